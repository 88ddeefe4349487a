"""What formulas are made of: `Term`, a value of one element or an index that stands for one.

Terms know Python's operators. Whole numbers stay index expressions for as long as only indices and
whole numbers meet, so that what is read can be proved to exist; all else is scalar arithmetic.
Below this room both compare by identity; `==` of terms is a comparison of what they stand for.
"""

from __future__ import annotations

import builtins
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import numpy as np

from terrazzo.base.arithmetic import Arithmetic
from terrazzo.base.scalar import Axis, Scalar, as_scalar, call
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.scalar import const as scalar_const
from terrazzo.base.scalar_table import OPS, highest, lowest
from terrazzo.dtypes import DType, as_dtype, bool_
from terrazzo.errors import ArgumentError, DTypeError, TracedControlFlow
from terrazzo.index import Index, IndexExpr, Var

_INDEX_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg,
    "floordiv": operator.floordiv, "mod": operator.mod,
}
_OF_NUMPY = {row.ufunc: name for name, row in OPS.items() if isinstance(row.ufunc, str)}


class Term(Arithmetic["Term"]):
    """A part of a formula: an index, or a value that is computed for each element."""

    __slots__ = ("value",)
    value: Scalar | Index

    def __init__(self, value: Scalar | Index):
        self.value = value

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **options: Any) -> Term:
        """Numbers of numpy leave arithmetic to us, and `np.exp(x)` is `te.exp(x)`."""
        name = _OF_NUMPY.get(ufunc.__name__)
        if name is None or method != "__call__" or options:
            raise ArgumentError(f"numpy.{ufunc.__name__} means nothing in a formula",
                                hint="use a function of te")
        return apply(name, *args)

    def apply(self, op: str, *args: Any) -> Term:
        return apply(op, *args)

    def __pos__(self) -> Term:
        return self

    def __eq__(self, other: object) -> Term:  # type: ignore[override]
        return apply("eq", self, other)

    def __ne__(self, other: object) -> Term:  # type: ignore[override]
        return apply("ne", self, other)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise TracedControlFlow(
            f"Python asked whether {self} is true, which differs from element to element",
            hint="choose by te.if_then_else(condition, a, b); join conditions with te.all and "
                 "te.any, or with & | ~, not with `and`, `or`, `not`, or a < b < c")

    def __index__(self) -> int:
        raise TracedControlFlow(
            f"Python asked for the number that {self} is, which differs from element to element",
            hint="compute with it: te.if_then_else, te.cast, index arithmetic")

    __int__ = __float__ = __index__

    def __str__(self) -> str:
        return str(self.value)

    def __repr__(self) -> str:
        return f"<te term {self}>"


class ReduceAxis(Term):
    """An axis to reduce over; in a formula it stands for its index, as in `A[i + k]`."""

    __slots__ = ("axis",)
    axis: Axis

    def __init__(self, axis: Axis):
        super().__init__(axis.var)
        self.axis = axis

    @property
    def var(self) -> Var:
        return self.axis.var

    def __repr__(self) -> str:
        return f"<te reduce_axis {self.axis}>"


# ---------------------------------------------------------------- in and out of terms
class _Used(threading.local):
    axes: dict[str, ReduceAxis] | None = None  # in the formula being written, by name


_used = _Used()


@contextmanager
def formula() -> Iterator[dict[str, ReduceAxis]]:
    """While a formula is written: the axes it reduces over, of which no two may share a name.

    Indices are interned, so two axes of one name and one range would be one index.
    """
    outer, _used.axes = _used.axes, {}
    try:
        yield _used.axes
    finally:
        _used.axes = outer


def plain(value: Any) -> Any:
    """What a term stands for; all other values as they are, numpy's numbers as Python's."""
    if isinstance(value, ReduceAxis) and _used.axes is not None:
        if _used.axes.setdefault(value.var.name, value) is not value:
            raise ArgumentError(f"two reduction axes of one formula are named {value.var.name!r}",
                                hint="give each a name of its own")
    if isinstance(value, Term):
        return value.value
    if isinstance(value, Axis):
        return value.var
    return value.item() if isinstance(value, np.generic) else value


def scalar(value: Any, like: DType | None = None) -> Scalar:
    """The scalar expression of a term or a number."""
    return as_scalar(plain(value), like)


def apply(op: str, *args: Any) -> Term:
    """An operation of `scalar.OPS` on terms and numbers."""
    values = [plain(_not_decided(a) if op in ("and", "or", "xor") else a) for a in args]
    arithmetic = _INDEX_ARITHMETIC.get(op)
    if arithmetic is not None and _all_indices(values):
        return Term(arithmetic(*values))
    if not builtins.all(isinstance(v, (Scalar, int, float, IndexExpr)) for v in values):
        raise ArgumentError(f"{op} of {', '.join(map(repr, args))} means nothing in a formula")
    return Term(call(op, *values))


def _all_indices(values: list[Any]) -> bool:
    return builtins.all(isinstance(v, (int, IndexExpr)) and not isinstance(v, bool) for v in values)


def element_function(name: str) -> Callable[..., Term]:
    """The function of elements with a name of the table OPS."""
    if name not in OPS:
        raise AttributeError(f"terrazzo.te has no {name!r}")

    def function(*args: Any) -> Term:
        return apply(name, *args)

    function.__name__ = name
    function.__doc__ = f"{name} of elements."
    return function


# ---------------------------------------------------------------- conditions
def _not_decided(value: Any) -> Any:
    """Refuse what Python has decided already: `n == 4` of a symbolic size is a plain False."""
    if isinstance(value, (bool, np.bool_)):
        raise ArgumentError(
            f"a condition was {value} before any element was computed",
            hint="compare sizes with te.eq(n, 4), te.lt(n, 4), ...; what Python knows is chosen by "
                 "Python's if")
    return value


def _condition(value: Any) -> Scalar:
    test = scalar(_not_decided(value))
    if test.dtype is not bool_:
        raise DTypeError(f"{test} is {test.dtype.name}, not a condition",
                         hint="compare it: x != 0")
    return test


def where(condition: Any, yes: Any, no: Any) -> Term:
    """`yes` where the condition holds, else `no`; what is not chosen is not read."""
    return Term(call("where", _condition(condition), plain(yes), plain(no)))


def if_then_else(condition: Any, yes: Any, no: Any) -> Term:
    """The name that TVM gives to `where`."""
    return where(condition, yes, no)


def all(*conditions: Any) -> Term:
    """Whether all conditions hold."""
    return _joined("and", conditions)


def any(*conditions: Any) -> Term:
    """Whether at least one condition holds."""
    return _joined("or", conditions)


def _joined(op: str, conditions: tuple[Any, ...]) -> Term:
    if not conditions:
        raise ArgumentError("there is no condition to join", hint="te.all(i >= 1, i < n)")
    return Term(reduce(lambda a, b: call(op, a, b), map(_condition, conditions)))


# ---------------------------------------------------------------- numbers
def maximum(a: Any, b: Any) -> Term:
    """The greater of two elements."""
    return apply("max", a, b)


def minimum(a: Any, b: Any) -> Term:
    """The lesser of two elements."""
    return apply("min", a, b)


def cast(value: Any, dtype: Any) -> Term:
    """A value as another type."""
    return Term(cast_scalar(scalar(value), dtype))


def const(value: Any, dtype: Any = None) -> Term:
    """A number of a given type."""
    return Term(scalar_const(value, None if dtype is None else as_dtype(dtype)))


def min_value(dtype: Any) -> Term:
    """The least number of a type: what a maximum of nothing is."""
    return const(lowest(as_dtype(dtype)), dtype)


def max_value(dtype: Any) -> Term:
    """The greatest number of a type: what a minimum of nothing is."""
    return const(highest(as_dtype(dtype)), dtype)
