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


def _getitem(self: Value, key: Any) -> Any:
    return OPERATORS["getitem"](self, key=key)


def _transpose(self: Value, *axes: Any) -> Any:
    order = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
    return OPERATORS["permute_dims"](self, axes=tuple(order) or tuple(range(self.ndim))[::-1])


def install() -> None:
    """Attach everything to Value."""
    methods: dict[str, Any] = {"__getitem__": _getitem, "transpose": _transpose,
                               "T": property(_transpose), "__hash__": object.__hash__}
    for short, name in _BINARY.items():
        methods[f"__{short}__"] = _forward(name)
        methods[f"__r{short}__"] = _forward(name, swap=True)
    methods |= {f"__{short}__": _forward(name) for short, name in (_COMPARE | _UNARY).items()}
    methods |= {name: _forward(name) for name in _METHODS}
    for name, method in methods.items():
        setattr(Value, name, method)
