"""Sampling, regions, blocks and columns against onnx's reference and torch."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from checking import check, check_gradient, close, draw, evaluate, from_torch, op, to_torch
from onnx_nodes import onnx_node

from terrazzo.errors import ArgumentError, RankError, ShapeError

MODES = ("nearest", "linear", "cubic")
PADDINGS = ("zeros", "border", "reflection")


# ---------------------------------------------------------------- grid_sample
@pytest.mark.onnx
@pytest.mark.parametrize(("mode", "padding", "align"), list(product(MODES, PADDINGS, (0, 1))))
def test_grid_sample(mode: str, padding: str, align: int, rng: np.random.Generator) -> None:
    x = draw(rng, (2, 2, 4, 5))
    grid = draw(rng, (2, 3, 4, 2), low=-1.8, high=1.8)
    expected = onnx_node("GridSample", [x, grid], mode=mode, padding_mode=padding,
                         align_corners=align)[0]
    got = evaluate(op("grid_sample"), x, grid, mode=mode, padding_mode=padding,
                   align_corners=bool(align))
    close(got, expected, rtol=2e-5)


@pytest.mark.onnx
@pytest.mark.parametrize(("mode", "padding", "align"), list(
    product(MODES[:2], PADDINGS, (0, 1))))
def test_grid_sample_of_volumes(mode: str, padding: str, align: int, rng: np.random.Generator
                                ) -> None:
    x = draw(rng, (1, 2, 3, 4, 2))
    grid = draw(rng, (1, 2, 2, 3, 3), low=-1.8, high=1.8)
    expected = onnx_node("GridSample", [x, grid], mode=mode, padding_mode=padding,
                         align_corners=align)[0]
    got = evaluate(op("grid_sample"), x, grid, mode=mode, padding_mode=padding,
                   align_corners=bool(align))
    close(got, expected, rtol=2e-5)


@pytest.mark.torch
def test_grid_sample_as_in_torch(rng: np.random.Generator) -> None:
    import torch.nn.functional as F

    x, grid = draw(rng, (1, 3, 6, 7)), draw(rng, (1, 5, 5, 2), low=-1.2, high=1.2)
    for padding, align in product(PADDINGS, (False, True)):
        expected = F.grid_sample(to_torch(x), to_torch(grid), "bilinear", padding, align)
        close(evaluate(op("grid_sample"), x, grid, mode="bilinear", padding_mode=padding,
                       align_corners=align), from_torch(expected), rtol=2e-5)


def test_places_far_away_and_nan_read_nothing_wrong() -> None:
    x = np.ones((1, 1, 2, 2), np.float32)
    grid = np.array([1e30, -1e30, np.inf, np.nan, 3.0, -3.0], np.float32).reshape(1, 1, 3, 2)
    got = evaluate(op("grid_sample"), x, grid, mode="nearest", padding_mode="zeros")
    np.testing.assert_array_equal(got[0, 0, 0, [0, 2]], [0, 0])
    close(np.asarray(op("grid_sample")(x, grid, mode="nearest", padding_mode="border")).shape,
          (1, 1, 1, 3))


@pytest.mark.onnx
@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (1, 2, 3, 2, 4)])
def test_affine_grid(size: tuple[int, ...], align: int, rng: np.random.Generator) -> None:
    rank = len(size) - 2
    theta = draw(rng, (size[0], rank, rank + 1))
    expected = onnx_node("AffineGrid", [theta, np.array(size, np.int64)], align_corners=align)[0]
    check(op("affine_grid"), theta, size=size, align_corners=bool(align), expected=expected,
          rtol=1e-5)


# ---------------------------------------------------------------- regions
ROIS = np.array([[0, 0, 5, 4], [1.5, 2.2, 6.6, 5.1], [4, 4, 4.2, 4.1], [-3, -2, 2, 3],
                 [6, 5, 12, 11]], np.float32)
BATCHES = np.array([0, 1, 1, 0, 1])


@pytest.mark.onnx
@pytest.mark.parametrize(("mode", "ratio", "half"), list(
    product(("avg", "max"), (0, 1, 2), (0, 1))))
def test_roi_align(mode: str, ratio: int, half: int, rng: np.random.Generator) -> None:
    x = draw(rng, (2, 3, 7, 8))
    how = "half_pixel" if half else "output_half_pixel"
    for scale, (height, width) in product((1.0, 0.5), ((2, 3), (4, 1))):
        expected = onnx_node("RoiAlign", [x, ROIS, BATCHES], mode=mode, sampling_ratio=ratio,
                             spatial_scale=scale, output_height=height, output_width=width,
                             coordinate_transformation_mode=how)[0]
        got = evaluate(op("roi_align"), x, ROIS, BATCHES, mode=mode, sampling_ratio=ratio,
                       spatial_scale=scale, output_height=height, output_width=width,
                       half_pixel=bool(half))
        close(got, expected, rtol=2e-5)


def test_max_roi_pool(rng: np.random.Generator) -> None:
    x = draw(rng, (2, 3, 7, 8))
    rois = np.concatenate([BATCHES[:, None], np.round(ROIS)], axis=1).astype(np.float32)
    got = evaluate(op("max_roi_pool"), x, rois, pooled_shape=(2, 3), spatial_scale=0.5)
    expected = np.zeros((5, 3, 2, 3), np.float32)
    for r, (b, *corners) in enumerate(rois):
        x1, y1, x2, y2 = (int(np.floor(c * 0.5 + 0.5)) for c in corners)
        high, wide = max(y2 - y1 + 1, 1) / 2, max(x2 - x1 + 1, 1) / 3
        for i, j in product(range(2), range(3)):
            rows = slice(*(int(np.clip(v + y1, 0, 7)) for v in (
                np.floor(i * high), np.ceil((i + 1) * high))))
            columns = slice(*(int(np.clip(v + x1, 0, 8)) for v in (
                np.floor(j * wide), np.ceil((j + 1) * wide))))
            part = x[int(b), :, rows, columns]
            if part.size:
                expected[r, :, i, j] = part.max(axis=(1, 2))
    close(got, expected)


# ---------------------------------------------------------------- blocks and columns
@pytest.mark.onnx
@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_to_space_and_back(mode: str, rng: np.random.Generator) -> None:
    x = draw(rng, (2, 12, 3, 4))
    y = onnx_node("DepthToSpace", [x], blocksize=2, mode=mode)[0]
    check(op("depth_to_space"), x, blocksize=2, mode=mode, expected=y)
    check(op("space_to_depth"), y, blocksize=2, mode=mode, expected=x)


@pytest.mark.onnx
@pytest.mark.parametrize(("image", "block", "strides", "pads", "dilations"), [
    ((5, 5), (1, 5), (1, 1), (0, 0, 0, 0), (1, 1)),
    ((6, 5), (2, 3), (2, 1), (0, 1, 0, 1), (1, 1)),
    ((6, 6), (2, 2), (2, 2), (1, 1, 1, 1), (1, 5)),
    ((3, 4, 5), (1, 2, 2), (1, 1, 2), (0, 0, 1, 0, 1, 1), (1, 2, 1)),
])
def test_col2im(image: Any, block: Any, strides: Any, pads: Any, dilations: Any,
                rng: np.random.Generator) -> None:
    rank = len(image)
    counts = [(n + pads[d] + pads[d + rank] - dilations[d] * (block[d] - 1) - 1) // strides[d] + 1
              for d, n in enumerate(image)]
    x = draw(rng, (2, 3 * int(np.prod(block)), int(np.prod(counts))))
    expected = onnx_node("Col2Im", [x, np.array(image), np.array(block)], strides=strides,
                         pads=pads, dilations=dilations)[0]
    check(op("col2im"), x, image_shape=image, block_shape=block, strides=strides,
          padding=tuple(zip(pads[:rank], pads[rank:])), dilation=dilations, expected=expected,
          rtol=1e-5)


@pytest.mark.onnx
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_lrn(size: int, rng: np.random.Generator) -> None:
    x = draw(rng, (5, 5, 3, 2))
    expected = onnx_node("LRN", [x], size=size, alpha=0.3, beta=0.6, bias=1.7)[0]
    check(op("lrn"), x, size=size, alpha=0.3, beta=0.6, bias=1.7, expected=expected, rtol=1e-5)


# ---------------------------------------------------------------- deformable convolution
@pytest.mark.onnx
@pytest.mark.parametrize(("groups", "offset_groups", "stride", "padding", "dilation", "masked"), [
    (1, 1, 1, (0, 0, 0, 0), 1, False),
    (2, 1, 1, (1, 0, 1, 0), 1, True),
    (1, 2, 2, (1, 1, 1, 1), 1, True),
    (2, 2, 1, (1, 2, 1, 2), 2, False),
])
def test_deform_conv(groups: int, offset_groups: int, stride: int, padding: Any, dilation: int,
                     masked: bool, rng: np.random.Generator) -> None:
    x, w = draw(rng, (2, 4, 5, 6)), draw(rng, (4, 4 // groups, 2, 3))
    out = [(n + padding[d] + padding[d + 2] - dilation * (k - 1) - 1) // stride + 1
           for d, (n, k) in enumerate(zip((5, 6), (2, 3)))]
    offset = draw(rng, (2, offset_groups * 6 * 2, *out), low=-1.5, high=1.5)
    bias = draw(rng, (4,))
    mask = draw(rng, (2, offset_groups * 6, *out)) if masked else None
    expected = onnx_node("DeformConv", [x, w, offset, bias, mask], group=groups,
                         offset_group=offset_groups, strides=(stride, stride), pads=padding,
                         dilations=(dilation, dilation), kernel_shape=(2, 3))[0]
    got = evaluate(op("deform_conv"), x, w, offset, bias, mask, groups=groups,
                   offset_groups=offset_groups, strides=stride, dilation=dilation,
                   padding=tuple(zip(padding[:2], padding[2:])))
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)  # sums of 24 products


# ---------------------------------------------------------------- gradients, code, errors
def test_gradients(rng: np.random.Generator) -> None:
    x, grid = draw(rng, (1, 2, 3, 4)), draw(rng, (1, 2, 3, 2), low=-0.9, high=0.9)
    check_gradient(op("grid_sample"), x, grid, wrt=(0, 1), rtol=1e-6)
    check_gradient(op("lrn"), x, size=3)
    check_gradient(op("depth_to_space"), draw(rng, (1, 4, 2, 2)), blocksize=2)


def test_compiled(rng: np.random.Generator) -> None:
    x, grid = draw(rng, (2, 17, 5, 6)), draw(rng, (2, 3, 7, 2), low=-1.5, high=1.5)
    for attrs in ({"mode": "linear"}, {"mode": "nearest", "padding_mode": "reflection"}):
        close(np.asarray(op("grid_sample")(x, grid, **attrs)),
              evaluate(op("grid_sample"), x, grid, **attrs), rtol=2e-5)
    attrs = {"output_height": 2, "output_width": 3, "sampling_ratio": 2}
    close(np.asarray(op("roi_align")(x, ROIS, BATCHES, **attrs)),
          evaluate(op("roi_align"), x, ROIS, BATCHES, **attrs), rtol=2e-5)
    close(np.asarray(op("lrn")(x, size=3)), evaluate(op("lrn"), x, size=3))
    offset = draw(rng, (2, 8, 4, 5))
    w = draw(rng, (3, 17, 2, 2))
    np.testing.assert_allclose(np.asarray(op("deform_conv")(x, w, offset)),
                               evaluate(op("deform_conv"), x, w, offset), rtol=2e-4, atol=2e-4)


def test_verified(rng: np.random.Generator) -> None:
    assert op("depth_to_space").verify(draw(rng, (1, 4, 2, 3)), blocksize=2, dtypes=["float32"],
                                       kinds=["random", "special"])
    assert op("lrn").verify(draw(rng, (1, 4, 2, 3)), size=3, dtypes=["float32"], kinds=["random"])


def test_errors() -> None:
    x = np.zeros((1, 3, 4, 4), np.float32)
    with pytest.raises(ArgumentError, match="no mode 'area'"):
        evaluate(op("grid_sample"), x, np.zeros((1, 2, 2, 2), np.float32), mode="area")
    with pytest.raises(ShapeError, match="last of size 2"):
        evaluate(op("grid_sample"), x, np.zeros((1, 2, 2, 3), np.float32))
    with pytest.raises(ShapeError, match="come out even"):
        evaluate(op("depth_to_space"), x, blocksize=2)
    with pytest.raises(RankError, match="roi_align"):
        evaluate(op("roi_align"), x[0], ROIS, BATCHES)
    with pytest.raises(ShapeError, match="offsets"):
        evaluate(op("deform_conv"), x, np.zeros((2, 3, 2, 2), np.float32), x)
    with pytest.raises(ShapeError, match="col2im"):
        evaluate(op("col2im"), np.zeros((1, 5, 4), np.float32), image_shape=(3, 3),
                 block_shape=(2, 2))
