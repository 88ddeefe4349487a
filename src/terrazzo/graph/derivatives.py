"""Derivatives of functions: `grad`, `value_and_grad`, `vjp`, `jvp`, of nests of tensors.

A function is traced on values and its graph differentiated (`autodiff.py`); on arrays, what comes
of that is compiled and run.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.base.nests import leaves, mapped
from terrazzo.base.upcalls import UPCALLS
from terrazzo.errors import GradientError, user_location
from terrazzo.graph.applying import as_value, common_type, is_number
from terrazzo.graph.autodiff import carries, check_scalar, filled, fit, gradients, tangents, zeros
from terrazzo.graph.ir import Graph, Value, is_tensor
from terrazzo.graph.rebuild import replace_inputs
from terrazzo.graph.scopes import trace_scope, tracing
from terrazzo.index.guards import all_equal

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
            check_scalar(value, function_name(function))
            return [value], [filled(value.type, 1)]

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
            pairs = [(v, None if t is None or not carries(v) else _direction(v, t, name))
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
        if not carries(value):
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
def dispatch(traced: Function, function: Function) -> Function:
    """On traced values (or inside a trace) makes nodes; on arrays, compiles and runs.

    The user's function that it is made of says which variables are watched (`calls/captures.py`).
    """
    compiled: list[Function] = []
    traced.made_of = function  # type: ignore[attr-defined]

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
    return dispatch(grad_function(function, argnums, has_aux=has_aux), function)


def value_and_grad(function: Function, argnums: int | Sequence[int] = 0,
                   has_aux: bool = False) -> Function:
    """Like `grad`, but answers the pair (value, gradient), which share their work.

    With `has_aux` the function returns (scalar, more): the answer is ((scalar, more), gradient).

    >>> import numpy as np, terrazzo as tz
    >>> value, gradient = tz.value_and_grad(lambda x: tz.sum(x * x))(np.array([1.0, 2.0]))
    >>> float(value), gradient.tolist()
    (5.0, [2.0, 4.0])
    """
    return dispatch(grad_function(function, argnums, has_value=True, has_aux=has_aux), function)


def vjp(function: Function, argnums: int | Sequence[int] = 0) -> Function:
    """The function that takes one more argument, the weights of the results, and pulls them back.

    `vjp(f)(x, v)` is v^T J for the Jacobian J of f at x: the gradient of sum(f(x) * v).

    >>> import numpy as np, terrazzo as tz
    >>> tz.vjp(lambda x: x * x)(np.array([1.0, 2.0]), np.array([1.0, 10.0]))
    array([ 2., 40.])
    """
    return dispatch(vjp_function(function, argnums), function)


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
    return dispatch(jvp_function(function), function)
