"""Default schedules for CPUs: how a fused group runs when nobody says otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from terrazzo.base.scalar import (
    Axis,
    Call,
    FromIndex,
    Load,
    Reduce,
    Scalar,
    call,
    cost,
    loads,
    rewrite,
    substitute_indices,
    walk,
)
from terrazzo.base.scalar import reduce as reduce_scalar
from terrazzo.base.shapes import num_elements
from terrazzo.chips.spec import ChipSpec
from terrazzo.dtypes import DType, int64
from terrazzo.expr.collapse import collapse
from terrazzo.expr.direction import reductions, unit_stride_axis
from terrazzo.expr.ir import Program, Tensor, fresh_axis
from terrazzo.expr.quotients import multiply_by_reciprocals
from terrazzo.expr.schedule import Schedule, Streaming
from terrazzo.index import Index, Var, bounds, ceildiv, coefficient, free_vars, minimum
from terrazzo.loop import ir as loop_ir
from terrazzo.loop.ir import Function, Stmt, Store

CHUNK = 8192  # elements of one piece of a flat loop: big enough to amortise the loop around it
TASK_WORK = 8192  # additions that are worth a task of their own: about 1 us
COLUMN_TILE_VECTORS = 4  # vectors of columns whose sums stay in registers
FRESH_MEMORY = 32 << 20  # bytes: glibc maps larger blocks anew for every allocation
SHORT_ROW, DEAR_FINISH = 256, 8  # elements of a row; additions that its sum's use is worth
FINISHED_TOGETHER = 64  # rows
PARTIALS = 16  # pieces of one long reduction: a few for every core of a small machine
# Float sums of more than this are sums of partial sums, so that errors do not add up: elements of
# a row (which has vectors of accumulators), rows of a column (which has one accumulator), partial
# sums of a column. With these, errors are those of torch's cascade of sums: of numbers around 0.5,
# 1.0 times torch's in 2000 rows (twice with 64 partial sums), and 2^24 times 0.1 is as exact.
SUM_BLOCK, SUM_ROWS, SUM_PARTS = 1 << 12, 32, 16


def schedule(program: Program, chip: ChipSpec, revisits: Sequence[bool] = ()
             ) -> tuple[Program, Schedule]:
    """The program in the form it will run in, and how it runs.

    What lies where an input was just read is not stored past the caches, which hold it already.
    """
    program, steps = _scheduled(program, chip)
    held = {t.name for t, again in zip(program.outputs, revisits) if again}
    return program, Schedule(tuple(s for s in steps.steps if not (
        isinstance(s, Streaming) and s.stage in held))) if held else steps


def _scheduled(program: Program, chip: ChipSpec) -> tuple[Program, Schedule]:
    if chip.has("fma") or chip.has("neon"):
        program = multiply_by_reciprocals(program)
    if program.kind == "pointwise":
        program = collapse(program)
        return program, _streaming(program, _pointwise(program), chip)
    if program.kind == "contraction":
        return program, _contraction(program)
    program = collapse(program)
    if len(program.stages) == 1:
        return _lone_reduction(program, chip)
    return program, _streaming(program, _rows(program), chip)


def _extent(axis: Axis, default: int = 1024) -> int:
    top = bounds(axis.extent)[1]
    return default if top is None else max(top, 1)


def _elements(shape: Sequence[Index]) -> int:
    total = num_elements(shape)
    top = bounds(total)[1]
    return 1 << 20 if top is None else max(top, 1)


def _grain(work_per_iteration: int) -> int:
    return max(1, TASK_WORK // max(work_per_iteration, 1))


def streams(stage: Tensor, chip: ChipSpec) -> bool:
    """Whether an output is so large that storing past the caches is faster.

    A store through the caches reads the line first. Measured on a Xeon (Ice Lake) with copies of
    copies: past the caches is slower up to 2 MB (1.6 times the second-level cache), and 1.35 times
    as fast from 8 MB on, although the next copy then reads from memory. The largest outputs are
    fresh memory at every call, which the kernel has just cleared by way of the caches.
    """
    return _is_large(num_elements(stage.shape), stage.dtype, chip)


def _is_large(size: Index, dtype: DType, chip: ChipSpec) -> bool:
    smallest, limit = streaming_sizes(chip)
    return isinstance(size, int) and smallest <= size * dtype.itemsize < limit


def with_streaming_fills(function: Function, chip: ChipSpec) -> Function:
    """A kernel that fills large results with one number past the caches.

    Of what is written later only some is in what the fill would leave there.
    """
    def visit(stmt: Stmt) -> Stmt | None:
        if isinstance(stmt, Store) and stmt.reduce is None and isinstance(stmt.value, Load) and (
                stmt.value.source.size == 1 and stmt.buffer in function.params
                and _is_large(stmt.buffer.size, stmt.buffer.dtype, chip)):
            return replace(stmt, streaming=True)
        return None

    return replace(function, body=loop_ir.rewrite(function.body, visit))


def with_gathers_through_caches(function: Function) -> Function:
    """A kernel whose gathered rows are stored past the caches by one thread alone.

    Reads at random keep one thread busy while its stores leave; two wait for memory, and are twice
    as fast (4 MB, Zen 4) where the last cache takes what they store.
    """
    def visit(stmt: Stmt) -> Stmt | None:
        if isinstance(stmt, Store) and stmt.streaming is True and any(
                isinstance(i, Scalar) for load in loads(stmt.value) for i in load.indices):
            return replace(stmt, streaming=call("le", FromIndex(int64, loop_ir.THREADS), 1))
        return None

    return replace(function, body=loop_ir.rewrite(function.body, visit))


def streaming_sizes(chip: ChipSpec) -> tuple[int, int]:
    """From how many bytes on, and below how many, outputs are stored past the caches."""
    return max(3 * chip.l2_bytes, chip.l3_bytes // 16, 1), FRESH_MEMORY


def _streaming(program: Program, s: Schedule, chip: ChipSpec) -> Schedule:
    """Large outputs that nothing else in the kernel reads are stored past the caches."""
    read = {load.source for t in program.stages if t.body is not None for load in loads(t.body)}
    for stage in program.outputs:
        if stage not in read and streams(stage, chip) and not _makes_pairs(stage):
            s = s.streaming(stage)
    return s


def _price(stages: Sequence[Tensor]) -> int:
    """Additions for one element of all stages together, memory traffic counted in."""
    return sum(cost(s.body) + 1 + len(loads(s.body)) for s in stages if s.body is not None)


# ---------------------------------------------------------------- pointwise
def _pointwise(program: Program) -> Schedule:
    """One flat loop in chunks, or rows in parallel with the last axis in vectors."""
    root, *others = reversed(program.stages)
    axes = [a.var.name for a in root.axes]
    s = Schedule()
    if not axes:
        return s
    price = _price(program.stages)
    if not others and _makes_pairs(root):
        return _pairs(root, price)
    inner = _extent(root.axes[-1])
    outer = [_extent(a) for a in root.axes[:-1]]
    task = axes[0]
    if len(axes) == 1 or (inner > CHUNK and _product(outer) < 64):
        s = s.split(root, axes[-1], CHUNK)
        task, inner = f"{axes[-1]}.o", CHUNK
        vector = f"{axes[-1]}.i"
        if len(axes) > 1:
            s = s.fuse(root, *axes[:-1], task, fused="task")
            task = "task"
    else:
        vector = axes[-1]
        if len(axes) > 2:
            s = s.fuse(root, *axes[:-1], fused="task")
            task = "task"
    s = s.parallel(root, task, _grain(inner * price)).vectorize(root, vector)
    for other in others:
        s = s.compute_at(other, root, task).vectorize(other, other.axes[-1])
    return s


def _makes_pairs(stage: Tensor) -> bool:
    """Whether the two elements along the last axis are computed in different ways."""
    if len(stage.axes) < 2 or stage.axes[-1].extent != 2 or stage.body is None:
        return False
    last = stage.axes[-1].var
    return any(isinstance(n, Call) and n.op == "lt" and isinstance(n.args[0], FromIndex)
               and n.args[0].index is last for n in walk(stage.body))


def _pairs(stage: Tensor, price: int) -> Schedule:
    """Vectors of pairs, both halves of each at once: they share what they are made of."""
    *outer, vector, last = (a.var.name for a in stage.axes)
    s = Schedule()
    if not outer:
        s = s.split(stage, vector, CHUNK // 2)
        return s.parallel(stage, f"{vector}.o", _grain(CHUNK * price)).vectorize(
            stage, f"{vector}.i").unroll(stage, last)
    task = outer[0]
    if len(outer) > 1:
        s, task = s.fuse(stage, *outer, fused="task"), "task"
    inner = 2 * _extent(stage.axes[-2])
    return s.parallel(stage, task, _grain(inner * price)).vectorize(stage, vector).unroll(
        stage, last)


def _product(values: Sequence[int]) -> int:
    total = 1
    for value in values:
        total *= value
    return total


# ---------------------------------------------------------------- rows
def _rows(program: Program) -> Schedule:
    """Rows in parallel; everything that belongs to a row happens while the row is in the cache."""
    root, *others = reversed(program.stages)
    rows = int(program.attrs.get("rows", 0))
    s = Schedule()
    names = [a.var.name for a in root.axes]
    task = ""
    if rows:
        task = names[0]
        if rows > 1:
            s = s.fuse(root, *names[:rows], fused="row")
            task = "row"
        width = max((_elements(t.shape[rows:]) for t in program.stages), default=1)
        width = max([width, *(_extent(a) for t in program.stages for a in _reduced(t))])
        s = s.parallel(root, task, _grain(width * _price(program.stages)))
    for stage in (root, *others):
        vector = _row_vector_axis(stage, rows)
        if stage is not root and rows:
            s = s.compute_at(stage, root, task)
        if vector is not None:
            s = s.vectorize(stage, vector)
    return s


def _reduced(stage: Tensor) -> list[Axis]:
    assert stage.body is not None
    return list(dict.fromkeys(
        a for n in walk(stage.body) if isinstance(n, Reduce) for a in n.axes))


def _row_vector_axis(stage: Tensor, rows: int) -> Axis | None:
    reduced = _reduced(stage)
    if len(stage.axes) > rows:
        return stage.axes[-1]
    return reduced[-1] if reduced else None


# ---------------------------------------------------------------- one reduction
def _lone_reduction(program: Program, chip: ChipSpec) -> tuple[Program, Schedule]:
    (stage,) = program.stages
    reduced = _reduced(stage)
    along = unit_stride_axis(stage, [*stage.axes, *reduced])
    rows = _elements(stage.shape)
    length = _product([_extent(a, 1 << 20) for a in reduced])
    down = along is not None and along in stage.axes
    if len(reductions(stage)) == 1 and not _is_ragged(stage):
        (node,) = reductions(stage)
        folded = _folded_columns(program, stage, node, chip) if down else None
        if folded is not None:
            return folded
        pieces: Index = 1
        first = node.axes[0].extent
        if length * rows > 16 * TASK_WORK and rows < 4 * chip.cores * (64 if down else 1):
            pieces = PARTIALS  # too few results to share out among the cores
        if down and _is_float_sum(node):
            if not isinstance(first, int):
                pieces = ceildiv(first, SUM_ROWS * SUM_ROWS)
            elif length > SUM_ROWS:
                least = PARTIALS if length > 2 * SUM_ROWS else 4
                pieces = max(least, first // max(1, SUM_ROWS * first // length))
        if isinstance(pieces, int) and isinstance(first, int):
            pieces = min(pieces, first)
        if not isinstance(pieces, int) or pieces > 1:
            return _split_reduction(program, stage, node, along, pieces, chip)
    if along is not None and down:
        return program, _columns(stage, along, chip)
    if length <= SHORT_ROW and len(reductions(stage)) == 1 and not _is_ragged(stage) and (
            stage.axes and _extent(stage.axes[-1]) >= 2 * chip.lanes(32)):
        (node,) = reductions(stage)
        finish = _with(stage.body, node, Load(node.dtype, stage, ()))
        if cost(finish) >= DEAR_FINISH:
            return _finished_in_vectors(program, stage, node, along)
    s = Schedule()
    names = [a.var.name for a in stage.axes]
    if names:
        task = names[0]
        if len(names) > 1:
            s = s.fuse(stage, *names, fused="row")
            task = "row"
        s = s.parallel(stage, task, _grain(length * _price([stage])))
    vector = along if along is not None else reduced[-1]
    others = [a for a in reduced if a is not vector]
    return program, _summed_in_blocks(s, stage, others, vector)


def _is_ragged(stage: Tensor) -> bool:
    """Whether what is reduced depends on the element: windows at the border of a tensor."""
    own = {a.var for a in stage.axes}
    return any(not own.isdisjoint(free_vars(bound)) for a in _reduced(stage)
               for bound in (a.lo, a.hi))


def _is_float_sum(node: Reduce) -> bool:
    return node.op == "add" and node.dtype.is_float


def _summed_in_blocks(s: Schedule, stage: Tensor, others: Sequence[Axis], vector: Axis
                      ) -> Schedule:
    """Vectors along an axis; a long float sum adds up blocks, so that its errors do not."""
    name = vector.var.name
    if any(map(_is_float_sum, reductions(stage))) and _extent(vector, 1 << 20) > 2 * SUM_BLOCK:
        s = s.split(stage, vector, SUM_BLOCK)
        return s.reorder(stage, *others, f"{name}.o", f"{name}.i").vectorize(stage, f"{name}.i")
    if others:
        s = s.reorder(stage, *others, vector)
    return s.vectorize(stage, vector)


def _column_tile(stage: Tensor, chip: ChipSpec) -> int:
    return chip.lanes(max(stage.dtype.compute.bits, 32)) * COLUMN_TILE_VECTORS


def _even_tile(tile: int, extent: Index) -> int:
    """A tile of about the size given that leaves no rest, if there is one: rests are slow."""
    if not isinstance(extent, int) or extent % tile == 0:
        return tile
    if extent <= 2 * tile:
        return max(extent, 1)
    lanes = tile // COLUMN_TILE_VECTORS
    vectors = (n for n in (5, 6, 3, 7, 8, 2) if extent % (n * lanes) == 0)
    return next(vectors, 0) * lanes or tile


def _columns(stage: Tensor, along: Axis, chip: ChipSpec) -> Schedule:
    """Sums down columns: a few vectors of columns stay in registers while rows stream by."""
    width = _even_tile(_column_tile(stage, chip), along.extent)
    reduced = _reduced(stage)
    name = along.var.name
    others = [a.var.name for a in stage.axes if a is not along]
    s = Schedule().split(stage, along, width)
    s = s.reorder(stage, *others, f"{name}.o", *reduced, f"{name}.i")
    task = f"{name}.o"
    if others:
        s = s.fuse(stage, *others, task, fused="task")
        task = "task"
    length = _product([_extent(a) for a in reduced])
    return s.parallel(stage, task, _grain(length * width)).vectorize(stage, f"{name}.i")


def _split_reduction(program: Program, stage: Tensor, node: Reduce, along: Axis | None,
                     pieces: Index, chip: ChipSpec) -> tuple[Program, Schedule]:
    """One long reduction as partial results in parallel, then the reduction of those."""
    first, *rest = node.axes
    step = ceildiv(first.extent, pieces)
    part = fresh_axis("part", pieces)
    # By a symbolic end the axis "k" is told from a dimension that a user named "k".
    most = first.hi if isinstance(first.hi, int) else first.hi - 1
    inner = Axis(Var(first.var.name, 0, most), first.lo + part.var * step,
                 minimum(first.lo + (part.var + 1) * step, first.hi))
    partial = Tensor(f"{stage.name}_part", (pieces, *stage.shape), node.dtype,
                     (part, *stage.axes),
                     Reduce(node.dtype, node.op, (inner, *rest),
                            _rename(node.value, first, inner)),
                     origin=stage.origin)
    down = along is not None and along in stage.axes
    between, s = _gathered(partial, node.op, SUM_PARTS)
    again = fresh_axis("piece", (partial, *between)[-1].shape[0])
    total = reduce_scalar(node.op, Load(node.dtype, (partial, *between)[-1], (
        again.var, *(a.var for a in stage.axes))), [again])

    final = replace(stage, body=_with(stage.body, node, total))
    fresh = replace(program, stages=(partial, *between, final), outputs=(final,), attrs={})
    others = [a for a in stage.axes if a is not along]
    if along is None or not down:
        s = s.parallel(partial, part)
        vector = inner if along is None or along is first else along
        before = [a for a in (inner, *rest) if a is not vector]
        s = _summed_in_blocks(s, partial, before, vector)
        return fresh, s.vectorize(final, again)
    columns, tile = along.var.name, _even_tile(_column_tile(stage, chip), along.extent)
    if isinstance(along.extent, int) and along.extent % (2 * tile) == 0 and (
            along.extent >= 8 * tile):
        tile *= 2  # longer pieces of rows come faster from memory: 1.4 times as fast on a Zen 4
    s = s.split(partial, along, tile)
    s = s.reorder(partial, part, *others, f"{columns}.o", inner, *rest, f"{columns}.i")
    s = s.fuse(partial, part, *others, f"{columns}.o", fused="task")
    work = SUM_ROWS * tile
    s = s.parallel(partial, "task", _grain(work)).vectorize(partial, f"{columns}.i")
    return fresh, s.reorder(final, again, *others, along).vectorize(final, along)


def _gathered(partial: Tensor, op: str, most: int) -> tuple[list[Tensor], Schedule]:
    """Stages that reduce the first axis of partial results until at most so many are left."""
    stages: list[Tensor] = []
    s = Schedule()
    source = partial
    while isinstance(count := source.shape[0], int) and count > most:
        pieces = -(-count // SUM_PARTS)
        part = fresh_axis("part", pieces)
        inner = Axis(Var("piece", 0, count - 1), part.var * SUM_PARTS,
                     minimum((part.var + 1) * SUM_PARTS, count))
        body = reduce_scalar(op, Load(source.dtype, source, (
            inner.var, *(a.var for a in source.axes[1:]))), [inner])
        source = Tensor(f"{partial.name}{len(stages) + 1}", (pieces, *source.shape[1:]),
                        source.dtype, (part, *source.axes[1:]), body, origin=partial.origin)
        stages.append(source)
        s = s.reorder(source, part, inner, *source.axes[1:]).vectorize(source, source.axes[-1])
    return stages, s


def _folded_columns(program: Program, stage: Tensor, node: Reduce, chip: ChipSpec
                    ) -> tuple[Program, Schedule] | None:
    """Reductions down a few dense columns: several rows side by side fill whole vectors.

    Rows of 3 columns become rows of 3 x 16, those are reduced, and then the 16 parts of each.
    """
    width = chip.lanes(max(stage.dtype.compute.bits, 32))
    if len(stage.axes) != 1 or len(node.axes) != 1:
        return None
    column, row = stage.axes[0], node.axes[0]
    few, count = column.extent, row.extent
    if not isinstance(few, int) or not isinstance(count, int) or row.lo != 0 or not (
            1 < few < width and count >= 16 * width):
        return None
    wide = fresh_axis("lane", few * width)
    steps = count // width
    pieces = max(steps // SUM_ROWS, 1)
    part, step = fresh_axis("part", pieces), -(-steps // pieces)
    inner = Axis(Var(row.var.name, 0, steps - 1), part.var * step,
                 minimum((part.var + 1) * step, steps))
    place = {row.var: inner.var * width + wide.var // few, column.var: wide.var % few}
    value = substitute_indices(node.value, place)
    for load in loads(value):
        if any(isinstance(i, Scalar) for i in load.indices) or coefficient(
                load.source.flat(load.indices), wide.var) != 1:
            return None
    if any(isinstance(n, FromIndex) for n in walk(value)):
        return None
    partial = Tensor(f"{stage.name}_part", (pieces, few * width), node.dtype, (part, wide),
                     Reduce(node.dtype, node.op, (inner,), value), origin=stage.origin)
    between, s = _gathered(partial, node.op, 1)
    lane = fresh_axis("row", width)
    total = reduce_scalar(node.op, Load(node.dtype, (partial, *between)[-1], (
        0, lane.var * few + column.var)), [lane])
    if count % width:
        rest = Axis(Var(row.var.name, 0, count - 1), steps * width, count)
        total = call(node.op, total, reduce_scalar(node.op, _rename(node.value, row, rest), [rest]))

    final = replace(stage, body=_with(stage.body, node, total))
    s = s.reorder(partial, part, inner, wide).parallel(partial, part)
    return (replace(program, stages=(partial, *between, final), outputs=(final,), attrs={}),
            s.vectorize(partial, wide))


def _finished_in_vectors(program: Program, stage: Tensor, node: Reduce, along: Axis | None
                         ) -> tuple[Program, Schedule]:
    """Short rows whose sums are made into results by something dear: for many of them at once.

    An exponential of each sum by itself takes three times as long as a row of ten: 1000 x 272 of
    them took 1590 us, 440 so, and 380 without exponentials (Zen 5).
    """
    sums = Tensor(f"{stage.name}_sum", stage.shape, node.dtype, stage.axes, node,
                  origin=stage.origin)
    final = replace(stage, body=_with(stage.body, node, Load(
        node.dtype, sums, tuple(a.var for a in stage.axes))))
    *outer, last = (a.var.name for a in stage.axes)
    s = Schedule().split(final, last, FINISHED_TOGETHER)
    task = f"{last}.o"
    if outer:
        s, task = s.fuse(final, *outer, task, fused="task"), "task"
    length = _product([_extent(a) for a in node.axes])
    s = s.parallel(final, task, _grain(FINISHED_TOGETHER * length * _price([stage])))
    s = s.vectorize(final, f"{last}.i").compute_at(sums, final, task)
    vector = node.axes[-1] if along is None else along
    s = _summed_in_blocks(s, sums, [a for a in node.axes if a is not vector], vector)
    return replace(program, stages=(sums, final), outputs=(final,), attrs={}), s


def _with(body: Scalar | None, node: Reduce, other: Scalar) -> Scalar:
    """A body in which something else stands for its reduction."""
    assert body is not None
    return rewrite(body, lambda n: other if n is node else None)


def _rename(value: Scalar, old: Axis, new: Axis) -> Scalar:
    return value if old.var is new.var else substitute_indices(value, {old.var: new.var})


# ---------------------------------------------------------------- contractions, no template
def _contraction(program: Program) -> Schedule:
    """Any contraction: rows in parallel, the last axis in vectors, sums in rows of accumulators."""
    stage = program.stages[-1]
    reduced = _reduced(stage)
    if not stage.axes:
        return Schedule().vectorize(stage, reduced[-1])
    *outer, last = [a.var.name for a in stage.axes]
    s = Schedule().split(stage, last, 64)
    s = s.reorder(stage, *outer, f"{last}.o", *reduced, f"{last}.i")
    task = f"{last}.o"
    if outer:
        s = s.fuse(stage, *outer, task, fused="task")
        task = "task"
    length = _product([_extent(a) for a in _reduced(stage)])
    return s.parallel(stage, task, _grain(length * 64)).vectorize(stage, f"{last}.i")
