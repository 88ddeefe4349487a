"""What the compiler is handed: a chip, from its description to code that runs on it.

A chip of one's own is a subclass with a description, `assemble` and `load`:

    class Abacus(tz.Chip):
        spec = tz.ChipSpec("abacus", "abacus", cores=1, vector_bits=64, vector_registers=8)

        def assemble(self, recipe): ...     # code for the kernels of a graph
        def load(self, name, made, constants): ...

Everything else has a default that suits any chip: no operator is kept whole, loops run in the order
in which they are written, memory is the host's. `register` makes it known by name, or an entry
point of the group `terrazzo.chips` does. What the compiler needs is imported when it asks: code
from a file is loaded without it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from terrazzo.chips.memory import HOST, HostMemory
from terrazzo.chips.spec import ChipSpec, Roofline
from terrazzo.errors import ArgumentError, DeviceError
from terrazzo.expr.limits import FusionLimits
from terrazzo.knobs import Settings

if TYPE_CHECKING:
    from terrazzo.chips.by_hand import Kernel, Run
    from terrazzo.expr.ir import Program, Tensor
    from terrazzo.expr.schedule import Schedule
    from terrazzo.loop.ir import Function
    from terrazzo.loop.steps import Recipe

LEVELS = ("graph", "canonical", "expr", "schedule", "loop")  # those that need no chip to be read


@dataclass(frozen=True)
class Assembled:
    """Code of one executable as bytes, and what its loader must know of it, as plain data."""

    code: bytes
    facts: Mapping[str, Any] = field(default_factory=dict)


class Code(Protocol):
    """Loaded code of one executable."""

    allocates: bool
    """Whether kernels take memory of their own, and may fail to get it."""
    models_time: bool
    """Whether the clock of `run` tells nanoseconds of a model of time; else it has any unit."""
    call_pointers: Callable[..., Any] | None
    call_numpy: Callable[..., Any] | None
    """Direct entries for Python: addresses or numpy arrays, then sizes, arena and threads."""
    call_slots: Callable[..., Any] | None
    """The same for any number of arguments, whose array is at the address that comes first; then
    arena, threads and clock, as of `run`."""

    def run(self, slots: Sequence[int], arena: int, threads: int, clock: int = 0) -> None:
        """Run on addresses of inputs and outputs and then the sizes.

        `clock` is 0 or the address of 64-bit integers for the time before every step and at the
        end.
        """

    def prepare(self) -> None:
        """Take over settings that steer runs; called before runs."""

    def failed(self) -> bool:
        """Whether a kernel found no memory since this was last asked."""


class Chip(ABC):
    """A chip as the compiler is handed it."""

    spec: ChipSpec
    memory: HostMemory = HOST
    levels: tuple[str, ...] = LEVELS
    """What `lower` can show, from the top down."""
    program_levels: tuple[str, ...] = ()
    """Those of its own that show programs one by one (`source`); others show all (`text`)."""
    languages: tuple[str, ...] = ()
    """Languages of kernels that users write by hand (`build`)."""
    keeps_code: bool = True
    """Whether code is good for other processes, and so kept on disk."""
    tunes: str = ""
    """Under which name choices that were measured for it are kept; empty: it measures none."""
    absence: str = ""
    """Why nothing can run on it here; empty where it can."""
    fusion_limits: FusionLimits = FusionLimits()
    """Up to where operators are made one kernel."""
    slack: int = 0
    """For how many kernels after its last use the memory of a value is left alone: with some, a
    chip may run kernels side by side that came one after the other."""

    @property
    def name(self) -> str:
        """What users call it."""
        return self.spec.kind

    def under(self, settings: Settings) -> Chip:
        """The chip as some settings want it."""
        return self

    def simulating(self, spec: ChipSpec) -> Chip:
        """This chip as what runs kernels for one that does not exist, the same on every machine."""
        raise DeviceError(f"the chip {self.name!r} cannot stand in for {spec.kind!r}")

    # ------------------------------------------------------------ graphs and programs
    def keeps(self, operator: str, inputs: Sequence[Any] = ()) -> bool:
        """Whether a composite operator stays whole, because there is a kernel for all of it.

        `float8_matmul` is asked for too: without units for it, operands are widened first.
        `inputs` have a shape and a type, or are None where one is left out.
        """
        return False

    def schedule(self, program: Program, revisits: Sequence[bool] = ()
                 ) -> tuple[Program, Schedule]:
        """The program in the form it will run in, and how it runs.

        `revisits` are outputs that lie where an input was just read: caches hold them already.
        """
        from terrazzo.expr.schedule import Schedule

        return program, Schedule()

    def template(self, program: Program, constants: frozenset[Tensor]) -> Function | None:
        """A kernel that is built whole instead of scheduled; None where there is none."""
        return None

    def lower(self, program: Program, constants: frozenset[Tensor] = frozenset(),
              revisits: Sequence[bool] = ()) -> Function:
        """The loops of a program, which may want some of its constants in another layout."""
        from terrazzo.expr.lower import lower

        function = self.template(program, constants)
        if function is None:
            scheduled, schedule = self.schedule(program, revisits)
            function = lower(scheduled, schedule, program.name)
        return function

    def adapt(self, function: Function) -> Function:
        """Loops that an operator gave itself, as this chip runs them best."""
        return function

    def elsewhere(self, function: Function) -> str:
        """Why another chip runs a kernel of this one's code; empty where it runs here."""
        return ""

    # ------------------------------------------------------------ code
    @abstractmethod
    def assemble(self, recipe: Recipe) -> Assembled:
        """Code for the kernels of a recipe and for what calls them."""

    @abstractmethod
    def load(self, name: str, made: Assembled, constants: Sequence[int]) -> Code:
        """Make assembled code callable; `constants` are addresses in this chip's memory."""

    def alone(self, function: Function) -> Code:
        """One kernel by itself: its slots are the function's parameters."""
        from terrazzo.loop.steps import Argument, Call, Recipe

        slots = tuple(Argument("slot", i) for i in range(len(function.params)))
        recipe = Recipe(function.name, (Call(function, slots, function.name),), len(slots), 0,
                        function.dims)
        return self.load(function.name, self.assemble(recipe), [])

    def text(self, level: str, recipe: Recipe) -> str:
        """A recipe at a level that is this chip's own."""
        raise self.no_level(level)

    def source(self, level: str, program: Program) -> str:
        """A program at one of `program_levels`."""
        raise self.no_level(level)

    def no_level(self, level: str) -> ArgumentError:
        """The error for a level that this chip does not have."""
        return ArgumentError(f"the chip {self.name!r} has no level {level!r}",
                             hint=f"its levels are {', '.join(self.levels)}")

    def compiling_elsewhere(self) -> AbstractContextManager[None]:
        """Inside, compilers that take much memory stay out of this process, if they can."""
        return nullcontext()

    def build(self, language: str, kernel: Kernel) -> Run:
        """A kernel by hand, ready to run.

        Raises MissingDependency where nothing here can compile the language, CompileError where
        the source is wrong.
        """
        raise ArgumentError(f"the chip {self.name!r} takes no kernels in {language!r}", hint=(
            f"it takes {', '.join(self.languages)}" if self.languages else "it takes none"))

    def native(self, text: str, name: str) -> Callable[..., Any]:
        """A function of Python's out of LLVM's text, where this chip is the one Python runs on.

        Its entry is a C function of CPython's METH_FASTCALL convention; other names of the text
        are its own, or those of this process.
        """
        raise DeviceError(f"the chip {self.name!r} runs no code beside Python's")

    # ------------------------------------------------------------ running
    def recorded(self, executable: Any) -> Any:
        """What runs an executable (`run`) by repeating what was recorded; itself by default."""
        return executable

    def on_stream(self, address: int) -> AbstractContextManager[Any]:
        """Inside, what runs on this chip is queued in a stream of the caller's own."""
        return nullcontext()

    def demand(self) -> None:
        """Raise where nothing can run on this chip."""
        if self.absence:
            raise self.absent()

    def absent(self) -> DeviceError:
        """The error for asking a chip to run what cannot run here."""
        return DeviceError(f"nothing can run on {self.name!r} here: {self.absence}",
                           hint="tz.chips() lists the chips there are")

    def roofline(self) -> Roofline:
        """What it does at best: as described, or measured where that says more."""
        return Roofline(self.spec.memory_gbps * 1e9, self.spec.peak("f32"))

    def seconds(self, run: Callable[[], Any]) -> float:
        """How long something takes on this chip: by the clock, or by a model of time."""
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def __repr__(self) -> str:
        return f"<chip {self.name}: {self.spec}>"
