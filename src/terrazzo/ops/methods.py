"""Gives traced values the operators and methods of an array, from one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from terrazzo.graph.ir import OPERATORS, Operator, Value
from terrazzo.ops.numpy_calls import array_function, rounded, ufunc
from terrazzo.ops.updates import At

_BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide",
    "floordiv": "floor_divide", "mod": "remainder", "pow": "power", "matmul": "matmul",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}
_COMPARE = {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
            "eq": "equal", "ne": "not_equal"}
_UNARY = {"neg": "negative", "abs": "absolute", "invert": "bitwise_invert"}
# Every operator of these families that begins with one tensor is a method of it: x.exp().
_FAMILIES = {"elementwise", "reduce", "shape", "activation", "contract", "norm", "indexing",
             "sorting", "scan"}
_NO_METHODS = {"eye", "getitem", "place", "where"}  # not of the first argument, or no one's to call
_RENAMED = {"abs": "absolute", "pow": "power", "unsqueeze": "expand_dims"}


def _forward(name: str, swap: bool = False) -> Callable[..., Any]:
    def method(self: Value, *args: Any, **kwargs: Any) -> Any:
        if swap:
            return OPERATORS[name](args[0], self)
        return OPERATORS[name](self, *args, **kwargs)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = OPERATORS[name].doc
    if not swap:
        method.__wrapped__ = OPERATORS[name]  # type: ignore[attr-defined]  # for its signature
    return method


def _is_method(op: Operator) -> bool:
    return (op.family in _FAMILIES and op.name not in _NO_METHODS and bool(op.tensor_params)
            and op.tensor_params[0].kind is not op.tensor_params[0].VAR_POSITIONAL)


def _getitem(self: Value, key: Any) -> Any:
    return OPERATORS["getitem"](self, key=key)


def _sizes(args: tuple[Any, ...]) -> Any:
    """Sizes or axes that were given one by one, or as one tuple."""
    return args[0] if len(args) == 1 and not isinstance(args[0], int) else args


def _reshape(self: Value, *sizes: Any, shape: Any = None) -> Any:
    return OPERATORS["reshape"](self, shape=_sizes(sizes) if sizes else shape)


def _transpose(self: Value, *axes: Any) -> Any:
    order = tuple(_sizes(axes)) if axes else ()
    return OPERATORS["permute_dims"](self, axes=order or tuple(range(self.ndim))[::-1])



def install() -> None:
    """Attach everything to Value."""
    methods: dict[str, Any] = {
        "__getitem__": _getitem, "__hash__": object.__hash__, "__pos__": lambda self: self,
        "__round__": lambda self, digits=None: rounded(self, digits or 0), "round": rounded,
        "__array_ufunc__": ufunc, "__array_function__": array_function,
        "reshape": _reshape, "view": _reshape, "transpose": _transpose, "permute": _transpose,
        "at": property(At),
        "real": property(lambda x: OPERATORS["real"](x)),
        "imag": property(lambda x: OPERATORS["imag"](x)), "conj": _forward("conj"),
        "angle": _forward("angle"), "T": property(_transpose),
        "mT": property(lambda x: OPERATORS["matrix_transpose"](x))}
    for short, name in _BINARY.items():
        methods[f"__{short}__"] = _forward(name)
        methods[f"__r{short}__"] = _forward(name, swap=True)
    methods |= {f"__{short}__": _forward(name) for short, name in (_COMPARE | _UNARY).items()}
    names = {op.name: op.name for op in OPERATORS.values() if _is_method(op)} | _RENAMED
    methods |= {name: _forward(target) for name, target in names.items()
                if name not in methods and not hasattr(Value, name)}
    for name, method in methods.items():
        setattr(Value, name, method)
