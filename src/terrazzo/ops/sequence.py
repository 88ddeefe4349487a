"""Sequences: causal convolutions with a state."""

from __future__ import annotations

from typing import Any

from terrazzo.base.shapes import dims_text
from terrazzo.errors import ArgumentError, ShapeError, user_location
from terrazzo.index.guards import known
from terrazzo.ops.activation import silu
from terrazzo.ops.creation import full
from terrazzo.ops.define import operator
from terrazzo.ops.elementwise import (
    astype,
)
from terrazzo.ops.joining import concat
from terrazzo.ops.shape import reshape, span


@operator(family="sequence")
def causal_conv_with_state(x: Any, weight: Any, bias: Any = None, past_state: Any = None, *,
                           activation: str = "none") -> Any:
    """each channel of x [batch, channels, length] convolved with its own past; the new state

    The weight is [channels, 1, k]; the state holds the k - 1 steps before x.
    """
    if x.ndim != 3 or weight.ndim != 3 or not isinstance(
            k := known(weight.shape[2]), int):
        raise ShapeError(f"causal_conv_with_state needs x [batch, channels, length] and a weight "
                         f"[channels, 1, k], not {dims_text(x.shape)} and "
                         f"{dims_text(weight.shape)}", where=user_location())
    if activation not in ("none", "silu", "swish"):
        raise ArgumentError(f"causal_conv_with_state has no activation {activation!r}",
                            where=user_location(), hint="use none, silu or swish")
    batch, channels, length = x.shape
    state = past_state if past_state is not None else full(shape=(batch, channels, k - 1), value=0,
                                                           dtype=x.dtype)
    wide = x.dtype.compute
    whole = concat(state, x, axis=2)
    total: Any = None
    for tap in range(k):
        part = astype(span(whole, 2, tap, tap + length), dtype=wide)
        factor = reshape(astype(span(weight, 2, tap, tap + 1), dtype=wide), shape=(1, channels, 1))
        total = part * factor if total is None else total + part * factor
    if bias is not None:
        total = total + reshape(astype(bias, dtype=wide), shape=(1, channels, 1))
    if activation != "none":
        total = silu(total)
    return astype(total, dtype=x.dtype), span(whole, 2, length, length + k - 1)
