"""The runtime library: devices, memory, copies, and what it says to those who err."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from runtime_kit import Kit

from terrazzo.chips.gcu.library import (
    BY_POINTERS,
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    ERRORS,
    HOST_TO_DEVICE,
    HOST_TO_HOST,
    DeviceProperties,
    GcuError,
    MemoryInfo,
    check,
)
from terrazzo.errors import DeviceError


def info(kit: Kit, device: int = 0) -> MemoryInfo:
    found = MemoryInfo()
    check(kit.lib.gcuMemGetInfo(found, device))
    return found


# ---------------------------------------------------------------- errors and devices
def test_errors_have_the_names_of_the_header(kit: Kit) -> None:
    for code, name in enumerate(ERRORS):
        assert kit.lib.gcuGetErrorName(code).decode() == name
        assert len(kit.lib.gcuGetErrorString(code)) > 5
    for code in (len(ERRORS), -1, 1 << 30):
        assert kit.lib.gcuGetErrorName(code) == b"unknown error"


def test_the_last_error_is_of_the_thread_and_forgotten_when_read(kit: Kit) -> None:
    kit.fails("gcuErrorInvalidDevice", kit.lib.gcuSetDevice(99))
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(kit.lib.gcuGetLastError()))
    thread.start()
    thread.join()
    assert elsewhere == [0]
    bad_device = ERRORS.index("gcuErrorInvalidDevice")
    assert kit.lib.gcuPeekAtLastError() == bad_device
    assert kit.lib.gcuGetLastError() == bad_device
    assert kit.lib.gcuGetLastError() == 0


def test_check_raises_our_error_with_the_message(kit: Kit) -> None:
    with pytest.raises(DeviceError, match="gcuErrorInvalidDevice: there is no device 99") as caught:
        check(kit.lib.gcuSetDevice(99))
    assert isinstance(caught.value, GcuError) and caught.value.code == 3
    check(0)


def test_devices(kit: Kit) -> None:
    count, device, major, minor = (ctypes.c_int(-1) for _ in range(4))
    check(kit.lib.gcuGetDeviceCount(count))
    assert count.value == kit.chip.devices
    check(kit.lib.gcuSetDevice(count.value - 1))
    check(kit.lib.gcuGetDevice(device))
    assert device.value == count.value - 1
    check(kit.lib.gcuGetDeviceCapability(major, minor, 0))
    assert (major.value, minor.value) == kit.chip.capability
    properties = DeviceProperties()
    check(kit.lib.gcuGetDeviceProperties(properties, 1))
    assert properties.device == 1 and properties.description.units == kit.chip.units
    assert properties.name == b"gcu (virtual, 48 units)"
    for bad in (-1, count.value):
        said = kit.fails("gcuErrorInvalidDevice", kit.lib.gcuSetDevice(bad))
        assert said == f"there is no device {bad}, only 0 to {count.value - 1}"
        kit.fails("gcuErrorInvalidDevice", kit.lib.gcuGetDeviceProperties(properties, bad))
        kit.fails("gcuErrorInvalidDevice", kit.lib.gcuMemGetInfo(MemoryInfo(), bad))


def test_the_current_device_is_of_the_thread(kit: Kit) -> None:
    check(kit.lib.gcuSetDevice(1))
    seen = ctypes.c_int(-1)
    thread = threading.Thread(target=lambda: check(kit.lib.gcuGetDevice(seen)))
    thread.start()
    thread.join()
    assert seen.value == 0


def test_another_description_is_too_late(kit: Kit) -> None:
    check(kit.lib.gcuConfigure(kit.struct))
    other = kit.chip.c_struct()
    other.units += 1
    kit.fails("gcuErrorInitialization", kit.lib.gcuConfigure(other))
    other.size = 12
    assert "12 bytes" in kit.fails("gcuErrorInvalidValue", kit.lib.gcuConfigure(other))
    kit.fails("gcuErrorInvalidValue", kit.lib.gcuConfigure(None))


# ---------------------------------------------------------------- memory
def test_copies_there_and_back(kit: Kit, rng: np.random.Generator) -> None:
    for size in (1, 3, 4096, 4097, 5 << 20):
        data = rng.integers(0, 256, size, dtype=np.uint8)
        address = kit.put(data)
        second = kit.malloc(size)
        check(kit.lib.gcuMemcpy(second, address, size, DEVICE_TO_DEVICE))
        assert address % 512 == 0 and (kit.get(second, np.uint8, size) == data).all()
        check(kit.lib.gcuMemset(second, 0x1A5, size))
        assert (kit.get(second, np.uint8, size) == 0xA5).all()
        check(kit.lib.gcuFree(address))
        check(kit.lib.gcuFree(second))


def test_memory_is_counted(kit: Kit) -> None:
    before, elsewhere = info(kit), info(kit, 1)
    address = kit.malloc(1000)
    during = info(kit)
    assert during.allocated - before.allocated == 1024  # multiples of 512
    assert during.free == during.total - during.allocated
    assert during.total == kit.chip.memory_bytes
    assert during.allocations == before.allocations + 1 and during.peak >= during.allocated
    check(kit.lib.gcuFree(address))
    assert info(kit).allocated == before.allocated and info(kit).peak == during.peak
    assert info(kit, 1).allocations == elsewhere.allocations


def test_nothing_is_a_null_pointer(kit: Kit) -> None:
    assert kit.malloc(0) == 0
    check(kit.lib.gcuFree(None))
    check(kit.lib.gcuHostFree(None))
    check(kit.lib.gcuMemcpy(None, None, 0, HOST_TO_DEVICE))
    check(kit.lib.gcuMemset(None, 0, 0))


def test_more_memory_than_there_is(kit: Kit) -> None:
    for size in (kit.chip.memory_bytes + 1, (1 << 64) - 1, 1 << 63):
        said = kit.fails("gcuErrorOutOfMemory",
                         kit.lib.gcuMalloc(ctypes.byref(ctypes.c_void_p()), size))
        assert said.startswith(f"{size} bytes asked for, and ")
    kit.fails("gcuErrorInvalidValue", kit.lib.gcuMalloc(None, 8))


def test_bad_pointers_of_free(kit: Kit) -> None:
    address, host = kit.malloc(1000), np.zeros(10)
    said = kit.fails("gcuErrorInvalidPointer", kit.lib.gcuFree(host.ctypes.data))
    assert said == f"gcuFree({host.ctypes.data:#x}): this is memory of the host"
    said = kit.fails("gcuErrorInvalidPointer", kit.lib.gcuFree(address + 8))
    assert said == f"gcuFree({address + 8:#x}): this is byte 8 of the 1000 at {address:#x}"
    check(kit.lib.gcuFree(address))
    said = kit.fails("gcuErrorInvalidPointer", kit.lib.gcuFree(address))
    assert "nothing is allocated there on device 0, or no more" in said


def test_freed_memory_is_not_given_out_at_once(kit: Kit) -> None:
    first = kit.malloc(4096)
    check(kit.lib.gcuFree(first))
    second = kit.malloc(4096)
    assert first != second
    kit.fails("gcuErrorInvalidPointer", kit.lib.gcuMemset(first, 0, 1))
    check(kit.lib.gcuFree(second))


def test_directions_of_copies(kit: Kit) -> None:
    host, device = np.zeros(64, np.uint8), kit.malloc(64)
    there, other = host.ctypes.data, np.zeros(64, np.uint8).ctypes.data
    wrong = [(device, there, DEVICE_TO_HOST), (there, device, HOST_TO_DEVICE),
             (there, device, DEVICE_TO_DEVICE), (device, there, DEVICE_TO_DEVICE),
             (device, device, HOST_TO_DEVICE), (there, there, DEVICE_TO_HOST),
             (device, there, HOST_TO_HOST), (there, other, HOST_TO_DEVICE)]
    for target, source, kind in wrong:
        for call in (kit.lib.gcuMemcpy, lambda *a: kit.lib.gcuMemcpyAsync(*a, None)):
            said = kit.fails("gcuErrorInvalidDirection", call(target, source, 8, kind))
            assert "is memory of the" in said
    said = kit.fails("gcuErrorInvalidDirection", kit.lib.gcuMemcpy(there, there, 8, HOST_TO_DEVICE))
    assert said == (f"gcuMemcpyHostToDevice: the target {there:#x} is memory of the host, "
                    "not of the device")
    for kind in (5, -1, 77):
        kit.fails("gcuErrorInvalidValue", kit.lib.gcuMemcpy(device, there, 8, kind))
    for target, source in ((device, there), (there, device), (device, device), (there, there)):
        check(kit.lib.gcuMemcpy(target, source, 8, BY_POINTERS))
    check(kit.lib.gcuFree(device))


def test_copies_over_the_end(kit: Kit) -> None:
    host, device = np.zeros(2000, np.uint8), kit.malloc(1000)
    there = host.ctypes.data
    for target, source, size, kind in [
            (device, there, 1001, HOST_TO_DEVICE), (there, device, 1001, DEVICE_TO_HOST),
            (device + 999, there, 2, HOST_TO_DEVICE), (device, there, (1 << 64) - 1, BY_POINTERS),
            (there, device + 1000, 1, DEVICE_TO_HOST), (device, device + 501, 500, BY_POINTERS)]:
        said = kit.fails("gcuErrorInvalidPointer", kit.lib.gcuMemcpy(target, source, size, kind))
        assert "run over the end of the 1000 allocated" in said or "nothing is allocated" in said
    said = kit.fails("gcuErrorInvalidPointer", kit.lib.gcuMemset(device + 8, 0, 993))
    assert said == (f"target {device + 8:#x}: 993 bytes from byte 8 on run over the end of the "
                    f"1000 allocated at {device:#x}")
    said = kit.fails("gcuErrorInvalidPointer", kit.lib.gcuMemset(there, 0, 1))
    assert said == f"target {there:#x} is memory of the host, not of device 0"
    kit.fails("gcuErrorInvalidPointer", kit.lib.gcuMemcpy(None, there, 8, HOST_TO_DEVICE))
    check(kit.lib.gcuFree(device))


def test_memory_of_the_host_that_is_not_there(kit: Kit) -> None:
    device = kit.malloc(1 << 20)
    for size in (8, 1 << 20):
        for call in (kit.lib.gcuMemcpy, lambda *a: kit.lib.gcuMemcpyAsync(*a, None)):
            kit.fails("gcuErrorInvalidPointer", call(device, 4096, size, HOST_TO_DEVICE))
            kit.fails("gcuErrorInvalidPointer", call(4096, device, size, DEVICE_TO_HOST))
    check(kit.lib.gcuDeviceSynchronize())  # nothing of it stays
    check(kit.lib.gcuFree(device))


def test_pinned_memory(kit: Kit) -> None:
    pinned = ctypes.c_int(-1)
    memory = kit.made(kit.lib.gcuHostAlloc, 100)
    for address, expected in ((memory, 1), (memory + 99, 1), (memory + 100, 0), (0, 0)):
        check(kit.lib.gcuHostIsPinned(pinned, address))
        assert pinned.value == expected
    device = ctypes.c_int()
    check(kit.lib.gcuPointerGetDevice(device, memory))
    assert device.value == -1
    target = kit.malloc(100)
    ctypes.memset(memory, 3, 100)
    check(kit.lib.gcuMemcpyAsync(target, memory, 100, HOST_TO_DEVICE, None))
    assert (kit.get(target, np.uint8, 100) == 3).all()
    kit.fails("gcuErrorInvalidPointer", kit.lib.gcuHostFree(memory + 1))
    check(kit.lib.gcuHostFree(memory))
    kit.fails("gcuErrorInvalidPointer", kit.lib.gcuHostFree(memory))
    check(kit.lib.gcuFree(target))


def test_pageable_memory_may_change_when_an_asynchronous_copy_returns(kit: Kit) -> None:
    stream, size = kit.stream(), 200_000
    flag, slot = np.zeros(1, np.int64), kit.zeros(1)
    target = kit.malloc(size)
    check(kit.launch("await", 1, flag.ctypes.data, slot, stream=stream))
    small = np.full(1000, 7, np.uint8)
    check(kit.lib.gcuMemcpyAsync(target, small.ctypes.data, 1000, HOST_TO_DEVICE, stream))
    small[:] = 0  # while the stream still waits
    flag[0] = 1
    large = np.full(size - 1000, 9, np.uint8)
    check(kit.lib.gcuMemcpyAsync(target + 1000, large.ctypes.data, large.size, HOST_TO_DEVICE,
                                 stream))
    large[:] = 0
    back = np.empty(size, np.uint8)
    check(kit.lib.gcuMemcpyAsync(back.ctypes.data, target, size, DEVICE_TO_HOST, stream))
    assert (back[:1000] == 7).all() and (back[1000:] == 9).all()
    check(kit.lib.gcuStreamDestroy(stream))
    check(kit.lib.gcuFree(target))


# ---------------------------------------------------------------- several devices
def test_pointers_know_their_device(kit: Kit) -> None:
    found = ctypes.c_int()
    check(kit.lib.gcuSetDevice(1))
    address = kit.malloc(100)
    check(kit.lib.gcuSetDevice(0))
    check(kit.lib.gcuPointerGetDevice(found, address + 50))
    assert found.value == 1
    check(kit.lib.gcuFree(address))  # whichever device is the current one
    kit.fails("gcuErrorInvalidPointer", kit.lib.gcuPointerGetDevice(found, address))
    check(kit.lib.gcuPointerGetDevice(found, np.zeros(3).ctypes.data))
    assert found.value == -1


def test_copies_between_devices(kit: Kit) -> None:
    data = np.arange(1000)
    first = kit.put(data)
    check(kit.lib.gcuSetDevice(1))
    second = kit.malloc(data.nbytes)
    check(kit.lib.gcuMemcpyPeer(second, 1, first, 0, data.nbytes))
    assert (kit.get(second, np.int64, 1000) == data).all()
    check(kit.lib.gcuMemset(second, 0, data.nbytes))
    check(kit.lib.gcuMemcpyPeerAsync(second, 1, first, 0, data.nbytes, None))
    check(kit.lib.gcuStreamSynchronize(None))
    assert (kit.get(second, np.int64, 1000) == data).all()
    check(kit.lib.gcuMemset(second, 0, data.nbytes))
    check(kit.lib.gcuMemcpy(second, first, data.nbytes, BY_POINTERS))
    assert (kit.get(second, np.int64, 1000) == data).all()
    said = kit.fails("gcuErrorPeerAccess", kit.lib.gcuMemcpy(second, first, 8, DEVICE_TO_DEVICE))
    assert "of device 0, the target of device 1; gcuMemcpyPeer" in said
    said = kit.fails("gcuErrorInvalidPointer", kit.lib.gcuMemcpyPeer(second, 0, first, 1, 8))
    assert said == f"target {second:#x} is memory of device 1, not of device 0"
    kit.fails("gcuErrorInvalidDevice", kit.lib.gcuMemcpyPeer(second, 9, first, 0, 8))
    kit.fails("gcuErrorInvalidPointer", kit.lib.gcuMemcpyPeer(second, 1, first, 0, 8001))
    host = np.zeros(8, np.uint8)
    for call in (lambda: kit.lib.gcuMemset(first, 0, 8),
                 lambda: kit.lib.gcuMemcpy(first, host.ctypes.data, 8, HOST_TO_DEVICE)):
        said = kit.fails("gcuErrorInvalidPointer", call())
        assert said == f"target {first:#x} is memory of device 0, not of device 1"
    check(kit.lib.gcuFree(first))
    check(kit.lib.gcuFree(second))


def test_many_blocks(kit: Kit, rng: np.random.Generator) -> None:
    """Blocks of all sizes, freed in any order, never overlap and keep what was written."""
    live: dict[int, tuple[int, int]] = {}
    for turn in range(400):
        if live and rng.random() < 0.4:
            address = list(live)[rng.integers(len(live))]
            size, value = live.pop(address)
            assert (kit.get(address, np.uint8, size) == value).all()
            check(kit.lib.gcuFree(address))
        else:
            size, value = int(rng.integers(1, 20000)), turn % 256
            address = kit.malloc(size)
            check(kit.lib.gcuMemset(address, value, size))
            assert all(address + size <= start or start + length <= address
                       for start, (length, _) in live.items())
            live[address] = size, value
    for address in live:
        check(kit.lib.gcuFree(address))
