"""Convolutions, plain, transposed and deformable."""

from __future__ import annotations

from terrazzo.frontends.onnx.convert.windows import halves, kernel_of, reach, read_windows
from terrazzo.frontends.onnx.registry import Call, Result, converts
from terrazzo.index import Index, maximum
from terrazzo.ops import conv as c


@converts("Conv")
def conv(call: Call) -> Result:
    x, weight = call.value(0), call.value(1)
    at = read_windows(call, x.shape[2:], kernel_of(call, weight))
    return c.conv(x, weight, call.optional(2), strides=at.strides, padding=at.padding,
                  dilation=at.dilation, groups=call.attr("group", 1))


@converts("ConvTranspose")
def conv_transpose(call: Call) -> Result:
    x, weight = call.value(0), call.value(1)
    sizes, kernel = x.shape[2:], kernel_of(call, weight)
    rank, mode = len(sizes), call.attr("auto_pad", "NOTSET")
    at = read_windows(call, sizes, kernel)
    extra: list[Index] = list(call.attr("output_padding") or [0] * rank)
    wanted: list[Index] | None = call.attr("output_shape")
    if wanted is None and mode in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [n * s for n, s in zip(sizes, at.strides, strict=True)]
    padding = list(at.padding)
    if wanted is not None:
        for d, target in enumerate(wanted[-rank:]):  # some exporters write all of the shape
            total = ((sizes[d] - 1) * at.strides[d] + extra[d] + reach(kernel[d], at.dilation[d])
                     - target)
            # More than the windows reach is asked for: zeros at the end, as in output_padding.
            extra[d] = extra[d] + maximum(-total, 0)
            padding[d] = halves(maximum(total, 0), extra_first=mode != "SAME_UPPER")
    return c.conv_transpose(
        x, weight, call.optional(2), strides=at.strides, padding=tuple(padding),
        output_padding=tuple(extra), dilation=at.dilation, groups=call.attr("group", 1))
