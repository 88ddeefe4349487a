"""What a session made of a model, written as ONNX and read back by us and by others."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import terrazzo.ort as ort
from terrazzo.frontends.onnx.session import Session

sys.path.insert(0, str(Path(__file__).parents[1] / "frontends" / "onnx"))
from models import model, node


def network() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    return model(
        [node("Conv", "x w b", "c", pads=[1, 1, 1, 1]), node("Relu", "c", "r"),
         node("MaxPool", "r", "p", kernel_shape=[2, 2], strides=[2, 2]),
         node("ReduceMean", "p axes", "m", keepdims=0), node("Gemm", "m v", "g", transB=1),
         node("Softmax", "g", "y")],
        {"x": (1, 3, 8, 8)}, ["y"],
        {"w": rng.standard_normal((4, 3, 3, 3), np.float32), "b": np.ones(4, np.float32),
         "axes": np.array([2, 3]), "v": rng.standard_normal((5, 4), np.float32)})


@pytest.mark.parametrize("level", ["none", "basic", "extended", "layout", "all"])
def test_every_level_is_written_and_read_back(level: str, tmp_path: Path,
                                              rng: np.random.Generator) -> None:
    x = rng.standard_normal((1, 3, 8, 8), np.float32)
    session = Session(network(), level=level)
    session.export(tmp_path / "opt.onnx")
    wanted = ReferenceEvaluator(network()).run(None, {"x": x})[0]
    for found in (session, Session(tmp_path / "opt.onnx")):
        np.testing.assert_allclose(found.run({"x": x})[0], wanted, rtol=1e-5, atol=1e-6)


def test_what_has_a_counterpart_runs_elsewhere(tmp_path: Path, rng: np.random.Generator) -> None:
    proto = model([node("MatMul", "x x", "m"), node("Exp", "m", "e"), node("Mul", "e k", "y")],
                  {"x": (3, 3)}, ["y"], {"k": np.float32([2])})
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "opt.onnx")
    ort.InferenceSession(proto.SerializeToString(), options)
    written = onnx.load(tmp_path / "opt.onnx")
    onnx.checker.check_model(written)
    x = rng.standard_normal((3, 3), np.float32)
    np.testing.assert_allclose(ReferenceEvaluator(written).run(None, {"x": x})[0],
                               2 * np.exp(x @ x), rtol=1e-5)


def test_symbolic_sizes_stay_symbolic(tmp_path: Path, rng: np.random.Generator) -> None:
    proto = model(
        [node("Shape", "x", "n", end=1), node("Concat", "n minus", "target", axis=0),
         node("Reshape", "x target", "flat"), node("Concat", "flat flat", "y", axis=0)],
        {"x": ("rows", 2, "columns")}, ["y"], {"minus": np.array([-1])})
    Session(proto).export(tmp_path / "opt.onnx")
    written = onnx.load(tmp_path / "opt.onnx")
    onnx.checker.check_model(written, full_check=True)
    for shape in ((3, 2, 4), (1, 2, 7)):
        x = rng.standard_normal(shape, np.float32)
        wanted = np.concatenate([x.reshape(shape[0], -1)] * 2)
        for found in (Session(written).run({"x": x}), ReferenceEvaluator(written).run(
                None, {"x": x})):
            assert np.array_equal(found[0], wanted)
