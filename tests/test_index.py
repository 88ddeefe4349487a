"""The index algebra: its rules are proved, its expressions keep their values, its text reads."""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrazzo.index import (
    RULES,
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
    maximum,
    minimum,
    proves_eq,
    proves_le,
    proves_lt,
    substitute,
    to_tree,
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
        self.names = {v: _Term(self, self.z3.Int(v)) for v in rule.variables}
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
        self.known += [num == den * quotient + rest, 0 <= rest, rest < den]
        self.divisions.append((num, den, quotient, rest))
        return _Term(self, quotient), _Term(self, rest)

    def same(self, a: Any, b: Any) -> bool:
        return self.z3.is_true(self.z3.simplify(a == b, som=True))

    def unsatisfiable(self, *facts: Any) -> bool:
        solver = self.z3.Solver()
        solver.set("timeout", 3_000)
        solver.add(*facts)
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


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_is_proved(rule: Rule) -> None:
    proof = _Proof(rule)
    left = proof.term(rule.lhs)
    proof.known += [proof.term(guard) for guard in rule.when]
    proof.assume_positive = False
    right = proof.term(rule.rhs)
    for claim in proof.to_show:
        assert proof.unsatisfiable(*proof.known, proof.z3.Not(claim)), f"{rule}: {claim}"
    assert proof.unsatisfiable(*proof.known, left != right), str(rule)


def test_hello():
    pass
