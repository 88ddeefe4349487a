"""What an executable does, for any chip: calls of kernels, with loops and branches around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from terrazzo.index import Index, Var
from terrazzo.loop.ir import Function


class Argument(NamedTuple):
    """Where a kernel's argument comes from: a slot of the caller, a constant, or the arena."""

    kind: str  # slot | constant | arena
    number: int = 0
    offset: Index = 0  # in bytes

    def at(self, offset: Index) -> Argument:
        """The place so many bytes further on."""
        return self._replace(offset=self.offset + offset)


@dataclass(frozen=True, eq=False)
class Call:
    """One run of a kernel with its arguments; several calls may share a kernel."""

    function: Function
    arguments: tuple[Argument, ...]
    name: str  # of this call, for the profiler


class Flag(NamedTuple):
    """A truth value in memory: an integer of so many bytes that is not 0."""

    place: Argument
    bytes: int


@dataclass(frozen=True, eq=False)
class Branch:
    """Runs one of two lists of steps, by a flag."""

    flag: Flag
    then: tuple[Step, ...]
    orelse: tuple[Step, ...]
    name: str


@dataclass(frozen=True, eq=False)
class Repeat:
    """Runs steps `count` times, or for as long as a flag holds that other steps set before.

    Arguments inside may mention `counter`, the number of turns so far, and so may those of `after`,
    which run once at the end.
    """

    counter: Var
    body: tuple[Step, ...]
    name: str
    count: Index = 0
    test: tuple[Step, ...] = ()
    flag: Flag | None = None  # None: `count` decides
    after: tuple[Step, ...] = ()


Step: TypeAlias = Call | Branch | Repeat


def calls_in(steps: Sequence[Step]) -> Iterator[Call]:
    """The calls of some steps, those inside branches and loops included."""
    for step in steps:
        if isinstance(step, Call):
            yield step
        elif isinstance(step, Branch):
            yield from calls_in((*step.then, *step.orelse))
        else:
            yield from calls_in((*step.test, *step.body, *step.after))


@dataclass(frozen=True, eq=False)
class Recipe:
    """All that a chip needs to know in order to make code of a graph.

    A caller passes addresses of inputs and outputs (slots), the sizes (dims), and an arena; the
    constants are in memory before.
    """

    name: str
    steps: tuple[Step, ...]
    slots: int
    constants: int = 0
    dims: tuple[Var, ...] = ()
    over: tuple[tuple[int, int], ...] = ()  # slots of outputs, and those of inputs in their place

    @property
    def functions(self) -> tuple[Function, ...]:
        """The kernels, each once."""
        return tuple(dict.fromkeys(c.function for c in calls_in(self.steps)))
