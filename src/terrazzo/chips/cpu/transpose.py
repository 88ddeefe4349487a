"""Kernels for pointwise programs that read along another axis than they write: tiled transposes.

`y[i, j] = x[j, i] + z[i, j]` in plain loops touches a new cache line for every element of x. Here
the two axes are cut into tiles, a tile of x is transposed in registers into a small buffer (or
straight into the output, when there is nothing else to do), and the rest of the body runs along
contiguous rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from terrazzo.base.scalar import (
    Axis,
    Call,
    Load,
    Scalar,
    children,
    loads,
    rewrite,
    substitute_indices,
)
from terrazzo.base.shapes import num_elements
from terrazzo.chips.cpu.schedule import streams
from terrazzo.chips.spec import ChipSpec
from terrazzo.expr.collapse import collapse
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import (
    Index,
    Var,
    bounds,
    ceildiv,
    coefficient,
    minimum,
    proves_le,
    proves_lt,
    substitute,
)
from terrazzo.loop.ir import Alloc, Buffer, For, Function, Stmt, Store, block
from terrazzo.loop.tile_transpose import transposed_copy

TILE = 64  # rows and columns of a tile: 16 KB of float32, and few enough pages for the TLB
SHORTEST = 2  # an axis of one element has no direction
TASK_ELEMENTS = 1 << 14  # elements that are worth a task of their own


@dataclass(frozen=True, eq=False)
class _Turned:
    """The axis that some loads are contiguous along, and those loads' positions."""

    axis: int
    loads: tuple[tuple[Load, Index, Index], ...]  # each with its address and its row stride


def lower_transpose(program: Program, chip: ChipSpec,
                    constants: frozenset[Tensor] = frozenset()) -> Function | None:
    """The kernel of a pointwise program with a transposed input; None if it has none."""
    if program.kind != "pointwise":
        return None
    name = program.name
    program = collapse(program)
    turned = _turned(program)
    if turned is None:
        return None
    return _Kernel(program, turned, chip).function(name)


def _turned(program: Program) -> _Turned | None:
    """Which loads to transpose: those along the axis that most of them are contiguous along."""
    axes = program.stages[0].axes
    if len(axes) < 2 or any(len(s.axes) != len(axes) for s in program.stages):
        return None
    found: dict[int, list[tuple[Load, Index, Index]]] = {}
    for stage in program.stages:
        assert stage.body is not None
        always = _always_read(stage.body)
        for load in loads(stage.body):
            if not load.source.is_input or any(isinstance(i, Scalar) for i in load.indices):
                continue
            address = load.source.flat(load.indices)
            stride = coefficient(address, stage.axes[-1].var)
            if stride is None or (isinstance(stride, int) and stride < SHORTEST):
                continue
            if id(load) not in always and not _is_inside(load, address):
                continue  # a guarded read past the edge: only its guard knows where it is safe
            for d, axis in enumerate(stage.axes[:-1]):
                if coefficient(address, axis.var) == 1 and _long(axis):
                    found.setdefault(d, []).append((load, address, stride))
    if not found or not _long(axes[-1]):
        return None
    best = max(found, key=lambda d: len(found[d]))
    return _Turned(best, tuple(found[best]))


def _always_read(body: Scalar) -> set[int]:
    """Loads that no condition stands before, by identity: they read what exists."""
    left, seen = [body], set[int]()
    while left:
        node = left.pop()
        if id(node) not in seen:
            seen.add(id(node))
            chosen = isinstance(node, Call) and node.op == "where"
            left += children(node)[:1] if chosen else children(node)
    return seen


def _is_inside(load: Load, address: Index) -> bool:
    return proves_le(0, address) and proves_lt(address, num_elements(load.source.shape))


def _long(axis: Axis) -> bool:
    top = bounds(axis.extent)[1]
    return top is None or top >= SHORTEST


class _Kernel:
    """One kernel in the making."""

    def __init__(self, program: Program, turned: _Turned, chip: ChipSpec):
        self.program, self.turned, self.chip = program, turned, chip
        self.buffers: dict[Tensor, Buffer] = {
            t: Buffer(t.name, t.dtype, num_elements(t.shape), constant=t.is_input)
            for t in (*program.inputs, *program.stages)}

    def function(self, name: str) -> Function:
        program = self.program
        axes = program.stages[0].axes
        across, along = axes[self.turned.axis], axes[-1]
        others = [a for a in axes if a is not across and a is not along]
        # Tiles are counted by one loop, so that all of them can be spread over the cores.
        counts = [*(a.extent for a in others), ceildiv(across.extent, TILE),
                  ceildiv(along.extent, TILE)]
        total = num_elements(counts)
        top = bounds(total)[1]
        task = Var("tile", 0, None if top is None else max(top - 1, 0))
        places = _digits(task, counts)
        first = [p + a.lo for p, a in zip(places, others, strict=False)]
        corner = (places[-2] * TILE, places[-1] * TILE)
        rows, columns = (minimum(TILE, a.extent - at)
                         for a, at in zip((across, along), corner, strict=True))
        start = {d: v for d, v in zip(
            [i for i, a in enumerate(axes) if a is not across and a is not along], first,
            strict=True)}
        start |= {self.turned.axis: corner[0] + across.lo, len(axes) - 1: corner[1] + along.lo}
        body = self.tile(start, rows, columns)
        grain = max(1, TASK_ELEMENTS // (TILE * TILE))
        origin = ", ".join(dict.fromkeys(s.origin for s in program.stages if s.origin))
        params = [self.buffers[t] for t in (*program.inputs, *program.outputs)]
        return Function(name, tuple(params), program.dims,
                        For(task, 0, total, body, "parallel", grain), origin)

    def tile(self, start: Mapping[int, Index], rows: Index, columns: Index) -> Stmt:
        """One tile, whose first element is at `start`."""
        stages = self.program.stages
        lone = stages[0].body if len(stages) == 1 else None
        if isinstance(lone, Load) and lone is self.turned.loads[0][0]:
            (_, address, stride), stage = self.turned.loads[0], stages[0]
            place = stage.flat([start[d] for d in range(len(stage.axes))])
            step = _stride(stage, self.turned.axis)
            assert not isinstance(place, Scalar)
            return transposed_copy(
                self.buffers[stage], place, self.buffers[lone.source],
                substitute(address, _values(stage, start)), rows, columns, step, stride,
                streams(stage, self.chip))
        i, j = Var("row", 0, TILE - 1), Var("column", 0, TILE - 1)
        code: list[Stmt] = []
        local: list[Buffer] = []
        copies: dict[int, Load] = {}
        for stage in stages:
            assert stage.body is not None
            for load, address, stride in self.turned.loads:
                if id(load) in copies or not any(load is x for x in loads(stage.body)):
                    continue
                copy = Buffer(f"{load.source.name}.turned{len(local)}", load.dtype, TILE * TILE)
                local.append(copy)
                copies[id(load)] = copy[i * TILE + j]
                code.append(transposed_copy(
                    copy, 0, self.buffers[load.source],
                    substitute(address, _values(stage, start)), rows, columns, TILE, stride))
        inner = dict(start)
        inner[self.turned.axis] = start[self.turned.axis] + i
        inner[len(stages[0].axes) - 1] = start[len(stages[0].axes) - 1] + j
        stores = []
        for stage in stages:
            if stage not in self.program.outputs:
                self.buffers[stage] = Buffer(stage.name, stage.dtype, TILE * TILE)
                local.append(self.buffers[stage])
            stores.append(Store(self.buffers[stage], self.place(stage, inner, i * TILE + j),
                                self.value(stage, inner, copies, i * TILE + j),
                                streaming=streams(stage, self.chip)))
        code.append(For(i, 0, rows, For(j, 0, columns, block(*stores), "vector")))
        stmt = block(*code)
        for buffer in reversed(local):
            stmt = Alloc(buffer, stmt)
        return stmt

    def place(self, stage: Tensor, at: Mapping[int, Index], in_tile: Index) -> Index:
        if stage not in self.program.outputs:
            return in_tile
        place = stage.flat([at[d] for d in range(len(stage.axes))])
        assert not isinstance(place, Scalar)
        return place

    def value(self, stage: Tensor, at: Mapping[int, Index], copies: Mapping[int, Load],
              in_tile: Index) -> Scalar:
        """A stage's body at one element, reading buffers."""
        assert stage.body is not None
        values = _values(stage, at)
        done: dict[int, Scalar] = {}

        def visit(node: Scalar) -> Scalar | None:
            return copies.get(id(node))

        def read(node: Scalar) -> Scalar | None:
            if not isinstance(node, Load) or not isinstance(node.source, Tensor):
                return None
            if id(node) not in done:
                source = node.source
                inside = not source.is_input and source not in self.program.outputs
                done[id(node)] = self.buffers[source][
                    in_tile if inside else source.flat(node.indices)]
            return done[id(node)]

        return rewrite(substitute_indices(rewrite(stage.body, visit), values), read)


def _values(stage: Tensor, at: Mapping[int, Index]) -> dict[Var, Index]:
    return {axis.var: at[d] for d, axis in enumerate(stage.axes)}


def _stride(tensor: Tensor, axis: int) -> Index:
    stride: Index = 1
    for n in tensor.shape[axis + 1:]:
        stride = stride * n
    return stride


def _digits(number: Var, counts: Sequence[Index]) -> list[Index]:
    """The places of a number in a mixed-radix system, most significant first."""
    digits: list[Index] = []
    rest: Index = number
    for count in reversed(counts[1:]):
        digits.append(rest % count)
        rest = rest // count
    return [rest, *reversed(digits)]
