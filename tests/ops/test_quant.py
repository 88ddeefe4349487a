"""Quantisation against onnx.reference and onnxruntime: types, axes, blocks, ties, saturation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from by_onnx import by_onnx
from checking import evaluate, op

from terrazzo.errors import DTypeError, RankError, ShapeError

INTEGERS = (np.uint8, np.int8, np.uint16, np.int16, ml_dtypes.int4, ml_dtypes.uint4,
            ml_dtypes.int2, ml_dtypes.uint2)
FLOATS = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2,
          ml_dtypes.float8_e5m2fnuz, ml_dtypes.float4_e2m1fn)
BYTES = (np.uint8, np.int8)


def numbers(shape: Sequence[int], spread: float = 10, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * spread).astype(np.float32)


def codes(shape: Sequence[int], dtype: Any, seed: int = 0) -> np.ndarray:
    info = ml_dtypes.iinfo(dtype)
    return np.random.default_rng(seed).integers(int(info.min), int(info.max) + 1, shape).astype(
        dtype)


def both_ways(name: str, *arrays: Any, **attrs: Any) -> list[Any]:
    """The results of the reference and of native code, which agree in every bit."""
    meant = evaluate(op(name), *arrays, **attrs)
    native = op(name)(*arrays, **attrs)
    meant, native = ([np.asarray(r) for r in (rs if isinstance(rs, tuple) else (rs,))]
                     for rs in (meant, native))
    for m, n in zip(meant, native, strict=True):
        assert n.dtype == m.dtype and n.shape == m.shape
        np.testing.assert_array_equal(*(np.frombuffer(a.tobytes(), np.uint8) for a in (n, m)))
    return native


# ---------------------------------------------------------------- quantising
@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda t: t.__name__)
def test_quantised_integers(dtype: Any) -> None:
    x, zero = numbers((3, 37), 40), np.array(1, dtype)
    (got,) = both_ways("quantize_linear", x, np.float32(0.7), zero)
    np.testing.assert_array_equal(got, by_onnx("QuantizeLinear", (x, np.float32(0.7), zero),
                                               opset=25)[0])


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda t: t.__name__)
def test_quantised_small_floats(dtype: Any, saturate: bool) -> None:
    x, zero = numbers((3, 37), 4000), np.array(0, dtype)
    (got,) = both_ways("quantize_linear", x, np.float32(0.25), zero, saturate=saturate)
    want = by_onnx("QuantizeLinear", (x, np.float32(0.25), zero), opset=25, saturate=int(saturate))
    np.testing.assert_array_equal(got.astype(np.float32), want[0].astype(np.float32))


def test_ties_go_to_even_before_the_zero_point_is_added() -> None:
    x = np.arange(-8, 9, dtype=np.float32) / 2
    for zero in (0, 1, 7):
        (got,) = both_ways("quantize_linear", x, np.float32(1), np.array(zero, np.int8))
        np.testing.assert_array_equal(got, np.rint(x).astype(np.int8) + np.int8(zero))


def test_what_is_out_of_range_saturates_and_nan_is_the_zero_point() -> None:
    x = np.array([np.inf, -np.inf, 1e30, -1e30, 300, -300, np.nan, 0, -0.0, 1e-40], np.float32)
    (got,) = both_ways("quantize_linear", x, np.float32(1), np.array(3, np.uint8))
    assert got.tolist() == [255, 0, 255, 0, 255, 0, 3, 3, 3, 3]


def test_the_type_is_that_of_the_zero_point_or_as_asked_or_bytes() -> None:
    x, scale = numbers((5,)), np.float32(2)
    assert op("quantize_linear")(x, scale).dtype == np.uint8
    assert op("quantize_linear")(x, scale, dtype="int16").dtype == np.int16
    assert op("quantize_linear")(x, scale, np.int8(1)).dtype == np.int8
    with pytest.raises(DTypeError, match="zero point of type int8"):
        op("quantize_linear")(x, scale, np.int8(1), dtype="uint8")
    with pytest.raises(DTypeError, match="got a scale of type int64"):
        evaluate(op("dequantize_linear"), np.ones(3, np.uint8), np.ones((), np.int64))
    with pytest.raises(DTypeError, match="cannot make float16"):
        op("quantize_linear")(x, scale, dtype="float16")


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scales_along_an_axis(axis: int) -> None:
    x = numbers((3, 5, 7))
    scale = np.linspace(0.1, 2, x.shape[axis], dtype=np.float32)
    zero = np.arange(x.shape[axis], dtype=np.uint8)
    (got,) = both_ways("quantize_linear", x, scale, zero, axis=axis)
    np.testing.assert_array_equal(got, by_onnx("QuantizeLinear", (x, scale, zero), axis=axis)[0])
    (back,) = both_ways("dequantize_linear", got, scale, zero, axis=axis)
    np.testing.assert_array_equal(back, by_onnx(
        "DequantizeLinear", (got, scale, zero), axis=axis)[0])


@pytest.mark.parametrize(("shape", "axis", "size"), [((3, 8, 2), 1, 4), ((9, 4), 0, 2),
                                                     ((2, 3, 6), 2, 3)])
def test_scales_of_blocks(shape: tuple[int, ...], axis: int, size: int) -> None:
    x = numbers(shape)
    blocks = tuple(-(-n // size) if d == axis else n for d, n in enumerate(shape))
    scale, zero = np.abs(numbers(blocks, 1)) + 0.1, codes(blocks, np.uint8)
    (got,) = both_ways("quantize_linear", x, scale, zero, axis=axis, block_size=size)
    wide = [np.repeat(p, size, axis).take(np.arange(shape[axis]), axis) for p in (scale, zero)]
    np.testing.assert_array_equal(got, np.clip(np.rint(x / wide[0]) + wide[1], 0, 255))
    (back,) = both_ways("dequantize_linear", got, scale, zero, axis=axis, block_size=size)
    np.testing.assert_array_equal(back, (got.astype(np.float32) - wide[1]) * wide[0])


def test_scales_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match="along axis 1"):
        op("quantize_linear")(numbers((3, 4)), np.ones(3, np.float32))


@pytest.mark.parametrize("dtype", (*INTEGERS, np.int32), ids=lambda t: t.__name__)
def test_dequantised_integers(dtype: Any) -> None:
    x = codes((4, 19), dtype)
    zero = None if dtype is np.int32 else np.array(1, dtype)
    (got,) = both_ways("dequantize_linear", x, np.float32(0.3), zero)
    np.testing.assert_array_equal(got, by_onnx("DequantizeLinear", (x, np.float32(0.3), zero),
                                               opset=25)[0])


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda t: t.__name__)
def test_dequantised_small_floats(dtype: Any) -> None:
    x = np.arange(16 if dtype is ml_dtypes.float4_e2m1fn else 256).astype(np.uint8).view(dtype)
    got = op("dequantize_linear")(x, np.float32(0.5))
    np.testing.assert_array_equal(got, x.astype(np.float32) * np.float32(0.5))


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16], ids=lambda t: t.__name__)
def test_halves(kind: Any) -> None:
    x, scale = numbers((50,)).astype(kind), np.asarray(0.5, kind)
    (got,) = both_ways("quantize_linear", x, scale, np.int8(2))
    np.testing.assert_array_equal(got, np.clip(np.rint(x.astype(np.float32) / 0.5) + 2, -128, 127))
    (back,) = both_ways("dequantize_linear", got, scale, np.int8(2))
    assert back.dtype == kind
    assert op("dequantize_linear")(got, scale, dtype="float32").dtype == np.float32


@pytest.mark.parametrize(("spread", "move"), [(0.0, 0.0), (0.0, 5.0), (1e-3, -100.0), (5.0, 0.0),
                                               (5.0, 100.0)])
def test_dynamic_quantisation_as_in_onnxruntime(spread: float, move: float) -> None:
    x = numbers((6, 33), spread) + np.float32(move)
    got = both_ways("dynamic_quantize_linear", x)
    want = by_onnxruntime("DynamicQuantizeLinear", [x], 3)
    np.testing.assert_array_equal(got[2], want[2])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)
    assert np.abs(got[0].astype(int) - want[0].astype(int)).max() <= 1


# ---------------------------------------------------------------- products
def by_onnxruntime(name: str, inputs: Sequence[Any], outputs: int = 1, **attrs: Any
                   ) -> list[np.ndarray]:
    """The results of a model of a single node; None stands for a missing input."""
    runtime = pytest.importorskip("onnxruntime")
    from onnx import helper

    given = {f"x{k}": np.asarray(a) for k, a in enumerate(inputs) if a is not None}
    node = helper.make_node(name, [f"x{k}" if a is not None else "" for k, a in enumerate(inputs)],
                            [f"y{k}" for k in range(outputs)], **attrs)
    infos = [helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
             for k, a in given.items()]
    results = [helper.make_empty_tensor_value_info(f"y{k}") for k in range(outputs)]
    model = helper.make_model(helper.make_graph([node], "one", infos, results), ir_version=10,
                              opset_imports=[helper.make_opsetid("", 21)])
    session = runtime.InferenceSession(model.SerializeToString(),
                                       providers=["CPUExecutionProvider"])
    return session.run(None, given)


@pytest.mark.parametrize(("shapes", "types", "zeros"), [
    (((5, 7), (7, 3)), (np.uint8, np.int8), (None, None)),
    (((5, 7), (7, 3)), (np.int8, np.uint8), (3, 7)),
    (((2, 3, 8), (8, 5)), (np.int8, np.int8), (3, None)),
    (((2, 1, 4, 6), (3, 6, 5)), (np.uint8, np.uint8), (3, 128)),
    (((6,), (6, 4)), (np.uint8, np.int8), (3, 7)),
    (((4, 6), (6,)), (np.int8, np.int8), (None, 7))], ids=str)
def test_integer_products(shapes: Any, types: Any, zeros: Any) -> None:
    a, b = (codes(shape, t, i) for i, (shape, t) in enumerate(zip(shapes, types, strict=True)))
    given = [None if z is None else np.array(z, t) for z, t in zip(zeros, types, strict=True)]
    (got,) = both_ways("matmul_integer", a, b, *given)
    np.testing.assert_array_equal(got, (a.astype(int) - (zeros[0] or 0)) @ (
        b.astype(int) - (zeros[1] or 0)))


def test_zero_points_of_rows_and_columns() -> None:
    a, b = codes((5, 9), np.uint8), codes((9, 4), np.int8, 1)
    p, q = codes((5,), np.uint8, 2), codes((4,), np.int8, 3)
    (got,) = both_ways("matmul_integer", a, b, p, q)
    np.testing.assert_array_equal(got, (a.astype(int) - p[:, None]) @ (b.astype(int) - q))


def test_products_without_terms_and_without_rows() -> None:
    empty = np.zeros((3, 0), np.uint8), np.zeros((0, 4), np.int8)
    np.testing.assert_array_equal(op("matmul_integer")(*empty), np.zeros((3, 4)))
    nothing = np.zeros((0, 5), np.uint8), np.zeros((5, 4), np.int8)
    assert op("matmul_integer")(*nothing).shape == (0, 4)


def test_products_of_what_is_no_byte_are_refused() -> None:
    with pytest.raises(DTypeError, match="multiplies bytes, not int32"):
        op("integer_matmul")(np.zeros((2, 2), np.int32), np.zeros((2, 2), np.int8))
    with pytest.raises(RankError, match="needs matrices"):
        op("integer_matmul")(np.zeros(2, np.int8), np.zeros((2, 2), np.int8))
    with pytest.raises(ShapeError, match="2 and 3"):
        op("integer_matmul")(np.zeros((2, 2), np.int8), np.zeros((3, 2), np.int8))


@pytest.mark.parametrize("dtype", BYTES, ids=lambda t: t.__name__)
@pytest.mark.parametrize("per_column", [False, True])
def test_quantised_products(dtype: Any, per_column: bool) -> None:
    a, b = codes((6, 30), dtype), codes((30, 5), np.int8, 1)
    b_scale = np.linspace(0.01, 0.03, 5, dtype=np.float32) if per_column else np.float32(0.02)
    b_zero = np.zeros(5, np.int8) if per_column else np.int8(0)
    given = (a, np.float32(0.02), np.array(5, dtype), b, b_scale, b_zero, np.float32(0.9),
             np.array(9, dtype))
    (got,) = both_ways("qlinear_matmul", *given)
    want = by_onnxruntime("QLinearMatMul", given)[0]
    assert got.dtype == dtype
    assert np.abs(got.astype(int) - want.astype(int)).max() <= 1
    reference = by_onnx("QLinearMatMul", given)[0]
    assert np.abs(got.astype(int) - reference.astype(int)).max() <= 1


# ---------------------------------------------------------------- convolutions
# (x, w, strides, padding, dilation, groups)
LAYERS: list[tuple[Any, ...]] = [
    ((1, 3, 9, 9), (8, 3, 3, 3), 2, 1, 1, 1), ((2, 8, 7, 7), (16, 8, 1, 1), 1, 0, 1, 1),
    ((1, 8, 12, 11), (20, 8, 3, 3), 1, 1, 1, 1), ((1, 4, 12, 11), (5, 4, 3, 2), 1, 2, 2, 1),
    ((1, 16, 9, 9), (12, 16, 1, 1), 2, 0, 1, 1), ((1, 8, 9, 9), (16, 4, 3, 3), 1, 1, 1, 2),
    ((1, 8, 9, 9), (8, 1, 3, 3), 1, 1, 1, 8), ((2, 3, 15, 15), (70, 3, 7, 7), 2, 3, 1, 1),
    ((1, 4, 20), (6, 4, 5), 2, 2, 1, 1), ((1, 2, 5, 6, 4), (3, 2, 2, 3, 2), 1, 1, 1, 1)]


def layer(strides: int, padding: int, dilation: int, groups: int, rank: int) -> dict[str, Any]:
    return {"strides": [strides] * rank, "pads": [padding] * 2 * rank,
            "dilations": [dilation] * rank, "group": groups}


@pytest.mark.parametrize("number", range(len(LAYERS)))
def test_integer_convolutions(number: int) -> None:
    case = LAYERS[number]
    types = ((np.uint8, np.int8), (np.int8, np.int8), (np.uint8, np.uint8))[number % 3]
    zeros = ((7, 3), (None, None), (7, None), (0, 2))[number % 4]
    x, w = codes(case[0], types[0]), codes(case[1], types[1], 1)
    given = [None if z is None else np.array(z, t) for z, t in zip(zeros, types, strict=True)]
    attrs = dict(zip(("strides", "padding", "dilation", "groups"), case[2:], strict=True))
    got = np.asarray(op("conv_integer")(x, w, *given, **attrs))
    # Products of bytes are exact in float64, where the reference adds up much faster.
    real = [a.astype(np.float64) - (z or 0) for a, z in zip((x, w), zeros, strict=True)]
    np.testing.assert_array_equal(got, by_onnx("Conv", real, **layer(*case[2:], x.ndim - 2))[0])


def test_a_zero_point_that_is_not_known_pads_as_well() -> None:
    x, w = codes((1, 4, 6, 6), np.uint8), codes((8, 4, 3, 3), np.int8, 1)
    zero = np.array(9, np.uint8)
    (got,) = both_ways("conv_integer", x, w, zero, padding=1)
    want = by_onnx("ConvInteger", (x, w, zero), pads=[1] * 4)[0]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", BYTES, ids=lambda t: t.__name__)
@pytest.mark.parametrize("bias", [False, True])
def test_quantised_convolutions(dtype: Any, bias: bool) -> None:
    x, w = codes((1, 6, 10, 9), dtype), codes((11, 6, 3, 3), np.int8, 1)
    w_scale = np.linspace(0.001, 0.004, 11, dtype=np.float32)
    given = (x, np.float32(0.05), np.array(4, dtype), w, w_scale, np.zeros(11, np.int8),
             np.float32(0.3), np.array(6, dtype),
             np.arange(-5, 6, dtype=np.int32) * 100 if bias else None)
    (got,) = both_ways("qlinear_conv", *given, strides=2, padding=1)
    want = by_onnxruntime("QLinearConv", given, strides=[2, 2], pads=[1] * 4)[0]
    assert got.dtype == dtype
    assert np.abs(got.astype(int) - want.astype(int)).max() <= 1
