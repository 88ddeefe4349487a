"""Where a last bit decides, arithmetic goes step by step: no fused products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import terrazzo as tz

DECISIONS: dict[str, Callable[[Any, Any], Any]] = {
    "floor": lambda m, x: m.floor(x), "ceil": lambda m, x: m.ceil(x),
    "trunc": lambda m, x: m.trunc(x), "round": lambda m, x: m.round(x * 0.5),
    "sign": lambda m, x: m.sign(x), "mod": lambda m, x: x % 1.0,
    "floor division": lambda m, x: x // 1.0,
    "cast": lambda m, x: x.astype(np.int32), "cast to bool": lambda m, x: x.astype(np.bool_),
    "less": lambda m, x: x < 0.0, "equal": lambda m, x: x == 0.0,
    "where": lambda m, x: m.where(x >= 0.0, x, 7.0),
    "fraction": lambda m, x: x - m.floor(x),
}


def near_ties(rng: np.random.Generator, dtype: Any) -> tuple[np.ndarray, ...]:
    """Products that are whole numbers once they are rounded, and those numbers."""
    whole = rng.integers(1, 2000, 4000).astype(dtype)
    factor = rng.uniform(0.5, 2, 4000).astype(dtype)
    other = whole / factor
    return factor, other, np.rint(factor * other).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", DECISIONS)
def test_decisions_are_those_of_steps(name: str, dtype: Any, rng: np.random.Generator) -> None:
    decide = DECISIONS[name]
    a, b, c = near_ties(rng, dtype)
    assert ((a * b == c) & (a.astype(np.longdouble) * b != c)).sum() > 500, "ties by rounding"
    for sign in (-1, 1):
        found = tz.jit(lambda a, b, c: decide(tz, (c - a * b) * sign))(a, b, c)  # noqa: B023
        np.testing.assert_array_equal(found, decide(np, (c - a * b) * dtype(sign)))


def test_a_border_of_a_picture() -> None:
    """Where a mask of Mask R-CNN is pasted whose box is as high as the picture."""
    middle, half, scale = (np.full(5, n, np.float32) for n in (112, 112, 30 / 28))
    found = tz.jit(lambda m, h, s: (m - h * s).astype(np.int64))(middle, half, scale)
    np.testing.assert_array_equal(found, -8)


def test_through_rows_of_the_kernel(rng: np.random.Generator) -> None:
    """Values that are reduced and read again before they are rounded."""
    a, b, c = (x.reshape(40, 100) for x in near_ties(rng, np.float32))

    def lowered(m: Any) -> Callable[..., Any]:
        def function(a: Any, b: Any, c: Any) -> Any:
            x = c - a * b
            return m.floor(x - m.max(m.floor(x), axis=1, keepdims=True))
        return function

    np.testing.assert_array_equal(tz.jit(lowered(tz))(a, b, c), lowered(np)(a, b, c))


def test_sums_of_products_stay_fused() -> None:
    """Only what decides is kept apart."""
    x = np.ones((64,), np.float32)
    plain = tz.op(lambda x, y: x * y + x).lower(x, x, "asm")
    assert "vfm" in str(plain) and "vaddps" not in str(plain)
    decided = tz.op(lambda x, y: tz.floor(x * y + x)).lower(x, x, "asm")
    assert "vaddps" in str(decided)
