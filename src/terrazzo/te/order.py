"""The order in which tensors are computed: each after what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Key = TypeVar("Key")


def topological(roots: Iterable[Key], needs: Callable[[Key], Iterable[Key]]) -> list[Key]:
    """Everything that the roots need, and they themselves, in an order in which it can be made."""
    done: dict[Key, None] = {}
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        key, ready = stack.pop()
        if key in done:
            continue
        if ready:
            done[key] = None
            continue
        stack.append((key, True))
        stack += [(need, False) for need in reversed(list(needs(key))) if need not in done]
    return list(done)
