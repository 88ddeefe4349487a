"""Algebra that keeps every bit: arithmetic, comparison, choice, conversion.

A rule is here only if both sides agree for nan, infinities, signed zeros and denormals; so x + 0
stays for floats (-0.0 + 0.0 is 0.0), and exp(log(x)) stays altogether. The exception are powers,
where a product or a root replaces a function that is itself only near the true value; each such
rule says so. (Of a nan, only that it is one is kept.)
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from terrazzo.dtypes import DType
from terrazzo.graph.applying import constant
from terrazzo.graph.ir import Graph, Node, Value, operator_named
from terrazzo.graph.passes.movement import MOVEMENT
from terrazzo.graph.passes.row_shapes import ROW_SHAPES
from terrazzo.graph.patterns import P, Wild, splat, wildcards
from terrazzo.graph.rewrite import Applied, Rule, RuleTable, rewrite, user_rules

x, y, c = wildcards("x y c")


def is_int(value: Value) -> bool:
    """Whether a value holds integers."""
    return value.dtype.is_integer


def is_float(value: Value) -> bool:
    """Whether a value holds floats."""
    return value.dtype.is_float


def is_bool(value: Value) -> bool:
    """Whether a value holds truth values."""
    return value.dtype.is_bool


def is_number(value: Value) -> bool:
    """Whether a value holds anything but truth values."""
    return not value.dtype.is_bool


def has_sign(value: Value) -> bool:
    """Whether a value may hold negative numbers."""
    return value.dtype.is_signed


def is_exact(value: Value) -> bool:
    """Whether a value holds integers or truth values, which have no nan and no -0.0."""
    return value.dtype.is_integer or value.dtype.is_bool


def filled(node: Node, number: object) -> Value:
    """One number in the shape and type of a node's result."""
    return operator_named("full")(shape=node.types[0].shape, value=number,
                                  dtype=node.types[0].dtype)


def _op(name: str, *args: Value, **attrs: object) -> Value:
    return operator_named(name)(*args, **attrs)


# ---------------------------------------------------------------- neutral and absorbing elements
NEUTRAL = RuleTable((
    Rule("multiply by one", P.multiply(x, 1), lambda x: x),
    Rule("divide by one", P.divide(x, 1), lambda x: x),
    Rule("add zero", P.add(x.that(is_int), 0), lambda x: x,
         doc="for floats -0.0 + 0.0 is 0.0, so only integers qualify"),
    Rule("add minus zero", P.add(x.that(is_float), -0.0), lambda x: x),
    Rule("subtract zero", P.subtract(x, 0), lambda x: x, doc="-0.0 - 0.0 is -0.0: exact"),
    Rule("multiply by zero", P.multiply(x.that(is_int), 0), lambda node: filled(node, 0)),
    Rule("subtract itself", P.subtract(x.that(is_int), x), lambda node: filled(node, 0)),
    Rule("floor divide by one", P.floor_divide(x.that(is_int), 1), lambda x: x),
    Rule("remainder by one", P.remainder(x.that(is_int), 1), lambda node: filled(node, 0)),
    Rule("shift by zero", P.one_of("bitwise_left_shift", "bitwise_right_shift")(x, 0),
         lambda x: x),
    Rule("and with all", P.bitwise_and(x.that(is_bool), True), lambda x: x),
    Rule("and with none", P.bitwise_and(x.that(is_exact), 0), lambda node: filled(node, 0)),
    Rule("or with none", P.one_of("bitwise_or", "bitwise_xor")(x.that(is_exact), 0), lambda x: x),
    Rule("or with all", P.bitwise_or(x.that(is_bool), True), lambda node: filled(node, True)),
    Rule("exclusive or with itself", P.bitwise_xor(x, x), lambda node: filled(node, 0)),
))


# ---------------------------------------------------------------- signs
SIGNS = RuleTable((
    Rule("multiply by minus one", P.multiply(x.that(is_number), -1),
         lambda x: _op("negative", x), doc="True * -1 is an integer, and -True is none"),
    Rule("subtract from minus zero", P.subtract(-0.0, x.that(is_float)),
         lambda x: _op("negative", x)),
    Rule("subtract from zero", P.subtract(0, x.that(is_int)), lambda x: _op("negative", x),
         doc="for floats 0.0 - 0.0 is 0.0, and -(0.0) is -0.0"),
    Rule("negative of negative", P.negative(P.negative(x)), lambda x: x),
    Rule("add a negative", P.add(x, P.negative(y)), lambda x, y: _op("subtract", x, y)),
    Rule("subtract a negative", P.subtract(x, P.negative(y)), lambda x, y: _op("add", x, y)),
    Rule("multiply negatives", P.multiply(P.negative(x), P.negative(y)),
         lambda x, y: _op("multiply", x, y)),
    Rule("divide negatives", P.divide(P.negative(x.that(is_float)), P.negative(y.that(is_float))),
         lambda x, y: _op("divide", x, y), doc="of int8, -(-128) is -128, and then divided"),
    Rule("absolute of negative", P.absolute(P.negative(x.that(has_sign))),
         lambda x: _op("absolute", x), doc="of uint8, -1 is 255"),
    Rule("cosine of negative", P.one_of("cos", "cosh")(P.negative(x.that(has_sign))),
         lambda x, node: _op(node.op.name, x), doc="both are even functions, also as computed"),
))


# ---------------------------------------------------------------- doing a thing twice
TWICE = RuleTable((
    Rule("rounding twice", P.one_of("floor", "ceil", "trunc", "round")(
        P.one_of("floor", "ceil", "trunc", "round")(x).named("rounded")),
        lambda rounded: rounded, doc="a rounded number stays under any rounding"),
    Rule("absolute twice", P.absolute(P.absolute(x).named("inner")), lambda inner: inner),
    Rule("sign twice", P.sign(P.sign(x).named("inner")), lambda inner: inner),
    Rule("invert twice", P.bitwise_invert(P.bitwise_invert(x)), lambda x: x),
    Rule("larger of the same", P.one_of("maximum", "minimum", "bitwise_and", "bitwise_or")(x, x),
         lambda x: x),
    Rule("maximum twice", P.maximum(P.maximum(x, y).named("inner"), y), lambda inner: inner),
    Rule("minimum twice", P.minimum(P.minimum(x, y).named("inner"), y), lambda inner: inner),
))


# ---------------------------------------------------------------- powers and quotients
def _reciprocal(x: Value, c: Value, node: Node) -> Value | None:
    """x * 2**-k for x / 2**k: both round the same real number, so they are the same float."""
    number, dtype = splat(c), node.types[0].dtype
    if not isinstance(number, (int, float)) or not dtype.is_float or not math.isfinite(number):
        return None
    if math.frexp(abs(number))[0] != 0.5:
        return None
    inverse = 1.0 / number
    if not _is_normal(inverse, dtype):
        return None
    return _op("multiply", x, constant(np.full(c.shape, inverse), dtype))


def _is_normal(number: float, dtype: DType) -> bool:
    """Whether a type holds a number exactly, and not as a denormal, which hardware may flush."""
    return float(np.asarray(number).astype(dtype.np)) == number and (
        abs(number) >= float(ml_dtypes.finfo(dtype.np).smallest_normal))


def never_negative(value: Value, depth: int = 8) -> bool:
    """Whether every element is provably nan or has a clear sign bit, so also not -0.0."""
    number = splat(value)
    if isinstance(number, (int, float)):
        return math.copysign(1.0, number) > 0
    node = value.node
    if node is None or depth == 0:
        return False
    name, inputs = node.op.name, [v for v in node.inputs if v is not None]
    if name in ("absolute", "exp", "exp2", "sigmoid"):
        return True
    if name == "multiply" and inputs[0] is inputs[1]:
        return True
    if name in ("add", "multiply", "divide", "maximum", "sum", "mean", "max", "min", "prod",
                "sqrt", "rsqrt", "reshape", "broadcast_to", "permute_dims", "astype"):
        return all(_counts(v) if v.dtype.is_integer else never_negative(v, depth - 1)
                   for v in inputs)
    return False


def _counts(value: Value) -> bool:
    """Whether an integer is a size, as means divide by."""
    number = splat(value)
    return number > 0 if isinstance(number, int) else (
        value.node is not None and value.node.op.name == "dimension")


POWERS = RuleTable((
    Rule("power zero", P.power(x, 0), lambda node: filled(node, 1), doc="also of nan, as in C"),
    Rule("power one", P.power(x, 1), lambda x: x),
    Rule("power two", P.power(x, 2), lambda x: _op("multiply", x, x),
         doc="one rounding: at least as near as any pow"),
    Rule("power three", P.power(x, 3), lambda x: _op("multiply", _op("multiply", x, x), x),
         doc="two roundings, within one unit in the last place of x**3; no spurious overflow"),
    Rule("power minus one", P.power(x.that(is_float), -1),
         lambda x: _op("divide", constant(1, x.dtype), x), doc="one rounding"),
    Rule("power one half", P.power(x.that(is_float).that(never_negative), 0.5),
         lambda x: _op("sqrt", x),
         doc="only where x cannot be negative: they differ for -inf and for -0.0"),
    Rule("power minus one half", P.power(x.that(is_float).that(never_negative), -0.5),
         lambda x: _op("rsqrt", x),
         doc="only where x cannot be negative: they differ for -inf and for -0.0"),
    Rule("divide by a power of two", P.divide(x, Wild("c", lambda v: splat(v) is not None)),
         _reciprocal),
))


# ---------------------------------------------------------------- comparison and choice
CHOICES = RuleTable((
    Rule("less than itself", P.one_of("less", "greater")(x, x), lambda node: filled(node, False),
         doc="false for nan as well"),
    Rule("equal to itself", P.one_of("equal", "less_equal", "greater_equal")(x.that(is_exact), x),
         lambda node: filled(node, True), doc="a nan is not, so floats stay"),
    Rule("unequal to itself", P.not_equal(x.that(is_exact), x), lambda node: filled(node, False)),
    Rule("is true", P.not_equal(x.that(is_bool), 0), lambda x: x),
    Rule("equals true", P.equal(x.that(is_bool), 1), lambda x: x),
    Rule("is not true", P.equal(x.that(is_bool), 0), lambda x: _op("bitwise_invert", x)),
    Rule("integers are finite", P.isfinite(x.that(is_exact)), lambda node: filled(node, True)),
    Rule("integers are no nan", P.one_of("isnan", "isinf")(x.that(is_exact)),
         lambda node: filled(node, False)),
    Rule("choice of the same", P.where(c, x, x), lambda x: x),
    Rule("choice by true", P.where(Wild("c", lambda v: splat(v) not in (None, 0)), x, y),
         lambda x: x),
    Rule("choice by false", P.where(Wild("c", lambda v: splat(v) == 0), x, y), lambda y: y),
    Rule("choice by not", P.where(P.bitwise_invert(c.that(is_bool)), x, y),
         lambda c, x, y: _op("where", c, y, x)),
    Rule("choice of truth", P.where(c.that(is_bool), x.that(is_bool), y.that(is_bool)),
         lambda c, x, y: c if splat(x) is True and splat(y) is False else None),
    Rule("choice within a choice", P.where(c, P.where(c, x, ...), y),
         lambda c, x, y: _op("where", c, x, y)),
    Rule("choice within the other choice", P.where(c, x, P.where(c, Wild("unused"), y)),
         lambda c, x, y: _op("where", c, x, y)),
))


# ---------------------------------------------------------------- conversion
def holds(wide: DType, narrow: DType) -> bool:
    """Whether a type represents every value of another exactly."""
    if wide is narrow or narrow.is_bool:
        return True
    if wide.is_bool or wide.is_complex or narrow.is_complex:
        return False
    if wide.is_integer:
        return narrow.is_integer and wide.min <= narrow.min and narrow.max <= wide.max
    if narrow.is_integer:
        digits = narrow.bits - int(narrow.is_signed)
        return 2.0 ** digits <= 2 / wide.eps and narrow.max <= wide.max
    return wide.eps <= narrow.eps and wide.max >= narrow.max and _tiny(wide) <= _tiny(narrow)


def _tiny(dtype: DType) -> float:
    return float(ml_dtypes.finfo(dtype.np).smallest_subnormal)


def _convert_once(x: Value, inner: Value, node: Node) -> Value | None:
    target = node.types[0].dtype
    if x.dtype.is_float and not (target.is_float or target.is_complex or target.is_bool):
        return None  # what is out of range has no defined result, and it may depend on the source
    return _op("astype", x, dtype=target) if holds(inner.dtype, x.dtype) else None


CONVERSIONS = RuleTable((
    Rule("conversion through a wider type", P.astype(P.astype(x).named("inner")), _convert_once),
    Rule("bitcast to its own type", P.bitcast(x), lambda x: x),
    Rule("bitcast twice", P.bitcast(P.bitcast(x)),
         lambda x, node: _op("bitcast", x, dtype=node.types[0].dtype)),
))

RULES = NEUTRAL + SIGNS + TWICE + POWERS + CHOICES + CONVERSIONS + MOVEMENT + ROW_SHAPES


def algebra(graph: Graph, log: list[Applied] | None = None, level: str = "all",
            added: RuleTable | None = None, most: int | None = None) -> Graph:
    """Apply the rules of this room, and those that users added, up to a level."""
    graph, applied = rewrite(graph, RULES + (user_rules() if added is None else added), level,
                             most=most)
    if log is not None:
        log.extend(applied)
    return graph
