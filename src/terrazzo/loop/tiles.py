"""The tile intrinsics: what a tile instruction computes, as plain loops.

A chip's generator may have a template for each (hand-shaped code around vector registers); where
it has none, or declines, these loops are what runs. The interpreter always runs the loops.

| intrinsic | places | sizes | constants |
|---|---|---|---|
| `fma_tile` | C, A, B [, S] | k, lda, a_step, ldb, ldc [, columns [, share]] | mr, nr, accumulate |
| `fma_rows` | C, A, B [, S] | rows, then those of `fma_tile` | mr, nr, accumulate |
| `dot_tile` | C, A, B | k, lda, ldb, ldc [, columns] | mr, nr, accumulate |
| `transpose_tile` | D, S | k, ldd, lds, columns | nr |

`columns` says how many of the `nr` columns there are; the others are neither read nor written
(`transpose_tile` repeats the last one). A and B may be half types: they are widened to C's type.
S of `fma_tile` is memory that will be needed soon, `share` elements of it for each step of k: a
template may ask for it ahead. A fourth constant, `near`, says that nothing need be asked for.
`fma_rows` is as many tiles of `mr` rows as there are in `rows`, and smaller ones for what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from terrazzo.base.scalar import Const, cast
from terrazzo.index import Index, Var, minimum
from terrazzo.loop.ir import Buffer, For, Stmt, Store, Tile, TileIntrinsic, block

Place = tuple[Buffer, Index]


class Soon(NamedTuple):
    """Memory that will be read soon: a tile may ask for some of it in each step of k."""

    buffer: Buffer
    at: Index
    share: Index  # elements from what one step asks for to what the next one does


def _axis(name: str, extent: Index) -> Var:
    return Var(name, 0, max(extent - 1, 0) if isinstance(extent, int) else None)


def _clear(place: Place, row: Var, ldc: Index, rows: Index, columns: Index) -> Stmt:
    c, at = place
    j = _axis("tj", columns)
    zero = Const(c.dtype, 0)
    return For(row, 0, rows, For(j, 0, columns, Store(c, at + row * ldc + j, zero), "vector"))


def _fma_meaning(places: Sequence[Place], sizes: Sequence[Index], *, mr: Index, nr: int,
                 accumulate: bool, near: bool = False) -> Stmt:
    (c, c_at), (a, a_at), (b, b_at) = places[:3]
    k, lda, a_step, ldb, ldc = sizes[:5]
    columns = sizes[5] if len(sizes) > 5 else nr
    i, p, j = _axis("ti", mr), _axis("tp", k), _axis("tj", columns)
    product = (cast(a[a_at + i * lda + p * a_step], c.dtype)
               * cast(b[b_at + p * ldb + j], c.dtype))
    update = For(j, 0, columns, Store(c, c_at + i * ldc + j, product, "add"), "vector")
    return block(None if accumulate else _clear(places[0], _axis("ti", mr), ldc, mr, columns),
                 For(i, 0, mr, For(p, 0, k, update)))


def _rows_meaning(places: Sequence[Place], sizes: Sequence[Index], *, mr: int, nr: int,
                  accumulate: bool, near: bool = False) -> Stmt:
    return _fma_meaning(places, sizes[1:], mr=sizes[0], nr=nr, accumulate=accumulate)


def _dot_meaning(places: Sequence[Place], sizes: Sequence[Index], *, mr: int, nr: int,
                 accumulate: bool) -> Stmt:
    (c, c_at), (a, a_at), (b, b_at) = places
    k, lda, ldb, ldc = sizes[:4]
    columns = sizes[4] if len(sizes) > 4 else nr
    i, p, j = _axis("ti", mr), _axis("tp", k), _axis("tj", columns)
    product = cast(a[a_at + i * lda + p], c.dtype) * cast(b[b_at + j * ldb + p], c.dtype)
    update = For(p, 0, k, Store(c, c_at + i * ldc + j, product, "add"), "vector")
    return block(None if accumulate else _clear(places[0], _axis("ti", mr), ldc, mr, columns),
                 For(i, 0, mr, For(j, 0, columns, update)))


def _transpose_meaning(places: Sequence[Place], sizes: Sequence[Index], *, nr: int) -> Stmt:
    (d, d_at), (s, s_at) = places
    k, ldd, lds, columns = sizes
    p, j = _axis("tp", k), _axis("tj", nr)
    item = cast(s[s_at + minimum(j, columns - 1) * lds + p], d.dtype)
    return For(p, 0, k, For(j, 0, nr, Store(d, d_at + p * ldd + j, item)))


FMA_TILE = TileIntrinsic("fma_tile", _fma_meaning)
FMA_ROWS = TileIntrinsic("fma_rows", _rows_meaning)
DOT_TILE = TileIntrinsic("dot_tile", _dot_meaning)
TRANSPOSE_TILE = TileIntrinsic("transpose_tile", _transpose_meaning)


def fma_tile(c: Buffer, c_at: Index, a: Buffer, a_at: Index, b: Buffer, b_at: Index, k: Index,
             lda: Index, a_step: Index, ldb: Index, ldc: Index, mr: int, nr: int,
             accumulate: bool, columns: Index | None = None,
             soon: Soon | None = None, near: bool = False) -> Tile:
    """`C[i, j] (+)= sum over p of A[i, p] * B[p, j]`, contiguous along j: an outer-product kernel.

    C[i, j] is at `c_at + i*ldc + j`, A[i, p] at `a_at + i*lda + p*a_step`, B[p, j] at
    `b_at + p*ldb + j`. `soon` says what the next tiles will read, of elements like those of B. If
    B is `near`, in the nearest cache, nothing is asked for.
    """
    live: tuple[Index, ...] = () if columns is None or columns == nr else (columns,)
    places: tuple[Place, ...] = ((c, c_at), (a, a_at), (b, b_at))
    if soon is not None:
        places = (*places, (soon.buffer, soon.at))
        live = (nr if columns is None else columns, soon.share)
    return Tile(FMA_TILE, places, (k, lda, a_step, ldb, ldc, *live),
                {"mr": mr, "nr": nr, "accumulate": accumulate, **({"near": True} if near else {})})


def fma_rows(tile: Tile, rows: Index) -> Tile:
    """Tiles like this one below each other, for so many rows as there are when it runs.

    What the first asks for soon is followed by what the second does, and so on.
    """
    assert tile.intrinsic is FMA_TILE
    return Tile(FMA_ROWS, tile.places, (rows, *tile.sizes), tile.constants)


def dot_tile(c: Buffer, c_at: Index, a: Buffer, a_at: Index, b: Buffer, b_at: Index, k: Index,
             lda: Index, ldb: Index, ldc: Index, mr: int, nr: int, accumulate: bool,
             columns: Index | None = None) -> Stmt:
    """`C[i, j] (+)= sum over p of A[i, p] * B[j, p]`, both contiguous along p: inner products."""
    live = () if columns is None or columns == nr else (columns,)
    return Tile(DOT_TILE, ((c, c_at), (a, a_at), (b, b_at)), (k, lda, ldb, ldc, *live),
                {"mr": mr, "nr": nr, "accumulate": accumulate})


def transpose_tile(d: Buffer, d_at: Index, s: Buffer, s_at: Index, k: Index, ldd: Index,
                   lds: Index, nr: int, columns: Index | None = None) -> Stmt:
    """`D[p, j] = S[j, p]` for p < k and j < nr; S has `columns` rows, the last one is repeated."""
    return Tile(TRANSPOSE_TILE, ((d, d_at), (s, s_at)),
                (k, ldd, lds, nr if columns is None else columns), {"nr": nr})
