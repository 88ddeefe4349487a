"""Whether the sizes of a call are among those that some code was compiled for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from terrazzo.base.shapes import Shape
from terrazzo.index import Index, IndexExpr, Var, compile_python
from terrazzo.index.guards import Guard

_RUNS_WITH = {"min": min, "max": max, "__builtins__": {}}


class Fit:
    """Shapes with symbolic sizes, and guards of those: `fits(values)` tells of arrays by name.

    Ranks, and unless told otherwise sizes that are numbers, are taken to be right already.
    """

    def __init__(self, shapes: Mapping[str, Shape], guards: Iterable[Guard] = (), *,
                 numbers: bool = False):
        self.shapes, self.guards = dict(shapes), tuple(guards)
        self._conditions: list[str] = []
        lines: list[str] = []
        self._places: dict[str, str] = {}  # of each size: the variable that holds it
        for i, (name, shape) in enumerate(self.shapes.items()):
            if shape and (numbers or any(isinstance(n, IndexExpr) for n in shape)):
                held = [f"s{i}_{d}" for d in range(len(shape))]
                lines.append(f"    {', '.join(held)}, = values[{name!r}].shape")
                for n, place in zip(shape, held, strict=True):
                    if isinstance(n, Var):
                        self._places.setdefault(n.name, place)
        for i, shape in enumerate(self.shapes.values()):
            for d, n in enumerate(shape):
                if numbers or isinstance(n, IndexExpr):
                    self._condition(f"s{i}_{d}", n)
        for guard in self.guards:
            self._conditions.append(
                f"{self._text(guard.left)} {guard.relation} {self._text(guard.right)}")
        body = " and ".join(self._conditions) or "True"
        self.fits: Callable[[Mapping[str, Any]], bool] = _function([*lines, f"    return {body}"])
        names = ", ".join(f"{n!r}: {place}" for n, place in self._places.items())
        self.sizes: Callable[[Mapping[str, Any]], dict[str, int]] = _function(
            [*lines, f"    return {{{names}}}"])

    def _condition(self, place: str, size: Index) -> None:
        text = self._text(size)
        if text != place:
            self._conditions.append(f"{place} == {text}")

    def _text(self, size: Index) -> str:
        if isinstance(size, Var):
            return self._places[size.name]
        return f"({compile_python(size, self._places)})"

    def misfit(self, values: Mapping[str, Any]) -> str:
        """The first condition that sizes do not keep, for people."""
        sizes = self.sizes(values)
        told = ", ".join(f"{n} = {size}" for n, size in sizes.items())
        for name, shape in self.shapes.items():
            for n, size in zip(shape, values[name].shape, strict=True):
                if Guard("==", n, size).holds(sizes) is False:
                    return f"input {name!r} has shape {tuple(values[name].shape)}, not " \
                           f"({', '.join(map(str, shape))}) with {told}"
        broken = next((g for g in self.guards if not g.holds(sizes)), None)
        return f"{broken} does not hold with {told}"


def _function(lines: Iterable[str]) -> Callable[[Mapping[str, Any]], Any]:
    scope: dict[str, Any] = dict(_RUNS_WITH)
    exec("\n".join(["def function(values):", *lines]), scope)
    function: Callable[[Mapping[str, Any]], Any] = scope["function"]
    return function
