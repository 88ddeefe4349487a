"""vmap: a function of rows made one of whole batches, as a rewriting of its graph.

The function is traced on one row. Each node that depends on a row is then replaced by what
computes it for all rows, with the batch as axis 0 of every value: by the rule of its operator
(`batching_rules.py`), else through its body, else row by row in a `scan`. So every operator can be
batched, and what comes out is ordinary nodes, which have gradients and can be batched again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from terrazzo.base.nests import flatten, leaves, mapped, pack
from terrazzo.base.shapes import dims_text, normalize_axis
from terrazzo.errors import ArgumentError, ShapeError, user_location
from terrazzo.graph.applying import apply, as_value, expand
from terrazzo.graph.autodiff import between, fit, rule_gradients
from terrazzo.graph.derivatives import Function, dispatch, function_name, labelled
from terrazzo.graph.ir import Graph, Node, TensorType, Value, operator_named
from terrazzo.graph.scopes import trace_scope
from terrazzo.index import Index
from terrazzo.index.guards import granted
from terrazzo.ops.shape import broadcast_to, moveaxis, reshape


class Rows:
    """The values of one row's graph for all rows of a batch, which is their axis 0."""

    def __init__(self, size: Index, table: dict[Value, Value]):
        self.size, self.table = size, dict(table)

    def has(self, value: Value | None) -> bool:
        """Whether a value differs from row to row."""
        return value is not None and value in self.table

    def of(self, value: Value) -> Value:
        """A value for all rows; one that does not depend on them is the same for all."""
        if value in self.table:
            return self.table[value]
        return broadcast_to(value, shape=(self.size, *value.type.shape))

    def aligned(self, value: Value, rank: int) -> Value:
        """A value as broadcasting needs it beside rows of so many axes."""
        if value not in self.table:
            return value
        shape = value.type.shape
        ones = (1,) * (rank - len(shape))
        return reshape(self.table[value], shape=(self.size, *ones, *shape)) if ones else (
            self.table[value])

    def batch(self, outputs: Sequence[Value]) -> list[Value]:
        """Outputs of the row's graph, for all rows."""
        for node in between(outputs, list(self.table))[0]:
            self.table.update(zip(node.outputs, self.batched(node), strict=True))
        return [self.of(v) for v in outputs]

    def batched(self, node: Node) -> Sequence[Value]:
        """What a node computes, for all rows."""
        from terrazzo.graph.batching_rules import RULES

        rule = RULES.get(node.op.name) if node.op.family != "user" else None
        found = None if rule is None else rule(self, node)
        if found is not None:
            return [found] if isinstance(found, Value) else list(found)
        if node.op.body is None:
            return self.one_by_one(node)
        # The rule of what chips keep whole is that of its body, for kernels.
        if node.op.grad is not None and not node.op.keep_whole:
            return self.with_own_gradient(node)
        return self.inside(node).batch(expand(node.op, node.inputs, node.attrs))

    def inside(self, node: Node) -> Rows:
        """The same rows, as far as a node depends on them."""
        return Rows(self.size, {v: self.table[v] for v in node.inputs
                                if v is not None and v in self.table})

    def one_by_one(self, node: Node) -> Sequence[Value]:
        """A node that nothing is known of: a scan over the rows."""
        given = [v for v in dict.fromkeys(node.inputs) if v is not None]
        rows = [v for v in given if v in self.table]
        rest = [v for v in given if v not in self.table]
        fresh = {v: Value(v.type) for v in given}
        inputs = tuple(None if v is None else fresh[v] for v in node.inputs)
        body = Graph("row", tuple(fresh[v] for v in (*rows, *rest)),
                     Node(node.op, inputs, node.attrs, node.types, node.where).outputs)
        return apply(operator_named("scan"), [*(self.table[v] for v in rows), *rest], {
            "body": body, "carries": 0, "sequences": len(rows), "length": self.size,
            "reverse": False})

    def with_own_gradient(self, node: Node) -> Sequence[Value]:
        """A composite operator with a gradient rule: one for all rows, with that rule for each."""
        flags = [self.has(v) for v in node.inputs]
        given = [None if v is None else self.table.get(v, v) for v in node.inputs]
        size = self.size

        def rows_of(values: Sequence[Value | None]) -> tuple[Rows, list[Value | None]]:
            own = [v if not flag else _row(v) for v, flag in zip(values, flags, strict=True)]
            return Rows(size, {row: v for row, v, flag in zip(own, values, flags)
                               if flag and row is not None and v is not None}), own

        def body(*values: Any) -> Any:
            rows, own = rows_of(values)
            return tuple(rows.batch(expand(node.op, own, node.attrs)))

        def grad(batched: Node, *gs: Value | None) -> list[Value | None]:
            rows, own = rows_of(batched.inputs)
            pulled = [None if g is None else _row(g) for g in gs]
            rows.table.update({r: g for r, g in zip(pulled, gs)
                               if r is not None and g is not None})
            single = Node(node.op, tuple(own), node.attrs, node.types, node.where)
            found = [None if g is None or v is None else fit(g, v.type)
                     for g, v in zip(rule_gradients(single, pulled), own, strict=True)]
            batched_found = iter(rows.batch([g for g in found if g is not None]))
            return [None if g is None else _summed(next(batched_found), flag)
                    for g, flag in zip(found, flags, strict=True)]

        result = apply(replace(node.op, body=body, grad=grad), given, {})
        return tuple(result)


def _summed(gradient: Value, of_rows: bool) -> Value:
    """The gradient of what is the same for all rows is the sum of theirs."""
    return gradient if of_rows else operator_named("sum")(gradient, axis=0)


def _row(value: Value | None) -> Value | None:
    return None if value is None else Value(TensorType(value.type.shape[1:], value.dtype))


def batched_graph(graph: Graph, flags: Sequence[bool], size: Index,
                  wanted: Sequence[bool] | None = None) -> Graph:
    """A graph for all rows of the inputs that are flagged, and of the results that are wanted so.

    The other results may not depend on the rows.
    """
    fresh = [Value(TensorType((size, *v.type.shape), v.dtype)) if flag else v
             for v, flag in zip(graph.inputs, flags, strict=True)]
    rows = Rows(size, {v: b for v, b, flag in zip(graph.inputs, fresh, flags) if flag})
    chosen = [True for _ in graph.outputs] if wanted is None else list(wanted)
    with trace_scope():
        found = iter(rows.batch([v for v, w in zip(graph.outputs, chosen, strict=True) if w]))
        return Graph(graph.name, tuple(fresh), tuple(
            next(found) if w else v for v, w in zip(graph.outputs, chosen)))


def dependent(graph: Graph, flags: Sequence[bool]) -> list[bool]:
    """Which results of a graph depend on the inputs that are flagged."""
    reached = between(graph.outputs, [v for v, f in zip(graph.inputs, flags, strict=True) if f])[1]
    return [v in reached for v in graph.outputs]


# ---------------------------------------------------------------- the function
def vmap(function: Function, in_axes: Any = 0, out_axes: Any = 0) -> Function:
    """The function that does for all rows of a batch what `function` does for one, at once.

    `in_axes` says which axis of each argument counts the rows: a number for all, or one for each
    argument, or a nest like the argument's; None for what all rows share. `out_axes` says where
    that axis stands in the results. What has no faster way is done row by row.

    >>> import numpy as np, terrazzo as tz
    >>> tz.vmap(tz.vecdot, in_axes=(0, None))(np.eye(2), np.array([3.0, 4.0]))
    array([3., 4.])
    """

    def traced(*args: Any, **kwargs: Any) -> Any:
        name = function_name(function)
        given: list[Any] = []
        structure = flatten((args, kwargs), given)
        axes = [*_spread_axes(in_axes, args, name, "in_axes"), *(0 for _ in leaves(kwargs))]
        with trace_scope():
            values = [None if axis is None else as_value(leaf)
                      for leaf, axis in zip(given, axes, strict=True)]
            moved = [None if v is None else _to_front(v, axis, name)
                     for v, axis in zip(values, axes)]
            size = _batch_size([v for v in moved if v is not None], name)
            rows: list[Any] = [leaf if v is None else _row(v) for leaf, v in zip(given, moved)]
            own_args, own_kwargs = pack(structure, rows)
            result = function(*own_args, **own_kwargs)
            results = [as_value(leaf) for leaf in leaves(result)]
            batch = Rows(size, {r: v for r, v in zip(rows, moved) if v is not None})
            places = _spread_axes(out_axes, result, name, "out_axes")
            batched = iter(batch.batch([r for r, p in zip(results, places) if p is not None]))
            answers = iter([_shared(r, batch, name) if place is None else
                            _from_front(next(batched), place) for r, place in
                            zip(results, places, strict=True)])
        return mapped(result, lambda _: next(answers))

    return dispatch(labelled(traced, "vmap", function), function)


def _spread_axes(axes: Any, tree: Any, name: str, what: str) -> list[Any]:
    """One axis (or None) for each leaf of a nest, from a prefix of that nest."""
    if axes is None or isinstance(axes, int):
        return [axes for _ in leaves(tree)]
    if isinstance(axes, dict) and isinstance(tree, dict) and axes.keys() == tree.keys():
        return [a for k in tree for a in _spread_axes(axes[k], tree[k], name, what)]
    if isinstance(axes, (tuple, list)) and isinstance(tree, (tuple, list)) and len(
            axes) == len(tree):
        return [a for own, part in zip(axes, tree) for a in _spread_axes(own, part, name, what)]
    raise ArgumentError(f"vmap of {name}: {what}={axes!r} does not fit a {type(tree).__name__}"
                        + (f" of {len(tree)}" if isinstance(tree, (tuple, list, dict)) else ""),
                        where=user_location(),
                        hint="give a number or None for all, or one for each, nested alike")


def _to_front(value: Value, axis: int, name: str) -> Value:
    if not value.ndim:
        raise ShapeError(f"vmap of {name} counts rows along axis {axis}, and {value.type} has none",
                         where=user_location(), hint="give None in in_axes for what rows share")
    return moveaxis(value, source=normalize_axis(axis, value.ndim), destination=0) if (
        normalize_axis(axis, value.ndim)) else value


def _from_front(value: Value, axis: int) -> Value:
    place = normalize_axis(axis, value.ndim)
    return moveaxis(value, source=0, destination=place) if place else value


def _batch_size(values: Sequence[Value], name: str) -> Index:
    if not values:
        raise ArgumentError(f"vmap of {name} has nothing to count rows by", where=user_location(),
                            hint="give an axis in in_axes for one argument at least")
    size = values[0].type.shape[0]
    for value in values[1:]:
        if not granted("==", size, value.type.shape[0]):
            raise ShapeError(f"vmap of {name} is given {size} rows of one argument and "
                             f"{value.type.shape[0]} of another "
                             f"({dims_text(value.type.shape)})", where=user_location(),
                             hint="all arguments must have as many, or None in in_axes")
    return size


def _shared(value: Value, rows: Rows, name: str) -> Value:
    if between([value], list(rows.table))[1] >= {value}:
        raise ArgumentError(f"vmap of {name}: a result with None in out_axes depends on the rows",
                            where=user_location(), hint="give its axis a place in out_axes")
    return value
