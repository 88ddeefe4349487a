"""Pointwise groups that turn an operand: they read it along another axis than they write.

Side by side in memory are elements of one axis for what is read and of another for what is
written, so that blocks of a line would read (or write) single elements far apart. Such groups run
over tiles of both axes instead, whose values Triton turns through shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from terrazzo.base.scalar import Scalar, loads
from terrazzo.expr.ir import Program, Tensor, substitute_any
from terrazzo.index import Index, Var, ceildiv, coefficient

LEAST_SIDE = 4  # of a tile: an axis that is shorter is read whole by blocks of a line
# Elements of each side of a tile by the bits of the widest tensor: neighbours of 128 bytes or more
# in both directions, and few enough bytes that several programs share a multiprocessor.
SIDES = {8: 128, 16: 64, 32: 64, 64: 32}
A_THREAD = 16  # elements
LEAST_TILE = 1024  # elements, where smaller tiles would keep more multiprocessors busy


@dataclass(frozen=True)
class Turn:
    """The axes of a tile, by number: along which memory is written, and read."""

    across: int  # what lies side by side in the results
    down: int  # what lies side by side in an operand


@dataclass(frozen=True)
class Tile:
    """How many positions of each axis one program has, and how many warps do them."""

    down: int
    across: int
    warps: int


def turn_of(program: Program) -> Turn | None:
    """The axes of a pointwise program that tiles are for; None where lines are as good."""
    axes = program.stages[0].axes
    wide = [d for d, axis in enumerate(axes)
            if not isinstance(axis.extent, int) or axis.extent >= LEAST_SIDE]
    if len(wide) < 2:
        return None
    places = [a.var for a in axes]
    written = [_along(o.flat(places), places) for o in program.outputs]
    across = next((d for d in written if d in wide), None)
    if across is None:
        return None
    weights: dict[int, int] = {}
    for source, address in _addresses(program, places):
        d = _along(address, places)
        if d is None or d == across or d not in wide:
            continue
        if coefficient(address, places[across]) not in (0, None):  # it is not one line for all
            weights[d] = weights.get(d, 0) + source.dtype.bits
    for d, output in zip(written, program.outputs):
        if d is not None and d != across and d in wide:
            weights[d] = weights.get(d, 0) + output.dtype.bits
    return Turn(across, max(weights, key=lambda d: weights[d])) if weights else None


def _along(address: Index | Scalar, places: list[Var]) -> int | None:
    """The axis whose elements lie side by side at an address."""
    if isinstance(address, Scalar):
        return None
    return next((d for d, var in enumerate(places) if _is_one(coefficient(address, var))), None)


def _is_one(factor: Index | None) -> bool:
    return isinstance(factor, int) and factor == 1


def _addresses(program: Program, places: list[Var]) -> Iterator[tuple[Tensor, Index]]:
    """What the outputs read of memory, in terms of where they are written."""
    seen: set[object] = set()

    def visit(stage: Tensor, indices: tuple[Index | Scalar, ...]) -> Iterator[tuple[Tensor, Index]]:
        key = (stage, *(id(i) if isinstance(i, Scalar) else i for i in indices))
        if key in seen:
            return
        seen.add(key)
        if stage.body is None:
            address = stage.flat(indices)
            if not isinstance(address, Scalar):
                yield stage, address
            return
        body = substitute_any(stage.body, {a.var: i for a, i in zip(stage.axes, indices)})
        kept.append(body)
        for load in loads(body):
            yield from visit(load.source, tuple(load.indices))

    kept: list[Scalar] = []  # what the ids belong to
    for output in program.outputs:
        yield from visit(output, tuple(places))


def tile_for(turn: Turn, extents: list[Index], bits: int, cores: int) -> Tile:
    """The tile of a program: as wide as is good, but not so large that multiprocessors idle."""
    side = SIDES[min(max(bits, 8), 64)]
    down, across = extents[turn.down], extents[turn.across]
    # What a short axis leaves of a tile is the other axis's.
    rows, columns = (min(_power_of_two(n), side) for n in (down, across))
    rows, columns = (min(_power_of_two(down), side * side // columns),
                     min(_power_of_two(across), side * side // rows))
    if all(isinstance(n, int) for n in extents):
        while rows * columns > LEAST_TILE and _tiles(turn, extents, rows, columns) < cores:
            rows, columns = (rows // 2, columns) if rows >= columns else (rows, columns // 2)
    return Tile(rows, columns, max(1, rows * columns // (32 * A_THREAD)))


def counts(turn: Turn, extents: list[Index], rows: int, columns: int) -> list[Index]:
    """How many programs there are along each axis: tiles of two of them, positions of others."""
    sizes = {turn.down: rows, turn.across: columns}
    return [ceildiv(n, sizes.get(d, 1)) for d, n in enumerate(extents)]


def _tiles(turn: Turn, extents: list[Index], rows: int, columns: int) -> int:
    total: Index = 1
    for n in counts(turn, extents, rows, columns):
        total = total * n
    assert isinstance(total, int)
    return total


def _power_of_two(n: Index) -> int:
    return 1 << max(n - 1, 0).bit_length() if isinstance(n, int) else 1 << 62
