"""Every operator as native code against its numpy reference: values, gradients, symbolic sizes.

The cases are those of the gradient tests plus rows for operators without a gradient, so an
operator without any row fails the last test. Sizes are small and odd on purpose: they reach tails,
masks and single elements; the long inputs at the end reach full vectors, tasks and split sums.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.base.scalar import OPS
from terrazzo.base.shapes import Shape, dim
from terrazzo.compiler.driver import compile_graph
from terrazzo.dtypes import as_dtype
from terrazzo.errors import TerrazzoError
from terrazzo.graph.autodiff import vjp_graph
from terrazzo.graph.evaluate import run
from terrazzo.graph.ir import OPERATORS, Graph, Operator, TensorType, operator_named
from terrazzo.graph.trace import trace
from terrazzo.ops.fourier_loops import half_roots
from terrazzo.ops.fourier_rows import row_roots
from terrazzo.ops.ngrams import trie_of

sys.path[:0] = [str(Path(__file__).parent / "graph")]

from test_operator_gradients import (  # noqa: E402
    COMPLEX,
    ROWS,
    Case,
    Maker,
    called,
    case,
    given,
    inside,
    integers,
    positive,
    spread,
    truths,
)

# A few units in the last place of the largest value: sums run in another order than numpy's, and
# native code keeps half types in float32 between the operators it fused.
TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "float16": 4e-3, "bfloat16": 3.2e-2}


# ---------------------------------------------------------------- rows without a gradient
def bits(*shape: int, low: int = -100, high: int = 100) -> Maker:
    return lambda rng: rng.integers(low, high, shape)


def specials(rng: np.random.Generator) -> np.ndarray:
    return np.array([0.0, -0.0, 1.5, -1.5, np.inf, -np.inf, np.nan, 1e-40, -1e30])


def single(make: Maker) -> Maker:
    """The same in float32, whatever type is asked for."""
    return lambda rng: make(rng).astype(np.float32)


def eighth(kind: str, *shape: int) -> Maker:
    """8-bit floats around zero."""
    return lambda rng: rng.standard_normal(shape).astype(as_dtype(f"float8_{kind}").np)


def key() -> Maker:
    return given(np.uint64(0x1234_5678_9ABC_DEF0))


def small(dtype: Any, *shape: int) -> Maker:
    """All the values of an integer type."""
    limits = np.iinfo(dtype)
    return lambda rng: rng.integers(limits.min, limits.max + 1, shape).astype(dtype)


X = spread(3, 5)
I = bits(3, 5)
TRIE = trie_of([np.array([[0], [1]]), np.array([[1, 2]])], [np.array([0, 1]), np.array([2])])
MORE: dict[str, list[Case]] = {
    **{name: [case(X, X), case(X, spread(5)), case(I, bits(3, 1)), case(specials, specials)]
       for name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")},
    "floor_divide": [case(X, positive(3, 5)), case(I, bits(3, 5, low=1)),
                     case(I, bits(5, low=-9, high=-1))],
    "remainder": [case(I, bits(3, 5, low=1)), case(I, bits(5, low=-9, high=-1))],
    "digamma": [case(positive(3, 5))],
    **{name: [case(specials), case(X)] for name in ("isnan", "isinf", "isfinite", "signbit")},
    **{name: [case(I, bits(3, 5)), case(truths(3, 5), truths(5))]
       for name in ("bitwise_and", "bitwise_or", "bitwise_xor")},
    "bitwise_invert": [case(I), case(truths(7))],
    **{name: [case(I, bits(3, 5, low=0, high=20))]
       for name in ("bitwise_left_shift", "bitwise_right_shift")},
    **{name: [case(truths(3, 5), truths(5)), case(X, I)]
       for name in ("logical_and", "logical_or", "logical_xor")},
    "logical_not": [case(truths(3, 5)), case(X)],
    "bitcast": [case(lambda rng: specials(rng).astype(np.float32), dtype="int32"),
                case(bits(9), dtype="float64"), case(bits(9), dtype="uint64")],
    "astype": [case(X, dtype=t) for t in ("float32", "int32", "bool", "float16", "bfloat16")]
    + [case(I, dtype=t) for t in ("float32", "int8", "uint8", "bool", "float64")]
    + [case(truths(9), dtype="int64"), case(truths(9), dtype="float32")],
    "full": [case(shape=(3, 5), value=2.5), case(shape=(), value=7, dtype="int32")],
    **{name: [case(shape=(3, 5)), case(shape=(4,), dtype="int8")] for name in ("zeros", "ones")},
    "arange": [case(start=0, stop=9), case(start=7), case(start=1.0, stop=3.0, step=0.25),
               case(start=9, stop=0, step=-2)],
    "eye": [case(n_rows=3), case(n_rows=3, n_cols=5, k=1)],
    **{name: [case(truths(3, 5)), case(truths(3, 5), axis=0), case(X, axis=1, keepdims=True)]
       for name in ("any", "all")},
    "count_nonzero": [case(truths(3, 5)), case(X, axis=0)],
    **{name: [case(X), case(X, axis=0), case(X, axis=-1, keepdims=True), case(I, axis=1)]
       for name in ("argmax", "argmin")},
    **{name: [case(I), case(I, axis=0), case(truths(3, 5), axis=1)] for name in ("sum", "max")},
    "one_hot": [case(integers(7, high=4), num_classes=4),
                case(integers(2, 3, high=4), num_classes=4, axis=0)],
    "searchsorted": [case(given(np.arange(9.0)), spread(5, low=-1.0, high=9.5), side=side)
                     for side in ("left", "right")],
    "bincount": [case(integers(20, high=6), length=8)],
    "nonzero": [case(given([0.0, 2.0, 0.0, 3.0]), size=3), case(truths(3, 5), size=15)],
    "argsort": [case(X), case(X, axis=0, descending=True), case(I)],
    "sort": [case(I), case(specials)],
    # Nodes 0 and 2 test a feature, and 1, 3 and 4 are leaves.
    "tree_ensemble": [
        case(spread(rows, 3), given(np.int32(
            [2, 4, 8, 0, 0, 4, 4, 0, 0, 12, 16, special, 0, 12, 12, 1, 0, 16, 16, 2])),
            spread(5), given(np.int32([0, 8, 4, 12] * 4)), given(np.int32([2, 1, 0, 0] * 4)),
            spread(3, 2), **attrs)
        for rows, special, attrs in (
            (5, 0, {"tests": ("le",)}), (35, 0, {"tests": ("gt",), "trees": 16}),
            (37, 3, {"tests": ("le", "lt"), "combine": "max"}),
            (150, 1, {"tests": ("le",), "missing": "some", "combine": "min"}))] + [
        case(spread(rows, 3), given(np.int32(
            [2, 4, 8, 0, 0, 4, 4, 0, 0, 12, 16, 0, 0, 12, 12, 1, 0, 16, 16, 2])),
            spread(5), given(np.int32([0, 8, 4, 12] * 4)), given(np.int32([2, 1, 0, 0] * 4)),
            spread(3, 1), given(np.int32([0, 2, 2, 1] * 4)), tests=("le",), targets=4)
        for rows in (5, 35)],
    "pairwise_coupling": [case(given(np.float32([[[0.0, r, s], [1 - r, 0.0, t], [1 - s, 1 - t, 0.0]]
                                                 for r, s, t in ((0.3, 0.6, 0.9), (0.5, 0.5, 0.5),
                                                                 (0.99, 0.01, 0.4))])))],
    "random_bits": [case(key(), shape=(3, 5))],
    "random_key": [case(seed=42)],
    "split_key": [case(key(), num=3)],
    "fold_in": [case(key(), given(np.int64(7)))],
    "uniform": [case(key(), shape=(3, 5)), case(key(), shape=(70,), low=-2.0, high=5.0)],
    "normal": [case(key(), shape=(3, 5)), case(key(), shape=(70,), mean=1.0, std=0.5)],
    "bernoulli": [case(key(), shape=(70,), p=0.3)],
    "randint": [case(key(), low=-3, high=9, shape=(70,))],
    "permutation": [case(key(), n=17)],
    # recurrent layers: small weights, so that rounding does not grow from step to step
    **{name: [case(spread(3, 2, 4), *(spread(1, count * 5, n, low=-0.5, high=0.5) for n in (4, 5)),
                   spread(1, count * 10)),
              case(spread(3, 2, 4), *(spread(2, count * 5, n, low=-0.5, high=0.5) for n in (4, 5)),
                   None, given(np.array([2, 3], np.int32)), direction="bidirectional", clip=0.7)]
       for name, count in (("lstm", 4), ("gru", 3), ("rnn", 1))},
    "recurrent_steps": [case(
        spread(3, 2, 5), spread(1, 1, 5, 1, 5, low=-0.5, high=0.5), kind="rnn",
        given=("gates", "weights0"), direction="reverse", functions=((("tanh", 0.0, 0.0),),),
        clip=None, input_forget=False, linear_before_reset=False, batch_first=False, units=(5,))],
    **{name: [case(size=9), case(size=9, periodic=False, dtype="float64")]
       for name in ("hann_window", "hamming_window", "blackman_window")},
    "real_rows": [case(spread(3, 6, 2), given(row_roots(6, False)), inverse=False, scale=0.5),
                  case(spread(2, 3, 7, 2), given(row_roots(6, True)), inverse=True, scale=1.5)],
    "real_halves": [case(spread(2, 6, 2), given(half_roots(6, -1)), inverse=False),
                    case(spread(2, 7, 2), given(half_roots(6, 1)), inverse=True)],
    "mel_weight_matrix": [case(num_mel_bins=8, dft_length=16, sample_rate=8192,
                               lower_edge_hertz=0, upper_edge_hertz=4096)],
    "det": [case(lambda rng: rng.uniform(-1, 1, (3, 4, 4)) + 3 * np.eye(4))],
    "bernoulli_of": [case(spread(3, 5, low=0.0, high=1.0), key())],
    "multinomial": [case(X, key(), sample_size=7)],
    "nonzero_padded": [case(truths(3, 5)), case(truths(7))],
    "compress_padded": [case(X, truths(3), axis=0), case(X, truths(5), axis=1), case(X, truths(9))],
    "unique_padded": [case(integers(3, 5, high=4)), case(integers(9, high=4), sorted=False),
                      case(specials)],
    "unique_slices_padded": [case(integers(7, 2, high=2), axis=0),
                             case(integers(2, 7, high=2), axis=1, sorted=False)],
    "rank_rows": [case(integers(7, 2, high=2))],
    "non_max_suppression_padded": [case(
        spread(2, 9, 4, low=0.0, high=1.0), spread(2, 3, 9), given(np.array([4])),
        given(np.float32(0.3)), given(np.float32(0.0)), center_point_box=center)
        for center in (False, True)],
    "select_boxes": [case(
        spread(1, 9, 4, low=0.0, high=1.0), spread(1, 2, 9),
        given(np.tile(np.arange(9), (1, 2, 1))), given(np.float32(0.0)), given(np.float32(0.3)),
        most=4)],
    "tfidf_vectorizer": [case(
        integers(3, 9, high=3), mode="TF", min_gram_length=1, max_gram_length=2, max_skip_count=1,
        ngram_counts=(0, 2), ngram_indexes=(0, 1, 2), pool_int64s=(0, 1, 1, 2))],
    "counts_of_ngrams": [case(
        integers(3, 9, high=3), given(TRIE.parents), given(TRIE.labels), given(TRIE.children),
        given(TRIE.counted), columns=3, longest=2, skips=1)],
    "linear_attention": [
        case(inside(2, 3, 8), inside(2, 3, 4), inside(2, 3, 6), None, inside(2, 3, 2),
             inside(2, 3, 2), q_num_heads=4, kv_num_heads=2),
        case(inside(2, 3, 8), inside(2, 3, 8), inside(2, 3, 6), inside(2, 2, 4, 3), q_num_heads=2,
             kv_num_heads=2, update_rule="linear")],
    "linear_attention_steps": [case(*(
        single(inside(*s)) for s in ((2, 3, 4, 5), (2, 3, 2, 5), (2, 3, 2, 7), (2, 2, 5, 7),
                                     (2, 3, 2, 5))), given=("decay",), scale=0.5)],
    "window_argmax": [case(given(np.arange(24.0).reshape(1, 4, 6, 1) % 7), given(
        np.array([5.0, 6, 6, 4, 6, 6]).reshape(1, 2, 3, 1)), window=(2, 2), strides=(2, 2),
        padding=((0, 0), (0, 0)), dilation=(1, 1))],
    # quantisation
    "quantize_linear": [
        case(X, given(np.float32(0.02)), small(np.int8)),
        case(X, given(np.full(5, 0.1, np.float32)), small(np.uint8, 5))],
    "dequantize_linear": [case(small(np.uint8, 3, 5), given(np.float32(0.3)), small(np.uint8)),
                          case(small(np.int8, 3, 5), given(np.float32(0.3)))],
    "dynamic_quantize_linear": [case(X)],
    "float8_matmul": [case(eighth("e4m3fn", 3, 9), eighth("e5m2", 9, 17)),
                      case(eighth("e5m2", 2, 9, 3), eighth("e5m2", 7, 9), transpose_x=True,
                           transpose_y=True)],
    "integer_matmul": [case(small(np.uint8, 3, 9), small(np.int8, 9, 17))],
    "matmul_integer": [case(small(np.int8, 3, 9), small(np.uint8, 9, 17), small(np.int8),
                            small(np.uint8, 17))],
    "qlinear_matmul": [case(
        small(np.uint8, 3, 9), given(np.float32(0.1)), small(np.uint8), small(np.int8, 9, 17),
        given(np.full(17, 0.1, np.float32)), small(np.int8), given(np.float32(3)),
        small(np.uint8))],
    "integer_convolve": [case(small(np.uint8, 2, 7, 6, 4), small(np.int8, 3, 3, 4, 10),
                              strides=(2, 1), dilation=(1, 1))],
    "conv_integer": [case(small(np.int8, 2, 4, 7, 6), small(np.int8, 10, 4, 3, 3), small(np.int8),
                          padding=1)],
    "qlinear_conv": [case(
        small(np.uint8, 2, 4, 7, 6), given(np.float32(0.1)), small(np.uint8),
        small(np.int8, 10, 4, 3, 3), given(np.float32(0.1)), small(np.int8), given(np.float32(5)),
        small(np.uint8), strides=2)],
    "stop_gradient": [case(X)],
    "constant": [called(lambda op, x: x + np.arange(15, dtype=np.float32).reshape(3, 5), X)],
    "while_loop": [called(lambda op, x: tz.while_loop(
        lambda state: state[0] < 5, lambda state: (state[0] + 1, state[1] * 1.5), (0, x))[1], X)],
}
# Only symbolic sizes make one; the symbolic checks of mean and others do.
WITHOUT_A_ROW = {"dimension"} | COMPLEX

CASES = [pytest.param(name, row, id=f"{name}-{i}")
         for name in dict.fromkeys([*ROWS, *MORE])
         for i, row in enumerate([*ROWS.get(name, ()), *MORE.get(name, ())])]
DIFFERENTIABLE = [pytest.param(name, row, id=f"{name}-{i}") for name, rows in ROWS.items()
                  for i, row in enumerate(rows)]


# ---------------------------------------------------------------- checking
def inputs_of(row: Case, rng: np.random.Generator, dtype: str) -> list[np.ndarray | None]:
    """The row's inputs with floats in the given type."""
    made = [None if make is None else np.asarray(make(rng)) for make in row.inputs]
    with np.errstate(over="ignore"):  # what is too large for a half type is infinite there
        return [a if a is None or a.dtype != np.float64 else a.astype(as_dtype(dtype).np)
                for a in made]


def graph_of(op: Operator, arrays: Sequence[np.ndarray | None], row: Case,
             symbolic: bool = False) -> Graph:
    """The graph of one case. Symbolic: one name for each distinct size over 1."""
    shapes: list[Shape] = [() if a is None else tuple(
        int(n) if n < 2 or not symbolic else dim(f"n{n}") for n in a.shape) for a in arrays]
    types = [None if a is None else TensorType(s, as_dtype(a.dtype))
             for a, s in zip(arrays, shapes, strict=True)]

    def function(*values: Any) -> Any:
        return row.call(op, *values) if row.call is not None else op(*values, **row.attrs)

    return trace(function, types, op.name)[0]


def check(graph: Graph, arrays: Sequence[np.ndarray], dtype: str = "float32",
          slack: float = 1) -> None:
    """Compiled code answers what the reference answers."""
    expected = run(graph, arrays)
    found = compile_graph(graph).run(arrays)
    for got, want in zip(found, expected, strict=True):
        assert got.shape == want.shape
        assert as_dtype(got.dtype) is as_dtype(want.dtype)
        if as_dtype(want.dtype).kind not in ("f", "c"):
            np.testing.assert_array_equal(got, want)
            continue
        own = as_dtype(want.dtype).real.name  # some results are float32 whatever comes in
        tolerance = slack * max(TOLERANCE[dtype], TOLERANCE[own])
        wide = np.complex128 if as_dtype(want.dtype).is_complex else np.float64
        got, want = got.astype(wide), want.astype(wide)
        largest = float(np.max(np.abs(want), initial=1.0, where=np.isfinite(want)))
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * largest,
                                   err_msg=str(graph))


def with_cotangents(graph: Graph, arrays: list[np.ndarray], rng: np.random.Generator
                    ) -> tuple[Graph, list[np.ndarray]]:
    """The graph of gradients, and its inputs: the graph's own, then a weight for each output."""
    weights = [np.asarray(rng.normal(size=r.shape)).astype(v.dtype.np)
               for v, r in zip(graph.outputs, run(graph, arrays), strict=True)
               if v.dtype.is_float]
    return vjp_graph(graph), arrays + weights


def present(arrays: Sequence[np.ndarray | None]) -> list[np.ndarray]:
    return [a for a in arrays if a is not None]


@pytest.mark.parametrize(("name", "row"), CASES)
def test_values(name: str, row: Case, rng: np.random.Generator) -> None:
    arrays = inputs_of(row, rng, "float32")
    check(graph_of(operator_named(name), arrays, row), present(arrays))


@pytest.mark.parametrize(("name", "row"), DIFFERENTIABLE)
def test_gradients(name: str, row: Case, rng: np.random.Generator) -> None:
    arrays = inputs_of(row, rng, "float32")
    graph = graph_of(operator_named(name), arrays, row)
    check(*with_cotangents(graph, present(arrays), rng))


# These need a size to be known, each for the reason its error gives.
KNOWN_SIZES = {"reshape", "broadcast_to", "split", "unstack", "repeat", "diagonal", "diag", "glu",
               "swiglu", "gather_nd", "group_norm", "einsum", "scaled_dot_product_attention",
               "attention_with_logsumexp", "attention_gradients", "rotary_embedding",
               "scatter_nd", "place", "nonzero", "constant", "lstm", "gru", "rnn",
               "recurrent_steps", "dft", "stft", "fft_lines", "fft_columns", "real_halves",
               "real_rows", "rfft_lines", "irfft_lines", "qr", "qr_tall", "svd", "lstsq",
               "causal_conv_with_state", "linear_attention",
               "max_pool",
               "max_pool_indices", "average_pool", "lp_pool", "window_max", "window_sum",
               "max_unpool", "resize", "upsample", "grid_sample", "affine_grid", "roi_align",
               "max_roi_pool", "depth_to_space", "space_to_depth", "col2im", "deform_conv",
               "convolve", "conv", "conv_transpose", "integer_convolve", "conv_integer",
               "qlinear_conv", "non_max_suppression_padded", "select_boxes", "window_argmax",
               "linear_attention_steps"}


def symbolic_graph(name: str, arrays: Sequence[np.ndarray | None], row: Case) -> Graph:
    try:
        return graph_of(operator_named(name), arrays, row, symbolic=True)
    except TerrazzoError as error:
        if name not in KNOWN_SIZES:
            raise
        pytest.skip(f"needs known sizes: {error}")


@pytest.mark.parametrize(("name", "row"), CASES)
def test_symbolic_sizes(name: str, row: Case, rng: np.random.Generator) -> None:
    arrays = inputs_of(row, rng, "float32")
    check(symbolic_graph(name, arrays, row), present(arrays))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "row"), DIFFERENTIABLE)
def test_gradients_with_symbolic_sizes(name: str, row: Case, rng: np.random.Generator) -> None:
    arrays = inputs_of(row, rng, "float32")
    graph = symbolic_graph(name, arrays, row)
    check(*with_cotangents(graph, present(arrays), rng))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize(("name", "row"), CASES)
def test_other_floats(name: str, row: Case, dtype: str, rng: np.random.Generator) -> None:
    arrays = inputs_of(row, rng, dtype)
    check(graph_of(operator_named(name), arrays, row), present(arrays), dtype)


# ---------------------------------------------------------------- integers and booleans
WHOLE_NUMBERS: dict[str, list[Case]] = {
    **{name: [case(bits(3, 21, low=0), bits(21, low=1))] for name in (
        "add", "subtract", "multiply", "maximum", "minimum", "floor_divide", "remainder", "fmod",
        "equal", "less", "greater_equal", "bitwise_and", "bitwise_xor")},
    **{name: [case(bits(3, 21, low=0))] for name in (
        "absolute", "negative", "sign", "square", "bitwise_invert", "relu", "flip", "transpose",
        "exp", "sqrt", "sin")},
    **{name: [case(bits(3, 21, low=0, high=4)), case(bits(3, 21, low=0, high=4), axis=0),
              case(bits(3, 21, low=0, high=4), axis=1)]
       for name in ("sum", "max", "min", "mean", "argmax", "any")},
    "prod": [case(bits(3, 4, low=1, high=3), axis=1)],
    "cumsum": [case(bits(3, 21, low=0, high=4), axis=1)],
    "sort": [case(bits(3, 21, low=0))],
    "where": [case(truths(3, 21), bits(3, 21, low=0), bits(21, low=0))],
    "matmul": [case(bits(3, 21, low=0, high=3), bits(21, 5, low=0, high=3))],
    "clip": [case(bits(3, 21, low=0), given(np.int64(5)), given(np.int64(9)))],
    "take": [case(bits(9, 3, low=0), integers(5, high=9), axis=0)],
    "concat": [case(bits(3, 5, low=0), bits(2, 5, low=0))],
    "pad": [case(bits(3, 5, low=0), pad_width=1)],
}


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64", "uint32", "uint64"])
@pytest.mark.parametrize(("name", "row"), [
    pytest.param(name, row, id=f"{name}-{i}") for name, rows in WHOLE_NUMBERS.items()
    for i, row in enumerate(rows)])
def test_whole_numbers(name: str, row: Case, dtype: str, rng: np.random.Generator) -> None:
    arrays = [np.asarray(make(rng)) for make in row.inputs if make is not None]
    if name != "take":
        arrays = [a if a.dtype == bool else a.astype(dtype) for a in arrays]
    check(graph_of(operator_named(name), arrays, row), arrays)


# ---------------------------------------------------------------- full vectors, several tasks
LONG: dict[str, list[Case]] = {
    **{name: [case(spread(100_003)), case(spread(67, 301))] for name in (
        "exp", "tanh", "gelu", "sigmoid", "relu", "square")},
    **{name: [case(spread(67, 301), spread(301)), case(spread(67, 1), spread(67, 301)),
              case(spread(5, 1, 301), spread(13, 1))] for name in ("add", "multiply", "maximum")},
    # Positive: a sum that cancels to nothing has no correct digits in any order.
    **{name: [case(positive(200_001)), *(case(positive(67, 301), axis=axis) for axis in (0, 1)),
              case(positive(9, 40, 301), axis=(0, 2)), case(positive(9, 40, 301), axis=1)]
       for name in ("sum", "max", "mean", "var", "logsumexp")},
    "argmax": [case(spread(20_001)), case(spread(67, 301), axis=0), case(spread(67, 301), axis=1)],
    **{name: [case(spread(67, 301)), case(spread(67, 301), axis=0), case(spread(3, 20_001))]
       for name in ("softmax", "log_softmax")},
    "layer_norm": [case(spread(67, 301), spread(301), spread(301))],
    "rms_norm": [case(spread(67, 301), spread(301))],
    "batch_norm_train": [case(spread(8, 33, 70), spread(33), spread(33))],
    "matmul": [case(spread(67, 130), spread(130, 301)), case(spread(1, 700), spread(700, 301)),
               case(spread(3, 67, 33), spread(3, 33, 65)), case(spread(300), spread(300))],
    "linear": [case(spread(67, 130), spread(301, 130), spread(301))],
    "transpose": [case(spread(67, 301))],
    "permute_dims": [case(spread(9, 40, 65), axes=(2, 0, 1)), case(spread(9, 40, 65),
                                                                   axes=(1, 0, 2))],
    "concat": [case(spread(67, 301), spread(33, 301)), case(spread(67, 301), spread(67, 5),
                                                            axis=1)],
    "take": [case(spread(67, 301), integers(500, high=67), axis=0),
             case(spread(67, 301), integers(90, high=301), axis=1)],
    "embedding": [case(spread(67, 301), integers(4, 33, high=67))],
    "cumsum": [case(spread(67, 301), axis=1), case(spread(67, 301), axis=0)],
    "sort": [case(spread(67, 301)), case(spread(5_001))],
    "topk": [case(spread(67, 301), k=7)],
    "cross_entropy": [case(spread(67, 301), integers(67, high=301))],
    "scaled_dot_product_attention": [
        case(spread(2, 3, 67, 32), spread(2, 3, 130, 32), spread(2, 3, 130, 32)),
        case(spread(1, 2, 65, 32), spread(1, 2, 65, 32), spread(1, 2, 65, 32), causal=True)],
}
# Sums of this many terms differ by the order they are taken in, as the square root of their number.
LONG_SUM = 16


@pytest.mark.parametrize("part", ["values", "gradients"])
@pytest.mark.parametrize(("name", "row"), [
    pytest.param(name, row, id=f"{name}-{i}") for name, rows in LONG.items()
    for i, row in enumerate(rows)])
def test_long_inputs(name: str, row: Case, part: str, rng: np.random.Generator) -> None:
    if part == "gradients" and name not in ROWS:
        pytest.skip(f"{name} has no gradient")
    arrays = inputs_of(row, rng, "float32")
    graph = graph_of(operator_named(name), arrays, row)
    given_arrays = present(arrays)
    if part == "gradients":
        graph, given_arrays = with_cotangents(graph, given_arrays, rng)
    check(graph, given_arrays, slack=LONG_SUM)


def test_every_operator_has_a_row() -> None:
    ours = {op.name for op in OPERATORS.values() if op.family and op.family != "user"}
    missing = sorted(ours - ROWS.keys() - MORE.keys() - WITHOUT_A_ROW)
    assert not missing, f"add rows of cases for {', '.join(missing)}"


def test_shifts_of_the_widest_integers():
    x = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
    got = tz.bitwise_right_shift(x, np.uint64(1) * np.ones(1, np.uint64))
    np.testing.assert_array_equal(got, x >> np.uint64(1))
    assert OPS["shr"].numpy(x, np.ones(4, np.uint64)).dtype == np.uint64
