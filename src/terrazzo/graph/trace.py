"""Turns a Python function into a graph by running it on traced values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.base.nests import flatten
from terrazzo.errors import ArgumentError
from terrazzo.graph.applying import as_value
from terrazzo.graph.ir import Graph, TensorType, Value
from terrazzo.graph.reach import collecting
from terrazzo.graph.scopes import trace_scope


def trace(function: Callable[..., Any], types: Sequence[TensorType | None], name: str = "",
          names: Sequence[str] = (), **attrs: Any) -> tuple[Graph, Any]:
    """The graph of `function` for inputs of the given types, and the structure of its result.

    The structure is the nest of tuples, lists and dicts with positions in place of values, for
    `pack`; None may stand inside for what there is not.
    """
    values = [None if t is None else Value(t, name=names[i] if i < len(names) else f"x{i}")
              for i, t in enumerate(types)]
    with trace_scope(), collecting():  # what is heard here is of this graph, which may not run
        result = function(*values, **attrs)
    if result is None:
        raise ArgumentError(f"{name or getattr(function, '__name__', 'function')} returned None",
                            hint="return the computed tensors")
    leaves: list[Any] = []
    structure = flatten(result, leaves)
    inputs = tuple(v for v in values if v is not None)
    return Graph(name or getattr(function, "__name__", "graph"), inputs,
                 tuple(map(as_value, leaves))), structure
