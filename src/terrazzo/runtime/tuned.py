"""Choices that were measured: a file of them, by chip and program, which can be shipped.

    {"format": "terrazzo choices", "version": 1, "chips": {"cuda h200": {"<program>": {
        "choice": {"block": 2048, "warps": 4}, "seconds": 1.1e-05, "by_rule": 1.3e-05,
        "text": "k_gelu (pointwise): bf16[4096, 4096] -> bf16[4096, 4096]"}}}}

A program is named by what it computes, sizes and types included, apart from the names in it. What a
choice says is for its chip to know (`Chip.tunes`). The file lies in the folder of the compile
cache, or where TZ_TUNE_DB says. One that is damaged, or something else, is left alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from terrazzo.base import log
from terrazzo.base.shapes import dims_text
from terrazzo.expr.ir import Program
from terrazzo.expr.structure import structure
from terrazzo.knobs import Settings, knobs

FORMAT, VERSION = "terrazzo choices", 1
FILE = "choices.json"

Choice: TypeAlias = Mapping[str, int]  # or booleans, which are integers to Python


@dataclass(frozen=True)
class Measured:
    """What was found to be the best way to run a program."""

    choice: Choice
    seconds: float
    by_rule: float  # seconds of what would have been chosen without measuring
    text: str  # the program, for people

    @staticmethod
    def of(data: Any) -> Measured | None:
        """An entry of a file; None where it is none."""
        if not isinstance(data, dict):
            return None
        choice, text = data.get("choice"), data.get("text", "")
        times = [data.get(name) for name in ("seconds", "by_rule")]
        if not isinstance(choice, dict) or not isinstance(text, str) or not all(
                isinstance(n, int) for n in choice.values()):
            return None
        if not all(isinstance(t, int | float) and math.isfinite(t) for t in times):
            return None
        return Measured(choice, float(times[0]), float(times[1]), text)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return (f"{self.text}: {choice_text(self.choice)}, {self.seconds * 1e6:.1f} us "
                f"(by rule {self.by_rule * 1e6:.1f})")


def choice_text(choice: Choice) -> str:
    """A choice in words: `rows 128, warps 8, persistent`."""
    return ", ".join(name if value is True else f"{name} {value}"
                     for name, value in choice.items() if value is not False)


def program_key(program: Program) -> str:
    """What a program computes, as a name that is the same in every process."""
    attrs = {k: v for k, v in program.attrs.items() if k != "node"}
    node = program.attrs.get("node")
    said = "" if node is None else (node.op.name, sorted(node.attrs.items(), key=str))
    offsets = [t.offset for t in program.inputs]
    text = repr((structure(program), sorted(attrs.items()), said, offsets))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def program_text(program: Program) -> str:
    """The same for people."""
    given, made = (", ".join(f"{t.dtype.short}{dims_text(t.shape)}" for t in tensors)
                   for tensors in (program.inputs, program.outputs))
    return f"{program.name} ({program.kind}): {given} -> {made}"


class Database:
    """A file of choices as it is now; without a path, what this process has found itself."""

    def __init__(self, path: str):
        self.path = Path(path) if path else None
        self._lock = threading.Lock()
        self._chips: dict[str, dict[str, Measured]] = {}
        self._stamp: tuple[int, int] | None = None  # of the file when it was read
        self._warned: set[str] = set()

    def find(self, chip: str, program: str) -> Measured | None:
        """What was measured for a program on a chip."""
        with self._lock:
            self._renew()
            return self._chips.get(chip, {}).get(program)

    def keep(self, chip: str, program: str, found: Measured) -> None:
        """Remember what was measured, in the file as well."""
        with self._lock:
            self._renew()  # with what other processes have written since
            self._chips.setdefault(chip, {})[program] = found
            if self.path is not None and "foreign" not in self._warned:
                self._write(self.path)

    def _renew(self) -> None:
        if self.path is None:
            return
        try:
            info = os.stat(self.path)
            stamp = info.st_mtime_ns, info.st_size
            if stamp == self._stamp:
                return
            self._stamp = stamp
            read = json.loads(self.path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, ValueError, RecursionError) as error:
            self._warn("foreign", f"cannot read the choices in {self.path}: {error}")
            return
        if not isinstance(read, dict) or read.get("format") != FORMAT:
            self._warn("foreign", f"{self.path} is no file of choices, and is left alone")
        elif read.get("version") != VERSION:
            self._warn("foreign", f"the choices in {self.path} are of version "
                       f"{read.get('version')!r}, and this is {VERSION}: they are left alone")
        else:
            self._warned.discard("foreign")
            self._take(read.get("chips"))

    def _take(self, chips: Any) -> None:
        for chip, programs in chips.items() if isinstance(chips, dict) else ():
            for program, data in programs.items() if isinstance(programs, dict) else ():
                found = Measured.of(data)
                if found is None:
                    self._warn("entry", f"{self.path} has entries that are no choices")
                else:
                    self._chips.setdefault(chip, {})[program] = found

    def _write(self, path: Path) -> None:
        """Aside, and moved into place: who reads it meanwhile has the old one or the new one."""
        data = {"format": FORMAT, "version": VERSION, "chips": {
            chip: {key: asdict(found) for key, found in sorted(programs.items())}
            for chip, programs in sorted(self._chips.items())}}
        temporary = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
            with os.fdopen(handle, "w") as file:
                json.dump(data, file, indent=1)
            os.replace(temporary, path)
            info = os.stat(path)
            self._stamp = info.st_mtime_ns, info.st_size
        except OSError as error:
            with suppress(OSError):
                os.unlink(temporary)
            self._warn("write", f"cannot write the choices to {path}: {error}. They are "
                       "measured anew in every process; set TZ_TUNE_DB to a file of yours.")

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(message)


def database(settings: Settings | None = None) -> Database:
    """The choices that the settings `tune_db`, `cache` and `cache_dir` ask for."""
    now = settings or knobs.now
    return _database(now.tune_db or (os.path.join(now.cache_dir, FILE) if now.cache else ""))


@lru_cache(maxsize=16)
def _database(path: str) -> Database:
    return Database(os.path.expanduser(path))


# ---------------------------------------------------------------- measuring again
_noted: ContextVar[dict[str, Measured] | None] = ContextVar("noted", default=None)


def noted() -> dict[str, Measured] | None:
    """What was measured since `measuring_again`, by program; None outside of it."""
    return _noted.get()


@contextmanager
def measuring_again() -> Iterator[dict[str, Measured]]:
    """Inside, what is compiled is measured, also what was before; answers what is found."""
    found: dict[str, Measured] = {}
    before = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(before)


__all__ = ["Choice", "Database", "Measured", "choice_text", "database", "measuring_again", "noted",
           "program_key", "program_text"]
