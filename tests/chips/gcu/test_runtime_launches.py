"""Launches of the runtime library: grids, arguments, faults, plans, what is traced."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from runtime_kit import Kit, words

from terrazzo.chips.gcu.library import ERRORS, FunctionInfo, Record, check

ILLEGAL = ERRORS.index("gcuErrorIllegalAddress")


def marks(kit: Kit, grid: int | tuple[int, int, int], how: str) -> np.ndarray:
    """How often each program of a launch ran."""
    count = grid if isinstance(grid, int) else grid[0] * grid[1] * grid[2]
    slots = kit.zeros(count + 1)
    check(kit.launch("mark", grid, slots, how=how))
    seen = kit.get(slots, np.int64, count + 1)
    check(kit.lib.gcuFree(slots))
    assert seen[-1] == 0
    return seen[:-1]


# ---------------------------------------------------------------- grids
def test_a_launch_of_57_programs_is_refused(kit: Kit) -> None:
    slots = kit.zeros(200)
    for grid, size in ((57, 57), ((19, 3, 1), 57), (49, 49), (95, 95), (97, 97), ((5, 5, 5), 125)):
        said = kit.fails("gcuErrorInvalidGrid", kit.launch("mark", grid, slots))
        assert said == f"Invalid grid size {size} (must be <= 48 or multiple of 48)"
    assert (kit.get(slots, np.int64, 200) == 0).all()
    check(kit.lib.gcuFree(slots))


@pytest.mark.parametrize("grid", [1, 47, 48, 96, 480, (6, 4, 2), (2, 3, 16), (48, 1, 2)])
def test_grids_that_the_rule_accepts(kit: Kit, grid: int | tuple[int, int, int]) -> None:
    assert (marks(kit, grid, "gcuLaunchKernel") == 1).all()


@pytest.mark.parametrize("grid", [1, 48, 57, 95, 96, 97, 1000, (19, 3, 1), (7, 11, 13)])
def test_folded_launches_run_each_program_once(
    kit: Kit, grid: int | tuple[int, int, int]
) -> None:
    assert (marks(kit, grid, "gcuLaunchFolded") == 1).all()


def test_empty_and_absurd_grids(kit: Kit) -> None:
    slots = kit.zeros(1)
    for grid in (0, (4, 0, 1), (0, 0, 0)):
        said = kit.fails("gcuErrorInvalidGrid", kit.launch("mark", grid, slots))
        assert said == "Invalid grid size 0 (must be at least 1)"
        check(kit.launch("mark", grid, slots, how="gcuLaunchFolded"))
    most = (1 << 32) - 1
    for grid in ((most, most, most), (most, 1, 1), (1 << 31, 2, 1 << 31)):
        for how in ("gcuLaunchKernel", "gcuLaunchFolded"):
            kit.fails("gcuErrorInvalidGrid", kit.launch("mark", grid, slots, how=how))
    assert kit.get(slots, np.int64) == 0
    check(kit.lib.gcuFree(slots))


def test_the_model_is_told_what_ran_at_once(kit: Kit) -> None:
    stream, slots = kit.stream(), kit.zeros(200)
    counts = np.zeros((200, 8), np.int64)
    counts[:, 0] = np.arange(1, 201)
    expected = 0
    for grid, at_once, how in ((48, 48, "gcuLaunchKernel"), (96, 96, "gcuLaunchKernel"),
                               (57, 48, "gcuLaunchFolded"), (150, 144, "gcuLaunchFolded")):
        check(kit.launch("mark", grid, slots, stream=stream, how=how))
        expected += kit.model(counts[:grid], at_once)
        assert kit.cycles(stream) == expected
    check(kit.lib.gcuStreamDestroy(stream))
    check(kit.lib.gcuFree(slots))


# ---------------------------------------------------------------- arguments
def test_a_kernel_computes(kit: Kit, rng: np.random.Generator) -> None:
    x, y = rng.standard_normal((2, 10_007)).astype(np.float32)
    here, there = kit.put(x), kit.put(y)
    check(kit.launch("saxpy", 96, here, there, 2.5, x.size))
    assert np.array_equal(kit.get(there, np.float32, x.size), y + (np.float32(2.5) * x))
    angle = kit.put(np.array([0.5]))
    check(kit.launch("sine", 1, angle))
    assert kit.get(angle, np.float64) == np.sin(0.5)
    for address in (here, there, angle):
        check(kit.lib.gcuFree(address))


def test_wrong_arguments(kit: Kit) -> None:
    slot = kit.zeros(1)
    said = kit.fails("gcuErrorInvalidValue", kit.launch("mark", 1, slot, 2))
    assert said.startswith("mark has 1 arguments, and got 2 at ")
    kit.fails("gcuErrorInvalidValue", kit.launch("mark", 1))
    function = kit.function("mark")
    kit.fails("gcuErrorInvalidValue", kit.lib.gcuLaunchKernel(function, 1, 1, 1, None, 1, None))
    kit.fails("gcuErrorInvalidValue", kit.lib.gcuLaunchPlan(function, words(slot), 1, slot, None))
    plan = kit.function("plan")
    kit.fails("gcuErrorInvalidValue",
              kit.lib.gcuLaunchKernel(plan, 1, 1, 1, words(slot, 0, 1), 3, None))
    kit.fails("gcuErrorInvalidValue", kit.lib.gcuFunctionGetInfo(None, function))
    check(kit.lib.gcuFunctionGetInfo(FunctionInfo(), function))
    check(kit.lib.gcuFree(slot))


def test_addresses_must_be_live_memory_of_the_device(kit: Kit) -> None:
    host, freed = np.zeros(8), kit.malloc(64)
    check(kit.lib.gcuFree(freed))
    check(kit.lib.gcuSetDevice(1))
    elsewhere = kit.malloc(64)
    check(kit.lib.gcuSetDevice(0))
    good = kit.malloc(64)
    for address, why in ((host.ctypes.data, "is memory of the host, not of device 0"),
                         (elsewhere, "is memory of device 1, not of device 0"),
                         (freed, "nothing is allocated there on device 0, or no more"),
                         (good + 64, "nothing is allocated there"), (-8, "memory of the host")):
        said = kit.fails("gcuErrorInvalidPointer", kit.launch("saxpy", 1, good, address, 1.0, 0))
        assert said.startswith("argument 1, ") and why in said
        kit.fails("gcuErrorInvalidPointer", kit.launch("mark", 1, address, how="gcuLaunchFolded"))
    check(kit.launch("saxpy", 1, 0, good + 60, 1.0, 0))  # NULL, and any byte of a block
    check(kit.lib.gcuStreamSynchronize(None))
    for address in (good, elsewhere):
        check(kit.lib.gcuFree(address))


def test_streams_of_another_device_take_its_memory(kit: Kit) -> None:
    check(kit.lib.gcuSetDevice(1))
    stream, slot = kit.stream(), kit.zeros(1)
    check(kit.lib.gcuSetDevice(0))
    check(kit.launch("mark", 1, slot, stream=stream))
    kit.fails("gcuErrorInvalidPointer", kit.launch("mark", 1, slot))
    check(kit.lib.gcuStreamSynchronize(stream))
    check(kit.lib.gcuSetDevice(1))
    assert kit.get(slot, np.int64) == 1
    check(kit.lib.gcuStreamDestroy(stream))
    check(kit.lib.gcuFree(slot))


def test_too_much_scratchpad(kit: Kit) -> None:
    slot = kit.zeros(1)
    said = kit.fails("gcuErrorScratchpad", kit.launch("greedy", 1, slot))
    assert said == (f"greedy wants {1 << 40} bytes of scratchpad, and a unit has "
                    f"{kit.chip.scratchpad_bytes}")
    check(kit.lib.gcuFree(slot))


# ---------------------------------------------------------------- faults
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("grid", [1, 8])
def test_a_kernel_that_touches_what_is_not_there(kit: Kit, grid: int, threads: int) -> None:
    freed = kit.malloc(4096)
    check(kit.lib.gcuFree(freed))
    check(kit.lib.gcuSetHostThreads(threads))
    for address in (8, freed, 1 << 62):
        stream, slot = kit.stream(), kit.zeros(1)
        check(kit.launch("poke", grid, address, stream=stream))
        failed = kit.lib.gcuStreamSynchronize(stream)
        said = kit.fails("gcuErrorIllegalAddress", failed)
        assert said.startswith("the kernel poke touched memory that is not there")
        assert address > 1 << 48 or said.endswith(f"{address:#x}")
        for again in (lambda s=stream, p=slot: kit.launch("mark", 1, p, stream=s),
                      lambda s=stream: kit.lib.gcuStreamQuery(s),
                      lambda s=stream, p=slot: kit.lib.gcuMemsetAsync(p, 1, 8, s),
                      lambda s=stream: kit.lib.gcuStreamGetCycles(ctypes.c_int64(), s),
                      lambda: kit.lib.gcuDeviceSynchronize()):
            kit.fails("gcuErrorIllegalAddress", again())
        check(kit.launch("mark", grid, kit.zeros(grid)))  # other streams go on
        assert kit.get(slot, np.int64) == 0
        check(kit.lib.gcuStreamDestroy(stream))
        check(kit.lib.gcuFree(slot))
    check(kit.lib.gcuSetHostThreads(0))
    check(kit.lib.gcuDeviceSynchronize())


def test_other_faults_end_the_launch_alone(kit: Kit) -> None:
    slot = kit.zeros(1)
    stream = kit.stream()
    check(kit.launch("divide", 1, slot, 7, 2, stream=stream))
    check(kit.lib.gcuStreamSynchronize(stream))
    assert kit.get(slot, np.int64) == 3
    check(kit.launch("divide", 1, slot, 7, 0, stream=stream))
    said = kit.fails("gcuErrorLaunchFailure", kit.lib.gcuStreamSynchronize(stream))
    assert said == "the kernel divide divided an integer by zero"
    check(kit.lib.gcuStreamDestroy(stream))
    stream = kit.stream()
    check(kit.launch("overflow", 1, 10_000, stream=stream))  # 40 MB of stack
    kit.fails("gcuErrorIllegalAddress", kit.lib.gcuStreamSynchronize(stream))
    check(kit.lib.gcuStreamDestroy(stream))
    check(kit.lib.gcuFree(slot))


def test_what_waits_for_a_failed_stream_fails_too(kit: Kit) -> None:
    bad, other, event, slot = kit.stream(), kit.stream(), kit.event(), kit.zeros(1)
    flag = np.zeros(1, np.int64)
    check(kit.launch("await", 1, flag.ctypes.data, slot, stream=bad))
    check(kit.launch("poke", 1, 16, stream=bad))
    check(kit.lib.gcuEventRecord(event, bad))
    check(kit.lib.gcuStreamWaitEvent(other, event))
    check(kit.launch("mark", 1, slot, stream=other))
    flag[0] = 5
    for call in (kit.lib.gcuStreamSynchronize(other), kit.lib.gcuEventSynchronize(event),
                 kit.lib.gcuEventQuery(event)):
        kit.fails("gcuErrorIllegalAddress", call)
    assert kit.get(slot, np.int64) == 5  # `mark` did not run
    for stream in (bad, other):
        check(kit.lib.gcuStreamDestroy(stream))
    check(kit.lib.gcuEventDestroy(event))
    check(kit.lib.gcuDeviceSynchronize())
    check(kit.lib.gcuFree(slot))


# ---------------------------------------------------------------- threads
def test_a_launch_within_a_launch_runs(kit: Kit) -> None:
    slot = kit.zeros(1)
    check(kit.lib.gcuSetHostThreads(4))
    check(kit.launch("nested", 48, slot))
    assert kit.get(slot, np.int64) == 48 * 45
    check(kit.lib.gcuSetHostThreads(0))
    kit.fails("gcuErrorInvalidValue", kit.lib.gcuSetHostThreads(-1))
    check(kit.lib.gcuFree(slot))


def test_a_hundred_threads_launch(kit: Kit) -> None:
    slots, failures = kit.zeros(100 * 48), []
    function = kit.function("mark")
    shared = kit.stream()

    def run(number: int) -> None:
        kit.lib.gcuSetDevice(0)
        stream = kit.stream() if number % 2 else shared
        for _ in range(20):
            code = kit.lib.gcuLaunchKernel(function, 48, 1, 1, words(slots + number * 48 * 8), 1,
                                           stream)
            if code:
                failures.append(kit.message())
        if number % 2:
            check(kit.lib.gcuStreamSynchronize(stream))
            check(kit.lib.gcuStreamDestroy(stream))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(kit.lib.gcuDeviceSynchronize())
    assert not failures
    assert (kit.get(slots, np.int64, 4800) == 20).all()
    counted = np.zeros((48, 8), np.int64)
    counted[:, 0] = np.arange(1, 49)
    assert kit.cycles(shared) == 50 * 20 * kit.model(counted, 48)
    check(kit.lib.gcuStreamDestroy(shared))
    check(kit.lib.gcuFree(slots))


# ---------------------------------------------------------------- plans and traces
def test_plans_are_timed_by_their_calls(kit: Kit) -> None:
    stream, target, arena = kit.stream(), kit.zeros(1), kit.malloc(64)
    units = kit.chip.units
    check(kit.lib.gcuTraceStart())
    check(kit.lib.gcuLaunchPlan(kit.function("plan"), words(target, 0, units), 3, arena, stream))
    check(kit.lib.gcuStreamSynchronize(stream))
    check(kit.lib.gcuTraceStop())
    assert kit.get(target, np.int64) == 6
    counts = np.zeros((2, units, 8), np.int64)
    counts[0, :, 0], counts[0, 0, 7] = 200, 2
    counts[1, 0, 0], counts[1, 0, 7] = 7, 1
    twice = kit.model(counts[0], units) + kit.struct.launch_cycles
    once = kit.model(counts[1], units)
    assert kit.cycles(stream) == twice + once
    records = kit.records()
    assert [(r.name, r.start, r.cycles) for r in records] == [
        (b"twice", 0, twice), (b"once", twice, once)]
    assert records[0].counts[0] == 200 * units and records[0].counts[7] == 2
    assert records[0].correlation == records[1].correlation > 0
    host = np.zeros(8)
    said = kit.fails("gcuErrorInvalidPointer", kit.lib.gcuLaunchPlan(
        kit.function("plan"), words(target, 0, units), 3, host.ctypes.data, stream))
    assert said.startswith("arena ")
    check(kit.lib.gcuStreamDestroy(stream))
    for address in (target, arena):
        check(kit.lib.gcuFree(address))


def test_plans_run_on_the_threads_of_the_host_and_not_on_one_for_each_unit(kit: Kit) -> None:
    units = kit.chip.units
    target = kit.zeros(units)
    for threads in (1, 2):
        check(kit.lib.gcuSetHostThreads(threads))
        check(kit.lib.gcuLaunchPlan(kit.function("threads"), words(target), 1, None, None))
        ran = kit.get(target, np.int64, units)
        assert ran.all() and 1 <= len(set(ran)) <= threads
    check(kit.lib.gcuSetHostThreads(0))
    check(kit.lib.gcuFree(target))


def test_what_was_run_is_recorded(kit: Kit) -> None:
    stream, slots = kit.stream(), kit.zeros(57)
    pinned = kit.made(kit.lib.gcuHostAlloc, 456)
    check(kit.launch("mark", 1, slots, stream=stream))  # before anybody asks
    check(kit.lib.gcuStreamSynchronize(stream))
    begin = kit.cycles(stream)
    check(kit.lib.gcuTraceStart())
    check(kit.lib.gcuMemsetAsync(slots, 0, 456, stream))
    check(kit.launch("mark", 57, slots, stream=stream, how="gcuLaunchFolded"))
    check(kit.lib.gcuMemcpyAsync(pinned, slots, 456, 2, stream))
    end = kit.cycles(stream)
    check(kit.lib.gcuTraceStop())
    check(kit.launch("mark", 1, slots, stream=stream))  # no more
    check(kit.lib.gcuStreamSynchronize(stream))
    fill, mark, copy = kit.records()
    assert [r.name for r in (fill, mark, copy)] == [b"fill", b"mark", b"copy"]
    assert [r.kind for r in (fill, mark, copy)] == [2, 0, 1]
    assert fill.start == begin and mark.start == begin + fill.cycles
    assert copy.start == mark.start + mark.cycles and copy.start + copy.cycles == end
    assert (mark.programs, mark.units) == (57, 48) and mark.counts[0] == 57 * 58 // 2
    assert fill.bytes == copy.bytes == 456 and mark.device == 0
    assert fill.correlation < mark.correlation < copy.correlation
    assert fill.stream == mark.stream == copy.stream > 0
    link = kit.struct.link_latency + -(-456 // kit.struct.link_bytes_per_cycle)
    assert copy.cycles == link
    assert fill.cycles == kit.struct.dma_latency + -(-456 // kit.struct.memory_bytes_per_cycle)
    assert not kit.records()
    kit.fails("gcuErrorInvalidValue", kit.lib.gcuTraceRead(None, 3, ctypes.c_int()))
    check(kit.lib.gcuStreamDestroy(stream))
    check(kit.lib.gcuFree(slots))
    check(kit.lib.gcuHostFree(pinned))


def test_records_carry_the_tag_of_the_thread_that_launched(kit: Kit) -> None:
    slots = kit.zeros(2)

    def launch() -> None:
        check(kit.launch("mark", 1, slots))

    check(kit.lib.gcuTraceStart())
    launch()
    check(kit.lib.gcuTraceTag(7))
    launch()
    other = threading.Thread(target=launch)  # has none
    other.start()
    other.join()
    check(kit.lib.gcuMemsetAsync(slots, 0, 8, None))
    check(kit.lib.gcuTraceTag(0))
    launch()
    check(kit.lib.gcuDeviceSynchronize())
    check(kit.lib.gcuTraceStop())
    assert [record.tag for record in kit.records()] == [0, 7, 0, 7, 0]
    check(kit.lib.gcuFree(slots))


def test_long_traces_are_read_in_parts(kit: Kit) -> None:
    slot = kit.zeros(1)
    check(kit.lib.gcuTraceStart())
    for _ in range(700):
        check(kit.launch("mark", 1, slot))
    check(kit.lib.gcuDeviceSynchronize())
    check(kit.lib.gcuTraceStop())
    seen, held, count = [], (Record * 64)(), ctypes.c_int(1)
    while count.value:
        check(kit.lib.gcuTraceRead(held, 64, count))
        seen += [record.correlation for record in held[:count.value]]
    assert len(seen) == 700 and seen == sorted(set(seen))
    check(kit.lib.gcuFree(slot))


def test_traces_inside_others(kit: Kit) -> None:
    """Each has all that ran between its own beginning and end, in parts that are read by few."""
    slot, held, count = kit.zeros(1), (Record * 5)(), ctypes.c_int()

    def launched(times: int) -> None:
        for _ in range(times):
            check(kit.launch("mark", 1, slot))
        check(kit.lib.gcuDeviceSynchronize())

    def ended() -> list[int]:
        check(kit.lib.gcuTraceStop())
        seen: list[int] = []
        count.value = 1
        while count.value:
            check(kit.lib.gcuTraceRead(held, 5, count))
            seen += [record.correlation for record in held[:count.value]]
        return seen

    found = []
    for times in (3, 300):  # more than there is room for at first
        check(kit.lib.gcuTraceStart())
        launched(times)
        check(kit.lib.gcuTraceStart())
        launched(7)
        check(kit.lib.gcuTraceStart())
        innermost = ended()
        launched(2)
        inner = ended()
        launched(1)
        check(kit.lib.gcuTraceStart())
        launched(4)
        check(kit.lib.gcuTraceStop())  # nobody reads it
        outer = ended()
        assert (len(innermost), len(inner), len(outer)) == (0, 9, times + 14)
        assert outer == sorted(set(outer)) and outer[times:times + 9] == inner
        assert ended() == []  # of none that is open
        launched(1)
        found.append(outer)
    assert max(found[0]) < min(found[1])
    for _ in range(64):
        check(kit.lib.gcuTraceStart())
    said = kit.fails("gcuErrorInvalidValue", kit.lib.gcuTraceStart())
    assert said == "64 traces are open already"
    assert [ended() for _ in range(64)] == [[]] * 64
    check(kit.lib.gcuFree(slot))


def test_grids_of_many_waves(kit: Kit) -> None:
    """More counters than a stream keeps, and then few again."""
    for count in (48 * 4000, 48, 48 * 5000):
        assert (marks(kit, count, "gcuLaunchKernel") == 1).all()
