"""Strings on the host: ONNX's operators that move elements, whatever these are, and Cast.

Arrays of strings are numpy arrays of objects. What strings look like as numbers, and numbers as
strings, is as onnxruntime has it: eight digits, and C's way to read the start of a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np

from terrazzo.errors import ModelError
from terrazzo.frontends.onnx.session.host_ops import Attrs, given, host_op, once
from terrazzo.frontends.onnx.strings import NUMBERS, STRINGS, WORDS
from terrazzo.frontends.onnx.types import STRING, dtype_of

_FLOAT = re.compile(r"\s*([+-]?(?:inf(?:inity)?|nan|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?))",
                    re.IGNORECASE)
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
    found = (_INTEGER if whole else _FLOAT).match(text)
    if found is None:
        raise ModelError(f"Cast finds no number in the string {text!r}")
    return int(found[1]) if whole else float(found[1])


@host_op("Cast", "CastLike")
def _cast(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    x = np.asarray(inputs[0])
    like = np.asarray(inputs[1]) if len(inputs) > 1 else None
    to_string = like.dtype.kind in "OUS" if like is not None else attrs["to"] == STRING
    if to_string:
        same = x.dtype.kind in "OUS"
        return [strings([str(v) if same else spelled(v) for v in x.reshape(-1).tolist()], x.shape)]
    dtype = like.dtype if like is not None else dtype_of(attrs["to"]).np
    if x.dtype.kind not in "OUS":
        return [x.astype(dtype)]
    whole = np.dtype(dtype).kind in "iub"
    return [np.array([read_number(t, whole) for t in x.reshape(-1)], object).reshape(
        x.shape).astype(dtype)]


# ---------------------------------------------------------------- moving elements
def _axes(attrs: Attrs, inputs: Sequence[Any], i: int = 1) -> list[int] | None:
    """Axes of an attribute, or of an input in later versions."""
    value = given(inputs, i)
    found = attrs.get("axes") if value is None else np.asarray(value).reshape(-1)
    return None if found is None else [int(a) for a in found]


def _reshape(x: np.ndarray, attrs: Attrs, inputs: Sequence[Any]) -> np.ndarray:
    shape = [int(n) for n in (attrs["shape"] if len(inputs) < 2 else inputs[1])]
    if not attrs.get("allowzero", 0):
        shape = [x.shape[i] if n == 0 else n for i, n in enumerate(shape)]
    return x.reshape(shape)


def _squeeze(x: np.ndarray, attrs: Attrs, inputs: Sequence[Any]) -> np.ndarray:
    axes = _axes(attrs, inputs)
    return np.squeeze(x) if axes is None else np.squeeze(x, tuple(axes))


def _unsqueeze(x: np.ndarray, attrs: Attrs, inputs: Sequence[Any]) -> np.ndarray:
    return np.expand_dims(x, tuple(_axes(attrs, inputs) or ()))


def _flatten(x: np.ndarray, attrs: Attrs, inputs: Sequence[Any]) -> np.ndarray:
    axis = attrs.get("axis", 1) % (x.ndim + 1) if attrs.get("axis", 1) < 0 else attrs.get("axis", 1)
    return x.reshape(int(np.prod(x.shape[:axis], dtype=np.int64)), -1)


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
            min(start, n - 1), None if end < 0 else end, step)
    return x[tuple(cuts)]


def _gather_elements(x: np.ndarray, attrs: Attrs, inputs: Sequence[Any]) -> np.ndarray:
    axis = attrs.get("axis", 0)
    at = np.asarray(inputs[1])
    return np.take_along_axis(x, np.where(at < 0, at + x.shape[axis], at), axis)


def _gather_nd(x: np.ndarray, attrs: Attrs, inputs: Sequence[Any]) -> np.ndarray:
    at, batch = np.asarray(inputs[1]), attrs.get("batch_dims", 0)
    if not batch:
        return x[tuple(np.moveaxis(at, -1, 0))]
    rows = [_gather_nd(x[i], {"batch_dims": batch - 1}, [None, at[i]]) for i in range(len(x))]
    return np.stack(rows)


def _scattered(x: np.ndarray, attrs: Attrs, inputs: Sequence[Any]) -> np.ndarray:
    made, at = x.copy(), np.asarray(inputs[1])
    axis = attrs.get("axis", 0)
    np.put_along_axis(made, np.where(at < 0, at + x.shape[axis], at), inputs[2], axis)
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
    "Gather": lambda x, attrs, inputs: np.take(x, inputs[1], axis=attrs.get("axis", 0)),
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


for _name, _mover in _MOVERS.items():
    host_op(_name)(_moving(_mover))


@host_op("Split")
def _split(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    x, axis = np.asarray(inputs[0]), attrs.get("axis", 0)
    sizes = attrs.get("split") if given(inputs, 1) is None else np.asarray(inputs[1]).tolist()
    if sizes is None:
        count = attrs.get("num_outputs")
        if count is None:
            raise ModelError("Split of strings does not say into how many parts")
        each = -(-x.shape[axis] // count)
        sizes = [min(each, x.shape[axis] - each * i) for i in range(count)]
    return np.split(x, np.cumsum(sizes)[:-1], axis=axis)


# ---------------------------------------------------------------- names for numbers
@host_op(WORDS, domain=STRINGS, makes=True, steady=True)
def _words(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    """The string that a number stands for."""
    words = once(attrs, "words", lambda: np.array(attrs["words"], object))
    return [np.asarray(words[inputs[0]], object)]


@host_op(NUMBERS, domain=STRINGS, makes=True, steady=True)
def _numbers(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    """The number that stands for a string, and -1 where there is none."""
    x = np.asarray(inputs[0], object)
    table = once(attrs, "table", lambda: {
        word: number for number, word in reversed(list(enumerate(attrs["words"])))})
    return [np.array(list(map(table.get, x.reshape(-1).tolist(), repeat(-1))), np.int64).reshape(
        x.shape)]


# ---------------------------------------------------------------- tokens
@host_op("Tokenizer", domain="com.microsoft", makes=True)
def _tokenizer(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    """Texts cut into tokens, a row each, filled up to the longest."""
    x = np.asarray(inputs[0], object)
    cut = once(attrs, "cut", lambda: _tokens(attrs))
    rows: list[list[str]] = list(map(cut, x.reshape(-1).tolist()))
    if attrs.get("mark", 0):
        rows = [["\x02", *row, "\x03"] for row in rows]
    longest = max(map(len, rows), default=0)
    padding = [attrs["pad_value"]] * longest
    filled = list(chain.from_iterable(chain(row, padding[len(row):]) for row in rows))
    return [strings(filled, (*x.shape, longest))]


def _tokens(attrs: Attrs) -> Callable[[str], list[str]]:
    """How a text is cut into tokens."""
    separators, expression = attrs.get("separators"), attrs.get("tokenexp")
    least = max(attrs.get("mincharnum", 1), 1)
    if (separators is None) == (expression is None):
        raise ModelError("Tokenizer needs either separators or a tokenexp")
    if expression is None and list(separators or ()) == [""]:
        return list
    if expression is None:
        patterns = [re.compile(s) for s in separators or ()]
        return lambda text: _cut(text, patterns, least)
    pattern = re.compile(expression)
    if pattern.groups:
        return lambda text: [t for m in pattern.finditer(text) if len(t := m[0]) >= least]
    if least == 1:
        return lambda text: list(filter(None, pattern.findall(text)))
    return lambda text: [t for t in pattern.findall(text) if len(t) >= least]


def _cut(text: str, separators: Sequence[re.Pattern[str]], least: int) -> list[str]:
    """A text cut by one separator after the other; what is too short is dropped."""
    pieces = [text]
    for separator in separators:
        cut: list[str] = []
        for piece in pieces:
            at = 0
            for match in separator.finditer(piece):
                if match.end() > match.start():
                    cut.append(piece[at:match.start()])
                    at = match.end()
            cut.append(piece[at:])
        pieces = cut
    return [p for p in pieces if len(p) >= max(least, 1)]
