"""Casts between all float types with both roundings, and arithmetic that must be exact."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [pytest.mark.triton, pytest.mark.torch]

# Triton's name, the host's type: the latter says what every code means.
SMALL = {
    "float8e4nv": ml_dtypes.float8_e4m3fn, "float8e5": ml_dtypes.float8_e5m2,
    "float8e4b8": ml_dtypes.float8_e4m3fnuz, "float8e5b16": ml_dtypes.float8_e5m2fnuz,
    "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
}
WIDE = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32,
        "float64": np.float64}
INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def convert(x_ptr, out_ptr, n, ROUNDING: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, x.to(out_ptr.dtype.element_ty, fp_downcast_rounding=ROUNDING),
             mask=i < n)


def converted(codes: np.ndarray, source: str, target: str, size: int, rounding: str | None = None
              ) -> np.ndarray:
    """The codes that a kernel writes, for numbers given by theirs."""
    integers = codes.view(f"int{codes.itemsize * 8}")
    x = triton.reinterpret(torch.from_numpy(integers.copy()), getattr(tl, source))
    out = torch.zeros(codes.size, dtype=INTEGER[size])
    convert[(triton.cdiv(codes.size, 512),)](
        x, triton.reinterpret(out, getattr(tl, target)), codes.size, rounding, 512)
    return out.numpy()


def values_of(name: str) -> np.ndarray:
    """What all codes of a type of 8 bits mean, in f64."""
    codes = np.arange(256, dtype=np.uint8)
    if name != "float8e4b15":
        return codes.view(SMALL[name]).astype(np.float64)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-17, (8 + mantissa) * 2.0 ** (
        exponent.astype(np.float64) - 18))
    return np.where(codes >= 128, -size, size)


@pytest.mark.parametrize("source", [*list(SMALL)[:4], "float8e4b15"])
@pytest.mark.parametrize("target", WIDE)
def test_all_codes_of_8_bits_are_widened_exactly(source: str, target: str) -> None:
    kind = np.dtype(WIDE[target])
    got = converted(np.arange(256, dtype=np.uint8), source, target, kind.itemsize).view(kind)
    with np.errstate(invalid="ignore"):  # ml_dtypes minds nan
        np.testing.assert_array_equal(got.astype(np.float64), values_of(source))


def numbers(target: str, source: type) -> np.ndarray:
    """Numbers around those of the target, halfway between them, and anywhere."""
    rng = np.random.default_rng(0)
    if np.dtype(SMALL.get(target, np.uint8)).itemsize == 1:
        known = values_of(target)
        known = np.unique(known[np.isfinite(known)])
    else:
        codes = rng.integers(0, 2**16, 1000).astype(np.uint16)
        with np.errstate(invalid="ignore"):
            known = np.unique(codes.view(SMALL[target]).astype(np.float64))
        known = known[np.isfinite(known)]
    with np.errstate(all="ignore"):
        exact = known.astype(source)
        middle = ((known[1:] + known[:-1]) / 2).astype(source)
        near = [np.nextafter(middle, source(s)) for s in (-np.inf, np.inf)] if (
            source in (np.float32, np.float64)) else []
        spread = (rng.normal(size=500) * 2.0 ** rng.integers(-30, 12, 500)).astype(source)
        limits = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, -1e-30, 6e4, 7e4]).astype(
            source)
    return np.concatenate([exact, middle, *near, spread, limits])


def rounded(x: np.ndarray, target: str, mode: str) -> np.ndarray:
    """The nearest number of a type or the next one towards zero; 8 bits saturate."""
    exact = x.astype(np.float64)
    if target == "float8e4b15" or np.dtype(SMALL[target]).itemsize == 1:
        table = values_of(target)
        codes = np.arange(128)[np.isfinite(table[:128])]
        sizes = table[codes]
    else:
        kind = SMALL[target]
        codes = np.arange(2**15)
        with np.errstate(all="ignore"):
            sizes = codes.astype(np.uint16).view(kind).astype(np.float64)
        codes, sizes = codes[np.isfinite(sizes)], sizes[np.isfinite(sizes)]
    size = np.minimum(np.abs(exact), sizes[-1])
    below = np.searchsorted(sizes, np.nan_to_num(size), side="right") - 1
    result = below.copy()
    if mode == "rtne":
        above = np.minimum(below + 1, sizes.size - 1)
        middle = (sizes[below] + sizes[above]) / 2
        up = (size > middle) | ((size == middle) & (codes[below] % 2 == 1))
        result = np.where(up, above, below)
    value = np.copysign(sizes[result], exact)
    if target in ("float16", "bfloat16"):  # there is infinity, reached by half a step
        last = sizes[-1] + (sizes[-1] - sizes[-2]) / 2
        over = np.abs(exact) >= last if mode == "rtne" else np.isinf(exact)
        value = np.where(over, np.copysign(np.inf, exact), value)
    return np.where(np.isnan(exact), np.nan, value)


@pytest.mark.parametrize("target", [*SMALL, "float8e4b15"])
@pytest.mark.parametrize("source", WIDE)
@pytest.mark.parametrize("mode", ["rtne", "rtz"])
def test_every_number_is_rounded_once(source: str, target: str, mode: str) -> None:
    kind = np.dtype(WIDE[source])
    size = np.dtype(SMALL.get(target, np.uint8)).itemsize
    if kind.itemsize <= size:
        pytest.skip("not a narrowing cast")
    x = numbers(target, kind.type)
    got = converted(x, source, target, size, mode)
    result = values_of(target)[got.view(np.uint8)] if size == 1 else (
        got.view(SMALL[target]).astype(np.float64))
    want = rounded(x, target, mode)
    if target == "float8e4b15":  # it has no nan
        want = np.where(np.isnan(want), np.where(np.signbit(x), -1.875, 1.875), want)
    np.testing.assert_array_equal(result, want)
    zeros = (want == 0) & (target not in ("float8e4b8", "float8e5b16"))  # those have one zero
    np.testing.assert_array_equal(np.signbit(result[zeros]), np.signbit(x[zeros]))


def test_between_types_of_8_bits() -> None:
    codes = np.arange(256, dtype=np.uint8)
    got = values_of("float8e4nv")[converted(codes, "float8e5", "float8e4nv", 1).view(np.uint8)]
    np.testing.assert_array_equal(got, rounded(values_of("float8e5"), "float8e4nv", "rtne"))


@pytest.mark.parametrize("target", ["int8", "int16", "int32", "int64"])
@pytest.mark.parametrize("source", ["float32", "float64"])
def test_floats_to_integers(source: str, target: str) -> None:
    kind, integer = np.dtype(source), np.dtype(target)
    info = np.iinfo(integer)
    x = np.array([0.5, -0.5, 1.99, -1.99, 100.7, -100.7, info.max // 2, info.min, 0.0, -0.0],
                 kind)
    got = converted(x, source, target, integer.itemsize)
    np.testing.assert_array_equal(got, np.trunc(x).astype(integer))
    if integer.itemsize >= 4:
        x = np.array([np.inf, -np.inf, np.nan, 1e30, -1e30, -float(info.min)], kind)
        got = converted(x, source, target, integer.itemsize)
        assert got.tolist() == [info.max, info.min, 0, info.max, info.min, info.max]


# ---------------------------------------------------------------- exact arithmetic
@triton.jit
def exact(a_ptr, b_ptr, c_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a = tl.load(a_ptr + i, mask=i < n)
    b = tl.load(b_ptr + i, mask=i < n)
    c = tl.load(c_ptr + i, mask=i < n)
    tl.store(out_ptr + i, tl.fma(a, b, c), mask=i < n)
    tl.store(out_ptr + n + i, tl.fdiv(a, b), mask=i < n)
    tl.store(out_ptr + 2 * n + i, tl.sqrt(tl.abs(a)), mask=i < n)
    if a.dtype == tl.float32:
        tl.store(out_ptr + n + i, tl.math.div_rn(a, b), mask=(i < n) & (i % 2 == 0))
        tl.store(out_ptr + 2 * n + i, tl.math.sqrt_rn(tl.abs(a)), mask=(i < n) & (i % 2 == 0))


def nearest(value: Fraction, kind: type) -> float:
    """A fraction rounded to the nearest float of a type, ties to even."""
    guess = kind(float(value))
    with np.errstate(over="ignore"):
        choices = [guess, np.nextafter(guess, kind(np.inf)), np.nextafter(guess, kind(-np.inf))]
    return min(choices, key=lambda v: (abs(Fraction(float(v)) - value),
                                       int(v.view(f"i{v.itemsize}")) & 1))


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_one_rounding(kind: type) -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.uniform(-2, 2, 200).astype(kind) for _ in range(2))
    c = (-a * b).astype(kind)  # nearly cancels: two roundings would leave nothing
    c[100:] = (rng.uniform(-2, 2, 100) * 2.0 ** rng.integers(-40, 40, 100)).astype(kind)
    out = torch.zeros(3, 200, dtype=torch.float32 if kind is np.float32 else torch.float64)
    exact[(1,)](*map(torch.from_numpy, (a, b, c)), out, 200, BLOCK=256)
    fused, quotient, root = out.numpy()
    want = [nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)), kind)
            for x, y, z in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(fused, want)
    np.testing.assert_array_equal(quotient, a / b)
    np.testing.assert_array_equal(root, np.sqrt(np.abs(a)))


@triton.jit
def fused_halves(a_ptr, b_ptr, c_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    mask = i < n
    tl.store(out_ptr + i, tl.fma(tl.load(a_ptr + i, mask=mask), tl.load(b_ptr + i, mask=mask),
                                 tl.load(c_ptr + i, mask=mask)), mask=mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_rounding_of_halves(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b, c = (torch.randn(500).to(dtype) for _ in range(3))
    out = torch.zeros(500, dtype=dtype)
    fused_halves[(1,)](a, b, c, out, 500, BLOCK=512)
    wide = torch.addcmul(c.double(), a.double(), b.double())  # exact: few bits
    assert torch.equal(out, wide.to(torch.float32).to(dtype))


@triton.jit
def clamped(x_ptr, low_ptr, high_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    mask = i < n
    x = tl.load(x_ptr + i, mask=mask)
    low = tl.load(low_ptr + i, mask=mask)
    high = tl.load(high_ptr + i, mask=mask)
    tl.store(out_ptr + i, tl.clamp(x, low, high), mask=mask)
    tl.store(out_ptr + n + i, tl.clamp(x, low, high, propagate_nan=tl.PropagateNan.ALL), mask=mask)


def test_clamp() -> None:
    nan = float("nan")
    x = torch.tensor([-2.0, 0.5, 3.0, nan, float("inf"), -float("inf"), -0.0])
    low, high = torch.full_like(x, -1.0), torch.full_like(x, 1.0)
    out = torch.zeros(2, x.numel())
    clamped[(1,)](x, low, high, out, x.numel(), BLOCK=8)
    assert out[0].tolist() == [-1.0, 0.5, 1.0, -1.0, 1.0, -1.0, 0.0]
    assert torch.equal(out[1].isnan(), x.isnan())
    assert torch.equal(out[1][~x.isnan()], out[0][~x.isnan()])


@triton.jit
def wrapping(a_ptr, b_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    mask = i < n
    a = tl.load(a_ptr + i, mask=mask)
    b = tl.load(b_ptr + i, mask=mask)
    tl.store(out_ptr + i, a + b, mask=mask)
    tl.store(out_ptr + n + i, a - b, mask=mask)
    tl.store(out_ptr + 2 * n + i, a * b, mask=mask)
    tl.store(out_ptr + 3 * n + i, -a, mask=mask)
    tl.store(out_ptr + 4 * n + i, tl.minimum(a, b), mask=mask)
    tl.store(out_ptr + 5 * n + i, tl.maximum(a, b), mask=mask)
    tl.store(out_ptr + 6 * n + i, tl.abs(a), mask=mask)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
                                   "uint64"])
def test_integers_wrap_around(dtype: str) -> None:
    info = np.iinfo(dtype)
    rng = np.random.default_rng(2)
    a, b = (rng.integers(info.min, info.max, 100, dtype, endpoint=True) for _ in range(2))
    a[:3], b[:3] = [info.max, info.min, info.min], [1, 1, info.max]
    out = torch.zeros(7, 100, dtype=getattr(torch, dtype))
    wrapping[(1,)](torch.from_numpy(a), torch.from_numpy(b), out, 100, BLOCK=128)
    with np.errstate(over="ignore"):
        want = [a + b, a - b, a * b, np.negative(a), np.minimum(a, b), np.maximum(a, b),
                np.abs(a)]
    np.testing.assert_array_equal(out.numpy(), np.stack(want))


@triton.jit
def high_half(a_ptr, b_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    mask = i < n
    tl.store(out_ptr + i, tl.umulhi(tl.load(a_ptr + i, mask=mask), tl.load(b_ptr + i, mask=mask)),
             mask=mask)


@pytest.mark.parametrize("bits", [32, 64])
def test_upper_halves_of_products(bits: int) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.integers(0, 2**bits, 100, f"uint{bits}") for _ in range(2))
    a[:2], b[:2] = 2**bits - 1, [2**bits - 1, 1]
    out = torch.zeros(100, dtype=getattr(torch, f"int{bits}"))
    high_half[(1,)](torch.from_numpy(a.view(f"int{bits}")), torch.from_numpy(b.view(f"int{bits}")),
                    out, 100, BLOCK=128)
    want = [int(x) * int(y) >> bits for x, y in zip(a, b, strict=True)]
    assert out.numpy().view(f"uint{bits}").tolist() == want


@triton.jit
def chosen(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    for _ in tl.static_range(6):
        x = tl.where(x > 0, x - 1, x * 2)
    tl.store(out_ptr + i, x, mask=i < n)


def test_chains_of_choices_load_once() -> None:
    x = torch.randint(-100, 100, (200,), dtype=torch.int32)
    out = torch.zeros_like(x)
    kernel = chosen[(1,)](x, out, 200, BLOCK=256)
    want = x
    for _ in range(6):
        want = torch.where(want > 0, want - 1, want * 2)
    assert torch.equal(out, want)
    # A load for each combination of conditions would make hundreds of them.
    assert kernel.asm["llir"].count("masked.load") + kernel.asm["llir"].count("= load <") < 30
    assert len(kernel.asm["loop"]) < 5000  # what is shared has a name


@triton.jit
def product_and_sum(a_ptr, b_ptr, c_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    mask = i < n
    a = tl.load(a_ptr + i, mask=mask)
    b = tl.load(b_ptr + i, mask=mask)
    tl.store(out_ptr + i, a * b + tl.load(c_ptr + i, mask=mask), mask=mask)


def test_products_are_rounded_without_fusion() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 300)
    c = -a * b
    out = torch.ones(300)
    product_and_sum[(1,)](a, b, c, out, 300, BLOCK=512, enable_fp_fusion=False)
    assert torch.equal(out, torch.zeros(300))
    product_and_sum[(1,)](a, b, c, out, 300, BLOCK=512)
    error = torch.addcmul(c.double(), a.double(), b.double())
    assert torch.equal(out, error.float())
