"""Converters of classical learning against ONNX's evaluator and arithmetic by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from one_node import check, imported, one_node, run
from onnx import numpy_helper

pytestmark = pytest.mark.onnx
ML: dict[str, Any] = {"domain": "ai.onnx.ml", "opset": 3}


def rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


# ---------------------------------------------------------------- features
def test_features(rng: np.random.Generator) -> None:
    x = rows(rng, 4, 3)
    check("ArrayFeatureExtractor", [x, np.array([[2, 0]])], **ML)
    check("ArrayFeatureExtractor", [x[0], np.array([1])], **ML)
    check("Binarizer", [x], threshold=0.3, **ML)
    check("Scaler", [x], offset=[0.1, 0.2, 0.3], scale=[1.0, 2.0, 3.0], **ML)
    for norm in ("MAX", "L1", "L2"):
        check("Normalizer", [x], norm=norm, **ML)
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
    assert "strings" in imported(model, {"x0": x}).put_off[0]


# ---------------------------------------------------------------- linear models
def test_regression(rng: np.random.Generator) -> None:
    x = rows(rng, 5, 3)
    check("LinearRegressor", [x], coefficients=[1.0, 2.0, 3.0, -1.0, 0.5, 0.25], targets=2,
          intercepts=[0.5, -0.5], post_transform="NONE", **ML)
    for kernel in ("LINEAR", "POLY", "RBF", "SIGMOID"):
        check("SVMRegressor", [x], coefficients=[0.5, -1.5], n_supports=2, rho=[0.25],
              support_vectors=rows(rng, 6).tolist(), kernel_type=kernel,
              kernel_params=[0.3, 0.1, 2.0], post_transform="NONE", rtol=1e-4, **ML)


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"])
@pytest.mark.parametrize("classes", [2, 3])
def test_classification(rng: np.random.Generator, classes: int, transform: str) -> None:
    x = rows(rng, 6, 4)
    count = 1 if classes == 2 else 3
    check("LinearClassifier", [x], outputs=2, coefficients=rows(rng, 4 * count).tolist(),
          intercepts=rows(rng, count).tolist(), classlabels_ints=[10, 20, 30][:classes],
          multi_class=0, post_transform=transform, **ML)


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


def test_older_classifier(rng: np.random.Generator) -> None:
    x = rows(rng, 12, 3)
    check("TreeEnsembleClassifier", [x], outputs=2, classlabels_int64s=[5, 9],
          post_transform="SOFTMAX", **OLDER, **ML, **{f"class_{k}": v for k, v in LEAVES.items()})
    one = {**LEAVES, "ids": [0] * 5}
    for transform in ("NONE", "LOGISTIC"):
        check("TreeEnsembleClassifier", [x], outputs=2, classlabels_int64s=[5, 9],
              post_transform=transform, **OLDER, **ML, **{f"class_{k}": v for k, v in one.items()})


@pytest.mark.parametrize("how", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", range(6))
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
    largest = np.finfo(np.float32).max
    for row in range(20):
        for target in range(2):
            said = [weights[leaf] for leaf in (first[row], second[row]) if targets[leaf] == target]
            expected = {0: sum(said) / 2, 1: sum(said), 2: min(said, default=largest),
                        3: max(said, default=-largest)}[how]
            assert y[row, target] == np.float32(expected)


def test_nan_and_inf_stay_in_linear_models() -> None:
    x = np.array([[np.nan, 1.0], [np.inf, 1.0]], np.float32)
    (y,) = run("LinearRegressor", [x], coefficients=[1.0, 1.0], **ML)
    assert np.isnan(y[0, 0]) and np.isposinf(y[1, 0])
