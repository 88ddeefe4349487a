"""How operators compute all rows of a batch at once: one rule an operator, most of them shared.

A rule gets the rows and the node of one row, and answers with what the node's outputs are for all
rows. None: this case has no rule. Composite operators without a rule are opened, so the table
holds primitive operators, and composites that have kernels or gradients of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.base.shapes import broadcast_shapes, normalize_axes, normalize_axis
from terrazzo.graph.applying import apply
from terrazzo.graph.batching import Rows, batched_graph, dependent
from terrazzo.graph.ir import OPERATORS, Node, Value
from terrazzo.ops.creation import arange
from terrazzo.ops.shape import permute_dims, reshape

Rule = Callable[[Rows, Node], Any]


def _present(node: Node) -> list[Value]:
    return [v for v in node.inputs if v is not None]


def _all(rows: Rows, node: Node) -> list[Value | None]:
    return [None if v is None else rows.of(v) for v in node.inputs]


def _later(axis: Any, rank: int) -> Any:
    """An axis (or several, or all) of a row, among those of the batch."""
    if axis is None:
        return tuple(range(1, rank + 1))
    moved = tuple(a + 1 for a in normalize_axes(axis, rank))
    return moved if isinstance(axis, (tuple, list)) else moved[0]


# ---------------------------------------------------------------- shared rules
def _elementwise(rows: Rows, node: Node) -> Any:
    """Broadcast from the last axis on: rows of fewer axes get some of size 1."""
    rank = max(len(v.type.shape) for v in _present(node))
    return apply(node.op, [None if v is None else rows.aligned(v, rank) for v in node.inputs],
                 node.attrs)


def _along_axis(rows: Rows, node: Node) -> Any:
    """Along one axis or several, which are one further back; all inputs have the same axes."""
    rank = len(_present(node)[0].type.shape)
    return apply(node.op, _all(rows, node), {
        **node.attrs, "axis": _later(node.attrs["axis"], rank)})


def _last_axes(rows: Rows, node: Node) -> Any:
    """Works on the last axes of its first input and takes any before them; the others are small."""
    if any(rows.has(v) for v in node.inputs[1:]):
        return None
    attrs = dict(node.attrs)
    if "axis" in attrs:
        attrs["axis"] = _later(attrs["axis"], len(_present(node)[0].type.shape))
    return apply(node.op, [rows.of(_present(node)[0]), *node.inputs[1:]], attrs)


def _more_of_axis_0(rows: Rows, node: Node) -> Any:
    """Does the same for each element of axis 0 of its first input: more rows are more of these."""
    if any(rows.has(v) for v in node.inputs[1:]):
        return None
    first = _present(node)[0]
    wide = rows.of(first)
    flat = reshape(wide, shape=(rows.size * first.type.shape[0], *first.type.shape[1:]))
    found = apply(node.op, [flat, *node.inputs[1:]], node.attrs)
    return [reshape(v, shape=(rows.size, *t.shape)) for v, t in zip(
        found if isinstance(found, tuple) else (found,), node.types, strict=True)]


# ---------------------------------------------------------------- shapes
def _reshape(rows: Rows, node: Node) -> Any:
    return reshape(rows.of(_present(node)[0]), shape=(rows.size, *node.types[0].shape))


def _permute_dims(rows: Rows, node: Node) -> Any:
    rank = len(node.types[0].shape)
    return permute_dims(rows.of(_present(node)[0]), axes=(
        0, *(normalize_axis(a, rank) + 1 for a in node.attrs["axes"])))


def _broadcast_to(rows: Rows, node: Node) -> Any:
    shape = node.types[0].shape
    return apply(node.op, [rows.aligned(_present(node)[0], len(shape))],
                 {"shape": (rows.size, *shape)})


def _slice(rows: Rows, node: Node) -> Any:
    a = node.attrs
    return apply(node.op, _all(rows, node), {
        "starts": (0, *a["starts"]), "stops": (rows.size, *a["stops"]), "steps": (1, *a["steps"])})


def _place(rows: Rows, node: Node) -> Any:
    a = node.attrs
    return apply(node.op, _all(rows, node), {
        **a, "shape": (rows.size, *node.types[0].shape), "starts": (0, *a["starts"]),
        "steps": (1, *a["steps"])})


# ---------------------------------------------------------------- indexing
def _counted(rows: Rows, indices: Sequence[Value]) -> tuple[list[Value], int]:
    """Index tensors of all rows, with the number of the row before them; the rank of a row's."""
    rank = len(broadcast_shapes(*(i.type.shape for i in indices)))
    number = reshape(arange(start=rows.size), shape=(rows.size, *(1 for _ in range(rank))))
    return [number, *(rows.aligned(i, rank) for i in indices)], rank


def _take_at(rows: Rows, node: Node) -> Any:
    x, *indices = _present(node)
    axes = tuple(node.attrs["axes"])
    if not any(map(rows.has, indices)):
        return apply(node.op, [rows.of(x), *indices], {"axes": tuple(a + 1 for a in axes)})
    first = axes[0]
    if not rows.has(x):
        rank = len(broadcast_shapes(*(i.type.shape for i in indices)))
        found = apply(node.op, [x, *(rows.aligned(i, rank) for i in indices)], node.attrs)
        rest = [d for d in range(len(found.type.shape)) if d != first]
        return permute_dims(found, axes=(first, *rest)) if first else found
    places, rank = _counted(rows, indices)
    found = apply(node.op, [rows.of(x), *places], {"axes": (0, *(a + 1 for a in axes))})
    # What the indices gave stands behind the number of the row, before the axes left of theirs.
    before = range(1 + rank, 1 + rank + first)
    after = range(1 + rank + first, len(found.type.shape))
    return permute_dims(found, axes=(0, *before, *range(1, 1 + rank), *after)) if first else found


def _scatter_at(rows: Rows, node: Node) -> Any:
    x, updates, *indices = _present(node)
    axes = tuple(node.attrs["axes"])
    if not any(map(rows.has, indices)):
        return apply(node.op, [rows.of(x), rows.of(updates), *indices],
                     {**node.attrs, "axes": tuple(a + 1 for a in axes)})
    places, rank = _counted(rows, indices)
    first, wide = axes[0], rows.of(updates)
    before, at = range(1, 1 + first), range(1 + first, 1 + first + rank)
    after = range(1 + first + rank, len(wide.type.shape))
    if first:
        wide = permute_dims(wide, axes=(0, *at, *before, *after))
    return apply(node.op, [rows.of(x), wide, *places],
                 {**node.attrs, "axes": (0, *(a + 1 for a in axes))})


# ---------------------------------------------------------------- kernels of their own
def _attention(rows: Rows, node: Node) -> Any:
    """Queries, keys and values of all rows as more of the first axis; a mask broadcasts."""
    q = _present(node)[0]
    if any(len(v.type.shape) != 4 for v in node.inputs[:3] if v is not None):
        return None
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    if mask is not None and (rows.has(mask) or (
            len(mask.type.shape) == 4 and mask.type.shape[0] != 1)):
        return None
    if any(v is not None and v.type.shape[0] != q.type.shape[0] for v in node.inputs[:3]):
        return None
    flat = [reshape(rows.of(v), shape=(rows.size * v.type.shape[0], *v.type.shape[1:]))
            for v in node.inputs[:3] if v is not None]
    found = apply(node.op, [*flat, *node.inputs[3:]], node.attrs)
    return reshape(found, shape=(rows.size, *node.types[0].shape))


# ---------------------------------------------------------------- control flow
def _cond(rows: Rows, node: Node) -> Any:
    pred, *operands = _present(node)
    if rows.has(pred):
        return None  # of each row only one branch is to run
    flags = [rows.has(v) for v in operands]
    return apply(node.op, [pred, *(rows.table.get(v, v) for v in operands)], {
        k: batched_graph(node.attrs[k], flags, rows.size) for k in ("then_graph", "else_graph")})


def _carried(flags: list[bool], after: Callable[[list[bool]], list[bool]]) -> list[bool]:
    """What a loop carries that differs from row to row, before some turn or another."""
    while True:
        more = [a or b for a, b in zip(flags, after(flags))]
        if more == flags:
            return flags
        flags = more


def _settled(rows: Rows, values: Sequence[Value], flags: Sequence[bool]) -> list[Value]:
    """Values of which some are for all rows already."""
    return [v if flag else rows.of(v) for v, flag in zip(values, flags, strict=True)]


def _while_loop(rows: Rows, node: Node) -> Any:
    operands, count = _present(node), node.attrs["carries"]
    test, body = node.attrs["cond_graph"], node.attrs["body_graph"]
    rest = [rows.has(v) for v in operands[count:]]
    carried = _carried([rows.has(v) for v in operands[:count]],
                       lambda flags: dependent(body, [*flags, *rest]))
    flags = [*carried, *rest]
    if dependent(test, flags)[0]:
        return None  # each row ends when it has to
    given = [rows.of(v) if flag else v for v, flag in zip(operands, flags)]
    found = apply(node.op, given, {
        **node.attrs, "cond_graph": batched_graph(test, flags, rows.size, [False]),
        "body_graph": batched_graph(body, flags, rows.size, carried)})
    return _settled(rows, found, carried)


def _scan(rows: Rows, node: Node) -> Any:
    """A scan that carries all rows; what it walks over has the rows as its second axis."""
    operands, body, count = _present(node), node.attrs["body"], node.attrs["carries"]
    rest = [rows.has(v) for v in operands[count:]]
    carried = _carried([rows.has(v) for v in operands[:count]],
                       lambda flags: dependent(body, [*flags, *rest])[:count])
    flags = [*carried, *rest]
    wanted = [*carried, *dependent(body, flags)[count:]]
    given = [rows.of(v) if flag else v for v, flag in zip(operands, flags)]
    sequences = range(count, count + node.attrs["sequences"])
    given = [_swapped(v) if flags[i] and i in sequences else v for i, v in enumerate(given)]
    found = apply(node.op, given, {
        **node.attrs, "body": batched_graph(body, flags, rows.size, wanted)})
    return _settled(rows, [_swapped(v) if wanted[i] and i >= count else v
                           for i, v in enumerate(found)], wanted)


def _swapped(value: Value) -> Value:
    return permute_dims(value, axes=(1, 0, *range(2, len(value.type.shape))))


# ---------------------------------------------------------------- the table
RULES: dict[str, Rule] = {
    **{op.name: _elementwise for op in OPERATORS.values()
       if op.family == "elementwise" and op.body is None},
    **dict.fromkeys(("relu", "hardtanh", "clip", "softplus", "logaddexp", "xlogy",
                     "binary_entropy", "stop_gradient", "batch_matmul", "float8_matmul"),
                    _elementwise),
    **dict.fromkeys(("sum", "prod", "max", "min", "any", "all", "logsumexp", "concat", "gather",
                     "scatter", "sort_pairs", "top_few", "cumulative", "linear_recurrence",
                     "softmax", "safe_softmax", "log_softmax"), _along_axis),
    **dict.fromkeys(("layer_norm", "rms_norm", "det"), _last_axes),
    **dict.fromkeys(("convolve", "window_max", "window_sum", "integer_convolve", "tree_ensemble"),
                    _more_of_axis_0),
    "reshape": _reshape, "permute_dims": _permute_dims, "broadcast_to": _broadcast_to,
    "slice": _slice, "place": _place, "take_at": _take_at, "scatter_at": _scatter_at,
    "scaled_dot_product_attention": _attention,
    "cond": _cond, "while_loop": _while_loop, "scan": _scan,
}
