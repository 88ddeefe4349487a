"""The threads that run the chunks of a kernel: a pool in LLVM IR (pool.ll), called by its code.

    void tz_parallel_for(void (*fn)(void *ctx, int64_t chunk), void *ctx,
                         int64_t n, int64_t max_threads);

calls `fn` once for every chunk from 0 to n - 1 and returns when all have run. `max_threads`
caps the threads of this launch; 0 leaves it to `knobs.threads`. Any number of threads may
launch at once; a launch from inside a chunk runs serially, in the thread that asked.

How it works. Each launch takes one of a few *slots*. What is left of it is one 64-bit word, and
taking a ticket is one atomic operation on that word. A launch of few chunks is a *set*: (chunks in
all, workers allowed, a bit for each chunk that nobody has taken), and whoever clears a bit has
that chunk. Every thread has a share of its own there, the same in each launch of as many chunks,
and takes from others only when its own is done: so the rows that a thread made in one kernel are
in its cache for the next. Of many chunks the word is a *count*: (workers allowed, tickets in all,
next ticket), and a ticket is a compare-and-swap. The caller takes tickets like any worker and then
waits only for tickets that others have taken: a worker that sleeps or comes late is never waited
for. A late worker is harmless too: it decides by the word alone and reads what to call only after
it got a ticket, when the job cannot finish without it; so whatever job the slot then holds, it has
a ticket of that job.
All sets share one cache line and all counts another, which are all that idle workers look at; what
a job calls lies in a line that nobody writes while it runs, and its count of finished tickets in
one more: on many cores a launch costs what its lines travel. Idle workers spin for `knobs.spin`
turns, then sleep, each on a futex of its own, so that a launch wakes just those whom it may use.

Schedulers like to wake a thread on the core of the one that woke it, where it would take turns
with the caller for milliseconds while another core has nothing to do: a worker that finds itself
there moves away. For the same case, whoever spins lets others run on its core now and then.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import NamedTuple

from terrazzo.chips.cpu.description import host, usable_cores
from terrazzo.chips.cpu.llvm import jit
from terrazzo.knobs import knobs
from terrazzo.runtime.cache import default_cache, make_key

_SLOTS = 8  # words of 8 bytes in one cache line of 64
_TICKET_BITS = 20
_MAX_TICKETS = (1 << _TICKET_BITS) - 1
_SET_BITS = 52  # chunks of a launch that is a set
_SET = (1 << _SET_BITS) - 1
_SMALL_BITS = 6  # of a number of chunks or workers beside them
_SMALL = (1 << _SMALL_BITS) - 1
_MAX_WORKERS = 1023
# A caller wakes this many sleepers, and each of them as many again: a tree, not a long line.
_WAKE_FAN_OUT = 4
# Spinning helps only while there is a core for every thread.
_SPIN_WHEN_CROWDED = 50
# A spinning thread lets others on its core run every so many turns, a power of two: some 5 us.
_YIELD_TURNS = 64
_CORE_BYTES = 128  # of a set of cores: as many as Linux's own type of it holds


def symbols() -> MappingProxyType[str, int]:
    """Give the native functions that kernels are linked against, making the pool if need be."""
    return _pool().symbols


def sync() -> None:
    """Take over `knobs.threads` and `knobs.spin`; to be called before a compiled run."""
    pool = _the_pool or _pool()
    if pool.settings != (knobs.threads, knobs.spin):
        pool.settings = (knobs.threads, knobs.spin)
        cores = usable_cores()
        threads = min(knobs.threads or cores, _MAX_WORKERS + 1)
        spin = knobs.spin if threads <= cores else min(knobs.spin, _SPIN_WHEN_CROWDED)
        pool.configure(threads, spin)


def parallel_for(fn: int, ctx: int, n: int, max_threads: int = 0) -> None:
    """Call the native function at address `fn` for every chunk, from Python."""
    sync()
    _pool().launch(fn, ctx, n, max_threads)


@contextmanager
def crowd(threads: int) -> Iterator[None]:
    """Give launches so many threads, however few cores there are, to one such launch at a time.

    For chunks that wait for each other: each needs a thread of its own, and two such launches
    would each take threads that the other waits for.
    """
    pool = _the_pool or _pool()
    with _crowd_lock:
        pool.configure(min(threads, _MAX_WORKERS + 1), min(knobs.spin, _SPIN_WHEN_CROWDED))
        try:
            yield
        finally:
            # So many threads must not spin until they sleep; the next `sync` restores the rest.
            pool.configure(usable_cores(), min(knobs.spin, _SPIN_WHEN_CROWDED))
            pool.settings = None


def worker_count() -> int:
    """Count the worker threads started so far in this process; the caller's own is not one."""
    return int(_pool().workers.value)


class _Pool:
    """The loaded pool: its code must outlive every thread, so it is never let go."""

    def __init__(self) -> None:
        exports = ("tz_parallel_for", "tz_pool_init", "tz_pool_configure", "tz_pool_after_fork")
        self.library = jit.load_object(_object_code(), exports=(*exports, "tz_pool_workers"))
        i64, pointer = ctypes.c_int64, ctypes.c_void_p
        launch, init, configure, after_fork = map(self.library.address, exports)
        self.symbols = MappingProxyType({"tz_parallel_for": launch})
        self.launch = ctypes.CFUNCTYPE(None, pointer, pointer, i64, i64)(launch)
        self.configure = ctypes.CFUNCTYPE(None, i64, i64)(configure)
        self.workers = ctypes.c_int64.from_address(self.library.address("tz_pool_workers"))
        self.settings: tuple[int, int] | None = None
        ctypes.CFUNCTYPE(None)(init)()
        if hasattr(os, "register_at_fork"):
            # No worker survives in a child: forget them, and start new ones when needed.
            os.register_at_fork(after_in_child=ctypes.CFUNCTYPE(None)(after_fork))


_the_pool: _Pool | None = None
_pool_lock = threading.Lock()
_crowd_lock = threading.Lock()


def _pool() -> _Pool:
    global _the_pool
    if _the_pool is None:
        with _pool_lock:
            if _the_pool is None:
                _the_pool = _Pool()
        sync()
    return _the_pool


def _object_code() -> bytes:
    text = pool_ir(_system())
    chip = host()
    cache, key = default_cache(), make_key("pool", text, chip=chip)
    code = cache.get(key)
    if code is None:
        code = jit.compile_object(text, chip)
        cache.put(key, code)
    return code


class System(NamedTuple):
    """What the pool needs of a processor and an operating system, as LLVM IR."""

    pause: str
    """One instruction that makes a spinning thread cheap for its neighbours."""
    futex: int
    """The number of Linux's futex system call; 0 where there is none and sleepers poll."""
    set_mask: int
    """The value of SIG_SETMASK."""
    bus_error: int
    """The value of SIGBUS."""


_PAUSE = {
    "x86_64": "call void @llvm.x86.sse2.pause()",
    "aarch64": "call void @llvm.aarch64.isb(i32 15)",
}
_FUTEX = {"x86_64": 202, "aarch64": 98}


def _system() -> System:
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(
        platform.machine().lower(), platform.machine()
    )
    linux = sys.platform == "linux"
    return System(
        pause=_PAUSE.get(machine, "fence seq_cst"),
        futex=_FUTEX.get(machine, 0) if linux else 0,
        set_mask=2 if linux else 3,
        bus_error=7 if linux else 10,
    )


def pool_ir(system: System) -> str:
    """Write the pool as LLVM IR for one kind of machine."""
    here = Path(__file__)
    names = {
        "SLOTS": _SLOTS, "MAX_WORKERS": _MAX_WORKERS, "BEDS": _MAX_WORKERS + 1,
        "BED_BYTES": 4 * (_MAX_WORKERS + 1), "FAN_OUT": _WAKE_FAN_OUT,
        "TICKET_BITS": _TICKET_BITS, "MAX_TICKETS": _MAX_TICKETS, "ALLOWED_AT": 2 * _TICKET_BITS,
        "SET": _SET, "SET_BITS": _SET_BITS, "SMALL": _SMALL, "SMALL_BITS": _SMALL_BITS,
        "CHUNKS_AT": _SET_BITS + _SMALL_BITS, "LAST_TURN": _YIELD_TURNS - 1,
        "CORE_BYTES": _CORE_BYTES, "CORES": 8 * _CORE_BYTES, "PAUSE": system.pause,
        "FUTEX": system.futex, "SIG_SETMASK": system.set_mask, "BUS_ERROR": system.bus_error,
    }
    sleeping = here.with_name("pool_futex.ll" if system.futex else "pool_polling.ll")
    text = here.with_name("pool.ll").read_text() + sleeping.read_text()
    return Template(text).substitute(names)
