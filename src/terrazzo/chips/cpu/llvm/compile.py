"""LLVM itself: from IR as text to object code or assembly for a target.

Apart from loading code (`jit`), because the process that compiles for others needs this alone, and
starts all the faster.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from terrazzo.errors import CodegenError

if TYPE_CHECKING:
    import llvmlite.binding as llvm

OptLevel = Literal["none", "quick", "light", "full"]
Target = tuple[str, str, str]  # triple, processor, features

_lock = threading.Lock()


def object_code(ir_text: str, target: Target, opt: OptLevel = "light") -> bytes:
    """Compile one module of LLVM IR, giving the bytes of a relocatable object file."""
    with _lock:
        module = _optimized_module(ir_text, target, opt)
        return bytes(_target_machine(target).emit_object(module))


def assembly_text(ir_text: str, target: Target, opt: OptLevel = "light") -> str:
    """Compile one module to assembly."""
    with _lock:
        module = _optimized_module(ir_text, target, opt)
        return str(_target_machine(target).emit_assembly(module))


def optimized_text(ir_text: str, target: Target, opt: OptLevel = "light") -> str:
    """The LLVM IR that code generation starts from."""
    with _lock:
        return str(_optimized_module(ir_text, target, opt))


def prepare() -> None:
    """Load LLVM, before there is anything to compile."""
    _initialize_all_targets()


@lru_cache(maxsize=1)
def _initialize_all_targets() -> None:
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()  # inline assembly aborts the process without it


@lru_cache(maxsize=16)
def _target_machine(target: Target) -> llvm.TargetMachine:
    import llvmlite.binding as llvm

    _initialize_all_targets()
    triple, cpu, features = target
    try:
        found = llvm.Target.from_triple(triple)
    except RuntimeError as error:
        raise CodegenError(f"LLVM has no target for the triple {triple!r}: {error}") from None
    return found.create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="pic", codemodel="small"
    )


@lru_cache(maxsize=16)
def _module_header(target: Target) -> str:
    layout = _target_machine(target).target_data
    return f'target datalayout = "{layout}" target triple = "{target[0]}" '


def _optimize(module: llvm.ModuleRef, target: Target, opt: OptLevel) -> None:
    import llvmlite.binding as llvm

    # Running a pipeline uses it up, so it is built anew each time; that takes 0.2 ms.
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = True
    builder = llvm.create_pass_builder(_target_machine(target), options)
    if opt == "full":
        passes = builder.getModulePassManager()
    else:
        # Generated kernels are already vectorised, blocked and free of repeated arithmetic: a few
        # milliseconds where LLVM's -O1 to -O3 take 20-100, same speed of code. InstCombine takes
        # what does nothing out of short loops (a softmax of 64 columns is 10 % faster for it) and
        # is a tenth of the whole compile time. NewGVN must stay out: it ends the process on some
        # large functions.
        passes = llvm.create_new_module_pass_manager()
        passes.add_always_inliner_pass()
        passes.add_sroa_pass()
        if opt == "light":
            passes.add_instruction_combine_pass()
        passes.add_simplify_cfg_pass()
    passes.run(module, builder)


def _optimized_module(ir_text: str, target: Target, opt: OptLevel) -> llvm.ModuleRef:
    module = _parse(ir_text, target)
    if opt != "none":
        _optimize(module, target, opt)
    return module


def _parse(ir_text: str, target: Target) -> llvm.ModuleRef:
    import llvmlite.binding as llvm

    # The layout goes before the text, on its first line: alignments are filled in while
    # parsing, and line numbers in LLVM's messages stay those of the text.
    try:
        module = llvm.parse_assembly(_module_header(target) + ir_text)
    except RuntimeError as error:
        raise CodegenError(_explain_parse_error(str(error), ir_text)) from None
    try:
        module.verify()
    except RuntimeError as error:
        raise CodegenError(_explain_verifier_error(str(error), ir_text)) from None
    return module


def _explain_parse_error(message: str, ir_text: str) -> str:
    import re

    found = re.search(r":(\d+):(\d+): error: (.*)", message)
    if not found:
        return f"LLVM cannot parse the generated IR: {message}"
    line = int(found.group(1))
    excerpt = _excerpt(ir_text, line)
    return f"LLVM cannot parse the generated IR, line {line}: {found.group(3)}\n{excerpt}"


def _explain_verifier_error(message: str, ir_text: str) -> str:
    # The verifier quotes the instruction it dislikes; finding it in the text shows its place.
    lines = [line.split(";")[0].strip() for line in ir_text.splitlines()]
    for quoted in (line.strip() for line in message.splitlines()):
        if quoted and quoted in lines:
            number = lines.index(quoted) + 1
            excerpt = _excerpt(ir_text, number)
            return f"LLVM rejects the generated IR, line {number}: {message}\n{excerpt}"
    return f"LLVM rejects the generated IR: {message}"


def _excerpt(text: str, line: int, around: int = 3) -> str:
    lines = text.splitlines()
    first, last = max(1, line - around), min(len(lines), line + around)
    return "\n".join(
        f"{'>' if number == line else ' '} {number:5d} | {lines[number - 1]}"
        for number in range(first, last + 1)
    )
