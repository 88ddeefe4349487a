"""Special functions, in double precision by expansions that are good for float32.

Bessel functions are sums of Chebyshev polynomials up to a bound and, beyond, their asymptotic forms
with such sums for what is left (Abramowitz and Stegun, chapter 9). The coefficients were fitted to
values of 30 digits, to 2e-10 of the largest. float64 is left to torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from terrazzo.dtypes import float64
from terrazzo.graph.ir import TensorType, Value
from terrazzo.ops import elementwise as e
from terrazzo.ops import reduce
from terrazzo.ops.control import while_loop
from terrazzo.ops.creation import full, zeros
from terrazzo.ops.shape import broadcast_to
from terrazzo.torch.aten.registry import CONVERTERS, Converter, Function, aten, unsupported

_COEFFICIENTS = {
    "i0_near": (
        0.338397637205, -0.304682672343, 0.171620901522, -0.094901097048, 0.0493052842397,
        -0.0237374148059, 0.0105464603946, -0.00432430999505, 0.00163947561694,
        -0.000576375574539, 0.000188502885096, -5.7541950101e-05, 1.64484480709e-05,
        -4.41673835872e-06, 1.11738753942e-06, -2.67079385655e-07, 6.04699508947e-08,
        -1.30002505269e-08, 2.65982411642e-09, -5.18979578389e-10),
    "i0_far": (
        0.402245284149, 0.00336895923465, 6.90547048316e-05, 2.73445282669e-06,
        3.61524565362e-07, -1.33599856988e-07, 1.59215637266e-07, -1.5479745307e-07,
        1.5469503371e-07, -1.5402611344e-07, 1.53213063646e-07, -1.52380332266e-07,
        1.51452547418e-07, -1.50446248783e-07, 1.49363487723e-07, -1.4820294803e-07,
        1.46965527275e-07, -1.45652001814e-07, 1.44262994318e-07, -1.42799218964e-07,
        1.41261440789e-07, -1.39650458494e-07, 1.37967103932e-07, -1.36212251559e-07,
        1.34386808673e-07, -1.32491724118e-07, 1.30527976487e-07, -1.28496586907e-07,
        1.26398604714e-07, -1.24235121599e-07, 1.220072538e-07, -1.19716159246e-07,
        1.17363022278e-07, -1.14949067103e-07, 1.1247553966e-07, -1.09943725451e-07,
        1.07354933799e-07, -1.04710509383e-07, 1.02011818363e-07, -9.92602638384e-08),
    "i1_near": (
        0.126293593222, -0.176416518358, 0.10264365869, -0.0529459812081, 0.0247264490306,
        -0.0105640848946, 0.00415642294431, -0.00151357245063, 0.000512285956168,
        -0.000161760815826, 4.78156510754e-05, -1.3273163656e-05, 3.47025130801e-06,
        -8.56872026409e-07, 2.0032947529e-07, -4.44505912859e-08, 9.38153744273e-09,
        -1.88724977486e-09, 3.62559210085e-10),
    "i1_far": (
        0.389287881591, -0.0097606257772, -0.00011106028621, -3.41182834437e-06,
        -7.21105155281e-07, 4.42468403149e-07, -4.71277094599e-07, 4.65299119904e-07,
        -4.64052027539e-07, 4.62000060979e-07, -4.59648485773e-07, 4.57121512796e-07,
        -4.54340169563e-07, 4.5132356116e-07, -4.4807462094e-07, 4.44593066625e-07,
        -4.40881036496e-07, 4.36940587746e-07, -4.32773702766e-07, 4.28382533535e-07,
        -4.23769365091e-07, 4.18936586497e-07, -4.13886703018e-07, 4.08622329791e-07,
        -4.03146197267e-07, 3.97461140637e-07, -3.91570109338e-07, 3.85476153028e-07,
        -3.79182432973e-07, 3.72692206514e-07, -3.66008841847e-07, 3.59135799284e-07,
        -3.52076643416e-07, 3.44835027995e-07, -3.37414710695e-07, 3.29819533507e-07,
        -3.22053435053e-07, 3.14120436938e-07, -3.0602465445e-07, 2.97770278754e-07),
    "k0_near": (
        -0.267663696617, 0.344289899925, 0.0359799365154, 0.00126461541145,
        2.28621210313e-05, 2.53479107655e-07, 1.90451650457e-09),
    "k1_near": (
        0.762650113669, -0.353155960777, -0.122611180823, -0.00697572385964,
        -0.000173028895751, -2.43340614114e-06, -2.21338766239e-08),
    "k0_far": (
        1.22015055318, -0.0314461261148, 0.00156791022416, -0.000126524392598,
        1.19822903404e-05, 1.31168385574e-07, -1.68062582766e-06, 1.90407123976e-06,
        -1.9344601526e-06, 1.93268776079e-06, -1.92437620674e-06, 1.91400556744e-06,
        -1.90242584212e-06, 1.88981324115e-06, -1.87621060982e-06, 1.86163313488e-06,
        -1.84609028239e-06, 1.82959056888e-06, -1.81214266562e-06, 1.79375564193e-06,
        -1.77443903855e-06, 1.75420286341e-06, -1.73305760977e-06, 1.71101422997e-06,
        -1.68808415433e-06, 1.66427925743e-06, -1.63961188607e-06, 1.61409481343e-06,
        -1.58774127312e-06, 1.5605649091e-06, -1.53257981994e-06, 1.50380049821e-06,
        -1.47424186696e-06, 1.44391923043e-06, -1.41284831777e-06, 1.38104521959e-06,
        -1.34852642575e-06, 1.31530877934e-06, -1.2814095072e-06, 1.24684616377e-06),
    "k1_far": (
        1.36031605922, 0.103917810149, -0.00285189503916, 0.000189301374153,
        -1.34585764592e-05, -3.48311797654e-06, 5.52255433498e-06, -5.79544358785e-06,
        5.81957957363e-06, -5.80195994923e-06, 5.77459783103e-06, -5.74297376189e-06,
        5.70811749256e-06, -5.67024837008e-06, 5.62942843952e-06, -5.58568827374e-06,
        5.53905272326e-06, -5.48954648934e-06, 5.43719535661e-06, -5.38202649395e-06,
        5.3240684957e-06, -5.26335140615e-06, 5.19990668452e-06, -5.13376721719e-06,
        5.0649672717e-06, -4.99354251241e-06, 4.91952994149e-06, -4.84296792662e-06,
        4.7638961328e-06, -4.68235555264e-06, 4.59838842607e-06, -4.51203827919e-06,
        4.42334985066e-06, -4.33236911817e-06, 4.23914321276e-06, -4.14372046023e-06,
        4.04615030161e-06, -3.94648331163e-06, 3.84477112572e-06, -3.74106647046e-06),
    "j0_near": (
        0.157727971475, -0.00872344235285, 0.265178613203, -0.370094993873, 0.158067102332,
        -0.0348937694114, 0.00481918006947, -0.000460626166206, 3.24603288206e-05,
        -1.76194690766e-06, 7.60816355852e-08, -2.67925327825e-09),
    "j1_near": (
        0.0810448463257, -0.148975145068, 0.160999262357, -0.0826804917668, 0.022213639655,
        -0.00364694060077, 0.000405033772835, -3.25555486683e-05, 1.98587740481e-06,
        -9.52198474582e-08, 3.68713354657e-09, -1.17802465598e-10),
    "y0_near": (
        -0.0331461132033, -0.27447430553, 0.179034314077, 0.261567346255, -0.177302012781,
        0.0471966895958, -0.00728796247955, 0.000753113593258, -5.63207914107e-05,
        3.20653253779e-06, -1.44072332946e-07, 5.24879477815e-09, -1.58375581313e-10),
    "y1_near": (
        0.00253801323574, -0.0160871730477, -0.0959120453608, 0.0844519725965,
        -0.0283281239446, 0.00528989754417, -0.000641455145133, 5.50598287333e-05,
        -3.53808001861e-06, 1.77078045541e-07, -7.11054998389e-09, 2.34433758144e-10),
    "p0_far": (
        0.999460349348, -0.000536522046813, 3.07518478743e-06, -5.17059453031e-08,
        1.63064649283e-09),
    "q0_far": (
        -0.0155558546053, 6.83851994261e-05, -7.41449841104e-07, 1.79724572462e-08,
        -7.27191590871e-10, 4.22012135523e-11, -3.20674172514e-12),
    "p1_far": (
        1.00090304086, 0.000898989833086, -3.98728430059e-06, 6.17763396826e-08,
        -1.87189075351e-09),
    "q1_far": (
        0.0467777870695, -9.62772354916e-05, 9.1386152579e-07, -2.09597813749e-08,
        8.22919331636e-10, -4.68636154188e-11),
    "erfcx": (
        1.1775625742, 0.00535390453962, -0.0937755034228, 0.0543665255574, -0.0189765967078,
        0.00445342606146, -0.000633553171055, 1.76617195228e-05, 1.2841532864e-05,
        -2.00722856572e-06, -1.80752279158e-07, 7.54982834514e-08, 1.88566860737e-09,
        -2.69951949509e-09),
    "ai_near": (
        0.103732614565, 0.0606447247462, -0.000661791968021, -0.154281301989,
        -0.0851616817022, 0.0634699246985, 0.0727202826279, 0.0998785486844,
        -0.201488173641, 0.0204739877475, 0.12204374036, -0.072556673631, -0.014433634299,
        0.0306214358149, -0.00867170754448, -0.00420559640724, 0.00350170229405,
        -0.000429646640119, -0.000478214056704, 0.000229073343944, -1.8855370347e-06,
        -3.10359208395e-05, 9.54987032486e-06, 9.20303031558e-07, -1.32362652509e-06,
        2.67589058962e-07, 5.84701813927e-08, -4.00632684054e-08, 5.07354384348e-09,
        2.0684679552e-09, -9.03677745478e-10, 5.95420536492e-11, 5.09041098608e-11),
    "ai_right": (
        0.984405304917, -0.0147927848501, 0.000732717746543, -6.12595423418e-05,
        6.83476697557e-06, -9.2372297354e-07, 1.43622534044e-07, -2.48931942232e-08,
        4.70979344005e-09, -9.58386370811e-10, 2.07458554837e-10),
    "ai_sine": (
        0.999918817918, -8.10466092367e-05, 1.34756659847e-07, -7.08558471431e-10),
    "ai_cosine": (
        0.00459807999355, -5.46192671459e-06, 1.77136344234e-08, -1.37503776096e-10,
        1.90480817603e-12),
}  # fmt: skip


def _wide(x: Value) -> Value:
    if x.dtype is float64:
        unsupported("a special function in double precision")
    return e.astype(x, dtype=float64)


def _sum(name: str, x: Any, low: float, high: float) -> Any:
    """A sum of Chebyshev polynomials on an interval, by Clenshaw's recurrence."""
    t = (x - (low + high) / 2) * (2 / (high - low))
    first, second = 0.0 * t, 0.0 * t
    for c in _COEFFICIENTS[name][:0:-1]:
        first, second = 2 * t * first - second + c, first
    return t * first - second + _COEFFICIENTS[name][0]


def _pieces(x: Value, bound: float, near: Callable[[Value], Value],
            far: Callable[[Value], Value]) -> Value:
    """One form up to a bound, another beyond; each is only given what it can take."""
    return e.where(e.less_equal(x, bound), near(e.minimum(x, bound)), far(e.maximum(x, bound)))


# ---------------------------------------------------------------- modified Bessel functions
def _i0e(x: Value) -> Value:
    return _pieces(e.absolute(x), 8, lambda a: _sum("i0_near", a, 0, 8),
                   lambda a: _sum("i0_far", 8 / a, 0, 1) / e.sqrt(a))


def _i1e(x: Value) -> Value:
    size = _pieces(e.absolute(x), 8, lambda a: a * _sum("i1_near", a, 0, 8),
                   lambda a: _sum("i1_far", 8 / a, 0, 1) / e.sqrt(a))
    return e.where(e.less(x, 0), e.negative(size), size)


def _i0(x: Value) -> Value:
    return _i0e(x) * e.exp(e.absolute(x))


def _i1(x: Value) -> Value:
    return _i1e(x) * e.exp(e.absolute(x))


def _k(order: int, x: Value, scaled: bool) -> Value:
    """Of the second kind; infinite at 0, nan below."""
    def near(a: Value) -> Value:
        a = e.maximum(a, 1e-300)
        rest = _sum(f"k{order}_near", a * a, 0, 4)
        log = e.log(a / 2)
        made = rest - log * _i0(a) if order == 0 else rest / a + log * _i1(a)
        return made * e.exp(a) if scaled else made

    def far(a: Value) -> Value:
        made = _sum(f"k{order}_far", 2 / a, 0, 1) / e.sqrt(a)
        return made if scaled else made * e.exp(e.negative(a))

    return _below_zero(x, math.inf, _pieces(x, 2, near, far))


def _below_zero(x: Value, at_zero: float, value: Value) -> Value:
    return e.where(e.less(x, 0), math.nan, e.where(e.equal(x, 0), at_zero, value))


# ---------------------------------------------------------------- Bessel functions
def _waves(order: int, x: Value) -> tuple[Value, Value]:
    """Both kinds from 8 on: amplitudes times cosine and sine of the phase."""
    z = (8 / x) * (8 / x)
    p, q = _sum(f"p{order}_far", z, 0, 1), _sum(f"q{order}_far", z, 0, 1) * (8 / x)
    phase = x - (order / 2 + 0.25) * math.pi
    scale = e.sqrt(2 / math.pi / x)
    return (scale * (p * e.cos(phase) - q * e.sin(phase)),
            scale * (p * e.sin(phase) + q * e.cos(phase)))


def _j(order: int, x: Value) -> Value:
    def near(a: Value) -> Value:
        made = _sum(f"j{order}_near", a * a, 0, 64)
        return a * made if order else made

    size = _pieces(e.absolute(x), 8, near, lambda a: _waves(order, a)[0])
    return e.where(e.less(x, 0), e.negative(size), size) if order else size


def _y(order: int, x: Value) -> Value:
    def near(a: Value) -> Value:
        a = e.maximum(a, 1e-300)
        rest, log = _sum(f"y{order}_near", a * a, 0, 64), e.log(a) * _j(order, a)
        return 2 / math.pi * log + rest if order == 0 else 2 / math.pi * (log - 1 / a) + a * rest

    value = _pieces(x, 8, near, lambda a: _waves(order, a)[1])
    return _below_zero(x, -math.inf, value)


def _spherical_j0(x: Value) -> Value:
    near = 1 - x * x / 6 * (1 - x * x / 20)
    return e.where(e.less(e.absolute(x), 1e-3), near,
                   e.where(e.isinf(x), 0.0, e.sin(x) / e.where(e.equal(x, 0), 1.0, x)))


def _airy(x: Value) -> Value:
    """Ai: a sum in the middle, waves to the left and a decay to the right of it (A. and S. 10.4).

    nan at both ends, as torch has it.
    """
    size = e.absolute(x)
    phase = 2 / 3 * size * e.sqrt(size)
    left, right = e.maximum(phase, 2 / 3 * 8 ** 1.5), e.maximum(phase, 2 / 3 * 2 ** 1.5)
    u = (2 / 3 * 8 ** 1.5) / left
    root = e.sqrt(e.sqrt(size)) * math.sqrt(math.pi)
    turned = left + math.pi / 4
    waves = (_sum("ai_sine", u * u, 0, 1) * e.sin(turned)
             - _sum("ai_cosine", u * u, 0, 1) * u * e.cos(turned)) / root
    decay = (_sum("ai_right", (2 / 3 * 2 ** 1.5) / right, 0, 1) / (2 * root)
             * e.exp(e.negative(right)))
    middle = _sum("ai_near", e.maximum(e.minimum(x, 2), -8), -8, 2)
    made = e.where(e.less(x, -8), waves, e.where(e.greater(x, 2), decay, middle))
    return e.where(e.isinf(x), math.nan, made)


# ---------------------------------------------------------------- normal distribution
def _erfcx(x: Value) -> Value:
    """exp(x * x) * erfc(x), by a sum in a variable that covers half the line (Schonfelder)."""
    a = e.minimum(e.absolute(x), 1e150)
    right = _sum("erfcx", (a - 3) / (a + 3), -1, 1) / (1 + 2 * a)
    return e.where(e.less(x, 0), 2 * e.exp(a * a) - right, right)


def _log_ndtr(x: Value) -> Value:
    root = math.sqrt(0.5)
    tail = e.log(_erfcx(e.negative(x) * root) / 2) - x * x / 2
    return e.where(e.less(x, -1), tail, e.log1p(e.erfc(x * root) * -0.5))


def _ndtri(p: Value) -> Value:
    """Winitzki's estimate of the nearer tail, and Halley's steps with the error function."""
    tail = e.minimum(p, 1 - p)
    inside = e.where(e.greater(tail, 0), tail, 0.25)
    log = e.log(4 * inside * (1 - inside))
    b = 2 / (math.pi * 0.147) + log / 2
    x = e.negative(math.sqrt(2) * e.sqrt(e.sqrt(b * b - log / 0.147) - b))
    for _ in range(3):
        error = e.erfc(e.negative(x) * math.sqrt(0.5)) / 2 - inside
        step = error * math.sqrt(2 * math.pi) * e.exp(x * x / 2)
        x = x - step / (1 + x * step / 2)
    x = e.where(e.less(p, 0.5), x, e.negative(x))
    edge = e.where(e.equal(p, 0), -math.inf, e.where(e.equal(p, 1), math.inf, math.nan))
    return e.where(e.logical_and(e.greater(p, 0), e.less(p, 1)), x, edge)


# ---------------------------------------------------------------- zeta and polygamma
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)


def _zeta(s: Value, q: Value) -> Value:
    """Hurwitz's zeta: terms up to q + k > 9, and the rest by Euler and Maclaurin's formula."""
    pole = e.logical_and(e.less_equal(q, 0), e.equal(q, e.floor(q)))
    whole = e.equal(s, e.floor(s))
    usable = e.logical_and(e.logical_not(pole), e.isfinite(q))
    start = e.where(usable, q, 1.0)

    def short(a: Value) -> Value:
        return e.less_equal(a, 9.0)

    def step(state: Any) -> Any:
        a, total = state
        more = short(a)
        return (e.where(more, a + 1, a),
                total + e.where(more, e.power(a, e.negative(s)), 0.0))

    a, total = while_loop(lambda state: reduce.any_(short(state[0])), step, (start, 0 * start))
    total = total + e.power(a, 1 - s) / (s - 1) + e.power(a, e.negative(s)) / 2
    factor = s * e.power(a, e.negative(s) - 1)
    for k, number in enumerate(_BERNOULLI):
        total = total + factor * (number / math.factorial(2 * k + 2))
        factor = factor * (s + (2 * k + 1)) * (s + (2 * k + 2)) / (a * a)
    total = e.where(e.isfinite(q), total, math.nan)
    below = e.logical_and(e.less(q, 0), e.logical_not(whole))
    total = e.where(pole, math.inf, e.where(below, math.nan, total))
    total = e.where(e.less(s, 1), math.nan, e.where(e.equal(s, 1), math.inf, total))
    return e.where(e.logical_or(e.isnan(s), e.isnan(q)), math.nan, total)


@aten("special_zeta", "special_zeta.other_scalar", "special_zeta.self_scalar", typed=True)
def zeta(s: Any, q: Any, *, out: TensorType) -> Any:
    if math.prod(out.shape) == 0:
        return zeros(shape=out.shape, dtype=out.dtype)
    return _zeta(*_together(s, q, out))


@aten("polygamma", typed=True)
def polygamma(n: int, x: Any, *, out: TensorType) -> Any:
    if n == 0:
        return e.digamma(e.astype(x, dtype=out.dtype))
    if x.size == 0:
        return zeros(shape=out.shape, dtype=out.dtype)
    wide = _wide(e.astype(x, dtype=out.dtype))
    order = full(shape=x.shape, value=float(n + 1), dtype=float64)
    return _zeta(order, wide) * ((-1) ** (n + 1) * math.factorial(n))


# ---------------------------------------------------------------- incomplete gamma functions
def _lower_series(a: Value, x: Value) -> Value:
    """The regularised lower function over its prefactor, for x up to a + 1."""
    def step(state: Any) -> Any:
        k, term, total = state
        term = term * x / (a + k)
        return k + 1, term, total + term

    def goes_on(state: Any) -> Any:
        return reduce.any_(e.greater(state[1], 1e-12 * state[2]))

    first = 1 / a
    return while_loop(goes_on, step, (full(shape=(), value=1.0, dtype=float64), first, first))[2]


def _upper_fraction(a: Value, x: Value) -> Value:
    """The regularised upper function over its prefactor, for x from a + 1 on (Lentz's method)."""
    def step(state: Any) -> Any:
        k, b, c, d, made, _ = state
        factor = k * (a - k)
        b = b + 2
        d = 1 / (factor * d + b)
        c = b + factor / c
        return k + 1, b, c, d, made * c * d, c * d - 1

    def goes_on(state: Any) -> Any:
        return reduce.any_(e.greater(e.absolute(state[5]), 1e-12))

    b = x + 1 - a
    start = (full(shape=(), value=1.0, dtype=float64), b, 0 * b + 1e300, 1 / b, 1 / b, 0 * b + 1)
    return while_loop(goes_on, step, start)[4]


def _incomplete_gamma(a: Value, x: Value, upper: bool) -> Value:
    inside = e.logical_and(e.logical_and(e.greater(a, 0), e.greater(x, 0)),
                           e.logical_and(e.isfinite(a), e.isfinite(x)))
    safe_a, safe_x = e.where(inside, a, 1.0), e.where(inside, x, 1.0)
    short = e.less(safe_x, safe_a + 1)
    scale = e.exp(safe_a * e.log(safe_x) - safe_x - e.lgamma(safe_a))
    low = scale * _lower_series(safe_a, e.where(short, safe_x, 0.5 * safe_a))
    high = scale * _upper_fraction(safe_a, e.where(short, safe_a + 2, safe_x))
    lower = e.where(short, low, 1 - high)
    made = e.where(short, 1 - low, high) if upper else lower
    none = e.logical_or(e.equal(x, 0), e.isinf(a))  # nothing of the integral lies below x
    edge = e.where(none, 1.0 if upper else 0.0, 0.0 if upper else 1.0)
    bad = e.logical_or(e.logical_or(e.less(a, 0), e.less(x, 0)), e.logical_or(
        e.logical_and(e.equal(a, 0), e.equal(x, 0)), e.logical_and(e.isinf(a), e.isinf(x))))
    bad = e.logical_or(bad, e.logical_or(e.isnan(a), e.isnan(x)))
    return e.where(bad, math.nan, e.where(inside, made, edge))


@aten("igamma", "special_gammainc", typed=True)
def igamma(a: Any, x: Any, *, out: TensorType) -> Any:
    if math.prod(out.shape) == 0:
        return zeros(shape=out.shape, dtype=out.dtype)
    return _incomplete_gamma(*_together(a, x, out), upper=False)


@aten("igammac", "special_gammaincc", typed=True)
def igammac(a: Any, x: Any, *, out: TensorType) -> Any:
    if math.prod(out.shape) == 0:
        return zeros(shape=out.shape, dtype=out.dtype)
    return _incomplete_gamma(*_together(a, x, out), upper=True)


def _together(x: Any, y: Any, out: TensorType) -> tuple[Value, Value]:
    made = [_wide(e.astype(v, dtype=out.dtype)) if isinstance(v, Value) else
            full(shape=(), value=float(v), dtype=float64) for v in (x, y)]
    return broadcast_to(made[0], shape=out.shape), broadcast_to(made[1], shape=out.shape)


# ---------------------------------------------------------------- orthogonal polynomials
# Each by its first two members and what the k-th and the one before say of the next.
Recurrence = Callable[[Any, Any, Any, Any], Any]  # of x, k, the one before, the k-th


def _chebyshev(x: Any, k: Any, before: Any, now: Any) -> Any:
    return 2 * x * now - before


_POLYNOMIALS: dict[str, tuple[Callable[[Any], Any], Recurrence]] = {
    "chebyshev_polynomial_t": (lambda x: x, _chebyshev),
    "chebyshev_polynomial_u": (lambda x: 2 * x, _chebyshev),
    "chebyshev_polynomial_v": (lambda x: 2 * x - 1, _chebyshev),
    "chebyshev_polynomial_w": (lambda x: 2 * x + 1, _chebyshev),
    "hermite_polynomial_h": (lambda x: 2 * x, lambda x, k, p, q: 2 * x * q - 2 * k * p),
    "hermite_polynomial_he": (lambda x: x, lambda x, k, p, q: x * q - k * p),
    "laguerre_polynomial_l": (lambda x: 1 - x,
                              lambda x, k, p, q: ((2 * k + 1 - x) * q - k * p) / (k + 1)),
    "legendre_polynomial_p": (lambda x: x,
                              lambda x, k, p, q: ((2 * k + 1) * x * q - k * p) / (k + 1)),
}


def _polynomial(x: Value, n: Value, first: Callable[[Any], Any], rule: Recurrence) -> Value:
    """The n-th of a family, n being a tensor too: as many turns as the largest needs."""
    n = e.trunc(n)
    most = reduce.max_(n)

    def step(state: Any) -> Any:
        k, before, now = state
        more = e.less(k, n)
        return (k + 1, e.where(more, now, before), e.where(more, rule(x, k, before, now), now))

    start = (full(shape=(), value=1.0, dtype=float64), 0 * x + 1, 0 * x + first(x))
    now = while_loop(lambda state: e.less(state[0], most), step, start)[2]
    return e.where(e.less(n, 0), 0.0, e.where(e.equal(n, 0), 1.0, now))


def _polynomial_converter(first: Callable[[Any], Any], rule: Recurrence, shifted: bool
                          ) -> Function:
    def convert(x: Any, n: Any, *, out: TensorType) -> Any:
        if math.prod(out.shape) == 0:
            return zeros(shape=out.shape, dtype=out.dtype)
        wide, degree = _together(x, n, out)
        return _polynomial(2 * wide - 1 if shifted else wide, degree, first, rule)

    return convert


# ---------------------------------------------------------------- all of them
_FUNCTIONS: dict[str, Callable[[Value], Value]] = {
    "i0": _i0, "special_i0": _i0, "special_i0e": _i0e, "special_i1": _i1, "special_i1e": _i1e,
    "special_modified_bessel_i0": _i0, "special_modified_bessel_i1": _i1,
    "special_modified_bessel_k0": lambda x: _k(0, x, False),
    "special_modified_bessel_k1": lambda x: _k(1, x, False),
    "special_scaled_modified_bessel_k0": lambda x: _k(0, x, True),
    "special_scaled_modified_bessel_k1": lambda x: _k(1, x, True),
    "special_bessel_j0": lambda x: _j(0, x), "special_bessel_j1": lambda x: _j(1, x),
    "special_bessel_y0": lambda x: _y(0, x), "special_bessel_y1": lambda x: _y(1, x),
    "special_spherical_bessel_j0": _spherical_j0, "special_erfcx": _erfcx,
    "special_log_ndtr": _log_ndtr, "special_ndtri": _ndtri, "special_airy_ai": _airy,
}  # fmt: skip


def _function_converter(function: Callable[[Value], Value]) -> Function:
    return lambda x: function(_wide(x))


for _name, _function in _FUNCTIONS.items():
    CONVERTERS[f"aten.{_name}"] = Converter(_function_converter(_function),
                                            promotes="INT_TO_FLOAT")
for _name, (_first, _rule) in _POLYNOMIALS.items():
    _names = [(_name, False)]
    if _name.startswith("chebyshev"):
        _names.append((f"shifted_{_name}", True))
    for _each, _shifted in _names:
        CONVERTERS[f"aten.special_{_each}"] = Converter(
            _polynomial_converter(_first, _rule, _shifted), typed=True)
