"""README's programs run as they stand, and print what it says they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import terrazzo as tz

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
# Where installed packages are found otherwise, and as on a machine without a GPU.
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_DEFAULT_BACKEND": "cpu",
               "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}


def run(program: str, folder: Path, timeout: float = 280) -> str:
    """What a program prints that was pasted into a file of its own."""
    file = folder / "pasted.py"
    file.write_text(program)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, cwd=folder,
                          timeout=timeout, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_programs() -> None:
    assert len(PROGRAMS) == 4 and "@tz.op" in PROGRAMS[0]


@pytest.mark.torch
def test_the_example(tmp_path: Path) -> None:
    quick = PROGRAMS[0].replace("gelu.verify()", 'gelu.verify(dtypes=["float32"], kinds=["odd"])')
    quick = quick.replace("gelu.bench(x)", "gelu.bench(x, torch=False, rounds=1)")
    assert quick.count('kinds=["odd"]') == quick.count("rounds=1") == 1
    said = run(quick, tmp_path)
    assert "kernel k_multiply(x0: f32[1048576]" in said
    assert "gelu: every level agrees" in said and "gelu(f32[1024, 1024])" in said


@pytest.mark.slow
@pytest.mark.torch
def test_the_example_as_it_stands(tmp_path: Path) -> None:
    said = run(PROGRAMS[0], tmp_path)
    assert "torch eager" in said and "bfloat16" in said


def test_the_table_of_bench_is_what_bench_prints() -> None:
    """Times are of some machine; what stands around them is not."""
    shown = TEXT[TEXT.index("`gelu.bench(x)` prints"):].split("```")[1]
    made = tz.op(lambda x: x * x, name="test_readme_square").bench(
        np.ones((4, 4), np.float32), rounds=1, torch=False)

    def words(text: str) -> set[str]:
        return set(re.sub(r"[\d.,x%]+|[^\w/ ]", " ", text).split())

    assert words(str(made)) - words(shown) <= {"test_readme_square", "torch", "was", "not",
                                               "asked", "for"}


def test_the_programs_of_the_language(tmp_path: Path) -> None:
    """One after the other, as they are read."""
    text = (ROOT / "docs" / "language.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(programs) >= 3
    checks = """
x = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
assert Layer(np.ones((4, 4), np.float32)).forward(x, scale=2.0).shape == (3, 4)
assert tz.grad(lambda x: tz.sum(clipped(x, 1.0)))(x).sum() == (np.abs(x) < 1).sum()
assert scaled(x).shape == x.shape
"""
    run("\n".join(programs) + checks, tmp_path)


@pytest.mark.onnx
def test_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])])
    (tmp_path / "model.onnx").write_bytes(helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString())
    given = "import numpy as np\nx = np.ones((2, 4), np.float32)\n"
    assert run(given + PROGRAMS[1] + "print(outputs[0].shape)", tmp_path) == "(2, 4)\n"


@pytest.mark.torch
def test_pytorch(tmp_path: Path) -> None:
    checks = ("torch.testing.assert_close(torch.from_numpy(y), model(x).detach())\n"
              "torch.testing.assert_close(fast(x), model(x))\n"
              "torch.testing.assert_close(op(x, 2.0), 2 * torch.relu(x) ** 2)")
    assert "0 call(s) of torch in between" in run(PROGRAMS[2] + checks, tmp_path)


@pytest.mark.torch
@pytest.mark.triton
def test_a_kernel_of_triton(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    run(PROGRAMS[3], tmp_path)
