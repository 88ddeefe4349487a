"""Complex numbers in compiled code, against numpy in complex128 and against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.errors import DTypeError, ShapeError, UnsupportedDType


def numbers(rng: np.random.Generator, *shape: int, dtype: str = "complex64") -> np.ndarray:
    parts = rng.standard_normal((2, *shape))
    return (parts[0] + 1j * parts[1]).astype(dtype)


def near(got: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert got.shape == expected.shape
    if expected.dtype.kind in "bi":
        np.testing.assert_array_equal(got, expected)
        return
    assert got.dtype.kind == expected.dtype.kind
    assert np.abs(got - expected).max(initial=0) <= tolerance * max(
        np.abs(expected).max(initial=0), 1e-30)


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    name: (f, f) for name, f in {
        "arithmetic": lambda x, y: x * y + x / y - (x - 2) * 3j + 1 / y,
        "by real numbers": lambda x, y: x * y.real + y.imag / x + 2 * x - y.real,
        "powers": lambda x, y: x ** 2 + y ** 3 + x ** 0.5 + x ** y,
        "comparison": lambda x, y: (x == y) | (x != x[0]),
        "indexing": lambda x, y: x[1:3, ::2] + y[..., 1::2][:2] + x[-1, 2],
        "movement": lambda x, y: x.T.reshape(3, 10) + y.reshape(3, -1),
        "sums": lambda x, y: x.sum() + x.sum(axis=0) + y.mean(axis=-1, keepdims=True),
        "products": lambda x, y: x @ y.T + x.real @ y.T + x @ y.T.imag,
        "broadcasting": lambda x, y: x[:, None] * y[0] + 1j,
        "conjugates": lambda x, y: x.conj() * y,
    }.items()} | {
    "exp and log": (lambda x, y: tz.exp(x) + tz.log(y), lambda x, y: np.exp(x) + np.log(y)),
    "roots": (lambda x, y: tz.sqrt(x) + tz.sqrt(-x) + tz.sqrt(y * 0),
              lambda x, y: np.sqrt(x) + np.sqrt(-x)),
    "waves": (lambda x, y: tz.sin(x) + tz.cos(y) + tz.tan(x),
              lambda x, y: np.sin(x) + np.cos(y) + np.tan(x)),
    "hyperbolic": (lambda x, y: tz.sinh(x) + tz.cosh(y) + tz.tanh(20 * x),
                   lambda x, y: np.sinh(x) + np.cosh(y) + np.tanh(20 * x)),
    "sizes": (lambda x, y: tz.abs(x) + tz.angle(y), lambda x, y: np.abs(x) + np.angle(y)),
    "signs": (lambda x, y: tz.sign(x), lambda x, y: x / np.abs(x)),
    "sigmoid": (lambda x, y: tz.sigmoid(x), lambda x, y: 1 / (1 + np.exp(-x))),
    "choice": (lambda x, y: tz.where(x.real > 0, x, y.real), lambda x, y: np.where(
        x.real > 0, x, y.real)),
    "joining": (lambda x, y: tz.concat(x, y.real, axis=-1), lambda x, y: np.concatenate(
        [x, y.real], -1)),
    "stacking": (lambda x, y: tz.stack(x, y, axis=1), lambda x, y: np.stack([x, y], 1)),
    "padding": (lambda x, y: tz.pad(x, pad_width=1), lambda x, y: np.pad(x, 1)),
    "taking": (lambda x, y: tz.take(x, np.array([4, 0]), axis=0), lambda x, y: x[[4, 0]]),
    "running sums": (lambda x, y: tz.cumsum(x, axis=1), lambda x, y: np.cumsum(x, 1)),
    "einsum": (lambda x, y: tz.einsum("ij,kj->ki", x, y), lambda x, y: np.einsum(
        "ij,kj->ki", x, y)),
    "making": (lambda x, y: tz.complex(x.real, 2.0) + tz.polar(tz.abs(y), tz.angle(y)),
               lambda x, y: x.real + 2j + y),
    "types": (lambda x, y: tz.astype(x.real, x.dtype) + tz.zeros(shape=(5, 6), dtype=y.dtype),
              lambda x, y: x.real + 0j),
    "numpy's names": (lambda x, y: np.exp(x) + np.conj(y) + np.real(x), lambda x, y: np.exp(x)
                      + np.conj(y) + np.real(x)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("complex64", 1e-6), ("complex128", 4e-15)])
def test_against_numpy(name: str, dtype: str, tolerance: float, rng: np.random.Generator) -> None:
    ours, theirs = FUNCTIONS[name]
    x, y = numbers(rng, 5, 6, dtype=dtype), numbers(rng, 5, 6, dtype=dtype)
    expected = theirs(x.astype(np.complex128), y.astype(np.complex128))
    got = tz.jit(lambda x, y: ours(x, y))(x, y)
    near(got, expected, tolerance)
    assert got.dtype.itemsize * (1 + (dtype == "complex64")) == expected.dtype.itemsize or (
        expected.dtype == bool)


@pytest.mark.parametrize("n", [0, 1, 7, 16, 33, 1000, 100_003])
def test_any_number_of_numbers(n: int, rng: np.random.Generator) -> None:
    """Full vectors, masked ones, several tasks; the output is stored in pairs."""
    x, y = numbers(rng, n), numbers(rng, n)
    near(tz.jit(lambda x, y: x * y + 1j)(x, y), x.astype(np.complex128) * y + 1j, 1e-6)
    near(tz.jit(lambda x: tz.abs(x))(x), np.abs(x.astype(np.complex128)), 1e-6)


def test_strides(rng: np.random.Generator) -> None:
    x = numbers(rng, 12, 14)
    function = tz.jit(lambda x: x * 2j - 1)
    for view in (x.T, x[::2], x[:, ::2], x[::-1], x[:, 3], np.broadcast_to(x[0], (3, 14)),
                 x.real + 0j, np.asfortranarray(x)):
        near(function(view), view * 2j - 1, 1e-6)


def test_sizes_that_vary(rng: np.random.Generator) -> None:
    function = tz.jit(lambda x, y: (x @ y).conj() + tz.exp(x[:, :1]))
    for n in (3, 4, 5, 8, 3):
        x, y = numbers(rng, n, n), numbers(rng, n, n)
        near(function(x, y), (x.astype(np.complex128) @ y).conj() + np.exp(x[:, :1]), 1e-6)


def test_infinities_and_nan() -> None:
    x = np.array([np.inf + 1j, 1 - np.inf * 1j, np.nan + 0j, complex(0, np.nan), 0j, 1e30 + 1e30j],
                 np.complex64)
    np.testing.assert_array_equal(tz.isnan(x), np.isnan(x))
    np.testing.assert_array_equal(tz.isinf(x), np.isinf(x))
    np.testing.assert_array_equal(tz.isfinite(x), np.isfinite(x))
    np.testing.assert_allclose(tz.abs(x), np.abs(x))
    huge = np.array([1e30 + 1e30j, 1e-30 - 1e-30j], np.complex64)
    np.testing.assert_allclose(tz.jit(lambda x: x / x)(huge), [1, 1], atol=1e-6)
    np.testing.assert_allclose(tz.sqrt(huge), np.sqrt(huge), rtol=1e-6)
    near_one = np.array([1 + 1e-4j, 0.6 + 0.8j, 1 - 3e-5j], np.complex64)
    np.testing.assert_allclose(tz.log(near_one).real, np.log(near_one.astype(np.complex128)).real,
                               rtol=1e-5, atol=2e-9)


def test_captured_and_literal_numbers(rng: np.random.Generator) -> None:
    table = numbers(rng, 6)
    function = tz.jit(lambda x: x * table + 0.5j)
    x = rng.standard_normal((3, 6)).astype(np.float32)
    near(function(x), x * table.astype(np.complex128) + 0.5j, 1e-6)
    table *= 2
    near(function(x), x * table.astype(np.complex128) + 0.5j, 1e-6)


def test_results_of_several_kinds(rng: np.random.Generator) -> None:
    x = numbers(rng, 4, 5)
    made = tz.jit(lambda x: {"same": x, "size": tz.abs(x), "both": (x * 2, x.real > 0)})(x)
    near(made["same"], x, 0)
    assert made["same"].ctypes.data != x.ctypes.data
    near(made["both"][0], x * 2, 0)
    np.testing.assert_array_equal(made["both"][1], x.real > 0)


def test_in_loops_and_branches(rng: np.random.Generator) -> None:
    x = numbers(rng, 7, 3)

    def turn(x: Any) -> Any:
        last, all_of_them = tz.scan(lambda h, row: (h * 0.5j + row, h), x[0] * 0, x)
        return tz.cond(tz.sum(tz.abs(x)) > 0, lambda a: a * 1j, lambda a: a, last), all_of_them

    h, rows = np.zeros(3, np.complex128), []
    for row in x:
        rows.append(h)
        h = h * 0.5j + row
    last, all_of_them = tz.jit(turn)(x)
    near(last, h * 1j, 1e-6)
    near(all_of_them, np.array(rows), 1e-6)


def test_gradients_are_torch_s(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    x, y = numbers(rng, 4, 5, dtype="complex128"), numbers(rng, 5, 3, dtype="complex128")

    def loss(m: Any, x: Any, y: Any, fft: Any) -> Any:
        z = fft(x * m.exp(x.conj()) if m is torch else x * tz.exp(x.conj())) @ y
        return (m.abs(z) ** 2).sum() + (z * z).real.sum()

    ours = tz.grad(lambda x, y: loss(tz, x, y, tz.fft), argnums=(0, 1))(x, y)
    leaves = [torch.tensor(a, requires_grad=True) for a in (x, y)]
    loss(torch, *leaves, torch.fft.fft).backward()
    for got, leaf in zip(ours, leaves, strict=True):
        near(np.asarray(got), leaf.grad.numpy(), 1e-12)


def test_inside_torch_s_autograd(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    function = tz.jit(lambda x: tz.ifft(tz.fft(x) * 2j) * x)
    x = torch.tensor(numbers(rng, 3, 8), requires_grad=True)
    made = function(x)
    assert made.dtype == torch.complex64
    made.abs().sum().backward()
    y = x.detach().clone().requires_grad_()
    (torch.fft.ifft(torch.fft.fft(y) * 2j) * y).abs().sum().backward()
    near(x.grad.numpy(), y.grad.numpy(), 1e-5)


def test_conjugated_views_of_torch(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    function = tz.jit(lambda x: x * 2)
    x = torch.tensor(numbers(rng, 9))
    for view in (x, x.conj(), x, x.conj().resolve_conj(), torch.view_as_complex(
            torch.view_as_real(x))):
        assert torch.equal(function(view), view * 2)


def test_every_level(rng: np.random.Generator) -> None:
    x = numbers(rng, 3, 5)
    assert tz.verify(tz.op(lambda x, y: x * y / 2 + tz.abs(x), name="complex_things"), x, x,
                     dtypes=["float32"])
    with tz.knobs.override(check=True):
        near(tz.jit(lambda x: x * x)(x), x.astype(np.complex128) ** 2, 1e-6)


def test_saved_and_loaded(rng: np.random.Generator, tmp_path: Any) -> None:
    x = numbers(rng, 3, 5)
    made = tz.op(lambda x: x * 3j, name="saved_complex").compile(x)
    made.save(tmp_path / "complex.tzx")
    near(tz.load(tmp_path / "complex.tzx")(x), x * 3j, 1e-6)


def test_what_is_not_there(rng: np.random.Generator) -> None:
    x = numbers(rng, 4)
    for function in (tz.max, tz.sort, tz.floor, tz.erf, lambda x: x < x, tz.cummax):
        with pytest.raises((UnsupportedDType, DTypeError)):
            tz.jit(lambda x, f=function: f(x))(x)
    with pytest.raises(DTypeError, match="not complex"):
        tz.view_as_real(x.real)
    with pytest.raises(ShapeError, match="two parts"):
        tz.view_as_complex(x.real)


# ---------------------------------------------------------------- numpy.fft's names
TRANSFORMS = ("fft", "ifft", "rfft", "irfft", "fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn",
              "rfftn", "irfftn")


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, rng: np.random.Generator) -> None:
    """Each along its own axes and along others, in every norm: butterflies, products, both."""
    plain = name in TRANSFORMS[:4]
    for shape, chosen, norm in (((4, 6), None, "backward"), ((3, 40, 30), (1, 0), "ortho"),
                                ((5, 17, 34), (0, 1), "forward")):
        x = rng.standard_normal(shape).astype(np.float32) if name.startswith("r") else numbers(
            rng, *shape)
        options: dict[str, Any] = {"norm": norm}
        if chosen is not None:
            options |= {"axis": chosen[-1]} if plain else {"axes": chosen}
        expected = getattr(np.fft, name)(x.astype(np.result_type(x, np.float64)), **options)
        near(getattr(tz, name)(x, **options), expected, 2e-6)


def test_lengths_that_are_asked_for(rng: np.random.Generator) -> None:
    x = numbers(rng, 3, 10)
    for n in (4, 10, 25, 64):
        near(tz.fft(x, n=n), np.fft.fft(x, n=n), 2e-6)
        near(tz.irfft(x, n=n), np.fft.irfft(x, n=n), 2e-6)
        near(tz.rfft(x.real, n=n, axis=0), np.fft.rfft(x.real, n=n, axis=0), 2e-6)
    near(tz.fftn(x, s=(4, 12)), np.fft.fftn(x, s=(4, 12), axes=(0, 1)), 2e-6)


def test_shifts_and_numpy_s_names(rng: np.random.Generator) -> None:
    x = numbers(rng, 5, 8)
    near(tz.jit(lambda x: np.fft.fftshift(np.fft.fft(x)))(x), np.fft.fftshift(np.fft.fft(x)), 2e-6)
    near(tz.jit(lambda x: tz.ifftshift(x, axes=1))(x), np.fft.ifftshift(x, axes=1), 0)


def test_a_convolution_by_spectra(rng: np.random.Generator) -> None:
    x, w = rng.standard_normal((2, 3, 500)).astype(np.float32)
    made = tz.jit(lambda x, w: tz.irfft(tz.rfft(x, n=1024) * tz.rfft(w, n=1024))[:, :999])(x, w)
    expected = np.stack([np.convolve(a, b) for a, b in zip(x.astype(float), w, strict=True)])
    near(made, expected, 2e-6)


@pytest.mark.parametrize("name", [*TRANSFORMS, "polar", "complex"])
def test_slopes(name: str, rng: np.random.Generator) -> None:
    """The gradient in a direction is the difference of a loss along it."""
    shape = (3, 4, 6)
    whole = name in TRANSFORMS and not name.startswith("r")
    x = numbers(rng, *shape, dtype="complex128")
    x, along = (x, x[::-1].copy()) if whole else (x.real.copy(), x.imag.copy())
    function = getattr(tz, name)
    more = () if name in TRANSFORMS else (rng.standard_normal(shape),)

    def loss(x: Any) -> Any:
        made = function(x, *more)
        return (tz.abs(made) ** 2 * 0.5).sum() + (made * (1 + 0.5j)).real.sum()

    gradient = tz.grad(loss)(x)
    step = 1e-6
    slope = (loss_at(loss, x + step * along) - loss_at(loss, x - step * along)) / (2 * step)
    assert abs((gradient.conj() * along).real.sum() - slope) <= 1e-6 * abs(slope) + 1e-6


def loss_at(loss: Callable[..., Any], x: np.ndarray) -> float:
    return float(tz.jit(loss)(x))


def test_real_numbers_have_angles_and_no_imaginary_part() -> None:
    x = np.array([-2.0, -0.0, 0.0, 3.0, np.inf, -np.inf], np.float32)
    np.testing.assert_allclose(tz.angle(x), np.angle(x), rtol=1e-6)
    np.testing.assert_array_equal(tz.imag(x), np.zeros(6))


def test_a_length_that_varies_is_still_made_of_butterflies(rng: np.random.Generator) -> None:
    function = tz.jit(lambda x: tz.fft(x))
    for n in (64, 100, 128, 64):
        x = numbers(rng, 3, n)
        near(function(x), np.fft.fft(x), 2e-6)
        with tz.profile() as seen:
            function(x)
        names = [kernel.origin for run in seen.runs for kernel in run.kernels]
        assert names == ["fft_lines"], names
