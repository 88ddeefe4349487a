"""The GPU that benchmarks run on, or the CPU in its place, which tries every line of them out.

A simulated GPU runs our kernels by terrazzo's own Triton backend, on small sizes. Its peers there
are torch's own operators on the CPU, and its times those of the CPU: they mean nothing.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

import terrazzo as tz

Run = Callable[[], Any]
_FLUSHED = 64 << 20  # numbers of 4 bytes, more than any cache holds
_ROUND_MS, _LEAST_TURNS, _MOST_TURNS = 40, 5, 100


@dataclass(frozen=True)
class Machine:
    """Where tensors are, how time is told, and who is compared with."""

    simulated: bool = False

    @staticmethod
    def started(simulated: bool) -> Machine:
        """The machine, with terrazzo set to compile for its sizes."""
        # A second size would make a kernel for any; benchmarks are about kernels for the sizes.
        tz.knobs.dynamic = "never"
        if simulated:
            tz.knobs.cuda_simulate, tz.knobs.chip = True, "cuda"
        return Machine(simulated)

    @property
    def device(self) -> str:
        return "cpu" if self.simulated else "cuda"

    def __str__(self) -> str:
        name = "simulated, times mean nothing" if self.simulated else torch.cuda.get_device_name()
        return f"{name}; torch {torch.__version__}, terrazzo {tz.__version__}"

    def random(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Any:
        """Normal numbers; of 8 bits rounded from float32."""
        made = torch.randn(shape, device=self.device, dtype=torch.float32 if
                           dtype.itemsize == 1 else dtype)
        return (made * scale if scale != 1 else made).to(dtype)

    def synchronize(self) -> None:
        if not self.simulated:
            torch.cuda.synchronize()

    # ------------------------------------------------------------ time
    def in_turns(self, *runs: Run) -> list[float]:
        """Median milliseconds of each, one after the other, with caches emptied in between.

        A GPU that gets warm is slower for all. Caches are filled by reading: what was written to
        them instead would go back to memory while the next run is timed (a sum of 67 MB then reads
        2.4 TB/s on an H200, and 3.0 so).
        """
        if self.simulated:
            return [_once(run) for run in runs]
        for run in runs:
            run()
        self.synchronize()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        for run in runs:
            run()
        marks[1].record()
        self.synchronize()
        once = max(marks[0].elapsed_time(marks[1]), 0.01)
        turns = max(_LEAST_TURNS, min(_MOST_TURNS, int(_ROUND_MS * len(runs) / once)))
        flushed = torch.zeros(_FLUSHED, dtype=torch.float32, device=self.device)
        taken: list[list[Sequence[Any]]] = [[] for _ in runs]
        for _ in range(turns):
            for run, own in zip(runs, taken, strict=True):
                flushed.sum()
                pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                pair[0].record()
                run()
                pair[1].record()
                own.append(pair)
        self.synchronize()
        return [statistics.median(a.elapsed_time(b) for a, b in own) for own in taken]

    def back_to_back(self, run: Run, rounds: int = 7, each: int = 20) -> tuple[float, float]:
        """Microseconds of a call with all that it queued, and until it returns: the least."""
        whole = host = math.inf
        if self.simulated:
            rounds, each = 1, 1
        else:
            for _ in range(3):
                run()
        for _ in range(rounds):
            self.synchronize()
            start = time.perf_counter()
            for _ in range(each):
                run()
            host = min(host, (time.perf_counter() - start) / each)
            self.synchronize()
            whole = min(whole, (time.perf_counter() - start) / each)
        return whole * 1e6, host * 1e6

    # ------------------------------------------------------------ peers
    def compiled(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """What Inductor makes of a function."""
        if self.simulated:
            return function
        torch._dynamo.reset()
        made: Callable[..., Any] = torch.compile(function, dynamic=False, **options)
        return made

    def attention_by(self, name: str) -> AbstractContextManager[Any]:
        """Where `scaled_dot_product_attention` is that of one library."""
        if self.simulated:
            return contextlib.nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(getattr(SDPBackend, name))


def _once(run: Run) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3
