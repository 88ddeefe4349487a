"""Converters of samplers, regions and columns against torch and ONNX's evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from one_node import check, imported, one_node, reference, run

pytestmark = pytest.mark.onnx


def images(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.torch
@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_grid_sample(rng: np.random.Generator, mode: str, padding: str, align: int) -> None:
    import torch

    x, grid = images(rng, 2, 3, 5, 6), images(rng, 2, 4, 3, 2) * 0.8
    expected = torch.nn.functional.grid_sample(
        torch.from_numpy(x), torch.from_numpy(grid), mode, padding, bool(align)).numpy()
    names = {"bilinear": "linear", "bicubic": "cubic", "nearest": "nearest"}
    if (mode, padding) == ("bicubic", "border"):  # torch moves neighbours to the border, not places
        (expected,) = reference("GridSample", [x, grid], mode="cubic", padding_mode=padding,
                                align_corners=align)
    opset, name = (20, names[mode]) if align else (16, mode)
    check("GridSample", [x, grid], opset=opset, mode=name, padding_mode=padding,
          align_corners=align, expected=[expected], rtol=1e-4, atol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 3, 4, 5, 6)])
def test_affine_grid(rng: np.random.Generator, size: tuple[int, ...], align: int) -> None:
    import torch

    rank = len(size) - 2
    theta = images(rng, 2, rank, rank + 1)
    expected = torch.nn.functional.affine_grid(torch.from_numpy(theta), size, bool(align)).numpy()
    check("AffineGrid", [theta, np.array(size)], opset=20, align_corners=align,
          expected=[expected], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [10, 16])
@pytest.mark.parametrize("ratio", [0, 2])
def test_roi_align(rng: np.random.Generator, opset: int, ratio: int) -> None:
    x = images(rng, 2, 3, 10, 12)
    rois = np.array([[1, 1, 7, 8], [0, 2, 9, 6.5], [3, 3, 4, 4]], np.float32)
    attributes = {"output_height": 2, "output_width": 3, "sampling_ratio": ratio,
                  "spatial_scale": 0.8}
    inputs = [x, rois, np.array([1, 0, 1])]
    # Up to version 16 places were not shifted by half an element.
    place = {"coordinate_transformation_mode": "output_half_pixel" if opset < 16 else "half_pixel"}
    expected = reference("RoiAlign", inputs, opset=16, **attributes, **place)
    check("RoiAlign", inputs, opset=opset, expected=expected, rtol=1e-4, atol=1e-5, **attributes)


def test_regions(rng: np.random.Generator) -> None:
    x = images(rng, 2, 3, 8, 10)
    rois = np.array([[0, 0, 0, 9, 7], [1, 2, 1, 6, 6], [1, 8, 6, 14, 12], [0, 3, 3, 3, 3]],
                    np.float32)
    (y,) = run("MaxRoiPool", [x, rois], pooled_shape=[2, 3], spatial_scale=0.9)
    for r, (image, *corners) in enumerate(rois):
        x1, y1, x2, y2 = np.floor(np.float32(0.9) * np.array(corners) + 0.5).astype(int)
        high, wide = max(y2 - y1 + 1, 1) / 2, max(x2 - x1 + 1, 1) / 3
        for i, j in np.ndindex(2, 3):
            cell = x[int(image), :, y1 + int(i * high):y1 + int(np.ceil((i + 1) * high)),
                     x1 + int(j * wide):x1 + int(np.ceil((j + 1) * wide))]
            expected = cell.max((1, 2)) if cell.size else 0
            np.testing.assert_array_equal(y[r, :, i, j], expected)


@pytest.mark.torch
@pytest.mark.parametrize("attributes", [
    {}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": (2, 1)}], ids=str)
def test_columns(rng: np.random.Generator, attributes: dict[str, Any]) -> None:
    import torch

    whole = torch.from_numpy(images(rng, 2, 3, 7, 8))
    columns = torch.nn.functional.unfold(whole, (3, 2), **attributes)
    expected = torch.nn.functional.fold(columns, (7, 8), (3, 2), **attributes).numpy()

    def both(name: str, default: int) -> list[int]:
        value = attributes.get(name, default)
        return [value] * 2 if isinstance(value, int) else list(value)

    check("Col2Im", [columns.numpy(), np.array([7, 8]), np.array([3, 2])], opset=18,
          expected=[expected], strides=both("stride", 1), pads=both("padding", 0) * 2,
          dilations=both("dilation", 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attributes", [
    {"pads": [1, 1, 1, 1]}, {"strides": [2, 1], "offset_group": 2}, {"group": 2}], ids=str)
def test_deformable_convolution(rng: np.random.Generator, attributes: dict[str, Any]) -> None:
    x, w = images(rng, 1, 4, 6, 7), images(rng, 2, 4 // attributes.get("group", 1), 3, 3)
    (plain,) = run("Conv", [x, w], **{k: v for k, v in attributes.items() if k != "offset_group"})
    groups = attributes.get("offset_group", 1)
    offsets = np.zeros((1, groups * 18, *plain.shape[2:]), np.float32)
    bias, mask = images(rng, 2), np.full((1, groups * 9, *plain.shape[2:]), 0.5, np.float32)
    # Windows that are not moved, and count half, make half a convolution.
    check("DeformConv", [x, w, offsets, bias, mask], opset=19, rtol=1e-4, atol=1e-5,
          expected=[plain / 2 + bias[:, None, None]], **attributes)


def test_moved_windows(rng: np.random.Generator) -> None:
    x, w = images(rng, 1, 2, 5, 5), images(rng, 2, 2, 2, 2)
    offsets = images(rng, 1, 8, 4, 4) * 0.7
    check("DeformConv", [x, w, offsets], opset=19, rtol=1e-4, atol=1e-5, pads=[0, 0, 0, 0])


def test_image_files_are_left_to_others() -> None:
    x = np.zeros(10, np.uint8)
    assert "decodes" in str(imported(one_node("ImageDecoder", [x], opset=20), {"x0": x}).put_off[0])


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_sample_of_microsoft(rng: np.random.Generator, mode: str, padding: str) -> None:
    x, grid = rng.random((2, 3, 4, 5)), rng.random((2, 3, 4, 2)) * 2.4 - 1.2
    inputs = [a.astype(np.float32) for a in (x, grid)]
    options = {"padding_mode": padding, "align_corners": 1}
    later = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)  # as version 20 says it
    wanted = reference("GridSample", inputs, opset=20, mode=later, **options)
    check("GridSample", inputs, expected=wanted, domain="com.microsoft", rtol=1e-4, atol=1e-5,
          mode=mode, **options)
