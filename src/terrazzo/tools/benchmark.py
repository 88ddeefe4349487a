"""Times a function beside numpy and torch, and against what the machine can do at best.

The ways to compute are timed in rounds: each round times every way once, so that what disturbs
the machine disturbs all alike; the median of the rounds counts. The roofline is the chip's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from terrazzo.base.tables import ShownAsTable, Table
from terrazzo.calls.compiled import Compiled
from terrazzo.calls.kernels import kernels_of, ready
from terrazzo.chips.chip import Chip
from terrazzo.chips.memory import HOST
from terrazzo.chips.registry import chip_for
from terrazzo.chips.spec import Roofline
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.rewriting import inlined
from terrazzo.errors import ArgumentError, MissingDependency, TerrazzoError
from terrazzo.graph import evaluate as graph_evaluate
from terrazzo.graph.ir import Graph, Operator
from terrazzo.index import Index, IndexExpr, evaluate
from terrazzo.knobs import knobs, thread_count
from terrazzo.runtime import fastcall
from terrazzo.runtime.hosted import needs_host, to_numpy

ROUNDS = 15
ROUND_SECONDS = 0.01  # each way runs at least this long in a round
IDLE_SECONDS = 10e-3  # before each: OpenMP's idle threads spin for up to 6 ms, ours for one
MOST_SECONDS = 2.0  # a way that takes longer is timed in fewer rounds


# ---------------------------------------------------------------- the machine
def roofline() -> Roofline:
    """What the chip does at best, with as many threads as the setting says."""
    return chip_for(knobs.now).roofline()


# ---------------------------------------------------------------- timing
@dataclass
class Timing:
    """One way to compute, with the seconds of each round."""

    name: str
    run: Callable[[], Any]
    calls: int = 1
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds for one call."""
        return median(self.seconds)

    def repeated(self) -> None:
        """All calls of a round."""
        for _ in range(self.calls):
            self.run()


def by_the_clock(run: Callable[[], Any]) -> float:
    """Seconds that something takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def time_rounds(ways: Sequence[Timing], rounds: int = ROUNDS,
                seconds: Callable[[Callable[[], Any]], float] = by_the_clock) -> None:
    """Time several ways to compute the same, interleaved."""
    for way in ways:
        way.run()
        way.calls = max(1, int(ROUND_SECONDS / max(seconds(way.run), 1e-9)))
    for _ in range(rounds):
        for way in ways:
            spent = sum(way.seconds) * way.calls
            if spent > MOST_SECONDS and len(way.seconds) >= 3:
                continue
            time.sleep(IDLE_SECONDS)
            way.seconds.append(seconds(way.repeated) / way.calls)


# ---------------------------------------------------------------- bench
@dataclass(frozen=True)
class Line:
    """One way to compute, as the table shows it."""

    name: str
    seconds: float
    bytes: float
    flops: float
    limit: float  # seconds that the machine needs at least

    @property
    def roofline(self) -> float:
        """The part of the machine's best that it reaches."""
        return self.limit / self.seconds


@dataclass(frozen=True, repr=False)
class BenchReport(ShownAsTable):
    """What `bench` measured; prints as a table."""

    name: str
    types: str
    lines: tuple[Line, ...]
    limits: Roofline
    where: str  # what ran it
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Line:
        return next(line for line in self.lines if line.name == name)

    def shown(self) -> Table:
        ours = self.lines[0].seconds
        rows = tuple((line.name, f"{line.seconds * 1e6:.1f}",
                      f"{line.bytes / line.seconds / 1e9:.1f}",
                      f"{line.flops / line.seconds / 1e9:.1f}", f"{line.roofline:.0%}",
                      f"{line.seconds / ours:.2f}x") for line in self.lines)
        machine = (f"{self.where}: {self.limits.bytes_per_second / 1e9:.1f} GB/s, "
                   f"{self.limits.flops_per_second / 1e9:.0f} GFLOP/s (float32)")
        heads = ("", "us", "GB/s", "GFLOP/s", "of roofline", "against ours")
        return Table(f"{self.name}({self.types})", heads, rows, (machine,), self.notes)


def bench(function: Any, *args: Any, rounds: int = ROUNDS, torch: bool = True,
          **attrs: Any) -> BenchReport:
    """Time a function or operator on the given arguments beside numpy and torch."""
    target = _compiled(function)
    if not args:
        raise ArgumentError(f"{target.name} cannot be timed without arguments",
                            hint=f"pass arrays: {target.name}.bench(x, ...)")
    leaves, _ = target.arguments(args, target.without_out(attrs)[0])
    arrays = [to_numpy(a) if hasattr(a, "detach") else a for a in leaves]
    graph = target.graph(args, attrs)
    ways = [Timing("terrazzo", lambda: target(*args, **attrs))]
    if target.operator is not None and kernels_of(target.operator).written:
        ways += _kernel_ways(target, args, attrs)
    chip = _chip_of(target, args, attrs, leaves)
    if chip is None and all(isinstance(a, np.ndarray) for a in arrays):
        ways.append(Timing("numpy, one operator at a time",
                           lambda: graph_evaluate.run(graph, arrays)))
    with _torch_threads(thread_count() if torch else None):
        notes = _torch_ways(graph, leaves, ways) if torch else ["torch was not asked for"]
        time_rounds(ways, rounds, by_the_clock if chip is None else chip.seconds)
    flops, size = work(graph)
    if needs_host(inlined(graph)):
        notes = [*notes, "with control flow, operations are not counted, nor what it reads again"]
    if target.operator is not None and kernels_of(target.operator).choices:
        notes = [*notes, *(f"chosen for {c}" for c in kernels_of(target.operator).choices.values())]
    limits = roofline() if chip is None else chip.roofline()
    where = f"{thread_count()} threads, this machine as measured" if chip is None else (
        f"{chip.spec.name}, at best")
    lines = tuple(Line(w.name, w.median, size, flops, limits.seconds(flops, size)) for w in ways)
    types = ", ".join(str(v.type) for v in graph.inputs)
    return BenchReport(target.name, types, lines, limits, where, tuple(notes))


def _chip_of(target: Compiled, args: Sequence[Any], attrs: dict[str, Any], leaves: Sequence[Any]
             ) -> Chip | None:
    """The chip in whose own memory the arguments are, which tells its own time; None: the host."""
    found = getattr(target.executable(args, attrs), "chip", None)
    away = found is not None and found.memory.device != HOST.device and all(
        found.memory.holds(a) or not a.shape for a in leaves)
    return found if away else None


def _kernel_ways(target: Compiled, args: Sequence[Any], attrs: dict[str, Any]) -> list[Timing]:
    """The generated kernel and those by hand, each by itself; the first line is what is called."""
    assert target.operator is not None
    leaves, rebuild = target.arguments(args, target.without_out(attrs)[0])
    executable = target.executable(args, attrs)
    structure = list(range(len(executable.output_types)))
    generated = fastcall.entry(executable, structure, leaves)
    ways = [Timing("generated", partial(generated, leaves))]
    results = executable.output_shapes(executable.bind(leaves))
    for written in kernels_of(target.operator).written:
        found = ready(written, rebuild, leaves, results) if (
            written.chip == executable.chip.name) else None
        if found is not None:
            ways.append(Timing(written.name, partial(found.entry(structure), leaves)))
    return ways


def _compiled(function: Any) -> Compiled:
    if isinstance(function, Operator):
        return function.compiled
    if isinstance(function, Compiled):
        return function
    if callable(function):
        return Compiled(function, getattr(function, "__name__", "function"))
    raise ArgumentError(f"cannot time {function!r}", hint="pass an operator or a function")


@contextmanager
def _torch_threads(count: int | None) -> Iterator[None]:
    """Give torch, if it is wanted and there, so many threads for a while."""
    from terrazzo.torch.eager import import_torch

    try:
        torch = None if count is None else import_torch()
    except MissingDependency:
        torch = None
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _torch_ways(graph: Graph, leaves: Sequence[Any], ways: list[Timing]) -> list[str]:
    """Add torch's ways; answers why not where one is missing."""
    from terrazzo.torch.eager import import_torch, to_torch, torch_function

    try:
        torch = import_torch()
        eager = torch_function(graph)
    except TerrazzoError as error:
        return [f"no rows for torch: {error.message}"]
    tensors = [to_torch(a) for a in leaves]
    try:
        with torch.no_grad():
            eager(*tensors)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        return [f"no rows for torch: {str(error).splitlines()[0]}"]

    def quietly(run: Callable[..., Any]) -> Callable[[], Any]:
        def call() -> Any:
            with torch.inference_mode():
                return run(*tensors)

        return call

    ways.append(Timing("torch eager", quietly(eager)))
    fused = torch.compile(eager, dynamic=False)
    try:
        quietly(fused)()
    except Exception as error:  # whatever its compiler stumbles over, such as no C++ compiler
        return [f"no row for torch.compile: {str(error).splitlines()[0]}"]
    ways.append(Timing("torch.compile", quietly(fused)))
    return []


def work(graph: Graph) -> tuple[float, float]:
    """Floating-point operations, and bytes of inputs and outputs, that a graph cannot do without.

    What fusion keeps out of memory is not counted, so an unfused rival moves more than this says.
    """
    size = sum(_elements(v.shape) * v.dtype.itemsize for v in (*graph.inputs, *graph.outputs))
    flat = inlined(graph)
    if needs_host(flat):  # how often the host runs what, only running tells
        return 0.0, float(size)
    functions = Lowering(flat, chip_for(knobs.now)).functions
    return float(sum(_known(f.flops) for f in functions)), float(size)


def _elements(shape: Sequence[Index]) -> int:
    count = 1
    for n in shape:
        count *= _known(n)
    return count


def _known(size: Index) -> int:
    return int(evaluate(size, {})) if isinstance(size, IndexExpr) else int(size)
