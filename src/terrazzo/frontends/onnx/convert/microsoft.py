"""Operators of com.microsoft that onnxruntime's optimiser and exporters write: fused layers.

Attention has a file of its own, `microsoft_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from terrazzo.dtypes import float32, int32, int64
from terrazzo.frontends.onnx.convert.contract import gemm_result
from terrazzo.frontends.onnx.convert.conv import conv
from terrazzo.frontends.onnx.convert.norm import layer_normalized, rms_normalized
from terrazzo.frontends.onnx.registry import MICROSOFT, Call, Result, converts
from terrazzo.graph.ir import Value
from terrazzo.graph.reach import must_reach
from terrazzo.ops import activation as a
from terrazzo.ops import elementwise as e
from terrazzo.ops.arrange import tril, triu
from terrazzo.ops.contract import batch_matmul, matmul
from terrazzo.ops.creation import arange, full
from terrazzo.ops.joining import split
from terrazzo.ops.lookups import take
from terrazzo.ops.norm import group_norm
from terrazzo.ops.reduce import in_type, sum_, wide_mean, widened
from terrazzo.ops.shape import moveaxis

# ---------------------------------------------------------------- activations
_GELUS: dict[str, Callable[[Value], Value]] = {
    "Gelu": lambda x: a.gelu(x), "BiasGelu": lambda x: a.gelu(x),
    "FastGelu": lambda x: a.gelu(x, approximate="tanh"),
}


@converts(*_GELUS, domain=MICROSOFT)
def gelu_of_biased(call: Call) -> Value:
    x, bias = call.value(0), call.optional(1)
    return _GELUS[call.node.op_type](x if bias is None else x + bias)


@converts("QuickGelu", domain=MICROSOFT)
def quick_gelu(call: Call) -> Value:
    x = widened(call.value(0))
    return in_type(x * e.sigmoid(call.attr("alpha", 1.702) * x), call.value(0).dtype)


@converts("BiasSplitGelu", domain=MICROSOFT)
def bias_split_gelu(call: Call) -> Value:
    value, gate = split(call.value(0) + call.value(1), indices_or_sections=2, axis=-1)
    return value * a.gelu(gate)


@converts("BiasAdd", domain=MICROSOFT)
def bias_add(call: Call) -> Value:
    return call.value(0) + call.value(1) + call.value(2)


# What layers may end in; parameters are those of the activation by itself, in order.
_ENDINGS: dict[str, Callable[..., Value]] = {
    "": lambda x: x,
    "Relu": lambda x: a.relu(x),
    "Tanh": lambda x: e.tanh(x),
    "Sigmoid": lambda x: e.sigmoid(x),
    "LeakyRelu": lambda x, alpha=0.01: a.leaky_relu(x, negative_slope=alpha),
    "Clip": lambda x, low, high: a.hardtanh(x, min=low, max=high),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: a.hardsigmoid(x, alpha=alpha, beta=beta),
    "Elu": lambda x, alpha=1.0: a.elu(x, alpha=alpha),
    "Softplus": lambda x: a.softplus(x, threshold=float("inf")),
    "Softsign": lambda x: a.softsign(x),
}


def ended(call: Call, x: Value, parameters: Sequence[float]) -> Value:
    """What the activation that a node ends in makes of a value."""
    name = call.attr("activation", "")
    if name not in _ENDINGS:
        call.unsupported(f"ends in the activation {name!r}")
    return _ENDINGS[name](x, *parameters)


# ---------------------------------------------------------------- products
@converts("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def fused_matmul(call: Call) -> Value:
    x, y = _behind_batch(call, 0, "A"), _behind_batch(call, 1, "B")
    if min(x.ndim, y.ndim) < 2:  # a vector has nothing to transpose
        product = matmul(x, y)
    else:
        product = batch_matmul(x, y, transpose_x=bool(call.attr("transA", 0)),
                               transpose_y=bool(call.attr("transB", 0)))
    alpha = call.attr("alpha", 1.0)
    return product if alpha == 1.0 else in_type(alpha * product, product.dtype)


def _behind_batch(call: Call, i: int, side: str) -> Value:
    """An operand whose first axis may be one of its matrices'."""
    x = call.value(i)
    return moveaxis(x, source=0, destination=-2) if call.attr(f"transBatch{side}", 0) else x


@converts("FusedGemm", domain=MICROSOFT)
def fused_gemm(call: Call) -> Value:
    product = gemm_result(call.value(0), call.value(1), call.optional(2), call.attr("alpha", 1.0),
                          call.attr("beta", 1.0), bool(call.attr("transA", 0)),
                          bool(call.attr("transB", 0)))
    given = (call.attr(f"activation_{name}") for name in ("alpha", "beta", "gamma"))
    return ended(call, product, [g for g in given if g is not None])


@converts("GemmFastGelu", domain=MICROSOFT)
def gemm_fast_gelu(call: Call) -> Value:
    product, bias = matmul(call.value(0), call.value(1)), call.optional(2)
    return a.gelu(product if bias is None else product + bias, approximate="tanh")


@converts("FusedConv", domain=MICROSOFT)
def fused_conv(call: Call) -> Value:
    y = conv(call)
    assert isinstance(y, Value)
    added = call.optional(3)
    return ended(call, y if added is None else y + added, call.attr("activation_params", []))


# ---------------------------------------------------------------- norms
@converts("LayerNormalization", domain=MICROSOFT)
def layer_normalization(call: Call) -> Result:
    return layer_normalized(call.value(0), call.optional(1), call.optional(2),
                            call.attr("axis", -1), call.attr("epsilon", 1e-5))


# onnxruntime keeps this one among the operators of ai.onnx.
@converts("SimplifiedLayerNormalization")
@converts("SimplifiedLayerNormalization", domain=MICROSOFT)
def simplified_layer_normalization(call: Call) -> Result:
    x, axis, eps = call.value(0), call.attr("axis", -1), call.attr("epsilon", 1e-5)
    return rms_normalized(x, call.optional(1), axis, eps), _inverse_rms(x, axis, eps)


def _inverse_rms(x: Value, axis: int, eps: float) -> Value:
    wide = widened(x)
    axes = tuple(range(axis % x.ndim, x.ndim))
    return in_type(e.rsqrt(wide_mean(wide * wide, axes) + eps), float32)


@converts("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(call: Call) -> Result:
    total = _skipped(call, 4)
    y, mean, inverse = layer_normalized(total, call.value(2), call.optional(3), -1,
                                        call.attr("epsilon", 1e-12))
    return in_type(y, call.value(0).dtype), mean, inverse, in_type(total, call.value(0).dtype)


@converts("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_normalization(call: Call) -> Result:
    total, eps = _skipped(call, 3), call.attr("epsilon", 1e-12)
    y, dtype = rms_normalized(total, call.value(2), -1, eps), call.value(0).dtype
    return in_type(y, dtype), None, _inverse_rms(total, -1, eps), in_type(total, dtype)


def _skipped(call: Call, bias: int) -> Value:
    """The sum of the input, what skipped a layer, and maybe a bias, before it is rounded."""
    total = widened(call.value(0)) + widened(call.value(1))
    return total + widened(call.value(bias)) if call.has(bias) else total


@converts("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_normalization(call: Call) -> Result:
    ids = call.value(0)
    words, places = call.value(2), call.value(3)
    batch, length = ids.shape
    positions = call.value(8) if call.has(8) else arange(start=length, dtype=int64)
    must_reach(ids, words.shape[0], wraps=False)
    must_reach(positions, places.shape[0], wraps=False)
    total = widened(take(words, ids, axis=0)) + widened(take(places, positions, axis=0))
    if call.has(1):
        must_reach(call.value(1), call.value(4).shape[0], wraps=False)
        total = total + widened(take(call.value(4), call.value(1), axis=0))
    y, _, _ = layer_normalized(total, call.value(5), call.value(6), -1,
                               call.attr("epsilon", 1e-12))
    mask = call.optional(7)
    lengths = full(shape=(batch,), value=0, dtype=int32) if mask is None else (
        sum_(e.equal(mask, 1), axis=1, dtype=int32))
    return in_type(y, words.dtype), lengths, in_type(total, words.dtype)


@converts("GroupNorm", domain=MICROSOFT)
def group_normalization(call: Call) -> Value:
    """Channels last, unless told otherwise, and a swish on demand."""
    x = call.value(0)
    last = bool(call.attr("channels_last", 1))
    first = moveaxis(x, source=-1, destination=1) if last else x
    y = group_norm(first, call.value(1), call.value(2), groups=call.attr("groups"),
                   eps=call.attr("epsilon", 1e-5))
    if call.attr("activation", 0):
        y = a.silu(y)
    return moveaxis(y, source=1, destination=-1) if last else y


@converts("Trilu", domain=MICROSOFT)
def triangle(call: Call) -> Value:
    k = int(call.number(1)) if call.has(1) else 0
    return (triu if call.attr("upper", 1) else tril)(call.value(0), k=k)
