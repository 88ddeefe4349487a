"""A described chip for our own compiler: kernels as the host runs them, counted, in plans.

Programs are lowered for a plain processor that is the same on every machine, with as many threads
as the chip has units and a cache as large as a scratchpad: so what kernels count, and with it the
modelled time, does not depend on where they are compiled. Matrix products are the chip's own
(`products.py`): their blocks are for its scratchpad, not for a processor's caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from terrazzo.chips.chip import LEVELS, Assembled, Chip, Code
from terrazzo.chips.gcu.build import compiler
from terrazzo.chips.gcu.description import Description, find
from terrazzo.chips.gcu.memory import DeviceMemory
from terrazzo.chips.registry import DEFAULT, chip_named
from terrazzo.chips.spec import Roofline
from terrazzo.errors import MissingDependency

if TYPE_CHECKING:
    from terrazzo.expr.ir import Program, Tensor
    from terrazzo.expr.schedule import Schedule
    from terrazzo.loop.ir import Function
    from terrazzo.loop.steps import Recipe


class Described(Chip):
    """A chip that exists as a description."""

    levels = (*LEVELS, "llvm")
    slack = 16  # kernels of a layer and its gradient, about: those that may share a launch

    def __init__(self, description: Description):
        self.description = description
        self.spec = description.spec()
        self.memory = DeviceMemory(description)

    @property
    def absence(self) -> str:  # type: ignore[override]
        try:
            compiler()
        except MissingDependency as missing:
            return str(missing)
        return ""

    @cached_property
    def host(self) -> Chip:
        """Who runs kernels: this machine's processor, as all machines have it."""
        host = chip_named(DEFAULT).simulating(self.spec)
        self.fusion_limits = host.fusion_limits
        return host

    # ------------------------------------------------------------ graphs and programs
    def keeps(self, operator: str, inputs: Sequence[Any] = ()) -> bool:
        return self.host.keeps(operator, inputs)

    def schedule(self, program: Program, revisits: Sequence[bool] = ()
                 ) -> tuple[Program, Schedule]:
        return self.host.schedule(program, revisits)

    def template(self, program: Program, constants: frozenset[Tensor]) -> Function | None:
        made = self._own_template(program)
        return self.host.template(program, constants) if made is None else made

    def _own_template(self, program: Program) -> Function | None:
        """A kernel with blocks for the scratchpad, where there is one."""
        from terrazzo.chips.gcu.attention import attention_template
        from terrazzo.chips.gcu.products import product_template

        return attention_template(program, self.description) or product_template(
            program, self.description)

    def lower(self, program: Program, constants: frozenset[Tensor] = frozenset(),
              revisits: Sequence[bool] = ()) -> Function:
        from terrazzo.chips.gcu.shares import shared_out

        made = self._own_template(program)
        return shared_out(self.host.lower(program, constants, revisits), self.spec.cores
                          ) if made is None else made

    def adapt(self, function: Function) -> Function:
        from terrazzo.chips.gcu.shares import shared_out

        return shared_out(self.host.adapt(function), self.spec.cores)

    # ------------------------------------------------------------ code
    def assemble(self, recipe: Recipe) -> Assembled:
        from terrazzo.chips.gcu.image import ImageFunction, write_image
        from terrazzo.chips.gcu.plans import CALLS, PLAN, counted_recipe, letters

        counted = counted_recipe(recipe, self.description)
        made = self.host.assemble(counted.recipe)
        entry = ImageFunction(PLAN, "tz_run", letters(recipe), tuple(counted.launches),
                              is_plan=True)
        image = write_image(made.code, [entry], self.description.fingerprint)
        return Assembled(image, {**made.facts, CALLS: counted.of_steps})

    def load(self, name: str, made: Assembled, constants: Sequence[int]) -> Code:
        from terrazzo.chips.gcu.plans import Plan

        return Plan(name, made, constants, self.description)

    def text(self, level: str, recipe: Recipe) -> str:
        from terrazzo.chips.gcu.plans import counted_recipe

        if level not in self.levels:
            raise self.no_level(level)
        return self.host.text(level, counted_recipe(recipe, self.description).recipe)

    # ------------------------------------------------------------ running
    def roofline(self) -> Roofline:
        return Roofline(self.spec.memory_gbps * 1e9, self.spec.peak("f32"))

    def seconds(self, run: Callable[[], Any]) -> float:
        """By the model of time, so the same in every run."""
        from terrazzo.chips.gcu.device import devices

        here = devices(self.description)
        before = here.cycles()
        run()
        return (here.cycles() - before) / (self.description.clock_khz * 1e3)


def described(name: str) -> Described:
    """The chip of a name: gcu, or one of the user's own."""
    return Described(find(name))
