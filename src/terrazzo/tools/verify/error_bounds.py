"""How far a faithful computation may be from float64: running error analysis of a graph.

Every value of a graph is computed in float64 together with a bound on the error that any level may
make: each operator adds its own rounding to what its inputs bring along (Wilkinson's running error
analysis; Higham, "Accuracy and Stability of Numerical Algorithms", chapter 3). So a tolerance is
never guessed: it is wide where an expression cancels, zero where nothing rounds, and infinite
where an inexact value decides something (a comparison, floor, an index, a cast to integer) and two
faithful computations may legitimately decide differently.

The bounds are of first order; `SAFETY` covers what they leave out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from terrazzo.base.scalar_accuracy import FEW, Accuracy, may_vanish
from terrazzo.base.scalar_table import by_operator
from terrazzo.dtypes import DType, bfloat16, float32, float64
from terrazzo.graph.evaluate import bind_dims, concrete, run_node
from terrazzo.graph.ir import Graph, Node, TensorType, Value, expand
from terrazzo.index import Var
from terrazzo.tools.verify import error_bounds_control

# Second-order terms of the bounds, and for float64 the error of the yardstick itself.
SAFETY = 2.0

# Operators beside those of the table of scalar operations.
_ULPS = {**dict.fromkeys(("sort_pairs", "top_pairs", "constant", "max", "min"), 0.0), "full": 1.0}
_ROWS = by_operator()
# Where rounding may cost more units in the last place, counting them says nothing.
WELL_CONDITIONED = 1024.0

_FLUSHED_BELOW = 2.0**-126  # what products of bfloat16 take for zero, read or made

# From floats to integers: a rounding on the way may decide for the integer next to it.
_DECIDING = ("astype", "quantize_linear")
# Integers whose bound is a count: quantised numbers that may be one off, and what is made of them.
_COUNTED = frozenset({"quantize_linear", "integer_matmul", "integer_convolve", "max", "min"}) | {
    name for name, row in _ROWS.items() if row.accuracy.counts}
_COMPARISONS = frozenset(name for name, row in _ROWS.items()
                         if row.arity == 2 and row.result == "bool")
_MOVEMENT = {"reshape": None, "permute_dims": None, "broadcast_to": None, "concat": None,
             "slice": None, "place": None, "take_at": 1, "gather": 1}  # how many inputs are data


@dataclass(frozen=True, eq=False)
class Bounded:
    """Values in float64 (integers as they are), and a bound on the error of each."""

    value: np.ndarray
    error: np.ndarray

    @property
    def exact(self) -> bool:
        """Whether no element can be off."""
        return not self.error.any()


def exactly(array: np.ndarray) -> Bounded:
    """An input: known to the last bit."""
    wide = array.astype(np.float64) if _is_float(array.dtype) else array
    return Bounded(wide, np.zeros(array.shape))


def _is_float(dtype: Any) -> bool:
    return dtype.kind == "f" or dtype == ml_dtypes.bfloat16 or "float8" in dtype.name


def run(graph: Graph, arrays: Sequence[np.ndarray]) -> dict[Value, Bounded]:
    """Every value of a graph with its bound."""
    return follow(graph, [exactly(a) for a in arrays], bind_dims(graph, arrays))


def follow(graph: Graph, inputs: Sequence[Bounded], dims: Mapping[Var, int]
           ) -> dict[Value, Bounded]:
    """The same from inputs that may be off already."""
    memory: dict[Value, Bounded] = dict(zip(graph.inputs, inputs, strict=True))
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            given = [None if v is None else _stored(memory[v], v.dtype) for v in node.inputs]
            for value, result in zip(node.outputs, _node(node, given, dims), strict=True):
                memory[value] = result
    return memory


# ---------------------------------------------------------------- one node
def _node(node: Node, inputs: list[Bounded | None], dims: Mapping[Var, int]) -> list[Bounded]:
    if node.op.body is not None:
        fresh = [None if v is None or b is None else Value(TensorType(b.value.shape, v.dtype))
                 for b, v in zip(inputs, node.inputs, strict=True)]
        attrs = {k: concrete(v, dims) for k, v in node.attrs.items()}
        body = Graph(node.op.name, tuple(v for v in fresh if v is not None),
                     expand(node.op, fresh, attrs))
        inner = follow(body, [b for b in inputs if b is not None], dims)
        return [inner[v] for v in body.outputs]
    given = [b for b in inputs if b is not None]
    exact = all(b.exact for b in given)
    name = node.op.name
    if node.op.family == "control":
        return error_bounds_control.bounds(node, given, dims, follow, Bounded) or [
            Bounded(v, np.full(v.shape, np.inf))
            for v in _run(node, [b.value for b in given], dims)]
    if name == "bitcast":
        return _bitcast(node, given[0], dims)
    values = _run(node, [None if b is None else b.value for b in inputs], dims)
    rule = _RULES.get(name, _elementwise if node.op.family == "elementwise" else _sampled)
    if name in _MOVEMENT:
        errors = _moved_errors(node, inputs, dims)
    elif exact and name not in _DECIDING and not any(t.dtype.is_float for t in node.types):
        errors = [np.zeros(v.shape) for v in values]
    else:
        errors = rule(node, inputs, values, dims)
    return [_settled(v, np.broadcast_to(e, v.shape), t.dtype, name)
            for v, e, t in zip(values, errors, node.types, strict=True)]


def _run(node: Node, arrays: Sequence[np.ndarray | None], dims: Mapping[Var, int]
         ) -> list[np.ndarray]:
    return run_node(node, arrays, dims, wide=True)


def _settled(value: np.ndarray, error: np.ndarray, dtype: DType, name: str) -> Bounded:
    """A node's result with the rounding of the operation and of its type added."""
    error = np.where(np.isnan(error), np.inf, error)
    if not dtype.is_float:
        counted = dtype.is_integer and (name in _COUNTED or name in _MOVEMENT)
        return Bounded(value, error if counted else np.where(error > 0, np.inf, 0.0))
    accuracy = _ROWS[name].accuracy if name in _ROWS else Accuracy(_ULPS.get(name, FEW))
    ulps = 0.0 if name in _MOVEMENT else accuracy.ulps
    if ulps:
        size = np.where(np.isfinite(value), np.abs(value), 0.0)
        error = error + ulps * dtype.eps * size + smallest(dtype)
    if accuracy.vanishes_early:
        error = error + float(ml_dtypes.finfo(dtype.compute.np).smallest_normal)
    return Bounded(value, error)


def _stored(bounded: Bounded, dtype: DType) -> Bounded:
    """A value as its consumers see it: where its type may have overflowed, nothing is known."""
    if not dtype.is_float:
        return bounded
    # A kernel need not store what is between its operators: half types are float32 there, and
    # a product that is added to something is not even rounded to float32 (fused multiply-add).
    value, error = bounded.value, bounded.error
    over = np.isfinite(value) & (np.abs(value) + error > dtype.max)
    return Bounded(value, np.where(over, np.inf, error)) if over.any() else bounded


def smallest(dtype: DType) -> float:
    """The least positive number of a float type: what underflow may cost."""
    return float(ml_dtypes.finfo(dtype.np).smallest_subnormal)


def growth(count: int) -> float:
    """How roundings add up over a sum of so many terms, in any order.

    The certain bound is `count`; Higham and Mary ("A New Approach to Probabilistic Rounding Error
    Analysis", 2019) show 6 * sqrt(count) to hold but for one case in millions.
    """
    return min(float(count), 6.0 * math.sqrt(count)) + 1.0


# ---------------------------------------------------------------- elementwise operators
def _deviation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How far results are apart; equal infinities and two nans are not apart at all."""
    if a.dtype.kind not in "f":
        apart = np.abs(_wide(a) - _wide(b)) if a.dtype.kind in "iu" else np.inf
        return np.where(a == b, 0.0, apart)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isfinite(a) & np.isfinite(b), np.abs(a - b), np.inf))


def _elementwise(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
                 dims: Mapping[Var, int]) -> list[np.ndarray]:
    """Inputs are moved by their errors to all corners, and the worst effect counts."""
    given = [b for b in inputs if b is not None]
    (value,) = values
    error = np.zeros(value.shape)
    if node.op.name in _COMPARISONS:
        x, y = given
        reach = x.error + y.error
        gap = _deviation(*np.broadcast_arrays(_wide(x.value), _wide(y.value)))
        unsure = (reach > 0) & ~(gap > reach)
        return [np.where(unsure & ~_is_the_extremum(node, unsure), np.inf, 0.0)]
    if node.op.name == "where":
        chooser, x, y = given
        chosen = np.where(chooser.value, x.error, y.error)
        either = np.maximum(x.error, y.error) + _deviation(
            *np.broadcast_arrays(_wide(x.value), _wide(y.value)))
        return [np.where(chooser.error > 0, either, chosen)]
    if node.op.name == "astype" and not node.types[0].dtype.is_float:
        return [_to_integer(given[0], node.types[0].dtype)]
    accuracy = _ROWS[node.op.name].accuracy
    if accuracy.backward_stable:
        slack = 4 * node.types[0].dtype.compute.eps * (1 + _finite(given[0].value))
        given = [Bounded(_wide(given[0].value), given[0].error + slack)]
    period = np.inf if accuracy.period is None else accuracy.period(given)
    unknown = np.zeros(value.shape, bool)
    ways: list[tuple[np.ndarray, ...]] = []
    for b in given:
        if b.exact:
            ways.append((b.value,))
        elif b.value.dtype.kind != "f" and node.op.name in _COUNTED and (
                b.value.dtype.kind in "iu"):
            unknown = unknown | ~np.isfinite(b.error)
            ways.append(_counts(b))
        elif b.value.dtype.kind != "f":
            unknown = unknown | (b.error > 0)
            ways.append((b.value,))
        else:
            known = np.where(np.isfinite(b.error), b.error, 0.0)
            unknown = unknown | ~np.isfinite(b.error) | (b.error > period)
            ways.append((b.value + known, b.value - known))
    for corner in itertools.product(*ways) if any(len(w) > 1 for w in ways) else ():
        (other,) = _run(node, corner, dims)
        error = np.maximum(error, _deviation(other, value))
    if accuracy.undefined is not None:
        unknown = unknown | accuracy.undefined(given)
    return [np.where(unknown, np.inf, error)]


def _is_the_extremum(node: Node, unsure: np.ndarray) -> np.ndarray:
    """Where x == max(x) holds however x was rounded: all others are certainly smaller.

    That is how positions of extrema are found.
    """
    x, y = node.inputs
    source = None if y is None else y.node
    if node.op.name != "equal" or source is None or source.op.name not in ("max", "min") or (
            source.inputs[0] is not x or not source.attrs["keepdims"]):
        return np.zeros(unsure.shape, bool)
    return unsure & (unsure.sum(axis=source.attrs["axis"], keepdims=True) == 1)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def _to_integer(x: Bounded, dtype: DType) -> np.ndarray:
    """Casts to integers and booleans; what does not fit an integer has no defined result."""
    if x.value.dtype.kind != "f":  # bytes that may be one off fit a wider integer as they are
        fits = dtype.is_integer and x.value.dtype.kind in "iu" and (
            8 * x.value.dtype.itemsize < dtype.bits)
        return x.error if fits else np.where(x.error > 0, np.inf, 0.0)
    value, error = x.value, x.error
    if dtype.is_bool:
        return np.where((error > 0) & ~(np.abs(value) > error), np.inf, 0.0)
    fits = (np.trunc(value) >= float(dtype.min)) & (np.trunc(value) < float(dtype.max) + 1)
    stable = np.trunc(value - error) == np.trunc(value + error)
    return np.where(fits & stable, 0.0, np.inf)


def _bitcast(node: Node, x: Bounded, dims: Mapping[Var, int]) -> list[Bounded]:
    """Bits are those of the narrow type, so the value goes back to it first."""
    source = node.inputs[0]
    assert source is not None
    (narrow,) = run_node(node, [x.value.astype(source.dtype.np)], dims)
    unsure = (x.error > 0) | np.isnan(_wide(x.value))  # of a nan, only that it is one is defined
    return [Bounded(exactly(narrow).value, np.where(unsure, np.inf, 0.0))]


def _quantized(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
               dims: Mapping[Var, int]) -> list[np.ndarray]:
    """Inputs are moved by their errors, x also by what its quotient may be rounded by."""
    (value,) = values
    x = inputs[0]
    assert x is not None
    room = x.error + 2 * float32.eps * _finite(x.value)
    unknown = ~np.isfinite(room)
    room = np.where(unknown, 0.0, room)
    ways: list[tuple[Any, ...]] = [(_wide(x.value) + room, _wide(x.value) - room)]
    for b in inputs[1:]:
        if b is None or b.exact:
            ways.append((None if b is None else b.value,))
        elif b.value.dtype.kind == "f" and np.isfinite(b.error).all():
            ways.append((b.value + b.error, b.value - b.error))
        else:  # a scale or zero point that is not known: nothing is
            unknown, ways = np.ones(value.shape, bool), [*ways, (b.value,)]
    error = np.zeros(value.shape)
    for corner in itertools.product(*ways):
        (other,) = _run(node, corner, dims)
        error = np.maximum(error, _deviation(other, value))
    return [np.where(unknown, np.inf, error)]


def _counts(x: Bounded) -> tuple[np.ndarray, np.ndarray]:
    """Integers moved up and down by their errors, within their type."""
    limits = np.iinfo(x.value.dtype)
    step = np.where(np.isfinite(x.error), x.error, 0.0)
    up, down = (np.clip(_wide(x.value) + s, limits.min, limits.max).astype(x.value.dtype)
                for s in (step, -step))
    return up, down


def _dequantized(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
                 dims: Mapping[Var, int]) -> list[np.ndarray]:
    """As many scales off as the quantised number is."""
    x, scale, *rest = inputs
    assert x is not None and scale is not None
    if not scale.exact or any(b is not None and not b.exact for b in rest):
        return _sampled(node, inputs, values, dims)
    return _error_run(node, [x.error, np.abs(scale.value), None], dims)


def _integer_contraction(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
                         dims: Mapping[Var, int]) -> list[np.ndarray]:
    """Sums of products of bytes that may be some off."""
    x, y = inputs
    assert x is not None and y is not None

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.abs(_wide(run_node(node, [a, b], dims)[0]))

    known = [np.where(np.isfinite(b.error), b.error, 0.0) for b in (x, y)]
    sizes = [_finite(b.value) for b in (x, y)]
    error = product(known[0], sizes[1] + known[1]) + product(sizes[0], known[1])
    lost = [np.isinf(b.error) * 1.0 for b in (x, y)]
    touched = product(lost[0], np.ones_like(sizes[1])) + product(np.ones_like(sizes[0]), lost[1])
    return [np.where(touched > 0, np.inf, error)]


# ---------------------------------------------------------------- reductions and contractions
def _finite(array: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(array), np.abs(_wide(array)), 0.0)


def _error_run(node: Node, arrays: Sequence[np.ndarray | None], dims: Mapping[Var, int],
               **attrs: Any) -> list[np.ndarray]:
    """A node's reference applied to errors or magnitudes, which are float64 whatever the type."""
    types = tuple(TensorType(t.shape, float64) for t in node.types)
    fake = Node(node.op, node.inputs, {**node.attrs, **attrs}, types, node.where)
    return run_node(fake, arrays, dims, wide=True)


def _accumulated(magnitude: np.ndarray, carried: np.ndarray, count: int, dtype: DType
                 ) -> np.ndarray:
    """The error of a sum of `count` terms whose magnitudes add up to `magnitude`."""
    wide = dtype.compute
    if not wide.is_float:
        return np.where(carried > 0, np.inf, 0.0)
    error = carried + growth(count) * wide.eps * magnitude + smallest(wide) * count
    # Whether a partial sum overflows depends on the order of adding.
    return np.where(magnitude + carried > wide.max, np.inf, error)


def _count(node: Node, inputs: Sequence[Bounded | None], values: Sequence[np.ndarray]) -> int:
    """How many elements are combined into one."""
    x = inputs[0]
    assert x is not None
    if node.op.name == "cumulative":
        return max(1, x.value.shape[node.attrs["axis"]])
    return max(1, x.value.size // max(values[0].size, 1))


def _plain(attrs: Mapping[str, Any]) -> dict[str, Any]:
    return {"dtype": None} if "dtype" in attrs else {}


def _sum(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
         dims: Mapping[Var, int]) -> list[np.ndarray]:
    (x,) = inputs
    assert x is not None
    (magnitude,) = _error_run(node, [_finite(x.value)], dims, **_plain(node.attrs))
    (carried,) = _error_run(node, [x.error], dims, **_plain(node.attrs))
    return [_accumulated(magnitude, carried, _count(node, inputs, values), node.types[0].dtype)]


def _prod(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
          dims: Mapping[Var, int]) -> list[np.ndarray]:
    (x,) = inputs
    assert x is not None
    dtype = node.types[0].dtype.compute
    plain = _plain(node.attrs)

    def product(array: np.ndarray) -> np.ndarray:
        return _error_run(node, [array], dims, **plain)[0]

    size = _finite(x.value)
    if not dtype.is_float:
        return [np.where(_error_run(node, [1.0 + (x.error > 0)], dims, **plain)[0] > 1, np.inf, 0)]
    most = product(size + x.error)
    error = most - product(size) + growth(_count(node, inputs, values)) * dtype.eps * most
    # The order of multiplying decides whether a partial product leaves the range of the type.
    leaves = (product(np.maximum(size, 1.0)) > dtype.max) | (
        product(np.where(size > 0, np.minimum(size, 1.0), 1.0)) < float(
            ml_dtypes.finfo(dtype.np).smallest_normal))
    return [np.where(leaves, np.inf, error)]


def _extreme(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
             dims: Mapping[Var, int]) -> list[np.ndarray]:
    """max, min, any and all: off by no more than the worst of their inputs."""
    (x,) = inputs
    assert x is not None
    sign = -1.0 if node.op.name in ("min", "all") else 1.0
    if node.op.name in ("any", "all"):
        return [np.where(_reduced(node, x.error, dims), np.inf, 0.0)]
    return [sign * _error_run(node, [sign * x.error], dims)[0]]


def _reduced(node: Node, error: np.ndarray, dims: Mapping[Var, int]) -> np.ndarray:
    unsure = error > 0
    given = ~unsure if node.op.name == "all" else unsure
    (answer,) = run_node(node, [given], dims)
    return ~answer if node.op.name == "all" else answer


def _contraction(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
                  dims: Mapping[Var, int]) -> list[np.ndarray]:
    x, y = inputs
    assert x is not None and y is not None

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return _error_run(node, [a, b], dims)[0]

    left, right = _finite(x.value), _finite(y.value)
    carried = np.zeros(values[0].shape)
    if node.op.name == "batch_matmul" and all(
            v is not None and v.dtype is bfloat16 for v in node.inputs):
        x, y = _flushed(x), _flushed(y)
        carried += 2 * left.shape[-2 if node.attrs["transpose_x"] else -1] * _FLUSHED_BELOW
    if not x.exact:
        carried = carried + product(x.error, right + y.error)
    if not y.exact:
        carried = carried + product(left, y.error)
    # An infinity times what may have vanished is nan, or an infinity.
    for one, other in ((np.isinf(x.value), may_vanish(y)), (may_vanish(x), np.isinf(y.value))):
        if one.any() and other.any():
            carried = np.where(product(one * 1.0, other * 1.0) > 0, np.inf, carried)
    if node.op.name == "convolve":
        # Whether an infinite weight meets the zeros of the padding, or nothing, is left open.
        open_ = ~np.isfinite(y.value).all(axis=tuple(range(y.value.ndim - 1)))
        carried = np.where(open_, np.inf, carried)
        count = math.prod(y.value.shape[:-1])
    else:
        count = x.value.shape[-2 if node.attrs["transpose_x"] else -1]
    return [_accumulated(product(left, right), carried, max(count, 1), node.types[0].dtype)]


def _flushed(x: Bounded) -> Bounded:
    """Instructions that multiply bfloat16 take denormal numbers for zero."""
    size = np.abs(x.value)
    return Bounded(x.value, x.error + np.where(size < _FLUSHED_BELOW, size, 0.0))


def _cumulative(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
                dims: Mapping[Var, int]) -> list[np.ndarray]:
    """A scan is as far off as the reductions that it consists of."""
    if node.attrs["op"] == "add":
        return _sum(node, inputs, values, dims)
    if node.attrs["op"] == "mul":
        return _prod(node, inputs, values, dims)
    return _sorted(node, inputs, values, dims)


def _linear_recurrence(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
                       dims: Mapping[Var, int]) -> list[np.ndarray]:
    """The error of h[t] = a[t] * h[t-1] + b[t] follows a recurrence of the same form."""
    a, b = inputs
    assert a is not None and b is not None
    dtype = node.types[0].dtype.compute
    factor, term = _finite(a.value), _finite(b.value)
    (size,) = _error_run(node, [factor + a.error, term + b.error], dims)
    axis = node.attrs["axis"]
    worst = np.max(size, axis=axis, keepdims=True, initial=0.0)
    added = b.error + a.error * worst + 2 * dtype.eps * worst + smallest(dtype)
    (error,) = _error_run(node, [factor + a.error, added], dims)
    return [np.where(worst > dtype.max, np.inf, error)]


# ---------------------------------------------------------------- the rest
def _moved_errors(node: Node, inputs: list[Bounded | None], dims: Mapping[Var, int]
                  ) -> list[np.ndarray]:
    """Operators that only move elements move their errors along."""
    data = _MOVEMENT[node.op.name]
    arrays: list[np.ndarray | None] = []
    for i, b in enumerate(inputs):
        moved = data is None or i < data
        arrays.append(None if b is None else b.error if moved else b.value)
    attrs = {"value": 0.0} if "value" in node.attrs else {}
    errors = _error_run(node, arrays, dims, **attrs)
    indices = [b for b in inputs[data or len(inputs):] if b is not None]
    return [np.full_like(e, np.inf) if any(not b.exact for b in indices) else e for e in errors]


def _sorted(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
            dims: Mapping[Var, int]) -> list[np.ndarray]:
    """Sorting is 1-Lipschitz in its values, like a running maximum.

    Positions are known only when the values are.
    """
    (x,) = inputs
    assert x is not None
    worst = float(np.max(x.error, initial=0.0))
    return [np.full(v.shape, worst if i == 0 else (np.inf if worst else 0.0))
            for i, v in enumerate(values)]


_SAMPLES = 4


def _determinant(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
                 dims: Mapping[Var, int]) -> list[np.ndarray]:
    """Elimination is exact for a matrix that is a little off: Hadamard's bound says what that does.

    Numpy goes through the logarithm of the result's size, which may be 700.
    """
    (x,) = inputs
    assert x is not None
    n = x.value.shape[-1]
    size = np.linalg.norm(_wide(x.value), axis=-1)
    off = 8 * n * n * node.types[0].dtype.compute.eps * size + np.linalg.norm(x.error, axis=-1)
    error = (size + off).prod(-1) - size.prod(-1) + 1024 * float64.eps * np.abs(values[0])
    return [np.where(np.isfinite(error), error, np.inf)]


def _factored(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
              dims: Mapping[Var, int]) -> list[np.ndarray]:
    """Exact for matrices that are a little off (Higham, chapters 9, 10, 19, 20); what that does to
    results is up to the condition number. The signs of eigenvectors and of singular ones are free.
    """
    x = inputs[0]
    assert x is not None
    n, dtype = max((1, *x.value.shape[-2:])), node.types[0].dtype.compute
    size = np.linalg.norm(_finite(x.value), axis=(-2, -1), keepdims=True)
    off = 8 * n * n * dtype.eps + np.divide(
        max(float(b.error.max(initial=0.0)) for b in inputs if b is not None), size,
        out=np.full_like(size, np.inf), where=size > 0)
    sound = np.isfinite(x.value).all(axis=(-2, -1), keepdims=True)
    if node.op.name in ("eigh_lower", "svd"):
        spectrum = 0 if node.op.name == "eigh_lower" else 1
        known = np.where(sound, off * size, np.inf)[..., 0]
        return [np.broadcast_to(known, v.shape) if i == spectrum else np.full(v.shape, np.inf)
                for i, v in enumerate(values)]
    condition = np.full(size.shape, np.inf)
    if sound.all() and x.value.size:
        condition = np.linalg.cond(x.value)[..., None, None]
    loss = np.where(sound & (off * condition < 0.01), off * condition, np.inf)
    if node.op.name == "slogdet":
        return [np.where(np.isfinite(loss[..., 0, 0]), e, np.inf) for e in (
            0.0, n * loss[..., 0, 0] + dtype.eps * np.abs(values[1]))]
    return [loss * np.abs(v).max(axis=(-2, -1), keepdims=True, initial=0.0) for v in values]


def _transformed(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
                 dims: Mapping[Var, int]) -> list[np.ndarray]:
    """Every number of a line takes part in every result, by log2(n) stages (Higham, chapter 24).

    What numbers that are not finite become depends on the order in which they are added.
    """
    x = inputs[0]
    assert x is not None
    axes = (-3, -1) if node.op.name == "fft_columns" else (-2, -1)
    n, dtype = x.value.shape[axes[0]], node.types[0].dtype.compute
    scale = abs(node.attrs.get("scale", 1.0))
    size = _finite(x.value).sum(axis=axes, keepdims=True)
    error = scale * (FEW * (1 + math.log2(max(n, 2))) * dtype.eps * size
                     + x.error.sum(axis=axes, keepdims=True)) + smallest(dtype) * n
    known = np.isfinite(x.value).all(axis=axes, keepdims=True) & (size < dtype.max / 2)
    return [np.where(known, error, np.inf)]


def _sampled(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
             dims: Mapping[Var, int]) -> list[np.ndarray]:
    """Any other operator: errors of random sign are tried (Monte Carlo arithmetic, Parker).

    Integers made from inexact numbers are decisions, of which samples miss some: all stay open.
    """
    errors = [np.zeros(v.shape) for v in values]
    given = [b for b in inputs if b is not None]
    if not all(b.exact for b in given):
        if any(not np.isfinite(b.error).all() for b in given) or any(
                b.value.dtype.kind != "f" and not b.exact for b in given) or not all(
                t.dtype.is_float for t in node.types):
            return [np.full(v.shape, np.inf) for v in values]
        rng = np.random.default_rng(len(given))
        for _ in range(_SAMPLES):
            moved = [b if b is None or b.exact else
                     b.value + b.error * rng.choice([-1.0, 1.0], b.value.shape) for b in inputs]
            other = _run(node, [m.value if isinstance(m, Bounded) else m for m in moved], dims)
            errors = [np.maximum(e, _deviation(o, v)) for e, o, v in zip(errors, other, values)]
        errors = [_SAMPLES * e for e in errors]
    if any(t.dtype.is_float for t in node.types) and node.op.kind in ("opaque", "reduce",
                                                                      "contract"):
        sizes = [None if b is None else _finite(b.value) if b.value.dtype.kind == "f" else b.value
                 for b in inputs]
        count = max((b.value.size for b in given), default=1)
        for i, (magnitude, type) in enumerate(zip(_run(node, sizes, dims), node.types)):
            if type.dtype.is_float:
                # Such operators may keep partial results in memory, in the type of the result.
                size = _finite(magnitude)
                errors[i] = errors[i] + _accumulated(size, np.zeros(()), count, type.dtype) + (
                    growth(count) * type.dtype.eps * size)
    return errors


Rule = Callable[[Node, list[Bounded | None], list[np.ndarray], Mapping[Var, int]],
                list[np.ndarray]]
_RULES: dict[str, Rule] = {
    "sum": _sum, "prod": _prod, "max": _extreme, "min": _extreme, "any": _extreme,
    "all": _extreme, "cumulative": _cumulative, "linear_recurrence": _linear_recurrence,
    "batch_matmul": _contraction, "convolve": _contraction, "sort_pairs": _sorted,
    "top_pairs": _sorted, "quantize_linear": _quantized, "det": _determinant,
    "dequantize_linear": _dequantized, "integer_matmul": _integer_contraction,
    "integer_convolve": _integer_contraction, "fft_lines": _transformed,
    **dict.fromkeys(("solve_matrices", "inv", "slogdet", "cholesky_lower", "eigh_lower", "qr_tall",
                     "svd"), _factored),
    "fft_columns": _transformed, "real_halves": _transformed, "real_rows": _transformed,
}  # fmt: skip


# ---------------------------------------------------------------- comparing
@dataclass(frozen=True)
class Difference:
    """How a result compares: its worst error, and the first element that is out of bounds."""

    ulps: float = 0.0
    share: float = 0.0  # of what the bound allows
    index: tuple[int, ...] | None = None
    expected: Any = None
    got: Any = None
    checked: int = 0
    open: int = 0  # elements that have no bound, so that nothing can be said of them


def compare(got: np.ndarray, expected: Bounded, dtype: DType, allow: float = SAFETY) -> Difference:
    """Hold a result against a bounded value."""
    got = np.asarray(got)
    sure = np.isfinite(expected.error)
    if not dtype.is_float:
        wrong = sure & (got != expected.value)
        if dtype.is_integer:
            wrong &= np.abs(_wide(got) - _wide(expected.value)) > expected.error
        return _difference(got, expected.value, wrong, np.zeros(got.shape), np.zeros(got.shape),
                           sure)
    with np.errstate(all="ignore"):
        found, value, error = got.astype(np.float64), expected.value, expected.error
        over = np.abs(value) > dtype.max * (1 + dtype.eps / 4)
        edge = np.isfinite(value) & (np.abs(value) + error >= dtype.max) & ~(
            np.abs(value) - error > dtype.max * (1 + dtype.eps))
        value = np.where(over & np.isfinite(value), np.copysign(np.inf, value), value)
        if not np.isinf(np.array(np.inf).astype(dtype.np).astype(np.float64)):
            value = np.where(np.isinf(value), np.nan, value)  # types that have a nan instead
        sure &= ~edge
        away = _deviation(found, value)
        # Rounding to the type is not an error of anybody's.
        room = allow * error + 0.5 * dtype.eps * np.where(np.isfinite(value), np.abs(value), 0.0
                                                          ) + smallest(dtype)
        wrong = sure & ~(away <= room)
        unit = np.maximum(dtype.eps * np.where(np.isfinite(value), np.abs(value), 0.0),
                          smallest(dtype))
        ulps = np.where(sure & (room < WELL_CONDITIONED * unit), away / unit, 0.0)
        share = np.where(sure, away / room, 0.0)
    return _difference(got, value.astype(dtype.np), wrong, ulps, share, sure)


def _difference(got: np.ndarray, expected: np.ndarray, wrong: np.ndarray, ulps: np.ndarray,
                share: np.ndarray, sure: np.ndarray) -> Difference:
    found = Difference(float(np.max(ulps, initial=0.0)), float(np.max(share, initial=0.0)),
                       checked=int(sure.sum()), open=int((~sure).sum()))
    if not wrong.any():
        return found
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    return replace(found, index=index, expected=expected[index], got=got[index])
