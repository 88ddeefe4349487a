"""A process that runs what was compiled before does without LLVM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import terrazzo.errors

OPERATOR = """
y = terrazzo.softmax(terrazzo.gelu(x) @ x)
"""
SAVED = """
path = os.path.join(os.environ["TZ_CACHE_DIR"], "saved.tzx")
if not os.path.exists(path):
    graph, _ = trace(lambda x: terrazzo.tanh(x) @ x, [TensorType((40, 40), terrazzo.float32)])
    compile_graph(graph).save(path)
y = Executable.load(path)(x)
"""
MODEL = """
import onnx
from onnx import TensorProto, helper
weight = helper.make_tensor("w", TensorProto.FLOAT, (40, 30), [i % 7 for i in range(1200)])
nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
given = helper.make_tensor_value_info("x", TensorProto.FLOAT, (40, 40))
result = helper.make_tensor_value_info("y", TensorProto.FLOAT, (40, 30))
graph = helper.make_graph(nodes, "small", [given], [result], [weight])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
from terrazzo.session import Session
y = Session(model).run({"x": x})[0]
"""
PROGRAM = """
import json, os, sys
import numpy as np
import terrazzo
from terrazzo.chips.cpu.description import host
from terrazzo.compiler.driver import compile_graph
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace
from terrazzo.runtime.executable import Executable
x = np.linspace(-2, 2, 1600, dtype=np.float32).reshape(40, 40)
{run}
llvm = "llvmlite" in sys.modules
print(json.dumps(dict(llvm=llvm, y=y.tobytes().hex(), chip=host().fingerprint)))
"""


def run(program: str, folder: Path, **variables: str) -> dict[str, Any]:
    source = str(Path(terrazzo.errors.__file__).parents[1])
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(run=program)], capture_output=True, text=True,
        timeout=120, env={**os.environ, "PYTHONPATH": source, "TZ_CACHE_DIR": str(folder),
                          **variables})
    assert finished.returncode == 0, finished.stderr
    return dict(json.loads(finished.stdout))


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64",
                    reason="code of other systems is linked by LLVM")
@pytest.mark.parametrize("program", [
    pytest.param(OPERATOR, id="operator"),
    pytest.param(SAVED, id="saved"),
    pytest.param(MODEL, id="model", marks=pytest.mark.onnx),
])
def test_llvm_is_not_imported_for_code_that_is_there(program: str, tmp_path: Path) -> None:
    first, second = run(program, tmp_path), run(program, tmp_path)
    assert first["llvm"] == (program is not MODEL), "sessions compile in another process"
    assert not second["llvm"]
    assert second["y"] == first["y"]
    without_cache = run(program, tmp_path, TZ_CACHE="0")
    assert without_cache["llvm"] == (program is OPERATOR), "what is there is loaded, not compiled"
    assert without_cache["y"] == first["y"]
    assert first["chip"] == second["chip"] == without_cache["chip"]
