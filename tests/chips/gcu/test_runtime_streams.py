"""Streams and events of the runtime library: order, concurrency, and the modelled clock."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from runtime_kit import Kit

from terrazzo.chips.gcu.library import DEVICE_TO_HOST, HOST_FUNCTION, HOST_TO_DEVICE, check


@pytest.fixture
def streams(kit: Kit) -> Iterator[list[int]]:
    made = [kit.stream() for _ in range(3)]
    yield made
    for stream in made:
        check(kit.lib.gcuStreamDestroy(stream))


class Gate:
    """A kernel that holds a stream up until it is opened."""

    def __init__(self, kit: Kit, stream: int | None) -> None:
        self.flag, slot = np.zeros(1, np.int64), kit.zeros(1)
        check(kit.launch("await", 1, self.flag.ctypes.data, slot, stream=stream))

    def open(self) -> None:
        self.flag[0] = 1


def test_work_runs_in_order(kit: Kit, streams: list[int]) -> None:
    slot = kit.zeros(1)
    check(kit.launch("late", 1, slot, 5000, 0, stream=streams[0]))
    for digit in range(1, 10):
        check(kit.launch("append", 1, slot, digit, stream=streams[0]))
    check(kit.lib.gcuStreamSynchronize(streams[0]))
    assert kit.get(slot, np.int64) == 123456789


def test_streams_run_beside_each_other(kit: Kit, streams: list[int]) -> None:
    slot = kit.zeros(1)
    gate = Gate(kit, streams[0])
    assert kit.fails("gcuErrorNotReady", kit.lib.gcuStreamQuery(streams[0])) is not None
    check(kit.launch("append", 1, slot, 7, stream=streams[1]))  # while the first is held up
    check(kit.lib.gcuStreamSynchronize(streams[1]))
    check(kit.lib.gcuStreamQuery(streams[1]))
    kit.fails("gcuErrorNotReady", kit.lib.gcuStreamQuery(streams[0]))
    assert kit.get(slot, np.int64) == 7  # the default stream does not wait either
    gate.open()
    check(kit.lib.gcuStreamSynchronize(streams[0]))
    check(kit.lib.gcuStreamQuery(streams[0]))


def test_not_ready_is_no_failure(kit: Kit, streams: list[int]) -> None:
    kit.lib.gcuGetLastError()
    gate = Gate(kit, streams[0])
    kit.fails("gcuErrorNotReady", kit.lib.gcuStreamQuery(streams[0]))
    assert kit.lib.gcuGetLastError() == 0
    gate.open()
    check(kit.lib.gcuStreamSynchronize(streams[0]))


def test_a_device_waits_for_all_its_streams(kit: Kit, streams: list[int]) -> None:
    slots = kit.zeros(3)
    for number, stream in enumerate(streams):
        check(kit.launch("late", 1, slots + 8 * number, 3000, 5, stream=stream))
    check(kit.lib.gcuDeviceSynchronize())
    assert (kit.get(slots, np.int64, 3) == 5).all()


def test_freeing_waits_for_the_device(kit: Kit, streams: list[int]) -> None:
    slot, source = kit.zeros(1), kit.put(np.array([77]))
    pinned = kit.made(kit.lib.gcuHostAlloc, 8)
    gate = Gate(kit, streams[0])
    check(kit.lib.gcuMemcpyAsync(pinned, source, 8, DEVICE_TO_HOST, streams[0]))
    timer = threading.Timer(0.02, gate.open)
    timer.start()
    check(kit.lib.gcuFree(source))
    assert gate.flag[0] == 1 and ctypes.c_int64.from_address(pinned).value == 77
    check(kit.lib.gcuHostFree(pinned))
    check(kit.lib.gcuFree(slot))


def test_the_caller_goes_on_while_pinned_memory_is_copied(kit: Kit, streams: list[int]) -> None:
    pinned, target = kit.made(kit.lib.gcuHostAlloc, 1 << 20), kit.malloc(1 << 20)
    ctypes.memset(pinned, 1, 1 << 20)
    gate = Gate(kit, streams[0])
    check(kit.lib.gcuMemcpyAsync(target, pinned, 1 << 20, HOST_TO_DEVICE, streams[0]))
    kit.fails("gcuErrorNotReady", kit.lib.gcuStreamQuery(streams[0]))
    gate.open()
    check(kit.lib.gcuStreamSynchronize(streams[0]))
    assert (kit.get(target, np.uint8, 1 << 20) == 1).all()
    check(kit.lib.gcuHostFree(pinned))
    check(kit.lib.gcuFree(target))


def test_synchronous_copies_wait_for_the_default_stream(kit: Kit) -> None:
    slot = kit.zeros(1)
    check(kit.launch("late", 1, slot, 3000, 9))
    assert kit.get(slot, np.int64) == 9
    check(kit.lib.gcuFree(slot))


def test_functions_of_the_host_run_in_order_and_must_not_wait(
    kit: Kit, streams: list[int]
) -> None:
    slot, seen = kit.zeros(1), []
    pinned = kit.made(kit.lib.gcuHostAlloc, 8)

    @HOST_FUNCTION
    def function(data: int | None) -> None:
        seen.append((data, ctypes.c_int64.from_address(pinned).value,
                     threading.get_ident() != main))
        for call in (kit.lib.gcuDeviceSynchronize, lambda: kit.lib.gcuStreamSynchronize(None),
                     lambda: kit.lib.gcuFree(slot), kit.lib.gcuDeviceReset,
                     lambda: kit.lib.gcuMemset(slot, 0, 8)):
            said = kit.fails("gcuErrorInvalidValue", call())
            assert "must not be called by a function of a stream" in said
        seen.append(kit.launch("append", 1, slot, 2, stream=streams[0]))  # queueing is fine

    main = threading.get_ident()
    check(kit.launch("append", 1, slot, 1, stream=streams[0]))
    check(kit.lib.gcuMemcpyAsync(pinned, slot, 8, DEVICE_TO_HOST, streams[0]))
    check(kit.lib.gcuLaunchHostFunction(streams[0], function, 12))
    check(kit.lib.gcuStreamSynchronize(streams[0]))
    check(kit.lib.gcuStreamSynchronize(streams[0]))
    assert seen == [(12, 1, True), 0]
    assert kit.get(slot, np.int64) == 12
    kit.fails("gcuErrorInvalidValue",
              kit.lib.gcuLaunchHostFunction(streams[0], HOST_FUNCTION(), None))
    check(kit.lib.gcuHostFree(pinned))


def test_stale_streams_and_events(kit: Kit) -> None:
    stream, event, slot = kit.stream(), kit.event(), kit.zeros(1)
    check(kit.lib.gcuStreamDestroy(stream))
    check(kit.lib.gcuEventDestroy(event))
    lib, elapsed, cycles = kit.lib, ctypes.c_float(), ctypes.c_int64()
    live = kit.event()
    for handle in (stream, 3, (1 << 64) - 8, event):
        for call in (lambda s: lib.gcuStreamDestroy(s), lambda s: lib.gcuStreamSynchronize(s),
                     lambda s: lib.gcuStreamQuery(s), lambda s: lib.gcuStreamWaitEvent(s, live),
                     lambda s: lib.gcuEventRecord(live, s),
                     lambda s: lib.gcuStreamGetCycles(cycles, s),
                     lambda s: kit.launch("mark", 1, slot, stream=s),
                     lambda s: lib.gcuMemsetAsync(slot, 0, 8, s)):
            kit.fails("gcuErrorInvalidHandle", call(handle))
    for handle in (event, None, 3, (1 << 64) - 8, stream):
        for call in (lambda e: lib.gcuEventDestroy(e), lambda e: lib.gcuEventRecord(e, None),
                     lambda e: lib.gcuEventQuery(e), lambda e: lib.gcuEventSynchronize(e),
                     lambda e: lib.gcuStreamWaitEvent(None, e),
                     lambda e: lib.gcuEventElapsedTime(elapsed, e, live),
                     lambda e: lib.gcuEventElapsedCycles(cycles, e, e)):
            kit.fails("gcuErrorInvalidHandle", call(handle))
    said = kit.fails("gcuErrorInvalidHandle", lib.gcuStreamDestroy(None))
    assert said == "NULL is no stream"
    check(lib.gcuEventDestroy(live))


def test_handles_are_never_the_same_twice(kit: Kit) -> None:
    seen = set()
    for _ in range(200):
        stream, event = kit.stream(), kit.event()
        assert not seen & {stream, event}
        seen |= {stream, event}
        check(kit.lib.gcuStreamDestroy(stream))
        check(kit.lib.gcuEventDestroy(event))


# ---------------------------------------------------------------- events
def test_events_are_reached_when_their_work_is_done(kit: Kit, streams: list[int]) -> None:
    event = kit.event()
    check(kit.lib.gcuEventQuery(event))  # never recorded: nothing to wait for
    check(kit.lib.gcuEventSynchronize(event))
    check(kit.lib.gcuStreamWaitEvent(streams[1], event))
    gate = Gate(kit, streams[0])
    check(kit.lib.gcuEventRecord(event, streams[0]))
    kit.fails("gcuErrorNotReady", kit.lib.gcuEventQuery(event))
    gate.open()
    check(kit.lib.gcuEventSynchronize(event))
    check(kit.lib.gcuEventQuery(event))
    check(kit.lib.gcuEventDestroy(event))


def test_streams_wait_for_events(kit: Kit, streams: list[int]) -> None:
    slot, event = kit.zeros(1), kit.event()
    gate = Gate(kit, streams[0])
    check(kit.launch("append", 1, slot, 1, stream=streams[0]))
    check(kit.lib.gcuEventRecord(event, streams[0]))
    check(kit.lib.gcuStreamWaitEvent(streams[1], event))
    check(kit.lib.gcuEventDestroy(event))  # who waits holds on to it
    check(kit.launch("append", 1, slot, 2, stream=streams[1]))
    time.sleep(0.01)
    kit.fails("gcuErrorNotReady", kit.lib.gcuStreamQuery(streams[1]))
    gate.open()
    check(kit.lib.gcuStreamSynchronize(streams[1]))
    assert kit.get(slot, np.int64) == 12


def test_a_wait_means_the_recording_before_it(kit: Kit, streams: list[int]) -> None:
    """Recording the event again neither holds a waiting stream up nor moves its clock."""
    slot, event = kit.zeros(1), kit.event()
    check(kit.launch("late", 1, slot, 0, 1, stream=streams[0]))
    check(kit.lib.gcuEventRecord(event, streams[0]))
    first = kit.cycles(streams[0])
    hold = Gate(kit, streams[1])
    check(kit.lib.gcuStreamWaitEvent(streams[1], event))
    gate = Gate(kit, streams[0])
    check(kit.lib.gcuEventRecord(event, streams[0]))
    hold.open()
    check(kit.lib.gcuStreamSynchronize(streams[1]))
    held = kit.cycles(streams[1])
    gate.open()
    check(kit.lib.gcuEventSynchronize(event))
    alone = kit.cycles(streams[0]) - first
    assert held == max(first, alone)
    check(kit.lib.gcuEventDestroy(event))


def test_the_modelled_clock(kit: Kit, streams: list[int]) -> None:
    """What begins after an event begins at its time, whatever the threads of the host do."""
    slot = kit.zeros(1)
    start, end = kit.event(), kit.event()
    each = kit.model(np.array([[1000] + 7 * [0]]), 1)
    check(kit.lib.gcuEventRecord(start, streams[0]))
    for _ in range(5):
        check(kit.launch("late", 1, slot, 0, 1, stream=streams[0]))
    check(kit.lib.gcuEventRecord(end, streams[0]))
    check(kit.launch("late", 1, slot, 0, 1, stream=streams[1]))
    check(kit.lib.gcuStreamWaitEvent(streams[1], end))
    check(kit.launch("late", 1, slot, 0, 1, stream=streams[1]))
    assert kit.cycles(streams[0]) == 5 * each
    assert kit.cycles(streams[1]) == 6 * each
    cycles, milliseconds = ctypes.c_int64(), ctypes.c_float()
    check(kit.lib.gcuEventElapsedCycles(cycles, start, end))
    check(kit.lib.gcuEventElapsedTime(milliseconds, start, end))
    assert cycles.value == 5 * each
    assert milliseconds.value == pytest.approx(5 * each / kit.chip.clock_khz)
    check(kit.lib.gcuEventElapsedCycles(cycles, end, start))
    assert cycles.value == -5 * each
    never = kit.event()
    said = kit.fails("gcuErrorInvalidValue", kit.lib.gcuEventElapsedCycles(cycles, start, never))
    assert said == "the second event was never recorded"
    gate = Gate(kit, streams[2])
    check(kit.lib.gcuEventRecord(never, streams[2]))
    kit.fails("gcuErrorNotReady", kit.lib.gcuEventElapsedTime(milliseconds, start, never))
    gate.open()
    check(kit.lib.gcuDeviceSynchronize())


def test_many_streams_and_events_finish(kit: Kit) -> None:
    """A long relay over forty streams: each adds to what the one before it left."""
    slot, relay = kit.zeros(1), [kit.stream() for _ in range(40)]
    events = [kit.event() for _ in relay]
    for turn in range(5):
        for number, stream in enumerate(relay):
            if turn or number:
                check(kit.lib.gcuStreamWaitEvent(stream, events[number - 1]))
            check(kit.launch("mark", 1, slot, stream=stream))
            check(kit.lib.gcuEventRecord(events[number], stream))
    check(kit.lib.gcuDeviceSynchronize())
    assert kit.get(slot, np.int64) == 200
    one = kit.model(np.array([[1] + 7 * [0]]), 1)
    assert kit.cycles(relay[-1]) == 200 * one
    for stream, event in zip(relay, events):
        check(kit.lib.gcuStreamDestroy(stream))
        check(kit.lib.gcuEventDestroy(event))
