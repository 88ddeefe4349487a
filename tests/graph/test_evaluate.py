"""The numpy reference: symbolic sizes, composites, the wide mode that serves as yardstick."""

from __future__ import annotations

import numpy as np

from terrazzo.base.shapes import dims
from terrazzo.dtypes import bfloat16, float16, float32, int32
from terrazzo.graph.evaluate import bind_dims, run
from terrazzo.graph.ir import OPERATORS, TensorType
from terrazzo.graph.trace import trace
from terrazzo.ops.elementwise import exp, log


def test_runs_node_by_node(rng: np.random.Generator) -> None:
    graph, _ = trace(lambda x, y: exp(x) - y * 2, [TensorType((3, 4), float32)] * 2)
    x, y = rng.normal(size=(2, 3, 4)).astype(np.float32)
    (result,) = run(graph, [x, y])
    np.testing.assert_array_equal(result, np.exp(x) - y * 2)
    assert result.dtype == np.float32


def test_sizes_are_read_off_the_inputs(rng: np.random.Generator) -> None:
    n, m = dims("n m")
    graph, _ = trace(lambda x: OPERATORS["reshape"](x, shape=(m, n)).sum(axis=0) / n,
                     [TensorType((n, m), float32)])
    x = rng.integers(0, 9, (2, 5)).astype(np.float32)
    assert bind_dims(graph, [x]) == {n: 2, m: 5}
    np.testing.assert_allclose(run(graph, [x])[0], x.reshape(5, 2).sum(0) / 2, rtol=1e-6)


def test_composites_run_by_their_body(rng: np.random.Generator) -> None:
    graph, _ = trace(lambda x: OPERATORS["softmax"](x, axis=0), [TensorType((5,), float32)])
    assert [node.op.name for node in graph.nodes] == ["softmax"]
    x = rng.normal(size=5).astype(np.float32)
    np.testing.assert_allclose(run(graph, [x])[0], np.exp(x) / np.exp(x).sum(), rtol=1e-6)


def test_half_types_round_after_every_operator() -> None:
    graph, _ = trace(lambda x: x + 1.0 - 1.0, [TensorType((), float16)])
    x = np.float16(2.0**-12)
    assert run(graph, [np.asarray(x)])[0] == 0
    assert run(graph, [np.asarray(x)], wide=True)[0] == 2.0**-12


def test_wide_mode_is_float64_throughout() -> None:
    def function(x: object) -> object:
        return log(exp(OPERATORS["astype"](x, dtype="bfloat16")))

    graph, _ = trace(function, [TensorType((3,), float32)])
    x = np.array([0.1, 1.7, -3.3], np.float32)
    (narrow,), (wide,) = run(graph, [x]), run(graph, [x], wide=True)
    assert narrow.dtype == bfloat16.np and wide.dtype == np.float64
    np.testing.assert_allclose(wide, x.astype(np.float64), rtol=1e-15)


def test_wide_mode_leaves_integers_alone() -> None:
    graph, _ = trace(lambda x: x * 2, [TensorType((2,), int32)])
    (result,) = run(graph, [np.array([1, 2**30], np.int32)], wide=True)
    assert result.dtype == np.int32 and result[1] == -2**31
