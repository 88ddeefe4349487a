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
from dataclasses import dataclass, replace

from terrazzo.base.shapes import contiguous_strides, num_elements
from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.triton.dot import DESCRIPTOR_BYTES, HALVES
from terrazzo.codegen.triton.emit import Emitter, unflatten
from terrazzo.codegen.triton.lines import Block, Names, Value
from terrazzo.codegen.triton.module import RESERVED, Size, Written
from terrazzo.codegen.triton.spelling import ATOM, type_text
from terrazzo.dtypes import DType, float32
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import Index, Var, bounds, ceildiv, divisible, minimum, proves_eq

LOWEST = "-1.0e38"  # the largest of no scores: a number, so that -inf less it is -inf


@dataclass(frozen=True)
class Tiles:
    """How the work is cut, and how the loop over keys is run."""

    rows: int  # of a tile of queries
    keys: int  # at a time
    warps: int = 4
    stages: int = 3
    descriptors: bool = False  # keys and values come by the engine that copies tiles (TMA)
    parts: int = 1  # of the keys
    packed: bool = False  # heads that share keys are rows of one tile
    precision: str = "tf32x3"  # of float32


@dataclass(frozen=True, eq=False)
class Attention:
    """The operands, sizes and options of one attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    out: Tensor
    batch: tuple[Index, ...]
    heads: Index
    shared: Index  # heads of q for each of k and v
    queries: Index
    keys: Index  # those that some query sees
    size: int  # of a query and a key
    value_size: int
    causal: bool
    nan_if_unseen: bool
    scale: float

    @staticmethod
    def of(program: Program) -> Attention:
        q, k, v, *rest = program.inputs
        (out,) = program.outputs
        attrs = program.attrs["node"].attrs
        *batch, heads, queries, value_size = (1, *out.shape)[-max(len(out.shape), 3):]
        keys, size = k.shape[-2:]
        assert isinstance(size, int) and isinstance(value_size, int)
        kv_heads = k.shape[-3] if len(k.shape) > 2 else 1
        alone = kv_heads == 1 or proves_eq(heads, kv_heads)
        causal = bool(attrs["causal"])
        if causal:  # places are counted from the first, so no query sees keys past their number
            keys = minimum(keys, q.shape[-2])
            causal = q.shape[-2] != 1
        scale = attrs["scale"]
        return Attention(q, k, v, rest[0] if rest else None, out, tuple(batch), heads,
                         1 if alone else heads // kv_heads, queries, keys, size, value_size,
                         causal, attrs["unseen"] == "nan",
                         float(scale) if scale is not None else 1 / math.sqrt(size or 1))

    @property
    def dtype(self) -> DType:
        """The type in which factors are multiplied."""
        types = {t.dtype for t in (self.q, self.k, self.v)}
        return types.pop() if len(types) == 1 and types <= set(HALVES) else float32


def _stride(tensor: Tensor, axis: int) -> Index:
    """The distance of neighbours along an axis counted from the back; 0 where it stretches."""
    if -axis > len(tensor.shape) or tensor.shape[axis] == 1:
        return 0
    return (tensor.strides or contiguous_strides(tensor.shape))[axis]


def _at(tensor: Tensor, *places: Index) -> Index:
    address = tensor.offset
    for axis, place in enumerate(reversed(places)):
        address = address + place * _stride(tensor, -axis - 1)
    return address


def describable(tensor: Tensor, size: int) -> bool:
    """Whether a descriptor can read rows of keys or values."""
    bytes_ = tensor.dtype.itemsize
    strides = tensor.strides or contiguous_strides(tensor.shape)
    return tensor.dtype in HALVES and strides[-1] == 1 and size >= 16 and all(
        divisible(n * bytes_, DESCRIPTOR_BYTES) for n in (*strides[:-1], tensor.offset))


def _power(n: int) -> int:
    return max(16, 1 << max(n - 1, 0).bit_length())


def attention_kernel(program: Program, attention: Attention, chip: ChipSpec, tiles: Tiles, *,
                     wide: bool) -> Written:
    """The kernel that attends: to all keys, or to a part of them."""
    kernel = _Kernel(program, attention, chip, tiles, wide)
    kernel.write()
    return kernel.written()


class _Kernel:
    """One kernel while it is written."""

    def __init__(self, program: Program, attention: Attention, chip: ChipSpec, tiles: Tiles,
                 wide: bool):
        self.program, self.a, self.tiles, self.wide = program, attention, tiles, wide
        self.rules, self.dtype = chip.launch, attention.dtype
        self.names = Names(RESERVED)
        self.name = self.names.fresh(program.name)
        self.pointers = {t: self.names.fresh(f"{t.name}_ptr")
                         for t in (*program.inputs, *program.outputs)}
        self.dims = {var: self.names.fresh(var.name) for var in program.dims}
        self.constants: dict[str, Size] = {}
        self.emitter = Emitter(self.names, self.dims, self.pointers, _no_space, tile=True,
                               wide=wide, libdevice=chip.has("libdevice"))
        group: Index = attention.shared if tiles.packed else 1
        self.group = group
        self.rows = group * attention.queries
        self.heads = attention.heads // group if group != 1 else attention.heads
        self.members = num_elements([*attention.batch, self.heads])
        self.blocks = ceildiv(self.rows, tiles.rows)

    def constant(self, name: str, value: Size) -> str:
        name = self.names.fresh(name)
        self.constants[name] = value
        return name

    def written(self) -> Written:
        programs = self.members * self.blocks * self.tiles.parts
        return Written(self.name, tuple(self.emitter.scopes[0].lines), self.pointers, self.dims,
                       programs, self.constants, self.rules.warps_for(self.tiles.warps), self.wide,
                       self.rules, self.tiles.stages, self.tiles.descriptors)

    def line(self, text: str) -> None:
        """A line of the innermost scope."""
        emitter = self.emitter
        emitter.line(text, frozenset().union(*(s.binds for s in emitter.scopes)))

    def block(self, name: str, extent: Index, size: str, lanes: int, direction: str,
              start: str = "") -> Var:
        """An index variable with lanes, which is made known."""
        top = extent - 1
        var = Var(f"%{name}", 0, max(top, 0) if isinstance(top, int) else top)
        numbers = f"{start + ' + ' if start else ''}tl.arange(0, {size}){direction}"
        exact = isinstance(extent, int) and extent % lanes == 0
        self.emitter.add_block(Block(var, self.names.fresh(name), extent, numbers, size, exact))
        return var

    # ------------------------------------------------------------ the kernel
    def write(self) -> None:
        a, tiles = self.a, self.tiles
        self.rows_size = self.constant("ROWS", tiles.rows)
        self.keys_size = self.constant("KEYS", tiles.keys)
        sizes = self.constant("SIZE", _power(a.size)), self.constant("VALUES", _power(a.value_size))
        self.sizes = sizes
        self.places()
        self.size = self.block("d", a.size, sizes[0], _power(a.size), "[None, :]")
        self.value = self.size if a.size == a.value_size else self.block(
            "e", a.value_size, sizes[1], _power(a.value_size), "[None, :]")
        row = self.row = self.block("row", self.rows, self.rows_size, tiles.rows, "[:, None]",
                                    f"block * {self.rows_size}")
        self.query: Index = row if self.group == 1 else row % a.queries
        head: Index = self.kv_head
        if self.group != 1:
            head = self.kv_head * self.group + row // a.queries
        self.head = head
        q = self.load(a.q, _at(a.q, *self.batch, head, self.query, self.size), row)
        self.line(f"q = {self.as_factor(q, a.q.dtype)}")
        rows = f"[{self.rows_size}, 1]"
        self.line(f"largest = tl.full({rows}, {LOWEST}, tl.float32)")
        self.line(f"total = tl.zeros({rows}, tl.float32)")
        self.line(f"sums = tl.zeros([{self.rows_size}, {sizes[1]}], tl.float32)")
        readers = self.descriptors() if tiles.descriptors else None
        self.passes(readers)
        if tiles.parts == 1:
            self.finish()
        else:
            self.store_parts()

    def places(self) -> None:
        """Which queries of which head this program attends with, and to which part of the keys."""
        emitter, a, tiles = self.emitter, self.a, self.tiles
        instance = "tl.program_id(0).to(tl.int64)" if self.wide else "tl.program_id(0)"
        self.line(f"program = {instance}")
        if tiles.parts > 1:
            parts = self.constant("PARTS", tiles.parts)
            self.line(f"part = program % {parts}")
            self.line(f"program = program // {parts}")
        blocks = emitter.index(self.blocks).inside(ATOM)
        members = emitter.index(self.members).inside(ATOM)
        if a.causal:  # the longest first: late ones are short
            self.line(f"block = {blocks} - 1 - program // {members}")
            self.line(f"member = program % {members}")
        else:
            self.line(f"block = program % {blocks}")
            self.line(f"member = program // {blocks}")
        self.names.taken |= {"program", "part", "block", "member"}
        top = self.members - 1
        self.member = Var("%member", 0, max(top, 0) if isinstance(top, int) else top)
        emitter.add_block(Block(self.member, "member", self.members))
        *self.batch, self.kv_head = unflatten(self.member, [*a.batch, self.heads])

    def as_factor(self, text: str, dtype: DType) -> str:
        return text if dtype is self.dtype else f"{text}.to({type_text(self.dtype)})"

    def load(self, tensor: Tensor, address: Index, *lanes: Var) -> str:
        """What lies at an address, for these lanes whether or not it depends on them."""
        emitter = self.emitter
        at = emitter.index(address)
        deps = at.deps | set(lanes)
        mask = emitter.mask(deps)
        inside = f", mask={mask.text}, other=0" if mask else ""
        text = f"tl.load({emitter.place(self.pointers[tensor], at, deps)}{inside})"
        return emitter.bind(Value(text, ATOM, deps), tensor.name).text

    # ------------------------------------------------------------ passes over keys
    def descriptors(self) -> list[str]:
        """Descriptors of the keys and the values of this program's head."""
        a, found = self.a, []
        for tensor, size, block in ((a.k, a.size, self.sizes[0]), (a.v, a.value_size,
                                                                    self.sizes[1])):
            first = self.emitter.index(_at(tensor, *self.batch, self.shared_head, 0, 0)).text
            keys = self.emitter.index(tensor.shape[-2]).text
            step = self.emitter.index(_stride(tensor, -2)).text if _known_one(
                tensor.shape[-2]) is False else str(size)
            name = self.names.fresh(f"{tensor.name}_rows")
            self.line(f"{name} = tl.make_tensor_descriptor({self.pointers[tensor]} + {first}, "
                      f"[{keys}, {size}], [{step}, 1], [{self.keys_size}, {block}])")
            found.append(name)
        return found

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
        keys = a.k.shape[-2] if not checked else a.keys
        top = bounds(keys)[1]
        down, across = (Var(f"%{n}{int(checked)}", 0, top) for n in ("keys_down", "keys"))
        for var, direction in ((down, "[:, None]"), (across, "[None, :]")):
            lanes = f"{start} + tl.arange(0, {self.keys_size}){direction}"
            emitter.blocks[var] = Block(
                var, self.names.fresh("key"), a.keys,
                f"({lanes}).to(tl.int64)" if self.wide else lanes, self.keys_size, not checked)
        head = f"for {start} in range({first}, {last}, {self.keys_size}):"
        with emitter.loop(head, {down, across}):
            self.line(f"scores = {self.scores(self.rows_of(0, start, down, readers))}")
            self.step(self.rows_of(1, start, down, readers), across, checked)

    def rows_of(self, number: int, start: str, down: Var, readers: Sequence[str] | None) -> str:
        """Some keys, or their values."""
        a = self.a
        tensor, lane = ((a.k, self.size), (a.v, self.value))[number]
        name = self.names.fresh("kv"[number])
        if readers is not None:
            at = f"({start}).to(tl.int32)" if self.wide else start
            self.line(f"{name} = {readers[number]}.load([{at}, 0])")
        else:
            text = self.load(tensor, _at(tensor, *self.batch, self.shared_head, down, lane),
                             down, lane)
            self.line(f"{name} = {self.as_factor(text, tensor.dtype)}")
        return name

    @property
    def precision(self) -> str:
        return f', input_precision="{self.tiles.precision}"' if self.dtype is float32 else ""

    def scores(self, k: str) -> str:
        """The scores of some keys, before they are scaled."""
        return f"tl.dot(q, {k}.T{self.precision})"

    def step(self, v: str, key: Var, checked: bool) -> None:
        """What the scores of some keys change."""
        a, emitter = self.a, self.emitter
        # The scale is part of what follows, one multiplication and addition, if it may be.
        scaled = f" * {a.scale * math.log2(math.e)!r}"
        if a.scale <= 0 or (a.mask is not None and not a.mask.dtype.is_bool):
            self.line(f"scores = scores{scaled}")
            scaled = ""
        conditions = []
        if checked:
            end = emitter.mask(frozenset({key}))
            conditions += [] if end is None else [end.text]
            if a.causal:
                query, place = emitter.index(self.query), emitter.index(key)
                conditions.append(f"({query.text} >= {place.text})")
        if a.mask is not None:
            at = _at(a.mask, *self.batch, self.head, self.query, key)
            mask = self.load(a.mask, at)
            if a.mask.dtype.is_bool:
                conditions.append(f"({mask} != 0)")
            else:
                self.line(f"scores += {mask}.to(tl.float32) * {math.log2(math.e)!r}")
        if conditions:
            self.line(f"scores = tl.where({' & '.join(conditions)}, scores, float('-inf'))")
        self.line("larger = tl.maximum(largest, tl.max(scores, axis=1, keep_dims=True)"
                  f"{scaled})")
        self.line(f"weights = tl.exp2(scores{scaled} - larger)")
        self.line("correction = tl.exp2(largest - larger)")
        self.line("total = total * correction + tl.sum(weights, axis=1, keep_dims=True)")
        narrow = "weights" if self.dtype is float32 else f"weights.to({type_text(self.dtype)})"
        self.line(f"sums = tl.dot({narrow}, {v}, sums * correction{self.precision})")
        self.line("largest = larger")

    # ------------------------------------------------------------ results
    def finish(self) -> None:
        a = self.a
        if a.mask is not None and not a.nan_if_unseen:
            self.line("total = tl.where(total == 0, 1, total)")
        self.store(a.out, _at(a.out, *self.batch, self.head, self.query, self.value),
                   f"(sums / total).to({type_text(a.out.dtype)})", self.row, self.value)

    def store_parts(self) -> None:
        """What this part of the keys says: a weighted sum, its weights, and the largest score."""
        sums, totals, largest = self.program.outputs
        part = Var("%part", 0, self.tiles.parts - 1)
        self.emitter.add_block(Block(part, "part", self.tiles.parts))
        place = (self.member, part, self.row)
        self.store(sums, _at(sums, *place, self.value), "sums", self.row, self.value)
        self.store(totals, _at(totals, *place, 0), "total", self.row)
        self.store(largest, _at(largest, *place, 0), "largest", self.row)

    def store(self, tensor: Tensor, address: Index, value: str, *lanes: Var) -> None:
        at = self.emitter.index(address)
        deps = at.deps | set(lanes)
        mask = self.emitter.mask(deps)
        masked = f", mask={mask.text}" if mask else ""
        pointer = self.emitter.place(self.pointers[tensor], at, deps)
        self.line(f"tl.store({pointer}, {value}{masked})")


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
        self.line("program = " + ("tl.program_id(0).to(tl.int64)" if self.wide else
                                  "tl.program_id(0)"))
        count = self.members * self.rows
        top = count - 1
        program = Var("%program", 0, max(top, 0) if isinstance(top, int) else top)
        emitter.add_block(Block(program, "program", count))
        self.names.taken.add("program")
        member, row = program // self.rows, program % self.rows
        *self.batch, self.kv_head = unflatten(member, [*a.batch, self.heads])
        head, query = self.kv_head, row
        if self.group != 1:
            head, query = self.kv_head * self.group + row // a.queries, row % a.queries
        lanes = 1 << (parts - 1).bit_length()
        part = self.block("part", parts, self.constant("PARTS", lanes), lanes, "[:, None]")
        values = self.constant("VALUES", _power(a.value_size))
        value = self.block("e", a.value_size, values, _power(a.value_size), "[None, :]")
        sums, totals, largest = self.program.inputs
        place = (member, part, row)
        mask = emitter.mask(frozenset({part}))
        text = self.load(largest, _at(largest, *place, 0), part)
        if mask is not None:
            text = f"tl.where({mask.text}, {text}, {LOWEST})"
        self.line(f"scores = {text}")
        self.line("weights = tl.exp2(scores - tl.max(scores, axis=0, keep_dims=True))")
        found = self.load(totals, _at(totals, *place, 0), part)
        self.line(f"total = tl.sum({found} * weights, axis=0, keep_dims=True)")
        found = self.load(sums, _at(sums, *place, value), part, value)
        self.line(f"sums = tl.sum({found} * weights, axis=0, keep_dims=True)")
        if a.mask is not None and not a.nan_if_unseen:
            self.line("total = tl.where(total == 0, 1, total)")
        self.store(a.out, _at(a.out, *self.batch, head, query, value),
                   f"(sums / total).to({type_text(a.out.dtype)})", value)


def _known_one(n: Index) -> bool:
    return isinstance(n, int) and n == 1


def _no_space(extent: Index, name: str) -> Block:
    raise AssertionError("attention has no rows of its own")
