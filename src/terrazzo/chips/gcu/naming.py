"""Names for what several counts have in common, so that it is computed once.

Counts of one place share most of what they are made of: whether something fits, how often a loop
runs. Written out, they grow with every loop around them; with names they stay as long as the number
of different parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from terrazzo.chips.gcu.tally import Tally
from terrazzo.index import Index, IndexExpr, Max, Min, Var, bounds
from terrazzo.index.nodes import FloorDiv, Mod, Sum, intern, monomial_order, sort_key

_LONG = 3  # terms of a sum that is worth a name
Named = tuple[Var, Index]


def named(tally: Tally, prefix: str) -> tuple[list[Named], Tally]:
    """Names with what they stand for, each after those that it mentions; and the tally by them."""
    roots = [index for guards, row in tally.terms.items() for index in (*guards, *row)]
    names = _Names(_uses(roots), prefix)
    made = Tally({tuple(map(names.of, guards)): list(map(names.of, row))
                  for guards, row in tally.terms.items()})
    return names.given, made


def _parts(index: IndexExpr) -> Iterator[Index]:
    if isinstance(index, Sum):
        for monomial, _ in index.terms:
            yield from monomial
    elif isinstance(index, (FloorDiv, Mod)):
        yield index.num
        yield index.den
    elif isinstance(index, (Min, Max)):
        yield from index.args


def _uses(roots: Iterable[Index]) -> dict[IndexExpr, int]:
    """How often each part is mentioned, by the counts or by another part."""
    found: dict[IndexExpr, int] = {}
    todo = [root for root in roots if isinstance(root, IndexExpr)]
    while todo:
        index = todo.pop()
        found[index] = found.get(index, 0) + 1
        if found[index] == 1:
            todo += [part for part in _parts(index) if isinstance(part, IndexExpr)]
    return found


class _Names:
    """Expressions rewritten from within; what is used again gets a name on the way."""

    def __init__(self, uses: dict[IndexExpr, int], prefix: str):
        self.uses, self.prefix = uses, prefix
        self.known: dict[IndexExpr, Index] = {}
        self.given: list[Named] = []

    def of(self, root: Index) -> Index:
        """The expression by names."""
        if not isinstance(root, IndexExpr):
            return root
        todo = [root]
        while todo:
            index = todo[-1]
            missing = [part for part in _parts(index)
                       if isinstance(part, IndexExpr) and part not in self.known]
            if missing:
                todo += missing
                continue
            todo.pop()
            if index not in self.known:
                self.known[index] = self._name(index, self._again(index))
        return self.known[root]

    def _again(self, index: IndexExpr) -> Index:
        """The expression over the names of its parts: as it is, for it is as short as it gets."""
        def known(part: Index) -> Any:
            return self.known[part] if isinstance(part, IndexExpr) else part

        if isinstance(index, Sum):
            terms = [(tuple(sorted(map(known, monomial), key=sort_key)), factor)
                     for monomial, factor in index.terms]
            return intern(Sum, tuple(sorted(terms, key=lambda t: monomial_order(t[0]))),
                          index.constant)
        if isinstance(index, (FloorDiv, Mod)):
            return intern(type(index), known(index.num), known(index.den))
        if isinstance(index, (Min, Max)):
            return intern(type(index), tuple(sorted(map(known, index.args), key=sort_key)))
        return index

    def _name(self, index: IndexExpr, again: Index) -> Index:
        is_long = not isinstance(index, (Var, Sum)) or (
            isinstance(index, Sum) and len(index.terms) >= _LONG)
        if self.uses[index] < 2 or not is_long or not isinstance(again, IndexExpr):
            return again
        var = Var(f"{self.prefix}{len(self.given)}", *bounds(index))
        self.given.append((var, again))
        return var
