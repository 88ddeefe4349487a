"""Symbolic sizes of a model: those that it declares, and what an import takes for granted of them.

Exporters give one size several names, and write sums of names. So sizes that have to be equal for
the model to make sense are taken to be: the equation is solved for one name, which then stands for
the other side of it wherever it is declared. Whoever runs the graph checks that at each call.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from terrazzo.dtypes import DType
from terrazzo.graph.ir import TensorType
from terrazzo.index import (
    Index,
    IndexExpr,
    Var,
    evaluate,
    free_vars,
    maximum,
    minimum,
    proves_le,
    substitute,
)
from terrazzo.index.equations import orders, raised, solved
from terrazzo.index.guards import Guard, Questions, decided, opposite


class Assumed(Questions):
    """What one import assumes of sizes, as guards of them by the names it was given.

    Without sizes at hand, only what the model needs is assumed; with them, every question has the
    answer that they give it.
    """

    def __init__(self, sizes: Mapping[str, int] | None = None):
        super().__init__(dict(sizes or {}))
        self.at_hand = sizes is not None
        self.equal: dict[Var, Index] = {}  # sizes that are written by means of others
        self.learned = False

    def start(self) -> None:
        """Begin to import (again, with what was learned)."""
        self.learned = False
        self.guards.clear()

    def now(self, n: Index) -> Index:
        """A size by means of those that remain."""
        return substitute(n, self.equal)

    def type(self, type: TensorType) -> TensorType:
        """A type with its sizes by means of those that remain."""
        return TensorType(tuple(map(self.now, type.shape)), type.dtype)

    def answer(self, relation: str, left: Index, right: Index) -> bool | None:
        left, right = self.now(left), self.now(right)
        known = decided(relation, left, right)
        if known is not None or not self.at_hand:
            return known
        guard = Guard(relation, left, right)
        holds = guard.holds(self.sizes)
        self._keep(guard if holds else opposite(guard))
        return holds

    def grant(self, relation: str, left: Index, right: Index) -> bool:
        left, right = self.now(left), self.now(right)
        known = decided(relation, left, right)
        if known is not None:
            return known
        if not self.at_hand:
            self._keep(Guard(relation, left, right))
            return True
        guard = Guard(relation, left, right)
        if guard.holds(self.sizes):
            self._keep(guard)
            return True
        if relation == "==":
            # A size of 1 stretches; once that is known, the question is no longer asked.
            for side in (left, right):
                if evaluate(side, self.sizes) == 1 and side != 1:
                    self._keep(Guard("==", side, 1))
        return False

    def shortcut(self, relation: str, left: Index, right: Index) -> bool:
        left, right = self.now(left), self.now(right)
        return self.at_hand and super().shortcut(relation, left, right)

    def _keep(self, guard: Guard) -> None:
        """Rely on a guard, by means of what it says about one size if there is such a thing."""
        left, right = guard.left, guard.right
        if guard.relation == "==":
            solution = solved(left, right)
            if solution is not None:
                var, value = solution
                if self.at_hand and not Guard("==", var, value).holds(self.sizes):
                    self.guards[guard] = None  # `n*m == k*m`, and n is not k: m is 0
                    return
                self._replace(var, value)
                if var.lo and not proves_le(var.lo, value):  # a bound that was learned before
                    self._keep(Guard("<=", var.lo, value))
                return
            pairs = orders(left, right)
            if pairs is not None:
                for a, b in pairs:
                    self._keep(Guard("<=", a, b))
                return
        elif guard.relation in ("<", "<="):
            higher = raised(left + 1 if guard.relation == "<" else left, right)
            if higher is not None:
                self._replace(*higher)
                return
        self.guards[guard] = None

    def _replace(self, var: Var, value: Index) -> None:
        self.equal = {v: substitute(n, {var: value}) for v, n in self.equal.items()}
        self.equal.setdefault(var, value)
        self.learned = True

    @property
    def all(self) -> tuple[Guard, ...]:
        """Everything that has to hold at a call, of sizes by the names they were given."""
        known = []
        for var, value in self.equal.items():
            if isinstance(value, Var) and value.name == var.name:
                assert value.lo is not None
                known.append(Guard("<=", value.lo, var))
            else:
                known.append(Guard("==", var, value))
        return (*known, *self.guards)


# ---------------------------------------------------------------- what a model declares
Declared = Mapping[str, tuple[DType, Sequence[Any]]]  # sizes: a number, a text, or None


def declared_types(declared: Declared, fixed: Mapping[str, int]) -> dict[str, TensorType]:
    """Types of tensors by what a model says of their sizes; `fixed` gives names a number.

    A text is a name, or a formula if all its names are sizes by themselves: only then a call can
    tell what they stand for.
    """
    vars: dict[str, Var] = {}

    def var(name: str) -> Var:
        if name not in vars:
            text = identifier(name)
            taken = {v.name for v in vars.values()}
            vars[name] = Var(text if text not in taken else f"{text}_{len(vars)}")
        return vars[name]

    texts = [n for _, shape in declared.values() for n in shape if isinstance(n, str)]
    plain: dict[str, Index] = {n: var(n) for n in texts if n.isidentifier()}
    plain.update(fixed)

    def size(n: Any) -> Index:
        if isinstance(n, int):
            return n
        if n in plain:
            return plain[n]
        formula = _formula(n, plain) if n else None
        return var(n or f"size{len(vars)}") if formula is None else formula

    return {name: TensorType(tuple(map(size, shape)), dtype)
            for name, (dtype, shape) in declared.items()}


def identifier(name: str) -> str:
    """A name for a size that generated code can bear."""
    text = "".join(c if (c.isascii() and c.isalnum()) or c == "_" else "_" for c in name)
    return text if text[:1].isalpha() else f"n_{text}"


_OPERATORS: dict[type, Callable[[Any, Any], Index]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b, ast.Mod: lambda a, b: a % b,
}
_FUNCTIONS: dict[str, Callable[..., Index]] = {"max": maximum, "min": minimum}


def _formula(text: str, names: Mapping[str, Index]) -> Index | None:
    """A text such as "past + 2*n" as an expression; None where it is no such thing."""

    def read(node: ast.AST) -> Index:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return names[name]
            case ast.BinOp(left=left, op=op, right=right):
                return _OPERATORS[type(op)](read(left), read(right))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return _FUNCTIONS[name.lower()](*map(read, args))
        raise KeyError(type(node))

    try:
        return read(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, KeyError, TypeError, ZeroDivisionError, ValueError, RecursionError):
        return None


def bindable(types: Mapping[str, TensorType]) -> dict[str, TensorType]:
    """The types with a name of its own for each size whose names no tensor shows by themselves."""
    shown = {n for t in types.values() for n in t.shape if isinstance(n, Var)}
    fresh: dict[Index, Var] = {}

    def size(n: Index) -> Index:
        if not isinstance(n, IndexExpr) or free_vars(n) <= shown:
            return n
        return fresh.setdefault(n, Var(f"size_{len(fresh)}"))

    return {name: TensorType(tuple(map(size, t.shape)), t.dtype) for name, t in types.items()}
