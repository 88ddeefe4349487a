"""From LLVM IR as text to object code, and from object code to addresses that can be called.

Compiling and loading are apart on purpose: object code is what the disk cache and saved
executables hold, and loading it needs neither an optimiser nor a target machine.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen import elf
from terrazzo.codegen.llvm import worker
from terrazzo.errors import ArtifactError, CodegenError

if TYPE_CHECKING:
    import llvmlite.binding as llvm

OptLevel = Literal["none", "quick", "light", "full"]

_log = logging.getLogger("terrazzo")
_library_numbers = itertools.count()
_compile_lock = threading.Lock()


class Library:
    """Loaded machine code: it stays callable for as long as this object lives."""

    def __init__(self, owner: Any, addresses: Mapping[str, int]) -> None:
        self._owner = owner
        self._addresses = dict(addresses)

    def address(self, name: str) -> int:
        """Give the address of an exported function or variable."""
        try:
            return self._addresses[name]
        except KeyError:
            known = ", ".join(sorted(self._addresses)) or "nothing"
            raise CodegenError(
                f"this library exports no {name!r}, only: {known}",
                hint="name it in `exports` when the object code is loaded",
            ) from None

    @property
    def span(self) -> tuple[int, int] | None:
        """Where the code begins and how many bytes it has; None where LLVM's linker put it."""
        if not isinstance(self._owner, elf.Code):
            return None
        return self._owner.address, self._owner.size

    @property
    def addresses(self) -> Mapping[str, int]:
        """Every exported name with its address."""
        return MappingProxyType(self._addresses)


def compile_object(ir_text: str, chip: ChipSpec, opt: OptLevel = "light") -> bytes:
    """Compile one module of LLVM IR for a chip, giving the bytes of a relocatable object file."""
    code = worker.compiled_elsewhere(ir_text, chip, opt)
    if code is not None:
        return code
    with _compile_lock:
        module = _optimized_module(ir_text, chip, opt)
        return bytes(_target_machine(_target_key(chip)).emit_object(module))


def assembly(ir_text: str, chip: ChipSpec, opt: OptLevel = "light") -> str:
    """Compile one module to the chip's assembly text, for people and for golden tests."""
    with _compile_lock:
        module = _optimized_module(ir_text, chip, opt)
        return str(_target_machine(_target_key(chip)).emit_assembly(module))


def optimized_ir(ir_text: str, chip: ChipSpec, opt: OptLevel = "light") -> str:
    """Give the LLVM IR that code generation starts from, after our optimisation passes."""
    with _compile_lock:
        return str(_optimized_module(ir_text, chip, opt))


def load_object(
    obj: bytes,
    symbols: Mapping[str, int] = MappingProxyType({}),
    exports: Sequence[str] = (),
) -> Library:
    """Load object code into this process and resolve what it needs.

    Names are looked up in the object itself, then in `symbols`, then among the process's own
    (libc, libm, pthread). Every library has a namespace of its own, so equal names in two of
    them never clash.
    """
    try:
        return Library(*elf.load(obj, symbols, exports))
    except elf.UnknownObject as reason:
        _log.debug("LLVM links %s: %s", ", ".join(exports) or "an object", reason)
    return _link(obj, symbols, exports)


def _link(obj: bytes, symbols: Mapping[str, int], exports: Sequence[str]) -> Library:
    """Load object code by LLVM's own linker, which knows all objects and takes 40 MB and 50 ms."""
    import llvmlite.binding as llvm

    linker = llvm.JITLibraryBuilder().add_object_img(obj).add_current_process()
    for name, address in symbols.items():
        linker.import_symbol(name, address)
    for name in exports:
        linker.export_symbol(name)
    try:
        tracker = linker.link(_lljit(), f"terrazzo_{next(_library_numbers)}")
    except RuntimeError as error:
        raise CodegenError(
            f"object code for {', '.join(exports) or 'a kernel'} could not be loaded: {error}"
            + _name_missing(obj, symbols),
            hint="every function it calls must be in `symbols` or in a library of the process",
        ) from None
    return Library(tracker, {name: int(tracker[name]) for name in exports})


def _name_missing(obj: bytes, symbols: Mapping[str, int]) -> str:
    """List what an object needs and nobody has, which LLVM's own message does not tell."""
    try:
        needed = elf.undefined_symbols(obj)
    except (elf.UnknownObject, ArtifactError):
        return ""
    process = ctypes.CDLL(None)
    missing = [name for name in needed if name not in symbols and not hasattr(process, name)]
    return f"; nobody defines: {', '.join(missing)}" if missing else ""


_load_lock = threading.Lock()
_session: Any = None


def _lljit() -> Any:
    # One session for the life of the process: libraries come and go inside it.
    global _session
    if _session is None:
        import llvmlite.binding as llvm

        with _load_lock:
            if _session is None:
                llvm.initialize_native_target()
                llvm.initialize_native_asmprinter()
                # JITLink maps all sections of an object together, so 32-bit relocations
                # between code and constants always reach; RuntimeDyld does not promise that.
                _session = llvm.create_lljit_compiler(use_jit_link=True, suppress_errors=True)
    return _session


TargetKey = tuple[str, str, str]


def _target_key(chip: ChipSpec) -> TargetKey:
    return chip.llvm_triple, chip.llvm_cpu, chip.llvm_features


@lru_cache(maxsize=1)
def _initialize_all_targets() -> None:
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()  # inline assembly aborts the process without it


@lru_cache(maxsize=16)
def _target_machine(key: TargetKey) -> llvm.TargetMachine:
    import llvmlite.binding as llvm

    _initialize_all_targets()
    triple, cpu, features = key
    try:
        target = llvm.Target.from_triple(triple)
    except RuntimeError as error:
        raise CodegenError(f"LLVM has no target for the triple {triple!r}: {error}") from None
    return target.create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="pic", codemodel="small"
    )


@lru_cache(maxsize=16)
def _module_header(key: TargetKey) -> str:
    return f'target datalayout = "{_target_machine(key).target_data}" target triple = "{key[0]}" '


def _optimize(module: llvm.ModuleRef, key: TargetKey, opt: OptLevel) -> None:
    import llvmlite.binding as llvm

    # Running a pipeline uses it up, so it is built anew each time; that takes 0.2 ms.
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = True
    builder = llvm.create_pass_builder(_target_machine(key), options)
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


def _optimized_module(ir_text: str, chip: ChipSpec, opt: OptLevel) -> llvm.ModuleRef:
    module = _parse(ir_text, _target_key(chip))
    if opt != "none":
        _optimize(module, _target_key(chip), opt)
    return module


def _parse(ir_text: str, key: TargetKey) -> llvm.ModuleRef:
    import llvmlite.binding as llvm

    # The layout goes before the text, on its first line: alignments are filled in while
    # parsing, and line numbers in LLVM's messages stay those of the text.
    try:
        module = llvm.parse_assembly(_module_header(key) + ir_text)
    except RuntimeError as error:
        raise CodegenError(_explain_parse_error(str(error), ir_text)) from None
    try:
        module.verify()
    except RuntimeError as error:
        raise CodegenError(_explain_verifier_error(str(error), ir_text)) from None
    return module


def _explain_parse_error(message: str, ir_text: str) -> str:
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
