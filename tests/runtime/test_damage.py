"""A damaged file of the cache is noticed and made again; too many open files are no damage."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
import terrazzo.errors
from terrazzo.compiler.driver import compile_graph
from terrazzo.compiler.keys import graph_key, load_compiled
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.options import Options
from terrazzo.compiler.rewriting import inlined
from terrazzo.graph.ir import Graph, TensorType
from terrazzo.graph.trace import trace
from terrazzo.knobs import knobs
from terrazzo.runtime import checksum
from terrazzo.runtime.cache import default_cache

X = np.linspace(-1, 1, 3 * 40, dtype=np.float32).reshape(3, 40)


def compiled_model(rng: np.random.Generator) -> tuple[Graph, str, np.ndarray]:
    """A graph with weights in the cache, its key, and its answer for X."""
    weight = rng.normal(size=(40, 300)).astype(np.float32)
    bias, scale = (rng.normal(size=300).astype(np.float32) for _ in range(2))
    graph, _ = trace(lambda x: tz.tanh(tz.matmul(x, weight) + bias) * scale,
                     [TensorType((3, 40), tz.float32)], name="damaged")
    options = Options.now()
    answer = compile_graph(graph, options=options)(X)
    lowering = Lowering(inlined(graph, options=options), options.chip, options=options)
    return graph, graph_key(lowering), answer


def test_no_flipped_byte_is_believed(tmp_path: Path, rng: np.random.Generator) -> None:
    with knobs.override(cache_dir=tmp_path):
        options = Options.now()
        _, key, answer = compiled_model(rng)
        path = default_cache().find(key)
        assert path is not None
        whole = path.read_bytes()
        places = {*range(0, 120, 3), *rng.integers(0, len(whole), 200).tolist(), len(whole) - 1}
        noticed = 0
        for place in sorted(places):
            damaged = bytearray(whole)
            damaged[place] ^= int(rng.integers(1, 256))
            path.write_bytes(damaged)
            found = load_compiled(key, options)
            if found is None:
                noticed += 1
                assert not path.exists()
            else:
                np.testing.assert_array_equal(found(X), answer)
        assert noticed == len(places) >= 200
        path.write_bytes(whole)
        sound = load_compiled(key, options)
        assert sound is not None
        np.testing.assert_array_equal(sound(X), answer)


def test_what_was_damaged_is_made_again(tmp_path: Path, rng: np.random.Generator,
                                        caplog: pytest.LogCaptureFixture) -> None:
    with knobs.override(cache_dir=tmp_path):
        graph, key, answer = compiled_model(rng)
        path = default_cache().find(key)
        assert path is not None
        whole = path.read_bytes()
        path.write_bytes(whole[:-100] + bytes(100))
        np.testing.assert_array_equal(compile_graph(graph)(X), answer)
        assert "damaged" in caplog.text
        assert path.read_bytes() == whole


@pytest.mark.parametrize("size", [0, 64, 1 << 16, (1 << 16) + 64, (1 << 20) + 4096 + 64, 5 << 20])
def test_every_change_changes_the_sum(size: int, rng: np.random.Generator,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_AT_ONCE", 1 << 21)
    data = rng.integers(0, 256, size, dtype=np.uint8)
    sound = checksum.digest([data])
    assert sound == checksum.digest_at_once([data]) == checksum.digest([data.copy()])
    for place in rng.integers(0, max(size, 1), 20 if size else 0):
        changed = data.copy()
        changed[place] ^= 1 << int(rng.integers(8))
        assert checksum.digest([changed]) != sound
    if size > 4096:
        numbers = data.view(np.uint64)
        swapped = numbers.copy()
        swapped[[1, 600]] = numbers[[600, 1]]
        assert checksum.digest([swapped.view(np.uint8)]) != sound
        rows = numbers.copy()
        rows[:512], rows[512:1024] = numbers[512:1024].copy(), numbers[:512].copy()
        assert checksum.digest([rows.view(np.uint8)]) != sound


OPEN_FILES = """
import logging, os, resource, sys
import numpy as np
import terrazzo as tz
from terrazzo.errors import TerrazzoError
from terrazzo.runtime.cache import default_cache
logging.disable()
x = np.linspace(-1, 1, 40, dtype=np.float32)
weight = np.arange(40 * 30, dtype=np.float32).reshape(40, 30)

def fresh():
    return tz.jit(lambda x: tz.tanh(x @ weight))

expected = fresh()(x)
entries = sorted(p for p in default_cache().folder.rglob("*.tzx"))
assert entries
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = []
try:
    while True:
        held.append(open("/dev/null"))
except OSError:
    pass
try:
    assert np.array_equal(fresh()(x), expected)
    print("compiled in memory")
except TerrazzoError as error:
    assert "open files" in str(error), error
    print("refused")
del held[:]
assert sorted(p for p in default_cache().folder.rglob("*.tzx")) == entries, "the entry stays"
from terrazzo.compiler.lowering import Lowering
Lowering.artifact = None  # nothing is compiled any more
assert np.array_equal(fresh()(x), expected)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no limit to set")
@pytest.mark.parametrize("warm", [False, True])
def test_too_many_open_files_are_no_damage(tmp_path: Path, warm: bool) -> None:
    source = str(Path(terrazzo.errors.__file__).parents[1])
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": source,
                                   "TZ_CACHE_DIR": str(tmp_path)}
    for _ in range(1 + warm):  # the second process has not loaded LLVM when it runs out
        finished = subprocess.run([sys.executable, "-c", OPEN_FILES], capture_output=True,
                                  text=True, timeout=120, env=environment)
        assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() in ("compiled in memory", "refused")
