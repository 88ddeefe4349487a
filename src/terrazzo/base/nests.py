"""Nests of tuples, lists and dicts: what functions take and give besides single tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def mapped(tree: Any, function: Callable[[Any], Any], none: bool = False) -> Any:
    """The same nest with every leaf replaced; None stays None unless it counts as a leaf."""
    if isinstance(tree, (tuple, list)):
        items = [mapped(item, function, none) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        return {k: mapped(v, function, none) for k, v in tree.items()}
    return tree if tree is None and not none else function(tree)


def leaves(tree: Any, none: bool = False) -> list[Any]:
    """The leaves of a nest in order."""
    found: list[Any] = []
    mapped(tree, found.append, none)
    return found


def flatten(tree: Any, found: list[Any]) -> Any:
    """The nest with positions in place of its leaves, which are added to `found`; see `pack`."""

    def place(leaf: Any) -> int:
        found.append(leaf)
        return len(found) - 1

    return mapped(tree, place)


def pack(structure: Any, values: Sequence[Any]) -> Any:
    """Values in the nest that `flatten` took them from."""
    if isinstance(structure, int):
        return values[structure]
    return mapped(structure, values.__getitem__)


__all__ = ["flatten", "leaves", "mapped", "pack"]
