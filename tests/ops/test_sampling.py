"""Random choices: their frequencies, and that the same key gives the same."""

from __future__ import annotations

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.dtypes import float32
from terrazzo.errors import ArgumentError, RankError
from terrazzo.graph.ir import TensorType, Value

KEY = tz.random_key(seed=3)
N = 20_000
NEAR = 4 * 0.5 / np.sqrt(N)  # four standard deviations of a frequency


def test_bernoulli() -> None:
    p = np.broadcast_to(np.array([0.2, 0.9, 0.0, 1.0], np.float32), (N, 4)).copy()
    drawn = tz.bernoulli_of(p, KEY)
    assert drawn.dtype == bool
    np.testing.assert_allclose(drawn.mean(0), p[0], atol=NEAR)
    assert not drawn[:, 2].any() and drawn[:, 3].all()
    np.testing.assert_array_equal(drawn, tz.bernoulli_of(p, KEY))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_multinomial(dtype: str) -> None:
    shares = np.array([[0.1, 0.2, 0.7, 0.0], [0.5, 0.5, 0.0, 0.0]])
    with np.errstate(divide="ignore"):
        logits = (np.log(shares) + 3).astype(dtype)
    drawn = tz.multinomial(logits, KEY, sample_size=N)
    assert drawn.shape == (2, N) and drawn.dtype == np.int32
    for row, share in zip(drawn, shares, strict=True):
        found = np.bincount(row, minlength=4) / N
        np.testing.assert_allclose(found, share, atol=NEAR + (5e-3 if dtype == "float16" else 0))
        assert (found[share == 0] == 0).all()


def test_errors() -> None:
    with pytest.raises(RankError, match="rows, classes"):
        tz.multinomial(Value(TensorType((3,), float32)), KEY)
    with pytest.raises(ArgumentError, match="of 0 classes"):
        tz.multinomial(Value(TensorType((3, 0), float32)), KEY)
