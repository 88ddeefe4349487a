"""Programs written for onnxruntime run on terrazzo.ort, and answer the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import terrazzo.ort as ort
from terrazzo.errors import ArgumentError, UnsupportedOperator

pytestmark = pytest.mark.onnx


def linear(batch: Any = "batch") -> bytes:
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((4, 3), np.float32), "b": np.ones(3, np.float32)}
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["h"]), helper.make_node("Tanh", ["h"], ["y"])],
        "linear", [helper.make_tensor_value_info("x", TensorProto.FLOAT, (batch, 4))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (batch, 3)),
         helper.make_tensor_value_info("h", TensorProto.FLOAT, (batch, 3))],
        [numpy_helper.from_array(a, n) for n, a in weights.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9,
                              producer_name="test")
    model.metadata_props.add(key="author", value="nobody")
    return model.SerializeToString()


X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


def test_the_usual_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.onnx").write_bytes(linear())
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.enable_profiling = True
    options.intra_op_num_threads = 2
    session = ort.InferenceSession("model.onnx", options, providers=["CPUExecutionProvider"])
    y, h = session.run(None, {session.get_inputs()[0].name: X})
    np.testing.assert_allclose(y, np.tanh(h), rtol=1e-5)
    (only,) = session.run(["h"], {"x": X})
    assert np.array_equal(only, h)
    trace = json.loads(Path(session.end_profiling()).read_text())
    assert any(e.get("ph") == "X" for e in trace["traceEvents"])


def test_what_a_session_says_of_itself() -> None:
    session = ort.InferenceSession(linear())
    (given,), made = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type, given.shape) == ("x", "tensor(float)", ["batch", 4])
    assert [o.name for o in made] == ["y", "h"]
    meta = session.get_modelmeta()
    assert meta.producer_name == "test" and meta.custom_metadata_map == {"author": "nobody"}
    assert session.get_providers()[0] == "CPUExecutionProvider"
    assert "CPUExecutionProvider" in ort.get_available_providers() and ort.get_device() == "CPU"


def test_the_same_as_onnxruntime() -> None:
    peer = pytest.importorskip("onnxruntime")
    theirs = peer.InferenceSession(linear(), providers=["CPUExecutionProvider"])
    ours = ort.InferenceSession(linear())
    for a, b in zip(theirs.run(None, {"x": X}), ours.run(None, {"x": X}), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
    for a, b in zip(theirs.get_inputs(), ours.get_inputs(), strict=True):
        assert (a.name, a.type, a.shape) == (b.name, b.type, b.shape)


@pytest.mark.parametrize("level", list(ort.GraphOptimizationLevel))
def test_levels_agree(level: ort.GraphOptimizationLevel) -> None:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    y = ort.InferenceSession(linear(), options).run(["y"], {"x": X})[0]
    np.testing.assert_allclose(y, ort.InferenceSession(linear()).run(["y"], {"x": X})[0],
                               rtol=1e-5)


# ---------------------------------------------------------------- memory of the caller's
def test_binding_writes_where_it_is_told() -> None:
    session = ort.InferenceSession(linear())
    wanted = session.run(["y"], {"x": X})[0]
    target = ort.OrtValue.ortvalue_from_shape_and_type((2, 3), np.float32)
    binding = session.io_binding()
    binding.bind_cpu_input("x", X)
    binding.bind_ortvalue_output("y", target)
    binding.bind_output("h")
    session.run_with_iobinding(binding)
    assert np.array_equal(target.numpy(), wanted)
    assert binding.get_outputs()[0].data_ptr() == target.data_ptr()
    assert np.array_equal(np.tanh(binding.copy_outputs_to_cpu()[1]).round(5), wanted.round(5))


def test_binding_by_address() -> None:
    session, out = ort.InferenceSession(linear()), np.zeros((2, 3), np.float32)
    binding = session.io_binding()
    binding.bind_input("x", "cpu", 0, np.float32, X.shape, X.ctypes.data)
    binding.bind_output("y", "cpu", 0, np.float32, out.shape, out.ctypes.data)
    session.run_with_iobinding(binding)
    assert np.array_equal(out, session.run(["y"], {"x": X})[0])


def test_ort_values() -> None:
    session = ort.InferenceSession(linear())
    value = ort.OrtValue.ortvalue_from_numpy(X)
    assert value.data_ptr() == X.ctypes.data and value.shape() == [2, 4]
    assert value.data_type() == "tensor(float)" and value.element_type() == TensorProto.FLOAT
    (y, _) = session.run_with_ort_values(None, {"x": value})
    assert np.array_equal(y.numpy(), session.run(["y"], {"x": X})[0])
    value.update_inplace(X * 0)
    with pytest.raises(ArgumentError):
        value.update_inplace(np.zeros(3, np.float32))


def test_sizes_can_be_fixed() -> None:
    options = ort.SessionOptions()
    options.add_free_dimension_override_by_name("batch", 2)
    session = ort.InferenceSession(linear(), options)
    assert session.run(["y"], {"x": X})[0].shape == (2, 3)


# ---------------------------------------------------------------- mistakes
def test_mistakes() -> None:
    session = ort.InferenceSession(linear())
    with pytest.raises(ort.InvalidArgument, match="needs its input 'x'"):
        session.run(None, {})
    with pytest.raises(ort.InvalidArgument, match="float64"):
        session.run(None, {"x": X.astype(np.float64)})
    with pytest.raises(ort.InvalidProtobuf):
        ort.InferenceSession(b"no model")
    with pytest.raises(ort.NoSuchFile):
        ort.InferenceSession("nowhere.onnx")
    with pytest.raises(ArgumentError, match="CUDA"):
        ort.InferenceSession(linear(), providers=["CUDAExecutionProvider"])
    with pytest.raises(UnsupportedOperator, match=r"tz\.op"):
        ort.SessionOptions().register_custom_ops_library("lib.so")


