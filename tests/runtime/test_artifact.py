"""Compiled code as a file: it comes back as it was, and what is wrong with a file is said."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.base.shapes import dim
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.compiler.driver import compile_graph
from terrazzo.compiler.lowering import Lowering
from terrazzo.dtypes import bfloat16, float32, int64
from terrazzo.errors import ArtifactError, CpuFeatureError
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace
from terrazzo.index import maximum, minimum
from terrazzo.runtime import artifact as module
from terrazzo.runtime.artifact import Artifact, pack, unpack
from terrazzo.runtime.executable import Executable
from terrazzo.runtime.hosted import HostedExecutable

TABLE = np.arange(12, dtype=np.float32).reshape(3, 4)


def model(x: Any, y: Any) -> Any:
    hidden = tz.softmax(tz.matmul(x, tz.transpose(y)))
    return tz.matmul(hidden, y) + tz.matmul(x[:, :3], TABLE), tz.sum(x)


def artifact_of(*types: TensorType) -> Artifact:
    return Lowering(trace(model, types, name="model")[0], Cpu()).artifact()


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    n = dim("n")
    return artifact_of(TensorType((n, 4), float32), TensorType((n, 4), float32))


def test_everything_comes_back(artifact: Artifact) -> None:
    again = unpack(pack(artifact))
    for name in ("name", "inputs", "outputs", "chip", "made", "strides"):
        assert str(getattr(again, name)) == str(getattr(artifact, name))
    assert str(again.arena) == str(artifact.arena)
    assert list(map(str, again.kernels)) == list(map(str, artifact.kernels))
    assert any(c.packing is not None for c in artifact.constants)
    for a, b in zip(again.constants, artifact.constants, strict=True):
        assert a.packing is None
        np.testing.assert_array_equal(a.array(), b.array())
        assert a.array().ctypes.data % 64 == 0


def test_sizes_of_every_kind() -> None:
    n, m = dim("n"), dim("m")
    sizes = (0, 7, n, n + 3, n * m, (n + 63) // 64, n % 8, minimum(n, m), maximum(n - 2, 0))
    for size in sizes:
        again = module.index_from(module.index_data(size))
        assert str(again) == str(size)
    for nonsense in (["^", 1, 2], ["+", 1], {"a": 1}, 1.5, None):
        with pytest.raises(ArtifactError):
            module.index_from(nonsense)


def test_save_and_load(tmp_path: Path, rng: np.random.Generator) -> None:
    x, y = rng.normal(size=(2, 5, 4)).astype(np.float32)
    compiled = tz.op(model, name="saved_model").compile(x, y)
    compiled.save(tmp_path / "model.tzx")
    loaded = tz.load(tmp_path / "model.tzx")
    for a, b in zip(loaded(x, y), compiled(x, y), strict=True):
        assert a.tobytes() == b.tobytes()
    assert repr(loaded) == repr(compiled)


KINDS_OF_CONSTANTS = [np.empty((0, 3), np.float32), np.ones(3, bfloat16.np), np.array(True),
                      np.zeros((2, 0), np.int8), np.arange(5, dtype=np.complex64)]


def test_constants_of_every_kind_come_back(artifact: Artifact) -> None:
    given = tuple(map(module.Constant, KINDS_OF_CONSTANTS))
    again = unpack(pack(replace(artifact, constants=given))).constants
    for a, b in zip(again, given, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.array().tobytes() == b.array().tobytes()


def test_constants_stay_in_the_file(tmp_path: Path, rng: np.random.Generator) -> None:
    table = rng.normal(size=(50, 7)).astype(np.float32)
    path = tmp_path / "table.tzx"
    compiled = tz.op(lambda i: tz.take(table, i, axis=0) * 2.0, name="look_up").compile(
        np.arange(3))
    compiled.save(path)
    loaded = tz.load(path)
    (constant,) = loaded.artifact.constants
    array = constant.array()
    assert np.shares_memory(array, constant.source) and not array.flags.writeable
    assert array.ctypes.data % 64 == 0
    loaded.save(path)  # over the file that is mapped
    again = tz.load(path)
    picked = np.array([49, 0, 3])
    for executable in (loaded, again):
        np.testing.assert_array_equal(executable(picked), table[picked] * 2)


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64",
                    reason="code of other systems is linked by LLVM")
def test_memory_holds_what_is_read_of_a_file(tmp_path: Path) -> None:
    table = np.ones((1 << 14, 1 << 10), np.float32)  # 64 MB, of which a call reads three rows
    tz.op(lambda i: tz.take(table, i, axis=0) * 2.0, name="look_up").compile(
        np.arange(3)).save(tmp_path / "table.tzx")
    program = """
import sys, numpy as np, terrazzo as tz

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

tz.load  # what is imported counts before
before = peak()
found = tz.load(sys.argv[1])(np.array([5, 1 << 13, 0]))
assert found.shape == (3, 1024) and (found == 2).all()
print((peak() - before) // 1024, "llvmlite.binding" in sys.modules)
"""
    source = str(Path(tz.__file__).parents[1])
    for _ in range(2):  # the second finds in the cache what it takes to call native code
        finished = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "table.tzx")], timeout=120, text=True,
            env={**os.environ, "PYTHONPATH": source, "TZ_CACHE_DIR": str(tmp_path / "cache")},
            capture_output=True)
        assert finished.returncode == 0, finished.stderr
        grown, compiles = finished.stdout.split()
        assert int(grown) < 32 and compiles == "False", finished.stdout


def test_a_damaged_constant_is_found_where_it_is_looked_for(tmp_path: Path,
                                                            artifact: Artifact) -> None:
    path = tmp_path / "model.tzx"
    content = damage(-2)(pack(artifact))
    path.write_bytes(content)
    for _ in range(2):
        for remember in (False, True):
            with pytest.raises(ArtifactError, match="checksum"):
                module.load(path, remember=remember)
    assert module.unpack(content, check_constants=False).name == artifact.name


def test_a_file_is_checked_once_until_it_is_touched(tmp_path: Path, artifact: Artifact,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.tzx"
    path.write_bytes(pack(artifact))
    checks: list[int] = []
    original = module.checksum.digest_at_once
    monkeypatch.setattr(module.checksum, "digest_at_once",
                        lambda *given: (checks.append(1), original(*given))[1])
    for _ in range(3):
        module.load(path, remember=True)
    assert len(checks) == 1
    status = path.stat()
    path.write_bytes(damage(-2)(path.read_bytes()))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as if nothing had happened
    with pytest.raises(ArtifactError, match="checksum"):
        module.load(path, remember=True)
    path.write_bytes(damage(-2)(path.read_bytes()))
    monkeypatch.setattr(module.checksum, "_boot", lambda: "another start of the machine")
    module.load(path, remember=True)
    assert len(checks) == 3
    monkeypatch.setattr(module.checksum, "_boot", lambda: "")
    module.load(path, remember=True)
    module.load(path, remember=True)
    assert len(checks) == 5, "where starts have no names, every load checks"


def test_an_executable_lets_go_of_what_it_packed() -> None:
    weights = np.ones((300, 64), np.float32)
    graph, _ = trace(lambda x: tz.matmul(x, weights), [TensorType((2, 300), float32)], name="f")
    artifact = Lowering(graph, Cpu()).artifact()
    (constant,) = artifact.constants
    assert constant.packing is not None and constant.shape == constant.packing.shape
    (held,) = Executable(artifact).artifact.constants
    assert held.packing is None and held.nbytes == constant.nbytes
    assert not np.shares_memory(held.source, constant.source)


def test_a_constant_is_stored_once_for_each_layout(rng: np.random.Generator) -> None:
    table = rng.normal(size=(70, 32)).astype(np.float32)

    def model(x: Any, ids: Any) -> Any:
        logits = tz.matmul(x, tz.transpose(table)) + 1.0
        again = tz.matmul(x * 3.0, tz.transpose(table)) - 1.0
        return logits, again, tz.take(table, ids, axis=0) + 0.5

    graph, _ = trace(model, [TensorType((5, 32), float32), TensorType((4,), int64)], name="f")
    artifact = Lowering(graph, Cpu()).artifact()
    assert [c.packing is None for c in artifact.constants].count(True) == 1
    assert len(artifact.constants) == 2
    x, ids = rng.normal(size=(5, 32)).astype(np.float32), np.array([69, 0, 1, 2])
    got = Executable(artifact)(x, ids)
    wanted = x @ table.T + 1, (x * 3) @ table.T - 1, table[ids] + 0.5
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_loading_needs_no_compiler(tmp_path: Path) -> None:
    x = np.linspace(-1, 1, 7, dtype=np.float32)
    tz.gelu.compile(x).save(tmp_path / "gelu.tzx")
    program = f"""
import sys, numpy as np, terrazzo as tz
y = tz.load({str(tmp_path / "gelu.tzx")!r})(np.linspace(-1, 1, 7, dtype=np.float32))
assert not [m for m in sys.modules if m.startswith(("terrazzo.compiler", "terrazzo.expr.lower"))]
print(y.tobytes().hex())
"""
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(tz.__file__).parents[1])})
    assert finished.stdout.strip() == tz.gelu(x).tobytes().hex(), finished.stderr


def damage(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1:]


DAMAGED = {
    "nothing": (lambda data: b"", "not a compiled terrazzo file"),
    "another kind of file": (lambda data: b"\x7fELF" + data, "not a compiled terrazzo file"),
    "another format": (lambda data: data[:3] + b"\x63" + data[4:], "format version"),
    "cut off in the header": (lambda data: data[:60], "checksum does not match"),
    "cut off in the code": (lambda data: data[:-100], "checksum does not match"),
    "something added": (lambda data: data + b"\0", "checksum does not match"),
    "a flipped bit in the checksum": (damage(10), "checksum does not match"),
    "a flipped bit in the header": (damage(120), "checksum does not match"),
    "a flipped bit in a length": (damage(5), "checksum does not match"),
    "a flipped bit at the end": (damage(-2), "checksum does not match"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused(case: str, artifact: Artifact, tmp_path: Path) -> None:
    change, message = DAMAGED[case]
    path = tmp_path / "model.tzx"
    path.write_bytes(change(pack(artifact)))
    with pytest.raises(ArtifactError, match=message) as caught:
        tz.load(path)
    assert "model.tzx" in str(caught.value)


def test_a_header_that_makes_no_sense_is_refused(artifact: Artifact) -> None:
    import hashlib

    for header in (b"not json", b"[]", b'{"terrazzo": 1}', b"{}"):
        lengths = struct.pack("<QQQ", len(header), 0, 0)
        start = module.MAGIC + lengths + hashlib.sha256(lengths + header).digest()
        content = start + hashlib.sha256(b"").digest() + header
        with pytest.raises(ArtifactError, match=r"makes no sense|compiled by"):
            unpack(content + bytes(-len(content) % 64))


def test_another_version_is_refused(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pack(artifact)
    monkeypatch.setattr(module, "__version__", "99.0")
    with pytest.raises(ArtifactError, match=r"compiled by terrazzo .*, this is 99\.0"):
        unpack(data)


def changed(artifact: Artifact, **facts: Any) -> Artifact:
    made = replace(artifact.made, facts={**artifact.made.facts, **facts})
    return replace(artifact, made=made)


def test_another_cpu_is_refused(artifact: Artifact) -> None:
    with pytest.raises(CpuFeatureError, match="lacks: teleport"):
        Executable(changed(artifact, features=[*artifact.made.facts["features"], "teleport"]))
    with pytest.raises(CpuFeatureError, match="was compiled for z80-unknown-none"):
        Executable(changed(artifact, triple="z80-unknown-none"))


def test_control_flow_is_saved_with_the_rest(tmp_path: Path) -> None:
    graph = trace(lambda x: tz.cond(tz.sum(x) > 0.0, lambda v: v * 2, lambda v: -v, x),
                  [TensorType((3,), float32)], name="branchy")[0]
    compile_graph(graph).save(tmp_path / "branchy.tzx")
    loaded, x = tz.load(tmp_path / "branchy.tzx"), np.array([1, 2, 3], np.float32)
    np.testing.assert_array_equal(loaded(x), x * 2)
    np.testing.assert_array_equal(loaded(-x), x)


def test_what_the_host_runs_cannot_be_saved(tmp_path: Path) -> None:
    graph = trace(lambda x: tz.inv(x) + 1, [TensorType((3, 3), float32)], name="inverted")[0]
    with pytest.raises(ArtifactError, match="inverted has inv, which runs on the host"):
        HostedExecutable(graph, compile_graph).save(tmp_path / "inverted.tzx")
