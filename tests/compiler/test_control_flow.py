"""Loops and branches in machine code: what lies where, constants, nesting, keeping, profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.base.shapes import dim
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.compiler.control_flow import ControlLowering, is_native
from terrazzo.compiler.driver import compile_graph
from terrazzo.compiler.options import Options
from terrazzo.compiler.rewriting import inlined
from terrazzo.dtypes import bool_, float32
from terrazzo.graph.evaluate import run
from terrazzo.graph.ir import Graph, TensorType
from terrazzo.graph.trace import trace
from terrazzo.loop.steps import Repeat, calls_in
from terrazzo.runtime.executable import Executable


def graph_of(function: Any, *types: TensorType) -> Graph:
    return trace(function, types, name="controlled")[0]


def floats(*shape: Any) -> TensorType:
    return TensorType(shape, float32)


def check(function: Any, arrays: list[np.ndarray], *types: TensorType) -> list[np.ndarray]:
    """Native results against the reference's."""
    graph = graph_of(function, *types)
    executable = compile_graph(graph)
    assert isinstance(executable, Executable)
    results = executable.run(arrays)
    for got, want in zip(results, run(graph, arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    return results


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
def test_carried_values_may_change_places(turns: int, rng: np.random.Generator) -> None:
    def swap(x: Any, y: Any) -> Any:
        return tz.scan(lambda s, _: ((s[1], s[0] * 2.0), s[0]), (x, y), None, length=turns)

    x, y = rng.normal(size=(2, 5)).astype(np.float32)
    check(swap, [x, y], floats(5), floats(5))


def test_results_that_nothing_computes(rng: np.random.Generator) -> None:
    """An operand, a constant, and one value twice as results of a branch."""
    def choose(flag: Any, x: Any) -> Any:
        twice = x * 2.0
        return tz.cond(flag, lambda: (x, np.ones(3, np.float32), twice, twice),
                       lambda: (twice, x, x, twice))

    x = rng.normal(size=3).astype(np.float32)
    for flag in (True, False):
        results = check(choose, [np.array(flag), x], TensorType((), bool_), floats(3))
        assert len({r.ctypes.data for r in results}) == 4
        assert all(r.ctypes.data != x.ctypes.data for r in results)


def test_constants_of_bodies_are_packed_products(rng: np.random.Generator) -> None:
    w = rng.normal(size=(8, 8)).astype(np.float32) * 0.3

    def recurrent(x: Any) -> Any:
        return tz.scan(lambda h, row: (tz.tanh(h @ w + row), h @ w), x[0], x)

    check(recurrent, [rng.normal(size=(6, 4, 8)).astype(np.float32)], floats(6, 4, 8))


def test_loops_in_branches_in_loops(rng: np.random.Generator) -> None:
    def nested(x: Any) -> Any:
        def shrink(v: Any) -> Any:
            return tz.while_loop(lambda s: tz.max(s) > 1.0, lambda s: s * 0.5, v)

        def turn(h: Any, row: Any) -> Any:
            h = tz.cond(tz.sum(row) > 0.0, lambda: shrink(h + row), lambda: h - row)
            return h, tz.sum(h)

        return tz.scan(turn, tz.zeros_like(x[0]), x, reverse=True)

    check(nested, [rng.normal(size=(9, 7)).astype(np.float32) * 3], floats(9, 7))


def test_sizes_are_symbolic(rng: np.random.Generator) -> None:
    n, m = dim("n"), dim("m")

    def running(h: Any, x: Any) -> Any:
        return tz.scan(lambda h, row: (h + row, tz.exp(h)), h, x)

    graph = graph_of(running, floats(m), floats(n, m))
    executable = compile_graph(graph)
    for shape in ((3, 4), (7, 2), (0, 5), (1, 1)):
        x = rng.normal(size=shape).astype(np.float32)
        arrays = [np.ones(shape[1], np.float32), x]
        for got, want in zip(executable.run(arrays), run(graph, arrays), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_operators_of_users_inside_bodies_are_part_of_the_key() -> None:
    def made(factor: float) -> Any:
        @tz.op(name="scaled_inside_a_body")
        def scaled(x: Any) -> Any:
            return x * factor

        return tz.jit(lambda x: tz.scan(lambda h, _: (scaled(h), ()), x, None, length=2)[0])

    x = np.ones(3, np.float32)
    np.testing.assert_array_equal(made(2.0)(x), 4 * x)
    np.testing.assert_array_equal(made(3.0)(x), 9 * x)


def test_control_flow_can_be_saved(tmp_path: Path) -> None:
    graph = graph_of(lambda x: tz.while_loop(lambda s: tz.sum(s) < 100.0, lambda s: s * 2.0, x),
                     floats(4))
    executable = compile_graph(graph)
    executable.save(tmp_path / "loop.tzx")
    x = np.ones(4, np.float32)
    np.testing.assert_array_equal(tz.load(tmp_path / "loop.tzx")(x), x * 32)


def test_a_loop_is_one_line_of_the_profile() -> None:
    graph = graph_of(lambda x: tz.exp(tz.scan(lambda h, _: (h + 1.0, ()), x, None, length=5)[0]),
                     floats(4))
    profiles: list[Any] = []
    compile_graph(graph).run([np.zeros(4, np.float32)], profiles=profiles)
    assert "scan" in [k.name for k in profiles[0].kernels]


def test_operators_of_the_host_are_not_native() -> None:
    graph = graph_of(lambda x: tz.scan(lambda h, _: (h + 1.0, ()), x, None, length=5)[0],
                     floats(4))
    assert is_native(graph)
    n = dim("n")
    hidden = graph_of(lambda x: tz.scan(lambda h, _: (h + tz.sum(tz.ones(shape=(n,))), ()), x,
                                        None, length=5)[0], floats(4))
    assert not is_native(hidden)  # the size n shows in no input


@pytest.mark.parametrize("turns", [3, 7])
@pytest.mark.parametrize("batch", [1, 5, 16, 70])
def test_weights_of_a_scan_are_packed_before_it(turns: int, batch: int) -> None:
    """As they lie and transposed, of two scans in one another, of a length that pays and not."""
    rng = np.random.default_rng(0)
    x, w, u = (rng.normal(size=s).astype(np.float32) * 0.1 for s in (
        (turns, batch, 37), (37, 37), (37, 37)))

    def inner(h: Any, w: Any, u: Any) -> Any:
        v = tz.tanh(u * h[0, 0])  # changes from turn to turn of the outer scan only
        return tz.scan(lambda g, _: (tz.tanh(g @ w + g @ v.T), ()), h, None, length=5)[0]

    def twice(x: Any, w: Any, u: Any) -> Any:
        return tz.scan(lambda h, row: (inner(h + row @ u.T, w, u), h), tz.zeros_like(x[0]), x)

    types = floats(turns, batch, 37), floats(37, 37), floats(37, 37)
    check(twice, [x, w, u], *types)
    lowering = ControlLowering(inlined(graph_of(twice, *types)), Cpu(), Options.now())
    loop = next(s for s in lowering.steps if isinstance(s, Repeat))
    packs = [c.name for c in calls_in(lowering.steps) if c.name.startswith("k_pack")]
    assert len(packs) == len(set(packs))
    own = [s.name for s in loop.body if s.name.startswith("k_pack")]
    first = [s.name for s in lowering.steps if s.name.startswith("k_pack")]
    assert len(own) == 2 and len(first) == (turns > 3)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("batch", "size"), [(1, 33), (5, 64), (16, 71)])
def test_weights_of_bfloat16_in_a_scan(batch: int, size: int, transposed: bool,
                                       rng: np.random.Generator) -> None:
    """Packed in pairs where the processor multiplies those, in compiled code."""
    narrow = tz.dtypes.bfloat16.np
    rows = (rng.standard_normal((6, batch, size)) * 0.5).astype(narrow)
    weight = (rng.standard_normal((size, size)) * size**-0.5).astype(narrow)

    @tz.op
    def states(rows: Any, weight: Any) -> Any:
        def step(h: Any, row: Any) -> Any:
            h = row + h @ (weight.T if transposed else weight)
            return h, h

        return tz.scan(step, tz.zeros_like(rows[0]), rows)[1]

    h, right = np.zeros((batch, size)), weight.astype(np.float64)
    for row, got in zip(rows, states(rows, weight), strict=True):
        h = row.astype(np.float64) + h @ (right.T if transposed else right)
        np.testing.assert_allclose(np.asarray(got).astype(np.float64), h, rtol=2.0**-8, atol=1e-4)
        h = np.asarray(got).astype(np.float64)


def test_a_loop_that_is_all_of_another_counts_its_own_turns() -> None:
    """Nothing stands between the two, so no kernel tells them apart."""
    def body(values: Any, zero: Any) -> Any:
        def halved(row: Any) -> Any:
            return tz.while_loop(lambda s: s[1] > 1, lambda s: (s[0] + 1, s[1] / 2), (zero, row))

        return tz.scan(lambda carry, row: (carry, halved(row)), (), values)[1]

    counts, rest = tz.jit(body)(np.array([1, 8, 3, 100], np.float32), np.array(0))
    np.testing.assert_array_equal(counts, [0, 3, 2, 7])
    np.testing.assert_array_equal(rest, np.array([1, 1, 0.75, 0.78125], np.float32))
