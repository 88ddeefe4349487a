"""The compile cache: object code and other artefacts on disk, found again by their content.

An entry is one file, named by the hash of everything it was made from: bytes that are read back
(`get`, `put`), or a compiled graph that is mapped (`find`, `store`). Files are written aside
and renamed into place, so that any number of processes share a folder without locks, and each
carries a checksum, so that a damaged one is noticed and made again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import struct
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from terrazzo.base import log
from terrazzo.chips.spec import ChipSpec
from terrazzo.knobs import Settings, knobs
from terrazzo.runtime import checksum
from terrazzo.version import __version__

# magic, version of this layout, length and SHA-256 of the payload that follows
_HEADER = struct.Struct("<8sIQ32s")
_MAGIC = b"TZCACHE\0"
_VERSION = 1
_SUFFIX = ".tzc"
_FILE_SUFFIX = ".tzx"  # compiled graphs, in the form that users save them in
# Trimming walks the whole folder, so it happens once per this many bytes written.
_TRIM_EVERY_BYTES = 64 << 20
# A crashed process leaves its half-written file behind; no live one is this old.
_ABANDONED_SECONDS = 3600


def make_key(*parts: str | bytes, chip: ChipSpec) -> str:
    """Name an artefact by all that it is made from, as 64 hexadecimal digits.

    The versions of terrazzo and of what makes the code, and the chip, are part of every key, so an
    upgrade or another machine never finds code that is not its own.
    """
    digest = hashlib.sha256(_versions())
    for part in (chip.fingerprint, *parts):
        data = part.encode() if isinstance(part, str) else part
        # The length keeps ("ab", "c") and ("a", "bc") apart, the kind "a" and b"a".
        digest.update(f"{'t' if isinstance(part, str) else 'b'}{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _versions() -> bytes:
    return f"terrazzo {__version__} layout {_VERSION}".encode()


@lru_cache(maxsize=1)
def source_stamp() -> str:
    """Changes whenever a file of the package does, so that a developer never runs stale code."""
    digest = hashlib.sha256()
    for folder, _, files in sorted(os.walk(Path(__file__).parent.parent)):
        for name in sorted(files):
            if name.endswith(".py"):
                info = os.stat(os.path.join(folder, name))
                digest.update(f"{name} {info.st_size} {info.st_mtime_ns}".encode())
    return digest.hexdigest()


_digests: dict[int, tuple[weakref.ref[np.ndarray], str]] = {}
_HASHED_AT_ONCE = 1 << 22  # bytes: below this, threads cost more than they save


def array_digests(arrays: Sequence[np.ndarray]) -> list[str]:
    """SHA-256 sums of arrays, each computed once: arrays of graphs do not change."""
    fresh = [a for a in {id(a): a for a in arrays}.values() if _known_digest(a) is None]
    if sum(a.nbytes for a in fresh) < _HASHED_AT_ONCE:
        sums = [_digest(a) for a in fresh]
    else:
        from concurrent.futures import ThreadPoolExecutor  # not for small ones: 3 ms

        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as executor:
            sums = list(executor.map(_digest, fresh))
    for array, digest in zip(fresh, sums, strict=True):
        _digests[id(array)] = weakref.ref(array, partial(_forget, id(array))), digest
    return [_digests[id(a)][1] for a in arrays]


def _forget(number: int, _: object) -> None:
    _digests.pop(number, None)


def _known_digest(array: np.ndarray) -> str | None:
    known = _digests.get(id(array))
    return known[1] if known is not None and known[0]() is array else None


def _digest(array: np.ndarray) -> str:
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return hashlib.sha256(content).hexdigest()


class Cache:
    """A folder of artefacts of bounded size; one that cannot be written is simply empty."""

    def __init__(self, folder: str | os.PathLike[str], limit_bytes: int = 2 << 30) -> None:
        self.folder = Path(folder)
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self._written_since_trim = 0
        self._writable = True

    def get(self, key: str) -> bytes | None:
        """Give the payload stored under a key, or None if there is none that is sound."""
        path = self._path(key)
        try:
            with open(path, "rb") as file:
                content = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.note_unreadable(error)
            return None
        payload = _unwrap(content)
        if payload is None:
            self._warn("damaged", f"damaged entry in the compile cache, made again: {path}")
            _remove(path)
            return None
        # The time of last use, for trimming; a read-only cache still serves.
        with contextlib.suppress(OSError):
            os.utime(path)
        return payload

    def note_unreadable(self, error: OSError) -> None:
        """Say once that an entry could not be read, which does not make it a bad one."""
        if not isinstance(error, FileNotFoundError):  # another process removed it meanwhile
            self._warn("read", f"cannot read the compile cache in {self.folder}: {error}")

    def put(self, key: str, payload: bytes) -> None:
        """Store a payload under a key; failing to only costs a later recompilation."""
        self._write(self._path(key), lambda file: file.write(_wrap(payload)))

    def find(self, key: str) -> Path | None:
        """Give the file stored under a key, which carries checksums of its own, or None."""
        path = self._path(key, _FILE_SUFFIX)
        if not path.exists():
            return None
        # The time of last use; the file's own times tell whether it was touched since its check.
        with contextlib.suppress(OSError):
            os.utime(path.with_suffix(checksum.SUFFIX))
        return path

    def store(self, key: str, write: Callable[[BinaryIO], object]) -> Path | None:
        """Keep what `write` writes as a file under a key; None where that cannot be."""
        path = self._path(key, _FILE_SUFFIX)
        return path if self._write(path, write) else None

    def discard(self, key: str, reason: str) -> None:
        """Remove a file that turned out to be of no use."""
        path = self._path(key, _FILE_SUFFIX)
        self._warn("damaged", f"damaged entry in the compile cache, made again: {path}: {reason}")
        _remove(path)
        _remove(path.with_suffix(checksum.SUFFIX))

    def _write(self, path: Path, write: Callable[[BinaryIO], object]) -> bool:
        """Write a file aside and move it into place; answers whether that went well."""
        if not self._writable:
            return False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
            try:
                with os.fdopen(handle, "wb") as file:
                    write(file)
                    size = file.seek(0, os.SEEK_END)
                os.replace(temporary, path)
            except BaseException:
                _remove(Path(temporary))
                raise
        except OSError as error:
            # Of files open at once there may be fewer again; the other reasons stay.
            self._writable = error.errno in (errno.EMFILE, errno.ENFILE)
            self._warn(
                "write",
                f"cannot write the compile cache in {self.folder}: {error}. "
                "Code is compiled anew in every process; set TZ_CACHE_DIR to a folder of yours.",
            )
            return False
        with self._lock:
            self._written_since_trim += size
            due = self._written_since_trim >= min(_TRIM_EVERY_BYTES, self.limit_bytes // 8)
            if due:
                self._written_since_trim = 0
        if due:
            self.trim()
        return True

    def trim(self) -> None:
        """Remove the entries used longest ago until the cache is within its limit."""
        found = dict(self._entries())
        times = {path: status.st_mtime for path, status in found.items()}
        for path in found:
            if path.suffix == checksum.SUFFIX:  # it goes with the file that it stands beside
                owner = path.with_suffix(_FILE_SUFFIX)
                times[owner] = max(times.pop(path), times.get(owner, 0.0))
        total = sum(status.st_size for status in found.values())
        newest = max(times.values(), default=0.0)
        for path, used in sorted(times.items(), key=lambda entry: entry[1]):
            abandoned = path.suffix == ".part" and used < newest - _ABANDONED_SECONDS
            if abandoned or (total > self.limit_bytes and path.suffix != ".part"):
                for gone in (path, path.with_suffix(checksum.SUFFIX)):
                    if gone in found:
                        _remove(gone)
                        total -= found[gone].st_size

    def size(self) -> int:
        """Count the bytes that all entries take on disk."""
        return sum(status.st_size for _, status in self._entries())

    def clear(self) -> None:
        """Remove every entry."""
        for path, _ in self._entries():
            _remove(path)

    def _path(self, key: str, suffix: str = _SUFFIX) -> Path:
        # Folders of 256 keep listings short when there are many thousands of kernels.
        return self.folder / key[:2] / (key[2:] + suffix)

    def _entries(self) -> list[tuple[Path, os.stat_result]]:
        found = []
        # What LLVM said of the host is kept there too (chips/cpu/description.py).
        for pattern in (f"??/*{_SUFFIX}", f"??/*{_FILE_SUFFIX}", f"??/*{checksum.SUFFIX}",
                        "??/*.json", "??/*.part"):
            for path in self.folder.glob(pattern):
                try:
                    found.append((path, path.stat()))
                except OSError:  # another process removed it meanwhile
                    continue
        return found

    def _warn(self, kind: str, message: str) -> None:
        with self._lock:
            first = kind not in self._warned
            self._warned.add(kind)
        if first:
            log.warning(message)


class NoCache(Cache):
    """A cache that keeps nothing, for when `knobs.cache` is off."""

    def __init__(self) -> None:
        super().__init__(os.devnull, 0)

    def get(self, key: str) -> bytes | None:
        return None

    def put(self, key: str, payload: bytes) -> None:
        return None

    def find(self, key: str) -> Path | None:
        return None

    def store(self, key: str, write: Callable[[BinaryIO], object]) -> Path | None:
        return None


def default_cache(settings: Settings | None = None) -> Cache:
    """Give the cache that the settings `cache`, `cache_dir` and `cache_limit_mb` ask for."""
    now = settings or knobs.now
    return _cache_for(now.cache_dir, now.cache_limit_mb) if now.cache else _no_cache


_no_cache = NoCache()


@lru_cache(maxsize=16)
def _cache_for(folder: str, limit_mb: int) -> Cache:
    return Cache(os.path.expanduser(folder), limit_mb << 20)


def _wrap(payload: bytes) -> bytes:
    digest = hashlib.sha256(payload).digest()
    return _HEADER.pack(_MAGIC, _VERSION, len(payload), digest) + payload


def _unwrap(content: bytes) -> bytes | None:
    if len(content) < _HEADER.size:
        return None
    magic, version, length, digest = _HEADER.unpack_from(content)
    payload = content[_HEADER.size :]
    sound = (
        magic == _MAGIC
        and version == _VERSION
        and length == len(payload)
        and digest == hashlib.sha256(payload).digest()
    )
    return payload if sound else None


def _remove(path: Path) -> None:
    # Gone already, or not ours to remove: either way no harm is done.
    with contextlib.suppress(OSError):
        path.unlink()
