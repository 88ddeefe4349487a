"""Convolutions of bytes that keep channels apart (depthwise), on CPUs: vectors along the channels.

All taps of a window are written out, for some neighbouring pixels at once: their windows overlap,
so each byte is widened once for all of them, and each weight once for all pixels.
"""

from __future__ import annotations

import itertools
import math

from terrazzo.base.scalar import (
    Load,
    Scalar,
    cast,
)
from terrazzo.chips.cpu.kernel_parts import Kernel, digits, grain_of, product_of
from terrazzo.chips.cpu.quant_bytes import small_value
from terrazzo.chips.spec import ChipSpec
from terrazzo.dtypes import int32
from terrazzo.expr.contraction import ContractionStage, match_contraction
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.lower import storage_size
from terrazzo.index import Index, Var, coefficient, substitute
from terrazzo.loop.ir import Buffer, For, Function, Stmt, Store, block
from terrazzo.loop.packing import Packing

_MOST_TAPS = 25
_PIXELS = 4  # more would not fit into registers together with the weights
_TASK_PRODUCTS = 1 << 16  # below this a task of its own does not pay


def _known(size: Index | None) -> int:
    assert isinstance(size, int)
    return size


def lower_depthwise(program: Program, chip: ChipSpec,
                    constants: frozenset[Tensor] = frozenset()) -> Function | None:
    """The kernel of a depthwise convolution of bytes; None for all other programs."""
    found = match_contraction(program)
    if found is None or not _keeps_channels_apart(found):
        return None
    return _Depthwise(program, found, chip, constants).function()


def _keeps_channels_apart(found: ContractionStage) -> bool:
    """Whether outputs and the bytes they are made of are neighbours, under a small window."""
    channel, sums, x, w = found.outputs, found.reduce.axes, found.x, found.w
    if not found.positions or found.reduce.dtype is not int32 or not all(
            isinstance(a.extent, int) for a in (channel, *found.places[1:], *sums)):
        return False
    if math.prod(_known(a.extent) for a in sums) > _MOST_TAPS or None in map(
            small_value, (x, w)) or x.load is None or w.load is None:
        return False
    return x.stride(channel.var) == 1 and not any(p.var in w.vars for p in found.places) and all(
        isinstance(w.stride(a.var), int) for a in (channel, *sums))


class _Depthwise(Kernel):
    """One kernel in the making."""

    def __init__(self, program: Program, found: ContractionStage, chip: ChipSpec,
                 constants: frozenset[Tensor]):
        super().__init__(program, chip)
        self.found = found
        x, w = found.x.load, found.w.load
        assert x is not None and w is not None
        self.x, self.w = x, w
        self.packing = self.packing_of_weights() if self.w.source in constants else None
        for tensor in (*program.inputs, found.stage):
            name = self.fresh(tensor.name)
            self.buffers[tensor] = Buffer(name, tensor.dtype, storage_size(tensor),
                                          tensor is not found.stage)

    def packing_of_weights(self) -> Packing | None:
        """All channels of a tap side by side, one tap after the other, unless they lie so."""
        found = self.found
        address = self.w.source.flat(self.w.indices)
        steps = [(_known(a.extent), _known(coefficient(address, a.var)))
                 for a in (found.outputs, *found.reduce.axes)]
        if steps[0][1] == 1:
            return None
        start = substitute(address, {a.var: 0 for a in (found.outputs, *found.reduce.axes)})
        return Packing(self.w.dtype, steps[0][0], steps[0], tuple(steps[1:]), (),
                       _known(start))

    def function(self) -> Function:
        found = self.found
        body = self.rows()
        packed = {} if self.packing is None else {
            self.program.inputs.index(self.w.source): self.packing}
        return Function(self.program.name, tuple(self.buffers.values()), self.program.dims, body,
                        found.stage.origin, packed=packed)

    def rows(self) -> Stmt:
        """One task for some rows of pixels; in a row, a few pixels at a time, then one by one."""
        found = self.found
        *outer, last = found.places
        task, tile, single = (Var(self.fresh(n), 0) for n in ("row", "tile", "pixel"))
        values = digits(task, outer)
        width = _known(last.extent)
        whole = width // _PIXELS
        count, taps = (product_of(a.extent for a in axes)
                       for axes in ((found.outputs, last), found.reduce.axes))
        pixels = block(
            For(tile, 0, whole, self.pixels(values, tile * _PIXELS, _PIXELS)) if whole else None,
            For(single, whole * _PIXELS, width, self.pixels(values, single, 1))
            if width % _PIXELS else None)
        return For(task, 0, product_of(a.extent for a in outer), pixels, "parallel",
                   grain_of(_TASK_PRODUCTS, count * taps))

    def pixels(self, values: dict[Var, Index], first: Index, count: int) -> Stmt:
        """All channels of some neighbouring pixels."""
        found = self.found
        size = _known(found.outputs.extent)
        j = Var(self.fresh("channel"), 0, size - 1)
        stores = []
        for number in range(count):
            here = {**values, found.places[-1].var: first + number, found.outputs.var: j}
            address = found.stage.flat([here[a.var] for a in (*found.places, found.outputs)])
            assert not isinstance(address, Scalar)
            out = self.buffers[found.stage]
            stores.append(Store(out, address, cast(self.value(here), out.dtype)))
        return For(j, 0, size, block(*stores), "vector")

    def value(self, here: dict[Var, Index]) -> Scalar:
        """What the body makes of the sum over the window at some place."""
        found = self.found
        axes = found.reduce.axes
        total: Scalar | None = None
        for number, taps in enumerate(itertools.product(
                *(range(_known(a.extent)) for a in axes))):
            at = {**here, **{a.var: t for a, t in zip(axes, taps, strict=True)}}
            weight = self.on_buffers(self.w, at)
            if self.packing is not None:
                weight = Load(self.w.dtype, self.buffers[self.w.source], (
                    number * self.packing.width + here[found.outputs.var],))
            product = cast(self.on_buffers(self.x, at), int32) * cast(weight, int32)
            total = product if total is None else total + product
        assert total is not None
        return self.on_buffers(found.body, here, total)
