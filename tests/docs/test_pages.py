"""Every page: links lead somewhere, files that are named exist, programs run as they are read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
CODE = re.compile(r"```.*?```", re.DOTALL)
# Where installed packages are found otherwise, and as on a machine without a GPU.
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_DEFAULT_BACKEND": "cpu",
               "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}


def prose(page: Path) -> str:
    return CODE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_lead_somewhere() -> None:
    seen = 0
    for page in PAGES:
        for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page)):
            if target.startswith("http"):
                continue
            file, _, anchor = target.partition("#")
            found = page.parent / file if file else page
            assert found.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(found), f"{page.name}: {target}"
            seen += 1
    assert seen > 20


def test_files_that_are_named_exist() -> None:
    bases = [ROOT, *(ROOT / folder for folder in ("src", "src/terrazzo", "docs", "benchmarks"))]
    seen = 0
    for page in PAGES:
        for name in re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|toml))`", prose(page)):
            assert any((base / name).exists() for base in bases), f"{page.name}: {name}"
            seen += 1
    assert seen > 20


@pytest.mark.torch
@pytest.mark.triton
@pytest.mark.parametrize("page", ["triton-cpu.md", "triton-source.md", "how-it-works.md"])
def test_programs_run(page: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert programs
    file = tmp_path / "pasted.py"
    file.write_text("\n".join(programs))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=200,
                          cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
