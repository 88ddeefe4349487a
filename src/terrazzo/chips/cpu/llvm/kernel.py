"""From Loop IR functions to machine code: the module's text, its object, a callable."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

from terrazzo.chips.cpu.llvm import jit
from terrazzo.chips.cpu.llvm.builder import HANDS_ON, Builder, Module
from terrazzo.chips.cpu.llvm.loops import STATUS, LoopEmitter
from terrazzo.chips.spec import ChipSpec
from terrazzo.loop.ir import Function


def llvm_text(functions: Sequence[Function], chip: ChipSpec) -> str:
    """The LLVM IR of some kernels as one module."""
    module = Module(chip.features)
    for function in functions:
        write_function(module, chip, function)
        write_entry(module, function)
    return module.text()


def write_function(module: Module, chip: ChipSpec, function: Function) -> None:
    """Write `void name.main(pointers..., sizes..., i64 threads)`."""
    module.global_(STATUS, "i64", "0", linkage="")
    LoopEmitter(module, chip, function.name).function(function)


def write_entry(module: Module, function: Function) -> None:
    """Write `void name(ptr args, i64 threads)`; args holds the pointers, then the sizes."""
    b = Builder(module, function.name, [("ptr", "args"), ("i64", "threads")], attrs=HANDS_ON)
    types = ["ptr"] * len(function.params) + ["i64"] * len(function.dims)
    loaded = [b.load(ty, b.gep("i64", b.params[0], i), 8) for i, ty in enumerate(types)]
    b.call("void", f"{function.name}.main", [*loaded, b.params[1]])
    b.ret()


@dataclass
class Kernel:
    """A loaded kernel: call it with addresses of buffers and values of sizes."""

    function: Function
    library: jit.Library
    _entry: object = field(init=False)

    def __post_init__(self) -> None:
        prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
        self._entry = prototype(self.library.address(self.function.name))

    def __call__(self, pointers: Sequence[int], dims: Sequence[int] = (), threads: int = 1) -> None:
        slots = (ctypes.c_int64 * (len(pointers) + len(dims)))(*pointers, *dims)
        self._entry(slots, threads)  # type: ignore[operator]


def compile_function(function: Function, chip: ChipSpec, symbols: dict[str, int] | None = None
                     ) -> Kernel:
    """Compile and load one kernel; `symbols` gives the addresses of the runtime's functions."""
    obj = jit.compile_object(llvm_text([function], chip), chip)
    return Kernel(function, jit.load_object(obj, symbols or {}, [function.name]))
