"""The tile intrinsic of integer products: small integers in, sums of 32 bits out.

| intrinsic | places | sizes | constants |
|---|---|---|---|
| `integer_tile` | C, A, B, S [, R] | groups, lda, ldc, segments, jump, share [, columns] | below |

The constants are mr, nr, together, accumulate and near.

Steps of k come in groups of `together` neighbours, as instructions want them that add up products
of neighbours: 4 bytes (x86's VNNI) or 2 words (`pmaddwd`). B is packed in panels
`[group][nr][together]`; A is read where it lies, a group of it at a time. Segments are stretches of
k that lie apart in A (the rows of a convolution's window) but follow each other in B. Rows of A are
`lda` apart, or where the table R says: pixels of an image have no one distance. S is memory that
will be needed soon, `share` elements of it for each group: a template may ask for it ahead. `near`
says that C is in the nearest cache, and need not be asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.base.scalar import Const, as_scalar, call, cast
from terrazzo.index import Index, Var
from terrazzo.loop.ir import Buffer, For, Stmt, Store, Tile, TileIntrinsic, block


def _axis(name: str, extent: Index) -> Var:
    return Var(name, 0, max(extent - 1, 0) if isinstance(extent, int) else None)


def _meaning(places: Sequence[tuple[Buffer, Index]], sizes: Sequence[Index], *, mr: int, nr: int,
             together: int, accumulate: bool, near: bool) -> Stmt:
    (c, c_at), (a, a_at), (b, b_at) = places[:3]
    groups, lda, ldc, segments, jump = sizes[:5]
    columns = sizes[6] if len(sizes) > 6 else nr
    i, j, clear = _axis("ti", mr), _axis("tj", columns), _axis("tj", columns)
    s, q, t = _axis("ts", segments), _axis("tq", groups), _axis("tt", together)
    left = a[a_at + i * lda + s * jump + q * together + t]
    if len(places) > 4:
        table, table_at = places[4]
        left = a[call("add", table[table_at + i], as_scalar(a_at + s * jump + q * together + t))]
    right = b[b_at + ((s * groups + q) * nr + j) * together + t]
    update = Store(c, c_at + i * ldc + j, cast(left, c.dtype) * cast(right, c.dtype), "add")
    sums = For(s, 0, segments, For(q, 0, groups, For(t, 0, together,
               For(j, 0, columns, update, "vector"))))
    zero = For(clear, 0, columns, Store(c, c_at + i * ldc + clear, Const(c.dtype, 0)), "vector")
    return For(i, 0, mr, block(None if accumulate else zero, sums))


INTEGER_TILE = TileIntrinsic("integer_tile", _meaning)


def integer_tile(c: Buffer, c_at: Index, a: Buffer, a_at: Index, b: Buffer, b_at: Index,
                 groups: Index, lda: Index, ldc: Index, mr: int, nr: int, together: int,
                 accumulate: bool, columns: Index | None = None, segments: Index = 1,
                 jump: Index = 0, rows: tuple[Buffer, Index] | None = None,
                 soon: tuple[Index, Index] | None = None, near: bool = False) -> Stmt:
    """`C[i, j] (+)= sum over s, q, t of A[i, s, q, t] * B[s, q, j, t]`, in 32-bit integers.

    C[i, j] is at `c_at + i*ldc + j`, A[i, s, q, t] at `a_at + i*lda + s*jump + q*together + t`,
    B[s, q, j, t] at `b_at + ((s*groups + q)*nr + j)*together + t`. Sums wrap around. Of the `nr`
    columns of C only the first `columns` are there; B has them all. `rows` is a place in a table
    of 64-bit numbers that say where the rows of A begin, in place of `i*lda`. `soon` says where in
    B the next tiles will read, and how many elements of it to ask for with each group.
    """
    live: tuple[Index, ...] = () if columns is None or columns == nr else (columns,)
    table = () if rows is None else (rows,)
    later, share = (b_at, 0) if soon is None else soon
    return Tile(INTEGER_TILE, ((c, c_at), (a, a_at), (b, b_at), (b, later), *table),
                (groups, lda, ldc, segments, jump, share, *live),
                {"mr": mr, "nr": nr, "together": together, "accumulate": accumulate, "near": near})
