"""Fourier transforms by butterflies against numpy in float64, and how vectors read pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checking import draw

import terrazzo as tz
from terrazzo.errors import ShapeError
from terrazzo.ops import fourier_loops
from terrazzo.ops.fourier import forward_real, inverse_real, transform, transform_axis

# Powers of every radix, mixtures of them, halves that fill no vector, lines for several tasks.
LENGTHS = (25, 26, 27, 32, 49, 64, 77, 100, 121, 128, 169, 210, 243, 256, 360, 625, 1000, 1024,
           2310, 4096, 8192, 12 * 1024)


def as_complex(x: np.ndarray) -> np.ndarray:
    return x[..., 0] + 1j * x[..., 1].astype(np.complex128)


def errors(got: np.ndarray, expected: np.ndarray) -> float:
    """The mean error over the mean size."""
    return float(np.sqrt((np.abs(got - expected) ** 2).mean() / (np.abs(expected) ** 2).mean()))


@pytest.mark.parametrize("n", LENGTHS)
def test_as_accurate_as_numpy(n: int, rng: np.random.Generator) -> None:
    x = draw(rng, (3, n, 2))
    z = as_complex(x)
    there = tz.jit(lambda x: transform(x, -1))(x)
    back = tz.jit(lambda x: transform(x, 1, 0.25))(x)
    exact = np.fft.fft(z)
    own = errors(np.fft.fft(z.astype(np.complex64)), exact)
    assert errors(as_complex(there), exact) <= max(1.2 * own, 2e-7)
    assert errors(as_complex(back), np.fft.ifft(z) * n / 4) <= max(1.2 * own, 2e-7)


@pytest.mark.parametrize("n", [50, 64, 90, 1000, 1030, 4096, 9000])
def test_real_numbers(n: int, rng: np.random.Generator) -> None:
    x = draw(rng, (2, 3, n))
    half = tz.jit(lambda x: forward_real(x, n // 2 + 1))(x)
    assert errors(as_complex(half), np.fft.rfft(x.astype(np.float64))) < 4e-7
    # The imaginary parts at both ends count for nothing.
    spectrum = draw(rng, (2, 3, n // 2 + 1, 2))
    got = tz.jit(lambda s: inverse_real(s, n, 1.0 / n))(spectrum)
    assert errors(got, np.fft.irfft(as_complex(spectrum), n)) < 4e-7


@pytest.mark.parametrize("shape", [(2, 8, 33), (5, 512, 8), (3, 12, 16), (30, 100), (1, 2, 9)])
def test_columns(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x = draw(rng, (*shape, 2))
    axis = len(shape) - 2
    got = tz.jit(lambda x: transform_axis(x, axis, -1))(x)
    assert errors(as_complex(got), np.fft.fft(as_complex(x), axis=axis)) < 2e-7


def test_doubles(rng: np.random.Generator) -> None:
    for n in (27, 210, 1024, 9000):
        x = draw(rng, (2, n, 2), "float64")
        assert errors(as_complex(tz.jit(lambda x: transform(x, -1))(x)),
                      np.fft.fft(as_complex(x))) < 1e-15
    x = draw(rng, (2, 12, 9, 2), "float64")
    assert errors(as_complex(tz.jit(lambda x: transform_axis(x, 1, 1))(x)),
                  12 * np.fft.ifft(as_complex(x), axis=1)) < 1e-15


def test_batches_of_any_size_and_stride(rng: np.random.Generator) -> None:
    function = tz.jit(lambda x: transform(x, -1))
    x = draw(rng, (9, 120, 2))
    for given in (x, x[:0], x[:1], x[:7], x[::2], x[::-1], x.transpose(0, 2, 1).copy()
                  .transpose(0, 2, 1), np.broadcast_to(x[:1], x.shape)):
        got = function(given)
        assert got.shape == given.shape
        if given.size:
            assert errors(as_complex(got), np.fft.fft(as_complex(given))) < 2e-7


def test_nan_and_infinity_reach_every_number_of_their_line(rng: np.random.Generator) -> None:
    x = draw(rng, (3, 120, 2))
    x[0, 7, 0], x[2, 11, 1] = np.nan, np.inf
    got = tz.jit(lambda x: transform(x, -1))(x)
    assert not np.isfinite(got[[0, 2]]).any(axis=-1).any()
    assert np.isfinite(got[1]).all()


@pytest.mark.parametrize(("shape", "attrs"), [
    ((2, 30, 2), {}), ((6, 8, 2), {"axis": 0, "inverse": True}), ((2, 50, 1), {"onesided": True}),
    ((2, 26, 2), {"inverse": True, "onesided": True})])
def test_every_level(shape: tuple[int, ...], attrs: dict[str, Any], rng: np.random.Generator
                     ) -> None:
    assert tz.verify(tz.dft, draw(rng, shape), dtypes=["float32"], **attrs)


def test_a_wrong_table_is_refused() -> None:
    x, table = np.zeros((2, 30, 2), np.float32), np.zeros(7, np.float32)
    with pytest.raises(ShapeError, match="does not go with a table"):
        tz.fft_lines(x, table, sign=-1, scale=1.0)
    with pytest.raises(ShapeError, match="prime factor over 13"):
        tz.fft_columns(np.zeros((17, 8, 2), np.float32),
                       fourier_loops.column_roots(17, -1).astype(np.float32), sign=-1, scale=1.0)
    for shape in ((2, 9), (2, 0), ()):
        with pytest.raises(ShapeError, match="even, known and not 0"):
            tz.rfft_lines(np.zeros(shape, np.float32))


# ---------------------------------------------------------------- vectors of pairs
@pytest.mark.parametrize("bits", [256, 512])
@pytest.mark.parametrize("n", [1, 2, 7, 8, 16, 17, 31, 33, 64, 100])
def test_pairs_in_vectors(n: int, bits: int, rng: np.random.Generator) -> None:
    """Every other element, from both ends, with the last vector masked."""
    x = draw(rng, (n, 2))
    with tz.knobs.override(vector_bits=bits):
        np.testing.assert_array_equal(tz.jit(lambda x: x[:, 0] - 2 * x[:, 1])(x),
                                      x[:, 0] - 2 * x[:, 1])
        np.testing.assert_array_equal(tz.jit(lambda x: x[::-1, 0] + x[:, 1])(x),
                                      x[::-1, 0] + x[:, 1])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [50, 64, 98, 256])
def test_short_lines_in_vectors_of_lines(n: int, dtype: str, rng: np.random.Generator) -> None:
    """Fewer lines than a vector has lanes, as many, more; from the second call on of any number."""
    there, back = tz.jit(lambda x: tz.rfft(x)), tz.jit(lambda z: tz.irfft(z))
    tolerance = 3e-7 if dtype == "float32" else 1e-15
    for lines in (16, 1, 7, 17, 40, 2):
        x = rng.standard_normal((lines, n)).astype(dtype)
        spectrum = np.fft.rfft(x.astype(np.float64))
        size = np.abs(spectrum).max()
        np.testing.assert_allclose(there(x), spectrum, rtol=0, atol=4 * tolerance * size)
        given = spectrum.astype("complex64" if dtype == "float32" else "complex128")
        np.testing.assert_allclose(back(given), x, rtol=0, atol=8 * tolerance)


@pytest.mark.parametrize("n", [10, 12, 16, 22, 24, 34])
@pytest.mark.parametrize("name", ["fft", "ifft"])
def test_numbers_that_are_nearly_alike(name: str, n: int) -> None:
    """What remains of them beside their sum is as exact as their differences are."""
    x = np.linspace(0.5, 1.5, 64 * n).reshape(64, n).astype(np.complex64)
    exact = getattr(np.fft, name)(x.astype(np.complex128))
    differences = np.abs(x[:, :n // 2] - x[:, n // 2:]).sum(1, keepdims=True)
    errors = np.abs(np.asarray(getattr(tz, name)(x)) - exact)[:, 1::2]
    scale = 1 / n if name == "ifft" else 1
    assert (errors <= 4 * np.finfo(np.float32).eps * scale * differences).all()
