"""docs/new-chip.md: its commands, its description and its programs, as they are read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "new-chip.md").read_text()
BLOCKS = re.findall(r"```(console|toml|python)\n(.*?)```", TEXT, re.DOTALL)
pytestmark = [pytest.mark.torch, pytest.mark.triton]
BEGINNING = """
from terrazzo.torch_device import register, wanted  # where terrazzo is not installed
from terrazzo.triton_gcu.activate import activate
register(wanted())
activate()
"""


def ran(words: list[str], folder: Path, **variables: str) -> str:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=folder,
                          timeout=500, env={**os.environ, "PYTHONPATH": path, **variables})
    assert done.returncode == 0, done.stderr
    return done.stdout


def typed(console: str, folder: Path) -> int:
    """Run what follows a $, and find the lines that follow it in what it prints."""
    count = 0
    for part in filter(None, console.split("$ tz ")):
        command, *shown = part.strip().split("\n")
        said = ran(["-m", "terrazzo", *command.split()], folder)
        assert all(line in said for line in shown), said
        count += 1
    return count


def changed(file: Path, keys: str) -> None:
    """Write keys of a table of TOML over those that a file has."""
    text, section = file.read_text(), ""
    for line in filter(None, keys.split("\n")):
        if line.startswith("["):
            section = line
            continue
        key = line.split(" = ")[0]
        head, found, rest = text.partition(f"\n{section}")
        assert found, section
        new, count = re.subn(rf"(?m)^{key} = .*$", line, rest, count=1)
        assert count == 1, line
        text = head + found + new
    file.write_text(text)


def test_the_day(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from terrazzo.torch_device.build import is_whole

    if not is_whole():
        pytest.skip("Inductor does not know the device before torch 2.13")
    assert [kind for kind, _ in BLOCKS[:3]] == ["console", "toml", "console"]
    commands = 0
    for kind, block in BLOCKS:
        if kind == "console":
            commands += typed(block, tmp_path)
        elif kind == "toml":
            changed(tmp_path / "mychip.toml", block)
    assert commands == 2
    programs = [block for kind, block in BLOCKS if kind == "python"]
    assert len(programs) >= 5 and all("assert" in program for program in programs)
    (tmp_path / "day.py").write_text("\n\n".join([BEGINNING, *programs]))
    said = ran(["day.py"], tmp_path, TZ_TORCH_DEVICE="mychip.toml", TRITON_DEFAULT_BACKEND="gcu",
               TORCHINDUCTOR_COMPILE_THREADS="1")
    assert said.count("of the roofline") == 3 and "us on mychip, modelled" in said
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "kernel" for event in events) > 10


@pytest.mark.slow
def test_the_pictures_are_up_to_date(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    ran([str(ROOT / "docs" / "gcu_pictures.py"), "made"], tmp_path, TZ_TORCH_DEVICE="gcu")
    made = {file.name: file.read_text() for file in (tmp_path / "made").glob("*.svg")}
    kept = {file.name: file.read_text() for file in (ROOT / "docs" / "pictures").glob("gcu-*.svg")}
    assert made == kept and len(made) == 3, "run python docs/gcu_pictures.py"
