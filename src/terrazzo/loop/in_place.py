"""Whether a kernel may write a result over one of its inputs.

It may where each element of the result is stored once, and nothing reads the input afterwards at
that element, or ever at another one. Then the input's memory can be the result's, and every number
of threads and every width of vectors gives the same result as with memory of its own.
"""

from __future__ import annotations

from terrazzo.base.scalar import Load, Scalar, loads
from terrazzo.index import free_vars
from terrazzo.loop.ir import Alloc, Block, Buffer, For, Function, Let, Stmt, Store, Tile, walk
from terrazzo.loop.window_tile import replaced


def may_overwrite(function: Function, result: Buffer, source: Buffer) -> bool:
    """Whether `result` may be stored where `source` lies; both are parameters of the kernel."""
    if result.dtype is not source.dtype or result is source:
        return False
    statements = list(walk(function.body))
    if any(isinstance(s, Tile) for s in statements):
        return _tiles_allow(statements, result, source)
    nest = _straight(function.body)
    return nest is not None and _stores_allow(*nest, result, source)


def _tiles_allow(statements: list[Stmt], result: Buffer, source: Buffer) -> bool:
    """Tiles that read an operand where they store, and nothing else that touches it."""
    if not all(isinstance(s, (Tile, Store, For, Block, Alloc, Let)) for s in statements):
        return False
    if any(load.source is source for s in statements if isinstance(s, Let)
           for load in loads(s.value)):
        return False
    tiles = [s for s in statements if isinstance(s, Tile)]
    stores = [s for s in statements if isinstance(s, Store)]
    return all(t.places[0][0] is result and source in replaced(t) for t in tiles) and not any(
        s.buffer is result or any(load.source is source for load in _reads(s)) for s in stores)


def _straight(body: Stmt) -> tuple[list[For], tuple[Store, ...]] | None:
    """Loops inside each other around nothing but plain stores; None: it is something else."""
    loops: list[For] = []
    while isinstance(body, For):
        loops.append(body)
        body = body.body
    stmts = body.stmts if isinstance(body, Block) else (body,)
    plain = all(isinstance(s, Store) and s.reduce is None and s.mask is None
                and not isinstance(s.index, Scalar) for s in stmts)
    return (loops, stmts) if plain else None  # type: ignore[return-value]


def _stores_allow(loops: list[For], stores: tuple[Store, ...], result: Buffer, source: Buffer
                  ) -> bool:
    """One store of the result, the last that reads the source, at the element that it stores."""
    places = [i for i, s in enumerate(stores) if s.buffer is result]
    if len(places) != 1 or any(s.buffer is source for s in stores):
        return False
    (at,) = places
    store = stores[at]
    assert not isinstance(store.index, Scalar)
    # Every turn of every loop stores another element.
    if any(loop.var not in free_vars(store.index) for loop in loops if loop.hi - loop.lo != 1):
        return False
    reads = [[load for load in _reads(s) if load.source is source] for s in stores]
    elsewhere = any(load.indices[0] != store.index for found in reads for load in found)
    # What the store itself reads is read before it: that holds for machine code, too.
    return not elsewhere and not any(reads[at + 1:]) and (bool(reads[at]) or not any(reads))


def _reads(store: Store) -> list[Load]:
    return [load for value in (store.value, store.mask, store.index, store.streaming)
            if isinstance(value, Scalar) for load in loads(value)]


__all__ = ["may_overwrite"]
