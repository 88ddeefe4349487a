"""Products lose the reshapes around them; those of one input become one for attention."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.compiler.driver import compile_graph
from terrazzo.compiler.lowering import Lowering
from terrazzo.graph import evaluate
from terrazzo.graph.passes.products import NAME, PRODUCTS, merge_products
from terrazzo.graph.rewrite import Applied

sys.path.insert(0, str(Path(__file__).parent))
from patterns import agree, graph_of, operators, rewritten

rng = np.random.default_rng(11)
ROWS, HEADS, SIZE = 9, 4, 8
WIDTH = HEADS * SIZE


def random(*shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) / 4).astype(np.float32)


X = random(2, ROWS, WIDTH)
WEIGHTS = [random(WIDTH, WIDTH) for _ in range(3)]
BIASES = [random(WIDTH) for _ in range(3)]


def heads(y: Any) -> Any:
    return tz.transpose(tz.reshape(y, shape=(2, ROWS, -1, SIZE)), axes=(0, 2, 1, 3))


def attention(*parts: Any) -> Any:
    return tz.scaled_dot_product_attention(*map(heads, parts))


def with_biases(x: Any) -> Any:
    return attention(*(x @ w + b for w, b in zip(WEIGHTS, BIASES)))


def without_biases(x: Any) -> Any:
    return attention(*(x @ w for w in WEIGHTS))


def transposed(x: Any) -> Any:
    return attention(*(b + tz.batch_matmul(x, w, transpose_y=True)
                       for w, b in zip(WEIGHTS, BIASES)))


def grouped_heads(x: Any) -> Any:
    return attention(x @ WEIGHTS[0], x @ random(WIDTH, 2 * SIZE), x @ random(WIDTH, 2 * SIZE))


def after_a_norm(x: Any) -> Any:
    return with_biases(tz.layer_norm(x))


@pytest.mark.parametrize("function", [with_biases, without_biases, transposed, grouped_heads,
                                      after_a_norm])
def test_queries_keys_and_values(function: Callable[..., Any]) -> None:
    before, log = graph_of(function, X), list[Applied]()
    after = merge_products(before, log)
    assert [a.rule for a in log] == [NAME] * 3
    assert operators(after).count("batch_matmul") == 1 and "matmul" not in operators(after)
    assert operators(after).count("add") == ("add" in operators(before))
    agree(before, after, [X])


def test_costs_no_copies() -> None:
    graph = graph_of(with_biases, X)
    assert len(Lowering(graph, Cpu()).fused.groups) == 2, "one product, one attention"
    (exact,) = evaluate.run(graph, [X], wide=True)
    np.testing.assert_allclose(compile_graph(graph).run([X])[0], exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", [
    lambda x: attention(x @ WEIGHTS[0], (x + 1.0) @ WEIGHTS[1], (x * 2.0) @ WEIGHTS[2]),
    lambda x: tz.silu(x @ WEIGHTS[0]) * (x @ WEIGHTS[1]),  # each takes its arithmetic along
    lambda x: attention(x @ WEIGHTS[0], x, x),
    lambda x: attention(*(x @ tz.exp(w) for w in WEIGHTS)),  # weights that are computed
    lambda x: (heads(x @ WEIGHTS[0]), x @ WEIGHTS[1]),  # a result of the graph
])
def test_others_stay(function: Callable[..., Any]) -> None:
    log: list[Applied] = []
    merge_products(graph_of(function, X), log)
    assert log == []


def test_only_from_the_extended_level_on() -> None:
    graph = graph_of(with_biases, X)
    assert merge_products(graph, level="basic") is graph


# ---------------------------------------------------------------- rows between reshapes
def flat(x: Any) -> Any:
    return tz.reshape(x, shape=(2 * ROWS, WIDTH))


@pytest.mark.parametrize(("form", "rule", "left"), [
    (lambda x: tz.reshape(flat(x) @ WEIGHTS[0], shape=X.shape),
     "rows of a product as they were", ["reshape", "matmul"]),
    (lambda x: tz.reshape(BIASES[0] + flat(x) @ WEIGHTS[0], shape=(2, -1, WIDTH)),
     "rows of a product with a bias as they were", ["reshape", "matmul", "add"]),
    (lambda x: tz.reshape(flat(heads(x)) @ WEIGHTS[0] + BIASES[0], shape=X.shape),
     "rows of a product with a bias as they were",
     ["reshape", "permute_dims", "reshape", "matmul", "add"]),
])
def test_rows_as_they_were(form: Callable[..., Any], rule: str, left: list[str]) -> None:
    after, fired = rewritten(PRODUCTS, form, X, roundings=0)
    assert fired == {rule} and operators(after) == left


def test_reshapes_do_not_part_a_product_from_what_follows() -> None:
    def layer(x: Any) -> Any:  # as Gemm is exported for three axes
        y = tz.reshape(flat(x) @ WEIGHTS[0] + BIASES[0], shape=X.shape)
        return tz.gelu(y) + x

    assert len(Lowering(graph_of(layer, X), Cpu()).fused.groups) == 1


@pytest.mark.parametrize("form", [
    lambda x: tz.reshape(flat(x) @ WEIGHTS[0], shape=(2, ROWS, HEADS, SIZE)),  # columns, too
    lambda x: tz.reshape(flat(x) @ WEIGHTS[0], shape=(ROWS, 2, WIDTH)),  # other rows
    lambda x: tz.reshape(flat(x) @ WEIGHTS[0] + random(2 * ROWS, WIDTH), shape=X.shape),
    lambda x: tz.reshape(tz.relu(flat(x) @ WEIGHTS[0]), shape=X.shape),
])
def test_other_reshapes_stay(form: Callable[..., Any]) -> None:
    assert rewritten(PRODUCTS, form, X)[1] == set()
