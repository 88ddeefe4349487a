"""Verifies every operator of the table on the cases of the operator tests, at every level.

    python tests/tools/verify_operators.py [--only exp,softmax] [--types float32] [--write FILE]

It counts the elements that were compared at each level. An operator fails if a level is wrong, or
if a level that it has compared none; which levels it does not have is said with the reason.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1])]

from test_every_operator import MORE, WITHOUT_A_ROW, inputs_of  # noqa: E402
from test_operator_gradients import ROWS, Case  # noqa: E402

import terrazzo as tz  # noqa: E402
from terrazzo.errors import TerrazzoError  # noqa: E402
from terrazzo.graph.ir import OPERATORS, Operator  # noqa: E402
from terrazzo.tools.verify.levels import LEVELS  # noqa: E402

KINDS = ("given",)  # --kinds given,special,odd,symbolic takes several times as long


@dataclass
class Verified:
    """What was compared of one operator."""

    name: str
    elements: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LEVELS, 0))
    open: int = 0
    cases: int = 0
    missing: dict[str, str] = field(default_factory=dict)  # levels that it has not, and why
    wrong: list[str] = field(default_factory=list)

    def empty(self) -> list[str]:
        """Levels at which nothing was compared, though the operator has them."""
        return [level for level in LEVELS
                if not self.elements[level] and level not in self.missing]


def names() -> list[str]:
    """The operators of the table that can be called by themselves."""
    return [op.name for op in OPERATORS.values()
            if op.family and op.family != "user" and op.name not in WITHOUT_A_ROW]


def cases(name: str) -> list[Case]:
    return [*ROWS.get(name, ()), *MORE.get(name, ())]


def verify(name: str, types: Sequence[str] = ("float32",), kinds: Sequence[str] = KINDS,
           most: int | None = None) -> Verified:
    """One operator on its cases, or on the first few of them."""
    op, found = OPERATORS[name], Verified(name)
    for row in cases(name)[:most]:
        arrays = inputs_of(row, np.random.default_rng(7), "float32")
        function = _function(op, row, arrays)
        try:
            report = tz.verify(function, *(a for a in arrays if a is not None), kinds=kinds,
                               dtypes=types if _has_floats(arrays) else None)
        except TerrazzoError as error:
            found.wrong.append(f"{name}: {error}")
            continue
        found.cases += 1
        for level in LEVELS:
            found.elements[level] += report.elements(level)
            found.open += report.open(level)
        for level, _, why in (part for line in report.rows for part in line.left_out):
            found.missing.setdefault(level, why)
    return found


def _function(op: Operator, row: Case, arrays: Sequence[Any]) -> Any:
    def call(*values: Any) -> Any:
        given = iter(values)
        args = [None if a is None else next(given) for a in arrays]
        return row.call(op, *args) if row.call is not None else op(*args, **row.attrs)

    call.__name__ = op.name
    return call


def _has_floats(arrays: Iterable[np.ndarray | None]) -> bool:
    return any(a is not None and a.dtype.kind not in "iub" for a in arrays)


# ---------------------------------------------------------------- what is written
def page(found: Sequence[Verified], settings: str) -> str:
    """The summary: one line a family, and which operators miss which level for what reason."""
    families: dict[str, list[Verified]] = {}
    for one in found:
        families.setdefault(OPERATORS[one.name].family, []).append(one)
    rows = [_line(family, ones) for family, ones in sorted(families.items())]
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in found:
        for level, why in one.missing.items():
            if not one.elements[level]:
                reasons.setdefault((level, _short(why)), []).append(one.name)
    lines = [f"- {level}, {why}: {', '.join(sorted(ones))}."
             for (level, why), ones in sorted(reasons.items())]
    heads = ("family", "operators", "cases", *LEVELS, "open")
    return "\n".join([
        "# Verified", "",
        "Written by `make verify`: elements that were compared at each level, over the cases of",
        f"the operator tests ({settings}). Open are those that no bound says anything of: an",
        "inexact value decides something there. No level that an operator has was left without a",
        "comparison.", "",
        f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1), *rows,
        _line("**all**", found), "", "Levels that operators do not have:", "", *lines, ""])


def _line(name: str, found: Sequence[Verified]) -> str:
    numbers = [len(found), sum(one.cases for one in found),
               *(sum(one.elements[level] for one in found) for level in LEVELS),
               sum(one.open for one in found)]
    return f"| {name} | {' | '.join(f'{n:,}' for n in numbers)} |"


def _short(why: str) -> str:
    return "no gradient" if "has no gradient" in why else why


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="comma-separated names of operators")
    parser.add_argument("--types", default="float32", help="comma-separated types of floats")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated kinds of inputs")
    parser.add_argument("--write", type=Path, help="the file that the summary goes to")
    asked = parser.parse_args()
    started, found = time.perf_counter(), []
    for name in asked.only.split(",") if asked.only else names():
        one = verify(name, asked.types.split(","), asked.kinds.split(","))
        counts = ", ".join(f"{level} {n:,}" for level, n in one.elements.items())
        print(f"{name}: {counts}; open {one.open:,}", flush=True)
        found.append(one)
    wrong = [line for one in found for line in one.wrong]
    wrong += [f"{one.name}: nothing was compared at level {level}"
              for one in found for level in one.empty()]
    text = page(found, f"{asked.types}; inputs {asked.kinds}".replace(",", ", "))
    print(text, *wrong, f"{time.perf_counter() - started:.0f} s", sep="\n")
    if asked.write and not wrong:
        asked.write.write_text(text)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
