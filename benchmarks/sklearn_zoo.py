"""Every kind of estimator that skl2onnx converts, LightGBM and XGBoost, against onnxruntime.

    python benchmarks/sklearn_zoo.py [--only NAME ...] [--rows 1,1000] [--threads 2] [--markdown]

Needs scikit-learn, skl2onnx, onnxmltools, lightgbm, xgboost and onnxruntime (`make sklearn-zoo`
installs them). Each estimator is fitted on made-up data, converted with the converter's defaults
(maps of probabilities included), and run by both engines, ours with onnxruntime's CPU provider
alone. Results are compared output by output; times are minima of interleaved runs, each on other
rows than the one before (a processor that has seen a row many times knows its way down a tree by
heart). Exits with 1 if any result differs or any model is refused.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ROWS, FEATURES = 400, 10


@dataclass(frozen=True)
class Recipe:
    """An estimator, the data it is fitted on, and how its model is made."""

    make: Callable[[], Any]
    data: str = "classes"
    options: dict[str, Any] | None = None
    tolerance: float = 2e-5  # of the largest number


# ---------------------------------------------------------------- data
def data_of(kind: str) -> tuple[Any, Any]:
    """Features and targets of a kind."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((ROWS, FEATURES)).astype(np.float32)
    score = x[:, 0] + 0.5 * x[:, 1] * x[:, 2] + 0.1 * rng.standard_normal(ROWS)
    classes = np.digitize(score, [-0.7, 0.7])
    if kind == "classes":
        return x, classes
    if kind == "words":
        return x, np.array(["low", "middle", "high"])[classes]
    if kind == "binary":
        return x, (score > 0).astype(np.int64)
    if kind == "two outputs":
        return x, np.stack([classes, (score > 0).astype(np.int64)], 1)
    if kind == "numbers":
        return x, score.astype(np.float32)
    if kind == "two numbers":
        return x, np.stack([score, -2 * score + x[:, 3]], 1).astype(np.float32)
    if kind == "positive":
        return x, np.exp(score).astype(np.float32)
    if kind == "counts":
        return rng.poisson(3.0, (ROWS, FEATURES)).astype(np.float32), classes
    if kind == "categories":
        return rng.integers(0, 4, (ROWS, 3)).astype(np.int64), classes
    if kind == "labels":
        return classes, None
    if kind == "word labels":
        return np.array(["low", "middle", "high"])[classes], None
    if kind == "missing":
        x[rng.random(x.shape) < 0.1] = np.nan
        return x, classes
    if kind == "strings":
        towns = np.array(["Rome", "Oslo", "Lima", "Suva"], object)
        return towns[rng.integers(0, 4, (ROWS, 2))], classes
    if kind == "texts":
        words = np.array(["this", "A", "cat,", "dog.", "runs", "over", "under", "the"], object)
        return np.array([" ".join(words[rng.integers(0, len(words), 8)])
                         for _ in range(ROWS)], object), classes
    if kind == "dicts":
        return [{"a": float(u), "b": float(v)} for u, v in x[:, :2]], None
    assert kind == "kernel"
    return np.exp(-((x[:, None] - x[None]) ** 2).sum(-1) / 20).astype(np.float32), classes


# ---------------------------------------------------------------- estimators
def recipes() -> dict[str, Recipe]:
    """All estimators, by name; a word after it names a variant."""
    import lightgbm
    import sklearn.calibration as calibration
    import sklearn.cluster as cluster
    import sklearn.compose as compose
    import sklearn.cross_decomposition as cross
    import sklearn.decomposition as decomposition
    import sklearn.discriminant_analysis as discriminant
    import sklearn.ensemble as ensemble
    import sklearn.feature_extraction as extraction
    import sklearn.feature_extraction.text as text
    import sklearn.feature_selection as selection
    import sklearn.gaussian_process as gaussian
    import sklearn.impute as impute
    import sklearn.linear_model as linear
    import sklearn.mixture as mixture
    import sklearn.model_selection as model_selection
    import sklearn.multiclass as multiclass
    import sklearn.multioutput as multioutput
    import sklearn.naive_bayes as bayes
    import sklearn.neighbors as neighbors
    import sklearn.neural_network as neural
    import sklearn.pipeline as pipeline
    import sklearn.preprocessing as pre
    import sklearn.random_projection as projection
    import sklearn.svm as svm
    import sklearn.tree as tree
    import xgboost

    def plain(room: Any, data: str, *names: str, **settings: Any) -> dict[str, Recipe]:
        return {n: Recipe(lambda n=n: getattr(room, n)(**settings), data) for n in names}

    logistic = linear.LogisticRegression
    return {
        **plain(linear, "classes", "LogisticRegression", "LogisticRegressionCV", "Perceptron",
                "PassiveAggressiveClassifier", "RidgeClassifier", "RidgeClassifierCV",
                "SGDClassifier"),
        "LogisticRegression words": Recipe(logistic, "words"),
        "LogisticRegression binary": Recipe(logistic, "binary"),
        "LogisticRegression no map": Recipe(logistic, "classes", {"zipmap": False}),
        "LogisticRegression columns": Recipe(logistic, "classes", {"zipmap": "columns"}),
        "SGDClassifier log": Recipe(lambda: linear.SGDClassifier(loss="log_loss")),
        **plain(linear, "numbers", "ARDRegression", "BayesianRidge", "ElasticNet", "ElasticNetCV",
                "HuberRegressor", "Lars", "LarsCV", "Lasso", "LassoCV", "LassoLars", "LassoLarsCV",
                "LassoLarsIC", "LinearRegression", "OrthogonalMatchingPursuit",
                "OrthogonalMatchingPursuitCV", "PassiveAggressiveRegressor", "QuantileRegressor",
                "RANSACRegressor", "Ridge", "RidgeCV", "SGDRegressor", "TheilSenRegressor"),
        **plain(linear, "two numbers", "MultiTaskElasticNet", "MultiTaskElasticNetCV",
                "MultiTaskLasso", "MultiTaskLassoCV"),
        **plain(linear, "positive", "GammaRegressor", "PoissonRegressor", "TweedieRegressor"),
        **plain(linear, "classes", "SGDOneClassSVM"),
        **plain(svm, "classes", "LinearSVC", "NuSVC", "SVC", "OneClassSVM"),
        **plain(svm, "numbers", "LinearSVR", "NuSVR", "SVR"),
        "SVC probability": Recipe(lambda: svm.SVC(probability=True)),
        "SVC binary probability": Recipe(lambda: svm.SVC(probability=True), "binary"),
        "SVC words": Recipe(lambda: svm.SVC(probability=True), "words"),
        "SVC linear": Recipe(lambda: svm.SVC(kernel="linear")),
        "SVC poly": Recipe(lambda: svm.SVC(kernel="poly", probability=True)),
        "NuSVC sigmoid": Recipe(lambda: svm.NuSVC(kernel="sigmoid", nu=0.2, probability=True)),
        "SVR poly": Recipe(lambda: svm.SVR(kernel="poly"), "numbers"),
        **plain(tree, "classes", "DecisionTreeClassifier", "ExtraTreeClassifier"),
        **plain(tree, "numbers", "DecisionTreeRegressor", "ExtraTreeRegressor"),
        "DecisionTreeClassifier two": Recipe(tree.DecisionTreeClassifier, "two outputs",
                                             {"zipmap": False}),
        **plain(ensemble, "classes", "AdaBoostClassifier", "BaggingClassifier",
                "ExtraTreesClassifier", "GradientBoostingClassifier",
                "HistGradientBoostingClassifier", "IsolationForest", "RandomForestClassifier",
                "RandomTreesEmbedding"),
        "RandomForestClassifier words": Recipe(ensemble.RandomForestClassifier, "words"),
        "RandomForestClassifier binary": Recipe(ensemble.RandomForestClassifier, "binary"),
        "GradientBoostingClassifier binary": Recipe(ensemble.GradientBoostingClassifier, "binary"),
        "HistGradientBoostingClassifier binary": Recipe(
            ensemble.HistGradientBoostingClassifier, "binary"),
        **plain(ensemble, "numbers", "AdaBoostRegressor", "BaggingRegressor",
                "ExtraTreesRegressor", "GradientBoostingRegressor",
                "HistGradientBoostingRegressor", "RandomForestRegressor"),
        "StackingClassifier": Recipe(lambda: ensemble.StackingClassifier(
            [("l", logistic()), ("t", tree.DecisionTreeClassifier(max_depth=4))])),
        "StackingRegressor": Recipe(lambda: ensemble.StackingRegressor(
            [("l", linear.Ridge()), ("t", tree.DecisionTreeRegressor(max_depth=4))]), "numbers"),
        "VotingClassifier": Recipe(lambda: ensemble.VotingClassifier(
            [("l", logistic()), ("t", tree.DecisionTreeClassifier(max_depth=4))])),
        "VotingClassifier soft": Recipe(lambda: ensemble.VotingClassifier(
            [("l", logistic()), ("t", tree.DecisionTreeClassifier(max_depth=4))], voting="soft")),
        "VotingRegressor": Recipe(lambda: ensemble.VotingRegressor(
            [("l", linear.Ridge()), ("t", tree.DecisionTreeRegressor(max_depth=4))]), "numbers"),
        **plain(bayes, "classes", "BernoulliNB", "GaussianNB"),
        **plain(bayes, "counts", "ComplementNB", "MultinomialNB"),
        **plain(bayes, "categories", "CategoricalNB"),
        **plain(neighbors, "classes", "KNeighborsClassifier", "LocalOutlierFactor",
                "NearestNeighbors", "NeighborhoodComponentsAnalysis"),
        "KNeighborsClassifier distance": Recipe(
            lambda: neighbors.KNeighborsClassifier(weights="distance")),
        "LocalOutlierFactor novelty": Recipe(lambda: neighbors.LocalOutlierFactor(novelty=True)),
        **plain(neighbors, "numbers", "KNeighborsRegressor"),
        "KNeighborsTransformer": Recipe(neighbors.KNeighborsTransformer),
        "RadiusNeighborsClassifier": Recipe(lambda: neighbors.RadiusNeighborsClassifier(9.0)),
        "RadiusNeighborsRegressor": Recipe(lambda: neighbors.RadiusNeighborsRegressor(9.0),
                                           "numbers"),
        **plain(neural, "classes", "MLPClassifier", max_iter=30),
        **plain(neural, "numbers", "MLPRegressor", max_iter=30),
        "MLPClassifier binary": Recipe(lambda: neural.MLPClassifier(max_iter=30), "binary"),
        **plain(discriminant, "classes", "LinearDiscriminantAnalysis",
                "QuadraticDiscriminantAnalysis"),
        **plain(mixture, "classes", "BayesianGaussianMixture", "GaussianMixture", n_components=3),
        **plain(cluster, "classes", "KMeans", "MiniBatchKMeans", n_clusters=4),
        # Its sums cancel: in float32 both engines are some 1e-4 off scikit-learn's own answer.
        "GaussianProcessRegressor": Recipe(gaussian.GaussianProcessRegressor, "numbers",
                                           tolerance=1e-3),
        **plain(gaussian, "classes", "GaussianProcessClassifier"),
        "CalibratedClassifierCV": Recipe(
            lambda: calibration.CalibratedClassifierCV(logistic())),
        "CalibratedClassifierCV isotonic": Recipe(
            lambda: calibration.CalibratedClassifierCV(logistic(), method="isotonic")),
        "OneVsRestClassifier": Recipe(lambda: multiclass.OneVsRestClassifier(logistic())),
        "OneVsOneClassifier": Recipe(lambda: multiclass.OneVsOneClassifier(logistic())),
        "MultiOutputClassifier": Recipe(
            lambda: multioutput.MultiOutputClassifier(logistic()), "two outputs",
            {"zipmap": False}),
        "MultiOutputRegressor": Recipe(
            lambda: multioutput.MultiOutputRegressor(linear.Ridge()), "two numbers"),
        "GridSearchCV": Recipe(
            lambda: model_selection.GridSearchCV(logistic(), {"C": [0.1, 1.0]})),
        "TunedThresholdClassifierCV": Recipe(
            lambda: model_selection.TunedThresholdClassifierCV(logistic()), "binary"),
        **plain(cross, "two numbers", "PLSRegression"),
        **plain(decomposition, "classes", "PCA", "TruncatedSVD", "IncrementalPCA", n_components=3),
        "KernelPCA": Recipe(lambda: decomposition.KernelPCA(n_components=3, kernel="rbf")),
        **plain(projection, "classes", "GaussianRandomProjection", n_components=3),
        **plain(pre, "classes", "Binarizer", "MaxAbsScaler", "MinMaxScaler", "Normalizer",
                "PolynomialFeatures", "PowerTransformer", "QuantileTransformer", "RobustScaler",
                "StandardScaler"),
        "Normalizer l1": Recipe(lambda: pre.Normalizer(norm="l1")),
        "Normalizer max": Recipe(lambda: pre.Normalizer(norm="max")),
        "QuantileTransformer normal": Recipe(
            lambda: pre.QuantileTransformer(n_quantiles=50, output_distribution="normal")),
        "KBinsDiscretizer": Recipe(lambda: pre.KBinsDiscretizer(5)),
        "KBinsDiscretizer ordinal": Recipe(lambda: pre.KBinsDiscretizer(5, encode="ordinal")),
        "FunctionTransformer": Recipe(pre.FunctionTransformer),
        "KernelCenterer": Recipe(pre.KernelCenterer, "kernel"),
        **plain(pre, "labels", "LabelBinarizer", "LabelEncoder"),
        "LabelEncoder words": Recipe(pre.LabelEncoder, "word labels"),
        **plain(pre, "categories", "OneHotEncoder", "OrdinalEncoder", "TargetEncoder"),
        "OneHotEncoder strings": Recipe(
            lambda: pre.OneHotEncoder(handle_unknown="ignore"), "strings"),
        "OrdinalEncoder strings": Recipe(pre.OrdinalEncoder, "strings"),
        **plain(impute, "missing", "SimpleImputer", "KNNImputer"),
        "SimpleImputer strings": Recipe(
            lambda: impute.SimpleImputer(strategy="most_frequent", missing_values=""), "strings"),
        **plain(selection, "classes", "GenericUnivariateSelect", "SelectFdr", "SelectFpr",
                "SelectFwe", "SelectPercentile", "VarianceThreshold"),
        "SelectKBest": Recipe(lambda: selection.SelectKBest(k=3)),
        "SelectFromModel": Recipe(lambda: selection.SelectFromModel(logistic())),
        "RFE": Recipe(lambda: selection.RFE(logistic(), n_features_to_select=4)),
        "RFECV": Recipe(lambda: selection.RFECV(logistic())),
        "DictVectorizer": Recipe(lambda: extraction.DictVectorizer(sparse=False), "dicts"),
        "FeatureHasher": Recipe(
            lambda: extraction.FeatureHasher(n_features=16, input_type="string"), "strings"),
        **plain(text, "texts", "CountVectorizer", "TfidfVectorizer"),
        "TfidfVectorizer bigrams": Recipe(
            lambda: text.TfidfVectorizer(ngram_range=(1, 2), stop_words=["the"]), "texts"),
        "TfidfVectorizer characters": Recipe(
            lambda: text.TfidfVectorizer(analyzer="char", ngram_range=(1, 3)), "texts"),
        "TfidfTransformer": Recipe(text.TfidfTransformer, "counts"),
        "Pipeline": Recipe(lambda: pipeline.make_pipeline(
            pre.StandardScaler(), decomposition.PCA(4), logistic())),
        "Pipeline of texts": Recipe(lambda: pipeline.make_pipeline(
            text.TfidfVectorizer(), logistic()), "texts"),
        "Pipeline of strings": Recipe(lambda: pipeline.make_pipeline(
            pre.OneHotEncoder(handle_unknown="ignore"), ensemble.RandomForestClassifier(50)),
            "strings"),
        "FeatureUnion": Recipe(lambda: pipeline.make_union(
            pre.StandardScaler(), decomposition.PCA(4))),
        "ColumnTransformer": Recipe(lambda: compose.ColumnTransformer(
            [("a", pre.StandardScaler(), [0, 1]), ("b", pre.MinMaxScaler(), [2, 3])])),
        "LGBMClassifier": Recipe(lambda: lightgbm.LGBMClassifier(verbose=-1)),
        "LGBMClassifier binary": Recipe(lambda: lightgbm.LGBMClassifier(verbose=-1), "binary"),
        "LGBMRegressor": Recipe(lambda: lightgbm.LGBMRegressor(verbose=-1), "numbers"),
        "XGBClassifier": Recipe(xgboost.XGBClassifier),
        "XGBClassifier binary": Recipe(xgboost.XGBClassifier, "binary"),
        "XGBRegressor": Recipe(xgboost.XGBRegressor, "numbers"),
        "XGBRFRegressor": Recipe(xgboost.XGBRFRegressor, "numbers"),
    }


# ---------------------------------------------------------------- models
def model_of(name: str, recipe: Recipe) -> tuple[bytes, dict[str, Any]]:
    """A fitted estimator as an ONNX model, and inputs for all rows."""
    x, y = data_of(recipe.data)
    estimator = recipe.make()
    estimator.fit(x) if y is None else estimator.fit(x, y)
    if name.startswith(("LGBM", "XGB")):
        proto = _boosted(name, estimator)
        return proto.SerializeToString(), {"x": x}
    from skl2onnx import convert_sklearn

    kinds, feeds = _inputs(recipe.data, x)
    options: Any = {id(estimator): recipe.options} if recipe.options else None
    if recipe.data == "texts":  # onnxruntime refuses a locale that the machine does not have
        texts = estimator if hasattr(estimator, "vocabulary_") else estimator[0]
        options = {id(texts): {"locale": "C"}}
    proto = convert_sklearn(estimator, initial_types=kinds, options=options,
                            target_opset={"": 21, "ai.onnx.ml": 3})
    return proto.SerializeToString(), feeds


def _boosted(name: str, estimator: Any) -> Any:
    import onnxmltools
    from onnxmltools.convert.common.data_types import FloatTensorType

    convert = onnxmltools.convert_lightgbm if name.startswith("LGBM") else (
        onnxmltools.convert_xgboost)
    return convert(estimator, initial_types=[("x", FloatTensorType([None, FEATURES]))],
                   target_opset=15)


def _inputs(kind: str, x: Any) -> tuple[list[Any], dict[str, Any]]:
    from skl2onnx.common import data_types as t

    if kind == "dicts":
        return [("x", t.DictionaryType(t.StringTensorType([1]), t.FloatTensorType([])))], {"x": x}
    if kind == "texts":
        return [("x", t.StringTensorType([None, 1]))], {"x": x.reshape(-1, 1)}
    if x.dtype.kind in "OU":
        x = x.astype(object)
        return [("x", t.StringTensorType([None, *x.shape[1:]]))], {"x": x}
    tensor = t.FloatTensorType if x.dtype == np.float32 else t.Int64TensorType
    return [("x", tensor([None, *x.shape[1:]]))], {"x": x}


def some_rows(feeds: dict[str, Any], count: int, first: int = 0) -> dict[str, Any]:
    """So many rows of the inputs, repeated where there are too few."""
    x = feeds["x"]
    if isinstance(x, list):
        return {"x": x[first]}  # a map is one row
    return {"x": np.ascontiguousarray(x[np.arange(first, first + count) % len(x)])}


# ---------------------------------------------------------------- comparing
def difference(mine: Any, theirs: Any, tolerance: float) -> str:
    """How a result differs from onnxruntime's; nothing where it does not."""
    if isinstance(theirs, list):
        if not isinstance(mine, list) or len(mine) != len(theirs):
            return f"{type(mine).__name__} for a list of {len(theirs)}"
        return next((d for m, t in zip(mine, theirs, strict=True)
                     if (d := difference(m, t, tolerance))), "")
    if isinstance(theirs, dict):
        if not isinstance(mine, dict) or list(mine) != list(theirs):
            return f"keys {list(mine)[:4]} for {list(theirs)[:4]}"
        mine, theirs = np.array(list(mine.values())), np.array(list(theirs.values()))
    mine, theirs = np.asarray(mine), np.asarray(theirs)
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return f"{mine.dtype}{mine.shape} for {theirs.dtype}{theirs.shape}"
    if theirs.dtype.kind not in "fc":
        wrong = (mine != theirs).mean() if theirs.size else 0.0
        return f"{wrong:.1%} differ" if wrong else ""
    scale = np.abs(theirs[np.isfinite(theirs)]).max(initial=1e-3)
    close = np.isclose(mine, theirs, rtol=1e-3, atol=tolerance * scale, equal_nan=True)
    if close.all():
        return ""
    worst = np.nanmax(np.abs(mine.astype(np.float64) - theirs)[~close])
    return f"off by {worst:.2g} ({(~close).mean():.1%})"


def raced(engines: Sequence[Any], batches: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """The best times of both for each batch, taken in turns, and the median of these in seconds."""
    best = np.full((2, len(batches)), np.inf)
    end = time.perf_counter() + 0.4
    rounds = 0
    while rounds < 3 or (time.perf_counter() < end and rounds < 60):
        for k, engine in enumerate(engines):
            for i, batch in enumerate(batches):
                start = time.perf_counter()
                engine.run(None, batch)
                best[k, i] = min(best[k, i], time.perf_counter() - start)
        rounds += 1
    return float(np.median(best[0])), float(np.median(best[1]))


@dataclass(frozen=True)
class Line:
    """What came of one estimator."""

    name: str
    verdict: str  # right | WRONG | REFUSED | not converted
    detail: str = ""
    times: tuple[tuple[float, float], ...] = ()


def tried(name: str, recipe: Recipe, rows: Sequence[int], threads: int) -> Line:
    """Convert, run and compare one estimator."""
    import onnxruntime

    import terrazzo.ort as ort

    try:
        model, feeds = model_of(name, recipe)
        theirs = onnxruntime.InferenceSession(
            model, _with_threads(onnxruntime, threads), providers=["CPUExecutionProvider"])
        wanted = theirs.run(None, some_rows(feeds, 57))
    except Exception as error:
        return Line(name, "not converted", f"{type(error).__name__}: {error}"[:100])
    try:
        mine = ort.InferenceSession(model, _with_threads(ort, threads),
                                    providers=["CPUExecutionProvider"])
        got = mine.run(None, some_rows(feeds, 57))
    except Exception as error:
        return Line(name, "REFUSED", f"{type(error).__name__}: {error}"[:200])
    wrong = [f"{o.name}: {d}" for o, m, t in zip(theirs.get_outputs(), got, wanted, strict=True)
             if (d := difference(m, t, recipe.tolerance))]
    times = []
    for count in rows:
        batches = [some_rows(feeds, count, i) for i in range(0, ROWS, 4 if count < 50 else 80)]
        try:
            theirs.run(None, batches[0])
        except Exception:  # some models of onnxruntime's fail at other sizes than they were made at
            break
        times.append(raced([mine, theirs], batches))
    return Line(name, "WRONG" if wrong else "right", "; ".join(wrong), tuple(times))


def _with_threads(engine: Any, threads: int) -> Any:
    options = engine.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return options


def main() -> int:
    """Run what is asked for, print a line each, and say how it went in the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", nargs="*", default=[], help="estimators whose name starts so")
    parser.add_argument("--rows", default="1,1000", help="sizes of batches to time")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--markdown", action="store_true", help="a table as in docs/onnx.md")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = [int(n) for n in args.rows.split(",") if n]
    chosen = {n: r for n, r in recipes().items()
              if not args.only or any(n.startswith(o) for o in args.only)}
    lines = []
    for name, recipe in chosen.items():
        line = tried(name, recipe, rows, args.threads)
        lines.append(line)
        print(_text(line, args.markdown), flush=True)
    return _summary(lines, rows)


def _text(line: Line, markdown: bool) -> str:
    times = [f"{mine * 1e6:.0f} us, {mine / theirs:.2f}" for mine, theirs in line.times]
    if markdown:
        return f"| {' | '.join([line.name, line.verdict, *times])} |"
    return f"{line.name:38s} {line.verdict:14s} {'   '.join(times)} {line.detail}"


def _summary(lines: Sequence[Line], rows: Sequence[int]) -> int:
    counts = {v: sum(li.verdict == v for li in lines) for v in (
        "right", "WRONG", "REFUSED", "not converted")}
    print(", ".join(f"{n} {v}" for v, n in counts.items()))
    for k, count in enumerate(rows):
        ratios = np.array([li.times[k][0] / li.times[k][1] for li in lines if len(li.times) > k])
        if ratios.size:
            print(f"{count} rows: geometric mean {np.exp(np.log(ratios).mean()):.2f} of "
                  f"onnxruntime's time, {(ratios > 1.2).sum()} of {ratios.size} above 1.2")
    return int(not counts["right"] or counts["WRONG"] > 0 or counts["REFUSED"] > 0)


if __name__ == "__main__":
    sys.exit(main())
