"""Times operators against PyTorch, eager and compiled: same tensors, same machine, one run.

    python benchmarks/ops.py                       # all rows, about 10 minutes
    python benchmarks/ops.py --no-compile          # only against eager PyTorch, about 2 minutes
    python benchmarks/ops.py --filter 'softmax|layer' --quick --json ops.json

How rows are checked and timed is said in common.py. Ratios are from minimums: the peer's fastest
sample over our fastest sample, so above 1 we are faster.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import (
    QUICK_ROUNDS,
    ROUNDS,
    Result,
    Row,
    WrongResult,
    geometric_mean,
    machine,
    measure,
)
from rich.console import Console
from rich.table import Table

import terrazzo as tz
from terrazzo.errors import TerrazzoError

SLOW = 0.85  # rows below this share of the faster peer's speed are listed by name
f32, bf16 = torch.float32, torch.bfloat16
ROWS: list[Row] = []


# ---------------------------------------------------------------- inputs
def normal(*shapes: Sequence[int], dtype: torch.dtype = f32
           ) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Tensors of normally distributed numbers."""
    return lambda: tuple(torch.randn(*shape).to(dtype) for shape in shapes)


def with_indices(shape: Sequence[int], count: int, limit: int
                 ) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A tensor and indices below a limit."""
    return lambda: (torch.randn(*shape), torch.randint(0, limit, (count,)))


def weights(m: int, k: int, n: int, dtype: torch.dtype = f32
            ) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Rows, a matrix and a bias, scaled so that results are of size 1."""
    return lambda: (torch.randn(m, k).to(dtype), (torch.randn(k, n) / k**0.5).to(dtype),
                    torch.randn(n).to(dtype))


def row(name: str, group: str, inputs: Callable[[], tuple[torch.Tensor, ...]],
        ours: Callable[..., Any], peer: Callable[..., torch.Tensor], threads: Sequence[int] = (1,),
        tolerance: float | None = None) -> None:
    """Add a row for each number of threads."""
    for count in threads:
        ROWS.append(Row(f"{name}, {count} thread{'s' * (count > 1)}", group, inputs, tz.jit(ours),
                        peer, count, tolerance))


# ---------------------------------------------------------------- pointwise
def chain2(lib: Any) -> Callable[..., Any]:
    return lambda x, y: x * y + x


def chain5(lib: Any) -> Callable[..., Any]:
    return lambda x, y: lib.exp(-lib.abs(x - y)) * x + y


def chain10(lib: Any) -> Callable[..., Any]:
    def function(x: Any, y: Any) -> Any:
        a = x * 0.5 + y
        b = lib.maximum(a, y) - lib.minimum(x, y)
        return lib.tanh(b * a) / (lib.sqrt(lib.abs(x)) + 1.0)

    return function


class _Tz:
    """Terrazzo's names for what torch calls the same."""

    exp, abs, tanh, sqrt = tz.exp, tz.absolute, tz.tanh, tz.sqrt
    maximum, minimum = tz.maximum, tz.minimum


def pointwise_rows() -> None:
    for name, make in (("2", chain2), ("5", chain5), ("10", chain10)):
        def add(text: str, n: int, threads: Sequence[int], dtype: torch.dtype = f32,
                name: str = name, make: Any = make) -> None:
            row(f"chain of {name}, {text}", "pointwise", normal((n,), (n,), dtype=dtype),
                make(_Tz), make(torch), threads)

        add("f32 1 KB", 256, (1,))
        add("f32 4 MB", 1 << 20, (1, 2))
        add("bf16 2 MB", 1 << 20, (1,), bf16)
    row("chain of 2, f32 64 KB", "pointwise", normal((1 << 14,), (1 << 14,)),
        chain2(_Tz), chain2(torch), (1, 2))
    row("chain of 2, f32 64 MB", "pointwise", normal((1 << 24,), (1 << 24,)),
        chain2(_Tz), chain2(torch), (1, 2))
    row("chain of 10, f32 32 MB", "pointwise", normal((1 << 23,), (1 << 23,)),
        chain10(_Tz), chain10(torch), (2,))
    row("where, f32 4 MB", "pointwise", normal((1 << 20,), (1 << 20,)),
        lambda x, y: tz.where(x > y, x, y * 2.0), lambda x, y: torch.where(x > y, x, y * 2.0))
    row("clip, f32 4 MB", "pointwise", normal((1 << 20,)),
        lambda x: tz.clip(x, -1.0, 1.0), lambda x: torch.clamp(x, -1.0, 1.0))
    row("broadcast add row and column, f32 2048x512", "pointwise",
        normal((2048, 512), (512,), (2048, 1)),
        lambda x, r, c: x + r + c, lambda x, r, c: x + r + c, (1, 2))


def activation_rows() -> None:
    table: list[tuple[str, Any, Any]] = [
        ("relu", tz.relu, torch.relu),
        ("gelu erf", tz.gelu, F.gelu),
        ("gelu tanh", lambda x: tz.gelu(x, approximate="tanh"),
         lambda x: F.gelu(x, approximate="tanh")),
        ("silu", tz.silu, F.silu),
        ("sigmoid", tz.sigmoid, torch.sigmoid),
        ("tanh", tz.tanh, torch.tanh),
        ("softplus", tz.softplus, F.softplus),
        ("exp", tz.exp, torch.exp),
    ]
    for name, ours, peer in table:
        row(f"{name}, f32 4 MB", "activation", normal((1 << 20,)), ours, peer,
            (1, 2) if name in ("relu", "gelu erf") else (1,))
    row("gelu erf, bf16 2 MB", "activation", normal((1 << 20,), dtype=bf16), tz.gelu, F.gelu, (2,))
    row("silu, bf16 2 MB", "activation", normal((1 << 20,), dtype=bf16), tz.silu, F.silu)
    row("tanh, f32 16 KB", "activation", normal((1 << 12,)), tz.tanh, torch.tanh)
    row("relu, f32 1 KB", "activation", normal((1 << 8,)), tz.relu, torch.relu)


# ---------------------------------------------------------------- rows
def row_rows() -> None:
    for shape, threads in (((65536, 17), (1,)), ((16384, 64), (1,)), ((1024, 1024), (1, 2)),
                           ((32, 32768), (2,)), ((8, 1024), (1,))):
        row(f"softmax, f32 {shape[0]}x{shape[1]}", "rows", normal(shape),
            lambda x: tz.softmax(x), lambda x: torch.softmax(x, -1), threads)
    row("softmax, bf16 1024x1024", "rows", normal((1024, 1024), dtype=bf16),
        lambda x: tz.softmax(x), lambda x: torch.softmax(x, -1))
    row("softmax of axis 0, f32 512x2048", "rows", normal((512, 2048)),
        lambda x: tz.softmax(x, axis=0), lambda x: torch.softmax(x, 0))
    row("log_softmax, f32 256x32000", "rows", normal((256, 32000)),
        lambda x: tz.log_softmax(x), lambda x: torch.log_softmax(x, -1), (2,))

    def layer_norm(x: Any, w: Any, b: Any) -> Any:
        return tz.layer_norm(x, w, b)

    def torch_layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, w.shape, w, b)

    row("layer norm, f32 2048x768", "rows", normal((2048, 768), (768,), (768,)),
        layer_norm, torch_layer_norm, (1, 2))
    row("layer norm, f32 8x768", "rows", normal((8, 768), (768,), (768,)),
        layer_norm, torch_layer_norm)
    row("layer norm, bf16 2048x768", "rows", normal((2048, 768), (768,), (768,), dtype=bf16),
        layer_norm, torch_layer_norm, (1,), 2**-7)
    row("add + layer norm, f32 2048x768", "rows",
        normal((2048, 768), (2048, 768), (768,), (768,)),
        lambda x, y, w, b: tz.layer_norm(x + y, w, b),
        lambda x, y, w, b: F.layer_norm(x + y, w.shape, w, b), (2,))
    row("RMS norm, f32 1024x4096", "rows", normal((1024, 4096), (4096,)),
        lambda x, w: tz.rms_norm(x, w), lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), (1, 2))
    row("RMS norm, bf16 1024x4096", "rows", normal((1024, 4096), (4096,), dtype=bf16),
        lambda x, w: tz.rms_norm(x, w), lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), (2,), 2**-7)
    row("cross entropy, f32 1024x8192", "rows", with_indices((1024, 8192), 1024, 8192),
        lambda x, t: tz.cross_entropy(x, t), F.cross_entropy, (1, 2))


# ---------------------------------------------------------------- reductions
def reduction_rows() -> None:
    square = normal((2048, 2048))
    row("sum of axis 0, f32 2048x2048", "reduction", square,
        lambda x: tz.sum(x, axis=0), lambda x: torch.sum(x, 0), (1, 2))
    row("sum of axis 1, f32 2048x2048", "reduction", square,
        lambda x: tz.sum(x, axis=1), lambda x: torch.sum(x, 1), (1, 2))
    row("sum of all, f32 16 MB", "reduction", square, lambda x: tz.sum(x), torch.sum, (1, 2))
    row("sum of all, f32 64 MB", "reduction", normal((1 << 24,)), lambda x: tz.sum(x), torch.sum,
        (2,))
    row("sum of all, f32 16 KB", "reduction", normal((1 << 12,)), lambda x: tz.sum(x), torch.sum)
    row("sum of axis 1, bf16 2048x2048", "reduction", normal((2048, 2048), dtype=bf16),
        lambda x: tz.sum(x, axis=1), lambda x: torch.sum(x, 1))
    row("max of axis 1, f32 2048x2048", "reduction", square,
        lambda x: tz.max(x, axis=1), lambda x: torch.amax(x, 1))
    row("max of axis 0, f32 2048x2048", "reduction", square,
        lambda x: tz.max(x, axis=0), lambda x: torch.amax(x, 0))
    row("mean of axes 0 and 2, f32 64x64x1024", "reduction", normal((64, 64, 1024)),
        lambda x: tz.mean(x, axis=(0, 2)), lambda x: torch.mean(x, (0, 2)))
    row("var of axis 1, f32 2048x2048", "reduction", square,
        lambda x: tz.var(x, axis=1), lambda x: torch.var(x, 1, correction=0), (1, 2))
    row("sum of squares of axis 1, f32 2048x2048", "reduction", square,
        lambda x: tz.sum(x * x, axis=1), lambda x: torch.sum(x * x, 1))
    row("argmax of axis 1, f32 1024x8192", "reduction", normal((1024, 8192)),
        lambda x: tz.argmax(x, axis=1), lambda x: torch.argmax(x, 1), (1, 2))


# ---------------------------------------------------------------- movement
def movement_rows() -> None:
    for shape, threads, dtype in (((2048, 2048), (1, 2), f32), ((64, 64), (1,), f32),
                                  ((2048, 2048), (1,), bf16)):
        row(f"transpose, {'f32' if dtype is f32 else 'bf16'} {shape[0]}x{shape[1]}", "movement",
            normal(shape, dtype=dtype), lambda x: tz.transpose(x), lambda x: x.t().contiguous(),
            threads)
    row("transpose + add, f32 1024x1024", "movement", normal((1024, 1024), (1024, 1024)),
        lambda x, y: tz.transpose(x) + y, lambda x, y: x.t() + y, (1, 2))
    row("heads permute, f32 8x128x12x64", "movement", normal((8, 128, 12, 64)),
        lambda x: tz.permute_dims(x, axes=(0, 2, 1, 3)),
        lambda x: x.permute(0, 2, 1, 3).contiguous(), (1, 2))
    row("heads permute of keys, f32 8x128x12x64", "movement", normal((8, 128, 12, 64)),
        lambda x: tz.permute_dims(x, axes=(0, 2, 3, 1)),
        lambda x: x.permute(0, 2, 3, 1).contiguous())
    row("NCHW to NHWC, f32 8x64x56x56", "movement", normal((8, 64, 56, 56)),
        lambda x: tz.permute_dims(x, axes=(0, 2, 3, 1)),
        lambda x: x.permute(0, 2, 3, 1).contiguous(), (2,))
    row("embedding, f32 4096 of 30000x768", "movement", with_indices((30000, 768), 4096, 30000),
        lambda w, i: tz.embedding(w, i), lambda w, i: F.embedding(i, w), (1, 2))
    row("take columns, f32 2048x1024", "movement", with_indices((2048, 1024), 512, 1024),
        lambda x, i: tz.take(x, i, axis=1), lambda x, i: torch.index_select(x, 1, i))
    row("concat of axis 1, f32 1024x(512+256+256)", "movement",
        normal((1024, 512), (1024, 256), (1024, 256)),
        lambda a, b, c: tz.concat(a, b, c, axis=1), lambda a, b, c: torch.cat((a, b, c), 1),
        (1, 2))
    row("concat of axis 0, f32 2x(512x1024)", "movement", normal((512, 1024), (512, 1024)),
        lambda a, b: tz.concat(a, b, axis=0), lambda a, b: torch.cat((a, b), 0))


# ---------------------------------------------------------------- products
def product_rows() -> None:
    def biased(x: Any, w: Any, b: Any) -> Any:
        return x @ w + b

    row("matmul, f32 1024x1024x1024", "product", normal((1024, 1024), (1024, 1024)),
        lambda x, y: x @ y, lambda x, y: x @ y, (1, 2))
    row("matmul + bias + gelu, f32 2048x768x3072", "product", weights(2048, 768, 3072),
        lambda x, w, b: tz.gelu(biased(x, w, b)), lambda x, w, b: F.gelu(biased(x, w, b)), (2,))
    row("matmul + bias + relu, f32 128x768x3072", "product", weights(128, 768, 3072),
        lambda x, w, b: tz.relu(biased(x, w, b)), lambda x, w, b: F.relu(biased(x, w, b)), (1, 2))
    row("matmul + bias, f32 16x768x3072", "product", weights(16, 768, 3072), biased, biased,
        (1, 2))
    row("matmul + bias, f32 1x768x3072", "product", weights(1, 768, 3072), biased, biased, (1, 2))
    row("linear + bias + silu, f32 512x1024x1024", "product",
        normal((512, 1024), (1024, 1024), (1024,)),
        lambda x, w, b: tz.silu(tz.linear(x, w, b)), lambda x, w, b: F.silu(F.linear(x, w, b)),
        (2,))
    row("matmul + bias, bf16 256x768x768", "product", weights(256, 768, 768, bf16), biased,
        biased, (1,), 2**-6)
    row("matmul, f32 64x64x64", "product", normal((64, 64), (64, 64)), lambda x, y: x @ y,
        lambda x, y: x @ y)
    row("batched matmul, f32 96 of 128x64x128", "product", normal((96, 128, 64), (96, 64, 128)),
        lambda x, y: x @ y, lambda x, y: x @ y, (1, 2))


def attention_rows() -> None:
    for shape, causal, threads, dtype in (
            ((8, 12, 128, 64), False, (1, 2), f32), ((1, 12, 512, 64), True, (1,), f32),
            ((1, 12, 1024, 64), False, (2,), f32), ((1, 12, 1024, 64), True, (2,), f32),
            ((2, 12, 256, 64), True, (1,), bf16)):
        text = "x".join(map(str, shape))
        row(f"{'causal ' * causal}attention, {'f32' if dtype is f32 else 'bf16'} {text}",
            "attention", normal(shape, shape, shape, dtype=dtype),
            lambda q, k, v, c=causal: tz.scaled_dot_product_attention(q, k, v, causal=c),
            lambda q, k, v, c=causal: F.scaled_dot_product_attention(q, k, v, is_causal=c),
            threads, 2**-6 if dtype is bf16 else None)


for add_rows in (pointwise_rows, activation_rows, row_rows, reduction_rows, movement_rows,
                 product_rows, attention_rows):
    add_rows()


# ---------------------------------------------------------------- report
def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}" if seconds < 1e-3 else f"{seconds * 1e6:,.0f}"


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    style = "red" if ratio < SLOW else "green" if ratio >= 1 else "yellow"
    return f"[{style}]{ratio:.2f}[/]"


def print_table(console: Console, results: Sequence[Result]) -> None:
    """Times in microseconds, minimum (median); ratios of minimums."""
    table = Table(title="Microseconds a call: minimum (median). Ratios of minimums, above 1 ours "
                        "is faster")
    table.add_column("row", overflow="fold")
    for title in ("MB", "ours", "eager", "compile", "eager/ours", "compile/ours"):
        table.add_column(title, justify="right")
    for result in results:
        cells = [f"{_time(result.minimum(n))} ({_time(result.median(n))})"
                 if n in result.samples else "-" for n in ("ours", "eager", "compile")]
        table.add_row(result.name, f"{result.megabytes:.3g}", *cells,
                      _ratio(result.ratio("eager")), _ratio(result.ratio("compile")))
    console.print(table)


def print_summary(console: Console, results: Sequence[Result]) -> None:
    """Geometric means over all rows, and the rows that fall behind."""
    for peer in ("eager", "compile"):
        ratios = [r for x in results if (r := x.ratio(peer)) is not None]
        if ratios:
            console.print(f"geometric mean against {peer}: {geometric_mean(ratios):.2f} "
                          f"({len(ratios)} rows)")
    behind = sorted((x for x in results if x.against_best() < SLOW), key=Result.against_best)
    console.print(f"rows below {SLOW} of the faster peer: {len(behind) or 'none'}")
    for result in behind:
        console.print(f"  {result.against_best():.2f}  {result.name}", highlight=False)


def run(rows: Sequence[Row], compiled: bool, rounds: int, busy: bool, progress: Console
        ) -> tuple[list[Result], list[str]]:
    """Measure rows one after the other; also what went wrong."""
    results: list[Result] = []
    failures: list[str] = []
    for number, each in enumerate(rows, 1):
        start = time.perf_counter()
        try:
            result = measure(each, compiled, rounds, busy)
        except (WrongResult, TerrazzoError) as error:
            failures.append(f"{each.name}: {error}")
            progress.print(f"[{number}/{len(rows)}] {failures[-1]}", markup=False)
            continue
        results.append(result)
        progress.print(f"[{number}/{len(rows)}] {each.name}: {result.against_best():.2f} of the "
                       f"faster peer ({time.perf_counter() - start:.1f} s)", highlight=False,
                       markup=False)
    return results, failures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark as the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--filter", metavar="REGEX", default="", help="only rows it is found in")
    parser.add_argument("--rows", metavar="N", type=int, help="only the first N of those")
    parser.add_argument("--quick", action="store_true", help="a third of the samples")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--busy", action="store_true",
                        help="the machine has other work: time 1-thread rows by processor time")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results there")
    options = parser.parse_args(arguments)
    wanted = re.compile(options.filter)
    rows = [r for r in ROWS if wanted.search(f"{r.group}: {r.name}")][:options.rows]
    console = Console(width=150) if not sys.stdout.isatty() else Console()
    results, failures = run(rows, not options.no_compile,
                            QUICK_ROUNDS if options.quick else ROUNDS, options.busy,
                            Console(stderr=True))
    if options.json:
        options.json.write_text(json.dumps(
            {"machine": machine(), "rows": [r.as_json() for r in results], "failures": failures},
            indent=1) + "\n")
    print_table(console, results)
    print_summary(console, results)
    for failure in failures:
        console.print(f"failed: {failure}", style="red", markup=False)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
