"""A Triton kernel that is written line by line: its parameters, index variables and memory."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.triton.emit import Emitter
from terrazzo.codegen.triton.lines import Block, Names, Value
from terrazzo.codegen.triton.module import RESERVED, Size, Written
from terrazzo.codegen.triton.spelling import ATOM
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import Index, Var


class KernelLines:
    """One kernel while it is written; `own` are names of its lines, so that no tensor has them."""

    def __init__(self, program: Program, chip: ChipSpec, wide: bool, own: Sequence[str]):
        self.program, self.wide, self.rules = program, wide, chip.launch
        self.names = Names((*RESERVED, *own))
        self.name = self.names.fresh(program.name)
        self.pointers = {t: self.names.fresh(f"{t.name}_ptr")
                         for t in (*program.inputs, *program.outputs)}
        self.dims = {var: self.names.fresh(var.name) for var in program.dims}
        self.constants: dict[str, Size] = {}
        self.emitter = Emitter(self.names, self.dims, self.pointers, _no_space, tile=True,
                               wide=wide, libdevice=chip.has("libdevice"))

    def as_written(self, programs: Index, warps: int, stages: int = 0, descriptors: bool = False
                   ) -> Written:
        """The kernel as it is written now."""
        return Written(self.name, tuple(self.emitter.scopes[0].lines), self.pointers, self.dims,
                       programs, self.constants, self.rules.warps_for(warps), self.wide,
                       self.rules, stages, descriptors)

    # ------------------------------------------------------------ lines
    def constant(self, name: str, value: Size) -> str:
        name = self.names.fresh(name)
        self.constants[name] = value
        return name

    def line(self, text: str) -> None:
        """A line of the innermost scope."""
        emitter = self.emitter
        emitter.line(text, frozenset().union(*(s.binds for s in emitter.scopes)))

    # ------------------------------------------------------------ index variables
    @property
    def instance(self) -> str:
        """Which program of the grid this is."""
        return "tl.program_id(0).to(tl.int64)" if self.wide else "tl.program_id(0)"

    def number(self, name: str, extent: Index) -> Var:
        """An index variable without lanes, which lines have given its name."""
        var = Var(f"%{name}", 0, last(extent))
        self.emitter.add_block(Block(var, name, extent))
        return var

    def block(self, name: str, extent: Index, size: str, lanes: int, direction: str,
              start: str = "") -> Var:
        """An index variable with lanes, which is made known."""
        var = Var(f"%{name}", 0, last(extent))
        numbers = f"{start + ' + ' if start else ''}tl.arange(0, {size}){direction}"
        exact = isinstance(extent, int) and extent % lanes == 0
        self.emitter.add_block(Block(var, self.names.fresh(name), extent, numbers, size, exact))
        return var

    # ------------------------------------------------------------ memory
    def load(self, tensor: Tensor, address: Index, *lanes: Var) -> str:
        """What lies at an address, for these lanes whether or not it depends on them."""
        emitter = self.emitter
        at = emitter.index(address)
        deps = at.deps | set(lanes)
        mask = emitter.mask(deps)
        inside = f", mask={mask.text}, other=0" if mask else ""
        text = f"tl.load({emitter.place(self.pointers[tensor], at, deps)}{inside})"
        return emitter.bind(Value(text, ATOM, deps), tensor.name).text

    def store(self, tensor: Tensor, address: Index, value: str, *lanes: Var) -> None:
        at = self.emitter.index(address)
        deps = at.deps | set(lanes)
        mask = self.emitter.mask(deps)
        masked = f", mask={mask.text}" if mask else ""
        pointer = self.emitter.place(self.pointers[tensor], at, deps)
        self.line(f"tl.store({pointer}, {value}{masked})")


def last(extent: Index) -> Index:
    """The largest index of an axis, 0 where there is none."""
    return max(extent - 1, 0) if isinstance(extent, int) else extent - 1


def _no_space(extent: Index, name: str) -> Block:
    raise AssertionError("kernels that are written line by line have no rows of their own")
