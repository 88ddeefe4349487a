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

from collections.abc import Callable, Mapping, Sequence

import ml_dtypes
import numpy as np

from terrazzo.base.scalar_accuracy import FEW, Accuracy
from terrazzo.dtypes import DType, promote
from terrazzo.graph.applying import expand
from terrazzo.graph.evaluate import bind_dims, concrete
from terrazzo.graph.ir import Graph, Node, TensorType, Value
from terrazzo.index import Var
from terrazzo.tools.verify import bounds_control
from terrazzo.tools.verify.bounded import (
    COUNTED,
    ROWS,
    Bounded,
    error_run,
    exactly,
    run_wide,
    smallest,
)
from terrazzo.tools.verify.bounds_elementwise import bitcast, dequantized, elementwise, quantized
from terrazzo.tools.verify.bounds_linalg import determinant, factored, transformed
from terrazzo.tools.verify.bounds_sampled import sampled
from terrazzo.tools.verify.bounds_sums import (
    contracted,
    cumulative,
    extreme,
    integer_contraction,
    linear_recurrence,
    multiplied,
    sorted_values,
    summed,
)

# Operators beside those of the table of scalar operations.
_ULPS = {**dict.fromkeys(("sort_pairs", "top_pairs", "constant", "max", "min"), 0.0), "full": 1.0}
# From floats to integers: a rounding on the way may decide for the integer next to it.
_DECIDING = ("astype", "quantize_linear")
_MOVEMENT = {"reshape": None, "permute_dims": None, "broadcast_to": None, "concat": None,
             "slice": None, "place": None, "take_at": 1, "gather": 1}  # how many inputs are data


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
        return bounds_control.bounds(node, given, dims, follow, Bounded) or [
            Bounded(v, np.full(v.shape, np.inf))
            for v in run_wide(node, [b.value for b in given], dims)]
    if name == "bitcast":
        return bitcast(node, given[0], dims)
    values = run_wide(node, [None if b is None else b.value for b in inputs], dims)
    rule = _RULES.get(name, elementwise if node.op.family == "elementwise" else sampled)
    if name in _MOVEMENT:
        errors = _moved_errors(node, inputs, dims)
    elif exact and name not in _DECIDING and not any(t.dtype.is_float for t in node.types):
        errors = [np.zeros(v.shape) for v in values]
    else:
        errors = rule(node, inputs, values, dims)
    return [_settled(v, np.broadcast_to(e, v.shape), t.dtype, node)
            for v, e, t in zip(values, errors, node.types, strict=True)]


def _settled(value: np.ndarray, error: np.ndarray, dtype: DType, node: Node) -> Bounded:
    """A node's result with the rounding of the operation and of its type added."""
    name = node.op.name
    error = np.where(np.isnan(error), np.inf, error)
    if not dtype.is_float:
        counted = dtype.is_integer and (name in COUNTED or name in _MOVEMENT)
        return Bounded(value, error if counted else np.where(error > 0, np.inf, 0.0))
    accuracy = ROWS[name].accuracy if name in ROWS else Accuracy(_ULPS.get(name, FEW))
    ulps = 0.0 if name in _MOVEMENT or _only_widens(node) else accuracy.ulps
    if ulps:
        size = np.where(np.isfinite(value), np.abs(value), 0.0)
        error = error + ulps * dtype.eps * size + smallest(dtype)
    if accuracy.vanishes_early:
        error = error + float(ml_dtypes.finfo(dtype.compute.np).smallest_normal)
    return Bounded(value, error)


def _only_widens(node: Node) -> bool:
    """Whether a float is converted to a type that holds all values of its own."""
    source = node.inputs[0] if node.op.name == "astype" else None
    target = node.types[0].dtype
    return source is not None and source.dtype.is_float and (
        promote(source.dtype, target) is target)


def _stored(bounded: Bounded, dtype: DType) -> Bounded:
    """A value as its consumers see it: where its type may have overflowed, nothing is known."""
    if not dtype.is_float:
        return bounded
    # A kernel need not store what is between its operators: half types are float32 there, and
    # a product that is added to something is not even rounded to float32 (fused multiply-add).
    value, error = bounded.value, bounded.error
    over = np.isfinite(value) & (np.abs(value) + error > dtype.max)
    return Bounded(value, np.where(over, np.inf, error)) if over.any() else bounded


def _moved_errors(node: Node, inputs: list[Bounded | None], dims: Mapping[Var, int]
                 ) -> list[np.ndarray]:
    """Operators that only move elements move their errors along."""
    data = _MOVEMENT[node.op.name]
    arrays: list[np.ndarray | None] = []
    for i, b in enumerate(inputs):
        moved = data is None or i < data
        arrays.append(None if b is None else b.error if moved else b.value)
    attrs = {"value": 0.0} if "value" in node.attrs else {}
    errors = error_run(node, arrays, dims, **attrs)
    indices = [b for b in inputs[data or len(inputs):] if b is not None]
    return [np.full_like(e, np.inf) if any(not b.exact for b in indices) else e for e in errors]


Rule = Callable[[Node, list[Bounded | None], list[np.ndarray], Mapping[Var, int]],
                list[np.ndarray]]
_RULES: dict[str, Rule] = {
    "sum": summed, "prod": multiplied, "max": extreme, "min": extreme, "any": extreme,
    "all": extreme, "cumulative": cumulative, "linear_recurrence": linear_recurrence,
    "batch_matmul": contracted, "float8_matmul": contracted, "convolve": contracted,
    "sort_pairs": sorted_values,
    "top_pairs": sorted_values, "quantize_linear": quantized, "det": determinant,
    "dequantize_linear": dequantized, "integer_matmul": integer_contraction,
    "integer_convolve": integer_contraction, "fft_lines": transformed,
    **dict.fromkeys(("solve_matrices", "inv", "slogdet", "cholesky_lower", "eigh_lower", "qr_tall",
                     "svd"), factored),
    "fft_columns": transformed, "real_halves": transformed, "real_rows": transformed,
}  # fmt: skip
