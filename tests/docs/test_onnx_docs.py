"""The pages about ONNX say what the code does: operators, and every program of docs/onnx.md."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.onnx
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_operators_is_up_to_date() -> None:
    module, stored = generator(), (DOCS / "onnx-operators.md").read_text()
    if module.of_another_version(stored):
        pytest.skip("the page was made with another version of onnx")
    assert module.onnx_operators() == stored, "run make docs"


def test_rows_say_where_operators_run() -> None:
    rows = {(r[0], version): r[2:] for line in (DOCS / "onnx-operators.md").read_text().splitlines()
            if (r := [c.strip() for c in line.strip("|").split("|")])[1:]
            for version in r[1].split(", ")}
    assert rows["Conv", "11"][0] == "compiled"
    assert rows["Shape", "15"][0] == "compiled"
    assert rows["Loop", "16"][0] == "compiled"
    assert rows["Unique", "11"][0] == "host"
    assert rows["SequenceMap", "17"][0] == "function"
    assert rows["ImageDecoder", "20"][0] == "reference"
    assert rows["ZipMap", "1"][0] == "host"


def test_programs_in_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from onnx_models import bert

    tiny = bert(layers=1, hidden=16, heads=2, vocabulary=50, positions=64, batch="batch",
                sequence="sequence")
    (tmp_path / "model.onnx").write_bytes(tiny.SerializeToString())
    programs = re.findall(r"```python\n(.*?)```", (DOCS / "onnx.md").read_text(), re.DOTALL)
    assert len(programs) >= 4
    scope: dict[str, Any] = {"__name__": "guide"}
    for program in programs:
        exec(compile(program, "docs/onnx.md", "exec"), scope)
    assert (tmp_path / "model.tzx").exists() and (tmp_path / "opt.onnx").exists()
    sys.modules.pop("onnx_models", None)
