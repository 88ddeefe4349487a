"""Matrices as such: determinants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from terrazzo.base.scalar import Const, as_scalar, call
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.scalar import where as where_scalar
from terrazzo.base.shapes import dims_text, num_elements
from terrazzo.dtypes import int64
from terrazzo.errors import DTypeError, ShapeError, user_location
from terrazzo.expr.ir import fresh_axis
from terrazzo.graph.ir import Node, TensorType, Value, operator_named
from terrazzo.index.guards import granted
from terrazzo.loop.interpret import convert
from terrazzo.loop.ir import Alloc, Block, Buffer, For, If, Stmt, Store, block
from terrazzo.ops.define import primitive


def _det_type(x: TensorType) -> TensorType:
    if len(x.shape) < 2 or not granted("==", x.shape[-1], x.shape[-2]):
        raise ShapeError(f"det needs square matrices in the last two axes, not "
                         f"{dims_text(x.shape)}", where=user_location())
    if not x.dtype.is_float:
        raise DTypeError(f"det works on floats, not on {x.dtype.name}", where=user_location(),
                         hint="cast with tz.astype(x, 'float32') first")
    return TensorType(x.shape[:-2], x.dtype)


def _det_numpy(x: np.ndarray, *, out: TensorType) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(convert(np.asarray(np.linalg.det(convert(x, out.dtype.compute))),
                                  out.dtype))


def _det_grad(node: Node, g: Value) -> list[Value | None]:
    (x,) = node.inputs
    assert x is not None
    each = operator_named("reshape")(g, shape=(*g.shape, 1, 1))
    return [each * operator_named("cofactors")(x)]


@primitive(family="linalg", infer=_det_type, reference=_det_numpy, grad=_det_grad, loops=True)
def det(x: Any, *, out: TensorType) -> Any:
    """determinants of the matrices in the last two axes, by elimination with row pivots"""
    n, wide = x.shape[-1], x.dtype.compute

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        count = num_elements(x.shape[:-2])
        if count == 0:
            return Block(())
        task, i, j, k = (fresh_axis("task", count), fresh_axis("i", n), fresh_axis("j", n),
                         fresh_axis("k", n))
        a = Buffer("a", wide, n * n)
        product, factor = Buffer("product", wide, 1), Buffer("factor", wide, 1)
        pivot = Buffer("pivot", int64, 1)
        held = Buffer("held", wide, 1)

        def row(place: Any) -> Any:
            """The address of element j of a row that data chose."""
            return place * as_scalar(n) + as_scalar(j.var)

        copy = For(j.var, 0, n * n, Store(a, j.var, cast_scalar(
            inputs[0][task.var * n * n + j.var], wide)), "vector")
        largest = a[pivot[0] * as_scalar(n) + as_scalar(k.var)]
        search = For(i.var, k.var + 1, n, If(
            call("gt", call("abs", a[i.var * n + k.var]), call("abs", largest)),
            Store(pivot, 0, as_scalar(i.var))))
        swap = If(call("ne", pivot[0], as_scalar(k.var)), block(
            For(j.var, k.var, n, block(
                Store(held, 0, a[row(pivot[0])]), Store(a, row(pivot[0]), a[k.var * n + j.var]),
                Store(a, k.var * n + j.var, held[0]))),
            Store(product, 0, Const(wide, -1.0), "mul")))
        corner = a[k.var * n + k.var]
        # A column of zeros: the product is 0 from here on, and must not become nan.
        quotient = where_scalar(call("eq", corner, 0.0), Const(wide, 0.0),
                                a[i.var * n + k.var] / corner)
        eliminate = For(i.var, k.var + 1, n, block(
            Store(factor, 0, quotient),
            For(j.var, k.var + 1, n, Store(
                a, i.var * n + j.var, a[i.var * n + j.var] - factor[0] * a[k.var * n + j.var]),
                "vector")))
        step = block(Store(pivot, 0, as_scalar(k.var)), search, swap,
                     Store(product, 0, a[k.var * n + k.var], "mul"), eliminate)
        body = block(Store(product, 0, Const(wide, 1.0)), copy, For(k.var, 0, n, step),
                     Store(outputs[0], task.var, cast_scalar(product[0], out.dtype)))
        for buffer in (a, product, factor, pivot, held):
            body = Alloc(buffer, body)
        return For(task.var, 0, count, body, "parallel")

    return build
