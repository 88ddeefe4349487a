"""Python functions that call native code directly: a fifth of the cost of a call by way of ctypes.

A trampoline is a C function in CPython's METH_FASTCALL convention, written in LLVM IR: it takes
addresses (or array objects) and the number of threads, lets go of the interpreter's lock, and calls
the native function whose address it was made with. There is one for each number of arguments.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from terrazzo.chips.cpu import host
from terrazzo.codegen.llvm import jit
from terrazzo.codegen.llvm.program import MOST_ARGUMENTS
from terrazzo.runtime.cache import default_cache, make_key

_METH_FASTCALL = 0x80


class _MethodDef(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = [("name", ctypes.c_char_p), ("function", ctypes.c_void_p),
                ("flags", ctypes.c_int), ("doc", ctypes.c_char_p)]


def python_function(address: int, count: int, objects: bool) -> Callable[..., Any] | None:
    """A function of `count` addresses (or objects) and a number of threads; None if too many.

    It calls `void f(ptr x count, ptr arena, i64 threads)` at `address` with no arena.
    """
    if count > MOST_ARGUMENTS:
        return None
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.argtypes, make.restype = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p], (
        ctypes.py_object)
    function: Callable[..., Any] = make(ctypes.addressof(_method(count, objects)), address, None)
    return function


@lru_cache(maxsize=None)
def _method(count: int, objects: bool) -> _MethodDef:
    address = _library().address(_name(count, objects))
    return _MethodDef(b"native", address, _METH_FASTCALL, None)


@lru_cache(maxsize=1)
def _library() -> jit.Library:
    text = trampolines_ir()
    cache, key = default_cache(), make_key("trampolines", text)
    code = cache.get(key)
    if code is None:
        code = jit.compile_object(text, host())
        cache.put(key, code)
    names = [_name(count, objects) for count in _COUNTS for objects in (False, True)]
    return jit.load_object(code, exports=names)


_COUNTS = range(1, MOST_ARGUMENTS + 1)


def _name(count: int, objects: bool) -> str:
    return f"tz_trampoline_{'objects' if objects else 'addresses'}_{count}"


def trampolines_ir() -> str:
    """The module of all trampolines."""
    parts = ["declare ptr @PyLong_AsVoidPtr(ptr)", "declare i64 @PyLong_AsLongLong(ptr)",
             "declare ptr @PyEval_SaveThread()", "declare void @PyEval_RestoreThread(ptr)",
             "declare void @Py_IncRef(ptr)"]
    parts += [_trampoline_ir(count, objects) for count in _COUNTS for objects in (False, True)]
    return "\n".join(parts)


def _trampoline_ir(count: int, objects: bool) -> str:
    lines = [f"define ptr @{_name(count, objects)}(ptr %self, ptr %args, i64 %nargs) {{",
             "  %target = call ptr @PyLong_AsVoidPtr(ptr %self)"]
    for i in range(count + 1):
        lines += [f"  %slot{i} = getelementptr ptr, ptr %args, i64 {i}",
                  f"  %object{i} = load ptr, ptr %slot{i}"]
    for i in range(count):
        if not objects:
            lines.append(f"  %address{i} = call ptr @PyLong_AsVoidPtr(ptr %object{i})")
    values = ", ".join(f"ptr %{'object' if objects else 'address'}{i}" for i in range(count))
    lines += [f"  %threads = call i64 @PyLong_AsLongLong(ptr %object{count})",
              "  %state = call ptr @PyEval_SaveThread()",
              f"  call void %target({values}, ptr null, i64 %threads)",
              "  call void @PyEval_RestoreThread(ptr %state)",
              # A Python function must answer with something: the last argument is at hand.
              f"  call void @Py_IncRef(ptr %object{count})",
              f"  ret ptr %object{count}", "}"]
    return "\n".join(lines)
