"""Merges axes of a program that memory does not tell apart: fewer, longer loops.

`y[i, j] = x[i, j] + 1` over 8 x 128 becomes one axis of 1024. Two neighbouring axes merge when
every address stays affine in the merged variable, which the index algebra decides; broadcasting
and transposition forbid it by themselves. Axes of extent 1 disappear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from terrazzo.base.scalar import (
    Axis,
    FromIndex,
    Load,
    Reduce,
    Scalar,
    rewrite,
    substitute_indices,
    walk,
)
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import Index, IndexExpr, Var, coefficient, free_vars, substitute


def collapse(program: Program) -> Program:
    """The same program with as few axes as its addresses allow."""
    state = _State(list(program.inputs), list(program.stages),
                   int(program.attrs.get("rows", 0)), [s.name for s in program.outputs])
    state.drop_unit_axes()
    state.merge_data_axes()
    state.merge_reduction_axes()
    by_name = {s.name: s for s in state.stages}
    attrs = dict(program.attrs)
    if "rows" in attrs:
        attrs["rows"] = state.rows
    return replace(program, stages=tuple(state.stages),
                   outputs=tuple(by_name[n] for n in state.outputs), attrs=attrs)


_Change = dict[Tensor, tuple[tuple[Axis, ...], dict[Var, Index]]]  # new axes, old axes' values


def _without(d: int, indices: Sequence[Index | Scalar]) -> tuple[Index | Scalar, ...]:
    return (*indices[:d], *indices[d + 1:])


@dataclass
class _State:
    inputs: list[Tensor]
    stages: list[Tensor]
    rows: int
    outputs: list[str]

    # ------------------------------------------------------------ rebuilding
    def reshape(self, change: _Change,
                reindex: Callable[[Sequence[Index | Scalar]], tuple[Index | Scalar, ...]]) -> None:
        """Give stages new axes; loads of those stages get their indices through `reindex`."""
        table: dict[Tensor, Tensor] = {}

        def visit(node: Scalar) -> Scalar | None:
            if isinstance(node, Load) and node.source in table:
                fresh = table[node.source]
                indices = reindex(node.indices) if node.source in change else node.indices
                return Load(node.dtype, fresh, indices)
            return None

        fresh_stages = []
        for stage in self.stages:
            assert stage.body is not None
            body = rewrite(stage.body, visit)
            if stage in change:
                axes, values = change[stage]
                body = substitute_indices(body, values)
                fresh = replace(stage, axes=axes, shape=tuple(a.hi for a in axes), body=body)
            else:
                fresh = replace(stage, body=body)
            table[stage] = fresh
            fresh_stages.append(fresh)
        self.stages = fresh_stages

    # ------------------------------------------------------------ unit axes
    def drop_unit_axes(self) -> None:
        ranks = sorted({len(s.axes) for s in self.stages}, reverse=True)
        for d in range((ranks[0] if ranks else 0) - 1, -1, -1):
            holders = [s for s in self.stages if len(s.axes) > d]
            units = [s for s in holders if _is_one(s.axes[d].extent)]
            if not units or (d < self.rows and len(units) != len(self.stages)):
                continue
            change: _Change = {s: (s.axes[:d] + s.axes[d + 1:], {s.axes[d].var: 0})
                               for s in units}
            if d < self.rows:
                self.rows -= 1
            self.reshape(change, partial(_without, d))

    # ------------------------------------------------------------ data axes
    def merge_data_axes(self) -> None:
        for low, high in ((0, self.rows), (self.rows, None)):
            top = max((len(s.axes) for s in self.stages), default=0) if high is None else high
            for d in range(top - 2, low - 1, -1):
                self.try_merge(d, everywhere=high is not None)

    def try_merge(self, d: int, everywhere: bool) -> None:
        holders = [s for s in self.stages if len(s.axes) > d + 1]
        if not holders or (everywhere and len(holders) != len(self.stages)):
            return
        inner = holders[0].axes[d + 1].extent
        outer = holders[0].axes[d].extent
        if any(s.axes[d + 1].extent != inner or s.axes[d].extent != outer for s in holders):
            return
        change: _Change = {}
        for stage in holders:
            merged, values = _merged(stage.axes[d], stage.axes[d + 1])
            if not _affine_after(stage.body, values, merged.var, set(holders)):
                return
            change[stage] = (stage.axes[:d] + (merged,) + stage.axes[d + 2:], values)

        def reindex(indices: Sequence[Index | Scalar]) -> tuple[Index | Scalar, ...]:
            first, second = indices[d], indices[d + 1]
            if isinstance(first, Scalar) or isinstance(second, Scalar):
                from terrazzo.base.scalar import as_scalar

                joint: Index | Scalar = as_scalar(first) * as_scalar(inner) + as_scalar(second)
            else:
                joint = first * inner + second
            return (*indices[:d], joint, *indices[d + 2:])

        self.reshape(change, reindex)
        if everywhere:
            self.rows -= 1

    # ------------------------------------------------------------ reduction axes
    def merge_reduction_axes(self) -> None:
        table: dict[Tensor, Tensor] = {}

        def visit(node: Scalar) -> Scalar | None:
            if isinstance(node, Load) and node.source in table:
                return Load(node.dtype, table[node.source], node.indices)
            if isinstance(node, Reduce):
                return _merge_reduce(node)
            return None

        fresh = []
        for stage in self.stages:
            assert stage.body is not None
            table[stage] = replace(stage, body=rewrite(stage.body, visit))
            fresh.append(table[stage])
        self.stages = fresh


def _is_one(extent: Index) -> bool:
    return isinstance(extent, int) and extent == 1


def _merged(outer: Axis, inner: Axis) -> tuple[Axis, dict[Var, Index]]:
    extent = outer.extent * inner.extent
    top = extent - 1 if isinstance(extent, int) else None
    var = Var(f"{outer.var.name}{inner.var.name}", 0, None if top is None else max(top, 0))
    if not isinstance(inner.extent, IndexExpr) and inner.extent == 0:
        return Axis(var, 0, extent), {outer.var: 0, inner.var: 0}
    return Axis(var, 0, extent), {outer.var: var // inner.extent, inner.var: var % inner.extent}


def _affine_after(body: Scalar | None, values: dict[Var, Index], var: Var,
                  merging: set[Tensor]) -> bool:
    """Whether every address stays affine (and unbroken) when two variables become one."""
    assert body is not None
    old = set(values)
    for node in walk(body):
        if isinstance(node, FromIndex):
            if free_vars(node.index) & old and coefficient(
                    substitute(node.index, values), var) is None:
                return False
        elif isinstance(node, Reduce):
            if any((free_vars(a.lo) | free_vars(a.hi)) & old for a in node.axes):
                return False
        elif isinstance(node, Load):
            if any(isinstance(i, Scalar) for i in node.indices):
                if any(not isinstance(i, Scalar) and free_vars(i) & old for i in node.indices):
                    return False
                continue
            address = node.source.flat(node.indices)
            if not isinstance(address, IndexExpr) or not (free_vars(address) & old):
                continue
            step = coefficient(substitute(address, values), var)
            if step is None:
                return False
    return True


def _merge_reduce(node: Reduce) -> Reduce:
    axes, value = list(node.axes), node.value
    d = len(axes) - 2
    while d >= 0:
        outer, inner = axes[d], axes[d + 1]
        plain = all(isinstance(a.lo, int) and a.lo == 0 for a in (outer, inner)) and not any(
            {outer.var, inner.var} & (free_vars(a.hi) | free_vars(a.lo)) for a in axes)
        if plain:
            merged, values = _merged(outer, inner)
            if _affine_after(value, values, merged.var, set()):
                value = substitute_indices(value, values)
                axes[d:d + 2] = [merged]
        d -= 1
    return node if value is node.value else Reduce(node.dtype, node.op, tuple(axes), value)
