"""The run of a library's own tests tells what its tests have shown from what they have not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import terrazzo.errors

pytestmark = [pytest.mark.triton, pytest.mark.torch]

TOOL = Path(__file__).parents[2] / "benchmarks" / "triton_libraries.py"
TESTS = """
import pytest, torch, triton, triton.language as tl

@triton.jit
def double(x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i) * 2)

@pytest.mark.parametrize("n", range(40))
def test_kernel(n):
    x = torch.full((16,), float(n), device="cuda")
    double[(1,)](x, BLOCK=16)
    assert x[0] == 2 * n

def test_operator_of_a_gpu():
    def neg(x):
        assert x.is_cuda
        out = torch.empty(x.shape, device="cuda").copy_(x)
        double[(1,)](out, BLOCK=16)
        return out

    library = torch.library.Library("aten", "IMPL")
    library.impl("neg", neg, "CUDA")
    assert torch.neg(torch.ones(16, device="cuda"))[0] == 2

def test_without_a_kernel(): assert torch.cuda.is_available()
def test_wants_a_gpu(): raise RuntimeError("no GPU here")
def test_wrong():
    double[(1,)](torch.ones(16), BLOCK=16)
    assert 1 == 2
def test_skipped(): pytest.skip("not today")
"""
MANY = "".join(f"def test_{n}(): pass\n" for n in range(45))


def test_outcomes_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "test_mixed.py").write_text(TESTS)
    found = tmp_path / "found.json"
    source = str(Path(terrazzo.errors.__file__).parents[1])
    folders = os.pathsep.join((source, os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, str(TOOL), str(tmp_path), "--each", "3", "--stand-in", "--json",
         str(found)], capture_output=True, text=True, timeout=300, check=True,
        env={**os.environ, "PYTHONPATH": folders, "TRITON_CACHE_DIR": str(tmp_path / "cache")})
    (file,) = json.loads(found.read_text()).values()
    assert {name.rpartition("::")[2]: outcome for name, outcome in file["outcomes"].items()} == {
        **{f"test_kernel[{n}]": "passed" for n in (0, 20, 39)},
        "test_operator_of_a_gpu": "passed", "test_without_a_kernel": "passed without a kernel",
        "test_wants_a_gpu": "wants a GPU", "test_wrong": "failed", "test_skipped": "skipped"}
    assert "| test_mixed.py | 45 | 8 | 4 | 1 | 1 | 1 | 1 |" in done.stdout
    assert "failed: test_mixed.py::test_wrong: assert 1 == 2" in done.stdout


def test_long_files_run_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOL.parent))
    import triton_libraries

    file = tmp_path / "test_many.py"
    file.write_text(MANY)
    assert triton_libraries.pieces(file) == [(0, 3), (1, 3), (2, 3)]
    names = [f"test_{n}" for n in range(45)]
    kept = []
    for piece in triton_libraries.pieces(file):
        items = [SimpleNamespace(nodeid=name) for name in names]
        triton_libraries.Sampler(1, 60, piece).pytest_collection_modifyitems(items)
        kept.append({"cases": 45, "outcomes": {item.nodeid: "passed" for item in items}})
    whole = triton_libraries.together(kept)
    assert sorted(whole["outcomes"]) == sorted(names) and whole["cases"] == 45
    assert triton_libraries.row("many", [whole]).startswith("| many | 45 | 45 | 45 | 0 |")


def test_time_may_be_up(tmp_path: Path) -> None:
    (tmp_path / "test_many.py").write_text(MANY)
    done = subprocess.run([sys.executable, str(TOOL), str(tmp_path), "--minutes", "0"],
                          capture_output=True, text=True, timeout=300, check=True)
    assert "not begun, or not to the end: test_many.py" in done.stdout
