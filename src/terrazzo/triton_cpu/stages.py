"""The stages that Triton's backends for chips of ours share, from TTIR to code.

A backend says which chip loops are written for and what its last stages make of them; TTIR, Loop IR
and LLVM text are made here for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton._C.libtriton import ir, passes

from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm import jit
from terrazzo.errors import CodegenError
from terrazzo.knobs import knobs
from terrazzo.triton_cpu.deep import with_room
from terrazzo.triton_cpu.frontend.elementwise import ALONE
from terrazzo.triton_cpu.frontend.lower import Lowered, lower
from terrazzo.triton_cpu.frontend.state import Target
from terrazzo.triton_cpu.frontend.ttir import parse, walk
from terrazzo.triton_cpu.frontend.waiting import has_waiting


class LoopText(str):
    """The text of Loop IR, with the function itself for the next stage."""

    lowered: Lowered
    waits: bool


def make_ttir(module: Any) -> Any:
    """TTIR without calls, block pointers and descriptors."""
    manager = ir.pass_manager(module.context)
    manager.enable_debug()
    passes.common.add_inliner(manager)
    if hasattr(passes.ttir, "add_rewrite_tensor_pointer"):  # gone since 3.8
        passes.ttir.add_rewrite_tensor_pointer(manager)
    passes.ttir.add_rewrite_tensor_descriptor_to_pointer(manager)
    passes.common.add_canonicalizer(manager)
    passes.ttir.add_combine(manager)
    passes.ttir.add_reorder_broadcast(manager)
    passes.common.add_cse(manager)
    passes.common.add_symbol_dce(manager)
    passes.ttir.add_loop_unroll(manager)
    manager.run(module, "make_ttir")
    return module


def generic_text(module: Any) -> str:
    """A module in MLIR's generic form.

    libtriton has no flag for it, but MLIR prints what it cannot verify in that form; an attribute
    that belongs on modules only, set on the kernel, is enough.
    """
    kernel = module.get_function(module.get_entry_func_name())
    kernel.set_attr("ttg.num-ctas", ir.builder(module.context).get_int32_attr(1))
    text = str(module.str())
    if '"builtin.module"' not in text:
        raise CodegenError("this version of Triton does not print the generic form of TTIR",
                           hint="terrazzo supports Triton 3.6 to 3.9")
    return text


def make_loops(module: Any, metadata: dict[str, Any], target: Target) -> LoopText:
    """The loops of a kernel for a chip; what its launcher must know goes into `metadata`."""
    ttir = generic_text(module)
    text = with_room(_loops, ttir, metadata["enable_fp_fusion"], target, lines=ttir.count("\n"))
    metadata["name"] = text.lowered.function.name
    metadata["reports"], metadata["waits"] = text.lowered.reports, text.waits
    return text


def _loops(ttir: str, fusion: bool, target: Target) -> LoopText:
    parsed = parse(ttir)
    if not fusion:
        for function in parsed.functions.values():
            for op in walk(function.regions[0]):
                if op.name == "arith.mulf":
                    op.attrs[ALONE] = True
    lowered = lower(parsed, target, knobs.sanitize)
    text = LoopText(lowered.function)
    text.lowered, text.waits = lowered, has_waiting(parsed)
    return text


def make_llvm(text: str, write: Callable[[Lowered], str]) -> str:
    """The LLVM IR that a backend writes for the loops of a kernel."""
    if not isinstance(text, LoopText):
        raise CodegenError("Loop IR cannot be read back from text",
                           hint="override the stage ttir or llir instead")
    return with_room(write, text.lowered, lines=text.count("\n"))


def make_object(text: str) -> bytes:
    """Code for the processor of this machine."""
    return jit.compile_object(text, host(), effort(text))


def effort(text: str) -> jit.OptLevel:
    """How much LLVM does for a kernel: compile time of long ones is worth more than the last bit
    of speed."""
    return "light" if text.count("\n") < LONG else "quick"


LONG = 1000  # lines of LLVM IR
