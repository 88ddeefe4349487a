"""One call in an FX graph as values of ours: arguments, promotion, the converter, the check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
from torch.fx import Node

from terrazzo.dtypes import DType, as_dtype
from terrazzo.errors import ShapeError, TerrazzoError, UnsupportedOperator
from terrazzo.graph.applying import as_value, constant
from terrazzo.graph.ir import TensorType, Value
from terrazzo.index import IndexExpr
from terrazzo.index.guards import granted
from terrazzo.ops.elementwise import astype
from terrazzo.ops.shape import reshape
from terrazzo.torch import aten  # noqa: F401  the converters register themselves
from terrazzo.torch.aten.registry import Converter, converter_of, without_placement
from terrazzo.torch.devices import is_chip
from terrazzo.torch.overload import overload_of
from terrazzo.torch.symbols import Names, index_of

READS = "aten._local_scalar_dense.default"  # a number out of a tensor: sizes may be made of it
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, eq=False)
class Conversion:
    """What is known while FX nodes become values of one graph."""

    values: dict[Node, Any]  # what has been converted: values, and tuples of them
    names: Names  # what torch's symbols stand for
    constant_of: Callable[[str], Any]  # tensors that are attributes of the module


def type_of(fake: Any, names: Names) -> TensorType:
    """The type of a tensor as torch knew it when tracing."""
    return TensorType(tuple(index_of(n, names) for n in fake.shape), as_dtype(fake.dtype))


def refusal(fake: Any) -> str | None:
    """Why our code cannot hold a tensor, if it cannot."""
    if not isinstance(fake, torch.Tensor):
        return None
    if not is_chip(fake.device):
        return f"a tensor on {fake.device}"
    if fake.layout is not torch.strided or fake.is_nested or fake.is_quantized:
        return f"a tensor of layout {fake.layout}"
    try:
        as_dtype(fake.dtype)
    except TerrazzoError:
        return f"a tensor of {fake.dtype}"
    return None


def converted(node: Node, into: Conversion) -> Any:
    """The value or values of a call; raises UnsupportedOperator with the reason why not."""
    args, kwargs = _arguments(node, into)
    out = _result_types(node.meta.get("val"), into.names)
    ours = overload_of(node.target)
    if ours is not None:  # torch was told of it by `register`: what it means is known
        made = ours.values(ours.schema.arguments(args, kwargs))
        return _all_fitted(ours.packed(made), out, node)
    converter = converter_of(node.target)
    if converter is None:
        raise UnsupportedOperator("no converter")
    if converter.promotes:
        args, kwargs = _promoted(node, args, kwargs, converter)
    extra: dict[str, Any] = {"out": out} if converter.typed else {}
    if converter.placed:
        fake = _meta(node.args[0])
        extra["lies"] = ([index_of(n, into.names) for n in fake.stride()],
                         index_of(fake.storage_offset(), into.names))
    result = converter.function(*args, **without_placement(kwargs), **extra)
    return _all_fitted(result, out, node)


def _all_fitted(result: Any, out: Any, node: Node) -> Any:
    if isinstance(out, tuple):
        return tuple(None if v is None or t is None else _fitted(v, t, node)
                     for v, t in zip(result, out, strict=True))
    return _fitted(result, out, node)


def _result_types(val: Any, names: Names) -> Any:
    if isinstance(val, (tuple, list)):
        return tuple(None if v is None else type_of(v, names) for v in val)
    if not isinstance(val, torch.Tensor):
        raise UnsupportedOperator("its result is no tensor")
    return type_of(val, names)


def _fitted(value: Any, wanted: TensorType, node: Node) -> Value:
    """A result in the type that torch said it would have."""
    value = as_value(value)
    if len(value.shape) != len(wanted.shape) or not all(
            granted("==", a, b) for a, b in zip(value.type.shape, wanted.shape)):
        raise ShapeError(f"the converter of {node.target} made {value.type} where torch has "
                         f"{wanted}")
    return value if value.dtype is wanted.dtype else astype(value, dtype=wanted.dtype)


def _arguments(node: Node, into: Conversion) -> tuple[list[Any], dict[str, Any]]:
    def found(arg: Any) -> Any:
        if isinstance(arg, Node):
            return argument(arg, into)
        if isinstance(arg, (list, tuple)):
            return [found(a) for a in arg]
        return arg

    return [found(a) for a in node.args], {k: found(v) for k, v in node.kwargs.items()}


def argument(node: Node, into: Conversion) -> Any:
    """What a node stands for where it is an argument: a value, a size, a constant."""
    if node in into.values:
        return into.values[node]
    val = node.meta.get("val")
    if isinstance(val, torch.SymInt):
        return index_of(val, into.names)
    if isinstance(val, int) and not isinstance(val, bool):
        return val
    read = read_number(node)
    if read in into.values:
        return reshape(astype(into.values[read], dtype="float64"), shape=())
    if isinstance(val, _SYMBOLIC):
        raise UnsupportedOperator(f"the argument {node.name}, a number that varies")
    if node.op == "get_attr":
        return into.values.setdefault(node, constant_value(into.constant_of(str(node.target))))
    raise UnsupportedOperator(f"the argument {node.name}, which is no tensor")


def read_number(node: Node) -> Node | None:
    """The tensor of one element that a node is the number of; whole ones may be sizes, and are not.

    Where it is used in arithmetic, the tensor will do.
    """
    if str(node.target) == READS and isinstance(node.meta.get("val"), torch.SymFloat):
        return node.args[0] if isinstance(node.args[0], Node) else None
    return None


def constant_value(tensor: Any) -> Value:
    """A tensor that never changes as a constant of the graph."""
    if not isinstance(tensor, torch.Tensor) or refusal(tensor) is not None:
        raise UnsupportedOperator("a constant that is no plain tensor")
    dtype = as_dtype(tensor.dtype)
    return constant(array_of(tensor, dtype), dtype)


def array_of(tensor: Any, dtype: DType) -> np.ndarray:
    """The memory of a tensor as an array, of types that numpy does not know as well."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if dtype.is_bool or dtype.is_complex or dtype.np.kind in "iuf":
        return plain.numpy()
    raw = plain.view(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    return raw.numpy().view(dtype.np)


def _promoted(node: Node, args: list[Any], kwargs: dict[str, Any], converter: Converter
              ) -> tuple[list[Any], dict[str, Any]]:
    """Tensors in the type in which they meet; numbers stay numbers, as ours are weak too."""
    given = [*zip(node.args, args), *((node.kwargs[k], v) for k, v in kwargs.items()
                                      if k not in ("alpha", "value"))]
    metas = [_meta(a) for a, v in given if isinstance(v, (Value, int, float, complex))]
    if converter.promotes == "WHERE":
        metas = metas[1:]
    kind = "DEFAULT" if converter.promotes == "WHERE" else converter.promotes
    result = elementwise_dtypes(
        *metas, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND[kind])[1]
    # In the type of the result where that is a half one: widening is our compiler's business.
    joint = as_dtype(_joint(metas) if kind == "ALWAYS_BOOL" else result)
    skip = 1 if converter.promotes == "WHERE" else 0

    def cast(value: Any) -> Any:
        if isinstance(value, IndexExpr):
            value = as_value(value)
        if isinstance(value, Value):
            return value if value.dtype is joint else astype(value, dtype=joint)
        return value

    cast_args = [a if i < skip else cast(a) for i, a in enumerate(args)]
    if not any(isinstance(a, Value) for a in cast_args):  # an operator needs one tensor
        cast_args[0] = as_value(args[0], joint)
    return cast_args, {k: cast(v) for k, v in kwargs.items()}


def _joint(metas: list[Any]) -> Any:
    found = metas[0]
    if len(metas) == 1:
        return found.dtype
    return elementwise_dtypes(
        *metas, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH)[1]


def _meta(arg: Any) -> Any:
    return arg.meta["val"] if isinstance(arg, Node) else arg


def fresh(node: Node, names: Names, name: str = "") -> Value:
    """An input of a graph for a node that is computed elsewhere."""
    val = node.meta.get("val")
    why = refusal(val)
    if why is None and isinstance(val, torch.Tensor) and not is_tangent(node) and (
            val.is_conj() or val.is_neg()):
        why = f"{node.name}, which torch negates or conjugates when it reads it"
    if why is not None or not isinstance(val, torch.Tensor):
        raise UnsupportedOperator(why or f"{node.name}, which is no tensor")
    return Value(type_of(val, names), name=name)


def is_tangent(node: Node) -> bool:
    """Whether a node is a gradient that the backward pass starts from, as AOTAutograd names them.

    Nobody guards how it comes: torch may negate or conjugate it when it reads it, whatever it was
    when it was traced. So it is written out before anything reads it.
    """
    return node.op == "placeholder" and "tangents" in str(node.target)


def location(node: Node) -> str:
    """The line of the user's code that a node comes from."""
    trace: Mapping[str, Any] | str | None = node.meta.get("stack_trace")
    lines = [line.strip() for line in str(trace or "").splitlines() if "File " in line]
    if not lines:
        return ""
    parts = lines[-1].split('"')
    rest = parts[2].split(",") if len(parts) > 2 else []
    number = next((p.strip().removeprefix("line ") for p in rest if "line" in p), "")
    return f"{parts[1]}:{number}" if len(parts) > 1 else ""


def call_text(node: Node) -> str:
    """A call and the line of the user's code that it comes from."""
    line = location(node)
    return f"{node.target}{line and f', {line}'}"
