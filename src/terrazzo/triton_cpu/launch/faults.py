"""Bad pointers in kernels: the fault is caught, its program ends, and Python hears of it.

A guard in LLVM IR stands between a kernel and the thread pool. Before each chunk of programs it
notes where to go on (setjmp, in a frame that the thread knows), and a handler of SIGSEGV and SIGBUS
sends a thread back there whose fault lies in the code of a kernel: it changes nothing but three
registers of the interrupted thread, so that no lock of anybody is jumped over. All other faults go
to the handler that was there before, such as faulthandler's.

Where the fault was is known by its chunk of programs and its address. What else a user wants to
know, the line, the sanitizer finds.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from types import MappingProxyType

from terrazzo.chips.cpu import pool
from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm import jit
from terrazzo.knobs import knobs
from terrazzo.runtime.cache import default_cache, make_key

_HELD = 64  # faults that may wait to be asked for, a power of two
_FIELDS = 5  # of each: the code, the chunk, how many chunks, the address, the signal
# Linux on x86-64: where a signal's context holds registers, and other numbers of its interface.
_RIP, _RSP, _RBP, _FAULT_ADDRESS = 168, 160, 120, 16
_ACTION_BYTES, _ACTION_FLAGS = 152, 136
_SIGINFO, _ON_STACK = 0x4, 0x08000000
_SIGNALS = {11: "SIGSEGV", 7: "SIGBUS"}


@dataclass(frozen=True)
class Fault:
    """A bad access: by which chunk of how many, to which address."""

    code: int
    chunk: int
    chunks: int
    address: int
    signal: str

    def programs(self, count: int) -> range:
        """The programs of a grid that the chunk had."""
        each = -(-count // self.chunks)
        return range(self.chunk * each, min((self.chunk + 1) * each, count))


class Guard:
    """The loaded guard: its code must outlive every thread, so it is never let go."""

    def __init__(self) -> None:
        exports = ("tz_guarded_for", "tz_guard_init", "tz_faults", "tz_fault_ring", "tz_ranges",
                   "tz_range_count")
        self.library = jit.load_object(_object_code(), pool.symbols(), exports)
        address = self.library.address
        self.symbols = MappingProxyType(
            {**pool.symbols(), "tz_parallel_for": address("tz_guarded_for")})
        self.count = ctypes.c_int64.from_address(address("tz_faults"))
        self.ring = (ctypes.c_int64 * (_HELD * _FIELDS)).from_address(address("tz_fault_ring"))
        self.ranges_at = ctypes.c_void_p.from_address(address("tz_ranges"))
        self.range_count = ctypes.c_int64.from_address(address("tz_range_count"))
        self.lock = threading.Lock()
        self.taken = 0
        self.pending: list[Fault] = []
        self.tables: list[ctypes.Array[ctypes.c_int64]] = []  # a handler may be reading an old one
        self.spans: dict[int, int] = {}
        ctypes.CFUNCTYPE(None)(address("tz_guard_init"))()

    def watch(self, library: jit.Library) -> tuple[int, int] | None:
        """From now on catch faults in a library's code; where it lies."""
        span = library.span
        if span is not None:
            begin, size = span
            with self.lock:
                self.spans[begin] = begin + size
                self._publish()
            weakref.finalize(library, self._forget, begin)
        return span

    def _forget(self, begin: int) -> None:
        with self.lock:
            self.spans.pop(begin, None)
            self._publish()

    def _publish(self) -> None:
        flat = [n for pair in self.spans.items() for n in pair]
        table = (ctypes.c_int64 * max(len(flat), 1))(*flat)
        self.tables = [*self.tables[-8:], table]
        self.range_count.value = 0
        self.ranges_at.value = ctypes.addressof(table)
        self.range_count.value = len(self.spans)

    def found(self, span: tuple[int, int]) -> Fault | None:
        """The fault of a kernel that lies somewhere, if it had one since last asked."""
        begin, size = span
        with self.lock:
            while self.taken < self.count.value:
                at = self.taken % _HELD * _FIELDS
                code, chunk, chunks, address, signal = self.ring[at: at + _FIELDS]
                self.pending.append(Fault(code, chunk, chunks, address,
                                          _SIGNALS.get(signal, str(signal))))
                self.taken += 1
            for fault in self.pending:
                if begin <= fault.code < begin + size:
                    self.pending.remove(fault)
                    return fault
        return None


@cache
def guard() -> Guard | None:
    """The guard, where there is one for this machine and it is wanted."""
    if not knobs.catch_faults or sys.platform != "linux" or os.uname().machine != "x86_64":
        return None
    return Guard()


def _object_code() -> bytes:
    text, chip = guard_ir(), host()
    store, key = default_cache(), make_key("guard", text, chip=chip)
    code = store.get(key)
    if code is None:
        code = jit.compile_object(text, chip)
        store.put(key, code)
    return code


def guard_ir() -> str:
    """The guard as LLVM IR."""
    return Template(Path(__file__).with_name("guard.ll").read_text()).substitute(
        RING_FIELDS=_HELD * _FIELDS, HELD=_HELD, FIELDS=_FIELDS, ACTION_BYTES=_ACTION_BYTES,
        ACTION_FLAGS=_ACTION_FLAGS, FLAGS=_SIGINFO | _ON_STACK, RIP=_RIP, RSP=_RSP, RBP=_RBP,
        FAULT_ADDRESS=_FAULT_ADDRESS)

