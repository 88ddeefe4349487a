"""Division by constants as products: the same bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.chips.cpu.description import avx2_spec
from terrazzo.compiler.levels import level_text
from terrazzo.compiler.lowering import Lowering
from terrazzo.dtypes import as_dtype
from terrazzo.expr.reciprocals import reciprocal
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace

CONSTANTS = (3.0, 0.7, 1.41421356, 255.0, -127.0, 0.65132153, 1e-3, 6.02e9, 49.0, 0.1, 1.9999999)


@pytest.mark.parametrize("c", CONSTANTS)
def test_every_float32_is_divided_right(c: float) -> None:
    c = float(np.float32(c))
    x = (np.arange(1 << 23, dtype=np.uint32) | np.uint32(127 << 23)).view(np.float32)
    assert x[0] == 1 and x[-1] < 2
    got = tz.jit(lambda x: x / c)(x)
    assert got.tobytes() == (x / np.float32(c)).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_at_the_edges(dtype: str) -> None:
    kind = as_dtype(dtype).np
    limits = np.finfo(kind)
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, limits.max, -limits.max, 1, -1, 1e-20], kind)
    rng = np.random.default_rng(0)
    x = np.concatenate([x, rng.normal(size=50_000).astype(kind)])
    for c in CONSTANTS:
        with np.errstate(over="ignore"):
            wanted = x / np.asarray(c, kind)
        got = tz.jit(lambda x, c=c: x / c)(x)
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(wanted))
    tiny = np.array([limits.tiny, limits.smallest_subnormal, limits.tiny / 7], kind)
    got = tz.jit(lambda x: x / 3)(tiny)
    assert (np.abs(got - tiny / 3) <= limits.smallest_subnormal).all()


def test_most_divisors_have_a_reciprocal() -> None:
    rng = np.random.default_rng(0)
    for dtype in ("float32", "float64"):
        constants = rng.uniform(1, 2, 300).astype(dtype)
        found = [reciprocal(float(c), dtype) for c in constants]
        assert sum(f is not None for f in found) > 150
        for c, parts in zip(constants, found, strict=True):
            if parts is not None:
                assert parts[0] * parts[1] > 0
                assert abs(1 - (parts[0] + parts[1]) * float(c)) < 2**-45
    assert sum(reciprocal(float(np.float32(c)), "float32") is not None for c in CONSTANTS) > 6
    for c in (0.0, np.inf, np.nan, 2.0, -0.25, 1e-30, 1e30):
        assert reciprocal(c, "float32") is None


def test_chips_without_multiply_add_divide() -> None:
    graph = trace(lambda x: x / 3, [TensorType((64,), tz.float32)], "f")[0]
    chip = avx2_spec(cores=2)
    plain = replace(chip, features=chip.features - {"fma"})
    assert "fma" in level_text(Lowering(graph, Cpu(chip)), "loop")
    assert "fma" not in level_text(Lowering(graph, Cpu(plain)), "loop")
