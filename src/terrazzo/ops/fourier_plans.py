"""Fourier transforms by numbers: butterflies, the stages of a length, roots of unity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from terrazzo.base.scalar import Const, Scalar

LARGEST_PRIME = 13  # of lengths that are taken apart into butterflies

Complex = tuple[Scalar, Scalar]


# ---------------------------------------------------------------- butterflies
def _turned(z: Complex, k: int, n: int) -> Complex:
    """z * exp(2 pi i k / n), by as few operations as the angle needs."""
    re, im = z
    k %= n
    if k * 4 % n == 0:
        return ((re, im), (-im, re), (-re, -im), (im, -re))[k * 4 // n]
    if k * 8 % n == 0:
        half = Const(re.dtype, math.sqrt(0.5))
        diagonal = ((re - im) * half, (re + im) * half)
        return _turned(diagonal, k * 8 // n // 2, 4)
    angle = 2 * math.pi * k / n
    return times(z, (Const(re.dtype, math.cos(angle)), Const(re.dtype, math.sin(angle))))


def times(z: Complex, w: Complex) -> Complex:
    return z[0] * w[0] - z[1] * w[1], z[0] * w[1] + z[1] * w[0]


def plus(a: Complex, b: Complex) -> Complex:
    return a[0] + b[0], a[1] + b[1]


def minus(a: Complex, b: Complex) -> Complex:
    return a[0] - b[0], a[1] - b[1]


def butterfly(x: Sequence[Complex], sign: int) -> list[Complex]:
    """The transform of a few numbers, written out."""
    n = len(x)
    if n == 1:
        return list(x)
    if n == 2:
        return [plus(x[0], x[1]), minus(x[0], x[1])]
    r = next(d for d in (4, 2, *range(3, n + 1)) if n % d == 0 and (d < n or n != 4))
    if r == n:
        return _prime_butterfly(x, sign)
    rows = n // r
    columns = [butterfly(x[p::rows], sign) for p in range(rows)]
    turned = [[_turned(columns[p][k], sign * p * k, n) for p in range(rows)] for k in range(r)]
    spectra = [butterfly(row, sign) for row in turned]
    return [spectra[k % r][k // r] for k in range(n)]


def _prime_butterfly(x: Sequence[Complex], sign: int) -> list[Complex]:
    """Of an odd number of numbers: sums and differences of mirror images halve the products."""
    n, dtype = len(x), x[0][0].dtype
    pairs = range(1, n // 2 + 1)
    sums = {j: plus(x[j], x[n - j]) for j in pairs}
    differences = {j: minus(x[j], x[n - j]) for j in pairs}
    total = x[0]
    for j in pairs:
        total = plus(total, sums[j])
    result: list[Complex] = [total] * n
    for k in pairs:
        even, odd = x[0], None
        for j in pairs:
            angle = 2 * math.pi * (j * k % n) / n
            c, s = Const(dtype, math.cos(angle)), Const(dtype, sign * math.sin(angle))
            even = (even[0] + sums[j][0] * c, even[1] + sums[j][1] * c)
            part = (differences[j][0] * s, differences[j][1] * s)
            odd = part if odd is None else plus(odd, part)
        assert odd is not None
        turned = (-odd[1], odd[0])
        result[k], result[n - k] = plus(even, turned), minus(even, turned)
    return result


# ---------------------------------------------------------------- plans
def is_smooth(n: int) -> bool:
    """Whether a length is a product of small primes."""
    return n >= 1 and max(_primes(n), default=1) <= LARGEST_PRIME


def _primes(n: int) -> list[int]:
    found = []
    for p in (2, *range(3, math.isqrt(n) + 1, 2)):
        while n % p == 0:
            found.append(p)
            n //= p
    return [*found, n] if n > 1 else found


def _radices(n: int) -> tuple[int, ...]:
    """The stages of a column: primes, then fours and eights, whose butterflies fill registers."""
    primes = _primes(n)
    twos = primes.count(2)
    odd = [p for p in primes if p > 2]
    nines, threes = divmod(odd.count(3), 2)
    fours = {0: 0, 1: 2, 2: 1}[twos % 3] if twos > 1 else 0
    eights = (twos - 2 * fours) // 3
    return (*(p for p in odd if p > 3), *(9,) * nines, *(3,) * threes, *(2,) * (twos == 1),
            *(4,) * fours, *(8,) * eights)


def halves(n: int) -> tuple[int, int]:
    """n as n1 * n2, near each other and multiples of a vector where possible."""
    divisors = [d for d in range(1, n + 1) if n % d == 0] if n < 4096 else [
        e for d in range(1, math.isqrt(n) + 1) if n % d == 0 for e in {d, n // d}]

    def cost(d: int) -> tuple[float, int]:
        """Vectors over both halves, as parts of a line have to be filled up."""
        filled = math.ceil(d / 16) * 16 / d + math.ceil(n // d / 16) * 16 / (n // d)
        return filled * (max(d, n // d) / min(d, n // d)) ** 0.5, -d

    best = min(divisors, key=cost)
    return best, n // best


class Stage(NamedTuple):
    """One pass over a column of r * m * s numbers: butterflies of r over [r, m, s] -> [m, r, s]."""

    r: int
    m: int
    s: int
    at: int  # where its roots of unity begin in the table

    @property
    def roots(self) -> int:
        return 2 * (self.r - 1) * self.m if self.m > 1 else 0


def stages_of(n: int, at: int) -> list[Stage]:
    found, m, s = [], n, 1
    for r in _radices(n):
        m //= r
        found.append(Stage(r, m, s, at))
        at += found[-1].roots
        s *= r
    return found


def _stage_roots(stage: Stage, sign: int) -> np.ndarray:
    if stage.m == 1:
        return np.empty(0)
    turns = np.outer(np.arange(stage.m), np.arange(1, stage.r))
    roots = np.exp(sign * 2j * math.pi / (stage.r * stage.m) * turns)
    return np.stack([roots.real, roots.imag], -1).ravel()


def stages_of_halves(rows: int, columns: int) -> tuple[list[Stage], list[Stage], int]:
    """The stages of both halves, and where in the table the roots between them begin."""
    first = stages_of(rows, 0)
    second = stages_of(columns, sum(s.roots for s in first))
    return first, second, sum(s.roots for s in (*first, *second))


def table_size(rows: int, columns: int) -> int:
    return stages_of_halves(rows, columns)[2] + (2 * rows * columns if columns > 1 else 0)


def roots_of(rows: int, columns: int, sign: int, scale: float) -> np.ndarray:
    """The table of all roots of unity that a transform multiplies by; columns = 1: of one half."""
    first, second, _ = stages_of_halves(rows, columns)
    parts = [_stage_roots(s, sign) for s in (*first, *second)]
    if columns > 1:
        turns = np.outer(np.arange(rows), np.arange(columns))
        between = scale * np.exp(sign * 2j * math.pi / (rows * columns) * turns)
        parts += [between.real.ravel(), between.imag.ravel()]
    return np.concatenate([*parts, np.empty(0)])
