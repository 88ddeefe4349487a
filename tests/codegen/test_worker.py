"""Object code from another process: the same as ours, with its errors, and never needed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm import jit, worker
from terrazzo.errors import CodegenError

TEXT = "define i64 @answer() {\n  ret i64 42\n}\n"


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[worker.Worker]:
    monkeypatch.delitem(sys.modules, "llvmlite.binding", raising=False)
    with worker.elsewhere():
        found = worker._current.get()
        assert found is not None
        yield found
    assert found.process.returncode is not None


def test_the_same_code(elsewhere: worker.Worker) -> None:
    theirs = jit.compile_object(TEXT, host())
    assert "llvmlite.binding" not in sys.modules
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "compiled_elsewhere", lambda *args: None)
        assert jit.compile_object(TEXT, host()) == theirs


def test_errors_come_back(elsewhere: worker.Worker) -> None:
    with pytest.raises(CodegenError, match="cannot parse the generated IR, line 2"):
        jit.compile_object("define i64 @answer() {\n  nonsense\n}\n", host())
    assert jit.compile_object(TEXT, host())


def test_a_process_that_died_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "llvmlite.binding", raising=False)
    with worker.elsewhere():
        found = worker._current.get()
        assert found is not None
        found.process.kill()
        found.process.wait()
        assert jit.compile_object(TEXT, host())[:4] == b"\x7fELF"


def test_where_llvm_is_loaded_nobody_else_is_asked() -> None:
    import llvmlite.binding  # noqa: F401

    with worker.elsewhere():
        assert worker._current.get() is None


def test_a_session_that_compiles_never_loads_llvm(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    program = """
import sys
import numpy as np
from onnx import TensorProto, helper
x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])
graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
import terrazzo.ort as ort
session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
a = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
assert (session.run(None, {"x": a})[0] == np.maximum(a, 0)).all()
assert "llvmlite.binding" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120,
                   env={**os.environ, "TZ_CACHE_DIR": str(tmp_path)})


def test_the_other_process_loads_what_it_needs_alone() -> None:
    """Starting it takes as long as its imports do, and small models wait for it."""
    report = worker._PROGRAM.replace("serve()", "prepare()").replace(
        "import serve", "import prepare") + "print(*sys.modules)"
    package = str(Path(worker.__file__).parents[3])
    finished = subprocess.run(
        [sys.executable, "-S", "-c", report, package], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, timeout=60)
    loaded = set(finished.stdout.split())
    ours = {name for name in loaded if name.startswith("terrazzo.")}
    assert "llvmlite.binding" in loaded
    assert ours == {
        "terrazzo.chips", "terrazzo.chips.cpu", "terrazzo.chips.cpu.llvm", "terrazzo.errors",
        "terrazzo.chips.cpu.llvm.compile", "terrazzo.chips.cpu.llvm.server"}
    assert not loaded & {"numpy", "onnx", "torch", "logging", "subprocess"}
