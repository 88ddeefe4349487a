"""Random choices by given probabilities."""

from __future__ import annotations

from typing import Any

from terrazzo.base.shapes import dims_text
from terrazzo.dtypes import float64
from terrazzo.errors import ArgumentError, RankError, user_location
from terrazzo.ops.define import operator
from terrazzo.ops.elementwise import astype, exp, less, less_equal, minimum
from terrazzo.ops.random import uniform
from terrazzo.ops.reduce import max_, sum_
from terrazzo.ops.scan import cumsum
from terrazzo.ops.shape import expand_dims, span


@operator(family="random", differentiable=False)
def bernoulli_of(p: Any, key: Any) -> Any:
    """True with the probability that each element of p gives"""
    return less(uniform(key, shape=p.shape, dtype=p.dtype.compute), p)


@operator(family="random", differentiable=False)
def multinomial(logits: Any, key: Any, *, sample_size: int = 1, dtype: Any = "int32") -> Any:
    """class numbers drawn by log-probabilities, which need not be normalised: [rows, sample_size]

    A uniform number is looked up among the running sums of the probabilities.
    """
    if logits.ndim != 2:
        raise RankError(f"multinomial needs [rows, classes], not {dims_text(logits.shape)}",
                        where=user_location())
    rows, classes = logits.shape
    if classes == 0 or sample_size < 0:
        raise ArgumentError(f"multinomial draws {sample_size} of {classes} classes",
                            where=user_location())
    wide = float64 if logits.dtype is float64 else logits.dtype.compute
    values = astype(logits, dtype=wide)
    sums = cumsum(exp(values - max_(values, axis=1, keepdims=True)), axis=1)
    drawn = uniform(key, shape=(rows, sample_size), dtype=wide) * span(
        sums, 1, classes - 1, classes)
    passed = less_equal(expand_dims(sums, axis=1), expand_dims(drawn, axis=2))
    number = sum_(astype(passed, dtype="int64"), axis=2)
    return astype(minimum(number, classes - 1), dtype=dtype)
