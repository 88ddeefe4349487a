"""The contraction that a program is: its axes by the roles that the operator gave them.

One record for all that looks for products and convolutions, of floats and of bytes, channels apart
or not. How operands lie in memory is for them to find out.
"""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.base.scalar import Axis, Call, Reduce, Scalar, walk
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.matmul import Factor
from terrazzo.index import Index


@dataclass(frozen=True, eq=False)
class ContractionStage:
    """`stage[batch, positions, outputs] = body`, where `reduce` in the body sums `x * w`."""

    stage: Tensor
    body: Scalar
    reduce: Reduce
    x: Factor
    w: Factor
    batch: tuple[Axis, ...]
    positions: tuple[Axis, ...]  # none for a matrix product
    outputs: Axis
    taps: tuple[Axis | None, ...]  # at each position; None for a window of 1
    channel: Axis | None  # None when a group has one channel
    groups: int

    @property
    def places(self) -> tuple[Axis, ...]:
        """The axes along which x moves and w does not."""
        return (*self.batch, *self.positions)


def match_contraction(program: Program) -> ContractionStage | None:
    """The contraction that a program is, with what follows the sum; None for all others."""
    if len(program.stages) != 1 or len(program.outputs) != 1:
        return None
    (stage,) = program.stages
    sums = [n for n in walk(stage.body) if isinstance(n, Reduce)] if stage.body else []
    if stage.body is None or len(sums) != 1 or sums[0].op != "add":
        return None
    (reduce,) = sums
    roles, product = reduce.contraction, reduce.value
    if roles is None or not (isinstance(product, Call) and product.op == "mul") or any(
            a.lo != 0 for a in (*stage.axes, *reduce.axes)):
        return None
    kept = (*roles.batch, *roles.positions, roles.outputs)
    # Along an axis of one element an index may be a number by now.
    if len(kept) != len(stage.axes) or any(
            i is not a.var and not (i == 0 and a.extent == 1) for i, a in zip(kept, stage.axes)):
        return None  # the stage is a view of the sums
    x, w = map(Factor, product.args)
    *places, outputs = stage.axes
    first = len(roles.batch)
    summed: dict[Index | None, Axis] = {a.var: a for a in reduce.axes}
    return ContractionStage(
        stage, stage.body, reduce, x, w, tuple(places[:first]), tuple(places[first:]), outputs,
        tuple(summed.get(t) for t in roles.taps), summed.get(roles.channel), roles.groups)
