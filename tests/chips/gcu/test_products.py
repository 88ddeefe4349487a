"""Matrix products of our own compiler on the chip: what they give, and near the least time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.gcu import description
from terrazzo.chips.gcu.blocks import POWERS, SIDES, ranked_blocks
from terrazzo.chips.gcu.build import compiler
from terrazzo.errors import MissingDependency

try:
    compiler()
except MissingDependency as missing:  # the runtime library is built by one
    pytest.skip(str(missing), allow_module_level=True)

GCU = description.find("gcu")
PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "plain": (tz.matmul, ((130, 70), (70, 90))),
    "left transposed": (lambda a, b: tz.matmul(a.T, b), ((70, 37), (70, 51))),
    "right transposed": (lambda a, b: tz.matmul(a, b.T), ((37, 70), (51, 70))),
    "both transposed": (lambda a, b: tz.matmul(a.T, b.T), ((70, 37), (51, 70))),
    "one row": (tz.matmul, ((1, 300), (300, 200))),
    "one column": (tz.matmul, ((300, 200), (200, 1))),
    "one step": (tz.matmul, ((33, 1), (1, 47))),
    "batches": (tz.matmul, ((3, 2, 33, 40), (3, 2, 40, 50))),
    "one for all": (tz.matmul, ((3, 20, 33), (33, 18))),
    "rows for all": (tz.matmul, ((20, 33), (5, 33, 18))),
    "bias and activation": (lambda a, b, c: tz.relu(tz.matmul(a, b) + c),
                            ((65, 129), (129, 80), (80,))),
    "factors that are computed": (lambda a, b: tz.matmul(a * 2 + 1, tz.exp(b)),
                                  ((40, 33), (33, 50))),
    "many blocks": (tz.matmul, ((600, 40), (40, 520))),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16],
                         ids=["f32", "f16", "bf16"])
def test_results(name: str, dtype: Any, rng: np.random.Generator) -> None:
    function, shapes = PRODUCTS[name]
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    with tz.chip("gcu"):
        found = np.asarray(tz.jit(function)(*arrays))
    exact = np.asarray(tz.jit(function).on("cpu")(*(a.astype(np.float64) for a in arrays)))
    low = np.dtype(dtype).itemsize < 4
    scale = np.abs(exact).max()
    np.testing.assert_allclose(found.astype(np.float64), exact, rtol=0,
                               atol=scale * (2e-2 if low else 2e-6))


@pytest.mark.parametrize("dtype, digits", [(np.float16, 11), (ml_dtypes.bfloat16, 8)],
                         ids=["f16", "bf16"])
def test_products_of_half_types_are_rounded_once(dtype: Any, digits: int,
                                                 rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(s).astype(dtype) for s in ((70, 300), (300, 90)))
    with tz.chip("gcu"):
        found = np.asarray(tz.jit(tz.matmul)(a, b)).astype(np.float64)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert (np.abs(found - exact) <= 2.0 ** (
        np.floor(np.log2(np.abs(exact))) - digits) + 2e-5).all()


def least(m: int, n: int, k: int, dtype: Any = np.float32) -> float:
    """Seconds that a product takes at best."""
    spec, size = GCU.spec(), np.dtype(dtype).itemsize
    return max(2 * m * n * k / spec.peak("f32" if size == 4 else "bf16"),
               size * (m * k + k * n + m * n) / (spec.memory_gbps * 1e9))


def traced(sizes: tuple[int, int, int], dtype: Any, rng: np.random.Generator) -> Any:
    """The record of one product of the chip."""
    m, n, k = sizes
    a, b = (rng.standard_normal(s).astype(dtype) for s in ((m, k), (k, n)))
    call = tz.jit(tz.matmul)
    with tz.chip("gcu"):
        call(a, b)
        with tz.gcu.trace() as trace:
            call(a, b)
    (record,) = (record for record in trace.records if record.kind == 0)
    return record


@pytest.mark.parametrize("sizes", [(1024, 1024, 1024), (1536, 2048, 256)])
def test_large_products_are_near_the_least_time(sizes: tuple[int, int, int],
                                                rng: np.random.Generator) -> None:
    cycles = traced(sizes, np.float32, rng).cycles
    assert 1 <= cycles / (GCU.clock_khz * 1e3) / least(*sizes) <= 1.3


def test_products_of_half_types_are_near_the_least_time(rng: np.random.Generator) -> None:
    sizes, dtype = (4096, 4096, 512), ml_dtypes.bfloat16
    cycles = traced(sizes, dtype, rng).cycles
    assert 1 <= cycles / (GCU.clock_khz * 1e3) / least(*sizes, dtype) <= 1.25


def test_half_types_take_several_steps_of_the_matrix_unit_at_once(rng: np.random.Generator
                                                                  ) -> None:
    wide, narrow = (traced((1024, 1024, 1024), dtype, rng)
                    for dtype in (np.float32, ml_dtypes.bfloat16))
    assert 4 * narrow.counts[1] <= 1.05 * wide.counts[1]
    assert narrow.cycles <= 0.45 * wide.cycles  # where the memory is what takes longest


def test_a_half_type_and_float32_are_multiplied_as_float32(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((2, 64, 64)).astype(np.float32)
    b = b.astype(ml_dtypes.bfloat16)
    call = tz.jit(lambda a, b: tz.matmul(a, tz.astype(b, dtype="float32")))
    with tz.chip("gcu"):
        call(a, b)
        with tz.gcu.trace() as trace:
            found = np.asarray(call(a, b))
    matrix = sum(record.counts[1] for record in trace.records if record.kind == 0)
    assert matrix == 64 ** 3 // 256
    np.testing.assert_allclose(found, a.astype(np.float64) @ b.astype(np.float64), atol=2e-5)


def test_blocks_fit_and_fill_the_units() -> None:
    for sides in (POWERS, SIDES):
        for m, n, k in ((1024, 1024, 1024), (7, 5000, 33), (1, 1, 1), (48, 48, 4096)):
            rows, columns, steps = ranked_blocks(GCU, (m, n, k), 1, 4, 1, sides)[0]
            assert 4 * (rows * columns + steps * (rows + columns)) <= GCU.scratchpad_bytes
            assert rows % 16 == columns % 16 == steps % 16 == 0
    rows, columns, _ = ranked_blocks(GCU, (1024, 1024, 1024), 1, 4, 1, SIDES)[0]
    assert 0.75 * GCU.units <= -(-1024 // rows) * -(-1024 // columns) <= GCU.units
