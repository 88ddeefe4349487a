"""TZ_DUMP prints what is compiled: all levels, with control flow, and from a warm cache too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.knobs import DUMP_LEVELS

X = np.linspace(-1, 1, 6, dtype=np.float32)


def plain(x: Any) -> Any:
    return tz.exp(x) * 3


def with_loop(x: Any) -> Any:
    return tz.scan(lambda c, row: (tz.tanh(c * row), ()), np.float32(1), x)[0]


SHOWN = {"graph": "graph ", "canonical": "graph ", "expr": "[", "schedule": "k_", "loop": "kernel ",
         "llvm": "define ", "asm": "ret"}


@pytest.mark.parametrize("function", [plain, with_loop])
@pytest.mark.parametrize("level", DUMP_LEVELS)
def test_every_level_cold_and_warm(function: Any, level: str, tmp_path: Path,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        with tz.knobs.override(cache_dir=str(tmp_path), dump=level):
            tz.jit(function)(X)
        texts.append(capsys.readouterr().out)
    assert SHOWN[level] in texts[0]
    assert len(texts[1].splitlines()) == len(texts[0].splitlines())
    assert any(tmp_path.rglob("*")), "the second time it was in the cache"


def test_loops_show_in_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    with tz.knobs.override(dump="graph"):
        tz.jit(with_loop)(X)
    text = capsys.readouterr().out
    assert "scan(" in text and "= tanh(" in text, "the body is shown too"


def test_nothing_is_printed_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    tz.jit(with_loop)(X)
    assert capsys.readouterr().out == ""
