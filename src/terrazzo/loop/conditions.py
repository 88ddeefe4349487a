"""The pass that takes conditions on indices out of vector loops.

`where(j < 512, x[j], y[j - 512])` in a vector loop over j means two masked loads a vector. Cut at
512, it is two loops of plain copies; a condition that does not depend on j becomes a branch around
the loop. Concatenation, padding and triangles are made of such conditions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from terrazzo.base.scalar import Call, Const, FromIndex, Load, Scalar, children, walk
from terrazzo.base.scalar import rewrite as rewrite_scalar
from terrazzo.dtypes import bool_
from terrazzo.index import (
    Index,
    Var,
    bounds,
    coefficient,
    free_vars,
    maximum,
    minimum,
    proves_le,
    proves_lt,
)
from terrazzo.loop.ir import Block, For, If, Stmt, Store, rewrite, substitute_vars
from terrazzo.loop.ir import block as in_order

MOST_PIECES = 16  # copies of a loop: code grows with each
# a < b is a - b + 0 < 0, and so on: what is to be negative for the comparison to hold.
_NEGATIVE = {"lt": (1, 0), "le": (1, -1), "gt": (-1, 0), "ge": (-1, -1)}


def cut_at_conditions(stmt: Stmt) -> Stmt:
    """Vector loops are cut where a condition on indices changes, or branched around."""

    def visit(node: Stmt) -> Stmt | None:
        if isinstance(node, For) and node.kind == "vector" and _plain_stores(node.body):
            return _cut(node, MOST_PIECES)
        return None

    return rewrite(stmt, visit)


def cut_loop(loop: For, pieces: int) -> Stmt:
    """One vector loop of stores, cut into at most so many pieces; sums may be cut as well."""
    return _cut(loop, pieces)


def _plain_stores(body: Stmt) -> bool:
    stmts = body.stmts if isinstance(body, Block) else (body,)
    return all(isinstance(s, Store) and s.reduce is None for s in stmts)


def _cut(loop: For, pieces: int) -> Stmt:
    """One condition at a time; each half may hold more."""
    if pieces < 2:
        return loop
    loop = _without_known(loop)
    test = _best_condition(loop)
    if test is None:
        return loop
    yes, no = (_decided(loop, {_test_key(test): answer}) for answer in (True, False))
    at = _cut_place(loop, test)
    if at is None:
        return If(test, _cut(yes, pieces // 2), _cut(no, pieces // 2))
    first, second = (yes, no) if at.holds_below else (no, yes)
    return in_order(_cut(_between(first, loop.lo, at.place), pieces // 2),
                    _cut(_between(second, at.place, loop.hi), pieces // 2))


class _Cut(NamedTuple):
    """Where along a loop a comparison changes, and whether it holds before that."""

    place: Index
    holds_below: bool


def _cut_place(loop: For, test: Scalar) -> _Cut | None:
    """Where to cut a loop for a comparison that depends on its variable; else nothing."""
    distance = _distance(test)
    assert distance is not None
    step = coefficient(distance, loop.var)
    if step not in (1, -1):
        return None
    rest = distance - step * loop.var
    at = -rest if step == 1 else rest + 1
    return _Cut(minimum(maximum(at, loop.lo), loop.hi), step == 1)


def _best_condition(loop: For) -> Scalar | None:
    """The condition to begin with.

    One that is the same for the whole loop comes first. Of cuts at known places it is the one in
    the middle: then each half holds half of the others, and the joints of dozens of tensors cost
    a few comparisons an element at most, though a loop is cut into few pieces only.
    """
    cuts: dict[object, tuple[_Cut, Scalar]] = {}
    for test in _conditions(loop.body):
        distance = _distance(test)
        assert distance is not None
        if loop.var not in free_vars(distance):
            return test
        cut = _cut_place(loop, test)
        if cut is not None:
            cuts.setdefault(cut.place, (cut, test))
    known = sorted(((cut.place, test) for cut, test in cuts.values()
                    if isinstance(cut.place, int)), key=lambda found: found[0])
    if len(known) == len(cuts) and known:
        return known[len(known) // 2][1]
    return next((test for _, test in cuts.values()), None)


def _without_known(loop: For) -> For:
    """The loop without the conditions that always hold, or never do."""
    known: dict[object, bool] = {}
    for test in _conditions(loop.body):
        distance = _distance(test)
        assert distance is not None
        if proves_lt(distance, 0):
            known[_test_key(test)] = True
        elif proves_le(0, distance):
            known[_test_key(test)] = False
    return _decided(loop, known) if known else loop


def _conditions(body: Stmt) -> Iterator[Scalar]:
    """Comparisons of indices that decide about a load."""
    for stmt in (body.stmts if isinstance(body, Block) else (body,)):
        assert isinstance(stmt, Store)
        loading: set[int] = set()
        for node in walk(stmt.value):
            if isinstance(node, Load) or any(id(c) in loading for c in children(node)):
                loading.add(id(node))
            if isinstance(node, Call) and node.op == "where" and any(
                    id(branch) in loading for branch in node.args[1:]):
                for part in _parts(node.args[0]):
                    if _distance(part) is not None:
                        yield part


def _parts(condition: Scalar) -> Iterator[Scalar]:
    todo = [condition]
    while todo:
        part = todo.pop()
        if isinstance(part, Call) and part.op in ("and", "or", "not"):
            todo += reversed(part.args)
        else:
            yield part


def _distance(test: Scalar) -> Index | None:
    """What is negative exactly where a comparison of two indices holds."""
    if not isinstance(test, Call) or test.op not in _NEGATIVE:
        return None
    sides = [_index(arg) for arg in test.args]
    if sides[0] is None or sides[1] is None:
        return None
    sign, shift = _NEGATIVE[test.op]
    return sign * (sides[0] - sides[1]) + shift


def _index(value: Scalar) -> Index | None:
    if isinstance(value, FromIndex):
        return value.index
    if isinstance(value, Const) and value.dtype.is_integer:
        return int(value.value)
    return None


def _decided(loop: For, known: Mapping[object, bool]) -> For:
    """The loop where the outcomes of some comparisons are known."""

    def visit(node: Scalar) -> Scalar | None:
        if isinstance(node, Call):
            if node.op in _NEGATIVE and (key := _test_key(node)) in known:
                return Const(bool_, known[key])
            return _folded(node)
        return None

    stmts = loop.body.stmts if isinstance(loop.body, Block) else (loop.body,)
    fresh = [replace(s, value=rewrite_scalar(s.value, visit)) for s in stmts
             if isinstance(s, Store)]
    return replace(loop, body=in_order(*fresh))


def _test_key(test: Scalar) -> object:
    """Equal for comparisons of the same indices."""
    assert isinstance(test, Call)
    return test.op, *map(_key, test.args)


def _key(value: Scalar) -> object:
    index = _index(value)
    return value if index is None else index


def _folded(node: Call) -> Scalar | None:
    """An operation on truth values of which one is known."""
    known = [arg.value if isinstance(arg, Const) and arg.dtype is bool_ else None
             for arg in node.args]
    if node.op == "where" and known[0] is not None:
        return node.args[1] if known[0] else node.args[2]
    if node.op == "not" and known[0] is not None:
        return Const(bool_, not known[0])
    if node.op in ("and", "or") and node.dtype is bool_:
        for value, other in ((known[0], node.args[1]), (known[1], node.args[0])):
            if value is not None:
                return other if bool(value) == (node.op == "and") else Const(bool_, bool(value))
    return None


def _between(loop: For, lo: Index, hi: Index) -> For:
    """The loop over a part of its range; its variable learns the new bounds, or is a number."""
    if proves_le(hi, lo):
        return replace(loop, lo=lo, hi=lo)
    low, top = bounds(lo)[0], bounds(hi - 1)[1]
    var = Var(loop.var.name, loop.var.lo if low is None else low,
              top if low is None or top is None else max(low, top))
    known: Index = var if var.lo is None or var.lo != var.hi else var.lo
    return replace(loop, var=var, lo=lo, hi=hi,
                   body=substitute_vars(loop.body, {loop.var: known}))
