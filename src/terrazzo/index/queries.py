"""Questions about symbolic integers, and what they mean outside the algebra."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from typing import Any, Generic, NamedTuple, TypeVar

from terrazzo.index.nodes import (
    MEMO_SIZE,
    FloorDiv,
    Index,
    IndexExpr,
    Max,
    Min,
    Mod,
    Sum,
    Var,
    add,
    canonical,
    floordiv,
    items,
    maximum,
    minimum,
    modulo,
    multiply,
    sort_key,
    text_of,
    without_atom,
)


@lru_cache(MEMO_SIZE)
def _variables(e: Index) -> frozenset[Var]:
    if isinstance(e, Var):
        return frozenset((e,))
    if isinstance(e, FloorDiv | Mod):
        return _variables(e.num) | _variables(e.den)
    if isinstance(e, Min | Max):
        return frozenset().union(*map(_variables, e.args))
    if isinstance(e, Sum):
        return frozenset().union(*(_variables(atom) for m, _ in e.terms for atom in m))
    return frozenset()


def free_vars(e: Index) -> set[Var]:
    """The variables an expression mentions."""
    return set(_variables(e))


def coefficient(e: Index, var: Var) -> Index | None:
    """The `c` of `e == c*var + rest` (0 where `var` is absent), or None if `e` is not affine."""
    if e is var:  # also where its bounds leave it one value, which expressions would put in
        return 1
    total: Index = 0
    for monomial, factor in items(e):
        if var in monomial:
            others = without_atom(monomial, var)
            total = total + canonical({others: factor})
        else:
            others = monomial
        if any(var in _variables(atom) for atom in others):
            return None
    return total


def without(e: Index, var: Var) -> Index:
    """The expression at `var == 0`: the rest of an affine expression."""
    return substitute(e, {var: 0})


Value = TypeVar("Value")


class Algebra(NamedTuple, Generic[Value]):
    """What an expression's parts mean in some domain: numbers, machine code, solver terms."""

    constant: Callable[[int], Value]
    variable: Callable[[Var], Value]
    add: Callable[[Value, Value], Value]
    multiply: Callable[[Value, Value], Value]
    floordiv: Callable[[Value, Value], Value]
    mod: Callable[[Value, Value], Value]
    minimum: Callable[[Value, Value], Value]
    maximum: Callable[[Value, Value], Value]


def interpret(e: Index, algebra: Algebra[Value]) -> Value:
    """The meaning of an expression in an algebra; shared parts are visited once."""
    known: dict[Index, Value] = {}

    def visit(e: Index) -> Value:
        value = known.get(e)
        if value is None:
            value = known[e] = compute(e)
        return value

    def fold(combine: Callable[[Value, Value], Value], values: list[Value]) -> Value:
        total = values[0]
        for value in values[1:]:
            total = combine(total, value)
        return total

    def compute(e: Index) -> Value:
        if isinstance(e, Var):
            return algebra.variable(e)
        if isinstance(e, FloorDiv):
            return algebra.floordiv(visit(e.num), visit(e.den))
        if isinstance(e, Mod):
            return algebra.mod(visit(e.num), visit(e.den))
        if isinstance(e, Min):
            return fold(algebra.minimum, [visit(arg) for arg in e.args])
        if isinstance(e, Max):
            return fold(algebra.maximum, [visit(arg) for arg in e.args])
        if isinstance(e, Sum):
            terms = []
            for monomial, factor in items(e):
                factors = [visit(atom) for atom in monomial]
                if factor != 1 or not factors:
                    factors.append(visit(factor))
                terms.append(fold(algebra.multiply, factors))
            return fold(algebra.add, terms)
        assert not isinstance(e, IndexExpr)
        return algebra.constant(e)

    return visit(e)


def substitute(e: Index, values: Mapping[Var, Index]) -> Index:
    """The expression with variables replaced, simplified again."""
    if not isinstance(e, IndexExpr) or _variables(e).isdisjoint(values):
        return e
    return interpret(
        e,
        Algebra(
            constant=lambda number: number,
            variable=lambda var: values.get(var, var),
            add=add,
            multiply=multiply,
            floordiv=floordiv,
            mod=modulo,
            minimum=minimum,
            maximum=maximum,
        ),
    )


def evaluate(e: Index, values: Mapping[Any, Any]) -> Any:
    """The number an expression stands for, given each variable (or its name) a number or an array.

    With numpy arrays as values the result is an array, computed element by element.
    """
    if not isinstance(e, IndexExpr):
        return e
    variables, function = _compiled(e)
    numbers = []
    for var in variables:
        if var in values:
            numbers.append(values[var])
        elif var.name in values:
            numbers.append(values[var.name])
        else:
            raise KeyError(f"no value was given for '{var.name}' in '{e}'")
    return function(*numbers)


@lru_cache(MEMO_SIZE)
def _compiled(e: IndexExpr) -> tuple[tuple[Var, ...], Callable[..., Any]]:
    """The variables of an expression, and Python code for its value as a function of them."""
    # Interpreters evaluate one address millions of times, and names need not be Python's.
    names = {var: f"v{at}" for at, var in enumerate(sorted(_variables(e), key=sort_key))}
    source = f"lambda {', '.join(names.values())}: {compile_python(e, names)}"
    return tuple(names), eval(source, {"min": _smallest, "max": _largest})


def _smallest(*values: Any) -> Any:
    if all(isinstance(value, int) for value in values):
        return min(values)
    import numpy

    return reduce(numpy.minimum, values)


def _largest(*values: Any) -> Any:
    if all(isinstance(value, int) for value in values):
        return max(values)
    import numpy

    return reduce(numpy.maximum, values)


def compile_python(e: Index, names: Mapping[Any, str] | None = None) -> str:
    """Python source for an expression; `names` maps variables (or their names) to source names."""

    def name(var: Var) -> str:
        if names is None:
            return var.name
        return names[var] if var in names else names.get(var.name, var.name)

    return text_of(e, name)[0]


def divisible(e: Index, c: int) -> bool:
    """Whether `e` is provably a multiple of `c`."""
    return _known_divisor(e) % c == 0 or e % c == 0


def _known_divisor(e: Index) -> int:
    """A number that divides every value of `e`; 0 for zero itself."""
    if isinstance(e, Sum):
        parts = [factor * math.prod(map(_known_divisor, monomial)) for monomial, factor in items(e)]
        return math.gcd(*parts)
    if isinstance(e, Mod):
        return math.gcd(_known_divisor(e.num), _known_divisor(e.den))
    if isinstance(e, Min | Max):
        return math.gcd(*map(_known_divisor, e.args))
    return 1 if isinstance(e, IndexExpr) else abs(e)
