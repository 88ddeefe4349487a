"""One piece of code for all sizes that answer alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from terrazzo.errors import TerrazzoError
from terrazzo.index import Index, Var, substitute
from terrazzo.index.guards import CallQuestions, Guard, Questions, asking
from terrazzo.torch.symbols import SMALLEST, Names

T = TypeVar("T")
C = TypeVar("C")


def for_all_sizes(numbers: Mapping[str, int], trace: Callable[[Names], T],
                  compiled: Callable[[T, Names], C], one: bool = False
                  ) -> tuple[T, C, tuple[Guard, ...]] | None:
    """A graph for sizes with names, its code, and what has to hold of sizes; None: it cannot be.

    Questions that come up are answered as for these numbers. Sizes that turn out to have to be
    equal become one, and it is traced again. Sizes may be 1 if `one` says so: torch takes those
    that vary to be 2 or more, and asks nothing then that 1 would answer otherwise.
    """
    variables = {s: Var(s, 1 if one else SMALLEST) for s in numbers}
    names: dict[str, Index] = dict(variables)
    values = {variables[s]: n for s, n in numbers.items()}
    fixed: dict[Guard, None] = {}
    while True:
        asked = Questions(values) if one else CallQuestions(values)
        with asking(asked):
            try:
                graph = trace(names)
                equal = asked.equalities()
                if not equal:
                    code = compiled(graph, names)
                    equal = asked.equalities()
            except TerrazzoError:
                return None
        if not equal:
            return graph, code, (*fixed, *asked.guards)
        fixed.update((g, None) for g in asked.guards if g.relation == "==")
        names = {s: substitute(n, equal) for s, n in names.items()}
        if not any(isinstance(n, Var) for n in names.values()):
            return None
