"""1 / c in two parts, where products by them give the bits of a division by c for every number.

Apart from `quotients.py` as it computes with exact fractions, which most programs never load.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache

DIGITS = {"float32": 24, "float64": 53}
_RANGE = {"float32": 60, "float64": 500}  # of the divisor's exponent: nothing overflows on the way
_NEAR = 8  # the least distance from a middle that errors cannot bridge, in units; see below


@lru_cache(maxsize=4096)
def reciprocal(c: float, dtype: str) -> tuple[float, float] | None:
    """1 / c in two parts; None where a division is as good or would be rounded otherwise."""
    digits = DIGITS[dtype]
    if not math.isfinite(c) or c == 0 or abs(math.frexp(c)[1]) > _RANGE[dtype]:
        return None
    exact = 1 / Fraction(c)
    high = _cut(exact, digits)
    if high == exact:  # a power of two, by which LLVM multiplies
        return None
    low = _nearest(exact - high, digits)
    if any(_nearest(x * high + _nearest(x * low, digits), digits) != _nearest(x * exact, digits)
           for x in _hard_numerators(Fraction(c), digits)):
        return None
    return float(high), float(low)


def _hard_numerators(c: Fraction, digits: int) -> Iterator[Fraction]:
    """All x (up to powers of two) whose quotient is nearest to a middle between two numbers.

    As integers of so many digits, x / c is between 1/2 and 2, and a middle is m / 2^j for an odd m
    of one more digit. The sum of products is off by 2^-(2 digits - 2) of the quotient at most, so
    it is rounded as the quotient is where |x * 2^j - m * c| exceeds 8. That this be another number
    r is a linear congruence for m.
    """
    divisor = int(abs(c) / Fraction(2) ** (_exponent(c) - digits + 1))
    twos = (divisor & -divisor).bit_length() - 1
    odd = divisor >> twos
    for j in (digits, digits + 1):
        modulus = 1 << (j - twos) if j > twos else 1
        for r in range(-_NEAR, _NEAR + 1):
            if r == 0 or r % (1 << twos):
                continue
            m = -(r >> twos) * pow(odd, -1, modulus) % modulus
            m += -(-((1 << digits) - m) // modulus) * modulus  # the first from 2^digits on
            while m < 2 << digits:
                x, rest = divmod(m * divisor + r, 1 << j)
                if rest == 0 and 1 << (digits - 1) <= x < 1 << digits:
                    yield Fraction(x)
                m += modulus


def _exponent(x: Fraction) -> int:
    """The n for which 2^n <= |x| < 2^(n + 1)."""
    n = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return n if abs(x) >= Fraction(2) ** n else n - 1


def _nearest(x: Fraction, digits: int) -> Fraction:
    unit = Fraction(2) ** (_exponent(x) - digits + 1)
    return round(x / unit) * unit


def _cut(x: Fraction, digits: int) -> Fraction:
    unit = Fraction(2) ** (_exponent(x) - digits + 1)
    return math.trunc(x / unit) * unit
