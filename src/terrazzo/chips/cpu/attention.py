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

A few queries against many keys are another matter: see decoding.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from terrazzo.base.scalar import Scalar, as_scalar, call, cast, where
from terrazzo.base.shapes import num_elements
from terrazzo.chips.cpu.decoding import is_decoding, lower_decoding
from terrazzo.chips.cpu.division import by_threads, longest_share
from terrazzo.chips.cpu.kernel_parts import Names, grain
from terrazzo.chips.spec import ChipSpec
from terrazzo.expr.attention import Attention, Operand
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import Index, Var, ceildiv, maximum, minimum
from terrazzo.loop.ir import THREADS, Alloc, Buffer, Function, If, Let, Stmt, Store, block
from terrazzo.loop.shorthands import digits, loop, pieces
from terrazzo.loop.tiles import fma_tile, transpose_tile

QUERY_BLOCK = 128  # queries of a task: what a block of keys is read for; measured
MOST_KEYS, FEWEST_KEYS = 128, 32  # of a block
# Vectors of queries in a panel, and how much longer a tile of that width takes for the same work;
# measured with AVX-512's 32 registers and AVX2's 16.
MANY_REGISTERS = {4: 1.0, 3: 1.0, 2: 1.08, 1: 1.3}
FEW_REGISTERS = {2: 1.0, 1: 1.25}
_TASK_PRICE = 0.1  # of a task, in panels: it reads the keys anew


def lower_attention(program: Program, chip: ChipSpec,
                    constants: frozenset[Tensor] = frozenset()) -> Function | None:
    """The kernel of a program that is one attention operator."""
    attention = Attention.of(program)
    if num_elements(attention.out.tensor.shape) == 0:
        body = block()
    elif is_decoding(attention):
        body = lower_decoding(attention, chip)
    else:
        body = _Panels.of(attention, chip).body()
    return Function(program.name, attention.params, program.dims, body,
                    program.attrs["node"].op.name)


# ---------------------------------------------------------------- sizes of blocks
def _panel_prices(chip: ChipSpec) -> dict[int, float]:
    return MANY_REGISTERS if chip.vector_registers >= 32 else FEW_REGISTERS


def _panel_width(a: Attention, chip: ChipSpec) -> int:
    """Queries of a panel, so that padding and the tile's own price cost least.

    What counts is the time of one thread and that of all: there, panels must go round.
    """
    prices = _panel_prices(chip)
    lanes = chip.lanes(a.wide.bits)
    if not isinstance(a.queries, int):
        return 2 * lanes
    queries, outer = a.queries, num_elements((*a.batch, a.heads))

    def work(vectors: int) -> float:
        width = vectors * lanes
        panels = -(-queries // width)
        alone = prices[vectors] * panels * width * ((panels + 1) * width / 2 if a.causal else 1)
        if not isinstance(outer, int) or outer == 0:
            return alone
        shared = longest_share(outer * panels, chip.cores) * chip.cores / (outer * panels)
        return alone * alone * shared

    return min(prices, key=work) * lanes


def _panel_count(a: Attention, chip: ChipSpec, width: int) -> Scalar:
    """Panels of a task: fewer where there would be too few tasks to go round."""
    most = max(QUERY_BLOCK // width, 1)
    panels, outer = ceildiv(a.queries, width), num_elements((*a.batch, a.heads))
    if a.causal or not (isinstance(panels, int) and isinstance(outer, int)):
        # Tasks differ, or are not known: several a thread.
        return as_scalar(maximum(minimum(ceildiv(outer * panels, 4 * THREADS), most), 1))

    def plan(threads: int) -> tuple[int, ...]:
        return (min(range(1, max(min(most, panels), 1) + 1), key=lambda count: (
            longest_share(outer * -(-panels // count), threads) * (count + _TASK_PRICE))),)

    return as_scalar(by_threads(chip, plan)[0])


def _key_block(a: Attention, chip: ChipSpec, width: int) -> int:
    """Keys of a block: their scores for a panel take a third of the nearest cache; measured."""
    most = chip.l1_bytes // 3 // (width * a.wide.itemsize)
    most = max(FEWEST_KEYS, min(MOST_KEYS, most))
    if isinstance(a.keys, int) and a.keys:
        return -(-a.keys // -(-a.keys // most))  # blocks of the same size
    return most


def _rows_of(chip: ChipSpec, vectors: int) -> int:
    """Rows of a register tile: its sums, a row of B and an element of A fill the registers."""
    return max(1, (chip.vector_registers - vectors - 1) // vectors)


# ---------------------------------------------------------------- the kernel
@dataclass(frozen=True, eq=False)
class _Panels:
    """The kernel for many queries: its block sizes and local buffers."""

    a: Attention
    chip: ChipSpec
    width: int  # queries of a panel
    panels: Var  # of a task
    key_block: int
    q_rows: Buffer  # [query][size] of one panel
    queries: Buffer  # [panel][size][query]
    sums: Buffer  # [panel][query][value size]
    top: Buffer  # [panel][query]: the highest score so far
    total: Buffer  # [panel][query]: the sum of weights so far
    fresh: Buffer  # [query]: the new maximum
    scores: Buffer  # [key][query], then the weights
    mask_rows: Buffer  # [query][key]: a boolean mask as numbers, before it is transposed
    bias: Buffer  # [key][query]: the mask
    k_block: Buffer  # keys and values of a block, where they are not of the type computed in
    v_block: Buffer

    @staticmethod
    def of(a: Attention, chip: ChipSpec) -> _Panels:
        width = _panel_width(a, chip)
        panels, keys = max(QUERY_BLOCK // width, 1), _key_block(a, chip, width)

        def local(name: str, *sizes: Index) -> Buffer:
            return Buffer(name, a.wide, num_elements(sizes))

        return _Panels(
            a, chip, width, Var("panels", 1, panels), keys,
            q_rows=local("q_rows", width, a.size),
            queries=local("queries", panels, width, a.size),
            sums=local("sums", panels, width, a.value_size),
            top=local("top", panels, width),
            total=local("total", panels, width),
            fresh=local("fresh", width),
            scores=local("scores", keys, width),
            mask_rows=local("mask_rows", width, keys),
            bias=local("bias", keys, width),
            k_block=local("k_block", keys, a.size),
            v_block=local("v_block", keys, a.value_size))

    def body(self) -> Stmt:
        a, block_size, names = self.a, self.panels * self.width, Names(str)
        blocks = names("blocks", ceildiv(a.queries, block_size))
        sizes = (*a.batch, a.heads, blocks)

        def task(number: Index) -> Stmt:
            *outer, number = digits(number, sizes)
            # The last queries see the most keys: their tasks go first, so that none is left alone.
            return self.task(outer, (blocks - 1 - number if a.causal else number) * block_size)

        tasks = loop("task", num_elements(sizes), task, "parallel",
                     grain=grain(a.keys * (a.size + a.value_size) * self.width))
        return Let(self.panels, _panel_count(a, self.chip, self.width), names.around(tasks))

    def task(self, outer: Sequence[Index], first: Index) -> Stmt:
        """A block of queries of one head: all its panels meet one block of keys after another."""
        a = self.a
        count = minimum(self.panels, ceildiv(a.queries - first, self.width))
        keys = minimum(a.keys, first + self.panels * self.width) if a.causal else a.keys

        def panels(act: Callable[[Index, Index], Stmt]) -> Stmt:
            return loop("panel", count, lambda p: act(p, first + p * self.width))

        def key_block(number: Index) -> Stmt:
            start = number * self.key_block
            live = minimum(self.key_block, keys - start)
            return block(self.widen(outer, start, live),
                         panels(lambda p, query: self.step(outer, p, query, start, live)))

        body = block(
            panels(lambda p, query: self.begin(outer, p, query)),
            loop("key_block", ceildiv(keys, self.key_block), key_block),
            panels(lambda p, query: self.finish(outer, p, query)))
        for buffer in (self.v_block, self.k_block, self.bias, self.mask_rows, self.scores,
                       self.fresh, self.total, self.top, self.sums, self.queries, self.q_rows):
            body = Alloc(buffer, body)
        return body

    def lanes(self, act: Callable[[Index], Stmt]) -> Stmt:
        """One step for all queries of a panel."""
        return loop("query", self.width, act, "vector")

    # ------------------------------------------------------------ before and after the keys
    def begin(self, outer: Sequence[Index], panel: Index, query: Index) -> Stmt:
        """Scale, widen and transpose the queries of a panel; nothing is seen yet."""
        a, width = self.a, self.width
        live = minimum(width, a.queries - query)
        copy = loop("row", live, lambda i: loop("item", a.size, lambda d: Store(
            self.q_rows, i * a.size + d,
            cast(a.q.buffer[a.q.at(*outer, query + i, d)], a.wide) * a.scale), "vector"))
        turn = transpose_tile(self.queries, panel * (width * a.size), self.q_rows, 0, a.size,
                              width, a.size, width, live)
        return block(
            copy, turn,
            loop("sum", width * a.value_size, lambda i: Store(
                self.sums, panel * (width * a.value_size) + i, a.const(0)), "vector"),
            self.lanes(lambda i: block(Store(self.top, panel * width + i, a.lowest),
                                       Store(self.total, panel * width + i, a.const(0)))))

    def finish(self, outer: Sequence[Index], panel: Index, query: Index) -> Stmt:
        """Divide by the sums of weights."""
        a, width = self.a, self.width
        at = panel * width

        def row(i: Index) -> Stmt:
            return loop("value", a.value_size, lambda d: Store(
                a.out.buffer, a.out.at(*outer, query + i, d),
                cast(self.sums[(at + i) * a.value_size + d] * self.total[at + i],
                     a.out.buffer.dtype)), "vector")

        return block(
            self.lanes(lambda i: Store(self.total, at + i, a.inverse(self.total[at + i]))),
            loop("row", minimum(width, a.queries - query), row))

    # ------------------------------------------------------------ keys and values
    def is_direct(self, operand: Operand) -> bool:
        """Whether tiles can read keys or values where they lie."""
        return operand.tensor.dtype is self.a.wide and operand.stride(-1) == 1

    def base(self, outer: Sequence[Index], operand: Operand, start: Index) -> Index:
        """Where the keys or values of a head begin."""
        *batch, head = outer
        return operand.at(*batch, head // self.a.shared, start, 0)

    def rows(self, outer: Sequence[Index], operand: Operand, copy: Buffer, size: Index,
             start: Index) -> tuple[Buffer, Index, Index]:
        """The buffer, address and stride that tiles read keys or values with."""
        if self.is_direct(operand):
            return operand.buffer, self.base(outer, operand, start), operand.stride(-2)
        return copy, 0, size

    def widen(self, outer: Sequence[Index], start: Index, live: Index) -> Stmt:
        """Keys and values of a block in the type computed in, where they are not already."""

        def copied(operand: Operand, copy: Buffer, size: Index) -> Stmt | None:
            if self.is_direct(operand):
                return None
            base = self.base(outer, operand, start)
            down, right = operand.stride(-2), operand.stride(-1)
            return loop("key", live, lambda j: loop("item", size, lambda i: Store(
                copy, j * size + i,
                cast(operand.buffer[base + j * down + i * right], self.a.wide)), "vector"))

        return block(copied(self.a.k, self.k_block, self.a.size),
                     copied(self.a.v, self.v_block, self.a.value_size))

    # ------------------------------------------------------------ a panel meets a block of keys
    def step(self, outer: Sequence[Index], panel: Index, query: Index, start: Index,
             live: Index) -> Stmt:
        """Scores, their maximum, weights, and the weighted sum of values."""
        causal = self.a.causal
        if causal:
            live = maximum(minimum(live, query + self.width - start), 0)
        body = block(
            self.score(outer, panel, start, live),
            self.apply_mask(outer, query, start, live),
            self.hide_future(query, start, live) if causal else None,
            self.update_top(panel, live),
            self.rescale(panel),
            self.weigh(panel, live),
            self.add_values(outer, panel, start, live))
        return If(call("gt", as_scalar(live), as_scalar(0)), body) if causal else body

    def score(self, outer: Sequence[Index], panel: Index, start: Index, live: Index) -> Stmt:
        a, width = self.a, self.width
        k, at, stride = self.rows(outer, a.k, self.k_block, a.size, start)
        most = _rows_of(self.chip, width // self.chip.lanes(a.wide.bits))

        def tile(row: Index, rows: int) -> Stmt:
            return fma_tile(self.scores, row * width, k, at + row * stride, self.queries,
                            panel * (width * a.size), a.size, stride, 1, width, width, rows,
                            width, accumulate=False)

        # The last tile begins early enough to be full: some scores are computed twice.
        full = loop("tile", ceildiv(live, most),
                    lambda t: tile(minimum(t * most, live - most), most))
        single = loop("key", live, lambda j: tile(j, 1))
        if isinstance(live, int):
            return full if live >= most else single
        return If(call("ge", as_scalar(live), as_scalar(most)), full, single)

    def each_score(self, live: Index, act: Callable[[Scalar, Index, Index], Scalar],
                   first: Index = 0) -> Stmt:
        """Replace every score by act(score, key, query)."""
        return loop("key", live, lambda j: self.lanes(lambda i: Store(
            self.scores, j * self.width + i,
            act(self.scores[j * self.width + i], j, i))), first=first)

    def apply_mask(self, outer: Sequence[Index], query: Index, start: Index, live: Index
                   ) -> Stmt | None:
        a, width = self.a, self.width
        if a.mask is None:
            return None
        mask, base = a.mask.buffer, a.mask.at(*outer, query, start)
        down, right = a.mask.stride(-2), a.mask.stride(-1)
        queries = minimum(width, a.queries - query)
        if down == 0 or right != 1:
            return self.each_score(live, lambda score, j, i: a.masked(
                score, mask[base + j * right] if down == 0 else where(
                    call("lt", as_scalar(i), as_scalar(queries)),
                    mask[base + j * right + i * down], False if mask.dtype.is_bool else 0)))
        if not mask.dtype.is_bool:
            turn = transpose_tile(self.bias, 0, mask, base, live, width, down, width, queries)
            return block(turn, self.each_score(live, lambda score, j, i: (
                score + self.bias[j * width + i])))
        spread = loop("row", queries, lambda i: loop("key", live, lambda j: Store(
            self.mask_rows, i * self.key_block + j,
            where(mask[base + i * down + j], a.const(1), 0.0)), "vector"))
        turn = transpose_tile(self.bias, 0, self.mask_rows, 0, live, width, self.key_block, width,
                              queries)
        return block(spread, turn, self.each_score(live, lambda score, j, i: a.masked(
            score, call("ne", self.bias[j * width + i], a.const(0)))))

    def hide_future(self, query: Index, start: Index, live: Index) -> Stmt:
        """Only keys from the panel's first query on can be in some query's future."""
        return self.each_score(
            live, lambda score, j, i: self.a.hidden(score, query + i, start + j),
            first=maximum(query - start, 0))

    def update_top(self, panel: Index, live: Index) -> Stmt:
        def larger(score: Scalar, top: Scalar) -> Scalar:
            # One instruction. It loses a nan, which the exponential brings back.
            return where(score > top, score, top)

        return block(
            self.lanes(lambda i: Store(self.fresh, i, self.top[panel * self.width + i])),
            loop("key", live, lambda j: self.lanes(lambda i: Store(
                self.fresh, i, larger(self.scores[j * self.width + i], self.fresh[i])))))

    def rescale(self, panel: Index) -> Stmt:
        """Bring earlier sums to the new maximum; `top` holds the factor for a while."""
        a, at = self.a, panel * self.width
        return block(
            self.lanes(lambda i: Store(self.top, at + i,
                                       a.weight(self.top[at + i] - self.fresh[i]))),
            self.lanes(lambda i: Store(self.total, at + i,
                                       self.total[at + i] * self.top[at + i])),
            loop("row", self.width, lambda i: loop("value", a.value_size, lambda d: Store(
                self.sums, (at + i) * a.value_size + d,
                self.sums[(at + i) * a.value_size + d] * self.top[at + i]), "vector")),
            self.lanes(lambda i: Store(self.top, at + i, self.fresh[i])))

    def weigh(self, panel: Index, live: Index) -> Stmt:
        width = self.width
        return loop("key", live, lambda j: self.lanes(lambda i: block(
            Store(self.scores, j * width + i,
                  self.a.weight(self.scores[j * width + i] - self.fresh[i])),
            Store(self.total, panel * width + i, self.scores[j * width + i], "add"))))

    def add_values(self, outer: Sequence[Index], panel: Index, start: Index, live: Index) -> Stmt:
        a, width = self.a, self.width
        v, at, stride = self.rows(outer, a.v, self.v_block, a.value_size, start)
        lanes = self.chip.lanes(a.wide.bits)
        vectors = max(_panel_prices(self.chip))
        if isinstance(a.value_size, int):
            vectors = min(vectors, -(-a.value_size // lanes))
        rows = _rows_of(self.chip, vectors)
        whole, rest = divmod(width, rows)

        def tiles(column: Index, columns: int, there: Index | None) -> Stmt:
            def tile(row: Index, count: int) -> Stmt:
                return fma_tile(self.sums, (panel * width + row) * a.value_size + column,
                                self.scores, row, v, at + column, live, 1, width, stride,
                                a.value_size, count, columns, accumulate=True, columns=there)

            return block(loop("tile", whole, lambda t: tile(t * rows, rows)),
                         tile(whole * rows, rest) if rest else None)

        return pieces(a.value_size, lanes * vectors, tiles)
