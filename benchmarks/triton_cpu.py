"""Times Triton kernels on the CPU against PyTorch's own operators and Triton's interpreter.

    python benchmarks/triton_cpu.py                          # all rows, about 3 minutes
    python benchmarks/triton_cpu.py --filter 'softmax|gelu' --threads 2 --json triton.json
    python benchmarks/triton_cpu.py --threads 2 --write      # into docs/triton-cpu.md

The kernels are those of examples/triton. Rows are checked and timed as common.py says: ours and
eager PyTorch in turns, the same tensors, the same number of threads; ratios are from minimums, so
above 1 we are faster. A launch is timed as users see it, Triton's own Python code included.

"x interpreter" says how often faster a kernel is than with TRITON_INTERPRET=1, in a process of its
own. That takes smaller sizes, so times are compared for one element (a multiply-add for products).
It stays empty where the interpreter cannot run a kernel, as it knows nothing of libdevice.

"compile ms" is the time from a kernel's source to machine code in a process that has compiled
others before, with nothing in Triton's cache, for tiles of 1,024 and of 16,384 elements.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from common import QUICK_ROUNDS, ROUNDS, Result, Row, WrongResult, machine, measure
from models import write_between_marks
from rich.console import Console
from rich.table import Table
from triton.runtime.errors import InterpreterError

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples" / "triton"))

import dropout  # noqa: E402
import flash_attention  # noqa: E402
import gelu  # noqa: E402
import layer_norm  # noqa: E402
import matmul  # noqa: E402
import softmax  # noqa: E402
import vector_add  # noqa: E402

f32, bf16 = torch.float32, torch.bfloat16
TILES = (1024, 16384)
COMPILES = 5  # of each kernel; the fastest counts
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One kernel at one size: the peer's function, and what to ask of the ratio."""

    name: str
    sizes: tuple[int, ...]
    small: tuple[int, ...]  # for the interpreter
    inputs: Callable[..., Tensors]  # of the sizes
    work: Callable[..., int]  # what time grows with, of the sizes
    ours: Callable[..., Any]
    torch: Callable[..., Any]
    target: float | None = None  # of the ratio, with two threads
    tolerance: float | None = None


# ---------------------------------------------------------------- kernels and their peers
def normal(*shapes: Sequence[int], dtype: torch.dtype = f32) -> Tensors:
    """Tensors of normally distributed numbers."""
    return tuple(torch.randn(*shape).to(dtype) for shape in shapes)


def _backward_inputs(rows: int, columns: int) -> Tensors:
    grad, x, weight, bias = normal((rows, columns), (rows, columns), (columns,), (columns,))
    _, means, scales = torch.native_layer_norm(x, (columns,), weight, bias, 1e-5)
    return grad, x, weight, bias, means, scales


def _layer_norm_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor,
                         bias: torch.Tensor, means: torch.Tensor, scales: torch.Tensor) -> Any:
    context = SimpleNamespace(saved_tensors=(x, weight, means, scales))
    return layer_norm.LayerNorm.backward(context, grad)[:3]


def _torch_layer_norm_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor,
                               bias: torch.Tensor, means: torch.Tensor, scales: torch.Tensor
                               ) -> Any:
    return torch.ops.aten.native_layer_norm_backward(
        grad, x, weight.shape, means, scales, weight, bias, [True, True, True])


def _heads(length: int) -> Tensors:
    return normal(*((1, 8, length, 64),) * 3)


def _product(*sizes: int) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def cases() -> list[Case]:
    """All rows but for the number of threads."""
    made = []
    for n, text in ((1 << 18, "256k"), (1 << 24, "16M")):
        made.append(Case(f"vector add, {text}", (n,), (1 << 16,), lambda n: normal((n,), (n,)),
                         _product, vector_add.add, torch.add, 0.95))
    for rows, columns in ((4096, 256), (4096, 1024), (1024, 4096)):
        made.append(Case(f"softmax, {rows}x{columns}", (rows, columns), (16, columns),
                         lambda r, c: normal((r, c)), _product, softmax.softmax,
                         lambda x: torch.softmax(x, -1), 1.2))
    for size in (1024, 2048):
        made.append(Case(
            f"layer norm, {size}x{size}", (size, size), (16, size),
            lambda r, c: normal((r, c), (c,), (c,)), _product, layer_norm.layer_norm,
            lambda x, w, b: F.layer_norm(x, w.shape, w, b), 1.0))
        made.append(Case(f"layer norm backward, {size}x{size}", (size, size), (16, size),
                         _backward_inputs, _product, _layer_norm_backward,
                         _torch_layer_norm_backward, 1.0))
    for n, text in ((1 << 20, "1M"), (1 << 22, "4M")):
        for form, name in (("tanh", "tanh"), ("none", "erf")):
            made.append(Case(f"GELU by {name}, {text}", (n,), (1 << 16,), lambda n: normal((n,)),
                             _product, partial(gelu.gelu, approximate=form),
                             partial(F.gelu, approximate=form), 2.0))
    # Random numbers differ from library to library: the example checks its own.
    made.append(Case("dropout, 4M", (1 << 22,), (1 << 16,), lambda n: normal((n,)), _product,
                     lambda x: dropout.dropout(x, 0.5, 1), lambda x: F.dropout(x, 0.5),
                     tolerance=float("inf")))
    for dtype, target, tolerance in ((f32, 0.75, None), (bf16, 0.5, 2**-7)):
        made.append(Case(
            f"matmul {'f32' if dtype is f32 else 'bf16'}, 1024x1024x1024", (1024,) * 3, (128,) * 3,
            lambda m, n, k, t=dtype: normal((m, k), (k, n), dtype=t), _product, matmul.matmul,
            torch.mm, target, tolerance))
    made.append(Case(
        "causal attention, f32 8x2048x64", (2048,), (256,), _heads, lambda n: n * n,
        lambda q, k, v: flash_attention.attention(q, k, v, causal=True),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), 0.8))
    return made


def rows_of(case: Case, threads: Sequence[int]) -> list[Row]:
    """A case as rows of a benchmark."""
    return [Row(f"{case.name}, {n} thread{'s' * (n > 1)}", "triton",
                lambda: case.inputs(*case.sizes), case.ours, case.torch, n, case.tolerance)
            for n in threads]


# ---------------------------------------------------------------- the interpreter
def interpret(wanted: Sequence[str]) -> None:
    """Print seconds a unit of work for some cases; runs where TRITON_INTERPRET=1 is set."""
    seconds = {}
    for case in cases():
        if case.name in wanted:
            inputs = case.inputs(*case.small)
            try:
                case.ours(*inputs)
            except InterpreterError:  # it knows no functions of libdevice
                continue
            samples = []
            for _ in range(3):
                start = time.perf_counter()
                case.ours(*inputs)
                samples.append(time.perf_counter() - start)
            seconds[case.name] = min(samples) / case.work(*case.small)
    print(json.dumps(seconds))


def interpreted(names: Sequence[str]) -> dict[str, float]:
    """Seconds a unit of work in Triton's interpreter, by case."""
    answer = subprocess.run(
        [sys.executable, __file__, "--interpret", *names], capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"}, check=False)
    if answer.returncode:
        raise RuntimeError(f"Triton's interpreter failed:\n{answer.stderr}")
    return dict(json.loads(answer.stdout.splitlines()[-1]))


# ---------------------------------------------------------------- compile time
def _source(kernel: Any) -> Any:
    """A kernel without the tuner around it."""
    return getattr(kernel, "fn", kernel) if hasattr(kernel, "configs") else kernel


def compilations() -> dict[str, Callable[[int], Any]]:
    """How each kernel is compiled for a tile of so many elements."""
    x, small = torch.randn(1 << 14), torch.randn(4)
    square = x.view(128, 128)
    strides = (128, 1) * 3

    def side(tile: int) -> int:
        return int(tile**0.5)

    return {
        "vector add": lambda t: vector_add.add_kernel.warmup(x, x, x, 999, BLOCK=t, grid=(1,)),
        "GELU": lambda t: gelu.gelu_kernel.warmup(x, x, 999, TANH=False, BLOCK=t, grid=(1,)),
        "dropout": lambda t: dropout.dropout_kernel.warmup(x, x, 999, 0.5, 1, BLOCK=t, grid=(1,)),
        "softmax": lambda t: softmax.softmax_kernel.warmup(x, x, 999, 999, 999, BLOCK=t,
                                                           grid=(1,)),
        "layer norm": lambda t: layer_norm.forward_kernel.warmup(
            x, x, x, x, small, small, 999, 999, 1e-5, BLOCK=t, grid=(1,)),
        "layer norm backward": lambda t: layer_norm.backward_kernel.warmup(
            x, x, x, small, small, x, x, x, 999, 999, 999, ROWS=8, BLOCK=t, grid=(1,)),
        "matmul": lambda t: _source(matmul.matmul_kernel).warmup(
            square, square, square, 999, 999, 999, *strides, BLOCK_M=side(t), BLOCK_N=side(t),
            BLOCK_K=32, GROUP_M=8, grid=(1,)),
        "attention": lambda t: flash_attention.attention_kernel.warmup(
            x, x, x, x, 999, 8, *(999, 99, 9) * 4, 0.1, CAUSAL=True, D=side(t), BLOCK_M=side(t),
            BLOCK_N=side(t), grid=(1,)),
    }


def _forget(kernel: Any) -> None:
    kernel.device_caches.clear()


def compile_times(busy: bool) -> dict[str, list[float]]:
    """Milliseconds to compile each kernel, by the size of its tile."""
    clock = time.process_time if busy else time.perf_counter
    kernels = {"vector add": vector_add.add_kernel, "GELU": gelu.gelu_kernel,
               "dropout": dropout.dropout_kernel, "softmax": softmax.softmax_kernel,
               "layer norm": layer_norm.forward_kernel,
               "layer norm backward": layer_norm.backward_kernel,
               "matmul": _source(matmul.matmul_kernel),
               "attention": flash_attention.attention_kernel}
    ways = compilations()
    times: dict[str, list[float]] = {}
    for name, compile_ in ways.items():
        times[name] = []
        for tile in TILES:
            samples = []
            for _ in range(1 + COMPILES):  # the first warms up
                with tempfile.TemporaryDirectory() as folder:
                    os.environ["TRITON_CACHE_DIR"] = folder
                    _forget(kernels[name])
                    start = clock()
                    compile_(tile)
                    samples.append(1e3 * (clock() - start))
            times[name].append(min(samples[1:]))
    return times


# ---------------------------------------------------------------- report
def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def print_rows(console: Console, results: Sequence[tuple[Case, Result]],
               slow: dict[str, float]) -> None:
    """Times and ratios, a line a row."""
    table = Table(title="Milliseconds a call: minimum (median); ratios of minimums, above 1 ours "
                        "is faster; targets are for two threads")
    table.add_column("row", overflow="fold")
    for title in ("ours", "torch", "torch/ours", "target", "x interpreter"):
        table.add_column(title, justify="right")
    for case, result in results:
        ratio = result.ratio("eager")
        assert ratio is not None
        target = case.target if result.threads == 2 else None
        style = "" if target is None else "green" if ratio >= target else "red"
        times = ""
        if case.name in slow:
            times = f"{slow[case.name] * case.work(*case.sizes) / result.minimum('ours'):,.0f}"
        table.add_row(
            result.name,
            *(f"{_milliseconds(result.minimum(n))} ({_milliseconds(result.median(n))})"
              for n in ("ours", "eager")),
            f"[{style}]{ratio:.2f}[/]" if style else f"{ratio:.2f}",
            "" if target is None else f"{target:.2f}", times)
    console.print(table)


def print_compile_times(console: Console, times: dict[str, list[float]]) -> None:
    """Compile times by kernel and tile."""
    table = Table(title="Compile ms, nothing cached (at most 120, and the large tile at most twice "
                        "the small one)")
    for title in ("kernel", *(f"tile of {t:,}" for t in TILES), "ratio"):
        table.add_column(title, justify="left" if title == "kernel" else "right")
    for name, (small, large) in times.items():
        table.add_row(name, f"{small:.0f}", f"{large:.0f}", f"{large / small:.2f}")
    console.print(table)


def page_text(results: Sequence[tuple[Case, Result]], slow: dict[str, float],
              times: dict[str, list[float]]) -> str:
    """What was measured, for the documentation."""
    facts = machine()
    lines = [f"{facts['cpu']}, PyTorch {facts['torch']}, float32 where nothing else is said. The "
             "peer is the PyTorch operator, in the same run; ratios are of fastest samples.", "",
             "| kernel | threads | ms | PyTorch ms | times as fast | times the interpreter |",
             "|---|---|---|---|---|---|"]
    for case, result in results:
        ours, theirs = result.minimum("ours"), result.minimum("eager")
        often = slow[case.name] * case.work(*case.sizes) / ours if case.name in slow else None
        lines.append(f"| {case.name} | {result.threads} | {_milliseconds(ours)} | "
                     f"{_milliseconds(theirs)} | {theirs / ours:.2f} | "
                     f"{'' if often is None else f'{often:,.0f}'} |")
    if times:
        lines += ["", "Milliseconds to compile a kernel, in a process that has compiled before, "
                  "with nothing cached:", "",
                  f"| kernel | {' | '.join(f'tile of {t:,}' for t in TILES)} |", "|---|---|---|",
                  *(f"| {name} | {a:.0f} | {b:.0f} |" for name, (a, b) in times.items())]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark as the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--filter", metavar="REGEX", default="", help="only rows it is found in")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, with commas")
    parser.add_argument("--quick", action="store_true", help="a third of the samples")
    parser.add_argument("--busy", action="store_true",
                        help="a machine with other work: processor time for 1 thread and compiling")
    parser.add_argument("--no-interpreter", action="store_true", help="leave out that column")
    parser.add_argument("--no-compile", action="store_true", help="leave out compile times")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results there")
    parser.add_argument("--write", action="store_true", help="put tables into docs/triton-cpu.md")
    parser.add_argument("--interpret", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    if options.interpret is not None:
        interpret(options.interpret)
        return 0
    console, progress = Console(width=130), Console(stderr=True)
    chosen = [c for c in cases() if re.search(options.filter, c.name)]
    threads = [int(n) for n in options.threads.split(",")]
    results: list[tuple[Case, Result]] = []
    failures: list[str] = []
    for case in chosen:
        for row in rows_of(case, threads):
            try:
                result = measure(row, False, QUICK_ROUNDS if options.quick else ROUNDS,
                                 options.busy)
            except WrongResult as error:
                failures.append(str(error))
                continue
            results.append((case, result))
            progress.print(f"{row.name}: {result.ratio('eager'):.2f}", highlight=False)
    slow = {} if options.no_interpreter else interpreted([c.name for c in chosen])
    times = {} if options.no_compile else compile_times(options.busy)
    if options.json:
        options.json.write_text(json.dumps({
            "machine": machine(), "failures": failures, "compile_ms": times,
            "interpreter_seconds_per_unit": slow,
            "rows": [{**r.as_json(), "target": c.target} for c, r in results]}, indent=1) + "\n")
    if options.write:
        write_between_marks(ROOT / "docs" / "triton-cpu.md", page_text(results, slow, times),
                            ("<!-- triton -->", "<!-- /triton -->"))
    print_rows(console, results, slow)
    if times:
        print_compile_times(console, times)
    for failure in failures:
        console.print(f"failed: {failure}", style="red", markup=False)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
