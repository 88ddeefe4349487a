"""Rules for what only moves data, and for how reductions and contractions read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from terrazzo.base.shapes import broadcast_shapes, normalize_axes
from terrazzo.graph.applying import constant
from terrazzo.graph.ir import Node, Value, operator_named
from terrazzo.graph.patterns import P, constant_array, same_shape, wildcards
from terrazzo.graph.rewrite import Rule, RuleTable
from terrazzo.index import Index

x, y = wildcards("x y")


def _op(name: str, *args: Value, **attrs: Any) -> Value:
    return operator_named(name)(*args, **attrs)


# ---------------------------------------------------------------- shapes
def _normal(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    return tuple(a % rank for a in axes)


def _permute_once(x: Value, inner: Value, node: Node) -> Value:
    assert inner.node is not None
    first = _normal(inner.node.attrs["axes"], x.ndim)
    second = _normal(node.attrs["axes"], x.ndim)
    return _op("permute_dims", x, axes=tuple(first[a] for a in second))


def _unmoved(x: Value, node: Node) -> Value | None:
    return x if _normal(node.attrs["axes"], x.ndim) == tuple(range(x.ndim)) else None


def _permute_as_reshape(x: Value, node: Node) -> Value | None:
    """Moving only axes of size 1 leaves every element where it is."""
    moved = [a for a in _normal(node.attrs["axes"], x.ndim) if x.shape[a] != 1]
    return _op("reshape", x, shape=node.types[0].shape) if moved == sorted(moved) else None


def _sliced_once(x: Value, inner: Value, node: Node) -> Value:
    """Every second element from 4 on, of every third from 1 on, is every sixth from 13 on."""
    assert inner.node is not None
    first, second = inner.node.attrs, node.attrs
    steps = tuple(a * b for a, b in zip(first["steps"], second["steps"]))
    starts = tuple(a + b * step for a, b, step in zip(
        first["starts"], second["starts"], first["steps"]))
    stops = tuple(start + n * step for start, n, step in zip(
        starts, node.types[0].shape, steps))
    return _op("slice", x, starts=starts, stops=stops, steps=steps)


def _everything(x: Value, node: Node) -> Value | None:
    """All of x in its own order; that the shape stays is for the engine to see."""
    attrs = node.attrs
    return x if all(n == 0 for n in attrs["starts"]) and all(
        n == 1 for n in attrs["steps"]) else None


def _taken_in_steps(x: Value, y: Value, node: Node) -> Value | None:
    """Places that are written down, and go up in even steps, are a slice."""
    places = constant_array(y)
    axis, *others = node.attrs["axes"]
    size = x.shape[axis]
    if others or places is None or places.ndim != 1 or not places.size or not isinstance(size, int):
        return None
    found = places.astype(np.int64)
    if places.dtype.kind == "i":
        found = np.where(found < 0, found + size, found)
    first, last = int(found[0]), int(found[-1])
    step = int(found[1]) - first if found.size > 1 else 1
    if first < 0 or last >= size or step < 1 or (np.diff(found) != step).any():
        return None
    starts, stops, steps = [0] * x.ndim, list(x.shape), [1] * x.ndim
    starts[axis], stops[axis], steps[axis] = first, last + 1, step
    return _op("slice", x, starts=tuple(starts), stops=tuple(stops), steps=tuple(steps))


# These apply only when shape and type stay, as any replacement must have the same.
UNCHANGED = RuleTable((
    Rule("reshape to its own shape", P.reshape(x), lambda x: x),
    Rule("broadcast to its own shape", P.broadcast_to(x), lambda x: x),
    Rule("conversion to its own type", P.astype(x), lambda x: x),
))

SHAPES = UNCHANGED + RuleTable((
    Rule("reshape twice", P.reshape(P.reshape(x)),
         lambda x, node: _op("reshape", x, shape=node.types[0].shape)),
    Rule("permute nothing", P.permute_dims(x), _unmoved),
    Rule("permute twice", P.permute_dims(P.permute_dims(x).named("inner")), _permute_once),
    Rule("permute axes of size one", P.permute_dims(x), _permute_as_reshape),
    Rule("broadcast twice", P.broadcast_to(P.broadcast_to(x)),
         lambda x, node: _op("broadcast_to", x, shape=node.types[0].shape)),
    Rule("slice everything", P.one_of("slice", "place")(x), _everything),
    Rule("slice twice", P.slice(P.slice(x).named("inner")), _sliced_once),
    Rule("take every so many", P.take_at(x, y), _taken_in_steps),
    Rule("join one", P.concat(x), lambda x: x),
))


# ---------------------------------------------------------------- reductions
_REDUCTIONS = ("sum", "prod", "max", "min", "any", "all")


def _reduce_nothing(x: Value, node: Node) -> Value | None:
    """A reduction over axes of size 1 combines an element with the identity only."""
    reduced = normalize_axes(node.attrs["axis"], x.ndim)
    if any(x.shape[d] != 1 for d in reduced):
        return None
    result = node.types[0]
    if node.op.name in ("any", "all") and not x.dtype.is_bool:
        x = _op("not_equal", x, constant(0, x.dtype))
    if x.dtype is not result.dtype:
        x = _op("astype", x, dtype=result.dtype)
    if node.op.name == "sum" and result.dtype.is_float:
        x = _op("add", x, constant(0.0, result.dtype))  # the sum of -0.0 alone is 0.0
    return x if same_shape(x.shape, result.shape) else _op("reshape", x, shape=result.shape)


def _reduce_once(x: Value, inner: Value, node: Node) -> Value | None:
    """One reduction over the axes of both; sums and products have no order that they promise."""
    assert inner.node is not None
    if inner.node.op is not node.op or inner.dtype is not node.types[0].dtype:
        return None
    first = normalize_axes(inner.node.attrs["axis"], x.ndim)
    left = [d for d in range(x.ndim) if inner.node.attrs["keepdims"] or d not in first]
    second = {left[d] for d in normalize_axes(node.attrs["axis"], inner.ndim)}
    merged = tuple(sorted(second.union(first)))
    attrs: dict[str, Any] = {"dtype": inner.dtype} if "dtype" in node.attrs else {}
    result = _op(node.op.name, x, axis=merged, keepdims=False, **attrs)
    shape = node.types[0].shape
    return result if same_shape(result.shape, shape) else _op("reshape", result, shape=shape)


def _reduce_broadcast(x: Value, inner: Value, node: Node) -> Value | None:
    """The extremum of copies is the extremum of one of them."""
    added = inner.ndim - x.ndim
    reduced = normalize_axes(node.attrs["axis"], inner.ndim)
    stretched = [d for d in range(inner.ndim) if d < added or (
        x.shape[d - added] == 1 and inner.shape[d] != 1)]
    if not stretched or not set(stretched) <= set(reduced) or any(
            not isinstance(inner.shape[d], int) or inner.shape[d] == 0 for d in stretched):
        return None
    rest = tuple(d - added for d in reduced if d >= added)
    result = _op(node.op.name, x, axis=rest, keepdims=False) if rest else x
    shape = node.types[0].shape
    return result if same_shape(result.shape, shape) else _op("reshape", result, shape=shape)


REDUCING = RuleTable((
    Rule("reduce over size one", P.one_of(*_REDUCTIONS)(x), _reduce_nothing),
    Rule("reduce twice", P.one_of(*_REDUCTIONS)(P.one_of(*_REDUCTIONS)(x).named("inner")),
         _reduce_once, "extended", "extrema keep their bits; sums and products of floats are "
         "reordered, which they allow: their order is not part of their meaning"),
    Rule("extremum of copies", P.one_of("max", "min", "any", "all")(
        P.broadcast_to(x).named("inner")), _reduce_broadcast, "extended"),
))


# ---------------------------------------------------------------- what broadcasts by itself
_BROADCASTING = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power", "where",
                 "equal", "not_equal", "less", "less_equal", "greater", "greater_equal",
                 "bitwise_and", "bitwise_or", "bitwise_xor")


def _without_broadcast(node: Node) -> Value | None:
    """Elementwise operators stretch their operands, so an explicit stretch before one is idle."""
    plain = [v.node.inputs[0] if v is not None and v.node is not None
             and v.node.op.name == "broadcast_to" else v for v in node.inputs]
    if all(a is b for a, b in zip(plain, node.inputs)):
        return None
    kept = list(plain)
    for i, original in enumerate(node.inputs):
        if same_shape(broadcast_shapes(*(v.shape for v in kept if v is not None)),
                      node.types[0].shape):
            break
        kept[i] = original  # some operand has to bring the shape
    if all(a is b for a, b in zip(kept, node.inputs)):
        return None
    return _op(node.op.name, *(v for v in kept if v is not None), **node.attrs)


BROADCASTS = RuleTable((
    Rule("broadcast before an elementwise operator", P.one_of(*_BROADCASTING)(...),
         _without_broadcast, "extended"),
))


# ---------------------------------------------------------------- contractions
def _swaps_last_two(value: Value) -> bool:
    assert value.node is not None
    rank = value.ndim
    return rank >= 2 and _normal(value.node.attrs["axes"], rank) == (
        *range(rank - 2), rank - 1, rank - 2)


def _transposed_left(x: Value, y: Value, moved: Value, node: Node) -> Value | None:
    if not _swaps_last_two(moved):
        return None
    return _op(node.op.name, x, y, transpose_x=not node.attrs["transpose_x"],
               transpose_y=node.attrs["transpose_y"])


def _transposed_right(x: Value, y: Value, moved: Value, node: Node) -> Value | None:
    if not _swaps_last_two(moved):
        return None
    return _op(node.op.name, x, y, transpose_x=node.attrs["transpose_x"],
               transpose_y=not node.attrs["transpose_y"])


def _transposed_result(x: Value, y: Value, product: Value, node: Node) -> Value | None:
    """(x y)^T = y^T x^T: each sum has the same terms in the same order."""
    if product.node is None or not _swaps_last_two(node.outputs[0]):
        return None
    flags = product.node.attrs
    return _op(product.node.op.name, y, x, transpose_x=not flags["transpose_y"],
               transpose_y=not flags["transpose_x"])


def _rows_as_they_were(x: Value, y: Value, merged: Value, node: Node) -> Value | None:
    """A product with one matrix takes rows in any shape, so the reshape may as well come after."""
    if y.ndim != 2 or x.ndim < 2 or node.attrs["transpose_x"] or x.shape[-1] != merged.shape[-1]:
        return None
    if x.shape[-1] == 0:  # of nothing, any number of rows can be made
        return None
    product = _op(node.op.name, x, y, transpose_x=False, transpose_y=node.attrs["transpose_y"])
    return _op("reshape", product, shape=node.types[0].shape)


def _used_taps(size: Index, taps: Index, count: Index, stride: int, before: Index, dilation: int
               ) -> range:
    """The taps of a window between the first and the last that ever lie inside; else all."""
    if not (isinstance(taps, int) and isinstance(size, int) and isinstance(count, int)
            and isinstance(before, int)):
        return range(taps if isinstance(taps, int) else 0)
    inside = [t for t in range(taps) if t * dilation - before < size
              and (count - 1) * stride + t * dilation - before >= 0]
    return range(inside[0], inside[-1] + 1) if inside and count > 0 else range(taps)


def _without_idle_taps(x: Value, y: Value, node: Node) -> Value | None:
    """Taps that lie in the padding wherever the window is add nothing.

    A dilation of 24 over 14 pixels leaves one tap in each direction.
    """
    attrs, taps = node.attrs, y.shape[:-2]
    before, after = zip(*attrs["padding"], strict=True)
    used = [_used_taps(*axis) for axis in zip(
        x.shape[1:-1], taps, node.types[0].shape[1:-1], attrs["strides"], before,
        attrs["dilation"], strict=True)]
    if any(not u or not isinstance(n, int) for u, n in zip(used, taps, strict=True)) or all(
            len(u) == n for u, n in zip(used, taps, strict=True)):
        return None
    padding = tuple((a - u.start * d, b - (n - u.stop) * d) for a, b, u, n, d in zip(
        before, after, used, taps, attrs["dilation"], strict=True))
    kept = _op("slice", y, starts=(*(u.start for u in used), 0, 0),
               stops=(*(u.stop for u in used), *y.shape[-2:]), steps=(1,) * y.ndim)
    return _op("convolve", x, kept, **{**attrs, "padding": padding})


_product = P.one_of("batch_matmul", "float8_matmul")
CONTRACTING = RuleTable((
    Rule("taps on padding alone", P.convolve(x, y), _without_idle_taps,
         "extended"),
    Rule("reshape after a matrix product", _product(P.reshape(x).named("merged"), y),
         _rows_as_they_were, "extended", "so that what follows the product meets no reshape"),
    Rule("transpose into a matrix product, left",
         _product(P.permute_dims(x).named("moved"), y), _transposed_left, "extended"),
    Rule("transpose into a matrix product, right",
         _product(x, P.permute_dims(y).named("moved")), _transposed_right, "extended"),
    Rule("transpose of a matrix product",
         P.permute_dims(_product(x, y).named("product").once()), _transposed_result,
         "extended"),
))

MOVEMENT = SHAPES + REDUCING + BROADCASTS + CONTRACTING
