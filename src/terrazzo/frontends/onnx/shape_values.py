"""Shape arithmetic: integer tensors that hold symbolic sizes, computed while importing.

Exporters write sizes as little graphs (Shape, Gather, Mul, Concat, ...) whose result a Reshape
or Expand then reads. With symbolic sizes these hold index expressions, as numpy arrays of objects,
and the operators on them are numpy's. Floats take part as long as they stand for whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NoReturn

import numpy as np

from terrazzo.dtypes import DType, bool_, int64
from terrazzo.errors import TerrazzoError
from terrazzo.frontends.onnx.types import dtype_of
from terrazzo.index import maximum, minimum, proves_le
from terrazzo.index.guards import ask, granted, shortcut


@dataclass(frozen=True, eq=False)
class Sizes:
    """A tensor of whole numbers that are known, of which some may be symbolic."""

    items: np.ndarray
    dtype: DType = int64


@dataclass(frozen=True, eq=False)
class Node:
    """What rules see of a node beside its inputs."""

    attr: Callable[..., Any]
    outputs: int
    dtype: DType  # of the first input


Arrays = Sequence[Any]  # of np.ndarray; None where an optional input is left out
Rule = Callable[[Arrays, Node], Any]  # an array, or a list of them


class _Unknown(Exception):
    """A result is not the same for all sizes."""


def _unknown() -> NoReturn:
    raise _Unknown


# ---------------------------------------------------------------- element by element
def _divided(a: Any, b: Any, node: Node) -> Any:
    """Division towards zero; what is divided here is not negative, so it rounds down."""
    if node.dtype.is_float:
        return a // b if shortcut("==", a // b * b, a) else _unknown()
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return a // b if granted("<=", 0, a) and granted("<=", 1, b) else _unknown()


def _remainder(a: Any, b: Any, node: Node) -> Any:
    if node.attr("fmod", 0) and not granted("<=", 0, a):
        _unknown()
    return a % b if granted("<=", 1, b) else _unknown()


def _holds(relation: str, a: Any, b: Any) -> bool:
    known = ask(relation, a, b)
    return _unknown() if known is None else known


_COMPARISONS: dict[str, Callable[[Any, Any, Node], bool]] = {
    "Equal": lambda a, b, node: _holds("==", a, b),
    "Less": lambda a, b, node: _holds("<", a, b),
    "LessOrEqual": lambda a, b, node: _holds("<=", a, b),
    "Greater": lambda a, b, node: _holds("<", b, a),
    "GreaterOrEqual": lambda a, b, node: _holds("<=", b, a),
}


def _absolute(a: Any) -> Any:
    return a if proves_le(0, a) else -a if proves_le(a, 0) else maximum(a, -a)


def _elementwise(function: Callable[..., Any]) -> Rule:
    """A function of elements and the node, for two or more operands one after the other."""

    def rule(inputs: Arrays, node: Node) -> np.ndarray:
        ufunc = np.frompyfunc(lambda a, b: function(a, b, node), 2, 1)
        return np.asarray(reduce(ufunc, map(_objects, inputs)), object)

    return rule


def _each(function: Callable[[Any], Any]) -> Rule:
    return lambda inputs, node: np.asarray(
        np.frompyfunc(function, 1, 1)(_objects(inputs[0])), object)


def _objects(array: np.ndarray) -> np.ndarray:
    """Elements as Python's integers, which mix with symbolic ones."""
    if array.dtype.kind in "fV":  # V: bfloat16 and its like
        whole = array.astype(np.int64)
        return whole.astype(object) if (whole == array).all() else _unknown()
    return array.astype(object)


def _where(inputs: Arrays, node: Node) -> np.ndarray:
    condition, yes, no = inputs
    return np.where(_plain(condition), _objects(yes), _objects(no))


def _clip(inputs: Arrays, node: Node) -> np.ndarray:
    result = _objects(inputs[0])
    for bound, function in zip(inputs[1:], (maximum, minimum)):
        if bound is not None:
            result = np.asarray(np.frompyfunc(function, 2, 1)(result, _objects(bound)), object)
    return result


# ---------------------------------------------------------------- all of them
def _reduction(combine: Callable[[Any, Any], Any]) -> Rule:
    def rule(inputs: Arrays, node: Node) -> np.ndarray:
        axes = _axes(inputs, node)
        if not inputs[0].size or (axes not in (None, [], [0], [-1]) and inputs[0].ndim <= 1):
            _unknown()
        if inputs[0].ndim > 1 and axes is not None and len(axes) < inputs[0].ndim:
            _unknown()
        total = reduce(combine, _objects(inputs[0]).reshape(-1))
        shape = (1,) * inputs[0].ndim if node.attr("keepdims", 1) else ()
        return np.array([total, None], object)[:1].reshape(shape)

    return rule


# ---------------------------------------------------------------- moving them
def _plain(array: np.ndarray | None) -> np.ndarray:
    """Numbers that have to be known themselves."""
    return _unknown() if array is None or array.dtype == object else array


def _axes(inputs: Arrays, node: Node) -> list[int] | None:
    if len(inputs) > 1:
        return None if inputs[1] is None else _plain(inputs[1]).reshape(-1).tolist()
    return node.attr("axes")


def _gather(inputs: Arrays, node: Node) -> np.ndarray:
    return np.take(inputs[0], _plain(inputs[1]).astype(np.int64), axis=node.attr("axis", 0))


def _slice(inputs: Arrays, node: Node) -> np.ndarray:
    data, *rest = inputs
    bounds: list[Any] = [None if r is None else _plain(r).tolist() for r in rest]
    if not bounds:
        bounds = [node.attr(k) for k in ("starts", "ends", "axes")]
    starts, ends, axes, steps = [*bounds, None, None][:4]
    keys = [slice(None)] * data.ndim
    for k, (start, end) in enumerate(zip(starts, ends, strict=True)):
        step, axis = 1 if steps is None else steps[k], k if axes is None else axes[k]
        n, stop = data.shape[axis], end
        if step < 0:
            # A start before the first element is the first one. Python counts an end there from
            # the back, so it is left out.
            start, stop = max(start, -n), None if end < -n else end
        keys[axis] = slice(start, stop, step)
    return data[tuple(keys)]


def _split(inputs: Arrays, node: Node) -> list[np.ndarray]:
    axis = node.attr("axis", 0)
    sizes = _axes(inputs, node) if len(inputs) > 1 else node.attr("split")
    if sizes is None:
        each = -(-inputs[0].shape[axis] // node.outputs)
        sizes = [each] * node.outputs
    return np.split(inputs[0], np.cumsum(sizes)[:-1], axis=axis)


def _squeeze(inputs: Arrays, node: Node) -> np.ndarray:
    axes = _axes(inputs, node)
    return np.squeeze(inputs[0], tuple(axes) if axes else None)


def _reshape(inputs: Arrays, node: Node) -> np.ndarray:
    sizes = _plain(inputs[1]).tolist()
    if not node.attr("allowzero", 0):
        sizes = [inputs[0].shape[d] if n == 0 else n for d, n in enumerate(sizes)]
    return inputs[0].reshape(sizes)


def _expand(inputs: Arrays, node: Node) -> np.ndarray:
    shape = np.broadcast_shapes(inputs[0].shape, tuple(_plain(inputs[1]).tolist()))
    return np.broadcast_to(inputs[0], shape)


RULES: dict[str, Rule] = {
    "Gather": _gather,
    "Slice": _slice,
    "Split": _split,
    "Unsqueeze": lambda inputs, node: np.expand_dims(inputs[0], tuple(_axes(inputs, node) or ())),
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "Flatten": lambda inputs, node: inputs[0].reshape(1, -1) if inputs[0].ndim < 2 else _unknown(),
    "Transpose": lambda inputs, node: np.transpose(inputs[0], node.attr("perm")),
    "Expand": _expand,
    "Tile": lambda inputs, node: np.tile(inputs[0], _plain(inputs[1]).tolist()),
    "Concat": lambda inputs, node: np.concatenate([_objects(i) for i in inputs],
                                                  axis=node.attr("axis", 0)),
    "Cast": lambda inputs, node: inputs[0],
    "CastLike": lambda inputs, node: inputs[0],
    "Identity": lambda inputs, node: inputs[0],
    **{name: lambda inputs, node: inputs[0] for name in ("Floor", "Ceil", "Round")},
    "Where": _where,
    "Clip": _clip,
    "Neg": _each(lambda a: -a),
    "Abs": _each(_absolute),
    "Add": _elementwise(lambda a, b, node: a + b),
    "Sum": _elementwise(lambda a, b, node: a + b),
    "Sub": _elementwise(lambda a, b, node: a - b),
    "Mul": _elementwise(lambda a, b, node: a * b),
    "Div": _elementwise(_divided),
    "Mod": _elementwise(_remainder),
    "Min": _elementwise(lambda a, b, node: minimum(a, b)),
    "Max": _elementwise(lambda a, b, node: maximum(a, b)),
    **{name: _elementwise(test) for name, test in _COMPARISONS.items()},
    "ReduceSum": _reduction(lambda a, b: a + b),
    "ReduceProd": _reduction(lambda a, b: a * b),
    "ReduceMin": _reduction(minimum),
    "ReduceMax": _reduction(maximum),
}


def _result_type(operator: str, inputs: Sequence[Sizes | None], attr: Callable[..., Any]) -> DType:
    if operator == "Cast":
        return dtype_of(attr("to"))
    if operator in _COMPARISONS:
        return bool_
    like = inputs[1 if operator in ("Where", "CastLike") else 0]
    assert like is not None
    return like.dtype


def compute(operator: str, inputs: Sequence[Sizes | None], attr: Callable[..., Any],
            outputs: int = 1) -> list[Sizes] | None:
    """The results of an operator on known integers, some symbolic; None where no rule applies."""
    rule = RULES.get(operator)
    if rule is None:
        return None
    try:
        dtype = _result_type(operator, inputs, attr)
        first = next(i.dtype for i in inputs if i is not None)
        if dtype.is_complex or (dtype.is_bool and operator not in _COMPARISONS):
            return None
        found = rule([None if i is None else i.items for i in inputs],
                     Node(attr, outputs, first))
    except (_Unknown, TerrazzoError, TypeError, ValueError, IndexError, ZeroDivisionError):
        return None
    return [Sizes(np.asarray(f), dtype) for f in (found if isinstance(found, list) else [found])]
