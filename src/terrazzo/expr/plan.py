"""A program with a schedule applied: stages in order, each with its loops and its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.errors import ScheduleError
from terrazzo.expr import loopnest
from terrazzo.expr.ir import Program, Tensor, axes_for, inline, load
from terrazzo.expr.loopnest import LoopNest
from terrazzo.expr.schedule import (
    CacheRead,
    CacheWrite,
    ComputeAt,
    ComputeInline,
    ComputeRoot,
    Fuse,
    Mark,
    Pack,
    Reorder,
    Schedule,
    Split,
    Step,
    Streaming,
    Tensorize,
)
from terrazzo.expr.tensorize import intrinsic_named
from terrazzo.index import Var, free_vars
from terrazzo.scalar import (
    Axis,
    FromIndex,
    Load,
    Reduce,
    Scalar,
    children,
    const,
    loads,
    rewrite,
    substitute_indices,
    walk,
)


@dataclass(frozen=True, eq=False)
class Stage:
    """One computed tensor: what it computes, its loops, and where and how it is stored."""

    tensor: Tensor  # what other stages load; its own body may be out of date
    axes: tuple[Axis, ...]
    body: Scalar
    nest: LoopNest
    attach: tuple[str, str] | None = None  # the consumer and its loop
    streaming: bool = False
    packed: tuple[str, ...] | None = None  # axes in the order of storage
    tensorize: Tensorize | None = None

    @property
    def name(self) -> str:
        return self.tensor.name


@dataclass(frozen=True, eq=False)
class Plan:
    """What lowering starts from."""

    program: Program
    stages: tuple[Stage, ...]
    outputs: tuple[Tensor, ...]

    def stage(self, name: str) -> Stage:
        """The stage of a name, or an error that lists all."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        there = ", ".join(s.name for s in self.stages)
        raise ScheduleError(f"program {self.program.name} has no stage {name!r}",
                            hint=f"its stages are: {there}")

    def is_output(self, tensor: Tensor) -> bool:
        return any(t is tensor for t in self.outputs)

    def readers(self, tensor: Tensor) -> list[Stage]:
        """The stages that load a tensor."""
        return [s for s in self.stages if any(x.source is tensor for x in loads(s.body))]


def plan(program: Program, schedule: Schedule, complete: bool = True) -> Plan:
    """Apply a schedule to a program; raises ScheduleError where they do not fit.

    A schedule still being written is not `complete`: stages may wait for where they belong.
    """
    result = _initial(program)
    for step in schedule.steps:
        result = _apply(result, step)
    if complete:
        _check(result)
    return result


def replace_loads(body: Scalar, old: Tensor, new: Tensor) -> Scalar:
    """Load from another tensor of the same shape."""
    return rewrite(body, lambda n: Load(new.dtype, new, n.indices)
                   if isinstance(n, Load) and n.source is old else None)


# ---------------------------------------------------------------- stages
def _initial(program: Program) -> Plan:
    names: set[str] = set()
    for tensor in (*program.inputs, *program.stages):
        if tensor.name in names:
            raise ScheduleError(f"program {program.name} has two tensors named {tensor.name!r}",
                                hint="give each a name of its own; schedules go by names")
        names.add(tensor.name)
    stages = [_stage(t) for t in program.stages]
    outputs: list[Tensor] = []
    for tensor in program.outputs:
        if tensor.is_input or any(t is tensor for t in outputs):
            name = fresh_name(f"{tensor.name}_copy", names)
            names.add(name)
            tensor = _copy_of(tensor, name)
            stages.append(_stage(tensor))
        outputs.append(tensor)
    return Plan(program, tuple(stages), tuple(outputs))


def fresh_name(name: str, taken: Iterable[str]) -> str:
    """The name itself, or with the first number that makes it new."""
    used, result, number = set(taken), name, 0
    while result in used:
        number += 1
        result = f"{name}{number}"
    return result


def _copy_of(tensor: Tensor, name: str) -> Tensor:
    axes = axes_for(tensor.shape)
    body = load(tensor, axes)
    return Tensor(name, tensor.shape, tensor.dtype, axes, body, origin=tensor.origin)


def _stage(tensor: Tensor, body: Scalar | None = None) -> Stage:
    body = tensor.body if body is None else body
    assert body is not None
    body = _name_reductions(body, [a.var.name for a in tensor.axes])
    reductions = [a.var.name for a in scheduled_reductions(body)]
    nest = loopnest.initial(tensor.name, [a.var.name for a in tensor.axes], reductions)
    return Stage(tensor, tensor.axes, body, nest)


def _name_reductions(body: Scalar, data: list[str]) -> Scalar:
    """Give every distinct reduction axis of a body a variable and a name of its own."""
    given: dict[Axis, Var] = {}

    def visit(node: Scalar) -> Scalar | None:
        if not isinstance(node, Reduce):
            return None
        renamed: dict[Var, Var] = {}
        for axis in node.axes:
            if axis not in given:
                taken = [*data, *(v.name for v in given.values())]
                name = fresh_name(axis.var.name, taken)
                given[axis] = Var(name, axis.var.lo, axis.var.hi)
            if given[axis] is not axis.var:
                renamed[axis.var] = given[axis]
        if not renamed:
            return None
        return rename_axes(node, renamed)

    return rewrite(body, visit)


def rename_axes(node: Reduce, renamed: Mapping[Var, Var]) -> Reduce:
    """A reduction over other variables."""
    fresh = substitute_indices(node, renamed)
    assert isinstance(fresh, Reduce)
    axes = tuple(Axis(renamed.get(a.var, a.var), a.lo, a.hi) for a in fresh.axes)
    return Reduce(fresh.dtype, fresh.op, axes, fresh.value)


def free_index_vars(root: Scalar) -> dict[int, frozenset[Var]]:
    """For each node (by id) the index variables that it does not bind itself."""
    found: dict[int, frozenset[Var]] = {}
    for node in walk(root):
        names: set[Var] = set()
        for child in children(node):
            names |= found[id(child)]
        if isinstance(node, Load):
            for index in node.indices:
                if not isinstance(index, Scalar):
                    names |= free_vars(index)
        elif isinstance(node, FromIndex):
            names |= free_vars(node.index)
        elif isinstance(node, Reduce):
            for axis in node.axes:
                names |= free_vars(axis.lo) | free_vars(axis.hi)
            names -= {a.var for a in node.axes}
        found[id(node)] = frozenset(names)
    return found


def top_reductions(body: Scalar) -> list[Reduce]:
    """The reductions that depend on no other's axes; the rest are computed inside of others."""
    everyone = [n for n in walk(body) if isinstance(n, Reduce)]
    if not everyone:
        return []
    bound = {a.var for r in everyone for a in r.axes}
    free = free_index_vars(body)
    return [r for r in everyone if free[id(r)].isdisjoint(bound)]


def scheduled_reductions(body: Scalar) -> list[Axis]:
    """The reduction axes that are loops of a stage."""
    return list(dict.fromkeys(a for r in top_reductions(body) for a in r.axes))


# ---------------------------------------------------------------- steps
def _apply(state: Plan, step: Step) -> Plan:
    if isinstance(step, CacheRead):
        return _cache_read(state, step)
    stage = state.stage(step.stage)
    if isinstance(step, CacheWrite):
        return _cache_write(state, stage, step)
    if isinstance(step, ComputeInline):
        return _inline(state, stage)
    if isinstance(step, (Split, Fuse, Reorder, Mark)):
        return _with(state, replace(stage, nest=loopnest.apply(stage.nest, step)))
    if isinstance(step, ComputeAt):
        return _with(state, _compute_at(state, stage, step))
    if isinstance(step, ComputeRoot):
        return _with(state, replace(stage, attach=None))
    if isinstance(step, Streaming):
        return _with(state, replace(stage, streaming=True))
    if isinstance(step, Pack):
        return _with(state, _pack(state, stage, step))
    assert isinstance(step, Tensorize)
    loopnest.check_loop(stage.nest, step.axis)
    intrinsic_named(step.intrinsic)
    return _with(state, replace(stage, tensorize=step))


def _with(state: Plan, stage: Stage) -> Plan:
    return replace(state, stages=tuple(
        stage if s.name == stage.name else s for s in state.stages))


def _compute_at(state: Plan, stage: Stage, step: ComputeAt) -> Stage:
    consumer = state.stage(step.consumer)
    order = [s.name for s in state.stages]
    if order.index(consumer.name) <= order.index(stage.name):
        raise ScheduleError(
            f"{stage.name} cannot be computed at {consumer.name}, which is computed before it",
            hint="compute a stage at one that reads it")
    loopnest.check_loop(consumer.nest, step.axis)
    return replace(stage, attach=(step.consumer, step.axis))


def _pack(state: Plan, stage: Stage, step: Pack) -> Stage:
    if state.is_output(stage.tensor):
        raise ScheduleError(f"{stage.name} is an output: its layout is the caller's",
                            hint="pack a stage that cache_read or cache_write made")
    fused = [r.fused for r in stage.nest.relations if isinstance(r, Fuse)]
    wanted = [leaf for leaf in stage.nest.order if not stage.nest.is_reduction(leaf)]
    if fused or sorted(step.axes) != sorted(wanted):
        raise ScheduleError(
            f"the layout of {stage.name} is not given by {', '.join(step.axes)}",
            hint=f"name each of its data axes once: {', '.join(wanted)} (split, never fused)")
    return replace(stage, packed=step.axes)


def _check_unscheduled(stage: Stage, action: str) -> None:
    if stage.nest.relations or stage.nest.marks or stage.attach:
        raise ScheduleError(f"{stage.name} already has scheduled loops",
                            hint=f"{action} comes before splitting, marking and placing")


def _cache_read(state: Plan, step: CacheRead) -> Plan:
    tensors = [*state.program.inputs, *(s.tensor for s in state.stages)]
    source = next((t for t in tensors if t.name == step.stage), None)
    if source is None:
        raise ScheduleError(f"program {state.program.name} has no tensor {step.stage!r}",
                            hint=f"its tensors are: {', '.join(t.name for t in tensors)}")
    _check_new_tensor(state, step.name)
    copy = _copy_of(source, step.name)
    stages: list[Stage] = []
    for stage in state.stages:
        if stage.name in step.readers:
            if not any(x.source is source for x in loads(stage.body)):
                raise ScheduleError(f"{stage.name} does not read {source.name}",
                                    hint="give the stages that load the tensor as readers")
            if not any(s.tensor is copy for s in stages):
                stages.append(_stage(copy))
            stage = replace(stage, body=replace_loads(stage.body, source, copy))
        stages.append(stage)
    for reader in step.readers:
        state.stage(reader)
    return replace(state, stages=tuple(stages))


def _cache_write(state: Plan, stage: Stage, step: CacheWrite) -> Plan:
    _check_unscheduled(stage, "cache_write")
    _check_new_tensor(state, step.name)
    tensor = stage.tensor
    inner = Tensor(step.name, tensor.shape, tensor.dtype, tensor.axes, stage.body,
                   origin=tensor.origin)
    copy = load(inner, tensor.axes)
    stages: list[Stage] = []
    for s in state.stages:
        stages += [_stage(inner), _stage(tensor, copy)] if s is stage else [s]
    return replace(state, stages=tuple(stages))


def _check_new_tensor(state: Plan, name: str) -> None:
    if any(t.name == name for t in (*state.program.inputs, *(s.tensor for s in state.stages))):
        raise ScheduleError(f"there already is a tensor named {name!r}",
                            hint="give the cached tensor another name")


def _inline(state: Plan, stage: Stage) -> Plan:
    if state.is_output(stage.tensor):
        raise ScheduleError(f"{stage.name} is an output and has to be stored",
                            hint="inline only what other stages read")
    attached = [s.name for s in state.stages if s.attach and s.attach[0] == stage.name]
    if attached:
        raise ScheduleError(f"{', '.join(attached)} is computed at {stage.name}",
                            hint=f"{stage.name} has no loops when it is inlined")
    stages = []
    for s in state.stages:
        if s is stage:
            continue
        if any(x.source is stage.tensor for x in loads(s.body)):
            body = inline(s.body, {stage.tensor: stage.body})
            fresh = _stage(s.tensor, body)
            if fresh.nest.reduction != s.nest.reduction:
                _check_unscheduled(s, f"inlining {stage.name} into it")
                s = fresh
            else:
                s = replace(s, body=fresh.body)
        stages.append(s)
    return replace(state, stages=tuple(stages))


# ---------------------------------------------------------------- checks
def _check(state: Plan) -> None:
    for stage in state.stages:
        loopnest.check_finished(stage.nest)
        if stage.attach is None:
            continue
        consumer = state.stage(stage.attach[0])
        loopnest.check_loop(consumer.nest, stage.attach[1])
        if state.is_output(stage.tensor):
            identity_read(stage, consumer)
            order = consumer.nest.order
            around = order[:order.index(stage.attach[1]) + 1]
            if any(map(consumer.nest.is_reduction, around)):
                raise ScheduleError(
                    f"output {stage.name} cannot be computed inside a reduction of "
                    f"{consumer.name}", hint="compute it at a loop outside of the reductions")
            continue
        for reader in state.readers(stage.tensor):
            if not is_inside(state, reader, *stage.attach):
                raise ScheduleError(
                    f"{stage.name} is computed at loop {stage.attach[1]!r} of {consumer.name}, "
                    f"but {reader.name} reads it outside of that loop",
                    hint=f"compute {reader.name} inside the loop too, or {stage.name} further out")


def is_inside(state: Plan, stage: Stage, consumer: str, axis: str) -> bool:
    """Whether a stage's loops run inside the given loop (or are the consumer's own)."""
    if stage.name == consumer:
        return True
    while stage.attach is not None:
        name, at = stage.attach
        if name == consumer:
            order = state.stage(consumer).nest.order
            return order.index(at) >= order.index(axis)
        stage = state.stage(name)
    return False


ANYWHERE = const(0)  # an index that is a scalar may point anywhere


def identity_read(stage: Stage, consumer: Stage) -> tuple[Any, ...]:
    """The element of an output that belongs to each element of the stage it is computed at.

    An output has to be stored whole, whether or not the consumer reads it: so each of its
    dimensions must be a dimension of the consumer at the same place, or 1, or one that the
    consumer does not have, or walks through inside of the loop only: all of that belongs to each
    of the consumer's elements.
    """
    indices: list[Any] = []
    assert stage.attach is not None
    order = consumer.nest.order
    inside = set(order[order.index(stage.attach[1]) + 1:])
    for d, size in enumerate(stage.tensor.shape):
        if size == 1:
            indices.append(0)
        elif d >= len(consumer.axes):
            indices.append(ANYWHERE)
        elif d < len(consumer.axes) and consumer.tensor.shape[d] == size:
            indices.append(consumer.axes[d].var)
        elif consumer.nest.leaves_of(consumer.axes[d].var.name) <= inside:
            indices.append(ANYWHERE)
        else:
            raise ScheduleError(
                f"output {stage.name} cannot be computed at {consumer.name}: their shapes differ "
                f"at dimension {d}", hint=f"compute {stage.name} in loops of its own")
    return tuple(indices)
