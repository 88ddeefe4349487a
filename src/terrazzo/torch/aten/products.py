"""Matrix products."""

from __future__ import annotations

from typing import Any

from terrazzo.ops import contract
from terrazzo.torch.aten.registry import aten


@aten("mm", "bmm")
def mm(x: Any, y: Any) -> Any:
    return contract.matmul(x, y)


@aten("mv", "dot", "vdot", "matmul")
def mv(x: Any, y: Any) -> Any:
    return contract.matmul(x, y)


@aten("addmm", "baddbmm", "addbmm", "addmv")
def addmm(bias: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    product = contract.matmul(x, y)
    if alpha != 1:
        product = product * alpha
    if beta == 0:  # then torch does not look at it, be it nan
        return product
    return product + (bias if beta == 1 else bias * beta)


@aten("linear")
def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    return contract.linear(x, weight, bias)
