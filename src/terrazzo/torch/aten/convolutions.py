"""Convolutions with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.graph.autodiff import gradients
from terrazzo.graph.ir import Value
from terrazzo.ops import conv, reduce
from terrazzo.ops.shape import reshape
from terrazzo.torch.aten.registry import aten


def _convolved(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any,
               transposed: bool, output_padding: Any, groups: int) -> Value:
    rank = weight.ndim - 2
    each = [tuple(v) * rank if len(v) == 1 else tuple(v)
            for v in (stride, padding, dilation, output_padding)]
    attrs: dict[str, Any] = dict(strides=each[0], padding=each[1], dilation=each[2], groups=groups)
    single = x.ndim == weight.ndim - 1
    if single:
        x = reshape(x, shape=(1, *x.shape))
    if transposed:
        y = conv.conv_transpose(x, weight, bias, output_padding=each[3], **attrs)
    else:
        y = conv.conv(x, weight, bias, **attrs)
    return reshape(y, shape=y.shape[1:]) if single else y


@aten("convolution")
def convolution(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any,
                transposed: bool, output_padding: Any, groups: int) -> Any:
    return _convolved(x, weight, bias, stride, padding, dilation, transposed, output_padding,
                      groups)


@aten("convolution_backward")
def convolution_backward(grad: Any, x: Any, weight: Any, bias_sizes: Any, stride: Any,
                         padding: Any, dilation: Any, transposed: bool, output_padding: Any,
                         groups: int, output_mask: Sequence[bool]) -> Any:
    y = _convolved(x, weight, None, stride, padding, dilation, transposed, output_padding, groups)
    wanted = [v for v, wants in zip((x, weight), output_mask) if wants]
    found = iter(gradients([y], [grad], wanted))
    dx, dw = (next(found) if wants else None for wants in output_mask[:2])
    db = None
    if output_mask[2]:
        db = reduce.sum_(grad, axis=tuple(d for d in range(grad.ndim) if d != 1))
    return dx, dw, db
