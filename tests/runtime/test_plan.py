"""The memory plan: values that live at the same time never overlap, others share memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.base.shapes import dim
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.compiler.lowering import Lowering
from terrazzo.dtypes import float32
from terrazzo.graph.ir import TensorType, Value
from terrazzo.graph.trace import trace
from terrazzo.index import evaluate, free_vars
from terrazzo.knobs import knobs
from terrazzo.runtime.plan import ALIGN, MemoryPlan, byte_size, plan_memory


def lowering(function: Any, *shapes: Any) -> Lowering:
    return Lowering(trace(function, [TensorType(s, float32) for s in shapes], name="f")[0], Cpu())


def chain(x: Any, length: int = 6) -> Any:
    """Every step needs memory of its own: running sums are kernels that stand alone."""
    for i in range(length):
        x = tz.cumsum(x, axis=i % 2)
    return x


def branches(x: Any) -> Any:
    """Values of different lengths of life."""
    early = tz.sort(x)
    a = tz.sort(early, descending=True)
    b = tz.sort(a)
    c = tz.cumsum(b, axis=0)
    return tz.cumsum(c, axis=1) + tz.cumsum(early, axis=0)


def lifetimes(lowered: Lowering) -> dict[Value, tuple[int, int]]:
    spans: dict[Value, tuple[int, int]] = {}
    for step, group in enumerate(lowered.fused.groups):
        for value in (*group.inputs, *group.outputs):
            while value in lowered.fused.aliases:
                value = lowered.fused.aliases[value]
            spans[value] = (spans.get(value, (step, step))[0], step)
    return spans


def sized(index: Any, n: int) -> int:
    return int(evaluate(index, {v.name: n for v in free_vars(index)}))


def check(lowered: Lowering, plan: MemoryPlan, n: int) -> None:
    spans = lifetimes(lowered)
    placed = [(v, sized(p.offset, n), sized(byte_size(v), n)) for v, p in plan.places.items()
              if p.kind == "arena" and v not in lowered.fused.aliases]
    assert placed
    for value, start, size in placed:
        assert start % ALIGN == 0 and start + size <= sized(plan.arena, n)
        for other, at, length in placed:
            if other is value:
                continue
            apart = start + size <= at or at + length <= start
            a, b = spans[value], spans[other]
            assert apart or a[1] < b[0] or b[1] < a[0], "two living values overlap"


@pytest.mark.parametrize("function", [chain, branches])
@pytest.mark.parametrize("symbolic", [False, True])
def test_living_values_never_overlap(function: Any, symbolic: bool) -> None:
    n = dim("n") if symbolic else 40
    lowered = lowering(function, (n, 30))
    for size in (1, 7, 40) if symbolic else (40,):
        check(lowered, lowered.plan, size)


def test_a_chain_needs_two_places() -> None:
    assert lowering(lambda x: chain(x, 9), (40, 32)).plan.arena == 2 * 40 * 32 * 4


def test_with_slack_a_place_is_left_alone_for_some_kernels_more() -> None:
    lowered = lowering(lambda x: chain(x, 9), (40, 32))
    for slack, places in ((0, 2), (1, 3), (2, 4)):
        plan = plan_memory(lowered.fused, lowered.functions, slack)
        check(lowered, plan, 0)
        assert plan.arena == places * 40 * 32 * 4


def test_symbolic_sizes_share_memory() -> None:
    n = dim("n")
    arena = lowering(lambda x: chain(x, 9), (n, 32)).plan.arena
    assert str(arena) == str(2 * 32 * 4 * n)
    odd = lowering(lambda x: chain(x, 9), (n, 3)).plan.arena  # rounded up to cache lines
    assert sized(odd, 1) == 2 * 64 and sized(odd, 64) == 2 * 64 * 3 * 4


def test_gaps_are_filled() -> None:
    """Two small values live while a large one is dead, and lie side by side where it was."""
    def function(x: Any) -> Any:
        large = tz.sort(tz.concat([x, x]))  # [2, n]
        small = tz.cumsum(large[:1], axis=1)
        other = tz.cumsum(small, axis=1)
        return tz.cumsum(tz.concat([small, other]), axis=1)

    lowered = lowering(function, (1, 64))
    check(lowered, lowered.plan, 0)
    sizes = [sized(byte_size(v), 0) for v, p in lowered.plan.places.items() if p.kind == "arena"]
    assert lowered.plan.arena < sum(sizes)


def test_a_pointwise_kernel_may_overwrite_what_dies_there(rng: np.random.Generator) -> None:
    def function(x: Any) -> Any:
        early = tz.cumsum(x, axis=0)
        return tz.cumsum(tz.exp(early) * 0.5, axis=0), tz.cumsum(x * 2.0, axis=1)

    lowered = lowering(function, (40, 32))
    (made,) = [g.outputs[0] for g in lowered.fused.groups if g.program.name == "k_multiply"]
    (source,) = [g.inputs[0] for g in lowered.fused.groups if g.outputs[0] is made]
    assert lowered.plan.places[made] == lowered.plan.places[source]
    x = rng.normal(size=(40, 32)).astype(np.float32)
    got = tz.jit(function)(x)
    np.testing.assert_allclose(got[0], np.cumsum(np.exp(np.cumsum(x, 0)) * 0.5, 0), rtol=1e-4)
    np.testing.assert_allclose(got[1], np.cumsum(x * 2, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", [
    lambda x: tz.cumsum(tz.flip(tz.sort(x), axis=1), axis=0),  # reads other elements
    lambda x: (lambda y: tz.cumsum(tz.exp(y), axis=0) + tz.cumsum(y, axis=1))(tz.sort(x)),  # lives
    lambda x: tz.cumsum(tz.astype(tz.sort(x), "float64"), axis=0),  # another size
], ids=["elsewhere", "alive", "wider"])
def test_otherwise_it_has_memory_of_its_own(function: Any, rng: np.random.Generator) -> None:
    lowered = lowering(function, (40, 32))
    for group in lowered.fused.groups:
        if group.program.kind == "pointwise":
            mine = lowered.plan.places[group.outputs[0]]
            assert all(lowered.plan.places[v] != mine for v in group.inputs)
    x = rng.normal(size=(40, 32)).astype(np.float32)
    with knobs.override(opt_level="none"):
        expected = tz.jit(function)(x)
    np.testing.assert_allclose(tz.jit(function)(x), expected, rtol=1e-5)


def test_a_place_may_grow() -> None:
    def widening(x: Any) -> Any:
        for _ in range(4):
            x = tz.sort(tz.sort(tz.concat([x, x])))
        return x

    lowered = lowering(widening, (4, 32))
    check(lowered, lowered.plan, 0)
    x = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)
    expected = x
    for _ in range(4):
        expected = np.sort(np.concatenate([expected, expected]))
    np.testing.assert_array_equal(tz.jit(widening)(x), expected)


def test_outputs_and_inputs_take_no_arena() -> None:
    plan = lowering(lambda x: (tz.exp(x), tz.cumsum(x, axis=0)), (5, 5)).plan
    assert plan.arena == 0
    assert sorted(p.kind for p in plan.places.values()) == ["input", "output", "output"]


def test_text() -> None:
    text = str(lowering(chain, (4, 16)).plan)
    assert text.splitlines()[0] == "arena 512 bytes" and "f32[4, 16] at 256" in text
