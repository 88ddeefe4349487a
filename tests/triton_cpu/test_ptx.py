"""Inline PTX: what each idiom of public kernels means, compared with numpy or the exact bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from terrazzo.errors import UnsupportedOperator  # noqa: E402

N = 256
RNG = np.random.default_rng(3)


@triton.jit
def _run(a, b, c, out, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, COUNT: tl.constexpr,
         PACK: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(a + i)
    if COUNT == 1:
        y = tl.inline_asm_elementwise(ASM, CONSTRAINTS, [x], out.dtype.element_ty, True, PACK)
    elif COUNT == 2:
        y = tl.inline_asm_elementwise(ASM, CONSTRAINTS, [x, tl.load(b + i)],
                                      out.dtype.element_ty, True, PACK)
    else:
        y = tl.inline_asm_elementwise(ASM, CONSTRAINTS, [x, tl.load(b + i), tl.load(c + i)],
                                      out.dtype.element_ty, True, PACK)
    tl.store(out + i, y)


_TORCH = {np.dtype(ml_dtypes.bfloat16): torch.bfloat16,
          np.dtype(ml_dtypes.float8_e4m3fn): torch.float8_e4m3fn,
          np.dtype(ml_dtypes.float8_e5m2): torch.float8_e5m2}


def _tensor(array: np.ndarray) -> Any:
    if array.dtype in _TORCH:
        return torch.from_numpy(array.view(f"i{array.itemsize}")).view(_TORCH[array.dtype])
    return torch.from_numpy(array)


def run(asm: str, constraints: str, inputs: list[np.ndarray], out: Any, pack: int = 1
        ) -> np.ndarray:
    """The result of an asm over arrays of N elements."""
    result = np.zeros(len(inputs[0]), out)
    tensors = [_tensor(np.ascontiguousarray(a)) for a in inputs]
    _run[(1,)](*(tensors + [tensors[0]] * (3 - len(tensors))), _tensor(result), asm, constraints,
               len(inputs), pack, len(inputs[0]))
    return result


def floats(dtype: Any = np.float32, spread: float = 8.0) -> np.ndarray:
    """Numbers of all kinds, the special ones first."""
    numbers = RNG.normal(size=N) * np.exp(RNG.normal(size=N) * spread / 4)
    numbers[:12] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, 1.5, 2.5, -3.5, 1e-41]
    with np.errstate(all="ignore"):
        return numbers.astype(dtype)


def words(dtype: Any = np.uint32) -> np.ndarray:
    info = np.iinfo(dtype)
    numbers = RNG.integers(info.min, info.max, N, dtype, endpoint=True)
    numbers[:6] = [0, 1, info.max, info.min, 7, 0x40]
    return numbers


def same(got: np.ndarray, wanted: np.ndarray) -> None:
    """Equal bit for bit, where nan is any nan."""
    wanted = np.asarray(wanted).astype(got.dtype)
    bits = f"u{got.itemsize}"
    equal = got.view(bits) == wanted.view(bits)
    if got.dtype.kind in "fV":
        equal |= np.isnan(got.astype(np.float64)) & np.isnan(wanted.astype(np.float64))
    assert equal.all(), (got[~equal][:5], wanted[~equal][:5])


def close(got: np.ndarray, wanted: np.ndarray, rtol: float = 3e-7) -> None:
    np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=rtol, atol=1e-37)


# ---------------------------------------------------------------- floats
def _ftz(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)


_UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tanh.approx.f32": np.tanh, "ex2.approx.f32": np.exp2, "sin.approx.f32": np.sin,
    "cos.approx.f32": np.cos, "rcp.rn.f32": lambda x: 1 / x,
    "rcp.approx.f32": lambda x: 1 / x, "sqrt.approx.f32": np.sqrt, "sqrt.rn.f32": np.sqrt,
    "rsqrt.approx.f32": lambda x: 1 / np.sqrt(x), "lg2.approx.f32": np.log2,
    "ex2.approx.ftz.f32": np.exp2, "rcp.approx.ftz.f32": lambda x: 1 / _ftz(x),
    "rsqrt.approx.ftz.f32": lambda x: 1 / np.sqrt(_ftz(x)), "tanh.approx.ftz.f32": np.tanh,
}


@pytest.mark.parametrize("name", _UNARY)
def test_functions(name: str) -> None:
    x = floats(spread=3.0)
    with np.errstate(all="ignore"):
        wanted = _UNARY[name](x.astype(np.float64))
    got = run(f"{name} $0, $1;", "=f,f", [x], np.float32)
    with np.errstate(all="ignore"):
        close(got, wanted.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["tanh.approx", "ex2.approx"])
def test_functions_of_packed_halves(name: str, dtype: Any) -> None:
    x = floats(dtype, 2.0)
    short = "f16x2" if dtype is np.float16 else "bf16x2"
    function = np.tanh if name.startswith("tanh") else np.exp2
    with np.errstate(all="ignore"):
        wanted = function(x.astype(np.float32)).astype(dtype)
    same(run(f"{name}.{short} $0, $1;", "=r,r", [x], dtype, pack=2), wanted)


def _larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The number where one is nan, and 0 rather than -0."""
    return np.where((a == b) & np.signbit(a), b, np.fmax(a, b))


def _plain(name: str, *args: np.ndarray) -> np.ndarray:
    a, b = args[:2]
    with np.errstate(all="ignore"):
        return {"add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b,
                "div": lambda: a / b, "min": lambda: -_larger(-a, -b), "max": lambda: _larger(a, b),
                "fma": lambda: a * b + args[2]}[name]()


@pytest.mark.parametrize("name", ["add.rn.f32", "add.f32", "sub.rn.f32", "mul.rn.f32", "mul.f32",
                                  "div.rn.f32", "div.full.f32", "min.f32", "max.f32"])
def test_arithmetic(name: str) -> None:
    x, y = floats(), RNG.permutation(floats())
    same(run(f"{name} $0, $1, $2;", "=f,f,f", [x, y], np.float32),
         _plain(name.split(".")[0], x, y))


@pytest.mark.parametrize("name", ["add.rz", "add.rm", "mul.rp", "mul.rz", "div.rm"])
def test_directions_of_rounding(name: str) -> None:
    x, y = floats(spread=1.0)[12:], RNG.permutation(floats(spread=1.0))[:N]
    x, y = np.resize(x, N), np.where(
        np.isfinite(y) & (np.abs(y) > 1e-20), y, 1).astype(np.float32)
    operation, mode = name.split(".")
    exact = _plain(operation, x.astype(np.longdouble), y.astype(np.longdouble))
    got = run(f"{name}.f32 $0, $1, $2;", "=f,f,f", [x, y], np.float32).astype(np.longdouble)
    inner = np.abs(got) <= np.abs(exact) if mode == "rz" else (
        got <= exact if mode == "rm" else got >= exact)
    assert inner.all()
    assert (np.abs(got - exact) <= np.abs(exact) * 2.0**-23).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "min", "max", "fma.rn", "neg", "abs"])
def test_packed_halves(name: str, dtype: Any) -> None:
    count = 3 if name == "fma.rn" else 1 if name in ("neg", "abs") else 2
    args = [RNG.permutation(floats(dtype, 2.0)) for _ in range(count)]
    short = "f16x2" if dtype is np.float16 else "bf16x2"
    got = run(f"{name}.{short} " + ", ".join(f"${n}" for n in range(count + 1)) + ";",
              ",".join(["=r"] + ["r"] * count), args, dtype, pack=2)
    wide = [a.astype(np.float64) for a in args]
    if count == 1:
        wanted = -wide[0] if name == "neg" else np.abs(wide[0])
    else:
        wanted = _plain(name.split(".")[0], *wide)
    with np.errstate(all="ignore"):
        same(got, wanted.astype(dtype))


def test_two_floats_in_a_register() -> None:
    x = floats()
    asm = """{
        .reg .b64 a, b;
        mov.b64 a, {$2, $3};
        mov.b64 b, {0f40000000, 0f3F800000};
        fma.rn.f32x2 a, a, b, b;
        mov.b64 {$0, $1}, a;
    }"""
    got = run(asm, "=f,=f,f,f", [x], np.float32, pack=2)
    pairs = x.reshape(-1, 2).astype(np.float64)
    same(got, (pairs * [2, 1] + [2, 1]).astype(np.float32).ravel())


def test_flush_to_zero_and_saturation() -> None:
    x = floats()
    x[20:23] = [1e-39, -1e-39, 2.0**-126]
    same(run("add.ftz.f32 $0, $1, 0f80000000;", "=f,f", [x], np.float32), _ftz(x))
    with np.errstate(all="ignore"):
        wanted = np.where(np.isnan(x), 0, np.clip(x, 0, 1)).astype(np.float32)
    close(run("add.sat.f32 $0, $1, 0f00000000;", "=f,f", [x], np.float32), wanted)


def test_nan_in_minimum_and_maximum() -> None:
    x = np.array([np.nan, 1.0, np.nan, -0.0, 0.0] * 16, np.float32)[:64]
    y = np.array([2.0, np.nan, np.nan, 0.0, -0.0] * 16, np.float32)[:64]
    same(run("max.f32 $0, $1, $2;", "=f,f,f", [x, y], np.float32),
         np.array([2.0, 1.0, np.nan, 0.0, 0.0] * 16, np.float32)[:64])
    same(run("min.f32 $0, $1, $2;", "=f,f,f", [x, y], np.float32),
         np.array([2.0, 1.0, np.nan, -0.0, -0.0] * 16, np.float32)[:64])
    same(run("max.NaN.f32 $0, $1, $2;", "=f,f,f", [x, y], np.float32),
         np.array([np.nan, np.nan, np.nan, 0.0, 0.0] * 16, np.float32)[:64])


def test_a_product_is_rounded_before_the_sum() -> None:
    x, y = floats(spread=0.5), RNG.permutation(floats(spread=0.5))
    asm = "{ .reg .f32 t; mul.rn.f32 t, $1, $2; sub.rn.f32 $0, t, $1; }"
    with np.errstate(all="ignore"):
        same(run(asm, "=f,f,f", [x, y], np.float32), x * y - x)


# ---------------------------------------------------------------- conversions
@pytest.mark.parametrize(("short", "dtype"), [("f16x2", np.float16),
                                              ("bf16x2", ml_dtypes.bfloat16)])
def test_two_floats_to_packed_halves(short: str, dtype: Any) -> None:
    x = floats()
    got = run(f"cvt.rn.{short}.f32 $0, $2, $1;", "=r,f,f", [x], dtype, pack=2)
    with np.errstate(all="ignore"):
        same(got, x.astype(dtype))
    got = run(f"cvt.rn.relu.{short}.f32 $0, $2, $1;", "=r,f,f", [x], dtype, pack=2)
    with np.errstate(all="ignore"):
        wanted = np.where(x.astype(dtype).astype(np.float32) < 0, 0, x).astype(dtype)
    same(got, wanted)


def test_half_towards_zero_and_within_bounds() -> None:
    x = floats()
    got = run("cvt.rz.f16.f32 $0, $1;", "=h,f", [x], np.float16).astype(np.float64)
    finite = np.isfinite(x)
    assert (np.abs(got[finite]) <= np.abs(x[finite])).all()
    x[30:32] = [1e30, -1e30]
    got = run("cvt.rn.satfinite.f16.f32 $0, $1;", "=h,f", [x], np.float16)
    with np.errstate(all="ignore"):
        same(got, np.clip(x, -65504, 65504).astype(np.float16))


@pytest.mark.parametrize(("short", "dtype"), [
    ("e4m3x2", ml_dtypes.float8_e4m3fn), ("e5m2x2", ml_dtypes.float8_e5m2)])
def test_eight_bits(short: str, dtype: Any) -> None:
    x = floats()
    limit = float(ml_dtypes.finfo(dtype).max)
    with np.errstate(all="ignore"):
        wanted = np.clip(x, -limit, limit).astype(dtype)
    asm = "{ .reg .b16 lo, hi; " + "".join(
        f"cvt.rn.satfinite.{short}.f32 {part}, ${b}, ${a}; "
        for part, a, b in (("lo", 1, 2), ("hi", 3, 4))) + "mov.b32 $0, {lo, hi}; }"
    same(run(asm, "=r,f,f,f,f", [x], dtype, pack=4), wanted)
    back = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; " + \
        f"cvt.rn.f16x2.{short} $0, lo; cvt.rn.f16x2.{short} $1, hi; }}"
    same(run(back, "=r,=r,r", [wanted], np.float16, pack=4), wanted.astype(np.float16))
    halves = x.astype(np.float16)
    asm = "{ .reg .b16 lo, hi; " + \
        f"cvt.rn.satfinite.{short}.f16x2 lo, $1; cvt.rn.satfinite.{short}.f16x2 hi, $2; " + \
        "mov.b32 $0, {lo, hi}; }"
    with np.errstate(all="ignore"):
        same(run(asm, "=r,r,r", [halves], dtype, pack=4),
             np.clip(halves.astype(np.float32), -limit, limit).astype(dtype))


def _nearest_code(x: np.ndarray, dtype: Any, largest: float) -> np.ndarray:
    with np.errstate(all="ignore"):
        clipped = np.where(np.isnan(x), largest, np.clip(x, -largest, largest))
    return clipped.astype(dtype).view(np.uint8)


def test_four_bits() -> None:
    """Two codes in a byte, the first operand in the upper half, as MXFP4 is stored."""
    x, y = floats(spread=1.0), RNG.permutation(floats(spread=1.0))
    x[12:27] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.5, -0.25, -5.0, 0.3, 4.9, 5.1, 1e9, -1e9]
    asm = "{ .reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, $1, $2; cvt.u32.u8 $0, t; }"
    got = run(asm, "=r,f,f", [x, y], np.uint8)
    high, low = (_nearest_code(v, ml_dtypes.float4_e2m1fn, 6.0) & 15 for v in (x, y))
    same(got, low | high << 4)
    back = "{ .reg .b8 t; .reg .b16 lo, hi; cvt.u8.u32 t, $1; .reg .b32 w; " \
        "cvt.rn.f16x2.e2m1x2 w, t; mov.b32 {lo, hi}, w; mov.b16 $0, hi; }"
    codes = np.arange(256, dtype=np.uint8)
    same(run(back, "=h,r", [codes.astype(np.uint32)], np.float16),
         (codes >> 4).view(ml_dtypes.float4_e2m1fn).astype(np.float16))


@pytest.mark.parametrize(("short", "dtype", "largest"), [
    ("e2m3x2", ml_dtypes.float6_e2m3fn, 7.5), ("e3m2x2", ml_dtypes.float6_e3m2fn, 28.0)])
def test_six_bits(short: str, dtype: Any, largest: float) -> None:
    x, y = floats(spread=2.0), RNG.permutation(floats(spread=2.0))
    asm = f"{{ .reg .b16 t; cvt.rn.satfinite.{short}.f32 t, $1, $2; cvt.u32.u16 $0, t; }}"
    got = run(asm, "=r,f,f", [x, y], np.uint32)
    high, low = (_nearest_code(v, dtype, largest).astype(np.uint32) for v in (x, y))
    same(got, low | high << 8)
    codes = np.arange(64, dtype=np.uint8).repeat(4)
    back = f"{{ .reg .b16 t; cvt.u16.u32 t, $1; .reg .b32 w; cvt.rn.f16x2.{short} w, t; " \
        "cvt.u16.u32 $0, w; }"
    same(run(back, "=h,r", [codes.astype(np.uint32)], np.uint16),
         codes.view(dtype).astype(np.float16).view(np.uint16))


def test_exponents_alone() -> None:
    """ue8m0, the scales of MX formats, rounded up."""
    x = np.abs(floats(spread=6.0))
    got = run("{ .reg .b16 t; cvt.rp.satfinite.ue8m0x2.f32 t, 0.0, $1; cvt.u32.u16 $0, t; }",
              "=r,f", [x], np.uint32)
    with np.errstate(all="ignore"):
        wanted = np.clip(np.ceil(np.log2(x.astype(np.float64))) + 127, 0, 254)
    wanted = np.where(np.isnan(x), 255, np.nan_to_num(wanted, nan=0)).astype(np.uint32)
    same(got & 0xFF, wanted)
    codes = np.arange(256, dtype=np.uint32)
    back = run("{ .reg .b16 t; cvt.u16.u32 t, $1; cvt.rn.bf16x2.ue8m0x2 $0, t; }", "=r,r",
               [codes], np.uint32)
    same((back & 0xFFFF).astype(np.uint16).view(ml_dtypes.bfloat16),
         codes.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(ml_dtypes.bfloat16))


def test_tf32() -> None:
    x = floats()[12:]
    x = np.resize(x, N)
    code = x.view(np.uint32)
    same(run("cvt.rna.tf32.f32 $0, $1;", "=r,f", [x], np.uint32),
         (code + 0x1000) & 0xFFFFE000)
    same(run("cvt.rz.tf32.f32 $0, $1;", "=r,f", [x], np.uint32), code & 0xFFFFE000)
    near = (code.astype(np.uint64) + 0xFFF + ((code >> 13) & 1)).astype(np.uint32) & 0xFFFFE000
    same(run("cvt.rn.tf32.f32 $0, $1;", "=r,f", [x], np.uint32), near)


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_floats_to_integers(mode: str) -> None:
    x = floats(spread=6.0)
    x[12:16] = [3e9, -3e9, 5e9, 2.0**31]
    function = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    whole = np.nan_to_num(function(x.astype(np.float64)), nan=0.0, posinf=1e30, neginf=-1e30)
    for name, dtype in (("s32", np.int32), ("u32", np.uint32), ("s8", np.int8)):
        info = np.iinfo(dtype)
        got = run(f"{{ .reg .b32 t; cvt.{mode}.{name}.f32 t, $1; cvt.s32.{name} $0, t; }}",
                  "=r,f", [x], np.int32)
        same(got, np.clip(whole, info.min, info.max).astype(dtype).astype(np.int32))
    same(run(f"cvt.{mode}.f32.f32 $0, $1;", "=f,f", [x], np.float32), function(x))


def test_integers_to_floats_and_each_other() -> None:
    n = words(np.int32)
    same(run("cvt.rn.f32.s32 $0, $1;", "=f,r", [n], np.float32), n.astype(np.float32))
    down = run("cvt.rm.f32.s32 $0, $1;", "=f,r", [n], np.float32).astype(np.int64)
    assert (down <= n).all() and (n - down < 256).all()
    same(run("cvt.rn.f16.u32 $0, $1;", "=h,r", [n & 0x1FFF], np.float16),
         (n & 0x1FFF).astype(np.float16))
    same(run("{ .reg .b32 t; cvt.sat.u8.s32 t, $1; cvt.u32.u8 $0, t; }", "=r,r", [n], np.uint32),
         np.clip(n, 0, 255).astype(np.uint32))
    same(run("{ .reg .s8 t; cvt.s8.s32 t, $1; cvt.s32.s8 $0, t; }", "=r,r", [n], np.int32),
         n.astype(np.int8).astype(np.int32))
    same(run("cvt.s64.s32 $0, $1;", "=l,r", [n], np.int64), n.astype(np.int64))


@pytest.mark.parametrize(("asm", "constraints", "dtype", "pack"), [
    ("cvt.rs.f16x2.f32 $0, $2, $1, $3;", "=r,f,f,r,r", np.float16, 2),
    ("cvt.rs.bf16x2.f32 $0, $2, $1, $3;", "=r,f,f,r,r", ml_dtypes.bfloat16, 2),
    ("cvt.rs.satfinite.e4m3x4.f32 $0, {$4, $3, $2, $1}, $5;", "=r,f,f,f,f,r,r,r,r",
     ml_dtypes.float8_e4m3fn, 4),
    ("cvt.rs.satfinite.e5m2x4.f32 $0, {$4, $3, $2, $1}, $5;", "=r,f,f,f,f,r,r,r,r",
     ml_dtypes.float8_e5m2, 4),
])
def test_stochastic_rounding(asm: str, constraints: str, dtype: Any, pack: int) -> None:
    """One of the two neighbours, and the right one on average."""
    count = 1 << 14
    x = np.full(count, 1.0 + 0.3 * float(ml_dtypes.finfo(dtype).eps), np.float32)
    chance = RNG.integers(0, 1 << 32, count, np.uint32)
    got = run(asm, constraints, [x, chance], dtype, pack).astype(np.float64)
    step = float(ml_dtypes.finfo(dtype).eps)
    assert set(np.unique(got)) == {1.0, 1.0 + step}
    assert abs((got - 1.0).mean() / step - 0.3) < 0.03


# ---------------------------------------------------------------- bits
def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    result = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result


@pytest.mark.parametrize("table", [0x00, 0x88, 0x96, 0xCA, 0xE8, 0xEA, 0xF8, 0xFF])
def test_truth_tables(table: int) -> None:
    a, b, c = words(), words(), words()
    same(run(f"lop3.b32 $0, $1, $2, $3, {table:#x};", "=r,r,r,r", [a, b, c], np.uint32),
         _lop3(a, b, c, table))


@pytest.mark.parametrize("selector", [0x3210, 0x5410, 0x7632, 0x7531, 0x5746, 0x0123, 0x89AB,
                                      0xF4C0])
def test_permuted_bytes(selector: int) -> None:
    a, b = words(), words()
    both = np.stack([a.view(np.uint8).reshape(N, 4), b.view(np.uint8).reshape(N, 4)], 1)
    both = both.reshape(N, 8)
    wanted = np.zeros((N, 4), np.uint8)
    for place in range(4):
        nibble = selector >> (4 * place) & 15
        byte = both[:, nibble & 7]
        wanted[:, place] = np.where(byte & 0x80, 0xFF, 0) if nibble & 8 else byte
    same(run(f"prmt.b32 $0, $1, $2, {selector:#x};", "=r,r,r", [a, b], np.uint32),
         wanted.view(np.uint32).ravel())


def _python(function: Callable[..., int], bits: int, *args: np.ndarray) -> np.ndarray:
    return np.array([function(*map(int, row)) % (1 << bits) for row in zip(*args, strict=True)],
                    f"u{bits // 8}")


_WORDS: dict[str, Callable[..., int]] = {
    "and.b32": lambda a, b: a & b, "or.b32": lambda a, b: a | b, "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: a + b, "sub.u32": lambda a, b: a - b, "mul.lo.u32": lambda a, b: a * b,
    "mul.hi.u32": lambda a, b: a * b >> 32, "min.u32": min, "max.u32": max,
    "shl.b32": lambda a, b: a << b if b < 32 else 0, "shr.u32": lambda a, b: a >> b,
}


@pytest.mark.parametrize("name", _WORDS)
def test_words(name: str) -> None:
    a, b = words(), words()
    if name.startswith("sh"):
        b %= 48  # shifts beyond the end are defined
    same(run(f"{name} $0, $1, $2;", "=r,r,r", [a, b], np.uint32),
         _python(_WORDS[name], 32, a, b))


def test_fields_of_bits() -> None:
    a, b = words(), words()
    start, length = RNG.integers(0, 40, N, np.uint32), RNG.integers(0, 40, N, np.uint32)
    both = start | length << 8
    asm = "{{ .reg .u32 s, l; and.b32 s, $2, 255; shr.u32 l, $2, 8; bfe.{0} $0, $1, s, l; }}"

    def unsigned(x: int, at: int) -> int:
        begin, count = at & 255, at >> 8
        return (x >> begin) & ((1 << count) - 1)

    def signed(x: int, at: int) -> int:
        begin, count = at & 255, at >> 8
        value = x - (1 << 32) if x >> 31 else x
        if count == 0:
            return 0
        value >>= min(begin, 63)
        if begin + count > 32:
            return value
        value &= (1 << count) - 1
        return value - (1 << count) if value >> (count - 1) else value

    same(run(asm.format("u32"), "=r,r,r", [a, both], np.uint32), _python(unsigned, 32, a, both))
    same(run(asm.format("s32"), "=r,r,r", [a, both], np.uint32), _python(signed, 32, a, both))

    def inserted(x: int, y: int, at: int) -> int:
        begin, count = at & 255, at >> 8
        mask = ((1 << count) - 1) << begin & 0xFFFFFFFF
        return y & ~mask | (x << begin) & mask

    asm = "{ .reg .u32 s, l; and.b32 s, $3, 255; shr.u32 l, $3, 8; bfi.b32 $0, $1, $2, s, l; }"
    same(run(asm, "=r,r,r,r", [a, b, both], np.uint32), _python(inserted, 32, a, b, both))


def test_counting_and_turning_bits() -> None:
    a, b = words(), words()
    for name, function in {
            "popc.b32": lambda x: x.bit_count(), "clz.b32": lambda x: 32 - x.bit_length(),
            "brev.b32": lambda x: int(f"{x:032b}"[::-1], 2), "not.b32": lambda x: ~x,
            "bfind.u32": lambda x: x.bit_length() - 1}.items():
        same(run(f"{name} $0, $1;", "=r,r", [a], np.uint32), _python(function, 32, a))
    for name, function in {
            "shf.l.wrap.b32": lambda low, high: (high << 32 | low) << 5 >> 32,
            "shf.r.clamp.b32": lambda low, high: (high << 32 | low) >> 5}.items():
        same(run(f"{name} $0, $1, $2, 5;", "=r,r,r", [a, b], np.uint32),
             _python(function, 32, a, b))


def test_products_and_sums_of_integers() -> None:
    a, b = words(np.int32), words(np.int32)
    wide = a.astype(np.int64) * b.astype(np.int64)
    same(run("mul.wide.s32 $0, $1, $2;", "=l,r,r", [a, b], np.int64), wide)
    same(run("mad.wide.s32 $0, $1, $2, 7;", "=l,r,r", [a, b], np.int64), wide + 7)
    same(run("mul.hi.s32 $0, $1, $2;", "=r,r,r", [a, b], np.int32), (wide >> 32))
    same(run("mad.lo.s32 $0, $1, $2, $1;", "=r,r,r", [a, b], np.int32), (wide + a).astype(np.int32))
    nonzero = np.where(b == 0, 1, b // 65536 + 1).astype(np.int32)
    nonzero[nonzero == 0] = 3
    same(run("div.s32 $0, $1, $2;", "=r,r,r", [a, nonzero], np.int32),
         np.trunc(a.astype(np.float64) / nonzero).astype(np.int32))
    bytes_ = a.view(np.int8).reshape(N, 4).astype(np.int32), b.view(np.int8).reshape(N, 4)
    same(run("dp4a.s32.s32 $0, $1, $2, 5;", "=r,r,r", [a, b], np.int32),
         (bytes_[0] * bytes_[1]).sum(1) + 5)


# ---------------------------------------------------------------- predicates, packing
def test_predicates() -> None:
    x, y = floats(), RNG.permutation(floats())
    asm = """{
        .reg .pred p, q;
        setp.gt.f32 p|q, $1, $2;   // a comparison and its contrary
        @p mov.b32 $0, $1;
        @!p mov.b32 $0, $2;
    }"""
    same(run(asm, "=f,f,f", [x, y], np.float32), np.where(x > y, x, y))
    asm = "{ .reg .pred p; setp.ltu.f32 p, $1, $2; selp.f32 $0, $1, $2, p; }"
    same(run(asm, "=f,f,f", [x, y], np.float32), np.where(~(x >= y), x, y))
    asm = "{ .reg .pred p, q; setp.lt.f32 q, $1, 0f00000000; " \
        "setp.gt.and.f32 p, $2, 0f00000000, q; selp.b32 $0, 1, 0, p; }"
    same(run(asm, "=r,f,f", [x, y], np.int32), (x < 0) & (y > 0))
    same(run("set.gt.u32.f32 $0, $1, $2;", "=r,f,f", [x, y], np.uint32),
         np.where(x > y, 0xFFFFFFFF, 0).astype(np.uint32))


def test_jumps_forward() -> None:
    x = floats()
    asm = """{
        .reg .pred p;
        mov.f32 $0, $1;
        setp.lt.f32 p, $1, 0f00000000;
        @!p bra done;
        neg.f32 $0, $1;
        mul.f32 $0, $0, 0f40000000;
        done:
    }"""
    same(run(asm, "=f,f", [x], np.float32), np.where(x < 0, -x * np.float32(2), x))


def test_several_elements_in_a_register() -> None:
    """Four bytes to four halves, as Triton's own fp8e4b15 does."""
    codes = np.arange(256, dtype=np.uint8)
    asm = """{
        .reg .b32 a<2>, b<2>;
        prmt.b32 a0, 0, $2, 0x5746;
        and.b32 b0, a0, 0x7f007f00;
        and.b32 b1, a0, 0x00ff00ff;
        and.b32 a1, a0, 0x00800080;
        shr.b32 b0, b0, 1;
        add.u32 b1, b1, a1;
        lop3.b32 $0, b0, 0x80008000, a0, 0xf8;
        shl.b32 $1, b1, 7;
    }"""
    wide = codes.astype(np.uint16)
    wanted = (wide & 0x80) << 8 | (wide & 0x7F) << 7
    same(run(asm, "=r,=r,r", [codes], np.uint16, pack=4), wanted)


def test_code_without_meaning_is_quoted() -> None:
    x = floats()
    with pytest.raises(UnsupportedOperator, match=r"(?s)`shfl.sync.bfly.b32 \$0, \$1, 1, 31, -1;`"
                                                  r".*test_ptx.py"):
        run("shfl.sync.bfly.b32 $0, $1, 1, 31, -1;", "=r,r", [x], np.float32)
    with pytest.raises(UnsupportedOperator, match="v_add_f32"):
        run("v_add_f32 $0, $1, $1;", "=v,v", [x], np.float32)
    with pytest.raises(UnsupportedOperator, match="xorsign"):
        run("max.xorsign.abs.f32 $0, $1, $1;", "=f,f", [x], np.float32)
