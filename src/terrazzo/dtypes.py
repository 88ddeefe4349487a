"""The data types of tensors: what each one is, how it is spelled, and how two combine.

A `DType` is an interned singleton, so types are compared with `is`. The host side is numpy, with
`ml_dtypes` for the types numpy lacks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy

from terrazzo.errors import DTypeError


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DType:
    """One element type: its names, its size, and the numpy type that holds it on the host."""

    name: str
    short: str
    kind: str  # "f" float, "i" signed, "u" unsigned, "b" bool, "c" complex
    bits: int  # of information: 4 for int4, although numpy stores it in a whole byte
    np: numpy.dtype[Any]

    @property
    def itemsize(self) -> int:
        """Bytes that one element takes in a host array."""
        return self.np.itemsize

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def is_integer(self) -> bool:
        return self.kind in "iu"

    @property
    def is_signed(self) -> bool:
        """Whether negative values exist: true of floats and complex numbers too."""
        return self.kind in "ifc"

    @property
    def is_bool(self) -> bool:
        return self.kind == "b"

    @property
    def is_complex(self) -> bool:
        return self.kind == "c"

    @property
    def compute(self) -> DType:
        """The type that arithmetic happens in: narrow storage types widen, others stay."""
        return _COMPUTE.get(self, self)

    @property
    def real(self) -> DType:
        """The type of the real part: itself, unless complex."""
        return _REAL.get(self, self)

    @property
    def min(self) -> Any:
        """The lowest finite value, as a Python number."""
        return _limits(self)[0]

    @property
    def max(self) -> Any:
        """The highest finite value, as a Python number."""
        return _limits(self)[1]

    @property
    def eps(self) -> float:
        """The gap between 1 and the next number; only floats have one."""
        if not self.is_float:
            raise DTypeError(f"{self.name} has no eps: only floating-point types do")
        return float(ml_dtypes.finfo(self.np).eps)

    def __repr__(self) -> str:
        return self.name

    # Copies and pickles must come back as the same singleton.
    def __reduce__(self) -> tuple[Any, ...]:
        return as_dtype, (self.name,)


float64 = DType("float64", "f64", "f", 64, numpy.dtype("float64"))
float32 = DType("float32", "f32", "f", 32, numpy.dtype("float32"))
float16 = DType("float16", "f16", "f", 16, numpy.dtype("float16"))
bfloat16 = DType("bfloat16", "bf16", "f", 16, numpy.dtype(ml_dtypes.bfloat16))
float8_e4m3fn = DType("float8_e4m3fn", "f8e4m3", "f", 8, numpy.dtype(ml_dtypes.float8_e4m3fn))
float8_e5m2 = DType("float8_e5m2", "f8e5m2", "f", 8, numpy.dtype(ml_dtypes.float8_e5m2))
float8_e4m3fnuz = DType(
    "float8_e4m3fnuz", "f8e4m3fnuz", "f", 8, numpy.dtype(ml_dtypes.float8_e4m3fnuz))
float8_e5m2fnuz = DType(
    "float8_e5m2fnuz", "f8e5m2fnuz", "f", 8, numpy.dtype(ml_dtypes.float8_e5m2fnuz))
float4_e2m1fn = DType("float4_e2m1fn", "f4e2m1", "f", 4, numpy.dtype(ml_dtypes.float4_e2m1fn))
int64 = DType("int64", "i64", "i", 64, numpy.dtype("int64"))
int32 = DType("int32", "i32", "i", 32, numpy.dtype("int32"))
int16 = DType("int16", "i16", "i", 16, numpy.dtype("int16"))
int8 = DType("int8", "i8", "i", 8, numpy.dtype("int8"))
int4 = DType("int4", "i4", "i", 4, numpy.dtype(ml_dtypes.int4))
int2 = DType("int2", "i2", "i", 2, numpy.dtype(ml_dtypes.int2))
uint64 = DType("uint64", "u64", "u", 64, numpy.dtype("uint64"))
uint32 = DType("uint32", "u32", "u", 32, numpy.dtype("uint32"))
uint16 = DType("uint16", "u16", "u", 16, numpy.dtype("uint16"))
uint8 = DType("uint8", "u8", "u", 8, numpy.dtype("uint8"))
uint4 = DType("uint4", "u4", "u", 4, numpy.dtype(ml_dtypes.uint4))
uint2 = DType("uint2", "u2", "u", 2, numpy.dtype(ml_dtypes.uint2))
bool_ = DType("bool", "bool", "b", 1, numpy.dtype("bool"))
complex64 = DType("complex64", "c64", "c", 64, numpy.dtype("complex64"))
complex128 = DType("complex128", "c128", "c", 128, numpy.dtype("complex128"))

DTYPES: tuple[DType, ...] = (
    float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, float8_e4m3fnuz,
    float8_e5m2fnuz, float4_e2m1fn,
    int64, int32, int16, int8, int4, int2,
    uint64, uint32, uint16, uint8, uint4, uint2,
    bool_, complex64, complex128,
)  # fmt: skip

default_float = float32
default_int = int64
default_complex = complex64

_COMPUTE = {
    float16: float32,
    bfloat16: float32,
    float8_e4m3fn: float32,
    float8_e5m2: float32,
    float8_e4m3fnuz: float32,
    float8_e5m2fnuz: float32,
    float4_e2m1fn: float32,
    int4: int8,
    int2: int8,
    uint4: uint8,
    uint2: uint8,
}
_REAL = {complex64: float32, complex128: float64}
_FLOAT8 = frozenset(t for t in DTYPES if t.is_float and t.bits <= 8)
_SIGNED_BY_BITS = {t.bits: t for t in DTYPES if t.kind == "i"}
_UNSIGNED_BY_BITS = {t.bits: t for t in DTYPES if t.kind == "u"}

# Everything `as_dtype` answers at once. What numpy reads as a type is that type here too: "i8" is
# 8 bytes, int64, although printed programs spell int8 so.
_SPELLINGS: dict[Any, DType] = {
    spelling: t for t in DTYPES for spelling in (t, t.name, t.short, t.np, t.np.type)
} | {bool: bool_, int: default_int, float: default_float, complex: default_complex, "bool_": bool_}
_SPELLINGS |= {f"{order}{kind}{size}": _SPELLINGS[numpy.dtype(f"{kind}{size}")]
               for order in ("", "<", "=", "|")
               for kind, sizes in (("f", (2, 4, 8)), ("i", (1, 2, 4, 8)), ("u", (1, 2, 4, 8)),
                                   ("c", (8, 16)))
               for size in sizes}
_SPELLINGS |= {"half": float16, "single": float32, "double": float64, "?": bool_}


def _limits(dtype: DType) -> tuple[Any, Any]:
    if dtype.is_float:
        info = ml_dtypes.finfo(dtype.np)
        return float(info.min), float(info.max)
    if dtype.is_integer:
        ints = ml_dtypes.iinfo(dtype.np)
        return int(ints.min), int(ints.max)
    if dtype.is_bool:
        return False, True
    raise DTypeError(f"{dtype.name} has no lowest or highest value: complex numbers are unordered")


def as_dtype(x: Any) -> DType:
    """Read a data type from any usual spelling of it.

    Accepts a `DType`, a long or short name ("float32", "f32"), a numpy dtype, scalar type or code
    ("f8", "<f4"), a torch dtype (without importing torch), and Python's `bool`, `int`, `float`,
    `complex`. A code of numpy counts bytes, so "i8" is int64.
    """
    try:
        found = _SPELLINGS.get(x)
    except TypeError:  # unhashable, so certainly not a type
        found = None
    if found is not None:
        return found
    if isinstance(x, type) and issubclass(x, numpy.generic):  # C aliases, such as longlong
        found = _SPELLINGS.get(numpy.dtype(x))
    elif str(x).startswith("torch."):
        found = _SPELLINGS.get(str(x).removeprefix("torch."))
    if found is None:
        known = ", ".join(t.name for t in DTYPES)
        raise DTypeError(f"{x!r} is not a data type that terrazzo knows", hint=f"one of {known}")
    return found


def _promote_integers(dtypes: frozenset[DType]) -> DType:
    """The smallest integer type that holds every value of all of them, as numpy does."""
    signed = max((t.bits for t in dtypes if t.kind == "i"), default=0)
    unsigned = max((t.bits for t in dtypes if t.kind == "u"), default=0)
    if not signed:
        return _UNSIGNED_BY_BITS[unsigned]
    if signed > unsigned:
        return _SIGNED_BY_BITS[signed]
    wider = [bits for bits in _SIGNED_BY_BITS if bits > unsigned]
    # No integer type holds both signed values and all of uint64; numpy takes float64, so do we.
    return _SIGNED_BY_BITS[min(wider)] if wider else float64


def _promote_floats(dtypes: frozenset[DType]) -> DType:
    """The narrowest float that all convert to; 8-bit floats give way to any wider one."""
    wide = dtypes - _FLOAT8
    if not wide:
        # float16 is the narrowest type that holds all 8-bit formats exactly.
        return float16 if len(dtypes) > 1 else next(iter(dtypes))
    widest = max(wide, key=lambda t: t.bits)
    # float16 has the precision and bfloat16 the range; neither holds the other.
    return float32 if widest.bits == 16 and len(wide) > 1 else widest


@functools.cache
def _promote(dtypes: frozenset[DType]) -> DType:
    if len(dtypes) == 1:
        return next(iter(dtypes))
    # The highest kind decides, and lower kinds do not widen it: int64 + float32 is float32.
    floating = frozenset(t.real for t in dtypes if t.is_float or t.is_complex)
    if any(t.is_complex for t in dtypes):
        return complex128 if _promote_floats(floating) is float64 else complex64
    if floating:
        return _promote_floats(floating)
    return _promote_integers(frozenset(t for t in dtypes if t.is_integer))


def promote(*dtypes: Any) -> DType:
    """The type that values of all these types are converted to when they meet.

    Follows the Python array API where it speaks. Where it is silent: an integer meeting a float
    takes the float's type, so that data stays as narrow as it was (torch and JAX do so too). The
    answer depends on the set of types only, never on their order.
    """
    if not dtypes:
        raise DTypeError("promote() needs at least one data type")
    return _promote(frozenset(map(as_dtype, dtypes)))


_KIND_ORDER = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}
_WEAK_DEFAULTS = (bool_, default_int, default_float, default_complex)


def _weak_order(x: Any) -> int | None:
    """The kind of a Python scalar, as an index into `_WEAK_DEFAULTS`; None for anything typed."""
    if hasattr(x, "dtype"):  # numpy's float64 scalar is a Python float too, yet has a type
        return None
    if isinstance(x, bool):
        return 0
    if isinstance(x, int):
        return 1
    if isinstance(x, float):
        return 2
    return 3 if isinstance(x, complex) else None


def result_type(*args: Any) -> DType:
    """The type of an operation's result, from tensors, types and Python scalars.

    Python scalars are weak: they raise the kind of the result (int to float), never its width, so
    `3 + float16` is float16, while `1.5 + int32` is the default float.
    """
    weak = -1
    strong: set[DType] = set()
    for arg in args:
        order = _weak_order(arg)
        if order is None:
            strong.add(as_dtype(getattr(arg, "dtype", arg)))
        elif order > weak:
            weak = order
    if not strong:
        if weak < 0:
            raise DTypeError("result_type() needs at least one argument")
        return _WEAK_DEFAULTS[weak]
    dtype = _promote(frozenset(strong))
    if weak <= _KIND_ORDER[dtype.kind]:
        return dtype
    if weak == 3 and dtype.is_float:
        return _promote(frozenset({dtype, default_complex}))
    return _WEAK_DEFAULTS[weak]
