"""Matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.ops import contract, reduce
from terrazzo.ops.shape import expand_dims
from terrazzo.torch.aten.registry import aten, unsupported


def _check_types(x: Any, y: Any) -> None:
    if x.dtype is not y.dtype:
        unsupported("a product of two types, which torch refuses")


@aten("mm", "bmm")
def mm(x: Any, y: Any) -> Any:
    _check_types(x, y)
    return contract.matmul(x, y)


@aten("mv", "dot", "vdot", "matmul")
def mv(x: Any, y: Any) -> Any:
    return contract.matmul(x, y)


@aten("addmm", "baddbmm", "addmv")
def addmm(bias: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    _check_types(x, y)
    product = contract.matmul(x, y)
    if alpha != 1:
        product = product * alpha
    if beta == 0:  # then torch does not look at it, be it nan
        return product
    return product + (bias if beta == 1 else bias * beta)


@aten("addbmm")
def addbmm(bias: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    total = reduce.sum_(contract.matmul(x, y), axis=0)
    total = total if alpha == 1 else total * alpha
    return total if beta == 0 else total + (bias if beta == 1 else bias * beta)


@aten("_trilinear")
def trilinear(x: Any, y: Any, z: Any, expand1: Sequence[int], expand2: Sequence[int],
              expand3: Sequence[int], sumdim: Sequence[int], unroll_dim: int = 1) -> Any:
    wide = [expand_dims(v, axis=tuple(axes)) if axes else v
            for v, axes in ((x, expand1), (y, expand2), (z, expand3))]
    return reduce.sum_(wide[0] * wide[1] * wide[2], axis=tuple(sumdim))


@aten("linear")
def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    _check_types(x, weight)
    return contract.linear(x, weight, bias)
