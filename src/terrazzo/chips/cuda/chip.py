"""An NVIDIA GPU as a chip: Triton source for every program that has one, launched by the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from terrazzo.chips.chip import LEVELS, Assembled, Chip, Code
from terrazzo.chips.cuda import driver
from terrazzo.chips.cuda.description import described, h200
from terrazzo.chips.cuda.memory import DeviceMemory
from terrazzo.chips.memory import HOST
from terrazzo.chips.registry import DEFAULT, chip_named
from terrazzo.chips.spec import FAST_FP8_SUMS, ChipSpec, Roofline
from terrazzo.errors import MissingDependency
from terrazzo.knobs import Settings, knobs

if TYPE_CHECKING:
    from terrazzo.chips.by_hand import Kernel, Run
    from terrazzo.chips.cuda.forms import Form
    from terrazzo.expr.ir import Program, Tensor
    from terrazzo.loop.ir import Function
    from terrazzo.loop.steps import Recipe


# Operators that stay whole; only of the first there are loops too.
ATTENTION = ("scaled_dot_product_attention", "attention_with_logsumexp", "attention_gradients")


class Cuda(Chip):
    """A GPU of NVIDIA's: this machine's, or the one that is described where there is none."""

    levels = (*LEVELS, "triton", "ptx", "sass")
    program_levels = ("triton", "ptx", "sass")
    languages = ("cuda", "triton")

    def __init__(self, spec: ChipSpec | None = None, simulated: bool = False,
                 measures: bool = False, fast_sums: bool = False):
        # Which are matters of settings: see `under`.
        self.simulated, self.measures, self.fast_sums = simulated, measures, fast_sums
        self.missing = "" if self.simulated else driver.absence()
        spec = spec or (h200() if self.missing or self.simulated else described())
        # Simulated GPUs run Triton, not Gluon, which is what `wgmma` stands for.
        features = spec.features - {FAST_FP8_SUMS} - ({"wgmma"} if self.simulated else set())
        self.spec = replace(spec, features=features | ({FAST_FP8_SUMS} if fast_sums else set()))
        self.memory = HOST if self.simulated else DeviceMemory()
        self.keeps_code = not self.simulated  # which is text for this process
        self._others: dict[tuple[bool, bool, bool], Cuda] = {}  # the same under other settings
        self._forms: WeakKeyDictionary[Program, Form] = WeakKeyDictionary()

    def under(self, settings: Settings) -> Cuda:
        wanted = settings.cuda_simulate, settings.tune, settings.fp8_fast_sums
        if wanted == (self.simulated, self.measures, self.fast_sums):
            return self
        if wanted not in self._others:
            same = self.spec if settings.cuda_simulate == self.simulated else None
            self._others[wanted] = Cuda(same, *wanted)
        return self._others[wanted]

    @property
    def absence(self) -> str:  # type: ignore[override]
        if self.missing and not knobs.cuda_simulate:
            return f"{self.missing} (TZ_CUDA_SIMULATE=1 runs its kernels on the CPU)"
        return ""

    @property
    def tunes(self) -> str:  # type: ignore[override]
        return f"cuda {self.spec.name}" + (", simulated" if self.simulated else "")

    @property
    def host(self) -> Chip:
        """Who runs what has no form here."""
        return chip_named(DEFAULT)

    def form(self, program: Program) -> Form:
        """The kernels of a program, or why the CPU runs it."""
        from terrazzo.chips.cuda.tune import form_for

        if program not in self._forms:
            self._forms[program] = form_for(program, self)
        return self._forms[program]

    def keeps(self, operator: str, inputs: Sequence[Any] = ()) -> bool:
        if operator == "float8_matmul":
            return self.spec.has("fp8")
        if operator not in ATTENTION or not inputs:
            return False
        from terrazzo.chips.cuda import attention

        return attention.has_kernel(operator, inputs)

    def lower(self, program: Program, constants: frozenset[Tensor] = frozenset(),
              revisits: Sequence[bool] = ()) -> Function:
        if program.kind == "attention" and program.attrs["node"].op.name != ATTENTION[0]:
            return _without_loops(program)
        if not self.form(program).kernels or program.kind == "attention":
            return self.host.lower(program, constants, revisits)
        from terrazzo.chips.cuda.layouts import weights_of

        weights = weights_of(program)
        if weights is None or program.inputs[weights.number] not in constants:
            return super().lower(program, constants, revisits)
        function = super().lower(weights.program, constants, revisits)
        return replace(function, packed={weights.number: weights.packing})

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
            version = kernel.shown
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


def _without_loops(program: Program) -> Function:
    """A kernel that is its program alone."""
    from terrazzo.expr.place import storage_size
    from terrazzo.loop.ir import Buffer, Function, block

    buffers = [Buffer(t.name, t.dtype, storage_size(t))
               for t in (*program.inputs, *program.outputs)]
    return Function(program.name, tuple(buffers), program.dims, block(),
                    program.attrs["node"].op.name)
