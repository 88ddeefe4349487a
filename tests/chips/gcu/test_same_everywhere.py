"""Modelled cycles are the chip's: processes that see other processors compile to the same ones."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from terrazzo.chips.cpu.description import host
from terrazzo.chips.gcu.build import compiler
from terrazzo.errors import MissingDependency

try:
    compiler()
except MissingDependency as missing:  # the runtime library is built by one
    pytest.skip(str(missing), allow_module_level=True)


def started(bits: int, threads: int) -> subprocess.Popen[str]:
    given = ["torch"] if importlib.util.find_spec("torch") else []
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("cycles.py")), *given],
        stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TZ_VECTOR_BITS": str(bits), "TZ_THREADS": str(threads),
             "GCU_THREADS": str(threads), "TZ_TORCH_DEVICE": "gcu"})


def test_cycles_do_not_hang_on_the_processor() -> None:
    widest = host(0).vector_bits
    if widest < 256:
        pytest.skip("vectors have one width here")
    answers = []
    for process in (started(widest, 1), started(widest // 2, 3)):
        text, _ = process.communicate(timeout=600)
        assert process.returncode == 0
        answers.append(json.loads(text))
    one, other = answers
    kinds = {name.split()[0] for name in one}
    assert kinds == {"own", *(k for k in ("triton", "torch") if importlib.util.find_spec(k))}
    assert min(one.values()) > 0
    assert one == other
