"""The nodes of a graph: `Value`, `Node`, `Graph`, and `Operator`, of which nodes are applications.

Everything is immutable: a graph is its inputs and outputs, the nodes are what lies between, and a
rewrite builds new values. An operator is defined in one place and everything follows from that:
a composite one by a body made of other operators, a primitive one by inference of types, a tensor
expression (or loops), a numpy reference and a gradient rule.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from terrazzo.base.nests import flatten, pack
from terrazzo.base.scalar_table import by_operator
from terrazzo.base.shapes import Shape, dims_text, num_elements
from terrazzo.base.upcalls import UPCALLS
from terrazzo.dtypes import DType, as_dtype, result_type
from terrazzo.errors import (
    ArgumentError,
    TerrazzoError,
    TracedControlFlow,
    UnknownOperator,
    is_ours,
    user_location,
)
from terrazzo.graph import described
from terrazzo.graph.bound import BoundOperator, found_at, is_method, of_object, reference
from terrazzo.index import Index, IndexExpr
from terrazzo.index.guards import call_questions, ordinary

_serial = itertools.count()


@dataclass(frozen=True)
class TensorType:
    """The shape and element type of a value."""

    shape: Shape
    dtype: DType

    def __str__(self) -> str:
        return f"{self.dtype.short}{dims_text(self.shape)}"


ALIASES = {"dim": "axis", "keepdim": "keepdims"}
TENSOR_KEYWORDS = "**"  # the attribute that names the inputs which came as **keywords


class _Shown:
    """An attribute that is made when asked for, of objects alone: the class has its own."""

    def __init__(self, make: Callable[[Operator], Any], of_class: Any):
        self.make, self.of_class = make, of_class

    def __get__(self, op: Operator | None, kind: type | None = None) -> Any:
        return self.of_class if op is None else self.make(op)


@dataclass(frozen=True, eq=False)
class Operator:
    """What an operator means. Calling it traces a node, or runs it when given arrays."""

    __signature__ = _Shown(lambda op: described.signature(op), None)
    __doc__ = _Shown(lambda op: described.documentation(op), __doc__)
    name: str
    signature: inspect.Signature
    infer: Callable[..., Any] | None = None  # (types..., **attrs) -> TensorType or a tuple of them
    expr: Callable[..., Any] | None = None  # (L2 tensors..., out=types, **attrs) -> tensor(s)
    loops: Callable[..., Any] | None = None  # (types..., out=types, **attrs) -> Loop IR builder
    reference: Callable[..., Any] | None = None  # (arrays..., **attrs) -> array(s)
    grad: Callable[..., Any] | None = None  # (Gradient context) -> a gradient for each input
    body: Callable[..., Any] | None = None  # composite: (values..., **attrs) -> value(s)
    kind: str = "pointwise"  # pointwise | reduce | contract | attention | opaque
    family: str = ""
    doc: str = ""
    unify: bool = False  # Python scalars take the type of the other operands
    keep_whole: bool = False  # composite with fused kernels of its own: inlined only on demand
    differentiable: bool = True
    starts_from_first: bool = False  # with loops: of an operand full of one number that is enough
    effects: Mapping[str, Any] = field(default_factory=dict)

    written: Callable[..., Any] | None = None  # the function that defines it

    def __post_init__(self) -> None:
        # What inspect, help() and notebooks show of a function.
        module = "terrazzo" if self.family != "user" else getattr(self.written, "__module__", None)
        self.__dict__.update(__name__=self.name, __qualname__=self.name, __module__=module)

    @cached_property
    def tensor_params(self) -> list[inspect.Parameter]:
        """Parameters that take tensors: everything before the `*`."""
        return [p for p in self.signature.parameters.values()
                if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]

    @cached_property
    def attr_params(self) -> list[inspect.Parameter]:
        """Parameters that take plain data: everything after the `*`."""
        return [p for p in self.signature.parameters.values() if p.kind == p.KEYWORD_ONLY]

    @cached_property
    def takes_keywords(self) -> bool:
        """Whether it takes **keywords: tensors among them are further inputs."""
        return any(p.kind == p.VAR_KEYWORD for p in self.signature.parameters.values())

    @cached_property
    def variadic(self) -> bool:
        return any(p.kind == p.VAR_POSITIONAL for p in self.tensor_params)

    @property
    def is_composite(self) -> bool:
        return self.body is not None

    def spelled(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords in our spelling: axes may be named as torch names them."""
        known = self.signature.parameters
        aliases = {k: ALIASES[k] for k in kwargs
                   if k in ALIASES and k not in known and ALIASES[k] in known}
        for alias, name in aliases.items():
            if name in kwargs:
                raise ArgumentError(f"{self.name}{self.signature} got {alias}= and {name}=, which "
                                    "mean the same", where=user_location(), hint="give one of them")
        return {aliases.get(k, k): v for k, v in kwargs.items()}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]
             ) -> tuple[list[Any], dict[str, Any]]:
        """Sort a call's arguments into tensors and attributes, with a clear error."""
        kwargs = self.spelled(kwargs)
        if self.variadic:
            if args and isinstance(args[0], (list, tuple)):
                tensors, rest = list(args[0]), list(args[1:])
            else:
                tensors, rest = list(args), []
        else:
            count = len(self.tensor_params)
            tensors, rest = list(args[:count]), list(args[count:])
            for param in self.tensor_params[len(tensors):]:
                if param.name in kwargs:
                    tensors.append(kwargs.pop(param.name))
                elif param.default is not param.empty:
                    tensors.append(param.default)
                else:
                    raise ArgumentError(f"{self.name}{self.signature} misses its argument "
                                        f"{param.name!r}", where=user_location())
            for param, tensor in zip(self.tensor_params, tensors):
                if tensor is None and param.default is param.empty:
                    raise ArgumentError(f"{self.name}{self.signature} got None for {param.name!r}",
                                        where=user_location(), hint="pass a tensor or a number")
        attrs = {p.name: p.default for p in self.attr_params if p.default is not p.empty}
        free = [p.name for p in self.attr_params if p.name not in kwargs]
        if len(rest) > len(free):
            raise ArgumentError(f"{self.name}{self.signature} got {len(rest) - len(free)} "
                                "arguments too many", where=user_location())
        attrs.update(zip(free, rest, strict=False))
        for name, value in kwargs.items():
            if all(p.name != name for p in self.attr_params):
                if not self.takes_keywords:
                    raise ArgumentError(
                        f"{self.name}{self.signature} has no argument {name!r}",
                        where=user_location(), hint="inside an operator values never change: "
                        "return the result" if name == "out" else None)
                if is_tensor(value):
                    tensors.append(value)
                    attrs[TENSOR_KEYWORDS] = (*attrs.get(TENSOR_KEYWORDS, ()), name)
                    continue
            attrs[name] = value
        for param in self.attr_params:
            if param.name not in attrs:
                raise ArgumentError(f"{self.name}{self.signature} misses its argument "
                                    f"{param.name!r}", where=user_location())
        return tensors, attrs

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if not tracing():
            for arg in args:
                if isinstance(arg, Value):
                    break
            else:
                return self.compiled(*args, **kwargs)
        tensors, attrs = self.bind(args, kwargs)
        return apply(self, tensors, attrs)

    @cached_property
    def compiled(self) -> Any:
        """What a call with arrays runs."""
        return UPCALLS["compiled"](self)

    def lower(self, /, *tensors_and_level: Any, chip: str = "", **attrs: Any) -> str:
        """One level of this operator's compilation as text, the level being the last argument.

        >>> import numpy as np, terrazzo as tz
        >>> print(tz.relu.lower(np.ones(4, np.float32), "graph"))
        graph relu(x0: f32[4]):
            %1: f32[4] = relu(x0)
            return %1

        Levels of the chip "cpu" are graph, canonical, expr, schedule, loop, llvm, asm and triton;
        `tz.chips()` tells those of others.
        """
        return UPCALLS["lower"](self, tensors_and_level, {"chip": chip, **attrs})

    def on(self, chip: str) -> Any:
        """This operator on a chip by its name, wherever the data is: `gelu.on("cpu")(x)`."""
        return UPCALLS["on"](self, chip)

    def verify(self, /, *tensors: Any, **options: Any) -> Any:
        """`tz.verify(this, ...)`: every level against the one above, and the gradient."""
        return UPCALLS["verify"](self, *tensors, **options)

    def bench(self, /, *tensors: Any, **options: Any) -> Any:
        """`tz.bench(this, ...)`: the time of a call beside numpy and torch."""
        return UPCALLS["bench"](self, *tensors, **options)

    def compile(self, /, *tensors: Any, **attrs: Any) -> Any:
        """The executable for arguments like these, which can be saved."""
        return self.compiled.executable(tensors, attrs)

    # ------------------------------------------------------------ as a Python object
    @cached_property
    def as_method(self) -> tuple[str, Operator]:
        """The name of the first parameter, and the operator that takes it for an attribute."""
        return of_object(self)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """An operator that was written in the body of a class is a method of its objects."""
        if owner is None or self.family != "user" or not is_method(self.body):
            return self
        return BoundOperator(self, owner)

    def __copy__(self) -> Operator:
        return self

    def __deepcopy__(self, memo: Any) -> Operator:
        return self

    def __reduce__(self) -> Any:
        if self.family != "user" or self.body is None:
            return found_at, ("terrazzo", self.name)
        return reference(self, inspect.unwrap(self.body), UPCALLS["op"], self.name, self.grad)

    def __repr__(self) -> str:
        return f"<operator {self.name}{self.signature}>"


@dataclass(frozen=True, eq=False)
class Node:
    """One application of an operator."""

    op: Operator
    inputs: tuple[Value | None, ...]
    attrs: Mapping[str, Any]
    types: tuple[TensorType, ...]
    where: str = ""
    serial: int = field(default_factory=lambda: next(_serial))

    @cached_property
    def outputs(self) -> tuple[Value, ...]:
        return tuple(Value(t, self, i) for i, t in enumerate(self.types))


class Value:
    """A tensor in a graph: an input, or an output of a node. Behaves like an array in a trace."""

    __slots__ = ("__weakref__", "index", "is_number", "name", "node", "type")
    __array_priority__ = 1000
    __hash__ = object.__hash__

    def __init__(self, type: TensorType, node: Node | None = None, index: int = 0, name: str = "",
                 is_number: bool = False):
        self.type, self.node, self.index, self.name = type, node, index, name
        # Stands for a Python number that was passed: it takes the type of what it meets.
        self.is_number = is_number

    @property
    def shape(self) -> Shape:
        """The sizes; where symbolic ones are asked about, a user's code sees `graph.sizes.Size`."""
        if call_questions() is not None and not is_ours(sys._getframe(1)):
            from terrazzo.graph.sizes import seen

            return seen(self.type.shape)
        return self.type.shape

    @property
    def size(self) -> Any:
        """The number of elements, as `shape` gives sizes."""
        count = num_elements(self.type.shape)
        if call_questions() is not None and not is_ours(sys._getframe(1)):
            from terrazzo.graph.sizes import seen

            return seen(count)
        return count

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return len(self.type.shape)

    def __repr__(self) -> str:
        return f"<traced {self.type}{' ' + self.name if self.name else ''}>"

    if TYPE_CHECKING:  # attached by ops.methods, which lies above this room
        def __add__(self, other: Any) -> Any: ...
        def __radd__(self, other: Any) -> Any: ...
        def __sub__(self, other: Any) -> Any: ...
        def __rsub__(self, other: Any) -> Any: ...
        def __mul__(self, other: Any) -> Any: ...
        def __rmul__(self, other: Any) -> Any: ...
        def __truediv__(self, other: Any) -> Any: ...
        def __rtruediv__(self, other: Any) -> Any: ...
        def __floordiv__(self, other: Any) -> Any: ...
        def __rfloordiv__(self, other: Any) -> Any: ...
        def __mod__(self, other: Any) -> Any: ...
        def __rmod__(self, other: Any) -> Any: ...
        def __pow__(self, other: Any) -> Any: ...
        def __rpow__(self, other: Any) -> Any: ...
        def __matmul__(self, other: Any) -> Any: ...
        def __rmatmul__(self, other: Any) -> Any: ...
        def __and__(self, other: Any) -> Any: ...
        def __rand__(self, other: Any) -> Any: ...
        def __or__(self, other: Any) -> Any: ...
        def __ror__(self, other: Any) -> Any: ...
        def __xor__(self, other: Any) -> Any: ...
        def __rxor__(self, other: Any) -> Any: ...
        def __lshift__(self, other: Any) -> Any: ...
        def __rshift__(self, other: Any) -> Any: ...
        def __lt__(self, other: Any) -> Any: ...
        def __le__(self, other: Any) -> Any: ...
        def __gt__(self, other: Any) -> Any: ...
        def __ge__(self, other: Any) -> Any: ...
        def __neg__(self) -> Any: ...
        def __invert__(self) -> Any: ...
        def __getitem__(self, key: Any) -> Any: ...

    def __len__(self) -> int:
        if self.ndim and isinstance(self.shape[0], int):
            return self.shape[0]
        asked = call_questions()
        if self.ndim and asked is not None:
            return asked.fix(self.shape[0])
        raise TracedControlFlow(f"len() of a traced value of type {self.type}",
                                where=user_location(), hint="use x.shape[0], which may be symbolic")

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TracedControlFlow(
            f"x[...] = y would change a traced tensor of type {self.type}, and values never change",
            where=user_location(), hint="make a new one with x.at[...].set(y) or tz.where")

    def _no_python_value(self, what: str) -> Any:
        raise TracedControlFlow(
            f"{what} needs the value of a traced tensor of type {self.type}, which is not known "
            "while tracing", where=user_location(),
            hint="use tz.where(condition, a, b) to choose elements, tz.cond, tz.while_loop or "
                 "tz.scan for control flow that depends on values")

    def __bool__(self) -> bool:
        return self._no_python_value("Python's if, while, and, or, not")

    def __int__(self) -> int:
        return self._no_python_value("int()")

    def __index__(self) -> int:
        return self._no_python_value("using it as a Python index")

    def __float__(self) -> float:
        return self._no_python_value("float()")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._no_python_value("a numpy function")


@dataclass(frozen=True, eq=False)
class Graph:
    """A DAG of operators between inputs and outputs."""

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Every node that an output needs, producers first, in the order of creation."""
        seen: dict[Node, None] = {}
        stack: list[tuple[Node, bool]] = [(v.node, False) for v in reversed(self.outputs)
                                               if v.node is not None]
        while stack:
            node, expanded = stack.pop()
            if expanded:
                seen.setdefault(node)
            elif node not in seen:
                stack.append((node, True))
                stack.extend((v.node, False) for v in reversed(node.inputs)
                             if v is not None and v.node is not None)
        return tuple(seen)

    def __str__(self) -> str:
        return format_graph(self)


# ---------------------------------------------------------------- the registry
OPERATORS: dict[str, Operator] = {}


def register(op: Operator) -> Operator:
    """Enter an operator under its name; a user's operator never replaces one of ours."""
    known = OPERATORS.get(op.name)
    if op.family != "user" or known is None or known.family == "user":
        OPERATORS[op.name] = op
    return op


def operator_named(name: str) -> Operator:
    """Look an operator up, with suggestions when it does not exist."""
    try:
        return OPERATORS[name]
    except KeyError:
        import difflib

        close = difflib.get_close_matches(name, OPERATORS, n=3)
        raise UnknownOperator(f"there is no operator {name!r}", hint=(
            "did you mean " + " or ".join(close) + "?" if close else
            "define it with @tz.op")) from None


# ---------------------------------------------------------------- applying and tracing
_state = threading.local()


def tracing() -> bool:
    """Whether this thread is inside a trace."""
    return getattr(_state, "depth", 0) > 0


class trace_scope:
    """While open, operators make nodes even if all their arguments are arrays."""

    def __enter__(self) -> None:
        _state.depth = getattr(_state, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        _state.depth -= 1


class capture_scope:
    """While open, arrays that are mentioned are looked up by their place in memory.

    Those that are known stand for a value; the others become constants, and are collected.
    """

    def __init__(self, known: Mapping[Any, Value]):
        self.known = known
        self.seen: dict[Any, Any] = {}
        self.uses = 0

    def __enter__(self) -> dict[Any, Any]:
        _state.captures = [*getattr(_state, "captures", ()), self]
        return self.seen

    def __exit__(self, *_: object) -> None:
        _state.captures = _state.captures[:-1]


def place_of(x: Any) -> Any:
    """Where an array or tensor lies in memory, and how."""
    if hasattr(x, "data_ptr"):
        return x.data_ptr(), tuple(x.shape), tuple(x.stride()), str(x.dtype)
    return x.ctypes.data, x.shape, x.strides, x.dtype.str


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
    scopes = getattr(_state, "captures", None)
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


def is_tensor(x: Any) -> bool:
    """Whether something is a traced value, an array or a tensor of torch."""
    return isinstance(x, (Value, np.ndarray)) or hasattr(x, "data_ptr")


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
    _state.called = op
    try:
        return _applied(op, tensors, attrs)
    except TerrazzoError as error:
        error.came_from(op.name)
        raise
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
        # An operator is written for arguments that make sense, and does not check for all others.
        shown = [*(str(t.type) if isinstance(t, Value) else type(t).__name__ for t in tensors),
                 *(f"{k}={_attr_text(v)}" for k, v in attrs.items())]
        raise ArgumentError(f"{op.name}({', '.join(shown)}) cannot be: {error}",
                            where=user_location(), hint=f"it is {op.name}{op.signature}"
                            ) from error
    finally:
        _state.called = None


def called() -> Operator | None:
    """The operator of ours that is being applied, whatever operators it is made of."""
    found: Operator | None = getattr(_state, "called", None)
    return found


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
        scopes = getattr(_state, "captures", ())
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


# ---------------------------------------------------------------- rebuilding
def rebuild(graph: Graph, visit: Callable[[Node, tuple[Value | None, ...]],
                                          Sequence[Value] | None]) -> Graph:
    """Copy a graph node by node; `visit` may answer with other values for a node's outputs."""
    table: dict[Value, Value] = {}
    for node in graph.nodes:
        inputs = tuple(None if v is None else table.get(v, v) for v in node.inputs)
        answer = visit(node, inputs)
        if answer is None:
            if all(a is b for a, b in zip(inputs, node.inputs, strict=True)):
                continue
            answer = Node(node.op, inputs, node.attrs, node.types, node.where).outputs
        table.update(zip(node.outputs, answer, strict=True))
    outputs = tuple(table.get(v, v) for v in graph.outputs)
    return Graph(graph.name, graph.inputs, outputs)


def replace_inputs(graph: Graph, values: Sequence[Value]) -> tuple[Value, ...]:
    """The outputs of a graph applied to other values: inlining."""
    table = dict(zip(graph.inputs, values, strict=True))
    for node in graph.nodes:
        inputs = tuple(None if v is None else table.get(v, v) for v in node.inputs)
        if all(a is b for a, b in zip(inputs, node.inputs, strict=True)):
            continue
        fresh = Node(node.op, inputs, node.attrs, node.types, node.where).outputs
        table.update(zip(node.outputs, fresh, strict=True))
    return tuple(table.get(v, v) for v in graph.outputs)


def computed_from(outputs: Sequence[Value], leaves: Mapping[Value, Value]) -> tuple[Value, ...]:
    """Values computed from other leaves; what lies behind the leaves is cut off."""
    nodes: dict[Node, None] = {}
    stack = [(v.node, False) for v in outputs if v not in leaves and v.node is not None]
    while stack:
        node, ready = stack.pop()
        if node in nodes:
            continue
        if ready:
            nodes.setdefault(node)
            continue
        stack.append((node, True))
        stack.extend((v.node, False) for v in node.inputs
                     if v is not None and v not in leaves and v.node is not None)
    table = dict(leaves)
    for node in nodes:
        inputs = tuple(None if v is None else table[v] for v in node.inputs)
        fresh = Node(node.op, inputs, node.attrs, node.types, node.where)
        table.update(zip(node.outputs, fresh.outputs, strict=True))
    return tuple(table[v] for v in outputs)


# ---------------------------------------------------------------- printing
def format_graph(graph: Graph) -> str:
    """The text form of a graph."""
    names: dict[Value, str] = {}
    for i, value in enumerate(graph.inputs):
        names[value] = value.name or f"x{i}"
    params = ", ".join(f"{names[v]}: {v.type}" for v in graph.inputs)
    lines = [f"graph {graph.name}({params}):"]
    for node in graph.nodes:
        if node.op.name == "constant" and node.types[0].shape == ():
            names[node.outputs[0]] = _literal(node.attrs["value"])
            continue
        for value in node.outputs:
            names[value] = f"%{len(names)}"
        args = ["none" if v is None else names[v] for v in node.inputs]
        args += [f"{k}={_attr_text(v)}" for k, v in node.attrs.items() if v is not None]
        results = ", ".join(f"{names[v]}: {v.type}" for v in node.outputs)
        lines.append(f"    {results} = {node.op.name}({', '.join(args)})")
    lines.append("    return " + ", ".join(names[v] for v in graph.outputs))
    for inner in (a for node in graph.nodes for a in node.attrs.values() if isinstance(a, Graph)):
        lines += [f"    {line}" for line in format_graph(inner).splitlines()]
    return "\n".join(lines)


def _literal(array: np.ndarray) -> str:
    from terrazzo.base.scalar_text import format_literal

    return format_literal(array.item() if array.dtype.kind in "biufc" else float(array))


def _attr_text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"<{as_dtype(value.dtype).short}{dims_text(value.shape)}>"
    if isinstance(value, Graph):
        return f"<graph {value.name}>"
    return str(value)


def dim_sizes(types: Sequence[TensorType]) -> set[Index]:
    """All symbolic sizes that occur in the given types."""
    return {n for t in types for n in t.shape if isinstance(n, IndexExpr)}
