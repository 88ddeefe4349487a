"""What `help`, `inspect.signature` and type checkers are told of an operator.

The types of parameters are those of its definition; where that takes anything, those that its name
stands for in all operators. Results are told by an example, which is inferred when asked for.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from terrazzo.dtypes import float32, float64, int64, uint64

if TYPE_CHECKING:
    from terrazzo.graph.ir import Operator, TensorType


@runtime_checkable
class Array(Protocol):
    """What operators take and give: an array of numpy, a tensor of torch, or a traced value.

    For annotations of a user's own functions. Type checkers take it for anything, as arrays of
    several libraries are meant and none knows the others.
    """

    shape: Any
    dtype: Any


class Type(str):
    """The text of an annotation, which `inspect` shows as it is."""

    __slots__ = ()
    __repr__ = str.__str__


ARRAY = Type("Array")
SIZES, AXES = "Size | Sequence[Size]", "int | Sequence[int]"
# What an attribute of this name is in every operator that has it: its type, where the definition
# takes anything, and its meaning.
ATTRIBUTES: dict[str, tuple[str, str]] = {
    "activations": ("Sequence[str] | None", "the names of the functions of each direction"),
    "align_corners": ("", "whether the corners of grids are those of the outermost elements"),
    "alpha": ("", "a factor of what lies below 0"),
    "approximate": ("", '"none", or "tanh" for the approximation by tanh'),
    "axes": (f"{AXES} | None", "axes, counted from the front, or from the back if negative"),
    "axis": (f"{AXES} | None", "the axis, counted from the front, or from the back if negative"),
    "block_size": ("", "how many elements share a scale; 0: all along the axis"),
    "block_shape": ("Sequence[int]", "the sizes of a block"),
    "causal": ("", "whether a query sees the keys up to its own place only"),
    "correction": ("", "what is taken off the number of elements; 1 for samples"),
    "descending": ("", "whether the largest comes first"),
    "destination": ("int | Sequence[int]", "where axes go"),
    "dilation": (SIZES, "the distance of elements in a window, one for all axes or one each"),
    "dtype": ("DTypeLike", "the type of the result, such as 'float32'"),
    "eps": ("", "what is added to a variance, lest it be 0"),
    "equation": ("", 'letters for axes, such as "bij,bjk->bik"'),
    "exclusive": ("", "whether an element is left out of its own prefix"),
    "groups": ("", "how many parts the channels are in, each convolved by itself"),
    "ignore_index": ("", "the target that counts for nothing"),
    "image_shape": ("Sequence[Size]", "the sizes of the image"),
    "indices_or_sections": ("int | Sequence[int]", "the number of equal parts, or where to cut"),
    "keepdims": ("", "whether reduced axes stay, with size 1"),
    "largest": ("", "whether the largest are meant, not the smallest"),
    "n": ("Size | None", ""),
    "n_cols": ("Size | None", ""),
    "n_rows": ("Size", ""),
    "norm": ("", '"backward", "ortho" or "forward": where the factor 1 / n goes'),
    "num_classes": ("Size", "the number of classes"),
    "output_padding": ("int | Sequence[int]", "what is added at the end of each axis"),
    "output_shape": ("Sequence[Size]", "the sizes of the result"),
    "pad_width": ("int | Sequence[int] | Sequence[tuple[int, int]]",
                  "how much is added: a number, (before, after), or such a pair for each axis"),
    "padding": ("Size | Sequence[Size] | Sequence[tuple[Size, Size]]",
                "zeros around: a number, one an axis, or pairs (before, after)"),
    "pooled_shape": ("Sequence[int]", "the sizes of the result"),
    "reduce": ("", '"set", "add", "mul", "max" or "min"'),
    "reduction": ("", '"mean", "sum" or "none"'),
    "repeats": ("int | Sequence[int]", "how often"),
    "repetitions": ("int | Sequence[int]", "how often along each axis"),
    "reverse": ("", "whether it starts from the end"),
    "s": ("Sequence[Size] | None", "the sizes along the axes, cut or filled up with zeros"),
    "scale": ("", "a factor of the scores; 1 / sqrt(size) if not given"),
    "scales": ("float | Sequence[float] | None", "factors of the sizes"),
    "seed": ("int | Array", "any whole number"),
    "shape": (SIZES, "sizes, one an axis"),
    "shift": ("int | Sequence[int]", "by how much, to the right"),
    "sizes": ("Sequence[Size] | None", "the sizes of the result"),
    "source": ("int | Sequence[int]", "which axes move"),
    "start": ("Size | float", ""),
    "starts": ("Sequence[Size]", ""),
    "step": ("Size | float", ""),
    "steps": ("Sequence[int]", ""),
    "stop": ("Size | float | None", ""),
    "stops": ("Sequence[Size]", ""),
    "strides": (f"{SIZES} | None", "the distance of windows, one for all axes or one each"),
    "window": (SIZES, "the sizes of the window"),
}
_METHODS = "It has .lower(..., level), .verify(), .bench(...) and .compile(...)."


def signature(op: Operator) -> inspect.Signature:
    """The signature with types, as texts."""
    written = op.written
    if op.family == "user":
        return op.signature if written is None else signature_of(written) or op.signature
    typed = None if written is None else signature_of(written)
    front = getattr(op, "front", None)
    if front is not None:
        return signature_of(front) or op.signature
    params = [p.replace(annotation=_type(op, p, typed)) for p in op.signature.parameters.values()]
    return inspect.Signature(params, return_annotation=_result(op))


def signature_of(function: Any) -> inspect.Signature | None:
    """The signature of a function as it is written; None where it does not tell."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):  # some objects that can be called do not tell
        return None
    params = [p.replace(annotation=_shown(p.annotation)) for p in found.parameters.values()]
    return found.replace(parameters=params, return_annotation=_shown(found.return_annotation))


def _shown(annotation: Any) -> Any:
    return Type(annotation) if isinstance(annotation, str) else annotation


def _type(op: Operator, param: inspect.Parameter, typed: inspect.Signature | None) -> Type:
    if param.kind is not param.KEYWORD_ONLY:
        return Type("Array | None") if param.default is None else ARRAY
    if param.name == "dtype":
        return Type("DTypeLike" if param.default is not None else "DTypeLike | None")
    text = "Any"
    if typed is not None and param.name in typed.parameters:
        text = _resolved(op.written, typed.parameters[param.name].annotation)
    if text == "Any":
        text = ATTRIBUTES.get(param.name, ("", ""))[0] or "Any"
    if param.default is None and "None" not in text and text != "Any":
        text += " | None"
    return Type(text)


def _resolved(function: Any, annotation: Any) -> str:
    """The text of an annotation with our own short names spelled out."""
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, inspect.unwrap(function).__globals__)
        except (NameError, TypeError, AttributeError):
            return "Any"
    text = inspect.formatannotation(annotation).replace("collections.abc.", "")
    text = re.sub(r"int \| [\w.]*IndexExpr", "Size", text).replace("numpy.ndarray", "Array")
    return "Any" if "terrazzo." in text or annotation is inspect.Parameter.empty else text


# ---------------------------------------------------------------- examples
_SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((2, 3),), ((2, 3), (2, 3)), ((2, 3), (3, 4)), ((2, 3), (3,)), ((2, 3, 8),), ((2, 3, 8, 8),),
    ((4, 4),), ((4, 4), (4,)), ((2, 3, 8), (5, 3, 3)), ((2, 3), (3,), (3,)),
    ((2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16)), ((2, 3), (2, 3), (2, 3)), ((6,),), ((),),
    ((2, 3), (4,)))
_DTYPES = ((float32,) * 3, (float32, int64, float32), (int64, float32, float32), (uint64,) * 3)


# Attributes that have no default, for examples.
_GIVEN: dict[str, Any] = {
    "axes": (1, 0), "axis": 0, "axis1": 0, "axis2": 1, "blocksize": 2, "destination": 1,
    "dtype": float64, "equation": "ij,kj->ik", "indices_or_sections": 2, "k": 2, "length": 5,
    "num_classes": 5, "op": "add", "pad_width": 1, "repeats": 2, "repetitions": 2, "scales": 2.0,
    "shift": 1, "size": 2, "source": 0, "threshold": 0.0, "value": 1.0, "window": 2, "seed": 0,
    "start": 5, "n_rows": 3, "high": 9, "low": 0, "num": 2}
_TARGETS = ((6,), (2, 3))  # for `shape`


class Example(NamedTuple):
    """Types of arguments that an operator takes, and of what it gives."""

    types: Sequence[TensorType]
    attrs: Mapping[str, Any]
    results: tuple[TensorType, ...]
    several: bool  # a tuple, even of one

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.results))
        given = [*map(str, self.types), *(f"{k}={v!r}" for k, v in self.attrs.items())]
        return f"({', '.join(given)}) is {f'({shown})' if self.several else shown}"


def example(op: Operator) -> Example | None:
    """The first of some plain arguments that fit an operator."""
    from terrazzo.graph.ir import TensorType

    needed = [p for p in op.tensor_params if p.default is p.empty]
    count = 2 if op.variadic else len(needed)
    rest = [] if op.variadic else [None for _ in op.tensor_params[len(needed):]]
    for shapes in ((), *_SHAPES):
        for dtypes in _DTYPES:
            if len(shapes) == count:
                types = [TensorType(s, t) for s, t in zip(shapes, dtypes)]
                for target in _TARGETS:
                    attrs = _attributes(op, target)
                    found = _inferred(op, [*types, *rest], attrs)
                    if found is not None:
                        chosen = {p.name: attrs[p.name] for p in op.attr_params
                                  if p.default is p.empty}
                        return Example(types, chosen, *found)
    return None


def _attributes(op: Operator, target: tuple[int, ...]) -> dict[str, Any]:
    wanted = {p.name: p.default for p in op.attr_params}
    given = {**_GIVEN, "shape": target}
    return {k: given.get(k) if v is inspect.Parameter.empty else v for k, v in wanted.items()}


def _inferred(op: Operator, types: Sequence[TensorType | None], attrs: dict[str, Any]
              ) -> tuple[tuple[TensorType, ...], bool] | None:
    from terrazzo.graph.applying import composite_types

    try:
        if op.infer is None:
            results, structure = composite_types(op, types, attrs)
            return results, not isinstance(structure, int)
        made = op.infer(*types, **attrs)
    except Exception:  # whatever an operator says to what it is not made for
        return None
    return (made, True) if isinstance(made, tuple) else ((made,), False)


def _result(op: Operator) -> Type:
    found = example(op)
    if found is None:
        return Type("Any")
    return Type(f"tuple[{', '.join('Array' for _ in found.results)}]") if found.several else ARRAY


# ---------------------------------------------------------------- help
def documentation(op: Operator) -> str:
    """What `help` says below the signature."""
    return "\n".join(_lines(op))


def _lines(op: Operator) -> Iterator[str]:
    yield op.doc or "An operator without a description."
    known = [p for p in op.attr_params
             if op.family != "user" and ATTRIBUTES.get(p.name, ("", ""))[1]]
    if known and getattr(op, "front", None) is None:
        width = max(len(p.name) for p in known)
        yield ""
        for param in known:
            yield f"{param.name:{width}}  {ATTRIBUTES[param.name][1]}"
    found = example(op) if op.family != "user" else None
    if found is not None:
        yield ""
        yield f"{op.name}{found}."
    yield ""
    gradient = ("no gradient" if not op.differentiable else "a gradient rule of its own"
                if op.grad is not None else "the gradient of its body")
    yield f"It has {gradient}. {_METHODS}"
