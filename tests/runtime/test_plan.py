"""The memory plan: values that live at the same time never overlap, others share memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cpu import host
from terrazzo.compiler import Lowering
from terrazzo.dtypes import float32
from terrazzo.graph.ir import TensorType, Value
from terrazzo.graph.trace import trace
from terrazzo.index import evaluate, free_vars
from terrazzo.runtime.plan import ALIGN, MemoryPlan, byte_size
from terrazzo.shapes import dim


def lowering(function: Any, *shapes: Any) -> Lowering:
    return Lowering(trace(function, [TensorType(s, float32) for s in shapes], name="f")[0], host())


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
