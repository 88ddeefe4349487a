"""The kernels of groups: from a program to Loop IR, by way of the chip."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from terrazzo.base.shapes import num_elements
from terrazzo.chips.chip import Chip
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.structure import structure
from terrazzo.expr.work import work
from terrazzo.graph.fusion import Group
from terrazzo.graph.ir import Node, Value
from terrazzo.graph.passes.cse import frozen
from terrazzo.index import Var, free_vars
from terrazzo.loop.ir import Buffer, For, Function, Store
from terrazzo.loop.simplify import simplify

SCHEDULED = ("pointwise", "rows", "contraction")  # kinds of programs that have a schedule


def group_key(group: Group, constants: frozenset[Tensor]) -> Hashable:
    """Equal for groups that one kernel serves; valid while their nodes are alive."""
    program = group.program
    return (structure(program), tuple(t in constants for t in program.inputs), tuple(
        (k, _node_key(v) if isinstance(v, Node) else frozen(v))
        for k, v in sorted(program.attrs.items())))


def _node_key(node: Node) -> Hashable:
    attrs = tuple((k, frozen(v)) for k, v in sorted(node.attrs.items()))
    return node.op, attrs, node.types, tuple(v is None for v in node.inputs)


def lower_group(group: Group, chip: Chip, constants: frozenset[Tensor] = frozenset(),
                revisits: Sequence[bool] = ()) -> Function:
    """The Loop IR of one group, which may ask for its constants in another layout."""
    program = group.program
    function = simplify(chip.adapt(_opaque(program)) if program.kind == "opaque" else
                        chip.lower(program, constants, revisits))
    flops, size = work(program)
    return replace(function, flops=flops, bytes=size, program=program)


def _opaque(program: Program) -> Function:
    node: Node = program.attrs["node"]
    assert node.op.loops is not None
    by_value = iter(program.inputs)
    inputs = [None if v is None else next(by_value) for v in node.inputs]
    out = node.types if len(node.types) > 1 else node.types[0]
    build = node.op.loops(*inputs, out=out, **node.attrs)
    buffers = [Buffer(t.name, t.dtype, num_elements(t.shape))
               for t in (*program.inputs, *program.outputs)]
    count = len(program.inputs)
    body = build(buffers[:count], buffers[count:])
    return Function(program.name, tuple(buffers), program.dims, body, node.op.name)


def copy_function(name: str, value: Value) -> Function:
    """A kernel that copies a value."""
    size = num_elements(value.shape)
    x, y = Buffer("x", value.dtype, size), Buffer("y", value.dtype, size)
    i = Var("i", 0, max(size - 1, 0) if isinstance(size, int) else None)
    dims = tuple(sorted({v for n in value.shape for v in free_vars(n)}, key=lambda v: v.name))
    return Function(name, (x, y), dims, For(i, 0, size, Store(y, i, x[i]), "vector"), "copy",
                    bytes=2 * size * value.dtype.itemsize)
