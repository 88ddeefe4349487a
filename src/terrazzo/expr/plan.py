"""A program with a schedule applied: stages in order, each with its loops and its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from terrazzo.base.scalar import Tuple, parts
from terrazzo.errors import ScheduleError
from terrazzo.expr import loopnest
from terrazzo.expr.ir import Program, Tensor, inline, load
from terrazzo.expr.reductions import fresh_name, top_reductions
from terrazzo.expr.rfactor import rfactor
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
    RFactor,
    Schedule,
    Split,
    Step,
    Streaming,
    Tensorize,
)
from terrazzo.expr.stage import (
    Plan,
    Stage,
    check_names,
    copy_of,
    identity_read,
    is_inside,
    make_stage,
    outermost,
    reads_any,
    replace_loads,
)
from terrazzo.expr.tensorize import intrinsic_named
from terrazzo.index import proves_le


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


# ---------------------------------------------------------------- stages
def _initial(program: Program) -> Plan:
    check_names((t.name for t in (*program.inputs, *program.stages)), program.name)
    names = {t.name for t in (*program.inputs, *program.stages)}
    scan_of = {t: scan for scan in program.scans for t in scan.body}
    results = {t for scan in program.scans for t in scan.results}
    together: dict[object, list[Tensor]] = {}
    for tensor in program.stages:
        if tensor not in results:  # the rows of a scan are made by its updates
            together.setdefault(tensor.joint or tensor, []).append(tensor)
    stages = [make_stage(tensors, scan=scan_of.get(tensors[0])) for tensors in together.values()]
    outputs: list[Tensor] = []
    for tensor in program.outputs:
        if tensor.is_input or any(t is tensor for t in outputs):
            name = fresh_name(f"{tensor.name}_copy", names)
            names.add(name)
            tensor = copy_of(tensor, name)
            stages.append(make_stage([tensor]))
        outputs.append(tensor)
    return Plan(program, tuple(stages), tuple(outputs))


# ---------------------------------------------------------------- steps
def _apply(state: Plan, step: Step) -> Plan:
    if isinstance(step, CacheRead):
        return _cache_read(state, step)
    stage = state.stage(step.stage)
    if isinstance(step, CacheWrite):
        return _cache_write(state, stage, step)
    if isinstance(step, ComputeInline):
        return _inline(state, stage)
    if isinstance(step, RFactor):
        _check_new_tensor(state, step.name)
        made = rfactor(stage, step)
        return replace(state, stages=tuple(
            new for old in state.stages for new in (made if old is stage else (old,))))
    if isinstance(step, Mark):
        _check_lanes(stage, step)
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


def _check_lanes(stage: Stage, step: Mark) -> None:
    """Partial results in the lanes of a vector are for reductions that the chip knows."""
    if step.kind != "vector" or step.axis not in stage.nest.order or (
            not stage.nest.is_reduction(step.axis)):
        return
    own = next((r.op for r in top_reductions(stage.body) if r.reducer is not None), None)
    if own is not None:
        raise ScheduleError(
            f"axis {step.axis!r} of {stage.name} cannot be vectorised: {own} combines one after "
            "the other", hint="rfactor it, and vectorise it where it is an axis of the result")


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
    begun = next((s for s in state.program.scans if not set(s.inits).isdisjoint(stage.tensors)),
                 None)
    if begun is not None:
        raise ScheduleError(
            f"{stage.name} begins {begun.name} and has to be whole before its first step",
            hint=f"compute {stage.name} in loops of its own")
    if stage.scan is not None and consumer.scan is not stage.scan:
        raise ScheduleError(f"{stage.name} is computed for each row of {stage.scan.name}, and "
                            f"{consumer.name} is not", hint="compute it at a part of the scan")
    return replace(stage, attach=(consumer.name, step.axis))


def _pack(state: Plan, stage: Stage, step: Pack) -> Stage:
    if state.has_output(stage):
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
    tensors = state.tensors()
    source = next((t for t in tensors if t.name == step.stage), None)
    if source is None:
        raise ScheduleError(f"program {state.program.name} has no tensor {step.stage!r}",
                            hint=f"its tensors are: {', '.join(t.name for t in tensors)}")
    inside = [t for s in state.stages if s.scan for t in (*s.scan.states, *s.tensors)]
    if any(t is source for t in inside):
        raise ScheduleError(f"{source.name} is computed row by row, in a scan",
                            hint="copy what the scan reads, or its result")
    _check_new_tensor(state, step.name)
    copy = copy_of(source, step.name)
    stages: list[Stage] = []
    for stage in state.stages:
        if any(map(stage.goes_by, step.readers)):
            if not reads_any(stage.body, [source]):
                raise ScheduleError(f"{stage.name} does not read {source.name}",
                                    hint="give the stages that load the tensor as readers")
            if not any(s.tensor is copy for s in stages):
                stages.insert(_before(stages, stage), make_stage([copy]))
            stage = replace(stage, body=replace_loads(stage.body, source, copy))
        stages.append(stage)
    for reader in step.readers:
        state.stage(reader)
    return replace(state, stages=tuple(stages))


def _before(stages: Sequence[Stage], stage: Stage) -> int:
    """Where among the stages that come before it something new does: not between a scan's own."""
    return next((at for at, s in enumerate(stages) if s.scan is not None and s.scan is stage.scan),
                len(stages))


def _cache_write(state: Plan, stage: Stage, step: CacheWrite) -> Plan:
    _check_unscheduled(stage, "cache_write")
    _check_new_tensor(state, step.name)
    axes, joint = stage.axes, step.name if len(stage.tensors) > 1 else ""
    inner = [Tensor(f"{step.name}.{j}" if joint else step.name, t.shape, t.dtype, axes, body,
                    origin=t.origin, joint=joint)
             for j, (t, body) in enumerate(zip(stage.tensors, parts(stage.body), strict=True))]
    copies = tuple(load(t, axes) for t in inner)
    copy = Tuple(copies[0].dtype, copies) if joint else copies[0]
    stages: list[Stage] = []
    for s in state.stages:
        stages += [make_stage(inner, scan=s.scan), make_stage(stage.tensors, copy, s.scan)] if (
            s is stage) else [s]
    return replace(state, stages=tuple(stages))


def _check_new_tensor(state: Plan, name: str) -> None:
    if any(t.name == name for t in state.tensors()) or any(s.goes_by(name) for s in state.stages):
        raise ScheduleError(f"there already is a tensor named {name!r}",
                            hint="give the cached tensor another name")


def _inline(state: Plan, stage: Stage) -> Plan:
    if state.has_output(stage):
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
        if reads_any(s.body, stage.tensors):
            body = inline(s.body, dict(zip(stage.tensors, parts(stage.body), strict=True)))
            fresh = make_stage(s.tensors, body, s.scan)
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
        if state.has_output(stage):
            _check_whole(state, stage, consumer)
        for reader in state.readers(stage):
            if not is_inside(state, reader, *stage.attach) and not _finds_whole(
                    state, reader, stage):
                raise ScheduleError(
                    f"{stage.name} is computed at loop {stage.attach[1]!r} of {consumer.name}, "
                    f"but {reader.name} reads it outside of that loop",
                    hint=f"compute {reader.name} inside the loop too, or {stage.name} further out")


def _check_whole(state: Plan, stage: Stage, consumer: Stage) -> None:
    """Refuse places where not every element of an output would be computed."""
    assert stage.attach is not None
    identity_read(stage, consumer)
    order = consumer.nest.order
    around = order[:order.index(stage.attach[1]) + 1]
    if any(map(consumer.nest.is_reduction, around)):
        raise ScheduleError(
            f"output {stage.name} cannot be computed inside a reduction of {consumer.name}",
            hint="compute it at a loop outside of the reductions")
    hint = f"compute {stage.name} in loops of its own"
    if consumer.attach is not None and not state.has_output(consumer):
        raise ScheduleError(
            f"output {stage.name} cannot be computed at {consumer.name}, of which only what "
            f"{consumer.attach[0]} reads is computed", hint=hint)
    if consumer.scan is not None and stage.scan is None:
        raise ScheduleError(
            f"output {stage.name} cannot be computed at {consumer.name}, which is computed for the "
            f"later rows of {consumer.scan.name} only", hint=hint)
    shape = stage.tensor.shape
    for d, (axis, size) in enumerate(zip(consumer.nest.data, consumer.tensor.shape, strict=True)):
        empty_too = d < len(shape) and shape[d] == size
        if not empty_too and not proves_le(1, size) and not (
                consumer.nest.leaves_of(axis).isdisjoint(around)):
            raise ScheduleError(
                f"output {stage.name} cannot be computed at loop {stage.attach[1]!r} of "
                f"{consumer.name}, which does not run where {size} is 0", hint=hint)


def _finds_whole(state: Plan, reader: Stage, stage: Stage) -> bool:
    """Whether all that a reader loads of a stage is an output, stored before the reader begins."""
    own = [t for t in stage.tensors if not state.is_output(t)]
    names = [s.name for s in state.stages]
    first, then = (names.index(outermost(state, s).name) for s in (stage, reader))
    return first < then and not reads_any(reader.body, own)
