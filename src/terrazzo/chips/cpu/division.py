"""How a kernel's work is shared out among threads.

A kernel is compiled once and runs on any number of threads. So it is planned for several numbers
while it is made, in plain Python, and finds its plan when it runs. No plan changes what is
computed: rows, columns and images are divided, sums never.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from terrazzo.base.scalar import Scalar, as_scalar, call, where
from terrazzo.chips.spec import ChipSpec
from terrazzo.index import Index, maximum
from terrazzo.loop.ir import THREADS

_FEWEST_PLANS = 16  # threads that are planned for, however few cores there are
_UNEVEN = 0.3  # of a task: how much later the slowest of many cores is done with its last one


def thread_counts(chip: ChipSpec) -> list[int]:
    """The numbers of threads that kernels are planned for: powers of two."""
    return [1 << bit for bit in range((max(chip.cores, _FEWEST_PLANS) - 1).bit_length() + 1)]


def by_threads(chip: ChipSpec, plan: Callable[[int], tuple[int, ...]]) -> tuple[int | Scalar, ...]:
    """The numbers of the plan for as many threads as the kernel runs on, or a few more."""
    counts = thread_counts(chip)
    found: list[int | Scalar] = []
    for numbers in zip(*map(plan, counts), strict=True):
        value: int | Scalar = numbers[-1]
        for threads, number in zip(reversed(counts[:-1]), reversed(numbers[:-1]), strict=True):
            if isinstance(value, Scalar) or value != number:
                value = where(call("le", as_scalar(THREADS), threads), number, value)
        found.append(value)
    return tuple(found)


def more_tasks(tasks: Index, each: int = 4) -> Index:
    """Into how many parts to divide each of some tasks, for several parts a thread.

    A single thread divides nothing. This is for sizes that are not known when a kernel is made.
    """
    return maximum((each * (THREADS - 1) + maximum(tasks, 1) - 1) // maximum(tasks, 1), 1)


def longest_share(tasks: int, threads: int) -> float:
    """Tasks that pass until the last thread is done, if all take equally long.

    Of many cores some are slower for a while (others use them, too), and the last task is theirs:
    several short tasks for each thread lose less by it than a single long one.
    """
    return math.ceil(tasks / threads) + _UNEVEN * max(1 - 2 / threads, 0)
