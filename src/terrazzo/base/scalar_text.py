"""Scalar expressions as text: `0.5 * x[i, j] * (1 + tanh(...))`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from terrazzo.base.scalar import (
    Call,
    Const,
    FromIndex,
    Item,
    Load,
    Reduce,
    Scalar,
    Tuple,
    Undefined,
    children,
    walk,
)
from terrazzo.base.scalar_table import OPS
from terrazzo.index import Var


def format_scalar(root: Scalar) -> str:
    """One line of text: `0.5 * x[i, j] * (1 + tanh(...))`."""
    return _Printer({}).text(root)[0]


_LONGEST = 300  # nodes of an expression that is printed as one line, shared ones as often as used


def format_lines(root: Scalar) -> list[str]:
    """One line, or one with names for what is shared if it would grow beyond reading."""
    size: dict[int, int] = {}
    for node in walk(root):
        size[id(node)] = 1 + sum(size[id(child)] for child in children(node))
    return [format_scalar(root)] if size[id(root)] <= _LONGEST else format_shared(root)


def format_shared(root: Scalar, used: Callable[[int], str] | None = None) -> list[str]:
    """Text in which what is used more than once has a name; the last line is the value."""
    uses: dict[int, int] = {}
    for node in walk(root):
        for child in children(node):
            uses[id(child)] = uses.get(id(child), 0) + 1
    names: dict[int, str] = {}
    printer, lines = _Printer(names), []
    for node in walk(root):
        if uses.get(id(node), 0) > 1 and isinstance(node, Call) and node.op != "cast":
            text = printer.text(node)[0]
            names[id(node)] = used(len(names)) if used else f"t{len(names)}"
            lines.append(f"{names[id(node)]} = {text}")
    return [*lines, printer.text(root)[0]]


_PRECEDENCE = {"|": 1, "^": 2, "&": 3, "==": 4, "!=": 4, "<": 4, "<=": 4, ">": 4, ">=": 4,
               "<<": 5, ">>": 5, "+": 6, "-": 6, "*": 7, "/": 7, "//": 7, "%": 7, "**": 9}


class _Printer:
    """Writes expressions; `names` are what shared nodes are called that were written before."""

    def __init__(self, names: dict[int, str]):
        self.names = names

    def text(self, root: Scalar) -> tuple[str, int]:
        """The text and how tightly it binds."""
        done: dict[int, tuple[str, int]] = {}
        stack = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if id(node) in done:
                continue
            if id(node) in self.names:
                done[id(node)] = self.names[id(node)], 10
            elif ready:
                done[id(node)] = self.own_text(node, done)
            else:
                stack.append((node, True))
                stack += [(child, False) for child in children(node)]
        return done[id(root)]

    def own_text(self, node: Scalar, done: Mapping[int, tuple[str, int]]) -> tuple[str, int]:
        """The text of a node whose arguments' texts are there."""
        if isinstance(node, Const):
            return format_literal(node.value), 10
        if isinstance(node, Undefined):
            return "undefined", 10
        if isinstance(node, FromIndex):
            return (str(node.index), 10) if isinstance(node.index, (int, Var)) else (
                f"({node.index})", 10)
        if isinstance(node, Load):
            inner = ", ".join(done[id(i)][0] if isinstance(i, Scalar) else str(i)
                              for i in node.indices)
            return f"{node.source.name}[{inner}]", 10
        if isinstance(node, Reduce):
            axes = ", ".join(str(a) for a in node.axes)
            name = node.op if node.reducer is not None else _REDUCE_NAMES[node.op]
            return f"{name}({axes}: {done[id(node.value)][0]})", 10
        if isinstance(node, Tuple):
            return f"({', '.join(done[id(i)][0] for i in node.items)})", 10
        if isinstance(node, Item):
            return f"{done[id(node.value)][0]}.{node.number}", 10
        assert isinstance(node, Call)
        symbol = OPS[node.op].infix
        args = [done[id(a)] for a in node.args]
        if symbol is not None:
            level = _PRECEDENCE[symbol]
            left, right = args
            a = left[0] if left[1] >= level else f"({left[0]})"
            b = right[0] if right[1] > level else f"({right[0]})"
            return f"{a} {symbol} {b}", level
        if node.op == "cast":
            return f"{node.dtype.short}({args[0][0]})", 10
        if node.op == "neg":
            value, level = args[0]
            return (f"-{value}" if level >= 10 else f"-({value})"), 8
        return f"{node.op}({', '.join(text for text, _ in args)})", 10


_REDUCE_NAMES = {"add": "sum", "mul": "prod", "max": "max", "min": "min", "and": "all", "or": "any"}


def format_literal(value: Any) -> str:
    """A number as short as it can be without losing float32's accuracy."""
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    if isinstance(value, complex):
        return str(value)
    text = f"{float(value):.9g}"
    return text if any(c in text for c in ".einf") else text + ".0"
