"""Prints running combinations along an axis as Triton kernels: cumsum and its like, recurrences.

What is combined lies in lines along the axis. A program takes some positions of some lines at once,
as a tile with positions down and lines across, and combines them by `tl.associative_scan`; what all
of them come to is carried to the next positions.

Few long lines leave multiprocessors idle: then lines are cut into parts. A first kernel finds what
each part comes to, a second one what lies before each, and a third one scans the parts from there.

A recurrence h = a*h + b is a combination of pairs: a, then c, is `h * (a*c) + (b*c + d)`. Products
of many numbers leave the range of float32 where the numbers one after the other do not, so products
and recurrences are carried in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from terrazzo.base.scalar import REDUCTIONS
from terrazzo.base.shapes import normalize_axis, num_elements
from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.triton.kernel_lines import KernelLines
from terrazzo.codegen.triton.lines import Block
from terrazzo.codegen.triton.module import Written, warps_for
from terrazzo.codegen.triton.spelling import PRODUCT, literal_text, type_text
from terrazzo.dtypes import DType, float64, int32
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import Index, Var, ceildiv

RECURRENCE = "recurrence"  # the operation of two tensors
MOST_WARPS = 8  # of a program: a scan across more waits for more of them
_OWN_NAMES = ("program", "block", "part", "first", "last", "start", "lane", "position",
              "carry", "running", "factors", "factor", "inside")


@dataclass(frozen=True, eq=False)
class Scan:
    """One running combination: of which tensors, along which axis, and how."""

    op: str  # add, mul, max, min or RECURRENCE
    sources: tuple[Tensor, ...]
    result: Tensor
    outer: Index  # lines are numbered by what comes before and after the axis
    length: Index
    inner: Index
    exclusive: bool
    reverse: bool

    @staticmethod
    def of(program: Program) -> Scan:
        node = program.attrs["node"]
        (result,) = program.outputs
        axis = normalize_axis(node.attrs["axis"], len(result.shape))
        return Scan(node.attrs.get("op", RECURRENCE), program.inputs, result,
                    num_elements(result.shape[:axis]), result.shape[axis],
                    num_elements(result.shape[axis + 1:]), node.attrs.get("exclusive", False),
                    node.attrs["reverse"])

    @property
    def lines(self) -> Index:
        return self.outer * self.inner

    @property
    def carried(self) -> DType:
        """The type in which numbers are combined."""
        wide = self.sources[0].dtype.compute
        if wide.is_float:
            return float64 if self.op in ("mul", RECURRENCE) else wide
        return int32 if wide.bits < 32 else wide

    def identities(self) -> tuple[str, ...]:
        """What stands for an element that is not there, of each source."""
        if self.op == RECURRENCE:
            return "1.0", "0.0"
        return (literal_text(REDUCTIONS[self.op].identity(self.carried), self.carried),)

    def address(self, position: Index, line: Index) -> Index:
        if self.inner == 1:
            return line * self.length + position
        return (line // self.inner * self.length + position) * self.inner + line % self.inner


@dataclass(frozen=True)
class Cut:
    """How the work is cut."""

    positions: int  # of a tile
    lines: int
    span: int = 0  # positions of a part, where lines are cut into parts

    def parts(self, scan: Scan) -> Index:
        return ceildiv(scan.length, self.span) if self.span else 1


@dataclass(frozen=True, eq=False)
class ScanInParts:
    """The three scans of lines in parts, with their programs."""

    sums: Program  # of each part
    before: Scan  # of parts
    before_program: Program
    final: Program

    @staticmethod
    def of(program: Program, scan: Scan, cut: Cut) -> ScanInParts:
        shape = (scan.outer, cut.parts(scan), scan.inner)
        name = scan.result.name
        kinds = ("factors", "sums") if scan.op == RECURRENCE else ("sums",)
        sums = tuple(Tensor(f"{name}_{kind}", shape, scan.carried) for kind in kinds)
        before = Tensor(f"{name}_before", shape, scan.carried)
        of_parts = Scan(scan.op, sums, before, scan.outer, shape[1], scan.inner, True, scan.reverse)

        def made(kind: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> Program:
            return Program(f"{program.name}{kind}", inputs, outputs, outputs, program.kind,
                           program.attrs)

        return ScanInParts(made("_sums", scan.sources, sums), of_parts,
                           made("_before", sums, (before,)),
                           made("", (*scan.sources, before), (scan.result,)))


def scan_kernel(program: Program, scan: Scan, cut: Cut, chip: ChipSpec, wide: bool) -> Written:
    """The kernel that stores results: of whole lines, or of parts after what lies before them."""
    kernel = _Kernel(program, scan, cut, chip, wide)
    kernel.write(program.inputs[-1] if cut.span else None)
    return kernel.written()


def sums_kernel(program: Program, scan: Scan, cut: Cut, chip: ChipSpec, wide: bool) -> Written:
    """The kernel that stores what each part comes to."""
    kernel = _Kernel(program, scan, cut, chip, wide)
    kernel.write_sums()
    return kernel.written()


class _Kernel(KernelLines):
    """Some positions of some lines at a time."""

    def __init__(self, program: Program, scan: Scan, cut: Cut, chip: ChipSpec, wide: bool):
        super().__init__(program, chip, wide, _OWN_NAMES)
        self.scan, self.cut = scan, cut
        self.type = type_text(scan.carried)
        self.at_once = not cut.span and isinstance(scan.length, int) and (
            scan.length <= cut.positions)
        self.position = Var("%position", 0, None)

    def written(self) -> Written:
        scan, cut = self.scan, self.cut
        programs = ceildiv(scan.lines, cut.lines) * cut.parts(scan)
        lanes = cut.positions * cut.lines
        return self.as_written(programs, min(MOST_WARPS, warps_for(lanes, 32, self.rules)))

    # ------------------------------------------------------------ the two kernels
    def write(self, before: Tensor | None) -> None:
        """Store results; `before` is what lies before each part."""
        self.begin()
        if before is not None:
            self.line(f"carry = {self.load(before, self.of_part(before), self.line_at)}")
        elif not self.at_once:
            self.line(f"carry = {self.full(self.scan.identities()[-1])}")
        with self.positions():
            self.combine()
            result = self.scan.result
            text = "running" if result.dtype is self.scan.carried else (
                f"running.to({type_text(result.dtype)})")
            self.store(result, self.scan.address(self.position, self.line_at), text)
            if not self.at_once:
                self.line(f"carry = {self.at_end('running')}")

    def write_sums(self) -> None:
        """Store what a part comes to."""
        self.begin()
        *factor, carry = self.scan.identities()
        for identity in factor:
            self.line(f"factor = {self.full(identity)}")
        self.line(f"carry = {self.full(carry)}")
        with self.positions():
            self.combine()
            if factor:
                self.line(f"factor = factor * {self.at_end('factors')}")
            self.line(f"carry = {self.at_end('running')}")
        names = ("factor", "carry") if factor else ("carry",)
        for tensor, name in zip(self.program.outputs, names, strict=True):
            self.store(tensor, self.of_part(tensor), name, self.line_at)

    # ------------------------------------------------------------ where things are
    def begin(self) -> None:
        scan, cut = self.scan, self.cut
        self.size = self.constant("POSITIONS", cut.positions)
        self.lines = lines = self.constant("LINES", cut.lines)
        self.line(f"program = {self.instance}")
        block = "program"
        if cut.span:
            parts = self.emitter.index(cut.parts(scan)).inside(PRODUCT)
            self.span = self.constant("SPAN", cut.span)
            self.line(f"part = program % {parts}")
            self.line(f"first = part * {self.span}")
            self.part = self.number("part", cut.parts(scan))
            block = f"program // {parts}"
        self.line_at = self.block("line", scan.lines, lines, cut.lines, "[None, :]",
                                  f"{block} * {lines}")
        self.emitter.variable(self.line_at)
        self.line(f"lane = tl.arange(0, {self.size})[:, None]")

    def of_part(self, tensor: Tensor) -> Index:
        """Where a tensor of parts has this one."""
        _, parts, inner = tensor.shape
        line = self.line_at
        if inner == 1:
            return line * parts + self.part
        return (line // inner * parts + self.part) * inner + line % inner

    @contextmanager
    def positions(self) -> Iterator[None]:
        """The positions of the lines, or of this part of them, some at a time."""
        scan, cut, emitter = self.scan, self.cut, self.emitter
        exact = isinstance(scan.length, int) and scan.length % (cut.span or cut.positions) == 0
        if self.at_once:
            emitter.add_block(Block(self.position, "position", scan.length, "lane", self.size,
                                    exact))
            yield
            return
        end, begin = emitter.index(scan.length).text, "start"
        if cut.span:
            end = self.span
            begin = f"first + {self.span} - {self.size} - start" if scan.reverse else (
                "first + start")
        elif scan.reverse:
            self.line(f"last = ({end} - 1) // {self.size} * {self.size}")
            begin = "last - start"
        numbers = f"({begin} + lane).to(tl.int64)" if self.wide else f"{begin} + lane"
        emitter.blocks[self.position] = Block(self.position, "position", scan.length, numbers,
                                              self.size, exact)
        with emitter.loop(f"for start in range(0, {end}, {self.size}):", {self.position}):
            yield

    # ------------------------------------------------------------ what is combined
    def combine(self) -> None:
        """Combine some positions with each other, and with what is carried."""
        scan = self.scan
        given = [self.element(t, i) for t, i in zip(scan.sources, scan.identities(), strict=True)]
        order = ", reverse=True" if scan.reverse else ""
        if scan.op == RECURRENCE:
            self.line(f"factors, running = tl.associative_scan(({', '.join(given)}), 0, "
                      f"_chained{order})")
            if not self.at_once:
                self.line("running = factors * carry + running")
            return
        self.line(f"running = tl.associative_scan({given[0]}, 0, _{scan.op}{order})")
        if not self.at_once:
            self.line(f"running = _{scan.op}(carry, running)")

    def element(self, tensor: Tensor, identity: str) -> str:
        """What a position adds: its element, or the one before it, or nothing."""
        scan, emitter, at = self.scan, self.emitter, self.position
        shift = 0 if not scan.exclusive else 1 if scan.reverse else -1
        lanes = frozenset((at, self.line_at))
        mask = emitter.mask(lanes)
        inside = "" if mask is None else mask.text
        if shift:
            place = emitter.variable(at).text
            end = emitter.index(scan.length - 1).text
            exists = f"({place} < {end})" if scan.reverse else f"({place} > 0)"
            self.line(f"inside = {exists} & ({emitter.variable(self.line_at).text} >= 0)"
                      if mask is None else f"inside = {exists} & {mask.text}")
            inside = "inside"
        pointer = emitter.place(self.pointers[tensor], emitter.index(
            scan.address(at + shift, self.line_at)), lanes)
        name = self.names.fresh(tensor.name)
        masked = f", mask={inside}" if inside else ""
        wide = "" if tensor.dtype is scan.carried else f".to({self.type})"
        self.line(f"{name} = tl.load({pointer}{masked}){wide}")
        if inside:
            self.line(f"{name} = tl.where({inside}, {name}, {identity})")
        return name

    def full(self, identity: str) -> str:
        return f"tl.full([1, {self.lines}], {identity}, {self.type})"

    def at_end(self, name: str) -> str:
        """The last of what was combined."""
        lane = "0" if self.scan.reverse else f"{self.size} - 1"
        return f"tl.sum(tl.where(lane == {lane}, {name}, 0), axis=0, keep_dims=True)"
