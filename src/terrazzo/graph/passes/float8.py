"""Products of 8-bit floats: widening and scales move behind the sum, or widening in front of it.

People write `(astype(x, float32) * sx) @ (astype(w, float32) * sw)`: 8-bit floats are only storage.
A chip that multiplies them (`Guide.keeps`) reads a quarter of the bytes at twice the rate of half
types, if the product comes first: `float8_matmul(x, w) * sx * sw`. Scales may be single numbers, or
one for each row of x and column of w; what varies along the sum stays where it is. Rounding to a
half type before the product is left out: the sums are nearer to what is meant.

Other chips widen whole operands once, in place of each element for each time it is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from terrazzo.dtypes import bfloat16, float16, float32
from terrazzo.graph.ir import Graph, Node, Value
from terrazzo.graph.passes.parts import made_by, op, operands
from terrazzo.graph.patterns import same_shape
from terrazzo.graph.rebuild import rebuild
from terrazzo.graph.rewrite import LEVELS, Applied, describe
from terrazzo.graph.scopes import trace_scope
from terrazzo.index import proves_eq
from terrazzo.ops.contract import FLOAT8

LEVEL = "extended"
PLAIN, OF_FLOAT8 = "batch_matmul", "float8_matmul"
_NAMES = {PLAIN: "8-bit floats multiplied before they are scaled",
          OF_FLOAT8: "8-bit floats widened before they are multiplied"}
_WIDE = (float32, float16, bfloat16)


def float8_products(graph: Graph, keeps: Callable[[Node], bool], log: list[Applied] | None = None,
                    level: str = "all") -> Graph:
    """The graph with products of 8-bit floats as the chip has them: `keeps` tells which it does."""
    if LEVELS.index(level) < LEVELS.index(LEVEL) or not any(
            v is not None and v.dtype in FLOAT8 for node in graph.nodes for v in node.inputs):
        return graph
    changed = False

    def visit(node: Node, inputs: tuple[Value | None, ...]) -> tuple[Value, ...] | None:
        nonlocal changed
        if node.op.name not in (PLAIN, OF_FLOAT8):
            return None
        fresh = Node(node.op, inputs, node.attrs, node.types, node.where)
        with trace_scope():
            answer = _gathered(fresh, keeps) if node.op.name == PLAIN else _widened(fresh, keeps)
        if answer is None:
            return None
        changed = True
        if log is not None:
            log.append(Applied(_NAMES[node.op.name], describe(node), node.where))
        return (answer,)

    made = rebuild(graph, visit)
    return made if changed else graph


def _widened(node: Node, keeps: Callable[[Node], bool]) -> Value | None:
    """A product of operands that were widened before, where the chip has no other."""
    if keeps(node):
        return None
    return op(PLAIN, *(op("astype", v, dtype=float32) for v in operands(node)), **node.attrs)


# ---------------------------------------------------------------- the product first
@dataclass(frozen=True, eq=False)
class _Operand:
    """8-bit floats in the place of an operand, and what the product is multiplied or divided by."""

    values: Value
    turned: bool  # whether rows and columns are swapped when it is multiplied
    scales: tuple[tuple[str, Value], ...] = ()


def _gathered(node: Node, keeps: Callable[[Node], bool]) -> Value | None:
    x, y = operands(node)
    left = _operand(x, node.attrs["transpose_x"], True)
    right = _operand(y, node.attrs["transpose_y"], False)
    out = node.types[0].dtype
    bare = x.dtype in FLOAT8 and y.dtype in FLOAT8
    if left is None or right is None or not (bare or out in _WIDE):
        return None
    made = op(OF_FLOAT8, left.values, right.values, transpose_x=left.turned,
              transpose_y=right.turned)
    assert made.node is not None
    if not bare and not keeps(made.node):
        return None
    for name, scale in (*left.scales, *right.scales):
        made = op(name, made, op("astype", scale, dtype=float32))
    return op("astype", made, dtype=out)


def _operand(value: Value, turned: bool, is_left: bool) -> _Operand | None:
    """The 8-bit floats that an operand is made of by widening, scaling and turning; None if not."""
    if value.dtype in FLOAT8:
        return _Operand(value, turned)
    node = value.node
    if node is None or value.dtype not in _WIDE:
        return None
    if node.op.name == "astype":
        (source,) = operands(node)
        return _operand(source, turned, is_left) if source.dtype.is_float else None
    if node.op.name == "permute_dims" and _swaps_last_two(node):
        return _operand(operands(node)[0], not turned, is_left)
    scaling = made_by(value, "multiply", "divide")
    if scaling is None:
        return None
    first, second = operands(scaling)
    orders = [(first, second), (second, first)] if node.op.name == "multiply" else [(first, second)]
    for inner, scale in orders:
        behind = _behind(scale, turned == is_left)
        found = _operand(inner, turned, is_left) if behind is not None and same_shape(
            inner.shape, value.shape) else None
        if found is not None and behind is not None:
            return replace(found, scales=(*found.scales, (node.op.name, _turned(behind) if turned
                                                          else behind)))
    return None


def _swaps_last_two(node: Node) -> bool:
    rank = len(node.types[0].shape)
    return tuple(a % rank for a in node.attrs["axes"]) == (*range(rank - 2), rank - 1, rank - 2)


def _behind(scale: Value, k_is_rows: bool) -> Value | None:
    """A scale, if it is the same all along the sum, which runs down rows or along columns."""
    place = 2 if k_is_rows else 1
    if scale.dtype not in _WIDE or (
            scale.ndim >= place and not proves_eq(scale.shape[-place], 1)):
        return None
    return scale


def _turned(scale: Value) -> Value:
    """A scale of rows as one of columns, or the other way round."""
    if scale.ndim == 0:
        return scale
    *batch, down, along = (1, *scale.shape) if scale.ndim == 1 else scale.shape
    return op("reshape", scale, shape=(*batch, along, down))


__all__ = ["float8_products"]
