"""Models on a GPU by onnxruntime's names: simulated where there is none, and the same on one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

import terrazzo.ort as ort
from terrazzo.chips.cuda import driver
from terrazzo.errors import ArgumentError, DeviceError
from terrazzo.frontends.onnx.session import Session
from terrazzo.frontends.onnx.session.report import report
from terrazzo.knobs import knobs
from terrazzo.tools.cli.commands import app

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "examples"), str(HERE.parent / "session")]

import onnx_models  # noqa: E402
import rewrite_models  # noqa: E402

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.onnx, pytest.mark.triton, pytest.mark.torch]
BOTH = ["CUDAExecutionProvider", "CPUExecutionProvider"]
needs_none = pytest.mark.skipif(not driver.absence(), reason="there is a GPU")


@pytest.fixture(params=["simulated", pytest.param("real", marks=[
    pytest.mark.gpu, pytest.mark.skipif(bool(driver.absence()), reason="needs a GPU")])])
def gpu(request: pytest.FixtureRequest) -> Iterator[str]:
    simulated = request.param == "simulated"
    with knobs.override(cuda_simulate=True) if simulated else nullcontext():
        yield request.param


def bert() -> onnx.ModelProto:
    return onnx_models.bert(layers=2, hidden=32, heads=4, vocabulary=50, positions=16, sequence=9)


def resnet() -> onnx.ModelProto:
    return onnx_models.resnet(depths=(1, 1), width=8, image=16, classes=5)


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "bert": bert, "resnet": resnet, "vit": rewrite_models.patches,
    "gpt2": rewrite_models.causal_decoder, "llama": rewrite_models.rotary_decoder,
    "mobilenet": rewrite_models.inverted_residual}


def one(op: str, shape: tuple[Any, ...] = ("batch", 64), outputs: int = 1, **attrs: Any) -> bytes:
    """A model of a product by a constant, one operator and what is done to each element."""
    rng = np.random.default_rng(0)
    names = [f"v{i}" for i in range(outputs)]
    extra = {"TopK": ["k"]}.get(op, [])
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]),
             helper.make_node(op, ["h", *extra], names, **attrs),
             helper.make_node("Exp", ["v0"], ["y"])]
    graph = helper.make_graph(
        nodes, "one", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(rng.standard_normal((64, 8), np.float32) / 8, "w"),
         numpy_helper.from_array(np.array([3]), "k")])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return made.SerializeToString()


def feeds_of(session: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {i.name: rng.integers(0, 2, i.shape) if "int" in i.type else
            rng.standard_normal(i.shape).astype(np.float32) for i in session.get_inputs()}


X = np.linspace(-1, 1, 3 * 64, dtype=np.float32).reshape(3, 64)
MATRICES = np.random.default_rng(0).standard_normal((3, 8, 64), np.float32) * np.float32(0.6)


def on_cpu(model: bytes, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)


@pytest.mark.parametrize("name", MODELS)
def test_models_answer_as_on_the_cpu(gpu: str, name: str) -> None:
    model = MODELS[name]().SerializeToString()
    session = ort.InferenceSession(model, providers=BOTH)
    assert session.get_providers() == BOTH
    whole = session._session.whole
    assert whole is not None and whole.executable.chip.name == "cuda"
    assert session._session.elsewhere == []
    feeds = feeds_of(session)
    for _ in range(2):  # the second time by the way that is remembered
        got = session.run(None, feeds)
        for a, b in zip(got, on_cpu(model, feeds), strict=True):
            assert isinstance(a, np.ndarray)
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_sizes_that_vary(gpu: str) -> None:
    model = one("Softmax")
    session = ort.InferenceSession(model, providers=BOTH)
    for rows in (3, 1, 16, 5):
        feeds = {"x": np.random.default_rng(rows).standard_normal((rows, 64), np.float32)}
        np.testing.assert_allclose(session.run(None, feeds)[0], on_cpu(model, feeds)[0], rtol=1e-4)


@pytest.mark.parametrize("rows", ["batch", 3])
def test_what_the_cpu_runs_is_said(gpu: str, rows: Any, tmp_path: Path,
                                   caplog: pytest.LogCaptureFixture) -> None:
    model = one("Det", (rows, 8, 64))
    with caplog.at_level(logging.WARNING, "terrazzo"):
        session = ort.InferenceSession(model, providers=BOTH)
    ((origin, reason),) = session._session.elsewhere
    assert "det" in origin and "loops are written for CPUs" in reason
    assert "1 kernels of the model run on the CPU" in caplog.text
    np.testing.assert_allclose(session.run(None, {"x": MATRICES})[0],
                               on_cpu(model, {"x": MATRICES})[0], rtol=1e-5)
    (tmp_path / "m.onnx").write_bytes(model)
    shown = report(Session(tmp_path / "m.onnx", compile_now=False, chip="cuda"))
    assert shown.chip == "cuda" and shown.elsewhere == [(origin, reason)]
    printed = CliRunner().invoke(app, ["info", str(tmp_path / "m.onnx"), "--chip", "cuda"]).output
    assert "on cuda, 1 of them run by the CPU" in printed and "written for CPUs" in printed


def test_a_model_in_parts(gpu: str) -> None:
    """What the host runs between compiled parts, from and to the GPU's memory as well."""
    nodes = [helper.make_node("Exp", ["x"], ["h"]), helper.make_node("NonZero", ["h"], ["at"]),
             helper.make_node("Cast", ["at"], ["f"], to=TensorProto.FLOAT),
             helper.make_node("Mul", ["f", "f"], ["y"])]
    graph = helper.make_graph(
        nodes, "parts", [helper.make_tensor_value_info("x", TensorProto.FLOAT, (3, 64))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)],
                              ir_version=9).SerializeToString()
    session = ort.InferenceSession(model, providers=BOTH)
    (want,) = on_cpu(model, {"x": X})
    value = ort.OrtValue.ortvalue_from_numpy(X, "cuda", 0)
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], want)
    np.testing.assert_array_equal(session.run(None, {"x": value})[0], want)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", value)
    binding.bind_output("y", "cuda")
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], want)


# ---------------------------------------------------------------- memory of the GPU
def test_values_on_the_gpu(gpu: str) -> None:
    value = ort.OrtValue.ortvalue_from_numpy(X, "cuda", 0)
    assert (value.device_name(), value.shape(), value.data_type()) == (
        "cuda", [3, 64], "tensor(float)")
    assert value.is_tensor() and value.tensor_size_in_bytes() == X.nbytes
    np.testing.assert_array_equal(value.numpy(), X)
    assert value.data_ptr() != X.ctypes.data
    value.update_inplace(X * 2)
    np.testing.assert_array_equal(value.numpy(), X * 2)
    assert X[0, 0] == -1  # a copy
    fresh = ort.OrtValue.ortvalue_from_shape_and_type([2, 5], np.float16, "cuda", 0)
    assert fresh.numpy().shape == (2, 5) and fresh.numpy().dtype == np.float16
    with pytest.raises(ArgumentError, match="cannot take"):
        fresh.update_inplace(X)
    with pytest.raises(ArgumentError, match="GPU 0"):
        ort.OrtValue.ortvalue_from_numpy(X, "cuda", 1)
    assert ort.OrtDevice.make("cuda", 0).device_type() == ort.OrtDevice.cuda() == 1


def test_binding_on_the_gpu(gpu: str) -> None:
    """Addresses of torch's tensors in, results in memory of ours, fresh, bound, or the host's."""
    model = one("Softmax")
    session = ort.InferenceSession(model, providers=BOTH)
    (want,) = on_cpu(model, {"x": X})
    x = torch.from_numpy(X).to("cuda" if gpu == "real" else "cpu")
    out = torch.zeros(3, 8, device=x.device)
    host = np.zeros((3, 8), np.float32)
    binding = session.io_binding()
    binding.bind_input("x", "cuda", 0, np.float32, (3, 64), x.data_ptr())
    for bind in (lambda: binding.bind_output("y", "cuda"),
                 lambda: binding.bind_output("y"),
                 lambda: binding.bind_output("y", "cuda", 0, np.float32, (3, 8), out.data_ptr()),
                 lambda: binding.bind_output("y", "cpu", 0, np.float32, (3, 8), host.ctypes.data),
                 lambda: binding.bind_ortvalue_output(
                     "y", ort.OrtValue.ortvalue_from_shape_and_type((3, 8), np.float32, "cuda"))):
        bind()
        session.run_with_iobinding(binding)
        np.testing.assert_allclose(binding.copy_outputs_to_cpu()[0], want, rtol=1e-4)
    for filled in (out.cpu().numpy(), host):
        np.testing.assert_allclose(filled, want, rtol=1e-4)
    binding.clear_binding_inputs()
    binding.bind_cpu_input("x", X * 2)
    binding.bind_output("y", "cuda")
    session.run_with_iobinding(binding)
    (result,) = binding.get_outputs()
    assert result.device_name() == "cuda"
    np.testing.assert_allclose(result.numpy(), on_cpu(model, {"x": X * 2})[0], rtol=1e-4)


def test_dlpack_and_tensors(gpu: str) -> None:
    model = one("Softmax")
    session = ort.InferenceSession(model, providers=BOTH)
    x = torch.from_numpy(X).to("cuda" if gpu == "real" else "cpu")
    (want,) = on_cpu(model, {"x": X})
    value = ort.OrtValue.from_dlpack(x)
    assert value.data_ptr() == x.data_ptr()
    (got,) = session.run_with_ort_values(None, {"x": value})
    assert got.device_name() == "cpu"
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-4)
    for _ in range(3):
        (tensor,) = session.run(None, {"x": x})
        assert tensor.device == x.device
        np.testing.assert_allclose(tensor.cpu().numpy(), want, rtol=1e-4)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", value)
    binding.bind_output("y", "cuda")
    session.run_with_iobinding(binding)
    back = torch.from_dlpack(binding.get_outputs()[0])
    np.testing.assert_allclose(back.cpu().numpy(), want, rtol=1e-4)


# ---------------------------------------------------------------- CUDA graphs
GRAPHS = [("CUDAExecutionProvider", {"enable_cuda_graph": "1"}), "CPUExecutionProvider"]


@pytest.mark.parametrize("name", ["bert", "resnet", "gpt2"])
def test_graphs_answer_as_launches_do(gpu: str, name: str) -> None:
    model = MODELS[name]().SerializeToString()
    session = ort.InferenceSession(model, providers=GRAPHS)
    assert session.get_provider_options()["CUDAExecutionProvider"]["enable_cuda_graph"] == "1"
    feeds = feeds_of(session)
    kept: list[Any] = []
    for turn in range(4):
        now = {n: a if a.dtype.kind == "i" else a + turn for n, a in feeds.items()}
        got = session.run(None, now)
        for a, b in zip(got, on_cpu(model, now), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        kept.append((got, [a.copy() for a in got]))
    for got, before in kept:  # outputs are the caller's own
        for a, b in zip(got, before, strict=True):
            np.testing.assert_array_equal(a, b)
    recorded = session._session.whole.runner
    (sizes,) = recorded._kept.values()
    assert len(sizes.recordings) == 1 or gpu == "simulated", "one for all runs"
    assert 0 < len(sizes.recordings) < 4  # arrays of a simulated GPU may be used in place


def test_graphs_use_bound_memory_in_place(gpu: str) -> None:
    model = one("Softmax", (3, 64))
    session = ort.InferenceSession(model, providers=GRAPHS)
    x, y = (ort.OrtValue.ortvalue_from_shape_and_type(s, np.float32, "cuda")
            for s in ((3, 64), (3, 8)))
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", x)
    binding.bind_ortvalue_output("y", y)
    for turn in range(5):
        x.update_inplace(X + turn)
        session.run_with_iobinding(binding)
        np.testing.assert_allclose(y.numpy(), on_cpu(model, {"x": X + turn})[0], rtol=1e-4)
    (kept,) = session._session.whole.runner._kept.values()
    assert list(kept.recordings) == [(x.data_ptr(), y.data_ptr())]


def test_graphs_read_tensors_in_place(gpu: str) -> None:
    model = one("Softmax", (3, 64))
    session = ort.InferenceSession(model, providers=GRAPHS)
    x = torch.from_numpy(X.copy()).to("cuda" if gpu == "real" else "cpu")
    results = []
    for turn in range(4):
        x += turn
        (y,) = session.run(None, {"x": x})
        assert y.device == x.device
        results.append((y, on_cpu(model, {"x": x.cpu().numpy()})[0]))
    for got, want in results:  # of which no two share memory
        np.testing.assert_allclose(got.cpu().numpy(), want, rtol=1e-4)
    (kept,) = session._session.whole.runner._kept.values()
    assert [places[0] for places in kept.recordings] == [x.data_ptr()]


def test_graphs_for_sizes_that_vary(gpu: str) -> None:
    model = one("Softmax")
    session = ort.InferenceSession(model, providers=GRAPHS)
    for rows in (3, 16, 3, 16, 5):
        feeds = {"x": np.random.default_rng(rows).standard_normal((rows, 64), np.float32)}
        for _ in range(2):
            np.testing.assert_allclose(session.run(None, feeds)[0], on_cpu(model, feeds)[0],
                                       rtol=1e-4)
    assert len(session._session.whole.runner._kept) == 3


def test_what_cannot_be_recorded_is_launched(gpu: str) -> None:
    """A part that the CPU runs, and a tensor over its own input."""
    model = one("Det", (3, 8, 64))
    session = ort.InferenceSession(model, providers=GRAPHS)
    for _ in range(3):
        np.testing.assert_allclose(session.run(None, {"x": MATRICES})[0],
                                   on_cpu(model, {"x": MATRICES})[0], rtol=1e-5)


def test_results_over_inputs_are_not_recorded_in_place(gpu: str) -> None:
    graph = helper.make_graph(
        [helper.make_node("Transpose", ["x"], ["t"]), helper.make_node("Exp", ["t"], ["y"])],
        "over", [helper.make_tensor_value_info("x", TensorProto.FLOAT, (16, 16))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)],
                              ir_version=9).SerializeToString()
    session = ort.InferenceSession(model, providers=GRAPHS)
    value = ort.OrtValue.ortvalue_from_shape_and_type((16, 16), np.float32, "cuda")
    square = np.random.default_rng(3).standard_normal((16, 16), np.float32)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", value)
    binding.bind_ortvalue_output("y", value)
    for _ in range(4):
        value.update_inplace(square)
        session.run_with_iobinding(binding)
        np.testing.assert_allclose(value.numpy(), np.exp(square.T), rtol=1e-5)


# ---------------------------------------------------------------- providers and their options
def test_what_a_session_says_of_its_providers(gpu: str) -> None:
    assert ort.get_available_providers()[0] == "CUDAExecutionProvider"
    assert ort.get_device() == "GPU"
    model = one("Softmax")
    session = ort.InferenceSession(model, providers=[
        ("CUDAExecutionProvider", {"device_id": 0, "cudnn_conv_algo_search": "DEFAULT"})])
    assert session.get_providers() == BOTH
    told = session.get_provider_options()["CUDAExecutionProvider"]
    assert told["device_id"] == "0" and told["cudnn_conv_algo_search"] == "DEFAULT"
    assert session.get_provider_options()["CPUExecutionProvider"] == {}
    options = ort.SessionOptions()
    options.add_provider("CUDAExecutionProvider", {"device_id": "0"})
    assert ort.InferenceSession(model, options).get_providers() == BOTH
    # Who is named first runs the model; who names nobody gets the CPU.
    for providers in (None, ["CPUExecutionProvider", "CUDAExecutionProvider"]):
        session = ort.InferenceSession(model, providers=providers)
        assert session._session.whole.executable.chip.name == "cpu"
    session.set_providers(["CUDAExecutionProvider"])
    assert session._session.whole.executable.chip.name == "cuda"
    np.testing.assert_allclose(session.run(None, {"x": X})[0], on_cpu(model, {"x": X})[0],
                               rtol=1e-4)


@pytest.mark.parametrize(("options", "wrong"), [
    ({"no_such_option": 1}, "has no option 'no_such_option'"), ({"device_id": 1}, "GPU 0"),
    ({"user_compute_stream": "mine"}, "no address")])
def test_options_that_are_wrong(gpu: str, options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ArgumentError, match=wrong):
        ort.InferenceSession(one("Softmax"), providers=[("CUDAExecutionProvider", options)])


@needs_none
def test_without_a_gpu_the_cpu_takes_over() -> None:
    with pytest.warns(UserWarning, match=r"not in available.*no NVIDIA GPU.*TZ_CUDA_SIMULATE"):
        session = ort.InferenceSession(one("Softmax"), providers=BOTH)
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert session.run(None, {"x": X})[0].shape == (3, 8)
    assert "CUDAExecutionProvider" in ort.get_all_providers()
    with pytest.raises(DeviceError, match="no NVIDIA GPU"):
        ort.OrtValue.ortvalue_from_numpy(X, "cuda", 0)
