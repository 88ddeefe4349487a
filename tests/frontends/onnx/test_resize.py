"""Converters of Resize and Upsample against ONNX's evaluator and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from models import model, node
from one_node import check, run
from symbolic import check_symbolic

pytestmark = pytest.mark.onnx
EMPTY = np.zeros(0, np.float32)


def images(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("opset", [11, 13, 18, 19])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_scales_and_sizes(rng: np.random.Generator, mode: str, opset: int) -> None:
    x = images(rng, 1, 2, 5, 6)
    scales = np.array([1, 1, 1.6, 0.7], np.float32)
    check("Resize", [x, EMPTY, scales], opset=opset, mode=mode, rtol=1e-4, atol=1e-5)
    sizes = np.array([1, 2, 8, 4])
    (y,) = run("Resize", [x, EMPTY, EMPTY, sizes], opset=opset, mode=mode)
    (wanted,) = run("Resize", [x, None, None, sizes], opset=opset, mode=mode)
    assert y.shape == (1, 2, 8, 4)
    np.testing.assert_array_equal(y, wanted)


@pytest.mark.parametrize("where", ["half_pixel", "pytorch_half_pixel", "align_corners",
                                   "asymmetric", "half_pixel_symmetric"])
@pytest.mark.parametrize("nearest", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
def test_coordinates(rng: np.random.Generator, where: str, nearest: str) -> None:
    x = images(rng, 2, 7)
    for scales in ([1, 2], [1, 0.6]):
        check("Resize", [x, None, np.array(scales, np.float32)], opset=19, mode="nearest",
              coordinate_transformation_mode=where, nearest_mode=nearest)


@pytest.mark.parametrize("attributes", [
    {"antialias": 1},
    {"exclude_outside": 1},
    {"axes": [3, 2], "keep_aspect_ratio_policy": "not_larger"},
    {"axes": [2, 3], "keep_aspect_ratio_policy": "not_smaller"},
], ids=str)
def test_options(rng: np.random.Generator, attributes: dict[str, Any]) -> None:
    x = images(rng, 1, 2, 8, 6)
    sizes = np.array([5, 5] if "axes" in attributes else [1, 2, 5, 5])
    check("Resize", [x, None, None, sizes], opset=19, mode="cubic", rtol=1e-4, atol=1e-5,
          **attributes)


def test_crop(rng: np.random.Generator) -> None:
    x = images(rng, 1, 1, 5, 5)
    roi = np.array([0, 0, 0.4, 0.6, 1, 1, 1.2, 1.7], np.float32)
    check("Resize", [x, roi, None, np.array([1, 1, 3, 3])], opset=13, mode="linear",
          coordinate_transformation_mode="tf_crop_and_resize", extrapolation_value=10.0)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float16"])
def test_other_types(rng: np.random.Generator, dtype: str) -> None:
    x = (rng.random((1, 1, 4, 4)) * 200).astype(dtype)
    scales = np.array([1, 1, 2, 2], np.float32)
    (y,) = run("Resize", [x, None, scales], opset=19, mode="nearest")
    np.testing.assert_array_equal(y, x.repeat(2, 2).repeat(2, 3))
    (y,) = run("Resize", [x, None, scales], opset=19, mode="linear")
    assert y.dtype == dtype


@pytest.mark.parametrize("version", [7, 9])
def test_upsample(rng: np.random.Generator, version: int) -> None:
    x = images(rng, 1, 2, 3, 4)
    scales = [1.0, 1.0, 2.0, 3.0]
    (y,) = run("Upsample", [x], opset=7, scales=scales, mode="nearest") if version == 7 else (
        run("Upsample", [x, np.array(scales, np.float32)], opset=9, mode="nearest"))
    np.testing.assert_array_equal(y, x.repeat(2, 2).repeat(3, 3))


def test_first_version_of_resize() -> None:
    x = np.arange(1, 9, dtype=np.float32).reshape(1, 1, 2, 4)
    (y,) = run("Resize", [x, np.array([1, 1, 0.6, 0.6], np.float32)], opset=10, mode="nearest")
    np.testing.assert_array_equal(y, [[[[1, 3]]]])  # the example of that version's tests
    (y,) = run("Resize", [x, np.array([1, 1, 1, 2], np.float32)], opset=10, mode="linear")
    np.testing.assert_allclose(y[0, 0, 0], [1, 1.5, 2, 2.5, 3, 3.5, 4, 4])


@pytest.mark.parametrize("scale", [0.3, 0.6, 1.7, 3.0])
def test_half_pixels_of_tensorflow(scale: float) -> None:
    x = np.arange(10, dtype=np.float32)
    (y,) = run("Resize", [x, EMPTY, np.array([scale], np.float32)], opset=11, mode="nearest",
               coordinate_transformation_mode="tf_half_pixel_for_nn", nearest_mode="floor")
    places = np.floor((np.arange(len(y)) + 0.5) / np.float32(scale))
    np.testing.assert_array_equal(y, np.clip(places, 0, 9))


def test_scales_are_float32(rng: np.random.Generator) -> None:
    x = images(rng, 1, 1, 5, 100)
    scales = np.array([1, 1, 2.6, 0.29], np.float32)  # a little less than 13 and 29 in float64
    (y,) = run("Resize", [x, None, scales], opset=19, mode="linear")
    assert y.shape == (1, 1, 13, 29)
    (y,) = run("Upsample", [x, scales], opset=9, mode="nearest")
    assert y.shape == (1, 1, 13, 29)


# ---------------------------------------------------------------- symbolic sizes
_SIZES = [{"n": n, "h": h, "w": w} for n, h, w in [(2, 5, 8), (1, 3, 3), (1, 8, 5), (1, 1, 4)]]


@pytest.mark.parametrize("where", ["half_pixel", "pytorch_half_pixel", "align_corners",
                                   "asymmetric", "half_pixel_symmetric"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_to_and_from_symbolic_sizes(mode: str, where: str) -> None:
    """x gets the sizes of y, of which one is a number, and those of x another."""
    nodes = [node("Shape", "y", "shape"),
             node("Resize", "x _ _ shape", "z", mode=mode, coordinate_transformation_mode=where)]
    proto = model(nodes, {"x": ("n", 2, "h", 6), "y": ("n", 2, 7, "w")}, ["z"])
    result = check_symbolic(proto, {"x": ("n", 2, "h", 6), "y": ("n", 2, 7, "w")}, {}, _SIZES,
                            rtol=1e-4)
    assert not result.guards


@pytest.mark.parametrize("nearest", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("scale", [2.0, 0.5, 1.5])
def test_symbolic_sizes_by_scales(nearest: str, scale: float) -> None:
    proto = model([node("Resize", "x _ scales", "y", nearest_mode=nearest)], {"x": ("n", "h")},
                  ["y"], {"scales": np.array([1, scale], np.float32)})
    check_symbolic(proto, {"x": ("n", "h")}, {}, [s for s in _SIZES if s["h"] * scale >= 1])


@pytest.mark.parametrize("attributes", [{"exclude_outside": 1}, {"antialias": 1}], ids=str)
def test_options_with_symbolic_sizes(attributes: dict[str, Any]) -> None:
    nodes = [node("Shape", "y", "shape"),
             node("Resize", "x _ _ shape", "z", mode="cubic", **attributes)]
    shapes = {"x": ("n", "h"), "y": ("n", "w")}
    proto = model(nodes, shapes, ["z"])
    larger = [s for s in _SIZES if s["w"] >= s["h"]]
    check_symbolic(proto, shapes, {}, larger, rtol=1e-4)


def test_a_scale_that_is_not_exact_needs_sizes() -> None:
    proto = model([node("Resize", "x _ scales", "y")], {"x": ("n", "h")}, ["y"],
                  {"scales": np.array([1, 2.6], np.float32)})
    with pytest.raises(AssertionError, match="resize needs to know axis 1"):
        check_symbolic(proto, {"x": ("n", "h")}, {}, _SIZES)


@pytest.mark.parametrize("opset", [11, 12])
@pytest.mark.parametrize("options, rows", [
    ({"mode": "nearest"}, [[0, 1, 1, 2, 2, 2], *[[3, 4, 4, 5, 5, 5]] * 3]),
    ({"mode": "nearest", "nearest_mode": "floor"},
     [*[[0, 0, 1, 1, 2, 2]] * 2, *[[3, 3, 4, 4, 5, 5]] * 2]),
    ({"mode": "nearest", "nearest_mode": "ceil"}, [[4, 4, 5, 5, 5, 5]] * 4),
    ({"mode": "linear"}, [[1, 1.5, 2, 2.5, 2.75, 2.75], [2.5, 3, 3.5, 4, 4.25, 4.25],
                          *[[3.25, 3.75, 4.25, 4.75, 5, 5]] * 2]),
], ids=str)
def test_half_pixels_of_tensorflow_in_all_modes(opset: int, options: dict[str, str],
                                                rows: list[list[float]]) -> None:
    x = np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3)
    (y,) = run("Resize", [x, EMPTY, np.array([1, 1, 2, 2], np.float32)], opset=opset,
               coordinate_transformation_mode="tf_half_pixel_for_nn", **options)
    np.testing.assert_allclose(y[0, 0], rows)
