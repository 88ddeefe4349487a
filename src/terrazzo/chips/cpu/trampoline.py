"""Python functions that call native code directly, at a fifth of the cost of ctypes.

A trampoline is a C function in CPython's METH_FASTCALL convention, written in LLVM IR: it takes
objects and integers, lets go of the interpreter's lock, and calls the native function whose address
it was made with. There is one for each number of arguments, made when first needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm import jit
from terrazzo.runtime.cache import default_cache, make_key

_METH_FASTCALL = 0x80


class _MethodDef(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = [("name", ctypes.c_char_p), ("function", ctypes.c_void_p),
                ("flags", ctypes.c_int), ("doc", ctypes.c_char_p)]


def python_function(address: int, objects: int, integers: int) -> Callable[..., Any]:
    """A function of some objects and then some integers, which calls the code at `address`.

    The code gets the objects' own addresses and the integers as 64-bit numbers, addresses among
    them, and returns nothing; the last integer comes back. Whatever has `__index__` is an integer;
    for anything else the call raises TypeError, and the code does not run.
    """
    return _trampoline(objects, integers).function(address)


def native(text: str, name: str) -> Callable[..., Any]:
    """A function whose code is a text of LLVM's, entered as METH_FASTCALL's are."""
    return _native(text, name).function(None)


class _Method:
    """Loaded code of a method: it and its description must outlive every function made of it."""

    def __init__(self, text: str, name: str):
        chip = host()
        store, key = default_cache(), make_key("trampoline", text, chip=chip)
        code = store.get(key)
        if code is None:
            code = jit.compile_object(text, chip)
            store.put(key, code)
        self.library = jit.load_object(code, exports=(name,))
        self.method = _MethodDef(b"native", self.library.address(name), _METH_FASTCALL, None)

    def function(self, own: Any) -> Callable[..., Any]:
        """What Python calls; the code gets `own` as its first argument."""
        make = ctypes.pythonapi.PyCFunction_NewEx
        make.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
        make.restype = ctypes.py_object
        function: Callable[..., Any] = make(ctypes.addressof(self.method), own, None)
        return function


@cache
def _trampoline(objects: int, integers: int) -> _Method:
    return _Method(trampoline_ir(objects, integers), "tz_trampoline")


@cache
def _native(text: str, name: str) -> _Method:
    return _Method(text, name)


def trampoline_ir(objects: int, integers: int) -> str:
    """The module of one trampoline."""
    count = objects + integers
    lines = ["declare ptr @PyLong_AsVoidPtr(ptr)", "declare ptr @PyEval_SaveThread()",
             "declare void @PyEval_RestoreThread(ptr)", "declare void @Py_IncRef(ptr)",
             "declare i64 @PyLong_AsUnsignedLongLongMask(ptr)", "declare ptr @PyErr_Occurred()",
             "define ptr @tz_trampoline(ptr %self, ptr %args, i64 %nargs) {",
             "  %target = call ptr @PyLong_AsVoidPtr(ptr %self)"]
    for i in range(count):
        lines += [f"  %slot{i} = getelementptr ptr, ptr %args, i64 {i}",
                  f"  %object{i} = load ptr, ptr %slot{i}"]
    for i in range(objects, count):
        lines.append(f"  %integer{i} = call i64 @PyLong_AsUnsignedLongLongMask(ptr %object{i})")
    values = [f"ptr %object{i}" if i < objects else f"i64 %integer{i}" for i in range(count)]
    lines += ["  %error = call ptr @PyErr_Occurred()",
              "  %wrong = icmp ne ptr %error, null",
              "  br i1 %wrong, label %refuse, label %run",
              "refuse:",
              "  ret ptr null",
              "run:",
              "  %state = call ptr @PyEval_SaveThread()",
              f"  call void %target({', '.join(values)})",
              "  call void @PyEval_RestoreThread(ptr %state)",
              # A Python function must answer with something: the last argument is at hand.
              f"  call void @Py_IncRef(ptr %object{count - 1})",
              f"  ret ptr %object{count - 1}", "}"]
    return "\n".join(lines)
