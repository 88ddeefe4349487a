"""GELU as exporters write it, found again: by the error function, by tanh, by a sigmoid.

All forms are x times a gate f(p(x)), with the half and the one in any place: 0.5 * x * (1 + erf(x /
sqrt(2))), x * (0.5 + 0.5 * erf(...)), and so on; p is a polynomial, written as powers or as chains
of products. So a candidate is read as a polynomial in x and f, and its coefficients are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from terrazzo.dtypes import DType
from terrazzo.graph.ir import Node, Value
from terrazzo.graph.passes.parts import made_by, near, op, operands
from terrazzo.graph.patterns import P, splat
from terrazzo.graph.rewrite import Rule, RuleTable

Polynomial = dict[tuple[int, int], float]  # coefficients, by the powers of x and of the gate

_DEPTH = 5  # of the largest such expression, in nodes
_ARITHMETIC = ("add", "subtract", "multiply", "divide", "negative", "power")
_SLOPE = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
_HALF_OF_ONE_PLUS: Polynomial = {(1, 0): 0.5, (1, 1): 0.5}


@dataclass(frozen=True)
class Form:
    """One way to write an activation: x and a gate's value make `whole`, of x `inside` the gate."""

    name: str
    gate: str
    inside: Polynomial
    whole: Polynomial
    result: str
    attrs: Mapping[str, Any] = field(default_factory=dict)


FORMS = (
    Form("gelu by the error function", "erf", {(1, 0): math.sqrt(0.5)}, _HALF_OF_ONE_PLUS, "gelu"),
    Form("gelu by tanh", "tanh", {(1, 0): _SLOPE, (3, 0): _SLOPE * _CUBIC}, _HALF_OF_ONE_PLUS,
         "gelu", {"approximate": "tanh"}),
    Form("gelu by a sigmoid", "sigmoid", {(1, 0): 1.702}, {(1, 1): 1.0}, "quick_gelu"),
)


# ---------------------------------------------------------------- polynomials
def _polynomial(value: Value, x: Value, gate: Value | None, depth: int = _DEPTH
                ) -> Polynomial | None:
    """A value as a polynomial in x and a gate's value, or None where it is something else."""
    value = _stored(value)
    if value is x:
        return {(1, 0): 1.0}
    if value is gate:
        return {(0, 1): 1.0}
    number = splat(value)
    if number is not None:
        return {(0, 0): float(number)} if isinstance(number, (int, float)) else None
    node = made_by(value, *_ARITHMETIC)
    if node is None or depth == 0:
        return None
    if node.op.name == "power":
        base, exponent = operands(node)
        return _power(_polynomial(base, x, gate, depth - 1), splat(exponent))
    parts = [_polynomial(v, x, gate, depth - 1) for v in operands(node)]
    known = [p for p in parts if p is not None]
    return _COMBINED[node.op.name](*known) if len(known) == len(parts) else None


def _stored(value: Value) -> Value:
    """A value before it was widened for arithmetic, or rounded after it."""
    while (node := made_by(value, "astype")) is not None:
        (source,) = operands(node)
        if not source.dtype.is_float or source.dtype.compute is not value.dtype.compute:
            break
        value = source
    return value


def _plus(a: Polynomial, b: Polynomial) -> Polynomial:
    return {k: a.get(k, 0.0) + b.get(k, 0.0) for k in {**a, **b}}


def _negative(a: Polynomial) -> Polynomial:
    return {k: -c for k, c in a.items()}


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    result: Polynomial = {}
    for (i, j), c in a.items():
        for (m, n), d in b.items():
            result[i + m, j + n] = result.get((i + m, j + n), 0.0) + c * d
    return result


def _over(a: Polynomial, b: Polynomial) -> Polynomial | None:
    number = b.get((0, 0), 0.0)
    return _times(a, {(0, 0): 1 / number}) if number != 0 and len(b) == 1 else None


def _power(a: Polynomial | None, exponent: Any) -> Polynomial | None:
    if a is None or exponent not in (2, 3):
        return None
    squared = _times(a, a)
    return squared if exponent == 2 else _times(squared, a)


_COMBINED: dict[str, Callable[..., Polynomial | None]] = {
    "add": _plus, "subtract": lambda a, b: _plus(a, _negative(b)), "multiply": _times,
    "divide": _over, "negative": _negative}


def _same(found: Polynomial | None, wanted: Polynomial, dtype: DType) -> bool:
    return found is not None and found.keys() == wanted.keys() and all(
        near(c, wanted[k], dtype) for k, c in found.items())


# ---------------------------------------------------------------- the pattern
def _inside(value: Value, depth: int) -> Iterator[Value]:
    """What an expression is made of, nearest first; numbers left out."""
    front = [_stored(value)]
    for _ in range(depth):
        yield from front
        makers = (made_by(u, *_ARITHMETIC) for u in front)
        front = list(dict.fromkeys(_stored(v) for node in makers if node is not None
                                   for v in operands(node) if splat(v) is None))


def _rule(form: Form) -> Rule:
    def build(node: Node) -> Value | None:
        result = node.outputs[0]
        for gate in _inside(result, _DEPTH):
            made = made_by(gate, form.gate)
            if made is None or not gate.dtype.is_float:
                continue
            (argument,) = operands(made)
            for x in _inside(argument, _DEPTH):
                if _same(_polynomial(argument, x, None), form.inside, x.dtype) and _same(
                        _polynomial(result, x, gate), form.whole, x.dtype):
                    return op(form.result, x, **form.attrs)
        return None

    return Rule(form.name, P.one_of("multiply", "add", "divide")(...), build, "extended")


GELU = RuleTable(tuple(map(_rule, FORMS)))
