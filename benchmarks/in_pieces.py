"""Runs many named things in processes of some dozens, so that one which dies takes few along.

A program calls `outcomes` with a command that runs the names after `--names` and prints a line of
JSON for each, `{"name": .., ..}`, to the file after `--out`. Names without such a line are run
again one by one; what then still has none ended its process, or took too long.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

Outcome = dict[str, Any]


def outcomes(command: Sequence[str], names: Sequence[str], jobs: int, together: int,
             seconds: float, tell: Callable[[Outcome], None] = lambda _: None,
             end: float = math.inf, keep: Callable[[Sequence[Outcome]], None] = lambda _: None
             ) -> dict[str, Outcome]:
    """What became of each name; a process may take so many seconds.

    What a process found is kept when it ends, in any order, and told at the end of all. Of names
    that no process was begun for until the `end` nothing is told.
    """
    found: dict[str, Outcome] = {}
    one_at_a_time = threading.Lock()

    def piece(part: Sequence[str]) -> list[Outcome]:
        left = end - time.monotonic()
        made = _apart(command, part, min(seconds, left)) if left > 0 else []
        with one_at_a_time:
            keep(made)
        return made

    with ThreadPoolExecutor(jobs) as pool:
        count = max(1, -(-len(names) // together))
        pieces = [names[i::count] for i in range(count)]  # as long as each other
        for part in pool.map(piece, pieces):
            found |= {r["name"]: r for r in part}
        left = [[n] for n in names if n not in found]
        for part in pool.map(piece, left):
            found |= {r["name"]: r for r in part}
    for name in filter(found.__contains__, names):
        tell(found[name])
    return found


def _apart(command: Sequence[str], names: Sequence[str], seconds: float) -> list[Outcome]:
    with tempfile.NamedTemporaryFile("r") as file:
        try:
            ended = subprocess.run([*command, "--out", file.name, "--names", *names],
                                   capture_output=True, timeout=seconds, text=True,
                                   env={**os.environ, "OMP_NUM_THREADS": "1"})
            why = f"the process ended with {ended.returncode}: {ended.stderr.strip()[-200:]}"
        except subprocess.TimeoutExpired:
            why = f"took longer than {seconds:.0f} s"
        found = [json.loads(line) for line in file.read().splitlines()]
    if len(names) == 1 and not found:
        found = [{"name": names[0], "outcome": "failed", "why": why}]
    return found


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Ends what takes longer with a TimeoutError, where Python gets to run at all."""
    def late(*_: Any) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def said(error: BaseException) -> str:
    """An error as one line."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines[:3])}"[:300]
