"""What a call of an operator adds to a graph: arguments as values, in types that meet, and a node.

Python's numbers are weak: they take the type of the tensors they meet, and keep their digits where
that is a half type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from terrazzo.base.nests import flatten, pack
from terrazzo.base.scalar_table import by_operator
from terrazzo.dtypes import DType, as_dtype, result_type
from terrazzo.errors import ArgumentError, TerrazzoError, user_location
from terrazzo.graph.ir import Node, Operator, TensorType, Value, operator_named
from terrazzo.graph.scopes import STATE, called, capture_scope, place_of, trace_scope
from terrazzo.graph.text import attr_text
from terrazzo.index import IndexExpr
from terrazzo.index.guards import call_questions, ordinary


# ---------------------------------------------------------------- values
def _captured(x: Any, scopes: Sequence[capture_scope]) -> Value | None:
    """What an array stands for in this trace; None: it is a constant."""
    if isinstance(x, np.ndarray) and not _may_change(x):
        return None
    try:
        if 0 in x.shape:
            return None
        place = place_of(x)
    except (RuntimeError, NotImplementedError):  # no tensor with memory: refused elsewhere
        return None
    for scope in reversed(scopes):
        scope.uses += 1
        if place in scope.known:
            return scope.known[place]
    scopes[-1].seen.setdefault(place, x)
    return None


def _may_change(array: np.ndarray) -> bool:
    """Whether somebody can write to an array's memory."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return True
        base = base.base
    return False


def constant(value: Any, dtype: DType | None = None) -> Value:
    """A literal array in a graph."""
    array = np.asarray(value)
    if dtype is None:
        dtype = as_dtype(array.dtype)
        if not isinstance(value, (np.ndarray, np.generic)):
            dtype = result_type(value)
    # The owner of an array may write to it later; weights come read-only and are not copied.
    array = np.ascontiguousarray(array.astype(dtype.np, copy=array.flags.writeable)).reshape(
        array.shape)
    return Node(operator_named("constant"), (), {"value": array},
                (TensorType(array.shape, dtype),)).outputs[0]


def as_value(x: Any, dtype: DType | None = None) -> Value:
    """A Value from a Value, an array, a tensor or a number."""
    if isinstance(x, Value):
        return x
    scopes = getattr(STATE, "captures", None)
    if scopes and (isinstance(x, np.ndarray) or hasattr(x, "detach")):
        captured = _captured(x, scopes)
        if captured is not None:
            return captured
    if hasattr(x, "detach"):  # a torch tensor inside a trace is a constant
        x = _from_torch(x)
    if isinstance(x, IndexExpr):
        return apply(operator_named("dimension"), [], {"size": x})
    if call_questions() is not None:
        from terrazzo.graph import sizes

        if type(x) in (sizes.Size, sizes.Real):
            return sizes.as_value(x, dtype)
    return constant(x, dtype)


def _from_torch(x: Any) -> np.ndarray:
    import torch

    if str(x.layout) != "torch.strided" or x.is_nested or x.is_quantized or x.is_meta or (
            type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__):
        raise ArgumentError(
            f"the tensor mentioned here is more than numbers in memory ({type(x).__name__}, "
            f"{x.layout}, {x.dtype} on {x.device})", where=user_location(),
            hint="make it an ordinary one, for instance with .to_dense() or .dequantize()")
    x = x.detach().cpu()
    if x._is_zerotensor():
        x = x.new_zeros(x.shape)
    x = x.resolve_conj().resolve_neg()
    try:
        return x.numpy()
    except TypeError:  # bfloat16 and fp8: numpy knows them from ml_dtypes, torch does not
        kind = as_dtype(x.dtype).np
        return x.view({1: torch.uint8, 2: torch.int16}[kind.itemsize]).numpy().view(kind)


def is_number(x: Any) -> bool:
    """Whether something is a number of Python's, or stands for one."""
    if type(x) is Value:
        return x.is_number
    return isinstance(x, (bool, int, float, complex)) and not isinstance(x, np.generic)


_OF_KIND: dict[str, Any] = {"b": True, "i": 1, "u": 1, "f": 1.0, "c": 1j}


def common_type(tensors: Sequence[Any]) -> DType:
    """The type in which numbers and tensors meet, numbers being weak."""
    numbers = [t for t in tensors if is_number(t)]
    typed = [_dtype_of(t) for t in tensors if t is not None and not is_number(t)]
    if not typed:  # arithmetic of numbers alone keeps their digits
        typed = [t.dtype for t in numbers if isinstance(t, Value)]
    return result_type(*typed, *(_OF_KIND[t.dtype.kind] if isinstance(t, Value) else t
                                 for t in numbers))


def _in_type(number: Any, dtype: DType) -> Value:
    """A number, or what stands for one, as a value of some type."""
    if not isinstance(number, Value):
        return as_value(number, dtype)
    if number.dtype is dtype:
        return number
    return apply(operator_named("astype"), [number], {"dtype": dtype})


def _is_complex(x: Any) -> bool:
    if isinstance(x, Value):
        return x.type.dtype.is_complex
    dtype = getattr(x, "dtype", None)
    return isinstance(x, complex) if dtype is None else as_dtype(dtype).is_complex


# What an operator does that meets complex values, installed by ops.complex: (operator, tensors,
# attributes) -> values, or NotImplemented where it takes them as they are.
COMPLEX: list[Callable[..., Any]] = []


def apply(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Make a node; answers its value, or a tuple of values. Errors name the operator called."""
    if op.family == "user" or called() is not None:
        return _applied(op, tensors, attrs)
    STATE.called = op
    try:
        return _applied(op, tensors, attrs)
    except TerrazzoError as error:
        error.came_from(op.name)
        raise
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
        # An operator is written for arguments that make sense, and does not check for all others.
        shown = [*(str(t.type) if isinstance(t, Value) else type(t).__name__ for t in tensors),
                 *(f"{k}={attr_text(v)}" for k, v in attrs.items())]
        raise ArgumentError(f"{op.name}({', '.join(shown)}) cannot be: {error}",
                            where=user_location(), hint=f"it is {op.name}{op.signature}"
                            ) from error
    finally:
        STATE.called = None


def _applied(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    if any(_is_complex(t) for t in tensors) or (
            attrs.get("dtype") is not None and as_dtype(attrs["dtype"]).is_complex):
        answer = COMPLEX[0](op, tensors, attrs)
        if answer is not NotImplemented:
            return answer
    number_type = None
    among_numbers = False
    if op.unify and any(map(is_number, tensors)):
        number_type = common_type(tensors)
        if _needs_room(op, tensors, number_type):
            return _in_wider_type(op, tensors, attrs, number_type)
        among_numbers = op.name in _OF_NUMBERS and all(map(is_number, tensors))
    elif op.family == "user" and any(map(is_number, tensors)):
        tensors, meets_another = _numbers_for_body(tensors)
        if meets_another and op.grad is None:
            return pack(*reversed(opened(op, tensors, attrs)))
        if meets_another:
            op = _taking_numbers(op, tuple(map(is_number, tensors)))
    values = [None if t is None else as_value(t) if number_type is None or not is_number(t) else
              _in_type(t, number_type) for t in tensors]
    if op.body is not None:  # what it means must not change with what is passed later
        values = [None if v is None else _typed(v) for v in values]
    types = [None if v is None else v.type for v in values]
    if call_questions() is not None:
        from terrazzo.graph.sizes import plain

        attrs = plain(attrs)
    if op.infer is not None:
        inferred = op.infer(*types, **attrs)
        several = isinstance(inferred, tuple)
        structure: Any = tuple(range(len(inferred))) if several else 0
        result_types = inferred if several else (inferred,)
    else:
        scopes = getattr(STATE, "captures", ())
        uses = [s.uses for s in scopes]
        result_types, structure = composite_types(op, types, attrs)
        if op.grad is None and [s.uses for s in scopes] != uses:
            # Its body mentions arrays, which have a meaning in this trace only: it is opened here.
            return pack(structure, expand(op, values, attrs))
    node = Node(op, tuple(values), dict(attrs), result_types, where=user_location() or "")
    for type in node.types:
        for size in type.shape:
            ordinary(size)
    if among_numbers:
        for value in node.outputs:
            value.is_number = True
    return pack(structure, node.outputs)


def _numbers_for_body(tensors: Sequence[Any]) -> tuple[list[Any], bool]:
    """The inputs of a user's operator, and whether its body must know which of them are numbers.

    Then numbers meet tensors inside as they do outside: the body is opened where it is called, or
    stays whole for its gradient rule and takes them for what they are.
    """
    joint = common_type(tensors)
    values = [_as_number(_in_type(t, joint.compute)) if is_number(t) else t for t in tensors]
    floats = {_dtype_of(t) for t in tensors if t is not None and not is_number(t)}
    others = {t for t in floats if t.is_float} - {joint.compute}
    return values, bool(others) or any(type(t) is Value and t.is_number for t in tensors)


@lru_cache(maxsize=256)
def _taking_numbers(op: Operator, flags: tuple[bool, ...]) -> Operator:
    """An operator with a gradient rule, whose body and rule see the flagged inputs as numbers."""
    body, rule = op.body, op.grad
    assert body is not None and rule is not None

    def marked(values: Sequence[Value | None]) -> list[Value | None]:
        return [_as_number(_in_type_again(v)) if flag and v is not None else v
                for v, flag in zip(values, flags, strict=True)]

    def with_numbers(*values: Value | None, **attrs: Any) -> Any:
        return body(*marked(values), **attrs)

    def rule_with_numbers(node: Node, *gs: Value | None) -> Any:
        inputs = tuple(marked(node.inputs))
        return rule(Node(op, inputs, node.attrs, node.types, node.where), *gs)

    return replace(op, body=with_numbers, grad=rule_with_numbers)


def _in_type_again(value: Value) -> Value:
    """The same value by another name, which may be marked without marking the first."""
    return apply(operator_named("astype"), [value], {"dtype": value.dtype})


def _as_number(made: Value) -> Value:
    """A value that was made for a number, as one that stands for it."""
    made.is_number = True
    return made


def _typed(value: Value) -> Value:
    """A value that keeps its type wherever it goes."""
    return _in_type_again(value) if value.is_number else value


# Of these, the result depends on more digits of a number than a half type has.
_ARITHMETIC = frozenset(name for name, row in by_operator().items() if row.digits
                        and row.arity == 2 and row.result in ("promote", "float"))
# What Python does with numbers alone, which gives a number again.
_OF_NUMBERS = frozenset({"add", "subtract", "multiply", "divide", "power", "remainder",
                         "floor_divide", "negative", "absolute"})


def _needs_room(op: Operator, tensors: Sequence[Any], dtype: DType) -> bool:
    """Whether a Python number would be rounded to the half type of the tensors it meets."""
    return op.name in _ARITHMETIC and dtype.is_float and dtype.compute is not dtype and any(
        is_number(t) and (isinstance(t, Value) or _is_rounded(t, dtype)) for t in tensors)


def _is_rounded(number: Any, dtype: DType) -> bool:
    """Whether a type holds a number inexactly, or might: one that stands for a size varies."""
    if call_questions() is not None:
        from terrazzo.graph.sizes import Real, Size

        if type(number) in (Size, Real):
            return True
    return float(np.asarray(number, dtype.np)) != float(number)


def _in_wider_type(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any], dtype: DType
                   ) -> Any:
    """Half types are storage: 0.1 is what it is in the type of the arithmetic, as in torch."""
    astype = operator_named("astype")
    wide = [None if t is None else _in_type(t, dtype.compute) if is_number(t) else
            apply(astype, [t], {"dtype": dtype.compute}) for t in tensors]
    return apply(astype, [apply(op, wide, attrs)], {"dtype": dtype})


def _dtype_of(x: Any) -> Any:
    if isinstance(x, Value):
        return x.dtype
    return as_dtype(x.dtype) if hasattr(x, "dtype") else as_dtype(np.asarray(x).dtype)


def expand(op: Operator, inputs: Sequence[Value | None], attrs: Mapping[str, Any]
           ) -> tuple[Value, ...]:
    """The values a composite operator's body computes from the given inputs."""
    return opened(op, inputs, attrs)[0]


def opened(op: Operator, inputs: Sequence[Value | None], attrs: Mapping[str, Any]
            ) -> tuple[tuple[Value, ...], Any]:
    """What a composite operator's body computes, and the nest in which it answers with it."""
    assert op.body is not None
    if call_questions() is not None and op.family == "user":
        from terrazzo.graph.sizes import seen

        attrs = seen(attrs)
    with trace_scope():
        result = op.body(*inputs, **attrs)
    if result is None:
        raise ArgumentError(f"{op.name} returned None", hint="return the computed tensors")
    found: list[Any] = []
    structure = flatten(result, found)
    return tuple(map(as_value, found)), structure


def composite_types(op: Operator, types: Sequence[TensorType | None], attrs: Mapping[str, Any]
                    ) -> tuple[tuple[TensorType, ...], Any]:
    """The types of a composite operator's results and their nest, by tracing its body."""
    values, structure = opened(op, [None if t is None else Value(t) for t in types], attrs)
    return tuple(v.type for v in values), structure
