"""Calls whose results go into given arrays: `step(p, g, m, out=(p, m))`.

Arrays of `out=` are in the nest of the results. Which of them lie where arguments lie is found at
each call; code for it is compiled once, which writes over its inputs where that is proven right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from terrazzo.errors import ArgumentError
from terrazzo.graph.ir import Value
from terrazzo.nests import flatten, mapped, pack
from terrazzo.runtime import fastcall
from terrazzo.runtime.artifact import Over
from terrazzo.runtime.targets import Way, addresses_of, require_array, way_into


@dataclass(frozen=True)
class Form:
    """The nest of arrays that were given for results: equal for equal nests."""

    text: str
    nest: Any = field(compare=False)  # positions in place of the arrays; None: make one

    @staticmethod
    def of(out: Any, name: str) -> tuple[Form, list[Any]]:
        """The form of what was given for `out`, and its arrays."""
        targets: list[Any] = []
        nest = flatten(out, targets)
        for target in targets:
            if isinstance(target, Value):
                raise ArgumentError(f"out= of {name} is a traced value, which never changes",
                                    hint="return the result, or use x.at[...].set(y)")
            require_array(target, name)
        return Form(repr(mapped(nest, lambda i: i)), nest), targets

    def targets_of(self, structure: Any, name: str) -> dict[int, int]:
        """For the numbers of results, the positions of the arrays that they go to."""
        found: dict[int, int] = {}
        if not _match(structure, self.nest, found):
            raise ArgumentError(f"the results of {name} are {_shown(structure)}, and out= is "
                                f"{_shown(self.nest)}", hint="pass arrays in the nest of the "
                                "results, None where one is to be made")
        return found


@dataclass(frozen=True)
class Aim:
    """Where results go: the form of what was given, and which of it lies where inputs do."""

    form: Form
    at: tuple[int | None, ...]  # of each array: the number of the input with its address

    def over(self, structure: Any, name: str) -> Over:
        """For each result the input that it is to be written over, if any."""
        targets = self.form.targets_of(structure, name)
        count = max(_numbers(structure), default=-1) + 1
        return tuple(self.at[targets[i]] if i in targets else None for i in range(count))


def aim(form: Form, targets: Sequence[Any], inputs: Sequence[Any]) -> Aim:
    """Which arrays lie where an input begins."""
    return Aim(form, _found_at(addresses_of(targets), addresses_of(inputs)))


def _found_at(targets: Sequence[int], inputs: Sequence[int]) -> tuple[int | None, ...]:
    return tuple([inputs.index(t) if t in inputs else None for t in targets])


_Known = tuple[Way, Any, list[int | None], bool]  # and whether results are one flat tuple
Find = Callable[[Sequence[Any], Aim], tuple[Any, Any]]


def entry(find: Find, form: Form, count: int, name: str) -> Callable[[Sequence[Any]], Any]:
    """A function of `count` arrays for results and then the inputs, to the results in their nest.

    `find` gives the executable for inputs and an aim, and the structure of its results.
    """
    ways: dict[tuple[int | None, ...], _Known] = {}

    def make(targets: Sequence[Any], inputs: Sequence[Any], at: tuple[int | None, ...]
             ) -> _Known:
        executable, structure = find(inputs, Aim(form, at))
        where = form.targets_of(structure, name)
        order = [where.get(i) for i in range(max(_numbers(structure), default=-1) + 1)]
        placed = [None if i is None else targets[i] for i in order]
        flat = type(structure) is tuple and structure == tuple(range(len(order)))
        return way_into(executable, inputs, placed), structure, order, flat

    def run(given: Sequence[Any]) -> Any:
        targets, inputs = given[:count], given[count:]
        pointers, places = addresses_of(targets), addresses_of(inputs)
        at = _found_at(pointers, places)
        known = ways.get(at)
        if known is None:
            known = ways[at] = make(targets, inputs, at)
        way, structure, order, flat = known
        results = way(inputs, [None if i is None else targets[i] for i in order], places,
                      [0 if i is None else pointers[i] for i in order])
        return tuple(results) if flat else pack(structure, results)

    return run


def refuse_gradients(arrays: Sequence[Any], name: str) -> None:
    """What is written over cannot be differentiated, as with `out=` of torch's functions."""
    if any(map(fastcall.wants_gradient, arrays)):
        raise ArgumentError(f"{name} got out= and a tensor that requires a gradient",
                            hint="call it inside torch.no_grad(), or without out=")


def _match(structure: Any, nest: Any, found: dict[int, int]) -> bool:
    if isinstance(structure, int):
        if isinstance(nest, int):
            found[structure] = nest
        return nest is None or isinstance(nest, int)
    if structure is None or nest is None:
        return nest is None
    if isinstance(structure, dict):
        return isinstance(nest, dict) and structure.keys() == nest.keys() and all(
            _match(v, nest[k], found) for k, v in structure.items())
    return isinstance(nest, (tuple, list)) and len(structure) == len(nest) and all(
        _match(a, b, found) for a, b in zip(structure, nest, strict=True))


def _numbers(structure: Any) -> list[int]:
    found: list[int] = []
    mapped(structure, found.append)
    return found


def _shown(nest: Any) -> str:
    if isinstance(nest, int):
        return "an array"
    return repr(mapped(nest, lambda _: _Array()))


class _Array:
    def __repr__(self) -> str:
        return "array"


__all__ = ["Aim", "Form", "aim", "entry", "refuse_gradients"]
