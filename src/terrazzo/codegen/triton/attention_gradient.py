"""Prints the gradient of attention as two Triton kernels that compute scores anew (FlashAttention).

With the log-sum-exp of each row of scores, which the forward pass kept, weights are found again
block by block: exp(score - logsumexp). In the first kernel a program owns some queries and passes
over keys, for the gradient of q; before that it finds what all of a row's gradients have in common
(delta, the sum of g * y), and stores it. In the second a program owns some keys of a head of k and
v and passes over the queries of all heads that share it, for the gradients of k and v; its scores
have keys down and queries across, so that weights are factors as they are.

Rows past the last query are zeros of q and g, which add nothing; columns past the last key are left
out by the kernel that sums over keys, and are not stored by the one that owns them.
"""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.base.shapes import num_elements
from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.triton.attention import QueryLines
from terrazzo.codegen.triton.attention_lines import (
    LOG2_E,
    Attention,
    AttentionLines,
    Tiles,
    lanes_for,
    place_in,
    scale_of,
)
from terrazzo.codegen.triton.lines import Block
from terrazzo.codegen.triton.module import Written
from terrazzo.codegen.triton.spelling import type_text
from terrazzo.dtypes import float32
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import Index, Var, ceildiv, minimum, proves_eq


@dataclass(frozen=True, eq=False)
class Gradients:
    """The attention that is differentiated, what the gradient starts from, and its results."""

    attention: Attention  # `out` and `sums` are inputs
    g: Tensor
    delta: Tensor
    by_q: Tensor
    by_k: Tensor
    by_v: Tensor

    @staticmethod
    def of(program: Program) -> Gradients:
        g, q, k, v, y, sums, *rest = program.inputs
        attrs = program.attrs["node"].attrs
        *batch, heads, queries, value_size = (1, *y.shape)[-max(len(y.shape), 3):]
        keys, size = k.shape[-2:]
        assert isinstance(size, int) and isinstance(value_size, int)
        kv_heads = k.shape[-3] if len(k.shape) > 2 else 1
        causal = bool(attrs["causal"])
        attention = Attention(
            q, k, v, rest[0] if rest else None, y, sums, tuple(batch), heads,
            1 if proves_eq(heads, kv_heads) else heads // kv_heads, queries,
            minimum(keys, queries) if causal else keys, size, value_size, causal, False,
            scale_of(attrs["scale"], size))
        delta = Tensor(f"{y.name}_delta", sums.shape, float32)
        return Gradients(attention, g, delta, *program.outputs)

    def programs(self, program: Program) -> tuple[Program, Program]:
        """What is computed for queries, and then for keys."""
        a = self.attention
        masks = () if a.mask is None else (a.mask,)
        assert a.sums is not None
        first = (self.by_q, self.delta)
        second = (self.by_k, self.by_v)
        return (Program(f"{program.name}_q", (self.g, a.q, a.k, a.v, a.out, a.sums, *masks), first,
                        first, "attention", program.attrs),
                Program(f"{program.name}_kv", (self.g, a.q, a.k, a.v, a.sums, self.delta, *masks),
                        second, second, "attention", program.attrs))


def queries_kernel(program: Program, gradients: Gradients, chip: ChipSpec, tiles: Tiles, *,
                   wide: bool) -> Written:
    """The kernel for the gradient of q, and for what the other kernel wants to know of rows."""
    kernel = _Queries(program, gradients, chip, tiles, wide)
    kernel.write()
    return kernel.written()


def keys_kernel(program: Program, gradients: Gradients, chip: ChipSpec, tiles: Tiles, *,
                wide: bool) -> Written:
    """The kernel for the gradients of k and v."""
    kernel = _Keys(program, gradients, chip, tiles, wide)
    kernel.write()
    return kernel.written()


class _Queries(QueryLines):
    """Some queries of one head."""

    def __init__(self, program: Program, gradients: Gradients, chip: ChipSpec, tiles: Tiles,
                 wide: bool):
        super().__init__(program, gradients.attention, chip, tiles, wide)
        self.gradients = gradients

    def begin(self) -> None:
        a, made = self.a, self.gradients
        assert a.sums is not None
        place = (*self.batch, self.head, self.query)
        g = self.load(made.g, place_in(made.g, *place, self.value), self.row, self.value)
        y = self.load(a.out, place_in(a.out, *place, self.value), self.row, self.value)
        self.line(f"delta = tl.sum({g}.to(tl.float32) * {y}.to(tl.float32), axis=1, "
                  "keep_dims=True)")
        self.store(made.delta, place_in(made.delta, *place), "delta", self.row)
        self.line(f"g = {self.as_factor(g, made.g.dtype)}")
        sums = self.load(a.sums, place_in(a.sums, *place), self.row)
        self.line(f"logarithms = {sums} * {LOG2_E!r}")
        self.line(f"by_q = tl.zeros([{self.rows_size}, {self.sizes[0]}], tl.float32)")

    def step(self, key: Var, checked: bool) -> None:
        scaled = self.masked_scores(self.batch, self.head, self.query, key, checked)
        self.line(f"weights = tl.exp2(scores{scaled} - logarithms)")
        self.line(f"slopes = weights * (tl.dot(g, v.T{self.precision}) - delta)")
        self.line(f"by_q = tl.dot({self.narrowed('slopes')}, k, by_q{self.precision})")

    def finish(self) -> None:
        by_q = self.gradients.by_q
        address = place_in(by_q, *self.batch, self.head, self.query, self.size)
        self.store(by_q, address, f"(by_q * {self.a.scale!r}).to({type_text(by_q.dtype)})",
                   self.row, self.size)


class _Keys(AttentionLines):
    """Some keys of one head of k and v."""

    def __init__(self, program: Program, gradients: Gradients, chip: ChipSpec, tiles: Tiles,
                 wide: bool):
        super().__init__(program, gradients.attention, chip, tiles, wide)
        self.gradients = gradients
        self.heads = self.a.heads // self.a.shared  # of k and v
        self.readers: dict[str, str] | None = None
        self.blocks = ceildiv(self.a.k.shape[-2], tiles.keys)

    def written(self) -> Written:
        return self.launched(num_elements([*self.a.batch, self.heads]) * self.blocks)

    def write(self) -> None:
        a, tiles = self.a, self.tiles
        self.rows_size = self.constant("ROWS", tiles.rows)
        self.keys_size = self.constant("KEYS", tiles.keys)
        lanes = lanes_for(a.size), lanes_for(a.value_size)
        self.sizes = sizes = self.constant("SIZE", lanes[0]), self.constant("VALUES", lanes[1])
        *self.batch, self.kv_head = self.member_of([*a.batch, self.heads], self.blocks,
                                                   False if a.causal else None)
        self.size = self.block("d", a.size, sizes[0], lanes[0], "[None, :]")
        self.value = self.size if a.size == a.value_size else self.block(
            "e", a.value_size, sizes[1], lanes[1], "[None, :]")
        self.key = self.block("key", a.k.shape[-2], self.keys_size, tiles.keys, "[:, None]",
                              f"block * {self.keys_size}")
        for name, tensor, lane, size in (("k", a.k, self.size, sizes[0]),
                                         ("v", a.v, self.value, sizes[1])):
            address = place_in(tensor, *self.batch, self.kv_head, self.key, lane)
            text = self.load(tensor, address, self.key, lane)
            self.line(f"{name} = {self.as_factor(text, tensor.dtype)}")
            self.line(f"by_{name} = tl.zeros([{self.keys_size}, {size}], tl.float32)")
        self.bounds()
        if a.shared == 1:
            self.passes(self.kv_head)
        else:
            self.passes_of_heads()
        self.finish()

    def bounds(self) -> None:
        """Which queries see some of the keys, and from which on each sees all."""
        if not self.a.causal:
            return
        rows, keys = self.rows_size, self.keys_size
        queries = self.emitter.index(self.a.queries).text
        self.line(f"first = block * {keys} // {rows} * {rows}")
        self.line(f"middle = tl.minimum(((block + 1) * {keys} + {rows} - 1) // {rows} * {rows}, "
                  f"{queries})")

    def passes_of_heads(self) -> None:
        """The queries of one head after the other."""
        shared = self.emitter.index(self.a.shared).text
        name = self.names.fresh("sharing")
        top = self.a.shared - 1
        sharing = Var("%sharing", 0, max(top, 0) if isinstance(top, int) else top)
        self.emitter.blocks[sharing] = Block(sharing, name, self.a.shared, looped=True)
        with self.emitter.loop(f"for {name} in range(0, {shared}):", {sharing}):
            self.passes(self.kv_head * self.a.shared + sharing)

    def passes(self, head: Index) -> None:
        a, queries = self.a, self.emitter.index(self.a.queries).text
        member = (*self.batch, head)
        self.readers = None if not self.tiles.descriptors else {
            "q": self.descriptor(a.q, member, a.size, self.rows_size, self.sizes[0]),
            "g": self.descriptor(self.gradients.g, member, a.value_size, self.rows_size,
                                 self.sizes[1])}
        if self.a.causal:
            self.one_pass(head, "first", "middle", True)
            self.one_pass(head, "middle", queries, False)
        else:
            self.one_pass(head, "0", queries, False)

    def one_pass(self, head: Index, first: str, last: str, checked: bool) -> None:
        a, emitter, made = self.a, self.emitter, self.gradients
        assert a.sums is not None
        start = self.names.fresh("start")
        exact = isinstance(a.queries, int) and a.queries % self.tiles.rows == 0
        down, across = self.moving("query", start, a.queries, self.rows_size, exact)
        with emitter.loop(f"for {start} in range({first}, {last}, {self.rows_size}):",
                          {down, across}):
            for name, tensor, lane in (("q", a.q, self.size), ("g", made.g, self.value)):
                if self.readers is not None:
                    self.line(f"{name} = {self.described(self.readers[name], start)}")
                    continue
                address = place_in(tensor, *self.batch, head, down, lane)
                text = self.load(tensor, address, down, lane)
                self.line(f"{name} = {self.as_factor(text, tensor.dtype)}")
            place = (*self.batch, head, across)
            sums = self.load(a.sums, place_in(a.sums, *place), across)
            self.line(f"scores = tl.dot(k, q.T{self.precision})")
            scaled = self.masked_scores(self.batch, head, across, self.key, checked)
            self.line(f"weights = tl.exp2(scores{scaled} - {sums} * {LOG2_E!r})")
            self.line(f"by_v = tl.dot({self.narrowed('weights')}, g, by_v{self.precision})")
            delta = self.load(made.delta, place_in(made.delta, *place), across)
            self.line(f"slopes = weights * (tl.dot(v, g.T{self.precision}) - {delta})")
            self.line(f"by_k = tl.dot({self.narrowed('slopes')}, q, by_k{self.precision})")

    def finish(self) -> None:
        made, place = self.gradients, (*self.batch, self.kv_head, self.key)
        self.store(made.by_k, place_in(made.by_k, *place, self.size),
                   f"(by_k * {self.a.scale!r}).to({type_text(made.by_k.dtype)})", self.key,
                   self.size)
        self.store(made.by_v, place_in(made.by_v, *place, self.value),
                   f"by_v.to({type_text(made.by_v.dtype)})", self.key, self.value)
