"""Attention of our own compiler on a described chip: blocks of queries, scores in the scratchpad.

A task makes blocks of queries of one head. It brings keys and values to the scratchpad piece by
piece, and the score matrix is never held as a whole: each query keeps its highest score so far, the
sum of its weights and its weighted sum of values, and a new maximum rescales the other two
(FlashAttention; online softmax, Milakov and Gimelshein). Of a causal attention a task makes two
blocks, one as far from the first query as the other from the last: so all have as much to do, and
the keys that both see are brought once.

Scores lie transposed, keys by queries, as in the kernel of CPUs: of all that the matrix unit
multiplies only the queries are turned, once a block, and nothing is combined across lanes. Half
types stay what they are up to the matrix unit, and sums are of float32; a weight, which is of
float32, is two numbers of the half type there, itself rounded and the rest, so that nothing is lost
that a result could show. Sizes are known numbers. Everything else, and a few queries to many keys,
runs as the host's does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from terrazzo.base.scalar import Const, Scalar, as_scalar, call, cast, where
from terrazzo.base.shapes import num_elements
from terrazzo.chips.gcu.attention_blocks import GROUP, AttentionBlock, Sizes, best_block
from terrazzo.chips.gcu.blocks import common_half
from terrazzo.chips.gcu.description import Description
from terrazzo.dtypes import DType, float32, int32
from terrazzo.expr.attention import Attention, Operand
from terrazzo.expr.ir import Program
from terrazzo.index import Index, Var, ceildiv, maximum, minimum
from terrazzo.loop.ir import Alloc, Buffer, Function, If, Let, Stmt, Store, block
from terrazzo.loop.shorthands import digits, loop, pieces
from terrazzo.loop.tiles import fma_rows, fma_tile

_ROWS = 4  # of the tiles that the host computes at once, of as many columns as a group
_FEW = 8  # queries that share keys: up to here reading those takes longer than multiplying


def attention_template(program: Program, chip: Description) -> Function | None:
    """The kernel of a program that is one attention operator; None if this is not one for it."""
    if program.kind != "attention":
        return None
    a = Attention.of(program)
    sizes = _sizes(a, chip)
    found = None if sizes is None else best_block(chip, sizes)
    if sizes is None or found is None:
        return None
    body = _Kernel.of(a, sizes, found, _multiplied(a, chip)).body()
    return Function(program.name, a.params, program.dims, body, program.attrs["node"].op.name)


def _sizes(a: Attention, chip: Description) -> Sizes | None:
    """The numbers that blocks are chosen by; None where some are not known, or too small."""
    numbers = (num_elements((*a.batch, a.heads)), a.queries, a.keys, a.size, a.value_size, a.shared)
    known = [n for n in numbers if isinstance(n, int) and n > 0]
    dtype = _multiplied(a, chip)
    depth = chip.depth(dtype.short)
    if a.wide is not float32 or depth is None or len(known) < len(numbers):
        return None
    outer, queries, keys, size, value_size, shared = known
    if queries * shared <= _FEW:
        return None
    return Sizes(outer, queries, keys, size, value_size, a.causal, dtype.itemsize, depth,
                 0 if a.mask is None else a.mask.tensor.dtype.itemsize)


def _multiplied(a: Attention, chip: Description) -> DType:
    """The type of what the matrix unit multiplies."""
    return common_half(chip, (o.tensor.dtype for o in (a.q, a.k, a.v))) or float32


@dataclass(frozen=True, eq=False)
class _Kernel:
    """The kernel: its block and what is in the scratchpad."""

    a: Attention
    sizes: Sizes
    blocks: int  # of queries in a head
    lanes: int  # queries of all blocks of a task
    keys: int  # of a piece
    queries: Buffer  # [size][query]
    k_piece: Buffer  # [key][size]
    v_piece: Buffer  # [key][value size]
    scores: Buffer  # [key][query], then the weights
    halves: tuple[Buffer, ...]  # [key][query]: the weights as numbers of a half type
    sums: Buffer  # [query][value size]
    top: Buffer  # [query]: the highest score so far
    shift: Buffer  # [query]: the same, scaled: what is taken off before the exponential
    factor: Buffer  # [query]: of earlier sums, for the new maximum
    total: Buffer  # [query]: the sum of weights so far

    @staticmethod
    def of(a: Attention, sizes: Sizes, chosen: AttentionBlock, dtype: DType) -> _Kernel:
        blocks, keys = chosen
        lanes = sizes.rows(blocks) * sizes.parts(blocks)

        def local(name: str, size: int, dtype: DType = float32) -> Buffer:
            return Buffer(name, dtype, size)

        return _Kernel(
            a, sizes, blocks, lanes, keys,
            queries=local("queries", sizes.size * lanes, dtype),
            k_piece=local("k_piece", keys * sizes.size, dtype),
            v_piece=local("v_piece", keys * sizes.value_size, dtype),
            scores=local("scores", keys * lanes),
            halves=() if dtype is float32 else tuple(
                local(name, keys * lanes, dtype) for name in ("weights", "rests")),
            sums=local("sums", lanes * sizes.value_size),
            top=local("top", lanes), shift=local("shift", lanes),
            factor=local("factor", lanes), total=local("total", lanes))

    @property
    def late_scale(self) -> Scalar | None:
        """The scale, where it can wait for the exponential, as part of a multiply-add there.

        Not where something is added to scores, and not where it might make infinities.
        """
        scale = self.a.scale
        waits = self.a.mask is None and isinstance(scale, Const) and 0 < float(scale.value) <= 1
        return scale if waits else None

    # ------------------------------------------------------------ tasks
    def body(self) -> Stmt:
        """All tasks: neighbours share their head."""
        a, sizes = self.a, self.sizes
        parts = sizes.parts(self.blocks)
        tasks = self.blocks // parts

        def task(number: Index) -> Stmt:
            early = number % tasks
            given = [self.part(0, early), self.part(1, self.blocks - 1 - early)][:parts]
            body = self.task(digits(number // tasks, (*a.batch, a.heads)), given)
            for var, value in [name for part in reversed(given) for name in reversed(part.names)]:
                body = Let(var, as_scalar(value), body)
            return body

        return loop("task", sizes.outer * tasks, task, "parallel")

    def part(self, number: int, block: Index) -> _Part:
        """A block of queries as part of a task; where it is has names, if it is no plain number."""
        groups, queries, rows = self.sizes.groups, self.sizes.queries, self.sizes.rows(self.blocks)
        names: list[tuple[Var, Index]] = []

        def named(name: str, value: Index, most: int) -> Index:
            if isinstance(value, int):
                return value
            names.append((Var(f"{name}{number}", 0, most), value))
            return names[-1][0]

        first = named("first", block * groups // self.blocks * GROUP, queries)
        after = minimum((block + 1) * groups // self.blocks * GROUP, queries)
        count = named("count", after - first, rows)
        seen: Index = self.sizes.keys
        if self.a.causal:
            seen = named("seen", minimum(seen, first + count), self.sizes.keys)
        return _Part(number * rows, first, count, seen, tuple(names))

    def task(self, outer: Sequence[Index], parts: list[_Part]) -> Stmt:
        """Blocks of queries, which meet one piece of keys after another."""
        task = _Task(self, outer, parts)
        stmts = [*map(task.begin, parts)]
        before: Index = 0
        for number, part in enumerate(parts):
            stmts.append(task.meets(number, before))
            before = part.seen
        body = block(*stmts, *map(task.end, parts))
        for buffer in (self.queries, self.k_piece, self.v_piece, self.scores, *self.halves,
                       self.sums, self.top, self.shift, self.factor, self.total):
            body = Alloc(buffer, body)
        return body


@dataclass(frozen=True)
class _Part:
    """A block of queries, as part of a task."""

    lane: int  # of the first one
    first: Index  # query
    count: Index
    seen: Index  # keys, by the last of them
    names: tuple[tuple[Var, Index], ...]  # that stand in these, each with what it is

    @property
    def end(self) -> Index:
        return self.lane + self.count


@dataclass(frozen=True, eq=False)
class _Task:
    """The blocks of queries of one task, and what is done with them."""

    kernel: _Kernel
    outer: Sequence[Index]  # batch and head
    parts: list[_Part]

    @property
    def a(self) -> Attention:
        return self.kernel.a

    def lanes(self, first: Index, act: Callable[[Index], Stmt]) -> Stmt:
        """One step for all queries from one on."""
        return loop("query", self.parts[-1].end, act, "vector", first)

    def sums(self, first: Index, end: Index, act: Callable[[Index, Index], Stmt]) -> Stmt:
        """One step for all sums of some queries: act(query, number)."""
        return loop("row", end, lambda i: loop(
            "value", self.kernel.sizes.value_size, lambda d: act(i, d), "vector"), first=first)

    # ------------------------------------------------------------ before and after the keys
    def begin(self, part: _Part) -> Stmt:
        """Turn the queries; nothing is seen yet."""
        a, kernel = self.a, self.kernel
        turned = loop("row", part.count, lambda i: loop("item", kernel.sizes.size, lambda d: Store(
            kernel.queries, d * kernel.lanes + part.lane + i,
            cast(a.q.buffer[a.q.at(*self.outer, part.first + i, d)], kernel.queries.dtype)),
            "vector"))
        cleared = self.sums(part.lane, part.end, lambda i, d: Store(
            kernel.sums, i * kernel.sizes.value_size + d, a.const(0)))
        return block(turned, cleared, loop("query", part.end, lambda i: block(
            Store(kernel.top, i, a.lowest), Store(kernel.shift, i, a.lowest),
            Store(kernel.total, i, a.const(0))), "vector", part.lane))

    def end(self, part: _Part) -> Stmt:
        """Divide by the sums of weights."""
        a, kernel, size = self.a, self.kernel, self.kernel.sizes.value_size
        return block(
            loop("query", part.end, lambda i: Store(
                kernel.total, i, a.inverse(kernel.total[i])), "vector", part.lane),
            self.sums(part.lane, part.end, lambda i, d: Store(
                a.out.buffer, a.out.at(*self.outer, part.first + i - part.lane, d),
                cast(kernel.sums[i * size + d] * kernel.total[i], a.out.buffer.dtype))))

    # ------------------------------------------------------------ the keys
    def meets(self, number: int, before: Index) -> Stmt:
        """The keys that the part of a number sees and those before it do not."""
        keys, seen = self.kernel.keys, self.parts[number].seen

        def piece(p: Index) -> Stmt:
            start = before + p * keys
            return _Piece(self, number, start, minimum(keys, seen - start)).step()

        return loop("piece", ceildiv(seen - before, keys), piece)


@dataclass(frozen=True, eq=False)
class _Piece:
    """A piece of keys that meets the parts of a task from one on."""

    task: _Task
    number: int  # of the part: those behind it see the whole piece
    start: Index  # key
    live: Index  # keys of it

    @property
    def kernel(self) -> _Kernel:
        return self.task.kernel

    @property
    def part(self) -> _Part:
        return self.task.parts[self.number]

    @property
    def first(self) -> Index:
        """The first query that sees some of it, in whole groups."""
        part = self.part
        if not self.kernel.a.causal:
            return part.lane
        return part.lane + maximum(self.start - part.first, 0)

    def lanes(self, act: Callable[[Index], Stmt]) -> Stmt:
        return self.task.lanes(self.first, act)

    def each_key(self, act: Callable[[Index, Index], Stmt]) -> Stmt:
        """One step for every score: act(key, query)."""
        return loop("key", self.live, lambda j: self.lanes(lambda i: act(j, i)))

    def down_keys(self, result: Buffer, operation: str) -> Stmt:
        """Scores or weights, reduced to one number a query."""
        return self.lanes(lambda i: loop("key", self.live, lambda j: Store(
            result, i, self.scores(j, i), operation)))

    def scores(self, j: Index, i: Index) -> Scalar:
        return self.kernel.scores[j * self.kernel.lanes + i]

    def step(self) -> Stmt:
        """Scores, their maximum, weights, and the weighted sum of values."""
        a, kernel = self.kernel.a, self.kernel
        return block(
            self.brought(a.k, kernel.k_piece, kernel.sizes.size),
            self.brought(a.v, kernel.v_piece, kernel.sizes.value_size),
            self.score(),
            None if kernel.late_scale is not None else block(
                *map(self.finished, range(self.number, len(self.task.parts)))),
            self.hide_future() if a.causal else None,
            self.down_keys(kernel.top, "max"),
            self.rescale(),
            self.weigh(),
            self.down_keys(kernel.total, "add"),
            self.add_values())

    def brought(self, operand: Operand, piece: Buffer, size: int) -> Stmt:
        *batch, head = self.task.outer
        return loop("key", self.live, lambda j: loop("item", size, lambda d: Store(
            piece, j * size + d, cast(operand.buffer[operand.at(
                *batch, head // self.kernel.a.shared, self.start + j, d)], piece.dtype)),
            "vector"))

    def groups(self, act: Callable[[Index, Index], Stmt]) -> Stmt:
        """What the matrix unit does at once: act(group of queries, keys that some of it see)."""
        seen = self.live
        part = self.part

        def one(group: Index) -> Stmt:
            if not self.kernel.a.causal:
                return act(group, seen)
            behind = part.first - part.lane + (group + 1) * GROUP
            return act(group, minimum(behind - self.start, seen))

        return loop("group", ceildiv(self.task.parts[-1].end, GROUP), one,
                    first=self.first // GROUP)

    def score(self) -> Stmt:
        """Products of keys and queries."""
        kernel, size = self.kernel, self.kernel.sizes.size

        def tiles(group: Index, seen: Index) -> Stmt:
            at = group * GROUP
            tile = fma_tile(kernel.scores, at, kernel.k_piece, 0, kernel.queries, at, size, size, 1,
                            kernel.lanes, kernel.lanes, _ROWS, GROUP, accumulate=False)
            return fma_rows(tile, seen)

        return self.groups(tiles)

    def finished(self, number: int) -> Stmt:
        """Scale the scores of a part and apply the mask."""
        a, kernel, part = self.kernel.a, self.kernel, self.task.parts[number]
        first = self.first if number == self.number else part.lane

        def value(j: Index, i: Index) -> Scalar:
            score = self.scores(j, i) * a.scale
            return score if a.mask is None else a.masked(score, a.mask.buffer[a.mask.at(
                *self.task.outer, part.first + i - part.lane, self.start + j)])

        return loop("key", self.live, lambda j: loop("query", part.end, lambda i: Store(
            kernel.scores, j * kernel.lanes + i, value(j, i)), "vector", first))

    def hide_future(self) -> Stmt:
        """Keys behind the first query of a part can be in some query's future."""
        kernel, part = self.kernel, self.part

        def seen(j: Index, i: Index) -> Scalar:  # in 32 bits, which lanes are made for
            return call("ge", as_scalar(part.first + i - part.lane, int32),
                        as_scalar(self.start + j, int32))

        hidden = loop("key", self.live, lambda j: loop("query", part.end, lambda i: Store(
            kernel.scores, j * kernel.lanes + i, where(
                seen(j, i), self.scores(j, i), -math.inf)), "vector", self.first))
        return If(call("gt", as_scalar(self.start + self.live), as_scalar(part.first + 1)), hidden)

    def rescale(self) -> Stmt:
        """Bring earlier sums to the new maximum."""
        kernel, scale = self.kernel, self.kernel.late_scale

        def shift(i: Index) -> Scalar:
            return kernel.top[i] if scale is None else kernel.top[i] * scale

        at = kernel.sizes.value_size
        return block(
            self.lanes(lambda i: Store(kernel.factor, i, call(
                "exp", kernel.shift[i] - shift(i)))),
            self.lanes(lambda i: block(
                Store(kernel.shift, i, shift(i)),
                Store(kernel.total, i, kernel.total[i] * kernel.factor[i]))),
            self.task.sums(self.first, self.task.parts[-1].end, lambda i, d: Store(
                kernel.sums, i * at + d, kernel.sums[i * at + d] * kernel.factor[i])))

    def weigh(self) -> Stmt:
        """Exponentials of the scores."""
        kernel, scale = self.kernel, self.kernel.late_scale

        def weight(j: Index, i: Index) -> Scalar:
            score = self.scores(j, i) if scale is None else self.scores(j, i) * scale
            return call("exp", score - kernel.shift[i])

        def halves(j: Index, i: Index) -> Stmt:
            rounded, rest = kernel.halves
            at, made = j * kernel.lanes + i, cast(self.scores(j, i), rounded.dtype)
            return block(Store(rounded, at, made), Store(rest, at, cast(
                self.scores(j, i) - cast(made, float32), rest.dtype)))

        return block(
            self.each_key(lambda j, i: Store(
                kernel.scores, j * kernel.lanes + i, weight(j, i))),
            self.each_key(halves) if kernel.halves else None)

    def add_values(self) -> Stmt:
        """Products of weights and values."""
        kernel, size = self.kernel, self.kernel.sizes.value_size

        def tiles(column: Index, columns: int, _: Index | None) -> Stmt:
            def tile(weights: Buffer, row: Index, steps: Index) -> Stmt:
                return fma_tile(kernel.sums, row * size + column, weights, row, kernel.v_piece,
                                column, steps, 1, kernel.lanes, size, size, _ROWS, columns,
                                accumulate=True)

            return self.groups(lambda group, seen: loop("tile", GROUP // _ROWS, lambda t: block(
                *(tile(weights, group * GROUP + t * _ROWS, seen)
                  for weights in kernel.halves or (kernel.scores,)))))

        return pieces(size, GROUP, tiles)
