"""Gives traced values the operators and methods of an array, from one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from terrazzo.graph.ir import OPERATORS, Value

_BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide",
    "floordiv": "floor_divide", "mod": "remainder", "pow": "power", "matmul": "matmul",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}
_COMPARE = {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
            "eq": "equal", "ne": "not_equal"}
_UNARY = {"neg": "negative", "abs": "absolute", "invert": "bitwise_invert"}
_METHODS = ("sum", "prod", "mean", "var", "std", "max", "min", "argmax", "argmin", "any", "all",
            "reshape", "astype", "cumsum")


def _forward(name: str, swap: bool = False) -> Callable[..., Any]:
    def method(self: Value, *args: Any, **kwargs: Any) -> Any:
        if swap:
            return OPERATORS[name](args[0], self)
        return OPERATORS[name](self, *args, **kwargs)

    return method


def install() -> None:
    """Attach everything to Value."""
    for short, name in _BINARY.items():
        setattr(Value, f"__{short}__", _forward(name))
        setattr(Value, f"__r{short}__", _forward(name, swap=True))
    for short, name in {**_COMPARE, **_UNARY}.items():
        setattr(Value, f"__{short}__", _forward(name))
    for name in _METHODS:
        setattr(Value, name, _forward(name))
    Value.__getitem__ = lambda self, key: OPERATORS["getitem"](self, key=key)  # type: ignore[attr-defined]
    Value.transpose = lambda self, *axes: OPERATORS["permute_dims"](  # type: ignore[attr-defined]
        self, axes=(axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes)
        or tuple(range(self.ndim))[::-1])
    Value.T = property(lambda self: self.transpose())  # type: ignore[attr-defined]
    Value.__hash__ = object.__hash__  # type: ignore[method-assign]
