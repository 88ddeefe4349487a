"""From LLVM IR as text to object code, and from object code to addresses that can be called.

Compiling and loading are apart on purpose: object code is what the disk cache and saved
executables hold, and loading it needs neither an optimiser nor a target machine.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from terrazzo.base import log
from terrazzo.chips.cpu import elf
from terrazzo.chips.cpu.llvm import worker
from terrazzo.chips.cpu.llvm.compile import (
    OptLevel,
    Target,
    assembly_text,
    object_code,
    optimized_text,
)
from terrazzo.chips.spec import ChipSpec
from terrazzo.errors import ArtifactError, CodegenError

_library_numbers = itertools.count()


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
    code = worker.compiled_elsewhere(ir_text, _target_of(chip), opt)
    return object_code(ir_text, _target_of(chip), opt) if code is None else code


def assembly(ir_text: str, chip: ChipSpec, opt: OptLevel = "light") -> str:
    """Compile one module to the chip's assembly text, for people and for golden tests."""
    return assembly_text(ir_text, _target_of(chip), opt)


def optimized_ir(ir_text: str, chip: ChipSpec, opt: OptLevel = "light") -> str:
    """Give the LLVM IR that code generation starts from, after our optimisation passes."""
    return optimized_text(ir_text, _target_of(chip), opt)


def _target_of(chip: ChipSpec) -> Target:
    return chip.llvm_triple, chip.llvm_cpu, chip.llvm_features


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
        log.debug("LLVM links %s: %s", ", ".join(exports) or "an object", reason)
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
