"""PyTorch's own samples on a simulated GPU, by the benchmark that runs them on one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from terrazzo.chips.cuda.simulate import Simulator
from terrazzo.knobs import knobs

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("expecttest")  # which torch.testing imports
FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))
import in_pieces  # noqa: E402
import torch_operators  # noqa: E402
from places import CPU, Place  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.triton]
SOME = ("^(add|addmm|cat|gather|log_softmax|max|mm|permute|sum|std|where|nn.functional.(gelu|"
        "conv2d|embedding|layer_norm|scaled_dot_product_attention|avg_pool2d|cross_entropy))")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    found: list[int] = []
    launch = Simulator.launch

    def noting(self: Any, *args: Any) -> None:
        found.append(1)
        launch(self, *args)

    monkeypatch.setattr(Simulator, "launch", noting)
    with knobs.override(cuda_simulate=True, chip="cuda"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield found


@pytest.mark.parametrize(("name", "kind"), [("addmm", "float32"), ("std", "bfloat16")])
def test_a_sample_is_run_by_kernels_and_right(launches: list[int], name: str, kind: str) -> None:
    dtype = getattr(torch, kind)
    known = torch_operators.operators(dtype)
    row = torch_operators.measure(name, known[name], dtype, 1, place=Place("simulated"))
    assert row["samples"] == 1 and not row["wrong"] and not row["torch"], row
    assert launches


def test_arguments_go_to_a_gpu() -> None:
    place = Place("cuda")
    assert place.given("cpu") == place.given(torch.device("cpu")) == torch.device("cuda")
    assert place.given("sum") == "sum" and CPU.given("cpu") == "cpu"
    assert Place("simulated").environment["TZ_CHIP"] == "cuda" and not place.environment


def test_what_no_time_is_left_for_is_not_begun() -> None:
    assert in_pieces.outcomes(["false"], ["a", "b"], 1, 1, 9.0, end=time.monotonic() - 1) == {}


def test_what_a_process_found_is_kept_when_it_ends(tmp_path: Path) -> None:
    """A command that is stopped loses what is under way, and nothing else."""
    script = tmp_path / "finds.py"
    script.write_text("import json, sys\n"
                      "names = sys.argv[sys.argv.index('--names') + 1:]\n"
                      "file = open(sys.argv[sys.argv.index('--out') + 1], 'w')\n"
                      "file.writelines(json.dumps({'name': n}) + '\\n' for n in names)\n")
    kept: list[list[str]] = []
    found = in_pieces.outcomes([sys.executable, str(script)], ["a", "b", "c", "d"], 1, 2, 60.0,
                               keep=lambda part: kept.append([row["name"] for row in part]))
    assert sorted(kept) == [["a", "c"], ["b", "d"]] and sorted(found) == ["a", "b", "c", "d"]


def test_what_was_found_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "found.jsonl"
    assert torch_operators.kept(None) == torch_operators.kept(file) == {}
    file.write_text('{"name": "add@0:60", "samples": 2}\n')
    assert torch_operators.kept(file) == {"add@0:60": {"name": "add@0:60", "samples": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_some_operators(kind: str) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "torch_operators.py"), "--place", "simulated", "--dtype",
         kind, "--only", SOME, "--samples", "2", "--jobs", "1"], capture_output=True, text=True,
        env={**os.environ}, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split(" ")[0]) > 20, done.stdout
