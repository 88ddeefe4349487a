"""Benchmarks of a GPU run in simulation from end to end, go on after a failure, and say it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = [pytest.mark.torch, pytest.mark.triton]

FOLDER = Path(__file__).parents[2] / "benchmarks"


def printed(script: str, *arguments: str, **environment: str) -> list[str]:
    """The lines of a benchmark in simulation, in a process of its own: it changes settings."""
    done = subprocess.run([sys.executable, str(FOLDER / script), "--simulate", *arguments],
                          env={**os.environ, **environment}, capture_output=True, text=True,
                          timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_some_parts() -> None:
    lines = printed("gpu.py", "transposes", "fp8", "calls", "--only", "4")
    rows = [line for line in lines if ":  " in line]
    assert [line.split(" ")[0] for line in rows] == ["permute"] * 4 + ["x"] + ["call"] * 4
    assert sum(line.startswith(("a transposes:", "b fp8:", "e calls:")) for line in lines) == 3


@pytest.mark.slow
def test_every_part(tmp_path: Path) -> None:
    parts = ["rows", "sums", "transposes", "products", "fp8", "attention", "gradient", "compiling",
             "calls", "convolutions", "graphs", "tune"]
    lines = printed("gpu.py", *parts, TZ_TUNE_DB=str(tmp_path / "choices.json"))
    rows = [line for line in lines if ":  " in line]
    assert len(rows) > 90 and not any("FAILED" in line for line in lines)


@pytest.mark.slow
@pytest.mark.onnx
def test_every_model() -> None:
    """Both precisions are right by torch.compile and by terrazzo.ort, with and without graphs."""
    pytest.importorskip("transformers")
    lines = printed("gpu_models.py", "--batches", "2")
    assert sum("first call" in line for line in lines) == 4 * 2 * 5
    assert any(line.startswith("d torch.compile: ") for line in lines)


def test_one_command_begins_nothing_without_time(tmp_path: Path) -> None:
    lines = printed("gpu_all.py", "--folder", str(tmp_path), "--seconds", "1")
    assert lines[1:] == [f"{step}: not begun, no time left" for step in (
        "kernels", "models", "operators, float32", "operators, bfloat16", "models by max-autotune")]


# ---------------------------------------------------------------- the report
@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpu_report

    yield gpu_report
    sys.modules.pop("gpu_report")


def test_a_row_that_fails_is_told_and_others_go_on(report: Any, tmp_path: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    figure = report.Figure

    def fails() -> Any:
        raise AssertionError("off by 3")

    kept = tmp_path / "rows.jsonl"
    first = report.Report(60, kept)
    first.measure("one", lambda: ("fine", [figure("a", "copies", 0.97, 0.95)]))
    first.measure("two", fails)
    first.measure("three", lambda: ("slow", [figure("a", "copies", 0.5, 0.95),
                                             figure("a", "s", 3.0, 1.0, most=True)]))
    first.mean("a", "copies", 0.9)
    assert first.conclude() == 1
    text = capsys.readouterr().out
    assert "two: FAILED, AssertionError: off by 3" in text and "failed: 1: two" in text
    assert "a: 1 of 4 targets reached" in text and "three: s 3, short by 2" in text
    assert "mean of 2 rows, a, copies" in text

    again = report.Report(60, kept)  # goes on where the first one ended
    again.measure("one", fails)
    again.measure("two", lambda: ("", [figure("a", "copies", 0.96, 0.95)]))
    assert again.conclude() == 0 and set(again.figures) == {"one", "two", "three"}


def test_nothing_measured_is_wrong(report: Any, capsys: pytest.CaptureFixture[str]) -> None:
    late = report.Report(-1)
    late.measure("one", lambda: ("", ()))
    assert late.conclude() == 1
    assert "not measured, no time left: 1: one" in capsys.readouterr().out
