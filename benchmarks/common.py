"""How rows of a benchmark are checked and timed: one method for all alternatives.

The alternatives of a row (ours and its peers) get the same tensors, and are checked against
float64 before anything is timed. They are then timed in rounds: every round takes one sample of
each, in random order, so that what disturbs the machine disturbs all of them alike. A sample is
the mean of as many calls as last two milliseconds. Compilation is never timed.

Time is wall time. On a machine that does other work as well, rows of one thread can be timed by
that thread's processor time instead, which leaves out the time it was not running.
"""

from __future__ import annotations

import gc
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import terrazzo as tz
from terrazzo.knobs import knobs

SAMPLE_SECONDS = 2e-3  # one sample lasts this long at least: 1000 times the clock's resolution
ROUNDS, QUICK_ROUNDS = 15, 5
NOISY = 1.25  # a median this far above the minimum means that the row was disturbed
REPEATS = 3  # how often a disturbed row is measured again before its numbers are taken as they are
# Between alternatives, so that idle workers of the last one stop spinning: OpenMP's were seen to
# take up to 6 ms for it, ours 1 ms, and a spinning thread takes a core from the one measured next.
IDLE_SECONDS = 10e-3

# Errors are compared with the largest value of the result: a sum of n terms may lose what is
# small against the terms. bfloat16 keeps 8 bits, so half a unit in the last place is 2^-9.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2**-8, torch.float64: 1e-13, torch.int64: 0.0,
              torch.bool: 0.0}
PEER_SLACK = 16  # eager bfloat16 rounds after every operator of a chain, and may do so

Function = Callable[..., Any]  # a tensor, or several
Clock = Callable[[], float]


class WrongResult(Exception):
    """An alternative's result is not what float64 says: its time would mean nothing."""


@dataclass(frozen=True)
class Row:
    """One comparison: the same function of the same tensors, written for terrazzo and for torch."""

    name: str
    group: str
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    ours: Function
    torch: Function
    threads: int = 1
    tolerance: float | None = None  # where the result's type alone does not tell


@dataclass
class Result:
    """What was measured for a row; seconds a call, by alternative."""

    name: str
    group: str
    threads: int
    megabytes: float
    errors: dict[str, float] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)

    def minimum(self, name: str) -> float:
        """The fastest sample of an alternative."""
        return min(self.samples[name])

    def median(self, name: str) -> float:
        """The middle sample of an alternative."""
        return statistics.median(self.samples[name])

    def ratio(self, peer: str) -> float | None:
        """A peer's time over ours, from minimums: above 1 we are faster."""
        return self.minimum(peer) / self.minimum("ours") if peer in self.samples else None

    def against_best(self) -> float:
        """The fastest peer's time over ours, from minimums."""
        return min(r for p in ("eager", "compile") if (r := self.ratio(p)) is not None)

    def as_json(self) -> dict[str, Any]:
        """The row as plain data."""
        return {
            "name": self.name, "group": self.group, "threads": self.threads,
            "megabytes": self.megabytes, "error_over_largest": self.errors,
            "min_us": {n: self.minimum(n) * 1e6 for n in self.samples},
            "median_us": {n: self.median(n) * 1e6 for n in self.samples},
            "ratios_of_minimums": {p: self.ratio(p) for p in self.samples if p != "ours"},
        }


def machine() -> dict[str, Any]:
    """What the numbers of this run depend on."""
    from terrazzo.chips.cpu.description import host

    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {"cpu": model, "load_average": os.getloadavg()[0], "chip": str(host()),
            "torch": torch.__version__, "terrazzo": tz.__version__,
            "python": platform.python_version()}


# ---------------------------------------------------------------- correctness
def check(row: Row, alternatives: dict[str, Function], inputs: Sequence[torch.Tensor]
          ) -> dict[str, float]:
    """The error of every alternative against float64, relative to the largest value."""
    # Copies, because a function may work in place.
    wide = [x.to(torch.float64, copy=True) if x.is_floating_point() else x for x in inputs]
    wanted = _tensors(row.torch(*wide))
    errors = dict.fromkeys(alternatives, 0.0)
    for name, function in alternatives.items():
        results = _tensors(function(*[x.clone() for x in inputs]))
        for result, expected in zip(results, wanted, strict=True):
            if result.shape != expected.shape:
                raise WrongResult(f"{row.name}: {name} has shape {tuple(result.shape)}, expected "
                                  f"{tuple(expected.shape)}")
            difference = (result.double() - expected.double()).abs().max().item()
            error = difference / max(expected.double().abs().max().item(), 1e-30)
            allowed = TOLERANCES[result.dtype] if row.tolerance is None else row.tolerance
            allowed *= 1 if name == "ours" else PEER_SLACK
            if not error <= allowed:
                raise WrongResult(f"{row.name}: {name} is off by {error:.2e} of the largest "
                                  f"value, allowed is {allowed:.2e}")
            errors[name] = max(errors[name], error)
    return errors


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    """One result or several."""
    return result if isinstance(result, tuple) else (result,)


# ---------------------------------------------------------------- time
def measure(row: Row, compiled: bool, rounds: int, busy: bool = False) -> Result:
    """Check and time one row; `busy` says that the machine is not ours alone."""
    clock = time.thread_time if busy and row.threads == 1 else time.perf_counter
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(row.threads)
    with knobs.override(threads=row.threads), torch.no_grad():
        inputs = row.inputs()
        alternatives = {"ours": row.ours, "eager": row.torch}
        if compiled:
            torch._dynamo.reset()
            alternatives["compile"] = torch.compile(row.torch, dynamic=False)
        errors = check(row, alternatives, inputs)
        size = sum(x.numel() * x.element_size() for x in (*inputs, *_tensors(row.torch(*inputs))))
        result = Result(row.name, row.group, row.threads, size / 2**20, errors,
                        {name: [] for name in alternatives})
        counts = {name: _calls_for_a_sample(f, inputs, clock) for name, f in alternatives.items()}
        gc.collect()
        gc.disable()
        try:
            for _ in range(1 + REPEATS):
                _rounds(alternatives, inputs, counts, rounds, clock, result)
                if not _disturbed(result):
                    break
        finally:
            gc.enable()
            torch.set_num_threads(threads)
    return result


def _calls_for_a_sample(function: Function, inputs: Sequence[torch.Tensor], clock: Clock) -> int:
    """How many calls last as long as a sample should."""
    count = 1
    while True:
        elapsed = _sample(function, inputs, count, clock) * count
        if elapsed >= SAMPLE_SECONDS:
            return count
        count = max(count + 1, int(count * min(1.2 * SAMPLE_SECONDS / max(elapsed, 1e-9), 100)))


def _sample(function: Function, inputs: Sequence[torch.Tensor], count: int, clock: Clock) -> float:
    calls = range(count)
    start = clock()
    for _ in calls:
        function(*inputs)
    return (clock() - start) / count


def _rounds(alternatives: dict[str, Function], inputs: Sequence[torch.Tensor],
            counts: dict[str, int], rounds: int, clock: Clock, result: Result) -> None:
    names = list(alternatives)
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            time.sleep(IDLE_SECONDS)
            # Wakes our or the peer's workers and brings the data back into the caches.
            _sample(alternatives[name], inputs, -(-counts[name] // 4), clock)
            result.samples[name].append(
                _sample(alternatives[name], inputs, counts[name], clock))


def _disturbed(result: Result) -> bool:
    """Whether so few samples came near the best one that the best may be no minimum yet."""
    for samples in result.samples.values():
        ordered = sorted(samples)
        if ordered[len(ordered) // 2] > NOISY * ordered[0]:
            return True
    return False


def geometric_mean(values: Sequence[float]) -> float:
    """The mean that treats twice as fast and half as fast alike."""
    return statistics.geometric_mean(values) if values else float("nan")
