"""Inputs to try an operator with: ordinary, special, extreme, empty, odd, strided, symbolic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from terrazzo.dtypes import DType, as_dtype
from terrazzo.graph.ir import TensorType
from terrazzo.index import Index, Var

KINDS = ("random", "special", "extreme", "one", "odd", "empty", "strided", "symbolic")
ODD = (17, 33, 7, 5, 9, 11)  # no multiple of a vector, a tile or an unrolled loop


@dataclass(frozen=True, eq=False)
class Sample:
    """Inputs, and the types to compile for, which may be symbolic."""

    types: tuple[TensorType, ...]
    arrays: tuple[np.ndarray, ...]


# ---------------------------------------------------------------- values
def draw(rng: np.random.Generator, shape: Sequence[int], dtype: DType) -> np.ndarray:
    """Ordinary numbers of both signs."""
    if dtype.is_bool:
        return rng.integers(0, 2, shape).astype(np.bool_)
    if dtype.is_integer:
        return rng.integers(-9 if dtype.is_signed else 0, 10, shape).astype(dtype.np)
    return np.asarray(rng.standard_normal(shape) * rng.choice([0.3, 1.0, 4.0])).astype(dtype.np)


def unit(rng: np.random.Generator, shape: Sequence[int], dtype: DType) -> np.ndarray:
    """Numbers between 0 and 1, such as probabilities."""
    return np.asarray(rng.uniform(0.05, 0.95, shape)).astype(dtype.np)


def special_values(dtype: DType) -> np.ndarray:
    """What arithmetic treats in its own way: nan, infinities, zeros, denormals, limits."""
    if dtype.is_bool:
        return np.array([False, True])
    if dtype.is_integer:
        near = [0, 1, 2, dtype.min, dtype.min + 1, dtype.max, dtype.max - 1]
        return np.array([n for n in (*near, -1, -2) if dtype.min <= n <= dtype.max], dtype.np)
    info = ml_dtypes.finfo(dtype.np)
    tiny, subnormal = float(info.smallest_normal), float(info.smallest_subnormal)
    numbers = [np.nan, np.inf, -np.inf, 0.0, -0.0, subnormal, -subnormal, 3 * subnormal, tiny,
               -tiny, dtype.max, dtype.min, 1.0, -1.0, 1.0 + dtype.eps, 1.0 - dtype.eps / 2, 0.5,
               -0.5, 1.5, 2.5, -2.5, np.pi, 88.0, -88.0, 1e4]
    return np.array(numbers).astype(dtype.np)


def special(rng: np.random.Generator, shape: Sequence[int], dtype: DType) -> np.ndarray:
    """Special values among ordinary ones."""
    ordinary = draw(rng, shape, dtype)
    return np.where(rng.random(shape) < 0.4, rng.choice(special_values(dtype), shape), ordinary)


def extreme(rng: np.random.Generator, shape: Sequence[int], dtype: DType) -> np.ndarray:
    """Finite numbers over the whole range of the type, very large and very small ones alike."""
    if not dtype.is_float:
        return rng.choice(special_values(dtype), shape)
    info = ml_dtypes.finfo(dtype.np)
    low, high = np.log2(float(info.smallest_subnormal)), np.log2(float(info.max))
    size = np.exp2(np.minimum(rng.uniform(low, high, shape), high - 0.01))
    return np.asarray(size * rng.choice([-1.0, 1.0], shape)).astype(dtype.np)


# ---------------------------------------------------------------- samples of examples
def samples(examples: Sequence[np.ndarray], dtype: DType, kind: str, rng: np.random.Generator
            ) -> Iterator[Sample]:
    """Inputs of one kind, like the examples but with floats of the given type.

    When no example is an integer, a `dtype` that is one replaces the floats. Integers keep the
    values of the examples, reordered, as they may be indices.
    """
    if kind == "given":
        if not examples or any(as_dtype(a.dtype) is dtype for a in examples):
            yield _plain(list(examples))
        return
    if kind == "symbolic":
        yield from _symbolic(examples, dtype, rng)
        return
    for sizes in list(_sizes(examples, kind)) * (3 if kind == "strided" else 1):
        arrays = [_filled(a, _resized(a.shape, sizes), dtype, kind, rng) for a in examples]
        if kind == "strided":
            arrays = [strided(a, rng) for a in arrays]
        yield _plain(arrays)


def _plain(arrays: Sequence[np.ndarray]) -> Sample:
    types = tuple(TensorType(a.shape, as_dtype(a.dtype)) for a in arrays)
    return Sample(types, tuple(arrays))


def _sizes(examples: Sequence[np.ndarray], kind: str) -> Iterator[Mapping[int, int]]:
    """Other sizes for those of the examples; equal sizes stay equal."""
    distinct = list(dict.fromkeys(n for a in examples for n in a.shape))
    if kind == "one":
        yield dict.fromkeys(distinct, 1)
    elif kind == "odd":
        yield dict(zip(distinct, (*ODD, *range(3, 3 + len(distinct)))))
    elif kind == "empty":
        for n in distinct:
            yield {n: 0}
    else:
        yield {}


def _resized(shape: Sequence[int], sizes: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(sizes.get(n, n) for n in shape)


def _filled(example: np.ndarray, shape: tuple[int, ...], dtype: DType, kind: str,
            rng: np.random.Generator) -> np.ndarray:
    own = as_dtype(example.dtype)
    if not own.is_float:
        return _reordered(example, shape, rng)
    fill = {"special": special, "extreme": extreme}.get(kind, draw)
    return fill(rng, shape, dtype)


def _reordered(example: np.ndarray, shape: tuple[int, ...], rng: np.random.Generator
               ) -> np.ndarray:
    flat = example.reshape(-1)
    if flat.size == 0 or 0 in shape:
        return np.zeros(shape, example.dtype)
    return rng.choice(flat, shape).astype(example.dtype)


def strided(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The same values in memory with gaps, backwards, or with axes in another order."""
    if array.ndim == 0:
        return array
    width = array.shape[-1]
    ways = [
        np.ascontiguousarray(array[..., ::-1])[..., ::-1],
        np.repeat(array, 2, axis=-1)[..., ::2],
    ]
    if array.ndim > 1:
        ways.append(np.ascontiguousarray(array.T).T)
        ways.append(np.concatenate([array, array], axis=-1)[..., :width])
    if array.ndim > 2:
        ways.append(np.ascontiguousarray(array.swapaxes(0, 1)).swapaxes(0, 1))
    return ways[int(rng.integers(0, len(ways)))]


def _symbolic(examples: Sequence[np.ndarray], dtype: DType, rng: np.random.Generator
              ) -> Iterator[Sample]:
    """One compilation with a symbolic dimension for every size, run at several sizes."""
    names: dict[int, Var] = {}
    shapes: list[tuple[Index, ...]] = [tuple(n if n < 2 else names.setdefault(
        n, Var(f"n{len(names)}", 0)) for n in a.shape) for a in examples]
    if not names:
        return
    own = [dtype if as_dtype(a.dtype).is_float else as_dtype(a.dtype) for a in examples]
    types = tuple(TensorType(s, t) for s, t in zip(shapes, own, strict=True))
    variants: list[dict[int, int]] = [{n: n for n in names}, dict(zip(names, ODD))]
    variants += [{n: size for n in names} for size in (1, 0)]
    for sizes in variants:
        arrays = tuple(_filled(a, _resized(a.shape, sizes), dtype, "random", rng)
                       for a in examples)
        yield Sample(types, arrays)
