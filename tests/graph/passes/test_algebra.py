"""Every rule of algebra and movement: it fires on its example, and no bit of the value changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.dtypes import DTYPES, as_dtype, bfloat16, bool_, float16, float32, int8, int32
from terrazzo.graph.applying import constant
from terrazzo.graph.evaluate import run
from terrazzo.graph.ir import OPERATORS, Graph, TensorType
from terrazzo.graph.passes import RULES
from terrazzo.graph.passes.algebra import algebra, holds, never_negative
from terrazzo.graph.rewrite import Applied, RuleTable, rewrite
from terrazzo.graph.trace import trace
from terrazzo.knobs import knobs

FLOATS = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, -1e-38,
                   3.4028235e38, -3.4028235e38, 1.0, -1.0, 0.5, 1.5, -2.5, 3.0, 0.1, -7.3, 1e20,
                   1e-20, 1.9999999], np.float32)
INTS = np.array([0, 1, -1, 2, 3, -7, 100, 2**31 - 1, -2**31], np.int32)
TRUTHS = np.array([False, True])


class Ops:
    """Operators by name: `op.add(x, y)`."""

    def __getattr__(self, name: str) -> Any:
        return OPERATORS[name]


op = Ops()


@dataclass(frozen=True)
class Example:
    function: Callable[..., Any]
    arrays: tuple[np.ndarray, ...]
    ulps: int = 0  # how far a rule may be from the reference of what it replaces


def floats(function: Callable[..., Any], ulps: int = 0) -> Example:
    return Example(function, (FLOATS,), ulps)


def ints(function: Callable[..., Any]) -> Example:
    return Example(function, (INTS,))


def pairs(function: Callable[..., Any], values: np.ndarray = FLOATS) -> Example:
    """All pairs of special values."""
    return Example(function, (np.repeat(values, len(values)), np.tile(values, len(values))))


def moves(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Example:
    """Small whole numbers, so that any order of adding gives the same bits."""
    arrays = tuple(np.arange(np.prod(s), dtype=np.float32).reshape(s) % 7 - 3 for s in shapes)
    return Example(function, arrays)


def choices(function: Callable[..., Any]) -> Example:
    size = len(FLOATS)
    return Example(function, (np.arange(size) % 3 == 0, FLOATS, FLOATS[::-1].copy()))


def less_the_largest(x: Any) -> Any:
    """Rows of x in groups of channels, less the largest of each; in the shape of x again."""
    rows = op.reshape(x, shape=(2, 4, 3, 3))
    return op.reshape(rows - op.max(rows, axis=(2, 3), keepdims=True), shape=(2, 12, 3))


EXAMPLES: dict[str, list[Example]] = {
    "multiply by one": [floats(lambda x: x * 1), floats(lambda x: 1.0 * x), ints(lambda x: x * 1)],
    "divide by one": [floats(lambda x: x / 1)],
    "add zero": [ints(lambda x: x + 0), ints(lambda x: 0 + x)],
    "add minus zero": [floats(lambda x: x + -0.0), floats(lambda x: -0.0 + x)],
    "subtract zero": [floats(lambda x: x - 0), ints(lambda x: x - 0)],
    "multiply by zero": [ints(lambda x: x * 0)],
    "subtract itself": [ints(lambda x: x - x)],
    "floor divide by one": [ints(lambda x: x // 1)],
    "remainder by one": [ints(lambda x: x % 1)],
    "shift by zero": [ints(lambda x: x << 0), ints(lambda x: x >> 0)],
    "and with all": [Example(lambda x: x & True, (TRUTHS,))],
    "and with none": [ints(lambda x: x & 0), Example(lambda x: x & False, (TRUTHS,))],
    "or with none": [ints(lambda x: x | 0), ints(lambda x: x ^ 0),
                     Example(lambda x: x | False, (TRUTHS,))],
    "or with all": [Example(lambda x: x | True, (TRUTHS,))],
    "exclusive or with itself": [ints(lambda x: x ^ x), Example(lambda x: x ^ x, (TRUTHS,))],
    "multiply by minus one": [floats(lambda x: x * -1), ints(lambda x: -1 * x)],
    "subtract from minus zero": [floats(lambda x: -0.0 - x)],
    "subtract from zero": [ints(lambda x: 0 - x)],
    "negative of negative": [floats(lambda x: op.negative(-x)), ints(lambda x: op.negative(-x))],
    "add a negative": [pairs(lambda x, y: x + -y), pairs(lambda x, y: -x + y),
                       pairs(lambda x, y: x + -y, INTS)],
    "subtract a negative": [pairs(lambda x, y: x - -y), pairs(lambda x, y: x - -y, INTS)],
    "multiply negatives": [pairs(lambda x, y: -x * -y), pairs(lambda x, y: -x * -y, INTS)],
    "divide negatives": [pairs(lambda x, y: -x / -y)],
    "absolute of negative": [floats(lambda x: abs(-x)), ints(lambda x: abs(-x))],
    "cosine of negative": [floats(lambda x: op.cos(-x)), floats(lambda x: op.cosh(-x))],
    "rounding twice": [floats(lambda x: op.floor(op.ceil(x))),
                       floats(lambda x: op.round(op.trunc(x)))],
    "absolute twice": [floats(lambda x: abs(abs(x))), ints(lambda x: abs(abs(x)))],
    "sign twice": [floats(lambda x: op.sign(op.sign(x))), ints(lambda x: op.sign(op.sign(x)))],
    "invert twice": [ints(lambda x: ~~x), Example(lambda x: ~~x, (TRUTHS,))],
    "larger of the same": [floats(lambda x: op.maximum(x, x)), floats(lambda x: op.minimum(x, x)),
                           ints(lambda x: x & x), ints(lambda x: x | x)],
    "maximum twice": [pairs(lambda x, y: op.maximum(op.maximum(x, y), y)),
                      pairs(lambda x, y: op.maximum(x, op.maximum(x, y)))],
    "minimum twice": [pairs(lambda x, y: op.minimum(op.minimum(x, y), y))],
    "power zero": [floats(lambda x: x**0), ints(lambda x: x**0)],
    "power one": [floats(lambda x: x**1), ints(lambda x: x**1)],
    "power two": [floats(lambda x: x**2, ulps=1), ints(lambda x: x**2)],
    "power three": [floats(lambda x: x**3, ulps=1), ints(lambda x: x**3)],
    "power minus one": [floats(lambda x: x**-1.0, ulps=1)],
    "power one half": [floats(lambda x: abs(x) ** 0.5, ulps=1),
                       floats(lambda x: (x * x + 1e-5) ** 0.5, ulps=1),
                       moves(lambda x: op.mean(x * x, axis=-1) ** 0.5, (2, 4))],
    "power minus one half": [floats(lambda x: (op.exp(x) + 1.0) ** -0.5, ulps=1)],
    "divide by a power of two": [floats(lambda x: x / 4), floats(lambda x: x / -0.5),
                                 floats(lambda x: x / 2.0**100), ints(lambda x: x / 8)],
    "less than itself": [floats(lambda x: x < x), floats(lambda x: x > x), ints(lambda x: x < x)],
    "equal to itself": [ints(lambda x: x == x), ints(lambda x: x <= x)],
    "unequal to itself": [ints(lambda x: x != x)],
    "is true": [Example(lambda x: x != 0, (TRUTHS,))],
    "equals true": [Example(lambda x: x == True, (TRUTHS,))],  # noqa: E712 (traced)
    "is not true": [Example(lambda x: x == 0, (TRUTHS,))],
    "integers are finite": [ints(lambda x: op.isfinite(x))],
    "integers are no nan": [ints(lambda x: op.isnan(x)), ints(lambda x: op.isinf(x))],
    "choice of the same": [choices(lambda c, x, y: op.where(c, x, x))],
    "choice by true": [choices(lambda c, x, y: op.where(constant(True), x, y))],
    "choice by false": [choices(lambda c, x, y: op.where(constant(False), x, y))],
    "choice by not": [choices(lambda c, x, y: op.where(~c, x, y))],
    "choice of truth": [choices(lambda c, x, y: op.where(c, True, False))],
    "choice within a choice": [choices(lambda c, x, y: op.where(c, op.where(c, x, 1.0), y))],
    "choice within the other choice": [
        choices(lambda c, x, y: op.where(c, x, op.where(c, 1.0, y)))],
    "conversion to its own type": [floats(lambda x: x.astype("float32"))],
    "conversion through a wider type": [
        floats(lambda x: x.astype("float64").astype("float16")),
        floats(lambda x: x.astype("float64").astype("float32")),
        ints(lambda x: x.astype("int64").astype("int8")),
        Example(lambda x: x.astype("int32").astype("bool"), (TRUTHS,))],
    "bitcast to its own type": [floats(lambda x: op.bitcast(x, dtype="float32"))],
    "bitcast twice": [floats(lambda x: op.bitcast(op.bitcast(x, dtype="int32"), dtype="uint32"))],
    "reshape to its own shape": [moves(lambda x: op.reshape(x, shape=(2, 3)), (2, 3))],
    "reshape twice": [moves(lambda x: op.reshape(op.reshape(x, shape=(6,)), shape=(3, 2)),
                            (2, 3))],
    "permute nothing": [moves(lambda x: op.permute_dims(x, axes=(0, -1)), (2, 2))],
    "permute twice": [moves(lambda x: op.permute_dims(op.permute_dims(
        x, axes=(1, 2, 0)), axes=(-1, 1, 0)), (2, 3, 4))],
    "permute axes of size one": [moves(lambda x: op.permute_dims(x, axes=(1, 0, 2)), (2, 1, 3)),
                                 moves(lambda x: op.permute_dims(x, axes=(1, 0)), (1, 3))],
    "broadcast to its own shape": [moves(lambda x: op.broadcast_to(x, shape=(2, 3)), (2, 3))],
    "broadcast twice": [moves(lambda x: op.broadcast_to(op.broadcast_to(
        x, shape=(2, 3)), shape=(4, 2, 3)), (2, 1))],
    "slice everything": [moves(lambda x: op.slice(
        x, starts=(0, 0), stops=(2, 3), steps=(1, 1)), (2, 3))],
    "slice twice": [
        moves(lambda x: op.slice(op.slice(x, starts=(1,), stops=(18,), steps=(3,)), starts=(1,),
                                 stops=(6,), steps=(2,)), (20,)),
        moves(lambda x: op.slice(op.slice(x, starts=(9,), stops=(-1,), steps=(-1,)), starts=(8,),
                                 stops=(1,), steps=(-3,)), (10,))],
    "take every so many": [
        moves(lambda x: op.take_at(x, np.array([1, 3, -1]), axes=(1,)), (3, 6, 2)),
        moves(lambda x: op.take_at(x, np.arange(6, dtype=np.uint8), axes=(0,)), (6, 2)),
        moves(lambda x: op.take_at(x, np.array([-1]), axes=(0,)), (4, 2))],
    "join one": [moves(lambda x: op.concat(x, axis=0), (2, 3))],
    "reduce over size one": [
        Example(lambda x: op.sum(op.reshape(x, shape=(-1, 1)), axis=1), (FLOATS,)),
        Example(lambda x: op.max(op.reshape(x, shape=(1, -1)), axis=0, keepdims=True), (FLOATS,)),
        Example(lambda x: op.prod(op.reshape(x, shape=(-1, 1)), axis=1), (FLOATS,)),
        Example(lambda x: op.sum(op.reshape(x, shape=(-1, 1)), axis=1), (INTS,)),
        Example(lambda x: op.any(op.reshape(x, shape=(-1, 1)), axis=1), (FLOATS,))],
    "reduce twice": [
        moves(lambda x: op.sum(op.sum(x, axis=1), axis=-1), (2, 3, 4)),
        moves(lambda x: op.sum(op.sum(x, axis=1, keepdims=True), axis=0), (2, 3, 4)),
        moves(lambda x: op.max(op.max(x, axis=0), axis=0, keepdims=True), (2, 3, 4)),
        Example(lambda x: op.sum(op.sum(x, axis=0), axis=0), (INTS.reshape(3, 3),))],
    "extremum of copies": [
        moves(lambda x: op.max(op.broadcast_to(x, shape=(4, 2, 3)), axis=(0, 2)), (2, 3)),
        moves(lambda x: op.min(op.broadcast_to(x, shape=(2, 3)), axis=1, keepdims=True), (2, 1))],
    "broadcast before an elementwise operator": [
        moves(lambda x, y: op.broadcast_to(x, shape=(2, 3)) + y, (3,), (2, 3)),
        moves(lambda x, y: op.broadcast_to(x, shape=(2, 3)) * op.broadcast_to(y, shape=(2, 3)),
              (3,), (1, 3)),
        moves(lambda x, y: op.where(op.broadcast_to(x > 0, shape=(2, 3)), 1.0, y), (3,), (2, 3))],
    "reshape after a matrix product": [
        moves(lambda x, y: op.batch_matmul(op.reshape(x, shape=(6, 4)), y), (2, 3, 4), (4, 5)),
        moves(lambda x, y: op.batch_matmul(op.reshape(x, shape=(1, 3, 4)), y, transpose_y=True),
              (3, 4), (5, 4))],
    "taps on padding alone": [
        moves(lambda x, y: op.convolve(x, y, strides=(1, 1), padding=((9, 9), (9, 9)),
                                       dilation=(9, 9)), (1, 5, 6, 2), (3, 3, 2, 3)),
        moves(lambda x, y: op.convolve(x, y, strides=(2, 1), padding=((8, 2), (1, 1)),
                                       dilation=(2, 1), groups=2), (2, 4, 5, 4), (5, 3, 2, 6)),
        moves(lambda x, y: op.convolve(x, y, strides=(1,), padding=((0, 9),), dilation=(3,)),
              (1, 6, 2), (5, 2, 2))],
    "transpose into a matrix product, left": [
        moves(lambda x, y: op.batch_matmul(op.permute_dims(x, axes=(1, 0)), y), (3, 2), (3, 4))],
    "transpose into a matrix product, right": [
        moves(lambda x, y: op.batch_matmul(x, op.permute_dims(y, axes=(0, 2, 1)),
                                           transpose_y=True), (2, 2, 3), (2, 3, 4))],
    "transpose of a matrix product": [
        moves(lambda x, y: op.permute_dims(op.batch_matmul(x, y), axes=(0, 2, 1)), (2, 2, 3),
              (3, 4)),
        moves(lambda x, y: op.permute_dims(op.batch_matmul(x, y, transpose_x=True,
                                                           transpose_y=True), axes=(1, 0)),
              (3, 2), (4, 3))],
    "reshape after a function of rows": [
        moves(lambda x: op.relu(less_the_largest(x)), (2, 12, 3)),
        moves(lambda x: op.negative(less_the_largest(x)), (2, 12, 3))],
    "reshape after an operator on rows, left": [
        moves(lambda x, y: less_the_largest(x) * y, (2, 12, 3), (12, 1)),
        moves(lambda x, y: less_the_largest(x) - y, (2, 12, 3), (2, 12, 3)),
        moves(lambda x: less_the_largest(x) - op.relu(less_the_largest(x)), (2, 12, 3))],
    "reshape after an operator on rows, right": [
        moves(lambda x, y: y - less_the_largest(x), (2, 12, 3), (12, 3)),
        moves(lambda x, y: y - less_the_largest(x), (2, 12, 3), (2, 1, 1))],
}


def graph_of(function: Callable[..., Any], arrays: tuple[np.ndarray, ...]) -> Graph:
    types = [TensorType(a.shape, as_dtype(a.dtype)) for a in arrays]
    return trace(function, types, "example")[0]


def assert_same(before: np.ndarray, after: np.ndarray, ulps: int = 0) -> None:
    """The same bits, but for what a nan carries; or within `ulps` floats of each other."""
    assert before.dtype == after.dtype and before.shape == after.shape
    if before.dtype.kind != "f":
        np.testing.assert_array_equal(before, after)
        return
    np.testing.assert_array_equal(np.isnan(before), np.isnan(after))
    known = ~np.isnan(before)
    np.testing.assert_array_equal(np.signbit(before[known]), np.signbit(after[known]))
    bits = f"i{before.dtype.itemsize}"
    a, b = before[known].view(bits).astype(np.int64), after[known].view(bits).astype(np.int64)
    assert np.max(np.abs(a - b), initial=0) <= ulps, f"{before} became {after}"


CASES = [pytest.param(name, e, id=f"{name}-{i}") for name, examples in EXAMPLES.items()
         for i, e in enumerate(examples)]


@pytest.mark.parametrize(("name", "example"), CASES)
def test_rule(name: str, example: Example) -> None:
    graph = graph_of(example.function, example.arrays)
    after, applied = rewrite(graph, RULES)
    assert name in {a.rule for a in applied}, f"did not fire on\n{graph}\nbut {applied}"
    alone, _ = rewrite(graph, RuleTable((RULES[name],)))
    expected = run(graph, example.arrays)
    for rewritten in (alone, after):
        for before, now in zip(expected, run(rewritten, example.arrays), strict=True):
            assert_same(before, now, example.ulps)


def test_every_rule_has_an_example() -> None:
    assert [rule.name for rule in RULES] == list(dict.fromkeys(rule.name for rule in RULES))
    assert {rule.name for rule in RULES} == EXAMPLES.keys()


@pytest.mark.parametrize("function", [
    lambda x: x + 0.0,  # -0.0 + 0.0 is 0.0
    lambda x: x - -0.0,
    lambda x: 0.0 - x,
    lambda x: x * 0.0,  # nan and infinity
    lambda x: x - x,
    lambda x: x == x,
    lambda x: op.exp(op.log(x)),
    lambda x: x / 3.0,
    lambda x: x / 2.0**127,  # the reciprocal is a denormal
    lambda x: x**0.5,  # -inf and -0.0
    lambda x: x**-0.5,
    lambda x: x.astype("float16").astype("float32"),
    lambda x: x.astype("int32").astype("float32"),
    lambda x: x * constant(np.array([[1.0], [1.0]], np.float32)),  # changes the shape
    lambda x: op.where(x > 0, x, x * 2),
])
def test_what_would_change_a_bit_stays(function: Callable[..., Any]) -> None:
    assert rewrite(graph_of(function, (FLOATS,)), RULES)[1] == []


def test_float_results_of_integers_keep_their_type() -> None:
    graph = graph_of(lambda x: x / 1, (INTS,))
    after = algebra(graph)
    assert after.outputs[0].dtype is float32
    assert_same(run(graph, [INTS])[0], run(after, [INTS])[0])


def test_rows_of_nothing_are_not_counted() -> None:
    x, y = np.ones((9, 4, 2, 0), np.float32), np.ones((0, 4), np.float32)
    graph = graph_of(lambda x, y: op.batch_matmul(op.reshape(x, shape=(36, 0)), y), (x, y))
    assert algebra(graph).outputs[0].shape == (36, 4)


def test_a_truth_value_has_no_negative() -> None:
    graph = graph_of(lambda x: x * -1, (TRUTHS,))
    assert_same(run(graph, [TRUTHS])[0], run(algebra(graph), [TRUTHS])[0])


def test_half_types_divide_by_powers_of_two_only_where_the_inverse_is_normal() -> None:
    near, far = (rewrite(graph_of(lambda x, d=divisor: x / d, (np.ones(3, np.float16),)), RULES)[1]
                 for divisor in (2.0**10, 2.0**15))
    assert [a.rule for a in near] == ["divide by a power of two"] and far == []


def test_levels_choose_rules() -> None:
    x = np.ones((2, 3, 4), np.float32)
    graph = graph_of(lambda x: op.sum(op.sum(x * 1, axis=1), axis=-1), (x,))
    names = {level: [a.rule for a in rewrite(graph, RULES, level)[1]]
             for level in ("basic", "extended")}
    assert names == {"basic": ["multiply by one"],
                     "extended": ["multiply by one", "reduce twice"]}


def test_algebra_records_where() -> None:
    log: list[Applied] = []
    algebra(graph_of(lambda x: x * 1, (FLOATS,)), log)
    (record,) = log
    assert record.rule == "multiply by one"
    assert record.node == "multiply(f32[22], f32[]) -> f32[22]"
    assert "test_algebra.py" in record.where and "test_algebra.py" in str(record)


def test_holds_agrees_with_conversion() -> None:
    """Every value of a small type comes back from a type that is said to hold it."""
    for narrow in (int8, bool_, float16, bfloat16):
        bits = np.arange(2 ** (8 * narrow.itemsize), dtype=f"u{narrow.itemsize}")
        values = (np.array([False, True]) if narrow is bool_ else bits.view(narrow.np))
        for wide in DTYPES:
            if wide.is_complex:
                continue
            with np.errstate(all="ignore"):
                back = values.astype(wide.np).astype(narrow.np)
                exact = bool(np.all((back == values) | (values != values)))
            if holds(wide, narrow):
                assert exact, f"{wide} does not hold {narrow}"


def test_never_negative_needs_a_proof() -> None:
    def proves(function: Callable[..., Any]) -> bool:
        return never_negative(graph_of(function, (FLOATS,)).outputs[0])

    assert proves(lambda x: x * x) and proves(lambda x: op.sqrt(abs(x)) + 1e-6)
    assert proves(lambda x: op.sum(op.exp(x)) / 22)
    assert not proves(lambda x: x * 2) and not proves(lambda x: x * x - 1.0)
    assert not proves(lambda x: abs(x) * -0.0) and not proves(lambda x: x)
    assert int32.is_integer and not never_negative(graph_of(lambda x: x, (INTS,)).outputs[0])


@pytest.mark.parametrize("function", [
    lambda x, y: abs(-x), lambda x, y: abs(0 - x), lambda x, y: tz.cos(-x),
    lambda x, y: tz.cosh(-x), lambda x, y: (-x) / (-y), lambda x, y: (-x) * (-y),
    lambda x, y: x + -y, lambda x, y: x - -y, lambda x, y: tz.negative(-x)])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64", "float32"])
def test_signs_of_numbers_that_wrap_around(function: Any, dtype: str) -> None:
    """Of unsigned numbers the negative is positive, and of the least one it is itself."""
    ends = [0, 1, 2, 100] if dtype == "float32" else [
        0, 1, 2, np.iinfo(dtype).min, np.iinfo(dtype).max]
    x, y = np.array(ends, dtype), np.array(ends[::-1], dtype)
    compiled = tz.op(function, name="test_signs")(x, y)
    with np.errstate(all="ignore"), knobs.override(opt_level="none"):
        plain = tz.op(function, name="test_signs_plain")(x, y)
    np.testing.assert_array_equal(compiled, plain)
