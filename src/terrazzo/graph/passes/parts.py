"""What the rules that look for patterns share: taking nodes apart, and making new ones."""

from __future__ import annotations

import math
from typing import Any

from terrazzo.dtypes import DType
from terrazzo.graph.ir import Node, Value, operator_named


def op(name: str, *args: Value | float | None, **attrs: Any) -> Value:
    """One more node, by its operator's name."""
    return operator_named(name)(*args, **attrs)


def made_by(value: Value | None, *names: str) -> Node | None:
    """The node that made a value, if it is of one of the named operators."""
    node = None if value is None else value.node
    return node if node is not None and node.op.name in names else None


def operands(node: Node) -> tuple[Value, ...]:
    """The inputs that are given."""
    return tuple(v for v in node.inputs if v is not None)


def near(number: Any, target: float, dtype: DType) -> bool:
    """Whether a number is another one up to how a type rounds, and a product of such numbers."""
    return isinstance(number, (int, float)) and dtype.is_float and math.isclose(
        number, target, rel_tol=2 * dtype.eps, abs_tol=0.0)
