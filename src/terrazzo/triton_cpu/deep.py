"""Room to compile in: a deep stack, and no search for garbage meanwhile.

A kernel of thousands of statements is that many names inside each other.
"""

from __future__ import annotations

import contextvars
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from terrazzo.base.collection import without_collection
from terrazzo.errors import CompileError

T = TypeVar("T")
STACK = 512 << 20  # bytes, of which only what is used is ever real
DEPTH = 100_000  # calls within each other: 5 KB of the stack each, far more than one takes
LONG = 1000  # lines of a kernel that will hardly do with Python's own stack
_one_at_a_time = threading.Lock()


def with_room(function: Callable[..., T], *args: object, lines: int = 0) -> T:
    """Call a function that may be called twice; the second time with a stack of its own.

    Only few kernels need that, and a thread for each would cost as much as compiling a small one.
    Those of many lines get it at once.
    """
    with without_collection():
        if lines > LONG:
            return _on_a_large_stack(function, *args)
        try:
            return function(*args)
        except RecursionError:
            return _on_a_large_stack(function, *args)


def _on_a_large_stack(function: Callable[..., T], *args: object) -> T:
    results: list[T] = []
    problems: list[BaseException] = []
    context = contextvars.copy_context()

    def work() -> None:
        try:
            results.append(context.run(function, *args))
        except RecursionError:
            problems.append(CompileError(
                "a kernel is too large to compile",
                hint="loop with tl.range where it has tl.static_range, or split it"))
        except BaseException as error:
            problems.append(error)

    with _one_at_a_time:  # both settings are the whole process's
        limit, size = sys.getrecursionlimit(), threading.stack_size(STACK)
        sys.setrecursionlimit(max(limit, DEPTH))
        try:
            thread = threading.Thread(target=work, name="terrazzo-deep")
            with _plain_calls():
                thread.start()
                threading.stack_size(size)
                thread.join()
        finally:
            threading.stack_size(size)
            sys.setrecursionlimit(limit)
    if problems:
        raise problems[0]
    return results[0]


@contextmanager
def _plain_calls() -> Iterator[None]:
    """Calls that nobody looks at, as torch's compiler does while it is active, or after an error.

    Through its hook each is a call of C's, of which Python allows a fixed number from 3.12 on, at
    first 1500. Meanwhile other threads run as they would without that compiler.
    """
    api = ctypes.pythonapi
    names = ("PyInterpreterState_Get", "_PyInterpreterState_GetEvalFrameFunc",
             "_PyInterpreterState_SetEvalFrameFunc", "_PyEval_EvalFrameDefault")
    if sys.version_info < (3, 12) or not all(hasattr(api, name) for name in names):
        yield
        return
    current, get, put, plain = (getattr(api, name) for name in names)
    current.restype = get.restype = ctypes.c_void_p
    get.argtypes, put.argtypes, put.restype = [ctypes.c_void_p], [ctypes.c_void_p] * 2, None
    interpreter, default = current(), ctypes.cast(plain, ctypes.c_void_p).value
    hook = get(interpreter)
    if hook == default:
        yield
        return
    put(interpreter, default)
    try:
        yield
    finally:
        if get(interpreter) == default:  # else another thread has just set it
            put(interpreter, hook)
