"""The tile intrinsic that copies a block of memory with rows and columns exchanged.

| intrinsic | places | sizes | constants |
|---|---|---|---|
| `transposed_copy` | D, S | rows, columns, ldd, lds | streaming |
"""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.index import Index, Var
from terrazzo.loop.ir import Buffer, For, Stmt, Store, Tile, TileIntrinsic


def _meaning(places: Sequence[tuple[Buffer, Index]], sizes: Sequence[Index], *, streaming: bool
             ) -> Stmt:
    (d, d_at), (s, s_at) = places
    rows, columns, ldd, lds = sizes
    i, j = Var("i", 0), Var("j", 0)
    copy = Store(d, d_at + i * ldd + j, s[s_at + j * lds + i], streaming=streaming)
    return For(i, 0, rows, For(j, 0, columns, copy, "vector"))


TRANSPOSED_COPY = TileIntrinsic("transposed_copy", _meaning)


def transposed_copy(d: Buffer, d_at: Index, s: Buffer, s_at: Index, rows: Index, columns: Index,
                    ldd: Index, lds: Index, streaming: bool = False) -> Stmt:
    """`D[i, j] = S[j, i]` for i < rows and j < columns, both of one type.

    `streaming` says that D will not be read soon.

    D[i, j] is at `d_at + i*ldd + j`, S[j, i] at `s_at + j*lds + i`.
    """
    return Tile(TRANSPOSED_COPY, ((d, d_at), (s, s_at)), (rows, columns, ldd, lds),
                {"streaming": streaming})
