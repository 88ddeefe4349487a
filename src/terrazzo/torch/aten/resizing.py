"""Images in other sizes and at other places: interpolation, its gradients, grids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from terrazzo.graph.autodiff import gradients
from terrazzo.graph.ir import TensorType, Value
from terrazzo.ops.creation import zeros
from terrazzo.ops.elementwise import astype
from terrazzo.ops.reduce import widened
from terrazzo.ops.resize import interpolated
from terrazzo.ops.vision import grid_sample
from terrazzo.torch.aten.registry import aten, unsupported

Taps = tuple[np.ndarray, np.ndarray]  # [result, tap]: which elements make it up, and their weights
Rule = Callable[[int, int, Any, bool], Taps]  # of sizes before and after, a scale, align_corners


def _ratio(n: int, count: int, scale: Any, align_corners: bool) -> np.float32:
    """How far apart results are, in elements; torch computes that in float32."""
    if align_corners:
        return np.float32((n - 1) / (count - 1)) if count > 1 else np.float32(0)
    if scale is not None and scale > 0:
        return np.float32(1.0 / scale)
    return np.float32(n) / np.float32(count)


def _nearest(n: int, count: int, scale: Any, align_corners: bool) -> Taps:
    return _chosen(n, np.arange(count, dtype=np.float32) * _ratio(n, count, scale, False))


def _nearest_exact(n: int, count: int, scale: Any, align_corners: bool) -> Taps:
    places = np.arange(count, dtype=np.float32) + np.float32(0.5)
    return _chosen(n, places * _ratio(n, count, scale, False))


def _chosen(n: int, places: np.ndarray) -> Taps:
    at = np.minimum(np.floor(places).astype(np.int64), n - 1)
    return at[:, None], np.ones((len(at), 1))


def _places(n: int, count: int, scale: Any, align_corners: bool) -> np.ndarray:
    ratio = float(_ratio(n, count, scale, align_corners))
    number = np.arange(count, dtype=np.float64)
    return number * ratio if align_corners else (number + 0.5) * ratio - 0.5


def _linear(n: int, count: int, scale: Any, align_corners: bool) -> Taps:
    places = np.maximum(_places(n, count, scale, align_corners), 0.0)
    left = np.minimum(np.floor(places).astype(np.int64), n - 1)
    weight = np.minimum(np.maximum(places - left, 0.0), 1.0)
    return (np.stack([left, np.minimum(left + 1, n - 1)], 1), np.stack([1 - weight, weight], 1))


def _keys(x: np.ndarray, a: float) -> np.ndarray:
    """The cubic convolution kernel of Keys."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def _cubic(n: int, count: int, scale: Any, align_corners: bool) -> Taps:
    places = _places(n, count, scale, align_corners)
    left = np.floor(places)
    at = left[:, None] + np.arange(-1, 3)[None]
    return np.clip(at, 0, n - 1).astype(np.int64), _keys(places[:, None] - at, -0.75)


def _filtered(kernel: Callable[[np.ndarray], np.ndarray], reach: float) -> Rule:
    """Antialiased: the kernel is as wide as results are apart."""
    def rule(n: int, count: int, scale: Any, align_corners: bool) -> Taps:
        ratio = float(_ratio(n, count, scale, align_corners))
        wide = max(ratio, 1.0)
        centre = ratio * (np.arange(count) + 0.5)
        first = np.maximum((centre - reach * wide + 0.5).astype(np.int64), 0)
        last = np.minimum((centre + reach * wide + 0.5).astype(np.int64), n)
        taps = int(np.max(last - first))
        at = first[:, None] + np.arange(taps)[None]
        weights = kernel((at - centre[:, None] + 0.5) / wide)
        weights = np.where(at < last[:, None], weights, 0.0)
        return np.minimum(at, n - 1), weights / weights.sum(axis=1, keepdims=True)

    return rule


def _hat(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0.0)


def transposed(taps: Taps, n: int) -> Taps:
    """The taps of the gradient: for each element, the results that it is in."""
    at, weights = taps
    matrix = np.zeros((n, len(at)))
    np.add.at(matrix, (at, np.arange(len(at))[:, None]), weights)
    most = max(1, int(np.max(np.count_nonzero(matrix, axis=1))))
    order = np.argsort(matrix == 0, axis=1, kind="stable")[:, :most]
    return order, np.take_along_axis(matrix, order, axis=1)


def _resized(x: Value, sizes: Sequence[Any], scales: Sequence[Any], rule: Rule,
             align_corners: bool, back: bool) -> Value:
    """The last axes in other sizes; or what a gradient of such a result is by its source."""
    first = x.ndim - len(sizes)
    known = [*x.shape[first:], *sizes]
    if not all(isinstance(n, int) for n in known):
        unsupported("resizing with sizes that vary")
    y = widened(x)
    for k, (count, scale) in enumerate(zip(sizes, scales)):
        n: Any = x.shape[first + k]
        if back:
            taps = transposed(rule(count, n, scale, align_corners), count)
        else:
            taps = rule(n, count, scale, align_corners)
        y = interpolated(y, first + k, *taps)
    return astype(y, dtype=x.dtype)


def _define(name: str, rank: int, rule: Rule, aligns: bool) -> None:
    """The operator and its gradient: (x, size, [align_corners], scales...)."""
    def arguments(more: Sequence[Any]) -> tuple[bool, list[Any]]:
        align, scales = (more[0], list(more[1:])) if aligns else (False, list(more))
        if len(scales) == 1 and isinstance(scales[0], (list, tuple)):
            scales = list(scales[0])  # of the overload `vec`
        scales = [None] * rank if scales in ([], [None]) else scales
        return align, scales + [None] * (rank - len(scales))

    @aten(name, typed=True)
    def forward(x: Any, size: Any, *more: Any, out: TensorType, **named: Any) -> Any:
        align, scales = arguments((*more, *named.values()))
        return _resized(x, out.shape[-rank:], scales, rule, align, back=False)

    @aten(f"{name}_backward", typed=True)
    def backward(grad: Any, size: Any, input_size: Any, *more: Any, out: TensorType,
                 **named: Any) -> Any:
        align, scales = arguments((*more, *named.values()))
        return _resized(grad, out.shape[-rank:], scales, rule, align, back=True)


for _rank in (1, 2, 3):
    _define(f"upsample_nearest{_rank}d", _rank, _nearest, False)
    _define(f"_upsample_nearest_exact{_rank}d", _rank, _nearest_exact, False)
for _name, _rank, _rule in (
        ("upsample_linear1d", 1, _linear), ("upsample_bilinear2d", 2, _linear),
        ("upsample_trilinear3d", 3, _linear), ("upsample_bicubic2d", 2, _cubic),
        ("_upsample_bilinear2d_aa", 2, _filtered(_hat, 1.0)),
        ("_upsample_bicubic2d_aa", 2, _filtered(lambda x: _keys(x, -0.5), 2.0))):
    _define(_name, _rank, _rule, True)


# ---------------------------------------------------------------- borders
@aten("replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward")
def replication_pad_backward(grad: Any, x: Any, padding: Sequence[Any]) -> Any:
    """The border's gradients, added to those of the elements that it repeats."""
    made = widened(grad)
    for k in range(len(padding) // 2):
        axis, before, after = x.ndim - 1 - k, padding[2 * k], padding[2 * k + 1]
        n = x.shape[axis]
        if not all(isinstance(m, int) for m in (n, before, after)):
            unsupported("the gradient of a border around sizes that vary")
        at = np.clip(np.arange(-before, n + after), 0, n - 1)[:, None]
        made = interpolated(made, axis, *transposed((at, np.ones(at.shape)), n))
    return astype(made, dtype=x.dtype)


# ---------------------------------------------------------------- grids
_MODES, _BORDERS = ("linear", "nearest", "cubic"), ("zeros", "border", "reflection")


@aten("grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(x: Any, grid: Any, interpolation_mode: int, padding_mode: int,
                 align_corners: bool) -> Any:
    mode, border = _MODES[interpolation_mode], _BORDERS[padding_mode]
    border = "edge" if (mode, border) == ("cubic", "border") else border
    return grid_sample(x, grid, mode=mode, padding_mode=border, align_corners=align_corners)


@aten("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def grid_sampler_backward(grad: Any, x: Any, grid: Any, interpolation_mode: int,
                          padding_mode: int, align_corners: bool, output_mask: Sequence[bool]
                          ) -> Any:
    y = grid_sampler(x, grid, interpolation_mode, padding_mode, align_corners)
    wanted = [v for v, wants in zip((x, grid), output_mask) if wants]
    found = iter(gradients([y], [grad], wanted))
    made = [next(found) if wants else None for wants in output_mask]
    # The nearest element is the same for all places around: no gradient.
    return tuple(zeros(shape=v.shape, dtype=v.dtype) if wants and g is None else g
                 for v, g, wants in zip((x, grid), made, output_mask))
