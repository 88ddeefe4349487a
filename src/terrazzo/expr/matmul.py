"""Matrix products in programs: which axis is which, what the factors are, and what comes after.

A contraction's stage has the body `epilogue(sum over k of a * b)`, with views and casts composed
into the factors. Rows, columns and batch are not written down anywhere: they follow from which
axes each factor depends on. So transposed operands, strided heads and broadcast batches are all
the same case, told apart by strides only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.base.scalar import (
    Axis,
    Call,
    Const,
    FromIndex,
    Load,
    Reduce,
    Scalar,
    substitute_indices,
    walk,
)
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import Index, Var, coefficient, free_vars, substitute


@dataclass(frozen=True, eq=False)
class Factor:
    """One operand of a product: any expression over the batch, one side's axis and k."""

    value: Scalar

    @property
    def load(self) -> Load | None:
        """The load this factor is, up to widening, if it is that and no more."""
        node = _without_casts(self.value)
        if isinstance(node, Load) and not any(isinstance(i, Scalar) for i in node.indices):
            return node
        return None

    @property
    def guarded(self) -> tuple[Load, Scalar | None] | None:
        """The load that it is, and the condition outside which it is zero instead, if any."""
        node, condition = _without_casts(self.value), None
        if isinstance(node, Call) and node.op == "where":
            condition, node, other = node.args
            zero = _without_casts(other)
            if not isinstance(zero, Const) or zero.value != 0:
                return None
        load = Factor(node).load
        return None if load is None else (load, condition)

    @property
    def address(self) -> Index | None:
        """The flat address of that load."""
        load = self.load
        if load is None:
            return None
        address = load.source.flat(load.indices)
        assert not isinstance(address, Scalar)
        return address

    def stride(self, var: Var | None) -> Index | None:
        """How far one step along an axis moves in memory; None when that varies."""
        address = self.address
        if var is None:
            return 0
        return None if address is None else coefficient(address, var)

    @property
    def indices(self) -> list[Index]:
        """Everything in it that is computed from indices: places, and what is compared."""
        found: list[Index] = []
        for node in walk(self.value):
            if isinstance(node, FromIndex):
                found.append(node.index)
            elif isinstance(node, Load):
                found += [i for i in node.indices if not isinstance(i, Scalar)]
        return found

    @property
    def vars(self) -> set[Var]:
        """The variables it depends on."""
        found: set[Var] = set()
        return found.union(*map(free_vars, self.indices))


def _without_casts(node: Scalar) -> Scalar:
    while isinstance(node, Call) and node.op == "cast":
        node = node.args[0]
    return node


@dataclass(frozen=True, eq=False)
class MatrixProduct:
    """`stage[batch, row, column] = body`, where `reduce` in the body sums `a * b` over k."""

    stage: Tensor  # as the program has it; its address is `out_address`
    out_address: Index
    batch: tuple[Axis, ...]
    row: Axis | None  # None when there is one row only
    column: Axis
    k: Axis
    a: Factor
    b: Factor
    reduce: Reduce
    body: Scalar

    def batch_of(self, factor: Factor) -> tuple[Axis, ...]:
        """The batch axes that a factor depends on; along the others it is broadcast."""
        used = factor.vars
        return tuple(axis for axis in self.batch if axis.var in used)


def match_product(program: Program) -> MatrixProduct | None:
    """The matrix product that a program is, or None."""
    if len(program.stages) != 1 or len(program.outputs) != 1:
        return None
    (stage,) = program.stages
    if stage.body is None or any(a.lo != 0 for a in stage.axes):
        return None
    address = stage.flat([a.var for a in stage.axes])
    assert not isinstance(address, Scalar)
    state = _State(stage.axes, stage.body, address).without_unit_axes()
    if state.factors() is None or not state.axes:
        return None
    state = state.merged()
    found = state.factors()
    assert found is not None
    reduce, left, right = found
    column = state.axes[-1]
    if column.var in left.vars:
        left, right = right, left
    if column.var in left.vars or column.var not in right.vars:
        return None
    rows = [a for a in state.axes[:-1] if a.var in left.vars and a.var not in right.vars]
    row = rows[-1] if rows else None
    batch = tuple(a for a in state.axes[:-1] if a is not row)
    return MatrixProduct(stage, state.address, batch, row, column, reduce.axes[0], left, right,
                         reduce, state.body)


@dataclass(frozen=True, eq=False)
class _State:
    axes: tuple[Axis, ...]
    body: Scalar
    address: Index

    def replaced(self, axes: Sequence[Axis], values: dict[Var, Index]) -> _State:
        return _State(tuple(axes), substitute_indices(self.body, values),
                      substitute(self.address, values))

    def without_unit_axes(self) -> _State:
        units = {a.var: 0 for a in self.axes if a.extent == 1}
        return self.replaced([a for a in self.axes if a.var not in units], dict(units))

    def factors(self) -> tuple[Reduce, Factor, Factor] | None:
        reductions = [n for n in walk(self.body) if isinstance(n, Reduce)]
        if len(reductions) != 1:
            return None
        (node,) = reductions
        product = node.value
        if node.op != "add" or len(node.axes) != 1 or node.axes[0].lo != 0:
            return None
        if free_vars(node.axes[0].hi) & {a.var for a in self.axes}:
            return None
        if not (isinstance(product, Call) and product.op == "mul"):
            return None
        return node, Factor(product.args[0]), Factor(product.args[1])

    def merged(self) -> _State:
        """Neighbouring axes of one side as one axis, where that leaves addresses affine."""
        state = self
        for d in range(len(self.axes) - 2, -1, -1):
            state = state.merge(d) or state
        return state

    def merge(self, d: int) -> _State | None:
        found = self.factors()
        assert found is not None
        outer, inner = self.axes[d], self.axes[d + 1]
        sides = [{outer.var, inner.var} & f.vars for f in found[1:]]
        if sorted(map(len, sides)) != [0, 2]:
            return None
        extent = outer.extent * inner.extent
        top = max(extent - 1, 0) if isinstance(extent, int) else None
        var = Var(f"{outer.var.name}.{inner.var.name}", 0, top)
        values: dict[Var, Index] = {outer.var: var // inner.extent, inner.var: var % inner.extent}
        if inner.extent == 0:
            values = {outer.var: 0, inner.var: 0}
        fresh = self.replaced((*self.axes[:d], Axis(var, 0, extent), *self.axes[d + 2:]), values)
        again = fresh.factors()
        assert again is not None
        mine = again[1] if sides[0] else again[2]
        if mine.stride(var) is None or coefficient(fresh.address, var) is None:
            return None
        return fresh
