"""The gradient of every operator against central differences, in float64.

Each differentiable operator has a row of cases below; one without fails the last test. The same
cases show that rewriting keeps the values of operators and of their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from terrazzo.dtypes import as_dtype
from terrazzo.graph.autodiff import tangents, vjp_graph, zeros
from terrazzo.graph.evaluate import run
from terrazzo.graph.ir import OPERATORS, Graph, Operator, TensorType, Value, operator_named
from terrazzo.graph.passes import canonicalize
from terrazzo.graph.trace import trace
from terrazzo.ops.fourier_loops import column_roots, line_roots

Maker = Callable[[np.random.Generator], np.ndarray]
STEP = 1e-6  # central differences err by STEP**2, and by 1e-16 / STEP from rounding
TOLERANCE = 2e-7


# ---------------------------------------------------------------- inputs
def spread(*shape: int, low: float = -2.0, high: float = 2.0) -> Maker:
    """Floats in a range, all different and apart from each other by more than STEP."""

    def make(rng: np.random.Generator) -> np.ndarray:
        count = int(np.prod(shape))
        places = (rng.permutation(count) + rng.uniform(0.3, 0.7, count)) / max(count, 1)
        return (low + (high - low) * places).reshape(shape)

    return make


def positive(*shape: int) -> Maker:
    return spread(*shape, low=0.2, high=3.0)


def inside(*shape: int) -> Maker:
    return spread(*shape, low=-0.9, high=0.9)


def integers(*shape: int, high: int) -> Maker:
    return lambda rng: rng.integers(0, high, shape)


def matrices(*shape: int) -> Maker:
    """Positive matrices, symmetric but for a little, with eigenvalues that are apart."""
    def make(rng: np.random.Generator) -> np.ndarray:
        turns = np.linalg.qr(rng.standard_normal(shape))[0]
        made = turns * np.arange(1.0, shape[-1] + 1) @ turns.swapaxes(-1, -2)
        return np.asarray(made + 0.05 * rng.standard_normal(shape))

    return make


def truths(*shape: int) -> Maker:
    return lambda rng: rng.integers(0, 2, shape).astype(bool)


def given(values: Any) -> Maker:
    return lambda rng: np.asarray(values)


@dataclass(frozen=True)
class Case:
    inputs: tuple[Maker | None, ...]
    attrs: dict[str, Any]
    call: Callable[..., Any] | None = None  # how the operator is called, if not by its inputs


def case(*inputs: Maker | None, **attrs: Any) -> Case:
    return Case(inputs, attrs)


def called(call: Callable[..., Any], *inputs: Maker) -> Case:
    """A case for operators that take functions: `call(operator, *values)`."""
    return Case(inputs, {}, call)


def below(limit: float) -> Callable[..., Any]:
    """A branch by the sum of x."""
    return lambda op, x, y: op(OPERATORS["less"](OPERATORS["sum"](x), limit), lambda a, b: a * b,
                               lambda a, b: a * a - b, x, y)


def with_its_forward(op: Any, g: Any, q: Any, k: Any, v: Any, *mask: Any) -> Any:
    """The gradients of attention, which start from what attention answers."""
    return op(g, q, k, v, *OPERATORS["attention_with_logsumexp"](q, k, v, *mask), *mask)


# ---------------------------------------------------------------- the rows
X = spread(3, 4)
ROWS: dict[str, list[Case]] = {
    # elementwise: both operands, one stretched in each of the two ways
    **{name: [case(X, spread(3, 4)), case(X, spread(4)), case(spread(3, 1), X), case(X, spread())]
       for name in ("add", "subtract", "multiply", "maximum", "minimum", "atan2", "hypot",
                    "copysign")},
    **{name: [case(X, positive(3, 4)), case(spread(3, 1), positive(4))]
       for name in ("divide", "remainder", "fmod")},
    "power": [case(positive(3, 4), X), case(positive(3, 1), spread(4)), case(X, given(3.0)),
              case(X, given(0.0))],
    **{name: [case(X)] for name in (
        "negative", "absolute", "sign", "floor", "ceil", "trunc", "round", "exp", "exp2", "expm1",
        "sin", "cos", "atan", "sinh", "cosh", "tanh", "asinh", "erf", "erfc", "sigmoid")},
    **{name: [case(positive(3, 4))] for name in (
        "sqrt", "rsqrt", "cbrt", "log", "log2", "log10", "log1p", "lgamma")},
    **{name: [case(inside(3, 4))] for name in ("tan", "asin", "acos", "atanh", "erfinv")},
    "acosh": [case(spread(3, 4, low=1.2, high=4.0))],
    "where": [case(truths(3, 4), X, spread(3, 4)), case(truths(4), X, spread(3, 1))],
    "astype": [case(X, dtype="float64")],
    # creation: the result does not depend on the values
    **{name: [case(X)] for name in ("zeros_like", "ones_like")},
    "full_like": [case(X, value=2.5)],
    # pooling, resizing and sampling
    **{name: [case(spread(2, 5, 6, 3), window=(3, 2), strides=(2, 1), padding=((1, 1), (0, 1)),
                   dilation=(1, 2))] for name in ("window_max", "window_sum")},
    **{name: [case(spread(2, 3, 7), window=3), case(spread(1, 2, 5, 6), window=(3, 2), strides=2,
                                                    padding=1)]
       for name in ("max_pool", "max_pool_indices", "average_pool")},
    "lp_pool": [case(spread(1, 2, 5, 6), window=2, p=2)],
    **{name: [case(spread(2, 3, 4)), case(spread(1, 2, 3, 2))] for name in (
        "global_average_pool", "global_max_pool", "global_lp_pool")},
    "max_unpool": [case(spread(1, 1, 2, 2), given([[[[5, 7], [13, 15]]]]),
                        output_shape=(1, 1, 4, 4))],
    "resize": [case(spread(1, 2, 3, 4), sizes=(1, 2, 5, 3), mode=mode)
               for mode in ("nearest", "linear", "cubic")],
    "upsample": [case(spread(1, 2, 2, 3), scales=(1, 1, 2, 2))],
    "grid_sample": [case(spread(1, 2, 3, 4), inside(1, 2, 3, 2)),
                    case(spread(1, 2, 3, 4), inside(1, 2, 2, 2), padding_mode="border")],
    "affine_grid": [case(spread(2, 2, 3), size=(2, 1, 3, 2))],
    "roi_align": [case(spread(1, 2, 4, 5), given([[0.3, 0.4, 2.8, 3.1]]), given([0]),
                       output_height=2, output_width=2, sampling_ratio=2)],
    "max_roi_pool": [case(spread(1, 2, 4, 5), given(np.array([[0, 0, 1, 3, 3]])),
                          pooled_shape=(2, 2))],
    "depth_to_space": [case(spread(1, 8, 2, 3), blocksize=2)],
    "space_to_depth": [case(spread(1, 2, 4, 6), blocksize=2)],
    "col2im": [case(spread(1, 8, 6), image_shape=(3, 4), block_shape=(2, 2))],
    "lrn": [case(spread(1, 4, 3), size=3)],
    "deform_conv": [case(spread(1, 2, 3, 4), spread(2, 2, 2, 2), inside(1, 8, 2, 3))],
    # matrices
    "det": [case(matrices(3, 3)), case(matrices(2, 2, 2))],
    "solve": [case(matrices(2, 3, 3), spread(3, 2)), case(matrices(3, 3), spread(3))],
    "solve_matrices": [case(matrices(2, 3, 3), spread(2, 3, 2))],
    "inv": [case(matrices(2, 3, 3))],
    "slogdet": [case(matrices(2, 3, 3))],
    **{name: [case(matrices(2, 3, 3)), case(matrices(4, 4))] for name in (
        "cholesky", "cholesky_lower", "eigh", "eigh_lower")},
    "qr": [case(spread(2, 4, 3)), case(spread(3, 5))],
    "qr_tall": [case(spread(4, 2))],
    "svd": [case(matrices(3, 3)), case(spread(2, 4, 3)), case(spread(2, 3))],
    "lstsq": [case(spread(2, 4, 3), spread(2, 4, 2)), case(spread(2, 4), spread(2))],
    # signals and sequences
    "dft": [case(spread(3, 4, 1)), case(spread(3, 6, 2), axis=0, inverse=True),
            case(spread(2, 4, 2), inverse=True, onesided=True), case(spread(7, 1), onesided=True)],
    "stft": [case(spread(2, 9, 1), spread(4), frame_step=2),
             case(spread(2, 9, 2), frame_step=3, frame_length=4, onesided=False)],
    "fft_lines": [case(spread(2, 30, 2), given(line_roots(30, -1, 0.5)), sign=-1, scale=0.5),
                  case(spread(16, 2), given(line_roots(16, 1)), sign=1, scale=1.0)],
    "fft_columns": [case(spread(2, 6, 3, 2), given(column_roots(6, 1)), sign=1, scale=0.5),
                    case(spread(7, 1, 2), given(column_roots(7, -1)), sign=-1, scale=1.0)],
    "rfft_lines": [case(spread(2, 10))],
    "pairs": [case(spread(3, 4), spread(4))],
    "fftshift": [case(spread(3, 5)), case(spread(4, 5), axes=1)],
    "ifftshift": [case(spread(3, 5))],
    "real": [case(spread(3, 4))],
    "conj": [case(spread(3, 4))],
    "imag": [case(spread(3, 4))],
    "angle": [case(spread(3, 4))],
    "irfft_lines": [case(spread(2, 6, 2), scale=0.1)],
    "causal_conv_with_state": [
        case(spread(2, 3, 5), spread(3, 1, 4), spread(3), spread(2, 3, 3), activation="silu"),
        case(spread(2, 3, 2), spread(3, 1, 4))],
    # reductions
    **{name: [case(X), case(X, axis=0), case(X, axis=-1, keepdims=True), case(X, axis=(0, 1))]
       for name in ("sum", "prod", "max", "min", "mean", "logsumexp")},
    **{name: [case(X), case(X, axis=1, correction=1), case(X, axis=0, keepdims=True)]
       for name in ("var", "std")},
    "vector_norm": [case(X), *(case(X, axis=1, ord=p) for p in (1, 2, 3, float("inf")))],
    # contractions
    "batch_matmul": [
        case(spread(2, 3), spread(3, 4)), case(spread(3, 2), spread(3, 4), transpose_x=True),
        case(spread(2, 3), spread(4, 3), transpose_y=True),
        case(spread(3, 2), spread(4, 3), transpose_x=True, transpose_y=True),
        case(spread(2, 2, 3), spread(3, 2)), case(spread(2, 3), spread(2, 3, 2)),
        case(spread(2, 2, 3), spread(1, 2, 3), transpose_y=True),
        case(spread(2, 3, 2), spread(2, 3), transpose_x=True, transpose_y=True)],
    "convolve": [
        case(spread(2, 5, 6, 3), spread(3, 2, 3, 4), strides=(2, 1), padding=((1, 1), (0, 1)),
             dilation=(1, 2)),
        case(spread(1, 7, 4), spread(3, 2, 6), strides=(1,), padding=((2, 1),), dilation=(2,),
             groups=2)],
    "conv": [case(spread(1, 3, 5, 6), spread(4, 3, 3, 3), spread(4), padding=1),
             case(spread(2, 4, 7), spread(4, 1, 3), strides=2, padding=1, groups=4),
             case(spread(1, 2, 3, 4, 5), spread(3, 2, 2, 2, 2), dilation=(1, 2, 1))],
    "conv_transpose": [case(spread(1, 3, 3, 4), spread(3, 2, 3, 3), spread(2), strides=2,
                            padding=1, output_padding=1),
                       case(spread(2, 4, 5), spread(4, 2, 3), groups=2, dilation=2)],
    "matmul": [case(spread(3), spread(3)), case(spread(2, 3), spread(3)),
               case(spread(3), spread(3, 2)), case(spread(2, 2, 3), spread(3, 2))],
    "linear": [case(spread(2, 3), spread(4, 3)), case(spread(2, 3), spread(4, 3), spread(4)),
               case(spread(3), spread(4, 3), spread(4))],
    "vecdot": [case(X, spread(3, 4)), case(X, spread(4)), case(X, spread(3, 4), axis=0)],
    "outer": [case(spread(3), spread(4))],
    "dot": [case(spread(3), spread(3)), case(spread(2, 3), spread(3, 2)), case(X, spread())],
    "tensordot": [case(spread(2, 3, 2), spread(3, 2, 2)),
                  case(spread(2, 3), spread(3, 2), axes=((0,), (1,)))],
    "einsum": [case(spread(2, 3), spread(3, 2), equation="ij,jk->ik"),
               case(spread(2, 2, 3), spread(2, 3, 2), equation="bij,bjk->bik"),
               case(spread(3, 3), equation="ii->i"), case(spread(2, 3), equation="ij->j")],
    # normalisation and attention
    **{name: [case(X), case(X, axis=0)] for name in ("softmax", "safe_softmax", "log_softmax")},
    "layer_norm": [case(X), case(X, spread(4), spread(4)),
                   case(spread(2, 2, 3), spread(2, 3), axis=(-2, -1))],
    "rms_norm": [case(X), case(X, spread(4))],
    "group_norm": [case(spread(2, 4, 3), spread(4), spread(4), groups=2),
                   case(spread(2, 4), groups=2)],
    "instance_norm": [case(spread(2, 2, 3), spread(2), spread(2)), case(spread(2, 2, 3))],
    "batch_norm": [case(spread(2, 3), spread(3), positive(3), spread(3), spread(3)),
                   case(spread(2, 3, 2), spread(3), positive(3))],
    "batch_norm_train": [case(spread(4, 3), spread(3), spread(3)), case(spread(3, 2, 2))],
    "scaled_dot_product_attention": [
        case(spread(3, 2), spread(4, 2), spread(4, 2)),
        case(spread(1, 2, 3, 2), spread(1, 2, 3, 2), spread(1, 2, 3, 2), causal=True),
        case(spread(1, 4, 2, 2), spread(1, 2, 3, 2), spread(1, 2, 3, 2), scale=0.7),
        case(spread(3, 2), spread(4, 2), spread(4, 2), spread(3, 4)),
        case(spread(3, 2), spread(4, 2), spread(4, 2), given(np.tri(3, 4, 1, bool)))],
    "attention_with_logsumexp": [
        case(spread(3, 2), spread(4, 2), spread(4, 2)),
        case(spread(1, 4, 3, 2), spread(1, 2, 3, 2), spread(1, 2, 3, 3), causal=True, scale=0.7),
        case(spread(3, 2), spread(4, 2), spread(4, 2), given(np.tri(3, 4, 1, bool)))],
    "attention_gradients": [
        called(with_its_forward, spread(3, 2), spread(3, 2), spread(4, 2), spread(4, 2)),
        called(with_its_forward, spread(1, 4, 3, 3), spread(1, 4, 3, 2), spread(1, 2, 3, 2),
               spread(1, 2, 3, 3)),
        called(with_its_forward, spread(3, 2), spread(3, 2), spread(4, 2), spread(4, 2),
               spread(3, 4))],
    "rotary_embedding": [case(spread(2, 3, 4), spread(3, 4), spread(3, 4)),
                         case(spread(3, 6), spread(3, 6), spread(3, 6), interleaved=True)],
    # movement
    "reshape": [case(X, shape=(2, 6)), case(X, shape=(-1,))],
    "flatten": [case(X), case(spread(2, 2, 3), start_axis=1)],
    "expand_dims": [case(X, axis=1)],
    "squeeze": [case(spread(3, 1, 4)), case(spread(3, 1, 4), axis=1)],
    "permute_dims": [case(spread(2, 3, 4), axes=(2, 0, 1))],
    "transpose": [case(X)],
    "swapaxes": [case(X, axis1=0, axis2=1)],
    "moveaxis": [case(spread(2, 3, 4), source=0, destination=-1)],
    "matrix_transpose": [case(X)],
    "broadcast_to": [case(spread(3, 1), shape=(2, 3, 4)), case(spread(), shape=(2, 3))],
    "concat": [case(X, spread(2, 4)), case(X, X, spread(3, 1), axis=1)],
    "stack": [case(X, spread(3, 4)), case(X, spread(3, 4), axis=-1)],
    "slice": [case(X, starts=(0, 1), stops=(3, 4), steps=(2, 1)),
              case(X, starts=(2, 3), stops=(-1, 0), steps=(-1, -2))],
    "place": [case(X, shape=(5, 8), starts=(1, 0), steps=(1, 2)),
              case(spread(2), shape=(4,), starts=(3,), steps=(-2,), value=1)],
    "split": [case(X, indices_or_sections=2, axis=1), case(X, indices_or_sections=(1,))],
    "unstack": [case(X)],
    "pad": [case(X, pad_width=1), *(case(X, pad_width=((1, 0), (2, 1)), mode=mode)
                                    for mode in ("reflect", "symmetric", "edge", "wrap"))],
    "flip": [case(X), case(X, axis=1)],
    "roll": [case(X, shift=1), case(X, shift=2, axis=1)],
    "tile": [case(X, repetitions=(2, 1))],
    "repeat": [case(X, repeats=2, axis=1), case(spread(3), repeats=(1, 0, 2), axis=0)],
    "sliding_window": [case(spread(6), size=3, step=2)],
    "tril": [case(X)],
    "triu": [case(X, k=1)],
    "diagonal": [case(X), case(X, offset=-1)],
    "diag": [case(spread(3)), case(X, k=1)],
    "meshgrid": [case(spread(2), spread(3)), case(spread(2), spread(3), indexing="ij")],
    # activations and other formulas
    **{name: [case(X)] for name in (
        "relu", "relu6", "hardsigmoid", "hardswish", "hardshrink", "softshrink", "selu",
        "logsigmoid", "silu", "quick_gelu", "mish", "softsign", "tanhshrink", "sinc", "square",
        "nan_to_num")},
    "hardtanh": [case(X), case(X, min=-0.3, max=0.8)],
    "clip": [case(X, given(-0.4), given(0.9)), case(X, None, given(0.5)), case(X, given(0.1))],
    "leaky_relu": [case(X), case(X, negative_slope=0.3)],
    "prelu": [case(X, spread(4)), case(X, spread())],
    "threshold": [case(X, threshold=0.2, value=5.0)],
    **{name: [case(X), case(X, alpha=0.7)] for name in ("elu", "celu")},
    "softplus": [case(X), case(X, beta=3.0, threshold=2.0)],
    "gelu": [case(X), case(X, approximate="tanh")],
    **{name: [case(X), case(spread(4, 2), axis=0)] for name in ("glu", "swiglu")},
    "logaddexp": [case(X, spread(4))],
    "lerp": [case(X, spread(3, 4), spread(4))],
    "xlogy": [case(X, positive(4))],
    "reciprocal": [case(positive(3, 4))],
    "addcmul": [case(X, spread(4), spread(3, 1), value=0.5)],
    # losses
    "nll_loss": [case(X, integers(3, high=4)), case(X, integers(3, high=4), positive(4)),
                 case(X, integers(3, high=4), reduction="none")],
    "cross_entropy": [
        case(X, integers(3, high=4)), case(X, given([1, -100, 3]), positive(4)),
        case(X, integers(3, high=4), label_smoothing=0.1, reduction="sum"),
        case(X, positive(3, 4))],
    **{name: [case(X, spread(3, 4)), case(X, spread(3, 4), reduction="none")]
       for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")},
    "binary_entropy": [case(spread(3, 4, low=0.1, high=0.9), spread(3, 4, low=0.1, high=0.9))],
    "binary_cross_entropy": [case(spread(3, 4, low=0.1, high=0.9), spread(3, 4, low=0.1, high=0.9)),
                             case(spread(4, low=0.1, high=0.9), truths(4), positive(4))],
    "binary_cross_entropy_with_logits": [
        case(X, spread(3, 4, low=0.1, high=0.9)),
        case(X, spread(3, 4, low=0.1, high=0.9), positive(3, 4), positive(4))],
    "kl_div": [case(X, positive(3, 4)), case(X, spread(3, 4), log_target=True,
                                            reduction="batchmean")],
    # indexing
    "take_at": [case(X, integers(2, high=3), axes=(0,)),
                case(X, integers(2, 2, high=3), integers(2, high=4), axes=(0, 1))],
    "take": [case(X, integers(2, 2, high=4), axis=1), case(X, integers(5, high=12))],
    "embedding": [case(X, integers(2, 3, high=3))],
    "gather": [case(X, integers(3, 2, high=4), axis=1)],
    "take_along_axis": [case(X, integers(1, 4, high=3), axis=0)],
    "gather_nd": [case(X, given([[0, 1], [2, 3], [0, 1]]))],
    "scatter_at": [
        case(X, spread(2, 4), given([2, 0]), axes=(0,)),
        *(case(X, spread(3, 4), given([2, 0, 2]), axes=(0,), reduce=r)
          for r in ("add", "max", "min"))],
    "scatter": [case(X, given([[0, 2], [1, 3], [3, 0]]), spread(3, 2), axis=1),
                case(X, given([[0, 0], [1, 3], [3, 0]]), spread(3, 2), axis=1, reduce="add")],
    "index_update": [case(X, given([2, 0]), spread(2, 4)),
                     case(X, given([1, 1]), spread(3, 1), axis=1, reduce="add")],
    "scatter_nd": [case(X, given([[0, 1], [2, 3]]), spread(2)),
                   case(X, given([[1], [1]]), spread(2, 4), reduce="add")],
    "masked_fill": [case(X, truths(3, 4), given(2.5))],
    "getitem": [called(lambda op, x: op(x, (slice(None, None, -2), 1)), X),
                called(lambda op, x, i: op(x, (i, slice(1, 3))), X, given([2, 0, 2]))],
    # running and sorted values
    "cumulative": [case(X, op=name, axis=axis, exclusive=exclusive, reverse=reverse)
                   for name in ("add", "mul", "max", "min")
                   for axis, exclusive, reverse in ((0, False, False), (1, True, True))
                   if not (exclusive and name in ("max", "min"))],
    "linear_recurrence": [case(X, spread(3, 4)), case(X, spread(3, 4), axis=0, reverse=True)],
    **{name: [case(X, axis=1), case(X)] for name in ("cumsum", "cumprod", "cummax", "cummin")},
    "sort_pairs": [case(X)],
    "top_pairs": [case(X, k=2)],
    "sort": [case(X), case(X, axis=0, descending=True)],
    "topk": [case(X, k=3), case(X, k=2, axis=0, largest=False)],
    # control flow and chance
    "cond": [called(below(-1e9), X, spread(4)), called(below(1e9), X, spread(4))],
    "scan": [called(lambda op, h, x: op(lambda h, row: (h * row + x.sum(), h * h), h, x),
                    spread(2), spread(3, 2)),
             called(lambda op, h, x: op(lambda h, row: (h + row, h * row), h, x, reverse=True),
                    spread(2), spread(3, 2))],
    "dropout": [case(X, given(np.uint64(7)), p=0.4)],
}
# No gradient exists (the number of steps is not known), or it is not that of the values on purpose.
# Of those that take or make complex numbers, tests/ops/test_complex.py has rows.
COMPLEX = {"complex", "polar", "view_as_real", "view_as_complex", "fft", "ifft", "rfft", "irfft",
           "fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn"}
WITHOUT_A_ROW = {"while_loop", "stop_gradient"} | COMPLEX


def differentiable() -> list[Operator]:
    """Our own operators (a family says so) that take tensors and have a gradient."""
    return [op for op in OPERATORS.values()
            if op.family not in ("", "user") and op.differentiable and op.tensor_params]


# ---------------------------------------------------------------- the checks
def graph_of(op: Operator, arrays: list[np.ndarray | None], row: Case) -> Graph:
    types = [None if a is None else TensorType(a.shape, as_dtype(a.dtype)) for a in arrays]

    def function(*values: Any) -> Any:
        return row.call(op, *values) if row.call is not None else op(*values, **row.attrs)

    return trace(function, types, op.name)[0]


def check(graph: Graph, arrays: list[np.ndarray], rng: np.random.Generator) -> None:
    """Compare the gradients of all float inputs with central differences."""
    outputs = run(graph, arrays)
    weights = [rng.normal(size=o.shape) if o.dtype.kind == "f" else None for o in outputs]
    found = iter(run(vjp_graph(graph), arrays + [w for w in weights if w is not None]))

    def weighted(changed: list[np.ndarray]) -> float:
        return sum(float(np.sum(o * w)) for o, w in zip(run(graph, changed), weights)
                   if w is not None)

    for position, array in enumerate(arrays):
        if array.dtype.kind != "f":
            continue
        expected = np.zeros_like(array)
        for place in np.ndindex(array.shape):
            ends = []
            for sign in (1, -1):
                moved = array.copy()
                moved[place] += sign * STEP
                ends.append(weighted([moved if p == position else a
                                      for p, a in enumerate(arrays)]))
            expected[place] = (ends[0] - ends[1]) / (2 * STEP)
        gradient = next(found)
        assert gradient.dtype == array.dtype and gradient.shape == array.shape
        scale = max(1.0, float(np.max(np.abs(expected), initial=0.0)))
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=TOLERANCE * scale,
                                   err_msg=f"input {position}\n{graph}")


CASES = [pytest.param(name, c, id=f"{name}-{i}") for name, cases in ROWS.items()
         for i, c in enumerate(cases)]


@pytest.mark.parametrize(("name", "row"), CASES)
def test_gradient(name: str, row: Case, rng: np.random.Generator) -> None:
    arrays = [None if make is None else make(rng) for make in row.inputs]
    graph = graph_of(operator_named(name), arrays, row)
    check(graph, [a for a in arrays if a is not None], rng)


@pytest.mark.parametrize(("name", "row"), CASES)
def test_rewriting_keeps_values(name: str, row: Case, rng: np.random.Generator) -> None:
    arrays = [None if make is None else make(rng) for make in row.inputs]
    graph = graph_of(operator_named(name), arrays, row)
    given = [a for a in arrays if a is not None]
    weights = [rng.normal(size=o.shape) for o in run(graph, given) if o.dtype.kind == "f"]
    for each, inputs in ((graph, given), (vjp_graph(graph), given + weights)):
        changed, _ = canonicalize(each)
        assert not any(n.op.is_composite and not n.op.keep_whole for n in changed.nodes)
        for before, after in zip(run(each, inputs), run(changed, inputs), strict=True):
            assert before.dtype == after.dtype
            np.testing.assert_allclose(after, before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "row"), CASES)
def test_forward_mode_is_the_transpose_of_reverse_mode(name: str, row: Case,
                                                       rng: np.random.Generator) -> None:
    """<w, J t> = <J^T w, t> for random weights w and directions t."""
    made = [None if make is None else make(rng) for make in row.inputs]
    graph = graph_of(operator_named(name), made, row)
    arrays = [a for a in made if a is not None]
    moved = [v for v in graph.inputs if v.dtype.is_float]
    along = [Value(v.type) for v in moved]
    pushed = tangents(graph.outputs, moved, along)
    outputs = [v for v in graph.outputs if v.dtype.is_float]
    found = [zeros(v.type) if t is None else t
             for v, t in zip(graph.outputs, pushed, strict=True) if v.dtype.is_float]
    forward = Graph("forward", (*graph.inputs, *along), tuple(found))
    t = [rng.uniform(-1, 1, a.shape) for v, a in zip(graph.inputs, arrays, strict=True)
         if v.dtype.is_float]
    pushed_values = run(forward, [*arrays, *t])
    w = [rng.uniform(-1, 1, y.shape) for y in pushed_values]
    pulled_values = run(vjp_graph(graph), [*arrays, *w])
    assert len(w) == len(outputs)
    left = sum(float(np.sum(a * b)) for a, b in zip(w, pushed_values, strict=True))
    right = sum(float(np.sum(a * b)) for a, b in zip(pulled_values, t, strict=True))
    np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [
    "multiply", "divide", "power", "tanh", "erf", "logsumexp", "std", "softmax", "layer_norm",
    "batch_matmul", "concat", "scaled_dot_product_attention"])
def test_second_order(name: str, rng: np.random.Generator) -> None:
    row = ROWS[name][0]
    arrays = [make(rng) for make in row.inputs if make is not None]
    first = vjp_graph(graph_of(operator_named(name), list(arrays), row))
    outputs = graph_of(operator_named(name), list(arrays), row).outputs
    weights = [rng.normal(size=o.shape) for o in outputs]
    check(first, arrays + weights, rng)


def test_every_differentiable_operator_has_a_row() -> None:
    missing = sorted({op.name for op in differentiable()} - ROWS.keys() - WITHOUT_A_ROW)
    assert not missing, f"add rows of cases for {', '.join(missing)}"
