"""Up to where one kernel of several operators pays: numbers that a chip hands to fusion."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FusionLimits:
    """Where fusion stops. Costs are in additions, sizes in elements.

    These are modest numbers that suit any chip; a chip that was measured has its own.
    """

    recomputed: int = 4  # what is cheaper is computed again for every reader, not kept in memory
    broadcast: int = 1  # the same, once for every element that it is broadcast to
    operations: int = 64  # of one element: code for more takes long to compile, and spills
    epilogue: int = 32  # operators between a reduction and where its uses join again
    # A kernel ends after so many stages, or where its code would get that long (in additions for
    # one element of each stage). From half as many stages on, it ends where a single value goes
    # on: such places cost least, and come back in each turn of a loop, so that all turns share
    # their kernels.
    stages: int = 32
    length: int = 1024
    siblings: int = 4  # stages of kernels that share nothing but what they read
    shared: int = 1 << 20  # siblings read a tensor that is as large as this: no cache holds it
    rows: int = 1  # a loop over fewer rows leaves cores idle
    alone: int = 0  # one core does it all where there are no more elements: any loop may be shared
