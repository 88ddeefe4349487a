"""What operators do that meet complex numbers: each is put together from operators on their parts.

An operator that meets a complex value while it is traced is looked up in the tables below, by its
name. Operators that only move elements, or add them, work on the pairs as they are; the others on
real and imaginary parts. Composite operators are opened, so they work where their bodies do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from terrazzo.base.nests import pack
from terrazzo.base.shapes import normalize_axes, normalize_axis, num_elements
from terrazzo.dtypes import DType, as_dtype
from terrazzo.errors import ShapeError, UnsupportedDType, user_location
from terrazzo.graph.applying import (
    COMPLEX,
    apply,
    as_value,
    common_type,
    constant,
    is_number,
    opened,
)
from terrazzo.graph.ir import Operator, Value, operator_named
from terrazzo.graph.scopes import called
from terrazzo.ops import elementwise as ew
from terrazzo.ops.complex import (
    complex_of,
    conj,
    joined,
    pairs,
    part,
    parts,
    view_as_complex,
    whole,
)
from terrazzo.ops.complex_arithmetic import (
    ARITHMETIC,
    ASKED,
    PAIRWISE,
    Parts,
    imaginary,
    multiply,
    turned,
)
from terrazzo.ops.contract import batch_matmul
from terrazzo.ops.creation import zeros_like
from terrazzo.ops.elementwise import where
from terrazzo.ops.reduce import in_type
from terrazzo.ops.shape import permute_dims, reshape, span


# ---------------------------------------------------------------- arithmetic
def _arithmetic(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    if op.name in PAIRWISE and all(_has_two(t) for t in tensors):
        dtype = common_type(tensors)
        return view_as_complex(apply(op, [_in_complex(t, dtype) for t in tensors], attrs))
    exponent = tensors[1] if op.name == "power" else None
    if isinstance(exponent, int) and 1 <= exponent <= 8:
        base = made = parts(_complex(tensors[0]))
        for _ in range(exponent - 1):
            made = multiply(made, base)
        return joined(*made)
    made = ARITHMETIC[op.name](*_operands(tensors))
    return joined(made[0], imaginary(made))


def _asked(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    return ASKED[op.name](*_operands(tensors))


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
    if attrs["op"] == "mul":
        return _running_product(_complex(tensors[0]), **{k: attrs[k] for k in (
            "axis", "exclusive", "reverse")})
    if attrs["op"] != "add":
        raise _unsupported(op, tensors)
    return _on_pairs(lambda z, a: {"axis": normalize_axis(a["axis"], z.ndim)})(op, tensors, attrs)


def _running_product(z: Value, axis: int, exclusive: bool, reverse: bool) -> Value:
    from terrazzo.ops.loops import associative_scan  # which needs operators itself

    axis = normalize_axis(axis, z.ndim)
    made = associative_scan(ew.multiply, z, axis=axis, reverse=reverse)
    if not exclusive:
        return as_value(made)
    n = z.shape[axis]
    one = operator_named("full")(value=1, dtype=z.dtype, shape=tuple(
        1 if d == axis else size for d, size in enumerate(z.shape)))
    kept = span(made, axis, 1, n) if reverse else span(made, axis, 0, n - 1)
    return as_value(operator_named("concat")(*((kept, one) if reverse else (one, kept)),
                                             axis=axis))


def _prod(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    """Halves of the elements times each other, until one is left."""
    z = _complex(tensors[0])
    if attrs["dtype"] is not None:
        z = operator_named("astype")(z, dtype=attrs["dtype"])
    axes = normalize_axes(attrs["axis"], z.ndim)
    others = [d for d in range(z.ndim) if d not in axes]
    shape = [z.shape[d] for d in others]
    count = num_elements(z.shape[d] for d in axes)
    if not isinstance(count, int):
        raise ShapeError("the number of complex factors has to be known", where=user_location())
    z = reshape(permute_dims(z, axes=(*axes, *others)), shape=(count, *shape))
    if not count:
        z = operator_named("full")(value=1, dtype=z.dtype, shape=(1, *shape))
    while count > 1:
        half = count // 2
        made = span(z, 0, 0, half) * span(z, 0, half, 2 * half)
        z = operator_named("concat")(made, span(z, 0, 2 * half, count), axis=0) if (
            count % 2) else made
        count = half + count % 2
    kept = [1 if d in axes else n for d, n in enumerate(tensors[0].shape)]
    return reshape(z, shape=tuple(kept if attrs["keepdims"] else shape))


def _convolve(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    """Parts are channels: a real window takes both alike, a complex one mixes them."""
    x, w = (as_value(t) for t in tensors)
    dtype = common_type([x, w]).real
    if not (x.dtype.is_complex and w.dtype.is_complex):
        both = [(parts(v)[0], imaginary(parts(v))) if v.dtype.is_complex else (v, v)
                for v in (x, w)]
        return joined(*(apply(op, [in_type(v[k], dtype) for v in both], attrs)
                        for k in range(2)))
    *outer, c, n, _ = (right := in_type(whole(w), dtype)).shape
    left = reshape(in_type(whole(x), dtype), shape=(*x.shape[:-1], 2 * x.shape[-1]))
    made = apply(op, [left, reshape(_mixing(right), shape=(*outer, 2 * c, 2 * n))], attrs)
    return view_as_complex(reshape(made, shape=(*made.shape[:-1], n, 2)))


def _mixing(right: Value) -> Value:
    """Of pairs [..., n, 2], [..., 2, n, 2]: what a part of a factor gives to each of a product."""
    turned_right = whole(_from(turned((part(right, 0), part(right, 1)))))
    return as_value(operator_named("stack")(right, turned_right, axis=-3))


def _blocks(z: Value, dtype: DType) -> Value:
    """Complex matrices a + ib as real ones [[a, -b], [b, a]], which multiply alike."""
    re, im = parts(z)
    re = in_type(re, dtype)
    im = re * 0 if im is None else in_type(im, dtype)
    concat = operator_named("concat")
    return as_value(concat(concat(re, -im, axis=-1), concat(im, re, axis=-1), axis=-2))


def _solve(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    """A real system of twice the size, whose unknowns are the parts one after the other."""
    a, b = (as_value(t) for t in tensors)
    dtype = common_type([a, b]).real
    re, im = parts(b)
    re = in_type(re, dtype)
    both = operator_named("concat")(re, re * 0 if im is None else in_type(im, dtype), axis=-2)
    made = apply(op, [_blocks(a, dtype), both], attrs)
    n = a.shape[-1]
    return joined(span(made, -2, 0, n), span(made, -2, n, 2 * n))


def _inverse(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    z = as_value(tensors[0])
    made = apply(op, [_blocks(z, z.dtype.real)], attrs)
    n = z.shape[-1]
    left = span(made, -1, 0, n)
    return joined(span(left, -2, 0, n), span(left, -2, n, 2 * n))


def _variance(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    """The mean of |z - mean|^2: the variances of both parts together."""
    both = [operator_named("var")(p, **attrs) for p in parts(_complex(tensors[0]))]
    made = both[0] + both[1]
    return made if op.name == "var" else as_value(ew.sqrt(made))


def _of_sizes(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    return as_value(op(ew.absolute(tensors[0]), **attrs))


def _truth(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    return as_value(op(ew.not_equal(tensors[0], 0), **attrs))


def _l1_loss(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    size = ew.absolute(ew.subtract(*tensors))
    return as_value(op(size, zeros_like(size), **attrs))


def _vecdot(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    """As in numpy and the array API: of the conjugate of the first."""
    x, y = tensors
    return as_value(operator_named("sum")(conj(x) * y, axis=attrs["axis"]))


def _lerp(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Value:
    x, y, weight = tensors
    return as_value(x + weight * (y - x))


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
        right = reshape(_mixing(right), shape=(*outer, 2 * k, 2 * n))
        left = reshape(in_type(whole(x), dtype), shape=(*x.shape[:-1], 2 * k))
    else:
        left, right = in_type(x, dtype), reshape(right, shape=(*outer, k, 2 * n))
    made = batch_matmul(left, right)
    return view_as_complex(reshape(made, shape=(*made.shape[:-1], n, 2)))


def _from(p: Parts) -> Value:
    return joined(p[0], imaginary(p))


def _swapped(x: Value) -> Value:
    axes = (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)
    return permute_dims(x, axes=axes)


def _shape_rule(z: Value, attrs: Mapping[str, Any]) -> Mapping[str, Any]:
    sizes = attrs["shape"]
    return {"shape": (*(sizes if isinstance(sizes, (tuple, list)) else (sizes,)), 2)}


_Rule = Callable[[Operator, Sequence[Any], Mapping[str, Any]], Any]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(ARITHMETIC, _arithmetic), **dict.fromkeys(ASKED, _asked),
    "astype": _astype, "where": _where, "full": _full, "place": _place, "concat": _concat,
    "cumulative": _cumulative, "batch_matmul": _matmul, "convolve": _convolve, "prod": _prod,
    "solve_matrices": _solve, "inv": _inverse, "var": _variance, "std": _variance,
    "vector_norm": _of_sizes, "any": _truth, "all": _truth, "vecdot": _vecdot, "lerp": _lerp,
    "l1_loss": _l1_loss,
    "reshape": _on_pairs(_shape_rule), "broadcast_to": _on_pairs(_shape_rule),
    "permute_dims": _on_pairs(lambda z, a: {
        "axes": (*(normalize_axis(d, z.ndim) for d in a["axes"]), z.ndim)}),
    "slice": _on_pairs(lambda z, a: {"starts": (*a["starts"], 0), "stops": (*a["stops"], 2),
                                     "steps": (*a["steps"], 1)}),
    "take_at": _on_pairs(lambda z, a: {}), "sum": _on_pairs(_sum),
    **dict.fromkeys(("gather", "scatter", "scatter_at"), _by_parts),
}
_VIEWS = ("view_as_real", "view_as_complex", "constant")
# What could be computed by their bodies, but would mean nothing: squares where sizes are meant.
_REAL_FAMILIES = ("loss", "quant", "norm")
_REAL = ("lp_pool", "global_lp_pool", "lrn", "non_max_suppression_padded")


def _apply(op: Operator, tensors: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """An operator that meets something complex; NotImplemented where it takes that as it is."""
    if op.name in _VIEWS or op.family == "control":
        return NotImplemented
    if op.name in _RULES:
        return _RULES[op.name](op, tensors, attrs)
    if op.body is None or op.family in _REAL_FAMILIES or op.name in _REAL:
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
