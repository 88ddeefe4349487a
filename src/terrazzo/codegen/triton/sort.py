"""Prints sorting along an axis as Triton kernels: blocks by a bitonic network, longer lines merged.

Elements are compared by an integer key and, where keys are equal, by where they come from, so that
equal ones keep their order and no two are the same. Keys of 32 bits and origins are one integer of
64; others are two tensors, which move together. Values are read again from where they come from.

A line that fits is sorted at once by one program, or by one together with others. A longer one is
cut into blocks, each of which becomes a run in memory; then runs are merged by pairs until one is
left. In a merge each element finds how many of the other run come before it by halving (a binary
search), which with its place in its own run is its place in both. Where only the first few of a
line are wanted, runs are cut to as many, and sorted again together.
"""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.base.keys import key_type, sort_key
from terrazzo.base.scalar import Call, Scalar, call
from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.triton.kernel_lines import KernelLines, last
from terrazzo.codegen.triton.lines import Block
from terrazzo.codegen.triton.module import Written, warps_for
from terrazzo.codegen.triton.spelling import ATOM
from terrazzo.dtypes import DType, int32, int64, uint32
from terrazzo.expr.ir import Program, Tensor, load
from terrazzo.index import Index, Var, ceildiv

MERGED = 1024  # elements of a program that merges
MOST_WARPS = 8
_OWN_NAMES = ("program", "piece", "lane", "line", "place", "packed", "key", "origin", "inside",
              "start", "base", "other", "low", "high", "middle", "open", "found_packed",
              "found_key", "found_origin", "less", "target", "value", "element", "step")


@dataclass(frozen=True, eq=False)
class Sort:
    """One sort: its tensors as (lines before the axis, the axis, lines after it)."""

    source: Tensor
    values: Tensor
    origins: Tensor
    descending: bool

    @property
    def inner(self) -> Index:
        return self.source.shape[2]

    @property
    def length(self) -> int:
        n = self.source.shape[1]
        assert isinstance(n, int)
        return n

    @property
    def kept(self) -> int:
        """How many are wanted."""
        k = self.values.shape[1]
        assert isinstance(k, int)
        return k

    @property
    def lines(self) -> Index:
        return self.source.shape[0] * self.inner

    @property
    def packs(self) -> bool:
        """Whether keys and origins are one integer."""
        return self.source.dtype is uint32 or key_type(self.source.dtype) is int32

    @property
    def records(self) -> tuple[tuple[str, DType], ...]:
        """What is moved for an element, by the name it has in lines."""
        return (("packed", int64),) if self.packs else (("key", int64), ("origin", int32))

    def key(self, value: Scalar) -> Scalar:
        if self.source.dtype is uint32:
            key: Scalar = Call(int32, "bitcast", (call("xor", value, 2**31),))
            return call("not", key) if self.descending else key
        return sort_key(value, self.descending)

    def address(self, tensor: Tensor, line: Index, place: Index) -> Index:
        n, inner = tensor.shape[1:]
        if inner == 1:
            return line * n + place
        return (line // inner * n + place) * inner + line % inner


@dataclass(frozen=True, eq=False)
class Runs:
    """Records of lines in memory, in runs that are sorted."""

    tensors: tuple[Tensor, ...]  # (lines, records), one for each part of a record
    run: int  # records of a run; the last may have fewer

    @property
    def length(self) -> int:
        n = self.tensors[0].shape[1]
        assert isinstance(n, int)
        return n

    @staticmethod
    def of(sort: Sort, name: str, length: int, run: int) -> Runs:
        return Runs(tuple(Tensor(f"{sort.values.name}_{name}_{part}", (sort.lines, length), dtype)
                          for part, dtype in sort.records), run)


@dataclass(frozen=True)
class Cut:
    """What one program sorts: so many places (a power of two) of so many lines."""

    places: int
    lines: int


def block_kernel(program: Program, sort: Sort, cut: Cut, given: Runs | None, made: Runs | None,
                 chip: ChipSpec, wide: bool) -> Written:
    """The kernel that sorts blocks: of elements or of records, to results or to runs."""
    kernel = _Blocks(program, sort, cut, given, chip, wide)
    kernel.write(made)
    lanes = cut.places * cut.lines
    return kernel.as_written(ceildiv(sort.lines, cut.lines) * kernel.pieces,
                             min(MOST_WARPS, warps_for(lanes, 32, kernel.rules)))


def merge_kernel(program: Program, sort: Sort, given: Runs, made: Runs | None, chip: ChipSpec,
                 wide: bool) -> Written:
    """The kernel that merges runs by pairs, to results or to runs."""
    kernel = _Merge(program, sort, chip, wide)
    kernel.write(given, made)
    return kernel.as_written(ceildiv(sort.lines * given.length, MERGED),
                             warps_for(MERGED, 32, kernel.rules))


class _SortLines(KernelLines):
    """What both kernels do with records."""

    def __init__(self, program: Program, sort: Sort, chip: ChipSpec, wide: bool):
        super().__init__(program, chip, wide, _OWN_NAMES)
        self.sort = sort
        self.integer = "tl.int64" if wide else "tl.int32"

    def lanes(self, name: str, extent: Index, size: str, declaration: str | None = None) -> Var:
        """An index variable with lanes; without a declaration lines give it, all of it inside."""
        var = Var(f"%{name}", 0, last(extent))
        self.emitter.add_block(Block(var, name, extent, declaration, size, declaration is None))
        if declaration is not None:
            self.emitter.variable(var)
        return var

    def read(self, name: str, runs: Runs, address: str, mask: str) -> None:
        """Read records: variables with the names of their parts, behind `name`."""
        for (part, _), tensor in zip(self.sort.records, runs.tensors, strict=True):
            self.line(f"{name}{part} = tl.load({self.pointers[tensor]} + {address}, mask={mask})")

    def write_runs(self, runs: Runs, address: str, mask: str) -> None:
        for (part, _), tensor in zip(self.sort.records, runs.tensors, strict=True):
            self.line(f"tl.store({self.pointers[tensor]} + {address}, {part}, mask={mask})")

    def write_results(self, line: Var, place: Var, size: str, mask: str) -> None:
        """Values and origins, at places of their lines."""
        sort = self.sort
        if sort.packs:
            self.line(f"origin = (packed & 0xFFFFFFFF).to({self.integer})")
        origin = self.lanes("origin", sort.length, size)
        self.line(f"value = tl.load({self.at(sort.source, line, origin)}, mask={mask})")
        for tensor, text in ((sort.values, "value"), (sort.origins, "origin.to(tl.int64)")):
            self.line(f"tl.store({self.at(tensor, line, place)}, {text}, mask={mask})")

    def at(self, tensor: Tensor, line: Var, place: Var) -> str:
        """Pointers to places of lines, one for each lane even if all are the same."""
        address = self.emitter.index(self.sort.address(tensor, line, place))
        return self.emitter.place(self.pointers[tensor], address, frozenset((place,)))


class _Blocks(_SortLines):
    """Blocks by a bitonic network."""

    def __init__(self, program: Program, sort: Sort, cut: Cut, given: Runs | None, chip: ChipSpec,
                 wide: bool):
        super().__init__(program, sort, chip, wide)
        self.cut, self.given = cut, given
        self.length = given.length if given else sort.length
        self.pieces = -(-self.length // cut.places)

    def write(self, made: Runs | None) -> None:
        sort, cut = self.sort, self.cut
        places, lines = self.constant("PLACES", cut.places), self.constant("LINES", cut.lines)
        size = self.constant("SIZE", cut.places * cut.lines)
        self.line(f"program = {self.instance}")
        block, first = "program", ""
        if self.pieces > 1:
            self.line(f"piece = program % {self.pieces}")
            block, first = f"program // {self.pieces}", f"piece * {places} + "
        self.line(f"lane = tl.arange(0, {size})")
        line = self.lanes("line", sort.lines, size, f"{block} * {lines} + lane // {places}")
        place = self.lanes("place", self.length, size, f"{first}lane % {places}")
        exists = f"(line < {self.emitter.index(sort.lines).inside(ATOM)})"
        mask = self.emitter.mask(frozenset((line, place)))
        assert mask is not None
        if self.given is None:
            self.read_elements(line, place, mask.text)
        else:
            self.read("", self.given, f"line * {self.length} + place", mask.text)
            self.with_last_ones(mask.text)
        names = ", ".join(part for part, _ in sort.records)
        function = "_sorted" if sort.packs else "_sorted_pairs"
        self.line(f"{names} = {function}({names}, {size}, {places}, {cut.places.bit_length() - 1})")
        if made is None:
            self.line(f"inside = {exists} & (place < {sort.kept})")
            self.write_results(line, place, size, "inside")
        elif made.run == cut.places:
            self.write_runs(made, f"line * {made.length} + place", mask.text)
        else:
            self.line(f"inside = {exists} & (lane % {places} < {made.run})")
            self.write_runs(made, f"line * {made.length} + piece * {made.run} + lane % {places}",
                            "inside")

    def read_elements(self, line: Var, place: Var, mask: str) -> None:
        """Read elements as records; places past the end come last, as they have no key before."""
        sort = self.sort
        inner = sort.inner
        before, after = (line, 0) if inner == 1 else (line // inner, line % inner)
        value = self.emitter.root(sort.key(load(sort.source, [before, place, after])))
        top = 2**31 - 1 if sort.packs else 2**63 - 1
        self.line(f"key = tl.where({mask}, {value.text}, {top})")
        if sort.packs:
            self.line("packed = (key.to(tl.int64) << 32) | place.to(tl.int64)")
        else:
            self.line("origin = place.to(tl.int32)")

    def with_last_ones(self, mask: str) -> None:
        """Records past the end come last."""
        for part, dtype in self.sort.records:
            self.line(f"{part} = tl.where({mask}, {part}, {2 ** (dtype.bits - 1) - 1})")


class _Merge(_SortLines):
    """Runs by pairs."""

    def write(self, given: Runs, made: Runs | None) -> None:
        sort, length, emitter = self.sort, given.length, self.emitter
        size = self.constant("BLOCK", MERGED)
        run, total = self.constant("RUN", given.run), sort.lines * length
        element = self.lanes("element", total, size,
                             f"{self.instance} * {size} + tl.arange(0, {size})")
        mask = emitter.mask(frozenset((element,)))
        self.line(f"inside = {'element >= 0' if mask is None else mask.text}")
        self.line(f"line = element // {length}")
        self.line(f"place = element % {length}")
        self.read("", given, "element", "inside")
        self.search(given, run)
        line, target = self.lanes("line", sort.lines, size), self.lanes("target", length, size)
        if made is None:
            if sort.kept < length:
                self.line(f"inside = inside & (target < {sort.kept})")
            self.write_results(line, target, size, "inside")
        else:
            self.write_runs(made, f"line * {length} + target", "inside")

    def search(self, given: Runs, run: str) -> None:
        """The place of each element in its own run and the other one together."""
        self.line(f"start = place // {run} * {run}")
        self.line(f"base = place // (2 * {run}) * (2 * {run})")
        self.line(f"other = tl.where(start == base, base + {run}, base)")
        self.line("low = element * 0")
        self.line(f"high = tl.maximum(tl.minimum(other + {run}, {given.length}) - other, 0)")
        records = [part for part, _ in self.sort.records]
        before = "found_packed < packed" if self.sort.packs else (
            "(found_key < key) | ((found_key == key) & (found_origin < origin))")
        with self.emitter.loop(f"for step in range({given.run.bit_length()}):",
                               {Var("%step", 0, given.run)}):
            self.line("open = inside & (low < high)")
            self.line("middle = (low + high) // 2")
            for part, tensor in zip(records, given.tensors, strict=True):
                self.line(f"found_{part} = tl.load({self.pointers[tensor]} + line * "
                          f"{given.length} + other + middle, mask=open)")
            self.line(f"less = open & ({before})")
            self.line("high = tl.where(open & ~less, middle, high)")
            self.line("low = tl.where(less, middle + 1, low)")
        self.line("target = base + place - start + low")
