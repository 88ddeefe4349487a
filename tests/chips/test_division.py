"""Work shared out among threads: kernels divide, and give the same bits on 1 to 16 threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from terrazzo.base.scalar import Scalar
from terrazzo.chips.cpu import pool
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.division import by_threads, thread_counts
from terrazzo.chips.cpu.llvm.kernel import compile_function
from terrazzo.chips.cpu.templates import lower
from terrazzo.chips.spec import ChipSpec
from terrazzo.compiler.lowering import Lowering
from terrazzo.dtypes import float32
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace
from terrazzo.index import Var, evaluate
from terrazzo.knobs import knobs
from terrazzo.loop import interpret
from terrazzo.loop.ir import THREADS, Alloc, Block, For, Function, If, Let, Stmt
from terrazzo.loop.simplify import simplify
from terrazzo.ops.activation import gelu, relu
from terrazzo.ops.attention import scaled_dot_product_attention
from terrazzo.ops.contract import batch_matmul, linear, matmul
from terrazzo.ops.conv import convolve

MANY = 16


@pytest.fixture(params=[bits for bits in (256, 512) if bits <= host().vector_bits])
def chip(request: pytest.FixtureRequest) -> ChipSpec:
    with knobs.override(vector_bits=request.param):
        return replace(host(), cores=MANY)


def numbers(shape: Sequence[int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def kernel_of(function: Callable[..., Any], shapes: Sequence[Sequence[Any]], chip: ChipSpec,
              constant: bool = False) -> Function:
    graph, _ = trace(function, [TensorType(tuple(s), float32) for s in shapes])
    (group,) = Lowering(graph, Cpu(chip)).fused.groups
    lowered = lower(group.program, chip,
                    frozenset(group.program.inputs[1:2]) if constant else frozenset())
    assert lowered is not None and bool(lowered.packed) == constant
    return simplify(lowered)


def check_threads(function: Function, shapes: Sequence[Sequence[int]], shape: Sequence[int],
                  chip: ChipSpec, want: np.ndarray | None = None,
                  sizes: Sequence[int] = ()) -> None:
    """The same bits on any number of threads, and right ones."""
    kernel = compile_function(function, chip, dict(pool.symbols()))
    inputs = [numbers(s, seed) for seed, s in enumerate(shapes)]
    given = [np.ascontiguousarray(a) for a in function.arranged(inputs)]
    results = []
    for threads in (1, 2, 3, 5, 8, 13, MANY):
        with knobs.override(threads=threads):
            pool.sync()
            out = np.full(shape, np.nan, np.float32)
            kernel([a.ctypes.data for a in given] + [out.ctypes.data], sizes, threads)
        results.append(out)
    pool.sync()
    for out in results:
        np.testing.assert_array_equal(out, results[0])
    if want is not None:
        np.testing.assert_allclose(results[0], want, rtol=2e-4, atol=2e-4)
    assert np.isfinite(results[0]).all()


# ---------------------------------------------------------------- the same on any number of threads
@pytest.mark.parametrize("constant", [False, True], ids=["computed", "constant"])
@pytest.mark.parametrize("m, k, n", [(128, 200, 192), (197, 64, 130), (50, 96, 300), (13, 40, 70),
                                     (7, 300, 65), (300, 70, 100), (520, 130, 200)], ids=str)
def test_products(chip: ChipSpec, m: int, k: int, n: int, constant: bool) -> None:
    shapes = [(m, k), (k, n), (n,)]
    function = kernel_of(lambda x, y, b: relu(matmul(x, y) + b), shapes, chip, constant)
    x, y, b = (numbers(s, i) for i, s in enumerate(shapes))
    check_threads(function, shapes, (m, n), chip, np.maximum(x.astype(np.float64) @ y + b, 0))


@pytest.mark.parametrize("left, right", [((6, 70, 40), (6, 40, 50)), ((8, 128, 64), (8, 64, 128)),
                                         ((3, 300, 20), (3, 20, 30))], ids=str)
def test_batches(chip: ChipSpec, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    want = numbers(left).astype(np.float64) @ numbers(right, 1)
    check_threads(kernel_of(matmul, [left, right], chip), [left, right], want.shape, chip, want)


@pytest.mark.parametrize("constant", [False, True], ids=["computed", "constant"])
def test_rows_that_are_known_when_it_runs(chip: ChipSpec, constant: bool) -> None:
    function = kernel_of(lambda x, y: gelu(linear(x, y)), [(Var("M"), 96), (130, 96)], chip,
                         constant)
    for m in (1, 30, 128, 400):
        check_threads(function, [(m, 96), (130, 96)], (m, 130), chip, sizes=[m])


@pytest.mark.parametrize("x, w, stride, pad", [
    ((1, 28, 28, 32), (3, 3, 32, 70), 1, 1), ((2, 14, 14, 40), (1, 1, 40, 130), 1, 0),
    ((1, 7, 7, 256), (3, 3, 256, 96), 1, 1), ((1, 30, 30, 3), (7, 7, 3, 20), 2, 3),
    ((1, 1, 200, 24), (1, 5, 24, 40), 1, 0)], ids=str)
def test_convolutions(chip: ChipSpec, x: tuple[int, ...], w: tuple[int, ...], stride: int,
                      pad: int) -> None:
    pads = ((pad, pad) if x[1] > 1 else (0, 0), (pad, pad))
    function = kernel_of(lambda a, b: relu(convolve(a, b, strides=(stride, stride), padding=pads,
                                                    dilation=(1, 1), groups=1)),
                         [x, w], chip, True)
    size = [(n + sum(p) - t) // stride + 1 for n, p, t in zip(x[1:3], pads, w[:2], strict=True)]
    check_threads(function, [x, w], (x[0], *size, w[-1]), chip)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, queries", [(3, 100), (12, 128), (5, 33)], ids=str)
def test_attention(chip: ChipSpec, heads: int, queries: int, causal: bool) -> None:
    shape = (heads, queries, 40)
    function = kernel_of(lambda q, k, v: scaled_dot_product_attention(q, k, v, causal=causal),
                         [shape] * 3, chip)
    check_threads(function, [shape] * 3, shape, chip)


# ---------------------------------------------------------------- enough for every thread
def tasks_of(stmt: Stmt, env: dict[Var, Any]) -> list[int]:
    """Iterations of the parallel loops of a kernel, in order."""
    if isinstance(stmt, Block):
        return [n for s in stmt.stmts for n in tasks_of(s, env)]
    if isinstance(stmt, Alloc):
        return tasks_of(stmt.body, env)
    if isinstance(stmt, Let):
        return tasks_of(stmt.body, {**env, stmt.var: int(interpret.evaluate_scalar(
            stmt.value, env, {}))})
    if isinstance(stmt, For):
        if stmt.kind == "parallel":
            return [int(evaluate(stmt.hi, env)) - int(evaluate(stmt.lo, env))]
        return tasks_of(stmt.body, {**env, stmt.var: int(evaluate(stmt.lo, env))})
    if isinstance(stmt, If):
        raise AssertionError("a plan that is chosen when it runs")
    return []


@pytest.mark.parametrize("m, k, n", [(128, 768, 768), (128, 3072, 768), (128, 768, 3072),
                                     (197, 768, 768), (197, 768, 2304), (64, 768, 2304),
                                     (128, 512, 512), (512, 768, 768), (1500, 384, 1536)], ids=str)
def test_layers_of_transformers_divide_evenly(chip: ChipSpec, m: int, k: int, n: int) -> None:
    """The longest share of the rows and columns is at most 1.2 of an even one."""
    function = kernel_of(lambda x, y: batch_matmul(x, y), [(m, k), (k, n)], chip, True)
    for threads in (4, 8, MANY):
        (tasks,) = tasks_of(function.body, {THREADS: threads})
        assert -(-tasks // threads) * threads / tasks <= 1.2, (threads, tasks)
    assert tasks_of(function.body, {THREADS: 1})[0] <= -(-n // 16) * -(-m // 48)


def test_attention_divides_evenly(chip: ChipSpec) -> None:
    for heads, queries in ((12, 128), (12, 197), (6, 1500), (8, 128)):
        function = kernel_of(scaled_dot_product_attention, [(heads, queries, 64)] * 3, chip)
        (tasks,) = tasks_of(function.body, {THREADS: MANY})
        assert -(-tasks // MANY) * MANY / tasks <= 1.2, (heads, queries, tasks)


def test_plans_are_chosen_by_the_threads_that_run() -> None:
    chip = replace(host(), cores=MANY)
    assert thread_counts(chip) == [1, 2, 4, 8, 16]
    same, differs = by_threads(chip, lambda threads: (7, 10 * threads))
    assert same == 7 and isinstance(differs, Scalar)
    found = [int(interpret.evaluate_scalar(differs, {THREADS: t}, {}))
             for t in (1, 2, 3, 9, 16, 99)]
    assert found == [10, 20, 40, 160, 160, 160]
