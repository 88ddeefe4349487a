"""Reductions in two steps: partial results as a tensor of its own, and what combines them.

`sum(k in 0..100: x[k])` with k cut into parts of 25 is `part[p] = sum(k in 0..25: x[p*25 + k])`
and `sum(p in 0..4: part[p])`. The first has an axis more, whose steps may run side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

from terrazzo.base.scalar import (
    Axis,
    Item,
    Reduce,
    Scalar,
    Tuple,
    as_scalar,
    call,
    identity_of,
    parts,
    rewrite,
    substitute_indices,
    where,
)
from terrazzo.errors import ScheduleError
from terrazzo.expr import loopnest
from terrazzo.expr.instance import Instance
from terrazzo.expr.ir import Tensor, fresh_axis, load
from terrazzo.expr.reductions import top_reductions
from terrazzo.expr.schedule import Fuse, RFactor
from terrazzo.expr.stage import Stage, make_stage
from terrazzo.index import Index, Var, free_vars, proves_eq, substitute


def rfactor(stage: Stage, step: RFactor) -> tuple[Stage, Stage]:
    """The stage of partial results, and the given one, which combines them."""
    whole = _the_reduction(stage, step)
    loops = Instance(stage, [(0, n, n) for n in stage.tensor.shape], lambda name: name, set())
    (inner,) = top_reductions(loops.body)
    axis = fresh_axis(step.axis, loops.room(step.axis))
    at = step.factor_axis + (len(stage.axes) + 1 if step.factor_axis < 0 else 0)
    data = [Axis(loops.roots[a.var.name].var, a.lo, a.hi) for a in stage.axes]
    axes = (*data[:at], axis, *data[at:])
    results = _partial(loops, inner, step.axis, axis)
    joint = step.name if len(results) > 1 else ""
    tensors = [Tensor(f"{step.name}.{j}" if joint else step.name, tuple(a.hi for a in axes),
                      result.dtype, axes, result, origin=stage.tensor.origin, joint=joint)
               for j, result in enumerate(results)]
    places = (*stage.axes[:at], axis, *stage.axes[at:])
    reads = tuple(load(t, places) for t in tensors)
    combined = replace(whole, axes=(axis,), value=reads[0] if whole.reducer is None else Tuple(
        reads[0].dtype, reads))
    after = make_stage(stage.tensors, rewrite(
        stage.body, lambda node: combined if node is whole else None), stage.scan)
    return (make_stage(tensors, scan=stage.scan),
            replace(after, attach=stage.attach, streaming=stage.streaming))


def _the_reduction(stage: Stage, step: RFactor) -> Reduce:
    """The one reduction of a stage, whose loops may be cut but not be marked yet."""
    nest = stage.nest
    loopnest.check_loop(nest, step.axis)
    if not nest.is_reduction(step.axis):
        raise ScheduleError(f"axis {step.axis!r} of {stage.name} is no reduction",
                            hint=f"its reductions are: {', '.join(nest.reduction) or 'none'}")
    made = [name for r in nest.relations for name in (
        (r.fused,) if isinstance(r, Fuse) else (r.outer, r.inner))]
    if nest.marks or stage.packed or stage.tensorize or not all(map(nest.is_reduction, made)):
        raise ScheduleError(f"{stage.name} already has scheduled loops",
                            hint="rfactor comes before marking, and before splitting other axes")
    found = top_reductions(stage.body)
    if len(found) != 1:
        raise ScheduleError(f"{stage.name} reduces {len(found)} things, and rfactor takes one",
                            hint="compute each in a stage of its own, or as a tuple")
    if not -len(stage.axes) - 1 <= step.factor_axis <= len(stage.axes):
        raise ScheduleError(f"{step.name} has no place {step.factor_axis} for its new axis",
                            hint=f"it has {len(stage.axes) + 1} axes")
    if stage.scan is not None and step.factor_axis in (0, -len(stage.axes) - 1):
        raise ScheduleError(f"the first axis of {step.name} is that of the scan {stage.scan.name}",
                            hint="put the new axis after it, with factor_axis=1")
    return found[0]


def _partial(loops: Instance, reduction: Reduce, leaf: str, axis: Axis) -> tuple[Scalar, ...]:
    """What is left to reduce for each value of one loop, as bodies over the new axis."""
    lo, hi = loops.leaf_range(leaf)
    var = loops.variable(leaf)
    table: dict[Var, Index] = {} if var is None else {var: lo + axis.var}
    tests = [substitute_indices(guard.test(), table) for guard in loops.fusion_guards()]
    if var is not None and not proves_eq(hi - lo, axis.hi):
        tests.append(call("lt", as_scalar(axis.var), as_scalar(substitute(hi - lo, table))))
    values = [substitute_indices(substitute_indices(v, loops.substitution()), table)
              for v in parts(reduction.value)]
    if tests:
        test = reduce(lambda a, b: call("and", a, b), tests)
        values = [where(test, value, nothing)
                  for value, nothing in zip(values, parts(identity_of(reduction)), strict=True)]
    rest = [other for other in loops.nest.order
            if other != leaf and loops.nest.is_reduction(other)]
    axes = _by_need([_axis(loops, other, table) for other in rest])
    if not axes:
        return tuple(values)
    if reduction.reducer is None:
        return (replace(reduction, axes=axes, value=values[0]),)
    joint = replace(reduction, axes=axes, value=Tuple(values[0].dtype, tuple(values)))
    return tuple(Item(value.dtype, joint, j) for j, value in enumerate(values))


def _axis(loops: Instance, leaf: str, table: Mapping[Var, Index]) -> Axis:
    var = loops.variable(leaf)
    if var is None:  # it runs once, but schedules know it by its name
        return fresh_axis(leaf, 1)
    lo, hi = loops.leaf_range(leaf)
    return Axis(var, substitute(lo, table), substitute(hi, table))


def _by_need(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """Axes in an order in which the range of each depends on those before it."""
    left, order = list(axes), []
    while left:
        unknown = {a.var for a in left}
        axis = next(a for a in left if unknown.isdisjoint(free_vars(a.lo) | free_vars(a.hi)))
        order.append(axis)
        left.remove(axis)
    return tuple(order)
