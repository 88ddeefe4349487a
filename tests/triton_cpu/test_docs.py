"""docs/triton-cpu.md says what the backend does: its tables and its programs."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.triton
DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "triton-cpu.md").read_text()


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_tables_are_up_to_date() -> None:
    generator = load("docs_generate", DOCS / "generate.py")
    if generator.of_another_version(PAGE):
        pytest.skip("the page was made with another version of Triton")
    assert generator.triton_cpu() == PAGE, "run make docs"


def test_every_function_of_the_language_is_tried() -> None:
    language = load("triton_language", DOCS / "triton_language.py")
    assert language.forgotten() == []
    assert len(language.kernels()) > 100


def test_programs_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert programs
    for number, program in enumerate(programs):
        path = tmp_path / f"program_{number}.py"  # Triton reads a kernel's source from its file
        path.write_text(program)
        load(f"triton_docs_{number}", path)
    assert "kernel add(x: f32[]" in capsys.readouterr().out


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))
    assert links and all((DOCS / link).exists() for link in links)


def test_limits_are_those_of_the_code() -> None:
    from terrazzo.triton_cpu.launch.entry import MOST_WAITING

    assert f"up to {MOST_WAITING} programs" in PAGE
