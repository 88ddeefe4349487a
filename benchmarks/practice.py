"""Operators as practitioners write them, against torch eager: forward and backward, three types.

    python benchmarks/practice.py                                # all rows, about 20 minutes
    python benchmarks/practice.py --only 'norm|lstm' --types float32 --threads 1 --busy
    python benchmarks/practice.py --write                        # and into benchmarks/README.md

The operators are in practice_operators.py, how rows are checked and timed is said in common.py.
A row of "backward" is a step of training: forward and backward through torch's autograd, on both
sides, with weights for the results. Ratios are torch's time over ours, so above 1 we are faster.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import QUICK_ROUNDS, ROUNDS, Result, Row, geometric_mean, machine
from models import write_between_marks
from ops import print_table, run
from practice_operators import KINDS, Kind, Tensors
from rich.console import Console

ENOUGH = 0.9  # of torch's speed: rows below are listed by name
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
PASSES = ("forward", "backward")
MARKS = ("<!-- practice -->", "<!-- /practice -->")
PAGE = Path(__file__).with_name("README.md")

# What a result of several kernels may be off by: ours rounds to bfloat16 between them.
TOLERANCES = {("float32", "backward"): 1e-4, ("float64", "backward"): 1e-12,
              ("bfloat16", "forward"): 2**-6, ("bfloat16", "backward"): 2**-5}


# ---------------------------------------------------------------- rows
def rows_of(kind: Kind, dtype: str, passes: Sequence[str], threads: Sequence[int]) -> list[Row]:
    """The rows of one operator in one type; what has no gradient has no backward."""
    found = []
    for which in passes:
        if which == "backward" and not kind.wrt:
            continue
        wrapped = _training if which == "backward" else _forward
        for count in threads:
            found.append(Row(row_name(kind, dtype, which, count), kind.group,
                             _inputs(kind, dtype, which), wrapped(kind, kind.ours),
                             wrapped(kind, kind.torch), count,
                             kind.tolerance or TOLERANCES.get((dtype, which))))
    return found


def row_name(kind: Kind, dtype: str, which: str, threads: int) -> str:
    """What a row is called."""
    return f"{kind.name}, {dtype} {which}, {threads} thread{'s' * (threads > 1)}"


def _inputs(kind: Kind, dtype: str, which: str) -> Callable[[], Tensors]:
    """What an operator takes and, for training, weights of its results."""
    def make() -> Tensors:
        given = kind.inputs(DTYPES[dtype])
        if which == "forward":
            return given
        results = kind.torch(*given)
        return (*given, *(torch.randn(r.shape).to(r.dtype) for r in _each(results)))

    return make


def _forward(kind: Kind, function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _training(kind: Kind, function: Callable[..., Any]) -> Callable[..., Any]:
    """A step of training: the gradients by what is learned."""
    count = len(kind.inputs(torch.float32))

    def step(*tensors: torch.Tensor) -> Tensors:
        given, weights = list(tensors[:count]), tensors[count:]
        with torch.enable_grad():
            for i in kind.wrt:
                given[i] = given[i].detach().requires_grad_()
            results = _each(function(*given))
            return torch.autograd.grad(results, [given[i] for i in kind.wrt], weights)

    return step


def _each(results: Any) -> Sequence[torch.Tensor]:
    return (results,) if isinstance(results, torch.Tensor) else results


# ---------------------------------------------------------------- report
def markdown(results: Sequence[Result]) -> str:
    """One line an operator: the ratio of each type, pass and number of threads."""
    ratios = {r.name: r.ratio("eager") for r in results}
    threads = sorted({r.threads for r in results})
    columns = [(t, p) for t in DTYPES for p in PASSES]
    lines = ["| operator | " + " | ".join(f"{t} {p}" for t, p in columns) + " |",
             "|---|" + "---|" * len(columns)]
    for kind in KINDS:
        cells = [" ".join(_cell(ratios, row_name(kind, t, p, n)) for n in threads).strip()
                 for t, p in columns]
        if any(cells):
            lines.append(f"| {kind.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(ratios: dict[str, float | None], name: str) -> str:
    ratio = ratios.get(name)
    if ratio is None:
        return ""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def summary(results: Sequence[Result], failures: Sequence[str]) -> str:
    """How many rows there are, and those that fall short."""
    ratios = {r.name: ratio for r in results if (ratio := r.ratio("eager")) is not None}
    below = sorted((ratio, name) for name, ratio in ratios.items() if ratio < ENOUGH)
    lines = [f"{len(ratios)} rows, geometric mean {geometric_mean(list(ratios.values())):.2f}; "
             f"below {ENOUGH}: {len(below) or 'none'}"]
    lines += [f"- {name}: {ratio:.2f}" for ratio, name in below]
    return "\n".join(lines + [f"- failed: {f}" for f in failures])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark as the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="REGEX", default="", help="operators ('group: name')")
    parser.add_argument("--types", default=",".join(DTYPES), help="some of them, with commas")
    parser.add_argument("--passes", default=",".join(PASSES), help="forward, backward or both")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, with commas")
    parser.add_argument("--quick", action="store_true", help="a third of the samples")
    parser.add_argument("--busy", action="store_true",
                        help="the machine has other work: time 1-thread rows by processor time")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write what was measured there")
    parser.add_argument("--write", action="store_true",
                        help="put the table into benchmarks/README.md")
    given = parser.parse_args(arguments)
    threads = [int(n) for n in given.threads.split(",")]
    chosen = [k for k in KINDS if re.search(given.only, f"{k.group}: {k.name}")]
    rows = [row for k in chosen for dtype in given.types.split(",")
            for row in rows_of(k, dtype, given.passes.split(","), threads)]
    if not rows:
        parser.error("no operator is called that, or none of those has a backward pass")
    results, failures = run(rows, False, QUICK_ROUNDS if given.quick else ROUNDS, given.busy,
                            Console(stderr=True))
    if given.json:
        given.json.write_text(json.dumps(
            {"machine": machine(), "rows": [r.as_json() for r in results], "failures": failures},
            indent=1) + "\n")
    print_table(Console(width=150) if not sys.stdout.isatty() else Console(), results)
    text = f"{markdown(results)}\n\n{summary(results, failures)}"
    print(text)
    if given.write:
        write_between_marks(PAGE, text, MARKS)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
