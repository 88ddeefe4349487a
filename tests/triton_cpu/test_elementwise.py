"""Arithmetic, comparisons, maths and casts, by tables of types, against torch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [pytest.mark.triton, pytest.mark.torch]

SIZE = 200  # neither a power of two nor a multiple of a vector


@triton.jit
def binary(x_ptr, y_ptr, out_ptr, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=1)
    y = tl.load(y_ptr + i, mask=i < n, other=1)
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    elif OP == "mul":
        z = x * y
    elif OP == "div":
        z = x / y
    elif OP == "floordiv":
        z = x // y
    elif OP == "mod":
        z = x % y
    elif OP == "and":
        z = x & y
    elif OP == "or":
        z = x | y
    elif OP == "xor":
        z = x ^ y
    elif OP == "shl":
        z = x << y
    elif OP == "shr":
        z = x >> y
    elif OP == "lt":
        z = x < y
    elif OP == "le":
        z = x <= y
    elif OP == "gt":
        z = x > y
    elif OP == "ge":
        z = x >= y
    elif OP == "eq":
        z = x == y
    elif OP == "ne":
        z = x != y
    elif OP == "minimum":
        z = tl.minimum(x, y)
    elif OP == "maximum":
        z = tl.maximum(x, y)
    elif OP == "where":
        z = tl.where(x > y, x, y * 2)
    tl.store(out_ptr + i, z, mask=i < n)


@triton.jit
def unary(x_ptr, out_ptr, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=1)
    if OP == "neg":
        z = -x
    elif OP == "abs":
        z = tl.abs(x)
    elif OP == "exp":
        z = tl.exp(x)
    elif OP == "exp2":
        z = tl.exp2(x)
    elif OP == "log":
        z = tl.log(x)
    elif OP == "log2":
        z = tl.log2(x)
    elif OP == "sin":
        z = tl.sin(x)
    elif OP == "cos":
        z = tl.cos(x)
    elif OP == "sqrt":
        z = tl.sqrt(x)
    elif OP == "rsqrt":
        z = tl.rsqrt(x)
    elif OP == "erf":
        z = tl.erf(x)
    elif OP == "floor":
        z = tl.floor(x)
    elif OP == "ceil":
        z = tl.ceil(x)
    elif OP == "sigmoid":
        z = tl.sigmoid(x)
    tl.store(out_ptr + i, z, mask=i < n)


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


PLAIN = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "minimum": torch.minimum,
    "maximum": torch.maximum, "where": lambda x, y: torch.where(x > y, x, y * 2),
}
COMPARISONS = {"lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq,
               "ne": torch.ne}
BITS = {"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor}
# Triton divides integers like C: towards zero.
C_DIVISION = {"floordiv": lambda x, y: torch.div(x, y, rounding_mode="trunc"), "mod": torch.fmod}


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
@pytest.mark.parametrize("op", [*PLAIN, *COMPARISONS])
def test_binary(op: str, dtype: str) -> None:
    x, y = numbers(dtype, 0), numbers(dtype, 1)
    expected = {**PLAIN, **COMPARISONS}[op](x, y)
    out = torch.empty_like(expected)
    binary[(1,)](x, y, out, SIZE, OP=op, BLOCK=256)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("op", [*BITS, *C_DIVISION])
def test_integers(op: str, dtype: str) -> None:
    x, y = numbers(dtype, 0), numbers(dtype, 1)
    y[y == 0] = 3
    expected = {**BITS, **C_DIVISION}[op](x, y)
    out = torch.empty_like(expected)
    binary[(1,)](x, y, out, SIZE, OP=op, BLOCK=256)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("op", ["shl", "shr"])
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_shifts(op: str, dtype: str) -> None:
    x, y = numbers(dtype, 0), (numbers(dtype, 1) % 7).abs()
    expected = x << y if op == "shl" else x >> y
    out = torch.empty_like(x)
    binary[(1,)](x, y, out, SIZE, OP=op, BLOCK=256)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("op", [*BITS, "eq", "ne"])
def test_truth_values(op: str) -> None:
    x, y = numbers("bool", 0), numbers("bool", 1)
    expected = {**BITS, **COMPARISONS}[op](x, y)
    out = torch.empty_like(expected)
    binary[(1,)](x, y, out, SIZE, OP=op, BLOCK=256)
    assert torch.equal(out, expected)


FUNCTIONS = {
    "neg": torch.neg, "abs": torch.abs, "exp": torch.exp, "exp2": torch.exp2, "log": torch.log,
    "log2": torch.log2, "sin": torch.sin, "cos": torch.cos, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "erf": torch.erf, "floor": torch.floor, "ceil": torch.ceil,
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("op", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_functions(op: str, dtype: str) -> None:
    x = numbers(dtype, 0)
    if op in ("log", "log2", "sqrt", "rsqrt"):
        x = x.abs() + 0.01
    out = torch.empty_like(x)
    unary[(1,)](x, out, SIZE, OP=op, BLOCK=256)
    torch.testing.assert_close(out, FUNCTIONS[op](x))


def test_special_floats() -> None:
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0] * 40)
    y = torch.roll(x, 1)
    for op in COMPARISONS:
        expected = COMPARISONS[op](x, y)
        out = torch.empty_like(expected)
        binary[(1,)](x, y, out, SIZE, OP=op, BLOCK=256)
        assert torch.equal(out, expected), op
    out = torch.empty_like(x)
    binary[(1,)](x, y, out, SIZE, OP="maximum", BLOCK=256)
    assert torch.equal(out.isnan(), x.isnan() & y.isnan())  # Triton's maximum passes nan over


CASTS = [(a, b) for a in [*INTEGERS, *FLOATS, "bool"] for b in [*INTEGERS, *FLOATS]]


@pytest.mark.parametrize(("source", "target"), CASTS)
def test_casts(source: str, target: str) -> None:
    x = numbers(source, 0)
    if target == "uint8":
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
