"""Operators on complex numbers: as numpy and torch have them, or refused under their own name."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.dtypes import as_dtype
from terrazzo.errors import TerrazzoError
from terrazzo.graph.ir import OPERATORS, TensorType
from terrazzo.graph.trace import trace

sys.path[:0] = [str(Path(__file__).parents[1] / "graph")]

from test_operator_gradients import ROWS  # noqa: E402


def numbers(*shape: int, seed: int = 0, dtype: Any = np.complex128) -> np.ndarray:
    parts = np.random.default_rng(seed).standard_normal((2, *shape))
    return (parts[0] + 1j * parts[1]).astype(dtype)


def near(got: Any, expected: Any, tolerance: float) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape and got.dtype.kind == expected.dtype.kind
    if expected.dtype == bool:
        np.testing.assert_array_equal(got, expected)
        return
    assert np.abs(got - expected).max(initial=0) <= tolerance * max(
        np.abs(expected).max(initial=0), 1e-30)


# ---------------------------------------------------------------- elementwise
def exact_log1p(z: np.ndarray) -> np.ndarray:
    """numpy's own loses the digits of small numbers."""
    re, im = z.real.astype(np.longdouble), z.imag.astype(np.longdouble)
    with np.errstate(all="ignore"):
        size = np.where(np.abs(z) < 0.5, 0.5 * np.log1p(re * (2 + re) + im * im),
                        np.log(np.hypot(1 + re, im)))
    return (size + 1j * np.arctan2(im, 1 + re)).astype(np.complex128)


FUNCTIONS = {"exp2": np.exp2, "expm1": np.expm1, "log2": np.log2, "log10": np.log10,
             "log1p": exact_log1p, "rsqrt": lambda z: 1 / np.sqrt(z), "asin": np.arcsin,
             "acos": np.arccos, "atan": np.arctan, "asinh": np.arcsinh, "acosh": np.arccosh,
             "atanh": np.arctanh}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.complex64, 3e-7), (np.complex128, 1e-15)])
def test_functions(name: str, dtype: Any, tolerance: float) -> None:
    """Each part of each number, of every size, to a few units of the larger part."""
    z = np.concatenate([numbers(50) * size for size in (1e-6, 1e-3, 0.3, 1.0, 5.0)]).astype(dtype)
    z = np.concatenate([z, np.array([0.5, -0.5, 2, -2, 1j, 3j, -3j, 0], dtype)])
    if name in ("log2", "log10", "rsqrt"):
        z = z[z != 0]
    if name == "atan":
        z = z[z != 1j]
    got, wide = getattr(tz, name)(z), z.astype(np.complex128)
    with np.errstate(all="ignore"):
        wanted = FUNCTIONS[name](wide)
    assert got.dtype == z.dtype
    worst = (np.abs(got - wanted) / np.abs(wanted).clip(1e-30))[wanted != 0].max()
    assert worst <= 4 * tolerance, (name, worst)


@pytest.mark.parametrize("name", ["asin", "acos", "atan", "asinh", "acosh", "atanh", "log1p",
                                  "expm1"])
def test_branch_cuts_and_far_away(name: str) -> None:
    """Zeros of either sign choose the side of a cut; large numbers do not overflow."""
    edge = [complex(re, im) for re in (-2.0, 2.0) for im in (0.0, -0.0)]
    edge += [complex(re, im) for re in (0.0, -0.0) for im in (-2.0, 2.0)]
    far = [complex(re, im) for re in (1e25, -1e25) for im in (1e25, -1e25, 1.0)]
    z = np.array(edge + ([] if name == "expm1" else far), np.complex64)
    wanted = FUNCTIONS[name](z.astype(np.complex128))
    np.testing.assert_allclose(getattr(tz, name)(z), wanted, rtol=1e-5, atol=1e-30)


# ---------------------------------------------------------------- reductions, products, systems
X, Y, W = numbers(4, 5), numbers(4, 5, seed=1), numbers(3, 2, 3, seed=2)
SAME: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "prod": (lambda: tz.prod(X), lambda: X.prod()),
    "prod of rows": (lambda: tz.prod(X, axis=1), lambda: X.prod(1)),
    "prod kept": (lambda: tz.prod(X, axis=0, keepdims=True), lambda: X.prod(0, keepdims=True)),
    "prod of nothing": (lambda: tz.prod(X[:0], axis=0), lambda: X[:0].prod(0)),
    "cumprod": (lambda: tz.cumprod(X, axis=1), lambda: X.cumprod(1)),
    "cumprod back": (lambda: tz.cumprod(X, axis=0, reverse=True),
                     lambda: X[::-1].cumprod(0)[::-1]),
    "cumprod before": (lambda: tz.cumprod(X, axis=1, exclusive=True), lambda: np.concatenate(
        [np.ones((4, 1)), X.cumprod(1)[:, :-1]], 1)),
    "cumprod after": (lambda: tz.cumprod(X, axis=1, exclusive=True, reverse=True),
                      lambda: np.concatenate([X[:, ::-1].cumprod(1)[:, ::-1][:, 1:],
                                              np.ones((4, 1))], 1)),
    "any": (lambda: tz.any(X * (np.arange(5) > 3), axis=0), lambda: np.arange(5) > 3),
    "all": (lambda: tz.all(X * (np.arange(5) > 3), axis=0), lambda: np.arange(5) > 3),
    "var": (lambda: tz.var(X, axis=0, correction=1), lambda: X.var(0, ddof=1)),
    "std": (lambda: tz.std(X), lambda: X.std()),
    "mean": (lambda: tz.mean(X, axis=-1), lambda: X.mean(-1)),
    "norm": (lambda: tz.vector_norm(X, axis=1), lambda: np.linalg.norm(X, axis=1)),
    "1-norm": (lambda: tz.vector_norm(X, ord=1), lambda: np.abs(X).sum()),
    "vecdot": (lambda: tz.vecdot(X, Y), lambda: (X.conj() * Y).sum(-1)),
    "vecdot with real": (lambda: tz.vecdot(X.real, Y), lambda: (X.real * Y).sum(-1)),
    "lerp": (lambda: tz.lerp(X, Y, 0.3), lambda: X + 0.3 * (Y - X)),
    "l1_loss": (lambda: tz.l1_loss(X, Y), lambda: np.abs(X - Y).mean()),
    "solve": (lambda: tz.solve(X[:, :4], Y), lambda: np.linalg.solve(X[:, :4], Y)),
    "solve a vector": (lambda: tz.solve(X[:, :4], Y[:, 0]),
                       lambda: np.linalg.solve(X[:, :4], Y[:, 0])),
    "solve real": (lambda: tz.solve(X[:, :4].real, Y), lambda: np.linalg.solve(X[:, :4].real, Y)),
    "inv": (lambda: tz.inv(X[:, :4]), lambda: np.linalg.inv(X[:, :4])),
    "matmul": (lambda: tz.matmul(X, Y.T), lambda: X @ Y.T),
    "einsum": (lambda: tz.einsum("ij,kj->ik", X, Y), lambda: X @ Y.T),
    "take_along_axis": (lambda: tz.take_along_axis(X, np.array([[1], [0], [4], [2]]), axis=1),
                        lambda: np.take_along_axis(X, np.array([[1], [0], [4], [2]]), axis=1)),
}


@pytest.mark.parametrize("name", SAME)
def test_as_numpy(name: str) -> None:
    ours, theirs = SAME[name]
    near(ours(), theirs(), 1e-14)


@pytest.mark.torch
@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"groups": 2}])
def test_convolutions(options: dict[str, int]) -> None:
    torch = pytest.importorskip("torch")
    x, w = numbers(2, 4, 9), numbers(6, 4 // options.get("groups", 1), 3, seed=1)
    ours = {"stride": "strides"}
    named = {ours.get(k, k): v for k, v in options.items()}
    for a, b in ((x, w), (x, w.real.copy()), (x.real.copy(), w)):
        both = [torch.tensor(v).to(torch.complex128) for v in (a, b)]
        near(tz.conv(a, b, **named), torch.nn.functional.conv1d(*both, **options).numpy(), 1e-14)
    turned = numbers(4, 6 // options.get("groups", 1), 3, seed=2)
    near(tz.conv_transpose(x, turned, **named), torch.nn.functional.conv_transpose1d(
        torch.tensor(x), torch.tensor(turned), **options).numpy(), 1e-14)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["prod", "cumprod", "var", "std", "norm", "solve", "inv", "asin",
                                  "acosh", "atanh", "expm1", "log1p", "conv"])
def test_gradients_are_torch_s(name: str) -> None:
    torch = pytest.importorskip("torch")
    x, y = numbers(4, 4), numbers(4, 4, seed=1)
    functions: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "prod": (lambda x, y: tz.prod(x, axis=1) * y[0], lambda x, y: x.prod(1) * y[0]),
        "cumprod": (lambda x, y: tz.cumprod(x, axis=0) * y, lambda x, y: x.cumprod(0) * y),
        "var": (lambda x, y: tz.var(x * y), lambda x, y: (x * y).var(correction=0)),
        "std": (lambda x, y: tz.std(x * y), lambda x, y: (x * y).std(correction=0)),
        "norm": (lambda x, y: tz.vector_norm(x * y), lambda x, y: (x * y).abs().square().sum()
                 .sqrt()),
        "solve": (tz.solve, torch.linalg.solve),
        "inv": (lambda x, y: tz.inv(x) @ y, lambda x, y: torch.linalg.inv(x) @ y),
        "conv": (lambda x, y: tz.conv(x[None], y[:, :, None]),
                 lambda x, y: torch.nn.functional.conv1d(x[None], y[:, :, None])),
        **{n: (lambda x, y, n=n: getattr(tz, n)(x) * y,
               lambda x, y, n=n: getattr(torch, n)(x) * y)
           for n in ("asin", "acosh", "atanh", "expm1", "log1p")}}
    ours, theirs = functions[name]
    got = tz.grad(lambda x, y: tz.sum(tz.real(ours(x, y)) + tz.abs(ours(x, y))),
                  argnums=(0, 1))(x, y)
    leaves = [torch.tensor(a, requires_grad=True) for a in (x, y)]
    made = theirs(*leaves)
    ((made.real if made.is_complex() else made) + made.abs()).sum().backward()
    for mine, leaf in zip(got, leaves, strict=True):
        near(mine, leaf.grad.numpy(), 1e-11)


# ---------------------------------------------------------------- what is refused
def test_every_operator_works_or_is_refused_by_its_name() -> None:
    """An error names the operator that was called, not one that it is made of."""
    worked, refused = [], []
    for name, cases in ROWS.items():
        op = OPERATORS[name]
        case = next((c for c in cases if c.call is None and not op.variadic), None)
        if case is None:
            continue
        arrays = [None if make is None else np.asarray(make(np.random.default_rng(0)))
                  for make in case.inputs]
        types = [None if a is None else TensorType(a.shape, as_dtype(
            np.complex64 if a.dtype.kind == "f" else a.dtype)) for a in arrays]

        def call(*values: Any, op: Any = op, types: Any = types, case: Any = case) -> Any:
            given = iter(values)
            return op(*[None if t is None else next(given) for t in types], **case.attrs)

        try:
            trace(call, [t for t in types if t is not None], name="f")
            worked.append(name)
        except TerrazzoError as error:
            said = str(error).splitlines()[0]
            assert re.search(rf"\b{name}\b", said), (name, said)
            others = {w for w in re.findall(r"\w+", said) if w in OPERATORS} - {name}
            assert not others & {"sort_pairs", "top_pairs", "cumulative", "convolve", "maximum",
                                 "greater", "window_max", "window_sum", "max", "less"}, said
            refused.append(name)
    assert len(worked) > 100 and len(refused) > 50, (len(worked), len(refused))


@pytest.mark.parametrize("call", [
    lambda z: tz.sort(z), lambda z: tz.topk(z, k=2), lambda z: tz.mse_loss(z, z),
    lambda z: tz.relu(z), lambda z: tz.softmax(z), lambda z: tz.det(z @ z.T), tz.cholesky,
    lambda z: tz.jit(lambda x: tz.layer_norm(x))(z)])
def test_what_has_no_meaning_says_so(call: Callable[..., Any]) -> None:
    with pytest.raises((TerrazzoError,), match=r"complex"):
        call(X)
