"""Classical learning (domain ai.onnx.ml) on numbers: features, linear models, support vectors."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from terrazzo.dtypes import DType, float32, float64, int64
from terrazzo.frontends.onnx.importer import astype, literal
from terrazzo.frontends.onnx.registry import Call, Result, converts
from terrazzo.frontends.onnx.strings import EACH_KNOWN, STRINGS
from terrazzo.graph.ir import Value
from terrazzo.graph.reach import must_reach
from terrazzo.ops import elementwise as e
from terrazzo.ops.activation import clip
from terrazzo.ops.arrange import pad
from terrazzo.ops.contract import matmul
from terrazzo.ops.coupling import pairwise_coupling
from terrazzo.ops.joining import concat
from terrazzo.ops.lookups import take
from terrazzo.ops.norm import softmax
from terrazzo.ops.reduce import all_, any_, argmax, max_, sum_
from terrazzo.ops.shape import expand_dims, reshape, span

ML = "ai.onnx.ml"
_LEAST = 1e-7  # probability of a class against another, as in LIBSVM


# ---------------------------------------------------------------- scores
def _softmax_zero(x: Value) -> Value:
    """A softmax of the scores that are not zero; the others stay."""
    given = e.greater(e.absolute(x), 1e-7)
    return e.where(given, softmax(e.where(given, x, -math.inf), axis=-1), 0.0)


POST_TRANSFORMS: dict[str, Callable[[Value], Value]] = {
    "NONE": lambda x: x,
    "LOGISTIC": e.sigmoid,
    "SOFTMAX": lambda x: softmax(x, axis=-1),
    "SOFTMAX_ZERO": _softmax_zero,
    "PROBIT": lambda x: e.erfinv(x * 2.0 - 1.0) * math.sqrt(2.0),
}


def post_transform(call: Call, scores: Value) -> Value:
    """Scores as the node's attribute wants them."""
    name = call.attr("post_transform", "NONE")
    if name not in POST_TRANSFORMS:
        call.unsupported(f"has an unknown post_transform {name!r}")
    return POST_TRANSFORMS[name](scores)


def two_scores(call: Call, score: Value, *, probability: bool) -> Value:
    """The scores of two classes that one column tells, as onnxruntime has them."""
    kind = call.attr("post_transform", "NONE")
    if kind == "LOGISTIC":
        return e.sigmoid(concat(-score, score, axis=1))
    if kind == "PROBIT":
        call.unsupported("has one score for two classes and the post_transform PROBIT")
    return concat(1.0 - score if probability else -score, score, axis=1)


def label_above(score: Value, threshold: float, labels: list[int]) -> Value:
    """The second of two labels where a column is above a threshold."""
    return e.where(e.greater(reshape(score, shape=(-1,)), threshold),
                   np.int64(labels[1]), np.int64(labels[0]))


def labels_of(call: Call, name: str) -> list[int]:
    """The labels of a classifier, which must be numbers."""
    labels = call.attr(name)
    if not labels:
        call.unsupported("has labels that are strings, or none")
    return labels


def floating(x: Value) -> Value:
    """The input of a model in the type it is computed in: float64 stays, all else is float32."""
    return astype(x, dtype=float64 if x.dtype is float64 else float32)


def numbers(call: Call, name: str, dtype: DType) -> Value | None:
    """An attribute with a list of numbers as a constant; None without it."""
    given = call.attr(name)
    return literal(np.array(given, dtype.np)) if given else None


# ---------------------------------------------------------------- features
@converts("ArrayFeatureExtractor", domain=ML)
def array_feature_extractor(call: Call) -> Result:
    x, chosen = call.value(0), reshape(call.value(1), shape=(-1,))
    x = reshape(x, shape=(1, -1)) if x.ndim == 1 else x
    must_reach(chosen, x.shape[-1], wraps=False)
    return take(x, chosen, axis=x.ndim - 1)


@converts("Binarizer", domain=ML)
def binarizer(call: Call) -> Result:
    x = call.value(0)
    return astype(e.greater(x, call.attr("threshold", 0.0)), dtype=x.dtype)


@converts("Scaler", domain=ML)
def scaler(call: Call) -> Result:
    x = floating(call.value(0))
    offset, scale = numbers(call, "offset", x.dtype), numbers(call, "scale", x.dtype)
    x = x if offset is None else x - offset
    return astype(x if scale is None else x * scale, dtype=float32)


_NORMS: dict[str, Callable[[Value], Value]] = {
    "MAX": lambda x: max_(x, axis=-1, keepdims=True),  # not of magnitudes: so ONNX defines it
    "L1": lambda x: sum_(e.absolute(x), axis=-1, keepdims=True),
    "L2": lambda x: e.sqrt(sum_(x * x, axis=-1, keepdims=True)),
}


@converts("Normalizer", domain=ML)
def normalizer(call: Call) -> Result:
    x, kind = floating(call.value(0)), call.attr("norm", "MAX")
    if kind not in _NORMS:
        call.unsupported(f"has an unknown norm {kind!r}")
    size = _NORMS[kind](x)
    return astype(x / e.where(e.equal(size, 0.0), 1.0, size), dtype=float32)


@converts("Imputer", domain=ML)
def imputer(call: Call) -> Result:
    x = call.value(0)
    kind = "float" if call.attr("imputed_value_floats") else "int64"
    filling = numbers(call, f"imputed_value_{kind}s", x.dtype)
    if filling is None:
        call.unsupported("has no imputed values")
    replaced = call.attr(f"replaced_value_{kind}", 0)
    lacking = e.isnan(x) if math.isnan(replaced) else e.equal(x, replaced)
    return e.where(lacking, filling, x)


@converts("FeatureVectorizer", domain=ML)
def feature_vectorizer(call: Call) -> Result:
    columns = []
    for x, width in zip(call.values(), call.attr("inputdimensions"), strict=True):
        x = reshape(x, shape=(-1, 1)) if x.ndim == 1 else x
        have = x.shape[1]
        if not isinstance(have, int):
            call.unsupported("needs to know how many features there are")
        x = span(x, 1, 0, width) if have > width else pad(
            x, pad_width=((0, 0), (0, width - have)))
        columns.append(astype(x, dtype=float32))
    return concat(*columns, axis=1)


@converts("OneHotEncoder", domain=ML)
def one_hot_encoder(call: Call) -> Result:
    classes = call.attr("cats_int64s")
    if not classes or not call.attr("zeros", 1):
        call.unsupported("encodes strings, or has to fail on values it does not know")
    x = call.value(0)
    known = literal(np.array(classes, np.int64))
    return astype(e.equal(expand_dims(astype(x, dtype=int64), axis=x.ndim), known), dtype=float32)


@converts(EACH_KNOWN, domain=STRINGS)
def each_known(call: Call) -> Result:
    """Whether every row of an encoder's result has a one."""
    return all_(any_(e.greater(call.value(0), 0.5), axis=-1))


@converts("LabelEncoder", domain=ML, since=2)
def label_encoder(call: Call) -> Result:
    x = call.value(0)
    keys = _table(call, "keys")
    values = _table(call, "values")
    default = call.attr("default_tensor")
    if default is None:
        name, usual = ("default_float", -0.0) if values.dtype.kind == "f" else (
            "default_int64", -1)
        default = np.array(call.attr(name, usual), values.dtype)
    if keys.size != values.size or not keys.size:
        call.unsupported(f"maps {keys.size} keys to {values.size} values")
    wide, known = expand_dims(x, axis=x.ndim), literal(keys)
    same = e.equal(wide, known)
    if keys.dtype.kind == "f":
        same = e.logical_or(same, e.logical_and(e.isnan(wide), e.isnan(known)))
    # 0 is the default's place; of equal keys the last counts.
    found = max_(e.where(same, literal(np.arange(1, keys.size + 1)), 0), axis=-1)
    return take(literal(np.concatenate([default.reshape(1), values])), found, axis=0)


def _table(call: Call, name: str) -> np.ndarray:
    given = call.attr(f"{name}_tensor")
    if given is None:
        for suffix, kind in (("int64s", np.int64), ("floats", np.float32)):
            if call.attr(f"{name}_{suffix}"):
                given = np.array(call.attr(f"{name}_{suffix}"), kind)
    if given is None or given.dtype.kind in "OUS":
        call.unsupported(f"has {name} that are strings")
    return given


# ---------------------------------------------------------------- linear models
def _linear(call: Call, x: Value, rows: int) -> Value:
    weights = np.array(call.attr("coefficients"), x.dtype.np).reshape(rows, -1)
    scores = matmul(x, literal(np.ascontiguousarray(weights.T)))
    added = numbers(call, "intercepts", x.dtype)
    return scores if added is None else scores + added


@converts("LinearRegressor", domain=ML)
def linear_regressor(call: Call) -> Result:
    scores = _linear(call, floating(call.value(0)), call.attr("targets", 1))
    return astype(post_transform(call, scores), dtype=float32)


@converts("LinearClassifier", domain=ML)
def linear_classifier(call: Call) -> Result:
    labels = labels_of(call, "classlabels_ints")
    x = floating(call.value(0))
    # Two classes may have one score; the number of features says so, or that of intercepts.
    rows = len(call.attr("intercepts") or ())
    features = x.shape[1]
    if isinstance(features, int):
        rows = len(call.attr("coefficients")) // features
    scores = _linear(call, x, rows or len(labels))
    if scores.shape[1] == 1:
        if len(labels) != 2:
            call.unsupported(f"has one score for {len(labels)} labels")
        return label_above(scores, 0.0, labels), astype(
            two_scores(call, scores, probability=True), dtype=float32)
    chosen = take(literal(np.array(labels, np.int64)), argmax(scores, axis=1), axis=0)
    return chosen, astype(post_transform(call, scores), dtype=float32)


# ---------------------------------------------------------------- support vectors
def _kernels(call: Call, x: Value, vectors: np.ndarray) -> Value:
    """The kernel function of every row of x with every support vector."""
    gamma, offset, degree = (call.attr("kernel_params") or [0.0, 0.0, 0.0])[:3]
    kind = call.attr("kernel_type", "LINEAR")
    dots = matmul(x, literal(np.ascontiguousarray(vectors.T)))
    if kind == "LINEAR":
        return dots
    if kind == "POLY":
        return e.power(dots * gamma + offset, float(degree))
    if kind == "SIGMOID":
        return e.tanh(dots * gamma + offset)
    if kind != "RBF":
        call.unsupported(f"has an unknown kernel_type {kind!r}")
    # Support vectors side by side: those of a row are computed in vectors.
    difference = expand_dims(x, axis=2) - literal(np.ascontiguousarray(vectors.T))
    return e.exp(sum_(difference * difference, axis=1) * -gamma)


@converts("SVMRegressor", domain=ML)
def svm_regressor(call: Call) -> Result:
    x = floating(call.value(0))
    count = call.attr("n_supports", 0)
    weights = np.array(call.attr("coefficients"), x.dtype.np)
    if count:
        vectors = np.array(call.attr("support_vectors"), x.dtype.np).reshape(count, -1)
        x = _kernels(call, x, vectors)
    scores = matmul(x, literal(weights.reshape(-1, 1))) + call.attr("rho")[0]
    if call.attr("one_class", 0):
        scores = e.where(e.greater(scores, 0.0), 1.0, -1.0)
    return astype(post_transform(call, scores), dtype=float32)


@converts("SVMClassifier", domain=ML)
def svm_classifier(call: Call) -> Result:
    labels = labels_of(call, "classlabels_ints")
    x = floating(call.value(0))
    counts = call.attr("vectors_per_class") or []
    if not counts:
        return _svm_of_planes(call, x, labels)
    if len(counts) != len(labels):
        call.unsupported(f"has support vectors of {len(counts)} classes for {len(labels)} labels")
    margins = _margins(call, x, counts)
    pairs = [(i, j) for i in range(len(labels)) for j in range(i + 1, len(labels))]
    votes = _votes(margins, pairs, len(labels))
    chosen = take(literal(np.array(labels, np.int64)), argmax(votes, axis=1), axis=0)
    if call.attr("prob_a"):
        scores = post_transform(call, _pair_probabilities(call, margins, pairs, len(labels)))
    elif len(pairs) == 1:
        scores = two_scores(call, margins,
                            probability=call.attr("post_transform", "NONE") != "NONE")
    else:
        scores = post_transform(call, margins)
    return chosen, astype(scores, dtype=float32)


def _svm_of_planes(call: Call, x: Value, labels: list[int]) -> Result:
    """Without support vectors: a plane for each class."""
    weights = np.array(call.attr("coefficients"), x.dtype.np).reshape(len(labels), -1)
    scores = _kernels(call, x, weights) + call.attr("rho")[0]
    chosen = take(literal(np.array(labels, np.int64)), argmax(scores, axis=1), axis=0)
    if len(labels) == 2:  # onnxruntime takes the larger score for that of the second class
        best = max_(scores, axis=1)
        sure = e.greater_equal(best, 0.5) if (weights >= 0).all() else e.greater(best, 0.0)
        chosen = e.where(sure, np.int64(labels[1]), chosen)
    return chosen, astype(post_transform(call, scores), dtype=float32)


def _margins(call: Call, x: Value, counts: list[int]) -> Value:
    """How far each row lies from the border of each pair of classes: one product for all pairs."""
    total, starts = sum(counts), np.cumsum([0, *counts])
    vectors = np.array(call.attr("support_vectors"), x.dtype.np).reshape(total, -1)
    given = np.array(call.attr("coefficients"), x.dtype.np).reshape(-1, total)
    columns = []
    for i in range(len(counts)):
        for j in range(i + 1, len(counts)):
            column = np.zeros(total, x.dtype.np)
            column[starts[i]:starts[i + 1]] = given[j - 1, starts[i]:starts[i + 1]]
            column[starts[j]:starts[j + 1]] = given[i, starts[j]:starts[j + 1]]
            columns.append(column)
    margins = matmul(_kernels(call, x, vectors), literal(np.stack(columns, axis=1)))
    return margins + literal(np.array(call.attr("rho"), x.dtype.np)[:len(columns)])


def _votes(margins: Value, pairs: list[tuple[int, int]], classes: int) -> Value:
    """How many other classes each class wins against."""
    first, second = (np.zeros((len(pairs), classes), np.float32) for _ in range(2))
    for n, (i, j) in enumerate(pairs):
        first[n, i] = second[n, j] = 1
    wins = astype(e.greater(margins, 0.0), dtype=float32)
    return matmul(wins, literal(first - second)) + literal(second.sum(axis=0))


def _pair_probabilities(call: Call, margins: Value, pairs: list[tuple[int, int]], classes: int
                        ) -> Value:
    """Platt's sigmoids of the margins, coupled into probabilities of classes."""
    slope, offset = (np.array(call.attr(name), margins.dtype.np) for name in ("prob_a", "prob_b"))
    one_of_two = clip(e.sigmoid(-(margins * literal(slope) + literal(offset))), min=_LEAST,
                      max=1 - _LEAST)
    place = np.zeros((classes, classes), np.int64)
    for n, (i, j) in enumerate(pairs):
        place[i, j], place[j, i] = n, n + len(pairs)
    both = concat(one_of_two, 1.0 - one_of_two, axis=1)
    table = take(both, literal(place.reshape(-1)), axis=1)
    return pairwise_coupling(reshape(table, shape=(-1, classes, classes)))
