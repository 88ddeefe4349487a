"""What this thread is inside of: traces, captures of arrays, the call of an operator."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from terrazzo.graph.ir import Operator, Value

STATE = threading.local()


def tracing() -> bool:
    """Whether this thread is inside a trace."""
    return getattr(STATE, "depth", 0) > 0


class trace_scope:
    """While open, operators make nodes even if all their arguments are arrays."""

    def __enter__(self) -> None:
        STATE.depth = getattr(STATE, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        STATE.depth -= 1


class capture_scope:
    """While open, arrays that are mentioned are looked up by their place in memory.

    Those that are known stand for a value; the others become constants, and are collected.
    """

    def __init__(self, known: Mapping[Any, Value]):
        self.known = known
        self.seen: dict[Any, Any] = {}
        self.uses = 0

    def __enter__(self) -> dict[Any, Any]:
        STATE.captures = [*getattr(STATE, "captures", ()), self]
        return self.seen

    def __exit__(self, *_: object) -> None:
        STATE.captures = STATE.captures[:-1]


def place_of(x: Any) -> Any:
    """Where an array or tensor lies in memory, and how."""
    if hasattr(x, "data_ptr"):
        return x.data_ptr(), tuple(x.shape), tuple(x.stride()), str(x.dtype)
    return x.ctypes.data, x.shape, x.strides, x.dtype.str


def called() -> Operator | None:
    """The operator of ours that is being applied, whatever operators it is made of."""
    found: Operator | None = getattr(STATE, "called", None)
    return found
