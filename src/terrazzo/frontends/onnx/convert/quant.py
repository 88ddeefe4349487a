"""Quantised tensors: to them, back from them, and products of them."""

from __future__ import annotations

from typing import Any

from terrazzo.dtypes import DType, float32
from terrazzo.frontends.onnx.convert.windows import kernel_of, read_windows
from terrazzo.frontends.onnx.registry import MICROSOFT, Call, Result, converts
from terrazzo.graph.ir import Value
from terrazzo.ops import quant as q
from terrazzo.ops.elementwise import astype


def _chosen_type(call: Call, name: str) -> DType | None:
    """An attribute that names a type; 0, the default, is none."""
    return call.dtype(name) if call.attr(name, 0) else None


def _scale_of(call: Call, i: int) -> Value:
    scale = call.value(i)
    return scale if scale.dtype.is_float else astype(scale, dtype=float32)


@converts("QuantizeLinear")
@converts("QuantizeLinear", domain=MICROSOFT)
def quantize_linear(call: Call) -> Result:
    x, scale, zero = call.value(0), _scale_of(call, 1), call.optional(2)
    target = _chosen_type(call, "output_dtype")
    x = x if x.dtype.is_float else astype(x, dtype=float32)
    # `precision` asks for a division in another type; float32 is as good as any it may name.
    return q.quantize_linear(
        x, scale, zero, dtype=None if zero is not None else target, axis=call.attr("axis", 1),
        block_size=call.attr("block_size", 0), saturate=bool(call.attr("saturate", 1)))


@converts("DequantizeLinear")
@converts("DequantizeLinear", domain=MICROSOFT)
def dequantize_linear(call: Call) -> Result:
    return q.dequantize_linear(
        call.value(0), _scale_of(call, 1), call.optional(2),
        dtype=_chosen_type(call, "output_dtype"), axis=call.attr("axis", 1),
        block_size=call.attr("block_size", 0))


@converts("DynamicQuantizeLinear")
def dynamic_quantize_linear(call: Call) -> Result:
    return q.dynamic_quantize_linear(call.value(0))


@converts("MatMulInteger")
def matmul_integer(call: Call) -> Result:
    return q.matmul_integer(call.value(0), call.value(1), call.optional(2), call.optional(3))


@converts("QLinearMatMul")
def qlinear_matmul(call: Call) -> Result:
    return q.qlinear_matmul(*(call.value(i) for i in range(8)))


def layer_of(call: Call, x: Value, weight: Value) -> dict[str, Any]:
    """The attributes of a convolution as our operators take them."""
    at = read_windows(call, x.shape[2:], kernel_of(call, weight))
    return {"strides": at.strides, "padding": at.padding, "dilation": at.dilation,
            "groups": call.attr("group", 1)}


@converts("ConvInteger")
def conv_integer(call: Call) -> Result:
    x, weight = call.value(0), call.value(1)
    return q.conv_integer(x, weight, call.optional(2), call.optional(3),
                          **layer_of(call, x, weight))


@converts("QLinearConv")
def qlinear_conv(call: Call) -> Result:
    return q.qlinear_conv(*(call.value(i) for i in range(8)), call.optional(8),
                          **layer_of(call, call.value(0), call.value(3)))
