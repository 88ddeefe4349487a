"""Attention of a few queries to many keys on CPUs, as when a model writes one word after another.

It is bound by reading keys and values. So every task reads one chunk of them, for all queries that
share them (those of a group of heads), and the parts are merged at the end: the technique is
Flash-Decoding's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.base.scalar import Scalar, cast
from terrazzo.base.shapes import num_elements
from terrazzo.chips.cpu.kernel_parts import TASK_PRODUCTS, grain
from terrazzo.chips.spec import ChipSpec
from terrazzo.expr.attention import Attention
from terrazzo.index import Index, ceildiv, maximum, minimum
from terrazzo.loop.ir import Alloc, Buffer, Stmt, Store, block
from terrazzo.loop.shorthands import digits, loop, pieces
from terrazzo.loop.tiles import dot_tile, fma_tile

MOST_QUERIES = 8  # that share keys; above, multiplying takes longer than reading
CHUNK = 512  # keys of one task: some 15 us of reading


def is_decoding(a: Attention) -> bool:
    """Whether few queries share their keys, and keys and values can be read as they lie."""
    rows = a.shared * a.queries
    return isinstance(rows, int) and rows <= MOST_QUERIES and all(
        o.stride(-1) == 1 or o.tensor.shape[-1] == 1 for o in (a.k, a.v))


def lower_decoding(a: Attention, chip: ChipSpec) -> Stmt:
    """All chunks in parallel, then the merging of their parts."""
    outer = (*a.batch, a.heads // a.shared)
    chunks = maximum(ceildiv(a.keys, CHUNK), 1)
    parts = num_elements(outer) * chunks
    rows = a.shared * a.queries
    assert isinstance(rows, int)
    kernel = _Decoding(
        a, chip, rows, chunks,
        Buffer("sums", a.wide, parts * rows * a.value_size),
        Buffer("tops", a.wide, parts * rows),
        Buffer("totals", a.wide, parts * rows))

    def part(number: Index) -> Stmt:
        *places, chunk = digits(number, (*outer, chunks))
        return kernel.chunk(places, number, chunk * CHUNK)

    # Reading a number takes longer than multiplying it.
    products = minimum(a.keys, CHUNK) * (a.size + a.value_size) * rows
    body = block(
        loop("part", parts, part, "parallel", grain=grain(products, TASK_PRODUCTS // 4)),
        loop("group", num_elements(outer), lambda g: kernel.merge(digits(g, outer), g),
             "parallel", grain=64))
    for buffer in (kernel.totals, kernel.tops, kernel.sums):
        body = Alloc(buffer, body)
    return body


@dataclass(frozen=True, eq=False)
class _Decoding:
    a: Attention
    chip: ChipSpec
    rows: int  # queries that share keys and values
    chunks: Index
    sums: Buffer  # [part][row][value size]: weighted values of a chunk
    tops: Buffer  # [part][row]: the highest score of a chunk
    totals: Buffer  # [part][row]: the sum of weights of a chunk

    def place(self, outer: Sequence[Index], row: Index) -> tuple[Index, ...]:
        """Where in q and in the result a row of a group of heads is."""
        *batch, group = outer
        return (*batch, group * self.a.shared + row // self.a.queries, row % self.a.queries)

    # ------------------------------------------------------------ one chunk
    def chunk(self, outer: Sequence[Index], part: Index, start: Index) -> Stmt:
        """Scores, weights and weighted values of one chunk of keys."""
        a, rows = self.a, self.rows
        queries = Buffer("queries", a.wide, rows * a.size)
        scores = Buffer("scores", a.wide, rows * CHUNK)
        live = minimum(CHUNK, a.keys - start)
        copy = loop("row", rows, lambda r: loop("item", a.size, lambda d: Store(
            queries, r * a.size + d,
            cast(a.q.buffer[a.q.at(*self.place(outer, r), d)], a.wide) * a.scale), "vector"))
        return Alloc(queries, Alloc(scores, block(
            copy,
            self.score(outer, queries, scores, start, live),
            loop("row", rows, lambda r: self.weigh(self.place(outer, r), part * rows + r, scores,
                                                   r * CHUNK, start, live)),
            self.add_values(outer, scores, start, live, part * rows))))

    def score(self, outer: Sequence[Index], queries: Buffer, scores: Buffer, start: Index,
              live: Index) -> Stmt:
        a = self.a
        base, stride = a.k.at(*outer, start, 0), a.k.stride(-2)
        columns = self.chip.lanes(a.wide.bits)
        while columns > 1 and self.rows * columns + columns + 1 > self.chip.vector_registers:
            columns //= 2

        def tile(column: Index, count: int) -> Stmt:
            return dot_tile(scores, column, queries, 0, a.k.buffer, base + column * stride, a.size,
                            a.size, stride, CHUNK, self.rows, count, accumulate=False)

        whole = live // columns
        return block(loop("tile", whole, lambda t: tile(t * columns, columns)),
                     loop("key", live, lambda j: tile(j, 1), first=whole * columns))

    def weigh(self, place: tuple[Index, ...], this: Index, scores: Buffer, at: Index, start: Index,
              live: Index) -> Stmt:
        a = self.a

        def hide(j: Index) -> Stmt:
            score: Scalar = scores[at + j]
            if a.causal:
                score = a.hidden(score, place[-1], start + j)
            if a.mask is not None:
                score = a.masked(score, a.mask.buffer[a.mask.at(*place, start + j)])
            return Store(scores, at + j, score)

        return block(
            loop("key", live, hide, "vector") if a.causal or a.mask else None,
            Store(self.tops, this, a.lowest),
            loop("key", live, lambda j: Store(self.tops, this, scores[at + j], "max"), "vector"),
            Store(self.totals, this, a.const(0)),
            loop("key", live, lambda j: block(
                Store(scores, at + j, a.weight(scores[at + j] - self.tops[this])),
                Store(self.totals, this, scores[at + j], "add")), "vector"))

    def add_values(self, outer: Sequence[Index], scores: Buffer, start: Index, live: Index,
                   row: Index) -> Stmt:
        a = self.a
        base = a.v.at(*outer, start, 0)
        # As much of a row of V at once as the registers hold, for long reads.
        vectors = max(1, (self.chip.vector_registers - 1) // (self.rows + 1))
        return pieces(a.value_size, self.chip.lanes(a.wide.bits) * vectors,
                      lambda column, columns, there: fma_tile(
                          self.sums, row * a.value_size + column, scores, 0, a.v.buffer,
                          base + column, live, CHUNK, 1, a.v.stride(-2), a.value_size, self.rows,
                          columns, accumulate=False, columns=there))

    # ------------------------------------------------------------ all chunks together
    def merge(self, outer: Sequence[Index], group: Index) -> Stmt:
        """The parts of one group, each scaled to the highest maximum of all."""
        a = self.a
        best, factor, total = (Buffer(n, a.wide, 1) for n in ("best", "factor", "total"))
        result = Buffer("result", a.wide, a.value_size)

        def row(r: Index) -> Stmt:
            def at(chunk: Index) -> Index:
                return (group * self.chunks + chunk) * self.rows + r

            def add(chunk: Index) -> Stmt:
                return block(
                    Store(factor, 0, a.weight(self.tops[at(chunk)] - best[0])),
                    Store(total, 0, self.totals[at(chunk)] * factor[0], "add"),
                    loop("value", a.value_size, lambda d: Store(
                        result, d, self.sums[at(chunk) * a.value_size + d] * factor[0], "add"),
                        "vector"))

            place = self.place(outer, r)
            return block(
                Store(best, 0, a.lowest),
                loop("chunk", self.chunks, lambda c: Store(best, 0, self.tops[at(c)], "max")),
                Store(total, 0, a.const(0)),
                loop("value", a.value_size, lambda d: Store(result, d, a.const(0)), "vector"),
                loop("chunk", self.chunks, add),
                Store(total, 0, a.inverse(total[0])),
                loop("value", a.value_size, lambda d: Store(
                    a.out.buffer, a.out.at(*place, d),
                    cast(result[d] * total[0], a.out.buffer.dtype)), "vector"))

        body = loop("row", self.rows, row)
        for buffer in (result, total, factor, best):
            body = Alloc(buffer, body)
        return body
