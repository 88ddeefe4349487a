"""Prints attention as Triton kernels: a tile of queries passes over all keys (FlashAttention).

The scores of a tile and some keys exist only in registers; the largest score so far, the sum of
weights and the weighted sum of values are corrected as larger scores appear (online softmax).
Weights are powers of two: the scale of the scores contains log2(e).

Few queries leave multiprocessors idle: then the keys are cut into parts, each of which a program
attends to, and a second kernel joins what they found (split-KV). The heads of q that share a head
of k and v are rows of one tile there, so that keys and values are read once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from terrazzo.base.shapes import num_elements
from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.triton.attention_lines import (
    Attention,
    AttentionLines,
    Tiles,
    lanes_for,
    place_in,
)
from terrazzo.codegen.triton.emit import unflatten
from terrazzo.codegen.triton.module import Written
from terrazzo.codegen.triton.spelling import ATOM, type_text
from terrazzo.dtypes import float32
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import Index, Var, ceildiv

LOWEST = "-1.0e38"  # the largest of no scores: a number, so that -inf less it is -inf


def attention_kernel(program: Program, attention: Attention, chip: ChipSpec, tiles: Tiles, *,
                     wide: bool) -> Written:
    """The kernel that attends: to all keys, or to a part of them."""
    kernel = _Kernel(program, attention, chip, tiles, wide)
    kernel.write()
    return kernel.written()


class QueryLines(AttentionLines):
    """A kernel whose programs own some queries each, and pass over keys."""

    def __init__(self, program: Program, attention: Attention, chip: ChipSpec, tiles: Tiles,
                 wide: bool):
        super().__init__(program, attention, chip, tiles, wide)
        group: Index = attention.shared if tiles.packed else 1
        self.group = group
        self.rows = group * attention.queries
        self.heads = attention.heads // group if group != 1 else attention.heads
        self.members = num_elements([*attention.batch, self.heads])
        self.blocks = ceildiv(self.rows, tiles.rows)

    def written(self) -> Written:
        return self.launched(self.members * self.blocks * self.tiles.parts)

    # ------------------------------------------------------------ the kernel
    def write(self) -> None:
        a, tiles = self.a, self.tiles
        self.rows_size = self.constant("ROWS", tiles.rows)
        self.keys_size = self.constant("KEYS", tiles.keys)
        lanes = lanes_for(a.size), lanes_for(a.value_size)
        self.sizes = sizes = self.constant("SIZE", lanes[0]), self.constant("VALUES", lanes[1])
        *self.batch, self.kv_head = self.member_of([*a.batch, self.heads], self.blocks,
                                                   True if a.causal else None)
        self.size = self.block("d", a.size, sizes[0], lanes[0], "[None, :]")
        self.value = self.size if a.size == a.value_size else self.block(
            "e", a.value_size, sizes[1], lanes[1], "[None, :]")
        row = self.row = self.block("row", self.rows, self.rows_size, tiles.rows, "[:, None]",
                                    f"block * {self.rows_size}")
        self.query: Index = row if self.group == 1 else row % a.queries
        head: Index = self.kv_head
        if self.group != 1:
            head = self.kv_head * self.group + row // a.queries
        self.head = head
        q = self.load(a.q, place_in(a.q, *self.batch, head, self.query, self.size), row)
        self.line(f"q = {self.as_factor(q, a.q.dtype)}")
        self.begin()
        self.passes(self.descriptors() if tiles.descriptors else None)
        self.finish()

    def begin(self) -> None:
        """What is known of the queries before the first key."""
        raise NotImplementedError

    def step(self, key: Var, checked: bool) -> None:
        """What the scores of some keys change."""
        raise NotImplementedError

    def finish(self) -> None:
        """Store what all keys gave."""
        raise NotImplementedError

    # ------------------------------------------------------------ passes over keys
    def descriptors(self) -> list[str]:
        """Descriptors of the keys and the values of this program's head."""
        a, member = self.a, (*self.batch, self.shared_head)
        return [self.descriptor(a.k, member, a.size, self.keys_size, self.sizes[0]),
                self.descriptor(a.v, member, a.value_size, self.keys_size, self.sizes[1])]

    @property
    def shared_head(self) -> Index:
        """The head of k and v; of tensors with one head it is multiplied by 0."""
        return self.kv_head if self.group != 1 else self.kv_head // self.a.shared

    def passes(self, readers: Sequence[str] | None) -> None:
        """Keys that all exist and are seen, then those that need a look at each."""
        a, tiles, emitter = self.a, self.tiles, self.emitter
        keys = emitter.index(a.keys).text
        first, last = "0", keys
        exact = isinstance(a.keys, int) and a.keys % tiles.keys == 0
        if tiles.parts > 1:
            share = ceildiv(ceildiv(a.keys, tiles.keys), tiles.parts) * tiles.keys
            self.line(f"first = part * {emitter.index(share).inside(ATOM)}")
            self.line(f"last = tl.minimum(first + {emitter.index(share).text}, {keys})")
            first, last = "first", "last"
        if a.causal and self.group == 1:
            seen = f"tl.minimum((block + 1) * {self.rows_size}, {keys})"
            self.line(f"last = tl.minimum(last, {seen})" if tiles.parts > 1 else f"last = {seen}")
            whole = f"tl.minimum(block * {self.rows_size} + 1, {keys})"
            whole = f"{whole} // {self.keys_size} * {self.keys_size}"
            self.line(f"whole = {whole}" if tiles.parts == 1 else
                      f"whole = tl.maximum(first, tl.minimum({whole}, last))")
            last = "last"
        elif a.causal:
            self.line(f"whole = {first}")
        elif not exact:
            self.line(f"whole = {keys} // {self.keys_size} * {self.keys_size}" if tiles.parts == 1
                      else f"whole = first + (last - first) // {self.keys_size} * "
                      f"{self.keys_size}")
        if exact and not a.causal:
            self.one_pass(first, last, False, readers)
            return
        if not (a.causal and self.group != 1):
            self.one_pass(first, "whole", False, readers)
        self.one_pass("whole", last, True, readers)

    def one_pass(self, first: str, last: str, checked: bool, readers: Sequence[str] | None) -> None:
        a, emitter = self.a, self.emitter
        start = self.names.fresh("start")
        down, across = self.moving("key", start, a.keys, self.keys_size, not checked)
        head = f"for {start} in range({first}, {last}, {self.keys_size}):"
        with emitter.loop(head, {down, across}):
            self.line(f"k = {self.rows_of(0, start, down, readers)}")
            self.line(f"scores = tl.dot(q, k.T{self.precision})")
            self.line(f"v = {self.rows_of(1, start, down, readers)}")
            self.step(across, checked)

    def rows_of(self, number: int, start: str, down: Var, readers: Sequence[str] | None) -> str:
        """Some keys, or their values."""
        a = self.a
        if readers is not None:
            return self.described(readers[number], start)
        tensor, lane = ((a.k, self.size), (a.v, self.value))[number]
        address = place_in(tensor, *self.batch, self.shared_head, down, lane)
        return self.as_factor(self.load(tensor, address, down, lane), tensor.dtype)


class _Kernel(QueryLines):
    """Attention itself."""

    def begin(self) -> None:
        rows = f"[{self.rows_size}, 1]"
        self.line(f"largest = tl.full({rows}, {LOWEST}, tl.float32)")
        self.line(f"total = tl.zeros({rows}, tl.float32)")
        self.line(f"sums = tl.zeros([{self.rows_size}, {self.sizes[1]}], tl.float32)")

    def step(self, key: Var, checked: bool) -> None:
        scaled = self.masked_scores(self.batch, self.head, self.query, key, checked)
        self.line("larger = tl.maximum(largest, tl.max(scores, axis=1, keep_dims=True)"
                  f"{scaled})")
        self.line(f"weights = tl.exp2(scores{scaled} - larger)")
        self.line("correction = tl.exp2(largest - larger)")
        self.line("total = total * correction + tl.sum(weights, axis=1, keep_dims=True)")
        self.line(f"sums = tl.dot({self.narrowed('weights')}, v, sums * correction"
                  f"{self.precision})")
        self.line("largest = larger")

    # ------------------------------------------------------------ results
    def finish(self) -> None:
        if self.tiles.parts > 1:
            self.store_parts()
        else:
            self.store_result(self.head, self.query, self.value, self.row)

    def store_result(self, head: Index, query: Index, value: Var, *row: Var) -> None:
        a = self.a
        if a.sums is not None:
            self.line(f"logarithms = (largest + tl.log2(total)) * {math.log(2)!r}")
            self.line("logarithms = tl.where(total == 0, float('inf'), logarithms)")
            self.store(a.sums, place_in(a.sums, *self.batch, head, query),
                       "logarithms" if row else "tl.sum(logarithms)", *row)
        if a.mask is not None and not a.nan_if_unseen:
            self.line("total = tl.where(total == 0, 1, total)")
        self.store(a.out, place_in(a.out, *self.batch, head, query, value),
                   f"(sums / total).to({type_text(a.out.dtype)})", *row, value)

    def store_parts(self) -> None:
        """What this part of the keys says: a weighted sum, its weights, and the largest score."""
        sums, totals, largest = self.program.outputs
        part = self.number("part", self.tiles.parts)
        place = (self.member, part, self.row)
        self.store(sums, place_in(sums, *place, self.value), "sums", self.row, self.value)
        self.store(totals, place_in(totals, *place, 0), "total", self.row)
        self.store(largest, place_in(largest, *place, 0), "largest", self.row)


def parts_program(program: Program, attention: Attention, tiles: Tiles) -> Program:
    """The first of two programs: what each part of the keys says."""
    rows = attention.shared * attention.queries if tiles.packed else attention.queries
    heads = attention.heads // attention.shared if tiles.packed else attention.heads
    members = num_elements([*attention.batch, heads])
    shape = (members, tiles.parts, rows)
    name = attention.out.name
    outputs = (Tensor(f"{name}_sums", (*shape, attention.value_size), float32),
               Tensor(f"{name}_totals", (*shape, 1), float32),
               Tensor(f"{name}_largest", (*shape, 1), float32))
    return Program(f"{program.name}_parts", program.inputs, outputs, outputs, "attention",
                   program.attrs)


def joined_program(program: Program, parts: Program) -> Program:
    """The second: what joins them."""
    return replace(program, inputs=parts.outputs)


def joining_kernel(program: Program, attention: Attention, chip: ChipSpec, tiles: Tiles, *,
                   wide: bool) -> Written:
    """The kernel that joins parts: one program for each row."""
    kernel = _Joining(program, attention, chip, tiles, wide)
    kernel.write_joining()
    return kernel.written()


class _Joining(_Kernel):
    """Parts of one row, weighted by how large their scores were."""

    def __init__(self, program: Program, attention: Attention, chip: ChipSpec, tiles: Tiles,
                 wide: bool):
        super().__init__(program, attention, chip, replace(tiles, rows=1, stages=1, warps=1,
                                                           descriptors=False), wide)

    def written(self) -> Written:
        return replace(super().written(), programs=self.members * self.rows)

    def write_joining(self) -> None:
        emitter, a = self.emitter, self.a
        parts = self.tiles.parts
        self.line(f"program = {self.instance}")
        program = self.number("program", self.members * self.rows)
        member, row = program // self.rows, program % self.rows
        *self.batch, self.kv_head = unflatten(member, [*a.batch, self.heads])
        head, query = self.kv_head, row
        if self.group != 1:
            head, query = self.kv_head * self.group + row // a.queries, row % a.queries
        lanes = 1 << (parts - 1).bit_length()
        part = self.block("part", parts, self.constant("PARTS", lanes), lanes, "[:, None]")
        values = self.constant("VALUES", lanes_for(a.value_size))
        value = self.block("e", a.value_size, values, lanes_for(a.value_size), "[None, :]")
        sums, totals, largest = self.program.inputs
        place = (member, part, row)
        mask = emitter.mask(frozenset({part}))
        text = self.load(largest, place_in(largest, *place, 0), part)
        if mask is not None:
            text = f"tl.where({mask.text}, {text}, {LOWEST})"
        self.line(f"scores = {text}")
        self.line("largest = tl.max(scores, axis=0, keep_dims=True)")
        self.line("weights = tl.exp2(scores - largest)")
        found = self.load(totals, place_in(totals, *place, 0), part)
        self.line(f"total = tl.sum({found} * weights, axis=0, keep_dims=True)")
        found = self.load(sums, place_in(sums, *place, value), part, value)
        self.line(f"sums = tl.sum({found} * weights, axis=0, keep_dims=True)")
        self.store_result(head, query, value)
