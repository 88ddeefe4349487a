"""A loader of relocatable ELF objects, so that code from the cache runs without LLVM.

It knows what our own compiler emits for x86-64: code, constants and variables, which call each
other and functions of the process. Everything goes into one mapping, which is written and then
protected: code can be executed but not written, constants only read. Functions elsewhere may be
further away than a 32-bit displacement reaches, so each has a slot that holds its address, and a
stub that jumps through it (what linkers call GOT and PLT). Whatever else an object may ask for
raises `UnknownObject`, and is left to LLVM's own linker.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from terrazzo.errors import ArtifactError, OutOfMemory

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QIIq")
_ELF64_LITTLE = b"\x7fELF\x02\x01"
_RELOCATABLE, _X86_64 = 1, 62

_BITS, _SYMBOLS, _STRINGS, _RELOCATIONS, _ZEROS = 1, 2, 3, 4, 8
# Tables for debuggers and exceptions, which generated code does not throw.
_UNWIND, _NOTE = 0x70000001, 7
_WRITE, _LOADED, _EXECUTE, _THREAD_LOCAL = 1, 2, 4, 0x400
_UNDEFINED, _ABSOLUTE, _FIRST_RESERVED = 0, 0xFFF1, 0xFF00
_LOCAL, _PLAIN_SYMBOLS = 0, range(4)  # nothing, object, function, section: no TLS, no ifunc

# Displacements within one mapping must fit into 32 bits with their sign.
_MOST_BYTES = 1 << 30
_SLOT, _STUB = 8, 8
_JUMP = struct.Struct("<Hixx")  # jmp *displacement(%rip)
_JUMP_CODE, _JUMP_BYTES = 0x25FF, 6


class UnknownObject(Exception):
    """An object that is sound as far as we can tell, but not of the kind that we can load."""


class Rule(NamedTuple):
    """How one kind of relocation is computed and written."""

    format: str
    target: Literal["anywhere", "near", "stub", "slot"]
    """What it names: an address, one within the object, a function, or the slot of an address."""
    relative: bool


_RULES = {
    1: Rule("<Q", "anywhere", relative=False),  # R_X86_64_64
    2: Rule("<i", "near", relative=True),  # R_X86_64_PC32
    4: Rule("<i", "stub", relative=True),  # R_X86_64_PLT32
    9: Rule("<i", "slot", relative=True),  # R_X86_64_GOTPCREL
    24: Rule("<q", "anywhere", relative=True),  # R_X86_64_PC64
    41: Rule("<i", "slot", relative=True),  # R_X86_64_GOTPCRELX
    42: Rule("<i", "slot", relative=True),  # R_X86_64_REX_GOTPCRELX
}


class _Relocation(NamedTuple):
    offset: int
    rule: Rule
    symbol: int
    addend: int


class Code:
    """Machine code in memory that is given back when this object goes."""

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size
        free = weakref.finalize(self, _libc().munmap, address, size)
        # Threads may still run in it while the interpreter ends: then the process is what frees it.
        free.atexit = False


def load(
    obj: bytes, symbols: Mapping[str, int], exports: Sequence[str]
) -> tuple[Code, dict[str, int]]:
    """Bring an object into memory; gives the code and the addresses of `exports`."""
    if sys.platform != "linux" or os.uname().machine != "x86_64" or sys.maxsize < 1 << 32:
        raise UnknownObject("objects are loaded on 64-bit Linux on x86 alone")
    file = _read(obj)
    outside = _resolve(file, symbols)
    plan = _place(file)
    code = _map(plan.size)
    addresses = {
        number: outside[number] if number in outside else _address(file, plan, code, number)
        for number in _used(file)
    }
    exported = {name: _address(file, plan, code, number)
                for name, number in _defined(file, exports).items()}
    _write(obj, file, plan, code, addresses)
    _protect(code.address, plan.constants_at, mmap.PROT_READ | mmap.PROT_EXEC)
    _protect(code.address + plan.constants_at, plan.variables_at - plan.constants_at,
             mmap.PROT_READ)
    return code, exported


def undefined_symbols(obj: bytes) -> list[str]:
    """Name what an object needs from elsewhere."""
    return [symbol.name for symbol in _read(obj).symbols[1:] if symbol.section == _UNDEFINED]


# ------------------------------------------------------------------------ reading
class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


class _Symbol(NamedTuple):
    name: str
    binding: int
    section: int
    value: int


class _File(NamedTuple):
    sections: list[_Section]
    loaded: list[int]
    symbols: list[_Symbol]
    relocations: dict[int, list[_Relocation]]
    """By the number of the section that they change."""


def _read(obj: bytes) -> _File:
    """Take an object apart; everything that is used later is known to be within bounds."""
    if obj[: len(_ELF64_LITTLE)] != _ELF64_LITTLE:
        raise UnknownObject("it is no 64-bit little-endian ELF file")
    header = _HEADER.unpack(_part(obj, 0, _HEADER.size, "the header"))
    kind, machine, sections_at, entry_size, count = (header[i] for i in (1, 2, 6, 11, 12))
    if (kind, machine) != (_RELOCATABLE, _X86_64):
        raise UnknownObject(f"it is of type {kind} for machine {machine}")
    if entry_size != _SECTION.size or not count:
        raise UnknownObject("its section table is of an unusual form")
    table = _part(obj, sections_at, count * _SECTION.size, "the section table")
    sections = [_Section._make(fields) for fields in _SECTION.iter_unpack(table)]
    loaded = [number for number, section in enumerate(sections) if _is_loaded(section)]
    for number in loaded:
        if sections[number].kind != _ZEROS:
            _part(obj, sections[number].offset, sections[number].size, f"section {number}")
    tables = [number for number, section in enumerate(sections) if section.kind == _SYMBOLS]
    if len(tables) > 1:
        raise UnknownObject("it has several symbol tables")
    symbols = _read_symbols(obj, sections, sections[tables[0]]) if tables else []
    relocations: dict[int, list[_Relocation]] = {}
    for section in sections:
        if section.kind == _RELOCATIONS and section.info in loaded:
            if [section.link] != tables or section.info in relocations:
                raise UnknownObject("its relocations are of an unusual form")
            relocations[section.info] = _read_relocations(
                obj, section, sections[section.info], len(symbols))
    return _File(sections, loaded, symbols, relocations)


def _is_loaded(section: _Section) -> bool:
    if not section.flags & _LOADED or section.kind in (_UNWIND, _NOTE):
        return False
    if section.kind not in (_BITS, _ZEROS) or section.flags & _THREAD_LOCAL:
        raise UnknownObject(f"it has a section of type {section.kind:#x}")
    if section.flags & _WRITE and section.flags & _EXECUTE:
        raise UnknownObject("it has code that can be written")
    alignment = section.alignment or 1
    if alignment & (alignment - 1) or alignment > mmap.PAGESIZE:
        raise ArtifactError(f"a section of an object is aligned to {alignment} bytes")
    if section.size > _MOST_BYTES:
        raise ArtifactError(f"a section of an object has {section.size} bytes")
    return True


def _read_symbols(obj: bytes, sections: list[_Section], table: _Section) -> list[_Symbol]:
    if table.link >= len(sections) or sections[table.link].kind != _STRINGS:
        raise ArtifactError("the symbols of an object have no names")
    strings = sections[table.link]
    names = _part(obj, strings.offset, strings.size, "the names of symbols")
    entries = _part(obj, table.offset, table.size, "the symbol table")
    if len(entries) % _SYMBOL.size:
        raise ArtifactError("the symbol table of an object ends within a symbol")
    symbols = []
    for name_at, info, _, section, value, _ in _SYMBOL.iter_unpack(entries):
        end = names.find(b"\0", name_at)
        if end < 0:
            raise ArtifactError("the name of a symbol is outside the object's names")
        if section >= _FIRST_RESERVED:
            # Files are named by absolute symbols, which nothing refers to.
            if section != _ABSOLUTE:
                raise UnknownObject("it has common symbols")
        elif section >= len(sections):
            raise ArtifactError(f"a symbol is in section {section} of {len(sections)}")
        elif info & 15 not in _PLAIN_SYMBOLS:
            raise UnknownObject(f"it has a symbol of type {info & 15}")
        symbols.append(_Symbol(names[name_at:end].decode("utf-8", "replace"), info >> 4,
                               section, value))
    return symbols


def _read_relocations(
    obj: bytes, table: _Section, target: _Section, symbol_count: int
) -> list[_Relocation]:
    entries = _part(obj, table.offset, table.size, "the relocations")
    if len(entries) % _RELOCATION.size:
        raise ArtifactError("the relocations of an object end within one")
    if entries and target.kind == _ZEROS:
        raise ArtifactError("an object relocates memory that it has no contents for")
    relocations = []
    for offset, kind, symbol, addend in _RELOCATION.iter_unpack(entries):
        rule = _RULES.get(kind)
        if rule is None:
            raise UnknownObject(f"it has a relocation of type {kind}")
        if offset + struct.calcsize(rule.format) > target.size:
            raise ArtifactError("a relocation is outside its section")
        if not 0 < symbol < symbol_count:
            raise ArtifactError(f"a relocation names symbol {symbol} of {symbol_count}")
        relocations.append(_Relocation(offset, rule, symbol, addend))
    return relocations


def _part(obj: bytes, offset: int, size: int, what: str) -> bytes:
    if offset + size > len(obj):
        raise ArtifactError(
            f"object code ends before {what} of it does",
            hint="the file it came from is damaged: make it again",
        )
    return obj[offset : offset + size]


# ------------------------------------------------------------------------ linking
class _Plan(NamedTuple):
    """Where everything goes, as offsets from the start of the mapping."""

    sections: dict[int, int]
    slots: dict[int, int]
    """Symbols whose addresses are read from memory, or jumped to through it."""
    stubs: dict[int, int]
    constants_at: int
    variables_at: int
    size: int


def _place(file: _File) -> _Plan:
    """Lay out code and stubs, constants and slots, variables: each group on pages of its own."""
    sections: dict[int, int] = {}
    slots: dict[int, int] = {}
    stubs: dict[int, int] = {}
    through_slots = [(number, file.symbols[number].section == _UNDEFINED)
                     for number, targets in _used(file).items()
                     if "slot" in targets or file.symbols[number].section == _UNDEFINED]
    end = _place_sections(file, 0, _EXECUTE, sections)
    for number, elsewhere in through_slots:
        if elsewhere:
            stubs[number] = end = _round_up(end, _STUB)
            end += _STUB
    constants_at = _round_up(end, mmap.PAGESIZE)
    end = _place_sections(file, constants_at, 0, sections)
    for number, _ in through_slots:
        slots[number] = end = _round_up(end, _SLOT)
        end += _SLOT
    variables_at = _round_up(end, mmap.PAGESIZE)
    end = _place_sections(file, variables_at, _WRITE, sections)
    size = max(_round_up(end, mmap.PAGESIZE), mmap.PAGESIZE)
    if size > _MOST_BYTES:
        raise ArtifactError(f"an object of {size} bytes in memory is too large to be sound")
    return _Plan(sections, slots, stubs, constants_at, variables_at, size)


def _place_sections(file: _File, start: int, kind: int, places: dict[int, int]) -> int:
    """Place the sections that are executed, written, or neither; gives where they end."""
    for number in file.loaded:
        section = file.sections[number]
        if section.flags & (_EXECUTE | _WRITE) == kind:
            places[number] = start = _round_up(start, section.alignment or 1)
            start += section.size
    return start


def _used(file: _File) -> dict[int, set[str]]:
    """The symbols that relocations name, each with the ways it is reached."""
    used: dict[int, set[str]] = {}
    for relocations in file.relocations.values():
        for _, rule, number, _ in relocations:
            used.setdefault(number, set()).add(rule.target)
    return used


def _resolve(file: _File, symbols: Mapping[str, int]) -> dict[int, int]:
    """Find the addresses of what is defined elsewhere: given, or in the process."""
    found = {}
    for number, targets in _used(file).items():
        name = file.symbols[number].name
        if file.symbols[number].section != _UNDEFINED:
            continue
        if "near" in targets:
            raise UnknownObject(f"it expects {name} to be near")
        found[number] = symbols.get(name) or _in_process(name)
        if not found[number]:
            raise UnknownObject(f"nobody defines {name}")
    return found


@lru_cache(maxsize=256)
def _in_process(name: str) -> int:
    try:
        return ctypes.cast(ctypes.CDLL(None)[name], ctypes.c_void_p).value or 0
    except AttributeError:
        return 0


def _defined(file: _File, names: Sequence[str]) -> dict[str, int]:
    """Find the symbols of the given names that others may see."""
    seen = {symbol.name: number for number, symbol in enumerate(file.symbols)
            if symbol.binding != _LOCAL and symbol.section != _UNDEFINED}
    missing = [name for name in names if name not in seen]
    if missing:
        raise UnknownObject(f"it does not define {', '.join(missing)}")
    return {name: seen[name] for name in names}


def _address(file: _File, plan: _Plan, code: Code, number: int) -> int:
    symbol = file.symbols[number]
    if symbol.section == _ABSOLUTE:
        return symbol.value
    if symbol.section not in plan.sections:
        raise ArtifactError(f"symbol {symbol.name!r} is in no section that is loaded")
    if symbol.value > file.sections[symbol.section].size:
        raise ArtifactError(f"symbol {symbol.name!r} is outside its section")
    return code.address + plan.sections[symbol.section] + symbol.value


def _write(obj: bytes, file: _File, plan: _Plan, code: Code, addresses: dict[int, int]) -> None:
    memory = memoryview((ctypes.c_ubyte * plan.size).from_address(code.address)).cast("B")
    for number, at in plan.sections.items():
        section = file.sections[number]
        if section.kind != _ZEROS:
            memory[at : at + section.size] = obj[section.offset : section.offset + section.size]
    for number, slot in plan.slots.items():
        struct.pack_into("<Q", memory, slot, addresses[number])
    for number, stub in plan.stubs.items():
        _JUMP.pack_into(memory, stub, _JUMP_CODE, plan.slots[number] - stub - _JUMP_BYTES)
    for section_number, relocations in file.relocations.items():
        for offset, rule, number, addend in relocations:
            at = plan.sections[section_number] + offset
            if rule.target == "slot":
                target = code.address + plan.slots[number]
            elif rule.target == "stub" and number in plan.stubs:
                target = code.address + plan.stubs[number]
            else:
                target = addresses[number]
            value = target + addend - (code.address + at if rule.relative else 0)
            try:
                struct.pack_into(rule.format, memory, at, value)
            except struct.error:
                raise ArtifactError(
                    f"a relocation at {offset:#x} of section {section_number} reaches too far"
                ) from None


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# ------------------------------------------------------------------------ memory
@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.argtypes = pointer, size, number, number, number, ctypes.c_int64
    libc.mmap.restype = pointer
    libc.munmap.argtypes = pointer, size
    libc.mprotect.argtypes = pointer, size, number
    return libc


def _map(size: int) -> Code:
    address = _libc().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE,
                           mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OutOfMemory(f"no memory for {size} bytes of code")
    return Code(address, size)


def _protect(address: int, size: int, protection: int) -> None:
    if size and _libc().mprotect(address, size, protection):
        raise UnknownObject("this system does not let code be made executable")
