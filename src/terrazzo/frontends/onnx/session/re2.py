"""Patterns as RE2 understands them, which ONNX means, written for Python's module re.

In RE2 `\\w`, `\\d`, `\\s` and `\\b` are of ASCII, and classes hold classes of POSIX by their names.
"""

from __future__ import annotations

import re

# What ranges of a class in Python hold the same characters.
_POSIX = {
    "alnum": "0-9A-Za-z", "alpha": "A-Za-z", "ascii": r"\x00-\x7f", "blank": r"\t ",
    "cntrl": r"\x00-\x1f\x7f", "digit": "0-9", "graph": "!-~", "lower": "a-z", "print": " -~",
    "punct": r"!-/:-@\[-`{-~", "space": r"\t\n\v\f\r ", "upper": "A-Z", "word": "0-9A-Za-z_",
    "xdigit": "0-9A-Fa-f",
}
_PERL = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t\n\f\r "}
_OUTSIDE = {"b": r"(?a:\b)", "B": r"(?a:\B)", "z": r"\Z"}
_PART = re.compile(  # a class, or an escape outside of one
    r"(?P<start>\[\^?\]?)(?P<items>(?:\\.|\[:\^?\w+:\]|[^\]\\])*)\]|\\(?P<escape>.)", re.DOTALL)
_ITEM = re.compile(r"\[:(?P<not>\^?)(?P<name>\w+):\]|\\(?P<escape>.)|\[", re.DOTALL)


def python_pattern(pattern: str) -> str:
    """A pattern of RE2's for Python."""
    return _PART.sub(_part, pattern)


def _part(found: re.Match[str]) -> str:
    if found["start"]:
        return found["start"] + _ITEM.sub(_item, found["items"]) + "]"
    letter = found["escape"]
    ranges = _PERL.get(letter.lower())
    if ranges is None:
        return _OUTSIDE.get(letter, found[0])
    return f"[{ranges}]" if letter.islower() else f"[^{ranges}]"


def _item(found: re.Match[str]) -> str:
    """One item of a class: those of Python know neither names nor ranges that are left out."""
    if found["name"]:
        if found["name"] not in _POSIX:
            raise re.error(f"RE2 has no class {found[0]}")
        ranges = _POSIX[found["name"]]
        return _all_but(ranges) if found["not"] else ranges
    letter = found["escape"] or "["
    perl = _PERL.get(letter.lower())
    if perl is None:
        return f"\\{letter}"
    return perl if letter.islower() else _all_but(perl)


def _all_but(ranges: str) -> str:
    held = re.compile(f"[{ranges}]")
    others = (c for c in range(128) if not held.match(chr(c)))
    return "".join(f"\\x{c:02x}" for c in others) + "\x80-\U0010ffff"
