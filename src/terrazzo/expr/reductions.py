"""What a body reduces: which reductions are loops of its stage, and in which order they run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from terrazzo.base.scalar import (
    Axis,
    FromIndex,
    Load,
    Reduce,
    Scalar,
    children,
    rewrite,
    substitute_indices,
    walk,
)
from terrazzo.index import Var, free_vars


def fresh_name(name: str, taken: Iterable[str]) -> str:
    """The name itself, or with the first number that makes it new."""
    used, result, number = set(taken), name, 0
    while result in used:
        number += 1
        result = f"{name}{number}"
    return result


def name_reductions(body: Scalar, data: list[str]) -> Scalar:
    """Give every distinct reduction axis of a body a variable and a name of its own."""
    given: dict[Axis, Var] = {}

    def visit(node: Scalar) -> Scalar | None:
        if not isinstance(node, Reduce):
            return None
        renamed: dict[Var, Var] = {}
        for axis in node.axes:
            if axis not in given:
                taken = [*data, *(v.name for v in given.values())]
                name = fresh_name(axis.var.name, taken)
                given[axis] = Var(name, axis.var.lo, axis.var.hi)
            if given[axis] is not axis.var:
                renamed[axis.var] = given[axis]
        if not renamed:
            return None
        return rename_axes(node, renamed)

    return rewrite(body, visit)


def rename_axes(node: Reduce, renamed: Mapping[Var, Var]) -> Reduce:
    """A reduction over other variables."""
    fresh = substitute_indices(node, renamed)
    assert isinstance(fresh, Reduce)
    axes = tuple(Axis(renamed.get(a.var, a.var), a.lo, a.hi) for a in fresh.axes)
    return replace(fresh, axes=axes)


def free_index_vars(root: Scalar) -> dict[int, frozenset[Var]]:
    """For each node (by id) the index variables that it does not bind itself."""
    found: dict[int, frozenset[Var]] = {}
    for node in walk(root):
        names: set[Var] = set()
        for child in children(node):
            names |= found[id(child)]
        if isinstance(node, Load):
            for index in node.indices:
                if not isinstance(index, Scalar):
                    names |= free_vars(index)
        elif isinstance(node, FromIndex):
            names |= free_vars(node.index)
        elif isinstance(node, Reduce):
            for axis in node.axes:
                names |= free_vars(axis.lo) | free_vars(axis.hi)
            names -= {a.var for a in node.axes}
        found[id(node)] = frozenset(names)
    return found


def top_reductions(body: Scalar) -> list[Reduce]:
    """The reductions that depend on no other's axes; the rest are computed inside of others."""
    everyone = [n for n in walk(body) if isinstance(n, Reduce)]
    if not everyone:
        return []
    bound = {a.var for r in everyone for a in r.axes}
    free = free_index_vars(body)
    return [r for r in everyone if free[id(r)].isdisjoint(bound)]


def scheduled_reductions(body: Scalar) -> list[Axis]:
    """The reduction axes that are loops of a stage."""
    return list(dict.fromkeys(a for r in top_reductions(body) for a in r.axes))


def next_group(body: Scalar) -> list[Reduce]:
    """Reductions that wait for no other one and run over the same axes."""
    everyone = top_reductions(body)
    known = {id(r) for r in everyone}
    ready = [r for r in everyone if not any(id(n) in known for n in walk(r.value))]
    return [r for r in ready if r.axes == ready[0].axes]


def outermost_reductions(value: Scalar) -> list[Reduce]:
    """The reductions of an expression that are inside of no other."""
    found: list[Reduce] = []
    seen: set[int] = set()
    stack = [value]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Reduce):
            found.append(node)
        else:
            stack.extend(children(node))
    return found


def storing_order(formulas: Sequence[Scalar], places: Sequence[object]) -> tuple[
        list[int], list[int]]:
    """The order in which new values may take the place of old ones that others still read.

    Answers with the numbers of those that can be stored one after the other, and of those left
    over, which wait for each other: these must all be computed before any is stored.
    """
    reads = [{places.index(n.source) for n in walk(f) if isinstance(n, Load) and n.source in places}
             for f in formulas]
    left, order = list(range(len(formulas))), []
    while left:
        free = next((j for j in left if not any(j in reads[m] for m in left if m != j)), None)
        if free is None:
            break
        order.append(free)
        left.remove(free)
    return order, left
