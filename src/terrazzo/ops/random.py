"""Random numbers that are a function of a key and a position: the same on every chip.

The generator is Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as
1, 2, 3"). Element i of a tensor is word i % 4 of block i // 4, so the order of computing does not
matter, and a kernel makes its numbers where it needs them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from terrazzo.base.scalar import FromIndex, Scalar, as_scalar, call
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.scalar import where as where_scalar
from terrazzo.base.shapes import dims_text
from terrazzo.dtypes import DType, as_dtype, float32, float64, int64, uint32, uint64
from terrazzo.errors import ArgumentError, DTypeError, ShapeError, user_location
from terrazzo.expr.ir import Tensor, compute
from terrazzo.graph.ir import TensorType, operator_named
from terrazzo.index import Index
from terrazzo.index.guards import ask
from terrazzo.ops.creation import full
from terrazzo.ops.define import operator, primitive
from terrazzo.ops.elementwise import (
    astype,
    bitwise_xor,
    cos,
    less,
    log1p,
    minimum,
    sqrt,
    where,
)
from terrazzo.ops.shape import as_shape, ravel

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = 0xFFFFFFFF

# The third word of the counter keeps what numbers are for apart: elements, and two steps of keys.
_ELEMENTS, _DERIVE, _FOLD = 0, 1, 2


def philox_numpy(counter: tuple[Any, ...], key: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """One block of four words a counter, in uint64 arrays holding 32 bits."""
    c = [np.asarray(word, np.uint64) for word in counter]
    low, shift = np.uint64(_LOW), np.uint64(32)
    for r in range(_ROUNDS):
        k = [np.uint64((key[n] + r * _WEYL[n]) & _LOW) for n in range(2)]
        a, b = (np.uint64(m) * word for m, word in zip(_MULTIPLIERS, (c[0], c[2])))
        c = [(b >> shift) ^ c[1] ^ k[0], b & low, (a >> shift) ^ c[3] ^ k[1], a & low]
    return tuple(c)


def _philox(counter: list[Scalar], key: list[Scalar]) -> list[Scalar]:
    """The same in scalar arithmetic; every word is a uint64 holding 32 bits."""

    def low(word: Scalar) -> Scalar:
        return call("and", word, _LOW)

    def high(word: Scalar) -> Scalar:
        return call("shr", word, 32)

    c = counter
    for r in range(_ROUNDS):
        k = [low(call("add", key[n], r * _WEYL[n] & _LOW)) for n in range(2)]
        a, b = call("mul", c[0], _MULTIPLIERS[0]), call("mul", c[2], _MULTIPLIERS[1])
        c = [call("xor", call("xor", high(b), c[1]), k[0]), low(b),
             call("xor", call("xor", high(a), c[3]), k[1]), low(a)]
    return c


def _bits_type(key: TensorType, *, shape: Any, words: int, word: int, stream: int) -> TensorType:
    if not key.dtype.is_integer or key.shape != ():
        raise DTypeError(f"a random key is a single integer, not {key}", where=user_location(),
                         hint="make one with tz.random_key(seed), more with tz.split_key(key, n)")
    sizes = as_shape(shape)
    if any(ask("<", n, 0) for n in sizes):
        raise ShapeError(f"a tensor cannot have the shape {dims_text(sizes)}",
                         where=user_location())
    return TensorType(sizes, uint32)


def _bits_numpy(key: np.ndarray, *, shape: Any, words: int, word: int, stream: int,
                out: Any) -> np.ndarray:
    seed = int(key) & (2**64 - 1)
    count = math.prod(out.shape)
    block = np.arange(-(-count * words // 4), dtype=np.uint64)
    made = philox_numpy((block & np.uint64(_LOW), block >> np.uint64(32), stream, 0),
                        (seed & _LOW, seed >> 32))
    stream_words = np.stack(made, axis=-1).reshape(-1)[:count * words]
    return stream_words[word::words].astype(np.uint32).reshape(out.shape)


@primitive(family="random", infer=_bits_type, reference=_bits_numpy, differentiable=False)
def random_bits(key: Any, *, shape: Any, words: int = 1, word: int = 0, stream: int = _ELEMENTS,
                out: TensorType) -> Tensor:
    """32 random bits an element: one word out of every `words` of the stream, that of number `word`

    What needs several words an element asks for each by itself; they share the work of a block.
    """

    def element(*i: Index) -> Scalar:
        position = ravel(i, out.shape) * words + word
        block = cast_scalar(FromIndex(int64, position // 4), uint64)
        seed = cast_scalar(key[()], uint64)
        zero = as_scalar(0, uint64)
        made = _philox(
            [call("and", block, _LOW), call("shr", block, 32), as_scalar(stream, uint64), zero],
            [call("and", seed, _LOW), call("shr", seed, 32)])
        lane = FromIndex(int64, position % 4)
        lanes = range(word % math.gcd(words, 4), 4, math.gcd(words, 4))  # those it can fall on
        chosen = made[lanes[-1]]
        for n in reversed(lanes[:-1]):
            chosen = where_scalar(call("eq", lane, n), made[n], chosen)
        return cast_scalar(chosen, uint32)

    return compute(out.shape, element, origin="random_bits")


# ---------------------------------------------------------------- keys
@operator(family="random", differentiable=False)
def random_key(*, seed: Any) -> Any:
    """the key of a seed: what every random operator takes"""
    return full(shape=(), value=int(seed) & (2**64 - 1), dtype="uint64")


def _words(key: Any, shape: Any, count: int, stream: int = _ELEMENTS) -> list[Any]:
    """Several random words an element."""
    return [random_bits(key, shape=as_shape(shape), words=count, word=k, stream=stream)
            for k in range(count)]


def _joined(low: Any, high: Any) -> Any:
    """64 random bits of two words."""
    return astype(low, dtype="uint64") | (astype(high, dtype="uint64") << np.uint64(32))


@operator(family="random", differentiable=False)
def split_key(key: Any, *, num: int = 2) -> Any:
    """independent keys made from one, which should not be used again"""
    return _joined(*_words(key, (num,), 2, _DERIVE))


@operator(family="random", differentiable=False)
def fold_in(key: Any, data: Any) -> Any:
    """a key made from a key and a number, such as that of a step or a layer"""
    own = _joined(*_words(key, (), 2, _DERIVE))
    mixed = bitwise_xor(own, astype(data, dtype="uint64"))
    return _joined(*_words(mixed, (), 2, _FOLD))


# ---------------------------------------------------------------- distributions
# As many random bits as a float's significand holds, so that no result rounds up to 1.
_UNIT_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}


def _check_float(dtype: DType) -> None:
    if dtype.name not in _UNIT_BITS:
        raise DTypeError(f"random numbers of type {dtype.name} are not supported",
                         where=user_location(), hint="use " + ", ".join(_UNIT_BITS))


def _unit(bits: Any, dtype: DType) -> Any:
    """The floats of [0, 1) that random bits stand for: in float64 of 64, else in float32 of 32."""
    count = _UNIT_BITS[dtype.name]
    if dtype is float64:
        return astype(bits >> np.uint64(64 - count), dtype=dtype) * 2.0**-count
    return astype(bits >> np.uint32(32 - count), dtype=float32) * 2.0**-count


@operator(family="random", differentiable=False)
def uniform(key: Any, *, shape: Any = (), low: float = 0.0, high: float = 1.0,
            dtype: Any = "float32") -> Any:
    """floats spread evenly over low <= x < high"""
    kind = as_dtype(dtype)
    _check_float(kind)
    unit = _unit(_joined(*_words(key, shape, 2)) if kind is float64 else
                 random_bits(key, shape=as_shape(shape)), kind)
    if (low, high) == (0.0, 1.0):
        return astype(unit, dtype=kind)
    value = astype(unit * (high - low) + low, dtype=kind)
    # Adding may round up to the excluded end.
    last = float(np.nextafter(np.asarray(high, kind.np), np.asarray(low, kind.np)))
    return minimum(value, last) if high > low else value


@operator(family="random", differentiable=False)
def normal(key: Any, *, shape: Any = (), mean: float = 0.0, std: float = 1.0,
           dtype: Any = "float32") -> Any:
    """normally distributed floats, by Box and Muller's transform"""
    kind, sizes = as_dtype(dtype), as_shape(shape)
    _check_float(kind)
    if kind is float64:
        words = _words(key, sizes, 4)
        first, second = (_unit(_joined(*words[k:k + 2]), kind) for k in (0, 2))
    else:  # half types are made in float32: their few bits would leave gaps in the tails
        first, second = (_unit(w, float32) for w in _words(key, sizes, 2))
    value = sqrt(-2.0 * log1p(-first)) * cos(second * (2.0 * math.pi))
    return astype(value if (mean, std) == (0.0, 1.0) else value * std + mean, dtype=kind)


@operator(family="random", differentiable=False)
def bernoulli(key: Any, *, shape: Any = (), p: float = 0.5) -> Any:
    """True with probability p"""
    if not 0.0 <= p <= 1.0:
        raise ArgumentError(f"a probability lies between 0 and 1, not at {p}",
                            where=user_location())
    limit = round(p * 2**32)
    if limit == 2**32:
        return full(shape=as_shape(shape), value=True, dtype="bool")
    return less(random_bits(key, shape=as_shape(shape)), np.uint32(limit))


@operator(family="random", differentiable=False)
def randint(key: Any, *, low: int, high: int, shape: Any = (), dtype: Any = "int64") -> Any:
    """integers spread evenly over low <= x < high"""
    count = high - low
    if not 0 < count <= 2**32:
        raise ArgumentError(f"randint from {low} to {high} must have 1 to 2**32 numbers to choose "
                            "from", where=user_location())
    fraction, whole = (astype(w, dtype="uint64") for w in _words(key, shape, 2))
    # The top half of 64 random bits times the count: biased by less than 2**-32.
    scaled = whole * np.uint64(count) + ((fraction * np.uint64(count)) >> np.uint64(32))
    return astype(astype(scaled >> np.uint64(32), dtype="int64") + low, dtype=dtype)


@operator(family="random", differentiable=False)
def permutation(key: Any, *, n: Any) -> Any:
    """the numbers 0..n-1 in random order"""
    return operator_named("argsort")(_joined(*_words(key, (n,), 2)))


@operator(family="random")
def dropout(x: Any, key: Any, *, p: float = 0.5) -> Any:
    """x with elements set to 0 with probability p, and the rest scaled by 1 / (1 - p)"""
    if not 0.0 <= p <= 1.0:
        raise ArgumentError(f"a probability lies between 0 and 1, not at {p}",
                            where=user_location())
    keep = bernoulli(key, shape=x.shape, p=1.0 - p)
    return where(keep, x * (1.0 / (1.0 - p)) if p < 1.0 else x, 0)
