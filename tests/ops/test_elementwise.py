"""Elementwise operators: what they refuse."""

from __future__ import annotations

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
