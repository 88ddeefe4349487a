"""The sizes that the calls of one function brought: which vary, and which were always equal."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

from terrazzo.index import Index, Var

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
Pattern: TypeAlias = tuple[tuple[Index, ...], ...]  # shapes with symbols for some sizes


class SizesSeen:
    """What calls with arguments of the same ranks and types have shown of their sizes."""

    def __init__(self) -> None:
        self.first: Shapes | None = None
        self.varying: set[tuple[int, int]] = set()
        self.classes: dict[tuple[int, int], int] = {}  # sizes equal in every call share a number

    def restart(self) -> None:
        """Begin with the next call: from now on there are more arguments."""
        self.first, self.classes = None, {}

    def note(self, shapes: Shapes, when: str) -> None:
        """Which sizes differ from call to call, and which were always equal to each other."""
        places = {(i, d): n for i, shape in enumerate(shapes) for d, n in enumerate(shape)}
        if self.first is None:
            self.first = shapes
        if when == "always":
            self.varying = set(places)
        self.varying |= {(i, d) for (i, d), n in places.items() if self.first[i][d] != n}
        numbers: dict[tuple[int, int], int] = {}
        self.classes = {place: numbers.setdefault((self.classes.get(place, 0), n), len(numbers))
                        for place, n in places.items()}

    def pattern(self, shapes: Shapes) -> tuple[Pattern, dict[Var, int]]:
        """Shapes with a variable for every size that varies, and what those are in this call."""
        pattern: list[tuple[Index, ...]] = []
        names: dict[Hashable, Var] = {}
        sizes: dict[Var, int] = {}
        for i, shape in enumerate(shapes):
            dims: list[Index] = []
            for d, n in enumerate(shape):
                if (i, d) not in self.varying or n < 2:  # 0 and 1 mean something of their own
                    dims.append(n)
                    continue
                var = names.setdefault(self.classes[i, d], Var(f"n{len(names)}", 2))
                sizes[var] = n
                dims.append(var)
            pattern.append(tuple(dims))
        return tuple(pattern), sizes
