"""How long compiling takes, and how that grows with a program's length.

    python benchmarks/compile_time.py                 # all programs, about two minutes
    python benchmarks/compile_time.py --only softmax

Every program is compiled from nothing to object code at three lengths, each twice the one before.
Times are processor time of this process (other work on the machine does not count), the least of
several runs for short ones. `growth` is the time of the last length over that of the one before:
2 is linear, 4 quadratic. The last column is the limit that a program is held to, if it has one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import terrazzo as tz
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm import jit
from terrazzo.compiler.levels import level_text
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.rewriting import inlined
from terrazzo.dtypes import float32
from terrazzo.graph.derivatives import grad_function
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace

Body = Callable[..., Any]
SHORT = 1.0  # seconds: what takes less is measured again, as other work disturbs it most
STEPS = ("graph", "fused", "functions", "llvm", "object")


@dataclass(frozen=True)
class Program:
    """A function of one tensor that does something `steps` times."""

    name: str
    make: Callable[[int], Body]
    shape: tuple[int, ...]
    steps: int  # of the longest measured
    limit: float | None = None  # seconds that the longest may take


def repeated(step: Callable[[Any], Any]) -> Callable[[int], Body]:
    """Programs that apply one step again and again."""

    def make(steps: int) -> Body:
        def body(x: Any) -> Any:
            for _ in range(steps):
                x = step(x)
            return x

        return body

    return make


def sinkhorn_step(x: Any) -> Any:
    x = x - tz.logsumexp(x, axis=1, keepdims=True)
    return x - tz.logsumexp(x, axis=0, keepdims=True)


def backward(make: Callable[[int], Body]) -> Callable[[int], Body]:
    """Programs that compute the gradient of the sum of squares of others."""
    return lambda steps: grad_function(lambda x: tz.sum(tz.square(make(steps)(x))))


def tree(steps: int) -> Body:
    """A sum of many different terms, two by two."""

    def body(x: Any) -> Any:
        values = [tz.exp(x * float(i)) for i in range(1, steps + 1)]
        while len(values) > 1:
            pairs = [a + b for a, b in zip(values[::2], values[1::2], strict=False)]
            values = pairs + values[2 * len(pairs):]
        return values[0]

    return body


def fibonacci(steps: int) -> Body:
    """Every value is used twice: unshared, it would be 1.6^steps operators."""

    def body(x: Any) -> Any:
        a, b = x, x * 0.5
        for _ in range(steps):
            a, b = b, a * 0.5 + b
        return b

    return body


softmax = repeated(lambda x: tz.softmax(x) + x)
sinkhorn = repeated(sinkhorn_step)
TEN_THOUSAND = 10.0  # seconds for as many operators
PROGRAMS = [
    Program("softmax(x) + x, 50 times", softmax, (256,), 50, 2.0),
    Program("Sinkhorn, 50 steps", sinkhorn, (64, 64), 50, 2.0),
    Program("Sinkhorn backward, 10 steps", backward(sinkhorn), (64, 64), 10, 2.0),
    Program("x - mean(x), 300 times", repeated(lambda x: x - tz.mean(x)), (256,), 300, 2.0),
    Program("10,000 elementwise: sin(x) * 1.01", repeated(lambda x: tz.sin(x) * 1.01), (1024,),
            5000, TEN_THOUSAND),
    Program("10,000 elementwise: x * x + 0.5", repeated(lambda x: x * x + 0.5), (1024,), 5000,
            TEN_THOUSAND),
    Program("10,000 of softmax(x) + x", softmax, (256,), 1430, TEN_THOUSAND),
    Program("10,000 of x - max(x)", repeated(lambda x: x - tz.max(x, axis=-1, keepdims=True)),
            (16, 64), 5000, TEN_THOUSAND),
    Program("10,000 of Sinkhorn backward", backward(sinkhorn), (64, 64), 270, TEN_THOUSAND),
    Program("10,000 of tanh(x @ x)", repeated(lambda x: tz.tanh(x @ x)), (32, 32), 5000,
            TEN_THOUSAND),
    Program("10,000 in diamonds: sin(x) * cos(x)", repeated(lambda x: tz.sin(x) * tz.cos(x)),
            (256,), 3333, TEN_THOUSAND),
    Program("10,000 shared: Fibonacci", fibonacci, (256,), 3333, TEN_THOUSAND),
    Program("10,000 in a wide tree", tree, (256,), 3333, TEN_THOUSAND),
]


def compile_once(program: Program, steps: int) -> tuple[float, int, dict[str, float]]:
    """Seconds in all, operators, and seconds by level."""
    laps: dict[str, float] = {}
    chip = host()
    begin = last = time.process_time()

    def lap(name: str) -> None:
        nonlocal last
        now = time.process_time()
        laps[name], last = now - last, now

    graph = trace(program.make(steps), [TensorType(program.shape, float32)], "program")[0]
    lowering = Lowering(inlined(graph), Cpu(chip))
    count = len(lowering.graph.nodes)
    lap("graph")
    assert lowering.fused.groups
    lap("fused")
    assert lowering.functions
    lap("functions")
    text = level_text(lowering, "llvm")
    lap("llvm")
    jit.compile_object(text, chip)
    lap("object")
    return last - begin, count, laps


def measure(program: Program, steps: int) -> tuple[float, int, dict[str, float]]:
    """The least of several runs, if one run is short."""
    best = compile_once(program, steps)
    for _ in range(2 if best[0] < SHORT else 0):
        best = min(best, compile_once(program, steps), key=lambda found: found[0])
    return best


def main(argv: list[str] | None = None) -> int:
    """Print the table; answers 1 where a program takes longer than its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--shorter", type=int, default=1, help="divide all lengths by this")
    options = parser.parse_args(argv)
    compile_once(PROGRAMS[0], 1)  # imports, LLVM's own tables
    print(f"{'program':38s} {'operators':>9s} {'quarter':>8s} {'half':>8s} {'whole':>8s} "
          f"{'growth':>6s} {'limit':>6s}  of the whole: {' '.join(STEPS)}")
    late = 0
    for program in (p for p in PROGRAMS if options.only.lower() in p.name.lower()):
        whole = max(program.steps // options.shorter, 4)
        times = [measure(program, steps) for steps in (whole // 4, whole // 2, whole)]
        seconds, count, laps = times[-1]
        late += program.limit is not None and seconds > program.limit
        print(f"{program.name:38s} {count:9,d} " + " ".join(f"{t:7.2f}s" for t, _, _ in times)
              + f" {seconds / times[1][0]:6.2f} "
              + (f"{program.limit:5.0f}s" if program.limit else " " * 6)
              + "  " + " ".join(f"{laps[name]:.2f}" for name in STEPS), flush=True)
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
