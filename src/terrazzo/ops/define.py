"""How operators are defined: `operator`, `primitive` and `elementwise`.

    @operator(family="norm")
    def softmax(x, *, axis=-1):                     # the body is its meaning and its gradient
        e = exp(x - max(x, axis=axis, keepdims=True))
        return e / sum(e, axis=axis, keepdims=True)

    @primitive(family="shape", infer=_flip_type, reference=_flip_numpy, grad=_flip_grad)
    def flip(x, *, axis, out):                      # the function is the tensor expression
        return compute(out.shape, lambda *i: x[...])

A rule's first arguments are the operator's inputs, its keywords the attributes. `out` is the
inferred type (a tuple when there are several results).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from terrazzo.base.scalar import Scalar, call, cast
from terrazzo.base.scalar_table import OPS, Absent, ScalarOp
from terrazzo.base.shapes import Shape, broadcast_shapes
from terrazzo.dtypes import DType, as_dtype, bool_, default_float, promote
from terrazzo.errors import DTypeError, user_location
from terrazzo.expr.ir import Tensor, compute
from terrazzo.graph.bound import doc_of, name_of
from terrazzo.graph.ir import (
    OPERATORS,
    TENSOR_KEYWORDS,
    Node,
    Operator,
    TensorType,
    Value,
    register,
)
from terrazzo.index import Index
from terrazzo.loop.interpret import convert


def _signature(function: Callable[..., Any], rule: bool = False) -> inspect.Signature:
    """What users may pass; a rule is told the types of its results as `out` besides."""
    kept = [p.replace(annotation=p.empty)
            for p in inspect.signature(function).parameters.values()
            if not (rule and p.name == "out")]
    return inspect.Signature(kept)


def _by_keyword(function: Callable[..., Any]) -> Callable[..., Any]:
    """A body whose last tensors came as **keywords, under the names that an attribute lists."""

    @functools.wraps(function)
    def body(*tensors: Any, **attrs: Any) -> Any:
        names = attrs.pop(TENSOR_KEYWORDS, ())
        count = len(tensors) - len(names)
        return function(*tensors[:count], **dict(zip(names, tensors[count:])), **attrs)

    return body


def operator(function: Callable[..., Any] | None = None, *, family: str = "",
             name: str | None = None, grad: Callable[..., Any] | None = None,
             reference: Callable[..., Any] | None = None, keep_whole: bool = False,
             differentiable: bool = True, unify: bool = False) -> Any:
    """Define a composite operator by a body made of other operators."""

    def make(body: Callable[..., Any]) -> Operator:
        signature = _signature(body)
        keywords = any(p.kind == p.VAR_KEYWORD for p in signature.parameters.values())
        return register(Operator(
            name or name_of(body), signature, body=_by_keyword(body) if keywords else body,
            grad=grad, reference=reference, family=family, doc=doc_of(body), keep_whole=keep_whole,
            kind="attention" if keep_whole else "pointwise", differentiable=differentiable,
            unify=unify, written=body))

    return make if function is None else make(function)


def primitive(*, family: str, infer: Callable[..., Any], reference: Callable[..., Any],
              kind: str = "pointwise", grad: Callable[..., Any] | None = None,
              name: str | None = None, loops: bool = False, host: bool = False,
              unify: bool = False, differentiable: bool = True, starts_from_first: bool = False
              ) -> Callable[[Callable[..., Any]], Operator]:
    """Define a primitive operator; the decorated function is its tensor expression.

    With `loops=True` the operator has no expression form (sorting, scattering, scans): the
    function answers with `build(inputs, outputs) -> Stmt`, which writes Loop IR over flat row-major
    buffers, one an input and one a result. One that `starts_from_first`, in that its result is the
    first operand but for what it changes, may get a single number for that one. With `host=True`
    an operator has no code at all: the reference is what runs, between compiled pieces, and the
    function only says what it is.
    """

    def make(rule: Callable[..., Any]) -> Operator:
        return register(Operator(
            name or rule.__name__.rstrip("_"), _signature(rule, rule=True), infer=infer,
            expr=None if loops or host else rule, loops=rule if loops else None,
            reference=reference, grad=grad,
            kind="opaque" if loops else "host" if host else kind, family=family,
            doc=inspect.getdoc(rule) or "", unify=unify, differentiable=differentiable,
            starts_from_first=starts_from_first, written=rule))

    return make


# ---------------------------------------------------------------- elementwise operators
def broadcast_load(x: Tensor, indices: Sequence[Index]) -> Scalar:
    """The element of `x` that broadcasting puts at `indices` of the result."""
    own = indices[len(indices) - len(x.shape):]
    return x[tuple(0 if n == 1 and isinstance(n, int) else i
                   for n, i in zip(x.shape, own, strict=True))]


def joint_type(row: ScalarOp, dtypes: Sequence[DType]) -> tuple[DType, DType]:
    """The type the arguments are brought to, and the type of the result."""
    joint = promote(*dtypes)
    if row.result == "float" and not joint.is_float and not joint.is_complex:
        joint = default_float
    if row.result == "bits" and joint.is_float:
        raise DTypeError(f"{row.operator} works on integers and booleans, not on {joint.name}",
                         where=user_location(), hint="cast with tz.astype(x, 'int32') first")
    if joint.is_bool and "b" not in row.kinds:  # as in numpy
        raise DTypeError(f"{row.operator} works on numbers, not on booleans",
                         where=user_location(),
                         hint="use the logical operators, or tz.astype(x, 'int32') first")
    return joint, bool_ if row.result == "bool" else joint


def elementwise(row: ScalarOp) -> Operator:
    """Define the operator that applies one scalar operation to broadcast arguments."""
    name, rule = str(row.operator), row.gradient

    def infer(*types: TensorType) -> TensorType:
        shape = broadcast_shapes(*(t.shape for t in types))
        return TensorType(shape, joint_type(row, [t.dtype for t in types])[1])

    def expr(*xs: Tensor, out: TensorType) -> Tensor:
        joint, final = joint_type(row, [x.dtype for x in xs])

        def element(*i: Index) -> Scalar:
            args = [cast(broadcast_load(x, i), joint) for x in xs]
            return cast(call(row.name, *args), final)

        return compute(out.shape, element, origin=name)

    def reference(*arrays: np.ndarray, out: TensorType) -> np.ndarray:
        joint = joint_type(row, [as_dtype(a.dtype) for a in arrays])[0].compute
        return convert(row.numpy(*(convert(a, joint) for a in arrays)), out.dtype)

    def grad(node: Node, g: Value) -> list[Value | None]:
        assert not isinstance(rule, Absent)
        found = rule(NAMED, *node.inputs, *node.outputs, g)
        return [found] if row.arity == 1 else list(found)

    differentiable = not isinstance(rule, Absent)
    return register(Operator(
        name, _of_tensors(row.arity), infer=infer, expr=expr, reference=reference,
        grad=grad if differentiable else None, family="elementwise", doc=row.doc, unify=True,
        differentiable=differentiable))


def composed(row: ScalarOp) -> Operator:
    """Define the operator of a scalar operation that is made of others."""
    meaning = row.meaning
    assert meaning is not None

    def on_tensors(op: str, *args: Any) -> Any:
        return OPERATORS[str(OPS[op].operator)](*args)

    def body(*tensors: Any) -> Any:
        return meaning(on_tensors, *tensors)

    return register(Operator(
        str(row.operator), _of_tensors(row.arity, named=True), body=body, family="elementwise",
        doc=row.doc, unify=row.arity > 1, differentiable=row.result != "bool"))


def _of_tensors(arity: int, named: bool = False) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if named else inspect.Parameter.POSITIONAL_ONLY
    return inspect.Signature([inspect.Parameter(p, kind) for p in ("x", "y", "z")[:arity]])


class _Named:
    """All operators, by their names."""

    def __getattr__(self, name: str) -> Operator:
        return OPERATORS[name]


NAMED = _Named()


def same_type(x: TensorType, **attrs: Any) -> TensorType:
    """The type rule of operators whose result looks like their input."""
    return x


def with_shape(x: TensorType, shape: Shape) -> TensorType:
    """The type of `x` with another shape."""
    return TensorType(shape, x.dtype)


GradientRule = Callable[..., Sequence[Value | None]]
__all__ = ["GradientRule", "Node", "broadcast_load", "composed", "elementwise", "joint_type",
           "operator", "primitive", "same_type", "with_shape"]


# ---------------------------------------------------------------- calls that need preparing
@dataclass(frozen=True, eq=False, repr=False)
class FrontedOperator(Operator):
    """An operator that is called with what a graph cannot hold (slices, Python functions).

    `front` sorts such arguments into tensors and plain data and then calls `Operator.__call__`.
    """

    __doc__ = Operator.__dict__["__doc__"]  # that of each object
    front: Callable[..., Any] | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        assert self.front is not None
        return self.front(*args, **kwargs)


def fronted(op: Operator, front: Callable[..., Any]) -> FrontedOperator:
    """Register an operator again with a function that prepares its calls."""
    values = {f.name: getattr(op, f.name) for f in fields(Operator)}
    made = FrontedOperator(**values, front=front)
    register(made)
    return made
