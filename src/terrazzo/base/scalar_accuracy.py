"""How exact scalar operations are: what running error analysis (tools/verify) asks of each.

Rules get the arguments of an operation, each with its `value` and a bound on its `error`, in
float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

# The elementary functions promise 2 units in the last place of float32, numpy's own promise 4, and
# each is compared with both.
FEW = 4.0
# Bounds are of first order; twice the error is what a second may add.
_TWICE = 2.0


class Bounded(Protocol):
    """An argument and how far it may be off."""

    @property
    def value(self) -> np.ndarray: ...
    @property
    def error(self) -> np.ndarray: ...


Arguments = Sequence[Bounded]


class Accuracy(NamedTuple):
    """What a result may be off by, beside what the errors of its arguments do."""

    ulps: float = FEW  # units in the last place
    counts: bool = False  # integers that are some off give integers that are some off
    # Zeros and poles are reached by subtraction, in numpy's way as in ours: the result is exact for
    # an argument that is off by a few units in the last place.
    backward_stable: bool = False
    vanishes_early: bool = False  # to zero, where the result is not a normal number any more
    # How far an argument may move before a function that swings tells nothing any more.
    period: Callable[[Arguments], Any] | None = None
    # Where a result hangs on what is not defined: the sign of a nan, a division by perhaps 0, a
    # pole that may have been hit, a product beyond float64.
    undefined: Callable[[Arguments], Any] | None = None


EXACT = Accuracy(0.0)
ROUNDED = Accuracy(1.0)  # correctly, in the type of the arithmetic, and once more when stored


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def may_vanish(x: Bounded) -> np.ndarray:
    """Where a value that is not known exactly may be zero."""
    return (x.error > 0) & ~(np.abs(_wide(x.value)) > x.error)


def _swings(given: Arguments) -> Any:
    return 0.1


def _poles_of_gamma(given: Arguments) -> Any:
    """At 0, -1, -2, ..."""
    x = given[-1]
    value = _wide(x.value)
    nearest = np.minimum(np.floor(value + x.error), 0.0)
    return (x.error > 0) & (nearest >= value - x.error)


def _poles_of_tangent(given: Arguments) -> Any:
    """Half-way between the multiples of pi."""
    x = given[-1]
    turns, reach = _wide(x.value) / np.pi + 0.5, _TWICE * x.error / np.pi
    return np.floor(turns + reach) > np.floor(turns - reach)


def _beyond_float64(given: Arguments) -> Any:
    """There the yardstick overflows too, where a fused multiply-add does not."""
    first, second = (_wide(x.value) for x in given)
    return np.isfinite(first) & np.isfinite(second) & np.isinf(first * second)


def _of_negative_numbers(given: Arguments) -> Any:
    """Of those, powers are only defined for integers."""
    base, exponent = given
    low, high = exponent.value - exponent.error, exponent.value + exponent.error
    return (exponent.error > 0) & (base.value < base.error) & (np.floor(high) >= low)


def _sign_of_nan(given: Arguments) -> Any:
    return np.isnan(_wide(given[-1].value))


def _many_turns(given: Arguments) -> Any:
    """Each of the many multiples that are taken away is off by the divisor's error."""
    x, y = given
    if not y.error.any():
        return False
    turns = np.abs(_wide(x.value) / _wide(y.value))
    return ~(turns * y.error < 0.1 * np.abs(_wide(y.value)))


def _by_zero(given: Arguments) -> Any:
    return may_vanish(given[-1])


def _half_the_divisor(given: Arguments) -> Any:
    return 0.5 * np.abs(_wide(given[1].value))


SUM = Accuracy(1.0, counts=True)
PRODUCT = Accuracy(1.0, counts=True, undefined=_beyond_float64)
QUOTIENT = Accuracy(1.0, undefined=_by_zero)
WHOLE_QUOTIENT = Accuracy(FEW, undefined=_by_zero)
CHOICE = Accuracy(0.0, counts=True)
SIGN = Accuracy(0.0, undefined=_sign_of_nan)
REMAINDER = Accuracy(FEW, period=_half_the_divisor, undefined=_many_turns)
C_REMAINDER = Accuracy(0.0, period=_half_the_divisor, undefined=_many_turns)
WAVE = Accuracy(period=_swings)
TANGENT = Accuracy(period=_swings, undefined=_poles_of_tangent)
POWER = Accuracy(2 * FEW, undefined=_of_negative_numbers)
TAIL = Accuracy(2 * FEW)
GAMMA = Accuracy(2 * FEW, backward_stable=True, period=_swings, undefined=_poles_of_gamma)
SIGMOID = Accuracy(vanishes_early=True)  # 1 / (1 + exp(-x)): the denominator overflows first
