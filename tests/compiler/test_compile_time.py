"""Compiling takes time that grows with a program's length and no faster, and no stack.

Work is counted, not timed: calls of Python functions are the same on every machine, and so is the
text that LLVM gets. `benchmarks/compile_time.py` measures seconds.
"""

from __future__ import annotations

import cProfile
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.base.shapes import dim
from terrazzo.base.unwind import Walk, unwind
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.compiler.levels import level_text
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.rewriting import inlined
from terrazzo.dtypes import float32
from terrazzo.expr import evaluate as expr_evaluate
from terrazzo.graph.applying import constant
from terrazzo.graph.derivatives import grad_function
from terrazzo.graph.evaluate import run
from terrazzo.graph.fusion import fuse
from terrazzo.graph.ir import Graph, TensorType, Value
from terrazzo.graph.trace import trace
from terrazzo.loop import interpret

Body = Callable[..., Any]


# ---------------------------------------------------------------- programs of any length
def elementwise(steps: int) -> Body:
    def body(x: Any) -> Any:
        for _ in range(steps):
            x = tz.sin(x) * 1.01
        return x

    return body


def softmaxes(steps: int) -> Body:
    def body(x: Any) -> Any:
        for _ in range(steps):
            x = tz.softmax(x) + x
        return x

    return body


def means(steps: int) -> Body:
    def body(x: Any) -> Any:
        for _ in range(steps):
            x = x - tz.mean(x)
        return x

    return body


def sinkhorn(steps: int) -> Body:
    def body(x: Any) -> Any:
        for _ in range(steps):
            x = x - tz.logsumexp(x, axis=1, keepdims=True)
            x = x - tz.logsumexp(x, axis=0, keepdims=True)
        return tz.exp(x)

    return body


def sinkhorn_backward(steps: int) -> Body:
    return grad_function(lambda x: tz.sum(tz.square(sinkhorn(steps)(x))))


def tree(steps: int) -> Body:
    def body(x: Any) -> Any:
        values = [tz.abs(x * float(i)) for i in range(1, steps + 1)]
        while len(values) > 1:
            pairs = [a + b for a, b in zip(values[::2], values[1::2], strict=False)]
            values = pairs + values[2 * len(pairs):]
        return values[0]

    return body


def diamonds(steps: int) -> Body:
    def body(x: Any) -> Any:
        for _ in range(steps):
            x = tz.sin(x) * tz.cos(x)
        return x

    return body


def fibonacci(steps: int) -> Body:
    """Each value is used twice: as a tree it would have 1.6^steps nodes."""
    def body(x: Any) -> Any:
        a, b = x, x * 0.5
        for _ in range(steps):
            a, b = b, a * 0.5 + b
        return b

    return body


def products(steps: int) -> Body:
    def body(x: Any) -> Any:
        for _ in range(steps):
            x = tz.tanh(x @ x)
        return x

    return body


def norms(steps: int) -> Body:
    """Layer norms as exporters write them: three rules apply to each, one after the other."""
    weight, bias = np.linspace(0.5, 1.5, 8, dtype=np.float32), np.ones(8, np.float32)

    def body(x: Any) -> Any:
        for _ in range(steps):
            centred = x - tz.mean(x, axis=-1, keepdims=True)
            variance = tz.mean(centred * centred, axis=-1, keepdims=True)
            x = x + (centred / tz.sqrt(variance + 1e-5) * weight + bias)
        return x

    return body


def long_sum(steps: int) -> Body:
    """One expression of many terms."""
    def body(x: Any) -> Any:
        total = x
        for i in range(steps):
            total = total + x[i % 8]
        return total

    return body


PROGRAMS: dict[str, tuple[Callable[[int], Body], tuple[int, ...], int]] = {
    "elementwise": (elementwise, (64,), 50),
    "softmaxes": (softmaxes, (64,), 20),
    "means": (means, (64,), 40),
    "sinkhorn": (sinkhorn, (8, 8), 10),
    "sinkhorn backward": (sinkhorn_backward, (8, 8), 5),
    "tree": (tree, (64,), 60),
    "diamonds": (diamonds, (64,), 40),
    "fibonacci": (fibonacci, (64,), 60),
    "products": (products, (8, 8), 40),
    "norms": (norms, (8, 8), 15),
    "long sum": (long_sum, (8, 8), 120),
}


def graph_of(name: str, steps: int) -> Graph:
    make, shape, _ = PROGRAMS[name]
    return trace(make(steps), [TensorType(shape, float32)], "program")[0]


def lowered(name: str, steps: int) -> Lowering:
    lowering = Lowering(inlined(graph_of(name, steps)), Cpu())
    assert level_text(lowering, "llvm")
    return lowering


def calls_of(function: Callable[[], Any]) -> int:
    profile = cProfile.Profile()
    profile.runcall(function)
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize("name", PROGRAMS)
def test_work_is_linear_in_the_length(name: str) -> None:
    steps = PROGRAMS[name][2]
    lowered(name, steps)  # what is made once, tables and interned indices
    few, many = (calls_of(lambda n=n: lowered(name, n)) for n in (steps, 3 * steps))
    assert few > 1000
    assert many < 3 * 1.3 * few  # quadratic is 9 times as much


@pytest.mark.parametrize("name", PROGRAMS)
def test_code_is_linear_in_the_length_and_in_small_functions(name: str) -> None:
    steps = PROGRAMS[name][2]
    few, many = (level_text(lowered(name, n), "llvm") for n in (steps, 3 * steps))
    assert len(many) < 3 * 1.3 * len(few)
    longest = max(len(body.splitlines()) for body in re.findall(r"^define.*?^}", many, re.M | re.S))
    assert longest < 20_000  # LLVM is not linear in one function


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_step_recurses_along_a_program(name: str) -> None:
    graph = graph_of(name, 2)
    rehearse(graph)  # imports, and what is made once
    steps = 3 * PROGRAMS[name][2]
    limit, frame = 0, sys._getframe()
    while frame is not None:
        limit, frame = limit + 1, frame.f_back  # type: ignore[assignment]
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 120)
    try:
        rehearse(graph_of(name, steps))
    finally:
        sys.setrecursionlimit(before)


def rehearse(graph: Graph) -> None:
    """Everything that is done with a program: lowering, printing and running at every level."""
    lowering = Lowering(inlined(graph), Cpu())
    assert level_text(lowering, "llvm")
    shown = [str(lowering.source), str(lowering.graph), str(lowering.fused),
             *map(str, lowering.functions)]
    assert all(shown)
    arrays = [np.ones(v.shape, np.float32) for v in graph.inputs]
    assert run(lowering.graph, arrays)
    for group, function in zip(lowering.fused.groups, lowering.functions, strict=True):
        inputs = [np.ones(v.shape, np.float32) for v in group.inputs]
        assert expr_evaluate.run(group.program, inputs, {})
        outputs = [np.zeros(int(np.prod(v.shape)), np.float32) for v in group.outputs]
        interpret.run(function, [*map(np.ravel, function.arranged(inputs)), *outputs], {})


@pytest.mark.parametrize("name", PROGRAMS)
def test_long_programs_are_right(name: str, rng: np.random.Generator) -> None:
    make, shape, steps = PROGRAMS[name]
    x = rng.uniform(0.1, 1.0, shape).astype(np.float32) / 8
    graph = graph_of(name, steps)
    (expected,) = run(graph, [x], wide=True)
    got = tz.op(make(steps))(x)
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-5 * np.abs(expected).max())


# ---------------------------------------------------------------- where kernels end
def test_kernels_end_and_turns_of_a_loop_share_them() -> None:
    lowering = lowered("softmaxes", 200)
    assert all(len(g.program.stages) <= Cpu.fusion_limits.stages for g in lowering.fused.groups)
    assert len(lowering.fused.groups) > 10
    assert len(set(lowering.functions)) <= 4


def test_short_programs_stay_one_kernel() -> None:
    assert len(lowered("softmaxes", 5).fused.groups) == 1
    assert len(lowered("elementwise", 20).fused.groups) == 1


def random_graph(rng: np.random.Generator, count: int) -> Graph:
    """Rows, columns, whole kernels and cheap operators, each reading what was made before."""
    def body(x: Any) -> Any:
        values = [x, x * 0.5]
        for _ in range(count):
            a, b = (values[int(i)] for i in rng.integers(max(0, len(values) - 12), len(values), 2))
            values.append([
                lambda a, b: a + b, lambda a, b: tz.exp(a) - b,
                lambda a, b: a - tz.max(b, axis=1, keepdims=True),
                lambda a, b: a * tz.sum(b, axis=0, keepdims=True),
                lambda a, b: tz.softmax(a) + b, lambda a, b: tz.tanh(a @ b),
                lambda a, b: tz.sort(a) + b,
            ][int(rng.integers(7))](a, b))
        return tuple(values[-3:])

    return trace(body, [TensorType((16, 16), float32)], "random")[0]


@pytest.mark.parametrize("seed", range(30))
def test_every_kernel_follows_those_it_reads(seed: int) -> None:
    graph = Lowering(inlined(random_graph(np.random.default_rng(seed), 120)), Cpu()).graph
    fused = fuse(graph, Cpu.fusion_limits)
    made: set[Value] = {*graph.inputs, *fused.constants}
    assert len(fused.groups) > 10
    for group in fused.groups:
        missing = [v for v in group.inputs if fused.root(v) not in made]
        assert not missing, group.program
        made.update(group.outputs)
    assert made >= {fused.root(v) for v in graph.outputs}


# ---------------------------------------------------------------- recursion without the stack
def test_unwind_answers_what_recursion_would() -> None:
    def fibonacci_number(n: int) -> Walk[int]:
        if n < 2:
            return n
        return (yield fibonacci_number(n - 1)) + (yield fibonacci_number(n - 2))

    def depth(n: int) -> Walk[int]:
        return 0 if n == 0 else 1 + (yield depth(n - 1))

    assert unwind(fibonacci_number(15)) == 610
    assert unwind(depth(50_000)) == 50_000


def test_unwind_passes_errors_on() -> None:
    def fails(n: int) -> Walk[int]:
        if n == 0:
            raise KeyError("bottom")
        return (yield fails(n - 1))

    with pytest.raises(KeyError, match="bottom"):
        unwind(fails(2000))


def test_a_size_that_varies_does_not_make_code_long() -> None:
    """Three small products and a softmax, for any number of rows: a ten-node model's load time."""
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=s).astype(np.float32) for s in ((16, 32), (32, 32), (32, 4))]

    def network(x: Any) -> Any:
        for w in weights[:-1]:
            x = tz.tanh(tz.matmul(x, constant(w)))
        return tz.softmax(tz.matmul(x, constant(weights[-1])))

    graphs = (trace(network, [TensorType((rows, 16), float32)], name="f")[0]
              for rows in (8, dim("rows")))
    fixed, any_batch = (len(level_text(Lowering(inlined(g), Cpu()), "llvm").splitlines())
                        for g in graphs)
    assert 200 < fixed < any_batch
    # 4,400 with tiles for what is left over in every kernel, and every division of sizes wherever
    # its name stands
    # 2,516 of 256 bits, as loops of unknown length end in fewer and fewer vectors side by side.
    assert any_batch < 2700
