"""The description of a chip that does not exist yet: a TOML file, checked, as a frozen value.

`gcu.toml` is the first one and says what each key means. Other chips lie in files named after them
(`mychip.toml`) in the folders that the setting `chip_files` names; everything that reads a
description finds them by that name.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from terrazzo.chips.spec import ChipSpec, LaunchRules
from terrazzo.errors import DeviceError
from terrazzo.knobs import knobs

FORMAT = 2
"""Grows when counts change their meaning: code that counted otherwise is code for another chip."""
MATRIX_TYPES = ("f64", "f32", "tf32", "f16", "bf16", "f8e4m3", "f8e5m2", "i8")
_LARGEST = 1 << 40  # of any number: products of two of them are what the model computes with
_TAKEN = frozenset({"cpu", "cuda", "meta", "mps", "xpu", "hip", "hpu", "mtia", "xla"})


def _number(section: str, key: str, least: int = 1, most: int = _LARGEST) -> Any:
    """One whole number of the file: where it stands, and what is allowed."""
    return field(metadata={"section": section, "key": key, "least": least, "most": most})


@dataclass(frozen=True)
class Description:
    """A virtual chip: all that launches, counts and modelled times depend on."""

    name: str
    capability: tuple[int, int]
    devices: int = _number("", "devices", most=64)
    units: int = _number("unit", "count", most=1 << 16)
    warps: int = _number("unit", "warps", most=64)
    clock_khz: int = _number("unit", "clock_khz", least=1000, most=1 << 26)
    vector_bits: int = _number("unit", "vector_bits", least=64, most=1 << 16)
    vector_registers: int = _number("unit", "vector_registers", least=4, most=1 << 16)
    free_grid: int = _number("launch", "free_grid", least=0, most=1 << 30)
    grid_multiple: int = _number("launch", "grid_multiple", most=1 << 16)
    launch_cycles: int = _number("launch", "launch_cycles", least=0)
    wave_cycles: int = _number("launch", "wave_cycles", least=0)
    matrix_rows: int = _number("matrix", "rows", most=1 << 12)
    matrix_columns: int = _number("matrix", "columns", most=1 << 12)
    memory_bytes: int = _number("memory", "bytes", least=1 << 20, most=1 << 44)
    memory_bytes_per_cycle: int = _number("memory", "bytes_per_cycle", most=1 << 20)
    scratchpad_bytes: int = _number("scratchpad", "bytes", least=1 << 10)
    scratchpad_bytes_per_cycle: int = _number("scratchpad", "bytes_per_cycle", most=1 << 20)
    unit_bytes_per_cycle: int = _number("dma", "bytes_per_cycle", most=1 << 20)
    dma_latency: int = _number("dma", "latency", least=0, most=1 << 20)
    dma_in_flight: int = _number("dma", "in_flight", most=1 << 10)
    transfer_bytes: int = _number("dma", "transfer_bytes", least=64, most=1 << 30)
    granule: int = _number("dma", "granule", most=1 << 12)
    link_bytes_per_cycle: int = _number("link", "bytes_per_cycle", most=1 << 20)
    link_latency: int = _number("link", "latency", least=0, most=1 << 30)
    matrix_depth: tuple[tuple[str, int], ...] = ()
    """By the short name of a type, over how many products a cycle sums for each result."""

    def lanes(self, bits: int) -> int:
        """How many elements of this many bits the vector unit computes in a cycle."""
        return max(1, self.vector_bits // max(bits, 1))

    def depth(self, type_name: str) -> int | None:
        """How deep the matrix unit is for a type; None where it does not have it."""
        return dict(self.matrix_depth).get(type_name)

    def spec(self) -> ChipSpec:
        """The chip as schedules, reports and rooflines read every chip."""
        hertz = self.clock_khz * 1000.0
        whole = self.units * 2 * self.matrix_rows * self.matrix_columns * hertz
        peaks = {name: whole * depth for name, depth in self.matrix_depth}
        peaks.setdefault("f32", self.units * self.lanes(32) * 2 * hertz)
        return ChipSpec(
            name=self.name, kind=self.name, cores=self.units, vector_bits=self.vector_bits,
            vector_registers=self.vector_registers, l1_bytes=self.scratchpad_bytes,
            memory_gbps=self.memory_bytes_per_cycle * hertz / 1e9, clock_ghz=hertz / 1e9,
            peak_flops=tuple(peaks.items()),
            compiler=self.fingerprint,
            launch=LaunchRules(
                cost_us=self.launch_cycles * 1e6 / hertz, free_grid=self.free_grid,
                grid_multiple=self.grid_multiple, warps=(self.warps,)))

    def c_struct(self) -> CDescription:
        """The description as the runtime library takes it."""
        made = CDescription(size=ctypes.sizeof(CDescription), name=self.name.encode())
        made.capability[:] = self.capability
        made.fingerprint[:] = self.fingerprint.encode()
        for name in (row[0] for row in CDescription._fields_[2:]):
            if name not in ("capability", "fingerprint"):
                setattr(made, name, getattr(self, name))
        return made

    @cached_property
    def fingerprint(self) -> str:
        """32 letters that differ for chips which differ in anything: what images are stamped with.

        Counts are part of the code, so code for one chip tells the times of no other.
        """
        text = repr((FORMAT, astuple(self)))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def __str__(self) -> str:
        return str(self.spec())


class CDescription(ctypes.Structure):
    """`gcuDescription` of gcu_runtime.h."""

    _fields_ = [
        ("size", ctypes.c_uint32), ("name", ctypes.c_char * 32), ("devices", ctypes.c_int32),
        ("capability", ctypes.c_int32 * 2), ("units", ctypes.c_int32), ("warps", ctypes.c_int32),
        ("free_grid", ctypes.c_int32), ("grid_multiple", ctypes.c_int32),
        ("vector_bits", ctypes.c_int32), ("clock_khz", ctypes.c_int64),
        ("memory_bytes", ctypes.c_int64), ("scratchpad_bytes", ctypes.c_int64),
        ("memory_bytes_per_cycle", ctypes.c_int64), ("unit_bytes_per_cycle", ctypes.c_int64),
        ("scratchpad_bytes_per_cycle", ctypes.c_int64), ("dma_latency", ctypes.c_int64),
        ("dma_in_flight", ctypes.c_int64), ("launch_cycles", ctypes.c_int64),
        ("wave_cycles", ctypes.c_int64), ("link_bytes_per_cycle", ctypes.c_int64),
        ("link_latency", ctypes.c_int64), ("fingerprint", ctypes.c_uint8 * 32)]


# ---------------------------------------------------------------- reading
_NUMBERS = tuple(f for f in fields(Description) if f.metadata)


def read(file: str | os.PathLike[str]) -> Description:
    """The description in a file; whatever is wrong with it is said by its key."""
    path = Path(file)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise DeviceError(f"the description {path} cannot be read: {problem}") from None
    made = parse(text, str(path))
    if path.suffix == ".toml" and path.stem != made.name:
        raise _wrong(str(path), "name", made.name, f"{path.stem!r}, as the file is called")
    return made


def parse(text: str, where: str = "description") -> Description:
    """The description of a text in TOML."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise DeviceError(f"{where} is no TOML: {problem}") from None
    known = {(f.metadata["section"], f.metadata["key"]) for f in _NUMBERS}
    known |= {("", "name"), ("", "capability"), ("matrix", "depth")}
    for section, key in _keys(tables):
        if (section, key) not in known:
            allowed = sorted(k for s, k in known if s == section) or sorted(
                {s for s, _ in known if s})
            raise _wrong(where, _spelled(section, key), None, f"one of {', '.join(allowed)}")
    numbers = {f.name: _whole(tables, f.metadata, where) for f in _NUMBERS}
    made = Description(name=_name(tables, where), capability=_capability(tables, where),
                       matrix_depth=_depth(tables, where), **numbers)
    _agree(made, where)
    return made


def _keys(tables: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in tables.items():
        if isinstance(value, dict):
            yield from ((name, key) for key in value)
        else:
            yield "", name


def _spelled(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _wrong(where: str, key: str, value: object, allowed: str) -> DeviceError:
    found = f"has no meaning: there is no key {key}" if value is None else (
        f"cannot be {value!r}" if value is not _MISSING else "is missing")
    return DeviceError(f"{where}: {key} {found}", hint=f"it is {allowed}" if value is not None
                       else allowed)


_MISSING = object()


def _lookup(tables: Mapping[str, Any], section: str, key: str) -> Any:
    table = tables.get(section, {}) if section else tables
    return table.get(key, _MISSING) if isinstance(table, dict) else _MISSING


def _whole(tables: Mapping[str, Any], row: Mapping[str, Any], where: str) -> int:
    value = _lookup(tables, row["section"], row["key"])
    if type(value) is not int or not row["least"] <= value <= row["most"]:
        raise _wrong(where, _spelled(row["section"], row["key"]), value,
                     f"a whole number of {row['least']} to {row['most']}")
    return value


def _name(tables: Mapping[str, Any], where: str) -> str:
    value = tables.get("name", _MISSING)
    if (not isinstance(value, str) or not re.fullmatch("[a-z][a-z0-9_]{0,30}", value)
            or value in _TAKEN):
        raise _wrong(where, "name", value, "up to 31 small letters, digits and _, a letter first, "
                     f"and none of {', '.join(sorted(_TAKEN))}")
    return value


def _capability(tables: Mapping[str, Any], where: str) -> tuple[int, int]:
    value = tables.get("capability", _MISSING)
    if (not isinstance(value, list) or len(value) != 2
            or not all(type(v) is int and 0 <= v < 1000 for v in value)):
        raise _wrong(where, "capability", value, "two whole numbers of 0 to 999")
    return value[0], value[1]


def _depth(tables: Mapping[str, Any], where: str) -> tuple[tuple[str, int], ...]:
    value = _lookup(tables, "matrix", "depth")
    if not isinstance(value, dict):
        raise _wrong(where, "matrix.depth", value, "a table of types and whole numbers")
    for name, depth in value.items():
        if name not in MATRIX_TYPES:
            raise _wrong(where, f"matrix.depth.{name}", None,
                         f"the types are {', '.join(MATRIX_TYPES)}")
        if type(depth) is not int or not 1 <= depth <= 4096:
            raise _wrong(where, f"matrix.depth.{name}", depth, "a whole number of 1 to 4096")
    return tuple(value.items())


def _agree(made: Description, where: str) -> None:
    """Checks of several keys together."""
    if made.vector_bits % 64:
        raise _wrong(where, "unit.vector_bits", made.vector_bits, "a multiple of 64")
    if made.free_grid % made.grid_multiple:
        raise _wrong(where, "launch.free_grid", made.free_grid,
                     f"a multiple of launch.grid_multiple, {made.grid_multiple}, or 0: then any "
                     "larger grid can be run in parts that the chip accepts")
    if made.scratchpad_bytes < 2 * made.transfer_bytes:
        raise _wrong(where, "dma.transfer_bytes", made.transfer_bytes,
                     f"at most half of the scratchpad, {made.scratchpad_bytes // 2}")


# ---------------------------------------------------------------- finding
BUILT_IN = Path(__file__).with_name("gcu.toml")


def files() -> dict[str, Path]:
    """The files of all chips that are described, by name; a user's own come first."""
    found: dict[str, Path] = {}
    named = knobs.torch_device
    for place in filter(None, [named if named.endswith(".toml") else "",
                               *knobs.chip_files.split(os.pathsep)]):
        path = Path(place).expanduser()
        for file in sorted(path.glob("*.toml")) if path.is_dir() else [path]:
            found.setdefault(file.stem, file)
    found.setdefault(BUILT_IN.stem, BUILT_IN)
    return found


def find(name: str = "gcu") -> Description:
    """The description of a chip by its name, or by the path of its file."""
    if name.endswith(".toml"):
        return read(name)
    known = files()
    if name not in known:
        raise DeviceError(
            f"no chip {name!r} is described", hint=f"there are {', '.join(known)}; others are "
            "found as NAME.toml in folders that TZ_CHIP_FILES names, or by the path of the file")
    file = known[name]
    stamp = file.stat() if file.is_file() else None
    return _read(file, stamp and (stamp.st_mtime_ns, stamp.st_size))


@lru_cache(maxsize=32)
def _read(file: Path, stamp: object) -> Description:
    return read(file)
