"""Normalisation layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.graph.applying import as_value
from terrazzo.graph.ir import TensorType, Value
from terrazzo.ops import norm, reduce
from terrazzo.ops.creation import full
from terrazzo.ops.elementwise import astype, rsqrt
from terrazzo.ops.reduce import widened
from terrazzo.ops.shape import reshape
from terrazzo.torch.aten.registry import aten


@aten("native_layer_norm", typed=True)
def native_layer_norm(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float, *,
                      out: Sequence[TensorType]) -> Any:
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    y = norm.layer_norm(x, weight, bias, axis=axes, eps=eps)
    # Nodes that nobody uses cost nothing: these are only computed where backward keeps them.
    wide = widened(x)
    mean = reduce.mean(wide, axis=axes, keepdims=True)
    centred = wide - mean
    scale = rsqrt(reduce.mean(centred * centred, axis=axes, keepdims=True) + eps)
    return y, astype(mean, dtype=out[1].dtype), astype(scale, dtype=out[2].dtype)


@aten("_native_batch_norm_legit_no_training", typed=True)
def batch_norm_inference(x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float,
                         eps: float, *, out: Sequence[TensorType]) -> Any:
    return norm.batch_norm(x, mean, var, weight, bias, eps=eps), *map(_nothing, out[1:3])


def _nothing(type: TensorType) -> Value:
    """What torch answers in place of statistics that were not taken: a tensor without elements."""
    return full(shape=type.shape, value=0.0, dtype=type.dtype)


@aten("_native_batch_norm_legit_functional", typed=True)
def batch_norm(x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any,
               training: bool, momentum: float, eps: float, *, out: Sequence[TensorType]) -> Any:
    if not training:
        y = norm.batch_norm(x, running_mean, running_var, weight, bias, eps=eps)
        return y, _nothing(out[1]), _nothing(out[2]), running_mean, running_var
    y, mean, var = norm.batch_norm_train(x, weight, bias, eps=eps)
    count: Any = 1
    for d, n in enumerate(x.shape):
        count = count if d == 1 else count * n
    total = astype(as_value(count), dtype=var.dtype)
    unbiased = var if count == 1 else var * (total / (total - 1))
    return (y, mean, rsqrt(var + eps), _moved(running_mean, mean, momentum),
            _moved(running_var, unbiased, momentum))


def _moved(running: Value, now: Value, momentum: float) -> Value:
    return astype(now * momentum + widened(running) * (1 - momentum), dtype=running.dtype)


@aten("native_group_norm", typed=True)
def native_group_norm(x: Any, weight: Any, bias: Any, n: Any, c: Any, hw: Any, groups: int,
                      eps: float, *, out: Sequence[TensorType]) -> Any:
    y = norm.group_norm(x, weight, bias, groups=groups, eps=eps)
    apart = widened(reshape(x, shape=(n, groups, (c // groups) * hw)))
    mean = reduce.mean(apart, axis=2, keepdims=True)
    centred = apart - mean
    scale = rsqrt(reduce.mean(centred * centred, axis=2) + eps)
    return (y, astype(reshape(mean, shape=(n, groups)), dtype=out[1].dtype),
            astype(scale, dtype=out[2].dtype))
