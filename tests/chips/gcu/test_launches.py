"""Kernels that share a launch, and tasks that are a unit's in one stretch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.gcu.build import compiler
from terrazzo.chips.gcu.chip import Described
from terrazzo.chips.gcu.device import devices
from terrazzo.chips.gcu.launches import members, tasks_of
from terrazzo.chips.gcu.shares import shared_out
from terrazzo.dtypes import float32
from terrazzo.errors import MissingDependency
from terrazzo.index import Index, Var
from terrazzo.loop.interpret import run
from terrazzo.loop.ir import Atomic, Buffer, For, Function, Store, walk
from terrazzo.loop.steps import Argument, Call

try:
    compiler()
except MissingDependency as missing:
    pytest.skip(str(missing), allow_module_level=True)

UNITS = 48
NAMES = "abcdefgh"


@pytest.fixture
def gcu() -> Iterator[Any]:
    with tz.chip("gcu") as chip:
        yield chip


def kernel(count: Index = 4, atomic: bool = False) -> Function:
    """y = x + 1, a task for each element."""
    x, y = Buffer("x", float32, count), Buffer("y", float32, count)
    i = Var("i", 0)
    store = Atomic("add", y, i, x[i]) if atomic else Store(y, i, x[i] + 1.0)
    return Function("k", (x, y), (), For(i, 0, count, store, "parallel"))


def copies(text: str, function: Function | None = None, **places: Argument) -> list[Call]:
    """Calls that read one place and write another: "ab bc" copies a to b, then b to c."""
    made = function or kernel()

    def place(name: str) -> Argument:
        return places.get(name, Argument("slot", NAMES.index(name)))

    return [Call(made, (place(a), place(b)), f"k{a}{b}") for a, b in text.split()]


def launches(calls: list[Call], over: dict[int, int] | None = None) -> list[int]:
    return [member.launch for member in members(calls, UNITS, over or {})]


# ---------------------------------------------------------------- who shares one
@pytest.mark.parametrize(("text", "expected"), [
    ("ab cd ef", [0, 0, 0]),  # nothing in common
    ("ab ac ad", [0, 0, 0]),  # they read the same
    ("ab bc cd", [0, 1, 2]),  # each reads what the one before wrote
    ("ab cb", [0, 1]),  # both write the same
    ("ab ca", [0, 1]),  # the second overwrites what the first reads
    ("ab bc ad", [0, 1, 0]),  # the third waits for nothing
    ("ab bc ad dc", [0, 1, 0, 2]),
])
def test_a_kernel_waits_for_what_it_reads_and_for_readers_of_what_it_writes(
        text: str, expected: list[int]) -> None:
    assert launches(copies(text)) == expected
    assert launches(copies(text, kernel(atomic=True))) == expected


def test_an_output_in_the_place_of_an_input_is_the_same_memory() -> None:
    calls = copies("ab cd")
    assert launches(calls) == [0, 0]
    assert launches(calls, over={3: 0}) == [0, 1]  # d is written where a is read


@pytest.mark.parametrize(("offset", "expected"), [(0, [0, 1]), (15, [0, 1]), (16, [0, 0]),
                                                  (Var("n"), [0, 1])])
def test_places_in_the_arena_meet_where_they_overlap(offset: Index, expected: list[int]) -> None:
    calls = copies("ab cd", b=Argument("arena"), c=Argument("arena", 0, offset))
    assert launches(calls) == expected


def test_constants_are_never_written() -> None:
    assert launches(copies("ab ac", a=Argument("constant"))) == [0, 0]


def test_kernels_of_unknown_length_have_launches_of_their_own() -> None:
    unknown = kernel(Var("n", 0))
    assert tasks_of(unknown) is None
    assert launches([*copies("ab"), *copies("cd", unknown), *copies("ef")]) == [0, 1, 2]


def test_tasks_of_all_members_are_dealt_out_to_the_units_in_turn() -> None:
    calls = [*copies("ab", kernel(40)), *copies("cd", kernel(10)), *copies("ef", kernel(96)),
             *copies("gh", kernel(1))]
    found = members(calls, UNITS, {})
    assert [m.first for m in found] == [0, 40, 0, 2]  # where all units have as many, it is all one
    assert [m.is_head for m in found] == [True, False, False, False]


# ---------------------------------------------------------------- what it takes
def cycles(gcu: Described, function: Any, *arrays: np.ndarray) -> list[int]:
    call = tz.jit(function)
    call(*arrays)
    with devices(gcu.description).traced() as records:
        call(*arrays)
    return [r.cycles for r in records if not r.bytes and sum(r.counts)]


def test_kernels_side_by_side_take_one_launch_and_the_time_of_the_longest(
        gcu: Described, rng: np.random.Generator) -> None:
    arrays = [rng.standard_normal(n).astype(np.float32) for n in (64, 60, 50)]
    (alone,) = cycles(gcu, tz.exp, arrays[0])
    (together,) = cycles(gcu, lambda x, y, z: (tz.exp(x), tz.sin(y), tz.tanh(z)), *arrays)
    assert together < alone + 500 < alone + gcu.description.launch_cycles  # units of their own
    made = tz.jit(lambda x, y, z: (tz.exp(x), tz.sin(y), tz.tanh(z)))(*arrays)
    for found, wanted in zip(made, (np.exp(arrays[0]), np.sin(arrays[1]), np.tanh(arrays[2]))):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_counts_are_the_same_with_company(gcu: Described, rng: np.random.Generator) -> None:
    """All that several kernels count in one launch is what they count by themselves."""
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((70, 300), (50,))]

    def total(function: Any, *given: np.ndarray) -> np.ndarray:
        call = tz.jit(function)
        call(*given)
        with devices(gcu.description).traced() as records:
            call(*given)
        kernels = [r for r in records if not r.bytes and sum(r.counts)]
        assert len(kernels) == 1
        return np.array(list(kernels[0].counts))[:7]  # without that of launches

    apart = total(tz.softmax, arrays[0]) + total(tz.exp, arrays[1])
    np.testing.assert_array_equal(total(lambda x, y: (tz.softmax(x), tz.exp(y)), *arrays), apart)


# ---------------------------------------------------------------- one stretch a unit
@pytest.mark.parametrize("count", [1, 48, 49, 95, 96, 1000])
def test_every_task_runs_once_in_as_many_stretches_as_there_are_units(count: int) -> None:
    function = kernel(count)
    made = shared_out(function, UNITS)
    tasks = tasks_of(made)
    assert tasks is not None and tasks <= UNITS
    assert -(-count // tasks) == -(-count // min(count, UNITS))  # the longest is no longer
    assert sum(isinstance(s, For) and s.kind == "parallel" for s in walk(made.body)) == 1
    x, y = np.arange(count, dtype=np.float32), np.zeros(count, np.float32)
    run(made, [x, y], {})
    np.testing.assert_array_equal(y, x + 1)


@pytest.mark.parametrize("function", [tz.softmax, lambda x: tz.layer_norm(x)], ids=["softmax",
                                                                                    "layer norm"])
def test_short_rows_are_brought_many_at_a_time(gcu: Described, function: Any,
                                               rng: np.random.Generator) -> None:
    """2048 rows of 256 bytes, each with a transfer in and out, would wait 43 * 400 cycles."""
    (found,) = cycles(gcu, function, rng.standard_normal((2048, 64)).astype(np.float32))
    assert found - gcu.description.launch_cycles < 5000
