"""Constant factors, offsets and borders around convolutions and matrix products, moved into them.

What follows a layer with constant weights channel by channel (a batch norm, a factor, a bias) is a
layer with other weights. The new weights are worked out in float64 and rounded once, so a result
differs from the old one by roundings of its terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from terrazzo.graph.applying import constant
from terrazzo.graph.ir import Node, Value
from terrazzo.graph.passes.parts import made_by, op, operands
from terrazzo.graph.patterns import P, constant_array, same_shape, wildcards
from terrazzo.graph.rewrite import Rule, RuleTable
from terrazzo.index import Index

x, y, c = wildcards("x y c")

_LAYERS = ("conv", "conv_transpose")
_PRODUCTS = ("matmul", "batch_matmul")


# ---------------------------------------------------------------- layers with constant weights
@dataclass(frozen=True, eq=False)
class Layer:
    """A convolution or matrix product with constant weights, and perhaps a bias, by channel."""

    node: Node
    weight: np.ndarray
    bias: np.ndarray | None  # float64, one number a channel of the result
    axis: int  # of channels in the result, from the end

    @property
    def channels(self) -> int:
        size = self.node.types[0].shape[self.axis]
        assert isinstance(size, int)
        return size

    def scaled(self, factor: np.ndarray) -> Layer:
        """The layer whose results are `factor` times as large."""
        wide = self.weight.astype(np.float64)
        name, rank = self.node.op.name, wide.ndim
        if name == "conv":
            wide = wide * factor.reshape(-1, *(1,) * (rank - 1))
        elif name == "conv_transpose":  # [inputs, outputs / groups, *sizes]
            groups = self.node.attrs["groups"]
            grouped = wide.reshape(groups, -1, *wide.shape[1:])
            wide = (grouped * factor.reshape(groups, 1, -1, *(1,) * (rank - 2))).reshape(wide.shape)
        elif self.node.attrs.get("transpose_y"):
            wide = wide * factor[:, None]
        else:
            wide = wide * factor
        bias = None if self.bias is None else self.bias * factor
        return replace(self, weight=wide, bias=bias)

    def offset(self, offset: np.ndarray) -> Layer:
        """The layer whose results are `offset` larger."""
        return replace(self, bias=offset if self.bias is None else self.bias + offset)

    def built(self) -> Value:
        node, dtype = self.node, self.node.types[0].dtype
        source = operands(node)[0]
        weight = constant(self.weight.astype(dtype.np), dtype)
        bias = None if self.bias is None else constant(self.bias.astype(dtype.np), dtype)
        if node.op.name in _LAYERS:
            return op(node.op.name, source, weight, bias, **node.attrs)
        product = op(node.op.name, source, weight, **node.attrs)
        return product if bias is None else op("add", product, bias)


def _layer(value: Value) -> Layer | None:
    """The layer that makes a value, if all its parameters are constants of its type."""
    convolution = made_by(value, *_LAYERS)
    if convolution is not None:
        _, weight, bias = (constant_array(v) for v in convolution.inputs)
        if weight is None or (bias is None and convolution.inputs[2] is not None):
            return None
        wide = None if bias is None else bias.astype(np.float64)
        return _of_float(Layer(convolution, weight, wide, 1 - value.ndim))
    added = made_by(value, "add")
    readings: list[tuple[Value, Value | None]] = [(value, None)]
    if added is not None:
        first, second = operands(added)
        readings = [(first, second), (second, first)]
    for total, summand in readings:
        product = made_by(total, *_PRODUCTS)
        weight = None if product is None else constant_array(operands(product)[1])
        if product is None or weight is None or weight.ndim != 2 or (
                not same_shape(total.shape, value.shape) or total.ndim < 2):
            continue
        layer = Layer(product, weight, None, -1)
        offset = None if summand is None else _per_channel(summand, total, -1)
        if summand is None or offset is not None:
            return _of_float(replace(layer, bias=offset))
    return None


def _of_float(layer: Layer) -> Layer | None:
    """Not in half types: weights that are rounded a second time lose more than results do."""
    dtype = layer.node.types[0].dtype
    fits = dtype.is_float and dtype.compute is dtype and layer.weight.dtype == dtype.np
    return layer if fits else None


def _per_channel(value: Value | None, like: Value, axis: int) -> np.ndarray | None:
    """A constant that varies along one axis only, counted from the end, as a float64 vector."""
    array = constant_array(value)
    size = like.shape[axis]
    if array is None or not isinstance(size, int) or array.dtype.kind in "bc":
        return None
    if array.ndim > like.ndim or any(n != 1 for d, n in enumerate(array.shape)
                                     if d - array.ndim != axis):
        return None
    return np.broadcast_to(array.reshape(-1).astype(np.float64), (size,))


# ---------------------------------------------------------------- after a layer
def _factor_after(y: Value, c: Value, node: Node) -> Value | None:
    layer = _layer(y)
    factor = None if layer is None else _per_channel(c, y, layer.axis)
    if layer is None or factor is None or not np.isfinite(factor).all():
        return None
    if node.op.name == "divide":
        if not factor.all():
            return None
        factor = 1 / factor
    if layer.node.op.name in _PRODUCTS and (factor == factor[0]).all():
        return None  # one number for all costs nothing where the product is stored
    return layer.scaled(factor).built()


def _offset_after(y: Value, c: Value, node: Node) -> Value | None:
    if made_by(y, *_LAYERS) is None:
        return None  # a product's bias is an addition already
    layer = _layer(y)
    offset = None if layer is None else _per_channel(c, y, layer.axis)
    if layer is None or offset is None:
        return None
    return layer.offset(-offset if node.op.name == "subtract" else offset).built()


def _line(norm: Node) -> tuple[np.ndarray, np.ndarray] | None:
    """The factor and offset that a batch norm with constant statistics amounts to."""
    parameters = [constant_array(v) for v in norm.inputs[1:]]
    if any(p is None and v is not None for p, v in zip(parameters, norm.inputs[1:], strict=True)):
        return None
    mean, variance, weight, bias = (None if p is None else p.astype(np.float64)
                                    for p in parameters)
    assert mean is not None and variance is not None
    if not (variance + norm.attrs["eps"] > 0).all():
        return None
    factor = (1.0 if weight is None else weight) / np.sqrt(variance + norm.attrs["eps"])
    return factor, (0.0 if bias is None else bias) - mean * factor


def _norm_after(y: Value, node: Node) -> Value | None:
    layer, line = _layer(y), _line(node)
    if layer is None or line is None or node.attrs["axis"] % y.ndim != layer.axis % y.ndim:
        return None
    return layer.scaled(line[0]).offset(line[1]).built()


# ---------------------------------------------------------------- before a convolution
def _norm_before(x: Value, y: Value, node: Node) -> Value | None:
    """A batch norm before a convolution that sees no border: zeros there would be normalised."""
    layer = _layer(node.outputs[0])
    line = None if y.node is None else _line(y.node)
    if layer is None or line is None or y.node is None or y.node.attrs["axis"] % y.ndim != 1 or any(
            pair != (0, 0) for pair in _pads(node, y.ndim - 2)):
        return None
    wide = layer.weight.astype(np.float64)  # [outputs, channels / groups, *sizes]
    groups = node.attrs["groups"]
    grouped = wide.reshape(groups, -1, *wide.shape[1:])
    factor, offset = (v.reshape(groups, 1, -1, *(1,) * (wide.ndim - 2)) for v in line)
    sums = (grouped * offset).sum(axis=tuple(range(2, grouped.ndim))).reshape(-1)
    moved = replace(layer, weight=(grouped * factor).reshape(wide.shape)).offset(sums).built()
    assert moved.node is not None
    return op("conv", x, *moved.node.inputs[1:], **node.attrs)


def _pads(node: Node, rank: int) -> list[tuple[Index, Index]]:
    """A convolution's padding, however it is written, as pairs."""
    padding = node.attrs["padding"]
    given: Sequence[object] = (padding,) * rank if isinstance(padding, int) else tuple(padding)
    return [(p, p) if isinstance(p, int) else tuple(p) for p in given]  # type: ignore[misc, arg-type]


def _border_before(x: Value, y: Value, node: Node) -> Value | None:
    """Zeros around images are what padding means."""
    border = y.node
    assert border is not None
    starts, steps = border.attrs["starts"], border.attrs["steps"]
    ends = [n - a - m for n, a, m in zip(y.shape, starts, x.shape, strict=True)]
    if border.attrs["value"] != 0 or any(s != 1 for s in steps) or any(
            n != 0 for n in (*starts[:2], *ends[:2])):
        return None
    pads = [(a + lo, b + hi) for a, b, (lo, hi) in zip(
        starts[2:], ends[2:], _pads(node, x.ndim - 2), strict=True)]
    return op("conv", x, *node.inputs[1:], **{**node.attrs, "padding": tuple(pads)})


_made = P.one_of(*_LAYERS, *_PRODUCTS, "add")(...).named("y").once()

CONVOLUTION = RuleTable((
    Rule("batch norm into the layer before", P.batch_norm(_made, ...), _norm_after),
    Rule("factor into the layer before", P.multiply(_made, c), _factor_after),
    Rule("divisor into the layer before", P.divide(_made, c), _factor_after),
    Rule("offset into the convolution before", P.one_of("add", "subtract")(_made, c),
         _offset_after),
    Rule("batch norm into the convolution after", P.conv(P.batch_norm(x, ...).named("y").once(),
                                                         ...), _norm_before),
    Rule("border into the convolution after", P.conv(P.place(x).named("y"), ...),
         _border_before),
))
