"""Recursion without the stack: walks over graphs, expressions and statements of any depth.

    def depth(tree):
        below = []
        for child in tree.children:
            below.append((yield depth(child)))
        return 1 + max(below, default=0)

    unwind(depth(tree))

A walk is written as the recursive function that it is, but as a generator: where it would call
itself it yields the call, and gets the answer. `unwind` keeps the calls on a list, so that a
program may be as deep as it likes; Python's own stack ends after a thousand.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")
Walk = Generator["Walk[Any]", Any, T]


def unwind(walk: Walk[T]) -> T:
    """What a walk answers, once all the walks that it asks for are done."""
    stack: list[Walk[Any]] = [walk]
    answer: Any = None
    while True:
        try:
            stack.append(stack[-1].send(answer))
            answer = None
        except StopIteration as done:
            stack.pop()
            answer = done.value
            if not stack:
                return answer
