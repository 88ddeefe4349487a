"""Bounds of what is computed element by element: arguments are moved, and the worst counts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from terrazzo.dtypes import DType, float32
from terrazzo.graph.evaluate import run_node
from terrazzo.graph.ir import Node
from terrazzo.index import Var
from terrazzo.tools.verify.bounded import (
    COUNTED,
    ROWS,
    Bounded,
    deviation,
    error_run,
    exactly,
    finite,
    run_wide,
    wide,
)
from terrazzo.tools.verify.bounds_sampled import sampled

_COMPARISONS = frozenset(name for name, row in ROWS.items()
                         if row.arity == 2 and row.result == "bool")


def elementwise(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
                dims: Mapping[Var, int]) -> list[np.ndarray]:
    """Inputs are moved by their errors to all corners, and the worst effect counts."""
    given = [b for b in inputs if b is not None]
    (value,) = values
    error = np.zeros(value.shape)
    if node.op.name in _COMPARISONS:
        x, y = given
        reach = x.error + y.error
        gap = deviation(*np.broadcast_arrays(wide(x.value), wide(y.value)))
        unsure = (reach > 0) & ~(gap > reach)
        return [np.where(unsure & ~_is_the_extremum(node, unsure), np.inf, 0.0)]
    if node.op.name == "where":
        chooser, x, y = given
        chosen = np.where(chooser.value, x.error, y.error)
        either = np.maximum(x.error, y.error) + deviation(
            *np.broadcast_arrays(wide(x.value), wide(y.value)))
        return [np.where(chooser.error > 0, either, chosen)]
    if node.op.name == "astype" and not node.types[0].dtype.is_float:
        return [_to_integer(given[0], node.types[0].dtype)]
    accuracy = ROWS[node.op.name].accuracy
    if accuracy.backward_stable:
        slack = 4 * node.types[0].dtype.compute.eps * (1 + finite(given[0].value))
        given = [Bounded(wide(given[0].value), given[0].error + slack)]
    period = np.inf if accuracy.period is None else accuracy.period(given)
    unknown = np.zeros(value.shape, bool)
    ways: list[tuple[np.ndarray, ...]] = []
    for b in given:
        if b.exact:
            ways.append((b.value,))
        elif b.value.dtype.kind != "f" and node.op.name in COUNTED and (
                b.value.dtype.kind in "iu"):
            unknown = unknown | ~np.isfinite(b.error)
            ways.append(counts(b))
        elif b.value.dtype.kind != "f":
            unknown = unknown | (b.error > 0)
            ways.append((b.value,))
        else:
            known = np.where(np.isfinite(b.error), b.error, 0.0)
            unknown = unknown | ~np.isfinite(b.error) | (b.error > period)
            ways.append((b.value + known, b.value - known))
    for corner in itertools.product(*ways) if any(len(w) > 1 for w in ways) else ():
        (other,) = run_wide(node, corner, dims)
        error = np.maximum(error, deviation(other, value))
    if accuracy.undefined is not None:
        unknown = unknown | accuracy.undefined(given)
    return [np.where(unknown, np.inf, error)]


def counts(x: Bounded) -> tuple[np.ndarray, np.ndarray]:
    """Integers moved up and down by their errors, within their type."""
    limits = np.iinfo(x.value.dtype)
    step = np.where(np.isfinite(x.error), x.error, 0.0)
    up, down = (np.clip(wide(x.value) + s, limits.min, limits.max).astype(x.value.dtype)
                for s in (step, -step))
    return up, down


def _is_the_extremum(node: Node, unsure: np.ndarray) -> np.ndarray:
    """Where x == max(x) holds however x was rounded: all others are certainly smaller.

    That is how positions of extrema are found.
    """
    x, y = node.inputs
    source = None if y is None else y.node
    if node.op.name != "equal" or source is None or source.op.name not in ("max", "min") or (
            source.inputs[0] is not x or not source.attrs["keepdims"]):
        return np.zeros(unsure.shape, bool)
    return unsure & (unsure.sum(axis=source.attrs["axis"], keepdims=True) == 1)


def _to_integer(x: Bounded, dtype: DType) -> np.ndarray:
    """Casts to integers and booleans; what does not fit an integer has no defined result."""
    if x.value.dtype.kind != "f":  # bytes that may be one off fit a wider integer as they are
        fits = dtype.is_integer and x.value.dtype.kind in "iu" and (
            8 * x.value.dtype.itemsize < dtype.bits)
        return x.error if fits else np.where(x.error > 0, np.inf, 0.0)
    value, error = x.value, x.error
    if dtype.is_bool:
        return np.where((error > 0) & ~(np.abs(value) > error), np.inf, 0.0)
    fits = (np.trunc(value) >= float(dtype.min)) & (np.trunc(value) < float(dtype.max) + 1)
    stable = np.trunc(value - error) == np.trunc(value + error)
    return np.where(fits & stable, 0.0, np.inf)


def bitcast(node: Node, x: Bounded, dims: Mapping[Var, int]) -> list[Bounded]:
    """Bits are those of the narrow type, so the value goes back to it first."""
    source = node.inputs[0]
    assert source is not None
    (narrow,) = run_node(node, [x.value.astype(source.dtype.np)], dims)
    unsure = (x.error > 0) | np.isnan(wide(x.value))  # of a nan, only that it is one is defined
    return [Bounded(exactly(narrow).value, np.where(unsure, np.inf, 0.0))]


# ---------------------------------------------------------------- quantised numbers
def quantized(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
              dims: Mapping[Var, int]) -> list[np.ndarray]:
    """Inputs are moved by their errors, x also by what its quotient may be rounded by."""
    (value,) = values
    x = inputs[0]
    assert x is not None
    room = x.error + 2 * float32.eps * finite(x.value)
    unknown = ~np.isfinite(room)
    room = np.where(unknown, 0.0, room)
    ways: list[tuple[Any, ...]] = [(wide(x.value) + room, wide(x.value) - room)]
    for b in inputs[1:]:
        if b is None or b.exact:
            ways.append((None if b is None else b.value,))
        elif b.value.dtype.kind == "f" and np.isfinite(b.error).all():
            ways.append((b.value + b.error, b.value - b.error))
        else:  # a scale or zero point that is not known: nothing is
            unknown, ways = np.ones(value.shape, bool), [*ways, (b.value,)]
    error = np.zeros(value.shape)
    for corner in itertools.product(*ways):
        (other,) = run_wide(node, corner, dims)
        error = np.maximum(error, deviation(other, value))
    return [np.where(unknown, np.inf, error)]


def dequantized(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
                dims: Mapping[Var, int]) -> list[np.ndarray]:
    """As many scales off as the quantised number is."""
    x, scale, *rest = inputs
    assert x is not None and scale is not None
    if not scale.exact or any(b is not None and not b.exact for b in rest):
        return sampled(node, inputs, values, dims)
    return error_run(node, [x.error, np.abs(scale.value), None], dims)
