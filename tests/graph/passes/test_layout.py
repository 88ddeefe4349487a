"""The choice of layouts: what each operator looks like channels last, and where permutes end up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.base.shapes import dim
from terrazzo.dtypes import as_dtype, float32
from terrazzo.graph.evaluate import run
from terrazzo.graph.ir import OPERATORS, Graph, TensorType
from terrazzo.graph.passes import Guide, canonicalize
from terrazzo.graph.passes.layout import (
    ELEMENTWISE,
    MOVERS,
    first_from_last,
    last_from_first,
    layout,
)
from terrazzo.graph.patterns import constant_array
from terrazzo.graph.rewrite import Applied
from terrazzo.graph.scopes import trace_scope
from terrazzo.graph.trace import trace


class Ops:
    """Operators by name: `op.add(x, y)`."""

    def __getattr__(self, name: str) -> Any:
        return OPERATORS[name]


op = Ops()
SHAPE = (2, 4, 5, 3)  # channels last


def graph_of(function: Callable[..., Any], *arrays: np.ndarray) -> Graph:
    types = [TensorType(a.shape, as_dtype(a.dtype)) for a in arrays]
    with trace_scope():
        return trace(function, types, "example")[0]


def numbers(*shape: int) -> np.ndarray:
    """Small whole numbers, so that any order of adding gives the same bits."""
    return (np.arange(np.prod(shape), dtype=np.float32).reshape(shape) * 7 % 11 - 5)


def first(x: Any) -> Any:
    return op.permute_dims(x, axes=first_from_last(x.ndim))


def last(x: Any) -> Any:
    return op.permute_dims(x, axes=last_from_first(x.ndim))


def permutes(graph: Graph) -> int:
    """How many permutes are left of what is computed; weights are moved when they are packed."""
    return sum(node.op.name == "permute_dims" and constant_array(node.inputs[0]) is None
               for node in graph.nodes)


def check(function: Callable[..., Any], *arrays: np.ndarray, left: int,
          level: str = "all") -> list[Applied]:
    """Canonical with and without layouts gives the same; so many permutes are left."""
    graph = graph_of(function, *arrays)
    plain, _ = canonicalize(graph, Guide("extended"))
    chosen, log = canonicalize(graph, Guide(level))
    for before, after in zip(run(plain, arrays), run(chosen, arrays), strict=True):
        np.testing.assert_allclose(after, before, rtol=2e-6, atol=1e-6)
    assert permutes(chosen) == left, str(chosen)
    assert [v.type for v in chosen.outputs] == [v.type for v in graph.outputs]
    return log


# ---------------------------------------------------------------- one a rule
EXAMPLES: dict[str, list[Callable[[Any], Any]]] = {
    "channels last past an elementwise operator": [
        lambda x: last(op.exp(first(x))),
        lambda x: last(first(x) * 2.0 + numbers(1, 3, 1, 1)),
        lambda x: last(op.where(first(x) > numbers(3, 1, 1), numbers(3, 4, 5), first(x))),
        lambda x: last(first(op.exp(x)) + op.astype(first(x), dtype="float32")),
        lambda x: last(op.astype(first(x), dtype="int32")),
        lambda x: last(first(x) + op.full(shape=(2, 3, 4, 5), value=1.5)),
    ],
    "channels last past a join": [
        lambda x: last(op.concat(first(x), first(op.exp(x)), axis=1)),
        lambda x: last(op.concat(first(x), numbers(2, 3, 1, 5), first(x), axis=-2)),
    ],
    "channels last past a slice or a border": [
        lambda x: last(op.slice(first(x), starts=(0, 2, 1, 0), stops=(2, 0, 4, 5),
                                steps=(1, -1, 2, 1))),
        lambda x: last(op.place(first(x), shape=(2, 3, 6, 9), starts=(0, 0, 1, 0),
                                steps=(1, 1, 1, 2), value=7)),
    ],
    "channels last past a stretch": [
        lambda x: last(op.broadcast_to(first(op.sum(x, axis=1, keepdims=True)),
                                       shape=(2, 3, 4, 5))),
    ],
    "channels last past a choice of places": [
        lambda x: last(op.take(first(x), np.array([3, 0, 0, -1]), axis=2)),
        lambda x: last(op.take(first(x), np.array([2, 1]), axis=1)),
    ],
    "channels last past a reduction": [
        lambda x: op.sum(first(x), axis=(2, 3)),
        lambda x: op.max(first(x), axis=(0, 2, 3)),
        lambda x: last(op.sum(first(x), axis=2, keepdims=True)),
        lambda x: last(first(x) - op.max(first(x), axis=1, keepdims=True)),
    ],
    "channels last past a regrouping of places": [
        lambda x: last(op.reshape(first(x), shape=(2, 3, 20))),
        lambda x: last(op.reshape(first(x), shape=(2, 3, 2, 2, 5))),
    ],
    "channels last past quantisation": [
        lambda x: last(op.quantize_linear(first(x), np.float32(0.5), np.uint8(7))),
        lambda x: last(op.dequantize_linear(op.quantize_linear(
            first(x), np.array([0.5, 1, 2], np.float32)), np.float32(0.5))),
    ],
}


@pytest.mark.parametrize(("name", "function"), [
    pytest.param(name, function, id=f"{name}-{i}") for name, functions in EXAMPLES.items()
    for i, function in enumerate(functions)])
def test_each_rule(name: str, function: Callable[[Any], Any]) -> None:
    log = check(function, numbers(*SHAPE), left=0)
    assert any(applied.rule == name for applied in log)


def test_every_rule_has_an_example() -> None:
    assert {mover.name for mover in MOVERS} == EXAMPLES.keys()


def test_every_elementwise_primitive_is_known() -> None:
    ours = [o for o in OPERATORS.values() if o.family == "elementwise"]
    assert {o.name for o in ours if o.body is None} <= set(ELEMENTWISE)
    assert {n for n in ELEMENTWISE if OPERATORS[n].body is None} <= {o.name for o in ours}


# ---------------------------------------------------------------- what must not get worse
def test_levels_below_layout_leave_permutes_alone() -> None:
    graph = graph_of(lambda x: last(op.exp(first(x))), numbers(*SHAPE))
    assert layout(graph, level="extended") is graph
    assert permutes(layout(graph, level="layout")) == 0


def test_a_permuted_value_that_is_also_an_output_is_permuted_once() -> None:
    def function(x: Any) -> Any:
        y = first(x)
        return y, op.exp(y)

    check(function, numbers(*SHAPE), left=1)


def test_an_output_of_a_chain_that_goes_on() -> None:
    def function(x: Any) -> Any:
        y = op.exp(first(x))
        return y, last(op.sin(y))

    check(function, numbers(*SHAPE), left=1)


def test_a_large_operand_of_the_other_layout_stays() -> None:
    check(lambda x, y: op.exp(first(x) + y), numbers(*SHAPE), numbers(2, 3, 4, 5), left=1)


def test_a_large_operand_moves_when_that_saves_more() -> None:
    check(lambda x, y: last(op.concat(first(x), first(x) + y, first(op.exp(x)), axis=1)),
          numbers(*SHAPE), numbers(2, 3, 4, 5), left=1)


def test_a_small_operand_moves_along() -> None:
    check(lambda x, y: last(first(x) * y), numbers(*SHAPE), numbers(2, 3, 1, 1), left=0)


def test_permutes_go_to_the_outputs_where_that_costs_nothing() -> None:
    graph, _ = canonicalize(graph_of(lambda x: op.exp(first(x)), numbers(*SHAPE)))
    assert [n.op.name for n in graph.nodes] == ["exp", "permute_dims"]


def test_what_comes_before_the_first_permute_stays() -> None:
    graph, _ = canonicalize(graph_of(lambda x: op.exp(last(op.sin(x))), numbers(*SHAPE)))
    assert [n.op.name for n in graph.nodes] == ["sin", "permute_dims", "exp"]


def test_three_axes_have_one_permutation() -> None:
    check(lambda x: last(op.exp(first(x))), numbers(2, 5, 3), left=0)

    def function(x: Any) -> Any:
        y = op.exp(op.batch_matmul(x, numbers(3, 3)))
        return last(op.sin(first(y)))

    check(function, numbers(2, 5, 3), left=0)


def test_a_matrix_product_reads_either_layout() -> None:
    check(lambda x: op.batch_matmul(op.reshape(first(x), shape=(2, 3, 20)), numbers(2, 3, 7),
                                    transpose_x=True), numbers(*SHAPE), left=0)


def test_symbolic_sizes() -> None:
    n = dim("n")
    with trace_scope():
        graph = trace(lambda x: last(op.exp(first(x)) * 2.0), [TensorType((n, 4, 5, 3), float32)],
                      "example")[0]
    chosen, _ = canonicalize(graph)
    assert permutes(chosen) == 0
    x = numbers(*SHAPE)
    np.testing.assert_array_equal(run(chosen, [x])[0], run(graph, [x])[0])


# ---------------------------------------------------------------- whole networks
RNG = np.random.default_rng(5)


def weights(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) * 0.2).astype(np.float32)


def layer(x: Any, outputs: int, size: int = 1, stride: int = 1, groups: int = 1) -> Any:
    """A convolution and a normalisation with known statistics."""
    y = op.conv(x, weights(outputs, x.shape[1] // groups, size, size), strides=stride,
                padding=size // 2, groups=groups)
    return y * weights(1, outputs, 1, 1) + weights(outputs, 1, 1)


def residual_network(x: Any) -> Any:
    x = op.max_pool(op.relu(layer(x, 8, 7, 2)), window=3, strides=2, padding=1)
    for stride in (1, 2):
        for part in range(2):
            step = stride if part == 0 else 1
            y = layer(op.relu(layer(op.relu(layer(x, 4)), 4, 3, step)), 16)
            x = op.relu(y + (layer(x, 16, 1, step) if part == 0 else x))
    x = op.reshape(op.global_average_pool(x), shape=(x.shape[0], -1))
    return op.matmul(x, weights(16, 10))


def inverted_residuals(x: Any) -> Any:
    x = op.minimum(op.relu(layer(x, 8, 3, 2)), 6.0)
    for _ in range(2):
        y = op.minimum(op.relu(layer(x, 16)), 6.0)
        y = op.pad(y, pad_width=((0, 0), (0, 0), (1, 1), (1, 1)))
        y = op.relu(layer(y, 16, 3, groups=16))[:, :, 1:-1, 1:-1]
        x = x + layer(y, 8)
    return op.mean(x, axis=(2, 3))


def joined_branches(x: Any) -> Any:
    x = op.relu(layer(x, 8, 3))
    for _ in range(2):
        x = op.concat(op.relu(layer(x, 4)), op.relu(layer(op.relu(layer(x, 4)), 6, 3)),
                      layer(op.average_pool(x, window=3, strides=1, padding=1), 4),
                      op.max_pool(x, window=3, strides=1, padding=1), axis=1)
    return op.global_average_pool(x)


def excitation(x: Any) -> Any:
    y = op.relu(layer(x, 8, 3))
    s = op.relu(op.conv(op.global_average_pool(y), weights(4, 8, 1, 1), weights(4)))
    y = y * op.sigmoid(op.conv(s, weights(8, 4, 1, 1), weights(8)))
    return op.global_average_pool(layer(y, 8, 3))


def patches(x: Any) -> Any:
    y = op.conv(x, weights(6, 3, 4, 4), weights(6), strides=4)
    y = op.permute_dims(op.reshape(y, shape=(y.shape[0], 6, -1)), axes=(0, 2, 1))
    return op.softmax(op.matmul(y, weights(6, 6)), axis=-1)


def signals(x: Any) -> Any:
    x = op.reshape(x, shape=(x.shape[0], 3, -1))
    y = op.gelu(op.conv(x, weights(4, 3, 3), weights(4)))
    y = op.gelu(op.conv(y, weights(4, 4, 3), weights(4)))
    return op.matmul(op.permute_dims(y, axes=(0, 2, 1)), weights(4, 4))


@pytest.mark.parametrize("network", [residual_network, inverted_residuals, joined_branches,
                                     excitation, patches, signals])
def test_networks_permute_their_input_only(network: Callable[[Any], Any]) -> None:
    check(network, weights(2, 3, 16, 16) * 5, left=1)


def test_layouts_are_settled_after_one_choice() -> None:
    graph = canonicalize(graph_of(joined_branches, weights(2, 3, 8, 8)))[0]
    assert layout(graph) is graph


def test_three_axes_do_not_go_back_and_forth(rng: np.random.Generator) -> None:
    # Of three axes, channels first and last are the same permutation.
    def program(x: Any, y: Any, z: Any) -> Any:
        turned = tz.swapaxes(tz.leaky_relu(x), axis1=1, axis2=-1)
        return tz.softshrink(turned), tz.concat(tz.kl_div(tz.elu(turned), y, reduction="none"), z,
                                                axis=-1)

    graph, _ = trace(program, [TensorType(s, float32) for s in ((8, 31, 16), (8, 16, 31),
                                                                (8, 16, 7))])
    assert canonicalize(graph)[0].outputs[1].shape == (8, 16, 38)
