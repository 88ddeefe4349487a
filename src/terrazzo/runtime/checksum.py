"""A checksum of weights that costs a read of memory, and the memory of what was checked.

Data is taken as blocks of rows of 64-bit numbers, and of each block the sums of its rows and of
its columns are hashed. Whatever changes one number changes two sums, whatever moves one changes
two of each: damage goes unnoticed only if it is made for that. One core sums 18 GB/s (Zen 4),
where it hashes 1.8.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

_ROWS, _COLUMNS = 256, 512  # 1 MiB: a block's second sum finds it in the cache
_HASHED_WHOLE = 1 << 16  # bytes: below, sums are no less than the data
_AT_ONCE = 1 << 24  # bytes for one thread
SUFFIX = ".ok"  # of the file beside another one that says when that was checked


def digest(pieces: Iterable[np.ndarray]) -> bytes:
    """The checksum of some arrays of bytes, one after the other, their lengths multiples of 8."""
    result = hashlib.sha256()
    for data in pieces:
        for part in _parts(data):
            result.update(_sums(part))
    return result.digest()


def digest_at_once(pieces: Sequence[np.ndarray],
                   let_go: Callable[[np.ndarray], None] = lambda _: None) -> bytes:
    """The same by several threads; `let_go` is told what will not be looked at again."""
    parts = [part for data in pieces for part in _parts(data)]
    sums = partial(_sums, let_go=let_go)
    if len(parts) < 2:
        return hashlib.sha256(b"".join(map(sums, parts))).digest()
    from concurrent.futures import ThreadPoolExecutor  # not for small ones: 3 ms

    with ThreadPoolExecutor(min(4, len(parts), os.cpu_count() or 1)) as executor:
        return hashlib.sha256(b"".join(executor.map(sums, parts))).digest()


def _parts(data: np.ndarray) -> Iterator[np.ndarray]:
    return (data[at:at + _AT_ONCE] for at in range(0, data.size, _AT_ONCE))


def _sums(data: np.ndarray, let_go: Callable[[np.ndarray], None] = lambda _: None) -> bytes:
    if data.size <= _HASHED_WHOLE:
        return hashlib.sha256(data.data).digest()
    numbers = data.view(np.uint64)
    whole = numbers.size // _COLUMNS * _COLUMNS
    rows = numbers[:whole].reshape(-1, _COLUMNS)
    found = [numbers[whole:]]
    for start in range(0, len(rows), _ROWS):
        block = rows[start:start + _ROWS]
        found += [block.sum(axis=0), block.sum(axis=1)]
        let_go(block)
    return hashlib.sha256(np.concatenate(found).data).digest()


# ---------------------------------------------------------------- what was checked
def is_checked(path: Path, status: os.stat_result) -> bool:
    """Whether a file was found sound since the machine started, and has not been touched since."""
    try:
        return _side_file(path).read_text() == _identity(status) != ""
    except (OSError, ValueError):
        return False


def remember_checked(path: Path, status: os.stat_result) -> None:
    """Note that a file is sound; where that cannot be, it is checked again."""
    with contextlib.suppress(OSError):
        _side_file(path).write_text(_identity(status))


def _side_file(path: Path) -> Path:
    return path.with_suffix(SUFFIX)


def _identity(status: os.stat_result) -> str:
    """What changes when a file does (no program can set the time of the last change)."""
    boot = _boot()
    return boot and (f"{boot} {status.st_dev} {status.st_ino} {status.st_size} "
                     f"{status.st_mtime_ns} {status.st_ctime_ns}")


@lru_cache(maxsize=1)
def _boot() -> str:
    """Names the time since the machine started; empty where that has no name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
