"""Plans: all kernels of an executable as one function of the runtime library.

Each kernel gets one more argument, the numbers that it adds its counts to; the library hands them
in (the letter c of the arguments) and makes them a time.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from terrazzo.chips.chip import Assembled
from terrazzo.chips.gcu.description import Description
from terrazzo.chips.gcu.device import Image, devices
from terrazzo.chips.gcu.launches import Member, members
from terrazzo.chips.gcu.library import COUNTERS, check
from terrazzo.loop.ir import Function
from terrazzo.loop.steps import Argument, Branch, Call, Recipe, Repeat, Step

PLAN = "plan"  # the name of the one function in the image of an executable
CALLS = "calls of steps"  # of the facts: the names of each step's kernels


# ---------------------------------------------------------------- writing
@dataclass(frozen=True)
class Counted:
    """A recipe whose kernels count, with one more slot for the counts."""

    recipe: Recipe
    launches: list[str]  # names, in the order in which they end
    of_steps: list[list[str]]  # those that end in each step of the recipe


def counted_recipe(recipe: Recipe, chip: Description) -> Counted:
    """The recipe with kernels that count; those of one launch count together."""
    writer = _Writer(recipe, chip)
    steps, of_steps = writer.steps(recipe.steps)
    return Counted(replace(recipe, steps=tuple(steps), slots=recipe.slots + 1), writer.launches,
                   of_steps)


class _Writer:
    """Counts launches, and remembers kernels that count."""

    def __init__(self, recipe: Recipe, chip: Description):
        self.recipe, self.chip = recipe, chip
        self.known: dict[tuple[Function, int, bool], Function] = {}
        self.launches: list[str] = []

    def steps(self, steps: Sequence[Step]) -> tuple[list[Step], list[list[str]]]:
        """Steps that count, and the launches that end in each."""
        made: list[Step] = []
        ended: list[list[str]] = []
        for is_call, run in groupby(steps, key=lambda step: isinstance(step, Call)):
            if is_call:
                more, names = self.calls([step for step in run if isinstance(step, Call)])
                made += more
                ended += names
                continue
            for step in run:
                before = len(self.launches)
                made.append(self.around(step))
                ended.append(self.launches[before:])
        return made, ended

    def around(self, step: Step) -> Step:
        """A branch or a loop."""
        if isinstance(step, Branch):
            return replace(step, then=self.inside(step.then), orelse=self.inside(step.orelse))
        assert isinstance(step, Repeat)
        return replace(step, test=self.inside(step.test), body=self.inside(step.body),
                       after=self.inside(step.after))

    def inside(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        return tuple(self.steps(steps)[0])

    def calls(self, calls: Sequence[Call]) -> tuple[list[Call], list[list[str]]]:
        """Calls in a row, of which several may be one launch."""
        row = self.chip.units * COUNTERS * 8  # bytes of one launch's counts
        before = len(self.launches)
        found = members(calls, self.chip.units, dict(self.recipe.over))
        heads = [call.name for call, member in zip(calls, found) if member.is_head]
        sizes = Counter(member.launch for member in found)
        self.launches += [name if sizes[i] == 1 else f"{name} and {sizes[i] - 1} more"
                          for i, name in enumerate(heads)]
        made, ended = [], []
        for call, member in zip(calls, found):
            launch = before + member.launch
            place = Argument("slot", self.recipe.slots, launch * row)
            made.append(Call(self.kernel(call.function, member), (*call.arguments, place),
                             call.name))
            ended.append([self.launches[launch]] if member.is_head else [])
        return made, ended

    def kernel(self, function: Function, member: Member) -> Function:
        """A kernel that counts as this member of a launch; equal ones are one."""
        from terrazzo.chips.gcu.counting import counted

        key = function, member.first, member.is_head
        if key not in self.known:
            name = f"{function.name}{'' if member.is_head else '_more'}_{member.first}"
            self.known[key] = replace(counted(function, self.chip, "task", member.first,
                                              member.is_head), name=name)
        return self.known[key]


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
