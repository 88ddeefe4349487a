"""Complex numbers: every operator on them is put together from operators on their parts.

A complex value is a real one whose last axis holds two parts, which is how it lies in memory:
`view_as_real` and `view_as_complex` say which of the two is meant. An operator that meets a complex
value while it is traced is looked up in the tables below, by its name. Operators that only move
elements, or add them, work on the pairs as they are; the others on real and imaginary parts.
Composite operators are opened, so they work where their bodies do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from terrazzo.dtypes import DType, as_dtype, promote
from terrazzo.errors import DTypeError, ShapeError, UnsupportedDType, user_location
from terrazzo.expr.ir import Tensor, compute
from terrazzo.graph.ir import (
    COMPLEX,
    Node,
    Operator,
    TensorType,
    Value,
    apply,
    as_value,
    called,
    common_type,
    constant,
    is_number,
    opened,
    operator_named,
)
from terrazzo.index import Index
from terrazzo.loop.interpret import convert
from terrazzo.nests import pack
from terrazzo.ops import elementwise as ew
from terrazzo.ops.contract import batch_matmul
from terrazzo.ops.creation import zeros_like
from terrazzo.ops.define import operator, primitive
from terrazzo.ops.elementwise import where
from terrazzo.ops.reduce import in_type
from terrazzo.ops.shape import broadcast_to, permute_dims, reshape, span
from terrazzo.scalar import Call, as_scalar, call
from terrazzo.shapes import broadcast_shapes, dims_text, normalize_axes, normalize_axis

Parts = tuple[Value, Value | None]  # None: a real number


# ---------------------------------------------------------------- views
def _as_real_type(x: TensorType) -> TensorType:
    if not x.dtype.is_complex:
        raise DTypeError(f"view_as_real of {x.dtype.name}, which is not complex",
                         where=user_location())
    return TensorType((*x.shape, 2), x.dtype.real)


def _as_real_numpy(x: np.ndarray, *, out: TensorType) -> np.ndarray:
    return np.stack([x.real, x.imag], -1)


def _as_complex_type(x: TensorType) -> TensorType:
    if not x.shape or x.shape[-1] != 2:
        raise ShapeError(f"view_as_complex needs a last axis of two parts, not "
                         f"{dims_text(x.shape)}", where=user_location())
    return TensorType(x.shape[:-1], complex_of(x.dtype))


def _as_complex_numpy(x: np.ndarray, *, out: TensorType) -> np.ndarray:
    made = np.empty(x.shape[:-1], np.result_type(x.dtype, np.complex64))
    made.real, made.imag = x[..., 0], x[..., 1]
    return made


def _as_real_grad(node: Node, g: Value) -> list[Value | None]:
    return [view_as_complex(g)]


@primitive(family="complex", infer=_as_real_type, reference=_as_real_numpy, kind="view",
           grad=_as_real_grad)
def view_as_real(x: Any, *, out: TensorType) -> Any:
    """complex x as real numbers, with one more axis of real and imaginary parts"""
    raise AssertionError("views of complex values are gone before kernels are made")


@primitive(family="complex", infer=_as_complex_type, reference=_as_complex_numpy, kind="view",
           grad=lambda node, g: [view_as_real(g)])
def view_as_complex(x: Any, *, out: TensorType) -> Any:
    """real numbers whose last axis holds real and imaginary parts, as complex ones"""
    raise AssertionError("views of complex values are gone before kernels are made")


def complex_of(dtype: DType) -> DType:
    """The complex type made of a real one."""
    return promote(dtype, as_dtype("complex64"))


def _pairs_type(re: TensorType, im: TensorType) -> TensorType:
    return TensorType((*broadcast_shapes(re.shape, im.shape), 2), promote(re.dtype, im.dtype))


def _pairs_numpy(re: np.ndarray, im: np.ndarray, *, out: TensorType) -> np.ndarray:
    return convert(np.stack(np.broadcast_arrays(re, im), -1), out.dtype)


@primitive(family="complex", infer=_pairs_type, reference=_pairs_numpy, unify=True,
           grad=lambda node, g: [_part(g, 0), _part(g, 1)])
def pairs(re: Any, im: Any, *, out: TensorType) -> Tensor:
    """two tensors side by side along a new last axis"""
    from terrazzo.ops.define import broadcast_load
    from terrazzo.scalar import cast

    def element(*i: Index) -> Any:
        *outer, part = i
        return Call(out.dtype, "where", (
            call("lt", as_scalar(part), 1), cast(broadcast_load(re, outer), out.dtype),
            cast(broadcast_load(im, outer), out.dtype)))

    return compute(out.shape, element, origin="pairs")


def _part(whole: Value, which: int) -> Value:
    return reshape(span(whole, -1, which, which + 1), shape=whole.shape[:-1])


def whole(z: Value) -> Value:
    """The pairs of a complex value."""
    node = z.node
    if node is not None and node.op.name == "view_as_complex":
        (seen,) = node.inputs
        assert seen is not None
        return seen
    if node is not None and node.op.name == "constant":
        value = node.attrs["value"]
        return constant(np.stack([value.real, value.imag], -1), z.dtype.real)
    return view_as_real(z)


def parts(z: Value) -> Parts:
    """Real and imaginary part; a real number has no second one."""
    if not z.dtype.is_complex:
        return z, None
    seen = whole(z)
    if seen.node is not None and seen.node.op.name == "pairs":
        re, im = (v for v in seen.node.inputs if v is not None)
        shape = z.shape
        return tuple(v if v.ndim == len(shape) and v.shape == shape else broadcast_to(
            v, shape=shape) for v in (re, im))  # type: ignore[return-value]
    return _part(seen, 0), _part(seen, 1)


def joined(re: Any, im: Any) -> Value:
    """A complex value of its parts."""
    return view_as_complex(pairs(re, im))


def _imaginary(p: Parts) -> Value:
    return ew.multiply(p[0], 0.0) if p[1] is None else p[1]


# ---------------------------------------------------------------- what users call
@operator(family="complex")
def real(x: Any) -> Any:
    """the real part"""
    return parts(x)[0]


@operator(family="complex")
def imag(x: Any) -> Any:
    """the imaginary part"""
    return parts(x)[1] if x.dtype.is_complex else zeros_like(x)


@operator(family="complex")
def conj(x: Any) -> Any:
    """x with its imaginary part negated"""
    re, im = parts(x)
    return re if im is None else joined(re, -im)


@operator(family="complex")
def angle(x: Any) -> Any:
    """the angle of a complex number, in radians from -pi to pi"""
    re, im = parts(x)
    return ew.atan2(0.0 if im is None else im, re)


@operator(family="complex", name="complex", unify=True)
def complex_(re: Any, im: Any) -> Any:
    """complex numbers of real and imaginary parts"""
    if re.dtype.is_complex or im.dtype.is_complex:
        raise DTypeError("the parts of a complex number are real", where=user_location())
    dtype = complex_of(promote(re.dtype, im.dtype)).real
    return joined(in_type(re, dtype), in_type(im, dtype))


@operator(family="complex", unify=True)
def polar(size: Any, angle: Any) -> Any:
    """complex numbers of sizes and angles"""
    return joined(size * ew.cos(angle), size * ew.sin(angle))


# ---------------------------------------------------------------- arithmetic
def _add(a: Parts, b: Parts) -> Parts:
    return a[0] + b[0], b[1] if a[1] is None else a[1] if b[1] is None else a[1] + b[1]


def _negative(a: Parts) -> Parts:
    return -a[0], None if a[1] is None else -a[1]


def _subtract(a: Parts, b: Parts) -> Parts:
    return _add(a, _negative(b)) if a[1] is None or b[1] is None else (a[0] - b[0], a[1] - b[1])


def _multiply(a: Parts, b: Parts) -> Parts:
    if a[1] is None:
        return a[0] * b[0], None if b[1] is None else a[0] * b[1]
    if b[1] is None:
        return a[0] * b[0], a[1] * b[0]
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


def _divide(a: Parts, b: Parts) -> Parts:
    """By the larger part of the divisor first (after Smith), so that no square overflows."""
    if b[1] is None:
        return a[0] / b[0], None if a[1] is None else a[1] / b[0]
    size = ew.maximum(ew.absolute(b[0]), ew.absolute(b[1]))
    size = where(ew.equal(size, 0), 1, size)
    c, d = b[0] / size, b[1] / size
    length = b[0] * c + b[1] * d
    im = _imaginary(a)
    return (a[0] * c + im * d) / length, (im * c - a[0] * d) / length


def _size(a: Parts) -> Value:
    return ew.absolute(a[0]) if a[1] is None else ew.hypot(a[0], a[1])


def _exp(a: Parts) -> Parts:
    grown, im = ew.exp(a[0]), _imaginary(a)
    return grown * ew.cos(im), grown * ew.sin(im)


def _log(a: Parts) -> Parts:
    """log |z| from |z|^2 - 1 where that is small, which the size itself would lose."""
    re, im = a[0], _imaginary(a)
    size = ew.hypot(re, im)
    large, small = ew.maximum(ew.absolute(re), ew.absolute(im)), ew.minimum(
        ew.absolute(re), ew.absolute(im))
    near = ew.bitwise_and(ew.greater(size, 0.7), ew.less(size, 1.5))
    beyond = where(near, (large - 1) * (large + 1) + small * small, 0)
    return where(near, 0.5 * ew.log1p(beyond), ew.log(size)), ew.atan2(im, re)


def _sqrt(a: Parts) -> Parts:
    """The larger part of the root from a sum that does not cancel, the other from the product."""
    re, im = a[0], _imaginary(a)
    larger = ew.sqrt(0.5 * (ew.absolute(re) + ew.hypot(re, im)))
    nothing = ew.equal(larger, 0)
    smaller = ew.absolute(im) / where(nothing, 1, 2 * larger)
    right = ew.greater_equal(re, 0)
    return where(right, larger, smaller), ew.copysign(where(right, smaller, larger), im)


def _tanh(a: Parts) -> Parts:
    t, im = ew.tanh(a[0]), _imaginary(a)
    c, s = ew.cos(im), ew.sin(im)
    length = c * c + t * t * (s * s)
    return t / length, s * c * (1 - t * t) / length


def _turned(a: Parts) -> Parts:
    """i * z"""
    return -_imaginary(a), a[0]


def _turned_back(a: Parts) -> Parts:
    return _imaginary(a), -a[0]


def _power(a: Parts, b: Parts) -> Parts:
    """exp(b * log(a)); what 0 is raised to decides between 0 and 1."""
    grown = _exp(_multiply(_log(a), b))
    zero = ew.equal(_size(a), 0)
    start = where(ew.equal(_size(b), 0), 1, 0)
    return where(zero, start, grown[0]), where(zero, 0, _imaginary(grown))


_ARITHMETIC: dict[str, Callable[..., Parts]] = {
    "add": _add, "subtract": _subtract, "multiply": _multiply, "divide": _divide,
    "negative": _negative, "exp": _exp, "log": _log, "sqrt": _sqrt, "power": _power,
    "tanh": _tanh,
    "sinh": lambda a: (ew.sinh(a[0]) * ew.cos(_imaginary(a)),
                       ew.cosh(a[0]) * ew.sin(_imaginary(a))),
    "cosh": lambda a: (ew.cosh(a[0]) * ew.cos(_imaginary(a)),
                       ew.sinh(a[0]) * ew.sin(_imaginary(a))),
    "sin": lambda a: (ew.sin(a[0]) * ew.cosh(_imaginary(a)),
                      ew.cos(a[0]) * ew.sinh(_imaginary(a))),
    "cos": lambda a: (ew.cos(a[0]) * ew.cosh(_imaginary(a)),
                      -(ew.sin(a[0]) * ew.sinh(_imaginary(a)))),
    "tan": lambda a: _turned_back(_tanh(_turned(a))),
    "sigmoid": lambda a: _divide((a[0] * 0 + 1, None), _add((a[0] * 0 + 1, None),
                                                            _exp(_negative(a)))),
    "sign": lambda a: _divide(a, (where(ew.equal(_size(a), 0), 1, _size(a)), None)),
}
_ASKED: dict[str, Callable[..., Value]] = {
    "absolute": _size,
    "equal": lambda a, b: ew.bitwise_and(ew.equal(a[0], b[0]), ew.equal(_zero(a), _zero(b))),
    "not_equal": lambda a, b: ew.bitwise_or(ew.not_equal(a[0], b[0]),
                                            ew.not_equal(_zero(a), _zero(b))),
    "isnan": lambda a: ew.bitwise_or(ew.isnan(a[0]), ew.isnan(a[1])),
    "isinf": lambda a: ew.bitwise_or(ew.isinf(a[0]), ew.isinf(a[1])),
    "isfinite": lambda a: ew.bitwise_and(ew.isfinite(a[0]), ew.isfinite(a[1])),
}


_PAIRWISE = ("add", "subtract", "negative")  # of both parts alike


def _zero(a: Parts) -> Any:
    return 0 if a[1] is None else a[1]


def _arithmetic(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    if op.name in _PAIRWISE and all(_has_two(t) for t in tensors):
        dtype = common_type(tensors)
        return view_as_complex(apply(op, [_in_complex(t, dtype) for t in tensors], attrs))
    exponent = tensors[1] if op.name == "power" else None
    if isinstance(exponent, int) and 1 <= exponent <= 8:
        base = made = parts(_complex(tensors[0]))
        for _ in range(exponent - 1):
            made = _multiply(made, base)
        return joined(*made)
    made = _ARITHMETIC[op.name](*_operands(tensors))
    return joined(made[0], _imaginary(made))


def _asked(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    return _ASKED[op.name](*_operands(tensors))


def _operands(tensors: Sequence[Any]) -> list[Parts]:
    """The parts of all operands in one real type."""
    dtype = common_type(tensors).real
    found = []
    for t in tensors:
        re, im = parts(_complex(t) if _has_two(t) else as_value(t, dtype if is_number(t) else None))
        found.append((in_type(re, dtype), None if im is None else in_type(im, dtype)))
    return found


def _has_two(x: Any) -> bool:
    return x.dtype.is_complex if isinstance(x, Value) else isinstance(x, complex) or (
        hasattr(x, "dtype") and as_dtype(x.dtype).is_complex)


def _complex(x: Any) -> Value:
    """A complex value of anything, in its own type."""
    if isinstance(x, complex) and not isinstance(x, np.generic):
        return constant(np.asarray(x, np.complex128))
    value = as_value(x)
    if value.dtype.is_complex:
        return value
    dtype = complex_of(value.dtype).real
    return joined(in_type(value, dtype), in_type(value, dtype) * 0)


def _in_complex(x: Any, dtype: DType) -> Value:
    """The pairs of anything in a complex type."""
    if not _has_two(x):
        re = as_value(x, dtype.real) if is_number(x) else in_type(as_value(x), dtype.real)
        return pairs(re, re * 0)
    return in_type(whole(_complex(x)), dtype.real)


# ---------------------------------------------------------------- moving, choosing, adding
def _astype(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    target = as_dtype(attrs["dtype"])
    if target.is_complex:
        return view_as_complex(_in_complex(tensors[0], target))
    re, im = parts(_complex(tensors[0]))
    if target.is_bool:
        return ew.bitwise_or(ew.not_equal(re, 0), ew.not_equal(im, 0))
    return in_type(re, target)


def _where(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    condition, *choices = tensors
    dtype = common_type(choices)
    x, y = (_in_complex(c, dtype) for c in choices)
    test = as_value(condition)
    return view_as_complex(where(reshape(test, shape=(*test.shape, 1)), x, y))


def _full(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    dtype = as_dtype(attrs["dtype"]) if attrs["dtype"] is not None else as_dtype("complex64")
    number = complex(attrs["value"])
    re, im = (operator_named("full")(shape=attrs["shape"], value=v, dtype=dtype.real)
              for v in (number.real, number.imag))
    return joined(re, im)


def _on_pairs(change: Callable[[Value, Mapping[str, Any]], Mapping[str, Any]]) -> Any:
    """A rule that applies the operator to the pairs, with attributes that leave the parts alone."""

    def rule(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
        z, *rest = tensors
        z = _complex(z)
        return view_as_complex(apply(op, [whole(z), *rest], {**attrs, **change(z, attrs)}))

    return rule


def _by_parts(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    """A rule that applies the operator to both parts of everything complex."""
    split = [parts(_complex(t)) if t is not None and _has_two(t) else (t, t) for t in tensors]
    numbers = {k: v for k, v in attrs.items() if isinstance(v, complex)}
    made = [apply(op, [s[k] for s in split], {
        **attrs, **{n: v.imag if k else v.real for n, v in numbers.items()}}) for k in range(2)]
    return joined(*made)


def _place(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    value = complex(attrs["value"])
    if value:
        return _by_parts(op, tensors, {**attrs, "value": value})
    return _on_pairs(lambda z, a: {"shape": (*a["shape"], 2), "starts": (*a["starts"], 0),
                                   "steps": (*a["steps"], 1), "value": 0.0})(op, tensors, attrs)


def _concat(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    dtype = common_type(tensors)
    rank = max(as_value(t).ndim for t in tensors)
    return view_as_complex(apply(op, [_in_complex(t, dtype) for t in tensors],
                                 {"axis": normalize_axis(attrs["axis"], rank)}))


def _sum(z: Value, attrs: Mapping[str, Any]) -> Mapping[str, Any]:
    dtype = attrs["dtype"]
    return {"axis": normalize_axes(attrs["axis"], z.ndim),
            "dtype": None if dtype is None else as_dtype(dtype).real}


def _cumulative(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    if attrs["op"] != "add":
        raise _unsupported(op, tensors)
    return _on_pairs(lambda z, a: {"axis": normalize_axis(a["axis"], z.ndim)})(op, tensors, attrs)


def _matmul(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    """One real product: the pairs of x times a matrix with the parts of y twice."""
    x, y = (as_value(t) for t in tensors)
    dtype = common_type([x, y]).real
    x, y = (_swapped(v) if attrs[k] else v
            for v, k in ((x, "transpose_x"), (y, "transpose_y")))
    if not y.dtype.is_complex:
        return joined(*(batch_matmul(in_type(p, dtype), in_type(y, dtype))
                        for p in parts(x) if p is not None))
    right = in_type(whole(y), dtype)  # [..., k, n, 2]
    *outer, k, n, _ = right.shape
    if x.dtype.is_complex:
        # Row 2 j + p and column 2 l + q: what part p of x[j] gives to part q of the result.
        turned = whole(_from(_turned((_part(right, 0), _part(right, 1)))))
        both = operator_named("stack")(right, turned, axis=-3)  # [..., k, 2, n, 2]
        right = reshape(both, shape=(*outer, 2 * k, 2 * n))
        left = reshape(in_type(whole(x), dtype), shape=(*x.shape[:-1], 2 * k))
    else:
        left, right = in_type(x, dtype), reshape(right, shape=(*outer, k, 2 * n))
    made = batch_matmul(left, right)
    return view_as_complex(reshape(made, shape=(*made.shape[:-1], n, 2)))


def _from(p: Parts) -> Value:
    return joined(p[0], _imaginary(p))


def _swapped(x: Value) -> Value:
    axes = (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)
    return permute_dims(x, axes=axes)


def _shape_rule(z: Value, attrs: Mapping[str, Any]) -> Mapping[str, Any]:
    sizes = attrs["shape"]
    return {"shape": (*(sizes if isinstance(sizes, (tuple, list)) else (sizes,)), 2)}


_Rule = Callable[[Operator, Sequence[Any], Mapping[str, Any]], Any]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_ARITHMETIC, _arithmetic), **dict.fromkeys(_ASKED, _asked),
    "astype": _astype, "where": _where, "full": _full, "place": _place, "concat": _concat,
    "cumulative": _cumulative, "batch_matmul": _matmul,
    "reshape": _on_pairs(_shape_rule), "broadcast_to": _on_pairs(_shape_rule),
    "permute_dims": _on_pairs(lambda z, a: {
        "axes": (*(normalize_axis(d, z.ndim) for d in a["axes"]), z.ndim)}),
    "slice": _on_pairs(lambda z, a: {"starts": (*a["starts"], 0), "stops": (*a["stops"], 2),
                                     "steps": (*a["steps"], 1)}),
    "take_at": _on_pairs(lambda z, a: {}), "sum": _on_pairs(_sum),
    **dict.fromkeys(("gather", "scatter", "scatter_at"), _by_parts),
}
_VIEWS = ("view_as_real", "view_as_complex", "constant")


def _apply(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """An operator that meets something complex; NotImplemented where it takes that as it is."""
    if op.name in _VIEWS or op.family == "control":
        return NotImplemented
    if op.name in _RULES:
        return _RULES[op.name](op, tensors, attrs)
    if op.body is None:
        raise _unsupported(op, tensors)
    if op.family == "user" and op.grad is not None:
        return NotImplemented  # a node of its own, as its gradient is
    if op.unify:
        dtype = common_type(tensors)
        tensors = [_complex(t) if isinstance(t, complex) else as_value(t, dtype.real)
                   if is_number(t) else t for t in tensors]
    made, structure = opened(op, [None if t is None else as_value(t) for t in tensors], attrs)
    return pack(structure, made)


def _unsupported(op: Operator, tensors: Sequence[Any]) -> UnsupportedDType:
    names = ", ".join(str(v.type) if isinstance(v, Value) else type(v).__name__ for v in tensors)
    name = (called() or op).name  # what was called, whatever it is made of
    return UnsupportedDType(f"there is no {name} of complex numbers ({names})",
                            where=user_location(),
                            hint="take tz.real, tz.imag or tz.abs of them first")


COMPLEX.append(_apply)
