"""Shorthands for kernels that are built whole as Loop IR: loops, pieces of a row, digits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.index import Index, Var, bounds, ceildiv, minimum
from terrazzo.loop.ir import For, Stmt, block


def loop(name: str, count: Index, body: Callable[[Any], Stmt], kind: str = "serial",
         first: Index = 0, grain: int = 1) -> Stmt:
    """A loop from `first` below `count`; its variable knows its bounds."""
    low, last = bounds(first)[0] or 0, count - 1
    var = Var(name, low, max(last, low) if isinstance(last, int) else last)
    return For(var, first, count, body(var), kind, grain)


def pieces(size: Index, width: int, act: Callable[[Index, int, Index | None], Stmt]) -> Stmt:
    """All columns, at most `width` at a time: act(first, width, how many of them there are)."""
    if not isinstance(size, int):
        return loop("column", ceildiv(size, width), lambda c: act(
            c * width, width, minimum(width, size - c * width)))
    whole, rest = divmod(size, width)
    return block(
        loop("column", whole, lambda c: act(c * width, width, None)) if whole else None,
        act(whole * width, rest, None) if rest else None)


def digits(number: Index, sizes: Sequence[Index]) -> list[Index]:
    """The places along axes of these sizes that a running number stands for."""
    found: list[Index] = []
    for size in reversed(sizes[1:]):
        found.append(number % size)
        number = number // size
    return [number, *reversed(found)]
