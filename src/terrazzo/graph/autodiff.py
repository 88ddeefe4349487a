"""Reverse-mode differentiation as a transform of graphs.

`gradients` walks from outputs back to inputs and asks each operator for its rule; an operator
without one is expanded into its body and differentiated through. The result is made of ordinary
nodes, so it can be differentiated again, rewritten, fused and compiled like any other graph.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from terrazzo.base.nests import leaves, mapped
from terrazzo.base.shapes import Shape
from terrazzo.base.upcalls import UPCALLS
from terrazzo.dtypes import DType
from terrazzo.errors import GradientError, NotDifferentiable, user_location
from terrazzo.graph.applying import as_value, common_type, expand, is_number
from terrazzo.graph.ir import Graph, Node, TensorType, Value, is_tensor, operator_named
from terrazzo.graph.rebuild import replace_inputs
from terrazzo.graph.scopes import trace_scope, tracing
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
        if value is None or gradient is None or value not in dependent or not _carries(value):
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


def _carries(value: Value) -> bool:
    """Whether small changes make sense for a value: floats do, integers and booleans do not."""
    return _is_smooth(value.dtype)


def _is_smooth(dtype: DType) -> bool:
    return dtype.is_float or dtype.is_complex


def _node_gradients(node: Node, reached: Sequence[Value | None], dependent: set[Value]
                    ) -> Sequence[Value | None]:
    if not any(v is not None and v in dependent and _carries(v) for v in node.inputs):
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
    return _filled(type, 0)


def _filled(type: TensorType, number: int) -> Value:
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
        weights = [Value(v.type) if _carries(v) else None for v in outputs]
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
    cotangents = [Value(v.type, name=f"d_{i}") if _carries(v) else None
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
        _check_scalar(value, graph.name)
    ones = [_filled(v.type, 1) for v in graph.outputs]
    return Graph(f"{graph.name}_grad", graph.inputs, _input_gradients(graph, ones, wrt))


def _input_gradients(graph: Graph, cotangents: Sequence[Value | None],
                     wrt: Sequence[int] | None) -> tuple[Value, ...]:
    chosen = [v for v in graph.inputs if _carries(v)] if wrt is None else [
        graph.inputs[i] for i in wrt]
    found = gradients(graph.outputs, cotangents, chosen)
    return tuple(zeros(v.type) if g is None else g for v, g in zip(chosen, found))


def _check_scalar(value: Value, name: str) -> None:
    if value.shape != ():
        raise GradientError(f"{name} has a result of type {value.type}, and only a scalar has a "
                            "gradient", where=user_location(),
                            hint="reduce it with sum() or mean(), or use vjp, which takes a weight "
                                 "for every element")
    if not value.dtype.is_float:
        raise GradientError(f"{name} has a result of type {value.type}, which does not change "
                            "smoothly", where=user_location(), hint="compute it in a float type")


# ---------------------------------------------------------------- functions
Function = Callable[..., Any]


def grad_function(function: Function, argnums: int | Sequence[int] = 0,
                  has_value: bool = False, has_aux: bool = False) -> Function:
    """A function for tracing: the gradient of `function`, with its value first on request.

    Arguments at `argnums` may be nested tuples, lists and dicts of tensors; the gradient has the
    same nesting. All other arguments go to the function as they are. With `has_aux` the function
    answers (value, more), and `more` is handed on: (value, more), gradient or gradient, more.
    """

    def traced(*args: Any, **kwargs: Any) -> Any:
        def pull(result: Any) -> tuple[list[Value], list[Value | None]]:
            value = as_value(_first(result, function) if has_aux else result)
            _check_scalar(value, function_name(function))
            return [value], [_filled(value.type, 1)]

        result, found = _differentiate(function, argnums, args, kwargs, pull)
        if has_value:
            return result, found
        return (found, result[1]) if has_aux else found

    return labelled(traced, "value_and_grad" if has_value else "grad", function)


def _first(result: Any, function: Function) -> Any:
    if isinstance(result, (tuple, list)) and len(result) == 2:
        return result[0]
    raise GradientError(f"{function_name(function)} answers with {_described(result)}, and "
                        "has_aux=True asks for a pair", where=user_location(),
                        hint="return (the scalar, whatever else is of interest)")


def _described(result: Any) -> str:
    if isinstance(result, (tuple, list, dict)):
        return f"a {type(result).__name__} of {len(result)}"
    return "a single result"


def vjp_function(function: Function, argnums: int | Sequence[int] = 0) -> Function:
    """A function for tracing: takes one more argument, the cotangents of `function`'s result."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        if not args:
            raise GradientError(f"vjp of {function_name(function)} misses the cotangents of its "
                                "result", where=user_location(),
                                hint="pass them as the last argument")
        *own, cotangents = args

        def pull(result: Any) -> tuple[list[Value], list[Value | None]]:
            values, seeds = leaves(result), leaves(cotangents)
            if len(values) != len(seeds):
                raise GradientError(f"{function_name(function)} has {len(values)} results, but "
                                    f"{len(seeds)} cotangents were given", where=user_location(),
                                    hint="pass one of the same shape for each result")
            pairs = [(as_value(v), as_value(s)) for v, s in zip(values, seeds)]
            for value, seed in pairs:
                if not all_equal(value.shape, seed.shape):
                    raise GradientError(f"a result of {function_name(function)} is {value.type}, "
                                        f"but its cotangent is {seed.type}", where=user_location(),
                                        hint="pass one of the same shape for each result")
            return [v for v, _ in pairs], [s for _, s in pairs]

        return _differentiate(function, argnums, own, kwargs, pull)[1]

    return labelled(traced, "vjp", function)


def jvp_function(function: Function) -> Function:
    """A function for tracing: (arguments, directions) -> (result, how it changes along them)."""

    def traced(primals: Sequence[Any], directions: Sequence[Any]) -> Any:
        name = function_name(function)
        given, along = leaves(tuple(primals)), leaves(tuple(directions), none=True)
        if len(given) != len(along):
            raise GradientError(f"{name} was given {len(given)} tensors, but {len(along)} tangents",
                                where=user_location(), hint="pass one for each, None where it does "
                                "not change")
        with trace_scope():
            values = _values(given, given)
            fresh = [Value(v.type, name=v.name, is_number=is_number(leaf))
                     for v, leaf in zip(values, given, strict=True)]
            pairs = [(v, None if t is None or not _carries(v) else _direction(v, t, name))
                     for v, t in zip(fresh, along, strict=True)]
            stand_ins = iter(fresh)
            result = function(*mapped(tuple(primals), lambda _: next(stand_ins)))
            outputs = [as_value(leaf) for leaf in leaves(result)]
            moved = [v for v, t in pairs if t is not None]
            found = tangents(outputs, moved, [t for _, t in pairs if t is not None])
            # What does not change in a smooth way, such as an integer, has zeros for a tangent.
            filled = [zeros(v.type) if t is None else t for v, t in zip(outputs, found,
                                                                        strict=True)]
            body = Graph(name, tuple(fresh), (*outputs, *filled))
            answers = iter(replace_inputs(body, values))
        return (mapped(result, lambda _: next(answers)),
                mapped(result, lambda _: next(answers)))

    return labelled(traced, "jvp", function)


def _values(given: Sequence[Any], beside: Sequence[Any]) -> list[Value]:
    """Values of arguments; a number keeps the digits that tensors beside it have."""
    tensors = [t for t in beside if is_tensor(t)]
    return [as_value(leaf, common_type([leaf, *tensors]).compute
                     if type(leaf) in (float, complex) else None) for leaf in given]


def _direction(value: Value, tangent: Any, name: str) -> Value:
    along = as_value(tangent)
    if not all_equal(along.shape, value.shape):
        raise GradientError(f"an argument of {name} is {value.type}, but its tangent is "
                            f"{along.type}", where=user_location(),
                            hint="pass one of the same shape for each")
    return fit(along, value.type)


def _differentiate(function: Function, argnums: int | Sequence[int], args: Sequence[Any],
                   kwargs: dict[str, Any], pull: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The result of a function and its gradients, both on the values that were passed."""
    positions = [argnums] if isinstance(argnums, int) else list(argnums)
    arguments = list(args)
    beside = leaves((args, kwargs))
    given: list[Value] = []
    fresh: list[Value] = []

    def stand_in(leaf: Any) -> Value:
        (value,) = _values([leaf], beside)
        if not _carries(value):
            raise GradientError(f"{function_name(function)} cannot be differentiated by an "
                                f"argument of type {value.type}", where=user_location(),
                                hint="pass a float, or leave this argument out of argnums")
        given.append(value)
        # What the function captured may be computed from the same value; only what passes through
        # the argument counts, so the argument is a value of its own.
        fresh.append(Value(value.type, name=value.name, is_number=is_number(leaf)))
        return fresh[-1]

    with trace_scope():
        for i in positions:
            if not -len(arguments) <= i < len(arguments):
                raise GradientError(f"{function_name(function)} was called with {len(arguments)} "
                                    f"arguments, and there is none of number {i}",
                                    where=user_location(), hint="count argnums from 0")
            arguments[i] = mapped(arguments[i], stand_in)
        result = function(*arguments, **kwargs)
        outputs, cotangents = pull(result)
        found = [zeros(v.type) if g is None else g
                 for v, g in zip(fresh, gradients(outputs, cotangents, fresh))]
        results = [as_value(leaf) for leaf in leaves(result)]
        body = Graph(function_name(function), tuple(fresh), (*results, *found))
        values = iter(replace_inputs(body, given))
    answer = mapped(result, lambda _: next(values))
    per_argument = [mapped(arguments[i], lambda _: next(values)) for i in positions]
    return answer, per_argument[0] if isinstance(argnums, int) else tuple(per_argument)


def function_name(function: Function) -> str:
    return str(getattr(function, "name", "") or getattr(function, "__name__", "function"))


_DERIVED = {"grad": "The gradient of {} by some of its arguments.",
            "value_and_grad": "The value and the gradient of {}.",
            "vjp": "{} pulled back: takes the cotangents of its result after its own arguments.",
            "jvp": "(arguments, tangents) to the value of {} and how it changes.",
            "vmap": "{} for all rows of a batch at once."}


def labelled(derived: Function, transform: str, function: Function) -> Function:
    """A function that was made of another, with a name and a signature that tell so."""
    name = function_name(function)
    derived.__name__ = derived.__qualname__ = f"{transform}_{name}"
    derived.__doc__ = _DERIVED[transform].format(name)
    if transform in ("grad", "value_and_grad", "vmap"):  # called as the function itself is
        with contextlib.suppress(TypeError, ValueError):
            derived.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return derived


# ---------------------------------------------------------------- functions on values and arrays
def dispatch(traced: Function) -> Function:
    """On traced values (or inside a trace) makes nodes; on arrays, compiles and runs."""
    compiled: list[Function] = []

    @functools.wraps(traced)
    def call(*args: Any, **kwargs: Any) -> Any:
        if tracing() or any(isinstance(leaf, Value) for leaf in leaves((args, kwargs))):
            return traced(*args, **kwargs)
        if not compiled:
            compiled.append(UPCALLS["jit"](traced))
        return compiled[0](*args, **kwargs)

    return call


def grad(function: Function, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Function:
    """The function that computes the gradient of a scalar function by its arguments `argnums`.

    Arguments may be nests of tensors; the gradient is nested alike, a tuple where `argnums` is one.
    With `has_aux` the function returns (scalar, more), and the answer is (gradient, more).

    >>> import numpy as np, terrazzo as tz
    >>> tz.grad(lambda x, y: tz.sum(x * y ** 2), argnums=1)(np.array([1.0, 2.0]), np.array(3.0))
    array(18.)
    """
    return dispatch(grad_function(function, argnums, has_aux=has_aux))


def value_and_grad(function: Function, argnums: int | Sequence[int] = 0,
                   has_aux: bool = False) -> Function:
    """Like `grad`, but answers the pair (value, gradient), which share their work.

    With `has_aux` the function returns (scalar, more): the answer is ((scalar, more), gradient).

    >>> import numpy as np, terrazzo as tz
    >>> value, gradient = tz.value_and_grad(lambda x: tz.sum(x * x))(np.array([1.0, 2.0]))
    >>> float(value), gradient.tolist()
    (5.0, [2.0, 4.0])
    """
    return dispatch(grad_function(function, argnums, has_value=True, has_aux=has_aux))


def vjp(function: Function, argnums: int | Sequence[int] = 0) -> Function:
    """The function that takes one more argument, the weights of the results, and pulls them back.

    `vjp(f)(x, v)` is v^T J for the Jacobian J of f at x: the gradient of sum(f(x) * v).

    >>> import numpy as np, terrazzo as tz
    >>> tz.vjp(lambda x: x * x)(np.array([1.0, 2.0]), np.array([1.0, 10.0]))
    array([ 2., 40.])
    """
    return dispatch(vjp_function(function, argnums))


def jvp(function: Function, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """The value of a function and how it changes when its arguments change along `tangents`.

    `jvp(f, (x,), (t,))` is (f(x), J t) for the Jacobian J of f at x: forward-mode differentiation.
    A tangent of None says that an argument does not change. What was compiled for the functions
    that were used last is kept.

    >>> import numpy as np, terrazzo as tz
    >>> value, change = tz.jvp(lambda x: x * x, (np.array([1.0, 2.0]),), (np.array([1.0, 0.5]),))
    >>> value.tolist(), change.tolist()
    ([1.0, 4.0], [2.0, 2.0])
    """
    value, change = _pushforward(function)(tuple(primals), tuple(tangents))
    return value, change


@functools.lru_cache(maxsize=64)
def _pushforward(function: Function) -> Function:
    return dispatch(jvp_function(function))
