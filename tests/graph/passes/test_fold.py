"""Folding of constants."""

from __future__ import annotations

import numpy as np

from terrazzo.base.shapes import dim
from terrazzo.dtypes import bfloat16, float32
from terrazzo.graph.applying import constant
from terrazzo.graph.evaluate import run
from terrazzo.graph.ir import OPERATORS, Graph, TensorType, Value
from terrazzo.graph.passes import fold_constants, inline_composites
from terrazzo.graph.rewrite import Applied
from terrazzo.graph.trace import trace
from terrazzo.ops.elementwise import exp

X = TensorType((4,), float32)


def names(graph: Graph) -> list[str]:
    return [node.op.name for node in graph.nodes]


def folded(function: object, type: TensorType = X) -> Graph:
    return fold_constants(trace(function, [type])[0])  # type: ignore[arg-type]


def test_scalars_fold() -> None:
    log: list[Applied] = []
    graph = fold_constants(trace(lambda x: x * (exp(constant(1.0)) + 2), [X])[0], log)
    assert names(graph) == ["constant", "multiply"]
    assert [a.node.split("(")[0] for a in log] == ["exp", "add"]
    x = np.ones(4, np.float32)
    np.testing.assert_array_equal(run(graph, [x])[0], np.exp(np.float32(1)) + np.float32(2) * x)


def test_a_filled_scalar_folds_and_a_filled_tensor_stays() -> None:
    def filled(shape: tuple[int, ...]) -> object:
        return lambda x: x + OPERATORS["full"](shape=shape, value=2, dtype="float32")

    assert names(folded(filled(()))) == ["constant", "add"]
    assert names(folded(filled((4,)))) == ["full", "add"]


def test_weights_are_moved_at_compile_time(rng: np.random.Generator) -> None:
    weight = rng.normal(size=(64, 128)).astype(np.float32)
    graph = folded(lambda x: OPERATORS["add"](
        x, OPERATORS["permute_dims"](constant(weight), axes=(1, 0))),
        TensorType((128, 64), float32))
    assert names(graph) == ["constant", "add"]
    stored = graph.nodes[0].attrs["value"]
    np.testing.assert_array_equal(stored, weight.T)
    assert stored.flags.c_contiguous


def test_weights_of_products_stay_as_they_lie(rng: np.random.Generator) -> None:
    weight = rng.normal(size=(64, 128)).astype(np.float32)
    graph = folded(lambda x: OPERATORS["batch_matmul"](
        x, OPERATORS["permute_dims"](constant(weight), axes=(1, 0))),
        TensorType((2, 128), float32))
    assert names(graph) == ["constant", "permute_dims", "batch_matmul"]


def test_constants_do_not_grow() -> None:
    narrow = np.ones((64, 64), np.int8)
    assert names(folded(lambda x: OPERATORS["astype"](constant(narrow), dtype="float32"))) == [
        "constant", "astype"], "weights stay as narrow as they were stored"
    assert names(folded(lambda x: OPERATORS["broadcast_to"](
        constant(np.ones(64, np.float32)), shape=(64, 64)))) == ["constant", "broadcast_to"]
    assert names(folded(lambda x: OPERATORS["broadcast_to"](
        constant(1.0), shape=(4, 4)))) == ["constant"], "small ones may"


def _table(x: Value) -> Value:
    """A scatter into zeros, a product and a softmax of the result, all made of nothing."""
    place, rows = OPERATORS["full"](shape=(40, 40), value=0.0, dtype="float32"), np.arange(40)
    index = OPERATORS["reshape"](constant(rows), shape=(40, 1))
    wide = OPERATORS["broadcast_to"](index, shape=(40, 40))
    return x + OPERATORS["softmax"](OPERATORS["scatter"](
        place, wide, OPERATORS["astype"](wide, dtype="float32"), axis=0) @ constant(
            np.linspace(-0.02, 0.02, 1600, dtype=np.float32).reshape(40, 40)))


def test_what_takes_a_kernel_of_its_own_becomes_a_table(rng: np.random.Generator) -> None:
    graph = inline_composites(trace(_table, [TensorType((40, 40), float32)])[0],
                              whole=lambda node: False)
    x = rng.standard_normal((40, 40)).astype(np.float32)
    made = fold_constants(graph)
    assert names(made) == ["constant", "add"]
    np.testing.assert_array_equal(run(made, [x])[0], run(graph, [x])[0])


def test_tables_are_not_made_larger_than_the_limit() -> None:
    graph, _ = trace(lambda x: x + OPERATORS["sum"](
        OPERATORS["full"](shape=(64, 64), value=2, dtype="float32"), axis=0), [
            TensorType((64,), float32)])
    assert names(fold_constants(graph)) == ["constant", "add"]
    assert "sum" in names(fold_constants(graph, limit=1000))


def test_the_limit_is_kept() -> None:
    big = np.ones(5000, np.float32)
    graph, _ = trace(lambda x: -constant(big), [X])
    assert names(fold_constants(graph)) == ["constant"]
    assert names(fold_constants(graph, limit=10_000)) == ["constant", "negative"]


def test_symbolic_sizes_are_not_known() -> None:
    n = dim("n")
    graph = folded(lambda x: x / n, TensorType((n,), float32))
    assert names(graph) == ["dimension", "divide"]
    spread = folded(lambda x: OPERATORS["broadcast_to"](constant(1.0), shape=(n,)),
                    TensorType((n,), float32))
    assert names(spread) == ["constant", "broadcast_to"]


def test_several_results_and_half_types() -> None:
    parts = constant(np.arange(4), bfloat16)

    def halves(x: Value) -> object:
        return OPERATORS["split"](parts * 2, indices_or_sections=2)

    graph = folded(halves)
    assert names(graph) == ["constant", "constant"]
    assert [v.dtype for v in graph.outputs] == [bfloat16, bfloat16]
    np.testing.assert_array_equal(run(graph, [np.zeros(4, np.float32)])[1].astype(float), [4, 6])
