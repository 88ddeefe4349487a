"""Long sums of products in blocks, for tile templates.

Rounding errors of a sum made one term after the other grow with the number of terms. In blocks,
which are added up in turn, they grow with the steps of a block and the number of blocks. Peers
block their sums too (MKL on Zen 4: 192 steps), so our blocks are no longer than theirs, whatever
pieces of k a kernel keeps in its caches. Of convolutions, whose peers keep whole windows in
registers, blocks are longer. Blocks cost matrix products 1 % of their time, convolutions the same.
"""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.chips.cpu.llvm.builder import Builder, Val

SUM_STEPS = 128
WINDOW_STEPS = 256  # of convolutions
SUM_VECTORS = 64  # of k, in inner products: their lanes are sums of their own


def last_block(steps: int) -> int:
    """The longest that the last block may be, so that it is not much shorter than the others."""
    return steps + steps // 2


def in_blocks(b: Builder, k: Val, steps: int, state: list[Val],
              block: Callable[[Val, Val, Val, list[Val]], list[Val]]) -> list[Val]:
    """Runs `block(start, end, is_first, state)` over k: blocks of `steps`, a power of two."""
    # As many as leave no more than the last one may have.
    count = b.smax(b.ashr(b.sub(k, last_block(steps) + 1 - steps), steps.bit_length() - 1), 0)

    def one(number: Val, state: list[Val]) -> list[Val]:
        start = b.mul(number, steps)
        end = b.select(b.icmp("eq", number, count), k, b.add(start, steps))
        return block(start, end, b.icmp("eq", number, 0), state)

    return b.loop(0, b.add(count, 1), 1, one, state)
