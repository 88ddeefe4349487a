"""Converters of classical learning against onnxruntime, and arithmetic by hand.

onnx's own evaluator is no judge here: its probabilities of support vectors are off by a tenth, and
what it makes of one score for two classes is not what engines make of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from one_node import by_onnxruntime, check, imported, one_node, run
from onnx import numpy_helper

pytestmark = pytest.mark.onnx
ML: dict[str, Any] = {"domain": "ai.onnx.ml", "opset": 3}


def rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def compare(operator: str, inputs: list[np.ndarray], *, rtol: float = 1e-4, atol: float = 1e-5,
            **options: Any) -> None:
    options = {**ML, **options}
    if options.get("post_transform") == "PROBIT":
        atol = 5e-3  # onnxruntime approximates it by a formula of three digits (Winitzki)
    check(operator, inputs, expected=by_onnxruntime(operator, inputs, **options), rtol=rtol,
          atol=atol, **options)


# ---------------------------------------------------------------- features
def test_features(rng: np.random.Generator) -> None:
    x = rows(rng, 4, 3)
    check("ArrayFeatureExtractor", [x, np.array([[2, 0]])], **ML)
    check("ArrayFeatureExtractor", [x[0], np.array([1])], **ML)
    check("Binarizer", [x], threshold=0.3, **ML)
    check("Scaler", [x], offset=[0.1, 0.2, 0.3], scale=[1.0, 2.0, 3.0], **ML)
    signs = np.array([[1, -3, 2], [-1, -2, -3], [0, 0, 0], [0, -1, 0]], np.float32)
    for norm in ("MAX", "L1", "L2"):
        compare("Normalizer", [x], norm=norm)
        compare("Normalizer", [signs], norm=norm)
    check("FeatureVectorizer", [x, rows(rng, 4, 2)], inputdimensions=[2, 3],
          domain="ai.onnx.ml", opset=1)
    check("OneHotEncoder", [np.array([[1, 7], [3, 9]])], cats_int64s=[1, 3, 7], zeros=1, **ML)


def test_missing_values() -> None:
    x = np.array([[1.0, np.nan], [np.nan, 4.0]], np.float32)
    check("Imputer", [x], imputed_value_floats=[7.0, 8.0], replaced_value_float=float("nan"), **ML)
    whole = np.array([[1, 0], [0, 4]])
    check("Imputer", [whole], imputed_value_int64s=[7], replaced_value_int64=0, **ML)


def test_labels() -> None:
    x = np.array([3, 1, 8, 3], np.int64)
    check("LabelEncoder", [x], domain="ai.onnx.ml", opset=4, keys_int64s=[1, 3, 5],
          values_floats=[0.5, 1.5, 2.5], default_float=-1.0)
    numbers = np.array([0.5, np.nan, 2.0], np.float32)
    (y,) = run("LabelEncoder", [numbers], domain="ai.onnx.ml", opset=4,
               keys_floats=[float("nan"), 0.5], values_int64s=[10, 20])
    np.testing.assert_array_equal(y, [20, 10, -1])


def test_strings_are_left_to_others() -> None:
    x = np.array([1, 2])
    model = one_node("LabelEncoder", [x], domain="ai.onnx.ml", opset=4, keys_int64s=[1],
                     values_strings=["one"])
    assert "strings" in str(imported(model, {"x0": x}).put_off[0])


# ---------------------------------------------------------------- linear models
TRANSFORMS = ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT"]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_regression(rng: np.random.Generator, transform: str) -> None:
    x = np.abs(rows(rng, 5, 3)) * 0.3
    compare("LinearRegressor", [x], coefficients=[0.1, 0.2, 0.3, 0.1, 0.5, 0.25], targets=2,
            intercepts=[0.5, 0.05], post_transform=transform)


@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
def test_support_vectors(rng: np.random.Generator, kernel: str) -> None:
    x = rows(rng, 5, 3)
    common: dict[str, Any] = {
        "kernel_type": kernel, "kernel_params": [0.3, 0.1, 2.0], "rho": [0.25]}
    for one_class in (0, 1):
        compare("SVMRegressor", [x], coefficients=[0.5, -1.5], n_supports=2, one_class=one_class,
                support_vectors=rows(rng, 6).tolist(), post_transform="NONE", **common)
    compare("SVMClassifier", [x], outputs=2, coefficients=rows(rng, 4).tolist(),
            support_vectors=rows(rng, 12).tolist(), vectors_per_class=[3, 1],
            classlabels_ints=[4, 8], **common)
    if kernel == "LINEAR":
        compare("SVMRegressor", [x], coefficients=[0.5, -1.5, 0.3], post_transform="NONE", **common)


@pytest.mark.parametrize("classes, transform, probable", [
    *((2, t, False) for t in TRANSFORMS[:-1]), (2, "NONE", True), (2, "PROBIT", True),
    (3, "NONE", False), (3, "SOFTMAX", False), (3, "NONE", True), (4, "NONE", True),
    (4, "LOGISTIC", True)])
def test_support_vector_classes(rng: np.random.Generator, classes: int, transform: str,
                                probable: bool) -> None:
    x = rows(rng, 9, 3)
    pairs, vectors = classes * (classes - 1) // 2, 2 * classes
    sigmoid = {"prob_a": (-1 - np.abs(rows(rng, pairs))).tolist(),
               "prob_b": rows(rng, pairs).tolist()} if probable else {}
    # Its own iteration stops within 0.005; a sum in another order may take a step more or less.
    weights = rows(rng, (classes - 1) * vectors)
    compare("SVMClassifier", [x], outputs=2, coefficients=weights.tolist(),
            support_vectors=rows(rng, vectors * 3).tolist(), vectors_per_class=[2] * classes,
            rho=(0.1 * rows(rng, pairs)).tolist(), kernel_type="RBF", kernel_params=[0.3, 0.0, 3.0],
            classlabels_ints=[5, 9, 11, 2][:classes], post_transform=transform,
            atol=1e-4, **sigmoid)


@pytest.mark.parametrize("classes", [2, 3])
def test_support_vector_planes(rng: np.random.Generator, classes: int) -> None:
    for weights in (rows(rng, classes * 3), np.abs(rows(rng, classes * 3))):
        for transform in ("NONE", "SOFTMAX"):
            compare("SVMClassifier", [rows(rng, 9, 3)], outputs=2, coefficients=weights.tolist(),
                    rho=[0.05], kernel_type="LINEAR", kernel_params=[0.0, 0.0, 3.0],
                    classlabels_ints=[5, 9, 11][:classes], post_transform=transform)


@pytest.mark.parametrize("scores, transform", [
    *((1, t) for t in TRANSFORMS[:-1]),  # PROBIT of one score: onnxruntime reads what nobody wrote
    *((3, t) for t in TRANSFORMS), (2, "SOFTMAX")])
def test_classification(rng: np.random.Generator, scores: int, transform: str) -> None:
    x = rows(rng, 6, 4)
    compare("LinearClassifier", [x], outputs=2, coefficients=rows(rng, 4 * scores).tolist(),
            intercepts=rows(rng, scores).tolist(), classlabels_ints=[10, 20, 30][:max(scores, 2)],
            multi_class=0, post_transform=transform)


# ---------------------------------------------------------------- trees
OLDER: dict[str, Any] = {
    "nodes_treeids": [0, 0, 0, 0, 0, 1, 1, 1], "nodes_nodeids": [0, 1, 2, 3, 4, 0, 1, 2],
    "nodes_featureids": [0, 1, 0, 0, 0, 2, 0, 0],
    "nodes_values": [0.1, -0.2, 0.0, 0.0, 0.0, 0.3, 0.0, 0.0],
    "nodes_modes": ["BRANCH_LEQ", "BRANCH_GT", "LEAF", "LEAF", "LEAF", "BRANCH_LEQ", "LEAF",
                    "LEAF"],
    "nodes_truenodeids": [1, 2, 0, 0, 0, 1, 0, 0], "nodes_falsenodeids": [4, 3, 0, 0, 0, 2, 0, 0],
    "nodes_missing_value_tracks_true": [1, 0, 0, 0, 0, 0, 0, 0],
}
LEAVES = {"treeids": [0, 0, 0, 1, 1], "nodeids": [2, 3, 4, 1, 2], "ids": [0, 1, 0, 1, 0],
          "weights": [0.3, 0.6, -0.2, 0.4, 0.1]}


def trees_by_hand(x: np.ndarray) -> np.ndarray:
    """The two leaves' (target, weight) of each row, for the trees above."""
    found = []
    for a, b, c in x:
        low = a <= 0.1 or np.isnan(a)
        first = ((0, 0.3) if b > -0.2 else (1, 0.6)) if low else (0, -0.2)
        found.append([first, (1, 0.4) if c <= 0.3 else (0, 0.1)])
    return np.array(found)


@pytest.mark.parametrize("how", ["SUM", "AVERAGE"])
def test_older_regressor(rng: np.random.Generator, how: str) -> None:
    x = rows(rng, 12, 3)
    x[3, 0] = np.nan
    leaves = trees_by_hand(x)
    expected = np.zeros((12, 2), np.float32)
    for row, pair in enumerate(leaves):
        for target, weight in pair:
            expected[row, int(target)] += weight / (2 if how == "AVERAGE" else 1)
    check("TreeEnsembleRegressor", [x], expected=[expected + np.float32([[0.5, 0.25]])],
          n_targets=2, aggregate_function=how, base_values=[0.5, 0.25], **OLDER, **ML,
          **{f"target_{k}": v for k, v in LEAVES.items()})


@pytest.mark.parametrize("base", [0, 1, 2])
@pytest.mark.parametrize("spoken", [0, 1])
def test_one_of_two_classes(rng: np.random.Generator, base: int, spoken: int) -> None:
    x = rows(rng, 12, 3)
    more = {"base_values": [0.1, 0.2][:base]} if base else {}
    for transform, weight in (("NONE", 0.2), ("NONE", -0.2), ("LOGISTIC", 0.2), ("LOGISTIC", -0.2),
                              ("SOFTMAX", -0.2)):
        leaves = {**LEAVES, "ids": [spoken] * 5, "weights": [0.3, 0.6, weight, 0.4, 0.1]}
        compare("TreeEnsembleClassifier", [x], outputs=2, classlabels_int64s=[5, 9],
                post_transform=transform, **OLDER, **more,
                **{f"class_{k}": v for k, v in leaves.items()})


def test_two_classes_that_both_have_scores(rng: np.random.Generator) -> None:
    """By onnx's evaluator: onnxruntime answers with labels here that the model does not have."""
    for transform in ("NONE", "SOFTMAX"):
        check("TreeEnsembleClassifier", [rows(rng, 12, 3)], outputs=2, classlabels_int64s=[5, 9],
              post_transform=transform, **OLDER, **ML,
              **{f"class_{k}": v for k, v in LEAVES.items()})


def test_classifier_of_three(rng: np.random.Generator) -> None:
    leaves = {**LEAVES, "ids": [0, 1, 2, 1, 2]}
    for transform in ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"):
        compare("TreeEnsembleClassifier", [rows(rng, 12, 3)], outputs=2,
                classlabels_int64s=[5, 9, 2], base_values=[0.3, 0.1, 0.2],
                post_transform=transform, **OLDER, **{f"class_{k}": v for k, v in leaves.items()})


@pytest.mark.parametrize("count, how, dtype", [
    (0, "SUM", np.float32), (1, "SUM", np.float32), (15, "AVERAGE", np.float64),
    (16, "MIN", np.float32), (17, "MAX", np.float64), (127, "SUM", np.float64),
    (300, "AVERAGE", np.float32), (300, "MAX", np.float32),
])
def test_forest_of_any_shape(rng: np.random.Generator, count: int, how: str, dtype: Any) -> None:
    """Trees that lean to one side, that are a leaf, that share a block with deeper ones."""
    attributes = leaning_forest(rng, [0, 1, 12, 3, 40, 5, 2])
    x = rng.standard_normal((count, 4)).astype(dtype)
    x[130::7, 1] = np.nan  # some blocks of rows have none
    compare("TreeEnsembleRegressor", [x], n_targets=2, aggregate_function=how, **attributes)


@pytest.mark.parametrize("how", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("count", [1, 17, 300])
def test_trees_that_speak_of_one_target_each(rng: np.random.Generator, count: int, how: str
                                             ) -> None:
    attributes = leaning_forest(rng, [0, 1, 12, 3, 9, 5, 2] * 3)
    attributes["target_ids"] = [(2, 0, 3)[tree % 3] for tree in attributes["target_treeids"]]
    x = rng.standard_normal((count, 4)).astype(np.float32)
    x[10::7, 1] = np.nan
    compare("TreeEnsembleRegressor", [x], n_targets=4, aggregate_function=how, **attributes)
    attributes["target_ids"][5] ^= 1  # a tree that speaks of two after all
    compare("TreeEnsembleRegressor", [x], n_targets=4, aggregate_function=how, **attributes)


def leaning_forest(rng: np.random.Generator, depths: list[int]) -> dict[str, Any]:
    """Trees of one long branch each, with leaves at every step."""
    nodes: dict[str, list[Any]] = {k: [] for k in (
        "treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids",
        "missing_value_tracks_true")}
    targets: dict[str, list[Any]] = {k: [] for k in ("treeids", "nodeids", "ids", "weights")}

    def leaf(tree: int, node: int) -> None:
        add(tree, node, 0, 0.0, "LEAF", 0, 0, 0)
        targets["treeids"].append(tree)
        targets["nodeids"].append(node)
        targets["ids"].append(int(rng.integers(2)))
        targets["weights"].append(float(np.float32(rng.standard_normal())))

    def add(*row: Any) -> None:
        for column, item in zip(nodes.values(), row, strict=True):
            column.append(item)

    for tree, depth in enumerate(depths):
        for step in range(depth):
            ways = [2 * step + 1, 2 * step + 2]
            ways = ways if rng.random() < 0.5 else ways[::-1]
            add(tree, 2 * step, int(rng.integers(4)), float(np.float32(rng.standard_normal())),
                "BRANCH_LEQ" if tree % 2 else "BRANCH_LT", *ways, int(rng.integers(2)))
            leaf(tree, 2 * step + 1)
        leaf(tree, 2 * depth)
    return {**{f"nodes_{k}": v for k, v in nodes.items()},
            **{f"target_{k}": v for k, v in targets.items()}}


@pytest.mark.parametrize("mode, how", [(0, 0), (1, 1), (2, 2), (3, 3), (4, 2), (5, 1)])
def test_ensemble(rng: np.random.Generator, mode: int, how: int) -> None:
    x = np.round(rows(rng, 20, 2), 1)
    weights = np.array([1.0, 2.0, 3.0, 4.0, 5.0], np.float32)

    def tensor(values: Any, dtype: str = "float32") -> Any:
        return numpy_helper.from_array(np.array(values, dtype))

    (y,) = run("TreeEnsemble", [x], domain="ai.onnx.ml", opset=5, n_targets=2,
               aggregate_function=how, post_transform=0, tree_roots=[0, 2],
               nodes_featureids=[0, 1, 1], nodes_splits=tensor([0.1, -0.2, 0.3]),
               nodes_modes=tensor([mode, 0, mode], "uint8"),
               nodes_truenodeids=[1, 0, 3], nodes_falsenodeids=[2, 1, 4],
               nodes_trueleafs=[0, 1, 1], nodes_falseleafs=[1, 1, 1],
               leaf_targetids=[0, 1, 0, 0, 1], leaf_weights=tensor(weights))
    test = [np.less_equal, np.less, np.greater_equal, np.greater, np.equal, np.not_equal][mode]
    first = np.where(test(x[:, 0], np.float32(0.1)), np.where(
        x[:, 1] <= np.float32(-0.2), 0, 1), 2)
    second = np.where(test(x[:, 1], np.float32(0.3)), 3, 4)
    targets = np.array([0, 1, 0, 0, 1])
    for row in range(20):
        for target in range(2):
            said = [weights[leaf] for leaf in (first[row], second[row]) if targets[leaf] == target]
            expected = {0: sum(said) / 2, 1: sum(said), 2: min(said, default=0.0),
                        3: max(said, default=0.0)}[how]  # 0 where no leaf says a thing
            assert y[row, target] == np.float32(expected)


def test_members(rng: np.random.Generator) -> None:
    """A test of membership, in a tree whose branches test others."""
    def tensor(values: Any, dtype: str = "float32") -> Any:
        return numpy_helper.from_array(np.array(values, dtype))

    x = rng.integers(0, 8, (40, 2)).astype(np.float32)
    compare("TreeEnsemble", [x], opset=5, n_targets=1, aggregate_function=1, post_transform=0,
            tree_roots=[0], nodes_featureids=[0, 1, 1], nodes_splits=tensor([0.0, 4.0, 0.0]),
            nodes_modes=tensor([6, 0, 6], "uint8"), nodes_truenodeids=[1, 0, 2],
            nodes_falsenodeids=[2, 1, 3], nodes_trueleafs=[0, 1, 1], nodes_falseleafs=[0, 1, 1],
            leaf_targetids=[0] * 4, leaf_weights=tensor([1.0, 10.0, 100.0, 1000.0]),
            membership_values=tensor([1.0, 4.0, 6.0, np.nan, 2.0, 3.0, np.nan]))


def test_nan_and_inf_stay_in_linear_models() -> None:
    x = np.array([[np.nan, 1.0], [np.inf, 1.0]], np.float32)
    (y,) = run("LinearRegressor", [x], coefficients=[1.0, 1.0], **ML)
    assert np.isnan(y[0, 0]) and np.isposinf(y[1, 0])
