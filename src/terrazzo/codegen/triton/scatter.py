"""Prints a Triton kernel whose results go where data says, several to one place: by atomics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from terrazzo.base.scalar import Scalar
from terrazzo.base.shapes import Shape, num_elements, unflatten
from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.triton.kernel_lines import KernelLines
from terrazzo.codegen.triton.lines import NO_GUARD
from terrazzo.codegen.triton.module import Written, warps_for
from terrazzo.expr.ir import Program, Tensor, axes_for
from terrazzo.index import Index, ceildiv

Place: TypeAlias = Sequence[Index | Scalar]
BLOCK = 1024  # updates of a program


@dataclass(frozen=True, eq=False)
class Updates:
    """Numbers that are added to what lies at places, or compared with it."""

    shape: Shape  # of the updates
    target: Tensor
    place: Callable[[Sequence[Index]], Place]  # in the target, of an update
    value: Callable[[Sequence[Index]], Scalar]
    how: str  # add, max or min


def updates_kernel(program: Program, updates: Updates, chip: ChipSpec, wide: bool) -> Written:
    """The kernel of updates, in no order."""
    kernel = KernelLines(program, chip, wide, ())
    emitter, total = kernel.emitter, num_elements(updates.shape)
    lanes = min(BLOCK, 1 << (total - 1).bit_length()) if isinstance(total, int) else BLOCK
    block = kernel.constant("BLOCK", lanes)
    update = kernel.block("update", total, block, lanes, "", f"{kernel.instance} * {block}")
    places = unflatten(update, updates.shape)
    if len(places) > 1:
        emitter.axes = dict(zip(places, axes_for(updates.shape)))
    target = updates.target
    address = emitter.address(target, updates.place(places), NO_GUARD)
    value = emitter.typed(emitter.root(updates.value(places)), target.dtype)
    lanes_of = frozenset((update,))
    mask = emitter.mask(lanes_of)
    masked = f", mask={mask.text}" if mask else ""
    pointer = emitter.place(kernel.pointers[target], address, lanes_of)
    kernel.line(f'tl.atomic_{updates.how}({pointer}, {value.text}{masked}, sem="relaxed")')
    return kernel.as_written(ceildiv(total, lanes), warps_for(lanes, 32, kernel.rules))
