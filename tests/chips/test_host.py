"""What LLVM says of the host is asked once, and remembered beside the compiled code."""

from __future__ import annotations

import sys
from pathlib import Path

import llvmlite
import pytest

from terrazzo.chips.cpu import description as cpu
from terrazzo.knobs import knobs
from terrazzo.runtime.cache import Cache

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/cpuinfo")


def test_the_version_is_that_of_the_package() -> None:
    assert cpu.llvmlite_version() == llvmlite.__version__


def test_the_version_is_asked_for_where_its_file_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "_read", lambda path: "version = unknown")
    assert cpu.llvmlite_version.__wrapped__() == llvmlite.__version__


@linux
def test_what_is_remembered_is_what_llvm_said(tmp_path: Path) -> None:
    with knobs.override(cache=True, cache_dir=str(tmp_path / "new")):
        assert cpu._remembered_host() is None
        said = cpu._ask_llvm()
        assert cpu._remembered_host() == said
        assert set(said) == {"name", "triple", "features"} and said["features"]
        (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
        cache = Cache(tmp_path / "new")
        assert cache.size() == file.stat().st_size
        cache.clear()
        assert cpu._remembered_host() is None


@linux
@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe\n{}", b"0123\n{\"name\": \"x\"}"])
def test_a_damaged_memory_is_no_memory(tmp_path: Path, content: bytes) -> None:
    with knobs.override(cache=True, cache_dir=str(tmp_path)):
        said = cpu._ask_llvm()
        path = cpu._host_file()
        assert path is not None
        sound = path.read_bytes()
        for damaged in (content, sound[:-1], sound.replace(b"true", b"fals", 1)):
            path.write_bytes(damaged)
            assert cpu._remembered_host() is None
        assert cpu._ask_llvm() == said == cpu._remembered_host()


@linux
def test_other_processors_and_versions_have_memories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = set()
    with knobs.override(cache=True, cache_dir=str(tmp_path)):
        for flags in ("avx avx2", "avx avx2 fma"):
            for version in ("0.44", "0.50"):
                text = f"processor : 0\ncpu MHz : 1\nmodel name : some\nflags : {flags}\n"
                monkeypatch.setattr(cpu, "_read", lambda path, text=text: text)
                monkeypatch.setattr(cpu, "llvmlite_version", lambda version=version: version)
                files.add(cpu._host_file())
                faster = text.replace("cpu MHz : 1", "cpu MHz : 2") + text
                monkeypatch.setattr(cpu, "_read", lambda path, text=faster: text)
                files.add(cpu._host_file())
        assert len(files) == 4
        monkeypatch.setattr(cpu, "_read", lambda path: "")
        assert cpu._host_file() is None, "nothing is known of the processor"


@linux
def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with knobs.override(cache=True, cache_dir=str(tmp_path / "file")):
        assert cpu._ask_llvm()["name"]
        assert cpu._remembered_host() is None
    with knobs.override(cache=False, cache_dir=str(tmp_path / "unused")):
        assert cpu._ask_llvm()["name"]
        assert not (tmp_path / "unused").exists()
