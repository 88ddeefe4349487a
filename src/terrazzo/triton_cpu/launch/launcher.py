"""From a compiled kernel to a running grid: the native entry and the Python function that calls it.

The entry takes every argument as a 64-bit integer (addresses, numbers, the bits of floats), then
the three sizes of the grid and the number of threads. It hands the programs of the grid to the
thread pool.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from terrazzo.chips.cpu import pool
from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm import jit
from terrazzo.chips.cpu.llvm.builder import HANDS_ON, Builder, Module
from terrazzo.chips.cpu.llvm.kernel import write_function
from terrazzo.chips.cpu.llvm.loops import STATUS
from terrazzo.chips.cpu.trampoline import python_function
from terrazzo.errors import ArgumentError, KernelFault
from terrazzo.knobs import knobs, thread_count
from terrazzo.triton_cpu.frontend.lower import Lowered
from terrazzo.triton_cpu.frontend.pointers import ANYWHERE
from terrazzo.triton_cpu.launch.faults import Fault, guard

ENTRY = "tz_launch"
ZERO = "tz_zero"
# Programs that wait for each other run all at once up to this number. Beyond it, and in all other
# kernels, they start in the order of their numbers: one may wait for those before it.
MOST_WAITING = 64
SHORT = 0.1  # seconds: such a launch can be run again under the sanitizer


def kernel_text(lowered: Lowered) -> str:
    """The LLVM module of a kernel."""
    chip = host()
    module = Module(chip.features)
    write_function(module, chip, lowered.function)
    params = [("i64", f"a{i}") for i in range(lowered.arguments)]
    b = Builder(module, ENTRY, [*params, *(("i64", f"g{i}") for i in range(3)), ("i64", "threads")],
                attrs=HANDS_ON)
    given, rest = b.params[:lowered.arguments], b.params[lowered.arguments:]
    # Address zero is loaded, for LLVM takes memory after a null pointer that it knows for absent.
    zero = b.load("i64", module.global_(ZERO, "i64", "0", linkage=""), 8)
    addresses = [b.cast("inttoptr", zero if n == ANYWHERE else given[n], "ptr")
                 for n in lowered.buffers]
    numbers = [given[n] for n in lowered.numbers]
    b.call("void", f"{lowered.function.name}.main", [*addresses, *numbers, *rest])
    b.ret()
    return module.text()


class LoadedKernel:
    """Machine code in this process; it stays callable for as long as this object lives."""

    def __init__(self, code: bytes):
        self.guard = guard()
        self.library = jit.load_object(
            code, pool.symbols() if self.guard is None else self.guard.symbols, (ENTRY, STATUS))
        self.span = None if self.guard is None else self.guard.watch(self.library)
        self.status = ctypes.c_int64.from_address(self.library.address(STATUS))
        self.functions: dict[int, Callable[..., Any]] = {}

    def fault(self) -> Fault | None:
        """The bad access that the last launch of this kernel made."""
        watch = self.guard
        if watch is None or self.span is None or not (
                watch.count.value != watch.taken or watch.pending):
            return None
        return watch.found(self.span)

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
    return int(pointer()) or _nowhere(value)


def _nowhere(value: Any) -> int:
    """The address zero, which only tensors without elements may have."""
    check_device(value)
    if getattr(value, "_is_zerotensor", bool)():
        raise ArgumentError("a kernel was given a tensor that is zero without having memory",
                            hint="pass torch.zeros_like(x)")
    return 0


def check_device(value: Any) -> None:
    """Refuse a tensor of another device: reading it would end the process."""
    device = getattr(value, "device", None)
    if getattr(device, "type", "cpu") != "cpu":
        raise ArgumentError(f"a kernel for the CPU was given a tensor on the device {device}",
                            hint="move it with .cpu(), or unset TRITON_DEFAULT_BACKEND on a "
                                 "machine with a GPU")


_SPELLING = {"fp64": "double_bits({})", "f64": "double_bits({})"}


def expression(kind: Any, value: str, address: str = "{}.data_ptr()") -> list[str]:
    """Python code that turns an argument of a kind into integers."""
    if isinstance(kind, (tuple, list)):
        return [e for i, k in enumerate(kind) for e in expression(k, f"{value}[{i}]", address)]
    if kind == "constexpr":
        return []
    if kind.startswith("tensordesc"):
        return _descriptor(kind, value, address)
    if kind.startswith("*"):
        return [address.format(value)]
    if kind.startswith(("fp", "bf", "f")):
        return [_SPELLING.get(kind, "single_bits({})").format(value)]
    return [f"int({value})" if kind in ("i1", "u1") else value]


def _descriptor(kind: str, value: str, address: str) -> list[str]:
    """Python code for a tensor descriptor that was made on the host.

    Triton's pass turns it into pointer, shape, strides and flags; its front end asks for the shape
    and the strides once more.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    rank = kind.partition("[")[2].partition("]")[0].count(",") + 1
    extents = [f"{value}.{part}[{i}]" for part in ("shape", "strides") for i in range(rank)]
    flags = [f"{value}.padding == 'nan'"]
    if "round_f32_to_tf32" in TensorDescriptor.__dataclass_fields__:  # since 3.7
        flags.append(f"{value}.round_f32_to_tf32")
    return [*expression("*", f"{value}.base", address), *extents, *flags, *extents]


class Launcher:
    """What Triton calls to launch a kernel; one for each compiled kernel."""

    sanitizable = True  # not under the sanitizer already, nor with more arguments than given

    def __init__(self, src: Any, metadata: Any):
        signature: Mapping[Any, Any] = src.signature
        kinds = list(signature.values())
        names = [f"a{i}" for i in range(len(kinds))]
        quick, careful = ([e for kind, name in zip(kinds, names)
                           for e in expression(kind, name, address)]
                          for address in ("({0}.data_ptr() or nowhere({0}))", "address({})"))
        rest = ["gx, gy, gz, threads"]
        if getattr(metadata, "reports", None):
            names.append("area")
            rest.insert(0, "area")
        self.count = len(quick) + len(rest) + 3
        self.waits = bool(getattr(metadata, "waits", False))
        self.kernel = str(getattr(metadata, "name", ""))
        self.source = getattr(src, "fn", None)  # a kernel may come from a file of TTIR
        # Written out, so that a launch costs one call of Python and one of the kernel.
        text = (f"def run(native, gx, gy, gz, threads, {', '.join(names)}):\n"
                f"    try:\n        native({', '.join([*quick, *rest])})\n"
                f"    except AttributeError:  # an address, or None\n"
                f"        native({', '.join([*careful, *rest])})\n")
        scope: dict[str, Any] = {"single_bits": _single_bits, "double_bits": _double_bits,
                                 "address": _address, "nowhere": _nowhere}
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
                for value in args:  # later ones come from the same place
                    check_device(value)
                self.native = function.function(self.count)
            if self.setting != knobs.threads:
                self.setting, self.threads = knobs.threads, thread_count()
            begin = time.perf_counter()
            programs = gx * gy * gz if self.waits else 0
            if 1 < programs <= max(MOST_WAITING, self.threads):
                with pool.crowd(programs):
                    self.run(self.native, gx, gy, gz, programs, *args)
            else:
                pool.sync()
                self.run(self.native, gx, gy, gz, self.threads, *args)
            if function.status.value:
                function.status.value = 0
                raise MemoryError("a Triton kernel ran out of memory for its tiles")
            fault = function.fault()
            if fault is not None:
                raise self.explained(fault, (gx, gy, gz), args, time.perf_counter() - begin)
        elif min(gx, gy, gz) < 0:
            raise ArgumentError(f"a kernel was launched on a grid of ({gx}, {gy}, {gz}) programs",
                                hint="sizes of a grid are zero (nothing runs) or more; "
                                     "triton.cdiv(n, BLOCK) rounds up")
        if leave is not None:
            leave(launch_metadata)

    def explained(self, fault: Fault, grid: tuple[int, int, int], args: Sequence[Any],
                  seconds: float) -> KernelFault:
        """The error for a bad access; of short launches the sanitizer finds the line."""
        if seconds < SHORT and not self.waits and self.sanitizable and self.source is not None:
            with knobs.override(sanitize=True):
                try:
                    self.source.run(*args, grid=grid, warmup=False)
                except KernelFault as found:
                    return found
        x, y, z = grid
        programs = fault.programs(x * y * z)
        first, last = (f"({n % x}, {n // x % y}, {n // (x * y)})"
                       for n in (programs[0], programs[-1]))
        where = f"program {first}" if len(programs) == 1 else f"one of programs {first} to {last}"
        # Of addresses that no memory can have, the processor does not say which it was.
        place = f"the address {fault.address:#x}," if fault.address else "an address"
        return KernelFault(
            f"`{self.kernel}` touched {place} where there is no memory ({fault.signal}), in "
            f"{where}; what it has written is undefined",
            hint="TZ_SANITIZE=1 names the line and the index")
