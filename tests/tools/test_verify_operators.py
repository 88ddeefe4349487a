"""A slice of `make verify`: some operators of the table on a case each, every level compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent)]

from verify_operators import LEVELS, Verified, cases, names, page, verify  # noqa: E402

SLICE = [name for i, name in enumerate(names()) if i % 12 == 5]
SPECIAL = ["arange", "bitcast", "compress_padded", "conj", "non_max_suppression_padded", "sort"]


def test_every_operator_of_the_table_has_cases() -> None:
    assert len(names()) > 300 and all(map(cases, names()))


@pytest.mark.parametrize("name", [*SLICE, *SPECIAL])
def test_every_level_that_an_operator_has_is_compared(name: str) -> None:
    found = verify(name, kinds=("given",), most=1)
    assert not found.wrong and found.cases == 1
    assert not found.empty(), found.missing


def test_the_page_counts_and_names_what_is_missing() -> None:
    one = Verified("exp", dict.fromkeys(LEVELS, 1500), open=2, cases=1)
    other = Verified("sort", dict.fromkeys(LEVELS, 10), cases=2, missing={"expr": "made of loops"})
    other.elements["expr"] = 0
    assert other.empty() == [] and Verified("exp").empty() == list(LEVELS)
    text = page([one, other], "float32")
    assert "| **all** | 2 | 3 | 1,510 | 1,500 | 1,510 | 1,510 | 1,510 | 2 |" in text
    assert "- expr, made of loops: sort." in text
