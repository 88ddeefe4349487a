"""Further operators of com.microsoft, and files that onnxruntime saved, against onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from one_node import by_onnxruntime, check, run
from onnx import TensorProto, helper, numpy_helper

import terrazzo.ort as tz_ort

pytestmark = pytest.mark.onnx
ort = pytest.importorskip("onnxruntime")
MS = "com.microsoft"


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def compare(operator: str, inputs: list[np.ndarray | None], *, rtol: float = 1e-4,
            atol: float = 1e-5, **options: Any) -> None:
    expected = by_onnxruntime(operator, inputs, domain=MS, **options)
    check(operator, inputs, expected=expected, rtol=rtol, atol=atol, domain=MS, **options)


def test_small_ones(rng: np.random.Generator) -> None:
    x = floats(rng, 3, 4)
    compare("ExpandDims", [x, np.array(-1, np.int32)])
    compare("ExpandDims", [x, np.array(1, np.int32)])
    compare("GatherND", [x, np.array([[0, 1], [2, 3]])])
    compare("Pad", [x, np.array([1, 0, 0, 2]), np.array([0.5], np.float32)], mode="constant")
    for metric in ("euclidean", "sqeuclidean"):
        compare("CDist", [x, floats(rng, 5, 4)], metric=metric)


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_crop_and_resize(rng: np.random.Generator, mode: str) -> None:
    boxes = np.array([[0.0, 0.0, 1.0, 1.0], [0.1, 0.2, 0.7, 0.6], [-0.5, 0.1, 1.4, 0.4],
                      [0.8, 0.9, 0.2, 0.1]], np.float32)
    for size in ([5, 4], [1, 3]):
        compare("CropAndResize", [floats(rng, 2, 3, 9, 8), boxes, np.array([0, 1, 1, 0], np.int32),
                                  np.array(size, np.int32)], mode=mode, extrapolation_value=7.0)


def through_sessions(operator: str, inputs: list[np.ndarray], outputs: int = 1, **attributes: Any
                     ) -> None:
    """A node that the host runs, ours with the CPU provider alone."""
    names = [f"x{i}" for i in range(len(inputs))]
    graph = helper.make_graph(
        [helper.make_node(operator, names, [f"y{i}" for i in range(outputs)], domain=MS,
                          name="node", **attributes)], "g",
        [helper.make_tensor_value_info(
            n, TensorProto.STRING if x.dtype == object else helper.np_dtype_to_tensor_dtype(
                x.dtype), x.shape) for n, x in zip(names, inputs, strict=True)],
        [onnx.ValueInfoProto(name=f"y{i}") for i in range(outputs)])
    model = helper.make_model(graph, ir_version=9, opset_imports=[
        helper.make_opsetid("", 18), helper.make_opsetid(MS, 1)]).SerializeToString()
    feeds = dict(zip(names, inputs, strict=True))
    theirs, mine = (engine.InferenceSession(model, providers=["CPUExecutionProvider"]).run(
        None, feeds) for engine in (ort, tz_ort))
    for m, t in zip(mine, theirs, strict=True):
        assert m.dtype == t.dtype and m.shape == t.shape
        np.testing.assert_allclose(m, t, rtol=1e-4, atol=1e-5)


def test_what_the_host_does(rng: np.random.Generator) -> None:
    through_sessions("Inverse", [floats(rng, 2, 4, 4)])
    through_sessions("Unique", [np.array([3, 1, 3, 2, 1], np.float32)], outputs=3)
    words = np.array(["", "a", "cat", "Äpfel", "a longer text of words"], object)
    for attributes in ({}, {"positive": 0}, {"seed": 42}):
        through_sessions("MurmurHash3", [words], **attributes)
        through_sessions("MurmurHash3", [np.array([1, -5, 2**31 - 1], np.int32)], **attributes)
    ids = np.array([[1, 2, 3, 1, 2], [4, 4, 4, 4, 4]])
    for n in (2, 3):
        through_sessions("NGramRepeatBlock", [ids, floats(rng, 2, 6)], ngram_size=n)


# ---------------------------------------------------------------- packed weights
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_gather_block_quantized(rng: np.random.Generator, zeros: bool, bits: int) -> None:
    rows, width, block = 7, 64, 16
    data = rng.integers(0, 256, (rows, width * bits // 8)).astype(np.uint8)
    scales = np.abs(floats(rng, rows, width // block))
    zero = rng.integers(0, 256, (rows, width // block * bits // 8)).astype(np.uint8)
    compare("GatherBlockQuantized", [data, np.array([[6, 0], [3, 3]]), scales,
                                     *([zero] if zeros else [])],
            block_size=block, quantize_axis=1, gather_axis=0, bits=bits)


@pytest.mark.parametrize("kind", [0, 1])
def test_matmul_bnb4(rng: np.random.Generator, kind: int) -> None:
    n, k, block = 6, 32, 16
    compare("MatMulBnb4", [floats(rng, 3, k), rng.integers(0, 256, n * k // 2).astype(np.uint8),
                           np.abs(floats(rng, n * k // block))],
            N=n, K=k, block_size=block, quant_type=kind)


@pytest.mark.parametrize("last", [0, 1])
def test_qlinear_conv_of_either_layout(rng: np.random.Generator, last: int) -> None:
    x = rng.integers(0, 256, (1, 6, 5, 4) if last else (1, 4, 6, 5)).astype(np.uint8)
    w = rng.integers(-128, 128, (8, 4, 3, 3)).astype(np.int8)
    one, zero = np.array(0.02, np.float32), np.array(120, np.uint8)
    compare("QLinearConv", [x, one, zero, w, one, np.array(0, np.int8), np.array(0.3, np.float32),
                            zero, rng.integers(-500, 500, 8).astype(np.int32)],
            channels_last=last, pads=[1, 1, 1, 1], kernel_shape=[3, 3], atol=1)


# ---------------------------------------------------------------- layers
@pytest.mark.parametrize("options", [{}, {"unidirectional": 1}, {"masked": True}], ids=str)
def test_qattention(rng: np.random.Generator, options: dict[str, Any]) -> None:
    options = dict(options)
    mask = np.array([[1, 1, 1, 0, 0], [1] * 5], np.int32) if options.pop("masked", False) else None
    compare("QAttention", [
        rng.integers(0, 256, (2, 5, 8)).astype(np.uint8),
        rng.integers(-128, 128, (8, 48)).astype(np.int8), floats(rng, 48),
        np.array(0.01, np.float32), np.array(0.02, np.float32), mask,
        np.array(128, np.uint8), np.array(3, np.int8)], num_heads=4, **options)


def test_dynamic_quantize_lstm(rng: np.random.Generator) -> None:
    """onnxruntime rounds what goes in to 8 bits; ours does not, so it is the more exact one."""
    x = floats(rng, 4, 2, 6)
    w, r = (rng.integers(-128, 128, (1, n, 20)).astype(np.int8) for n in (6, 5))
    scales = [np.array([0.004], np.float32), np.array([0], np.int8)]
    compare("DynamicQuantizeLSTM", [x, w, r, floats(rng, 1, 40), None, None, None, None,
                                    *scales, *scales], outputs=3, hidden_size=5, atol=0.02)


@pytest.mark.parametrize("sinks", ["smooth", "given"])
def test_group_query_attention_with_sinks(rng: np.random.Generator, sinks: str) -> None:
    batch, queries, heads, kv, size = 2, 4, 4, 2, 8
    inputs: list[np.ndarray | None] = [
        floats(rng, batch, queries, heads * size), floats(rng, batch, queries, kv * size),
        floats(rng, batch, queries, kv * size), None, None,
        np.full(batch, queries - 1, np.int32), np.array(queries, np.int32)]
    more: dict[str, Any] = {"smooth_softmax": 1}
    if sinks == "given":
        inputs += [None, None, None, None, floats(rng, heads)]
        more = {}
    try:
        expected = by_onnxruntime("GroupQueryAttention", inputs, domain=MS, outputs=1,
                                  num_heads=heads, kv_num_heads=kv, **more)
    except Exception as error:
        pytest.skip(f"onnxruntime does not: {error}")
    check("GroupQueryAttention", inputs, expected=expected, domain=MS, num_heads=heads,
          kv_num_heads=kv, rtol=1e-4, atol=1e-5, **more)


def test_decoder_masked_attention(rng: np.random.Generator) -> None:
    """With a cache that has room, as onnxruntime has it, and with one that grows."""
    batch, heads, size, past = 2, 2, 8, 5
    q, k, v = (floats(rng, batch, 1, heads * size) for _ in range(3))
    caches = [floats(rng, batch, heads, past + 3, size) for _ in range(2)]
    filled = np.array([past], np.int32)

    def inputs(room: int) -> list[np.ndarray | None]:
        return [q, k, v, None, None, *(c[:, :, :room] for c in caches), filled]

    options: dict[str, Any] = {"outputs": 3, "num_heads": heads, "domain": MS}
    expected = by_onnxruntime("DecoderMaskedMultiHeadAttention", inputs(past + 3),
                              past_present_share_buffer=1, **options)
    for shared, room in ((1, past + 3), (0, past)):
        got = run("DecoderMaskedMultiHeadAttention", inputs(room),
                  past_present_share_buffer=shared, **options)
        np.testing.assert_allclose(got[0], expected[0], rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(got[1:], expected[1:], strict=True):  # what is behind is nobody's
            np.testing.assert_allclose(mine[:, :, :past + 1], theirs[:, :, :past + 1], rtol=1e-5)


@pytest.mark.parametrize("kind", ["relu", "gelu", "silu"])
def test_experts(rng: np.random.Generator, kind: str) -> None:
    x, router = floats(rng, 5, 8), floats(rng, 5, 4)
    first, second = floats(rng, 4, 12, 8), floats(rng, 4, 8, 12)
    weights = np.exp(router - router.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    best = np.argsort(-weights, axis=1)[:, :2]
    act: Any = {"relu": lambda v: np.maximum(v, 0), "silu": lambda v: v / (1 + np.exp(-v)),
                "gelu": lambda v: 0.5 * v * (1 + np.vectorize(__import__("math").erf)(
                    v / np.sqrt(2)))}[kind]
    expected = np.zeros((5, 8))
    for t in range(5):
        for expert in best[t]:
            hidden = act(first[expert].astype(np.float64) @ x[t])
            expected[t] += weights[t, expert] * (second[expert] @ hidden)
    (y,) = run("MoE", [x, router, first, None, second], domain=MS, k=2, activation_type=kind)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- files that onnxruntime saved
def some_convolutions(rng: np.random.Generator) -> bytes:
    """Convolutions of few and many channels, of channels by themselves, with an addition."""
    def weight(name: str, *shape: int) -> Any:
        return numpy_helper.from_array(floats(rng, *shape) * 0.2, name)

    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["ar"]),
        helper.make_node("MaxPool", ["ar"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["p", "w2"], ["c"], pads=[1, 1, 1, 1], group=32),
        helper.make_node("Conv", ["c", "w3", "b3"], ["d"]),
        helper.make_node("Conv", ["p", "w4"], ["e0"]),
        helper.make_node("Add", ["d", "e0"], ["e"]),
        helper.make_node("AveragePool", ["e"], ["f"], kernel_shape=[2, 2]),
        helper.make_node("Conv", ["f", "w5"], ["h"], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["h"], ["y"])]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 12, 12])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 40, 1, 1])],
        [weight("w1", 32, 3, 3, 3), weight("b1", 32), weight("w2", 32, 1, 3, 3),
         weight("w3", 32, 32, 1, 1), weight("b3", 32), weight("w4", 32, 32, 1, 1),
         weight("w5", 40, 32, 3, 3)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)],
                             ir_version=9).SerializeToString()


def test_convolutions_in_blocks(rng: np.random.Generator, tmp_path: Path) -> None:
    model, x = some_convolutions(rng), floats(rng, 1, 3, 12, 12)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "saved.onnx")
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    saved = onnx.load(tmp_path / "saved.onnx")
    if not any(n.domain == "com.microsoft.nchwc" for n in saved.graph.node):
        pytest.skip("onnxruntime does not cut channels into blocks here")
    (expected,) = session.run(None, {"x": x})
    mine = tz_ort.InferenceSession(tmp_path / "saved.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(mine.run(None, {"x": x})[0], expected, rtol=1e-4, atol=1e-5)
