"""Operators of com.microsoft on arrays: distances, crops, tables of packed weights, experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from terrazzo.dtypes import float32, int64, uint8
from terrazzo.frontends.onnx.convert.quant_microsoft import unpacked
from terrazzo.frontends.onnx.importer import astype, literal
from terrazzo.frontends.onnx.registry import MICROSOFT, Call, Result, converts, find
from terrazzo.graph.ir import Value
from terrazzo.graph.reach import must_reach
from terrazzo.index import Index
from terrazzo.ops import activation as a
from terrazzo.ops import elementwise as e
from terrazzo.ops.activation import clip
from terrazzo.ops.contract import batch_matmul, matmul
from terrazzo.ops.creation import arange
from terrazzo.ops.lookups import take
from terrazzo.ops.norm import softmax
from terrazzo.ops.reduce import sum_
from terrazzo.ops.selection import topk
from terrazzo.ops.shape import expand_dims, matrix_transpose, moveaxis, reshape, span


def _known(call: Call, size: Index, what: str) -> int:
    """A size that has to be a number."""
    if not isinstance(size, int):
        call.unsupported(f"needs to know {what}")
    return size


@converts("GatherND", "GridSample", "Pad", "Range", domain=MICROSOFT)
def as_in_onnx(call: Call) -> Result:
    """What became an operator of ai.onnx later."""
    converter = find("", call.node.op_type, 13)
    assert converter is not None
    return converter.function(replace(call, version=13))


@converts("ExpandDims", domain=MICROSOFT)
def expanded(call: Call) -> Result:
    return expand_dims(call.value(0), axis=int(call.number(1)))


@converts("CDist", domain=MICROSOFT)
def cdist(call: Call) -> Result:
    """Distances of all rows of one matrix from all rows of another."""
    x, y, metric = call.value(0), call.value(1), call.attr("metric", "sqeuclidean")
    if metric not in ("euclidean", "sqeuclidean"):
        call.unsupported(f"has the metric {metric!r}")
    rows = [sum_(v * v, axis=1, keepdims=True) for v in (x, y)]
    squares = rows[0] + matrix_transpose(rows[1]) - 2.0 * matmul(x, matrix_transpose(y))
    squares = e.maximum(squares, 0.0)
    return e.sqrt(squares) if metric == "euclidean" else squares


@converts("CropAndResize", domain=MICROSOFT)
def crop_and_resize(call: Call) -> Result:
    """Boxes of images, given by corners from 0 to 1, each brought to one size."""
    x, boxes, images = call.value(0), call.value(1), call.value(2)
    height, width = call.ints(3)
    mode, outside = call.attr("mode", "bilinear"), call.attr("extrapolation_value", 0.0)
    if mode not in ("bilinear", "nearest"):
        call.unsupported(f"has the mode {mode!r}")
    count = boxes.shape[0]

    def places(first: int, size: int, extent: Any) -> Value:
        """Where the samples of each box lie along an axis of the image."""
        lo, hi = span(boxes, 1, first, first + 1), span(boxes, 1, first + 2, first + 3)
        scale = astype(literal(np.arange(size)), dtype=float32)
        last = float(extent - 1)
        if size > 1:
            return lo * last + scale * ((hi - lo) * last / (size - 1))
        return (lo + hi) * (0.5 * last)

    sizes = [_known(call, n, "the size of the images") for n in x.shape[2:]]
    at = [places(n, size, extent) for n, (size, extent) in enumerate(
        zip((height, width), sizes, strict=True))]
    inside = [e.bitwise_and(e.less_equal(0.0, p), e.less_equal(p, float(n - 1)))
              for p, n in zip(at, sizes, strict=True)]
    rows = take(moveaxis(x, source=1, destination=-1), astype(images, dtype=int64), axis=0)
    flat = reshape(rows, shape=(-1, rows.shape[-1]))
    base = reshape(arange(start=count, dtype=int64), shape=(count, 1, 1)) * (
        sizes[0] * sizes[1])

    def pick(y: Value, z: Value) -> Value:
        index = [astype(clip(p, 0.0, float(n - 1)), dtype=int64)
                 for p, n in zip((y, z), sizes, strict=True)]
        place = base + reshape(index[0], shape=(count, height, 1)) * sizes[1] + reshape(
            index[1], shape=(count, 1, width))
        return take(flat, place, axis=0)

    if mode == "nearest":
        made = pick(*(e.floor(p + 0.5) for p in at))
    else:
        low = [e.floor(p) for p in at]
        part = [p - f for p, f in zip(at, low, strict=True)]
        down = reshape(part[0], shape=(count, height, 1, 1))
        across = reshape(part[1], shape=(count, 1, width, 1))
        top = pick(low[0], low[1]) * (1.0 - across) + pick(low[0], low[1] + 1.0) * across
        bottom = pick(low[0] + 1.0, low[1]) * (1.0 - across) + pick(
            low[0] + 1.0, low[1] + 1.0) * across
        made = top * (1.0 - down) + bottom * down
    seen = e.bitwise_and(reshape(inside[0], shape=(count, height, 1, 1)),
                         reshape(inside[1], shape=(count, 1, width, 1)))
    return moveaxis(e.where(seen, made, outside), source=-1, destination=1)


# ---------------------------------------------------------------- packed weights
@converts("GatherBlockQuantized", domain=MICROSOFT)
def gather_block_quantized(call: Call) -> Result:
    """Rows of a table whose numbers have few bits, and a scale for each block of a row."""
    data, indices, scales = call.value(0), call.value(1), call.value(2)
    gather_axis = call.attr("gather_axis", 0) % data.ndim
    axis, block = call.attr("quantize_axis", 1) % data.ndim, call.attr("block_size", 128)
    bits = call.attr("bits", 4)
    packed = data.dtype is uint8
    if gather_axis != 0 or axis != data.ndim - 1:
        call.unsupported("gathers along another axis than the first, or has blocks elsewhere than "
                         "along the last")
    must_reach(indices, data.shape[0])

    def rows(table: Value, pack: bool) -> Value:
        found = take(table, indices, axis=0)
        return unpacked(found, bits) if pack and bits < 8 else found

    numbers, scale = rows(data, packed), take(scales, indices, axis=0)
    width, blocks = numbers.shape[-1], scale.shape[-1]
    if call.has(3):
        zeros: Any = span(rows(call.value(3), packed), -1 % numbers.ndim, 0, blocks)
        zeros = astype(zeros, dtype=float32)
    else:
        zeros = np.float32(1 << (bits - 1)) if packed or data.dtype.kind == "u" else np.float32(0)
    which = literal(np.arange(_known(call, width, "the width of a row")) // block)
    scale = take(scale, which, axis=scale.ndim - 1)
    if isinstance(zeros, Value):
        zeros = take(zeros, which, axis=zeros.ndim - 1)
    real = (astype(numbers, dtype=float32) - zeros) * astype(scale, dtype=float32)
    return astype(real, dtype=scales.dtype)


# The 16 numbers of each kind of 4-bit float of bitsandbytes: FP4, and NF4, the quantiles of a
# normal distribution (QLoRA, Dettmers et al. 2023).
_BNB4 = (
    np.array([0, 5.208333333e-03, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32),
    np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
              -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
              0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
              0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32),
)


@converts("MatMulBnb4", domain=MICROSOFT)
def matmul_bnb4(call: Call) -> Result:
    """Weights of 4-bit floats, two a byte, the first in the upper half, with a scale a block."""
    x, packed, largest = call.value(0), call.value(1), call.value(2)
    columns, rows, block = call.attr("N"), call.attr("K"), call.attr("block_size")
    kind = call.attr("quant_type", 1)
    if kind not in (0, 1) or call.attr("transB", 1) != 1:
        call.unsupported(f"has weights of kind {kind}, or not transposed")
    table = _BNB4[1] if kind else np.concatenate([_BNB4[0], -_BNB4[0]])
    halves = reshape(unpacked(reshape(packed, shape=(-1,)), 4), shape=(-1, 2))
    numbers = reshape(take(halves, literal(np.array([1, 0])), axis=1), shape=(-1,))
    count = columns * rows
    real = take(literal(table), astype(span(numbers, 0, 0, count), dtype=int64), axis=0)
    scale = take(astype(largest, dtype=float32), literal(np.arange(count) // block), axis=0)
    weights = reshape(real * scale, shape=(columns, rows))
    return matmul(x, matrix_transpose(astype(weights, dtype=x.dtype)))


# ---------------------------------------------------------------- experts
_ACTIVATIONS: dict[str, Callable[[Value], Value]] = {
    "relu": a.relu, "gelu": a.gelu, "silu": a.silu, "identity": lambda x: x}


@converts("MoE", domain=MICROSOFT)
def mixture_of_experts(call: Call) -> Result:
    """Every expert computes, and the k that the router likes best are heard."""
    if call.has(6) or call.has(7) or call.attr("use_sparse_mixer", 0):
        call.unsupported("has experts with gates, or a sparse mixer")
    kind = call.attr("activation_type", "relu")
    if kind not in _ACTIVATIONS:
        call.unsupported(f"has experts with the activation {kind!r}")
    x, router = call.value(0), call.value(1)
    first, second = call.value(2), call.value(4)
    experts, width = first.shape[0], x.shape[-1]
    tokens = reshape(x, shape=(1, -1, width))
    hidden = batch_matmul(tokens, first, transpose_y=True)  # [experts, tokens, inner]
    if call.has(3):
        hidden = hidden + expand_dims(call.value(3), axis=1)
    made = batch_matmul(_ACTIVATIONS[kind](hidden), second, transpose_y=True)
    if call.has(5):
        made = made + expand_dims(call.value(5), axis=1)
    weights, chosen = topk(softmax(router, axis=-1), k=call.attr("k", 1), axis=-1)
    if call.attr("normalize_routing_weights", 0):
        weights = weights / sum_(weights, axis=-1, keepdims=True)
    places = literal(np.arange(_known(call, experts, "the number of experts")))
    heard = e.equal(expand_dims(chosen, axis=2), places)
    share = sum_(e.where(heard, expand_dims(weights, axis=2), 0.0), axis=1)  # [tokens, experts]
    total = sum_(made * expand_dims(matrix_transpose(share), axis=2), axis=0)
    return reshape(total, shape=x.shape)

