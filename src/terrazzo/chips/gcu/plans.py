"""Plans: all kernels of an executable as one function of the runtime library.

Each kernel gets one more argument, the numbers that it adds its counts to; the library hands them
in (the letter c of the arguments) and makes them a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from terrazzo.chips.chip import Assembled
from terrazzo.chips.gcu.description import Description
from terrazzo.chips.gcu.device import Image, devices
from terrazzo.chips.gcu.library import COUNTERS, check
from terrazzo.loop.ir import Function
from terrazzo.loop.steps import Argument, Branch, Call, Recipe, Repeat, Step

PLAN = "plan"  # the name of the one function in the image of an executable
CALLS = "calls of steps"  # of the facts: the names of each step's kernels


# ---------------------------------------------------------------- writing
def counted_recipe(recipe: Recipe, chip: Description) -> tuple[Recipe, list[str]]:
    """A recipe whose kernels count, with one more slot for the counts; and its calls by name."""
    from terrazzo.chips.gcu.counting import counted

    known: dict[Function, Function] = {}
    calls: list[str] = []
    row = chip.units * COUNTERS * 8  # bytes of one call's counts

    def call(step: Call) -> Call:
        if step.function not in known:
            known[step.function] = counted(step.function, chip, per="task")
        place = Argument("slot", recipe.slots, len(calls) * row)
        calls.append(step.name)
        return Call(known[step.function], (*step.arguments, place), step.name)

    def all_of(steps: Sequence[Step]) -> tuple[Step, ...]:
        return tuple(map(one, steps))

    def one(step: Step) -> Step:
        if isinstance(step, Call):
            return call(step)
        if isinstance(step, Branch):
            return replace(step, then=all_of(step.then), orelse=all_of(step.orelse))
        assert isinstance(step, Repeat)
        return replace(step, test=all_of(step.test), body=all_of(step.body),
                       after=all_of(step.after))

    return replace(recipe, steps=all_of(recipe.steps), slots=recipe.slots + 1), calls


def letters(recipe: Recipe) -> str:
    """The kinds of a plan's arguments: addresses, the counts, sizes."""
    return "p" * recipe.slots + "c" + "i" * len(recipe.dims)


# ---------------------------------------------------------------- running
class Plan:
    """Code of one executable, launched in the current stream; launches do not wait."""

    allocates = False
    models_time = True
    call_numpy: Callable[..., Any] | None = None

    def __init__(self, name: str, made: Assembled, constants: Sequence[int], chip: Description):
        self.devices = devices(chip)
        self.image = Image(made.code)
        self.function = self.image.function(PLAN)
        table = self.image.variable("tz_constants")
        for i, address in enumerate(constants):
            ctypes.c_void_p.from_address(table + 8 * i).value = address
        facts = made.facts
        self.slots: int = facts["slots"] - 1
        self.count = self.slots + 1 + facts["dims"]
        self.words = ctypes.c_int64 * self.count
        self.calls_of_steps: list[list[str]] = facts[CALLS]
        self.clock_khz = chip.clock_khz
        self.launches = self.devices.library.gcuLaunchPlan
        self.call_pointers: Callable[..., Any] | None = self.direct
        self.call_slots: Callable[..., Any] | None = None

    def launch(self, words: Any, arena: int) -> None:
        """Put the plan into the current stream."""
        code = self.launches(self.function, words, self.count, arena, self.devices.stream())
        if code:
            check(code)

    def direct(self, *given: int) -> None:
        """With addresses, sizes, the arena and a number of threads, as any code is called."""
        at = self.slots
        self.launch(self.words(*given[:at], 0, *given[at:-2]), given[-2])

    def run(self, slots: Sequence[int], arena: int, threads: int, clock: int = 0) -> None:
        at = self.slots
        words = self.words(*slots[:at], 0, *slots[at:])
        if not clock:
            self.launch(words, arena)
            return
        with self.devices.traced() as records:
            self.launch(words, arena)
        # Times as of a clock of the host: nanoseconds, before every step and at the end.
        now, stamps, left = 0, [0], [(r.name.decode(), r.cycles) for r in reversed(records)]
        for calls in self.calls_of_steps:
            for name in calls:
                if left and left[-1][0] == name:  # else no branch came to it
                    now += left.pop()[1]
            stamps.append(now)
        target = (ctypes.c_int64 * len(stamps)).from_address(clock)
        target[:] = [n * 1_000_000 // self.clock_khz for n in stamps]

    def prepare(self) -> None:
        """Threads of the host are the library's."""

    def failed(self) -> bool:
        return False
