"""Pooling: the largest, the mean or the norm of windows and of whole images."""

from __future__ import annotations

from terrazzo.frontends.onnx.convert.windows import Windows, explicit_pads, read_windows
from terrazzo.frontends.onnx.registry import Call, Result, converts, converts_each
from terrazzo.graph.ir import Value
from terrazzo.ops import pool


def _windows(call: Call, x: Value) -> Windows:
    kernel = call.attr("kernel_shape")
    if kernel is None:
        call.unsupported("misses its attribute kernel_shape")
    return read_windows(call, x.shape[2:], tuple(kernel), ceil=bool(call.attr("ceil_mode", 0)))


@converts("MaxPool")
def max_pool(call: Call) -> Result:
    x = call.value(0)
    at = _windows(call, x)
    if call.wants(1):
        return pool.max_pool_indices(
            x, window=at.size, strides=at.strides, padding=at.padding, dilation=at.dilation,
            storage_order=call.attr("storage_order", 0))
    return pool.max_pool(x, window=at.size, strides=at.strides, padding=at.padding,
                         dilation=at.dilation)


@converts("AveragePool")
def average_pool(call: Call) -> Result:
    return averaged(call, call.value(0))


def averaged(call: Call, x: Value) -> Value:
    """The means of windows that a node's attributes describe."""
    at = _windows(call, x)
    counted = tuple((lo, hi - over) for (lo, hi), over in zip(
        at.padding, at.overhang, strict=True))
    return pool.average_pool(
        x, window=at.size, strides=at.strides, padding=counted, dilation=at.dilation,
        count_include_pad=bool(call.attr("count_include_pad", 0)), overhang=at.overhang)


@converts("LpPool")
def lp_pool(call: Call) -> Result:
    x = call.value(0)
    at = _windows(call, x)
    return pool.lp_pool(x, window=at.size, strides=at.strides, padding=at.padding,
                        dilation=at.dilation, p=call.attr("p", 2))


converts_each({"GlobalAveragePool": pool.global_average_pool,
               "GlobalMaxPool": pool.global_max_pool})


@converts("GlobalLpPool")
def global_lp_pool(call: Call) -> Result:
    return pool.global_lp_pool(call.value(0), p=call.attr("p", 2))


@converts("MaxUnpool")
def max_unpool(call: Call) -> Result:
    x = call.value(0)
    kernel = call.attr("kernel_shape")
    rank = len(kernel)
    strides = call.attr("strides") or [1] * rank
    inner = (*x.shape[:2], *((n - 1) * s + k - lo - hi for n, s, k, (lo, hi) in zip(
        x.shape[2:], strides, kernel, explicit_pads(call, rank), strict=True)))
    shape = tuple(call.sizes(2)) if call.has(2) else inner
    return pool.max_unpool(x, call.value(1), output_shape=shape, indices_shape=inner)
