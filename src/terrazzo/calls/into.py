"""Calls whose results go into given arrays: `step(p, g, m, out=(p, m))`.

Arrays of `out=` are in the nest of the results. Which of them lie where arguments lie is found at
each call; code for it is compiled once, which writes over its inputs where that is proven right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from terrazzo.base.nests import flatten, mapped, pack
from terrazzo.errors import ArgumentError
from terrazzo.graph.ir import Value
from terrazzo.knobs import knobs
from terrazzo.runtime import fastcall
from terrazzo.runtime.targets import Repeated, Way, addresses_of, claim, require_array

if TYPE_CHECKING:
    from terrazzo.runtime.artifact import Over


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


Find = Callable[[Sequence[Any], Aim], tuple[Any, Any]]


@dataclass(frozen=True)
class _Placed:
    """A way to run for arrays of which some lie where inputs do."""

    way: Way
    structure: Any  # of the results
    order: list[int | None]  # of each result: the position of its array

    @cached_property
    def flat(self) -> bool:
        """Whether the results are one tuple, in the order of what was given for them."""
        plain = tuple(range(len(self.order)))
        return type(self.structure) is tuple and self.structure == plain == tuple(self.order)

    def sorted(self, given: Sequence[Any], missing: Any) -> list[Any]:
        """What was given for the results, in their order."""
        return [missing if i is None else given[i] for i in self.order]


def entry(find: Find, form: Form, count: int, name: str) -> Callable[[Sequence[Any]], Any]:
    """A function of `count` arrays for results and then the inputs, to the results in their nest.

    `find` gives the executable for inputs and an aim, and the structure of its results.
    """
    known: dict[tuple[int | None, ...], _Placed] = {}
    repeated: dict[tuple[int, ...], tuple[Repeated, _Placed]] = {}  # by addresses: steps come again

    def placed(targets: Sequence[Any], inputs: Sequence[Any], at: tuple[int | None, ...]
               ) -> _Placed:
        executable, structure = find(inputs, Aim(form, at))
        where = form.targets_of(structure, name)
        order = [where.get(i) for i in range(max(_numbers(structure), default=-1) + 1)]
        ordered = [None if i is None else targets[i] for i in order]
        return _Placed(Way(executable, inputs, ordered), structure, order)

    def first(given: Sequence[Any], addresses: tuple[int, ...]) -> Any:
        targets, inputs = given[:count], given[count:]
        pointers, places = addresses[:count], addresses[count:]
        at = _found_at(pointers, places)
        if at not in known:
            known[at] = placed(targets, inputs, at)
        found = known[at]
        results = found.way(inputs, found.sorted(targets, None), places, found.sorted(pointers, 0))
        again = found.way.repeated(places, found.sorted(pointers, 0))
        if again is not None:
            if len(repeated) >= fastcall.MOST_ENTRIES:
                repeated.clear()
            repeated[addresses] = again, found
        return pack(found.structure, results)

    def run(given: Sequence[Any]) -> Any:
        addresses = tuple(addresses_of(given))
        again = repeated.get(addresses)
        if again is None or again[0].threads != knobs.threads or knobs.profile:
            return first(given, addresses)
        call, found = again
        targets = given[:count]
        claim(targets, name)
        call.native(*call.arguments)
        return tuple(targets) if found.flat else pack(found.structure,
                                                      found.sorted(targets, None))

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
