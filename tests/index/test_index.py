"""The index algebra: its rules are proved, its expressions keep their values, its text reads."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.index import (
    RULES,
    Algebra,
    Index,
    IndexExpr,
    Rule,
    Var,
    bounds,
    ceildiv,
    coefficient,
    compile_python,
    divisible,
    evaluate,
    free_vars,
    interpret,
    maximum,
    minimum,
    proofs,
    proves_eq,
    proves_le,
    proves_lt,
    substitute,
    without,
)

f, m, n, x, y = map(Var, "fmnxy")
i, j, k = Var("i", 0, 1023), Var("j", 0, 31), Var("k", 0, 63)
column = Var("column", 0, n - 1)


# --------------------------------------------------------------------------------- the rules


class _Proof:
    """Integers for z3, where each `a // d` and `a % d` stands for the q and r of a = d*q + r.

    Left-hand sides assume that their divisors are positive, right-hand sides have to show it.
    """

    def __init__(self, rule: Rule) -> None:
        self.z3 = pytest.importorskip("z3")
        self.known: list[Any] = []
        self.to_show: list[Any] = []
        self.divisions: list[tuple[Any, Any, Any, Any]] = []
        self.assume_positive = True
        self.names: dict[str, Any] = {v: _Term(self, self.z3.Int(v)) for v in rule.variables}
        self.names |= {"min": self.smaller, "max": self.larger}

    def term(self, text: str) -> Any:
        value = eval(text, {}, self.names)
        return value.z if isinstance(value, _Term) else value

    def smaller(self, a: _Term, b: _Term) -> _Term:
        return _Term(self, self.z3.If(a.z <= b.z, a.z, b.z))

    def larger(self, a: _Term, b: _Term) -> _Term:
        return _Term(self, self.z3.If(a.z >= b.z, a.z, b.z))

    def divide(self, num: Any, den: Any) -> tuple[_Term, _Term]:
        (self.known if self.assume_positive else self.to_show).append(den > 0)
        for old_num, old_den, quotient, rest in self.divisions:
            if self.same(num, old_num) and self.same(den, old_den):
                return _Term(self, quotient), _Term(self, rest)
        quotient, rest = self.z3.Ints(f"q{len(self.divisions)} r{len(self.divisions)}")
        self.known += [num == den * quotient + rest, rest >= 0, rest < den]
        self.divisions.append((num, den, quotient, rest))
        return _Term(self, quotient), _Term(self, rest)

    def same(self, a: Any, b: Any) -> bool:
        return self.z3.is_true(self.z3.simplify(a == b, som=True))

    def follows(self, claim: Any) -> bool:
        solver = self.z3.Solver()
        solver.set("timeout", 20_000)
        solver.add(*self.known, self.z3.Not(claim))
        return solver.check() == self.z3.unsat


class _Term:
    def __init__(self, proof: _Proof, z: Any) -> None:
        self.proof, self.z = proof, z

    def lift(self, other: Any) -> Any:
        return other.z if isinstance(other, _Term) else self.proof.z3.IntVal(other)

    def __add__(self, other: Any) -> _Term:
        return _Term(self.proof, self.z + self.lift(other))

    def __sub__(self, other: Any) -> _Term:
        return _Term(self.proof, self.z - self.lift(other))

    def __mul__(self, other: Any) -> _Term:
        return _Term(self.proof, self.z * self.lift(other))

    def __floordiv__(self, other: Any) -> _Term:
        return self.proof.divide(self.z, self.lift(other))[0]

    def __rfloordiv__(self, other: Any) -> _Term:
        return self.proof.divide(self.lift(other), self.z)[0]

    def __mod__(self, other: Any) -> _Term:
        return self.proof.divide(self.z, self.lift(other))[1]

    def __rmod__(self, other: Any) -> _Term:
        return self.proof.divide(self.lift(other), self.z)[1]

    def __lt__(self, other: Any) -> Any:
        return self.z < self.lift(other)

    def __le__(self, other: Any) -> Any:
        return self.z <= self.lift(other)

    def __ge__(self, other: Any) -> Any:
        return self.z >= self.lift(other)

    def __eq__(self, other: object) -> Any:
        return self.z == self.lift(other)

    __hash__ = None  # type: ignore[assignment]


# Steps that lead the solver to a proof; each is proved itself before it may be used.
LEMMAS = {"div-mod": ("x // (a*b) == x // a // b", "x % (a*b) == (x // a % b)*a + x % a")}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_is_proved(rule: Rule) -> None:
    proof = _Proof(rule)
    left = proof.term(rule.lhs)
    proof.known += [proof.term(guard) for guard in rule.when]
    proof.assume_positive = False
    right = proof.term(rule.rhs)
    claims = [proof.term(lemma) for lemma in LEMMAS.get(rule.name, ())]
    for claim in [*proof.to_show, *claims, left == right]:
        assert proof.follows(claim), f"{rule}: could not prove {claim}"
        proof.known.append(claim)


def test_a_false_rule_is_not_proved() -> None:
    proof = _Proof(
        Rule("floordiv", "wrong", "(x + y) // c", "x // c + y // c", (), lambda: iter(()))
    )
    assert not proof.follows(proof.term("(x + y) // c") == proof.term("x // c + y // c"))


# For each rule: the operands it applies to, and what it makes of them.
EXAMPLES: dict[str, tuple[tuple[Any, ...], str]] = {
    "div-one": ((x, 1), "x"),
    "div-zero": ((0, n), "0"),
    "div-minus-one": ((-1, n), "-1"),
    "div-range": ((j + 64, 32), "2"),
    "div-multiple": ((i * 1024 + x, 1024), "i + x // 1024"),
    "div-cancel": ((x * n, m * n), "x // m"),
    "div-low-digits": ((x * 32 + j, 64), "x // 2"),
    "div-div": ((x // n + 3, m), "(n*3 + x) // (m*n)"),
    "div-mod": ((x % (m * n), n), "(x // n) % m"),
    "mod-one": ((x, 1), "0"),
    "mod-zero": ((0, n), "0"),
    "mod-minus-one": ((-1, n), "n - 1"),
    "mod-range": ((j + 64, 32), "j"),
    "mod-multiple": ((i * n + x, n), "x % n"),
    "mod-cancel": ((x * n, m * n), "n*(x % m)"),
    "mod-low-digits": ((x * n + column, m * n), "n*(x % m) + column"),
    "mod-mod": ((y + (x % 64) * 3, 16), "(x*3 + y) % 16"),
    "sum-div-mod": (({(n, x // n): 2, (x % n,): 2, (y,): 1},), "x*2 + y"),
    "sum-digits": (({((x // 8) % 4,): 8, (x % 8,): 1},), "x % 32"),
    "sum-remainder": (({(x,): 1, (x // 8,): -8},), "x % 8"),
    "sum-multiple": (({(x,): 3, (x % 8,): -3, (y,): 1},), "y + (x // 8)*24"),
    "min-smaller": ((x + 1, x, 2), "x"),
    "min-common": ((x + n, x + m, 2), "x + min(m, n)"),
    "max-larger": ((x + 1, x, 2), "x + 1"),
    "max-common": ((x + n, x + m, 2), "x + max(m, n)"),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_applies_to_its_example(rule: Rule) -> None:
    operands, expected = EXAMPLES[rule.name]
    assert str(rule.apply(*operands)) == expected


# ------------------------------------------------------------------------ values are preserved

NAMES: dict[str, Index] = {
    "i": Var("i", 0, 7),
    "j": Var("j", 0, 31),
    "s": Var("s", -5, 5),
    "u": Var("u", None, None),
    "n": n,
    "m": m,
    "column": column,
}


@st.composite
def assignments(draw: st.DrawFn) -> dict[str, int]:
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    return {
        "i": draw(st.integers(0, 7)),
        "j": draw(st.integers(0, 31)),
        "s": draw(st.integers(-5, 5)),
        "u": draw(st.integers(-1000, 1000)),
        "m": rows,
        "n": columns,
        "column": draw(st.integers(0, columns - 1)),
    }


positive = st.one_of(
    st.sampled_from(["1", "2", "3", "4", "8", "16", "32", "64"]),
    st.sampled_from(["n", "m", "(m*n)", "(n*4)", "(n + 1)", "(m*n*2)", "(j + 2)"]),
)
sources = st.recursive(
    st.one_of(st.sampled_from(sorted(NAMES)), st.integers(-70, 70).map(lambda c: f"({c})")),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda t: f"({' '.join(t)})"),
        st.tuples(inner, st.sampled_from(["//", "%", "*"]), positive).map(
            lambda t: f"({' '.join(t)})"
        ),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(
            lambda t: f"{t[0]}({t[1]}, {t[2]})"
        ),
        # Digits of one value by one divisor are what flattening and tiling produce all the time.
        st.tuples(inner, positive, positive).map(
            lambda t: f"(({t[0]} // {t[1]} % {t[2]})*{t[1]} + {t[0]} % {t[1]})"
        ),
    ),
    max_leaves=10,
)


def build(source: str) -> Index:
    value: Index = eval(source, {"min": minimum, "max": maximum}, NAMES)
    return value


@settings(max_examples=400, deadline=None)
@given(sources, st.lists(assignments(), min_size=5, max_size=5))
def test_simplifying_keeps_the_value(source: str, points: list[dict[str, int]]) -> None:
    e = build(source)
    low, high = bounds(e)
    code = compile_python(e)
    for point in points:
        value = eval(source, {}, point)
        assert evaluate(e, point) == value
        assert low is None or low <= value
        assert high is None or value <= high
        assert eval(code, {}, point) == value
        assert eval(str(e), {}, point) == value
    arrays = {name: np.array([point[name] for point in points]) for name in NAMES}
    values = [eval(source, {}, point) for point in points]
    np.testing.assert_array_equal(evaluate(e, arrays) + np.zeros(5, int), values)


@settings(max_examples=200, deadline=None)
@given(sources, sources, st.lists(assignments(), min_size=5, max_size=5))
def test_what_is_proved_is_true(a: str, b: str, points: list[dict[str, int]]) -> None:
    less, least, equal = (claim(build(a), build(b)) for claim in (proves_lt, proves_le, proves_eq))
    for point in points:
        left, right = eval(a, {}, point), eval(b, {}, point)
        assert left < right or not less
        assert left <= right or not least
        assert left == right or not equal


@settings(max_examples=300, deadline=None)
@given(sources)
def test_what_an_example_refutes_cannot_be_proved(source: str) -> None:
    """Looking for an example first saves the search for a proof, and changes no answer."""
    e = build(source)
    assert not (proofs._refuted(e) and proofs._nonnegative(e, proofs._PROOF_DEPTH))


def test_examples_keep_to_bounds() -> None:
    assert proofs._refuted(n - m - 1) and proofs._refuted(column - n)
    assert proofs._refuted(i - 1023 + j)
    assert not proofs._refuted(n - column - 1), "a counter stays below its dimension"
    assert not proofs._refuted((x // maximum(n, 1)) * 5 + y)
    assert not proofs._refuted(x - (x // n) * n), "a divisor is positive"


@settings(max_examples=200, deadline=None)
@given(sources, st.sampled_from(["i", "s", "n"]), sources, assignments())
def test_substitution_is_evaluation(
    source: str, name: str, replacement: str, point: dict[str, int]
) -> None:
    var = NAMES[name]
    assert isinstance(var, Var)
    # A divisor has to stay positive.
    by = maximum(build(replacement), 1) if name == "n" else build(replacement)
    e = substitute(build(source), {var: by})
    there = {**point, name: evaluate(by, point)}
    assert evaluate(e, point) == evaluate(build(source), there)


@settings(max_examples=200, deadline=None)
@given(sources, st.sampled_from(["i", "u", "n"]), assignments())
def test_affine_parts_add_up(source: str, name: str, point: dict[str, int]) -> None:
    e, var = build(source), NAMES[name]
    assert isinstance(var, Var)
    step = coefficient(e, var)
    if step is not None:
        assert var not in free_vars(step)
        assert var not in free_vars(without(e, var))
        assert step * var + without(e, var) == e
        value = evaluate(step, point) * point[name] + evaluate(without(e, var), point)
        assert value == evaluate(e, point)


@settings(max_examples=200, deadline=None)
@given(sources, st.sampled_from([2, 4, 8, 64]), assignments())
def test_divisible_is_true(source: str, by: int, point: dict[str, int]) -> None:
    if divisible(build(source), by):
        assert eval(source, {}, point) % by == 0


# ------------------------------------------------------------------------------- known results


def test_polynomials_are_canonical() -> None:
    assert n * m - m * n == 0
    assert (n + 1) * (n - 1) == n * n - 1
    assert (x + y) * n is n * y + x * n
    assert x + y is y + x
    assert Var("x") is x
    assert Var("x", 0, 9) is not x


def test_quotient_and_remainder_join_for_a_symbolic_divisor() -> None:
    assert (f // n) * n + f % n is f
    assert (f // (n + 1)) * (n + 1) + f % (n + 1) is f
    assert (f // (m * n)) * m * n + (f // n % m) * n + f % n is f


def test_flattening_and_unflattening_cancel() -> None:
    flat = i * n + column
    assert flat // n is i
    assert flat % n is column
    flat = (x * 32 + j) * 64 + k
    assert (flat // 2048, flat // 64 % 32, flat % 64) == (x, j, k)
    # Seen through another tiling: the same digits, regrouped.
    assert flat // 512 * 512 + flat % 512 is flat


def test_rounding_up_has_one_form() -> None:
    assert ceildiv(n, 64) is (n - 1) // 64 + 1
    assert ceildiv(n, n) == 1
    assert ceildiv(n * 64, 64) is n
    padding = ceildiv(n, 64) * 64 - n
    assert bounds(padding) == (0, 63)
    assert proves_lt(padding, 64) and proves_le(n, ceildiv(n, 64) * 64)


def test_bounds() -> None:
    assert bounds(5) == (5, 5)
    assert bounds(i * 2 - j) == (-31, 2046)
    assert bounds(n) == (0, None)
    assert bounds(-n) == (None, 0)
    assert bounds(i * n) == (0, None)
    assert bounds(n % 64) == (0, 63)
    assert bounds(minimum(n, 64)) == (0, 64)
    assert bounds(maximum(n, 64)) == (64, None)
    assert bounds((i - 512) // 100) == (-6, 5)
    assert bounds(Var("any", None)) == (None, None)


def test_proofs_with_symbolic_bounds() -> None:
    tile = Var("tile")
    assert proves_lt(column, n)
    assert proves_lt(f % n, n)
    assert proves_lt(i * n + column, n * 1024)
    assert proves_le((f // n) * n, f)
    assert proves_le(tile * 64 + minimum(n - tile * 64, 64), n)
    assert proves_eq(minimum(i + 64, n) - i, minimum(64, n - i))
    assert proves_le(minimum(x, y), maximum(x, y))
    assert not proves_le(x, y) and not proves_eq(x, y) and not proves_lt(x, x)


def test_quotients_of_counters_stay_below_what_their_sizes_divide_into() -> None:
    task, lane = Var("task", 0, n * 196 - 1), Var("lane", 0, 1)
    assert proves_lt(task // 196, n)
    assert proves_lt(lane + (task // 28) * 2, n * 14)
    assert proves_lt(lane + (task // 196) * 14 + ((task // 4) % 7) * 2, n * 14)
    assert not proves_lt(task // 195, n) and not proves_lt(task // 28, n * 7 - 1)


def test_minimum_and_maximum() -> None:
    assert minimum(3, 4) == 3 and maximum(3, 4) == 4
    assert minimum(x, x + 3) is x and maximum(x, x + 3) == x + 3
    assert minimum(i, 2000) is i and maximum(i, -1) is i
    assert minimum(minimum(x, y), minimum(y, n)) is minimum(n, minimum(x, y))
    assert minimum(x, maximum(x, y)) is x
    assert maximum(x + n, y + n) - n is maximum(x, y)


@pytest.mark.parametrize(
    ("e", "text"),
    [
        (i * 1024 + j, "i*1024 + j"),
        (f // n, "f // n"),
        (minimum(n - x * 64, 64), "min(n - x*64, 64)"),
        (ceildiv(n, 64), "(n + 63) // 64"),
        ((f // n) * 4 - 1, "(f // n)*4 - 1"),
        (f // n % m, "(f // n) % m"),
        (x + (y + 1) % 64 - f // n, "x + (y + 1) % 64 - f // n"),
        (3 - n, "3 - n"),
        (-n, "-n"),
        (-(f // n), "-(f // n)"),
        (-(f // n) - 1, "-(f // n) - 1"),
        (-n - 2, "-n - 2"),
        (n * m * 4 // (x + 1), "m*n*4 // (x + 1)"),
        (maximum(n, 1) * x, "x*max(n, 1)"),
        (Var("b") + Var("a") * n, "a*n + b"),
    ],
)
def test_text(e: Index, text: str) -> None:
    assert str(e) == text


def test_python_source_takes_names() -> None:
    assert compile_python(i * n + 1, {i: "row", "n": "dims[0]"}) == "row*dims[0] + 1"
    assert compile_python(7) == "7"


def test_affine_queries() -> None:
    e = i * n * 2 + j - 3
    assert coefficient(e, i) is n * 2
    assert coefficient(e, k) == 0
    assert coefficient(i * i, i) is None
    assert coefficient(i + i // n, i) is None
    assert without(e, i) is j - 3
    assert coefficient(5, i) == 0 and without(5, i) == 5
    assert free_vars(e) == {i, j, n} and free_vars(5) == set()


def test_divisible() -> None:
    assert divisible(i * 64 + minimum(n * 16, 32), 16)
    assert divisible((x * 8) % 64, 8)
    assert divisible(0, 8) and divisible(64, 8) and not divisible(x, 2)


def test_interpreting_in_another_algebra() -> None:
    def node(sign: str) -> Callable[[Any, Any], Any]:
        return lambda a, b: (sign, a, b)

    signs = [node(sign) for sign in ("+", "*", "//", "%", "min", "max")]
    trees: Algebra[Any] = Algebra(lambda number: number, lambda var: var.name, *signs)
    assert interpret(i * 1024 + j, trees) == ("+", ("*", "i", 1024), "j")
    assert interpret(minimum(f // n, 7), trees) == ("min", ("//", "f", "n"), 7)
    assert interpret(maximum(f % n, 7) - 1, trees) == ("+", ("max", ("%", "f", "n"), 7), -1)
    assert interpret(7, trees) == 7


def test_evaluating_by_variable_or_name() -> None:
    odd, wide = Var("%x.1", 0, 7), Var("%x.1", 0, 63)
    assert evaluate(odd * 100 + wide, {odd: 3, wide: 5}) == 305
    assert evaluate(odd + n, {"%x.1": 3, n: 5}) == 8
    assert evaluate(9, {}) == 9
    counts = np.arange(4)
    clipped = evaluate(minimum(minimum(x, y), 2) + maximum(x, 1), {"x": counts, "y": 9})
    np.testing.assert_array_equal(clipped, np.minimum(counts, 2) + np.maximum(counts, 1))


def test_a_variable_with_one_value_is_that_value() -> None:
    only = Var("only", 0, 0)
    assert only * 64 + j is j
    assert (only + x) // 4 is x // 4


def test_numpy_integers_are_constants() -> None:
    four: Any = np.int64(4)
    assert four * x is x * 4
    assert x + four is x + 4
    assert type(bounds(minimum(x, four))[1]) is int


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="never positive"):
        x // 0
    with pytest.raises(ValueError, match="never positive"):
        x % -n
    with pytest.raises(ValueError, match="has no value"):
        Var("empty", 3, 2)
    with pytest.raises(TypeError, match="proves_eq"):
        bool(x)
    with pytest.raises(TypeError, match="unsupported operand"):
        x + 0.5  # type: ignore[operator]
    with pytest.raises(KeyError, match="'y'"):
        evaluate(x + y, {"x": 1})
    with pytest.raises(AttributeError, match="immutable"):
        x.name = "z"


def test_copies_are_the_same_node() -> None:
    e = minimum(f // n, (i * n + j) % 7)
    assert pickle.loads(pickle.dumps(e)) is e
    assert copy.deepcopy(e) is e
    assert isinstance(e, IndexExpr) and hash(e) == hash(copy.copy(e))


def test_building_is_fast() -> None:
    start = time.process_time()
    for tile in range(500):
        row, lane = Var(f"row{tile}", 0, 63), Var(f"lane{tile}", 0, 15)
        flat = row * 16 + lane
        assert (flat // 16, flat % 16) == (row, lane)
    # About 0.05 s of one core, whatever else the machine does.
    assert time.process_time() - start < 5


def test_the_coefficient_of_a_variable_with_one_value() -> None:
    only = Var("only", 0, 0)
    assert coefficient(only, only) == 1
