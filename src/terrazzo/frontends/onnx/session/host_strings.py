"""Strings on the host: ONNX's operators that move elements, whatever these are, and Cast.

Arrays of strings are numpy arrays of objects. What strings look like as numbers, and numbers as
strings, is as onnxruntime has it: eight digits, and C's way to read the start of a text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from terrazzo.errors import ModelError
from terrazzo.frontends.onnx.session.host_ops import (
    Attrs,
    given,
    host_op,
    number,
    once,
    outputs_of,
)
from terrazzo.frontends.onnx.strings import NUMBERS, REFUSE, STRINGS, WORDS
from terrazzo.frontends.onnx.types import STRING, dtype_of

_FLOAT = re.compile(r"\s*([+-]?(?:inf(?:inity)?|nan|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?))",
                    re.IGNORECASE)
_HEXADECIMAL = re.compile(
    r"\s*([+-]?0x(?:[\da-f]+\.?[\da-f]*|\.[\da-f]+)(?:p[+-]?\d+)?)", re.IGNORECASE)
_INTEGER = re.compile(r"\s*([+-]?\d+)")


def strings(items: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """Objects as an array, lists and the like among them left alone."""
    array = np.empty(len(items), object)
    array[:] = items
    return array.reshape(tuple(shape))


# ---------------------------------------------------------------- numbers and strings
def spelled(value: Any) -> str:
    """A number as onnxruntime writes it."""
    if isinstance(value, (bool, np.bool_)):
        return "1" if value else "0"
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    value = float(value)
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "INF" if value > 0 else "-INF"
    return f"{value:.8g}"


def read_number(text: str, whole: bool) -> Any:
    """The number that a text starts with."""
    found = _INTEGER.match(text) if whole else _HEXADECIMAL.match(text) or _FLOAT.match(text)
    if found is None:
        raise ModelError(f"Cast finds no number in the string {text!r}")
    if whole:
        return int(found[1])
    return float.fromhex(found[1]) if found.re is _HEXADECIMAL else float(found[1])


def _read_bits(text: str, signed: bool) -> int:
    """The 64 bits of an integer, as C's strtoll reads it, or strtoull."""
    value = read_number(text, whole=True)
    if not (-1 << 63 <= value < 1 << 63 if signed else abs(value) < 1 << 64):
        raise ModelError(f"Cast finds an integer beyond 64 bits in the string {text!r}")
    return int(value % (1 << 64))


def _read(texts: Sequence[str], dtype: np.dtype[Any]) -> np.ndarray:
    """Numbers that texts start with; of integers a narrower type has the lower bits, as in C."""
    if dtype.kind in "iub":
        bits = [_read_bits(t, dtype.kind == "i") for t in texts]
        return np.array(bits, np.uint64).astype(dtype)
    return np.array([read_number(t, whole=False) for t in texts], np.float64).astype(dtype)


@host_op("Cast", "CastLike")
def _cast(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    x = np.asarray(inputs[0])
    like = np.asarray(inputs[1]) if len(inputs) > 1 else None
    to_string = like.dtype.kind in "OUS" if like is not None else attrs["to"] == STRING
    if to_string:
        same = x.dtype.kind in "OUS"
        return [strings([str(v) if same else spelled(v) for v in x.reshape(-1).tolist()], x.shape)]
    dtype = np.dtype(like.dtype if like is not None else dtype_of(attrs["to"]).np)
    return [_read(x.reshape(-1).tolist(), dtype).reshape(x.shape) if x.dtype.kind in "OUS"
            else x.astype(dtype)]


# ---------------------------------------------------------------- moving elements
def _axes(attrs: Attrs, inputs: Sequence[Any], i: int = 1) -> list[int] | None:
    """Axes of an attribute, or of an input in later versions."""
    value = given(inputs, i)
    found = attrs.get("axes") if value is None else np.asarray(value).reshape(-1)
    return None if found is None else [int(a) for a in found]


def _reshape(x: np.ndarray, attrs: Attrs, inputs: Sequence[Any]) -> np.ndarray:
    shape = attrs["shape"] if len(inputs) < 2 else inputs[1].tolist()
    if 0 in shape and not attrs.get("allowzero", 0):
        shape = [x.shape[i] if n == 0 else n for i, n in enumerate(shape)]
    return x.reshape(shape)


def _squeeze(x: np.ndarray, attrs: Attrs, inputs: Sequence[Any]) -> np.ndarray:
    axes = _axes(attrs, inputs)
    return np.squeeze(x, tuple(axes)) if axes else np.squeeze(x)


def _unsqueeze(x: np.ndarray, attrs: Attrs, inputs: Sequence[Any]) -> np.ndarray:
    return np.expand_dims(x, tuple(_axes(attrs, inputs) or ()))


def _flatten(x: np.ndarray, attrs: Attrs, inputs: Sequence[Any]) -> np.ndarray:
    axis = attrs.get("axis", 1)
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def _slice(x: np.ndarray, attrs: Attrs, inputs: Sequence[Any]) -> np.ndarray:
    starts, ends = (attrs[n] if given(inputs, i) is None else inputs[i].tolist()
                    for i, n in ((1, "starts"), (2, "ends")))
    axes = _axes(attrs, inputs, 3) or list(range(len(starts)))
    steps = [1] * len(axes) if given(inputs, 4) is None else inputs[4].tolist()
    cuts = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        n = x.shape[axis]
        start, end = (v + n if v < 0 else v for v in (start, end))
        cuts[axis] = slice(max(start, 0), max(end, 0), step) if step > 0 else slice(
            min(max(start, 0), n - 1), None if end < 0 else end, step)
    return x[tuple(cuts)]


def _gather_elements(x: np.ndarray, attrs: Attrs, inputs: Sequence[Any]) -> np.ndarray:
    return np.asarray(x[_places(attrs, inputs)])


def _places(attrs: Attrs, inputs: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """Where elements lie that indices name along an axis; numpy's own functions stretch these."""
    at = np.asarray(inputs[1])
    places: list[np.ndarray] = list(np.indices(at.shape, sparse=True))
    places[attrs.get("axis", 0)] = at
    return tuple(places)


def _gather_nd(x: np.ndarray, attrs: Attrs, inputs: Sequence[Any]) -> np.ndarray:
    at, batch = np.asarray(inputs[1]), attrs.get("batch_dims", 0)
    if not batch:
        return x[tuple(np.moveaxis(at, -1, 0))]
    rows = [_gather_nd(x[i], {"batch_dims": batch - 1}, [None, at[i]]) for i in range(len(x))]
    return np.stack(rows)


def _scattered(x: np.ndarray, attrs: Attrs, inputs: Sequence[Any]) -> np.ndarray:
    made = x.copy()
    made[_places(attrs, inputs)] = inputs[2]
    return made


def _scattered_nd(x: np.ndarray, attrs: Attrs, inputs: Sequence[Any]) -> np.ndarray:
    made = x.copy()
    made[tuple(np.moveaxis(np.asarray(inputs[1]), -1, 0))] = inputs[2]
    return made


Mover = Callable[[np.ndarray, Attrs, Sequence[Any]], Any]
_MOVERS: Mapping[str, Mover] = {
    "Reshape": _reshape, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze, "Flatten": _flatten,
    "Slice": _slice, "GatherElements": _gather_elements, "GatherND": _gather_nd,
    "ScatterElements": _scattered, "Scatter": _scattered, "ScatterND": _scattered_nd,
    "Transpose": lambda x, attrs, inputs: np.transpose(x, attrs.get("perm")),
    "Gather": lambda x, attrs, inputs: x.take(inputs[1], attrs.get("axis", 0)),
    "Concat": lambda x, attrs, inputs: np.concatenate(inputs, axis=attrs.get("axis", 1)),
    "Expand": lambda x, attrs, inputs: np.broadcast_to(x, np.broadcast_shapes(
        x.shape, tuple(int(n) for n in inputs[1]))).copy(),
    "Tile": lambda x, attrs, inputs: np.tile(x, [int(n) for n in inputs[1]]),
    "Where": lambda x, attrs, inputs: np.where(*inputs),
    "Shape": lambda x, attrs, inputs: np.array(
        x.shape[slice(attrs.get("start", 0), attrs.get("end"))], np.int64),
    "Size": lambda x, attrs, inputs: np.array(x.size, np.int64),
}


def _moving(move: Mover) -> Callable[[Attrs, int, Sequence[Any]], list[Any]]:
    return lambda attrs, version, inputs: [np.asarray(move(np.asarray(inputs[0]), attrs, inputs))]


# The contents of no input decide how these lie.
_STEADY = {"Flatten", "GatherElements", "GatherND", "ScatterElements", "Scatter", "ScatterND",
           "Transpose", "Gather", "Concat", "Where"}
for _name, _mover in _MOVERS.items():
    host_op(_name, steady=_name in _STEADY, tells=_name in ("Shape", "Size"))(_moving(_mover))


@host_op("Split")
def _split(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    x, axis = np.asarray(inputs[0]), attrs.get("axis", 0)
    sizes = attrs.get("split") if given(inputs, 1) is None else np.asarray(inputs[1]).tolist()
    if sizes is not None:
        return np.split(x, np.cumsum(sizes)[:-1], axis=axis)
    n, count = x.shape[axis], attrs.get("num_outputs") or outputs_of(attrs)
    if version < 18 and n % count:
        raise ModelError(f"Split cuts {n} strings into {count} parts, which are not equal")
    each = -(-n // count)
    return np.split(x, [min(each * i, n) for i in range(1, count)], axis=axis)


@host_op("OneHot", makes=True)
def _one_hot(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    at, depth = np.asarray(inputs[0]).astype(np.int64), int(number(inputs[1]))
    if version >= 11:  # before, negative indices were outside
        at = np.where(at < 0, at + depth, at)
    hit = np.moveaxis(at[..., None] == np.arange(depth), -1, attrs.get("axis", -1))
    return [np.asarray(inputs[2])[hit.astype(np.int64)]]


# ---------------------------------------------------------------- names for numbers
@host_op(WORDS, domain=STRINGS, makes=True, steady=True)
def _words(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    """The string that a number stands for."""
    words = once(attrs, "words", lambda: np.array(attrs["words"], object))
    return [np.asarray(words[inputs[0]], object)]


class Numbers(dict[str, Any]):
    """The numbers of words, and one for all others."""

    def __init__(self, attrs: Attrs):
        words = attrs["words"]
        values = attrs.get("numbers") or range(len(words))
        super().__init__(zip(reversed(words), reversed(values), strict=True))
        self.other = attrs.get("other", -1)
        self.dtype = np.float32 if isinstance(self.other, float) else np.int64

    def __missing__(self, word: Any) -> Any:
        return self.other

    def each(self, words: Sequence[str]) -> Iterator[Any]:
        """Those of some words, without a call of Python's for those that there are not."""
        return map(self.get, words, repeat(self.other))

    def of(self, words: Sequence[str]) -> np.ndarray:
        """Those of a list of words."""
        return np.fromiter(self.each(words), self.dtype, len(words))


@host_op(NUMBERS, domain=STRINGS, makes=True, steady=True)
def _numbers(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    """The number that stands for a string, and another one where there is none."""
    x = np.asarray(inputs[0], object)
    return [once(attrs, "numbers", lambda: Numbers(attrs)).of(x.reshape(-1).tolist()).reshape(
        x.shape)]


@host_op(REFUSE, domain=STRINGS, steady=True)
def _refuse(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    """An error, unless all that was encoded is known."""
    if not inputs[0]:
        raise ModelError("OneHotEncoder does not know all of "
                         f"{np.unique(inputs[1]).tolist()[:10]}, where -1 stands for strings")
    return []
