"""The programs of docs/te.md run, and what they assert holds."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "te.md"


def test_programs_of_the_page() -> None:
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(programs) >= 2
    scope: dict[str, object] = {}
    for program in programs:  # each goes on where the one before it ended
        assert "assert" in program
        exec(compile(program, str(PAGE), "exec"), scope)
