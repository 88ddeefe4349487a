"""Fourier transforms against numpy in float64; frames, windows, filters against onnx.reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from by_onnx import by_onnx
from checking import check, check_gradient, close, draw, evaluate, op

import terrazzo as tz
from terrazzo.base.shapes import dim
from terrazzo.dtypes import float32, int32
from terrazzo.errors import ArgumentError, DTypeError, ShapeError
from terrazzo.graph.ir import TensorType, Value


def by_numpy(x: np.ndarray, axis: int, length: int | None, inverse: bool, onesided: bool
             ) -> np.ndarray:
    wide = x.astype(np.float64)
    signal = wide[..., 0] if x.shape[-1] == 1 else wide[..., 0] + 1j * wide[..., 1]
    axis %= x.ndim
    n = length or (2 * (x.shape[axis] - 1) if inverse and onesided else x.shape[axis])
    if inverse and onesided:
        return np.fft.irfft(signal, n, axis=axis)[..., None]
    result = (np.fft.ifft if inverse else np.fft.fft)(signal, n, axis=axis)
    if onesided:
        result = np.take(result, range(n // 2 + 1), axis=axis)
    return np.stack([result.real, result.imag], -1)


def near(got: np.ndarray, expected: np.ndarray, tolerance: float = 1e-6) -> None:
    """Errors of a transform are relative to the largest of its results."""
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("onesided", [False, True])
def test_options(parts: int, inverse: bool, onesided: bool, rng: np.random.Generator) -> None:
    for shape, axis, length in (((3, 7, parts), 1, None), ((2, 8, 5, parts), 1, None),
                                ((2, 5, 8, parts), -2, 6), ((3, 8, parts), 1, 20),
                                ((9, parts), 0, 9)):
        x = draw(rng, shape)
        got = evaluate(op("dft"), x, axis=axis, length=length, inverse=inverse, onesided=onesided)
        near(got, by_numpy(x, axis, length, inverse, onesided))


# One product; two factors; a prime; twice a prime; three stages.
@pytest.mark.parametrize("n", [1, 2, 512, 600, 521, 1042, 4099])
def test_lengths(n: int, rng: np.random.Generator) -> None:
    x = draw(rng, (2, n, 2))
    # Sums of up to a thousand rounded products, three of them one after the other.
    tolerance = 1e-6 if n < 512 else 4e-6
    near(tz.dft(x, axis=1), by_numpy(x, 1, None, False, False), tolerance)
    real = x[..., :1]
    spectrum = tz.dft(real, axis=1, onesided=True)
    near(spectrum, by_numpy(real, 1, None, False, True), tolerance)
    near(tz.dft(spectrum, axis=1, length=n, inverse=True, onesided=True), real, tolerance)


def test_there_and_back(rng: np.random.Generator) -> None:
    x = draw(rng, (3, 30, 2))
    near(tz.dft(tz.dft(x), inverse=True), x)


def test_other_floats(rng: np.random.Generator) -> None:
    x = draw(rng, (3, 30, 1), "float64")
    near(tz.dft(x), by_numpy(x, 1, None, False, False), 1e-14)
    half = x.astype(np.float16)
    got = tz.dft(half)
    assert got.dtype == np.float16
    near(got.astype(np.float64), by_numpy(half, 1, None, False, False), 1e-3)


def test_gradient(rng: np.random.Generator) -> None:
    check_gradient(op("dft"), draw(rng, (2, 6, 1)), onesided=True)
    check_gradient(op("dft"), draw(rng, (2, 4, 2)), inverse=True, onesided=True)


def test_symbolic_batch(rng: np.random.Generator) -> None:
    x = draw(rng, (3, 8, 1))
    got = evaluate(op("dft"), x, shapes=[(dim("batch"), 8, 1)])
    near(got, by_numpy(x, 1, None, False, False))


@pytest.mark.onnx
@pytest.mark.parametrize(("parts", "onesided"), [(1, 0), (1, 1), (2, 0)])
def test_frames(parts: int, onesided: int, rng: np.random.Generator) -> None:
    x, window = draw(rng, (2, 50, parts)), draw(rng, (16,))
    for given, step, length in ((window, 8, 16), (window, 7, None), (None, 7, 16)):
        inputs = [x, np.int64(step), given, None if length is None else np.int64(length)]
        (expected,) = by_onnx("STFT", inputs, opset=17, onesided=onesided)
        near(tz.stft(x, given, frame_step=step, frame_length=length, onesided=bool(onesided)),
             expected)


@pytest.mark.onnx
@pytest.mark.parametrize("name", ["Hann", "Hamming", "Blackman"])
def test_windows(name: str) -> None:
    for periodic in (0, 1):
        (expected,) = by_onnx(f"{name}Window", [np.int64(11)], opset=17, periodic=periodic)
        window = op(f"{name.lower()}_window")
        close(window(size=11, periodic=bool(periodic)), expected, rtol=1e-6)
        assert window(size=0).shape == (0,)
        assert window(size=1, periodic=bool(periodic), dtype="float64").dtype == np.float64


@pytest.mark.onnx
@pytest.mark.parametrize("settings", [(8, 16, 8192, 0, 4096), (20, 256, 16000, 20, 7600),
                                      (80, 400, 16000, 0, 8000)])
def test_mel_filters(settings: tuple[float, ...]) -> None:
    names = ("num_mel_bins", "dft_length", "sample_rate", "lower_edge_hertz", "upper_edge_hertz")
    inputs = [np.int64(v) if k < 3 else np.float32(v) for k, v in enumerate(settings)]
    (expected,) = by_onnx("MelWeightMatrix", inputs, opset=17)
    close(tz.mel_weight_matrix(**dict(zip(names, settings))), expected)


def test_errors() -> None:
    def tensor(*shape: Any, dtype: Any = float32) -> Value:
        return Value(TensorType(shape, dtype))

    with pytest.raises(ShapeError, match="last axis of 1"):
        tz.dft(tensor(3, 8))
    with pytest.raises(DTypeError, match="works on floats"):
        tz.dft(tensor(3, 8, 1, dtype=int32))
    with pytest.raises(ArgumentError, match="goes along another"):
        tz.dft(tensor(3, 8, 1), axis=-1)
    with pytest.raises(ShapeError, match="size to be known"):
        tz.dft(tensor(3, dim("n"), 1))
    with pytest.raises(ArgumentError, match="at least 1"):
        tz.dft(tensor(3, 8, 1), length=0)
    with pytest.raises(ArgumentError, match="of a signal of 8"):
        tz.stft(tensor(3, 8, 1), tensor(16), frame_step=4)
    with pytest.raises(ShapeError, match="as long a window"):
        tz.stft(tensor(3, 80, 1), tensor(16), frame_step=4, frame_length=8)


def test_primitives(rng: np.random.Generator) -> None:
    check(op("dft"), draw(rng, (2, 6, 2)), rtol=1e-5)
