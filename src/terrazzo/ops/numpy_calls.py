"""numpy's functions on traced values: `np.exp(x)` is `tz.exp(x)`, or an error says what to use.

numpy asks a value what one of its functions means (`__array_ufunc__`, `__array_function__`). The
tables hold what is spelled differently; arguments go by their names, so that one which an operator
does not have is an error and never taken for another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from terrazzo.base.scalar_table import by_operator
from terrazzo.errors import TracedControlFlow, user_location
from terrazzo.graph.ir import OPERATORS, Value
from terrazzo.ops.contract import einsum

_UFUNCS = {
    **{row.ufunc: name for name, row in by_operator().items() if isinstance(row.ufunc, str)},
    "fabs": "absolute", "conjugate": "conj", "logaddexp": "logaddexp", "matmul": "matmul",
    "vecdot": "vecdot",
}
_FUNCTIONS = {
    "amax": "max", "amin": "min", "concatenate": "concat", "ravel": "flatten",
    **{name: name for name in (
        "sum", "prod", "mean", "var", "std", "max", "min", "argmax", "argmin", "any", "all",
        "cumsum", "cumprod", "sort", "argsort", "clip", "where", "concat", "stack", "expand_dims",
        "squeeze", "reshape", "permute_dims", "transpose", "matrix_transpose", "swapaxes",
        "moveaxis", "broadcast_to", "tile", "repeat", "roll", "flip", "tril", "triu", "take",
        "take_along_axis", "dot", "outer", "tensordot", "zeros_like", "ones_like", "full_like",
        "pad", "split", "unstack", "diagonal", "diag", "nan_to_num", "count_nonzero", "meshgrid",
        "sinc", "real", "imag", "angle")},
    **{f"fft.{name}": name for name in (
        "fft", "ifft", "rfft", "irfft", "fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn",
        "rfftn", "irfftn", "fftshift", "ifftshift")},
}
_REDUCED = {"add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min",
            "logical_and": "all", "logical_or": "any"}
_KEYWORDS = {"ddof": "correction", "a_min": "min", "a_max": "max", "reps": "repetitions",
             "fill_value": "value", "constant_values": "value", "newshape": "shape"}
_ASKED = {"shape": lambda x: x.shape, "ndim": lambda x: x.ndim, "size": lambda x: x.size}
# numpy's names of what has another one here.
_ELSEWHERE = {
    "linalg.norm": "vector_norm", "vstack": "concat", "hstack": "concat", "heaviside": "where",
    "column_stack": "stack", "isclose": "absolute", "allclose": "absolute",
    "array": "stack", "average": "mean", "nansum": "nan_to_num", "select": "where",
    "convolve": "conv", "put": "index_update", "digitize": "searchsorted", "linalg.det": "det",
    "linalg.matmul": "matmul", "float_power": "power", "fmax": "maximum", "fmin": "minimum",
}


def ufunc(self: Value, function: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
    """np.exp(x), and arithmetic with an array on the left."""
    name = function.__name__
    if method == "__call__" and not kwargs:
        if name == "positive":
            return inputs[0]
        if name in _UFUNCS:
            return OPERATORS[_UFUNCS[name]](*inputs)
    called = name if method == "__call__" else f"{name}.{method}"
    raise _refusal(self, called, f" with {', '.join(kwargs)}=" if kwargs else "",
                   _REDUCED.get(name) if method == "reduce" else _UFUNCS.get(name))


def array_function(self: Value, function: Callable[..., Any], types: Any, args: Sequence[Any],
                   kwargs: Mapping[str, Any]) -> Any:
    """np.sum(x), np.concatenate([x, y]) and the like."""
    module = getattr(function, "__module__", "numpy") or "numpy"
    name = ".".join([*module.split(".")[1:], function.__name__])
    if name in _ASKED:
        return _ASKED[name](*args)
    if name == "einsum":
        return einsum(*args, **kwargs)
    if name in ("round", "around"):
        return rounded(*args, **kwargs)
    if name not in _FUNCTIONS:
        raise _refusal(self, name, "", None)
    op = OPERATORS[_FUNCTIONS[name]]
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C, in some versions of numpy
        return op(*args, **kwargs)
    bound = signature.bind(*args, **kwargs)
    given = {k: v for k, v in bound.arguments.items()
             if v is not signature.parameters[k].default}
    given |= given.pop("kwargs", {})
    if op.variadic:
        tensors = list(given.pop(next(iter(given))))
        return op(tensors, **given)
    count = len(op.tensor_params) if op.name != "clip" else 1
    positional = [given.pop(k) for k in list(given)[:count]]
    return op(*positional, **{_KEYWORDS.get(k, k): v for k, v in given.items()})


def rounded(x: Any, decimals: int = 0) -> Any:
    """To the nearest multiple of a power of ten, ties to even."""
    whole = OPERATORS["round"]
    return whole(x) if not decimals else whole(x * 10.0 ** decimals) / 10.0 ** decimals


def _refusal(value: Value, name: str, how: str, known: str | None) -> TracedControlFlow:
    import difflib  # only mistakes wait for it

    short = name.rpartition(".")[2]
    close = difflib.get_close_matches(short, OPERATORS, n=1, cutoff=0.8)
    if known or name in _ELSEWHERE:
        close = [known or _ELSEWHERE[name]]
    return TracedControlFlow(
        f"np.{name}{how}: a numpy function needs the value of a traced tensor of type "
        f"{value.type}, which is not known while tracing", where=user_location(),
        hint=f"use tz.{close[0]}" if close else "compute it with the functions of tz, which "
        "docs/operators.md lists")
