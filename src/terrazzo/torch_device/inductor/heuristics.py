"""Block sizes of the kernels that Inductor generates, chosen by what the chip's units would do.

Generated kernels import this module by the name of Inductor's own; what stands here replaces the
heuristics of the same name, the rest is Inductor's. Programs have one warp. A kernel gets the block
with which the unit that has most to do is done first: blocks too large leave units idle, small ones
wait for memory. With `max_autotune` the three best are run, and their modelled times decide.

It is imported by the processes in which Inductor compiles, too: there it chooses the backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import TRITON_MAX_BLOCK, HeuristicType, ReductionHint
from torch._inductor.runtime.runtime_utils import next_power_of_2
from triton import Config
from triton.runtime import driver

from terrazzo.triton_gcu.activate import activate
from terrazzo.triton_gcu.chip import description
from terrazzo.triton_gcu.driver import GCUDriver

TILE = 4096  # elements of a block at most: one transfer of numbers of four bytes
ROWS_TILE = 4 * TILE  # where whole rows are kept
CONTROL = 40  # cycles, about, that a program takes for addresses and masks
OPERATIONS = 24  # of the vector unit, about, for an element: an exponential takes 15
NARROW = 16  # elements of a row that memory hands out at once

if not isinstance(getattr(driver.active, "_obj", driver.active), GCUDriver):
    activate()


def __getattr__(name: str) -> Any:
    return getattr(triton_heuristics, name)


def pointwise(size_hints: dict[str, int], triton_meta: Any, tile_hint: Any = None,
              filename: Any = None, min_elem_per_thread: int = 0, inductor_meta: Any = None,
              **options: Any) -> Any:
    """Elementwise kernels of one to three dimensions."""
    if "combo_grid_meta" in inductor_meta:
        return triton_heuristics.pointwise(
            size_hints, triton_meta, tile_hint, filename, min_elem_per_thread, inductor_meta,
            **options)
    sizes = _sizes(size_hints, inductor_meta)
    work = _work(sizes, inductor_meta)
    ranked = sorted(_tiles(sizes), key=lambda tile: _pointwise_cycles(sizes, tile, work))
    return _tuned(size_hints, [_blocks(sizes, tile) for tile in ranked], triton_meta, filename,
                  inductor_meta, HeuristicType.POINTWISE)


def reduction(size_hints: dict[str, int], reduction_hint: Any = False, triton_meta: Any = None,
              filename: Any = None, inductor_meta: Any = None, **options: Any) -> Any:
    """Reductions that go over their rows piece by piece."""
    if not _is_plain(size_hints, inductor_meta):
        return triton_heuristics.reduction(
            size_hints, reduction_hint, triton_meta, filename, inductor_meta, **options)
    sizes = _sizes(size_hints, inductor_meta)
    work = _work(sizes, inductor_meta)
    across = min(next_power_of_2(sizes["x"]), 64) if reduction_hint == ReductionHint.OUTER else 1
    columns = [n for n in _powers(sizes["x"], TILE) if n >= across]
    ranked = sorted(columns, key=lambda n: _reduction_cycles(sizes, n, work))
    row = next_power_of_2(sizes["r0_"])
    blocks = [{"XBLOCK": n, "R0_BLOCK": max(min(TILE // n, row), 1)} for n in ranked]
    return _tuned(size_hints, blocks, triton_meta, filename,
                  {**inductor_meta, "reduction_hint": reduction_hint}, HeuristicType.REDUCTION)


def persistent_reduction(size_hints: dict[str, int], reduction_hint: Any = False,
                         triton_meta: Any = None, filename: Any = None, inductor_meta: Any = None,
                         **options: Any) -> Any:
    """Reductions that hold whole rows."""
    if not _is_plain(size_hints, inductor_meta):
        return triton_heuristics.persistent_reduction(
            size_hints, reduction_hint, triton_meta, filename, inductor_meta, **options)
    sizes = _sizes(size_hints, inductor_meta)
    work = _work(sizes, inductor_meta)
    most = max(ROWS_TILE // next_power_of_2(sizes["r0_"]), 1)
    ranked = sorted(_powers(sizes["x"], most), key=lambda n: _reduction_cycles(sizes, n, work))
    return _tuned(size_hints, [{"XBLOCK": n} for n in ranked], triton_meta, filename,
                  {**inductor_meta, "reduction_hint": reduction_hint},
                  HeuristicType.PERSISTENT_REDUCTION)


# ---------------------------------------------------------------- what is known of a kernel
def _sizes(size_hints: dict[str, int], inductor_meta: dict[str, Any]) -> dict[str, int]:
    """Elements in each dimension: exact where they are known, else Inductor's powers of two."""
    sizes = {**size_hints, **inductor_meta.get("gcu_sizes", {})}
    if inductor_meta.get("no_x_dim"):
        sizes["x"] = 1
    return {axis: max(int(sizes[axis]), 1) for axis in size_hints}


@dataclass(frozen=True)
class Work:
    """What a kernel does with memory."""

    element: float  # bytes, of all that is read and written, to an element
    accesses: int  # loads and stores of a program


def _work(sizes: dict[str, int], inductor_meta: dict[str, Any]) -> Work:
    elements = math.prod(sizes.values())
    moved = inductor_meta.get("gcu_bytes", 8 * elements)
    known = (inductor_meta.get(key, 1) for key in ("num_load", "num_store"))
    return Work(moved / elements, max(sum(known), 1))


def _is_plain(size_hints: dict[str, int], inductor_meta: dict[str, Any]) -> bool:
    return (set(size_hints) == {"x", "r0_"} and "RSPLIT_SIZE" not in inductor_meta
            and "combo_grid_meta" not in inductor_meta)


def _powers(size: int, most: int) -> list[int]:
    last = min(next_power_of_2(size), most)
    return [1 << n for n in range(last.bit_length())]


def _tiles(sizes: dict[str, int]) -> Iterator[tuple[int, ...]]:
    """Blocks to choose from: powers of two in each dimension."""
    found: list[tuple[int, ...]] = [()]
    for axis, size in sizes.items():
        found = [(*tile, n) for tile in found
                 for n in _powers(size, TRITON_MAX_BLOCK[axis.upper()])
                 if math.prod(tile) * n <= TILE]
    yield from found


def _blocks(sizes: dict[str, int], tile: tuple[int, ...]) -> dict[str, int]:
    return {f"{axis.upper()}BLOCK": n for axis, n in zip(sizes, tile)}


# ---------------------------------------------------------------- what a block costs
def _unit_cycles(programs: int, computed: int, moved: float, transfers: int) -> float:
    """Cycles, about, of the unit that has most to do, by what each program computes and moves."""
    chip = description()
    shared = min(chip.memory_bytes_per_cycle / min(programs, chip.units),
                 chip.unit_bytes_per_cycle)
    data = moved / shared
    waited = ((transfers - 1) * chip.dma_latency + data) / chip.dma_in_flight
    stream = max(data, waited)
    worked = CONTROL + OPERATIONS * math.ceil(computed / (chip.vector_bits // 32))
    each = (chip.dma_latency + max(stream, worked) + min(stream, worked) / transfers
            + chip.wave_cycles)
    return math.ceil(programs / chip.units) * each


def _transfers(elements: int, work: Work) -> int:
    """How many times a program waits for memory: it does for each place that it reads or writes."""
    return max(work.accesses, math.ceil(elements * work.element / description().transfer_bytes))


def _pointwise_cycles(sizes: dict[str, int], tile: tuple[int, ...], work: Work) -> float:
    programs = math.prod(math.ceil(size / n) for size, n in zip(sizes.values(), tile))
    held = math.prod(min(size, n) for size, n in zip(sizes.values(), tile))
    cycles = _unit_cycles(programs, math.prod(tile), held * work.element,
                          _transfers(held, work))
    if len(tile) == 1:
        return cycles
    for size, n in zip(sizes.values(), tile):  # whichever lies side by side in memory
        cycles *= 1 + min(NARROW, size) / n
    return cycles


def _reduction_cycles(sizes: dict[str, int], columns: int, work: Work) -> float:
    elements = columns * sizes["r0_"]
    return _unit_cycles(math.ceil(sizes["x"] / columns), elements, elements * work.element,
                        _transfers(elements, work))


def _tuned(size_hints: dict[str, int], ranked: list[dict[str, int]], triton_meta: Any,
           filename: Any, inductor_meta: Any, kind: HeuristicType) -> Callable[..., Any]:
    tries = 3 if inductor_meta.get("max_autotune") and filename else 1
    configs = [Config(blocks, num_warps=1, num_stages=1) for blocks in ranked[:tries]]
    tuned: Callable[..., Any] = triton_heuristics.cached_autotune(
        size_hints, configs, triton_meta=triton_meta, inductor_meta=inductor_meta,
        heuristic_type=kind, filename=filename)
    return tuned
