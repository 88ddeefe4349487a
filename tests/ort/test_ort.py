"""Programs written for onnxruntime run on terrazzo.ort, and answer the same."""

from __future__ import annotations

import json
import queue
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import terrazzo.ort as ort
from terrazzo.chips.cuda import driver
from terrazzo.errors import ArgumentError, UnsupportedOperator
from terrazzo.frontends.onnx.types import dtype_named, dtype_of, type_text

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
    assert isinstance(trace, list) and any(e["ph"] == "X" and e["dur"] >= 0 for e in trace)


def test_what_a_session_says_of_itself() -> None:
    session = ort.InferenceSession(linear())
    (given,), made = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type, given.shape) == ("x", "tensor(float)", ["batch", 4])
    assert [o.name for o in made] == ["y", "h"]
    meta = session.get_modelmeta()
    assert meta.producer_name == "test" and meta.custom_metadata_map == {"author": "nobody"}
    assert session.get_providers()[0] == "CPUExecutionProvider"
    assert "CPUExecutionProvider" in ort.get_available_providers()
    assert ort.get_device() == ("CPU" if driver.absence() else "GPU")


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
    (given,), made = session.get_inputs(), session.get_outputs()
    assert [given.shape, *(o.shape for o in made)] == [[2, 4], [2, 3], [2, 3]]


def test_a_size_can_be_fixed_to_nothing() -> None:
    options = ort.SessionOptions()
    options.add_free_dimension_override_by_name("batch", 0)
    session = ort.InferenceSession(linear(), options)
    assert session.get_inputs()[0].shape == [0, 4]
    assert session.run(["y"], {"x": X[:0]})[0].shape == (0, 3)
    with pytest.raises(ort.InvalidArgument, match="shape"):
        session.run(["y"], {"x": X})


@pytest.mark.parametrize("size", ["2", 2.0, None, -1])
def test_sizes_that_are_none(size: Any) -> None:
    with pytest.raises(ArgumentError, match="not a size of the dimension 'batch'"):
        ort.SessionOptions().add_free_dimension_override_by_name("batch", size)


def test_profiles_of_one_second_are_files_of_their_own(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "2026-01-01_00-00-00")
    options = ort.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, "mine"
    model, paths = linear(), []
    for _ in range(3):
        session = ort.InferenceSession(model, options)
        session.run(None, {"x": X})
        paths.append(Path(session.end_profiling()))
    assert [p.name for p in paths] == [f"mine_2026-01-01_00-00-00_{i}.json" for i in range(3)]
    assert all(json.loads(p.read_text()) for p in paths)


@pytest.mark.parametrize(("code", "text"), [
    (TensorProto.FLOAT8E4M3FN, "float8e4m3fn"), (TensorProto.FLOAT8E4M3FNUZ, "float8e4m3fnuz"),
    (TensorProto.FLOAT8E5M2, "float8e5m2"), (TensorProto.FLOAT8E5M2FNUZ, "float8e5m2fnuz"),
    (TensorProto.FLOAT4E2M1, "float4e2m1"), (TensorProto.BFLOAT16, "bfloat16"),
    (TensorProto.INT4, "int4"), (TensorProto.DOUBLE, "double")])
def test_types_are_spelt_as_onnxruntime_does(code: int, text: str) -> None:
    dtype = dtype_of(code)
    assert type_text(dtype) == f"tensor({text})" and dtype_named(f"tensor({text})") is dtype
    info = helper.make_tensor_value_info("x", code, (2,))
    assert ort.NodeArg(info).type == f"tensor({text})"
    assert ort.OrtValue(np.zeros(2, dtype.np)).data_type() == f"tensor({text})"


def test_weights_in_a_folder_of_a_model_given_as_bytes(tmp_path: Path) -> None:
    onnx.save_model(onnx.ModelProto.FromString(linear()), tmp_path / "model.onnx",
                    save_as_external_data=True, location="weights.bin", size_threshold=0)
    model = (tmp_path / "model.onnx").read_bytes()
    with pytest.raises(ort.InvalidArgument, match="given as bytes"):
        ort.InferenceSession(model)
    options = ort.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path",
                                     str(tmp_path))
    wanted = ort.InferenceSession(linear()).run(None, {"x": X})
    for a, b in zip(ort.InferenceSession(model, options).run(None, {"x": X}), wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    options.add_initializer("b", ort.OrtValue.ortvalue_from_numpy(np.full(3, 2, np.float32)))
    (h,) = ort.InferenceSession(model, options).run(["h"], {"x": X})
    np.testing.assert_allclose(h, wanted[1] + 1, rtol=1e-5)


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
    with pytest.raises(UnsupportedOperator, match=r"tz\.op"):
        ort.SessionOptions().register_custom_ops_library("lib.so")
    binding = session.io_binding()
    binding.bind_cpu_input("x", X)
    with pytest.raises(ArgumentError, match="no output is bound"):
        session.run_with_iobinding(binding)
    with pytest.raises(ArgumentError, match="not of a list"):
        ort.OrtValue.ortvalue_from_numpy([1, 2])


@pytest.mark.parametrize("provider", [
    3, None, ("CPUExecutionProvider",), ("CPUExecutionProvider", None),
    ("CPUExecutionProvider", {}, 1), (3, {})])
def test_what_is_no_provider(provider: Any) -> None:
    with pytest.raises(ArgumentError, match="is no provider"):
        ort.InferenceSession(linear(), providers=[provider])


@pytest.mark.parametrize("level", [-1, 5, "a", 2.0, None])
def test_severities_that_are_none(level: Any) -> None:
    with pytest.raises(ArgumentError, match="is not a severity"):
        ort.set_default_logger_severity(level)


@pytest.mark.parametrize(("name", "value"), [
    ("intra_op_num_threads", "a"), ("intra_op_num_threads", 2.5), ("inter_op_num_threads", None),
    ("graph_optimization_level", "x"), ("graph_optimization_level", 7),
    ("execution_mode", "parallel"), ("log_severity_level", "a")])
def test_options_refuse_what_they_cannot_be(name: str, value: Any) -> None:
    options = ort.SessionOptions()
    before = getattr(options, name)
    with pytest.raises(ArgumentError, match=f"{name} cannot be"):
        setattr(options, name, value)
    assert getattr(options, name) is before


def test_a_session_keeps_the_options_it_was_made_with() -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = np.int64(1)
    options.add_session_config_entry("a", "b")
    session = ort.InferenceSession(linear(), options)
    for other in (options, session.get_session_options()):
        other.intra_op_num_threads = 3
        other.add_session_config_entry("a", "c")
    kept = session.get_session_options()
    assert kept.intra_op_num_threads == 1 and kept.get_session_config_entry("a") == "b"


# ---------------------------------------------------------------- as clients use it
def test_bound_runs_are_repeated_until_something_is_bound_anew() -> None:
    session = ort.InferenceSession(linear())
    x, y, h = X.copy(), np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    for name, array in (("y", y), ("h", h)):
        binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))

    def check(given: np.ndarray, target: np.ndarray) -> None:
        target[...] = np.nan
        session.run_with_iobinding(binding)
        np.testing.assert_array_equal(target, session.run(["y"], {"x": given})[0])
        np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], target)

    for turn in range(3):
        x += turn
        check(x, y)
    assert binding._again is not None
    other, target = X * 3, np.zeros((2, 3), np.float32)
    binding.bind_cpu_input("x", other)
    check(other, y)
    binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(target))
    check(other, target)
    binding.bind_cpu_input("x", np.asfortranarray(other))  # which is copied first
    check(other, target)
    check(other, target)
    y[...] = 7
    session.run_with_iobinding(binding)
    assert (y == 7).all(), "it is bound no more"


@pytest.mark.parametrize("over", [True, False])
def test_bound_memory_that_is_input_and_output(over: bool) -> None:
    graph = helper.make_graph(
        [helper.make_node("Transpose", ["x"], ["t"]), helper.make_node("Exp", ["t"], ["y"])],
        "over", [helper.make_tensor_value_info("x", TensorProto.FLOAT, (16, 16))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (16, 16))])
    session = ort.InferenceSession(helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString())
    square = np.random.default_rng(3).standard_normal((16, 16), np.float32)
    x = square.copy()
    out = x if over else np.zeros_like(x)
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(out))
    for _ in range(4):
        x[...] = square
        session.run_with_iobinding(binding)
        np.testing.assert_allclose(out, np.exp(square.T), rtol=1e-5)


def test_providers_that_are_not_here_are_warned_of() -> None:
    for providers in (["TensorrtExecutionProvider"], ["NoSuchProvider", "CPUExecutionProvider"],
                      [("ROCMExecutionProvider", {"device_id": 0})]):
        with pytest.warns(UserWarning, match="not in available provider names"):
            session = ort.InferenceSession(linear(), providers=providers)
        assert session.get_providers() == ["CPUExecutionProvider"]
        assert session.run(["y"], {"x": X})[0].shape == (2, 3)
    assert ort.InferenceSession(linear(), providers=[]).get_providers() == ["CPUExecutionProvider"]
    with pytest.raises(ArgumentError, match="provider_options"):
        ort.InferenceSession(linear(), providers=["CPUExecutionProvider"],
                             provider_options=[{}, {}])


@pytest.mark.parametrize("options", [ort.SessionOptions, ort.RunOptions])
def test_misspelt_options(options: Any) -> None:
    with pytest.raises(AttributeError, match="intra_op_threads"):
        options().intra_op_threads = 2
    first, second = options(), options()
    first.logid = "a"
    assert second.logid == ""


def test_run_async_and_terminate() -> None:
    session, answers = ort.InferenceSession(linear()), queue.Queue()
    session.run_async(["y"], {"x": X}, lambda *got: answers.put(got), "mine")
    results, data, error = answers.get(timeout=60)
    assert data == "mine" and not error
    assert np.array_equal(results[0], session.run(["y"], {"x": X})[0])
    session.run_async(["y"], {}, lambda *got: answers.put(got), None)
    assert "needs its input" in answers.get(timeout=60)[2]
    told = ort.RunOptions()
    told.terminate = True
    with pytest.raises(ort.Fail, match="terminate"):
        session.run(None, {"x": X}, told)
    told.terminate = False
    session.run(None, {"x": X}, told)


def test_initializers_can_be_replaced(tmp_path: Path) -> None:
    """Those in a file that is not there among them, as onnxruntime's do."""
    w = np.full((4, 3), 0.5, np.float32)
    model = onnx.ModelProto.FromString(linear())
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="nowhere.bin")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    for source in (linear(), tmp_path / "model.onnx"):
        options = ort.SessionOptions()
        options.add_initializer("w", ort.OrtValue.ortvalue_from_numpy(w))
        y = ort.InferenceSession(source, options).run(["h"], {"x": X})[0]
        np.testing.assert_allclose(y, X @ w + 1, rtol=1e-5)
    options = ort.SessionOptions()
    options.add_external_initializers(["q"], [ort.OrtValue.ortvalue_from_numpy(w)])
    with pytest.raises(ort.InvalidArgument, match="no initialiser 'q'"):
        ort.InferenceSession(linear(), options)


def one(operator: str, output: Any = None, **attributes: Any) -> bytes:
    info = output if output is not None else onnx.ValueInfoProto(name="y")
    graph = helper.make_graph(
        [helper.make_node(operator, ["x"], ["y"], name="only", **attributes)], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("n", 3))], [info])
    return helper.make_model(graph, ir_version=9, opset_imports=[
        helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]).SerializeToString()


@pytest.mark.parametrize("model", [
    one("NoSuchOperator"), one("Relu", domain="no.such.domain"), b"", b"\x00\x01",
    one("Relu")[:-7],
], ids=["operator", "domain", "empty", "bytes", "cut"])
def test_what_cannot_run_is_refused_when_loaded(model: bytes) -> None:
    for providers in (None, ["CPUExecutionProvider"]):
        with pytest.raises(ort.Fail):
            ort.InferenceSession(model, providers=providers)


@pytest.mark.parametrize("model", [
    one("SequenceConstruct"), one("ZipMap", domain="ai.onnx.ml", classlabels_int64s=[1, 2, 3]),
    one("ZipMap", domain="ai.onnx.ml", classlabels_strings=["a", "b", "c"]),
    one("Cast", to=TensorProto.STRING), one("Transpose"), one("Shape"), one("ReduceSum"),
], ids=["sequence", "map", "map of strings", "strings", "turned", "shape", "sum"])
def test_types_and_shapes_of_outputs_are_inferred(model: bytes) -> None:
    peer = pytest.importorskip("onnxruntime")
    theirs = peer.InferenceSession(model, providers=["CPUExecutionProvider"]).get_outputs()
    ours = ort.InferenceSession(model).get_outputs()
    assert [(o.name, o.type, o.shape) for o in ours] == [
        (o.name, o.type, o.shape) for o in theirs]


# What onnxruntime has and we have not, by reason.
LEFT_OUT = {
    "its own devices and plug-in providers": {
        "OrtDeviceMemoryType", "OrtDeviceVendorId", "OrtEpAssignedNode", "OrtEpAssignedSubgraph",
        "OrtEpContextData", "OrtEpContextDataBuffer", "OrtEpDevice",
        "OrtExecutionProviderDevicePolicy", "OrtHardwareDevice", "OrtHardwareDeviceType",
        "OrtSyncStream", "add_provider_for_devices", "clear_ep_context_data_read_func",
        "copy_tensors", "cuda_version", "get_input_epdevices",
        "get_provider_graph_assignment_info", "register_execution_provider_library",
        "release_captured_graph", "set_ep_context_data_read_func", "set_provider_selection_policy",
        "set_provider_selection_policy_delegate", "unregister_execution_provider_library"},
    "its own allocators": {
        "OrtAllocatorType", "OrtArenaCfg", "OrtMemType", "OrtMemoryInfo",
        "OrtMemoryInfoDeviceType", "create_and_register_allocator",
        "create_and_register_allocator_v2", "get_input_memory_infos", "get_output_memory_infos",
        "create_ortvalue_from_shape_and_type"},
    "its own compiled files and adapters": {
        "AdapterFormat", "LoraAdapter", "ModelCompiler", "OrtCompileApiFlags",
        "OrtExternalInitializerInfo", "add_active_adapter",
        "add_external_initializers_from_files_in_memory", "set_load_cancellation_flag"},
    "sparse tensors, which no CPU model takes": {
        "OrtSparseFormat", "SparseTensor", "as_sparse_tensor", "ort_value_from_sparse_tensor"},
    "vectors of its own values": {"get_outputs_as_ortvaluevector", "run_with_ortvaluevector"},
    "modules that its own file imports": {
        "contextlib", "import_capi_exception", "onnxruntime_validation"},
}


def test_every_public_name_is_here_or_left_out_with_a_reason() -> None:
    peer = pytest.importorskip("onnxruntime")
    left_out = set().union(*LEFT_OUT.values())
    things = ["", "InferenceSession", "SessionOptions", "IOBinding", "OrtValue", "RunOptions",
              "ModelMetadata", "NodeArg"]
    seen = set()
    for thing in things:
        theirs, ours = (getattr(m, thing) if thing else m for m in (peer, ort))
        if thing in ("SessionOptions", "RunOptions"):
            ours = ours()
        if thing in ("ModelMetadata", "NodeArg"):
            session = ort.InferenceSession(linear())
            ours = session.get_modelmeta() if thing == "ModelMetadata" else session.get_inputs()[0]
        lacking = {n for n in set(dir(theirs)) - set(dir(ours)) if not n.startswith("_")}
        assert lacking <= left_out, f"{thing or 'the module'}: {sorted(lacking - left_out)}"
        seen |= {n for n in dir(theirs) if not n.startswith("_")}
    assert len(seen) > 100


def test_in_the_place_of_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that imports onnxruntime, its inner modules too, gets ours."""
    for name in [n for n in sys.modules if n.split(".")[0] == "onnxruntime"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnxruntime", ort)
    import onnxruntime
    from onnxruntime.capi._pybind_state import InvalidArgument
    from onnxruntime.capi.onnxruntime_inference_collection import OrtValue
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail, NoSuchFile
    from onnxruntime.transformers.io_binding_helper import TypeHelper

    types = TypeHelper.get_io_numpy_type_map(ort.InferenceSession(linear()))
    assert types == {"x": np.float32, "y": np.float32, "h": np.float32}
    assert onnxruntime is ort and OrtValue is ort.OrtValue
    assert issubclass(NoSuchFile, Fail) and InvalidArgument is ort.InvalidArgument
    assert onnxruntime.__version__ >= "1.18.0"
    for name in [n for n in sys.modules if n.startswith("onnxruntime.")]:
        monkeypatch.delitem(sys.modules, name)
