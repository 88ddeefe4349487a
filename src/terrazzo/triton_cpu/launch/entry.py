"""The native entry of a kernel, in LLVM IR: from the words of a launch to the loops.

Every argument is a 64-bit integer: addresses, numbers, the bits of floats. The CPU's entry takes
them one by one, then the three sizes of the grid and the number of threads. The entry of an image
(docs/gcu.md) takes an array of them, and one for what programs count.
"""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm.builder import HANDS_ON, Builder, Module, Val
from terrazzo.chips.cpu.llvm.kernel import write_function
from terrazzo.triton_cpu.frontend.lower import Lowered
from terrazzo.triton_cpu.frontend.pointers import ANYWHERE

ENTRY = "tz_launch"
ZERO = "tz_zero"
# Programs that wait for each other run all at once up to this number. Beyond it, and in all other
# kernels, they start in the order of their numbers: one may wait for those before it.
MOST_WAITING = 64


def kernel_text(lowered: Lowered) -> str:
    """The LLVM module of a kernel for the CPU."""
    module = _with_loops(lowered)
    params = [("i64", f"a{i}") for i in range(lowered.arguments)]
    b = Builder(module, ENTRY, [*params, *(("i64", f"g{i}") for i in range(3)), ("i64", "threads")],
                attrs=HANDS_ON)
    given, rest = b.params[:lowered.arguments], b.params[lowered.arguments:]
    _hand_on(b, lowered, given, [], rest)
    return module.text()


def image_text(lowered: Lowered, waits: bool) -> str:
    """The LLVM module of a kernel for an image, whose loops count into their last buffer.

    Programs that wait for each other ask for a thread each.
    """
    module = _with_loops(lowered)
    b = Builder(module, ENTRY, [("ptr", "arguments"), ("ptr", "grid"), ("i64", "threads"),
                                ("ptr", "counters")], attrs=HANDS_ON)
    arguments, grid, threads, counters = b.params
    given = [b.load("i64", b.gep("i64", arguments, i), 8) for i in range(lowered.arguments)]
    sizes = [b.load("i64", b.gep("i64", grid, i), 8) for i in range(3)]
    if waits:
        programs = b.mul(b.mul(sizes[0], sizes[1]), sizes[2])
        few = b.icmp("sle", programs, b.smax(threads, MOST_WAITING))
        threads = b.select(few, programs, threads)
    _hand_on(b, lowered, given, [counters], [*sizes, threads])
    return module.text()


def _with_loops(lowered: Lowered) -> Module:
    chip = host()
    module = Module(chip.features)
    write_function(module, chip, lowered.function)
    return module


def _hand_on(b: Builder, lowered: Lowered, given: Sequence[Val], more: Sequence[Val],
             rest: Sequence[Val]) -> None:
    """Call the loops with the arguments that they use, further buffers, grid and threads."""
    # Address zero is loaded, for LLVM takes memory after a null pointer that it knows for absent.
    zero = b.load("i64", b.module.global_(ZERO, "i64", "0", linkage=""), 8)
    addresses = [b.cast("inttoptr", zero if n == ANYWHERE else given[n], "ptr")
                 for n in lowered.buffers]
    numbers = [given[n] for n in lowered.numbers]
    b.call("void", f"{lowered.function.name}.main", [*addresses, *more, *numbers, *rest])
    b.ret()
