"""Modelled cycles, written down: every machine that runs the tests shows these same numbers.

They are those of cycles.py, copies of arguments and results included. Whoever changes a kernel, a
schedule or the model of time on purpose accepts the new numbers, and reads what changed, by

    python tests/chips/gcu/test_golden_cycles.py --accept
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from terrazzo.chips.gcu.build import compiler
from terrazzo.errors import MissingDependency

try:
    compiler()
except MissingDependency as missing:  # the runtime library is built by one
    pytest.skip(str(missing), allow_module_level=True)

GOLDEN = {
    "own add": 17863,
    "own softmax": 11247,
    "own layer norm": 10712,
    "own matmul": 11464,
    "own ragged matmul": 12025,
    "own matmul bfloat16": 9710,
    "own attention": 11671,
    "own causal attention": 15290,
    "own attention bfloat16": 10573,
    "own attention of one query": 22950,
    "own convolution": 9132,
    "own sum of columns": 8367,
    "triton softmax": 4372,
    "triton ragged matmul float32": 4663,
}


def measured() -> dict[str, int]:
    """The cycles of a process of its own: Triton's driver is one for a whole process."""
    ran = subprocess.run([sys.executable, str(Path(__file__).with_name("cycles.py"))],
                         stdout=subprocess.PIPE, text=True, check=True, timeout=600,
                         env={**os.environ, "TZ_TORCH_DEVICE": "gcu"})  # which Triton compiles for
    found: dict[str, int] = json.loads(ran.stdout)
    return found


def test_cycles_are_those_that_are_written_down() -> None:
    found = measured()
    expected = {name: cycles for name, cycles in GOLDEN.items()
                if name.startswith("own ") or importlib.util.find_spec("triton")}
    assert len(expected) >= 12
    assert {name: found[name] for name in expected} == expected


def accept() -> None:
    """Write the numbers of today into this file."""
    here, found = Path(__file__), measured()
    text = here.read_text()
    for name, cycles in GOLDEN.items():
        if name in found and found[name] != cycles:
            print(f"{name}: {cycles} -> {found[name]}")
            text = re.sub(rf'"{re.escape(name)}": \d+,', f'"{name}": {found[name]},', text)
    here.write_text(text)


if __name__ == "__main__":
    if sys.argv[1:] != ["--accept"]:
        sys.exit(__doc__)
    accept()
