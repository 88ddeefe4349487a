"""A chip of a hundred lines: it runs Loop IR in the interpreter, under a name of its own.

Nothing in terrazzo knows of it. What works on it works by the seam alone.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from terrazzo.chips.chip import LEVELS, Assembled, Chip
from terrazzo.chips.spec import ChipSpec
from terrazzo.index import Var, evaluate
from terrazzo.loop import interpret
from terrazzo.loop.ir import Buffer
from terrazzo.loop.steps import Argument, Branch, Call, Flag, Recipe, Repeat, Step


class Abacus(Chip):
    """Counts on beads; what it is handed stays in this process."""

    spec = ChipSpec("abacus", "abacus", cores=1, vector_bits=64, vector_registers=8,
                    memory_gbps=1e-3, peak_flops=(("f32", 1e6),))
    levels = (*LEVELS, "beads")
    keeps_code = False

    def __init__(self) -> None:
        self.recipes: list[Recipe] = []

    def assemble(self, recipe: Recipe) -> Assembled:
        self.recipes.append(recipe)
        return Assembled(b"", {"recipe": len(self.recipes) - 1})

    def load(self, name: str, made: Assembled, constants: Sequence[int]) -> Beads:
        return Beads(self.recipes[made.facts["recipe"]], constants)

    def text(self, level: str, recipe: Recipe) -> str:
        return "\n".join(f"count {f.name}" for f in recipe.functions)


class Beads:
    """A recipe followed step by step."""

    allocates = False
    models_time = False
    call_pointers = call_numpy = call_slots = None

    def __init__(self, recipe: Recipe, constants: Sequence[int]):
        self.recipe, self.constants = recipe, constants

    def prepare(self) -> None:
        """There are no threads to tell anything."""

    def failed(self) -> bool:
        return False

    def run(self, slots: Sequence[int], arena: int, threads: int, clock: int = 0) -> None:
        recipe = self.recipe
        bases = {"slot": slots, "constant": self.constants, "arena": [arena]}
        sizes = dict(zip(recipe.dims, slots[recipe.slots:], strict=True))
        for i, step in enumerate(recipe.steps):
            self.stamp(clock, i)
            self.step(step, bases, sizes)
        self.stamp(clock, len(recipe.steps))

    def stamp(self, clock: int, i: int) -> None:
        if clock:
            ctypes.c_int64.from_address(clock + 8 * i).value = time.perf_counter_ns()

    def step(self, step: Step, bases: Mapping[str, Sequence[int]], sizes: Mapping[Var, int]
             ) -> None:
        def address(place: Argument) -> int:
            return bases[place.kind][place.number] + int(evaluate(place.offset, sizes))

        def holds(flag: Flag) -> bool:
            return any(ctypes.string_at(address(flag.place), flag.bytes))

        def all_of(steps: Sequence[Step], sizes: Mapping[Var, int]) -> None:
            for inner in steps:
                self.step(inner, bases, sizes)

        if isinstance(step, Call):
            arrays = [beads(address(a), b, sizes) for a, b in zip(
                step.arguments, step.function.params, strict=True)]
            interpret.run(step.function, arrays, {d: sizes[d] for d in step.function.dims})
        elif isinstance(step, Branch):
            all_of(step.then if holds(step.flag) else step.orelse, sizes)
        else:
            self.repeat(step, all_of, holds, sizes)

    def repeat(self, step: Repeat, all_of: Any, holds: Any, sizes: Mapping[Var, int]) -> None:
        turn = 0
        while True:
            inside = {**sizes, step.counter: turn}
            all_of(step.test, inside)
            if not (turn < evaluate(step.count, sizes) if step.flag is None else
                    holds(step.flag)):
                break
            all_of(step.body, inside)
            turn += 1
        all_of(step.after, inside)


def beads(address: int, buffer: Buffer, sizes: Mapping[Var, int]) -> np.ndarray:
    """The memory of a kernel's argument as an array."""
    count = int(evaluate(buffer.size, sizes))
    if count == 0:
        return np.empty(0, buffer.dtype.np)
    room = (ctypes.c_char * (count * buffer.dtype.np.itemsize)).from_address(address)
    return np.frombuffer(room, buffer.dtype.np)
