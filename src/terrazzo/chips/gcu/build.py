"""The runtime library from its sources: made once by the system's C compiler, kept in the cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from terrazzo.errors import CacheError, CompileError, MissingDependency
from terrazzo.knobs import knobs

NAME = "libgcu_runtime.so"
SOURCES = Path(__file__).parent / "runtime"
# Threads of a library that was unloaded would run in nothing.
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread",
         "-Wl,-z,nodelete")
LIBRARIES = ("-ldl", "-lm")
_SECONDS = 300  # no compiler takes longer over so little


def compiler() -> list[str]:
    """The command of the system's C compiler: CC, or what is usually there."""
    asked = shlex.split(os.environ.get("CC", ""))
    for command in ([asked] if asked else [["cc"], ["gcc"], ["clang"]]):
        if shutil.which(command[0]):
            return command
    raise MissingDependency(
        f"no C compiler was found ({asked[0] if asked else 'cc, gcc or clang'}), and the runtime "
        "library of gcu is built by one",
        hint="install one (on Debian: apt install gcc), or set CC to its command")


@lru_cache(maxsize=4)
def built_library(cache_dir: str | None = None) -> Path:
    """Where the library lies, which is built first if no process did so before."""
    kept = _folder(cache_dir) / _key()
    try:
        command = compiler()
    except MissingDependency:
        # A compiler that has gone (as in an image without one) left behind what it built.
        if not (earlier := newest(kept, NAME)):
            raise
        return earlier
    folder = kept / stamp(command)
    library = folder / NAME
    if not library.exists():
        with _alone(folder):
            if not library.exists():
                _build(command, library)
    return library


def is_there_or_can_be() -> bool:
    """Whether the library would be found or built, told without doing so."""
    try:
        return bool(compiler())
    except MissingDependency:
        return newest(_folder(None) / _key(), NAME) is not None


def newest(folder: Path, name: str) -> Path | None:
    """Of what compilers have built of the same sources, a folder each, the file made last."""
    return max(folder.glob(f"*/{name}"), key=lambda file: file.stat().st_mtime_ns, default=None)


def build_into(library: Path, command: Sequence[str], flags: Sequence[str] = ()) -> None:
    """Compile the library to a file, with further flags."""
    sources = sorted(str(path) for path in SOURCES.glob("*.c"))
    ran = subprocess.run([*command, *FLAGS, *flags, *sources, "-o", str(library), *LIBRARIES],
                         text=True, capture_output=True, timeout=_SECONDS)
    if ran.returncode:
        raise CompileError(
            f"{command[0]} does not compile the runtime library of gcu:\n{ran.stderr.strip()}",
            hint="set CC to another C compiler")


def _build(command: list[str], library: Path) -> None:
    shown = sys.stderr is not None and sys.stderr.isatty()
    if shown:
        print(f"terrazzo: building the runtime library of gcu with {command[0]}, once ...",
              end="", flush=True, file=sys.stderr)
    began = time.monotonic()
    aside = library.with_name(f".{NAME}.{os.getpid()}")
    try:
        build_into(aside, command)
        # Others see the whole file or none.
        os.replace(aside, library)
    finally:
        aside.unlink(missing_ok=True)
        if shown:
            print(f" {time.monotonic() - began:.1f} s", file=sys.stderr)


def _folder(cache_dir: str | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir)
    if knobs.cache:
        return Path(os.path.expanduser(knobs.cache_dir)) / "gcu"
    return Path(_temporary_folder().name)


@lru_cache(maxsize=1)
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="terrazzo-gcu-")


def _key() -> str:
    """What the library is made from."""
    digest = hashlib.sha256(repr((FLAGS, LIBRARIES)).encode())
    for source in sorted(SOURCES.glob("*.[ch]")):
        content = source.read_bytes()
        digest.update(f"{source.name} {len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def stamp(command: Sequence[str]) -> str:
    """What tells one compiler from another: its file, which costs less than to ask it."""
    path = os.path.realpath(shutil.which(command[0]) or command[0])
    info = os.stat(path)
    made_by = repr((list(command), path, info.st_size, info.st_mtime_ns))
    return hashlib.sha256(made_by.encode()).hexdigest()[:16]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While open, no other process builds there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise CacheError(
            f"the runtime library of gcu cannot be kept in {folder}: {error}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


__all__ = ["NAME", "SOURCES", "build_into", "built_library", "compiler", "is_there_or_can_be",
           "newest", "stamp"]
