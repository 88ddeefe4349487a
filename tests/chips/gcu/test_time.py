"""The model of time, term by term, against the formulas of docs/gcu.md written out in Python."""

from __future__ import annotations

import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from terrazzo.chips.gcu import description
from terrazzo.chips.gcu.description import BUILT_IN, Description

VECTOR, MATRIX, SCALAR, LOAD, STORE, LOCAL, TRANSFERS, LAUNCHES = range(8)
GCU = replace(description.read(BUILT_IN), launch_cycles=0)

sys.path.insert(0, str(Path(__file__).parent))
from model import Model, build  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def cycles(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The model of the C file alone, called with programs as dictionaries of counts."""
    model = build(tmp_path_factory.mktemp("time"))

    def call(programs: list[dict[int, int]], at_once: int | None = None,
             chip: Description = GCU) -> int:
        table = np.zeros((len(programs), 8), np.int64)
        for row, program in zip(table, programs):
            for which, number in program.items():
                row[which] = number
        return model(table, at_once, chip)

    return call


def over(a: int, b: int) -> int:
    return -(-a // b)


def expected(programs: list[dict[int, int]], at_once: int, chip: Description) -> int:
    """The formulas of docs/gcu.md."""
    summed = []
    for q in range(min(at_once, len(programs))):
        mine = programs[q::at_once]
        summed.append({which: sum(p.get(which, 0) for p in mine) for which in range(8)})
    busy = [0] * chip.units
    for start in range(0, len(summed), chip.units):
        wave = summed[start:start + chip.units]
        moved = sum(p[LOAD] + p[STORE] for p in wave)
        for u, p in enumerate(wave):
            compute = max(p[VECTOR], p[MATRIX],
                          over(p[LOCAL], chip.scratchpad_bytes_per_cycle)) + p[SCALAR]
            size, n = p[LOAD] + p[STORE], max(p[TRANSFERS], 1)
            total = compute
            if size:
                data = max(over(size, chip.unit_bytes_per_cycle),
                           over(min(size * len(wave), moved), chip.memory_bytes_per_cycle))
                stream = max(data, over((n - 1) * chip.dma_latency + data, chip.dma_in_flight))
                total = chip.dma_latency + (
                    stream + compute if chip.dma_in_flight == 1 else
                    max(compute, stream) + over(min(compute, stream), n))
            busy[u] += total + (chip.wave_cycles if start else 0)
    return chip.launch_cycles + max(busy)


def test_the_units_of_a_program_work_side_by_side_and_control_does_not(cycles: Model) -> None:
    assert cycles([{VECTOR: 700}]) == 700
    assert cycles([{VECTOR: 700, MATRIX: 900}]) == 900
    assert cycles([{VECTOR: 700, MATRIX: 900, SCALAR: 50}]) == 950
    assert cycles([{LOCAL: 1024 * 30 + 1}]) == 31
    assert cycles([{LOCAL: 1024 * 30, VECTOR: 29}]) == 30


def test_a_launch_costs_what_the_chip_says(cycles: Model) -> None:
    assert cycles([{}], chip=replace(GCU, launch_cycles=2800)) == 2800
    assert cycles([{VECTOR: 5}], chip=replace(GCU, launch_cycles=2800)) == 2805
    assert cycles([]) == 0


def test_one_unit_moves_no_more_than_its_dma(cycles: Model) -> None:
    assert cycles([{LOAD: 64 * 1000, TRANSFERS: 1}]) == 400 + 1000
    assert cycles([{LOAD: 64 * 600, STORE: 64 * 400, TRANSFERS: 1}]) == 400 + 1000


def test_units_share_the_memory(cycles: Model) -> None:
    one = {LOAD: 576 * 1000, TRANSFERS: 1}
    assert cycles([one] * 9) == 400 + 9000  # nine times 64 bytes are 576
    assert cycles([one] * 18) == 400 + 18_000
    assert cycles([one] * 48) == 400 + 48_000


def test_a_unit_that_moves_more_than_others_waits_for_no_more_than_all_bytes(
        cycles: Model) -> None:
    few, many = {LOAD: 64, TRANSFERS: 1}, {LOAD: 576 * 64, TRANSFERS: 1}
    assert cycles([few] * 47 + [many]) == 400 + 576  # its own DMA is slower than the memory
    assert cycles([few] * 24 + [many] * 24) == 400 + over(24 * (64 + 576 * 64), 576)


def test_latency_is_hidden_as_far_as_transfers_are_in_flight(cycles: Model) -> None:
    moved = {LOAD: 64 * 1000, TRANSFERS: 11}
    assert cycles([moved], chip=replace(GCU, dma_in_flight=1)) == 11 * 400 + 1000
    assert cycles([moved]) == 400 + (10 * 400 + 1000) // 2
    assert cycles([moved], chip=replace(GCU, dma_in_flight=16)) == 400 + 1000
    large = {LOAD: 64 * 100_000, TRANSFERS: 11}
    assert cycles([large]) == 400 + 100_000


def test_transfers_run_beside_arithmetic_but_for_the_first_piece(cycles: Model) -> None:
    work = {LOAD: 64 * 8000, TRANSFERS: 10, VECTOR: 5000}
    assert cycles([work]) == 400 + 8000 + 500
    assert cycles([work | {VECTOR: 20_000}]) == 400 + 20_000 + 800
    assert cycles([work | {TRANSFERS: 1}]) == 400 + 8000 + 5000  # one piece: nothing overlaps
    assert cycles([work], chip=replace(GCU, dma_in_flight=1)) == 400 * 10 + 8000 + 5000


def test_more_programs_than_units_come_in_waves(cycles: Model) -> None:
    one = {VECTOR: 1000}
    assert cycles([one] * 48) == 1000
    assert cycles([one] * 49) == cycles([one] * 96) == 2100
    assert cycles([one] * 480) == 10_000 + 9 * 100
    # A unit goes on as soon as it is free: the wave does not wait for its slowest program.
    assert cycles([{VECTOR: 9000}] + [one] * 47 + [one] * 48) == 9000 + 100 + 1000
    assert cycles([{VECTOR: 9000}] + [one] * 48 + [{VECTOR: 5000}]) == 10_100


def test_a_wave_shares_the_memory_among_its_own_programs(cycles: Model) -> None:
    one = {LOAD: 576 * 480, TRANSFERS: 1}
    alone = 400 + 9 * 480
    assert cycles([one]) == alone
    assert cycles([one] * 48) == 400 + 48 * 480
    assert cycles([one] * 49) == (400 + 48 * 480) + 100 + alone


def test_folded_programs_are_one_pipeline(cycles: Model) -> None:
    one = {LOAD: 64 * 1000, TRANSFERS: 2, VECTOR: 600}
    twice = {which: 2 * number for which, number in one.items()}
    assert cycles([one] * 2, at_once=1) == cycles([twice]) == 400 + 2000 + 300
    # Programs 0 and 48 are the first physical program's.
    assert cycles([{VECTOR: 10}] * 48 + [{VECTOR: 30}], at_once=48) == 40
    assert cycles([{VECTOR: 10}] * 200, at_once=96) == 10 * 3 + 100 + 10 * 2


def test_cycles_only_grow_with_counts(cycles: Model) -> None:
    rng = random.Random(3)
    for _ in range(200):
        programs = [_random_program(rng) for _ in range(rng.randint(1, 60))]
        before = cycles(programs)
        more = rng.choice(programs)
        which = rng.choice((VECTOR, MATRIX, SCALAR, LOCAL))
        more[which] = more.get(which, 0) + rng.randint(1, 10_000)
        assert cycles(programs) >= before


def _random_program(rng: random.Random) -> dict[int, int]:
    return {which: rng.choice((0, rng.randint(0, 100), rng.randint(0, 10 ** rng.randint(1, 12))))
            for which in range(8)} | {TRANSFERS: rng.randint(0, 1000)}


def test_random_counts_follow_the_formulas(cycles: Model) -> None:
    rng = random.Random(7)
    for _ in range(300):
        chip = replace(GCU, units=rng.choice((1, 3, 48)), dma_in_flight=rng.choice((1, 2, 5)),
                       dma_latency=rng.choice((0, 400)), launch_cycles=rng.choice((0, 2800)))
        programs = [_random_program(rng) for _ in range(rng.choice((1, 5, 48, 49, 130)))]
        at_once = rng.randint(1, len(programs) + 3)
        assert cycles(programs, at_once, chip) == expected(programs, at_once, chip)


def test_huge_counts_do_not_wrap_around(cycles: Model) -> None:
    huge = {LOAD: 1 << 58, TRANSFERS: 1 << 40}
    assert cycles([huge] * 48) == expected([huge] * 48, 48, GCU) > 1 << 50
