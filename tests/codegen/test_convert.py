"""Conversions between f32 and small float types, against ml_dtypes and numpy, bit by bit."""

from __future__ import annotations

import ctypes
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cpu import elf
from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm import jit
from terrazzo.chips.cpu.llvm.builder import Builder, Module, Val, vec
from terrazzo.chips.cpu.llvm.convert import from_f32, to_f32
from terrazzo.chips.cpu.llvm.helpers import helpers
from terrazzo.chips.cpu.llvm.jit import compile_object, load_object
from terrazzo.dtypes import as_dtype
from terrazzo.errors import TerrazzoError
from terrazzo.graph.ir import OPERATORS, TensorType
from terrazzo.graph.trace import trace
from terrazzo.tools.verify.verifier import Subject

LANES = 16
# name for convert -> (LLVM element type in memory, numpy type, integers of the same width)
TYPES = {
    "half": ("half", np.float16, np.uint16),
    "bfloat": ("bfloat", ml_dtypes.bfloat16, np.uint16),
    "e4m3fn": ("i8", ml_dtypes.float8_e4m3fn, np.uint8),
    "e5m2": ("i8", ml_dtypes.float8_e5m2, np.uint8),
    "e4m3fnuz": ("i8", ml_dtypes.float8_e4m3fnuz, np.uint8),
    "e5m2fnuz": ("i8", ml_dtypes.float8_e5m2fnuz, np.uint8),
}


def convert(x: np.ndarray, kind: str, encode: bool) -> np.ndarray:
    """Runs a conversion over an array whose size is a multiple of the lanes."""
    stored, dtype, _ = TYPES[kind]
    module = Module(host().features)
    b = Builder(module, "f", [("ptr", "x"), ("ptr", "y"), ("i64", "n")])
    source, target, size = b.params
    taken, given = ("float", stored) if encode else (stored, "float")

    def body(i: Val, _: list[Val]) -> None:
        v = b.load(vec(taken, LANES), b.gep(taken, source, i), 1)
        result = from_f32(b, v, kind) if encode else to_f32(b, v, kind)
        assert result.ty == vec(given, LANES)
        b.store(result, b.gep(given, target, i), 1)

    b.loop(0, size, LANES, body)
    b.ret()
    library = load_object(compile_object(module.text(), host()), exports=["f"])
    types = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    y = np.empty(x.size, dtype if encode else np.float32)
    ctypes.CFUNCTYPE(None, *types)(library.address("f"))(x.ctypes.data, y.ctypes.data, x.size)
    return y


@pytest.mark.parametrize("kind", TYPES)
def test_every_code_is_decoded_exactly(kind: str) -> None:
    _, dtype, integers = TYPES[kind]
    codes = np.arange(1 << (8 * integers().itemsize), dtype=np.uint32).astype(integers).view(dtype)
    got, exact = convert(codes, kind, encode=False), codes.astype(np.float32)
    np.testing.assert_array_equal(got, exact)
    numbers = ~np.isnan(exact)
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(exact[numbers]))


@pytest.mark.parametrize("kind", TYPES)
def test_rounding_is_to_nearest_even_everywhere(kind: str) -> None:
    _, dtype, integers = TYPES[kind]
    spread = np.arange(0, 1 << 32, 4099, dtype=np.uint64).astype(np.uint32).view(np.float32)
    # All numbers of the small type, halfway points between neighbours, and their neighbours.
    codes = np.arange(1 << (8 * integers().itemsize), dtype=np.uint32).astype(integers).view(dtype)
    with np.errstate(all="ignore"):
        exact = np.sort(codes.astype(np.float32)[np.isfinite(codes.astype(np.float32))])
        middle = exact[:-1] / 2 + exact[1:] / 2
    up, down = np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))
    specials = np.array([np.inf, -np.inf, np.nan, 448, 464, 465, 57344, 61440, -0.0], np.float32)
    x = np.concatenate([spread, exact, middle, up, down, specials])
    x = np.concatenate([x, np.zeros(-x.size % LANES, np.float32)])
    got = convert(x, kind, encode=True)
    with np.errstate(all="ignore"):
        want = x.astype(dtype)
    nans = np.isnan(x)
    assert np.isnan(got[nans].astype(np.float32)).all()
    np.testing.assert_array_equal(got[~nans].view(integers), want[~nans].view(integers))


# ---------------------------------------------------------------- what LLVM calls of its own accord
@pytest.mark.parametrize("elem, dtype", [("half", np.float16), ("bfloat", ml_dtypes.bfloat16)])
def test_doubles_are_rounded_once(elem: str, dtype: Any, rng: np.random.Generator) -> None:
    text = f"""
define void @narrow(ptr %x, ptr %y) {{
  %wide = load double, ptr %x
  %narrow = fptrunc double %wide to {elem}
  store {elem} %narrow, ptr %y
  ret void
}}
"""
    code = jit.compile_object("\n".join([text, *helpers(text)]), host())
    assert not elf.undefined_symbols(code)
    library = jit.load_object(code, {}, ["narrow"])
    narrow = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(library.address("narrow"))
    eps, largest = float(ml_dtypes.finfo(dtype).eps), float(ml_dtypes.finfo(dtype).max)
    tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    tie = 1 + eps / 2
    hard = [0.0, -0.0, np.inf, -np.inf, np.nan, largest, largest * (1 + eps / 4), 1e300, -1e300,
            5e-324, tiny / 2, tiny / 2 * (1 + 1e-12), 1.5 * tiny, tie, np.nextafter(tie, 2),
            np.nextafter(tie, 0), 1 + 1.5 * eps, np.nextafter(1 + 1.5 * eps, 0)]
    drawn = rng.normal(size=500) * 10.0 ** rng.integers(-9, 6, 500)
    out = np.zeros(1, dtype)
    for x in np.concatenate([hard, drawn]):
        source = np.array([x])
        narrow(source.ctypes.data, out.ctypes.data)
        wanted = exactly_rounded(x, dtype)
        assert out.tobytes() == wanted.tobytes() or (np.isnan(x) and np.isnan(float(out[0]))), x


def exactly_rounded(x: float, dtype: Any) -> np.ndarray:
    """To the nearest of the two neighbours, by exact fractions; numpy may round twice."""
    with np.errstate(over="ignore"):
        near = np.array([x]).astype(dtype)
    if not np.isfinite(x) or not np.isfinite(float(near[0])):
        return near
    codes = [int(near.view(np.uint16)[0]) + step for step in (-1, 0, 1)]
    around = [np.array([c & 0xFFFF], np.uint16).view(dtype) for c in codes]
    finite = [a for a in around if np.isfinite(float(a[0])) and np.signbit(a[0]) == np.signbit(x)]
    return min(finite, key=lambda a: (abs(Fraction(float(a[0])) - Fraction(x)),
                                      int(a.view(np.uint16)[0]) & 1))


_UNARY = [op for op in OPERATORS.values() if op.family == "elementwise" and not op.variadic
          and len(op.tensor_params) == 1 and not op.attr_params]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "float8_e4m3fn",
                                   "float8_e5m2"])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_every_elementary_operator_on_one_element(dtype: str, shape: tuple[int, ...]) -> None:
    """Also after a function that is computed in float64, as LLVM moves conversions about."""
    type = TensorType(shape, as_dtype(dtype))

    def programs(x: Any) -> Any:
        for op in _UNARY:
            try:
                yield op(x)
                yield op(tz.cosh(x))
                yield tz.cosh(op(x)) if op(x).dtype.is_float else op(x)
            except TerrazzoError:  # an operator of integers
                continue

    graph, _ = trace(lambda x: tuple(programs(x)), [type], name="all")
    assert len(graph.outputs) > 100
    for value in (0.5, 0.0, -1.5):
        Subject(graph).check([np.full(shape, value).astype(type.dtype.np)], ("code",))
