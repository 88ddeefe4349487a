"""Functions that Triton has no word for, as Triton text: a module prints those it calls.

All are composed from `tl.exp`, `tl.log`, `tl.sin` and the like, so they run wherever Triton runs,
its interpreter included. They are good to a few ulp of float32 (1e-5 at worst, far out on the tails
of `lgamma`, `pow` and `erfc`); float64 arguments get float64 arithmetic, but not always the last
digits. A chip whose description lists "libdevice" gets NVIDIA's versions instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

LIBRARY = '''
@triton.jit
def _max(a, b):
    # numpy's rule: NaN wins, where tl.max would drop it
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

@triton.jit
def _min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)

@triton.jit
def _add(a, b):
    return a + b

@triton.jit
def _mul(a, b):
    return a * b

@triton.jit
def _chained(a, b, c, d):
    # x to a*x + b, and that to c*x + d
    return a * c, b * c + d

@triton.jit
def _and(a, b):
    return a & b

@triton.jit
def _or(a, b):
    return a | b

@triton.jit
def _xor(a, b):
    return a ^ b

@triton.jit
def _partner(x, SIZE: tl.constexpr, DISTANCE: tl.constexpr):
    # what lies where one bit of the place is another: both together, less what is here
    pairs = tl.reshape(x, [SIZE // (2 * DISTANCE), 2, DISTANCE])
    return tl.reshape(pairs ^ tl.reduce(pairs, 1, _xor, keep_dims=True), [SIZE])

@triton.jit
def _keeps_less(STAGE: tl.constexpr, BIT: tl.constexpr, SIZE: tl.constexpr, LENGTH: tl.constexpr):
    # of two that a bitonic network compares: runs rise and fall in turn, in the end all rise
    place = tl.arange(0, SIZE) % LENGTH
    return ((place >> BIT) & 1) == ((place >> STAGE) & 1)

@triton.jit
def _sorted(x, SIZE: tl.constexpr, LENGTH: tl.constexpr, STAGES: tl.constexpr):
    # rows of LENGTH (2 to the STAGES) side by side, by a bitonic network (Batcher)
    for stage in tl.static_range(1, STAGES + 1):
        for step in tl.static_range(1, stage + 1):
            other = _partner(x, SIZE, 1 << (stage - step))
            less = _keeps_less(stage, stage - step, SIZE, LENGTH)
            x = tl.where(less, tl.minimum(x, other), tl.maximum(x, other))
    return x

@triton.jit
def _sorted_pairs(x, y, SIZE: tl.constexpr, LENGTH: tl.constexpr, STAGES: tl.constexpr):
    # the same by x, and where that is equal by y
    for stage in tl.static_range(1, STAGES + 1):
        for step in tl.static_range(1, stage + 1):
            other_x = _partner(x, SIZE, 1 << (stage - step))
            other_y = _partner(y, SIZE, 1 << (stage - step))
            before = (other_x < x) | ((other_x == x) & (other_y < y))
            swap = before == _keeps_less(stage, stage - step, SIZE, LENGTH)
            x = tl.where(swap, other_x, x)
            y = tl.where(swap, other_y, y)
    return x, y

@triton.jit
def _e4m3(x):
    # beyond its largest number is nan, where Triton's own conversion ends at that number
    return tl.where(tl.abs(x) <= 464.0, x, float("nan")).to(tl.float8e4nv)

@triton.jit
def _e5m2(x):
    # the same, but that this type has infinities
    code = x.to(tl.float8e5).to(tl.int8, bitcast=True)
    infinite = (code & -128) | 124
    return tl.where(tl.abs(x) >= 61440.0, infinite, code).to(tl.float8e5, bitcast=True)

@triton.jit
def _tile_place(tile, down, across, GROUP: tl.constexpr):
    # GROUP rows of tiles are done column by column: caches hold what neighbours in time share
    first = tile // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    inside = tile % (GROUP * across)
    return first + inside % height, inside // height

@triton.jit
def _gelu_bf16(x):
    # x for x > 0, less |x| times the normal distribution at -|x|: 2 to a polynomial that is fitted
    # to its logarithm, to 1e-4 where it counts. Bounded, so that infinity is not multiplied by 0.
    a = tl.minimum(tl.abs(x), 20.0)
    p = -0.000296385928 * a + 0.00559207212
    p = p * a - 0.0474413055
    p = p * a - 0.46520714
    p = p * a - 1.14866573
    p = p * a - 1.0001582
    return 0.5 * x + 0.5 * tl.abs(x) - a * tl.exp2(p)

@triton.jit
def _gelu_f16(x):
    # the same to 2e-6
    a = tl.minimum(tl.abs(x), 20.0)
    p = -1.36331990e-06 * a + 5.41823530e-05
    p = p * a - 8.85404642e-04
    p = p * a + 8.37421924e-03
    p = p * a - 5.37612160e-02
    p = p * a - 4.58601449e-01
    p = p * a - 1.15121684
    p = p * a - 9.99996627e-01
    return 0.5 * x + 0.5 * tl.abs(x) - a * tl.exp2(p)

@triton.jit
def _floor_div(a, b):
    # Triton divides integers as C does, towards zero
    quotient = a // b
    return tl.where((quotient * b != a) & ((a < 0) != (b < 0)), quotient - 1, quotient)

@triton.jit
def _floor_mod(a, b):
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)

@triton.jit
def _fmod(a, b):
    # the remainder of floats goes through a rounded quotient on some chips: one too many at times
    rest = a % b
    step = tl.where(a < 0, -tl.abs(b), tl.abs(b))
    return tl.where((rest != 0) & ((rest < 0) != (a < 0)), rest + step, rest)

@triton.jit
def _floor_div_float(a, b):
    rest = a % b
    quotient = (a - rest) / b
    quotient = tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)
    return tl.where(b == 0, a / b, _round(quotient))

@triton.jit
def _trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))

@triton.jit
def _round(x):
    # to nearest, halves to even
    below = tl.floor(x)
    rest = x - below
    odd = below != 2 * tl.floor(below * 0.5)
    return tl.where((rest > 0.5) | ((rest == 0.5) & odd), below + 1, below)

@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))

@triton.jit
def _negative(x):
    # the sign bit, which -0.0 has too
    return (x < 0) | ((x == 0) & (1 / x < 0))

@triton.jit
def _shift_left(a, b, BITS: tl.constexpr):
    return tl.where((b >= 0) & (b < BITS), a << b, 0)

@triton.jit
def _shift_right(a, b, BITS: tl.constexpr):
    return tl.where((b >= 0) & (b < BITS), a >> b, a >> (BITS - 1))

@triton.jit
def _shift_right_unsigned(a, b, BITS: tl.constexpr):
    return tl.where(b < BITS, a >> b, 0)

@triton.jit
def _pow_int(x, y, BITS: tl.constexpr):
    # by squaring
    power = x * 0 + 1
    for _ in tl.static_range(BITS):
        power = tl.where((y & 1) == 1, power * x, power)
        x = x * x
        y = y >> 1
    return power

@triton.jit
def _pow(x, y):
    size = tl.abs(x)
    power = tl.exp2(y * tl.log2(size))
    whole = tl.floor(y) == y
    odd = whole & (2 * tl.floor(y * 0.5) != y)
    power = tl.where(_negative(x) & odd, -power, power)
    no_root = (x < 0) & ~whole & (size != float("inf"))
    power = tl.where(no_root, float("nan"), power)
    one = (x == 1) | (y == 0) | ((size == 1) & (tl.abs(y) == float("inf")))
    return tl.where(one, 1.0, power)

@triton.jit
def _expm1(x):
    # Taylor near 0, where exp(x) - 1 cancels
    series = x * 0 + 1
    for i in tl.static_range(2, 14):
        series = 1 + series * x * (1.0 / (15 - i))
    return tl.where(tl.abs(x) < 0.5, x * series, tl.exp(x) - 1)

@triton.jit
def _log1p(x):
    # log(1 + x) = 2 atanh(x / (2 + x)), by its series near 0
    s = x / (2 + x)
    series = x * 0
    for i in tl.static_range(0, 9):
        series = series * (s * s) + 1.0 / (17 - 2 * i)
    return tl.where(tl.abs(x) < 0.25, 2 * s * series, tl.log(1 + x))

@triton.jit
def _tanh(x):
    t = _expm1(-2 * tl.abs(x))
    size = -t / (2 + t)
    return tl.where(x < 0, -size, size)

@triton.jit
def _sinh(x):
    size = tl.abs(x)
    t = _expm1(size)
    half = tl.exp(size * 0.5)  # squared last: exp(size) overflows before sinh does
    size = tl.where(size < 1, 0.5 * (t + t / (t + 1)), 0.5 * half * half - 0.5 / half / half)
    return tl.where(x < 0, -size, size)

@triton.jit
def _cosh(x):
    half = tl.exp(tl.abs(x) * 0.5)
    return 0.5 * half * half + 0.5 / half / half

@triton.jit
def _asinh(x):
    size = tl.abs(x)
    near = _log1p(size + size * size / (1 + tl.sqrt(size * size + 1)))
    size = tl.where(size > 1e9, tl.log(size) + 0.6931471805599453, near)
    return tl.where(x < 0, -size, size)

@triton.jit
def _acosh(x):
    t = x - 1
    near = _log1p(t + tl.sqrt(t) * tl.sqrt(t + 2))
    return tl.where(x > 1e9, tl.log(x) + 0.6931471805599453, near)

@triton.jit
def _atanh(x):
    size = tl.abs(x)
    size = 0.5 * _log1p(2 * size / (1 - size))
    return tl.where(x < 0, -size, size)

@triton.jit
def _cbrt(x):
    # Newton's steps after a first guess
    size = tl.abs(x)
    root = tl.exp2(tl.log2(size) * 0.3333333333333333)
    root -= (root - size / (root * root)) * 0.3333333333333333
    root -= (root - size / (root * root)) * 0.3333333333333333
    root = tl.where((size == 0) | (size == float("inf")), size, root)
    return tl.where(x < 0, -root, root)

@triton.jit
def _tan(x):
    return tl.sin(x) / tl.cos(x)

@triton.jit
def _atan(x):
    # two half-angle steps bring the argument below tan(pi / 16), where the series is short
    size = tl.abs(x)
    t = tl.where(size > 1, 1 / size, size)
    t = t / (1 + tl.sqrt(1 + t * t))
    t = t / (1 + tl.sqrt(1 + t * t))
    series = t * 0
    for i in tl.static_range(0, 11):
        series = 1.0 / (21 - 2 * i) - series * (t * t)
    angle = 4 * t * series
    angle = tl.where(size > 1, 1.5707963267948966 - angle, angle)
    return tl.where(x < 0, -angle, angle)

@triton.jit
def _asin(x):
    return _atan(x / tl.sqrt((1 - x) * (1 + x)))

@triton.jit
def _acos(x):
    return 2 * _atan(tl.sqrt((1 - x) / (1 + x)))

@triton.jit
def _atan2(y, x):
    high, low = tl.abs(y), tl.abs(x)
    big, small = _max(high, low), _min(high, low)
    ratio = tl.where(big == 0, 0.0, tl.where(small == float("inf"), 1.0, small / big))
    angle = _atan(ratio)
    angle = tl.where(high > low, 1.5707963267948966 - angle, angle)
    angle = tl.where(_negative(x), 3.141592653589793 - angle, angle)
    angle = tl.where(_negative(y), -angle, angle)
    return tl.where((x != x) | (y != y), x + y, angle)

@triton.jit
def _hypot(x, y):
    big, small = _max(tl.abs(x), tl.abs(y)), _min(tl.abs(x), tl.abs(y))
    ratio = small / big
    length = tl.where(big == 0, big, big * tl.sqrt(1 + ratio * ratio))
    infinite = (tl.abs(x) == float("inf")) | (tl.abs(y) == float("inf"))
    return tl.where(infinite, float("inf"), length)

@triton.jit
def _erfc(x):
    # (1 + 2a) exp(a*a) erfc(a) is smooth in q = (a - 3) / (a + 3): Shepherd and Laframboise
    a = _min(tl.abs(x), 30.0)
    q = (a - 3) / (a + 3)
    p = 7.576722066e-05 * q - 9.292964379e-05
    p = p * q - 7.223977425e-04
    p = p * q + 1.8759854e-03
    p = p * q + 2.495275583e-03
    p = p * q - 2.376431444e-02
    p = p * q + 6.831813996e-02
    p = p * q - 1.192750342e-01
    p = p * q + 1.296438561e-01
    p = p * q - 4.756218386e-02
    p = p * q - 1.356210578e-01
    p = p * q + 1.253008057
    square = a * a
    lost = tl.fma(a, a, -square)  # what rounding the square lost matters in the tail
    tail = tl.exp(-square) * (1 - lost) * p / (1 + 2 * a)
    return tl.where(x < 0, 2 - tail, tail)

@triton.jit
def _erfinv(y):
    # Winitzki's estimate, then two steps of Halley's method
    size = tl.abs(y)
    log = _log1p(-size * size)
    u = 4.330746750799873 + 0.5 * log
    x = tl.sqrt(tl.sqrt(u * u - log * 6.802721088435375) - u)
    for _ in tl.static_range(2):
        error = tl.where(size < 0.5, tl.erf(x) - size, (1 - size) - _erfc(x))
        step = error * 0.886226925452758 * tl.exp(x * x)
        x -= step / (1 + x * step)
    x = tl.where(size == 1, float("inf"), x)
    return tl.where(y < 0, -x, x)

@triton.jit
def _lgamma(x):
    # Stirling's series above 8, shifted up from below it, reflected from below a half
    z = tl.where(x < 0.5, 1 - x, x)
    low = z < 8
    product = z
    for i in tl.static_range(1, 7):
        product = product * (z + i)
    w = tl.where(low, z + 7, z)
    v = 1 / (w * w)
    series = (0.08333333333333333 - v * (0.002777777777777778 - v * 0.0007936507936507937)) / w
    result = (w - 0.5) * tl.log(w) - w + 0.9189385332046727 + series
    result = tl.where(low, result - tl.log(product), result)
    sine = tl.sin(3.141592653589793 * (x - _round(x)))
    result = tl.where(x < 0.5, tl.log(3.141592653589793 / tl.abs(sine)) - result, result)
    return tl.where(tl.abs(x) == float("inf"), float("inf"), result)

@triton.jit
def _digamma(x):
    # the asymptotic series above 8, by recurrence from below it, reflected from below 0
    z = tl.where(x < 0, 1 - x, x)
    low = z < 8
    shift = 1 / z
    for i in tl.static_range(1, 8):
        shift += 1 / (z + i)
    w = tl.where(low, z + 8, z)
    v = 1 / (w * w)
    series = v * (0.08333333333333333 - v * (0.008333333333333333 - v * 0.003968253968253968))
    result = tl.log(w) - 0.5 / w - series
    result = tl.where(low, result - shift, result)
    turn = x - _round(x)
    angle = 3.141592653589793 * turn
    mirror = 3.141592653589793 * tl.cos(angle) / tl.sin(angle)
    result = tl.where(x < 0, result - mirror, result)
    return tl.where((x < 0) & (turn == 0), float("nan"), result)
'''

_NAME = re.compile(r"\b_[a-z]\w*\b")


def _functions() -> dict[str, str]:
    pieces = [piece.strip() for piece in LIBRARY.split("@triton.jit") if piece.strip()]
    return {piece[len("def "):piece.index("(")]: f"@triton.jit\n{piece}" for piece in pieces}


FUNCTIONS: dict[str, str] = _functions()


def needed_functions(code: Iterable[str]) -> list[str]:
    """The texts of all library functions that some lines call, what they call first."""
    order: dict[str, str] = {}

    def visit(text: str) -> None:
        for name in _NAME.findall(text):
            if name in FUNCTIONS and name not in order:
                body = FUNCTIONS[name].split(":", 1)[1]
                visit(body)
                order.setdefault(name, FUNCTIONS[name])

    for line in code:
        visit(line)
    return list(order.values())
