"""Attention on CPUs: the Loop IR of a kernel that never holds the score matrix.

The technique is FlashAttention's: keys come block by block, and each query keeps the highest score
so far, the sum of its weights and its weighted sum of values; a new maximum rescales the other two
(online softmax, Milakov and Gimelshein).

Queries are taken a panel at a time, as many as the columns of a register tile. The scores of a
panel are held transposed, keys by queries, which settles everything else:
- in `scores = K q^T` the keys' rows are read as they lie, and only the panel's queries are
  transposed, once for all keys;
- maximum, exponential and sum run down the keys with one query in each lane, so nothing is ever
  combined across lanes;
- in `sums = weights V` the weights are the left operand, which a register tile reads in any
  direction, and the rows of V are read as they lie.

A few queries against many keys (decoding) are bound by memory instead: there every task takes a
chunk of the keys, all queries that share them, and the parts are merged at the end (Flash-Decoding).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from terrazzo.chips.spec import ChipSpec
from terrazzo.dtypes import DType, float32, promote
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import Index, Var, bounds, ceildiv, maximum, minimum, proves_eq
from terrazzo.loop.ir import Alloc, Buffer, For, Function, If, Stmt, Store, block
from terrazzo.loop.tiles import dot_tile, fma_tile, transpose_tile
from terrazzo.scalar import Const, FromIndex, Scalar, as_scalar, call, cast, where
from terrazzo.shapes import contiguous_strides, num_elements

QUERY_BLOCK = 128  # queries of a task: what a block of keys is read for; measured
DECODE_QUERIES = 8  # up to here attention is bound by memory
DECODE_CHUNK = 512  # keys of one task then: some 15 us of reading
SMALLEST = {32: -87.0, 64: -708.0}  # e to this is the last normal number, by bits of the type
TASK_PRODUCTS = 1 << 18  # multiplications worth a task of their own: about 5 us
# Vectors of queries in a panel, and how much longer a tile of that width takes for the same work.
PANELS = {32: {4: 1.0, 3: 1.0, 2: 1.08, 1: 1.3}, 16: {2: 1.0, 1: 1.25}}


def lower_attention(program: Program, chip: ChipSpec) -> Function | None:
    """The kernel of a program that is one attention operator."""
    attention = _Attention.of(program)
    if attention.is_decoding:
        body = _Decoding(attention, chip).body()
    else:
        body = _Panels.of(attention, chip).body()
    operands = [o for o in (attention.q, attention.k, attention.v, attention.mask) if o]
    return Function(program.name, tuple(o.buffer for o in (*operands, attention.out)),
                    program.dims, body, program.attrs["node"].op.name)


# ---------------------------------------------------------------- the problem
@dataclass(frozen=True, eq=False)
class _Operand:
    """A tensor of [..., heads, places, size] and the buffer it lies in."""

    tensor: Tensor
    buffer: Buffer

    @staticmethod
    def of(tensor: Tensor) -> _Operand:
        return _Operand(tensor, Buffer(tensor.name, tensor.dtype, num_elements(tensor.shape)))

    def stride(self, axis: int) -> Index:
        """The distance of neighbours along an axis counted from the back; 0 where it stretches."""
        if -axis > len(self.tensor.shape) or self.tensor.shape[axis] == 1:
            return 0
        return (self.tensor.strides or contiguous_strides(self.tensor.shape))[axis]

    def at(self, *places: Index) -> Index:
        """The address of an element, given its place along every axis of the result."""
        address: Index = 0
        for axis, place in enumerate(reversed(places)):
            address = address + place * self.stride(-axis - 1)
        return address


@dataclass(frozen=True, eq=False)
class _Attention:
    """The operands, sizes and options of one attention."""

    q: _Operand
    k: _Operand
    v: _Operand
    mask: _Operand | None
    out: _Operand
    queries: Index
    keys: Index
    size: Index  # of a query and a key
    value_size: Index
    heads: Index
    shared: Index  # heads of q for each of k and v
    batch: tuple[Index, ...]
    causal: bool
    scale: Scalar
    wide: DType  # what is computed in

    @staticmethod
    def of(program: Program) -> _Attention:
        q, k, v, *rest = map(_Operand.of, program.inputs)
        out = _Operand.of(program.outputs[0])
        attrs = program.attrs["node"].attrs
        *outer, queries, value_size = out.tensor.shape
        heads = outer[-1] if outer else 1
        kv_heads = k.tensor.shape[-3] if len(k.tensor.shape) > 2 else 1
        keys, size = k.tensor.shape[-2:]
        wide = promote(float32, *(o.tensor.dtype.compute for o in (q, k, v)))
        causal = bool(attrs["causal"])
        if causal:
            keys = minimum(keys, q.tensor.shape[-2])  # no query sees those after it
            causal = q.tensor.shape[-2] != 1
        return _Attention(
            q, k, v, rest[0] if rest else None, out, queries, keys, size, value_size, heads,
            1 if kv_heads == 1 or proves_eq(heads, kv_heads) else heads // kv_heads, tuple(outer[:-1]), causal,
            _scale(attrs["scale"], size, wide), wide)

    @property
    def is_decoding(self) -> bool:
        """Whether few queries share their keys, and the keys can be read as they lie."""
        rows = self.shared * self.queries
        return isinstance(rows, int) and rows <= DECODE_QUERIES and all(
            o.stride(-1) == 1 or o.tensor.shape[-1] == 1 for o in (self.k, self.v))

    def const(self, value: float) -> Const:
        return Const(self.wide, value)

    def kv_head(self, head: Index) -> Index:
        return head // self.shared

    def masked(self, score: Scalar, allowed: Scalar) -> Scalar:
        """A score with the mask's element applied to it."""
        assert self.mask is not None
        if self.mask.tensor.dtype.is_bool:
            return where(allowed, score, -math.inf)
        return score + cast(allowed, self.wide)

    @cached_property
    def lowest(self) -> Const:
        """The maximum of no scores: a number, for which exp(-inf - lowest) is 0 and not nan."""
        import numpy as np

        return self.const(float(np.finfo(self.wide.np).min))


def _scale(given: float | None, size: Index, wide: DType) -> Scalar:
    if given is not None:
        return Const(wide, float(given))
    if isinstance(size, int):
        return Const(wide, 1 / math.sqrt(size) if size else 1.0)
    return call("rsqrt", cast(as_scalar(size), wide))


def _loop(name: str, count: Index, body: Callable[[Any], Stmt], kind: str = "serial",
          first: Index = 0, grain: int = 1) -> Stmt:
    """A loop from `first` below `count`; its variable knows its bounds."""
    low, last = bounds(first)[0] or 0, count - 1
    var = Var(name, low, max(last, low) if isinstance(last, int) else last)
    return For(var, first, count, body(var), kind, grain)


def _digits(number: Index, sizes: Sequence[Index]) -> list[Index]:
    """The places along axes of these sizes that a running number stands for."""
    digits: list[Index] = []
    for size in reversed(sizes[1:]):
        digits.append(number % size)
        number = number // size
    return [number, *reversed(digits)] if sizes else []


def _larger(a: Scalar, b: Scalar) -> Scalar:
    """The larger of two, one instruction; a nan is lost here, but its exponential is a nan again."""
    return where(a > b, a, b)


def _rows_of(chip: ChipSpec, vectors: int) -> int:
    """Rows of a register tile: its sums, a row of B and an element of A fill the registers."""
    return max(1, (chip.vector_registers - vectors - 1) // vectors)


def _weight(score: Scalar) -> Scalar:
    """e to a score of at most 0. What would be a denormal is 0: denormals cost 100 cycles each."""
    least = Const(score.dtype, SMALLEST[score.dtype.bits])
    vanishes = call("lt", score, least)
    return where(vanishes, Const(score.dtype, 0), call("exp", where(vanishes, least, score)))


# ---------------------------------------------------------------- many queries
@dataclass(frozen=True, eq=False)
class _Panels:
    """The kernel for many queries: its block sizes and local buffers."""

    a: _Attention
    chip: ChipSpec
    width: int  # queries of a panel
    panels: int  # of a task
    key_block: int
    q_rows: Buffer  # [query][size] of one panel
    queries: Buffer  # [panel][size][query]
    sums: Buffer  # [panel][query][value size]
    top: Buffer  # [panel][query]: the highest score so far
    total: Buffer  # [panel][query]: the sum of weights so far
    scores: Buffer  # [key][query], then the weights
    fresh: Buffer  # [query]: the new maximum
    bias: Buffer  # [key][query]: the mask, transposed
    mask_rows: Buffer  # [query][key]: a boolean mask as numbers, before it is transposed
    k_block: Buffer  # keys and values of a block, where they are not of the type computed in
    v_block: Buffer

    @staticmethod
    def of(a: _Attention, chip: ChipSpec) -> _Panels:
        lanes = chip.lanes(a.wide.bits)
        width = lanes * _panel_vectors(a, chip)
        panels = max(1, QUERY_BLOCK // width)
        if isinstance(a.queries, int):
            panels = max(1, min(panels, -(-a.queries // width)))
        most = bounds(num_elements((*a.batch, a.heads)))[1]
        if isinstance(a.queries, int) and most is not None:
            # Smaller tasks where there would be too few to go round.
            while panels > 1 and most * -(-a.queries // (panels * width)) < 4 * chip.cores:
                panels = -(-panels // 2)
        key_block = _key_block(a, chip, width)

        def local(name: str, size: Index) -> Buffer:
            return Buffer(name, a.wide, size)

        return _Panels(
            a, chip, width, panels, key_block, local("q_rows", width * a.size), local("queries", panels * width * a.size),
            local("sums", panels * width * a.value_size), local("top", panels * width),
            local("total", panels * width), local("scores", key_block * width),
            local("fresh", width), local("bias", key_block * width),
            local("mask_rows", width * key_block), local("k_block", key_block * a.size),
            local("v_block", key_block * a.value_size))

    # ------------------------------------------------------------ the loops
    def body(self) -> Stmt:
        a = self.a
        blocks = ceildiv(a.queries, self.panels * self.width)
        sizes = (*a.batch, a.heads, blocks)
        work = bounds(a.keys * (a.size + a.value_size) * (self.panels * self.width))[1]
        grain = 1 if work is None else max(1, TASK_PRODUCTS // max(work, 1))

        def task(number: Index) -> Stmt:
            *outer, number = _digits(number, sizes)
            # The last queries see the most keys: their tasks go first, so that none is left alone.
            return self.task(outer, blocks - 1 - number if a.causal else number)

        return _loop("task", num_elements(sizes), task, "parallel", grain=grain)

    def task(self, outer: Sequence[Index], number: Index) -> Stmt:
        a = self.a
        first = number * (self.panels * self.width)
        count = minimum(self.panels, ceildiv(a.queries - first, self.width))
        keys = minimum(a.keys, first + self.panels * self.width) if a.causal else a.keys

        def panels(act: Callable[[Index, Index], Stmt]) -> Stmt:
            return _loop("panel", count, lambda p: act(p, first + p * self.width))

        def key_block(block_number: Index) -> Stmt:
            start = block_number * self.key_block
            live = minimum(self.key_block, keys - start)
            return block(self.widen(outer, start, live),
                         panels(lambda p, query: self.step(outer, p, query, start, live)))

        body = block(
            panels(lambda p, query: self.begin(outer, p, query)),
            _loop("key_block", ceildiv(keys, self.key_block), key_block),
            panels(lambda p, query: self.finish(outer, p, query)))
        for buffer in (self.v_block, self.k_block, self.mask_rows, self.bias, self.fresh, self.scores,
                       self.total, self.top, self.sums, self.queries, self.q_rows):
            body = Alloc(buffer, body)
        return body

    def lanes(self, act: Callable[[Index], Stmt]) -> Stmt:
        """One step for all queries of a panel."""
        return _loop("query", self.width, act, "vector")

    # ------------------------------------------------------------ before and after the keys
    def begin(self, outer: Sequence[Index], panel: Index, query: Index) -> Stmt:
        """Scale, widen and transpose the queries of a panel; nothing is seen yet."""
        a, width = self.a, self.width
        live = minimum(width, a.queries - query)
        copy = _loop("row", live, lambda i: _loop("d", a.size, lambda d: Store(
            self.q_rows, i * a.size + d,
            cast(a.q.buffer[a.q.at(*outer, query + i, d)], a.wide) * a.scale), "vector"))
        return block(
            copy,
            transpose_tile(self.queries, panel * (width * a.size), self.q_rows, 0, a.size, width,
                           a.size, width, live),
            _loop("sum", width * a.value_size, lambda i: Store(
                self.sums, panel * (width * a.value_size) + i, a.const(0)), "vector"),
            self.lanes(lambda i: block(Store(self.top, panel * width + i, a.lowest),
                                       Store(self.total, panel * width + i, a.const(0)))))

    def finish(self, outer: Sequence[Index], panel: Index, query: Index) -> Stmt:
        """Divide by the sums of weights; a query that saw no key gives zeros."""
        a, width = self.a, self.width

        def invert(i: Index) -> Stmt:
            total = self.total[panel * width + i]
            return Store(self.total, panel * width + i,
                         a.const(1) / where(call("eq", total, a.const(0)), 1.0, total))

        def row(i: Index) -> Stmt:
            return _loop("value", a.value_size, lambda d: Store(
                a.out.buffer, a.out.at(*outer, query + i, d),
                cast(self.sums[(panel * width + i) * a.value_size + d]
                     * self.total[panel * width + i], a.out.buffer.dtype)), "vector")

        return block(self.lanes(invert),
                     _loop("row", minimum(width, a.queries - query), row))

    def widen(self, outer: Sequence[Index], start: Index, live: Index) -> Stmt:
        """Keys and values of a block in the type computed in, where they are not already."""
        a = self.a
        copies = []
        for operand, copy, size in ((a.k, self.k_block, a.size),
                                    (a.v, self.v_block, a.value_size)):
            if not self.is_direct(operand):
                copies.append(self.copy(outer, operand, copy, size, start, live))
        return block(*copies)

    def copy(self, outer: Sequence[Index], operand: _Operand, copy: Buffer, size: Index,
             start: Index, live: Index) -> Stmt:
        *batch, head = outer or (0,)
        base = operand.at(*batch, self.a.kv_head(head), start, 0)
        if operand.stride(-2) == size and operand.stride(-1) == 1:
            return _loop("element", live * size, lambda i: Store(
                copy, i, cast(operand.buffer[base + i], self.a.wide)), "vector")
        return _loop("key", live, lambda j: _loop("element", size, lambda i: Store(
            copy, j * size + i, cast(operand.buffer[
                base + j * operand.stride(-2) + i * operand.stride(-1)], self.a.wide)), "vector"))

    def is_direct(self, operand: _Operand) -> bool:
        """Whether tiles can read an operand where it lies."""
        return operand.tensor.dtype is self.a.wide and operand.stride(-1) == 1

    # ------------------------------------------------------------ a panel meets a block of keys
    def step(self, outer: Sequence[Index], panel: Index, query: Index, start: Index,
             live: Index) -> Stmt:
        """Scores, their maximum, weights, and the weighted sum of values."""
        a = self.a
        if a.causal:
            live = maximum(minimum(live, query + self.width - start), 0)
        body = block(
            self.score(outer, panel, start, live),
            self.apply_mask(outer, query, start, live),
            self.hide_future(query, start, live) if a.causal else None,
            self.update_top(panel, live),
            self.rescale(panel),
            self.weigh(panel, live),
            self.add_values(outer, panel, start, live))
        return If(call("gt", as_scalar(live), as_scalar(0)), body) if a.causal else body

    def score(self, outer: Sequence[Index], panel: Index, start: Index, live: Index) -> Stmt:
        a, width = self.a, self.width
        *batch, head = outer or (0,)
        most = _rows_of(self.chip, width // self.chip.lanes(a.wide.bits))
        if self.is_direct(a.k):
            k, at, stride = (a.k.buffer, a.k.at(*batch, a.kv_head(head), start, 0), a.k.stride(-2))
        else:
            k, at, stride = self.k_block, 0, a.size

        def tile(row: Index, rows: int) -> Stmt:
            return fma_tile(self.scores, row * width, k, at + row * stride, self.queries,
                            panel * (width * a.size), a.size, stride, 1, width, width, rows,
                            width, accumulate=False)

        # The last tile begins early enough to be full: some scores are computed twice.
        full = _loop("tile", ceildiv(live, most),
                     lambda t: tile(minimum(t * most, live - most), most))
        single = _loop("key", live, lambda j: tile(j, 1))
        if isinstance(live, int):
            return full if live >= most else single
        return If(call("ge", as_scalar(live), as_scalar(most)), full, single)

    def apply_mask(self, outer: Sequence[Index], query: Index, start: Index, live: Index
                   ) -> Stmt | None:
        a, width = self.a, self.width
        if a.mask is None:
            return None
        base = a.mask.at(*outer, query, start)
        by_query, by_key = a.mask.stride(-2), a.mask.stride(-1)
        queries = minimum(width, a.queries - query)
        is_bool = a.mask.tensor.dtype.is_bool

        def apply(allowed: Callable[[Index, Index], Scalar]) -> Stmt:
            return _loop("key", live, lambda j: self.lanes(lambda i: Store(
                self.scores, j * width + i,
                a.masked(self.scores[j * width + i], allowed(j, i)))))

        if by_query == 0 or by_key != 1:
            mask = a.mask.buffer

            def direct(j: Index, i: Index) -> Scalar:
                element = mask[base + j * by_key + i * by_query]
                if by_query == 0:
                    return element
                inside = call("lt", as_scalar(i), as_scalar(queries))
                return where(inside, element, False if is_bool else 0)

            return apply(direct)
        if not is_bool:
            turn = transpose_tile(self.bias, 0, a.mask.buffer, base, live, width, by_query, width,
                                  queries)
            return block(turn, apply(lambda j, i: self.bias[j * width + i]))
        mask = a.mask.buffer
        spread = _loop("row", queries, lambda i: _loop("key", live, lambda j: Store(
            self.mask_rows, i * self.key_block + j,
            where(mask[base + i * by_query + j], a.const(1), 0.0)), "vector"))
        turn = transpose_tile(self.bias, 0, self.mask_rows, 0, live, width, self.key_block, width,
                              queries)
        return block(spread, turn, apply(
            lambda j, i: call("ne", self.bias[j * width + i], a.const(0))))

    def hide_future(self, query: Index, start: Index, live: Index) -> Stmt:
        """Only keys from the panel's first query on can be in some query's future."""
        width = self.width
        return _loop("key", live, lambda j: self.lanes(lambda i: Store(
            self.scores, j * width + i, where(
                call("ge", as_scalar(query + i), as_scalar(start + j)),
                self.scores[j * width + i], -math.inf))), first=maximum(query - start, 0))

    def update_top(self, panel: Index, live: Index) -> Stmt:
        width = self.width
        return block(
            self.lanes(lambda i: Store(self.fresh, i, self.top[panel * width + i])),
            _loop("key", live, lambda j: self.lanes(lambda i: Store(
                self.fresh, i, _larger(self.scores[j * width + i], self.fresh[i])))))

    def rescale(self, panel: Index) -> Stmt:
        """What was summed up so far belongs to the old maximum; `top` holds the factor meanwhile."""
        a, width = self.a, self.width
        at = panel * width
        return block(
            self.lanes(lambda i: Store(self.top, at + i, _weight(self.top[at + i] - self.fresh[i]))),
            self.lanes(lambda i: Store(self.total, at + i,
                                       self.total[at + i] * self.top[at + i])),
            _loop("row", width, lambda i: _loop("value", a.value_size, lambda d: Store(
                self.sums, (at + i) * a.value_size + d,
                self.sums[(at + i) * a.value_size + d] * self.top[at + i]), "vector")),
            self.lanes(lambda i: Store(self.top, at + i, self.fresh[i])))

    def weigh(self, panel: Index, live: Index) -> Stmt:
        width = self.width
        return _loop("key", live, lambda j: self.lanes(lambda i: block(
            Store(self.scores, j * width + i, _weight(self.scores[j * width + i] - self.fresh[i])),
            Store(self.total, panel * width + i, self.scores[j * width + i], "add"))))

    def add_values(self, outer: Sequence[Index], panel: Index, start: Index, live: Index) -> Stmt:
        a, width = self.a, self.width
        *batch, head = outer or (0,)
        if self.is_direct(a.v):
            v, at, stride = (a.v.buffer, a.v.at(*batch, a.kv_head(head), start, 0), a.v.stride(-2))
        else:
            v, at, stride = self.v_block, 0, a.value_size
        lanes = self.chip.lanes(a.wide.bits)
        vectors = min(max(PANELS[self.chip.vector_registers]),
                      -(-(bounds(a.value_size)[1] or 1 << 20) // lanes))
        columns = lanes * vectors
        rows = _rows_of(self.chip, vectors)

        def tile(row: Index, count: int, column: Index, wide: int, there: Index | None) -> Stmt:
            return fma_tile(self.sums, (panel * width + row) * a.value_size + column,
                            self.scores, row, v, at + column, live, 1, width, stride,
                            a.value_size, count, wide, accumulate=True, columns=there)

        def all_rows(column: Index, wide: int, there: Index | None = None) -> Stmt:
            whole = width // rows
            rest = width - whole * rows
            return block(
                _loop("tile", whole, lambda t: tile(t * rows, rows, column, wide, there)),
                tile(whole * rows, rest, column, wide, there) if rest else None)

        if not isinstance(a.value_size, int):
            return _loop("column", ceildiv(a.value_size, columns), lambda c: all_rows(
                c * columns, columns, minimum(columns, a.value_size - c * columns)))
        whole, rest = divmod(a.value_size, columns)
        return block(
            _loop("column", whole, lambda c: all_rows(c * columns, columns)) if whole else None,
            all_rows(whole * columns, rest) if rest else None)


def _panel_vectors(a: _Attention, chip: ChipSpec) -> int:
    """The width of a panel for which padding and the tile's own price cost least."""
    prices = PANELS[chip.vector_registers]
    if not isinstance(a.queries, int):
        return 2
    lanes = chip.lanes(a.wide.bits)

    def work(vectors: int) -> float:
        width = vectors * lanes
        queries = -(-a.queries // width) * width
        if not a.causal:
            return queries * prices[vectors]
        return queries * (queries + width) / 2 * prices[vectors]

    return min(prices, key=work)


def _key_block(a: _Attention, chip: ChipSpec, width: int) -> int:
    """Keys of a block: their scores for a panel take a third of the nearest cache; measured."""
    most = max(32, min(128, chip.l1_bytes // 3 // (width * a.wide.itemsize)))
    if isinstance(a.keys, int) and a.keys:
        return -(-a.keys // -(-a.keys // most))  # blocks of the same size
    return most


# ---------------------------------------------------------------- few queries
@dataclass(frozen=True, eq=False)
class _Decoding:
    """The kernel for few queries and many keys."""

    a: _Attention
    chip: ChipSpec

    @cached_property
    def rows(self) -> int:
        """Queries that share keys and values: those of all heads of a group."""
        rows = self.a.shared * self.a.queries
        assert isinstance(rows, int)
        return rows

    @cached_property
    def chunks(self) -> Index:
        return maximum(ceildiv(self.a.keys, DECODE_CHUNK), 1)

    @cached_property
    def outer(self) -> tuple[Index, ...]:
        return (*self.a.batch, self.a.heads // self.a.shared)

    def body(self) -> Stmt:
        """All chunks in parallel, then the merging of their parts."""
        a, rows = self.a, self.rows
        parts = num_elements(self.outer) * self.chunks
        sums = Buffer("sums", a.wide, parts * rows * a.value_size)
        tops = Buffer("tops", a.wide, parts * rows)
        totals = Buffer("totals", a.wide, parts * rows)
        work = bounds(minimum(a.keys, DECODE_CHUNK) * (a.size + a.value_size) * rows)[1]
        # Reading a number takes longer than multiplying it.
        grain = 1 if work is None else max(1, TASK_PRODUCTS // 4 // max(work, 1))

        def chunk(part: Index) -> Stmt:
            *outer, number = _digits(part, (*self.outer, self.chunks))
            return self.chunk(outer, part, number * DECODE_CHUNK, sums, tops, totals)

        def merge(group: Index) -> Stmt:
            return self.merge(_digits(group, self.outer), group, sums, tops, totals)

        body = block(_loop("part", parts, chunk, "parallel", grain=grain),
                     _loop("group", num_elements(self.outer), merge, "parallel", grain=64))
        for buffer in (totals, tops, sums):
            body = Alloc(buffer, body)
        return body

    def query_place(self, outer: Sequence[Index], row: Index) -> tuple[Index, ...]:
        """The place in q and in the result of a row of a group of heads."""
        a = self.a
        if not a.out.tensor.shape[:-2]:
            return (row,)
        *batch, head = outer
        return (*batch, head * a.shared + row // a.queries, row % a.queries)

    def chunk(self, outer: Sequence[Index], part: Index, start: Index, sums: Buffer, tops: Buffer,
              totals: Buffer) -> Stmt:
        a, rows = self.a, self.rows
        queries = Buffer("queries", a.wide, rows * a.size)
        scores = Buffer("scores", a.wide, rows * DECODE_CHUNK)
        live = minimum(DECODE_CHUNK, a.keys - start)
        pack = _loop("row", rows, lambda r: _loop("d", a.size, lambda d: Store(
            queries, r * a.size + d,
            cast(a.q.buffer[a.q.at(*self.query_place(outer, r), d)], a.wide) * a.scale),
            "vector"))

        def weigh(r: Index) -> Stmt:
            this, at = part * rows + r, r * DECODE_CHUNK
            place = self.query_place(outer, r)

            def hide(j: Index) -> Stmt:
                score: Scalar = scores[at + j]
                if a.causal:
                    seen = call("ge", as_scalar(place[-1]), as_scalar(start + j))
                    score = where(seen, score, -math.inf)
                if a.mask is not None:
                    score = a.masked(score, a.mask.buffer[a.mask.at(*place, start + j)])
                return Store(scores, at + j, score)

            return block(
                _loop("key", live, hide, "vector") if a.causal or a.mask else None,
                Store(tops, this, a.lowest),
                _loop("key", live, lambda j: Store(tops, this, scores[at + j], "max"), "vector"),
                Store(totals, this, a.const(0)),
                _loop("key", live, lambda j: block(
                    Store(scores, at + j, _weight(scores[at + j] - tops[this])),
                    Store(totals, this, scores[at + j], "add")), "vector"))

        body = block(pack, self.score(outer, queries, scores, start, live),
                     _loop("row", rows, weigh),
                     self.add_values(outer, scores, start, live, sums, part * rows))
        return Alloc(queries, Alloc(scores, body))

    def score(self, outer: Sequence[Index], queries: Buffer, scores: Buffer, start: Index,
              live: Index) -> Stmt:
        a = self.a
        columns = self.chip.lanes(a.wide.bits)
        while columns > 1 and self.rows * columns + columns + 1 > self.chip.vector_registers:
            columns //= 2
        base = a.k.at(*outer, start, 0)

        def tile(column: Index, count: int) -> Stmt:
            return dot_tile(scores, column, queries, 0, a.k.buffer, base + column * a.k.stride(-2),
                            a.size, a.size, a.k.stride(-2), DECODE_CHUNK, self.rows, count,
                            accumulate=False)

        whole = live // columns
        return block(_loop("tile", whole, lambda t: tile(t * columns, columns)),
                     _loop("key", live, lambda j: tile(j, 1), first=whole * columns))

    def add_values(self, outer: Sequence[Index], scores: Buffer, start: Index, live: Index,
                   sums: Buffer, row: Index) -> Stmt:
        a = self.a
        lanes = self.chip.lanes(a.wide.bits)
        # As much of a row of V at once as the registers hold, for long reads.
        columns = lanes * max(1, (self.chip.vector_registers - 1) // (self.rows + 1))
        base = a.v.at(*outer, start, 0)

        def tile(column: Index, wide: int, there: Index | None = None) -> Stmt:
            return fma_tile(sums, row * a.value_size + column, scores, 0, a.v.buffer,
                            base + column, live, DECODE_CHUNK, 1, a.v.stride(-2), a.value_size,
                            self.rows, wide, accumulate=False, columns=there)

        if not isinstance(a.value_size, int):
            return _loop("column", ceildiv(a.value_size, columns), lambda c: tile(
                c * columns, columns, minimum(columns, a.value_size - c * columns)))
        whole, rest = divmod(a.value_size, columns)
        return block(
            _loop("column", whole, lambda c: tile(c * columns, columns)) if whole else None,
            tile(whole * columns, rest) if rest else None)

    def merge(self, outer: Sequence[Index], group: Index, sums: Buffer, tops: Buffer,
              totals: Buffer) -> Stmt:
        """The parts of one group, each scaled to the highest maximum of all."""
        a, rows, chunks = self.a, self.rows, self.chunks
        best = Buffer("best", a.wide, 1)
        weight = Buffer("weight", a.wide, 1)
        total = Buffer("total", a.wide, 1)
        result = Buffer("result", a.wide, a.value_size)

        def row(r: Index) -> Stmt:
            def at(chunk: Index) -> Index:
                return (group * chunks + chunk) * rows + r

            def add(chunk: Index) -> Stmt:
                return block(
                    Store(weight, 0, _weight(tops[at(chunk)] - best[0])),
                    Store(total, 0, totals[at(chunk)] * weight[0], "add"),
                    _loop("value", a.value_size, lambda d: Store(
                        result, d, sums[at(chunk) * a.value_size + d] * weight[0], "add"),
                        "vector"))

            place = self.query_place(outer, r)
            return block(
                Store(best, 0, a.lowest),
                _loop("chunk", chunks, lambda c: Store(best, 0, tops[at(c)], "max")),
                Store(total, 0, a.const(0)),
                _loop("value", a.value_size, lambda d: Store(result, d, a.const(0)), "vector"),
                _loop("chunk", chunks, add),
                Store(total, 0, a.const(1) / where(call("eq", total[0], a.const(0)), 1.0,
                                                   total[0])),
                _loop("value", a.value_size, lambda d: Store(
                    a.out.buffer, a.out.at(*place, d),
                    cast(result[d] * total[0], a.out.buffer.dtype)), "vector"))

        body = _loop("row", rows, row)
        for buffer in (best, weight, total, result):
            body = Alloc(buffer, body)
        return body
