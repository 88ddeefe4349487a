"""Matrix products, Einstein sums, determinants, and losses over classes."""

from __future__ import annotations

from terrazzo.frontends.onnx.registry import Call, Result, converts, converts_each
from terrazzo.graph.ir import Value, operator_named
from terrazzo.ops import contract as c
from terrazzo.ops.loss import nll_loss
from terrazzo.ops.norm import log_softmax
from terrazzo.ops.reduce import in_type

converts_each({"MatMul": c.matmul})


def gemm_result(x: Value, y: Value, z: Value | None, alpha: float, beta: float,
                transpose_x: bool, transpose_y: bool) -> Value:
    """alpha * x @ y + beta * z, of matrices, in the type of x."""
    product = c.batch_matmul(x, y, transpose_x=transpose_x, transpose_y=transpose_y)
    if alpha != 1.0:
        product = in_type(alpha * product, x.dtype)
    if z is None or beta == 0.0:
        return product
    return product + (z if beta == 1.0 else in_type(beta * z, x.dtype))


@converts("Gemm")
def gemm(call: Call) -> Value:
    return gemm_result(call.value(0), call.value(1), call.optional(2), call.attr("alpha", 1.0),
                       call.attr("beta", 1.0), bool(call.attr("transA", 0)),
                       bool(call.attr("transB", 0)))


@converts("Einsum")
def einsum(call: Call) -> Value:
    return c.einsum(call.attr("equation"), *call.values())


@converts("Det")
def det(call: Call) -> Value:
    return operator_named("det")(call.value(0))


# ---------------------------------------------------------------- losses
_NOTHING_IGNORED = -(1 << 31)  # no class number, and one that fits into int32


def _loss(call: Call, log_probabilities: Value) -> Value:
    """Losses [batch, ...] of classes on axis 1."""
    target = call.value(1)
    return nll_loss(log_probabilities, target, call.optional(2), axis=1,
                    reduction=call.attr("reduction", "mean"),
                    ignore_index=call.attr("ignore_index", _NOTHING_IGNORED))


@converts("NegativeLogLikelihoodLoss")
def negative_log_likelihood(call: Call) -> Value:
    return _loss(call, call.value(0))


@converts("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(call: Call) -> Result:
    log_probabilities = log_softmax(call.value(0), axis=1)
    return _loss(call, log_probabilities), log_probabilities
