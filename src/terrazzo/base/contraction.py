"""What the axes of a sum of products are to the operator that makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from terrazzo.index import Index


@dataclass(frozen=True)
class Contraction:
    """The roles of all axes of a sum of products `x * w`: of a matrix product, of a convolution.

    A sum keeps this wherever it goes (`Reduce.contraction`). Roles are indices, not names: where
    the sum becomes part of another tensor, or its variables are renamed, so are these.
    """

    batch: tuple[Index, ...]  # images; of a matrix product all axes but the columns
    outputs: Index  # columns of a matrix product
    channel: Index | None  # summed over; None where a group has one, and there is a window
    positions: tuple[Index, ...] = ()  # of the window, one for each axis in space
    taps: tuple[Index | None, ...] = ()  # summed over, at each position; None for a window of 1
    groups: int = 1  # of outputs, each with channels of its own

    def mapped(self, change: Callable[[Index], Index]) -> Contraction:
        """The roles where each index has become another."""
        return Contraction(
            tuple(map(change, self.batch)), change(self.outputs),
            None if self.channel is None else change(self.channel),
            tuple(map(change, self.positions)),
            tuple(None if t is None else change(t) for t in self.taps), self.groups)
