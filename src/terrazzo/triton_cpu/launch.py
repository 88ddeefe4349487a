"""From a compiled kernel to a running grid: the native entry and the Python function that calls it.

The entry takes every argument as a 64-bit integer (addresses, numbers, the bits of floats), then
the three sizes of the grid and the number of threads. It hands the programs of the grid to the
thread pool.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from terrazzo.chips.cpu import host
from terrazzo.codegen.llvm import jit
from terrazzo.codegen.llvm.builder import Builder, Module
from terrazzo.codegen.llvm.kernel import write_function
from terrazzo.codegen.llvm.loops import STATUS
from terrazzo.errors import ArgumentError
from terrazzo.knobs import knobs, thread_count
from terrazzo.loop.ir import Function
from terrazzo.runtime import pool
from terrazzo.runtime.trampoline import python_function

ENTRY = "tz_launch"


def kernel_text(function: Function, sources: Sequence[int], pointers: Sequence[bool]) -> str:
    """The LLVM module of a kernel; `sources` names the argument that each buffer comes from."""
    chip = host()
    module = Module(chip.features)
    write_function(module, chip, function)
    params = [("i64", f"a{i}") for i in range(len(pointers))]
    b = Builder(module, ENTRY, [*params, *(("i64", f"g{i}") for i in range(3)), ("i64", "threads")])
    given, rest = b.params[:len(pointers)], b.params[len(pointers):]
    addresses = [b.cast("inttoptr", given[n], "ptr") for n in sources]
    numbers = [value for value, pointer in zip(given, pointers, strict=True) if not pointer]
    b.call("void", f"{function.name}.main", [*addresses, *numbers, *rest])
    b.ret()
    return module.text()


class LoadedKernel:
    """Machine code in this process; it stays callable for as long as this object lives."""

    def __init__(self, code: bytes):
        self.library = jit.load_object(code, pool.symbols(), (ENTRY, STATUS))
        self.status = ctypes.c_int64.from_address(self.library.address(STATUS))
        self.functions: dict[int, Callable[..., Any]] = {}

    def function(self, arguments: int) -> Callable[..., Any]:
        """A Python function of so many integers that runs the kernel."""
        if arguments not in self.functions:
            self.functions[arguments] = python_function(
                self.library.address(ENTRY), 0, arguments)
        return self.functions[arguments]


def _single_bits(value: float) -> int:
    try:
        return int(struct.unpack("<i", struct.pack("<f", value))[0])
    except OverflowError:
        return int(struct.unpack("<i", struct.pack("<f", float("inf") if value > 0 else
                                                   float("-inf")))[0])


def _double_bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _address(value: Any) -> int:
    """Where an argument lies: anything with `data_ptr()`, an address, or None."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value
    pointer = getattr(value, "data_ptr", None)
    if pointer is None:
        raise ArgumentError(f"a kernel was given {type(value).__name__} where it takes a pointer",
                            hint="pass a torch tensor, or anything with a method data_ptr()")
    return int(pointer())


_SPELLING = {"fp64": "double_bits({})", "f64": "double_bits({})"}


def _expression(kind: Any, value: str) -> list[str]:
    """Python code that turns an argument of a kind into integers."""
    if isinstance(kind, (tuple, list)):
        return [e for i, k in enumerate(kind) for e in _expression(k, f"{value}[{i}]")]
    if kind == "constexpr":
        return []
    if kind.startswith("*"):
        return [f"({value}.data_ptr() if hasattr({value}, 'data_ptr') else address({value}))"]
    if kind.startswith(("fp", "bf", "f")):
        return [_SPELLING.get(kind, "single_bits({})").format(value)]
    return [f"int({value})" if kind in ("i1", "u1") else value]


class Launcher:
    """What Triton calls to launch a kernel; one for each compiled kernel."""

    def __init__(self, src: Any, metadata: Any):
        signature: Mapping[Any, Any] = src.signature
        kinds = list(signature.values())
        names = [f"a{i}" for i in range(len(kinds))]
        passed = [e for kind, name in zip(kinds, names) for e in _expression(kind, name)]
        self.count = len(passed) + 4
        # Written out, so that a launch costs one call of Python and one of the kernel.
        text = (f"def run(native, gx, gy, gz, threads, {', '.join(names)}):\n"
                f"    native({', '.join([*passed, 'gx, gy, gz, threads'])})\n")
        scope: dict[str, Any] = {"single_bits": _single_bits, "double_bits": _double_bits,
                                 "address": _address}
        exec(text, scope)
        self.run: Callable[..., None] = scope["run"]
        self.native: Callable[..., Any] | None = None
        self.setting: int | None = None  # of knobs.threads, when the threads were last counted
        self.threads = 1

    def __call__(self, gx: int, gy: int, gz: int, stream: Any, function: LoadedKernel,
                 packed: Any, launch_metadata: Any, enter: Any, leave: Any, *args: Any) -> None:
        if enter is not None:
            enter(launch_metadata)
        if gx > 0 and gy > 0 and gz > 0:
            if self.native is None:
                self.native = function.function(self.count)
            if self.setting != knobs.threads:
                self.setting, self.threads = knobs.threads, thread_count()
            pool.sync()
            self.run(self.native, gx, gy, gz, self.threads, *args)
            if function.status.value:
                function.status.value = 0
                raise MemoryError("a Triton kernel ran out of memory for its tiles")
        if leave is not None:
            leave(launch_metadata)
