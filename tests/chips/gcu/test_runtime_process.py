"""The runtime library in processes of their own: building it, other chips, fork, no Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runtime_kit import HERE, Kit

from terrazzo.chips.gcu import build
from terrazzo.errors import CompileError, MissingDependency

PRELUDE = f"""
import ctypes, os, sys
sys.path.insert(0, {str(HERE)!r})
import numpy as np
from runtime_kit import *
"""


def run_python(text: str, **environment: str) -> str:
    ran = subprocess.run([sys.executable, "-c", PRELUDE + text], text=True, capture_output=True,
                         timeout=120, env={**os.environ, **environment})
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


# ---------------------------------------------------------------- without Python
def test_a_program_in_c(kit: Kit, tmp_path: Path) -> None:
    library, program, image = build.built_library(), tmp_path / "program", tmp_path / "image"
    image.write_bytes(kit.image())
    subprocess.run([*build.compiler(), "-std=c11", "-Wall", "-Wextra", "-Werror",
                    "-I", str(build.SOURCES), str(HERE / "program.c"), str(library),
                    f"-Wl,-rpath,{library.parent}", "-o", str(program)], check=True)
    for visible, devices in ((None, 3), ("2,0", 2)):
        environment = {k: v for k, v in os.environ.items() if k != "GCU_VISIBLE_DEVICES"}
        if visible:
            environment["GCU_VISIBLE_DEVICES"] = visible
        ran = subprocess.run([program, image, kit.fingerprint], text=True, capture_output=True,
                             timeout=60, env=environment)
        assert (ran.returncode, ran.stdout) == (0, f"{devices} devices\n"), ran.stderr


def test_the_header_is_one_for_c_plus_plus_too(tmp_path: Path) -> None:
    source = tmp_path / "a.cpp"
    source.write_text('#include "gcu_runtime.h"\nint main() { return gcuGetLastError(); }\n')
    ran = subprocess.run([*build.compiler(), "-x", "c++", "-std=c++17", "-Wall", "-Werror",
                          "-fsyntax-only", "-I", str(build.SOURCES), str(source)],
                         capture_output=True, text=True)
    if "c++" in ran.stderr and "cc1plus" in ran.stderr:
        pytest.skip("the C compiler knows no C++")
    assert ran.returncode == 0, ran.stderr


# ---------------------------------------------------------------- other chips
def in_children(text: str, cases: list[tuple[object, ...]]) -> None:
    """Run a text, whose function `case` takes a case, in a fresh process for each case."""
    assert len(cases) > 1
    run_python(text + f"""
for values in {cases!r}:
    child = os.fork()  # from a process that has not described a chip yet
    if not child:
        case(*values)
        os._exit(17)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17, values
""")


def test_visible_devices(kit: Kit) -> None:
    in_children("""
def case(visible, expected):
    os.environ.pop("GCU_VISIBLE_DEVICES", None)
    if visible is not None:
        os.environ["GCU_VISIBLE_DEVICES"] = visible
    kit, count = Kit(), ctypes.c_int()
    check(kit.lib.gcuGetDeviceCount(count))
    assert count.value == expected, count.value
    if not expected:
        for code in (kit.lib.gcuSetDevice(0), kit.lib.gcuMalloc(ctypes.c_void_p(), 8),
                     kit.lib.gcuStreamCreate(ctypes.c_void_p()), kit.lib.gcuDeviceSynchronize()):
            assert kit.fails("gcuErrorInvalidDevice", code) == "no device is visible"
""", [(None, 4), ("", 0), ("0", 1), ("3,1", 2), (" 2 , 0", 2), ("0,1,7,2", 2), ("-1", 0),
      ("1,-1,2", 1), ("0,0", 0), ("x", 0), ("1,2x,3", 1), ("0,1,2,3", 4),
      ("99999999999999999999", 0)])


def test_before_the_chip_is_described(kit: Kit) -> None:
    run_python("""
lib = library()
found, number = ctypes.c_void_p(), ctypes.c_int()
for code in (lib.gcuGetDeviceCount(number), lib.gcuMalloc(found, 8), lib.gcuFree(None),
             lib.gcuModuleLoadData(found, b"", 0), lib.gcuStreamCreate(found),
             lib.gcuLaunchKernel(None, 1, 1, 1, None, 0, None), lib.gcuEventCreate(found),
             lib.gcuDeviceSynchronize(), lib.gcuTraceStart(), lib.gcuSetHostThreads(2),
             lib.gcuPointerGetDevice(number, None), lib.gcuHostFree(None)):
    assert ERRORS[code] == "gcuErrorInitialization"
    assert b"gcuConfigure was not called" in lib.gcuGetLastErrorMessage()
chip = description.find("gcu").c_struct()
for name, value in (("units", 0), ("memory_bytes", 0), ("clock_khz", -1), ("devices", 65),
                    ("free_grid", -1)):
    bad = description.find("gcu").c_struct()
    setattr(bad, name, value)
    assert ERRORS[lib.gcuConfigure(bad)] == "gcuErrorInvalidValue"
check(lib.gcuConfigure(chip))
""")


def test_other_launch_rules(kit: Kit) -> None:
    in_children("""
def case(free, multiple, accepted, refused, at_once):
    kit = Kit(free_grid=free, grid_multiple=multiple, units=7)
    slots = kit.zeros(1000)
    for grid in accepted:
        check(kit.launch("mark", grid, slots))
    for grid in refused:
        said = kit.fails("gcuErrorInvalidGrid", kit.launch("mark", grid, slots))
        rule = f" or multiple of {multiple}" if multiple else ""
        assert said == f"Invalid grid size {grid} (must be <= {free}{rule})", said
    counts = np.zeros((1000, 8), np.int64)
    counts[:, 0] = np.arange(1, 1001)
    for grid, running in at_once.items():
        before = kit.cycles()
        check(kit.launch("mark", grid, slots, how="gcuLaunchFolded"))
        assert kit.cycles() - before == kit.model(counts[:grid], running)
""", [(0, 0, [1, 57, 1000], [], {57: 57}),
      (32, 0, [1, 32], [33, 64], {100: 32}),
      (8, 10, [8, 10, 30], [9, 31], {9: 8, 57: 50, 11: 10}),
      (48, 30, [48, 60], [59], {59: 48, 61: 60})])


def test_resetting_a_device_frees_everything_of_it(kit: Kit) -> None:
    run_python("""
kit = Kit()
from terrazzo.chips.gcu.library import MemoryInfo
slot, stream = kit.zeros(1), kit.stream()
check(kit.lib.gcuSetDevice(1))
kept = kit.put(np.array([5]))
check(kit.lib.gcuSetDevice(0))
check(kit.launch("poke", 1, 8))
kit.fails("gcuErrorIllegalAddress", kit.lib.gcuStreamSynchronize(None))
kit.fails("gcuErrorIllegalAddress", kit.lib.gcuMemset(slot, 0, 8))
check(kit.lib.gcuDeviceReset())
kit.fails("gcuErrorInvalidPointer", kit.lib.gcuFree(slot))
kit.fails("gcuErrorInvalidHandle", kit.lib.gcuStreamSynchronize(stream))
info = MemoryInfo()
check(kit.lib.gcuMemGetInfo(info, 0))
assert info.allocated == info.peak == info.allocations == 0
assert kit.cycles() == 0
slot = kit.zeros(1)
check(kit.launch("mark", 1, slot))
assert kit.get(slot, np.int64) == 1
check(kit.lib.gcuSetDevice(1))
assert kit.get(kept, np.int64) == 5
""")


def test_memory_of_a_small_device_runs_out_and_comes_back(kit: Kit) -> None:
    run_python("""
kit = Kit(memory_bytes=64 << 20)
for _ in range(200):
    blocks = [kit.malloc(16 << 20) for _ in range(4)]
    kit.fails("gcuErrorOutOfMemory", kit.lib.gcuMalloc(ctypes.c_void_p(), 1))
    for block in blocks:
        check(kit.lib.gcuFree(block))
many = [kit.malloc(512) for _ in range(20_000)]
for block in many[::2] + many[1::2]:
    check(kit.lib.gcuFree(block))
""")


# ---------------------------------------------------------------- fork
def test_a_child_of_a_process_that_used_the_chip_is_told_so(kit: Kit) -> None:
    said = run_python("""
kit = Kit()
slot = kit.zeros(1)
check(kit.launch("late", 1, slot, 50_000, 7))
child = os.fork()
if not child:
    codes = [kit.lib.gcuMalloc(ctypes.c_void_p(), 8), kit.lib.gcuFree(slot),
             kit.lib.gcuDeviceSynchronize(), kit.lib.gcuStreamSynchronize(None),
             kit.lib.gcuMemset(slot, 0, 8), kit.lib.gcuModuleLoadData(ctypes.c_void_p(), b"", 0),
             kit.lib.gcuLaunchFolded(None, 1, 1, 1, None, 0, None)]
    assert {ERRORS[code] for code in codes} == {"gcuErrorInitialization"}, codes
    print(kit.message(), flush=True)
    count = ctypes.c_int()
    check(kit.lib.gcuGetDeviceCount(count))  # what needs no device is still answered
    os._exit(count.value)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
assert kit.get(slot, np.int64) == 7
""")
    assert "was forked from one that used gcu" in said and "spawn" in said


def test_a_child_of_a_process_that_only_described_the_chip_starts_clean(kit: Kit) -> None:
    run_python("""
kit = Kit()
def work():
    slot = kit.zeros(1)
    check(kit.launch("mark", 1, slot))
    assert kit.get(slot, np.int64) == 1
children = []
for _ in range(2):
    child = os.fork()
    if not child:
        work()
        os._exit(17)
    children.append(child)
assert [os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children] == [17, 17]
work()
""")


def test_faults_that_are_not_ours_end_the_process_as_ever(kit: Kit) -> None:
    for text, signal in (("ctypes.string_at(16, 1)", 11), ("os.kill(os.getpid(), 7)", 7)):
        ran = subprocess.run([sys.executable, "-c", PRELUDE + "kit = Kit()\nkit.zeros(1)\n" + text],
                             capture_output=True, timeout=60)
        assert ran.returncode == -signal
    ran = subprocess.run([sys.executable, "-X", "faulthandler", "-c",
                          PRELUDE + "Kit().zeros(1)\nctypes.string_at(16, 1)"],
                         capture_output=True, timeout=60)
    assert ran.returncode == -11 and b"Segmentation fault" in ran.stderr


def test_handlers_that_were_installed_later_do_not_hide_faults_of_kernels(kit: Kit) -> None:
    run_python("""
from terrazzo.triton_cpu.launch.faults import guard
kit = Kit()
check(kit.lib.gcuSetHostThreads(2))
guard()  # catches faults of Triton's kernels on the CPU, and hands ours on
for turn in range(20):
    stream = kit.stream()
    check(kit.launch("poke", 2, 8, stream=stream))
    kit.fails("gcuErrorIllegalAddress", kit.lib.gcuStreamSynchronize(stream))
    check(kit.lib.gcuStreamDestroy(stream))
""")


# ---------------------------------------------------------------- building
def test_no_compiler_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(MissingDependency, match=r"no C compiler was found \(no-such-compiler\)"):
        build.built_library(str(tmp_path / "a"))
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependency, match="cc, gcc or clang"):
        build.built_library(str(tmp_path / "b"))


def test_without_a_compiler_what_was_built_last_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "build_into", lambda path, command: path.touch())
    made = []
    for name in ("one-cc", "another-cc"):
        compiler = tmp_path / name
        compiler.write_text("#!/bin/sh\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CC", str(compiler))
        made.append(build.built_library(str(tmp_path / "kept")))
        build.built_library.cache_clear()
        os.utime(made[-1], (len(made), len(made)))
    assert made[0] != made[1], "each compiler has a library of its own"
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build.built_library(str(tmp_path / "kept")) == made[1]
    build.built_library.cache_clear()


def test_without_a_compiler_images_are_still_written() -> None:
    text = ("from terrazzo.chips.gcu.image import *\n"
            "from terrazzo.chips.gcu import description\n"
            "made = write_image(b'code', [ImageFunction('f', 'f', 'p')], 'x' * 32)\n"
            "assert read_image(made).object_code == b'code'\n"
            "description.find('gcu')\n")
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True,
                         env={**os.environ, "CC": "no-such-compiler"})
    assert ran.returncode == 0, ran.stderr


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(CompileError, match="false does not compile the runtime library of gcu"):
        build.built_library(str(tmp_path))
    assert not list(tmp_path.rglob("*.so*"))


def test_building_says_what_it_does_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = []
    monkeypatch.setattr(build, "build_into", lambda path, command: (made.append(path),
                                                                    path.touch()))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    first = build.built_library(str(tmp_path))
    assert "building the runtime library of gcu with" in capsys.readouterr().err
    build.built_library.cache_clear()
    assert build.built_library(str(tmp_path)) == first and len(made) == 1
    assert capsys.readouterr().err == ""


def test_processes_that_build_at_once_build_it_once(kit: Kit, tmp_path: Path) -> None:
    """A compiler that counts how often it is called."""
    counter, compiler = tmp_path / "calls", tmp_path / "counting-cc"
    compiler.write_text(f'#!/bin/sh\necho >> {counter}\nexec {build.compiler()[0]} "$@" -O0\n')
    compiler.chmod(0o755)
    text = "Kit(); print(library()._name)"
    environment = {**os.environ, "CC": str(compiler), "TZ_CACHE_DIR": str(tmp_path / "cache")}
    running = [subprocess.Popen([sys.executable, "-c", PRELUDE + text], text=True,
                                stdout=subprocess.PIPE, env=environment) for _ in range(3)]
    paths = {process.communicate(timeout=120)[0].strip() for process in running}
    assert all(process.returncode == 0 for process in running)
    assert len(paths) == 1 and Path(*paths).is_file()
    assert len(counter.read_text().splitlines()) == 1
    whole = Path(*paths).stat().st_size
    Path(*paths).write_bytes(b"damaged")
    again = subprocess.run([sys.executable, "-c", PRELUDE + text], env=environment, timeout=120)
    assert again.returncode == 0 and Path(*paths).stat().st_size == whole
    assert len(counter.read_text().splitlines()) == 2
