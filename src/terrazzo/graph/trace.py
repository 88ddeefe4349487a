"""Turns a Python function into a graph by running it on traced values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.errors import ArgumentError
from terrazzo.graph.ir import Graph, TensorType, Value, as_value, trace_scope


def trace(function: Callable[..., Any], types: Sequence[TensorType | None], name: str = "",
          names: Sequence[str] = (), **attrs: Any) -> tuple[Graph, Any]:
    """The graph of `function` for inputs of the given types, and the structure of its result.

    The structure is None for a single value, else the nesting of tuples, lists and dicts with
    positions in place of values, for `pack`.
    """
    values = [None if t is None else Value(t, name=names[i] if i < len(names) else f"x{i}")
              for i, t in enumerate(types)]
    with trace_scope():
        result = function(*values, **attrs)
    leaves: list[Value] = []
    structure = _flatten(result, leaves, name or getattr(function, "__name__", "function"))
    inputs = tuple(v for v in values if v is not None)
    return Graph(name or getattr(function, "__name__", "graph"), inputs, tuple(leaves)), structure


def _flatten(result: Any, leaves: list[Value], name: str) -> Any:
    if isinstance(result, (tuple, list)):
        return type(result)(_flatten(r, leaves, name) for r in result) if not hasattr(
            result, "_fields") else type(result)(*(_flatten(r, leaves, name) for r in result))
    if isinstance(result, dict):
        return {k: _flatten(v, leaves, name) for k, v in result.items()}
    if result is None:
        raise ArgumentError(f"{name} returned None", hint="return the computed tensors")
    leaves.append(as_value(result))
    return len(leaves) - 1


def pack(structure: Any, values: Sequence[Any]) -> Any:
    """Rebuild a function's result from its flat list of values."""
    if isinstance(structure, int):
        return values[structure]
    if isinstance(structure, dict):
        return {k: pack(s, values) for k, s in structure.items()}
    items = [pack(s, values) for s in structure]
    return type(structure)(*items) if hasattr(structure, "_fields") else type(structure)(items)
