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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from terrazzo.base.shapes import Shape, dims_text, num_elements
from terrazzo.base.upcalls import UPCALLS
from terrazzo.dtypes import DType
from terrazzo.errors import (
    ArgumentError,
    TracedControlFlow,
    UnknownOperator,
    is_ours,
    user_location,
)
from terrazzo.graph import described
from terrazzo.graph.bound import BoundOperator, found_at, is_method, of_object, reference
from terrazzo.graph.scopes import tracing
from terrazzo.index import Index, IndexExpr
from terrazzo.index.guards import call_questions

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


@dataclass(frozen=True, eq=False, repr=False)
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
        from terrazzo.graph.applying import apply

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

    def kernel(self, chip: str, *, language: str) -> Any:
        """Decorates a function that writes a kernel by hand, beside the generated one.

        It is given the types of the tensors and the attributes, and answers with source text, or
        None where the kernel is not for them. docs/hand-written-kernels.md says what is called.
        """
        return UPCALLS["kernel"](self, chip, language)

    def on(self, chip: str) -> Any:
        """This operator on a chip by its name, wherever the data is: `gelu.on("cpu")(x)`."""
        return UPCALLS["on"](self, chip)

    def verify(self, /, *tensors: Any, **options: Any) -> Any:
        """`tz.verify(this, ...)`: every level against the one above, and the gradient."""
        return UPCALLS["verify"](self, *tensors, **options)

    def bench(self, /, *tensors: Any, **options: Any) -> Any:
        """`tz.bench(this, ...)`: the time of a call beside numpy and torch."""
        return UPCALLS["bench"](self, *tensors, **options)

    def tune(self, /, *tensors: Any, **attrs: Any) -> Any:
        """Measure how its kernels run best for arguments like these; later calls run so.

        Answers what was chosen. It is for chips whose kernels leave a choice: docs/cuda.md.
        """
        return self.compiled.tune(*tensors, **attrs)

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
        from terrazzo.graph.text import format_graph

        return format_graph(self)


def is_tensor(x: Any) -> bool:
    """Whether something is a traced value, an array or a tensor of torch."""
    return isinstance(x, (Value, np.ndarray)) or hasattr(x, "data_ptr")


def dim_sizes(types: Sequence[TensorType]) -> set[Index]:
    """All symbolic sizes that occur in the given types."""
    return {n for t in types for n in t.shape if isinstance(n, IndexExpr)}


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
