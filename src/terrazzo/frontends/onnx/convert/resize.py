"""Images of another size: Resize and its forerunner Upsample."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from terrazzo.frontends.onnx.registry import Call, Result, converts
from terrazzo.graph.ir import Value
from terrazzo.index import Index
from terrazzo.ops.resize import resize

_FIRST_MODES = {"nearest": "nearest", "linear": "linear", "bilinear": "linear",
                "trilinear": "linear"}


def _scaled(call: Call, x: Value, scales: Sequence[float], shrinking_rounds: str) -> Value:
    """Scaling as it was before opset 11: corners stay where they are, and nearest is to the left.

    `shrinking_rounds` is the rounding along axes that become smaller.
    """
    mode = call.attr("mode", "nearest")
    if mode not in _FIRST_MODES:
        call.unsupported(f"has an unknown mode {mode!r}")
    if len(scales) != x.ndim:
        call.unsupported(f"has {len(scales)} scales for {x.ndim} axes")
    scales = [_scale(n, s) for n, s in zip(x.shape, scales, strict=True)]
    for rounding, axes in (("floor", [d for d in range(x.ndim) if scales[d] >= 1]),
                           (shrinking_rounds, [d for d in range(x.ndim) if scales[d] < 1])):
        if axes:
            x = resize(x, scales=tuple(scales[d] for d in axes), axes=tuple(axes),
                       mode=_FIRST_MODES[mode], nearest_mode=rounding,
                       coordinate_transformation_mode="asymmetric")
    return x


def _scale(size: Index, scale: float) -> float:
    """A scale with which a size becomes what float32 makes of it, as in onnxruntime.

    5 * 2.6 is 13, but a little less if the 2.6 is a float32 and the product is not.
    """
    if not isinstance(size, int) or not size or not math.isfinite(scale):
        return scale
    result = math.floor(np.float32(size) * np.float32(scale))
    return scale if int(size * scale) == result else math.nextafter(result / size, math.inf)


def _numbers(call: Call, i: int) -> tuple[float, ...]:
    return tuple(float(n) for n in call.array(i).reshape(-1))


@converts("Upsample", until=9)
def upsample_by_attribute(call: Call) -> Result:
    scales = call.attr("scales")
    if scales is None:
        call.unsupported("misses its attribute scales")
    return _scaled(call, call.value(0), scales, "floor")


@converts("Upsample", since=9)
def upsample(call: Call) -> Result:
    return _scaled(call, call.value(0), _numbers(call, 1), "floor")


@converts("Resize", until=11)
def first_resize(call: Call) -> Result:
    # The text says nothing on rounding; onnxruntime takes the next element when shrinking, and so
    # do the tests of that version.
    return _scaled(call, call.value(0), _numbers(call, 1), "ceil")


@converts("Resize", since=11)
def later_resize(call: Call) -> Result:
    x = call.value(0)
    # Before optional inputs were usual, one that is not meant was an empty tensor.
    scales = _numbers(call, 2) if call.has(2) else ()
    sizes = tuple(call.sizes(3)) if call.has(3) and not scales else None
    where = call.attr("coordinate_transformation_mode", "half_pixel")
    crops = where == "tf_crop_and_resize"
    axes = call.attr("axes")
    shape = x.shape if axes is None else tuple(x.shape[a] for a in axes)
    if scales and len(scales) == len(shape):
        scales = tuple(map(_scale, shape, scales))
    return resize(
        x, sizes=sizes, scales=scales or None, axes=None if axes is None else tuple(axes),
        mode=call.attr("mode", "nearest"), coordinate_transformation_mode=where,
        nearest_mode=call.attr("nearest_mode", "round_prefer_floor"),
        cubic_coeff_a=call.attr("cubic_coeff_a", -0.75),
        exclude_outside=bool(call.attr("exclude_outside", 0)),
        antialias=bool(call.attr("antialias", 0)), roi=_numbers(call, 1) if crops else None,
        extrapolation_value=call.attr("extrapolation_value", 0.0),
        keep_aspect_ratio_policy=call.attr("keep_aspect_ratio_policy", "stretch"))
