"""The tile intrinsic of convolutions: sums under a window for a block of pixels, and what follows.

| intrinsic | places | sizes | constants |
|---|---|---|---|
| `window_tile` | C, A, B, operands... | columns, levels..., pixels... | down, across, nr, ... |

The block is `down` rows of `across` pixels by `nr` columns (channels). The loops over the window
are `levels`: so many steps, each so far in A and in B, the innermost last. A pixel of A is one
number a step, the same for all columns; with `lanewise` it is a number for each column, as in
convolutions that keep channels apart. `finish` is an expression over the sum and over operands; its
type is that of C, which may be narrower than the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.base.scalar import Const, Load, Scalar, cast, rewrite
from terrazzo.index import Index, Var
from terrazzo.loop.ir import Alloc, Buffer, For, Stmt, Store, Tile, TileIntrinsic, block

Place = tuple[Buffer, Index]
Level = tuple[Index, Index, Index]  # steps; how far a step goes in A, and in B


@dataclass(frozen=True, eq=False)
class Finish:
    """What is stored instead of a sum: `value`, where loads of these stand for the real ones."""

    value: Scalar
    total: Load
    operands: tuple[Load, ...]
    along: tuple[int, ...]  # 1 where an operand has an element for each column, else 0


@dataclass(frozen=True, eq=False)
class Pixels:
    """How far apart pixels lie in one place: next to each other, and in the next row."""

    across: Index
    down: Index


def _meaning(places: Sequence[Place], sizes: Sequence[Index], *, down: int, across: int, nr: int,
             levels: int, accumulate: bool, lanewise: bool, finish: Finish | None, asks: bool,
             near: bool) -> Stmt:
    (c, c_at), (a, a_at), (b, b_at), *operands = places[:-1] if asks else places
    columns, *rest = sizes
    loops = [(rest[i], rest[i + 1], rest[i + 2]) for i in range(0, 3 * levels, 3)]
    steps = rest[3 * levels:]
    y, x, j = (Var(name, 0, size - 1) for name, size in (("ty", down), ("tx", across), ("tj", nr)))

    def pixel(which: int) -> Index:
        return x * steps[2 * which] + y * steps[2 * which + 1]

    here = c_at + pixel(0) + j

    wide = c.dtype if finish is None else finish.total.dtype
    total, sum_at = (c, here) if wide is c.dtype else (
        Buffer("tsums", wide, down * across * nr), (y * across + x) * nr + j)

    def each(store: Stmt) -> Stmt:
        return For(y, 0, down, For(x, 0, across, For(j, 0, columns, store, "vector")))

    left, right = a_at + pixel(1), b_at + j
    taps = [Var(f"tk{i}", 0) for i in range(levels)]
    for tap, (_, a_step, b_step) in zip(taps, loops, strict=True):
        left, right = left + tap * a_step, right + tap * b_step
    product = cast(a[left + j if lanewise else left], wide) * cast(b[right], wide)
    update = each(Store(total, sum_at, product, "add"))
    for tap, (count, _, _) in zip(reversed(taps), reversed(loops), strict=True):
        update = For(tap, 0, count, update)
    code = [None if accumulate else each(Store(total, sum_at, Const(wide, 0))), update]
    if finish is not None:
        table: dict[int, Scalar] = {id(finish.total): total[sum_at]}
        for i, (load, along, (buffer, at)) in enumerate(zip(
                finish.operands, finish.along, operands, strict=True)):
            table[id(load)] = buffer[at + pixel(i + 2) + along * j]
        code.append(each(Store(c, here, rewrite(finish.value, lambda n: table.get(id(n))))))
    return block(*code) if total is c else Alloc(total, block(*code))


WINDOW_TILE = TileIntrinsic("window_tile", _meaning)


def replaced(tile: Tile) -> list[Buffer]:
    """Operands that a tile reads only where it stores afterwards: their memory may be C's."""
    facts = tile.constants
    if tile.intrinsic is not WINDOW_TILE or facts["finish"] is None or facts["accumulate"]:
        return []
    (c, c_at), _, _, *operands = tile.places
    steps = tile.sizes[1 + 3 * facts["levels"]:]
    found = [buffer for i, (buffer, at) in enumerate(operands[:len(facts["finish"].along)])
             if facts["finish"].along[i] == 1 and buffer.dtype is c.dtype and at == c_at
             and steps[2 * i + 4:2 * i + 6] == steps[:2]]
    return [x for x in found if sum(x is y for y, _ in tile.places) == 1]


def window_tile(c: Place, a: Place, b: Place, levels: Sequence[Level], columns: Index,
                c_step: Pixels, a_step: Pixels, down: int, across: int, nr: int, *,
                accumulate: bool = False, lanewise: bool = False, finish: Finish | None = None,
                operands: Sequence[tuple[Place, Pixels]] = (),
                soon: tuple[Index, Index] | None = None, near: bool = False) -> Stmt:
    """`C[pixel, j] (+)= sum over the window of A[pixel, tap] * B[tap, j]`, then `finish` of it.

    `soon` says where in B later tiles will read, and how many elements of it to ask for in each
    step of the innermost level; `near`, that B lies in the first-level cache.
    """
    steps = [n for p in (c_step, a_step, *(p for _, p in operands)) for n in (p.across, p.down)]
    places = [c, a, b, *(place for place, _ in operands)]
    if soon is not None:
        places.append((b[0], soon[0]))
        steps.append(soon[1])
    return Tile(WINDOW_TILE, tuple(places),
                (columns, *(n for level in levels for n in level), *steps),
                {"down": down, "across": across, "nr": nr, "levels": len(levels),
                 "accumulate": accumulate, "lanewise": lanewise, "finish": finish,
                 "asks": soon is not None, "near": near})
