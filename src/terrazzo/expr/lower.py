"""From a program and a schedule to Loop IR.

Each stage becomes one nest of loops. A stage with reductions becomes, inside the loops that stand
outside of all its reductions, three nests: one that sets accumulators to the identity, one that
reduces into them, and one that stores what the rest of the body makes of them. A stage computed at
a loop of another is lowered there, for the region that the loops inside of it read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from terrazzo.base.scalar import (
    Load,
    Reduce,
    Scalar,
    Tuple,
    identity_of,
    loads,
    parts,
    rewrite,
    substitute_indices,
)
from terrazzo.base.shapes import num_elements
from terrazzo.dtypes import DType
from terrazzo.expr.instance import Guard, Instance, loop_var
from terrazzo.expr.ir import Program, Scan, Tensor
from terrazzo.expr.place import Place, storage_parts, storage_size
from terrazzo.expr.plan import plan
from terrazzo.expr.reductions import (
    fresh_name,
    next_group,
    outermost_reductions,
    storing_order,
    top_reductions,
)
from terrazzo.expr.regions import (
    Ranges,
    Reads,
    add_read,
    collect_reads,
    hull_of,
    in_storage,
    storage_range,
)
from terrazzo.expr.schedule import Schedule
from terrazzo.expr.stage import Plan, Stage, identity_read, is_inside, shared_by_tasks
from terrazzo.expr.tensorize import tensorize
from terrazzo.expr.work import work
from terrazzo.index import Index, Var, bounds, proves_eq, substitute
from terrazzo.loop.bounds import Interval, plus
from terrazzo.loop.ir import Alloc, Buffer, For, Function, If, Stmt, Store, block

# Accumulators beyond this leave the first-level cache no room for what is being reduced; then the
# output itself is the better place.
LARGEST_ACCUMULATOR = 16 << 10

Region = list[tuple[Index, Index, Index]]  # lo, hi and room of each dimension
Target = tuple[Buffer, Index | Scalar]  # where a value goes
Targets = dict[int, tuple[Target, ...]]  # of a reduction, by its id: one for each of its values


def lower(program: Program, schedule: Schedule, name: str | None = None) -> Function:
    """The loops that compute a program as a schedule says."""
    return _Lowering(plan(program, schedule)).function(name or program.name)


@dataclass
class _Nest:
    """What one nest of a stage needs to know: what it reads, and what stands innermost."""

    reads: tuple[Scalar, ...]
    content: Callable[[], Stmt]
    tensorized: bool = False
    guards: list[Guard] = field(default_factory=list)


class _Lowering:
    """One function in the making."""

    def __init__(self, state: Plan):
        self.plan = state
        self.places: dict[Tensor, Place] = {}
        self.carried: list[Buffer] = []  # results of scans that do not leave the function
        self.loops: set[Var] = set()
        self.taken: set[str] = {d.name for d in state.program.dims}
        self.live = _live_stages(state)

    def fresh(self, name: str) -> str:
        result = fresh_name(name, self.taken)
        self.taken.add(result)
        return result

    # ------------------------------------------------------------ the function
    def function(self, name: str) -> Function:
        program = self.plan.program
        params = []
        for tensor, constant in (*((t, True) for t in program.inputs),
                                 *((t, False) for t in self.plan.outputs)):
            buffer = Buffer(self.fresh(tensor.name), tensor.dtype, storage_size(tensor), constant)
            params.append(buffer)
            self.places[tensor] = Place(buffer, tensor)
        self._share_memory(program.scans)
        body = self._sequence([s for s in self.live if s.attach is None])
        origins = dict.fromkeys(s.tensor.origin for s in self.live if s.tensor.origin)
        flops, size = work(program)
        return Function(name, tuple(params), program.dims, body, ", ".join(origins), flops, size)

    def _sequence(self, stages: Sequence[Stage]) -> Stmt:
        """Whole tensors one after the other."""
        code: list[Stmt] = []
        scopes: list[tuple[Buffer, int]] = []  # and how many statements stand before them
        done: set[Scan] = set()
        for stage in stages:
            if stage.scan is None:
                sizes = stage.tensor.shape
                scopes += [(b, len(code)) for b in self._allocate(stage, [0] * len(sizes), sizes)]
                code.append(self._stage(stage, [(0, n, n) for n in sizes]))
            elif stage.scan not in done:
                done.add(stage.scan)
                code.append(self._scan(stage.scan, [s for s in stages if s.scan is stage.scan]))
        for buffer, at in reversed(scopes):
            code[at:] = [Alloc(buffer, block(*code[at:]))]
        return _allocs(self.carried, code)

    def _share_memory(self, scans: Sequence[Scan]) -> None:
        """Give everything that is a row of a scan's result its place there."""
        for scan in scans:
            for result in scan.results:
                if result not in self.places:
                    buffer = Buffer(self.fresh(result.name), result.dtype, storage_size(result))
                    self.carried.append(buffer)
                    self.places[result] = Place(buffer, result)
            self.places.update({t: self.places[r] for t, r in scan.memory_of().items()})

    def _scan(self, scan: Scan, stages: Sequence[Stage]) -> Stmt:
        """The rows of a recurrence, one after the other."""
        row = loop_var(self.fresh(scan.body[0].axes[0].var.name), scan.first, scan.rows)
        self.loops.add(row)
        code: list[Stmt] = []
        buffers: list[Buffer] = []
        for stage in stages:
            rest: Region = [(0, n, n) for n in stage.tensor.shape[1:]]
            buffers += self._allocate(stage, [row, *(0 for _ in rest)], [1, *(n for *_, n in rest)])
            code.append(self._stage(stage, [(row, row + 1, 1), *rest]))
        return For(row, scan.first, scan.rows, _allocs(buffers, code))

    def _allocate(self, stage: Stage, base: Sequence[Index], sizes: Sequence[Index],
                  ) -> list[Buffer]:
        """Memory for what a stage computes, but for what leaves the function."""
        layout = storage_parts(stage, sizes)
        total = num_elements(part.size for part in layout)
        buffers = []
        for tensor in stage.tensors:
            if not self.plan.is_output(tensor):
                buffers.append(Buffer(self.fresh(tensor.name), tensor.dtype, total))
                self.places[tensor] = Place(buffers[-1], tensor, tuple(base), layout)
        return buffers

    # ------------------------------------------------------------ one stage
    def _stage(self, stage: Stage, region: Region) -> Stmt:
        inst = Instance(stage, region, self.fresh, self.loops)
        order = stage.nest.order
        if not top_reductions(inst.body):
            return self._loops(inst, order, (), _Nest(
                (inst.body,), lambda: self._finish(inst, inst.body), tensorized=True))
        first = next(at for at, leaf in enumerate(order) if stage.nest.is_reduction(leaf))
        outside, inside = order[:first], order[first:]
        return self._loops(inst, outside, (), _Nest(
            (inst.body,), lambda: self._reductions(inst, outside, inside)))

    def _elements(self, inst: Instance) -> list[Target]:
        """Where the element that the loops stand at is stored, of each tensor."""
        indices = [inst.value(name) for name in inst.nest.data]
        places = [self.places[tensor] for tensor in inst.stage.tensors]
        return [(place.buffer, place.address(indices)) for place in places]

    def _finish(self, inst: Instance, body: Scalar) -> Stmt:
        """Store what a stage computes."""
        return block(*(self._assign(inst, *target, value, streaming=inst.stage.streaming)
                       for target, value in zip(self._elements(inst), parts(body), strict=True)))

    def _reductions(self, inst: Instance, outside: tuple[str, ...],
                    inside: tuple[str, ...]) -> Stmt:
        """The accumulators of a stage, what fills them, and what is stored in the end."""
        stage, nest = inst.stage, inst.nest
        data = tuple(leaf for leaf in inside if not nest.is_reduction(leaf))
        size = num_elements(inst.room(leaf) for leaf in data)
        at: Index = 0
        for leaf in data:
            at = at * inst.room(leaf) + _from_zero(inst, leaf)
        body = inst.body
        buffers: list[Buffer] = []
        code: list[Stmt] = []
        while group := next_group(body):
            targets: Targets = {}
            for reduction in group:
                if reduction is body and self._accumulates_in_place(
                        stage, reduction.dtype, size):
                    targets[id(reduction)] = tuple(self._elements(inst))
                    code += self._reduce_group(inst, group, targets, outside, inside, data, buffers)
                    return _allocs(buffers, code)
                own = [Buffer(self.fresh(f"{stage.name}.acc"), value.dtype, size)
                       for value in parts(identity_of(reduction))]
                buffers += own
                targets[id(reduction)] = tuple((buffer, at) for buffer in own)
            code += self._reduce_group(inst, group, targets, outside, inside, data, buffers)
            body = _replace_reductions(body, targets)
        code.append(self._loops(inst, data, outside, _Nest(
            (body,), lambda: self._finish(inst, body))))
        return _allocs(buffers, code)

    def _accumulates_in_place(self, stage: Stage, dtype: DType, size: Index) -> bool:
        """Whether a stage that is nothing but a reduction needs no accumulator besides itself."""
        place = self.places[stage.tensor]
        if dtype is not place.buffer.dtype:
            return False
        if place.base is None and shared_by_tasks(self.plan, stage):
            return False  # others may compute the same element, and read it
        if place.base is not None and proves_eq(place.buffer.size, size):
            return True
        largest = bounds(size * dtype.itemsize)[1]
        return largest is None or largest > LARGEST_ACCUMULATOR

    def _reduce_group(self, inst: Instance, group: Sequence[Reduce], targets: Targets,
                      outside: tuple[str, ...], inside: tuple[str, ...], data: tuple[str, ...],
                      scratch: list[Buffer]) -> list[Stmt]:
        """Reductions over the same axes share their loops."""

        def initialise() -> Stmt:
            return block(*(_begin(r, targets[id(r)]) for r in group))

        def accumulate() -> Stmt:
            return block(*(self._accumulate(inst, r, targets[id(r)], scratch) for r in group))

        axes = {a.var for r in group for a in r.axes}
        own = {name for name, root in inst.roots.items() if root.var in axes}
        leaves = tuple(leaf for leaf in inside
                       if leaf in data or not inst.nest.roots_of(leaf).isdisjoint(own))
        values = tuple(r.value for r in group)
        return [self._loops(inst, data, outside, _Nest((), initialise)),
                self._loops(inst, leaves, outside, _Nest(values, accumulate, tensorized=True))]

    # ------------------------------------------------------------ loops
    def _loops(self, inst: Instance, leaves: tuple[str, ...], opened: tuple[str, ...],
               nest: _Nest) -> Stmt:
        """Loops over `leaves` around a nest's content, inside the loops `opened`."""
        if not leaves:
            guards = [g for g in (*nest.guards, *inst.fusion_guards())
                      if g.leaves <= set(opened) and g not in inst.passed]
            inst.passed += guards
            stmt = nest.content()
            for passed in guards:
                inst.passed.remove(passed)
                stmt = If(passed.test(), stmt)
            return stmt
        leaf, rest = leaves[0], leaves[1:]
        now = (*opened, leaf)
        var = inst.variable(leaf)
        if var is not None:
            lo, hi, guard = inst.loop_range(leaf, opened)
            if guard is not None:
                nest.guards.append(guard)
        stmt = self._attached(inst, leaf, now, nest, lambda: self._loops(inst, rest, now, nest))
        if var is not None:
            mark = inst.nest.marks.get(leaf)
            stmt = For(var, lo, hi, stmt, *((mark.kind, mark.grain) if mark else ()))
        step = inst.stage.tensorize
        if step is not None and step.axis == leaf and nest.tensorized:
            stmt = tensorize(stmt, step)
        return stmt

    def _attached(self, inst: Instance, leaf: str, opened: tuple[str, ...], nest: _Nest,
                  inner: Callable[[], Stmt]) -> Stmt:
        """The stages computed at a loop, and then what the loop itself does."""
        stages = self._needed(inst, leaf, nest.reads)
        if not stages:
            return inner()
        before = dict(self.places)
        regions = self._regions(inst, leaf, opened, nest.reads, stages)
        code: list[Stmt] = []
        buffers: list[Buffer] = []
        for stage in stages:
            base, sizes, region = regions[stage.tensor]
            buffers += self._allocate(stage, base, sizes)
            code.append(self._stage(stage, region))
        code.append(inner())
        self.places = before
        return _allocs(buffers, code)

    def _needed(self, inst: Instance, leaf: str, reads: tuple[Scalar, ...]) -> list[Stage]:
        """The stages at this loop that a nest reads, also by way of stages further in."""
        here = (inst.stage.name, leaf)
        candidates = [s for s in self.live if s.attach is not None
                      and is_inside(self.plan, s, *here)]
        if not any(s.attach == here for s in candidates):
            return []
        wanted = {x.source for expr in reads for x in loads(expr)}
        if reads and any(r is inst.body for r in reads):
            wanted |= {t for s in candidates for t in s.tensors if self.plan.is_output(t)}
        for stage in reversed(candidates):
            if not wanted.isdisjoint(stage.tensors):
                wanted |= {x.source for x in loads(stage.body)}
        return [s for s in candidates if s.attach == here and not wanted.isdisjoint(s.tensors)]

    # ------------------------------------------------------------ regions
    def _regions(self, inst: Instance, leaf: str, opened: tuple[str, ...],
                 reads: tuple[Scalar, ...], stages: Sequence[Stage],
                 ) -> dict[Tensor, tuple[list[Index], list[Index], Region]]:
        """Which part of each stage is read inside the loops `opened`.

        For each: where its storage begins, how much of it there is, and the loops' ranges.
        """
        inside = [s for s in self.live if s.attach is not None
                  and is_inside(self.plan, s, inst.stage.name, leaf)]
        exact, whole = inst.root_ranges(opened)
        full = {r.var: Interval(r.lo, r.hi - 1) for r in inst.roots.values()}
        ranges = Ranges(exact, whole, full)
        found: Reads = {}
        for expr in reads:
            collect_reads(expr, ranges, found)
        result: dict[Tensor, tuple[list[Index], list[Index], Region]] = {}
        for stage in reversed(inside):
            if self.plan.has_output(stage):
                self._add_identity(inst, stage, ranges, found)
            reads_of = [found[t] for t in stage.tensors if t in found]
            if not reads_of:
                continue
            read = hull_of(reads_of)
            base: list[Index] = []
            sizes: list[Index] = []
            region: Region = []
            for size, (tight, loose) in zip(stage.tensor.shape, read, strict=True):
                start, room = storage_range(size, loose)
                lo, hi = in_storage(tight, start, room)
                base.append(start)
                sizes.append(room)
                region.append((lo, plus(hi, 1), room))
            result[stage.tensor] = base, sizes, region
            collect_reads(stage.body, Ranges(
                {a.var: Interval(lo, hi - 1) for a, (lo, hi, _) in zip(stage.axes, region)},
                {a.var: Interval(b, b + n - 1) for a, b, n in zip(stage.axes, base, sizes)},
                {a.var: Interval(a.lo, a.hi - 1) for a in stage.axes}), found)
        return {s.tensor: result[s.tensor] for s in stages}

    def _add_identity(self, inst: Instance, stage: Stage, ranges: Ranges, found: Reads) -> None:
        assert stage.attach is not None
        if stage.attach[0] != inst.stage.name:
            return
        table = {a.var: inst.roots[a.var.name].var for a in inst.stage.axes}
        indices = [i if isinstance(i, Scalar) else substitute(i, table)
                   for i in identity_read(stage, inst.stage)]
        add_read(stage.tensor, indices, ranges, found)

    # ------------------------------------------------------------ stores
    def _assign(self, inst: Instance, buffer: Buffer, index: Index | Scalar, value: Scalar,
                reduce: str | None = None, streaming: bool = False) -> Stmt:
        """A store, after the loops of reductions that depend on the loops around it."""
        inner = outermost_reductions(value)
        if not inner:
            return Store(buffer, index, self._resolve(inst, value), reduce, streaming)
        code: list[Stmt] = []
        buffers = []
        targets: Targets = {}
        for reduction in inner:
            totals = [Buffer(self.fresh(f"{inst.stage.name}.acc"), part.dtype, 1)
                      for part in parts(identity_of(reduction))]
            buffers += totals
            targets[id(reduction)] = tuple((total, 0) for total in totals)
            code.append(_begin(reduction, targets[id(reduction)]))
            code.append(self._inner_loops(
                inst, targets[id(reduction)], reduction, buffers))
        value = _replace_reductions(value, targets)
        code.append(self._assign(inst, buffer, index, value, reduce, streaming))
        return _allocs(buffers, code)

    def _accumulate(self, inst: Instance, reduction: Reduce, targets: Sequence[Target],
                    scratch: list[Buffer]) -> Stmt:
        """Combine what is there with one more value, or with one more of each of several.

        Memory that this takes beside the targets is added to `scratch`.
        """
        if reduction.reducer is None:
            (target,) = targets
            return self._assign(inst, *target, reduction.value, reduce=reduction.op)
        places = [buffer for buffer, _ in targets]
        fresh = reduction.reducer.combine([buffer[at] for buffer, at in targets],
                                          parts(reduction.value))
        order, waiting = storing_order(fresh, places)
        code = [self._assign(inst, *targets[j], fresh[j]) for j in order]
        copies = {j: Buffer(self.fresh(f"{places[j].name}.next"), places[j].dtype, places[j].size)
                  for j in waiting[:-1]}  # the last may take its place at once
        code += [self._assign(inst, copies.get(j, places[j]), targets[j][1], fresh[j])
                 for j in waiting]
        code += [Store(*targets[j], copy[targets[j][1]]) for j, copy in copies.items()]
        scratch += copies.values()
        return block(*code)

    def _inner_loops(self, inst: Instance, targets: Sequence[Target], reduction: Reduce,
                     scratch: list[Buffer]) -> Stmt:
        table: dict[Var, Index] = {}
        loops = []
        for axis in reduction.axes:
            lo, hi = (inst.resolve(substitute(end, table)) for end in (axis.lo, axis.hi))
            var = Var(self.fresh(axis.var.name), bounds(lo)[0], bounds(hi - 1)[1])
            self.loops.add(var)
            table[axis.var] = var
            loops.append((var, lo, hi))
        value = substitute_indices(reduction.value, table)
        stmt = self._accumulate(inst, replace(reduction, value=value), targets, scratch)
        for var, lo, hi in reversed(loops):
            stmt = For(var, lo, hi, stmt)
        return stmt

    def _resolve(self, inst: Instance, value: Scalar) -> Scalar:
        """A body over tensors as one over buffers, with the axes' values put in."""

        def visit(node: Scalar) -> Scalar | None:
            if isinstance(node, Load) and isinstance(node.source, Tensor):
                place = self.places[node.source]
                return Load(node.dtype, place.buffer, (place.address(node.indices),))
            return None

        return rewrite(substitute_indices(value, inst.substitution()), visit)


# ---------------------------------------------------------------- helpers
def _live_stages(state: Plan) -> list[Stage]:
    wanted: set[Tensor] = {*state.outputs, *(
        t for scan in state.program.scans for t in (*scan.inits, *scan.updates))}
    live = []
    for stage in reversed(state.stages):
        if not wanted.isdisjoint(stage.tensors):
            live.append(stage)
            wanted |= {x.source for x in loads(stage.body)}
    return live[::-1]


def _from_zero(inst: Instance, leaf: str) -> Index:
    value = inst.value(leaf)
    return value - inst.resolve(inst.roots[leaf].lo) if leaf in inst.roots else value


def _begin(reduction: Reduce, targets: Sequence[Target]) -> Stmt:
    return block(*(Store(*target, value) for target, value in zip(
        targets, parts(identity_of(reduction)), strict=True)))


def _replace_reductions(body: Scalar, targets: Targets) -> Scalar:
    """A body that loads the results of reductions."""

    def visit(node: Scalar) -> Scalar | None:
        if id(node) not in targets:
            return None
        assert isinstance(node, Reduce)
        found = tuple(buffer[at] for buffer, at in targets[id(node)])
        return Tuple(node.dtype, found) if node.reducer is not None else found[0]

    return rewrite(body, visit)


def _allocs(buffers: Sequence[Buffer], code: Sequence[Stmt]) -> Stmt:
    stmt = block(*code)
    for buffer in reversed(buffers):
        stmt = Alloc(buffer, stmt)
    return stmt
