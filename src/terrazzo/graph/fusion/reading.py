"""Questions about what an expression reads, and how: by strides, in place, turned around."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.base.scalar import Load, Reduce, Scalar, loads, walk
from terrazzo.base.shapes import num_elements
from terrazzo.expr.ir import Tensor
from terrazzo.graph.ir import Graph, Node, Value
from terrazzo.index import Index, coefficient, free_vars, substitute


def has_reduce(tensor: Tensor) -> bool:
    """Whether a stage reduces over anything."""
    return tensor.body is not None and reduces(tensor.body)


def reduces(body: Scalar) -> bool:
    """Whether an element is, or is made of, a reduction."""
    return any(isinstance(n, Reduce) for n in walk(body))


def contracts(tensor: Tensor) -> bool:
    """Whether a stage is a product or a convolution, which has a kernel of its own."""
    return tensor.body is not None and any(
        isinstance(n, Reduce) and n.contraction is not None for n in walk(tensor.body))


def row_prefix(shape: Sequence[Index]) -> tuple[Index, ...]:
    """The rows of a reduction's result: its shape up to the last axis of more than one element."""
    end = len(shape)
    while end and isinstance(shape[end - 1], int) and shape[end - 1] == 1:
        end -= 1
    return tuple(shape[:end])


def is_view(body: Scalar) -> bool:
    """Whether an element is just an element of another tensor."""
    return isinstance(body, Load) and not any(isinstance(i, Scalar) for i in body.indices)


def strided_view(tensor: Tensor, body: Scalar) -> Tensor | None:
    """A tensor that only picks elements of one in memory, by strides, the last ones neighbours."""
    if not is_view(body):
        return None
    assert isinstance(body, Load)
    address = body.source.flat(body.indices)
    strides = [coefficient(address, a.var) for a in tensor.axes]
    if any(s is None for s in strides) or not strides or strides[-1] != 1:
        return None
    offset = substitute(address, {a.var: 0 for a in tensor.axes})
    return Tensor(tensor.name, tensor.shape, tensor.dtype, offset=offset,
                  strides=tuple(s for s in strides if s is not None))


def keeps_axes(tensor: Tensor, body: Scalar) -> bool:
    """Whether a view reads along each axis of what lies in memory by at most one axis of its own.

    Windows of convolutions move along axes; a view that cuts them in pieces is stored first.
    """
    assert isinstance(body, Load)
    own = {a.var for a in tensor.axes}
    moved = [free_vars(i) & own for i in body.indices if not isinstance(i, Scalar)]
    return all(len(vars) <= 1 for vars in moved) and (
        sum(map(len, moved)) == len(set().union(*moved))) and all(
        coefficient(i, var) is not None for i, vars in zip(body.indices, moved)
        if not isinstance(i, Scalar) for var in vars)


def takes_strides(graph: Graph, value: Value) -> bool:
    """Whether all that reads an input computes addresses: whole kernels and copies do not."""
    return all(value is not v for v in graph.outputs) and all(
        node.op.expr is not None and node.op.kind in ("pointwise", "reduce")
        for node in graph.nodes if any(value is v for v in node.inputs))


def grows(value: Value, consumer: Node) -> bool:
    """Whether the consumer evaluates each element several times (broadcasting)."""
    if consumer.op.kind == "reduce" or consumer.op.name == "pairs":
        return False  # of a pair, each half is evaluated once
    mine, theirs = num_elements(value.shape), num_elements(consumer.types[0].shape)
    if isinstance(mine, int) and isinstance(theirs, int):
        return theirs > mine
    return value.shape != consumer.types[0].shape


def moves(node: Node) -> bool:
    """Whether an operator of one result reads elements of its shape from other places."""
    assert node.op.expr is not None
    given = [None if v is None else Tensor("x", v.shape, v.dtype) for v in node.inputs]
    made = node.op.expr(*given, out=node.types[0], **node.attrs)
    return any(load.source.shape == made.shape and any(
        index is not a.var and a.extent != 1 for index, a in zip(load.indices, made.axes))
        for load in loads(made.body))


def turns(node: Node) -> bool:
    """Whether a node transposes: moving elements has code of its own, which computes nothing."""
    if node.op.name != "permute_dims" or node.inputs[0] is None:
        return False
    last = node.attrs["axes"][-1] % node.inputs[0].ndim
    return last != node.inputs[0].ndim - 1 and num_elements(node.types[0].shape) != (
        node.inputs[0].shape[last])


def keeps_channels_apart(node: Node) -> bool:
    """Whether a node is a depthwise convolution: it reads channels as neighbours, many times."""
    x, *rest = node.inputs
    return node.op.name == "convolve" and x is not None and rest[0] is not None and (
        1 < node.attrs["groups"] == x.shape[-1] == rest[0].shape[-1])


def taken_by_rows(value: Value, consumers: Sequence[Node]) -> bool:
    """Whether rows of a value are taken so often that they should lie in one piece.

    That is where at least as much is taken as there is; of unknown sizes, where several take.
    """
    takes = [c for c in consumers if c.op.name == "take_at" and c.inputs[0] is value
             and value.ndim - 1 not in c.attrs["axes"]]
    held = num_elements(value.shape)
    taken = [num_elements(c.types[0].shape) for c in takes]
    known = [n for n in taken if isinstance(n, int)]
    if isinstance(held, int) and len(known) == len(taken):
        return bool(takes) and sum(known) >= held
    return len(takes) > 1
