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
from terrazzo.chips.cpu import host
from terrazzo.compiler import Lowering, compile_graph
from terrazzo.dtypes import float32
from terrazzo.errors import ArtifactError, CpuFeatureError
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace
from terrazzo.index import maximum, minimum
from terrazzo.runtime import artifact as module
from terrazzo.runtime.artifact import Artifact, pack, unpack
from terrazzo.runtime.executable import Executable
from terrazzo.shapes import dim

TABLE = np.arange(12, dtype=np.float32).reshape(3, 4)


def model(x: Any, y: Any) -> Any:
    hidden = tz.softmax(tz.matmul(x, tz.transpose(y)))
    return tz.matmul(hidden, y) + tz.matmul(x[:, :3], TABLE), tz.sum(x)


def artifact_of(*types: TensorType) -> Artifact:
    return Lowering(trace(model, types, name="model")[0], host()).artifact()


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    n = dim("n")
    return artifact_of(TensorType((n, 4), float32), TensorType((n, 4), float32))


def test_everything_comes_back(artifact: Artifact) -> None:
    again = unpack(pack(artifact))
    for name in ("name", "inputs", "outputs", "features", "triple", "object_code", "strides"):
        assert str(getattr(again, name)) == str(getattr(artifact, name))
    assert str(again.arena) == str(artifact.arena)
    assert list(map(str, again.kernels)) == list(map(str, artifact.kernels))
    for a, b in zip(again.constants, artifact.constants, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.ctypes.data % 64 == 0


def test_sizes_of_every_kind() -> None:
    n, m = dim("n"), dim("m")
    sizes = (0, 7, n, n + 3, n * m, (n + 63) // 64, n % 8, minimum(n, m), maximum(n - 2, 0))
    for size in sizes:
        again = module._from_data(module._to_data(size))
        assert str(again) == str(size)
    for nonsense in (["^", 1, 2], ["+", 1], {"a": 1}, 1.5, None):
        with pytest.raises(ArtifactError):
            module._from_data(nonsense)


def test_save_and_load(tmp_path: Path, rng: np.random.Generator) -> None:
    x, y = rng.normal(size=(2, 5, 4)).astype(np.float32)
    compiled = tz.op(model, name="saved_model").compile(x, y)
    compiled.save(tmp_path / "model.tzx")
    loaded = tz.load(tmp_path / "model.tzx")
    for a, b in zip(loaded(x, y), compiled(x, y), strict=True):
        assert a.tobytes() == b.tobytes()
    assert repr(loaded) == repr(compiled)


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
    "a flipped bit in the header": (damage(80), "checksum does not match"),
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
        rest = struct.pack("<Q", len(header)) + header
        with pytest.raises(ArtifactError):
            unpack(module.MAGIC + hashlib.sha256(rest).digest() + rest)


def test_another_version_is_refused(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pack(artifact)
    monkeypatch.setattr(module, "__version__", "99.0")
    with pytest.raises(ArtifactError, match=r"compiled by terrazzo .*, this is 99\.0"):
        unpack(data)


def test_another_cpu_is_refused(artifact: Artifact) -> None:
    with pytest.raises(CpuFeatureError, match="lacks: teleport"):
        Executable(replace(artifact, features=(*artifact.features, "teleport")))
    with pytest.raises(CpuFeatureError, match="was compiled for z80-unknown-none"):
        Executable(replace(artifact, triple="z80-unknown-none"))


def test_control_flow_cannot_be_saved(tmp_path: Path) -> None:
    graph = trace(lambda x: tz.cond(tz.sum(x) > 0.0, lambda v: v, lambda v: -v, x),
                  [TensorType((3,), float32)], name="branchy")[0]
    with pytest.raises(ArtifactError, match="branchy has control flow"):
        compile_graph(graph).save(tmp_path / "branchy.tzx")
