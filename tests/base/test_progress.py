"""A bar for long compilations: on a terminal, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from terrazzo.base import progress

PROGRAM = """
import numpy as np
import terrazzo as tz
from terrazzo.base import progress
progress.AFTER = {after}
print(float(tz.op(lambda x: tz.softmax(tz.exp(x)))(np.zeros(4, np.float32))[0]))
"""


def compiled(after: float, stderr: int, cache: Path) -> str:
    """Compile a small program in a process of its own; answers what it printed as its result."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(after=after)], stdout=subprocess.PIPE, stderr=stderr,
        env={**os.environ, "TZ_CACHE_DIR": str(cache), "TERM": "xterm"}, check=True,
        text=True).stdout


def on_a_terminal(after: float, cache: Path) -> tuple[str, str]:
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    result = compiled(after, theirs, cache)
    os.set_blocking(ours, False)
    try:
        shown = os.read(ours, 1 << 20).decode()
    except BlockingIOError:
        shown = ""
    os.close(theirs)
    os.close(ours)
    return result, shown


def test_a_terminal_sees_what_takes_long(tmp_path: Path) -> None:
    result, shown = on_a_terminal(0.0, tmp_path)
    assert result == "0.25\n"
    assert "compiling" in shown


def test_what_is_quick_shows_nothing(tmp_path: Path) -> None:
    assert on_a_terminal(3600.0, tmp_path) == ("0.25\n", "")


def test_a_file_sees_nothing(tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    with log.open("wb") as file:
        assert compiled(0.0, file.fileno(), tmp_path / "cache") == "0.25\n"
    assert log.read_bytes() == b""


def test_saying_without_a_bar_is_free() -> None:
    begin = time.process_time()
    for i in range(10_000):
        progress.doing("kernels", i, 10_000)
    assert time.process_time() - begin < 1.0
