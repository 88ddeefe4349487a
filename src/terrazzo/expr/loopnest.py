"""The loops of one stage while a schedule is applied: names, where they come from, their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from terrazzo.errors import ScheduleError
from terrazzo.expr.schedule import Fuse, Mark, Reorder, Split

_KIND_WORDS = {"vector": "vectorised", "parallel": "parallel", "unrolled": "unrolled",
               "program": "bound to a program"}


@dataclass(frozen=True)
class LoopNest:
    """Axes of a stage, the splits and fusions made of them, and the loops that result."""

    stage: str
    data: tuple[str, ...]  # one a dimension of the tensor
    reduction: tuple[str, ...]
    order: tuple[str, ...]  # the loops, outside in
    relations: tuple[Split | Fuse, ...] = ()
    marks: Mapping[str, Mark] = field(default_factory=dict)

    def roots_of(self, axis: str) -> frozenset[str]:
        """The stage's own axes that an axis is made of."""
        if axis in self.data or axis in self.reduction:
            return frozenset((axis,))
        for relation in self.relations:
            if isinstance(relation, Split) and axis in (relation.outer, relation.inner):
                return self.roots_of(relation.axis)
            if isinstance(relation, Fuse) and axis == relation.fused:
                return self.roots_of(relation.outer) | self.roots_of(relation.inner)
        raise KeyError(axis)

    def leaves_of(self, axis: str) -> frozenset[str]:
        """The loops that an axis ended up in."""
        for relation in self.relations:
            if isinstance(relation, Split) and relation.axis == axis:
                return self.leaves_of(relation.outer) | self.leaves_of(relation.inner)
            if isinstance(relation, Fuse) and axis in (relation.outer, relation.inner):
                return self.leaves_of(relation.fused)
        return frozenset((axis,))

    def is_reduction(self, axis: str) -> bool:
        return not self.roots_of(axis).isdisjoint(self.reduction)

    def kind(self, axis: str) -> str:
        return self.marks[axis].kind if axis in self.marks else "serial"

    def names(self) -> set[str]:
        """Every axis name in use, also of axes that have been split or fused away."""
        made = {name for r in self.relations
                for name in ((r.outer, r.inner) if isinstance(r, Split) else (r.fused,))}
        return made | set(self.data) | set(self.reduction)


def initial(stage: str, data: Iterable[str], reduction: Iterable[str]) -> LoopNest:
    """Plain loops: the dimensions in order, then the reductions."""
    data, reduction = tuple(data), tuple(reduction)
    return LoopNest(stage, data, reduction, data + reduction)


def apply(nest: LoopNest, step: Split | Fuse | Reorder | Mark) -> LoopNest:
    """The loops after one more step."""
    if isinstance(step, Split):
        return _split(nest, step)
    if isinstance(step, Fuse):
        return _fuse(nest, step)
    return _reorder(nest, step) if isinstance(step, Reorder) else _mark(nest, step)


def check_loop(nest: LoopNest, axis: str) -> None:
    """Refuse a name that is not a loop of the stage, and list those that are."""
    if axis in nest.order:
        return
    there = ", ".join(nest.order) or "none"
    for relation in nest.relations:
        if isinstance(relation, Split) and relation.axis == axis:
            raise ScheduleError(
                f"axis {axis!r} of {nest.stage} was split into {relation.outer!r} and "
                f"{relation.inner!r}", hint=f"the loops there are now: {there}")
        if isinstance(relation, Fuse) and axis in (relation.outer, relation.inner):
            raise ScheduleError(f"axis {axis!r} of {nest.stage} was fused into {relation.fused!r}",
                                hint=f"the loops there are now: {there}")
    raise ScheduleError(f"{nest.stage} has no axis {axis!r}", hint=f"its loops are: {there}")


def _check_unmarked(nest: LoopNest, axis: str, action: str) -> None:
    if axis in nest.marks:
        word = _KIND_WORDS[nest.marks[axis].kind]
        raise ScheduleError(f"axis {axis!r} of {nest.stage} is already {word}",
                            hint=f"{action} it before it is marked")


def _check_new(nest: LoopNest, *names: str) -> None:
    for name in names:
        if name in nest.names() or names.count(name) > 1:
            raise ScheduleError(f"{nest.stage} already has an axis named {name!r}",
                                hint="choose another name for the new axis")


def _split(nest: LoopNest, step: Split) -> LoopNest:
    check_loop(nest, step.axis)
    _check_unmarked(nest, step.axis, "split")
    _check_new(nest, step.outer, step.inner)
    at = nest.order.index(step.axis)
    order = (*nest.order[:at], step.outer, step.inner, *nest.order[at + 1:])
    return replace(nest, order=order, relations=(*nest.relations, step))


def _fuse(nest: LoopNest, step: Fuse) -> LoopNest:
    for axis in (step.outer, step.inner):
        check_loop(nest, axis)
        _check_unmarked(nest, axis, "fuse")
    _check_new(nest, step.fused)
    at = nest.order.index(step.outer)
    if nest.order[at + 1:at + 2] != (step.inner,):
        raise ScheduleError(
            f"axes {step.outer!r} and {step.inner!r} of {nest.stage} are not neighbours in "
            f"{', '.join(nest.order)}",
            hint=f"reorder so that {step.inner!r} comes right inside {step.outer!r}")
    if nest.is_reduction(step.outer) != nest.is_reduction(step.inner):
        raise ScheduleError(
            f"axes {step.outer!r} and {step.inner!r} of {nest.stage} cannot be fused: one walks "
            "over the result, the other is a reduction", hint="fuse axes of one sort")
    order = (*nest.order[:at], step.fused, *nest.order[at + 2:])
    return replace(nest, order=order, relations=(*nest.relations, step))


def _reorder(nest: LoopNest, step: Reorder) -> LoopNest:
    for axis in step.axes:
        check_loop(nest, axis)
    if len(set(step.axes)) < len(step.axes):
        raise ScheduleError(f"reorder of {nest.stage} names an axis twice: {', '.join(step.axes)}")
    fresh = iter(step.axes)
    order = tuple(next(fresh) if axis in step.axes else axis for axis in nest.order)
    place = {axis: at for at, axis in enumerate(order)}
    for relation in nest.relations:
        if not isinstance(relation, Split):
            continue
        last_outer = max(place[leaf] for leaf in nest.leaves_of(relation.outer))
        if last_outer > min(place[leaf] for leaf in nest.leaves_of(relation.inner)):
            raise ScheduleError(
                f"reorder of {nest.stage} puts {relation.inner!r} outside {relation.outer!r}, "
                f"but it runs over one piece of it", hint="keep the outer part of a split outside")
    return replace(nest, order=order)


def _mark(nest: LoopNest, step: Mark) -> LoopNest:
    check_loop(nest, step.axis)
    _check_unmarked(nest, step.axis, "choose one way to run")
    word = _KIND_WORDS.get(step.kind)
    if word is None:
        raise ScheduleError(f"there is no kind of loop {step.kind!r}",
                            hint=f"kinds are {', '.join(_KIND_WORDS)}")
    if step.grain < 1:
        raise ScheduleError(f"grain {step.grain} of axis {step.axis!r} is less than one iteration")
    if step.kind in ("parallel", "program") and nest.is_reduction(step.axis):
        raise ScheduleError(
            f"axis {step.axis!r} of {nest.stage} is a reduction and cannot be {word}: its "
            "iterations write to one place",
            hint="rfactor it, which gives each iteration a place of its own, or make an axis of "
                 "the result parallel")
    if step.kind != "unrolled":
        for other, mark in nest.marks.items():
            if mark.kind == step.kind and step.kind != "program":
                raise ScheduleError(
                    f"axis {step.axis!r} of {nest.stage} cannot be {word}: {other!r} already is",
                    hint="fuse the two axes first")
    return replace(nest, marks={**nest.marks, step.axis: step})


def check_finished(nest: LoopNest) -> None:
    """Refuse what only shows once all steps are there: concurrent loops inside a reduction."""
    reductions = [at for at, axis in enumerate(nest.order) if nest.is_reduction(axis)]
    for at, axis in enumerate(nest.order):
        if nest.kind(axis) in ("parallel", "program") and reductions and at > reductions[0]:
            raise ScheduleError(
                f"axis {axis!r} of {nest.stage} is {_KIND_WORDS[nest.kind(axis)]} inside the "
                f"reduction {nest.order[reductions[0]]!r}",
                hint="reorder it outside all reductions")
