"""Sizes as the code of a user sees them while they are symbolic: they behave like Python's numbers.

A `Size` stands for an int. Whole-number arithmetic stays symbolic, comparisons are questions that
become guards (`index/guards.py`), and true division makes a `Real`: a float that is a value of
the graph, so that one compilation serves all sizes. Whatever needs the number itself (`range`,
`int`, hashing, printing, a numpy function) fixes the size: what is compiled then serves that size.

Both say that they are an int or a float (`__class__`), as code that asks for the type of a size
should do the same for known and for symbolic ones. Operators are given plain index expressions.
"""

from __future__ import annotations

import math
import operator as python
from collections.abc import Callable
from typing import Any

import numpy as np

from terrazzo.base.nests import mapped
from terrazzo.dtypes import DType, default_int, float64, result_type
from terrazzo.graph.applying import apply, constant
from terrazzo.graph.ir import Value, operator_named
from terrazzo.index import Index, IndexExpr
from terrazzo.index.guards import CallQuestions, call_questions


class _Stand:
    """What symbolic numbers of both kinds do: whatever is not arithmetic, on the fixed number."""

    __slots__ = ("asked",)
    __array_priority__ = 900  # below that of traced values, above that of arrays
    asked: CallQuestions
    kind: type

    def fixed(self) -> Any:
        """The number of this call, which becomes the only one that the compiled code serves."""
        raise NotImplementedError

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __int__(self) -> int:
        return int(self.fixed())

    def __float__(self) -> float:
        return float(self.fixed())

    def __complex__(self) -> complex:
        return complex(self.fixed())

    def __hash__(self) -> int:
        return hash(self.fixed())

    def __str__(self) -> str:
        return str(self.fixed())

    def __repr__(self) -> str:
        return repr(self.fixed())

    def __format__(self, spec: str) -> str:
        return format(self.fixed(), spec)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(self.fixed()).__array__(*args, **kwargs)

    def __reduce__(self) -> Any:
        return self.kind, (self.fixed(),)

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self.kind, name):
            raise AttributeError(f"{self.kind.__name__!r} object has no attribute {name!r}")
        return getattr(self.fixed(), name)

    def __pos__(self) -> Any:
        return self


class Size(_Stand):
    """A symbolic size: an int to the code of a user."""

    __slots__ = ("expr",)
    expr: IndexExpr
    kind = int

    def __init__(self, expr: IndexExpr, asked: CallQuestions):
        self.expr, self.asked = expr, asked

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int

    def fixed(self) -> int:
        return self.asked.fix(self.expr)

    def __index__(self) -> int:
        return self.fixed()

    def _compare(self, relation: str, other: Any, swap: bool = False) -> Any:
        if type(other) is not Size and not isinstance(other, (int, np.integer)):
            if isinstance(other, (float, np.floating)):
                return _PYTHON[relation](*((other, self.fixed()) if swap else
                                           (self.fixed(), other)))
            return NotImplemented
        left, right = self.expr, _plain_index(other)
        return self.asked.decide(relation, right, left) if swap else (
            self.asked.decide(relation, left, right))

    def __eq__(self, other: object) -> Any:
        return self._compare("==", other)

    def __ne__(self, other: object) -> Any:
        return self._compare("!=", other)

    def __lt__(self, other: Any) -> Any:
        return self._compare("<", other)

    def __le__(self, other: Any) -> Any:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> Any:
        return self._compare("<", other, swap=True)

    def __ge__(self, other: Any) -> Any:
        return self._compare("<=", other, swap=True)

    __hash__ = _Stand.__hash__

    def __neg__(self) -> Any:
        return seen(-self.expr)

    def __abs__(self) -> Any:
        return self if self >= 0 else -self

    def __round__(self, digits: int | None = None) -> Any:
        return self if digits is None or digits >= 0 else round(self.fixed(), digits)

    def __trunc__(self) -> Any:
        return self

    __floor__ = __ceil__ = __trunc__

    def __pow__(self, other: Any, modulus: Any = None) -> Any:
        if modulus is None and type(other) is int and 0 <= other <= 8:
            return seen(math.prod([self.expr] * other))
        if modulus is None and isinstance(other, (int, float)) and not _typed(other) and self > 0:
            return _real("power", python.pow, self, other)
        return pow(self.fixed(), other, modulus)

    def __rpow__(self, other: Any) -> Any:
        return pow(other, self.fixed())

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self


class Real(_Stand):
    """A float computed from symbolic sizes: a value of the graph that takes on any float type."""

    __slots__ = ("hint", "positive", "sizes", "value")
    kind = float
    value: Value  # in float64, as Python computes
    hint: float  # what it is in this call
    sizes: frozenset[IndexExpr]
    positive: bool  # for all sizes that the guards admit

    def __init__(self, value: Value, hint: float, sizes: frozenset[IndexExpr], positive: bool,
                 asked: CallQuestions):
        self.value, self.hint, self.sizes, self.positive = value, hint, sizes, positive
        self.asked = asked

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return float

    def fixed(self) -> float:
        for size in self.sizes:
            self.asked.fix(size)
        return self.hint

    def __neg__(self) -> Any:
        return _real("subtract", python.sub, 0, self)

    def __abs__(self) -> Any:
        return self if self.positive else abs(self.fixed())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.fixed(), digits)

    def __pow__(self, other: Any) -> Any:
        if self.positive and isinstance(other, (int, float)) and not _typed(other):
            return _real("power", python.pow, self, other)
        return self.fixed() ** other

    def __rpow__(self, other: Any) -> Any:
        return other ** self.fixed()

    __hash__ = _Stand.__hash__


_PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    "==": python.eq, "!=": python.ne, "<": python.lt, "<=": python.le, ">": python.gt,
    ">=": python.ge,
}


# ---------------------------------------------------------------- arithmetic
def _are_numbers(*xs: Any) -> bool:
    return all(isinstance(x, (int, float, np.integer, np.floating)) for x in xs)


def _typed(x: Any) -> bool:
    """Whether a number is numpy's, which has a type that it imposes on what it meets."""
    return isinstance(x, np.generic)


def _known(x: Any) -> Any:
    """The plain number that something stands for in this call, without fixing it."""
    if type(x) is Size:
        return x.asked.value(x.expr)
    return x.hint if type(x) is Real else x


def _positive(x: Any) -> bool:
    if type(x) is Real:
        return x.positive
    return bool(x > 0)


def _double(x: Any) -> Value:
    if type(x) is Real:
        return x.value
    if type(x) is Size:
        return operator_named("astype")(apply(operator_named("dimension"), [], {"size": x.expr}),
                                        dtype=float64)
    return constant(float(x), float64)


def _real(name: str, function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """An operation on floats as Python does it, as a node of the graph."""
    hint = function(_known(a), _known(b))
    parts = [x for x in (a, b) if type(x) in (Size, Real)]
    sizes = frozenset().union(*(frozenset([x.expr]) if type(x) is Size else x.sizes
                                for x in parts))
    positive = (_positive(a) and (name == "power" or _positive(b))) if name != "subtract" else False
    value = operator_named(name)(_double(a), _double(b))
    return Real(value, float(hint), sizes, positive, parts[0].asked)


def _arithmetic(whole: Callable[[Any, Any], Any], name: str) -> Callable[[Any, Any], Any]:
    def operation(a: Any, b: Any) -> Any:
        if not _are_numbers(a, b):
            return NotImplemented
        if _typed(a) or _typed(b):
            return whole(_fixed(a), _fixed(b))
        if isinstance(a, float) or isinstance(b, float):
            return _real(name, whole, a, b)
        return seen(whole(_plain_index(a), _plain_index(b)))

    return operation


def _division(a: Any, b: Any) -> Any:
    if not _are_numbers(a, b):
        return NotImplemented
    if _typed(a) or _typed(b):
        return python.truediv(_fixed(a), _fixed(b))
    if not _positive(b):  # Python raises for 0, so which it is has to be known
        b = _fixed(b)
        if type(a) not in (Size, Real) or b == 0:
            return _known(a) / b
    return _real("divide", python.truediv, a, b)


def _by_whole(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Floor division and remainder: symbolic by a positive divisor, else of fixed numbers."""

    def operation(a: Any, b: Any) -> Any:
        if not _are_numbers(a, b):
            return NotImplemented
        if isinstance(a, int) and isinstance(b, int) and b > 0:
            return seen(function(_plain_index(a), _plain_index(b)))
        return function(_fixed(a), _fixed(b))

    return operation


def _fixed(x: Any) -> Any:
    return x.fixed() if type(x) in (Size, Real) else x


def _install() -> None:
    table = {"add": _arithmetic(python.add, "add"), "sub": _arithmetic(python.sub, "subtract"),
             "mul": _arithmetic(python.mul, "multiply"), "truediv": _division,
             "floordiv": _by_whole(python.floordiv), "mod": _by_whole(python.mod)}
    for kind in (Size, Real):
        for name, operation in table.items():
            setattr(kind, f"__{name}__", operation)
            setattr(kind, f"__r{name}__", _swapped(operation))
    for name in ("and_", "or_", "xor", "lshift", "rshift"):
        function = getattr(python, name)
        operation = _on_fixed(function)
        setattr(Size, f"__{name.rstrip('_')}__", operation)
        setattr(Size, f"__r{name.rstrip('_')}__", _swapped(operation))
    for relation, name in zip(_PYTHON, ("eq", "ne", "lt", "le", "gt", "ge"), strict=True):
        setattr(Real, f"__{name}__", _on_fixed(_PYTHON[relation]))


def _swapped(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: operation(other, self)


def _on_fixed(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def operation(a: Any, b: Any) -> Any:
        if isinstance(a, Value) or isinstance(b, Value):
            return NotImplemented
        return function(_fixed(a), _fixed(b))

    return operation


_install()


# ---------------------------------------------------------------- in and out
def _plain_index(x: Any) -> Index:
    return x.expr if type(x) is Size else python.index(x)


def seen(x: Any) -> Any:
    """Sizes as the code of a user is to see them, in a nest of tuples, lists and dicts."""
    asked = call_questions()
    return x if asked is None else _mapped(
        x, lambda leaf: Size(leaf, asked) if isinstance(leaf, IndexExpr) else leaf)


def plain(x: Any) -> Any:
    """The same as operators take them: index expressions, and floats that are fixed."""
    return _mapped(x, lambda leaf: leaf.expr if type(leaf) is Size else _fixed(leaf))


def _mapped(x: Any, function: Callable[[Any], Any]) -> Any:
    def leaf(item: Any) -> Any:
        if isinstance(item, slice):
            return slice(*(leaf(part) for part in (item.start, item.stop, item.step)))
        return function(item)

    return mapped(x, leaf, none=True)


def as_value(x: Size | Real, dtype: DType | None) -> Value:
    """A symbolic number as a 0-d value, of the type that a Python number would have there."""
    cast = operator_named("astype")
    if type(x) is Size:
        made = apply(operator_named("dimension"), [], {"size": x.expr})
        return cast(made, dtype=dtype or default_int)
    return cast(x.value, dtype=dtype or result_type(1.0))


__all__ = ["Real", "Size", "as_value", "plain", "seen"]
