"""An NVIDIA GPU as a chip: Triton source for every program that has one, launched by the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from terrazzo.chips.chip import LEVELS, Assembled, Chip, Code
from terrazzo.chips.cuda import driver
from terrazzo.chips.cuda.description import described, h200
from terrazzo.chips.cuda.memory import DeviceMemory
from terrazzo.chips.memory import HOST
from terrazzo.chips.registry import DEFAULT, chip_named
from terrazzo.chips.spec import ChipSpec, Roofline
from terrazzo.errors import MissingDependency
from terrazzo.knobs import Settings, knobs

if TYPE_CHECKING:
    from terrazzo.chips.by_hand import Kernel, Run
    from terrazzo.chips.cuda.forms import Form
    from terrazzo.expr.ir import Program, Tensor
    from terrazzo.loop.ir import Function
    from terrazzo.loop.steps import Recipe


class Cuda(Chip):
    """A GPU of NVIDIA's: this machine's, or the one that is described where there is none."""

    levels = (*LEVELS, "triton", "ptx", "sass")
    program_levels = ("triton", "ptx", "sass")
    languages = ("cuda", "triton")

    def __init__(self, spec: ChipSpec | None = None, simulated: bool = False):
        self.simulated = simulated  # which is a matter of settings: see `under`
        self.missing = "" if self.simulated else driver.absence()
        self.spec = spec or (h200() if self.missing or self.simulated else described())
        self.memory = HOST if self.simulated else DeviceMemory()
        self.keeps_code = not self.simulated  # which is text for this process
        self._other: Cuda | None = None  # the same, simulated or not
        self._forms: WeakKeyDictionary[Program, Form] = WeakKeyDictionary()

    def under(self, settings: Settings) -> Cuda:
        if settings.cuda_simulate == self.simulated:
            return self
        if self._other is None:
            self._other = Cuda(simulated=settings.cuda_simulate)
        return self._other

    @property
    def absence(self) -> str:  # type: ignore[override]
        if self.missing and not knobs.cuda_simulate:
            return f"{self.missing} (TZ_CUDA_SIMULATE=1 runs its kernels on the CPU)"
        return ""

    @property
    def host(self) -> Chip:
        """Who runs what has no form here."""
        return chip_named(DEFAULT)

    def form(self, program: Program) -> Form:
        """The kernels of a program, or why the CPU runs it."""
        from terrazzo.chips.cuda.forms import form_of

        if program not in self._forms:
            self._forms[program] = form_of(program, self.spec)
        return self._forms[program]

    def keeps(self, operator: str, inputs: Sequence[Any] = ()) -> bool:
        if operator != "scaled_dot_product_attention" or not inputs:
            return False
        from terrazzo.chips.cuda import attention

        return attention.has_kernel(inputs)

    def lower(self, program: Program, constants: frozenset[Tensor] = frozenset(),
              revisits: Sequence[bool] = ()) -> Function:
        if self.form(program).kernels and program.kind != "attention":
            return super().lower(program, constants, revisits)
        return self.host.lower(program, constants, revisits)

    def elsewhere(self, function: Function) -> str:
        from terrazzo.chips.cuda.plan import MOVES, program_of

        program = program_of(function)
        return MOVES if program is None else self.form(program).reason

    def adapt(self, function: Function) -> Function:
        return self.host.adapt(function)

    def assemble(self, recipe: Recipe) -> Assembled:
        from terrazzo.chips.cuda.plan import Planner

        return Planner(self.spec, self.host, self.simulated, self.form).plan(recipe)

    def load(self, name: str, made: Assembled, constants: Sequence[int]) -> Code:
        from terrazzo.chips.cuda.launch import Launched

        if self.simulated or made.facts["simulated"]:
            from terrazzo.chips.cuda.simulate import Simulator

            return Launched(made, constants, Simulator(made))
        from terrazzo.chips.cuda.launch import Device, check_made_for

        check_made_for(name, made.facts, self.spec.features, self.spec.name)
        return Launched(made, constants, Device(made))

    def source(self, level: str, program: Program) -> str:
        form = self.form(program)
        if level == "triton" or not form.kernels:
            return form.text(program)
        from terrazzo.chips.cuda.binaries import compiled, disassembled

        pieces = []
        for kernel in form.kernels:
            version = kernel.versions[-1]
            types = [t.dtype for t in kernel.tensors]
            made = compiled(version.written, types, version.constants(), version.warps,
                            [True] * len(types), version.sixteen, self.spec)
            pieces.append(made.ptx if level == "ptx" else disassembled(made))
        return "\n\n".join(pieces)

    def build(self, language: str, kernel: Kernel) -> Run:
        from terrazzo.chips.cuda import by_hand

        if language == "triton":
            return by_hand.triton(kernel, self.simulated)
        if language != "cuda":
            return super().build(language, kernel)
        if self.simulated:
            raise MissingDependency("kernels in CUDA C++ need a GPU")
        return by_hand.cuda(kernel, self.spec, self.memory)

    def roofline(self) -> Roofline:
        # What a copy reaches of the vendor's figure: 4.25 of 4.8 TB/s on an H200.
        return Roofline(0.885 * self.spec.memory_gbps * 1e9, self.spec.peak("f32"))

    def recorded(self, executable: Any) -> Any:
        from terrazzo.chips.cuda.graphs import recorded

        return recorded(executable)

    def on_stream(self, address: int) -> AbstractContextManager[Any]:
        if self.simulated:
            return super().on_stream(address)
        import torch

        return torch.cuda.stream(torch.cuda.ExternalStream(address))

    def seconds(self, run: Callable[[], Any]) -> float:
        if self.simulated:
            return super().seconds(run)
        import torch

        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3
