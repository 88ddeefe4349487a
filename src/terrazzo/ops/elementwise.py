"""Elementwise operators: one for each row of the table of scalar operations.

Those whose results have another type than numpy's promotion says are written out here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from terrazzo.base.scalar import Call, call
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.scalar_table import by_operator
from terrazzo.base.shapes import broadcast_shapes
from terrazzo.dtypes import as_dtype, promote
from terrazzo.errors import DTypeError, user_location
from terrazzo.expr.ir import Tensor, compute
from terrazzo.graph.ir import Node, Operator, TensorType, Value
from terrazzo.loop.interpret import convert
from terrazzo.ops.define import broadcast_load, composed, elementwise, primitive

if TYPE_CHECKING:
    def __getattr__(name: str) -> Operator: ...

globals().update({
    name: elementwise(row) if row.meaning is None else composed(row)
    for name, row in by_operator().items() if not row.written})


# A gradient rule gets the node and the gradient of its result and answers with one gradient an
# input (None: no gradient). Broadcasting is undone by the caller.

# ---------------------------------------------------------------- choosing and converting
def _where_type(c: TensorType, x: TensorType, y: TensorType) -> TensorType:
    return TensorType(broadcast_shapes(c.shape, x.shape, y.shape), promote(x.dtype, y.dtype))


def _where_numpy(c: np.ndarray, x: np.ndarray, y: np.ndarray, out: TensorType) -> np.ndarray:
    return np.where(c.astype(bool), convert(x, out.dtype), convert(y, out.dtype))


def _where_grad(node: Node, g: Value) -> list[Value | None]:
    c = node.inputs[0]
    return [None, where(c, g, 0), where(c, 0, g)]


@primitive(family="elementwise", infer=_where_type, reference=_where_numpy, grad=_where_grad,
           unify=True)
def where(condition: Any, x: Any, y: Any, *, out: TensorType) -> Tensor:
    """x where the condition holds, else y"""
    def element(*i: Any) -> Any:
        test = broadcast_load(condition, i)
        if not test.dtype.is_bool:
            test = call("ne", test, 0)
        return Call(out.dtype, "where", (test, cast_scalar(broadcast_load(x, i), out.dtype),
                                         cast_scalar(broadcast_load(y, i), out.dtype)))

    return compute(out.shape, element, origin="where")


def _astype_type(x: TensorType, *, dtype: Any) -> TensorType:
    return TensorType(x.shape, as_dtype(dtype))


def _astype_numpy(x: np.ndarray, out: TensorType, *, dtype: Any) -> np.ndarray:
    return convert(x, out.dtype)


def _astype_grad(node: Node, g: Value) -> list[Value | None]:
    (x,) = node.inputs
    return [None if x is None else astype(g, x.dtype)]


@primitive(family="elementwise", infer=_astype_type, reference=_astype_numpy, grad=_astype_grad)
def astype(x: Any, *, dtype: Any, out: TensorType) -> Tensor:
    """x converted to another type"""
    return compute(out.shape, lambda *i: cast_scalar(x[i], out.dtype), origin="astype")


def _bitcast_type(x: TensorType, *, dtype: Any) -> TensorType:
    target = as_dtype(dtype)
    if target.bits != x.dtype.bits:
        raise DTypeError(f"bitcast reads {x.dtype.bits} bits of {x.dtype.name} as {target.bits} of "
                         f"{target.name}", where=user_location(),
                         hint="both types must have the same width; astype converts values")
    return TensorType(x.shape, target)


def _bitcast_numpy(x: np.ndarray, out: TensorType, *, dtype: Any) -> np.ndarray:
    return np.ascontiguousarray(x).view(out.dtype.np).reshape(x.shape)


@primitive(family="elementwise", infer=_bitcast_type, reference=_bitcast_numpy,
           differentiable=False)
def bitcast(x: Any, *, dtype: Any, out: TensorType) -> Tensor:
    """the bits of x read as another type of the same width"""
    return compute(out.shape, lambda *i: Call(out.dtype, "bitcast", (x[i],)), origin="bitcast")
