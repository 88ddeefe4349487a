"""Patterns that read like the expressions they match, and what values are known to be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from terrazzo.base.scalar_table import by_operator
from terrazzo.errors import ArgumentError
from terrazzo.graph.ir import Node, TensorType, Value
from terrazzo.index import proves_eq

COMMUTATIVE = frozenset(name for name, row in by_operator().items() if row.commutes)


@dataclass(frozen=True, eq=False)
class Wild:
    """Matches any value (or attribute) and binds it to a name; twice the same name, one value."""

    name: str
    test: Callable[[Any], bool] | None = None
    optional: bool = False  # also matches an input that is not given

    def that(self, test: Callable[[Any], bool]) -> Wild:
        """The same wildcard, matching only what passes one more test."""
        first = self.test
        return replace(self, test=test if first is None else lambda v: first(v) and test(v))


@dataclass(frozen=True, eq=False)
class Literal:
    """Matches a constant all of whose elements are one number; 0.0 and -0.0 are told apart."""

    value: Any


@dataclass(frozen=True, eq=False)
class Apply:
    """Matches a value computed by one of the named operators; made by `P`."""

    ops: tuple[str, ...]
    args: tuple[Any, ...]
    attrs: tuple[tuple[str, Any], ...]
    name: str | None = None
    used_once: bool = False
    output: int = 0

    def named(self, name: str) -> Apply:
        """The same pattern, also binding the value it matches."""
        return replace(self, name=name)

    def once(self) -> Apply:
        """The same pattern, matching only a value that nothing else uses."""
        return replace(self, used_once=True)


class _PatternMaker:
    """`P.add(x, y)` matches an addition; `P.one_of("sum", "max")(x)` either of two operators.

    Attributes are matched by value, by a function that tests them, or bound by a wildcard; those
    that are not mentioned may be anything. A last argument `...` leaves further inputs free.
    """

    def one_of(self, *ops: str) -> Callable[..., Apply]:
        def make(*args: Any, **attrs: Any) -> Apply:
            return Apply(ops, tuple(map(_as_pattern, args)), tuple(attrs.items()))

        return make

    def __getattr__(self, op: str) -> Callable[..., Apply]:
        return self.one_of(op)


P = _PatternMaker()


def _as_pattern(arg: Any) -> Any:
    if arg is None or arg is ... or isinstance(arg, (Wild, Apply, Literal)):
        return arg
    if isinstance(arg, (bool, int, float, complex)):
        return Literal(arg)
    raise ArgumentError(f"{arg!r} is no part of a pattern",
                        hint="use a Wild, a number, P.operator(...), None or ...")


def wildcards(names: str) -> tuple[Wild, ...]:
    """Several wildcards at once: `x, y = wildcards("x y")`."""
    return tuple(map(Wild, names.split()))


# ---------------------------------------------------------------- what values are known to be
def constant_array(value: Value | None) -> np.ndarray | None:
    """The array of a constant, or None when the value is computed."""
    if value is not None and value.node is not None and value.node.op.name == "constant":
        return value.node.attrs["value"]
    return None


def splat(value: Value | None) -> Any:
    """The one number that all elements of a constant are, as a Python number, or None."""
    if value is None or value.node is None:
        return None
    if value.node.op.name == "full":
        number = value.node.attrs["value"]
        if not isinstance(number, (bool, int, float, complex)):
            return None
        array = np.asarray(number).astype(value.dtype.np)
    elif value.node.op.name == "constant":
        array = value.node.attrs["value"]
        if array.size == 0 or (array.size > 1 and not _all_same(array)):
            return None
        array = array.reshape(-1)[0]
    else:
        return None
    return array.item() if array.dtype.kind in "biufc" else float(array)


def _all_same(array: np.ndarray) -> bool:
    flat = array.reshape(-1)
    if flat[0] != flat[-1]:  # the usual case, without looking at all of a large weight
        return False
    return flat.tobytes() == flat[:1].tobytes() * flat.size


def is_constant(value: Value) -> bool:
    """Whether a value is a literal array."""
    return constant_array(value) is not None


def same_number(a: Any, b: Any) -> bool:
    """Equality of Python numbers that tells 0.0 from -0.0, and finds nan equal to itself."""
    if isinstance(a, complex) or isinstance(b, complex):
        a, b = complex(a), complex(b)
        return same_number(a.real, b.real) and same_number(a.imag, b.imag)
    if a != b:
        return a != a and b != b
    return a != 0 or not (isinstance(a, float) and isinstance(b, float)) or (
        math.copysign(1, a) == math.copysign(1, b))


def same_value(a: Any, b: Any) -> bool:
    """Whether two values (or attributes) are the same one; constants compare by their bits."""
    if a is b:
        return True
    if not (isinstance(a, Value) and isinstance(b, Value)):
        return not isinstance(a, Value) and not isinstance(b, Value) and bool(np.all(a == b))
    left, right = constant_array(a), constant_array(b)
    return (left is not None and right is not None and same_type(a.type, b.type)
            and left.tobytes() == right.tobytes())


def same_type(a: TensorType, b: TensorType) -> bool:
    """Whether two types are provably the same."""
    return a.dtype is b.dtype and same_shape(a.shape, b.shape)


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are provably the same."""
    return len(a) == len(b) and all(m == n or proves_eq(m, n) for m, n in zip(a, b))


# ---------------------------------------------------------------- matching
Found = dict[str, Any]
_MISSING: Any = object()
_LITERALS = ("full", "constant")


def match(pattern: Any, value: Value, uses: Mapping[Value, int] | None = None) -> Found | None:
    """What the wildcards of a pattern are bound to where it matches a value, or None."""
    return next(_match(pattern, value, {}, uses or {}), None)


def _match(pattern: Any, value: Value | None, found: Found, uses: Mapping[Value, int]
           ) -> Iterator[Found]:
    if isinstance(pattern, Wild):
        yield from _bind(pattern, value, found)
    elif isinstance(pattern, Literal):
        number = splat(value)
        if number is not None and same_number(number, _as_read(pattern.value, value)):
            yield found
    elif isinstance(pattern, Apply):
        if value is not None and value.node is not None and value.index == pattern.output:
            if not pattern.used_once or uses.get(value) == 1:
                for result in match_node(pattern, value.node, found, uses):
                    yield result if pattern.name is None else {**result, pattern.name: value}
    elif value is None:
        yield found


def _as_read(number: Any, value: Value | None) -> Any:
    """A pattern's number as a constant of the value's type would hold it: 0.1 in float32."""
    if value is None or not value.dtype.is_float or isinstance(number, complex):
        return number
    return float(np.asarray(number).astype(value.dtype.np))


def match_node(pattern: Apply, node: Node, found: Found, uses: Mapping[Value, int]
                ) -> Iterator[Found]:
    if node.op.name not in pattern.ops:
        return
    args = pattern.args
    if args and args[-1] is ...:
        args = args[:-1]
        if len(node.inputs) < len(args):
            return
    elif len(node.inputs) != len(args):
        return
    for name, wanted in pattern.attrs:
        bound = _match_attr(wanted, node.attrs.get(name), found)
        if bound is None:
            return
        found = bound
    inputs = node.inputs[:len(args)]
    # Most rules fail here, before anything is bound.
    if all(map(_may_match, args, inputs)):
        yield from _match_all(args, inputs, found, uses)
    if len(args) == 2 and node.op.name in COMMUTATIVE and all(map(_may_match, args, inputs[::-1])):
        yield from _match_all(args, inputs[::-1], found, uses)


def _may_match(pattern: Any, value: Value | None) -> bool:
    """Whether a value is made by an operator that a pattern is for."""
    if isinstance(pattern, (Apply, Literal)):
        return value is not None and value.node is not None and value.node.op.name in (
            pattern.ops if isinstance(pattern, Apply) else _LITERALS)
    return True


def _match_all(patterns: Sequence[Any], values: Sequence[Value | None], found: Found,
               uses: Mapping[Value, int]) -> Iterator[Found]:
    if not patterns:
        yield found
        return
    for partial in _match(patterns[0], values[0], found, uses):
        yield from _match_all(patterns[1:], values[1:], partial, uses)


def _bind(wild: Wild, value: Any, found: Found) -> Iterator[Found]:
    if value is None and not wild.optional:
        return
    bound = found.get(wild.name, _MISSING)
    if bound is _MISSING:
        if wild.test is None or value is None or wild.test(value):
            yield {**found, wild.name: value}
    elif same_value(bound, value):
        yield found


def _match_attr(wanted: Any, actual: Any, found: Found) -> Found | None:
    if isinstance(wanted, Wild):
        return next(_bind(replace(wanted, optional=True), actual, found), None)
    if callable(wanted):
        return found if wanted(actual) else None
    return found if type(actual) is type(wanted) and actual == wanted else None
