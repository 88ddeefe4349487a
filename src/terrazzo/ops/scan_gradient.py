"""The gradient of scan: a scan from the other end.

It carries the gradient of the state, and those of what the body mentions, which add up. States and
what else is dear to compute again (the results of products) are kept by the scan before it, one a
step. Where a gradient is a product in every step, as that of a weight is, its factors are kept
instead, and one long product of them comes after the scan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.graph.applying import apply
from terrazzo.graph.ir import Graph, Node, Value, operator_named
from terrazzo.graph.rebuild import computed_from
from terrazzo.graph.scopes import trace_scope
from terrazzo.ops.control import scan

# Linear in their only tensor: what they do to each part of a sum may be done to the sum.
_MOVEMENT = frozenset({"permute_dims", "reshape", "transpose", "swapaxes", "matrix_transpose",
                       "moveaxis", "squeeze", "expand_dims"})


def scan_gradient(node: Node, gs: Sequence[Value | None]) -> list[Value | None]:
    """The gradients of a scan's operands, given those of its results."""
    from terrazzo.graph.autodiff import differentiated_inside, vjp_graph
    from terrazzo.graph.residuals import worth_keeping

    body, carries, sequences = (node.attrs[k] for k in ("body", "carries", "sequences"))
    body = differentiated_inside(body)
    operands = [v for v in node.inputs if v is not None]
    pull = vjp_graph(body)
    cotangents = pull.inputs[len(body.inputs):]
    answered = body.outputs[carries:]
    kept = worth_keeping(body, pull, stored=answered)
    own = {v: Value(v.type, name=v.name) for v in (*body.inputs, *kept, *cotangents)}
    pulled = computed_from(pull.outputs, own)
    used = {v for n in Graph("", (), pulled).nodes for v in n.inputs} | set(pulled)
    kept = [v for v in (*body.inputs[:carries], *kept) if own[v] in used]
    outputs = (*body.outputs, *(v for v in kept if v not in set(answered)))
    stacks = apply(scan, operands, {**node.attrs, "body": Graph(body.name, body.inputs, outputs)})
    place = {v: stack for v, stack in zip(outputs[carries:], stacks[carries:], strict=True)}
    stacked = [place[v] for v in kept]

    given = body.inputs
    states, rows, rest = given[:carries], given[carries:carries + sequences], given[
        carries + sequences:]
    by_carry, by_row, by_rest = ([v for v in part if v.dtype.is_float]
                                 for part in (states, rows, rest))
    d_carry, dy = cotangents[:len(by_carry)], cotangents[len(by_carry):]
    d_of = dict(zip((*by_carry, *by_row, *by_rest), pulled, strict=True))
    # What the steps of the backward scan read, row by row.
    table = {own[v]: s for v, s in zip(kept, stacked, strict=True)}
    table |= {own[v]: x for v, x in zip(rows, operands[carries:]) if own[v] in used}
    table |= {own[c]: g for c, g in zip(dy, (g for g in gs[carries:] if g is not None))}
    later = {v: product for v in by_rest if (product := _as_product(d_of[v], set(table)))}
    added = [v for v in by_rest if v not in later]
    by_row_too = {d_of[v] for v in by_row}
    factors = dict.fromkeys(f for product in later.values() for f in product.factors
                            if f not in table and f not in by_row_too)
    totals = [Value(v.type) for v in added]
    with trace_scope():
        sums = [operator_named("add")(t, d_of[v]) for t, v in zip(totals, added, strict=True)]
        zeros = [operator_named("full")(shape=v.shape, value=0, dtype=v.dtype) for v in added]
    back = Graph(pull.name, (*(own[c] for c in d_carry), *totals, *table, *(own[v] for v in rest)),
                 (*(d_of[v] for v in by_carry), *sums, *(d_of[v] for v in by_row), *factors))
    first = [*(g for g in gs[:carries] if g is not None), *zeros]
    found = iter(apply(scan, [*first, *table.values(), *operands[carries + sequences:]], {
        **node.attrs, "body": back, "carries": len(first), "sequences": len(table),
        "reverse": not node.attrs["reverse"]}))
    answer = {v: next(found) for v in (*by_carry, *added, *by_row)}
    table |= {f: next(found) for f in factors} | {d_of[v]: answer[v] for v in by_row}
    answer |= {v: product.over_all(table) for v, product in later.items()}
    return [answer.get(v) for v in given]


@dataclass(frozen=True)
class _Product:
    """A gradient that is a matrix product in every step, but for where its elements lie."""

    gradient: Value
    node: Node  # the product

    @property
    def factors(self) -> tuple[Value, Value]:
        x, y = self.node.inputs
        assert x is not None and y is not None
        return x, y

    def over_all(self, stacked: dict[Value, Value]) -> Value:
        """The sum over all steps: one product, as deep as all of theirs together."""
        x, y = (stacked[f] for f in self.factors)
        with trace_scope():
            product = self.node.op(_deep(x, self.node.attrs["transpose_x"]),
                                   _deep(y, not self.node.attrs["transpose_y"]), **self.node.attrs)
        return computed_from([self.gradient], {self.node.outputs[0]: product})[0]


def _deep(stacked: Value, along_rows: bool) -> Value:
    """Matrices one after the other: in rows, or in columns."""
    steps, rows, columns = stacked.shape
    if along_rows:
        return operator_named("reshape")(stacked, shape=(steps * rows, columns))
    side_by_side = operator_named("permute_dims")(stacked, axes=(1, 0, 2))
    return operator_named("reshape")(side_by_side, shape=(rows, steps * columns))


def _as_product(gradient: Value, known: set[Value]) -> _Product | None:
    """The product that a gradient is, if its factors take less room than its sum takes time."""
    from terrazzo.graph.residuals import likely_count

    value: Any = gradient
    while value.node is not None and value.node.op.name in _MOVEMENT:
        value = value.node.inputs[0]
    node = value.node
    if node is None or node.op.name != "batch_matmul" or any(
            v is None or v.ndim != 2 for v in node.inputs):
        return None
    room = sum(likely_count(v.shape) for v in node.inputs if v not in known)
    return _Product(gradient, node) if room <= 2 * likely_count(value.shape) else None
