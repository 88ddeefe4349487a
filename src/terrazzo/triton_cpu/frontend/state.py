"""What `Lowering` knows of a kernel while it walks it, in parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from terrazzo.chips.spec import ChipSpec
from terrazzo.dtypes import DType
from terrazzo.index import Var
from terrazzo.loop.ir import Buffer, Stmt
from terrazzo.triton_cpu.frontend.values import Element, Indices, Value

if TYPE_CHECKING:
    from terrazzo.triton_cpu.frontend.reports import Reports
    from terrazzo.triton_cpu.frontend.sanitizer import Sanitizer

GRID = ("programs_x", "programs_y", "programs_z")


@dataclass(frozen=True)
class Target:
    """What lowering goes by of the chip that a kernel will run on."""

    spec: ChipSpec
    # Bytes from which on, and below which, stores pass the caches by; None where there are none.
    streams: tuple[int, int] | None
    # Rows and columns of the products that it makes at once; None: as many as registers hold.
    matrix: tuple[int, int] | None = None
    # Whether memory of its own holds tiles, and what lies outside is brought there once.
    scratchpad: bool = False


@dataclass(eq=False)
class Scope:
    """Names that are taken, and the buffers of a program of its own."""

    taken: dict[str, int] = field(default_factory=dict)  # and how often
    locals: list[Buffer] = field(default_factory=list)

    def fresh(self, name: str) -> str:
        """A name that nothing else has."""
        number = self.taken[name] = self.taken.get(name, -1) + 1
        return f"{name}_{number}"

    def local(self, name: str, dtype: DType, size: int) -> Buffer:
        """A new buffer of the program's own."""
        self.locals.append(Buffer(self.fresh(name), dtype, max(size, 1)))
        return self.locals[-1]


@dataclass(eq=False)
class Signature:
    """What a kernel is given: arguments, the sizes of the grid, and which of its programs it is."""

    params: list[tuple[Buffer, int]] = field(default_factory=list)  # with argument, or ANYWHERE
    addresses: dict[int, Var] = field(default_factory=dict)  # of arguments needed as numbers
    grid: tuple[Var, ...] = field(default_factory=lambda: tuple(Var(n, 1) for n in GRID))
    program: tuple[Var, ...] = field(
        default_factory=lambda: tuple(Var(f"program_{axis}", 0) for axis in "xyz"))

    def argument_of(self, buffer: Buffer) -> int:
        """The number of the argument that a pointer leads into, or `pointers.ANYWHERE`."""
        return next(number for b, number in self.params if b is buffer)

    def address_of(self, argument: int) -> Var:
        """The address that was passed as an argument."""
        if argument not in self.addresses:
            name = next(b.name for b, number in self.params if number == argument)
            self.addresses[argument] = Var(f"{name}_address", 0)
        return self.addresses[argument]


@dataclass(eq=False)
class Lazy:
    """Values that are expressions so far, and will have to lie in memory, with their names."""

    pending: list[tuple[str, Value]] = field(default_factory=list)  # loads: before a store
    deferred: list[tuple[str, Value]] = field(default_factory=list)  # when first computed

    def copy(self) -> Lazy:
        """As it is now: what one branch brings into memory, another has not."""
        return Lazy(list(self.pending), list(self.deferred))

    def forget(self, value: Value) -> None:
        """It lies in memory now."""
        self.pending = [p for p in self.pending if p[1] is not value]
        self.deferred = [p for p in self.deferred if p[1] is not value]


@dataclass(eq=False)
class Memory:
    """What was put into memory, and what is read there."""

    # Values that were put into memory, and what they were before, in the order of time.
    kept: list[tuple[Value, Callable[[Indices], Element], Buffer | None, int]] = field(
        default_factory=list)
    read: set[Buffer] = field(default_factory=set)  # what the kernel has loaded from so far
    load_pointers: dict[str, str] = field(default_factory=dict)  # of each lazy load
    inplace: dict[str, Buffer] = field(default_factory=dict)  # products that go where carried


@dataclass(eq=False)
class Watch:
    """What a kernel reports, and what is done so that it can."""

    prologue: list[Stmt] = field(default_factory=list)  # what a program does before anything else
    reports: Reports | None = None  # once something in the kernel may report
    sanitizer: Sanitizer | None = None
    alive: Buffer | None = None  # false after an assertion of the program failed
