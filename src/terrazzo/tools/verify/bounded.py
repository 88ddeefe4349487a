"""Values with bounds on their errors, and the arithmetic that bounds are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from terrazzo.base.scalar_table import by_operator
from terrazzo.dtypes import DType, float64
from terrazzo.graph.evaluate import run_node
from terrazzo.graph.ir import Node, TensorType
from terrazzo.index import Var

# Second-order terms of the bounds, and for float64 the error of the yardstick itself.
SAFETY = 2.0
ROWS = by_operator()
# Integers whose bound is a count: quantised numbers that may be one off, and what is made of them.
COUNTED = frozenset({"quantize_linear", "integer_matmul", "integer_convolve", "max", "min"}) | {
    name for name, row in ROWS.items() if row.accuracy.counts}


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
    wide = array.astype(np.float64) if is_float(array.dtype) else array
    return Bounded(wide, np.zeros(array.shape))


def is_float(dtype: Any) -> bool:
    """Whether numpy or ml_dtypes computes with it as a float."""
    return dtype.kind == "f" or dtype == ml_dtypes.bfloat16 or "float8" in dtype.name


def smallest(dtype: DType) -> float:
    """The least positive number of a float type: what underflow may cost."""
    return float(ml_dtypes.finfo(dtype.np).smallest_subnormal)


def growth(count: int) -> float:
    """How roundings add up over a sum of so many terms, in any order.

    The certain bound is `count`; Higham and Mary ("A New Approach to Probabilistic Rounding Error
    Analysis", 2019) show 6 * sqrt(count) to hold but for one case in millions.
    """
    return min(float(count), 6.0 * math.sqrt(count)) + 1.0


# ---------------------------------------------------------------- of arrays
def wide(array: np.ndarray) -> np.ndarray:
    """The same numbers in float64."""
    return array.astype(np.float64)


def finite(array: np.ndarray) -> np.ndarray:
    """Magnitudes, with zeros for what is not finite."""
    return np.where(np.isfinite(array), np.abs(wide(array)), 0.0)


def deviation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How far results are apart; equal infinities and two nans are not apart at all."""
    if a.dtype.kind not in "f":
        apart = np.abs(wide(a) - wide(b)) if a.dtype.kind in "iu" else np.inf
        return np.where(a == b, 0.0, apart)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isfinite(a) & np.isfinite(b), np.abs(a - b), np.inf))


# ---------------------------------------------------------------- of nodes
def run_wide(node: Node, arrays: Sequence[np.ndarray | None], dims: Mapping[Var, int]
            ) -> list[np.ndarray]:
    """A node computed in float64."""
    return run_node(node, arrays, dims, wide=True)


def error_run(node: Node, arrays: Sequence[np.ndarray | None], dims: Mapping[Var, int],
              **attrs: Any) -> list[np.ndarray]:
    """A node's reference applied to errors or magnitudes, which are float64 whatever the type."""
    types = tuple(TensorType(t.shape, float64) for t in node.types)
    fake = Node(node.op, node.inputs, {**node.attrs, **attrs}, types, node.where)
    return run_node(fake, arrays, dims, wide=True)


def accumulated(magnitude: np.ndarray, carried: np.ndarray, count: int, dtype: DType
               ) -> np.ndarray:
    """The error of a sum of `count` terms whose magnitudes add up to `magnitude`."""
    wide = dtype.compute
    if not wide.is_float:
        return np.where(carried > 0, np.inf, 0.0)
    error = carried + growth(count) * wide.eps * magnitude + smallest(wide) * count
    # Whether a partial sum overflows depends on the order of adding.
    return np.where(magnitude + carried > wide.max, np.inf, error)
