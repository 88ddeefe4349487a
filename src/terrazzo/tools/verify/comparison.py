"""Results held against bounded values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from terrazzo.dtypes import DType
from terrazzo.tools.verify.bounded import SAFETY, Bounded, deviation, smallest, wide

# Where rounding may cost more units in the last place, counting them says nothing.
WELL_CONDITIONED = 1024.0


@dataclass(frozen=True)
class Difference:
    """How a result compares: its worst error, and the first element that is out of bounds."""

    ulps: float = 0.0
    share: float = 0.0  # of what the bound allows
    index: tuple[int, ...] | None = None
    expected: Any = None
    got: Any = None
    checked: int = 0
    open: int = 0  # elements that have no bound, so that nothing can be said of them


def compare(got: np.ndarray, expected: Bounded, dtype: DType, allow: float = SAFETY) -> Difference:
    """Hold a result against a bounded value."""
    got = np.asarray(got)
    sure = np.isfinite(expected.error)
    if not dtype.is_float:
        wrong = sure & (got != expected.value)
        if dtype.is_integer:
            wrong &= np.abs(wide(got) - wide(expected.value)) > expected.error
        return _difference(got, expected.value, wrong, np.zeros(got.shape), np.zeros(got.shape),
                           sure)
    with np.errstate(all="ignore"):
        found, value, error = got.astype(np.float64), expected.value, expected.error
        over = np.abs(value) > dtype.max * (1 + dtype.eps / 4)
        edge = np.isfinite(value) & (np.abs(value) + error >= dtype.max) & ~(
            np.abs(value) - error > dtype.max * (1 + dtype.eps))
        value = np.where(over & np.isfinite(value), np.copysign(np.inf, value), value)
        if not np.isinf(np.array(np.inf).astype(dtype.np).astype(np.float64)):
            value = np.where(np.isinf(value), np.nan, value)  # types that have a nan instead
        sure &= ~edge
        away = deviation(found, value)
        # Rounding to the type is not an error of anybody's.
        room = allow * error + 0.5 * dtype.eps * np.where(np.isfinite(value), np.abs(value), 0.0
                                                          ) + smallest(dtype)
        wrong = sure & ~(away <= room)
        unit = np.maximum(dtype.eps * np.where(np.isfinite(value), np.abs(value), 0.0),
                          smallest(dtype))
        ulps = np.where(sure & (room < WELL_CONDITIONED * unit), away / unit, 0.0)
        share = np.where(sure, away / room, 0.0)
    return _difference(got, value.astype(dtype.np), wrong, ulps, share, sure)


def _difference(got: np.ndarray, expected: np.ndarray, wrong: np.ndarray, ulps: np.ndarray,
                share: np.ndarray, sure: np.ndarray) -> Difference:
    found = Difference(float(np.max(ulps, initial=0.0)), float(np.max(share, initial=0.0)),
                       checked=int(sure.sum()), open=int((~sure).sum()))
    if not wrong.any():
        return found
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    return replace(found, index=index, expected=expected[index], got=got[index])
