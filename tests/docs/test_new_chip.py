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


def run(words: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=folder,
                          timeout=500, env={**os.environ, "PYTHONPATH": path, **variables})


def ran(words: list[str], folder: Path, **variables: str) -> str:
    done = run(words, folder, **variables)
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


# ---------------------------------------------------------------- when something goes wrong
MISTAKES = dict(re.findall(r"(?m)^\| (.*?) \| (.*) \|$", TEXT.partition("## When something")[2]))
KERNEL = """
import torch, triton, triton.language as tl
from terrazzo.torch_device import register, wanted  # where terrazzo is not installed
register(wanted())

@triton.jit
def double(x, out):
    i = tl.program_id(0) * 64 + tl.arange(0, 64)
    tl.store(out + i, 2 * tl.load(x + i))
"""
CHOSEN = "from terrazzo.triton_gcu.activate import activate; activate()\n"
HERE = "from terrazzo.triton_cpu.activate import activate; activate()\n"
LAUNCH = """
import ctypes
x = torch.ones(64 * 57, device="gcu")
image = double[(57,)](x, x).asm["gcuimg"]  # by Triton's launcher it runs
lib = ctypes.CDLL(tz.gcu.library_path())
lib.gcuGetLastErrorMessage.restype = ctypes.c_char_p
module, function = ctypes.c_void_p(), ctypes.c_void_p()
arguments = (ctypes.c_int64 * 2)(x.data_ptr(), x.data_ptr())
assert lib.gcuModuleLoadData(ctypes.byref(module), image, ctypes.c_size_t(len(image))) == 0
assert lib.gcuModuleGetFunction(ctypes.byref(function), module, b"double") == 0
assert lib.gcuLaunchKernel(function, 48, 1, 1, arguments, 2, None) == 0
assert lib.gcuLaunchKernel(function, 57, 1, 1, arguments, 2, None) != 0
print(lib.gcuGetLastErrorMessage().decode())
torch.gcu.synchronize()
assert x.view(57, 64)[:, 0].tolist() == [4.0] * 48 + [2.0] * 9
"""


def test_mistakes(tmp_path: Path) -> None:
    """Each is made, and what the table quotes is read."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    ran(["-m", "terrazzo", "chip", "new", "--from", "gcu", "mychip.toml"], tmp_path)
    misspelt = (tmp_path / "mychip.toml").read_text().replace("vector_bits", "vektor_bits")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mychip.toml").write_text(misspelt)

    def said(code: str, **variables: str) -> str:
        env = {"TZ_TORCH_DEVICE": "mychip.toml", **variables}
        (tmp_path / "program.py").write_text(code)
        done = run(["program.py"], tmp_path, **env)
        return done.stdout + done.stderr

    none = {"TZ_CACHE_DIR": str(tmp_path / "cache"), "CC": "no-cc", "CXX": "no-cxx"}
    device = "import torch; from terrazzo.torch_device import register, wanted; register(wanted())"
    made = {
        "a key": said("import terrazzo as tz; tz.gcu.description('other/mychip.toml')"),
        "`device=": said(f"{device}; torch.ones(2, device='mychip')", TZ_TORCH_DEVICE="gcu"),
        "a Triton kernel without": said(
            KERNEL + HERE + "x = torch.ones(64, device='mychip'); double[(1,)](x, x)"),
        "a tensor of the CPU": said(
            KERNEL + CHOSEN + "x = torch.ones(64); double[(1,)](x, x.to('mychip'))"),
        "no compiler": said("import terrazzo as tz; tz.gcu.library_path()", **none)
            + said(f"{device}; torch.ones(2, device='mychip')", **none),
        "a device too many": said(f"{device}; torch.ones(2, device='mychip:9')"),
        "gcu: a launch of 57": said(
            KERNEL + CHOSEN + "import terrazzo as tz\n" + LAUNCH, TZ_TORCH_DEVICE="gcu"),
    }
    rows = {row: read for row, read in MISTAKES.items() if row not in ("what you did", "---")}
    assert len(rows) == len(made)
    for begins, text in made.items():
        (read,) = (read for row, read in rows.items() if row.startswith(begins))
        quoted = re.findall(r"`([^`]+)`", read)
        assert quoted and all(part in text for part in quoted), f"{begins}: {text}"
    assert "AssertionError" not in made["gcu: a launch of 57"]
