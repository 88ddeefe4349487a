"""The quantised operators that onnxruntime's quantiser and exporters write (com.microsoft).

Those that go element by element are made of their float operators between a dequantisation and a
quantisation; fusion makes one loop of the three.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from terrazzo.dtypes import float32, int32, uint8
from terrazzo.frontends.onnx.convert.microsoft_attention import attended_projection, refuse
from terrazzo.frontends.onnx.convert.pool import averaged
from terrazzo.frontends.onnx.convert.quant import layer_of, qlinear_conv
from terrazzo.frontends.onnx.importer import astype, literal
from terrazzo.frontends.onnx.registry import MICROSOFT, Call, Result, converts
from terrazzo.graph.ir import Value
from terrazzo.ops import elementwise as e
from terrazzo.ops import quant as q
from terrazzo.ops.activation import leaky_relu
from terrazzo.ops.contract import matmul
from terrazzo.ops.joining import concat
from terrazzo.ops.norm import softmax
from terrazzo.ops.pool import global_average_pool
from terrazzo.ops.recurrent import lstm
from terrazzo.ops.shape import expand_dims, matrix_transpose, permute_dims, reshape, span


def _real(call: Call, first: int) -> Value:
    """The tensor that three inputs stand for: quantised, scale and zero point."""
    return q.dequantize_linear(call.value(first), call.value(first + 1), call.optional(first + 2))


def _quantised(call: Call, x: Value, first: int, like: Value) -> Value:
    """x with the scale and zero point of two inputs, in the type of another quantised tensor."""
    zero = call.optional(first + 1)
    return q.quantize_linear(x, call.value(first), zero,
                             dtype=like.dtype if zero is None else None)


_UNARY: dict[str, Callable[[Call, Value], Value]] = {
    "QLinearSigmoid": lambda call, x: e.sigmoid(x),
    "QLinearLeakyRelu": lambda call, x: leaky_relu(x, negative_slope=call.attr("alpha", 0.01)),
    "QLinearSoftmax": lambda call, x: softmax(x, axis=call.attr("axis", -1)),
    "QLinearGlobalAveragePool": lambda call, x: _channels_first(call, x, global_average_pool),
    "QLinearAveragePool": lambda call, x: _channels_first(call, x, lambda y: averaged(call, y)),
}
_BINARY: dict[str, Callable[[Value, Value], Value]] = {
    "QLinearAdd": e.add,
    "QLinearMul": e.multiply,
}


def _channels_first(call: Call, x: Value, function: Callable[[Value], Value]) -> Value:
    """Pooling of a tensor whose channels may come last."""
    if not call.attr("channels_last", 0):
        return function(x)
    pooled = function(permute_dims(x, axes=(0, x.ndim - 1, *range(1, x.ndim - 1))))
    return permute_dims(pooled, axes=(0, *range(2, x.ndim), 1))


@converts(*_UNARY, domain=MICROSOFT)
def qlinear_unary(call: Call) -> Result:
    result = _UNARY[call.node.op_type](call, _real(call, 0))
    return _quantised(call, result, 3, call.value(0))


@converts(*_BINARY, domain=MICROSOFT)
def qlinear_binary(call: Call) -> Result:
    result = _BINARY[call.node.op_type](_real(call, 0), _real(call, 3))
    return _quantised(call, result, 6, call.value(0))


@converts("QLinearWhere", domain=MICROSOFT)
def qlinear_where(call: Call) -> Result:
    result = e.where(call.value(0), _real(call, 1), _real(call, 4))
    return _quantised(call, result, 7, call.value(1))


@converts("QLinearConcat", domain=MICROSOFT)
def qlinear_concat(call: Call) -> Result:
    parts = [_quantised(call, _real(call, first), 0, call.value(first))
             for first in range(2, len(call), 3)]
    return concat(*parts, axis=call.attr("axis"))


@converts("QLinearConv", domain=MICROSOFT)
def qlinear_conv_of_any_layout(call: Call) -> Result:
    """The operator of ai.onnx, whose images may have their channels last."""
    if not call.attr("channels_last", 0):
        return qlinear_conv(call)
    x = call.value(0)
    first = permute_dims(x, axes=(0, x.ndim - 1, *range(1, x.ndim - 1)))
    y = q.qlinear_conv(first, *(call.value(i) for i in range(1, 8)), call.optional(8),
                       **layer_of(call, first, call.value(3)))
    return permute_dims(y, axes=(0, *range(2, x.ndim), 1))


# ---------------------------------------------------------------- layers
@converts("QAttention", domain=MICROSOFT)
def qattention(call: Call) -> Result:
    """Attention whose projection multiplies integers."""
    refuse(call, {}, {"do_rotary": 0, "past_present_share_buffer": 0})
    total = q.matmul_integer(call.value(0), call.value(1), _zero(call, 6), _zero(call, 7))
    projected = _scaled(total, call.value(3), call.value(4), call.value(2))
    return attended_projection(call, projected, mask=5, past=8)


@converts("DynamicQuantizeLSTM", domain=MICROSOFT)
def dynamic_quantize_lstm(call: Call) -> Result:
    """An LSTM with weights of 8 bits. What goes in is not rounded, so it is the more exact one."""
    def weights(i: int, scale: int) -> Value:
        real = q.dequantize_linear(call.value(i), _by_direction(call, i, scale),
                                   _by_direction(call, i, scale + 1))
        return matrix_transpose(real)

    lists = {name: tuple(call.attr(name) or ()) or None
             for name in ("activations", "activation_alpha", "activation_beta")}
    return lstm(call.value(0), weights(1, 8), weights(2, 10),
                *(call.optional(i) for i in range(3, 8)),
                direction=call.attr("direction", "forward"), layout=0, clip=call.attr("clip"),
                input_forget=bool(call.attr("input_forget", 0)), **lists)


def _by_direction(call: Call, i: int, which: int) -> Value:
    """A scale or zero point of one element: those of several are made one for all columns."""
    value = call.value(which)
    if value.ndim > 1 or (value.ndim == 1 and value.shape[0] != 1):
        call.unsupported("has a scale for each column or direction")
    return _number(value)


# ---------------------------------------------------------------- products
def _scaled(total: Value, a_scale: Value, b_scale: Value, bias: Value | None) -> Value:
    """Sums of products of integers as real numbers."""
    factor = astype(_number(a_scale), dtype=float32) * astype(_number(b_scale), dtype=float32)
    result = astype(total, dtype=float32) * factor
    return result if bias is None else result + bias


def _number(x: Value) -> Value:
    """A scale or zero point of one element without its axes, so that it broadcasts."""
    return reshape(x, shape=()) if x.ndim and all(n == 1 for n in x.shape) else x


def _zero(call: Call, i: int) -> Value | None:
    zero = call.optional(i)
    return None if zero is None else _number(zero)


@converts("MatMulIntegerToFloat", domain=MICROSOFT)
def matmul_integer_to_float(call: Call) -> Result:
    total = q.matmul_integer(call.value(0), call.value(1), _zero(call, 4), _zero(call, 5))
    return _scaled(total, call.value(2), call.value(3), call.optional(6))


@converts("DynamicQuantizeMatMul", domain=MICROSOFT)
def dynamic_quantize_matmul(call: Call) -> Result:
    a, a_scale, a_zero = q.dynamic_quantize_linear(call.value(0))
    total = q.matmul_integer(a, call.value(1), a_zero, _zero(call, 3))
    return _scaled(total, a_scale, call.value(2), call.optional(4))


@converts("QGemm", domain=MICROSOFT)
def qgemm(call: Call) -> Result:
    a, b = (matrix_transpose(call.value(i)) if call.attr(name, 0) else call.value(i)
            for i, name in ((0, "transA"), (3, "transB")))
    total = q.matmul_integer(a, b, _zero(call, 2), _zero(call, 5))
    if call.has(6):
        total = total + astype(call.value(6), dtype=int32)
    result = _scaled(total, call.value(1), call.value(4), None)
    alpha = call.attr("alpha", 1.0)
    result = result if alpha == 1.0 else result * alpha
    return _quantised(call, result, 7, call.value(0)) if call.has(7) else result


@converts("MatMulNBits", domain=MICROSOFT)
def matmul_nbits(call: Call) -> Result:
    """Weights of 4 or 8 bits in blocks along the rows of the transposed matrix."""
    x, packed, scales = call.value(0), call.value(1), call.value(2)
    bits, block = call.attr("bits", 4), call.attr("block_size")
    columns, rows = call.attr("N"), call.attr("K")
    if bits not in (2, 4, 8) or call.has(4):
        call.unsupported(f"has weights of {bits} bits, or reorders them with g_idx")
    blocks = -(-rows // block)
    numbers = unpacked(reshape(packed, shape=(columns, blocks, -1)), bits)
    zeros: Any = np.float32(1 << (bits - 1))
    if call.has(3):
        zeros = call.value(3)
        if zeros.dtype is uint8:
            zeros = span(unpacked(reshape(zeros, shape=(columns, -1)), bits), 1, 0, blocks)
        zeros = astype(reshape(zeros, shape=(columns, blocks, 1)), dtype=float32)
    real = (astype(numbers, dtype=float32) - zeros) * astype(
        reshape(scales, shape=(columns, blocks, 1)), dtype=float32)
    weights = span(reshape(real, shape=(columns, blocks * block)), 1, 0, rows)
    result = astype(matmul(x, matrix_transpose(astype(weights, dtype=x.dtype))), dtype=x.dtype)
    return result + call.value(5) if call.has(5) else result


def unpacked(x: Value, bits: int) -> Value:
    """Bytes as the smaller numbers they hold along the last axis, the lowest bits first."""
    if bits == 8:
        return x
    shifts = literal(np.arange(0, 8, bits, dtype=np.uint8))
    each = e.bitwise_and(e.bitwise_right_shift(expand_dims(x, axis=x.ndim), shifts),
                         np.uint8((1 << bits) - 1))
    return reshape(each, shape=(*x.shape[:-1], x.shape[-1] * (8 // bits)))
