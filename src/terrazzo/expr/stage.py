"""The stages of a program while a schedule is applied: what each computes, its loops, its place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from terrazzo.base.scalar import Axis, Load, Scalar, Tuple, const, loads, rewrite
from terrazzo.errors import ScheduleError
from terrazzo.expr import loopnest
from terrazzo.expr.ir import Program, Scan, Tensor, axes_for, load
from terrazzo.expr.loopnest import LoopNest
from terrazzo.expr.reductions import name_reductions, scheduled_reductions
from terrazzo.expr.schedule import Tensorize


@dataclass(frozen=True, eq=False)
class Stage:
    """What one nest of loops computes, and where and how it is stored.

    That is one tensor as a rule. If there are several, of one shape, the body is a Tuple.
    """

    tensors: tuple[Tensor, ...]  # what other stages load; their own bodies may be out of date
    axes: tuple[Axis, ...]
    body: Scalar
    nest: LoopNest
    attach: tuple[str, str] | None = None  # the consumer and its loop
    streaming: bool = False
    packed: tuple[str, ...] | None = None  # axes in the order of storage
    tensorize: Tensorize | None = None
    scan: Scan | None = None  # the recurrence for each of whose rows it is computed

    @property
    def tensor(self) -> Tensor:
        """The first of its tensors, for what they have in common."""
        return self.tensors[0]

    @property
    def name(self) -> str:
        return self.nest.stage

    def goes_by(self, name: str) -> bool:
        return name == self.name or any(name == t.name for t in self.tensors)


@dataclass(frozen=True, eq=False)
class Plan:
    """What lowering starts from."""

    program: Program
    stages: tuple[Stage, ...]
    outputs: tuple[Tensor, ...]

    def stage(self, name: str) -> Stage:
        """The stage of a name, or an error that lists all."""
        found = self._named.get(name)
        if found is not None:
            return found
        there = ", ".join(s.name for s in self.stages)
        raise ScheduleError(f"program {self.program.name} has no stage {name!r}",
                            hint=f"its stages are: {there}")

    @cached_property
    def _named(self) -> dict[str, Stage]:
        return {**{t.name: s for s in self.stages for t in s.tensors},
                **{s.nest.stage: s for s in self.stages}}

    @cached_property
    def _kept(self) -> frozenset[Tensor]:
        return frozenset((*self.outputs, *(t for scan in self.program.scans
                                           for t in (*scan.inits, *scan.updates))))

    def is_output(self, tensor: Tensor) -> bool:
        """Whether a tensor has to be stored whole, where others expect it."""
        return tensor in self._kept

    def has_output(self, stage: Stage) -> bool:
        return not self._kept.isdisjoint(stage.tensors)

    def tensors(self) -> list[Tensor]:
        """Everything that can be read."""
        return [*self.program.inputs, *(t for s in self.stages for t in s.tensors),
                *(t for scan in self.program.scans for t in scan.results)]

    def readers(self, stage: Stage) -> list[Stage]:
        """The stages that load what a stage computes."""
        return [s for s in self.stages if reads_any(s.body, stage.tensors)]


def reads_any(body: Scalar, tensors: Sequence[Tensor]) -> bool:
    """Whether an expression loads from one of some tensors."""
    return any(x.source is t for x in loads(body) for t in tensors)


def make_stage(tensors: Sequence[Tensor], body: Scalar | None = None,
               scan: Scan | None = None) -> Stage:
    """A stage in plain loops: for one tensor, or for several that were computed together."""
    first = tensors[0]
    if body is None:
        bodies = [t.body for t in tensors if t.body is not None]
        assert len(bodies) == len(tensors)
        body = bodies[0] if len(bodies) == 1 else Tuple(first.dtype, tuple(bodies))
    body = name_reductions(body, [a.var.name for a in first.axes])
    reductions = [a.var.name for a in scheduled_reductions(body)]
    nest = loopnest.initial(first.joint or first.name, [a.var.name for a in first.axes], reductions)
    return Stage(tuple(tensors), first.axes, body, nest, scan=scan)


def copy_of(tensor: Tensor, name: str) -> Tensor:
    """A tensor with the same elements."""
    axes = axes_for(tensor.shape)
    return Tensor(name, tensor.shape, tensor.dtype, axes, load(tensor, axes), origin=tensor.origin)


def replace_loads(body: Scalar, old: Tensor, new: Tensor) -> Scalar:
    """Load from another tensor of the same shape."""
    return rewrite(body, lambda n: Load(new.dtype, new, n.indices)
                   if isinstance(n, Load) and n.source is old else None)


def check_names(names: Iterable[str], program: str) -> None:
    """Refuse two tensors of one name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ScheduleError(f"program {program} has two tensors named {name!r}",
                                hint="give each a name of its own; schedules go by names")
        seen.add(name)


# ---------------------------------------------------------------- stages inside of others
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


def outermost(state: Plan, stage: Stage) -> Stage:
    """The stage with loops of its own inside of which a stage is computed, or itself."""
    while stage.attach is not None:
        stage = state.stage(stage.attach[0])
    return stage


def shared_by_tasks(state: Plan, stage: Stage) -> bool:
    """Whether a stage is computed inside a concurrent loop of another, several times perhaps."""
    while stage.attach is not None:
        name, at = stage.attach
        stage = state.stage(name)
        around = stage.nest.order[:stage.nest.order.index(at) + 1]
        if any(stage.nest.kind(axis) in ("parallel", "program") for axis in around):
            return True
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
