"""Quantisation: numbers held as small integers with a scale and a zero point, and their products.

    real = (quantised - zero) * scale

Scales and zero points are one number for all, one for each index of an axis, or, with a
`block_size`, one for each block along that axis. Names and rules are those of ONNX.

Products of small integers are summed up in 32 bits by one primitive, `integer_matmul`. Zero
points are taken out of it: sum (a - p)(b - q) = sum ab - p sum b - q sum a + k p q, where sums of
constants are constants. Instructions multiply unsigned by signed bytes, so other operands are
moved by 128 together with their zero points, which changes no result.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from terrazzo.base.contraction import Contraction
from terrazzo.base.scalar import Call, Const, Scalar, call
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.scalar import reduce as reduce_scalar
from terrazzo.base.shapes import Shape, broadcast_shapes, dims_text, normalize_axis, num_elements
from terrazzo.dtypes import DType, as_dtype, bool_, float32, float64, int8, int32, uint8
from terrazzo.errors import DTypeError, RankError, ShapeError, user_location
from terrazzo.expr.ir import Tensor, compute, reduce_axis
from terrazzo.graph.applying import as_value, constant
from terrazzo.graph.ir import TensorType, Value
from terrazzo.index import Index
from terrazzo.index.guards import ask, granted
from terrazzo.ops.arrange import pad, repeat
from terrazzo.ops.conv import (
    Pads,
    Window,
    _each,
    _pads,
    _require_layer,
    convolve,
)
from terrazzo.ops.creation import full
from terrazzo.ops.define import operator, primitive
from terrazzo.ops.elementwise import (
    bitcast,
    bitwise_xor,
    equal,
    maximum,
    minimum,
    subtract,
    where,
)
from terrazzo.ops.reduce import in_shape, in_type, max_, min_, sum_
from terrazzo.ops.shape import channels_first, channels_last, permute_dims

# 1.5 * 2**23: a float32 of this size counts in ones, so adding it rounds to an integer, ties to
# even, and leaves that integer in the low bits. Exact for what is below 2**22 in size.
_ROUNDING = 12582912.0
_FEW_CHANNELS = 16


# ---------------------------------------------------------------- scales and zero points
def _check_parameter(name: str, x: TensorType, given: TensorType | None, axis: int,
                     block_size: int) -> None:
    """Complain about a scale or a zero point whose shape does not fit."""
    if given is None or all(n == 1 for n in given.shape):
        return
    axis = normalize_axis(axis, len(x.shape))
    if block_size:
        fits = len(given.shape) == len(x.shape) and all(
            n == 1 or (ask("<=", m, n * block_size) if d == axis else ask("==", n, m)) is not False
            for d, (n, m) in enumerate(zip(given.shape, x.shape, strict=True)))
    else:
        fits = len(given.shape) == 1 and granted("==", given.shape[0], x.shape[axis])
    if not fits:
        raise ShapeError(
            f"{name} of {x} cannot use a scale or zero point {dims_text(given.shape)} along axis "
            f"{axis}" + (f" in blocks of {block_size}" if block_size else ""),
            where=user_location(), hint="give one number, one for each index of the axis, or with "
                                        "block_size one for each block of it")


def _check_scale(name: str, scale: TensorType | None) -> None:
    """Complain about a scale that is not a real number."""
    if scale is not None and not scale.dtype.is_float:
        raise DTypeError(f"{name} got a scale of type {scale.dtype.name}", where=user_location(),
                         hint="scales are floating-point numbers")


def _parameter(given: Tensor, indices: tuple[Index, ...], axis: int, block_size: int) -> Scalar:
    """The scale or zero point of the element at `indices`."""
    if all(n == 1 for n in given.shape):
        return given[(0,) * len(given.shape)]
    axis = normalize_axis(axis, len(indices))
    if block_size:
        return given[tuple(0 if n == 1 else i // block_size if d == axis else i
                           for d, (i, n) in enumerate(zip(indices, given.shape, strict=True)))]
    return given[(indices[axis],)]


def _parameter_numpy(given: np.ndarray, shape: Shape, axis: int, block_size: int) -> np.ndarray:
    if given.size == 1:
        return given.reshape(())
    axis = normalize_axis(axis, len(shape))
    if block_size:
        return np.repeat(given, block_size, axis)[
            tuple(slice(n if d == axis else None) for d, n in enumerate(shape))]
    return given.reshape([-1 if d == axis else 1 for d in range(len(shape))])


def _wide(*dtypes: DType) -> DType:
    """The type of the arithmetic: float32, unless something comes in float64."""
    return float64 if any(t is float64 for t in dtypes) else float32


# ---------------------------------------------------------------- quantising
def _quantize_type(x: TensorType, scale: TensorType | None, zero: TensorType | None, *,
                   dtype: Any, axis: int, block_size: int, saturate: bool) -> TensorType:
    target = zero.dtype if zero is not None else uint8 if dtype is None else as_dtype(dtype)
    if dtype is not None and as_dtype(dtype) is not target:
        raise DTypeError(f"quantize_linear to {as_dtype(dtype).name} cannot use a zero point of "
                         f"type {target.name}", where=user_location(), hint="leave dtype away")
    if not _fits(target):
        raise DTypeError(f"quantize_linear cannot make {target.name}", where=user_location(),
                         hint="it makes integers of up to 16 bits and floats of up to 8")
    _check_scale("quantize_linear", scale)
    for given in (scale, zero):
        _check_parameter("quantize_linear", x, given, axis, block_size)
    return TensorType(x.shape, target)


def _fits(dtype: DType) -> bool:
    return dtype.bits <= (16 if dtype.is_integer else 8 if dtype.is_float else 0)


def _quantize_numpy(x: np.ndarray, scale: np.ndarray | None, zero: np.ndarray | None, *,
                    dtype: Any, axis: int, block_size: int, saturate: bool,
                    out: TensorType) -> np.ndarray:
    target = out.dtype if dtype is None else as_dtype(dtype)
    if zero is not None:
        target = as_dtype(zero.dtype)
    wide = _wide(*(as_dtype(a.dtype) for a in (x, scale) if a is not None)).np
    value = x.astype(wide)
    if scale is not None:
        value = value / _parameter_numpy(scale, x.shape, axis, block_size).astype(wide)
    offset = 0 if zero is None else _parameter_numpy(zero, x.shape, axis, block_size)
    if target.is_integer:
        offset = np.asarray(offset).astype(wide)
        low, high = target.min - offset, target.max - offset
        return (np.rint(np.clip(np.nan_to_num(value, nan=0.0, posinf=np.inf, neginf=-np.inf),
                                low, high)) + offset).astype(target.np)
    if saturate:
        value = np.clip(value, target.min, target.max)
    return value.astype(target.np)


@primitive(family="quant", infer=_quantize_type, reference=_quantize_numpy, differentiable=False)
def quantize_linear(x: Any, scale: Any = None, zero: Any = None, *, dtype: Any = None,
                    axis: int = 1, block_size: int = 0, saturate: bool = True,
                    out: TensorType) -> Tensor:
    """x / scale rounded to the nearest even integer, plus zero, within the range of its type

    The type is that of `zero`, or `dtype`, or uint8. Without a scale, x is not divided. Nan
    becomes the zero point. Small floats, which have no zero point, become infinite or nan beyond
    their range unless `saturate` is set.
    """
    target = out.dtype
    wide = _wide(*(t.dtype for t in (x, scale) if t is not None))

    def element(*i: Index) -> Scalar:
        value = cast_scalar(x[i], wide)
        if scale is not None:
            value = call("div", value, cast_scalar(_parameter(scale, i, axis, block_size), wide))
        if not target.is_integer:
            if saturate:
                value = call("min", call("max", value, target.min), target.max)
            return cast_scalar(value, target)
        offset: Scalar | None = None
        if zero is not None and isinstance(zero.body, Const):
            offset = Const(int32, int(zero.body.value))
        elif zero is not None:
            offset = cast_scalar(_parameter(zero, i, axis, block_size), int32)
        return saturated(value, offset, target)

    return compute(out.shape, element, origin="quantize_linear")


def saturated(value: Scalar, offset: Scalar | None, target: DType) -> Scalar:
    """A float rounded to the nearest even integer, plus an offset, within an integer type."""
    low: Any = float(target.min)
    high: Any = float(target.max)
    if isinstance(offset, Const):
        low, high = low - offset.value, high - offset.value
    elif offset is not None:
        low = low - cast_scalar(offset, value.dtype)
        high = high - cast_scalar(offset, value.dtype)
    inside = call("min", call("max", value, low), high)
    if value.dtype is float32:
        bits: Scalar = Call(int32, "bitcast", (call("add", inside, _ROUNDING),))
    else:
        number = call("where", call("isnan", inside), 0.0, inside)
        bits = cast_scalar(call("round", number), int32)
    if offset is not None and not (isinstance(offset, Const) and offset.value == 0):
        bits = call("add", bits, offset)
    return cast_scalar(bits, target)


def _dequantize_type(x: TensorType, scale: TensorType, zero: TensorType | None, *, dtype: Any,
                     axis: int, block_size: int) -> TensorType:
    _check_scale("dequantize_linear", scale)
    for given in (scale, zero):
        _check_parameter("dequantize_linear", x, given, axis, block_size)
    return TensorType(x.shape, scale.dtype if dtype is None else as_dtype(dtype))


def _dequantize_numpy(x: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, *, dtype: Any,
                      axis: int, block_size: int, out: TensorType) -> np.ndarray:
    wide = _wide(as_dtype(scale.dtype)).np
    value = x.astype(wide)
    if zero is not None:
        value = value - _parameter_numpy(zero, x.shape, axis, block_size).astype(wide)
    return (value * _parameter_numpy(scale, x.shape, axis, block_size).astype(wide)).astype(
        out.dtype.np)


@primitive(family="quant", infer=_dequantize_type, reference=_dequantize_numpy,
           differentiable=False)
def dequantize_linear(x: Any, scale: Any, zero: Any = None, *, dtype: Any = None, axis: int = 1,
                      block_size: int = 0, out: TensorType) -> Tensor:
    """(x - zero) * scale, in the type of the scale or in `dtype`"""
    wide = _wide(scale.dtype)
    between = int32 if x.dtype.is_integer and x.dtype.bits <= 16 else wide

    def element(*i: Index) -> Scalar:
        value = cast_scalar(x[i], between)
        if zero is not None and x.dtype.is_integer:
            value = value - cast_scalar(_parameter(zero, i, axis, block_size), between)
        factor = cast_scalar(_parameter(scale, i, axis, block_size), wide)
        return cast_scalar(cast_scalar(value, wide) * factor, out.dtype)

    return compute(out.shape, element, origin="dequantize_linear")


@operator(family="quant", differentiable=False)
def dynamic_quantize_linear(x: Any) -> Any:
    """x as uint8 with the scale and zero point that its range asks for: (quantised, scale, zero)"""
    x = in_type(x, float32)
    high, low = maximum(max_(x), 0.0), minimum(min_(x), 0.0)
    extent = high - low
    scale = where(equal(extent, 0.0), 1.0, extent / 255.0)
    zero = quantize_linear(-low / scale, dtype=uint8)
    return quantize_linear(x, scale, zero), scale, zero


# ---------------------------------------------------------------- integer products
def _integer_matmul_type(x: TensorType, y: TensorType) -> TensorType:
    for operand in (x, y):
        if len(operand.shape) < 2:
            raise RankError(f"integer_matmul needs matrices, got {operand}",
                            where=user_location(), hint="tz.matmul_integer takes vectors too")
        if operand.dtype not in (uint8, int8):
            raise DTypeError(f"integer_matmul multiplies bytes, not {operand.dtype.name}",
                             where=user_location(), hint="quantise to int8 or uint8 first")
    if not granted("==", x.shape[-1], y.shape[-2]):
        raise ShapeError(f"integer_matmul of {x} and {y} multiplies along sizes {x.shape[-1]} and "
                         f"{y.shape[-2]}, which are not equal", where=user_location())
    return TensorType((*broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-1]),
                      int32)


def _integer_matmul_numpy(x: np.ndarray, y: np.ndarray, out: TensorType) -> np.ndarray:
    # Products of bytes and their sums are exact in float64, which numpy multiplies much faster.
    return np.matmul(x.astype(np.float64), y.astype(np.float64)).astype(np.int64).astype(np.int32)


@primitive(family="quant", kind="contract", infer=_integer_matmul_type,
           reference=_integer_matmul_numpy, differentiable=False)
def integer_matmul(x: Any, y: Any, *, out: TensorType) -> Tensor:
    """matrix products of bytes over broadcast leading axes, summed up in 32 bits"""
    k = reduce_axis(x.shape[-1])

    def load(operand: Tensor, batch: tuple[Index, ...], row: Index, column: Index) -> Scalar:
        leading = operand.shape[:-2]
        own = batch[len(batch) - len(leading):]
        at = [0 if n == 1 and isinstance(n, int) else b for n, b in zip(leading, own, strict=True)]
        return cast_scalar(operand[(*at, row, column)], int32)

    def element(*indices: Index) -> Scalar:
        *batch, i, j = indices
        product = load(x, tuple(batch), i, k.var) * load(y, tuple(batch), k.var, j)
        return reduce_scalar("add", product, (k,), Contraction((*batch, i), j, k.var))

    return compute(out.shape, element, origin="integer_matmul")


def as_unsigned(x: Value) -> Value:
    """Bytes moved by 128 where they are signed."""
    if x.dtype not in (uint8, int8):
        raise DTypeError(f"integer products multiply bytes, not {x.dtype.name}",
                         where=user_location(), hint="quantise to int8 or uint8 first")
    return x if x.dtype is uint8 else bitwise_xor(bitcast(x, dtype=uint8), np.uint8(128))


def as_signed(x: Value) -> Value:
    """Bytes moved by -128 where they are unsigned."""
    return x if x.dtype is int8 else bitcast(bitwise_xor(x, np.uint8(128)), dtype=int8)


def known_number(value: Value | None) -> np.ndarray | None:
    """The zero point that is known now: that of a constant, or zero where none is given."""
    if value is None:
        return np.zeros((), np.int32)
    node = value.node
    if node is None or node.op.name != "constant":
        return None
    array: np.ndarray = node.attrs["value"].astype(np.int32)
    return array.reshape(()) if array.size == 1 else array


def shifted_zero(zero: Value | None, dtype: DType, target: DType) -> Value | None:
    """The zero point, as int32, of bytes that were moved from one type to another; None if zero."""
    by = 0 if dtype is target else 128 if target is uint8 else -128
    known = known_number(zero)
    if known is not None:
        return constant(known + by, int32) if np.any(known + by) else None
    assert zero is not None
    wide = in_type(zero, int32)
    return wide + np.int32(by) if by else wide


@operator(family="quant", differentiable=False)
def matmul_integer(a: Any, b: Any, a_zero: Any = None, b_zero: Any = None) -> Any:
    """(a - a_zero) @ (b - b_zero) of bytes in 32 bits; zero points may be one a row or column"""
    left = in_shape(a, (1, *a.shape)) if a.ndim == 1 else a
    right = in_shape(b, (*b.shape, 1)) if b.ndim == 1 else b
    p = shifted_zero(a_zero, a.dtype, uint8)
    q = shifted_zero(b_zero, b.dtype, int8)
    left, right = as_unsigned(left), as_signed(right)
    if p is not None and p.ndim == 1 and p.shape[0] != 1:
        p = in_shape(p, (p.shape[0], 1))
    total = integer_matmul(left, right)
    correction = None
    if p is not None:
        correction = p * sum_(right, axis=-2, keepdims=True, dtype=int32)
    if q is not None:
        rows = sum_(left, axis=-1, keepdims=True, dtype=int32)
        if p is not None:
            rows = rows - p * dimension_of(left.shape[-1])
        correction = q * rows if correction is None else correction + q * rows
    total = total if correction is None else subtract(total, correction)
    shape = list(total.shape)
    if b.ndim == 1:
        del shape[-1]
    if a.ndim == 1:
        del shape[-1 if b.ndim == 1 else -2]
    return in_shape(total, tuple(shape))


def dimension_of(size: Index) -> Any:
    """A size, which may be symbolic, as a number of 32 bits."""
    return in_type(as_value(size), int32)


@operator(family="quant", differentiable=False)
def qlinear_matmul(a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any,
                   y_scale: Any, y_zero: Any) -> Any:
    """the product of two quantised matrices, quantised again"""
    total = matmul_integer(a, b, a_zero, b_zero)
    if a_scale.ndim == 1 and a_scale.shape[0] != 1:
        a_scale = in_shape(a_scale, (a_scale.shape[0], 1))
    scale = in_type(a_scale, float32) * in_type(b_scale, float32) / in_type(y_scale, float32)
    if all(n == 1 for n in scale.shape):
        scale = in_shape(scale, ())
    return quantize_linear(in_type(total, float32) * scale, None, in_shape(y_zero, ()))


# ---------------------------------------------------------------- integer convolutions
def _integer_convolve_type(x: TensorType, w: TensorType, *, strides: tuple[int, ...],
                           dilation: tuple[int, ...], groups: int) -> TensorType:
    for operand in (x, w):
        if operand.dtype not in (uint8, int8):
            raise DTypeError(f"integer_convolve multiplies bytes, not {operand.dtype.name}",
                             where=user_location(), hint="quantise to int8 or uint8 first")
    infer = convolve.infer
    assert infer is not None
    like = infer(x, TensorType(w.shape, x.dtype), strides=strides, dilation=dilation,
                 groups=groups, padding=((0, 0),) * len(strides))
    return TensorType(like.shape, int32)


def _integer_convolve_numpy(x: np.ndarray, w: np.ndarray, out: TensorType, *,
                            strides: tuple[int, ...], dilation: tuple[int, ...], groups: int
                            ) -> np.ndarray:
    reference = convolve.reference
    assert reference is not None
    # Products of bytes and their sums are exact in float64, which numpy multiplies much faster.
    total = reference(x.astype(np.float64), w.astype(np.float64), TensorType(out.shape, float64),
                      strides=strides, dilation=dilation, groups=groups,
                      padding=((0, 0),) * len(strides))
    return total.astype(np.int64).astype(np.int32)


@primitive(family="quant", kind="contract", infer=_integer_convolve_type,
           reference=_integer_convolve_numpy, differentiable=False)
def integer_convolve(x: Any, w: Any, *, strides: tuple[int, ...], dilation: tuple[int, ...],
                     groups: int = 1, out: TensorType) -> Tensor:
    """convolutions of bytes, channels last as in convolve, unpadded, summed up in 32 bits"""
    window = Window.of(w.shape, groups)

    def element(n: Index, *rest: Index) -> Scalar:
        *place, output = rest
        at = [o * stride + k * step for o, stride, k, step in zip(
            place, strides, window.at_tap, dilation, strict=True)]
        product = cast_scalar(x[(n, *at, window.source(output))], int32) * cast_scalar(
            w[(*window.at_tap, window.at_channel, output)], int32)
        return reduce_scalar("add", product, window.axes, window.roles(n, place, output))

    return compute(out.shape, element, origin="integer_convolve")


def padded_with(x: Value, padding: Pads, value: Value | None) -> Value:
    """x [N, *S, C] with a border of one number, which may be known only when it runs."""
    if all(n == 0 for pair in padding for n in pair):
        return x
    *sizes, width, channels = x.shape
    if isinstance(channels, int) and 1 < channels < _FEW_CHANNELS:
        # The pixels of a row as one stretch of bytes: borders of long rows are made fast.
        before, after = padding[-1]
        rows = padded_with(in_shape(x, (*sizes, width * channels, 1)), (
            *padding[:-1], (before * channels, after * channels)), value)
        return in_shape(rows, (*rows.shape[:-2], width + before + after, channels))
    around = ((0, 0), *padding, (0, 0))
    known = known_number(value)
    if known is not None:
        return pad(x, pad_width=around, value=int(known.item()))
    assert value is not None
    inside = pad(full(shape=x.shape, value=True, dtype=bool_), pad_width=around, value=False)
    return where(inside, pad(x, pad_width=around), in_type(in_shape(value, ()), x.dtype))


def convolve_bytes(x: Value, w: Value, x_zero: Value | None, w_zero: Value | None, *,
                   strides: tuple[int, ...], padding: Pads, dilation: tuple[int, ...],
                   groups: int) -> Value:
    """The convolution of x - x_zero and w - w_zero in 32 bits, channels last.

    The zero point of x is one number, that of w one number or one for each output.
    """
    p, q = shifted_zero(x_zero, x.dtype, uint8), shifted_zero(w_zero, w.dtype, int8)
    x, w = padded_with(as_unsigned(x), padding, p), as_signed(w)
    window, within, outputs = w.shape[:-2], w.shape[-2], w.shape[-1]
    attrs = {"strides": strides, "dilation": dilation, "groups": groups}
    total = integer_convolve(x, w, **attrs)
    correction = None
    if p is not None:
        correction = in_shape(p, ()) * sum_(w, axis=tuple(range(w.ndim - 1)), dtype=int32)
    if q is not None:
        ones = full(shape=(*window, within, groups), value=1, dtype=int8)
        sums = integer_convolve(x, ones, **attrs)
        if p is not None:
            sums = sums - in_shape(p, ()) * dimension_of(num_elements((*window, within)))
        if groups > 1:
            sums = repeat(sums, repeats=outputs // groups, axis=-1)
        correction = q * sums if correction is None else correction + q * sums
    return total if correction is None else subtract(total, correction)


@operator(family="quant", differentiable=False)
def conv_integer(x: Any, w: Any, x_zero: Any = None, w_zero: Any = None, *, strides: Any = 1,
                 padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Any:
    """a layer of convolutions of bytes in 32 bits: x [N, C, *S], w [O, C/groups, *K]

    Padding is with the zero point. The zero point of w may be one for each output.
    """
    rank = _require_layer("conv_integer", x, w, "[outputs, channels / groups, *sizes]")
    return channels_first(convolve_bytes(
        channels_last(x), permute_dims(w, axes=(*range(2, rank + 2), 1, 0)), x_zero, w_zero,
        strides=_each(strides, rank, "strides"), padding=_pads(padding, rank),
        dilation=_each(dilation, rank, "dilation"), groups=groups))


@operator(family="quant", differentiable=False)
def qlinear_conv(x: Any, x_scale: Any, x_zero: Any, w: Any, w_scale: Any, w_zero: Any,
                 y_scale: Any, y_zero: Any, bias: Any = None, *, strides: Any = 1,
                 padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Any:
    """a layer of quantised convolutions, quantised again; the bias is int32 in x_scale * w_scale"""
    rank = _require_layer("qlinear_conv", x, w, "[outputs, channels / groups, *sizes]")
    total = convolve_bytes(
        channels_last(x), permute_dims(w, axes=(*range(2, rank + 2), 1, 0)), x_zero, w_zero,
        strides=_each(strides, rank, "strides"), padding=_pads(padding, rank),
        dilation=_each(dilation, rank, "dilation"), groups=groups)
    if bias is not None:
        total = total + bias
    scale = in_type(x_scale, float32) * in_type(w_scale, float32) / in_type(y_scale, float32)
    if all(n == 1 for n in scale.shape):
        scale = in_shape(scale, ())
    return channels_first(quantize_linear(in_type(total, float32) * scale, None,
                                          in_shape(y_zero, ())))
