"""Matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.index.guards import ask
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


# ---------------------------------------------------------------- 8-bit floats
def _is_one(scale: Any, *axes: int) -> bool:
    return all(ask("==", scale.shape[a], 1) for a in axes)


@aten("_scaled_mm")
def scaled_mm(x: Any, y: Any, scale_a: Any, scale_b: Any, bias: Any = None,
              scale_result: Any = None, out_dtype: Any = None, use_fast_accum: bool = False) -> Any:
    if x.dtype not in contract.FLOAT8 or y.dtype not in contract.FLOAT8:
        unsupported(f"a scaled product of {x.dtype.name} and {y.dtype.name}")
    if scale_result is not None:
        unsupported("a scale of the result")
    for scale, along_k in ((scale_a, 1), (scale_b, 0)):
        if not _is_one(scale, *range(scale.ndim)) and not (
                scale.ndim == 2 and _is_one(scale, along_k)):
            unsupported("scales of blocks of an operand")
    product = contract.float8_matmul(x, y) * scale_a * scale_b
    return product if bias is None else product + bias
