"""How a parameter of a kernel lies in memory, when not as the graph has it.

A kernel that reads weights may want them in panels: `width` columns side by side, all steps of k
one after the other (the packed B of GotoBLAS and BLIS, the blocked weights of convolutions).
Constants are brought into that form once, when a graph is compiled, so kernels never pack them;
what stays the same in all turns of a loop is packed before it (`packing_kernel.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from terrazzo.dtypes import DType

Steps = tuple[int, int]  # of an axis: how many, and how far apart in the flat original


@dataclass(frozen=True)
class Packing:
    """A gather by strides from a flat constant, into panels that are filled up with zeros:

        [batch...][columns / width][k...][width]

    Element (b, n, k) of the original is at `start + b*strides + n*stride + k*strides`. With
    `together` above 1 so many steps of the last k axis, filled up with zeros too, lie side by side
    for each column, as instructions want them that add up products of neighbours:

        [batch...][columns / width][k...][last k / together][width][together]
    """

    dtype: DType  # of the packed elements; wider than the original's where that pays
    width: int
    columns: Steps
    k: tuple[Steps, ...]
    batch: tuple[Steps, ...] = ()
    start: int = 0
    together: int = 1

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the packed constant."""
        batch, k = ([n for n, _ in steps] for steps in (self.batch, self.k))
        panels = math.ceil(self.columns[0] / self.width)
        if self.together == 1:
            return (*batch, panels, *k, self.width)
        return (*batch, panels, *k[:-1], math.ceil(k[-1] / self.together), self.width,
                self.together)

    @property
    def text(self) -> str:
        """The layout in a few words."""
        axes = {"batch": self.batch, "columns": (self.columns,), "k": self.k}
        parts = [f"{name} {'x'.join(f'{n}:{s}' for n, s in steps)}" for name, steps in axes.items()
                 if steps]
        return f"{', '.join(parts)} in panels of {self.width}" + (
            f", {self.together} steps together" if self.together > 1 else "")

    @property
    def size(self) -> int:
        """How many elements the packed constant has."""
        return math.prod(self.shape)

    def apply(self, constant: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """The packed form of a constant, flat; into `out` where that is given."""
        packed = np.empty(self.size, self.dtype.np) if out is None else out
        if not packed.size:
            return packed
        count, stride = self.columns
        steps = [*self.batch, *self.k]
        flat = np.ascontiguousarray(constant).reshape(-1)[self.start:]
        matrix = np.lib.stride_tricks.as_strided(
            flat, [*(n for n, _ in steps), count],
            [s * flat.itemsize for s in (*(s for _, s in steps), stride)])
        panels = packed.reshape(self.shape)
        for at in np.ndindex(*(n for n, _ in self.batch)):
            # A panel at a time stays in the cache, whichever way the original lies.
            for number in range(self.shape[len(self.batch)]):
                first = number * self.width
                self._fill(panels[(*at, number)], matrix[at][..., first:first + self.width])
        return packed

    def _fill(self, panel: np.ndarray, source: np.ndarray) -> None:
        """One panel from its columns, which are the last axis of `source`."""
        width = source.shape[-1]
        if self.together == 1:
            panel[..., :width] = source
            panel[..., width:] = 0
            return
        if width < self.width or source.shape[-2] % self.together:
            panel[...] = 0
        for i in range(self.together):
            part = source[..., i::self.together, :]
            panel[..., :part.shape[-2], :width, i] = part
