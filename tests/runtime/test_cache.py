"""The compile cache: what goes in comes out, and nothing else ever does."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from terrazzo.chips.cpu.description import avx2_spec, neon_spec
from terrazzo.knobs import knobs
from terrazzo.runtime import cache as cache_module
from terrazzo.runtime.cache import Cache, NoCache, array_digests, default_cache, make_key

KEY = make_key("a kernel", chip=avx2_spec())
OTHER = make_key("another kernel", chip=avx2_spec())


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def entry_of(cache: Cache) -> Path:
    (entry,) = cache.folder.rglob("*.tzc")
    return entry


def test_what_is_put_is_found_again(cache: Cache) -> None:
    assert cache.get(KEY) is None
    cache.put(KEY, b"code")
    cache.put(OTHER, b"")
    assert cache.get(KEY) == b"code"
    assert cache.get(OTHER) == b""
    assert Cache(cache.folder).get(KEY) == b"code"
    cache.put(KEY, b"newer code")
    assert cache.get(KEY) == b"newer code"


def test_files_are_written_aside_and_found_again(cache: Cache) -> None:
    assert cache.find(KEY) is None
    path = cache.store(KEY, lambda file: file.write(b"mapped"))
    assert path is not None and path == cache.find(KEY) and path.read_bytes() == b"mapped"
    assert cache.get(KEY) is None  # bytes and files do not mix
    assert cache.size() == 6
    cache.discard(KEY, "a test")
    assert cache.find(KEY) is None

    def fails(file: object) -> None:
        raise OSError(28, "No space left on device")

    assert cache.store(KEY, fails) is None
    assert [path for path in cache.folder.rglob("*") if path.is_file()] == []


def test_files_count_when_the_cache_is_trimmed(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit_bytes=5000)
    for key in (KEY, OTHER):
        cache.store(key, lambda file: file.write(bytes(3000)))
        os.utime(cache._path(key, ".tzx"), (1e9, 1e9 + (key == OTHER)))
    cache.trim()
    assert cache.find(KEY) is None and cache.find(OTHER) is not None


def test_digests_of_arrays_are_kept_with_them() -> None:
    import hashlib

    import numpy as np

    big, small = np.arange(1 << 21, dtype=np.float32), np.arange(6).reshape(2, 3).T
    sums = array_digests([big, small, big])
    assert sums[0] == sums[2] == hashlib.sha256(big.tobytes()).hexdigest()
    assert sums[1] == hashlib.sha256(small.tobytes()).hexdigest()
    before = len(cache_module._digests)
    assert array_digests([small, big]) == [sums[1], sums[0]]
    assert len(cache_module._digests) == before
    del big, small
    assert len(cache_module._digests) == before - 2


def test_size_and_clear(cache: Cache) -> None:
    assert cache.size() == 0
    cache.put(KEY, bytes(1000))
    assert 1000 < cache.size() < 1100
    cache.clear()
    assert (cache.size(), cache.get(KEY)) == (0, None)
    cache.put(KEY, b"again")
    assert cache.get(KEY) == b"again"


def test_keys_depend_on_every_part_and_on_the_chip() -> None:
    chip = avx2_spec()
    keys = [
        make_key("ab", "c", chip=chip),
        make_key("a", "bc", chip=chip),
        make_key("abc", chip=chip),
        make_key(b"abc", chip=chip),
        make_key("abc", "", chip=chip),
        make_key("abc", chip=neon_spec()),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 64 and int(key, 16) >= 0 for key in keys)
    assert make_key("abc", chip=chip) == make_key("abc", chip=avx2_spec())


def test_keys_depend_on_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = make_key("abc", chip=avx2_spec())
    monkeypatch.setattr("terrazzo.runtime.cache._versions", lambda: b"terrazzo 99")
    assert make_key("abc", chip=avx2_spec()) != before


DAMAGE = {
    "a flipped bit in the payload": lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
    "a flipped bit in the checksum": lambda data: data[:30] + bytes([data[30] ^ 8]) + data[31:],
    "a wrong magic": lambda data: b"X" + data[1:],
    "another version": lambda data: data[:8] + b"\xff" + data[9:],
    "cut short": lambda data: data[:-1],
    "cut inside the header": lambda data: data[:20],
    "empty": lambda data: b"",
    "something after the end": lambda data: data + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_noticed_logged_once_and_removed(
    cache: Cache, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "terrazzo"):
        for _ in range(3):
            cache.put(KEY, bytes(range(256)))
            entry = entry_of(cache)
            entry.write_bytes(DAMAGE[damage](entry.read_bytes()))
            assert cache.get(KEY) is None
            assert not entry.exists()
    assert [record.name for record in caplog.records] == ["terrazzo"]
    assert "damaged" in caplog.text
    cache.put(KEY, b"good")
    assert cache.get(KEY) == b"good"


def test_a_folder_that_cannot_be_made_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    cache = Cache(blocker / "cache")
    with caplog.at_level(logging.WARNING, "terrazzo"):
        cache.put(KEY, b"code")
        cache.put(OTHER, b"code")
    assert "TZ_CACHE_DIR" in caplog.text
    assert len(caplog.records) == 1
    assert cache.size() == 0


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere"
)
def test_a_read_only_folder_still_serves(cache: Cache) -> None:
    cache.put(KEY, b"code")
    folders = [cache.folder, *cache.folder.iterdir()]
    for folder in folders:
        folder.chmod(0o500)
    try:
        cache.put(OTHER, b"code")
        assert cache.get(OTHER) is None
        assert cache.get(KEY) == b"code"
    finally:
        for folder in folders:
            folder.chmod(0o700)


def test_a_full_disk_leaves_no_half_written_file(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_space(*_paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    cache.put(KEY, b"code")
    assert [path for path in cache.folder.rglob("*") if path.is_file()] == []
    assert "No space left" in caplog.text


def test_the_least_recently_used_entries_go_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit_bytes=5000)
    keys = [make_key(str(number), chip=avx2_spec()) for number in range(4)]
    long_ago = time.time() - 10_000
    for age, key in enumerate(keys):
        cache.put(key, bytes(1000))
        entry = tmp_path / key[:2] / f"{key[2:]}.tzc"
        os.utime(entry, (long_ago + age, long_ago + age))
    assert cache.get(keys[0]) is not None  # using it makes it the newest
    cache.put(make_key("large", chip=avx2_spec()), bytes(2500))
    assert cache.size() <= 5000
    assert [cache.get(key) is not None for key in keys] == [True, False, False, True]


def test_abandoned_temporary_files_are_swept(cache: Cache) -> None:
    cache.put(KEY, b"code")
    old, fresh = (entry_of(cache).with_name(name) for name in ("old.part", "fresh.part"))
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    cache.trim()
    assert not old.exists()
    assert fresh.exists()
    assert cache.get(KEY) == b"code"


def test_the_default_cache_follows_the_knobs(tmp_path: Path) -> None:
    with knobs.override(cache=True, cache_dir=str(tmp_path / "here"), cache_limit_mb=3):
        cache = default_cache()
        assert cache is default_cache()
        assert (cache.folder, cache.limit_bytes) == (tmp_path / "here", 3 << 20)
    with knobs.override(cache=False, cache_dir=str(tmp_path / "off")):
        off = default_cache()
        off.put(KEY, b"code")
        assert isinstance(off, NoCache)
        assert off.get(KEY) is None
        assert off.size() == 0
    assert not (tmp_path / "off").exists()


def test_a_hit_is_quick(cache: Cache) -> None:
    """The budget is 0.3 ms; the bound leaves room for a loaded machine."""
    cache.put(KEY, bytes(4096))
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        assert cache.get(KEY) is not None
        best = min(best, time.perf_counter() - start)
    assert best < 1e-3


def payload_of(key: str) -> bytes:
    return key.encode() * 500


def hammer(folder: str, seed: int, keys: list[str]) -> int:
    """Put, get, trim and damage entries as fast as possible; return how often a hit was wrong."""
    logging.disable(logging.WARNING)
    cache = Cache(folder, limit_bytes=200_000)
    wrong = 0
    for turn in range(300):
        key = keys[(turn * 7 + seed * 13) % len(keys)]
        found = cache.get(key)
        if found is None:
            cache.put(key, payload_of(key))
        elif found != payload_of(key):
            wrong += 1
        if turn % 50 == 49:
            entry = cache._path(key)
            if entry.exists():
                entry.write_bytes(b"TZCACHE\0 torn")
    return wrong


def test_processes_share_a_folder(tmp_path: Path) -> None:
    keys = [make_key(str(number), chip=avx2_spec()) for number in range(10)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(4) as processes:
        wrong = processes.starmap(hammer, [(str(tmp_path), seed, keys) for seed in range(4)])
    assert wrong == [0, 0, 0, 0]
    cache = Cache(tmp_path)
    for key in keys:
        cache.put(key, payload_of(key))
        assert cache.get(key) == payload_of(key)
    assert not list(tmp_path.rglob("*.part"))
