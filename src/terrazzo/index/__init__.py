"""Integers that may be symbolic: dimensions, tensor indices, loop bounds and flat addresses.

A plain Python `int` is a constant; everything else is an immutable, interned `IndexExpr`, so equal
expressions are the same object. Sums and products are kept as canonical polynomials with integer
coefficients over *atoms*: variables, floor divisions, remainders, minima and maxima. Whatever a
polynomial cannot express by itself is simplified, as it is built, by the named rules in `RULES`;
each rule is an identity in plain text that the tests hand to an SMT solver.

Division and remainder are Python's (towards minus infinity). One convention runs through the
package: *a divisor is positive wherever its expression is evaluated*. So `f // n` may be written
for a dimension `n` that could be zero; an empty tensor simply never evaluates it.
"""

from terrazzo.index.nodes import (
    FloorDiv,
    Index,
    IndexExpr,
    Max,
    Min,
    Mod,
    Sum,
    Var,
    bounds,
    ceildiv,
    maximum,
    minimum,
)
from terrazzo.index.proofs import proves_eq, proves_le, proves_lt
from terrazzo.index.queries import (
    Algebra,
    coefficient,
    compile_python,
    divisible,
    evaluate,
    free_vars,
    interpret,
    substitute,
    without,
)
from terrazzo.index.rules import RULES, Rule

__all__ = [
    "RULES",
    "Algebra",
    "FloorDiv",
    "Index",
    "IndexExpr",
    "Max",
    "Min",
    "Mod",
    "Rule",
    "Sum",
    "Var",
    "bounds",
    "ceildiv",
    "coefficient",
    "compile_python",
    "divisible",
    "evaluate",
    "free_vars",
    "interpret",
    "maximum",
    "minimum",
    "proves_eq",
    "proves_le",
    "proves_lt",
    "substitute",
    "without",
]
