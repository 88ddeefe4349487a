"""What kernels of convolutions share: names, addresses, the window's edges, what comes after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from terrazzo.base.scalar import (
    Const,
    FromIndex,
    Load,
    Reduce,
    Scalar,
    cast,
    cost,
    rewrite,
    walk,
)
from terrazzo.chips.cpu.kernel_parts import Kernel, Names
from terrazzo.chips.spec import ChipSpec
from terrazzo.dtypes import DType
from terrazzo.expr.convolution import NO_SPACE, Convolution, Space, loads_outside
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.lower import storage_size
from terrazzo.index import (
    Index,
    Var,
    ceildiv,
    coefficient,
    maximum,
    minimum,
    substitute,
)
from terrazzo.loop.ir import Buffer, Function, Stmt
from terrazzo.loop.packing import Packing
from terrazzo.loop.window_tile import Finish, Pixels

# Costlier expressions than this are for a loop of their own: in registers, they are written out
# once for each vector of the tile.
IN_REGISTERS = 12

Values = Mapping[Var, Index]
Place = tuple[Buffer, Index]


@dataclass(frozen=True, eq=False)
class After:
    """What follows the sum in registers: the expression, and where its operands lie."""

    finish: Finish
    operands: tuple[tuple[Buffer, Index], ...]  # addresses in terms of the stage's axes


class ConvKernel(Kernel):
    """One kernel in the making."""

    def __init__(self, program: Program, conv: Convolution, chip: ChipSpec,
                 constants: frozenset[Tensor]):
        super().__init__(program, chip)
        self.conv = conv
        for tensor, constant in (*((t, True) for t in program.inputs), (conv.stage, False)):
            name = self.fresh(tensor.name)
            self.buffers[tensor] = Buffer(name, tensor.dtype, storage_size(tensor), constant)
        self.packed: dict[int, Packing] = {}
        after = loads_outside(conv.body, conv.reduce)
        self.may_pack = conv.w.source in constants and all(
            n.source is not conv.w.source for n in (*after, conv.x))
        self.after = None if self.is_plain else self.in_registers()

    @cached_property
    def wide(self) -> DType:
        """The type of the sums."""
        return self.conv.reduce.dtype

    @cached_property
    def lanes(self) -> int:
        return self.chip.lanes(self.wide.bits)

    @property
    def out(self) -> Buffer:
        return self.buffers[self.conv.stage]

    @property
    def x(self) -> Buffer:
        return self.buffers[self.conv.x.source]

    @property
    def w(self) -> Buffer:
        return self.buffers[self.conv.w.source]

    @cached_property
    def spaces(self) -> tuple[Space, ...]:
        """The axes in space, two at least: rows and columns."""
        return (NO_SPACE,) * max(0, 2 - len(self.conv.spaces)) + self.conv.spaces

    @cached_property
    def row(self) -> Space:
        return self.spaces[-2]

    @cached_property
    def column(self) -> Space:
        return self.spaces[-1]

    @cached_property
    def sums_in_output(self) -> bool:
        """Whether the output can hold the sums until all have been added."""
        return self.out.dtype is self.wide

    @cached_property
    def is_plain(self) -> bool:
        """Whether the sums are the result."""
        return isinstance(self.conv.body, Reduce) and self.sums_in_output

    def function(self, body: Stmt) -> Function:
        """The finished kernel."""
        return Function(self.program.name, tuple(self.buffers.values()), self.program.dims, body,
                        self.conv.stage.origin, packed=self.packed)

    # ------------------------------------------------------------ the window's edges
    def taps(self, names: Names, space: Space, position: Index) -> tuple[Index, Index]:
        """The first tap that lies inside at a position, and how many do."""
        reach = position * space.stride
        first: Index = 0
        end: Index = space.taps
        if space.below:
            first = names("first", minimum(maximum(ceildiv(
                space.before - reach, space.dilation), 0), space.taps), space.taps)
        if space.size is not None:
            end = names("end", maximum(minimum(ceildiv(
                space.size + space.before - reach, space.dilation), space.taps), 0), space.taps)
        if isinstance(first, int) and isinstance(end, int):
            return first, max(end - first, 0)
        return first, names("count", maximum(end - first, 0), space.taps)

    # ------------------------------------------------------------ what follows the sum
    def in_registers(self) -> After | None:
        """What follows the sum as an expression of few operands, if it is that."""
        conv = self.conv
        after = loads_outside(conv.body, conv.reduce)
        narrow = conv.stage.dtype.compute is self.wide
        if not narrow or cost(_without(conv.body, conv.reduce)) > IN_REGISTERS:
            return None
        total = Load(self.wide, Buffer("total", self.wide, 1), (0,))
        table: dict[int, Scalar] = {id(conv.reduce): total}
        formal: list[Load] = []
        along: list[int] = []
        places: list[tuple[Buffer, Index]] = []
        for number, load in enumerate(after):
            if any(isinstance(i, Scalar) for i in load.indices):
                return None
            address = load.source.flat(load.indices)
            assert not isinstance(address, Scalar)
            step = coefficient(address, conv.outputs.var)
            moving = [coefficient(address, s.position.var) for s in conv.spaces[-2:]
                      if s.position is not None]
            if not isinstance(step, int) or step not in (0, 1) or any(m is None for m in moving):
                return None
            stand_in = Load(load.dtype, Buffer(f"operand{number}", load.dtype, 1), (0,))
            table[id(load)] = stand_in
            formal.append(stand_in)
            along.append(step)
            places.append((self.buffers[load.source], address))
        value = cast(rewrite(conv.body, lambda n: table.get(id(n))), self.out.dtype)
        if any(isinstance(n, FromIndex) for n in walk(value)):
            return None
        return After(Finish(value, total, tuple(formal), tuple(along)), tuple(places))

    def pixels(self, address: Index) -> Pixels:
        """How far apart pixels are in a tensor, given the address of an element of it."""
        steps: list[Index] = []
        for space in self.conv.spaces[:-3:-1]:
            step = 0 if space.position is None else coefficient(address, space.position.var)
            assert step is not None
            steps.append(step)
        return Pixels(steps[0], steps[1] if len(steps) > 1 else 0)

    def at(self, address: Index, values: Values) -> Index:
        """An address at some place."""
        return substitute(address, dict(values))

    def operands(self, values: Values) -> list[tuple[Place, Pixels]]:
        """Where the operands of what follows the sum are read, for the tile at some place."""
        if self.after is None:
            return []
        return [((buffer, self.at(address, values)), self.pixels(address))
                for buffer, address in self.after.operands]


def _without(body: Scalar, total: Reduce) -> Scalar:
    return rewrite(body, lambda n: Const(total.dtype, 0) if n is total else None)
