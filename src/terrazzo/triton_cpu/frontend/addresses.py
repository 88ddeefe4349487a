"""What address and mask arithmetic does along one loop variable.

Addresses of a kernel are integer expressions of any kind. Here they are turned, as far as they go,
into index expressions, in which strides are coefficients: that is what tells vector loads, rows
and broadcasts from gathers. Parts that do not change along the innermost loop get a name before
it, however they are computed (a row number that was loaded, a remainder).

Sums and products of 32-bit integers are taken not to overflow where they make an address or are
compared to make a mask; everywhere else they wrap around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from terrazzo.base.scalar import OPS, Call, Const, FromIndex, Load, Scalar, children, rewrite, walk
from terrazzo.dtypes import bool_, float32, int64
from terrazzo.index import Index, Var, bounds, coefficient, free_vars, substitute

_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
# a < b is a - b + 0 < 0, and so on: what is negative exactly where the comparison holds.
_NEGATIVE = {"lt": (1, 0), "le": (1, -1), "gt": (-1, 0), "ge": (-1, -1)}


def depends(value: Scalar, variables: Iterable[Var]) -> bool:
    """Whether an expression changes with one of some loop variables."""
    wanted = set(variables)
    for node in walk(value):
        index: Index | Scalar = 0
        if isinstance(node, FromIndex):
            index = node.index
        elif isinstance(node, Load):
            index = node.indices[0]
        if not isinstance(index, Scalar) and not wanted.isdisjoint(free_vars(index)):
            return True
    return False


@dataclass
class Names:
    """Names for values that do not change in some loops, to be bound before them."""

    inner: tuple[Var, ...]
    fresh: Callable[[str], Var]
    bound: list[tuple[Var, Scalar]] = field(default_factory=list)
    known: dict[int, Var] = field(default_factory=dict)

    def name(self, value: Scalar) -> Var | None:
        """A variable for an integer, if it stays the same in the loop."""
        if id(value) in self.known:
            return self.known[id(value)]
        if not value.dtype.is_integer or depends(value, self.inner):
            return None
        var = self.known[id(value)] = self.fresh("at")
        self.bound.append((var, value))
        return var


class Reader:
    """Reads integer expressions as index expressions; one for each loop nest."""

    def __init__(self, names: Names | None):
        self.names = names
        self.memo: dict[int, tuple[Scalar, Index | None]] = {}  # nodes kept, so ids stay theirs

    def index(self, value: Scalar) -> Index | None:
        """The expression as an index, or None where it has no such form."""
        if id(value) not in self.memo:
            self.memo[id(value)] = value, self._read(value)
        return self.memo[id(value)][1]

    def _read(self, value: Scalar) -> Index | None:
        if isinstance(value, Const) and value.dtype.is_integer:
            return int(value.value)
        if isinstance(value, FromIndex):
            return value.index
        found: Index | None = None
        if isinstance(value, Call):
            if value.op == "cast" and self._keeps_value(value):
                found = self.index(value.args[0])
            elif value.op in ("add", "sub", "mul") and value.dtype.is_integer and (
                    value.dtype.bits >= 32):
                found = self._combine(value)
        if found is None and self.names is not None:
            return self.names.name(value)
        return found

    def _combine(self, value: Call) -> Index | None:
        a, b = (self.index(arg) for arg in value.args)
        if a is None or b is None:
            return None
        result = a + b if value.op == "add" else a - b if value.op == "sub" else a * b
        if value.dtype.bits == 32:
            low, high = bounds(result)
            if (low is not None and low < -(1 << 31)) or (high is not None and high >= 1 << 32):
                return None
        return result

    @staticmethod
    def _keeps_value(value: Call) -> bool:
        source, target = value.args[0].dtype, value.dtype
        if not (source.is_integer and target.is_integer) or target.bits < 32:
            return False
        return source.is_signed == target.is_signed or source.bits < target.bits

    # ------------------------------------------------------------ whole expressions
    def settle(self, root: Scalar) -> Scalar:
        """The expression with addresses and comparisons of integers as index expressions."""

        def visit(node: Scalar) -> Scalar | None:
            if isinstance(node, Load) and isinstance(node.indices[0], Scalar):
                index = self.index(node.indices[0])
                return None if index is None else Load(node.dtype, node.source, (index,))
            if isinstance(node, Call) and node.op in _COMPARISONS:
                if node.args[0].dtype.is_integer and node.args[0].dtype.is_signed:
                    sides = [self.index(a) for a in node.args]
                    if sides[0] is not None and sides[1] is not None:
                        return Call(bool_, node.op, tuple(FromIndex(int64, s) for s in sides
                                                          if s is not None))
            return None

        return rewrite(root, visit)


def conjuncts(condition: Scalar) -> list[Scalar]:
    """The parts of a condition that must all hold."""
    if isinstance(condition, Call) and condition.op == "and":
        return [part for arg in condition.args for part in conjuncts(arg)]
    if isinstance(condition, Const) and condition.value:
        return []
    return [condition]


def distance(test: Scalar) -> Index | None:
    """What is negative exactly where a settled comparison of two indices holds."""
    if not isinstance(test, Call) or test.op not in _NEGATIVE:
        return None
    a, b = test.args
    if not (isinstance(a, FromIndex) and isinstance(b, FromIndex)):
        return None
    sign, shift = _NEGATIVE[test.op]
    return sign * (a.index - b.index) + shift


def _key(test: Scalar) -> object:
    if isinstance(test, Call) and all(isinstance(a, FromIndex) for a in test.args):
        return (test.op, *(a.index for a in test.args if isinstance(a, FromIndex)))
    return id(test)


def assuming(value: Scalar, facts: Iterable[Scalar]) -> Scalar:
    """A settled expression where some conditions are known to hold."""
    keys = {_key(f) for f in facts}
    if not keys:
        return value

    def visit(node: Scalar) -> Scalar | None:
        if not isinstance(node, Call):
            return None
        if node.dtype is bool_ and _key(node) in keys:
            return Const(bool_, True)
        if node.op == "where" and isinstance(node.args[0], Const):
            return node.args[1] if node.args[0].value else node.args[2]
        if node.op == "and" and node.dtype is bool_:
            for i in (0, 1):
                arg = node.args[i]
                if isinstance(arg, Const) and arg.value:
                    return node.args[1 - i]
        return None

    return rewrite(value, visit)


def remainders(root: Scalar, variables: Sequence[Var]) -> list[Call]:
    """Remainders of what counts along some loops, as in `(start + i) % size`, in addresses.

    They change nothing as long as the whole range lies below the divisor.
    """
    found: dict[int, Call] = {}
    for node in walk(root):
        if isinstance(node, Load) and isinstance(node.indices[0], Scalar):
            for part in walk(node.indices[0]):
                if isinstance(part, Call) and part.op == "fmod" and part.dtype.is_integer and (
                        depends(part.args[0], variables)
                        and not depends(part.args[1], variables)):
                    found[id(part)] = part
    return list(found.values())


def guards(root: Scalar) -> list[Scalar]:
    """The conditions of an expression that decide about loads."""
    loading: set[int] = set()  # what has a load in it
    found: list[Scalar] = []
    for node in walk(root):
        if isinstance(node, Load) or any(id(c) in loading for c in children(node)):
            loading.add(id(node))
        if isinstance(node, Call) and node.op == "where" and any(
                id(branch) in loading for branch in node.args[1:]):
            found.append(node.args[0])
    return found


def extremes(index: Index, ranges: Mapping[Var, int]) -> tuple[Index, Index] | None:
    """The least and greatest value of an index while some variables count up from zero."""
    low = high = index
    for var, count in ranges.items():
        step = coefficient(index, var)
        if not isinstance(step, int):
            return None
        ends = (0, count - 1) if step >= 0 else (count - 1, 0)
        low, high = substitute(low, {var: ends[0]}), substitute(high, {var: ends[1]})
    return low, high


def below(a: Index, b: Index) -> Scalar:
    """The comparison `a < b`."""
    return Call(bool_, "lt", (FromIndex(int64, a), FromIndex(int64, b)))


def replaced(root: Scalar, table: dict[int, Scalar]) -> Scalar:
    """An expression with some nodes exchanged, found by identity before anything is rebuilt."""
    done: dict[int, Scalar] = {}
    for node in walk(root):
        fresh: Scalar = table.get(id(node), node)
        if fresh is not node:
            fresh = done.get(id(fresh), fresh)
        elif isinstance(node, Call):
            fresh = Call(node.dtype, node.op, tuple(done[id(a)] for a in node.args)) if any(
                done[id(a)] is not a for a in node.args) else node
        elif isinstance(node, Load) and children(node):
            index = node.indices[0]
            assert isinstance(index, Scalar)
            if done[id(index)] is not index:
                fresh = Load(node.dtype, node.source, (done[id(index)],))
        done[id(node)] = fresh
    return done[id(root)]


def reciprocals(root: Scalar, var: Var) -> Scalar:
    """An expression with products for divisions by what does not change with a variable.

    Triton's division of float32 may be off by two units in the last place, and a vector of them
    takes as long as thirty products.
    """

    def visit(node: Scalar) -> Scalar | None:
        if isinstance(node, Call) and node.op == "div" and node.dtype is float32 and (
                not depends(node.args[1], (var,)) and depends(node.args[0], (var,))):
            inverse = Call(float32, "div", (Const(float32, 1.0), node.args[1]))
            return Call(float32, "mul", (node.args[0], inverse))
        return None

    return rewrite(root, visit)


def known_number(root: Scalar) -> Any:
    """The value of an expression of nothing but numbers; None for others."""
    known: dict[int, Any] = {}
    for node in walk(root):
        if isinstance(node, Const):
            known[id(node)] = node.dtype.np.type(node.value)
        elif isinstance(node, Call) and node.op not in ("cast", "bitcast"):
            with np.errstate(all="ignore"):
                known[id(node)] = OPS[node.op].numpy(*(known[id(a)] for a in node.args))
        else:
            return None
    return known[id(root)]
