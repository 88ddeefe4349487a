"""One class per way a user can go wrong; each message says what happened, where, and what to do.

Every class derives from `TerrazzoError`, and also from the builtin exception that a Python
programmer would expect to catch, so `except ValueError` keeps working around a shape mistake.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any, ClassVar

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def is_ours(frame: FrameType) -> bool:
    """Tell whether a stack frame belongs to terrazzo itself."""
    return frame.f_code.co_filename.startswith(_PACKAGE)


def is_users(frame: FrameType) -> bool:
    """Tell whether a stack frame belongs to code that a user of terrazzo wrote."""
    return _is_users_file(frame.f_code.co_filename)


@lru_cache(maxsize=4096)
def _is_users_file(file: str) -> bool:
    if file.startswith((_PACKAGE, "<frozen")):
        return False
    # A value may reach us through functools, contextlib or numpy; the user did not write those.
    if f"{os.sep}site-packages{os.sep}numpy{os.sep}" in file:
        return False
    return not (file.startswith(_STDLIB) and "site-packages" not in file)


_located = threading.local()


@contextmanager
def located(where: str) -> Iterator[None]:
    """While open, what is traced comes from a place that is no line of Python: a model's node."""
    before = getattr(_located, "where", None)
    _located.where = where
    try:
        yield
    finally:
        _located.where = before


def user_location() -> str | None:
    """Name the innermost line of the user's own code on the stack, as "file.py:17 in f"."""
    where: str | None = getattr(_located, "where", None)
    if where is not None:
        return where
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    if frame is None:
        return None
    file = frame.f_code.co_filename
    here = os.getcwd() + os.sep
    name = frame.f_code.co_name
    place = f"{file.removeprefix(here)}:{frame.f_lineno}"
    return place if name == "<module>" else f"{place} in {name}"


class TerrazzoError(Exception):
    """The root of every error that terrazzo raises on purpose."""

    advice: ClassVar[str | None] = None  # the hint, when the one who raises gives none
    locates_user: ClassVar[bool] = False  # fill in `where` from the stack when not given

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where if where or not self.locates_user else user_location()
        self.hint = hint or self.advice

    def came_from(self, operator: str) -> None:
        """Say which operator was called, unless the message names it."""
        if not re.search(rf"\b{re.escape(operator)}\b", self.message):
            self.message = f"{operator}: {self.message}"

    def __str__(self) -> str:
        text = self.message
        if self.where:
            text += f"\n  where: {self.where}"
        if self.hint:
            text += f"\n  try: {self.hint}"
        return text


# Shapes, types and arguments: what the user passed does not fit the operator.


class ShapeError(TerrazzoError, ValueError):
    """The sizes of a tensor do not fit what an operator needs."""


class RankError(ShapeError):
    """A tensor has the wrong number of dimensions."""


class BroadcastError(ShapeError):
    """Two shapes cannot be stretched to a common one."""

    advice = "sizes must be equal or 1, counted from the last axis; reshape or add axes of size 1"


class AxisError(TerrazzoError, ValueError, IndexError):
    """An axis is outside the dimensions of a tensor, or is named twice."""


class IndexOutOfRange(TerrazzoError, IndexError):
    """An index points outside a tensor."""


class DTypeError(TerrazzoError, TypeError):
    """A data type is unknown, or does not fit what an operator needs."""


class UnsupportedDType(DTypeError, NotImplementedError):
    """A data type is known, but this operator or chip has no code for it."""


class ArgumentError(TerrazzoError, TypeError):
    """An operator was called with a missing, extra or ill-typed argument."""


class WrongDevice(ArgumentError, ValueError):
    """A kernel was given a tensor of another device; Triton's own drivers say ValueError too."""


class NotContiguous(TerrazzoError, ValueError):
    """A buffer's memory layout is not one that compiled code can read in place."""

    advice = "pass a copy in row-major order, for example np.ascontiguousarray(x)"


# Operators and tracing: the user's program cannot become a graph.


class UnknownOperator(TerrazzoError, KeyError):
    """No operator of that name is registered."""


class UnsupportedOperator(TerrazzoError, NotImplementedError):
    """An operator is known by name, but nothing here can run it."""


class TracedControlFlow(TerrazzoError, TypeError):
    """Python asked for the value of a traced tensor, which has no value until it runs.

    `if`, `while`, `for`, `bool()`, `int()`, `float()` and conversion to numpy all do so.
    """

    advice = (
        "choose by element with tz.where, branch with tz.cond, repeat with tz.while_loop, "
        "or walk over an axis with tz.scan"
    )
    locates_user = True


class NotDifferentiable(TerrazzoError, TypeError):
    """A gradient was asked for through an operator or a data type that has none."""


class GradientError(TerrazzoError, ValueError):
    """A gradient was asked for in a way that makes no sense, such as of a non-scalar output."""


# Compiling: the program is sound, but cannot be turned into code as asked.


class ScheduleError(TerrazzoError, ValueError):
    """A schedule does not fit the expression that it is applied to."""


class CodegenError(TerrazzoError, RuntimeError):
    """Code generation met a loop program that it cannot translate."""


class CompileError(TerrazzoError, RuntimeError):
    """The machine-code compiler rejected what was generated."""


class VerifyError(TerrazzoError, AssertionError):
    """Two levels of the compiler disagree about the value of an operator."""

    def __init__(
        self,
        message: str,
        *,
        level: str | None = None,
        operator: str | None = None,
        index: tuple[int, ...] | None = None,
        expected: Any = None,
        got: Any = None,
        where: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, where=where, hint=hint)
        self.level = level
        self.operator = operator
        self.index = index
        self.expected = expected
        self.got = got


# Running: the code is fine, but the machine, a file or a setting is not.


class OutOfMemory(TerrazzoError, MemoryError):
    """A buffer could not be allocated."""


class DeviceError(TerrazzoError, RuntimeError):
    """A chip is missing, or reported a failure."""


class KernelAssertion(TerrazzoError, RuntimeError, AssertionError):
    """A condition that a kernel asserted while it ran did not hold."""


class KernelStuck(TerrazzoError, RuntimeError, TimeoutError):
    """Programs of a kernel waited for each other for longer than the limit."""


class KernelFault(TerrazzoError, RuntimeError):
    """A kernel did with memory what it must not: the sanitizer, or the processor, found it out."""


class CpuFeatureError(DeviceError):
    """Code needs instructions that this processor does not have."""


class CacheError(TerrazzoError, RuntimeError):
    """The compile cache on disk cannot be used."""

    advice = "point TZ_CACHE_DIR at a folder you may write to, or set TZ_CACHE=0"


class ArtifactError(TerrazzoError, ValueError):
    """A saved .tzx file is damaged, too new, or made for another machine."""


class ModelError(TerrazzoError, ValueError):
    """A model is damaged or inconsistent, or was called with what does not fit it."""


class IndexFault(IndexOutOfRange, ModelError, RuntimeError):
    """Compiled code was given an index that points outside a tensor.

    Eager torch says IndexError or RuntimeError, by operator, and onnxruntime that an argument is
    invalid: whatever a program expects catches it.
    """


class KnobError(TerrazzoError, ValueError):
    """A setting has a value that is not allowed, or a name that does not exist."""


class MissingDependency(TerrazzoError, ImportError):
    """An optional package that this feature needs is not installed."""