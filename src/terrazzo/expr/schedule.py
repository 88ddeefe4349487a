"""Schedules: how a program's loops run, as plain data apart from what they compute.

A `Schedule` is a list of steps, each about one stage (a computed tensor) by name, with loops by
name: axis "i" split gives "i.o" and "i.i", axes "i" and "j" fused give "i_j".

    Schedule().split("C", "i", 8).reorder("C", "i.o", "k", "i.i").vectorize("C", "i.i")

Steps know nothing of a program; `plan.plan` applies them to one and says what does not fit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

from terrazzo.base.scalar import Axis
from terrazzo.errors import ScheduleError
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import Index, Var, ceildiv, maximum

SCOPES = ("local",)
# How a loop may run, and the primitive that says so.
MARKS = {"vector": "vectorize", "parallel": "parallel", "unrolled": "unroll", "program": "bind"}


@dataclass(frozen=True)
class Step:
    """One primitive applied to one stage; see the subclasses."""

    verb: ClassVar[str] = ""
    stage: str

    def arguments(self) -> str:
        """The arguments as the text form shows them."""
        return ""

    def __str__(self) -> str:
        return f"{self.stage}.{self.verb}({self.arguments()})"


@dataclass(frozen=True)
class Split(Step):
    """One loop becomes two: `inner` runs over `factor` values, `outer` over the pieces.

    Instead of a factor there may be a number of pieces; how long they are is then worked out where
    the loop's length is known, which may be when the kernel runs.
    """

    verb: ClassVar[str] = "split"
    axis: str
    factor: int | None
    outer: str
    inner: str
    nparts: int | None = None

    def piece(self, room: Index) -> Index:
        """How many values `inner` runs over, in a loop of at most `room`."""
        if self.factor is not None:
            return self.factor
        assert self.nparts is not None
        return maximum(ceildiv(room, self.nparts), 1)

    def arguments(self) -> str:
        by = self.factor if self.nparts is None else f"nparts {self.nparts}"
        return f"{self.axis}, {by} -> {self.outer}, {self.inner}"


@dataclass(frozen=True)
class Fuse(Step):
    """Two neighbouring loops become one over all pairs."""

    verb: ClassVar[str] = "fuse"
    outer: str
    inner: str
    fused: str

    def arguments(self) -> str:
        return f"{self.outer}, {self.inner} -> {self.fused}"


@dataclass(frozen=True)
class Reorder(Step):
    """The named loops are nested in this order, in the places they take now."""

    verb: ClassVar[str] = "reorder"
    axes: tuple[str, ...]

    def arguments(self) -> str:
        return ", ".join(self.axes)


@dataclass(frozen=True)
class Mark(Step):
    """A loop runs as `kind`: vector, parallel, unrolled or program (one instance a program)."""

    verb: ClassVar[str] = "mark"
    axis: str
    kind: str
    grain: int = 1

    def __str__(self) -> str:
        verb = MARKS.get(self.kind, self.kind)
        grain = f", grain {self.grain}" if self.grain != 1 else ""
        return f"{self.stage}.{verb}({self.axis}{grain})"


@dataclass(frozen=True)
class ComputeAt(Step):
    """The stage is computed inside a loop of a consumer, just the part that is needed there."""

    verb: ClassVar[str] = "compute_at"
    consumer: str
    axis: str

    def arguments(self) -> str:
        return f"{self.consumer}, {self.axis}"


@dataclass(frozen=True)
class ComputeRoot(Step):
    """The stage is computed whole, before whatever reads it."""

    verb: ClassVar[str] = "compute_root"


@dataclass(frozen=True)
class ComputeInline(Step):
    """The stage has no loops and no memory: its readers compute its elements themselves."""

    verb: ClassVar[str] = "compute_inline"


@dataclass(frozen=True)
class CacheRead(Step):
    """A new stage `name` copies this tensor into memory of its own, and `readers` read that."""

    verb: ClassVar[str] = "cache_read"
    scope: str
    readers: tuple[str, ...]
    name: str

    def arguments(self) -> str:
        return f"{self.scope}, {', '.join(self.readers)} -> {self.name}"


@dataclass(frozen=True)
class CacheWrite(Step):
    """A new stage `name` computes the values, and this stage only copies them out."""

    verb: ClassVar[str] = "cache_write"
    scope: str
    name: str

    def arguments(self) -> str:
        return f"{self.scope} -> {self.name}"


@dataclass(frozen=True)
class RFactor(Step):
    """A new stage `name` reduces for each value of a loop apart; this stage combines the results.

    The loop becomes an axis of the new stage's result, in the place `factor_axis`.
    """

    verb: ClassVar[str] = "rfactor"
    axis: str
    name: str
    factor_axis: int = 0

    def arguments(self) -> str:
        place = f" at {self.factor_axis}" if self.factor_axis else ""
        return f"{self.axis}{place} -> {self.name}"


@dataclass(frozen=True)
class Pack(Step):
    """The stage's own memory is laid out in this order of its axes, so that readers walk along."""

    verb: ClassVar[str] = "pack"
    axes: tuple[str, ...]

    def arguments(self) -> str:
        return ", ".join(self.axes)


@dataclass(frozen=True)
class Tensorize(Step):
    """The loops from `axis` inwards are done by one tile intrinsic of the chip."""

    verb: ClassVar[str] = "tensorize"
    axis: str
    intrinsic: str

    def arguments(self) -> str:
        return f"{self.axis}, {self.intrinsic}"


@dataclass(frozen=True)
class Streaming(Step):
    """What the stage stores will not be read soon: the stores may bypass the caches."""

    verb: ClassVar[str] = "streaming"


STEPS: dict[str, type[Step]] = {cls.verb: cls for cls in (
    Split, Fuse, Reorder, Mark, ComputeAt, ComputeRoot, ComputeInline, CacheRead, CacheWrite,
    RFactor, Pack, Tensorize, Streaming)}


def name_of(thing: Any) -> str:
    """The name that steps know a tensor or an axis by."""
    if isinstance(thing, str):
        return thing
    if isinstance(thing, Axis):
        return thing.var.name
    if isinstance(thing, (Tensor, Var)):
        return thing.name
    raise ScheduleError(f"{thing!r} names neither a tensor nor an axis",
                        hint="pass a name, a tensor or an axis")


@dataclass(frozen=True)
class Schedule:
    """Steps in order. Each method answers with a schedule that has one more primitive."""

    steps: tuple[Step, ...] = ()

    def of(self, stage: Any) -> tuple[Step, ...]:
        """The steps about one stage."""
        return tuple(s for s in self.steps if s.stage == name_of(stage))

    def then(self, *steps: Step) -> Schedule:
        """This schedule with more steps at the end."""
        return Schedule(self.steps + steps)

    # ------------------------------------------------------------ loops
    def split(self, stage: Any, axis: Any, factor: int | None = None, outer: str | None = None,
              inner: str | None = None, nparts: int | None = None) -> Schedule:
        """Cut a loop into pieces of `factor`, or into `nparts` pieces; the last may be shorter."""
        axis = name_of(axis)
        if (factor is None) == (nparts is None):
            raise ScheduleError(f"cannot split axis {axis!r} of {name_of(stage)}",
                                hint="give either a factor or nparts")
        by = factor if nparts is None else nparts
        if not isinstance(by, int) or by < 1:
            raise ScheduleError(f"cannot split axis {axis!r} of {name_of(stage)} by {by!r}",
                                hint="a factor is a whole number, 1 or more")
        return self.then(Split(name_of(stage), axis, factor, outer or f"{axis}.o",
                               inner or f"{axis}.i", nparts))

    def tile(self, stage: Any, first: Any, second: Any, first_factor: int,
             second_factor: int) -> Schedule:
        """Split two neighbouring loops and put both outer parts around both inner parts."""
        x, y = name_of(first), name_of(second)
        return (self.split(stage, x, first_factor).split(stage, y, second_factor)
                .reorder(stage, f"{x}.o", f"{y}.o", f"{x}.i", f"{y}.i"))

    def reorder(self, stage: Any, *axes: Any) -> Schedule:
        """Nest the named loops in this order."""
        return self.then(Reorder(name_of(stage), tuple(map(name_of, axes))))

    def fuse(self, stage: Any, outer: Any, inner: Any, *more: Any,
             fused: str | None = None) -> Schedule:
        """Turn neighbouring loops into one."""
        a, b = name_of(outer), name_of(inner)
        if not more:
            return self.then(Fuse(name_of(stage), a, b, fused or f"{a}_{b}"))
        return (self.then(Fuse(name_of(stage), a, b, f"{a}_{b}"))
                .fuse(stage, f"{a}_{b}", *more, fused=fused))

    def vectorize(self, stage: Any, axis: Any) -> Schedule:
        """Run a loop in the lanes of the vector unit."""
        return self.then(Mark(name_of(stage), name_of(axis), "vector"))

    def unroll(self, stage: Any, axis: Any) -> Schedule:
        """Repeat a loop's body instead of looping."""
        return self.then(Mark(name_of(stage), name_of(axis), "unrolled"))

    def parallel(self, stage: Any, axis: Any, grain: int = 1) -> Schedule:
        """Spread a loop over the cores; `grain` iterations at least make a task."""
        return self.then(Mark(name_of(stage), name_of(axis), "parallel", grain))

    def bind(self, stage: Any, axis: Any, kind: str = "program") -> Schedule:
        """Give each iteration to a program instance of the chip."""
        if kind != "program":
            raise ScheduleError(f"cannot bind axis {name_of(axis)!r} to {kind!r}",
                                hint="the only thing to bind to is 'program'")
        return self.then(Mark(name_of(stage), name_of(axis), kind))

    def tensorize(self, stage: Any, axis: Any, intrinsic: str) -> Schedule:
        """Replace the loops from `axis` inwards by a tile intrinsic."""
        return self.then(Tensorize(name_of(stage), name_of(axis), intrinsic))

    # ------------------------------------------------------------ places
    def compute_at(self, stage: Any, consumer: Any, axis: Any) -> Schedule:
        """Compute a stage inside a loop of one that reads it."""
        return self.then(ComputeAt(name_of(stage), name_of(consumer), name_of(axis)))

    def compute_root(self, stage: Any) -> Schedule:
        """Compute a stage in loops of its own, as is usual."""
        return self.then(ComputeRoot(name_of(stage)))

    def compute_inline(self, stage: Any) -> Schedule:
        """Compute a stage's elements where they are read."""
        return self.then(ComputeInline(name_of(stage)))

    def cache_read(self, tensor: Any, scope: str, readers: Sequence[Any],
                   name: str | None = None) -> Schedule:
        """Copy a tensor for some readers; the copy is a stage of its own, `A.local`."""
        names = tuple(map(name_of, readers))
        return self.then(CacheRead(
            name_of(tensor), _scope(scope), names, name or f"{name_of(tensor)}.{scope}"))

    def cache_write(self, tensor: Any, scope: str = "local", name: str | None = None) -> Schedule:
        """Compute a tensor in memory of its own first; that is a stage of its own, `C.local`."""
        return self.then(CacheWrite(
            name_of(tensor), _scope(scope), name or f"{name_of(tensor)}.{scope}"))

    def rfactor(self, stage: Any, axis: Any, factor_axis: int = 0, name: str | None = None,
                ) -> Schedule:
        """Reduce for each value of a loop apart; that is a stage of its own, `C.rf`."""
        return self.then(RFactor(
            name_of(stage), name_of(axis), name or f"{name_of(stage)}.rf", factor_axis))

    def pack(self, stage: Any, *axes: Any) -> Schedule:
        """Lay out a stage's own memory in the given order of its (split) data axes."""
        return self.then(Pack(name_of(stage), tuple(map(name_of, axes))))

    def streaming(self, stage: Any) -> Schedule:
        """Say that what a stage stores will not be read soon."""
        return self.then(Streaming(name_of(stage)))

    # ------------------------------------------------------------ text
    def __str__(self) -> str:
        return "\n".join(map(str, self.steps)) or "plain loops"

    def to_json(self) -> str:
        """Text that `from_json` reads back; equal schedules give equal text."""
        rows = [{"do": s.verb, **{f.name: getattr(s, f.name) for f in fields(s)}}
                for s in self.steps]
        return json.dumps(rows)

    @staticmethod
    def from_json(text: str) -> Schedule:
        """The schedule that `to_json` wrote."""
        steps = []
        for row in json.loads(text):
            cls = STEPS.get(row.pop("do", None))
            if cls is None or not _fits(row, cls):
                raise ScheduleError(f"no schedule step looks like {row}",
                                    hint=f"steps are {', '.join(STEPS)}")
            values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v
                                      for k, v in row.items()}
            steps.append(cls(**values))
        return Schedule(tuple(steps))


def _fits(row: Mapping[str, Any], cls: type[Step]) -> bool:
    needed = {f.name for f in fields(cls) if f.default is MISSING}
    return needed <= set(row) <= {f.name for f in fields(cls)}


def _scope(scope: str) -> str:
    if scope not in SCOPES:
        raise ScheduleError(f"there is no memory scope {scope!r}",
                            hint=f"scopes are {', '.join(SCOPES)}")
    return scope


def default_schedule(program: Program) -> Schedule:
    """Plain loops in order, every tensor computed whole: slow, and right for any program."""
    return Schedule()
