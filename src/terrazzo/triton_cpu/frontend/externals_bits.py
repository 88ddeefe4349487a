"""Functions on the bits of integers, without a branch or a table (SWAR: many fields in a word)."""

from __future__ import annotations

from terrazzo.base.scalar import Const, Scalar, call, cast, where
from terrazzo.dtypes import DType, int32, int64, uint32, uint64

_UNSIGNED: dict[DType, DType] = {int32: uint32, int64: uint64, uint32: uint32, uint64: uint64}


def _repeated(byte: int, dtype: DType) -> Const:
    return Const(dtype, int.from_bytes(bytes([byte]) * (dtype.bits // 8), "little"))


def _shifted(name: str, x: Scalar, by: int) -> Scalar:
    return call(name, x, Const(x.dtype, by))


def _words(x: Scalar) -> Scalar:
    """Without a sign, so that shifts bring in zeros."""
    return cast(x, _UNSIGNED[x.dtype])


def count_ones(x: Scalar) -> Scalar:
    """How many bits are set, summed up in fields of 2, 4 and 8 bits, then by a product."""
    x = _words(x)
    x = call("sub", x, call("and", _shifted("shr", x, 1), _repeated(0x55, x.dtype)))
    pairs = _repeated(0x33, x.dtype)
    x = call("add", call("and", x, pairs), call("and", _shifted("shr", x, 2), pairs))
    x = call("and", call("add", x, _shifted("shr", x, 4)), _repeated(0x0F, x.dtype))
    total = call("mul", x, _repeated(0x01, x.dtype))
    return cast(_shifted("shr", total, x.dtype.bits - 8), int32)


def leading_zeros(x: Scalar) -> Scalar:
    """Zeros above the highest set bit: all below it are set first."""
    x = _words(x)
    by = 1
    while by < x.dtype.bits:
        x = call("or", x, _shifted("shr", x, by))
        by *= 2
    return call("sub", Const(int32, x.dtype.bits), count_ones(x))


def first_one(x: Scalar) -> Scalar:
    """The place of the lowest set bit, counted from one; 0 if there is none."""
    lowest = call("and", x, call("neg", x))
    below = count_ones(call("sub", lowest, Const(x.dtype, 1)))
    return where(call("eq", x, Const(x.dtype, 0)), Const(int32, 0),
                 call("add", below, Const(int32, 1)))


def reversed_bits(x: Scalar) -> Scalar:
    """Neighbours change places, then pairs, and so on."""
    x = _words(x)
    bits = x.dtype.bits
    by = 1
    while by < bits:
        mask = Const(x.dtype, sum(((1 << by) - 1) << at for at in range(0, bits, 2 * by)))
        x = call("or", call("and", _shifted("shr", x, by), mask),
                 _shifted("shl", call("and", x, mask), by))
        by *= 2
    return x


def high_product(a: Scalar, b: Scalar) -> Scalar:
    """The upper half of a product; the arguments' type says whether they have signs."""
    dtype = a.dtype
    if dtype.bits == 32:
        wide = int64 if dtype.is_signed else uint64
        return cast(_shifted("shr", call("mul", cast(a, wide), cast(b, wide)), 32), dtype)
    high = _high_product_of_words(cast(a, uint64), cast(b, uint64))
    if dtype.is_signed:
        zero = Const(uint64, 0)
        for x, y in ((a, b), (b, a)):
            negative = call("lt", x, Const(dtype, 0))
            high = call("sub", high, where(negative, cast(y, uint64), zero))
    return cast(high, dtype)


def _high_product_of_words(a: Scalar, b: Scalar) -> Scalar:
    low = Const(uint64, 0xFFFFFFFF)
    a0, a1 = call("and", a, low), _shifted("shr", a, 32)
    b0, b1 = call("and", b, low), _shifted("shr", b, 32)
    middle = call("add", call("mul", a1, b0), _shifted("shr", call("mul", a0, b0), 32))
    cross = call("add", call("mul", a0, b1), call("and", middle, low))
    total = call("add", call("mul", a1, b1), _shifted("shr", middle, 32))
    return call("add", total, _shifted("shr", cross, 32))


def product_of_24_bits(a: Scalar, b: Scalar) -> Scalar:
    """The product of the lower 24 bits of two numbers, in 32 bits."""
    return call("mul", *(_shifted("shr", _shifted("shl", x, 8), 8) for x in (a, b)))


def sum_of_difference(a: Scalar, b: Scalar, c: Scalar) -> Scalar:
    """|a - b| + c"""
    apart = call("sub", call("max", a, b), call("min", a, b))
    return call("add", cast(apart, uint32), c)


def average(a: Scalar, b: Scalar, carry: int) -> Scalar:
    """(a + b + carry) / 2, rounded down, without overflow."""
    wide = call("add", cast(a, int64), cast(b, int64))
    return cast(_shifted("shr", call("add", wide, Const(int64, carry)), 1), a.dtype)


def permuted_bytes(a: Scalar, b: Scalar, selector: Scalar) -> Scalar:
    """Four bytes out of eight, each chosen by three bits of a selector."""
    both = call("or", _shifted("shl", cast(_words(b), uint64), 32), cast(_words(a), uint64))
    chosen = cast(_words(selector), uint64)
    result: Scalar = Const(uint64, 0)
    for place in range(4):
        number = call("and", _shifted("shr", chosen, 4 * place), Const(uint64, 7))
        byte = call("and", call("shr", both, _shifted("shl", number, 3)), Const(uint64, 0xFF))
        result = call("or", result, _shifted("shl", byte, 8 * place))
    return cast(result, int32)
