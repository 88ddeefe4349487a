"""What a shell and a program see of virtual chips: tz gcu, tz chip, terrazzo.gcu."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import terrazzo as tz
from terrazzo.chips import registry
from terrazzo.chips.gcu.build import compiler
from terrazzo.errors import MissingDependency
from terrazzo.knobs import knobs
from terrazzo.tools.cli.commands import app

try:
    compiler()
    built = pytest.mark.skipif(False, reason="")
except MissingDependency as missing:
    built = pytest.mark.skip(reason=str(missing))

PROGRAM = """
import sys
import numpy as np, terrazzo as tz
with tz.chip("gcu"):
    print(sys.argv[1], tz.softmax(np.zeros((4, 8), np.float32)).sum())
"""


def test_info_says_what_the_chip_is() -> None:
    said = CliRunner().invoke(app, ["gcu", "info"]).output
    assert "48 units" in said and "at most 48 programs or a multiple of 48" in said


@built
def test_a_program_is_traced(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ran = subprocess.run([sys.executable, "-m", "terrazzo", "gcu", "trace", "program.py", "word",
                          "-o", "t.json"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "word 4.0" in ran.stdout and "us on gcu, modelled" in ran.stdout
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    assert len(kernels) == 1 and kernels[0]["dur"] > 0 and kernels[0]["args"]["bytes stored"] == 128
    assert sum(e.get("cat") == "copy" for e in events) == 2


@built
def test_a_trace_inside_another_takes_nothing_from_it() -> None:
    """As where a program that traces itself is run by `tz gcu trace`."""
    x = np.ones((4, 8), np.float32)
    with tz.chip("gcu"):
        with tz.gcu.trace() as whole:
            tz.relu(x)
            with tz.gcu.trace() as first:
                tz.relu(x)
            with pytest.raises(ZeroDivisionError), tz.gcu.trace() as failed:
                tz.relu(x)
                raise ZeroDivisionError
            tz.relu(x)
        with tz.gcu.trace() as alone:
            tz.relu(x)
    names = [record.name for record in alone.records]
    assert len(names) == 3  # there, relu, back
    assert [record.name for record in first.records] == names and failed.records == []
    assert [record.name for record in whole.records] == 4 * names


@built
def test_the_library_by_ctypes() -> None:
    loaded, count = ctypes.CDLL(tz.gcu.library_path()), ctypes.c_int()
    assert loaded.gcuGetErrorName and Path(tz.gcu.header_path()).is_file()
    assert loaded.gcuGetDeviceCount(None) != 0
    assert loaded.gcuGetDeviceCount(ctypes.byref(count)) == 0 and count.value >= 1


@built
def test_a_chip_of_ones_own(tmp_path: Path) -> None:
    """In a process of its own: a process has one chip's devices."""
    target = tmp_path / "mychip.toml"
    assert CliRunner().invoke(app, ["chip", "new", str(target)]).exit_code == 0
    target.write_text(target.read_text().replace("count = 48", "count = 6"))
    program = ("import numpy as np, terrazzo as tz\n"
               "with tz.chip('mychip') as chip:\n"
               "    y = tz.relu(np.full((3, 4), -1, np.float32))\n"
               "    print(chip.spec.cores, float(y.sum()), 'mychip' in tz.chips())\n")
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                         env={**os.environ, "TZ_CHIP_FILES": str(tmp_path)})
    assert ran.stdout.split() == ["6", "0.0", "True"], ran.stderr


@built
@pytest.mark.torch
def test_a_program_runs_on_a_chip_of_ones_own(tmp_path: Path) -> None:
    """By its file alone: PyTorch's device has its name, and its operators are compiled for it."""
    pytest.importorskip("torch")
    target = tmp_path / "mychip.toml"
    assert CliRunner().invoke(app, ["chip", "new", str(target)]).exit_code == 0
    target.write_text(target.read_text().replace("count = 48", "count = 6"))
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "from terrazzo.torch_device import register, wanted\n"
        "register(wanted())\n"
        "x = torch.ones(1000, device='mychip') + 1\n"
        "print(float(x.sum()), torch.mychip.get_device_properties(0).multi_processor_count,\n"
        "      torch.mychip.fallbacks())\n")
    ran = subprocess.run([sys.executable, "-m", "terrazzo", "gcu", "run", "--chip", "mychip.toml",
                          "program.py"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "2000.0 6 {}" in ran.stdout and "us on mychip, modelled" in ran.stdout


def test_mistakes_have_answers(tmp_path: Path) -> None:
    for words, said in ((["gcu", "info", "tpu"], "there are gcu"),
                        (["gcu", "run", "nothing.py"], "there is no file"),
                        (["gcu", "run", "--chip", "tpu", __file__], "by the path of the file"),
                        (["chip", "new", str(tmp_path / "cuda.toml")], "cannot be 'cuda'"),
                        (["chip", "new", str(tmp_path / "mine")], "is no .toml")):
        failed = CliRunner().invoke(app, words)
        assert failed.exit_code and said in str(failed.exception), words
    with knobs.override(chip_files=str(tmp_path)):
        assert "gcu" in registry.names()
