"""The rules that simplify symbolic integers, as a table of named identities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from terrazzo.index.nodes import (
    SIMPLIFIERS,
    FloorDiv,
    Index,
    IndexExpr,
    Mod,
    Monomial,
    Node,
    Polynomial,
    Sum,
    bounds,
    canonical,
    divide,
    exact_quotient,
    items,
    maximum,
    minimum,
    monomial_order,
    monomial_quotient,
    without_atom,
)
from terrazzo.index.proofs import proves_le, proves_lt

Matches: TypeAlias = "Iterator[dict[str, Index]]"


@dataclass(frozen=True, eq=False)
class Rule:
    """A named identity: wherever `when` is proved, `lhs` is replaced by `rhs`.

    `match` finds the values of the identity's variables in the operands of `operation`; it only
    takes expressions apart. What makes the step sound is the text, which the tests prove.
    """

    operation: str
    name: str
    lhs: str
    rhs: str
    when: tuple[str, ...]
    match: Callable[..., Matches]

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """The names the identity speaks about, in alphabetical order."""
        text = "".join(f"({part})," for part in (self.lhs, self.rhs, *self.when))
        names = compile(text, self.name, "eval").co_names
        return tuple(sorted(set(names) - {"min", "max"}))

    @cached_property
    def _result(self) -> Callable[..., Index]:
        return self._function(self.rhs)

    @cached_property
    def _guards(self) -> tuple[Callable[..., bool], ...]:
        """Each condition as a call of the prover: "r < k" asks proves_lt(r, k)."""
        calls = []
        for guard in self.when:
            small, sign, large = guard.partition(" < " if " < " in guard else " <= ")
            prover = "proves_lt" if sign == " < " else "proves_le"
            calls.append(self._function(f"{prover}({small}, {large})"))
        return tuple(calls)

    def _function(self, text: str) -> Callable[..., Any]:
        names = {"min": minimum, "max": maximum, "proves_le": proves_le, "proves_lt": proves_lt}
        function: Callable[..., Any] = eval(f"lambda {', '.join(self.variables)}: {text}", names)
        return function

    def apply(self, *operands: Any) -> Index | None:
        """The simpler form of the operation on these operands, or None if the rule has none."""
        for values in self.match(*operands):
            if all(guard(**values) for guard in self._guards):
                result: Index = self._result(**values)
                return result
        return None

    def __str__(self) -> str:
        when = f"   when {' and '.join(self.when)}" if self.when else ""
        return f"{self.name}: {self.lhs} = {self.rhs}{when}"


def _numerator(value: int) -> Callable[..., Matches]:
    def match(num: Index, den: Index) -> Matches:
        if isinstance(num, int) and num == value:
            yield {"c": den}

    return match


def _by_one(num: Index, den: Index) -> Matches:
    if isinstance(den, int) and den == 1:
        yield {"x": num}


def _in_one_period(num: Index, den: Index) -> Matches:
    if isinstance(den, int):
        low, high = bounds(num)
        if low is not None and high is not None and low // den == high // den:
            yield {"x": num, "c": den, "q": low // den}
    else:
        yield {"x": num, "c": den, "q": 0}


def _multiples(num: Index, den: Index) -> Matches:
    quotient, rest = divide(num, den)
    # Dividing by a sum may trade one term for several; only a shorter rest is progress.
    if quotient != 0 and (len(items(den)) == 1 or len(items(rest)) < len(items(num))):
        yield {"x": quotient, "y": rest, "c": den}


def _common_factors(num: Index, den: Index) -> Matches:
    """Splits of `num` into `x*k + r` for the factors `k` that some of its terms share with `den`.

    The mixed-radix digits of flattened indices come apart here: in `(i*32 + j) // 64` k is 32.
    """
    content = math.gcd(*(factor for _, factor in items(den)))
    atoms = [atom for atom in items(den)[0][0]]
    for monomial, _ in items(den)[1:]:
        atoms = [atom for atom in atoms if atom in monomial]
    found: dict[Index, tuple[Any, ...]] = {}
    for monomial, factor in items(num):
        if not monomial:
            continue
        shared: list[IndexExpr] = []
        for atom in monomial:
            if shared.count(atom) < atoms.count(atom):
                shared.append(atom)
        number = math.gcd(factor, content)
        k = canonical({tuple(shared): number})
        if k != 1 and k != den:
            found[k] = (*monomial_order(tuple(shared)), -number)
    for k in sorted(found, key=found.__getitem__):
        ((k_atoms, k_number),) = items(k)
        x: Polynomial = {}
        rest: Polynomial = {}
        for monomial, factor in items(num):
            over = monomial_quotient(monomial, k_atoms)
            if not monomial and not k_atoms:
                x[()], rest[()] = divmod(factor, k_number)
            elif over is not None and factor % k_number == 0:
                x[over] = factor // k_number
            else:
                rest[monomial] = factor
        c = exact_quotient(den, k)
        if c is not None:
            yield {"x": canonical(x), "r": canonical(rest), "k": k, "c": c}


def _common_factor_of_all(num: Index, den: Index) -> Matches:
    for values in _common_factors(num, den):
        if values.pop("r") == 0:
            yield values


def _quotient_plus_constant(num: Index, den: Index) -> Matches:
    constant = num.constant if isinstance(num, Sum) else 0
    base = num - constant
    if isinstance(base, FloorDiv):
        yield {"x": base.num, "a": base.den, "y": constant, "b": den}


def _remainder_by_multiple(num: Index, den: Index) -> Matches:
    if isinstance(num, Mod):
        ratio = exact_quotient(num.den, den)
        if ratio is not None:
            yield {"x": num.num, "a": den, "b": ratio}


def _remainder_terms(num: Index, den: Index) -> Matches:
    for monomial, factor in items(num):
        for atom in monomial:
            if isinstance(atom, Mod):
                ratio = exact_quotient(atom.den, den)
                if ratio is not None:
                    k = canonical({without_atom(monomial, atom): factor})
                    y = num - k * atom
                    yield {"k": k, "x": atom.num, "a": den, "b": ratio, "y": y}


def _atoms_with_factors(poly: Polynomial, kind: type[Node]) -> Iterator[tuple[Node, Monomial, int]]:
    for monomial, factor in poly.items():
        for atom in monomial:
            if isinstance(atom, kind):
                yield atom, without_atom(monomial, atom), factor


def _contains(poly: Polynomial, part: Index) -> bool:
    """Whether the polynomial has every symbolic term of `part`; constants can always be made up."""
    terms = [(monomial, factor) for monomial, factor in items(part) if monomial]
    return bool(terms) and all(poly.get(monomial) == factor for monomial, factor in terms)


def _rest_of(poly: Polynomial, *parts: Index) -> Index:
    rest = dict(poly)
    for part in parts:
        for monomial, factor in items(part):
            rest[monomial] = rest.get(monomial, 0) - factor
    return canonical(rest)


def _quotient_and_remainder(poly: Polynomial) -> Matches:
    for mod, others, factor in _atoms_with_factors(poly, Mod):
        k = canonical({others: factor})
        whole = (mod.num // mod.den) * mod.den * k
        if _contains(poly, whole):
            y = _rest_of(poly, whole, mod * k)
            yield {"x": mod.num, "c": mod.den, "k": k, "y": y}


def _adjacent_digits(poly: Polynomial) -> Matches:
    for low, others, factor in _atoms_with_factors(poly, Mod):
        k = canonical({others: factor})
        quotient = low.num // low.den
        for high, _, _ in _atoms_with_factors(poly, Mod):
            # Multiples of the low digit's base have left its numerator: here they are again.
            above = high.num - quotient
            if above == 0 or len(items(above)) < len(items(high.num)):
                part = high * low.den * k
                if _contains(poly, part):
                    y = _rest_of(poly, part, low * k)
                    yield {"x": low.num, "a": low.den, "b": high.den, "d": above, "k": k, "y": y}


def _value_less_multiple(poly: Polynomial) -> Matches:
    for div, others, factor in _atoms_with_factors(poly, FloorDiv):
        k = exact_quotient(canonical({others: -factor}), div.den)
        if k is not None and _contains(poly, div.num * k):
            whole = div * div.den * k
            if _contains(poly, -whole):
                y = _rest_of(poly, div.num * k, -whole)
                yield {"x": div.num, "c": div.den, "k": k, "y": y}


def _value_less_remainder(poly: Polynomial) -> Matches:
    for mod, others, factor in _atoms_with_factors(poly, Mod):
        k = canonical({others: -factor})
        if _contains(poly, mod.num * k):
            y = _rest_of(poly, mod.num * k, -(mod * k))
            yield {"x": mod.num, "c": mod.den, "k": k, "y": y}


def _either_way(x: Index, y: Index, count: int) -> Matches:
    yield {"x": x, "y": y}
    yield {"x": y, "y": x}


def _common_terms(x: Index, y: Index, count: int) -> Matches:
    in_y = dict(items(y))
    shared = canonical({m: factor for m, factor in items(x) if m and in_y.get(m) == factor})
    # Among three or more, pulling a sum out of two of them would hide it from the others.
    if shared != 0 and count == 2:
        yield {"x": x - shared, "y": y - shared, "z": shared}


RULES: tuple[Rule, ...] = (
    Rule("floordiv", "div-one", "x // 1", "x", (), _by_one),
    Rule("floordiv", "div-zero", "0 // c", "0", (), _numerator(0)),
    Rule("floordiv", "div-minus-one", "(-1) // c", "-1", (), _numerator(-1)),
    Rule("floordiv", "div-range", "x // c", "q", ("q*c <= x", "x < q*c + c"), _in_one_period),
    Rule("floordiv", "div-multiple", "(x*c + y) // c", "x + y // c", (), _multiples),
    Rule("floordiv", "div-cancel", "(x*k) // (c*k)", "x // c", ("0 <= k",), _common_factor_of_all),
    Rule("floordiv", "div-low-digits", "(x*k + r) // (c*k)", "x // c",
         ("0 <= r", "r < k"), _common_factors),
    Rule("floordiv", "div-div", "(x // a + y) // b", "(x + y*a) // (a*b)",
         (), _quotient_plus_constant),
    Rule("floordiv", "div-mod", "(x % (a*b)) // a", "(x // a) % b", (), _remainder_by_multiple),
    Rule("mod", "mod-one", "x % 1", "0", (), _by_one),
    Rule("mod", "mod-zero", "0 % c", "0", (), _numerator(0)),
    Rule("mod", "mod-minus-one", "(-1) % c", "c - 1", (), _numerator(-1)),
    Rule("mod", "mod-range", "x % c", "x - q*c", ("q*c <= x", "x < q*c + c"), _in_one_period),
    Rule("mod", "mod-multiple", "(x*c + y) % c", "y % c", (), _multiples),
    Rule("mod", "mod-cancel", "(x*k) % (c*k)", "(x % c)*k", ("0 <= k",), _common_factor_of_all),
    Rule("mod", "mod-low-digits", "(x*k + r) % (c*k)", "(x % c)*k + r",
         ("0 <= r", "r < k"), _common_factors),
    Rule("mod", "mod-mod", "(k*(x % (a*b)) + y) % a", "(k*x + y) % a", (), _remainder_terms),
    Rule("sum", "sum-div-mod", "(x // c)*c*k + (x % c)*k + y", "x*k + y",
         (), _quotient_and_remainder),
    Rule("sum", "sum-digits", "((x // a + d) % b)*a*k + (x % a)*k + y",
         "((x + d*a) % (a*b))*k + y", (), _adjacent_digits),
    Rule("sum", "sum-remainder", "x*k - (x // c)*c*k + y", "(x % c)*k + y",
         (), _value_less_multiple),
    Rule("sum", "sum-multiple", "x*k - (x % c)*k + y", "(x // c)*c*k + y",
         (), _value_less_remainder),
    Rule("min", "min-smaller", "min(x, y)", "x", ("x <= y",), _either_way),
    Rule("min", "min-common", "min(x + z, y + z)", "min(x, y) + z", (), _common_terms),
    Rule("max", "max-larger", "max(x, y)", "x", ("y <= x",), _either_way),
    Rule("max", "max-common", "max(x + z, y + z)", "max(x, y) + z", (), _common_terms),
)  # fmt: skip
for _rule in RULES:
    SIMPLIFIERS[_rule.operation].append(_rule.apply)
