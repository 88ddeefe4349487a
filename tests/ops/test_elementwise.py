"""Elementwise operators: what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.errors import DTypeError


@pytest.mark.parametrize(("dtype", "target"), [("float32", "float64"), ("bool", "uint8")])
def test_bitcast_keeps_the_width(dtype: str, target: str) -> None:
    with pytest.raises(DTypeError, match="bits"):
        tz.bitcast(np.ones(3, dtype), dtype=target)


def test_integer_products_multiply_bytes() -> None:
    with pytest.raises(DTypeError, match="bytes, not bool"):
        tz.matmul_integer(np.ones((2, 2), bool), np.ones((2, 2), bool))


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("function", [
    lambda x: x * 0.1, lambda x: 0.1 * x, lambda x: x + 0.1, lambda x: 1.1 - x, lambda x: x / 0.3,
    lambda x: 0.3 / x, lambda x: x ** 0.3, lambda x: x * 2, lambda x: x - 1.5])
def test_numbers_are_not_rounded_to_a_half_type_first(kind: str, function: Any) -> None:
    """0.1 is what it is in float32, and only the result is rounded (torch's arithmetic too)."""
    torch = pytest.importorskip("torch")
    x = torch.arange(1, 200).to(getattr(torch, kind))
    found = tz.jit(function)(x)
    assert found.dtype == x.dtype
    exact = function(x.double())
    np.testing.assert_array_equal(found.float(), exact.float().to(x.dtype).float())
