"""Reductions of few rows as two kernels: parts of all rows side by side, then what joins them.

A GPU wants thousands of warps under way. Where a program has fewer rows than that, each of its
reductions is cut into parts (`part[r, s]`), which a second, small kernel joins; what is computed
from the results for every element (a softmax of few long rows) is a kernel of its own behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from terrazzo.base.scalar import (
    Axis,
    Reduce,
    Scalar,
    as_scalar,
    call,
    identity_of,
    loads,
    rewrite,
    substitute_indices,
    walk,
    where,
)
from terrazzo.base.shapes import num_elements
from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.triton.source import runs_down_columns
from terrazzo.expr.collapse import collapse
from terrazzo.expr.ir import Program, Tensor, fresh_axis, inline, load
from terrazzo.index import Index

WORTH = 1 << 18  # elements below which two launches take longer than one slow kernel
ENOUGH = 4  # programs a multiprocessor: with fewer, memory waits for arithmetic
# Programs a multiprocessor, where they can be chosen: of rows, of columns. Parts of columns are as
# many results each as there are columns: more of them take as long as they gain.
WANTED = {False: 16, True: 4}
COLUMNS = 64  # that one program reduces side by side
LEAST = {False: 1024, True: 16}  # positions of a part: of a row, of columns


@dataclass(frozen=True)
class Cut:
    """How many parts a reduction is cut into, of how many positions each."""

    parts: int
    size: int


def split(program: Program, spec: ChipSpec) -> list[Program] | None:
    """A program in several; None where one kernel is as good."""
    whole = collapse(program)
    rows = int(whole.attrs.get("rows", 0))
    reducing = [s for s in whole.stages if _reductions(s.body)]
    outer = {len(o.axes) > rows for o in whole.outputs}
    if len(outer) != 1 or whole.scans or any(len(s.axes) != rows for s in reducing) or any(
            s.body is None or s.body.dtype is not s.dtype for s in whole.stages):
        return None
    counts = [num_elements([a.extent for a in s.axes]) for s in reducing]
    lengths = {a.extent for s in reducing for n in _reductions(s.body) for a in n.axes}
    if any(len(n.axes) != 1 or n.reducer is not None or a.lo != 0 for s in reducing
           for n in _reductions(s.body) for a in n.axes) or len(lengths) != 1:
        return None
    (length,) = lengths
    count = counts[0]
    if not isinstance(length, int) or not isinstance(count, int) or count * length < WORTH:
        return None
    columns = runs_down_columns(whole, rows)
    programs = -(-count // COLUMNS) if columns else count
    if programs >= ENOUGH * spec.cores or length < 2 * LEAST[columns] or len(
            {o.shape for o in whole.outputs}) != 1:
        return None
    cut = _cut(length, -(-WANTED[columns] * spec.cores // programs), LEAST[columns])
    return _Splitter(whole, rows, columns, cut).programs(outer == {True}, reducing[-1])


def _reductions(body: Scalar | None) -> list[Reduce]:
    return [] if body is None else [n for n in walk(body) if isinstance(n, Reduce)]


def _cut(length: int, parts: int, least: int) -> Cut:
    """Even parts if there are any near the number wanted, else parts whose last is shorter."""
    parts = max(1, min(parts, length // least))
    even = next((n for n in range(parts, min(2 * parts, length // least) + 1)
                 if length % (n * 16) == 0), None)
    if even is not None:
        return Cut(even, length // even)
    size = -(-length // (parts * 16)) * 16
    return Cut(-(-length // size), size)


def _replaced(body: Scalar, table: Mapping[Scalar, Scalar]) -> Scalar:
    return rewrite(body, lambda node: table.get(node))


@dataclass(eq=False)
class _Splitter:
    """The programs so far, and what the program's stages are in terms of their results."""

    whole: Program
    rows: int
    columns: bool
    cut: Cut
    made: list[Program] = field(default_factory=list)
    values: dict[Tensor, Scalar] = field(default_factory=dict)

    def programs(self, wide: bool, last: Tensor) -> list[Program] | None:
        for stage in self.whole.stages:
            assert stage.body is not None
            body = inline(stage.body, self.values)
            # Not those of the parts that it reads.
            found = _reductions(body) if _reductions(stage.body) else []
            if any(_reductions(node.value) for node in found):
                return None
            parts: dict[Scalar, Scalar] = {node: self.joined(node, stage, i)
                                           for i, node in enumerate(found)}
            body = _replaced(body, parts)
            if found and (wide or stage is not last):
                body = self.stored(stage, body)
            self.values[stage] = body
        outputs = [replace(o, body=self.values[o]) for o in self.whole.outputs]
        self.add(self.whole.name, outputs, "pointwise" if wide else "rows", self.rows)
        return self.made

    def joined(self, node: Reduce, stage: Tensor, number: int) -> Scalar:
        """A reduction of parts, which a program of their own makes."""
        (axis,) = node.axes
        part = fresh_axis("part", self.cut.parts)
        inner = fresh_axis(axis.var.name, self.cut.size)
        place: Index = part.var * self.cut.size + inner.var
        value = substitute_indices(node.value, {axis.var: place})
        if self.cut.parts * self.cut.size != axis.extent:
            value = where(call("lt", as_scalar(place), as_scalar(axis.extent)), value,
                          identity_of(node))
        axes = self.with_part(stage.axes, part)
        name = f"{stage.name}_parts{number or ''}"
        body = replace(node, axes=(inner,), value=value, contraction=None)
        made = Tensor(name, tuple(a.hi for a in axes), node.dtype, axes, body,
                      origin=stage.origin)
        self.add(f"{self.whole.name}_{name}", [made], "rows", self.rows + 1)
        source = Tensor(name, made.shape, made.dtype)
        return replace(node, axes=(part,), contraction=None,
                       value=load(source, [a.var for a in axes]))

    def with_part(self, axes: Sequence[Axis], part: Axis) -> tuple[Axis, ...]:
        """The axes of parts: neighbours in memory are what one program has side by side."""
        return (part, *axes) if self.columns else (*axes, part)

    def stored(self, stage: Tensor, body: Scalar) -> Scalar:
        """The result of a reduction in memory, for what follows."""
        self.add(f"{self.whole.name}_{stage.name}", [replace(stage, body=body)], "rows", self.rows)
        return load(Tensor(stage.name, stage.shape, stage.dtype), [a.var for a in stage.axes])

    def add(self, name: str, outputs: Sequence[Tensor], kind: str, rows: int) -> None:
        sources = dict.fromkeys(read.source for o in outputs if o.body is not None
                                for read in loads(o.body))
        self.made.append(Program(name, tuple(sources), tuple(outputs), tuple(outputs), kind,
                                 {"rows": rows} if kind == "rows" else {}))
