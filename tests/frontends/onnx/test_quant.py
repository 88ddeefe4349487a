"""Converters of quantised operators against ONNX's evaluator and arithmetic by hand."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from one_node import check, run

pytestmark = pytest.mark.onnx
MICROSOFT = "com.microsoft"


def real(x: np.ndarray, scale: Any, zero: Any) -> np.ndarray:
    return (x.astype(np.float32) - np.float32(zero)) * np.float32(scale)


def quantised(x: np.ndarray, scale: Any, zero: Any, dtype: Any = np.uint8) -> np.ndarray:
    limits = ml_dtypes.iinfo(dtype)
    value = np.rint(x / np.float32(scale)) + np.float32(zero)
    return np.clip(value, limits.min, limits.max).astype(dtype)


# ---------------------------------------------------------------- there and back
@pytest.mark.parametrize(("opset", "dtype"), [
    *((opset, dtype) for opset in (10, 13, 21, 25) for dtype in ("int8", "uint8")),
    *((opset, dtype) for opset in (21, 25) for dtype in ("int16", "uint16"))])
def test_quantise(rng: np.random.Generator, dtype: str, opset: int) -> None:
    x = (rng.standard_normal((3, 5)) * 200).astype(np.float32)
    x[0, :3] = 1.5, 2.5, -0.5
    scale, zero = np.float32(1), np.array(3, dtype)
    check("QuantizeLinear", [x, np.asarray(scale), zero], opset=opset)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4])
def test_four_bits(rng: np.random.Generator, dtype: Any) -> None:
    x = (rng.standard_normal((3, 5)) * 20).astype(np.float32)
    scale, zero = np.asarray(np.float32(2)), np.array(1, dtype)
    (q,) = run("QuantizeLinear", [x, scale, zero], opset=21)
    assert q.dtype == dtype
    expected = quantised(x, 2, 1, dtype)
    np.testing.assert_array_equal(q.astype(np.int8), expected.astype(np.int8))
    (back,) = run("DequantizeLinear", [q, scale, zero], opset=21)
    np.testing.assert_array_equal(back, real(expected.astype(np.int8), 2, 1))


@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_eight_bit_floats(dtype: Any, saturate: int) -> None:
    x = np.array([0.0, 1.0, -3.3, 1e6, -1e6, np.nan], np.float32)
    (q,) = run("QuantizeLinear", [x, np.asarray(np.float32(2)), np.zeros((), dtype)], opset=19,
               saturate=saturate)
    limit = float(ml_dtypes.finfo(dtype).max)
    scaled = np.clip(x / 2, -limit, limit) if saturate else x / 2
    np.testing.assert_array_equal(q.astype(np.float32), scaled.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_one_scale_an_index(rng: np.random.Generator, axis: int) -> None:
    x = rng.standard_normal((3, 4, 5)).astype(np.float32)
    n = x.shape[axis]
    scale = (rng.random(n) + 0.1).astype(np.float32)
    zero = rng.integers(0, 200, n).astype(np.uint8)
    check("QuantizeLinear", [x, scale, zero], opset=13, axis=axis)
    q = rng.integers(0, 255, x.shape).astype(np.uint8)
    check("DequantizeLinear", [q, scale, zero], opset=19, axis=axis)


def test_one_scale_a_block(rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 10)).astype(np.float32)
    scale = (rng.random((3, 3)) + 0.1).astype(np.float32)
    (q,) = run("QuantizeLinear", [x, scale], opset=21, axis=1, block_size=4, output_dtype=3)
    wide = np.repeat(scale, 4, 1)[:, :10]
    np.testing.assert_array_equal(q, quantised(x, wide, 0, np.int8))
    (back,) = run("DequantizeLinear", [q, scale], opset=21, axis=1, block_size=4)
    np.testing.assert_allclose(back, q * wide, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dequantise_type(dtype: str) -> None:
    q = np.array([[-5, 0, 7]], np.int32)
    check("DequantizeLinear", [q, np.array(0.5, dtype)], opset=23)
    (y,) = run("DequantizeLinear", [q, np.array(0.5, dtype)], opset=23, output_dtype=10)
    assert y.dtype == np.float16


def test_dynamic(rng: np.random.Generator) -> None:
    for x in (rng.standard_normal((3, 4)), rng.random((3, 4)) + 1, np.zeros((2, 2))):
        q, scale, zero = run("DynamicQuantizeLinear", [x.astype(np.float32)], outputs=3)
        assert q.dtype == np.uint8 and zero.dtype == np.uint8
        np.testing.assert_allclose(real(q, scale, zero), x, atol=float(scale) * 0.51)


# ---------------------------------------------------------------- products
@pytest.mark.parametrize("left", ["int8", "uint8"])
@pytest.mark.parametrize("right", ["int8", "uint8"])
def test_matmul_integer(rng: np.random.Generator, left: str, right: str) -> None:
    a = rng.integers(0, 100, (2, 3, 7)).astype(left)
    b = rng.integers(0, 100, (7, 5)).astype(right)
    zeros = np.array(12, left), np.array(120, right)
    expected = (a.astype(np.int32) - 12) @ (b.astype(np.int32) - 120)
    check("MatMulInteger", [a, b, *zeros], opset=10, expected=[expected])
    check("MatMulInteger", [a, b], opset=10,
          expected=[a.astype(np.int32) @ b.astype(np.int32)])


@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_convolutions(rng: np.random.Generator, kind: str) -> None:
    x = rng.integers(0, 255, (1, 4, 7, 6)).astype(np.uint8)
    w = rng.integers(0, 100, (6, 2, 3, 3)).astype(kind)
    attributes = {"pads": [1, 1, 1, 1], "strides": [2, 1], "group": 2}
    wide, kernel = x.astype(np.float64) - 11, w.astype(np.float64) - 3
    (total,) = run("Conv", [wide, kernel], **attributes)
    check("ConvInteger", [x, w, np.uint8(11).reshape(()), np.array(3, kind)], opset=10,
          expected=[np.rint(total).astype(np.int32)], **attributes)
    bias = rng.integers(-1000, 1000, 6).astype(np.int32)
    scales = (rng.random(6) * 0.01 + 0.001).astype(np.float32)
    real_total = (total + bias[:, None, None]) * 0.02 * scales[:, None, None]
    inputs = [x, np.float32(0.02), np.uint8(11), w, scales, np.full(6, 3, kind), np.float32(0.5),
              np.uint8(7), bias]
    (y,) = run("QLinearConv", [np.asarray(i) for i in inputs], opset=10, **attributes)
    expected = quantised(real_total.astype(np.float32), 0.5, 7)
    assert y.dtype == np.uint8
    np.testing.assert_allclose(y.astype(int), expected.astype(int), atol=1)  # ties may round apart


# ---------------------------------------------------------------- onnxruntime's own operators
def parameters(scale: float, zero: int, dtype: Any = np.uint8) -> list[np.ndarray]:
    return [np.array(scale, np.float32), np.array(zero, dtype)]


@pytest.mark.parametrize(("operator", "function"), [
    ("QLinearAdd", np.add), ("QLinearMul", np.multiply)])
def test_binary(rng: np.random.Generator, operator: str, function: Any) -> None:
    a, b = (rng.integers(0, 255, s).astype(np.uint8) for s in ((3, 4), (4,)))
    (y,) = run(operator, [a, *parameters(0.1, 128), b, *parameters(0.2, 100),
                          *parameters(0.3, 120)], domain=MICROSOFT)
    expected = quantised(function(real(a, 0.1, 128), real(b, 0.2, 100)), 0.3, 120)
    np.testing.assert_allclose(y.astype(int), expected.astype(int), atol=1)


@pytest.mark.parametrize(("operator", "function"), [
    ("QLinearSigmoid", lambda x: 1 / (1 + np.exp(-x))),
    ("QLinearLeakyRelu", lambda x: np.where(x > 0, x, 0.01 * x)),
    ("QLinearGlobalAveragePool", lambda x: x.mean((2, 3), keepdims=True)),
    ("QLinearAveragePool", lambda x: x.reshape(1, 2, 2, 2, 2, 2).mean((3, 5)))])
def test_unary(rng: np.random.Generator, operator: str, function: Any) -> None:
    x = rng.integers(-128, 127, (1, 2, 4, 4)).astype(np.int8)
    window = {"kernel_shape": [2, 2], "strides": [2, 2]} if operator == "QLinearAveragePool" else {}
    (y,) = run(operator, [x, *parameters(0.05, 3, np.int8), *parameters(0.01, -5, np.int8)],
               domain=MICROSOFT, **window)
    expected = quantised(function(real(x, 0.05, 3)), 0.01, -5, np.int8)
    np.testing.assert_allclose(y.astype(int), expected.astype(int), atol=1)


def test_channels_last(rng: np.random.Generator) -> None:
    x = rng.integers(0, 255, (2, 3, 4, 5)).astype(np.uint8)
    (y,) = run("QLinearGlobalAveragePool", [x, *parameters(0.1, 3), *parameters(0.1, 3)],
               domain=MICROSOFT, channels_last=1)
    assert y.shape == (2, 1, 1, 5)
    np.testing.assert_allclose(y[:, 0, 0].astype(float), x.mean((1, 2)), atol=0.51)


def test_concat(rng: np.random.Generator) -> None:
    a, b = (rng.integers(0, 255, (2, n)).astype(np.uint8) for n in (3, 4))
    (y,) = run("QLinearConcat", [*parameters(0.2, 10), a, *parameters(0.2, 10), b,
                                 *parameters(0.1, 0)], domain=MICROSOFT, axis=1)
    np.testing.assert_array_equal(y[:, :3], a)
    np.testing.assert_array_equal(y[:, 3:], quantised(real(b, 0.1, 0), 0.2, 10))


def test_float_products(rng: np.random.Generator) -> None:
    a = rng.integers(0, 255, (3, 8)).astype(np.uint8)
    b = rng.integers(-128, 127, (8, 5)).astype(np.int8)
    scales = (rng.random(5) * 0.1).astype(np.float32)
    bias = rng.standard_normal(5).astype(np.float32)
    expected = real(a, 0.1, 100) @ (b * scales) + bias
    check("MatMulIntegerToFloat", [a, b, np.array(0.1, np.float32), scales, np.array(100, np.uint8),
                                   None, bias], domain=MICROSOFT, expected=[expected], rtol=1e-4)
    x = rng.standard_normal((3, 8)).astype(np.float32)
    (y,) = run("DynamicQuantizeMatMul", [x, b, scales, None, bias], domain=MICROSOFT)
    np.testing.assert_allclose(y, x @ (b * scales) + bias, atol=0.3)


@pytest.mark.parametrize("transposed", [0, 1])
def test_gemm(rng: np.random.Generator, transposed: int) -> None:
    a = rng.integers(0, 255, (3, 8)).astype(np.uint8)
    b = rng.integers(-128, 127, (5, 8) if transposed else (8, 5)).astype(np.int8)
    c = rng.integers(-1000, 1000, 5).astype(np.int32)
    inputs = [a, *parameters(0.1, 100), b, *parameters(0.02, 0, np.int8), c]
    total = (a.astype(int) - 100) @ (b.T if transposed else b).astype(int) + c
    expected = (total * np.float32(0.1) * np.float32(0.02)).astype(np.float32)
    check("QGemm", inputs, domain=MICROSOFT, transB=transposed, expected=[expected], rtol=1e-4)
    (y,) = run("QGemm", [*inputs, *parameters(0.5, 128)], domain=MICROSOFT, transB=transposed)
    np.testing.assert_allclose(y.astype(int), quantised(expected, 0.5, 128).astype(int), atol=1)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("with_zeros", [False, True])
def test_matmul_of_few_bits(rng: np.random.Generator, bits: int, with_zeros: bool) -> None:
    rows, columns, block = 40, 6, 16  # the last block is not full
    blocks, per = 3, 8 // bits
    numbers = rng.integers(0, 1 << bits, (columns, blocks * block)).astype(np.uint8)
    scales = (rng.random((columns, blocks)) + 0.1).astype(np.float32)
    zeros = rng.integers(0, 1 << bits, (columns, blocks)).astype(np.uint8)

    def packed(x: np.ndarray) -> np.ndarray:
        x = np.pad(x, ((0, 0), (0, -x.shape[1] % per))).reshape(columns, -1, per)
        return sum(x[..., k] << (bits * k) for k in range(per)).astype(np.uint8)

    x = rng.standard_normal((2, rows)).astype(np.float32)
    offset = np.repeat(zeros, block, 1) if with_zeros else 1 << (bits - 1)
    weights = (numbers.astype(np.float32) - offset) * np.repeat(scales, block, 1)
    inputs = [x, packed(numbers).reshape(columns, blocks, -1), scales]
    check("MatMulNBits", inputs + ([packed(zeros)] if with_zeros else []), domain=MICROSOFT, K=rows,
          N=columns, bits=bits, block_size=block, expected=[x @ weights[:, :rows].T], rtol=1e-4,
          atol=1e-3)
