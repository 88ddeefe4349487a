"""Random numbers and dropout.

A graph is a function: run again, it gives the same numbers. They come from the node's seed or,
without one, from its name, so that nodes differ from each other.
"""

from __future__ import annotations

import zlib

import numpy as np

from terrazzo.dtypes import bool_, float32, int32
from terrazzo.frontends.onnx.registry import Call, Result, converts
from terrazzo.graph.applying import constant
from terrazzo.graph.ir import Value
from terrazzo.ops import elementwise as e
from terrazzo.ops.creation import full
from terrazzo.ops.random import bernoulli, normal, random_key, uniform
from terrazzo.ops.reduce import in_type, widened
from terrazzo.ops.sampling import bernoulli_of, multinomial


def _key(call: Call) -> Value:
    seed = call.attr("seed")
    text = f"name {call.node.output[0]}" if seed is None else f"seed {seed}"
    return random_key(seed=zlib.crc32(text.encode()))


@converts("RandomNormal", "RandomNormalLike")
def random_normal(call: Call) -> Value:
    like = call.optional(0)
    return normal(_key(call), shape=tuple(call.attr("shape")) if like is None else like.shape,
                  mean=call.attr("mean", 0.0), std=call.attr("scale", 1.0),
                  dtype=call.dtype("dtype", float32 if like is None else like.dtype))


@converts("RandomUniform", "RandomUniformLike")
def random_uniform(call: Call) -> Value:
    like = call.optional(0)
    return uniform(_key(call), shape=tuple(call.attr("shape")) if like is None else like.shape,
                   low=call.attr("low", 0.0), high=call.attr("high", 1.0),
                   dtype=call.dtype("dtype", float32 if like is None else like.dtype))


@converts("Bernoulli")
def random_bernoulli(call: Call) -> Value:
    p = call.value(0)
    return in_type(bernoulli_of(p, _key(call)), call.dtype("dtype", p.dtype))


@converts("Multinomial")
def random_multinomial(call: Call) -> Value:
    return multinomial(call.value(0), _key(call), sample_size=call.attr("sample_size", 1),
                       dtype=call.dtype("dtype", int32))


# ---------------------------------------------------------------- dropout
@converts("Dropout", until=12)
def dropout_at_inference(call: Call) -> Result:
    x = call.value(0)
    return x, full(shape=x.shape, value=1, dtype=x.dtype if call.version < 10 else bool_)


@converts("Dropout", since=12)
def dropout(call: Call) -> Result:
    x = call.value(0)
    training = bool(call.number(2)) if call.has(2) else False
    ratio = float(call.number(1)) if training and call.has(1) else 0.5
    if not training or ratio == 0.0:
        return x, full(shape=x.shape, value=True, dtype=bool_)
    keep = _kept_elements(call, x, ratio)
    scaled = in_type(widened(x) * (1 / (1 - ratio)), x.dtype) if ratio < 1.0 else x
    return e.where(keep, scaled, 0), keep


def _kept_elements(call: Call, x: Value, ratio: float) -> Value:
    """A mask. With a seed it is the one that ONNX's reference draws, if the sizes are known."""
    seed = call.attr("seed")
    sizes = [n for n in x.shape if isinstance(n, int)]
    if seed is not None and len(sizes) == x.ndim:
        numbers = np.random.RandomState(seed).uniform(0.0, 1.0, sizes)
        return constant(numbers >= ratio)
    return bernoulli(_key(call), shape=x.shape, p=1.0 - ratio)
