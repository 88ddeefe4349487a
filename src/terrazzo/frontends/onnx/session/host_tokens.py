"""Tokens on the host: texts cut into strings, or straight into the numbers of those.

Python looks at a text in microseconds and at one more character in nanoseconds. So where numbers
are wanted and the way to cut allows it, all texts are cut as one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from terrazzo.errors import ModelError
from terrazzo.frontends.onnx.session.host_ops import Attrs, host_op, once
from terrazzo.frontends.onnx.session.host_strings import Numbers, strings
from terrazzo.frontends.onnx.session.re2 import python_pattern
from terrazzo.frontends.onnx.strings import STRINGS, TOKENS

# Numbers of all tokens of some texts one after the other, and how many each text has.
Cut = tuple[np.ndarray, np.ndarray]
_ONE_CLASS = re.compile(r"\[[^\[\]\\]+\]\+")  # runs of characters of one class
_BETWEEN = "\0"
_SPACES = "".join(c for c in map(chr, range(0x3001)) if c.isspace())


@host_op("Tokenizer", domain="com.microsoft", makes=True)
def _tokenizer(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    """Texts cut into tokens, a row each, filled up to the longest."""
    x = np.asarray(inputs[0], object)
    cut = once(attrs, "cut", lambda: _tokens(attrs))
    rows = _marked(attrs, list(map(cut, x.reshape(-1).tolist())))
    longest = max(map(len, rows), default=0)
    padding = [attrs["pad_value"]] * longest
    filled = list(chain.from_iterable(chain(row, padding[len(row):]) for row in rows))
    return [strings(filled, (*x.shape, longest))]


@host_op(TOKENS, domain=STRINGS, makes=True)
def _token_numbers(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    """The numbers of the tokens of texts, a row each, filled up to the longest."""
    x = np.asarray(inputs[0], object)
    numbers, alone, cut = once(attrs, "ways", lambda: _ways(attrs))
    if x.size == 1:
        made = np.asarray(alone(x.item()), numbers.dtype)
        return [made[(None,) * x.ndim]]
    found, counts = cut(x.reshape(-1).tolist())
    longest = int(counts.max(initial=0))
    filled = np.full((len(counts), longest), numbers[attrs["pad_value"]], numbers.dtype)
    filled[np.arange(longest) < counts[:, None]] = found
    return [filled.reshape(*x.shape, longest)]


def _ways(attrs: Attrs) -> tuple[Numbers, Callable[[str], Any], Callable[[list[str]], Cut]]:
    """Numbers of tokens, and how one text and many are cut into them."""
    numbers = Numbers(attrs)
    cut, tokens = _all_tokens(attrs, numbers), _tokens(attrs)
    if _by_character(attrs):
        return numbers, lambda text: cut([text])[0], cut
    if attrs.get("mark", 0):
        return numbers, lambda text: list(numbers.each(_marked(attrs, [tokens(text)])[0])), cut
    return numbers, lambda text: list(numbers.each(tokens(text))), cut


def _by_character(attrs: Attrs) -> bool:
    """Whether every character is a token, and nothing else is."""
    return not attrs.get("mark", 0) and max(attrs.get("mincharnum", 1), 1) == 1 and (
        attrs.get("tokenexp") == "." or attrs.get("separators") == [""])


def _all_tokens(attrs: Attrs, numbers: Numbers) -> Callable[[list[str]], Cut]:
    """How texts are cut into the numbers of tokens: all at once, where that comes to the same."""
    least, cut = max(attrs.get("mincharnum", 1), 1), _tokens(attrs)
    expression = python_pattern(attrs.get("tokenexp") or "")

    def one_by_one(texts: list[str]) -> Cut:
        return _numbered(_marked(attrs, list(map(cut, texts))), numbers)

    if _by_character(attrs):
        return _characters(numbers)
    if attrs.get("mark", 0):
        return one_by_one
    if _ONE_CLASS.fullmatch(expression):
        kept = re.compile(expression)
        if not any(map(kept.match, _SPACES)):
            return _words(numbers, kept, least, one_by_one)
    return one_by_one


def _numbered(rows: Sequence[list[str]], numbers: Numbers) -> Cut:
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    return numbers.of(list(chain.from_iterable(rows))), counts


def _words(numbers: Numbers, kept: re.Pattern[str], least: int,
           one_by_one: Callable[[list[str]], Cut]) -> Callable[[list[str]], Cut]:
    """Words made of characters of one class: all others become spaces."""
    spaced = _Spaced(kept)

    def cut(texts: list[str]) -> Cut:
        joined = _BETWEEN.join(texts)
        if joined.count(_BETWEEN) != len(texts) - 1:
            return one_by_one(texts)
        rows = list(map(str.split, joined.translate(spaced).split(_BETWEEN)))
        if least > 1:
            rows = [[t for t in row if len(t) >= least] for row in rows]
        return _numbered(rows, numbers)

    return cut


class _Spaced(dict[int, str]):
    """What becomes of characters: those that match stay, others are spaces."""

    def __init__(self, kept: re.Pattern[str]):
        super().__init__({ord(_BETWEEN): _BETWEEN})
        self.kept = kept

    def __missing__(self, code: int) -> str:
        character = chr(code)
        self[code] = character if self.kept.match(character) else " "
        return self[code]


def _characters(numbers: Numbers) -> Callable[[list[str]], Cut]:
    """Every character a token."""
    known = {ord(w): n for w, n in numbers.items() if len(w) == 1}
    table = np.full(max(known, default=-1) + 2, numbers.other, numbers.dtype)
    table[list(known)] = list(known.values())

    def cut(texts: list[str]) -> Cut:
        codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
        counts = np.fromiter(map(len, texts), np.int64, len(texts))
        return table[np.minimum(codes, len(table) - 1)], counts

    return cut


def _marked(attrs: Attrs, rows: list[list[str]]) -> list[list[str]]:
    """Rows with marks at both ends, where those are wanted and there is any token at all."""
    if not attrs.get("mark", 0) or not any(rows):
        return rows
    return [["\x02", *row, "\x03"] for row in rows]


def _tokens(attrs: Attrs) -> Callable[[str], list[str]]:
    """How a text is cut into tokens."""
    separators, expression = attrs.get("separators"), attrs.get("tokenexp")
    least = max(attrs.get("mincharnum", 1), 1)
    if (separators is None) == (expression is None):
        raise ModelError("Tokenizer needs either separators or a tokenexp")
    if expression is None and list(separators or ()) == [""]:
        return list
    if expression is None:
        patterns = [re.compile(python_pattern(s)) for s in separators or ()]
        return lambda text: _cut(text, patterns, least)
    pattern = re.compile(python_pattern(expression), re.DOTALL)  # as onnxruntime's
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
