"""Converters of Fourier transforms and windows against numpy and ONNX's evaluator."""

from __future__ import annotations

import numpy as np
import pytest
from models import model, node
from one_node import check, run
from symbolic import check_symbolic

pytestmark = pytest.mark.onnx


def as_complex(x: np.ndarray) -> np.ndarray:
    return x[..., 0] + 1j * x[..., 1]


def scalar(x: object, dtype: str = "int64") -> np.ndarray:
    return np.array(x, dtype)


@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("length", [None, 5, 12])
@pytest.mark.parametrize("opset", [17, 20])
def test_complex_transforms(rng: np.random.Generator, opset: int, length: int | None, inverse: int
                            ) -> None:
    x = rng.standard_normal((2, 7, 3, 2)).astype(np.float32)
    size = None if length is None else scalar(length)
    if opset == 17:
        (y,) = run("DFT", [x, size], opset=17, axis=1, inverse=inverse)
    else:
        (y,) = run("DFT", [x, size, scalar(1)], opset=20, inverse=inverse)
    function = np.fft.ifft if inverse else np.fft.fft
    np.testing.assert_allclose(as_complex(y), function(as_complex(x), n=length, axis=1), atol=1e-5)


def test_defaults_of_versions(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 4, 3, 2)).astype(np.float32)
    (old,) = run("DFT", [x], opset=17)
    (new,) = run("DFT", [x], opset=20)
    np.testing.assert_allclose(as_complex(old), np.fft.fft(as_complex(x), axis=1), atol=1e-5)
    np.testing.assert_allclose(as_complex(new), np.fft.fft(as_complex(x), axis=2), atol=1e-5)


def test_one_sided_and_back(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 9, 1)).astype(np.float32)
    (half,) = run("DFT", [x], opset=20, onesided=1)
    np.testing.assert_allclose(as_complex(half), np.fft.rfft(x[..., 0]), atol=1e-5)
    (back,) = run("DFT", [half, scalar(9)], opset=20, onesided=1, inverse=1)
    np.testing.assert_allclose(back, x, atol=1e-5)


@pytest.mark.parametrize("onesided", [0, 1])
def test_frames(rng: np.random.Generator, onesided: int) -> None:
    x = rng.standard_normal((2, 20, 1)).astype(np.float32)
    window = rng.random(8).astype(np.float32)
    (y,) = run("STFT", [x, scalar(3), window, scalar(8)], opset=17, onesided=onesided)
    frames = np.stack([x[:, k:k + 8, 0] * window for k in range(0, 13, 3)], 1)
    function = np.fft.rfft if onesided else np.fft.fft
    np.testing.assert_allclose(as_complex(y), function(frames), atol=1e-5)


@pytest.mark.parametrize("periodic", [0, 1])
@pytest.mark.parametrize("operator", ["HannWindow", "HammingWindow", "BlackmanWindow"])
def test_windows(operator: str, periodic: int) -> None:
    check(operator, [scalar(10, "int32")], opset=17, periodic=periodic)
    (y,) = run(operator, [scalar(10)], opset=17, periodic=periodic, output_datatype=11)
    assert y.dtype == np.float64


def test_mel_bands() -> None:
    inputs = [scalar(8, "int32"), scalar(16, "int32"), scalar(8192, "int32"),
              scalar(0, "float32"), scalar(4096, "float32")]
    check("MelWeightMatrix", inputs, opset=17)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("attributes", [{}, {"inverse": 1}, {"onesided": 1}], ids=str)
def test_transforms_of_symbolic_length(attributes: dict[str, int], parts: int) -> None:
    if parts == 2 and "onesided" in attributes:
        pytest.skip("onnx's evaluator takes real signals only")
    proto = model([node("DFT", "x _ axis", "y", **attributes)], {"x": ("b", "n", 3, parts)}, ["y"],
                  {"axis": np.array(1)})
    result = check_symbolic(proto, {"x": ("b", "n", 3, parts)}, {},
                            [{"b": 1, "n": 9}, {"b": 2, "n": 1}, {"b": 1, "n": 16}], rtol=1e-4)
    assert [str(g) for g in result.guards] == ["1 <= n", "n <= 512"]
