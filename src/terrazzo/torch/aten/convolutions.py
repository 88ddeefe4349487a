"""Convolutions, pools and resizing, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.graph.autodiff import gradients
from terrazzo.graph.ir import TensorType, Value
from terrazzo.ops import conv, pool, reduce
from terrazzo.ops.creation import zeros
from terrazzo.ops.elementwise import astype
from terrazzo.ops.indexing import scatter
from terrazzo.ops.shape import reshape
from terrazzo.torch.aten.registry import aten, unsupported


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


def _pool_attrs(x: Value, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool,
                rank: int) -> dict[str, Any]:
    if ceil_mode:
        unsupported("pooling with ceil_mode")
    each = [tuple(v) * rank if len(v) == 1 else tuple(v)
            for v in (kernel, stride or kernel, padding, dilation)]
    return dict(window=each[0], strides=each[1], padding=each[2], dilation=each[3])


@aten("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool_with_indices(x: Any, kernel_size: Any, stride: Any = (), padding: Any = (0,),
                          dilation: Any = (1,), ceil_mode: bool = False) -> Any:
    rank = len(kernel_size)
    batched = x if x.ndim == rank + 2 else reshape(x, shape=(1, *x.shape))
    attrs = _pool_attrs(x, kernel_size, stride, padding, dilation, ceil_mode, rank)
    y, places = pool.max_pool_indices(batched, **attrs)
    plane: Any = 1
    for n in x.shape[-rank:]:
        plane = plane * n
    places = places % plane  # torch counts within a channel
    if x.ndim != rank + 2:
        y, places = (reshape(v, shape=v.shape[1:]) for v in (y, places))
    return y, places


@aten("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def max_pool_backward(grad: Any, x: Any, kernel_size: Any, stride: Any, padding: Any,
                      dilation: Any, ceil_mode: bool, indices: Any) -> Any:
    rank = len(kernel_size)
    lead = x.shape[:-rank]
    plane: Any = 1
    for n in x.shape[-rank:]:
        plane = plane * n
    flat = [reshape(v, shape=(*lead, -1)) for v in (grad, indices)]
    empty = zeros(shape=(*lead, plane), dtype=grad.dtype.compute)
    summed = scatter(empty, flat[1], astype(flat[0], dtype=grad.dtype.compute), axis=len(lead),
                     reduce="add")
    return astype(reshape(summed, shape=x.shape), dtype=grad.dtype)


def _average(x: Any, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool,
             count_include_pad: bool, divisor_override: Any) -> Value:
    if divisor_override is not None:
        unsupported("average pooling with a divisor of its own")
    rank = len(kernel_size)
    batched = x if x.ndim == rank + 2 else reshape(x, shape=(1, *x.shape))
    attrs = _pool_attrs(x, kernel_size, stride, padding, (1,), ceil_mode, rank)
    y = pool.average_pool(batched, count_include_pad=count_include_pad, **attrs)
    return y if x.ndim == rank + 2 else reshape(y, shape=y.shape[1:])


@aten("avg_pool1d", "avg_pool2d", "avg_pool3d")
def average_pool(x: Any, kernel_size: Any, stride: Any = (), padding: Any = (0,),
                 ceil_mode: bool = False, count_include_pad: bool = True,
                 divisor_override: Any = None) -> Any:
    return _average(x, kernel_size, stride, padding, ceil_mode, count_include_pad,
                    divisor_override)


@aten("avg_pool2d_backward", "avg_pool3d_backward")
def average_pool_backward(grad: Any, x: Any, kernel_size: Any, stride: Any, padding: Any,
                          ceil_mode: bool, count_include_pad: bool, divisor_override: Any) -> Any:
    y = _average(x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    return gradients([y], [grad], [x])[0]


@aten("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", typed=True)
def adaptive_average_pool(x: Any, size: Any, *, out: TensorType) -> Any:
    axes = tuple(range(x.ndim - len(size), x.ndim))
    if all(n == 1 for n in size):
        return reduce.mean(x, axis=axes, keepdims=True)
    sizes = [(x.shape[d], out.shape[d]) for d in axes]
    if not all(isinstance(n, int) and isinstance(m, int) and n % m == 0 for n, m in sizes):
        unsupported("adaptive pooling whose windows differ in size")
    return average_pool(x, [n // m for n, m in sizes])


@aten("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", typed=True)
def adaptive_average_pool_backward(grad: Any, x: Any, *, out: TensorType) -> Any:
    rank = x.ndim - 2
    y = adaptive_average_pool(x, list(grad.shape[-rank:]), out=grad.type)
    return gradients([y], [grad], [x])[0]
