"""Convolutions on CPUs, their weights in panels: packed ahead where constant, else at each call."""

from __future__ import annotations

import math

from terrazzo.chips.cpu.conv_rows import ReadingConv
from terrazzo.chips.cpu.kernel_parts import Names
from terrazzo.index import minimum
from terrazzo.loop.ir import Buffer, For, Stmt
from terrazzo.loop.packing import Packing
from terrazzo.loop.panels import KAxis, Panel

_PACK_ELEMENTS = 16384  # elements worth packing in a task of their own
_PIECE_STEPS = 288  # steps of k that a task packs: runs long enough to be read ahead


class PackingConv(ReadingConv):
    """A convolution whose weights are brought into panels."""

    def packing(self) -> Packing | None:
        """How constant weights shall lie, if their strides are known."""
        conv = self.conv
        steps = [(s.taps, s.w_step) for s in self.spaces] + [(conv.channels, conv.w_channel)]
        numbers = [conv.w_output, conv.w_start, *(step for _, step in steps)]
        if not all(isinstance(n, int) for n in numbers):
            return None
        output, start, *between = (n for n in numbers if isinstance(n, int))
        k = tuple((n, step) for (n, _), step in zip(steps, between, strict=True))
        return Packing(self.wide, self.tiling.nr, (self.share, output), k,
                       ((conv.groups, self.share * output),), start)

    def pack(self, packed: Buffer) -> Stmt:
        """All weights in panels, in parallel: all taps of some channels of a panel are a task."""
        conv, nr, panels = self.conv, self.tiling.nr, self.tiling.panels
        taps = math.prod(s.taps for s in self.spaces)
        each = min(conv.channels, max(1, _PIECE_STEPS // taps))
        pieces = math.ceil(conv.channels / each)
        task, names = self.var("task"), Names(self.fresh)
        panel = names("panel", task // pieces)  # of all groups
        channel = names("channel", task % pieces * each)
        channels = each if conv.channels % each == 0 else names(
            "channels", minimum(each, conv.channels - channel), each)
        first = names("outputs", panel % panels * nr)
        live = nr if self.share % nr == 0 else names(
            "live", minimum(nr, self.share - first), nr)
        start = names("from", conv.w_start + channel * conv.w_channel + (
            panel // panels * self.share + first) * conv.w_output)
        to = names("to", panel * (self.depth * nr) + channel * nr)
        k = [KAxis(channels, conv.w_channel, nr)]
        room = conv.channels * nr
        for space in reversed(self.spaces):
            k.insert(0, KAxis(space.taps, space.w_step, room))
            room *= space.taps
        body = Panel(packed, to, self.w, start, nr, live, conv.w_output, self.fresh).filled(k)
        return For(task, 0, conv.groups * panels * pieces, names.around(body), "parallel",
                   max(1, _PACK_ELEMENTS // (each * taps * nr)))
