"""Torch's symbolic sizes as ours: expressions of sympy become index expressions.

A symbol of torch's is at least 2 where it has a value while tracing ("backed"): 0 and 1 are
numbers of their own there as here. One that data decides has none ("unbacked"), and so has what is
made of it: code for such sizes is made for numbers, when they are known.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from terrazzo.errors import UnsupportedOperator
from terrazzo.index import Algebra, Index, Var, interpret, maximum, minimum
from terrazzo.index.guards import RELATIONS, Guard

SMALLEST = 2  # that a size with a name may be
Names = Mapping[str, Index]  # what each symbol stands for, by its name


def _folded(function: Callable[[Any, Any], Any]) -> Callable[..., Index]:
    return lambda *parts: reduce(function, parts)


def _power(base: Index, exponent: Index) -> Index:
    if not isinstance(exponent, int) or exponent < 0:
        raise UnsupportedOperator(f"a size that is a power of {exponent}")
    return reduce(operator.mul, [base] * exponent, 1)


# By the name of the class of sympy, or of torch.utils._sympy.functions.
_FUNCTIONS: dict[str, Callable[..., Index]] = {
    "Add": _folded(operator.add), "Mul": _folded(operator.mul), "Max": _folded(maximum),
    "Min": _folded(minimum), "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv,
    "CeilDiv": lambda a, b: (a + b - 1) // b, "Mod": operator.mod, "PythonMod": operator.mod,
    "Pow": _power, "PowByNatural": _power,
}  # fmt: skip


def index_of(size: Any, names: Names) -> Index:
    """A size of torch's (a number, a SymInt, an expression of sympy) in our algebra."""
    if isinstance(size, int):
        return size
    node = getattr(size, "node", None)
    return _converted(node.expr if node is not None else size, names)


def _converted(expr: Any, names: Names) -> Index:
    if expr.is_Symbol:
        if expr.name not in names:
            raise UnsupportedOperator(f"the size {expr.name} is known from data only")
        return names[expr.name]
    if expr.is_Integer:
        return int(expr)
    function = _FUNCTIONS.get(type(expr).__name__)
    if function is None:
        raise UnsupportedOperator(f"the size {expr}")
    return function(*(_converted(part, names) for part in expr.args))


def symbols_in(size: Any) -> set[str]:
    """The names of the symbols that a size is made of."""
    if isinstance(size, int):
        return set()
    return {s.name for s in size.node.expr.free_symbols}


def hints_in(size: Any) -> dict[str, int]:
    """What the symbols of a size are in the call that was traced, where there is such a number."""
    if isinstance(size, int):
        return {}
    node = size.node
    env = node.shape_env
    known = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    return {s.name: int(known[s]) for s in node.expr.free_symbols if s in known}


def known_to_torch(guards: Sequence[Guard], sizes: Iterable[Any], tell: bool) -> bool:
    """Whether torch lets only those sizes through that keep to some guards.

    It may be told to, until it has made its own; then it calls other code for other sizes. A size
    that would have to be one number is left as it is, or there would be code for each.
    """
    symbols: dict[str, Any] = {}
    for size in sizes:
        env = size.node.shape_env
        for symbol in size.node.expr.free_symbols:
            hint = hints_in(size).get(symbol.name)
            symbols[symbol.name] = env.create_symintnode(symbol, hint=hint)
    if any(guard.relation == "==" and {type(guard.left), type(guard.right)} == {Var, int}
           for guard in guards):
        return False
    numbers = Algebra[Any](int, lambda var: symbols[var.name], operator.add, operator.mul,
                           operator.floordiv, operator.mod, torch.sym_min, torch.sym_max)
    for guard in guards:
        holds = RELATIONS[guard.relation](interpret(guard.left, numbers),
                                          interpret(guard.right, numbers))
        if (tell and not bool(holds)) or not statically_known_true(holds):
            return False
    return True


def variable(name: str) -> Var:
    """The variable that stands for a symbol of torch's."""
    return Var(name, SMALLEST)
