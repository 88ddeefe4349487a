"""Tensorising: the innermost loops of a stage as one tile instruction of a chip.

An instruction is entered in INTRINSICS with its meaning, which is Loop IR. Whether it does what a
nest of loops does is not taken on trust: both are run on small numbers and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from terrazzo.base.scalar import Scalar, as_scalar, call, loads
from terrazzo.errors import IndexOutOfRange, ScheduleError
from terrazzo.expr.schedule import Tensorize
from terrazzo.index import Index, Min, Var, bounds, coefficient, evaluate, free_vars, substitute
from terrazzo.loop import interpret
from terrazzo.loop.ir import (
    Buffer,
    For,
    Function,
    If,
    Stmt,
    Store,
    Tile,
    TileIntrinsic,
)
from terrazzo.loop.tiles import FMA_TILE

_CHECKED_EXTENT = 5  # enough to tell instructions apart, small enough for the interpreter
_DIM_SAMPLE = 37  # a size that leaves room for some full tiles and a remainder


@dataclass(frozen=True, eq=False)
class Pattern:
    """A perfect nest around one store, as an intrinsic sees it.

    `places` are what is stored to and then what is loaded, each with its first address;
    `strides` say how far each loop moves in each place.
    """

    extents: tuple[Index, ...]
    places: tuple[tuple[Buffer, Index], ...]
    strides: tuple[tuple[Index, ...], ...]
    store: Store
    loops: tuple[For, ...]

    def nest(self) -> Stmt:
        """The loops again, with the pattern's extents."""
        stmt: Stmt = self.store
        for loop, extent in reversed(tuple(zip(self.loops, self.extents, strict=True))):
            stmt = For(loop.var, loop.lo, loop.lo + extent, stmt)
        return stmt


Arguments = tuple[tuple[Index, ...], Mapping[str, Any]]


def extents_and_strides(pattern: Pattern) -> Arguments | None:
    """The usual arguments of an intrinsic: all extents, then the strides of each place."""
    return (*pattern.extents, *(s for row in pattern.strides for s in row)), {}


@dataclass(frozen=True, eq=False)
class Intrinsic:
    """A tile instruction, and how its sizes and constants follow from the loops it replaces.

    `arguments` answers None for extents that the instruction cannot do.
    """

    tile: TileIntrinsic
    arguments: Callable[[Pattern], Arguments | None] = extents_and_strides


def fma_tile_arguments(pattern: Pattern) -> Arguments | None:
    """For loops k, i, j around `C[i, j] += A[i, k] * B[k, j]`, contiguous along j."""
    if len(pattern.extents) != 3 or len(pattern.places) != 3:
        return None
    k, rows, columns = pattern.extents
    (c_k, ldc, c_j), (a_step, lda, a_j), (ldb, b_i, b_j) = pattern.strides
    if not (isinstance(rows, int) and isinstance(columns, int)) or (
            (c_k, c_j, a_j, b_i, b_j) != (0, 1, 0, 0, 1)):
        return None
    return (k, lda, a_step, ldb, ldc), {"mr": rows, "nr": columns, "accumulate": True}


INTRINSICS: dict[str, Intrinsic] = {"fma_tile": Intrinsic(FMA_TILE, fma_tile_arguments)}


def register_intrinsic(intrinsic: Intrinsic) -> Intrinsic:
    """Make an intrinsic known to schedules by its name."""
    INTRINSICS[intrinsic.tile.name] = intrinsic
    return intrinsic


def intrinsic_named(name: str) -> Intrinsic:
    """Look an intrinsic up."""
    if name not in INTRINSICS:
        raise ScheduleError(f"there is no tile intrinsic {name!r}",
                            hint=f"registered are: {', '.join(sorted(INTRINSICS)) or 'none'}")
    return INTRINSICS[name]


def tensorize(stmt: Stmt, step: Tensorize) -> Stmt:
    """A nest of loops as the intrinsic that a schedule names.

    Where the last tile may be smaller and the intrinsic has only one size, small tiles stay loops.
    """
    intrinsic = intrinsic_named(step.intrinsic)
    pattern = _pattern(stmt, step)
    full = replace(pattern, extents=tuple(map(_full, pattern.extents)))
    for candidate in (pattern, full):
        tile = _tile(intrinsic, candidate)
        if tile is None:
            continue
        _check_meaning(intrinsic, candidate, step)
        tests = [call("ge", as_scalar(have), as_scalar(want))
                 for have, want in zip(pattern.extents, candidate.extents) if have is not want
                 and isinstance(have, Min)]
        return If(reduce(lambda a, b: call("and", a, b), tests), tile, stmt) if tests else tile
    sizes = ", ".join(map(str, pattern.extents))
    raise ScheduleError(f"{step.intrinsic} cannot do the loops from {step.axis!r} of {step.stage}",
                        hint=f"their extents are {sizes}; split them to the instruction's size")


def _full(extent: Index) -> Index:
    if isinstance(extent, Min):
        return next((arg for arg in extent.args if isinstance(arg, int)), extent)
    return extent


def _tile(intrinsic: Intrinsic, pattern: Pattern) -> Tile | None:
    arguments = intrinsic.arguments(pattern)
    if arguments is None:
        return None
    sizes, constants = arguments
    return Tile(intrinsic.tile, pattern.places, sizes, dict(constants))


def _pattern(stmt: Stmt, step: Tensorize) -> Pattern:
    loops: list[For] = []
    node = stmt
    while isinstance(node, For):
        loops.append(node)
        node = node.body
    if not isinstance(node, Store):
        raise ScheduleError(
            f"the loops from {step.axis!r} of {step.stage} hold more than one store",
            hint="tensorize loops that nothing else is computed in and that need no guard")
    accesses = [(node.buffer, node.index), *((x.source, x.indices[0]) for x in loads(node.value))]
    start = {loop.var: loop.lo for loop in loops}
    places: list[tuple[Buffer, Index]] = []
    strides: list[tuple[Index, ...]] = []
    for buffer, index in accesses:
        steps = () if isinstance(index, Scalar) else tuple(
            coefficient(index, loop.var) for loop in loops)
        if isinstance(index, Scalar) or None in steps:
            raise ScheduleError(f"{buffer.name} is not walked over in even steps by the loops from "
                                f"{step.axis!r} of {step.stage}",
                                hint="an intrinsic needs affine addresses")
        places.append((buffer, substitute(index, start)))
        strides.append(tuple(s for s in steps if s is not None))
    extents = tuple(loop.hi - loop.lo for loop in loops)
    return Pattern(extents, tuple(places), tuple(strides), node, tuple(loops))


def _check_meaning(intrinsic: Intrinsic, pattern: Pattern, step: Tensorize) -> None:
    """Run the loops and the intrinsic's meaning on the same small numbers."""
    small = replace(pattern, extents=tuple(
        min(e, _CHECKED_EXTENT) if isinstance(e, int) else e for e in pattern.extents))
    tile = _tile(intrinsic, small)
    if tile is None:
        small, tile = pattern, _tile(intrinsic, pattern)
    assert tile is not None
    nest = small.nest()
    bound = {loop.var for loop in small.loops}
    indices: list[Index] = [*small.extents, *(at for _, at in small.places),
                            *(s for row in small.strides for s in row)]
    outside = {v for index in indices for v in free_vars(index)} - bound
    values = {v: _sample(v) for v in outside}
    buffers = tuple(dict.fromkeys(b for b, _ in small.places))
    size = {b: 1 for b in buffers}
    for (buffer, at), row in zip(small.places, small.strides, strict=True):
        last = int(evaluate(at, values)) + sum(
            max(int(evaluate(s, values)), 0) * max(int(evaluate(e, values)) - 1, 0)
            for s, e in zip(row, small.extents, strict=True))
        size[buffer] = max(size[buffer], last + 1)
    random = np.random.default_rng(0)
    before = [random.integers(-4, 5, size[b]).astype(b.dtype.np) for b in buffers]
    results = []
    for body in (nest, tile):
        arrays = [a.copy() for a in before]
        try:
            interpret.run(Function("check", buffers, tuple(values), body), arrays, values)
        except IndexOutOfRange:
            break
        results.append(arrays)
    if len(results) < 2 or not all(
            np.array_equal(a, b) for a, b in zip(*results, strict=True)):
        meaning = "\n".join("    " + line for line in str(tile.expand()).splitlines())
        raise ScheduleError(
            f"{step.intrinsic} does not compute what the loops from {step.axis!r} of "
            f"{step.stage} do; it means\n{meaning}",
            hint=f"the loops are\n{nest}")


def _sample(var: Var) -> int:
    low, high = bounds(var)
    return _DIM_SAMPLE if high is None and not low else max(low or 0, 0)

