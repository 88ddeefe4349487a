"""Executables called directly: checks, symbolic sizes, constants, arenas, repeated outputs."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.base.shapes import dim
from terrazzo.chips.cpu.llvm.program import MOST_ARGUMENTS
from terrazzo.compiler.driver import compile_graph
from terrazzo.dtypes import float32
from terrazzo.errors import ArgumentError, DTypeError, OutOfMemory, ShapeError
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace
from terrazzo.runtime.executable import Executable

N, M = dim("n"), dim("m")


def compiled(function: Any, *shapes: Any, strides: Any = ()) -> Executable:
    graph, _ = trace(function, [TensorType(s, float32) for s in shapes], name="tested")
    return compile_graph(graph, strides=strides)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(11).normal(size=shape).astype(np.float32)


def test_one_result_or_a_tuple() -> None:
    x = floats(3)
    assert isinstance(compiled(lambda x: x + 1.0, (3,))(x), np.ndarray)
    both = compiled(lambda x: (x + 1.0, x * 2.0), (3,))(x)
    assert isinstance(both, tuple) and len(both) == 2


def test_wrong_arguments() -> None:
    executable = compiled(lambda x, y: x + y, (3,), (3,))
    with pytest.raises(ArgumentError, match="takes 2 inputs, got 1"):
        executable(floats(3))
    with pytest.raises(ShapeError, match=r"'x1' of tested has shape \(4,\), expected \(3\)"):
        executable(floats(3), floats(4))
    with pytest.raises(ShapeError, match="has 2 dimensions, expected 1"):
        executable(floats(3), floats(1, 3))
    with pytest.raises(DTypeError, match="'x0' of tested is float64, compiled for float32"):
        executable(floats(3).astype(np.float64), floats(3))
    with pytest.raises(ArgumentError, match="is a str"):
        executable("three", floats(3))


def test_symbolic_sizes_are_bound_and_checked() -> None:
    executable = compiled(lambda x, y: tz.concat([x, y]), (N, 4), (M, 4))
    for n, m in ((1, 5), (7, 2), (0, 3)):
        assert executable(floats(n, 4), floats(m, 4)).shape == (n + m, 4)
    same = compiled(lambda x, y: x + y, (N,), (N,))
    with pytest.raises(ShapeError, match=r"expected \(n\) with n = 3"):
        same(floats(3), floats(4))


def test_lists_and_other_layouts_are_converted() -> None:
    executable = compiled(lambda x: x * 2.0, (2, 3))
    np.testing.assert_array_equal(executable([[1, 2, 3], [4, 5, 6]]), [[2, 4, 6], [8, 10, 12]])
    x = floats(3, 2)
    np.testing.assert_array_equal(executable(x.T), x.T * 2)


def test_strides_are_kept_only_where_addresses_are_computed() -> None:
    assert compiled(lambda x: tz.exp(x), (4, 5), strides=((9, 1),)).strides == ((9, 1),)
    for whole in (lambda x: tz.sort(x), lambda x: x, lambda x: tz.matmul(x, tz.transpose(x))):
        assert compiled(whole, (4, 5), strides=((9, 1),)).strides == (None,)


def test_an_executable_for_strides_refuses_others() -> None:
    executable = compiled(lambda x: tz.exp(x), (4, 5), strides=((9, 1),))
    x = floats(4, 9)
    np.testing.assert_allclose(executable(x[:, :5]), np.exp(x[:, :5]), rtol=1e-6)
    with pytest.raises(ArgumentError, match=r"compiled for strides \(9, 1\)"):
        executable(np.ascontiguousarray(x[:, :5]))


def test_outputs_that_are_inputs_constants_or_each_other() -> None:
    table = np.arange(3, dtype=np.float32)

    def function(x: Any) -> Any:
        y = x + 1.0
        return x, y, y, tz.reshape(y, (3, 1)), tz.add(table, 0.0), x

    x = floats(3)
    found = compiled(function, (3,))(x)
    expected = (x, x + 1, x + 1, (x + 1).reshape(3, 1), table, x)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(got, want)
    addresses = [a.ctypes.data for a in (*found, x)]
    assert len(set(addresses)) == len(addresses), "results must not share memory"


def test_constants_stay_alive() -> None:
    def function(x: Any) -> Any:
        return x + np.full(1000, 7, np.float32)

    executable = compiled(function, (1000,))
    assert (executable(np.zeros(1000, np.float32)) == 7).all()


def test_arenas_are_used_again() -> None:
    executable = compiled(lambda x: tz.matmul(tz.softmax(tz.matmul(x, x)), x), (N, N))
    assert executable.arena_size([40]) > 0
    for n in (40, 20, 40, 60):
        x = floats(n, n)
        weights = np.exp(x @ x - (x @ x).max(1, keepdims=True))
        np.testing.assert_allclose(executable(x), weights / weights.sum(1, keepdims=True) @ x,
                                   rtol=1e-3, atol=1e-4)
        assert len(executable._arenas) == 1


def test_many_calls_at_once_have_arenas_of_their_own() -> None:
    executable = compiled(lambda x: tz.matmul(tz.softmax(tz.matmul(x, x)), x), (64, 64))
    xs = [floats(64, 64) * (i + 1) / 8 for i in range(8)]
    expected = [executable(x) for x in xs]
    wrong = []

    def work(i: int) -> None:
        for _ in range(30):
            if executable(xs[i]).tobytes() != expected[i].tobytes():
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(executable._arenas) <= 8


def test_no_memory_for_the_arena() -> None:
    executable = compiled(lambda x: x + 1.0, (3,))
    with pytest.raises(OutOfMemory, match="for values between its kernels"):
        executable.take_arena(1 << 60)


@pytest.mark.parametrize("count", [20, MOST_ARGUMENTS])
def test_many_inputs(count: int) -> None:
    """As many as direct entries take, and with the result one more."""
    executable = compiled(lambda *xs: sum(xs[1:], xs[0]), *[(5,)] * count)
    xs = [floats(5) + i for i in range(count)]
    np.testing.assert_allclose(executable(*xs), sum(xs), rtol=1e-5)
    many = tz.jit(lambda xs: sum(xs[1:], xs[0]))
    np.testing.assert_allclose(many(xs), sum(xs), rtol=1e-5)


def test_a_kernel_without_memory_says_so():
    """A packed product that cannot get its panels raises; it does not crash."""
    import subprocess
    import sys

    pytest.importorskip("resource")

    program = """
import numpy as np, resource, terrazzo as tz
from terrazzo.errors import OutOfMemory
a = np.ones((1024, 8192), "f"); b = np.ones((8192, 8192), "f")
exe = tz.matmul.compile(a, b)
assert exe.code.allocates
out = exe.allocate([])[0]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
try:
    exe.run_into([a.ctypes.data, b.ctypes.data, out.ctypes.data])
    print("ran")
except OutOfMemory as error:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=120)
    assert done.stdout.strip() == "refused", done.stderr[-2000:]
