"""Conversions between f32 and small float types, against ml_dtypes and numpy, bit by bit."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

from terrazzo.chips.cpu import host
from terrazzo.codegen.llvm.builder import Builder, Module, Val, vec
from terrazzo.codegen.llvm.convert import from_f32, to_f32
from terrazzo.codegen.llvm.jit import compile_object, load_object

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
