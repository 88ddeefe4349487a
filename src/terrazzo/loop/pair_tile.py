"""The tile intrinsics of products of bfloat16: steps of k in pairs, sums in float32.

| intrinsic | places | sizes | constants |
|---|---|---|---|
| `pair_tile` | C, A, B [, S] | k, lda, a_step, ldb, ldc [, columns [, share]] | below |
| `pair_rows` | C, A, B [, S] | rows, then those of `pair_tile` | below |
| `pair_panel` | D, S | k, ldd, lds, columns | nr |

The constants are mr, nr, accumulate, paired, even [, near].

Instructions that multiply bfloat16 (x86's `vdpbf16ps`) add two products of neighbours to each sum.
So both steps of a pair lie side by side in A, and in B where that is `paired`: panels
`[k / 2][nr][2]`, which have all their columns. Else B lies in rows, which the tile brings together
itself. An odd k ends with half a pair; `even` says that it never does. The rest is as in `tiles`.

C is float32, or bfloat16 if its sums are whole: then they are rounded as they are stored, and k is
at most `WHOLE_SUMS`.
"""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.base.scalar import Const, as_scalar, call, cast
from terrazzo.dtypes import float32
from terrazzo.index import Index, Var, ceildiv, minimum
from terrazzo.loop.ir import Alloc, Buffer, For, If, Stmt, Store, Tile, TileIntrinsic, block
from terrazzo.loop.tiles import Soon

Place = tuple[Buffer, Index]

WHOLE_SUMS = 384  # steps of k: longer sums are added up in memory, from blocks


def _axis(name: str, extent: Index) -> Var:
    return Var(name, 0, max(extent - 1, 0) if isinstance(extent, int) else None)


def _meaning(places: Sequence[Place], sizes: Sequence[Index], *, mr: Index, nr: int,
             accumulate: bool, paired: bool, even: bool, near: bool = False) -> Stmt:
    (c, c_at), (a, a_at), (b, b_at) = places[:3]
    k, lda, a_step, ldb, ldc = sizes[:5]
    columns = sizes[5] if len(sizes) > 5 else nr
    i, p, j = _axis("ti", mr), _axis("tp", k), _axis("tj", columns)
    clear, keep = _axis("tj", columns), _axis("tj", columns)
    left = a[a_at + i * lda + p // 2 * a_step + p % 2]
    right = b[b_at + p // 2 * ldb + j * 2 + p % 2] if paired else b[b_at + p * ldb + j]
    sums, at = (c, c_at + i * ldc) if c.dtype is float32 else (Buffer("sums", float32, nr), 0)
    update = Store(sums, at + j, cast(left, float32) * cast(right, float32), "add")
    zero = For(clear, 0, columns, Store(sums, at + clear, Const(float32, 0)), "vector")
    body = block(None if accumulate else zero,
                 For(p, 0, k, For(j, 0, columns, update, "vector")))
    if sums is not c:
        assert not accumulate
        rounded = Store(c, c_at + i * ldc + keep, cast(sums[keep], c.dtype))
        body = Alloc(sums, block(body, For(keep, 0, columns, rounded, "vector")))
    return For(i, 0, mr, body)


def _rows_meaning(places: Sequence[Place], sizes: Sequence[Index], *, mr: int, nr: int,
                  accumulate: bool, paired: bool, even: bool, near: bool = False) -> Stmt:
    return _meaning(places, sizes[1:], mr=sizes[0], nr=nr, accumulate=accumulate, paired=paired,
                    even=even)


def _panel_meaning(places: Sequence[Place], sizes: Sequence[Index], *, nr: int) -> Stmt:
    (d, d_at), (s, s_at) = places
    k, ldd, lds, columns = sizes
    q, j, t = _axis("tq", ceildiv(k, 2)), _axis("tj", nr), _axis("tt", 2)
    at = d_at + q * ldd + j * 2 + t
    return For(q, 0, ceildiv(k, 2), For(j, 0, nr, For(t, 0, 2, If(
        call("lt", as_scalar(q * 2 + t), as_scalar(k)),
        Store(d, at, s[s_at + minimum(j, columns - 1) * lds + q * 2 + t]),
        Store(d, at, Const(d.dtype, 0))))))


PAIR_TILE = TileIntrinsic("pair_tile", _meaning)
PAIR_ROWS = TileIntrinsic("pair_rows", _rows_meaning)
PAIR_PANEL = TileIntrinsic("pair_panel", _panel_meaning)


def pair_tile(c: Buffer, c_at: Index, a: Buffer, a_at: Index, b: Buffer, b_at: Index, k: Index,
              lda: Index, a_step: Index, ldb: Index, ldc: Index, mr: int, nr: int,
              accumulate: bool, paired: bool, even: bool, columns: Index | None = None,
              soon: Soon | None = None, near: bool = False) -> Tile:
    """`C[i, j] (+)= sum over p of A[i, p] * B[p, j]`, in float32.

    C[i, j] is at `c_at + i*ldc + j`, A[i, p] at `a_at + i*lda + p//2*a_step + p%2`, B[p, j] at
    `b_at + p//2*ldb + 2*j + p%2` if `paired`, else at `b_at + p*ldb + j`.
    """
    live: tuple[Index, ...] = () if columns is None or columns == nr else (columns,)
    places: tuple[Place, ...] = ((c, c_at), (a, a_at), (b, b_at))
    if soon is not None:
        places = (*places, (soon.buffer, soon.at))
        live = (nr if columns is None else columns, soon.share)
    return Tile(PAIR_TILE, places, (k, lda, a_step, ldb, ldc, *live), {
        "mr": mr, "nr": nr, "accumulate": accumulate, "paired": paired, "even": even,
        **({"near": True} if near else {})})


def pair_rows(tile: Tile, rows: Index) -> Tile:
    """Tiles like this one below each other, for so many rows as there are when it runs."""
    return Tile(PAIR_ROWS, tile.places, (rows, *tile.sizes), tile.constants)


def pair_panel(d: Buffer, d_at: Index, s: Buffer, s_at: Index, k: Index, ldd: Index, lds: Index,
               nr: int, columns: Index | None = None) -> Stmt:
    """`D[q, j, t] = S[j, 2*q + t]` for j < nr; S has `columns` rows, the last one is repeated.

    D[q, j, t] is at `d_at + q*ldd + 2*j + t`, S[j, p] at `s_at + j*lds + p`. What an odd k lacks
    to the last pair is zero.
    """
    return Tile(PAIR_PANEL, ((d, d_at), (s, s_at)),
                (k, ldd, lds, nr if columns is None else columns), {"nr": nr})
