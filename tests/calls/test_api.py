"""Calling operators and compiled functions: what is compiled when, and what comes back."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.calls import family
from terrazzo.compiler import driver as compiler
from terrazzo.errors import ArgumentError, DTypeError
from terrazzo.knobs import knobs
from terrazzo.runtime import fastcall, layout


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the graphs compiled since the test began."""
    names: list[str] = []
    original = compiler.compile_graph

    def noted(graph: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(graph.name)
        return original(graph, *args, **kwargs)

    monkeypatch.setattr(compiler, "compile_graph", noted)
    return names


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


# ---------------------------------------------------------------- what is compiled when
def test_one_compilation_for_equal_types(compilations: list[str]) -> None:
    function = tz.jit(lambda x: x * 3.0)
    for _ in range(3):
        np.testing.assert_array_equal(function(floats(5)), floats(5) * 3)
    assert len(compilations) == 1


def test_sizes_that_change_are_compiled_once_for_all(compilations: list[str]) -> None:
    function = tz.jit(lambda x, y: x + y)
    for n in (5, 6, 7, 8, 5, 100):
        np.testing.assert_array_equal(function(floats(n), floats(n)), floats(n) * 2)
    assert len(compilations) == 2  # the first size, then all sizes


def test_a_size_of_one_still_broadcasts(compilations: list[str]) -> None:
    function = tz.jit(lambda x, y: x + y)
    for n in (5, 6, 1, 7):
        x, y = floats(5 if n == 1 else n), floats(n)
        np.testing.assert_array_equal(function(x, y), x + y)


def test_sizes_that_were_equal_by_chance(compilations: list[str]) -> None:
    """Rows and columns equal in two calls, different in the third."""
    function = tz.jit(lambda x: x.sum(axis=0) * 2.0)
    for shape in ((4, 4), (5, 5), (6, 7), (8, 8)):
        np.testing.assert_allclose(function(floats(*shape)), floats(*shape).sum(0) * 2, rtol=1e-5)


@pytest.mark.parametrize(("dynamic", "expected"), [("never", 3), ("always", 1)])
def test_the_setting_for_symbolic_sizes(dynamic: str, expected: int,
                                        compilations: list[str]) -> None:
    function = tz.jit(lambda x: tz.exp(x))
    with knobs.override(dynamic=dynamic):
        for n in (5, 6, 7):
            np.testing.assert_allclose(function(floats(n)), np.exp(floats(n)), rtol=1e-6)
    assert len(compilations) == expected


def test_settings_that_change_code_compile_again(compilations: list[str]) -> None:
    function = tz.jit(lambda x: x + 1.0)
    function(floats(5))
    with knobs.override(vector_bits=128):
        function(floats(5))
        function(floats(5))
    function(floats(5))
    assert len(compilations) == 2


def test_entries_do_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "MOST_ENTRIES", 8)
    function = tz.jit(lambda x: x + 1.0)
    for n in range(2, 40):
        np.testing.assert_array_equal(function(floats(n)), floats(n) + 1)
    assert len(function.table.entries) <= 8


def test_functions_are_let_go() -> None:
    function = tz.jit(lambda x: x + 1.0)
    function(floats(5))
    gone = weakref.ref(function)
    del function
    gc.collect()
    assert gone() is None


# ---------------------------------------------------------------- arguments
def test_static_arguments_are_part_of_the_program(compilations: list[str]) -> None:
    @tz.jit
    def power(x: Any, n: int, mode: str = "plain", scale: Any = None) -> Any:
        for _ in range(n - 1):
            x = x * x
        if scale is not None:
            x = x * scale
        return -x if mode == "negative" else x

    x = floats(4)
    for _ in range(2):
        np.testing.assert_array_equal(power(x, 1), x)
        np.testing.assert_array_equal(power(x, 2), x * x)
        np.testing.assert_array_equal(power(x, 2, "negative"), -(x * x))
        np.testing.assert_array_equal(power(x, 2, mode="negative"), -(x * x))
        np.testing.assert_array_equal(power(x, 2, scale=2.0), x * x * 2)
    assert len(compilations) == 5
    power(x, 2, scale=3.0)  # floats are computed with
    assert len(compilations) == 5


def test_true_one_and_one_point_zero_are_three_things() -> None:
    function = tz.jit(lambda x, flag: x + 1.0 if flag is True else x)
    x = floats(3)
    np.testing.assert_array_equal(function(x, 1), x)
    np.testing.assert_array_equal(function(x, True), x + 1)
    np.testing.assert_array_equal(function(x, 1.0), x)


def test_any_hashable_thing_may_be_static(compilations: list[str]) -> None:
    function = tz.jit(lambda x, f, kind: tz.astype(f(x), kind))
    x = floats(3)
    for _ in range(2):
        np.testing.assert_allclose(function(x, tz.exp, tz.float64), np.exp(x), rtol=1e-6)
        assert function(x, tz.negative, np.float16).dtype == np.float16
    assert len(compilations) == 2 and len(function.table.entries) == 2


def test_nests_of_tensors() -> None:
    Pair = namedtuple("Pair", "left right")

    @tz.jit
    def function(tree: Any) -> Any:
        return {"sum": tree["a"] + tree["rest"][0], "pair": Pair(tree["rest"][1].left, tree["a"])}

    x, y, z = floats(3), floats(3) + 1, floats(2)
    for _ in range(2):
        found = function({"a": x, "rest": [y, Pair(z, "name")]})
        np.testing.assert_array_equal(found["sum"], x + y)
        assert isinstance(found["pair"], Pair)
        np.testing.assert_array_equal(found["pair"].left, z)
        np.testing.assert_array_equal(found["pair"].right, x)


def test_keywords_and_their_order() -> None:
    function = tz.jit(lambda x, y, z=0.0: x - y * z)
    x, y = floats(3), floats(3) + 1
    for _ in range(2):
        np.testing.assert_allclose(function(y=y, x=x, z=2.0), x - y * 2, rtol=1e-6)
        np.testing.assert_allclose(function(x=x, y=y, z=2.0), x - y * 2, rtol=1e-6)
        np.testing.assert_allclose(function(x, z=3.0, y=y), x - y * 3, rtol=1e-6)


def test_an_operator_takes_tensors_by_name() -> None:
    x, w, b = floats(4, 8), floats(8), floats(8) + 2
    expected = tz.layer_norm(x, w, b)
    for _ in range(2):
        np.testing.assert_array_equal(tz.layer_norm(x, bias=b, weight=w), expected)
        np.testing.assert_array_equal(tz.layer_norm(x, weight=w, bias=b), expected)


def test_attributes_by_position_and_by_name() -> None:
    x = floats(3, 4)
    for _ in range(2):
        np.testing.assert_allclose(tz.sum(x, 0), x.sum(0), rtol=1e-6)
        np.testing.assert_allclose(tz.sum(x, axis=1), x.sum(1), rtol=1e-6)
        np.testing.assert_array_equal(tz.reshape(x, (4, 3)), x.reshape(4, 3))
        np.testing.assert_array_equal(tz.reshape(x, shape=[2, 6]), x.reshape(2, 6))


def test_numbers_go_in_as_tensors(compilations: list[str]) -> None:
    x = floats(5)
    for value in (2.0, 3.5, -1.0):
        np.testing.assert_array_equal(tz.multiply(x, value), x * np.float32(value))
        np.testing.assert_array_equal(tz.multiply(value, x), x * np.float32(value))
    assert compilations.count("multiply") == 2
    assert tz.add(2, 3) == 5
    assert tz.add(x.astype(np.int8), 3).dtype == np.int8


def test_a_number_that_does_not_fit() -> None:
    x = np.ones(3, np.int8)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="300 does not fit into int8"):
            tz.add(x, 300)
    np.testing.assert_array_equal(tz.add(x, 3), x + 3)


def test_lists_are_arrays_for_operators() -> None:
    np.testing.assert_array_equal(tz.add([1.0, 2.0], [3.0, 4.0]), [4, 6])
    x, y = floats(2, 3), floats(1, 3)
    for _ in range(2):
        np.testing.assert_array_equal(tz.concat([x, y], axis=0), np.concatenate([x, y]))
        np.testing.assert_array_equal(tz.concat(x, y), np.concatenate([x, y]))


def test_numpy_scalars() -> None:
    assert tz.exp(np.float32(0)) == 1
    assert tz.add(np.int16(3), np.int16(4)).dtype == np.int16


def test_attributes_with_equal_hashes() -> None:
    x = np.full(3, -1.0, np.float32)
    fill = tz.jit(lambda x: tz.full_like(x, value=0.0))
    negative = tz.jit(lambda x: tz.full_like(x, value=-0.0))
    assert not np.signbit(fill(x)).any() and np.signbit(negative(x)).all()
    assert not np.signbit(tz.full_like(x, value=0.0)).any()
    assert np.signbit(tz.full_like(x, value=-0.0)).all()


def test_control_flow_called_again_is_not_compiled_again(compilations: list[str]) -> None:
    x = floats(3)
    for _ in range(3):
        found = tz.cond(np.True_, lambda v: v * 2.0, lambda v: v, x)
        np.testing.assert_array_equal(found, x * 2)
    assert compilations.count("cond") == 1


# ---------------------------------------------------------------- layouts
VIEWS = {
    "rows of a wider matrix": lambda x: x[:, 3:40],
    "every second row": lambda x: x[::2],
    "a broadcast row": lambda x: np.broadcast_to(x[0], x.shape),
    "a broadcast column": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "a permuted outer axis": lambda x: x.reshape(4, 8, 48).transpose(1, 0, 2),
}
COPIED = {
    "a transpose": lambda x: x.T,
    "every second column": lambda x: x[:, ::2],
    "rows backwards": lambda x: x[::-1],
    "columns backwards": lambda x: x[:, ::-1],
}


@pytest.mark.parametrize("view", [*VIEWS, *COPIED])
@pytest.mark.parametrize("function", [
    lambda x: tz.exp(x) * 2.0, lambda x: tz.softmax(x), lambda x: tz.sum(x, axis=0),
    lambda x: tz.sum(x, axis=-1), lambda x: tz.mean(x), lambda x: tz.matmul(x, tz.transpose(x)),
    lambda x: tz.sort(x), lambda x: tz.reshape(x, (-1,)), lambda x: x, lambda x: tz.flip(x, axis=0),
    lambda x: tz.transpose(x) + 1.0,
], ids=["pointwise", "rows", "columns", "row sums", "all", "matmul", "opaque", "reshape",
        "identity", "flip", "transpose"])
def test_layouts(function: Any, view: str) -> None:
    x = {**VIEWS, **COPIED}[view](floats(32, 48))
    if x.ndim == 3 and "matmul" in str(function.__code__.co_names):
        pytest.skip("three axes")
    compiled = tz.jit(function)
    expected = tz.jit(function)(np.ascontiguousarray(x))
    for _ in range(2):
        np.testing.assert_allclose(compiled(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("view", VIEWS)
def test_no_copy_where_strides_will_do(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = VIEWS[view](floats(32, 48))
    function = tz.jit(lambda x: tz.exp(x))

    def refuse(array: Any) -> Any:
        raise AssertionError("copied")

    for module in (fastcall, layout):
        monkeypatch.setattr(module, "row_major", refuse)
    np.testing.assert_allclose(function(x), np.exp(x), rtol=1e-6)


def test_strides_and_sizes_that_vary(compilations: list[str],
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    function = tz.jit(lambda x: tz.softmax(x) + 1.0)
    function(floats(3, 5))

    def refuse(array: Any) -> Any:
        raise AssertionError("copied")

    monkeypatch.setattr(fastcall, "row_major", refuse)
    for rows, wide, columns in ((4, 9, 7), (5, 30, 20), (6, 40, 3), (70, 80, 33)):
        x = floats(rows, wide)[:, :columns]
        weights = np.exp(x - x.max(1, keepdims=True))
        np.testing.assert_allclose(function(x), weights / weights.sum(1, keepdims=True) + 1,
                                   rtol=1e-5)
    assert len(compilations) == 2


def test_two_layouts_at_once() -> None:
    x, y = floats(6, 20)[:, :7], np.broadcast_to(floats(7), (6, 7))
    np.testing.assert_array_equal(tz.add(x, y), x + y)
    np.testing.assert_array_equal(tz.add(y, x), x + y)


def test_unaligned_arrays_and_other_byte_orders() -> None:
    x = floats(9)
    with pytest.raises(DTypeError, match=">f4"):
        tz.exp(x.astype(">f4"))
    raw = np.zeros(9 * 4 + 1, np.uint8)
    raw[1:] = x.view(np.uint8)
    unaligned = raw[1:].view(np.float32)
    assert not unaligned.flags.aligned
    np.testing.assert_array_equal(tz.add(unaligned, x), x * 2)


def test_empty_arrays() -> None:
    for shape in ((0,), (0, 5), (5, 0)):
        assert tz.exp(floats(*shape)).shape == shape
        assert tz.sum(floats(*shape)) == 0


# ---------------------------------------------------------------- threads and processes
def test_many_threads_first_compile_and_bits() -> None:
    """Threads that race for the first compilation, over functions, sizes and layouts."""
    functions = [tz.jit(lambda x: tz.softmax(x) + 1.0), tz.jit(lambda x: tz.matmul(x, x)),
                 tz.jit(lambda x: (tz.sum(x, axis=0), tz.max(x)))]
    inputs = [floats(n, n) for n in (8, 17, 33)]
    start = threading.Barrier(16)
    results: list[list[Any]] = [[] for _ in range(16)]

    def work(number: int) -> None:
        start.wait()
        for _ in range(20):
            results[number].append([f(x) for f in functions for x in inputs])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [f(x) for f in functions for x in inputs]
    for each in results:
        assert len(each) == 20
        for found in each:
            for got, want in zip(found, expected, strict=True):
                pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
                assert all(a.tobytes() == b.tobytes() for a, b in pairs)


def test_memory_does_not_grow() -> None:
    resource = pytest.importorskip("resource")
    function = tz.jit(lambda x: tz.matmul(x, tz.softmax(tz.matmul(x, x))))
    x = floats(256, 256)

    def work() -> None:
        for _ in range(100):
            function(x)

    def run() -> int:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    first = run()
    assert run() - first < 20 * 1024  # KiB; 800 results alone would be ten times that


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_after_use() -> None:
    program = """
import os, numpy as np, terrazzo as tz
x = np.ones((512, 512), np.float32)
before = tz.matmul(x, x)
tz.softmax(x)
child = os.fork()
after = tz.matmul(x, x) if child else tz.matmul(x, x) * 1
fresh = tz.gelu(x)  # compiled after the fork, in both
assert (after == before).all() and fresh.shape == x.shape
if child == 0:
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    source = str(Path(tz.__file__).parents[1])
    finished = subprocess.run([sys.executable, "-W", "ignore", "-c", program], timeout=120,
                              env={**os.environ, "PYTHONPATH": source}, capture_output=True)
    assert finished.returncode == 0, finished.stderr.decode()


def test_a_new_process_finds_compiled_code_on_disk(tmp_path: Path) -> None:
    program = """
import numpy as np, terrazzo as tz
from terrazzo.compiler.lowering import Lowering
made = []
original = Lowering.artifact
Lowering.artifact = lambda self: made.append(1) or original(self)
assert tz.gelu(np.zeros(9, np.float32)).shape == (9,)
print(len(made))
"""
    source = str(Path(tz.__file__).parents[1])
    for expected in ("1", "0"):
        finished = subprocess.run(
            [sys.executable, "-c", program], timeout=120, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": source, "TZ_CACHE_DIR": str(tmp_path)})
        assert finished.stdout.strip() == expected, finished.stderr


# ---------------------------------------------------------------- arrays of other classes
def test_mapped_files_and_what_numpy_makes_an_array_of(tmp_path: Any) -> None:
    """Classes of arrays are read as the arrays that they are."""
    np.save(tmp_path / "a.npy", np.arange(6, dtype=np.float32).reshape(2, 3))
    double = tz.op(lambda x: x * 2, name="test_other_classes")
    given = [np.load(tmp_path / "a.npy", mmap_mode="r"), np.rec.array(np.ones((1, 2))), range(4),
             memoryview(np.arange(3.0))]
    for run in (double, tz.jit(lambda x: x * 2)):
        for x in given[:2] if run is not double else given:
            for _ in range(2):
                result = run(x)
                assert type(result) is np.ndarray
                np.testing.assert_array_equal(result, np.asarray(x) * 2)
    gradient = tz.grad(lambda x: tz.sum(x * x))(given[0])
    np.testing.assert_array_equal(gradient, np.asarray(given[0]) * 2)
    with pytest.raises(ArgumentError, match="masked array"):
        double(np.ma.masked_array([1.0, 2.0], [True, False]))
