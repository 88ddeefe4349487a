"""Trampolines pass every argument on, and let other Python threads run meanwhile."""

from __future__ import annotations

import ctypes
import threading
import time

import numpy as np
import pytest

from terrazzo.chips.cpu.trampoline import python_function

i64, pointer = ctypes.c_int64, ctypes.c_void_p


def address_of(callback: object) -> int:
    return ctypes.cast(callback, pointer).value or 0  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_integers_arrive(count: int) -> None:
    seen: list[tuple[int, ...]] = []
    target = ctypes.CFUNCTYPE(None, *[i64] * count)(lambda *a: seen.append(a))
    function = python_function(address_of(target), 0, count)
    assert function(*range(1, count + 1)) == count
    assert seen == [tuple(range(1, count + 1))]


def test_what_counts_as_an_integer() -> None:
    seen: list[tuple[int, ...]] = []
    target = ctypes.CFUNCTYPE(None, *[i64] * 3)(lambda *a: seen.append(a))
    function = python_function(address_of(target), 0, 3)
    function(-1, 2**64 - 2, np.int64(7))
    assert seen == [(-1, -2, 7)]
    for wrong in (1.5, None, "7"):
        with pytest.raises(TypeError):
            function(1, wrong, 3)
    assert len(seen) == 1


def test_objects_arrive_as_their_addresses() -> None:
    seen: list[tuple[int, ...]] = []
    target = ctypes.CFUNCTYPE(None, pointer, pointer, i64)(lambda *a: seen.append(a))
    things = object(), object()
    python_function(address_of(target), 2, 1)(*things, 5)
    assert seen == [(id(things[0]), id(things[1]), 5)]


def test_other_threads_run_during_a_call() -> None:
    ticked = threading.Event()
    # A callback that waits for another Python thread would never return if the lock were held.
    target = ctypes.CFUNCTYPE(None, i64)(lambda *a: ticked.wait(10))
    ticker = threading.Timer(0.05, ticked.set)
    start = time.monotonic()
    ticker.start()
    python_function(address_of(target), 0, 1)(1)
    assert ticked.is_set() and time.monotonic() - start < 5
