"""The thread pool: every chunk exactly once, whoever launches, however often."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from terrazzo.chips.cpu import pool
from terrazzo.chips.cpu.description import host, neon_spec
from terrazzo.chips.cpu.llvm import jit
from terrazzo.knobs import knobs

i64, pointer = ctypes.c_int64, ctypes.c_void_p

PROBES = """
declare void @tz_parallel_for(ptr, ptr, i64, i64)

define void @count(ptr %counts, i64 %chunk) nounwind {
  %at = getelementptr i32, ptr %counts, i64 %chunk
  %old = atomicrmw add ptr %at, i32 1 monotonic
  ret void
}

; Chunk i of the outer launch counts on row i of a matrix with 16 columns.
define void @count_row(ptr %counts, i64 %chunk) nounwind {
  %first = mul i64 %chunk, 16
  %row = getelementptr i32, ptr %counts, i64 %first
  call void @tz_parallel_for(ptr @count, ptr %row, i64 16, i64 0)
  ret void
}

define void @launch_often(ptr %counts, i64 %n, i64 %threads, i64 %times) nounwind {
entry:
  br label %again
again:
  %k = phi i64 [ 0, %entry ], [ %k.next, %again ]
  call void @tz_parallel_for(ptr @count, ptr %counts, i64 %n, i64 %threads)
  %k.next = add i64 %k, 1
  %last = icmp eq i64 %k.next, %times
  br i1 %last, label %out, label %again
out:
  ret void
}
"""


class Probes:
    """Native functions that launch and that are launched."""

    def __init__(self) -> None:
        code = jit.compile_object(PROBES, host())
        names = ("count", "count_row", "launch_often")
        self.library = jit.load_object(code, pool.symbols(), names)
        self.count, self.count_row = map(self.library.address, names[:2])
        self.launch_often = ctypes.CFUNCTYPE(None, pointer, i64, i64, i64)(
            self.library.address("launch_often")
        )


@pytest.fixture(scope="module")
def probes() -> Probes:
    return Probes()


@pytest.fixture(autouse=True)
def four_threads():
    """More threads than a small machine has cores, so that workers are preempted mid-chunk."""
    with knobs.override(threads=4):
        pool.sync()
        yield
    pool.sync()


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 17, 64, 1000, 70_001])
@pytest.mark.parametrize("max_threads", [0, 1, 2, 3, 64])
def test_every_chunk_runs_exactly_once(probes: Probes, n: int, max_threads: int) -> None:
    counts = np.zeros(n + 1, np.int32)
    pool.parallel_for(probes.count, counts.ctypes.data, n, max_threads)
    assert counts[:n].tolist() == [1] * n
    assert counts[n] == 0


def test_more_chunks_than_tickets_are_shared_out_in_grains(probes: Probes) -> None:
    n = 2 * pool._MAX_TICKETS + 12345
    counts = np.zeros(n + 1, np.int32)
    pool.parallel_for(probes.count, counts.ctypes.data, n)
    assert (counts[:n] == 1).all()
    assert counts[n] == 0


def test_negative_numbers_of_chunks_run_nothing(probes: Probes) -> None:
    counts = np.zeros(4, np.int32)
    pool.parallel_for(probes.count, counts.ctypes.data, -3)
    assert not counts.any()


def test_many_threads_launch_at_once(probes: Probes) -> None:
    launchers, times = 16, 1500
    sizes = [1, 2, 3, 5, 8, 13, 40, 100]
    counts = [np.zeros(sizes[t % len(sizes)], np.int32) for t in range(launchers)]

    def launch(mine: np.ndarray, threads: int) -> None:
        probes.launch_often(mine.ctypes.data, len(mine), threads, times)

    threads = [threading.Thread(target=launch, args=(mine, t % 5)) for t, mine in enumerate(counts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for mine in counts:
        assert (mine == times).all()


def test_short_jobs_in_quick_succession_never_lose_or_repeat_a_chunk(probes: Probes) -> None:
    """Late workers meet a slot that already holds the next job, over and over."""
    for n in (2, 3, 7):
        counts = np.zeros(n, np.int32)
        probes.launch_often(counts.ctypes.data, n, 0, 30_000)
        assert counts.tolist() == [30_000] * n


@pytest.mark.parametrize("threads", [2, 5, 16])
def test_launches_of_few_and_of_many_chunks_take_turns(probes: Probes, threads: int) -> None:
    """Sets and counts share the slots; workers may be late for either."""
    with knobs.override(threads=threads):
        for turn in range(300):
            counts = np.zeros((1, 2, 7, 16, 51, 52, 53, 200)[turn % 8], np.int32)
            pool.parallel_for(probes.count, counts.ctypes.data, len(counts))
            assert (counts == 1).all()
    pool.sync()


def test_a_thread_finds_its_own_chunks_again() -> None:
    """Of as many chunks, each thread takes the same ones in each launch, if none is late."""
    chunks: dict[int, list[int]] = {}
    meet = threading.Barrier(2)

    def chunk(_: int | None, number: int) -> None:
        chunks.setdefault(threading.get_ident(), []).append(number)
        if number in (0, 3):  # the first of either share: both threads are there
            meet.wait(30)

    native = ctypes.CFUNCTYPE(None, pointer, i64)(chunk)
    address = ctypes.cast(native, pointer).value
    assert address is not None
    with knobs.override(threads=2):
        for _ in range(5):
            pool.parallel_for(address, 0, 6)
    pool.sync()
    firsts = {ident: {n for n in taken if n in (0, 3)} for ident, taken in chunks.items()}
    assert sorted(map(sorted, firsts.values())) == [[0], [3]]


def test_sleeping_workers_and_sleeping_callers(probes: Probes) -> None:
    """Without spinning every wait goes through the futex, on both sides."""
    with knobs.override(spin=0):
        pool.sync()
        counts = np.zeros(8, np.int32)
        probes.launch_often(counts.ctypes.data, 8, 0, 3000)
    assert counts.tolist() == [3000] * 8


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux's affinity")
@pytest.mark.parametrize("cores", ["one", "all"])
def test_moving_off_the_callers_core_keeps_what_a_worker_may_use(cores: str) -> None:
    """Threads that may use one core only stay there; where more are allowed, all remain so."""
    program = f"""
import ctypes, os, time
allowed = os.sched_getaffinity(0)
mine = min(allowed)
os.sched_setaffinity(0, {{mine}})  # workers start on the caller's core
from terrazzo.chips.cpu import pool
from terrazzo.knobs import knobs
knobs.threads = 2
ran = []
def chunk(_ctx, i):
    ran.append(i)
    time.sleep(0.0005)  # the other one gets its turn
fn = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(chunk)
address = ctypes.cast(fn, ctypes.c_void_p).value
pool.parallel_for(address, 0, 4)
workers = {{int(t) for t in os.listdir('/proc/self/task')}} - {{os.getpid()}}
wanted = {{mine}} if {cores!r} == 'one' else allowed
for worker in workers:
    os.sched_setaffinity(worker, wanted)
for _ in range(20):
    time.sleep(0.003)  # longer than a worker spins
    pool.parallel_for(address, 0, 4)
assert len(ran) == 84, len(ran)
end = time.monotonic() + 10  # a worker that came too late for the last launch may be on its way
while any(os.sched_getaffinity(worker) != wanted for worker in workers):
    assert time.monotonic() < end
    time.sleep(0.001)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, b"")


def test_a_launch_inside_a_chunk_runs_inline(probes: Probes) -> None:
    counts = np.zeros((50, 16), np.int32)
    for _ in range(20):
        pool.parallel_for(probes.count_row, counts.ctypes.data, 50)
    assert (counts == 20).all()


def test_chunks_run_in_several_threads_when_they_take_time() -> None:
    seen: set[int] = set()

    @ctypes.CFUNCTYPE(None, pointer, i64)
    def slow(_ctx: int, _chunk: int) -> None:
        seen.add(threading.get_native_id())
        time.sleep(0.005)

    address = ctypes.cast(slow, pointer).value
    assert address is not None
    pool.parallel_for(address, 0, 16)
    assert 2 <= len(seen) <= 4


def test_max_threads_caps_the_threads_of_a_launch() -> None:
    seen: set[int] = set()

    @ctypes.CFUNCTYPE(None, pointer, i64)
    def slow(_ctx: int, _chunk: int) -> None:
        seen.add(threading.get_native_id())
        time.sleep(0.002)

    address = ctypes.cast(slow, pointer).value
    assert address is not None
    pool.parallel_for(address, 0, 16, 2)
    assert len(seen) <= 2
    seen.clear()
    pool.parallel_for(address, 0, 4, 1)
    assert seen == {threading.get_native_id()}


def test_a_change_of_threads_takes_effect_at_the_next_call(probes: Probes) -> None:
    counts = np.zeros(64, np.int32)
    with knobs.override(threads=6):
        pool.parallel_for(probes.count, counts.ctypes.data, 64)
        assert pool.worker_count() >= 5  # earlier launches may have started more
    seen: set[int] = set()

    @ctypes.CFUNCTYPE(None, pointer, i64)
    def note(_ctx: int, _chunk: int) -> None:
        seen.add(threading.get_native_id())
        time.sleep(0.001)

    with knobs.override(threads=1):
        address = ctypes.cast(note, pointer).value
        assert address is not None
        pool.parallel_for(address, 0, 16)
    assert seen == {threading.get_native_id()}
    assert (counts == 1).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_workers_of_its_own(probes: Probes) -> None:
    counts = np.zeros(64, np.int32)
    pool.parallel_for(probes.count, counts.ctypes.data, 64)
    child = os.fork()
    if child == 0:
        fine = pool.worker_count() == 0
        counts[:] = 0
        pool.parallel_for(probes.count, counts.ctypes.data, 64)
        probes.launch_often(counts.ctypes.data, 64, 0, 99)
        fine = fine and bool((counts == 100).all()) and pool.worker_count() == 3
        os._exit(0 if fine else 1)
    assert _wait_for(child) == 0
    pool.parallel_for(probes.count, counts.ctypes.data, 64)
    assert (counts == 2).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_another_thread_launches(probes: Probes) -> None:
    stop = threading.Event()
    busy = np.zeros(32, np.int32)

    def keep_launching() -> None:
        while not stop.is_set():
            probes.launch_often(busy.ctypes.data, 32, 0, 50)

    launcher = threading.Thread(target=keep_launching)
    launcher.start()
    codes = []
    for _ in range(5):
        child = os.fork()
        if child == 0:
            counts = np.zeros(64, np.int32)
            probes.launch_often(counts.ctypes.data, 64, 0, 20)
            os._exit(0 if (counts == 20).all() else 1)
        codes.append(_wait_for(child))
    stop.set()
    launcher.join(30)
    assert codes == [0] * 5
    assert len(set(busy.tolist())) == 1


def _wait_for(child: int, seconds: float = 30) -> int:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the forked child hangs")


@pytest.mark.parametrize("pause", ["", "import time; time.sleep(0.1)"])
def test_a_process_ends_cleanly_with_idle_workers(pause: str) -> None:
    """Both with workers that still spin and with workers that sleep."""
    program = f"""
import ctypes
from terrazzo.chips.cpu import pool
from terrazzo.knobs import knobs
knobs.threads = 3
hit = []
fn = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(lambda _ctx, i: hit.append(i))
pool.parallel_for(ctypes.cast(fn, ctypes.c_void_p).value, 0, 10)
assert sorted(hit) == list(range(10)) and pool.worker_count() == 2
{pause}
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, b"")


def test_signals_stay_with_the_program(probes: Probes) -> None:
    """A signal sent to the process is never delivered to a worker, where nobody waits for it."""
    counts = np.zeros(8, np.int32)
    pool.parallel_for(probes.count, counts.ctypes.data, 8)
    arrived: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, _frame: arrived.append(number))
    try:
        for _ in range(20):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.0005)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert len(arrived) == 20


def test_a_hot_launch_costs_little(probes: Probes) -> None:
    """The budget is 1 us; the bound leaves room for a loaded machine."""
    threads = min(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
    with knobs.override(threads=threads):
        pool.sync()
        counts = np.zeros(2, np.int32)
        times = 5000
        best = float("inf")
        for _ in range(10):
            start = time.perf_counter()
            probes.launch_often(counts.ctypes.data, 2, 0, times)
            best = min(best, time.perf_counter() - start)
    assert best / times < 10e-6


@pytest.mark.parametrize(
    "system",
    [
        pool.System(pause=pool._PAUSE["aarch64"], futex=98, set_mask=2, bus_error=7),
        pool.System(pause=pool._PAUSE["aarch64"], futex=0, set_mask=3, bus_error=10),
    ],
)
def test_the_pool_compiles_for_arm(system: pool.System) -> None:
    text = jit.assembly(pool.pool_ir(system), neon_spec())
    assert "tz_parallel_for" in text
    assert "isb" in text
    assert ("usleep" in text) == (system.futex == 0)


def test_the_pool_works_without_a_futex() -> None:
    """Elsewhere than on Linux sleepers poll; that way works here too."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the default pool is the polling one already")
    here = pool._system()
    polling = pool.System(here.pause, 0, here.set_mask, here.bus_error)
    exports = ("tz_parallel_for", "tz_pool_init", "tz_pool_configure")
    library = jit.load_object(jit.compile_object(pool.pool_ir(polling), host()), exports=exports)
    # Its workers poll for ever, so their code must never be unmapped.
    test_the_pool_works_without_a_futex.keep = library  # type: ignore[attr-defined]
    launch, init, configure = map(library.address, exports)
    ctypes.CFUNCTYPE(None)(init)()
    ctypes.CFUNCTYPE(None, i64, i64)(configure)(3, 10)
    hits: list[int] = []

    @ctypes.CFUNCTYPE(None, pointer, i64)
    def note(_ctx: int, chunk: int) -> None:
        hits.append(chunk)
        time.sleep(0.001)

    ctypes.CFUNCTYPE(None, pointer, pointer, i64, i64)(launch)(
        ctypes.cast(note, pointer), None, 20, 0
    )
    assert sorted(hits) == list(range(20))
