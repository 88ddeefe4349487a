"""Reverse-mode differentiation as a transform of graphs.

`gradients` walks from outputs back to inputs and asks each operator for its rule; an operator
without one is expanded into its body and differentiated through. The result is made of ordinary
nodes, so it can be differentiated again, rewritten, fused and compiled like any other graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from terrazzo.base.shapes import Shape
from terrazzo.dtypes import DType
from terrazzo.errors import GradientError, NotDifferentiable, user_location
from terrazzo.graph.applying import as_value, expand, is_number
from terrazzo.graph.ir import Graph, Node, TensorType, Value, is_tensor, operator_named
from terrazzo.graph.rebuild import replace_inputs
from terrazzo.graph.scopes import trace_scope
from terrazzo.index import IndexExpr
from terrazzo.index.guards import all_equal
from terrazzo.ops.define import operator


@operator(family="autodiff", grad=lambda node, g: [None])
def stop_gradient(x: Any) -> Any:
    """x, taken as a constant by gradients"""
    return x


# ---------------------------------------------------------------- the core, on values
def gradients(outputs: Sequence[Value], cotangents: Sequence[Value | None],
              inputs: Sequence[Value]) -> list[Value | None]:
    """How `inputs` must change to change `outputs` along `cotangents` (J^T v, by value).

    None stands for a gradient that is zero because nothing of a float type connects the two.
    """
    with trace_scope():
        return _gradients(outputs, cotangents, inputs)


def _gradients(outputs: Sequence[Value], cotangents: Sequence[Value | None],
               inputs: Sequence[Value]) -> list[Value | None]:
    nodes, dependent = between(outputs, inputs)
    table: dict[Value, Value] = {}

    def accumulate(value: Value | None, gradient: Value | None) -> None:
        if value is None or gradient is None or value not in dependent or not carries(value):
            return
        gradient = fit(gradient, value.type)
        table[value] = operator_named("add")(table[value], gradient) if value in table else gradient

    for value, cotangent in zip(outputs, cotangents, strict=True):
        accumulate(value, cotangent)
    leaves = set(inputs)
    for node in reversed(nodes):
        reached = [table.get(v) if v in leaves else table.pop(v, None) for v in node.outputs]
        if any(g is not None for g in reached):
            for source, gradient in zip(node.inputs, _node_gradients(node, reached, dependent)):
                accumulate(source, gradient)
    return [table.get(v) for v in inputs]


def between(outputs: Sequence[Value], inputs: Sequence[Value]
             ) -> tuple[list[Node], set[Value]]:
    """The nodes on paths from inputs to outputs, producers first, and the values on such paths."""
    dependent = set(inputs)
    order: dict[Node, bool] = {}
    stack = [(v.node, False) for v in outputs if v.node is not None and v not in dependent]
    while stack:
        node, inputs_known = stack.pop()
        if node in order:
            continue
        if not inputs_known:
            stack.append((node, True))
            stack.extend((v.node, False) for v in node.inputs
                         if v is not None and v.node is not None and v not in dependent)
            continue
        order[node] = any(v in dependent for v in node.inputs if v is not None)
        if order[node]:
            dependent.update(node.outputs)
    return [node for node, on_path in order.items() if on_path], dependent


def carries(value: Value) -> bool:
    """Whether small changes make sense for a value: floats do, integers and booleans do not."""
    return _is_smooth(value.dtype)


def _is_smooth(dtype: DType) -> bool:
    return dtype.is_float or dtype.is_complex


def _node_gradients(node: Node, reached: Sequence[Value | None], dependent: set[Value]
                    ) -> Sequence[Value | None]:
    if not any(v is not None and v in dependent and carries(v) for v in node.inputs):
        return ()
    if not node.op.differentiable:
        raise NotDifferentiable(
            f"the operator {node.op.name} has no gradient, but a gradient through it was asked for",
            where=node.where or None,
            hint="keep the value out of what is differentiated (tz.stop_gradient), or give the "
                 "operator a gradient rule")
    full_cotangents = [zeros(t) if g is None and _is_smooth(t.dtype) else g
                       for g, t in zip(reached, node.types)]
    if node.op.grad is not None:
        return rule_gradients(node, full_cotangents)
    if node.op.body is None:
        raise NotDifferentiable(f"the operator {node.op.name} is said to be differentiable, but "
                                "has no gradient rule", where=node.where or None,
                                hint="give its definition grad=, or differentiable=False")
    sources = list(dict.fromkeys(v for v in node.inputs if v is not None))
    results = expand(node.op, node.inputs, node.attrs)
    pulled = dict(zip(sources, _gradients(results, full_cotangents, sources)))
    # An input given twice has one gradient in all: it is counted at its first place.
    return [None if v is None else pulled.pop(v, None) for v in node.inputs]


def rule_gradients(node: Node, cotangents: Sequence[Value | None]) -> Sequence[Value | None]:
    """What an operator's own rule answers: a gradient, or None, for each of its inputs."""
    assert node.op.grad is not None
    answer = node.op.grad(node, *cotangents)
    found = answer if isinstance(answer, (list, tuple)) else [answer]
    wanted = len(node.inputs)
    if len(found) != wanted:
        raise GradientError(
            f"the gradient rule of {node.op.name} returned {len(found)} "
            f"gradient{'s' * (len(found) != 1)}, and the operator has {wanted} "
            f"input{'s' * (wanted != 1)}", where=node.where or None,
            hint=f"return a list of {wanted}, with None for an input that has no gradient")
    return [None if g is None else _checked(node, i, g) for i, g in enumerate(found)]


def _checked(node: Node, number: int, gradient: Any) -> Value:
    """A gradient that a rule answered with, if it can be one of its input."""
    source = node.inputs[number]
    if not is_tensor(gradient) and not is_number(gradient) and not isinstance(
            gradient, (np.generic, IndexExpr)):
        raise GradientError(
            f"the gradient rule of {node.op.name} returned a {type(gradient).__name__} for its "
            f"input {number}", where=node.where or None,
            hint="return a tensor, a number, or None where there is no gradient")
    value = as_value(gradient)
    if source is not None and not _fits(value.type.shape, source.type.shape):
        raise GradientError(
            f"the gradient rule of {node.op.name} returned {value.type} for its input {number}, "
            f"which is {source.type}", where=node.where or None,
            hint="return what has the shape of the input, or broadcasts with it")
    return value


def _fits(found: Shape, wanted: Shape) -> bool:
    """Whether sizes, counted from the last axis, are equal or 1, as far as they are known."""
    return all(n == m or 1 in (n, m) or not (isinstance(n, int) and isinstance(m, int))
               for n, m in zip(reversed(found), reversed(wanted)))


def zeros(type: TensorType) -> Value:
    """A gradient of nothing."""
    return filled(type, 0)


def filled(type: TensorType, number: int) -> Value:
    with trace_scope():
        return operator_named("full")(shape=type.shape, value=number, dtype=type.dtype)


def fit(gradient: Value, type: TensorType) -> Value:
    """A gradient brought to the type of what it belongs to: broadcasting undone, type cast."""
    if not all_equal(gradient.shape, type.shape):
        gradient = _undo_broadcast(gradient, type)
    if gradient.dtype is not type.dtype:
        gradient = operator_named("astype")(gradient, dtype=type.dtype)
    return gradient


def _undo_broadcast(gradient: Value, type: TensorType) -> Value:
    """Sum over the axes that broadcasting added or stretched; stretch those a rule left at 1."""
    added = gradient.ndim - len(type.shape)
    summed = tuple(d for d, n in enumerate(gradient.shape)
                   if d < added or (type.shape[d - added] == 1 and n != 1))
    kept = tuple(1 if d in summed else n for d, n in enumerate(gradient.shape) if d >= added)
    if summed:
        gradient = operator_named("sum")(gradient, axis=summed, keepdims=False)
    if gradient.ndim != len(kept):
        gradient = operator_named("reshape")(gradient, shape=kept)
    if not all_equal(gradient.shape, type.shape):
        gradient = operator_named("broadcast_to")(gradient, shape=type.shape)
    return gradient


def tangents(outputs: Sequence[Value], inputs: Sequence[Value],
             directions: Sequence[Value | None]) -> list[Value | None]:
    """How `outputs` change when `inputs` change along `directions` (J t, by value).

    What is pulled back depends on the weights it starts from in a linear way, so its own gradient
    by them pushes forward: J is the transpose of J^T. None stands for no change at all.
    """
    with trace_scope():
        weights = [Value(v.type) if carries(v) else None for v in outputs]
        pulled = gradients(outputs, weights, inputs)
        pairs = [(g, t) for g, t in zip(pulled, directions, strict=True)
                 if g is not None and t is not None]
        given = [w for w in weights if w is not None]
        pushed = gradients([g for g, _ in pairs], [t for _, t in pairs], given)
        # A linear function has the same slope everywhere: where a rule looks at the weights
        # nevertheless, any will do.
        found = [g for g in pushed if g is not None]
        body = Graph("tangents", tuple(given), tuple(found))
        settled = iter(replace_inputs(body, [zeros(w.type) for w in given]))
        by_weight = iter([None if g is None else next(settled) for g in pushed])
        return [None if w is None else next(by_weight) for w in weights]


# ---------------------------------------------------------------- graphs
def vjp_graph(graph: Graph, wrt: Sequence[int] | None = None) -> Graph:
    """The graph from inputs and one cotangent a float output to the gradients of inputs `wrt`.

    Without `wrt`, of all float inputs. An input that does not matter has a gradient of zeros.
    """
    cotangents = [Value(v.type, name=f"d_{i}") if carries(v) else None
                  for i, v in enumerate(graph.outputs)]
    given = tuple(c for c in cotangents if c is not None)
    return Graph(f"{graph.name}_vjp", graph.inputs + given,
                 _input_gradients(graph, cotangents, wrt))


def differentiated_inside(graph: Graph) -> Graph:
    """A graph with the operators expanded that gradients look into: those without a rule.

    What they compute inside can then be kept for the backward pass.
    """
    from terrazzo.graph.passes.inline import in_bodies, inline_composites

    return in_bodies(inline_composites(
        graph, whole=lambda n: n.op.grad is not None or n.op.keep_whole), differentiated_inside)


def grad_graph(graph: Graph, wrt: Sequence[int] | None = None) -> Graph:
    """The graph from inputs to the gradients of inputs `wrt`, for a graph with a scalar output."""
    for value in graph.outputs:
        check_scalar(value, graph.name)
    ones = [filled(v.type, 1) for v in graph.outputs]
    return Graph(f"{graph.name}_grad", graph.inputs, _input_gradients(graph, ones, wrt))


def _input_gradients(graph: Graph, cotangents: Sequence[Value | None],
                     wrt: Sequence[int] | None) -> tuple[Value, ...]:
    chosen = [v for v in graph.inputs if carries(v)] if wrt is None else [
        graph.inputs[i] for i in wrt]
    found = gradients(graph.outputs, cotangents, chosen)
    return tuple(zeros(v.type) if g is None else g for v, g in zip(chosen, found))


def check_scalar(value: Value, name: str) -> None:
    if value.shape != ():
        raise GradientError(f"{name} has a result of type {value.type}, and only a scalar has a "
                            "gradient", where=user_location(),
                            hint="reduce it with sum() or mean(), or use vjp, which takes a weight "
                                 "for every element")
    if not value.dtype.is_float:
        raise GradientError(f"{name} has a result of type {value.type}, which does not change "
                            "smoothly", where=user_location(), hint="compute it in a float type")
