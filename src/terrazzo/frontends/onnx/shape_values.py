"""Shape arithmetic: integer tensors that hold symbolic sizes, computed while importing.

Exporters write sizes as little graphs (Shape, Gather, Mul, Concat, ...) whose result a Reshape
or Expand then reads. With symbolic sizes these hold index expressions, as numpy arrays of objects,
and the operators on them are numpy's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from terrazzo.frontends.onnx.types import dtype_of
from terrazzo.index import maximum, minimum

Attr = Callable[..., Any]
Rule = Callable[[Sequence[np.ndarray], Attr], "np.ndarray | None"]


def _objects(array: np.ndarray) -> np.ndarray:
    return array.astype(object)


def _gather(inputs: Sequence[np.ndarray], attr: Attr) -> np.ndarray | None:
    data, indices = inputs
    if indices.dtype == object:
        return None
    return np.take(data, indices.astype(np.int64), axis=attr("axis", 0))


def _slice(inputs: Sequence[np.ndarray], attr: Attr) -> np.ndarray | None:
    data, rest = inputs[0], [i for i in inputs[1:]]
    if data.ndim != 1 or any(i.dtype == object for i in rest):
        return None
    starts = attr("starts") if not rest else rest[0].tolist()
    ends = attr("ends") if not rest else rest[1].tolist()
    steps = rest[3].tolist() if len(rest) > 3 else [1]
    return data[slice(starts[0], _end(ends[0], steps[0], starts[0]), steps[0])]


def _end(end: int, step: int, start: int) -> int | None:
    return None if step < 0 and end < -(1 << 31) else end


def _axes(inputs: Sequence[np.ndarray], attr: Attr) -> list[int] | None:
    return inputs[1].tolist() if len(inputs) > 1 else attr("axes")


def _unsqueeze(inputs: Sequence[np.ndarray], attr: Attr) -> np.ndarray:
    axes = _axes(inputs, attr) or []
    return np.expand_dims(inputs[0], tuple(axes))


def _squeeze(inputs: Sequence[np.ndarray], attr: Attr) -> np.ndarray:
    axes = _axes(inputs, attr)
    return np.squeeze(inputs[0], None if axes is None else tuple(axes))


def _cast(inputs: Sequence[np.ndarray], attr: Attr) -> np.ndarray | None:
    return inputs[0] if dtype_of(attr("to")).is_integer else None


def _reduce_prod(inputs: Sequence[np.ndarray], attr: Attr) -> np.ndarray:
    total: Any = 1
    for n in inputs[0].reshape(-1):
        total = total * n
    return np.array([total] if attr("keepdims", 1) else total, object)


def _elementwise(function: Callable[[Any, Any], Any]) -> Rule:
    ufunc = np.frompyfunc(function, 2, 1)
    return lambda inputs, attr: np.asarray(
        ufunc(_objects(inputs[0]), _objects(inputs[1])), object)


def _reshape(inputs: Sequence[np.ndarray], attr: Attr) -> np.ndarray | None:
    return None if inputs[1].dtype == object else inputs[0].reshape(inputs[1].tolist())


RULES: dict[str, Rule] = {
    "Gather": _gather,
    "Slice": _slice,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Cast": _cast,
    "Identity": lambda inputs, attr: inputs[0],
    "Concat": lambda inputs, attr: np.concatenate([_objects(i) for i in inputs],
                                                  axis=attr("axis", 0)),
    "Add": _elementwise(lambda a, b: a + b),
    "Sub": _elementwise(lambda a, b: a - b),
    "Mul": _elementwise(lambda a, b: a * b),
    "Div": _elementwise(lambda a, b: a // b),  # sizes are not negative: truncation is floor
    "Mod": _elementwise(lambda a, b: a % b),
    "Min": _elementwise(minimum),
    "Max": _elementwise(maximum),
    "ReduceProd": _reduce_prod,
    "Reshape": _reshape,
}


def compute(operator: str, inputs: Sequence[np.ndarray], attr: Attr) -> np.ndarray | None:
    """The result of an operator on known integers, some symbolic; None where no rule applies."""
    rule = RULES.get(operator)
    if rule is None:
        return None
    try:
        return rule(inputs, attr)
    except (TypeError, ValueError, IndexError, ZeroDivisionError):
        return None
