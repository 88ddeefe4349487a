"""What a graph is, told by its content, for keys that another process finds again.

A graph's own text names operators and attributes. That tells everything only if the operators are
ours (our sources are a part of every key) and the attributes plain data. Where either is not so,
nothing is told: such a graph is compiled anew in every process, and never mistaken for another.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import numpy as np

from terrazzo.dtypes import DType
from terrazzo.graph.ir import Graph, Operator
from terrazzo.index import IndexExpr, free_vars
from terrazzo.runtime.cache import array_digests

_PACKAGE = __name__.partition(".")[0]
_PLAIN = (bool, int, float, complex, DType, np.generic, np.dtype, type(None), type(...), range)


class Unknowable(Exception):
    """The content of something cannot be told."""


def graph_text(graph: Graph) -> str:
    """A graph's text with all that it leaves out: contents of arrays, inner graphs, bounds."""
    parts = [str(graph)]
    arrays: list[np.ndarray] = []
    sizes = {v for value in graph.inputs for n in value.shape for v in free_vars(n)}
    for node in graph.nodes:
        if not is_ours(node.op):
            raise Unknowable(f"the operator {node.op.name}")
        for value in node.attrs.values():
            if type(value) not in _PLAIN:
                parts += _hidden(value, arrays, sizes)
    # Bounds decide what can be proved, and with that what is compiled.
    parts += sorted(f"{v.name}: {v.lo} to {v.hi}" for v in sizes)
    return "\n".join(parts + array_digests(arrays))


def _hidden(value: Any, arrays: list[np.ndarray], sizes: set[Any]) -> Iterator[str]:
    """What the text of an attribute does not tell; arrays and symbolic sizes are collected."""
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise Unknowable("an array of objects")
        arrays.append(value)
        yield f"{value.dtype}{value.shape}"
    elif isinstance(value, Graph):
        yield graph_text(value)
    elif isinstance(value, IndexExpr):
        sizes |= free_vars(value)
    elif isinstance(value, (str, bytes)):
        yield repr(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _hidden(item, arrays, sizes)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield repr(key)
            yield from _hidden(item, arrays, sizes)
    elif isinstance(value, slice):
        yield from _hidden((value.start, value.stop, value.step), arrays, sizes)
    elif not isinstance(value, (*_PLAIN, enum.Enum)):
        raise Unknowable(f"an attribute of type {type(value).__name__}")


@lru_cache(maxsize=4096)
def is_ours(thing: Any) -> bool:
    """Whether all that decides what an operator or a function does is in our own sources."""
    seen: dict[int, Any] = {}
    waiting = [thing]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen[id(part)] = part
        if isinstance(part, Operator):
            waiting += filter(None, (part.infer, part.expr, part.loops, part.body))
        elif isinstance(part, partial):
            waiting += filter(callable, (part.func, *part.args, *part.keywords.values()))
        elif (getattr(part, "__module__", None) or "").partition(".")[0] != _PACKAGE:
            return False
        else:
            waiting += filter(callable, _closed_over(part))
    return True


def _closed_over(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            if not isinstance(cell.cell_contents, type):
                yield cell.cell_contents
