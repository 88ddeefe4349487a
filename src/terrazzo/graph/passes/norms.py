"""Layer norm and RMS norm as exporters take them apart, found again.

    centred = x - mean(x);  centred / sqrt(mean(centred**2) + eps) * weight + bias
    x / sqrt(mean(x**2) + eps) * weight

with squares as powers or products, and the root as a divisor, a reciprocal or a negative power.
Half types come with conversions to float32 around; the operators do that by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from terrazzo.base.shapes import normalize_axes, num_elements
from terrazzo.graph.ir import Node, Value
from terrazzo.graph.passes.parts import made_by, op, operands
from terrazzo.graph.patterns import P, same_shape, splat, wildcards
from terrazzo.graph.rewrite import Rule, RuleTable

x, parameter = wildcards("x parameter")

_NORMS = ("layer_norm", "rms_norm")


# ---------------------------------------------------------------- parts of the pattern
def _plain(value: Value) -> Value:
    """A value before conversions from one float type to another."""
    while (node := made_by(value, "astype")) is not None:
        (source,) = operands(node)
        if not (source.dtype.is_float and value.dtype.is_float):
            break
        value = source
    return value


def _is(a: Value, b: Value) -> bool:
    return _plain(a) is _plain(b)


def _mean(value: Value) -> tuple[Value, tuple[int, ...]] | None:
    """What a value is the mean of, and over which axes, if those are the last ones and are kept."""
    node = made_by(_plain(value), "divide")
    total = None if node is None else made_by(_plain(operands(node)[0]), "sum")
    if node is None or total is None or not total.attrs["keepdims"]:
        return None
    (source,) = operands(total)
    axes = normalize_axes(total.attrs["axis"], source.ndim)
    if axes != tuple(range(source.ndim - len(axes), source.ndim)):
        return None
    size = num_elements(source.shape[d] for d in axes)
    return (source, axes) if splat(operands(node)[1]) == size else None


def _square(value: Value) -> Value | None:
    """What a value is the square of."""
    node = made_by(_plain(value), "power", "multiply")
    if node is None:
        return None
    base, other = operands(node)
    squares = splat(other) == 2 if node.op.name == "power" else _is(base, other)
    return base if squares else None


def _root(value: Value) -> Value | None:
    """What a value is the square root of."""
    node = made_by(_plain(value), "sqrt", "power")
    if node is None or (node.op.name == "power" and splat(operands(node)[1]) != 0.5):
        return None
    return operands(node)[0]


def _inverse_root(value: Value) -> Value | None:
    """What a value is one over the square root of."""
    node = made_by(_plain(value), "rsqrt", "divide", "power")
    if node is None:
        return None
    first, *rest = operands(node)
    if node.op.name == "rsqrt":
        return first
    if node.op.name == "power":
        return first if splat(rest[0]) == -0.5 else None
    return _root(rest[0]) if splat(first) == 1 else None


def _mean_square(value: Value) -> tuple[Value, tuple[int, ...], float] | None:
    """v, the axes and eps of mean(v**2) + eps."""
    node = made_by(_plain(value), "add")
    if node is None:
        return None
    for mean, other in (operands(node), operands(node)[::-1]):
        eps, found = splat(other), _mean(mean)
        source = None if found is None else _square(found[0])
        if isinstance(eps, float) and eps >= 0 and found is not None and source is not None:
            return source, found[1], eps
    return None


def _divided(node: Node) -> Iterator[tuple[Value, Value, Value | None]]:
    """Readings of a node as v / sqrt(s) * w: v, s and w, which may be missing."""
    a, b = operands(node)
    if node.op.name == "divide":
        inside = _root(b)
        if inside is not None:
            yield a, inside, None
        return
    for v, factor in ((a, b), (b, a)):
        inside = _inverse_root(factor)
        if inside is not None:
            yield v, inside, None
        scaled = made_by(factor, "multiply")
        for inverse, weight in () if scaled is None else (
                operands(scaled), operands(scaled)[::-1]):
            inside = _inverse_root(inverse)
            if inside is not None:
                yield v, inside, weight


# ---------------------------------------------------------------- the norms without parameters
def _normalised(node: Node) -> Value | None:
    """Either norm: they differ in whether what is divided was centred."""
    for v, inside, weight in _divided(node):
        found = _mean_square(inside)
        if found is None or not _is(found[0], v) or not v.dtype.is_float:
            continue
        _, axes, eps = found
        centred = made_by(_plain(v), "subtract")
        whole = None if centred is None else operands(centred)[0]
        mean = None if centred is None else _mean(operands(centred)[1])
        if whole is not None and mean is not None and _is(mean[0], whole) and mean[1] == axes:
            name, source = "layer_norm", whole
        else:
            name, source = "rms_norm", v
        if weight is not None and not _fits(weight, source, axes):
            continue
        return op(name, source, weight, axis=axes, eps=eps)
    return None


def _named(name: str) -> Any:
    """A rule's `build` for one of the two norms, so that the report says which was found."""
    def build(node: Node) -> Value | None:
        found = _normalised(node)
        return found if made_by(found, name) else None

    return build


# ---------------------------------------------------------------- their parameters
def _fits(weight: Value, source: Value, axes: tuple[int, ...]) -> bool:
    return weight.dtype.is_float and same_shape(weight.shape, source.shape[axes[0]:])


def _as_parameter(value: Value, source: Value, axes: tuple[int, ...]) -> Value | None:
    """A factor or summand in the shape of the normalised axes, if it varies along those only."""
    while value.ndim > len(axes) and value.shape[0] == 1:
        value = op("reshape", value, shape=value.shape[1:])
    return value if _fits(value, source, axes) else None


def _with_parameter(inner: Value, parameter: Value, place: int) -> Value | None:
    """A norm with one more parameter, at a place of its inputs that is still free."""
    node = inner.node
    assert node is not None
    source, *given = node.inputs
    assert source is not None
    axes = normalize_axes(node.attrs["axis"], source.ndim)
    fitting = _as_parameter(parameter, source, axes)
    if place > len(given) or fitting is None or any(p is not None for p in given[place - 1:]):
        return None
    given[place - 1] = fitting
    return op(node.op.name, source, *given, **node.attrs)


def _widened(inner: Value, x: Value, node: Node) -> Value | None:
    """Norms of half types are worked out in float32 as they are."""
    wide, result = inner.node, node.types[0].dtype
    if wide is None or not x.dtype.is_float or x.dtype.compute is not inner.dtype or (
            result is not x.dtype):
        return None
    return op(wide.op.name, x, *wide.inputs[1:], **wide.attrs)


_inner = P.one_of(*_NORMS)(...).named("inner").once()

NORMS = RuleTable((
    Rule("layer norm", P.one_of("divide", "multiply")(...), _named("layer_norm"), "extended"),
    Rule("rms norm", P.one_of("divide", "multiply")(...), _named("rms_norm"), "extended"),
    Rule("norm of a half type", P.astype(P.one_of(*_NORMS)(P.astype(x), ...).named("inner").once()),
         _widened, "extended", "rounded once, at the end"),
    Rule("weight of a norm", P.multiply(_inner, parameter),
         lambda inner, parameter: _with_parameter(inner, parameter, 1), "extended"),
    Rule("bias of a norm", P.add(_inner, parameter),
         lambda inner, parameter: _with_parameter(inner, parameter, 2), "extended"),
))
