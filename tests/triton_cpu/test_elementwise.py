"""Arithmetic, comparisons, maths and casts, by tables of types, against torch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
libdevice = pytest.importorskip("triton.language.extra.libdevice")

pytestmark = [pytest.mark.triton, pytest.mark.torch]

SIZE = 200  # neither a power of two nor a multiple of a vector


@triton.jit
def arithmetic(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=1)
    y = tl.load(y_ptr + i, mask=i < n, other=1)
    tl.store(out_ptr + i, x + y, mask=i < n)
    tl.store(out_ptr + n + i, x - y, mask=i < n)
    tl.store(out_ptr + 2 * n + i, x * y, mask=i < n)
    tl.store(out_ptr + 3 * n + i, tl.minimum(x, y), mask=i < n)
    tl.store(out_ptr + 4 * n + i, tl.maximum(x, y), mask=i < n)
    tl.store(out_ptr + 5 * n + i, tl.where(x > y, x, y * 2), mask=i < n)
    tl.store(out_ptr + 6 * n + i, tl.abs(x), mask=i < n)


@triton.jit
def comparisons(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=1)
    y = tl.load(y_ptr + i, mask=i < n, other=1)
    tl.store(out_ptr + i, x < y, mask=i < n)
    tl.store(out_ptr + n + i, x <= y, mask=i < n)
    tl.store(out_ptr + 2 * n + i, x > y, mask=i < n)
    tl.store(out_ptr + 3 * n + i, x >= y, mask=i < n)
    tl.store(out_ptr + 4 * n + i, x == y, mask=i < n)
    tl.store(out_ptr + 5 * n + i, x != y, mask=i < n)


@triton.jit
def integers(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=1)
    y = tl.load(y_ptr + i, mask=i < n, other=1)
    tl.store(out_ptr + i, x & y, mask=i < n)
    tl.store(out_ptr + n + i, x | y, mask=i < n)
    tl.store(out_ptr + 2 * n + i, x ^ y, mask=i < n)
    tl.store(out_ptr + 3 * n + i, x // y, mask=i < n)
    tl.store(out_ptr + 4 * n + i, x % y, mask=i < n)
    tl.store(out_ptr + 5 * n + i, x << (y & 3), mask=i < n)
    tl.store(out_ptr + 6 * n + i, x >> (y & 3), mask=i < n)


@triton.jit
def functions(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=1)
    tl.store(out_ptr + i, -x, mask=i < n)
    tl.store(out_ptr + n + i, tl.exp(x), mask=i < n)
    tl.store(out_ptr + 2 * n + i, tl.exp2(x), mask=i < n)
    tl.store(out_ptr + 3 * n + i, tl.log(tl.abs(x)), mask=i < n)
    tl.store(out_ptr + 4 * n + i, tl.log2(tl.abs(x)), mask=i < n)
    tl.store(out_ptr + 5 * n + i, tl.sin(x), mask=i < n)
    tl.store(out_ptr + 6 * n + i, tl.cos(x), mask=i < n)
    tl.store(out_ptr + 7 * n + i, tl.sqrt(tl.abs(x)), mask=i < n)
    tl.store(out_ptr + 8 * n + i, tl.rsqrt(tl.abs(x)), mask=i < n)
    tl.store(out_ptr + 9 * n + i, tl.erf(x), mask=i < n)
    tl.store(out_ptr + 10 * n + i, tl.floor(x), mask=i < n)
    tl.store(out_ptr + 11 * n + i, tl.ceil(x), mask=i < n)
    tl.store(out_ptr + 12 * n + i, tl.sigmoid(x), mask=i < n)
    tl.store(out_ptr + 13 * n + i, tl.fma(x, x, x), mask=i < n)


@triton.jit
def convert(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, x.to(out_ptr.dtype.element_ty), mask=i < n)


INTEGERS = ["int8", "int16", "int32", "int64", "uint8"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]


def numbers(dtype: str, seed: int):
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.randint(0, 2, (SIZE,), generator=generator).to(kind)
    if kind.is_floating_point:
        return torch.randn(SIZE, generator=generator).to(kind)
    low = 0 if dtype.startswith("u") else -100
    return torch.randint(low, 100, (SIZE,), generator=generator).to(kind)


def check(kernel, inputs, expected) -> None:
    """All results of a kernel, one after the other in its output."""
    out = torch.full((len(expected), SIZE), 99).to(expected[0].dtype)
    kernel[(1,)](*inputs, out, SIZE, BLOCK=256)
    for result, wanted in zip(out, expected, strict=True):
        torch.testing.assert_close(result, wanted, equal_nan=True)


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
def test_arithmetic(dtype: str) -> None:
    x, y = numbers(dtype, 0), numbers(dtype, 1)
    check(arithmetic, (x, y), [x + y, x - y, x * y, torch.minimum(x, y), torch.maximum(x, y),
                               torch.where(x > y, x, y * 2), x.abs()])


def compared(x, y):
    return [x < y, x <= y, x > y, x >= y, x == y, x != y]


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
def test_comparisons(dtype: str) -> None:
    x, y = numbers(dtype, 0), numbers(dtype, 1)
    check(comparisons, (x, y), compared(x, y))


def test_nan_and_infinity() -> None:
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0] * 40)
    y = torch.roll(x, 1)
    check(comparisons, (x, y), compared(x, y))
    # Triton's minimum and maximum pass over nan.
    check(arithmetic, (x, y), [x + y, x - y, x * y, torch.fmin(x, y), torch.fmax(x, y),
                               torch.where(x > y, x, y * 2), x.abs()])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers(dtype: str) -> None:
    x, y = numbers(dtype, 0), numbers(dtype, 1)
    y[y == 0] = 3
    # Triton divides integers like C: towards zero.
    check(integers, (x, y), [x & y, x | y, x ^ y, torch.div(x, y, rounding_mode="trunc"),
                             torch.fmod(x, y), x << (y & 3), x >> (y & 3)])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_functions(dtype: str) -> None:
    x = numbers(dtype, 0)
    p = x.abs()
    check(functions, (x,), [-x, x.exp(), x.exp2(), p.log(), p.log2(), x.sin(), x.cos(), p.sqrt(),
                            p.rsqrt(), x.erf(), x.floor(), x.ceil(), x.sigmoid(), x * x + x])


# Every type once as source and as target, with each of three others.
KINDS = [*INTEGERS, *FLOATS]
CASTS = [(a, KINDS[(k + step) % len(KINDS)]) for k, a in enumerate([*KINDS, "bool"])
         for step in (1, 4, 6)]


@pytest.mark.parametrize(("source", "target"), CASTS)
def test_casts(source: str, target: str) -> None:
    x = numbers(source, 0)
    if target == "uint8" and source != "bool":
        x = x.abs()
    out = torch.empty(SIZE, dtype=getattr(torch, target))
    convert[(1,)](x, out, SIZE, BLOCK=256)
    torch.testing.assert_close(out, x.to(out.dtype))


@pytest.mark.parametrize("target", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_casts(target: str) -> None:
    x = numbers("float32", 0)
    small = torch.empty(SIZE, dtype=getattr(torch, target))
    convert[(1,)](x, small, SIZE, BLOCK=256)
    assert torch.equal(small.float(), x.to(small.dtype).float())
    back = torch.empty(SIZE)
    convert[(1,)](small, back, SIZE, BLOCK=256)
    assert torch.equal(back, small.float())


@triton.jit
def library(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=1)
    tl.store(out_ptr + i, libdevice.tanh(x), mask=i < n)
    tl.store(out_ptr + n + i, libdevice.pow(tl.abs(x), x), mask=i < n)
    tl.store(out_ptr + 2 * n + i, libdevice.log1p(tl.abs(x)), mask=i < n)
    tl.store(out_ptr + 3 * n + i, tl.where(libdevice.isnan(x), 1.0, libdevice.rint(x)),
             mask=i < n)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_libdevice(dtype: str) -> None:
    x = numbers(dtype, 0)
    check(library, (x,), [x.tanh(), x.abs() ** x, x.abs().log1p(), x.round()])
