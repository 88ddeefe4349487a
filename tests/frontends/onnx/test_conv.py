"""Converters of convolutions against torch and ONNX's evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from one_node import check, check_symbolic, imported, one_node, run

pytestmark = pytest.mark.onnx


def images(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("attributes", [
    {},
    {"pads": [1, 0, 2, 1], "strides": [2, 1]},
    {"dilations": [2, 1], "group": 2, "kernel_shape": [3, 2]},
    {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
    {"auto_pad": "SAME_LOWER", "strides": [2, 3]},
    {"auto_pad": "VALID", "strides": [1, 2]},
], ids=str)
@pytest.mark.parametrize("opset", [7, 11, 22])
def test_conv(rng: np.random.Generator, attributes: dict[str, Any], opset: int) -> None:
    channels = 4 // attributes.get("group", 1)
    x, w, b = images(rng, 2, 4, 9, 7), images(rng, 6, channels, 3, 2), images(rng, 6)
    check("Conv", [x, w, b], opset=opset, rtol=1e-4, atol=1e-5, **attributes)


@pytest.mark.parametrize("rank", [1, 3])
def test_conv_of_other_ranks(rng: np.random.Generator, rank: int) -> None:
    x, w = images(rng, 1, 3, *(6,) * rank), images(rng, 2, 3, *(3,) * rank)
    check("Conv", [x, w], pads=[1] * (2 * rank), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_conv_keeps_the_type(rng: np.random.Generator, dtype: str) -> None:
    x, w = images(rng, 1, 2, 5, 5).astype(dtype), images(rng, 2, 2, 3, 3).astype(dtype)
    (y,) = run("Conv", [x, w])
    assert y.dtype == dtype


@pytest.mark.torch
@pytest.mark.parametrize("attributes", [
    {"stride": (2, 3)},
    {"stride": (2, 2), "padding": (1, 0), "output_padding": (1, 1)},
    {"groups": 2, "dilation": (2, 1)},
], ids=str)
def test_conv_transpose(rng: np.random.Generator, attributes: dict[str, Any]) -> None:
    import torch

    x = images(rng, 2, 4, 5, 6)
    w, b = images(rng, 4, 3, 3, 2), images(rng, 3 * attributes.get("groups", 1))
    expected = torch.nn.functional.conv_transpose2d(*map(torch.from_numpy, (x, w, b)),
                                                    **attributes).numpy()
    names = {"stride": "strides", "padding": "pads", "groups": "group", "dilation": "dilations",
             "output_padding": "output_padding"}
    given = {names[k]: v if isinstance(v, int) else list(v) for k, v in attributes.items()}
    if "pads" in given:
        given["pads"] = given["pads"] * 2
    check("ConvTranspose", [x, w, b], expected=[expected], rtol=1e-4, atol=1e-5, **given)


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
def test_conv_transpose_same(rng: np.random.Generator, mode: str) -> None:
    x, w = images(rng, 1, 2, 4, 5), images(rng, 2, 3, 3, 3)
    (whole,) = run("ConvTranspose", [x, w], strides=[2, 2])
    (y,) = run("ConvTranspose", [x, w], strides=[2, 2], auto_pad=mode)
    start = 0 if mode == "SAME_UPPER" else 1
    np.testing.assert_array_equal(y, whole[:, :, start:start + 8, start:start + 10])


def test_conv_transpose_to_a_shape(rng: np.random.Generator) -> None:
    x, w = images(rng, 1, 1, 3, 3), images(rng, 1, 2, 3, 3)
    (whole,) = run("ConvTranspose", [x, w], strides=[3, 2])  # 9 x 7
    (y,) = run("ConvTranspose", [x, w], strides=[3, 2], output_shape=[10, 6])
    assert y.shape == (1, 2, 10, 6)
    np.testing.assert_array_equal(y[:, :, :9], whole[..., 1:])  # the odd element goes first
    np.testing.assert_array_equal(y[:, :, 9], 0)


def test_bad_attributes_are_refused(rng: np.random.Generator) -> None:
    x, w = images(rng, 1, 2, 5, 5), images(rng, 2, 2, 3, 3)
    feeds = {"x0": x, "x1": w}
    for attributes in ({"strides": [0, 1]}, {"pads": [1, 1]}, {"kernel_shape": [2, 2]},
                       {"auto_pad": "SOMEHOW"}, {"dilations": [1]}):
        result = imported(one_node("Conv", [x, w], **attributes), feeds)
        assert "node" in str(result.put_off[0]), attributes


@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("attributes", [{"pads": [1, 1]}, {"auto_pad": "SAME_UPPER"}], ids=str)
def test_symbolic_sizes(rng: np.random.Generator, operator: str, attributes: dict[str, Any]
                        ) -> None:
    check_symbolic(operator, [images(rng, 1, 2, 6), images(rng, 2, 2, 3)], {0: (0, 2)},
                   strides=[2], **attributes)
