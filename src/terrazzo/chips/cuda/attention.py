"""Attention on a GPU: which kernels there are for it, by rules with reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from terrazzo.base.shapes import num_elements
from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.triton.attention import (
    Attention,
    Tiles,
    attention_kernel,
    describable,
    joined_program,
    joining_kernel,
    parts_program,
)
from terrazzo.codegen.triton.dot import HALVES
from terrazzo.codegen.triton.module import Written
from terrazzo.dtypes import float32
from terrazzo.expr.ir import Program
from terrazzo.index import Index, bounds

MOST_SIZE = 256  # of a key or a value: sums of a tile stay in registers
FEW_ROWS = 64  # up to here queries share a tile, and parts of the keys are attended to apart
_PART_KEYS = 128  # that a part has at least
_PROGRAMS, _MOST_PARTS = 8, 32  # programs a multiprocessor that are wanted, parts that are joined


def has_kernel(inputs: Sequence[Any]) -> bool:
    """Whether attention of such inputs has a kernel; the rest is products and softmax."""
    q, k, v, *rest = inputs
    sizes = [q.shape[-1], v.shape[-1]]
    mask = rest[0] if rest else None
    empty = any(isinstance(n, int) and n == 0 for t in (q, k, v) for n in t.shape)
    return not empty and all(isinstance(n, int) and n <= MOST_SIZE for n in sizes) and all(
        t in (float32, *HALVES) for t in {x.dtype for x in (q, k, v)}) and (
            mask is None or mask.dtype.is_bool or mask.dtype in (float32, *HALVES))


def kernels(program: Program, spec: ChipSpec) -> list[tuple[Program, list[Written]]]:
    """The programs that attention becomes, each with its kernels from the best on."""
    attention = Attention.of(program)
    cut = tiles(attention, spec)
    sizes = [bounds(num_elements(t.shape))[1] for t in (*program.inputs, *program.outputs)]
    large = any(top is None or top >= 1 << 31 for top in sizes)

    def forms(make: Any, part: Program) -> list[Written]:
        def of(cut: Tiles, wide: bool) -> Written:
            made: Written = make(part, attention, spec, cut, wide=wide)
            return made

        plain = replace(cut, descriptors=False)
        if program.dims:
            return [*([of(cut, False)] if cut.descriptors else []), of(plain, False),
                    *([of(plain, True)] if large else [])]
        return [of(cut, large), *([of(plain, large)] if cut.descriptors else [])]

    if cut.parts == 1:
        return [(program, forms(attention_kernel, program))]
    parts = parts_program(program, attention, cut)
    joined = joined_program(program, parts)
    return [(parts, forms(attention_kernel, parts)), (joined, forms(joining_kernel, joined))]


def tiles(attention: Attention, spec: ChipSpec) -> Tiles:
    """How attention is cut."""
    rows = _rows(attention)
    if rows is not None:
        return _few_rows(attention, spec, rows)
    largest = max(attention.size, attention.value_size)
    if attention.dtype is float32:
        if largest > 128:  # two stages of keys and values are more than there is of shared memory
            return Tiles(32, 32, warps=4, stages=1)
        return Tiles(64, 32 if largest > 64 else 64, warps=4, stages=2)
    descriptors = spec.has("tma") and describable(attention.k, attention.size) and describable(
        attention.v, attention.value_size)
    # Two programs share a multiprocessor, so that one weighs while the other multiplies.
    if largest > 128:
        return Tiles(64, 64, warps=4, stages=2, descriptors=descriptors)
    if largest > 64:
        return Tiles(128, 64, warps=4, stages=2, descriptors=descriptors)
    return Tiles(128, 64, warps=4, stages=3, descriptors=descriptors) if (
        attention.causal) else Tiles(64, 128, warps=4, stages=2, descriptors=descriptors)


def _rows(attention: Attention) -> int | None:
    """The rows of a tile for all heads that share keys, where there are few."""
    shared, queries = attention.shared, attention.queries
    if isinstance(shared, int) and isinstance(queries, int) and shared * queries <= FEW_ROWS:
        return shared * queries
    return None


def _few_rows(attention: Attention, spec: ChipSpec, rows: int) -> Tiles:
    """Keys and values are read once, by as many programs as keep memory busy."""
    high = max(16, 1 << (rows - 1).bit_length())
    largest = max(attention.size, attention.value_size)
    keys: Index = attention.keys
    members = num_elements([*attention.batch, attention.heads]) // attention.shared
    parts = 1
    if isinstance(members, int) and isinstance(keys, int):
        parts = max(1, min(_PROGRAMS * spec.cores // members, keys // _PART_KEYS, _MOST_PARTS))
    wide = 32 if attention.dtype is float32 or largest > 128 else 64
    return Tiles(high, wide, warps=4, stages=3, parts=parts, packed=attention.shared != 1)
