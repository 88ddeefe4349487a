"""Recurrences: tensors whose rows are computed from the rows before them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.base.scalar import Axis, Scalar, as_scalar, call, loads, where
from terrazzo.base.shapes import dims_text
from terrazzo.dtypes import as_dtype, float32
from terrazzo.errors import ArgumentError, DTypeError, IndexOutOfRange, ShapeError
from terrazzo.expr import ir
from terrazzo.expr.access import Access, accesses
from terrazzo.expr.stage import copy_of
from terrazzo.index import Index, proves_eq
from terrazzo.te.algorithm import State, Tensor, new_name, refuse_outside
from terrazzo.te.order import topological
from terrazzo.te.terms import plain


@dataclass(frozen=True, eq=False)
class Recurrence:
    """What te.scan was told; a schedule makes an `ir.Scan` of it."""

    name: str
    names: tuple[str, ...]  # of the results
    states: tuple[State, ...]
    inits: tuple[Tensor, ...]
    updates: tuple[Tensor, ...]
    body: tuple[Tensor, ...]  # the updates, and what they need of each row, in order

    def result(self, number: int) -> Carried:
        """One of the results: the first rows of its init, then those of its update."""
        init, update = self.inits[number], self.updates[number]
        axes = ir.axes_for(update.shape)
        given = call("lt", as_scalar(axes[0].var), as_scalar(init.shape[0]))
        return Carried(self.names[number], update.shape, update.dtype, axes,
                       where(given, ir.load(init, axes), ir.load(update, axes)),
                       origin=self.name, recurrence=self, number=number)

    def scan(self, results: Sequence[ir.Tensor]) -> ir.Scan:
        return ir.Scan(self.name, self.states, self.inits, self.updates, tuple(results), self.body)


@dataclass(frozen=True, eq=False)
class Carried(Tensor):
    """A result of a recurrence."""

    recurrence: Recurrence | None = None
    number: int = 0


def state(shape: Iterable[Index], dtype: Any = float32, name: str | None = None) -> State:
    """What a scan carries: the rows of its result, of which an update reads those before its own.

    The first axis is the one that the scan walks along.
    """
    made = State(name or new_name("state"), tuple(map(plain, shape)), as_dtype(dtype))
    if not made.shape:
        raise ShapeError(f"state {made.name} has no axis to walk along",
                         hint="its first axis is the one that te.scan walks along")
    return made


def scan(init: Any, update: Any, state: Any, name: str | None = None) -> Any:
    """Tensors whose first rows are `init`, and every other row `update` of the rows before it.

        s = te.state((steps, n))
        first = te.compute((1, n), lambda t, i: x[0, i])
        then = te.compute((steps, n), lambda t, i: s[t - 1, i] + x[t, i])
        sums = te.scan(first, then, s)

    For several states give as many of each. What an update reads that depends on a state is
    computed in each step as well, and has the same first axis.
    """
    several = isinstance(state, (tuple, list))
    states, inits, updates = (tuple(t) if isinstance(t, (tuple, list)) else (t,)
                              for t in (state, init, update))
    name = name or new_name("scan")
    names = tuple(f"{name}.{j}" for j in range(len(states))) if several else (name,)
    _check_alike(name, states, inits, updates)
    first: list[Tensor] = []
    for each, given in zip(names, inits, strict=True):
        # Its memory will be the result's: so it is computed for this alone.
        first.append(Tensor(**vars(copy_of(given, f"{each}.init"))) if (
            given.is_input or isinstance(given, Carried) or given in first) else given)
    made = Recurrence(name, names, states, tuple(first), updates, _body(name, states, updates))
    results = tuple(made.result(j) for j in range(len(names)))
    for stage, access in scan_accesses(made.scan(results)):
        refuse_outside(stage, access, {})
    return results if several else results[0]


# ---------------------------------------------------------------- checks
def _check_alike(name: str, states: Sequence[Any], inits: Sequence[Any],
                 updates: Sequence[Any]) -> None:
    if not len(states) == len(inits) == len(updates) > 0:
        raise ArgumentError(f"{name} has {len(states)} states, {len(inits)} inits and "
                            f"{len(updates)} updates", hint="give one of each for each state")
    for tensor in (*states, *inits, *updates):
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"{name} was given {tensor!r}", hint="give tensors of te")
    if len(set(states)) < len(states) or len(set(updates)) < len(updates):
        raise ArgumentError(f"{name} was given a state or an update twice",
                            hint="each state has an update of its own")
    for carried, first, then in zip(states, inits, updates, strict=True):
        if not isinstance(carried, State):
            raise ArgumentError(f"{carried.name} is no state", hint="make it with te.state")
        if first.waits:
            raise ArgumentError(f"{first.name} begins {name}, but is computed inside of a scan",
                                hint="there are no scans inside of scans")
        rows = (carried.shape, then.shape), (carried.shape[1:], first.shape[1:])
        if not first.shape or not all(map(_equal, *zip(*rows))):
            raise ShapeError(
                f"state {carried.name} has shape {dims_text(carried.shape)}, its init "
                f"{dims_text(first.shape)} and its update {dims_text(then.shape)}",
                hint="state and update have one shape, and init some of its rows")
        if not carried.dtype is first.dtype is then.dtype:
            raise DTypeError(f"state {carried.name} is {carried.dtype.name}, its init "
                             f"{first.dtype.name} and its update {then.dtype.name}",
                             hint="convert with te.cast")


def _equal(a: Sequence[Index], b: Sequence[Index]) -> bool:
    return len(a) == len(b) and all(map(proves_eq, a, b))


def _body(name: str, states: Sequence[State], updates: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What is computed for each row, in order."""

    def needs(tensor: Tensor) -> list[Tensor]:
        return [source for source in ir.reads(tensor)
                if isinstance(source, Tensor) and source.waits]

    found = topological(updates, needs)
    for tensor in found:
        foreign = [s.name for s in tensor.waits if s not in states]
        if foreign:
            raise ArgumentError(f"{tensor.name} reads {', '.join(foreign)}, which is no state of "
                                f"{name}", hint="one scan may have several states")
        if not tensor.shape or not proves_eq(tensor.shape[0], states[0].shape[0]):
            raise ShapeError(f"{tensor.name} is computed for each row of {name}, but has shape "
                             f"{dims_text(tensor.shape)}",
                             hint=f"let its first axis have {states[0].shape[0]} elements")
    return _joint_together(found)


def _joint_together(found: Sequence[Tensor]) -> tuple[Tensor, ...]:
    groups: dict[object, list[Tensor]] = {}
    for tensor in found:
        groups.setdefault(tensor.joint or tensor, []).append(tensor)

    def needs(key: object) -> list[object]:
        return [source.joint or source for member in groups[key] for source in ir.reads(member)
                if (source.joint or source) in groups]

    order = topological(groups, needs)
    return tuple(t for key in order for t in sorted(groups[key], key=lambda t: t.name))


@dataclass(frozen=True)
class Earlier(Access):
    """A row of a state, which has to lie before the one that is computed."""

    row: Index = 0

    def __str__(self) -> str:
        return (f"row {self.row} of {self.tensor.name} is not computed before row "
                f"{self.axes[0].var}, for {', '.join(map(str, self.axes))}")


def scan_accesses(scan: ir.Scan) -> Iterator[tuple[str, Access]]:
    """What a scan reads: of its states, rows before the one that it computes."""
    yield scan.name, Access(scan.results[0], 0, scan.first - 1, (), ())
    for tensor in scan.body:
        _check_rows(scan, tensor)
        row = tensor.axes[0].var
        for access in accesses(tensor):
            there = replace(access, axes=(Axis(row, scan.first, scan.rows), *access.axes[1:]))
            yield tensor.name, there
            if access.tensor in scan.states and access.dimension == 0:
                yield tensor.name, Earlier(there.tensor, 0, access.index + scan.rows - row,
                                           there.axes, there.facts, access.index)


def _check_rows(scan: ir.Scan, tensor: ir.Tensor) -> None:
    assert tensor.body is not None
    row = tensor.axes[0].var
    for load in loads(tensor.body):
        at = load.indices[0] if load.indices else None
        if load.source in scan.body and at is not row:
            raise IndexOutOfRange(
                f"{tensor.name} reads another row of {load.source.name} than its own, {row}",
                hint="only states keep their rows from step to step")
        if load.source in scan.states and isinstance(at, Scalar):
            raise IndexOutOfRange(f"{tensor.name} reads a computed row of {load.source.name}",
                                  hint="name rows by index arithmetic: s[t - 1, i]")


def all_accesses(program: ir.Program) -> Iterator[tuple[str, Access]]:
    """Everything that a program reads, by stages."""
    rows = {t for scan in program.scans for t in (*scan.body, *scan.results)}
    for stage in program.stages:
        if stage not in rows:
            yield from ((stage.name, access) for access in accesses(stage))
    for scan in program.scans:
        yield from scan_accesses(scan)
