"""Resizing against onnx's reference: every mode, way of counting coordinates, and rounding."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from checking import check, check_gradient, close, draw, evaluate, op
from onnx_nodes import onnx_node

from terrazzo.errors import ArgumentError, ShapeError
from terrazzo.graph.passes import canonicalize
from terrazzo.graph.trace import trace
from terrazzo.ops.resize import resized

COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners",
               "asymmetric")
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
SIZES = ((4, 6), (8, 3), (7, 7), (1, 2), (10, 12), (5, 6))
SCALES = ((1.0, 1.0, 2.0, 3.0), (1.0, 1.0, 0.6, 0.6), (1.0, 1.0, 1.5, 0.4), (1.0, 2.0, 0.8, 1.0))


def reference(x: np.ndarray, **attrs: Any) -> np.ndarray:
    """ONNX's Resize with our arguments."""
    roi, scales, sizes = (attrs.pop(k, None) for k in ("roi", "scales", "sizes"))
    inputs = [x, None if roi is None else np.array(roi, np.float32),
              None if scales is None else np.array(scales, np.float32),
              None if sizes is None else np.array(sizes, np.int64)]
    return onnx_node("Resize", inputs, opset=19, **{
        k: int(v) if isinstance(v, bool) else v for k, v in attrs.items()})[0]


def compare(x: np.ndarray, **attrs: Any) -> None:
    expected = reference(x, **attrs)
    for name in ("scales", "roi"):
        if name in attrs:  # as a model holds them
            attrs[name] = tuple(float(np.float32(s)) for s in attrs[name])
    close(evaluate(op("resize"), x, **attrs), expected, rtol=1e-5)


@pytest.mark.onnx
@pytest.mark.parametrize("how", COORDINATES)
@pytest.mark.parametrize("rounding", NEAREST)
def test_nearest(how: str, rounding: str, rng: np.random.Generator) -> None:
    x = draw(rng, (1, 2, 5, 6))
    for size in SIZES:
        compare(x, sizes=(1, 2, *size), mode="nearest", nearest_mode=rounding,
                coordinate_transformation_mode=how)
    for scales in SCALES:
        compare(x, scales=scales, mode="nearest", nearest_mode=rounding,
                coordinate_transformation_mode=how)


@pytest.mark.onnx
@pytest.mark.parametrize("how", COORDINATES)
@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("exclude_outside", [False, True])
def test_interpolation(how: str, mode: str, antialias: bool, exclude_outside: bool,
                       rng: np.random.Generator) -> None:
    x = draw(rng, (2, 1, 5, 6))
    attrs = {"mode": mode, "antialias": antialias, "exclude_outside": exclude_outside,
             "coordinate_transformation_mode": how}
    for size in SIZES:
        compare(x, sizes=(2, 1, *size), **attrs)
    for scales in SCALES:
        compare(x, scales=scales, cubic_coeff_a=-0.5, **attrs)


@pytest.mark.onnx
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("roi", [(0, 0, 0.4, 0.6, 1, 1, 0.6, 0.8), (0, 0, 0.6, 0.6, 1, 1, 1.2, 0.9),
                                 (0, 0, 0.9, -0.3, 1, 1, 0.1, 0.5)])
def test_crop_and_resize(mode: str, roi: Any, rng: np.random.Generator) -> None:
    x = draw(rng, (1, 1, 5, 6))
    for size in ((3, 3), (1, 8)):
        compare(x, sizes=(1, 1, *size), mode=mode, roi=roi, extrapolation_value=10.0,
                coordinate_transformation_mode="tf_crop_and_resize")


@pytest.mark.onnx
def test_chosen_axes(rng: np.random.Generator) -> None:
    x = draw(rng, (1, 2, 4, 5))
    for axes, mode in product(([2, 3], [3, 2], [1]), ("nearest", "linear")):
        compare(x, sizes=(7, 3)[:len(axes)], axes=axes, mode=mode)
    compare(x, sizes=(3, 4), axes=[2, 3], mode="linear", roi=(0.25, 0.1, 0.9, 0.7),
            coordinate_transformation_mode="tf_crop_and_resize")


@pytest.mark.onnx
@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
def test_one_scale_for_all_axes(policy: str, rng: np.random.Generator) -> None:
    x = draw(rng, (1, 2, 4, 5))
    for size in ((7, 8), (2, 9), (3, 1)):
        compare(x, sizes=size, axes=[2, 3], mode="linear", keep_aspect_ratio_policy=policy)
    assert resized((1, 2, 4, 5), sizes=(8, 5), axes=(2, 3),
                   keep_aspect_ratio_policy="not_larger") == ((1, 2, 4, 5), (1.0, 1.0, 1.0, 1.0))


@pytest.mark.onnx
@pytest.mark.parametrize("shape", [(7,), (4, 5), (2, 3, 4), (1, 2, 3, 4, 3)])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_any_rank(shape: Any, mode: str, rng: np.random.Generator) -> None:
    compare(draw(rng, shape), sizes=tuple(n * 2 - 1 for n in shape), mode=mode)


@pytest.mark.onnx
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "float16", "float64"])
def test_other_types(dtype: str, rng: np.random.Generator) -> None:
    x = draw(rng, (1, 1, 4, 4), dtype, low=-100, high=100)
    for mode in ("nearest", "linear", "cubic"):
        expected = reference(x, sizes=(1, 1, 7, 3), mode=mode)
        got = evaluate(op("resize"), x, sizes=(1, 1, 7, 3), mode=mode)
        assert got.dtype == x.dtype
        np.testing.assert_allclose(got.astype(np.float64), expected.astype(np.float64),
                                   rtol=1e-3, atol=0.15 if dtype == "float16" else 1e-12)


@pytest.mark.torch
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_torch_agrees(mode: str, rng: np.random.Generator) -> None:
    import torch

    x = draw(rng, (2, 3, 9, 7))
    for antialias in (False, True):
        expected = torch.nn.functional.interpolate(torch.from_numpy(x), (4, 12), mode=mode,
                                                   antialias=antialias)
        got = evaluate(op("resize"), x, sizes=(2, 3, 4, 12), mode=mode[2:], antialias=antialias,
                       exclude_outside=antialias, cubic_coeff_a=-0.5 if antialias else -0.75)
        close(got, expected.numpy(), rtol=2e-5)


def test_upsample(rng: np.random.Generator) -> None:
    x = draw(rng, (1, 2, 2, 3))
    check(op("upsample"), x, scales=(1, 1, 2, 3), expected=x.repeat(2, 2).repeat(3, 3))
    linear = evaluate(op("upsample"), x, scales=(1, 1, 2, 2), mode="linear")
    close(linear[:, :, ::2, ::2], x)


def test_even_spreads_need_no_table() -> None:
    def operators(**attrs: Any) -> set[str]:
        graph = trace(op("resize"), [x.type], "example", **attrs)[0]
        return {n.op.name for n in canonicalize(graph)[0].nodes}

    x = trace(lambda v: v, [_type((1, 4, 6, 6))], "x")[0].outputs[0]
    assert "take_at" not in operators(scales=(1, 1, 2, 2))
    assert operators(scales=(1, 1, 0.5, 0.5)) == {"slice"}
    assert operators(scales=(1, 1, 1, 1)) == set()


def _type(shape: tuple[int, ...]) -> Any:
    from terrazzo.dtypes import float32
    from terrazzo.graph.ir import TensorType

    return TensorType(shape, float32)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_gradients_and_code(mode: str, rng: np.random.Generator) -> None:
    x = draw(rng, (1, 2, 3, 4))
    attrs = {"sizes": (1, 2, 5, 3), "mode": mode}
    check_gradient(op("resize"), x, **attrs)
    check(op("resize"), x, expected=evaluate(op("resize"), x, **attrs), **attrs)
    close(np.asarray(op("resize")(x, **attrs)), evaluate(op("resize"), x, **attrs))
    small = {"sizes": (1, 2, 1, 1), "mode": mode, "antialias": mode != "nearest"}
    close(np.asarray(op("resize")(x, **small)), evaluate(op("resize"), x, **small))


def test_verified(rng: np.random.Generator) -> None:
    assert op("resize").verify(draw(rng, (1, 2, 3, 4)), sizes=(1, 2, 5, 3), mode="linear",
                               dtypes=["float32"], kinds=["random", "special"])


def test_errors() -> None:
    x = np.zeros((1, 1, 4, 4), np.float32)
    for attrs, message in (({"sizes": (2, 2)}, "as many sizes"),
                           ({"scales": (1, 1, 2, 2), "mode": "area"}, "no mode 'area'"),
                           ({"scales": (1, 1, 2, 2), "nearest_mode": "up"}, "no nearest_mode"),
                           ({"scales": (1, 1, 2, 2), "antialias": True}, "no antialiasing"),
                           ({"sizes": (1, 1, 2, 2), "keep_aspect_ratio_policy": "x"}, "policy")):
        with pytest.raises(ArgumentError, match=message):
            evaluate(op("resize"), x, **attrs)
    with pytest.raises(ShapeError, match="cannot resize axis 2"):
        evaluate(op("resize"), x[:, :, :0], scales=(1, 1, 2, 2), mode="linear")
