"""The commands of `tz` that take models, and what they say of mistakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from typer.testing import CliRunner

import terrazzo.errors
from terrazzo.errors import ArgumentError, CompileError, ModelError, TerrazzoError
from terrazzo.frontends.onnx.session import Session
from terrazzo.tools.cli import commands as cli
from terrazzo.tools.cli import models as cli_models

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from onnx_models import bert, resnet

pytestmark = pytest.mark.onnx


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with symbolic sizes and a ResNet, both tiny."""
    made = tmp_path_factory.mktemp("models")
    tiny = bert(layers=1, hidden=16, heads=2, vocabulary=50, positions=32, batch="batch",
                sequence="sequence")
    (made / "bert.onnx").write_bytes(tiny.SerializeToString())
    small = resnet(depths=(1, 1), width=4, image=16, classes=5)
    (made / "resnet.onnx").write_bytes(small.SerializeToString())
    return made


def tz(*words: object) -> str:
    """What a command prints; errors of terrazzo come through."""
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, [str(w) for w in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


# ---------------------------------------------------------------- run
def test_run_makes_up_inputs(folder: Path) -> None:
    assert "[1, 5]" in tz("run", folder / "resnet.onnx")
    assert "[8, 8, 16]" in tz("run", folder / "bert.onnx")


def test_run_with_sizes(folder: Path) -> None:
    text = tz("run", folder / "bert.onnx", "--size", "batch=2", "--size", "sequence=7")
    assert "[2, 7, 16]" in text and "float32" in text


def test_run_with_given_inputs(folder: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    feeds = {"input_ids": rng.integers(0, 50, (3, 4)), "attention_mask": np.ones((3, 4), np.int64)}
    given, made = tmp_path / "inputs.npz", tmp_path / "outputs.npz"
    np.savez(given, **feeds)
    text = tz("run", folder / "bert.onnx", "--input", given, "--output", made, "--threads", 1)
    assert "[3, 4, 16]" in text
    with np.load(made) as file:
        assert np.array_equal(file["output"], Session(folder / "bert.onnx").run(feeds)[0])


# ---------------------------------------------------------------- compile
def test_compile_then_run(folder: Path, tmp_path: Path) -> None:
    compiled = tmp_path / "bert.tzx"
    assert "kernels" in tz("compile", folder / "bert.onnx", "-o", compiled)
    text = tz("run", compiled, "--size", "batch=2", "--size", "sequence=7", "-o",
              tmp_path / "compiled.npz")
    assert "[2, 7, 16]" in text
    tz("run", folder / "bert.onnx", "--size", "batch=2", "--size", "sequence=7", "-o",
       tmp_path / "session.npz")
    with np.load(tmp_path / "compiled.npz") as ours, np.load(tmp_path / "session.npz") as theirs:
        assert np.array_equal(ours["output"], theirs["output"])


def test_compile_writes_beside_the_model(folder: Path) -> None:
    tz("compile", folder / "resnet.onnx")
    assert "[1, 5]" in tz("run", folder / "resnet.tzx")


def test_compiled_models_are_known_by_what_is_in_them(
        folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = tmp_path / "foo"
    tz("compile", folder / "resnet.onnx", "-o", compiled)
    assert "[1, 5]" in tz("run", compiled)
    for command in ("info", "compile", "bench"):
        with pytest.raises(ArgumentError, match=r"(?s)compiled model.*give the \.onnx file"):
            tz(command, compiled)
    monkeypatch.setattr(cli_models, "interleaved", lambda runners: {n: [1.0] for n in runners})
    assert "terrazzo" in tz("bench", compiled, "--against", "")  # which needs no graph


# ---------------------------------------------------------------- info
def test_info(folder: Path) -> None:
    text = tz("info", folder / "bert.onnx")
    assert "input_ids: int64[batch, sequence]" in text
    assert "output: float32[batch, sequence, 16]" in text
    assert "MatMul" in text and "GFLOP" in text and "nodes compiled" in text
    assert "rewrite" not in text


def test_info_lists_rewrites(folder: Path) -> None:
    text = tz("info", folder / "bert.onnx", "--rewrites")
    assert "attention" in text and "times" in text


# ---------------------------------------------------------------- bench
def test_bench_times_ours_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cli_models.interleaved
    monkeypatch.setattr(cli_models, "interleaved",
                        lambda runners: whole(runners, rounds=2, slice_s=0.01))
    text = tz("bench", folder / "resnet.onnx", "--against", "", "--threads", 1)
    assert "terrazzo" in text and "ms" in text
    with pytest.raises(ArgumentError, match="no engine 'tvm'"):
        tz("bench", folder / "resnet.onnx", "--against", "tvm")


def test_openvino_races_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where processors have bfloat16 it takes that unless told otherwise."""
    openvino = MagicMock()
    monkeypatch.setitem(sys.modules, "openvino", openvino)
    cli_models._openvino("model.onnx", {}, threads=3)
    (_, device, settings), _ = openvino.Core.return_value.compile_model.call_args
    assert device == "CPU" and settings["INFERENCE_NUM_THREADS"] == 3
    assert settings["INFERENCE_PRECISION_HINT"] == "f32"


def test_engines_take_turns() -> None:
    order: list[str] = []
    times = cli_models.interleaved({n: lambda n=n: order.append(n) for n in "ab"}, rounds=2,
                                   slice_s=0.0)
    assert "".join(order) == "aabbaabb" and len(times["a"]) == len(times["b"]) == 2


# ---------------------------------------------------------------- mistakes
@pytest.mark.parametrize("words", [("run", "nowhere.onnx"), ("info", "nowhere.onnx"),
                                   ("compile", "nowhere.onnx"), ("bench", "nowhere.onnx"),
                                   ("run", "nowhere.tzx")])
def test_files_that_do_not_exist(words: tuple[str, str]) -> None:
    with pytest.raises(TerrazzoError, match="nowhere"):
        tz(*words)


def test_files_that_are_no_models(tmp_path: Path) -> None:
    for name in ("broken.onnx", "broken.tzx"):
        (tmp_path / name).write_bytes(b"\xff" * 100)
        with pytest.raises(TerrazzoError):
            tz("run", tmp_path / name)


@pytest.mark.parametrize(("text", "message"), [
    ("batch", "'batch' is not a size"), ("batch=-1", "is not a size"),
    ("batch=two", "is not a size"), ("=3", "is not a size"), ("btach=3", "no size 'btach'")])
def test_sizes_that_are_none(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        tz("run", folder / "bert.onnx", "--size", text)


def test_inputs_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.npz"
    np.savez(wrong, image=np.zeros((1, 3, 16, 17), np.float32))
    with pytest.raises(ModelError, match=r"shape \(1, 3, 16, 17\)"):
        tz("run", folder / "resnet.onnx", "--input", wrong)
    with pytest.raises(ArgumentError, match="cannot read inputs"):
        tz("run", folder / "resnet.onnx", "--input", tmp_path / "none.npz")


def test_one_array_is_no_inputs(folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.zeros((1, 3, 16, 16), np.float32))
    with pytest.raises(ArgumentError, match="one array, without the name"):
        tz("run", folder / "resnet.onnx", "--input", tmp_path / "one.npy")


@pytest.mark.parametrize("command", ["run", "compile"])
def test_what_cannot_be_written_is_said_before_the_work(
        command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "__init__", lambda *_, **__: pytest.fail("it began"))
    for path, why in ((tmp_path / "nowhere" / "o.npz", "no folder"), (tmp_path, "is a folder")):
        with pytest.raises(ArgumentError, match=why):
            tz(command, folder / "resnet.onnx", "-o", path)


@pytest.mark.parametrize(("words", "message"), [
    ("run {} -i x.npz --size batch=5", "--size means nothing beside --input"),
    ("bench {} -s 4", "--shape means nothing for timing a model"),
    ("bench {} --dtype f16", "--dtype means nothing for timing a model"),
    ("bench tanh -s 4 --size n=2", "--size means nothing for timing an operator"),
    ("bench tanh -s 4 --threads 2", "--threads means nothing for timing an operator"),
    ("info --rewrites", "--rewrites means nothing for tz info without a model")])
def test_options_that_would_be_ignored(folder: Path, words: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        tz(*words.format(folder / "bert.onnx").split())


def test_a_model_that_is_not_one_executable(tmp_path: Path) -> None:
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("NonZero", ["x"], ["y"])], "places",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (4,))],
        [helper.make_tensor_value_info("y", TensorProto.INT64, None)])
    path = tmp_path / "places.onnx"
    path.write_bytes(helper.make_model(graph, ir_version=10, opset_imports=[
        helper.make_opsetid("", 18)]).SerializeToString())
    with pytest.raises(CompileError, match="NonZero"):
        tz("compile", path)
    assert "1 nodes host" in tz("info", path) and "[1, 4]" in tz("run", path)


def test_mistakes_are_one_message() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "terrazzo", "run", "nowhere.onnx"], capture_output=True, text=True,
        env={"PYTHONPATH": str(Path(terrazzo.errors.__file__).parents[1])})
    assert done.returncode == 1 and done.stderr.startswith("ModelError: cannot read the model")
    assert "Traceback" not in done.stderr
