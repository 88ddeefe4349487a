"""Schedules being written: `te.schedule` and the handles of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.errors import ArgumentError, ScheduleError
from terrazzo.expr import ir
from terrazzo.expr.ir import Program, Scan, Tensor
from terrazzo.expr.plan import Plan, plan
from terrazzo.expr.schedule import Schedule, name_of
from terrazzo.expr.tensorize import Intrinsic
from terrazzo.te import algorithm as te
from terrazzo.te.order import topological
from terrazzo.te.recurrence import Carried, Recurrence
from terrazzo.te.terms import ReduceAxis, plain


def schedule(*outputs: Tensor) -> ScheduleBuilder:
    """Start a schedule for what the given tensors are computed from."""
    for output in outputs:
        if not isinstance(output, Tensor):
            raise ArgumentError(f"cannot schedule {output!r}", hint="give tensors, one by one")
    if not outputs:
        raise ArgumentError("there is nothing to schedule", hint="name at least one tensor")
    return ScheduleBuilder(_program(outputs))


def _program(outputs: Sequence[Tensor]) -> Program:
    """What is read and what is computed, each after what it needs; what is joint lies together."""
    members: dict[object, dict[Tensor, None]] = {}
    todo = list(outputs)
    while todo:
        tensor = todo.pop()
        found = members.setdefault(_unit(tensor), {})
        if tensor not in found:
            found[tensor] = None
            todo += _sources(tensor)
    order = topological(map(_unit, outputs), lambda unit: [
        _unit(source) for tensor in members[unit] for source in _sources(tensor)])
    inputs: list[Tensor] = []
    stages: list[Tensor] = []
    scans: list[Scan] = []
    for unit in order:
        tensors = sorted(members[unit], key=lambda t: t.name)
        if isinstance(unit, Recurrence):
            known = {t.name: t for t in tensors}
            results = [known.get(name) or unit.result(j) for j, name in enumerate(unit.names)]
            scans.append(unit.scan(results))
            stages += [*unit.body, *results]
        elif tensors[0].is_input:
            inputs += tensors
        else:
            stages += tensors
    _check_scans(stages, scans)
    return Program(outputs[0].joint or outputs[0].name, tuple(inputs), tuple(stages),
                   tuple(outputs), scans=tuple(scans))


def _unit(tensor: Tensor) -> object:
    """What a tensor is computed together with."""
    if isinstance(tensor, Carried):
        return tensor.recurrence
    return tensor.joint or tensor


def _sources(tensor: Tensor) -> list[Tensor]:
    """The tensors that have to be there before one can be computed."""
    if not isinstance(tensor, Carried):
        return ir.reads(tensor)
    assert tensor.recurrence is not None
    body, states = tensor.recurrence.body, tensor.recurrence.states
    return [*tensor.recurrence.inits, *(source for stage in body for source in ir.reads(stage)
                                        if source not in body and source not in states)]


def _check_scans(stages: Sequence[Tensor], scans: Sequence[Scan]) -> None:
    """What depends on a state has no other place than the steps of its scan."""
    inside = {t for scan in scans for t in scan.body}
    for stage in stages:
        if isinstance(stage, te.Tensor) and stage.waits and stage not in inside:
            raise ScheduleError(
                f"{stage.name} depends on {', '.join(s.name for s in stage.waits)}, the state of a "
                "scan, but is no part of that scan", hint="read the result of te.scan instead")
    carried = [s for scan in scans for s in scan.states]
    twice = next((s.name for s in carried if carried.count(s) > 1), None)
    if twice is not None:
        raise ScheduleError(f"{twice} is the state of two scans", hint="give each its own state")


class ScheduleBuilder:
    """A schedule being written; `schedule` is the data so far, checked after every step."""

    def __init__(self, program: Program):
        self.program = program
        self.schedule = Schedule()
        self.plan: Plan = plan(program, self.schedule)

    def __getitem__(self, stage: Tensor | str | StageHandle) -> StageHandle:
        if isinstance(stage, StageHandle):
            return stage
        return StageHandle(self, self.plan.stage(name_of(stage)).name)

    def cache_read(self, tensor: Tensor | str | StageHandle, scope: str,
                   readers: Sequence[Any]) -> StageHandle:
        """Copy a tensor into memory of its own for some readers; answers with the new stage."""
        source = _stage_name(tensor)
        self.set(self.schedule.cache_read(source, scope, [_stage_name(r) for r in readers]))
        return StageHandle(self, f"{source}.{scope}")

    def cache_write(self, tensor: Tensor | str | StageHandle, scope: str = "local") -> StageHandle:
        """Compute a tensor in memory of its own and copy it out; answers with the new stage."""
        source = self[tensor].name
        self.set(self.schedule.cache_write(source, scope))
        return StageHandle(self, f"{source}.{scope}")

    def rfactor(self, tensor: Tensor | str | StageHandle, axis: Any,
                factor_axis: int = 0) -> StageHandle:
        """Reduce for each step of a reduction's loop apart, in a stage of its own: the answer.

        There the loop is an axis of the result, which may be parallel or vectorised; the stage
        itself combines what comes out. Where in the new result it lies, `factor_axis` says.
        """
        stage = self[tensor]
        schedule = self.schedule.rfactor(stage.name, stage._axis(axis), factor_axis)
        self.set(schedule)
        return StageHandle(self, f"{stage.name}.rf")

    def set(self, schedule: Schedule) -> None:
        """Take over a schedule if it fits the program."""
        self.plan = plan(self.program, schedule, complete=False)
        self.schedule = schedule

    def __str__(self) -> str:
        return str(self.schedule)


def _stage_name(stage: Any) -> str:
    return stage.name if isinstance(stage, StageHandle) else name_of(stage)


@dataclass(frozen=True)
class StageHandle:
    """One stage of a schedule being written. Axes go by name, or as Axis objects."""

    builder: ScheduleBuilder
    name: str

    @property
    def axes(self) -> tuple[str, ...]:
        """The loops there are now, outside in."""
        return self.builder.plan.stage(self.name).nest.order

    @property
    def axis(self) -> tuple[str, ...]:
        """The axes of the tensor's dimensions."""
        return self.builder.plan.stage(self.name).nest.data

    @property
    def reduce_axis(self) -> tuple[str, ...]:
        """The axes that are reduced over."""
        return self.builder.plan.stage(self.name).nest.reduction

    def _axis(self, axis: Any) -> str:
        name = name_of(plain(axis))
        renamed = [r for r in self.reduce_axis if r != name and r.rstrip("0123456789") == name]
        if isinstance(axis, ReduceAxis) and name in self.axis and renamed:
            raise ScheduleError(f"{name!r} names both a dimension of {self.name} and a reduction",
                                hint="give reduce_axis another name")
        return name

    def _do(self, schedule: Schedule) -> None:
        self.builder.set(schedule)

    def split(self, axis: Any, factor: int | None = None, nparts: int | None = None,
              ) -> tuple[str, str]:
        """Cut a loop into pieces of `factor`, or into `nparts` pieces of one size.

        Answers with the outer and the inner loop. The last pieces may be shorter, or empty.
        """
        name = self._axis(axis)
        self._do(self.builder.schedule.split(self.name, name, factor, nparts=nparts))
        return f"{name}.o", f"{name}.i"

    def tile(self, first: Any, second: Any, first_factor: int, second_factor: int,
             ) -> tuple[str, str, str, str]:
        """Split two loops; answers with both outer and then both inner loops."""
        x, y = self._axis(first), self._axis(second)
        self._do(self.builder.schedule.tile(self.name, x, y, first_factor, second_factor))
        return f"{x}.o", f"{y}.o", f"{x}.i", f"{y}.i"

    def reorder(self, *axes: Any) -> None:
        """Nest the named loops in this order."""
        self._do(self.builder.schedule.reorder(self.name, *map(self._axis, axes)))

    def fuse(self, outer: Any, inner: Any, *more: Any) -> str:
        """Turn neighbouring loops into one; answers with it."""
        names = [self._axis(a) for a in (outer, inner, *more)]
        self._do(self.builder.schedule.fuse(self.name, *names))
        return "_".join(names)

    def vectorize(self, axis: Any) -> None:
        """Run a loop in the lanes of the vector unit."""
        self._do(self.builder.schedule.vectorize(self.name, self._axis(axis)))

    def unroll(self, axis: Any) -> None:
        """Repeat a loop's body instead of looping."""
        self._do(self.builder.schedule.unroll(self.name, self._axis(axis)))

    def parallel(self, axis: Any, grain: int = 1) -> None:
        """Spread a loop over the cores."""
        self._do(self.builder.schedule.parallel(self.name, self._axis(axis), grain))

    def bind(self, axis: Any, kind: str = "program") -> None:
        """Give each iteration of a loop to a program instance of the chip."""
        self._do(self.builder.schedule.bind(self.name, self._axis(axis), kind))

    def tensorize(self, axis: Any, intrinsic: str | Intrinsic) -> None:
        """Replace the loops from `axis` inwards by a registered tile intrinsic."""
        name = intrinsic if isinstance(intrinsic, str) else intrinsic.tile.name
        self._do(self.builder.schedule.tensorize(self.name, self._axis(axis), name))

    def compute_at(self, consumer: Any, axis: Any) -> None:
        """Compute this stage inside a loop of one that reads it."""
        target = self.builder[consumer]
        self._do(self.builder.schedule.compute_at(self.name, target.name, target._axis(axis)))

    def compute_root(self) -> None:
        """Compute this stage in loops of its own, whatever was said before."""
        self._do(self.builder.schedule.compute_root(self.name))

    def compute_inline(self) -> None:
        """Compute this stage's elements where they are read."""
        self._do(self.builder.schedule.compute_inline(self.name))

    def pack(self, *axes: Any) -> None:
        """Lay out this stage's own memory in the given order of its axes."""
        self._do(self.builder.schedule.pack(self.name, *map(self._axis, axes)))

    def streaming(self) -> None:
        """Say that what this stage stores will not be read soon."""
        self._do(self.builder.schedule.streaming(self.name))
