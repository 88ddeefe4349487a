"""Convolutions and pools in files that onnxruntime itself saved (domain com.microsoft.nchwc).

Its optimiser cuts channels into blocks as long as a vector, stores weights in that order, and says
that such a file is for the machine that wrote it. Here a tensor in blocks is an ordinary one, with
channels filled up to whole blocks, and weights are put back into their order.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from terrazzo.frontends.onnx.convert.microsoft import ended
from terrazzo.frontends.onnx.convert.pool import average_pool, max_pool
from terrazzo.frontends.onnx.convert.windows import read_windows
from terrazzo.frontends.onnx.importer import literal
from terrazzo.frontends.onnx.registry import Call, Result, converts
from terrazzo.graph.ir import Value
from terrazzo.ops import conv as c
from terrazzo.ops import pool
from terrazzo.ops.arrange import pad
from terrazzo.ops.shape import moveaxis, span

NCHWC = "com.microsoft.nchwc"


@lru_cache(1)
def block_size() -> int:
    """How many channels onnxruntime puts into a block on this machine: a vector of floats."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        flags = ""
    return 16 if "avx512f" in flags else 8


@converts("ReorderInput", domain=NCHWC)
def reorder_input(call: Call) -> Result:
    x = call.value(0)
    if call.attr("channels_last", 0):
        x = moveaxis(x, source=-1, destination=1)
    channels = x.shape[1]
    if not isinstance(channels, int):
        call.unsupported("needs to know how many channels there are")
    return pad(x, pad_width=((0, 0), (0, -channels % block_size()), *[(0, 0)] * (x.ndim - 2)))


@converts("ReorderOutput", domain=NCHWC)
def reorder_output(call: Call) -> Result:
    x = span(call.value(0), 1, 0, call.attr("channels"))
    return moveaxis(x, source=1, destination=-1) if call.attr("channels_last", 0) else x


@converts("Conv", domain=NCHWC)
def conv(call: Call) -> Result:
    x, stored = call.value(0), call.array(1)
    groups = call.attr("group", 1)
    weight = _in_order(call, stored, in_blocks=groups == 1 and stored.shape[1] >= block_size())
    at = read_windows(call, x.shape[2:], tuple(call.attr("kernel_shape") or stored.shape[2:]))
    y = c.conv(x, literal(weight), call.optional(2), strides=at.strides, padding=at.padding,
               dilation=at.dilation, groups=groups)
    added = call.optional(3)
    return ended(call, y if added is None else y + added, call.attr("activation_params", []))


def _in_order(call: Call, stored: np.ndarray, in_blocks: bool) -> np.ndarray:
    """Weights as [outputs, inputs, height, width]; inputs may be in blocks as outputs are."""
    block, (outputs, inputs, height, width) = block_size(), stored.shape
    if outputs % block or (in_blocks and inputs % block):
        call.unsupported("was saved on a machine with vectors of another length")
    if in_blocks:
        cut = stored.reshape(outputs // block, inputs // block, height, width, block, block)
        return cut.transpose(0, 5, 1, 4, 2, 3).reshape(stored.shape)
    cut = stored.reshape(outputs // block, inputs, height, width, block)
    return cut.transpose(0, 4, 1, 2, 3).reshape(stored.shape)


converts("MaxPool", domain=NCHWC)(max_pool)
converts("AveragePool", domain=NCHWC)(average_pool)


@converts("GlobalMaxPool", "GlobalAveragePool", domain=NCHWC)
def global_pool(call: Call) -> Value:
    kind = pool.global_max_pool if call.node.op_type == "GlobalMaxPool" else (
        pool.global_average_pool)
    return kind(call.value(0))
