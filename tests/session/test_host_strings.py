"""Strings, maps and encoders on the host, against onnxruntime, with the CPU provider alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import terrazzo.ort as tz_ort

pytestmark = pytest.mark.onnx
rt = pytest.importorskip("onnxruntime")
ML, MS = "ai.onnx.ml", "com.microsoft"
WORDS = np.array([["cat", "dog"], ["", "Äpfel"], ["cat", "x y"]], object)


def model_of(nodes: list[Any], feeds: dict[str, Any], outputs: list[str], ml: int = 3) -> bytes:
    infos = [helper.make_tensor_value_info(
        n, TensorProto.STRING if x.dtype == object else helper.np_dtype_to_tensor_dtype(x.dtype),
        [f"{n}_{i}" if n == "x" else s for i, s in enumerate(x.shape)]) for n, x in feeds.items()]
    results = [onnx.ValueInfoProto(name=n) for n in outputs]
    return helper.make_model(
        helper.make_graph(nodes, "g", infos, results), ir_version=9, opset_imports=[
            helper.make_opsetid("", 20), helper.make_opsetid(ML, ml),
            helper.make_opsetid(MS, 1)]).SerializeToString()


def same(mine: Any, theirs: Any) -> None:
    """Equal in kind and content, strings and dictionaries to the letter."""
    if isinstance(theirs, (list, dict)):
        assert type(mine) is type(theirs) and len(mine) == len(theirs)
        if isinstance(theirs, dict):
            assert list(mine) == list(theirs)
            mine, theirs = list(mine.values()), list(theirs.values())
        for m, t in zip(mine, theirs, strict=True):
            same(m, t)
    elif isinstance(theirs, np.ndarray):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        if theirs.dtype.kind == "f":
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(mine, theirs)
    else:
        assert mine == pytest.approx(theirs, rel=1e-5)


def compare(nodes: list[Any], feeds: dict[str, Any], *, ml: int = 3) -> list[Any]:
    outputs = list(nodes[-1].output)
    model = model_of(nodes, feeds, outputs, ml)
    theirs = rt.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)
    session = tz_ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    for _ in range(2):  # the second run finds what the first one made of attributes
        mine = session.run(None, feeds)
        for m, t in zip(mine, theirs, strict=True):
            same(m, t)
    return mine


def node(operator: str, inputs: list[str], outputs: int = 1, domain: str = "", **attrs: Any) -> Any:
    return helper.make_node(operator, inputs, [f"y{i}" for i in range(outputs)], domain=domain,
                            name="node", **attrs)


# ---------------------------------------------------------------- Cast
def test_numbers_are_spelled_as_onnxruntime_does() -> None:
    x = np.array([0.1, 1, 1e10, 1e-10, 123456789, np.nan, np.inf, -np.inf, -0.0, 1e5, 1e8, 1 / 3])
    to_string = [node("Cast", ["x"], to=TensorProto.STRING)]
    compare(to_string, {"x": x})
    compare(to_string, {"x": x.astype(np.float32)})
    compare(to_string, {"x": np.array([[True], [False]])})
    compare(to_string, {"x": np.array([3, -2**63, 2**63 - 1])})
    compare(to_string, {"x": np.array([2**64 - 1], np.uint64)})


def test_strings_are_read_as_c_does() -> None:
    texts = np.array(["1.5", " 3", "1e5", "3x", "-7"], object)
    compare([node("Cast", ["x"], to=TensorProto.FLOAT)], {"x": texts})
    compare([node("Cast", ["x"], to=TensorProto.INT64)], {"x": texts})
    compare([node("Cast", ["x"], to=TensorProto.DOUBLE)],
            {"x": np.array(["INF", "-inf", "NaN", "+Infinity"], object)})
    with pytest.raises(Exception, match="no number"):
        tz_ort.InferenceSession(model_of([node("Cast", ["x"], to=1)], {"x": texts}, ["y0"])).run(
            None, {"x": np.array(["abc"], object)})


# ---------------------------------------------------------------- moving strings
I64 = {"k": np.array([1, 0])}


@pytest.mark.parametrize("step, more", [
    (node("Reshape", ["x", "k"]), {"k": np.array([2, -1])}),
    (node("Unsqueeze", ["x", "k"]), {"k": np.array([0, -1])}),
    (node("Transpose", ["x"]), {}), (node("Flatten", ["x"], axis=0), {}),
    (node("Gather", ["x", "k"], axis=1), {"k": np.array([[1, -2], [0, 0]])}),
    (node("GatherElements", ["x", "k"], axis=1), {"k": np.array([[1], [0], [-1]])}),
    (node("GatherND", ["x", "k"]), {"k": np.array([[2, 1], [0, 0]])}),
    (node("Concat", ["x", "x"], axis=-1), {}), (node("Identity", ["x"]), {}),
    (node("Slice", ["x", "k", "m", "a", "s"]), {"k": np.array([2, 0]), "m": np.array([-9, 1]),
                                                "a": np.array([0, 1]), "s": np.array([-1, 1])}),
    (node("Tile", ["x", "k"]), {"k": np.array([1, 2])}),
    (node("Expand", ["x", "k"]), {"k": np.array([2, 1, 1])}),
    (node("Where", ["c", "x", "x"]), {"c": np.array([[True], [False], [True]])}),
    (node("ScatterElements", ["x", "k", "x"], axis=0), {"k": np.array([[2, 1], [0, 2], [1, 0]])}),
    (node("Split", ["x"], outputs=2, axis=1, num_outputs=2), {}),
    (node("Shape", ["x"]), {}), (node("Size", ["x"]), {}),
    (node("Equal", ["x", "x"]), {}), (node("Unique", ["x"], outputs=4), {}),
    (node("Compress", ["x", "c"], axis=0), {"c": np.array([True, False, True])}),
    (node("StringConcat", ["x", "x"]), {}), (node("StringSplit", ["x"], outputs=2), {}),
    (node("StringSplit", ["x"], outputs=2, delimiter="a"), {}),
    (node("RegexFullMatch", ["x"], pattern="[a-z]+"), {}),
], ids=lambda v: v.op_type if hasattr(v, "op_type") else "")
def test_strings_move_as_numbers_do(step: Any, more: dict[str, Any]) -> None:
    compare([step], {"x": WORDS, **more})


def test_squeeze_and_normalize() -> None:
    compare([node("Squeeze", ["x"])], {"x": WORDS[:1]})
    x = np.array(["Cat", "dog", "bird"], object)
    for case in ("LOWER", "UPPER", "NONE"):
        compare([node("StringNormalizer", ["x"], case_change_action=case, stopwords=["dog"],
                      is_case_sensitive=0, locale="C")], {"x": x})


# ---------------------------------------------------------------- tokens
TEXTS = np.array(["the cat, the dog", "", "a  b", "Äpfel und Birnen!"], object)


@pytest.mark.parametrize("options", [
    {"separators": [" "]}, {"separators": [" ", ","], "mincharnum": 2},
    {"separators": [""]}, {"tokenexp": "[a-zA-Z0-9_]+"},
    {"tokenexp": "[a-z]+", "mincharnum": 3}, {"separators": [" "], "mark": 1},
    {"tokenexp": "(t)?h?e|[a-z]", "mincharnum": 1},
], ids=str)
def test_tokenizer(options: dict[str, Any]) -> None:
    settings = {"mark": 0, "mincharnum": 1, "pad_value": "#", **options}
    for x in (TEXTS, TEXTS.reshape(2, 2)):
        compare([node("Tokenizer", ["x"], domain=MS, **settings)], {"x": x})


def test_tfidf_of_strings() -> None:
    x = np.array([["cat", "dog", "cat", "owl"], ["dog", "dog", "ape", "cat"]], object)
    compare([node("TfIdfVectorizer", ["x"], mode="TFIDF", min_gram_length=1, max_gram_length=2,
                  max_skip_count=1, ngram_counts=[0, 3], ngram_indexes=[0, 1, 2, 3, 4],
                  pool_strings=["cat", "dog", "owl", "cat", "dog", "dog", "dog"],
                  weights=[1.0, 2.0, 0.5, 3.0, 1.5])], {"x": x})


NUMBERED = np.array(["the cat, the dog", "", "a  b", "Äpfel und\xa0Birnen!", "a\0the a", "THE\nb\n",
                     "\U0001f600 a \U0001f600", "#"], object)


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("options", [
    {"separators": [" "]}, {"separators": [""]}, {"tokenexp": "."},
    {"tokenexp": "[a-zA-Z0-9_]+"}, {"tokenexp": "[a-z]+", "mincharnum": 3},
    {"tokenexp": "[^ ,]+"}, {"tokenexp": "[^,]+"}, {"tokenexp": r"[a-z]{1,2}"},
    {"separators": [" "], "mark": 1}, {"tokenexp": "[a-z]+", "pad_value": "the"},
], ids=str)
def test_tokens_that_are_counted(options: dict[str, Any], seen: bool) -> None:
    """Cut all at once, or one by one where somebody sees the tokens, as onnxruntime counts them."""
    words = ["the", "a", "b", "#", "Ä", "\U0001f600", " ", "cat,", "\x02"]
    settings = {"mark": 0, "mincharnum": 1, "pad_value": "#", **options}
    steps = [helper.make_node("Tokenizer", ["x"], ["tokens"], domain=MS, **settings),
             helper.make_node("Flatten", ["tokens"], ["flat"], axis=1),
             helper.make_node("TfIdfVectorizer", ["flat"], ["counts"], mode="TF", pool_strings=[
                 *words, "a", "b", "the", "a"], ngram_counts=[0, len(words)], max_skip_count=0,
                 min_gram_length=1, max_gram_length=2, ngram_indexes=list(range(len(words) + 2)))]
    for x in (NUMBERED, NUMBERED[:1], NUMBERED[1:2], NUMBERED[[3, 0]]):
        model = model_of(steps, {"x": x}, ["counts", "flat"] if seen else ["counts"])
        theirs, mine = (engine.InferenceSession(model, providers=["CPUExecutionProvider"]).run(
            None, {"x": x}) for engine in (rt, tz_ort))
        same(mine, theirs)


# ---------------------------------------------------------------- maps
def test_maps_of_scores(rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 3)).astype(np.float32)
    compare([node("ZipMap", ["x"], domain=ML, classlabels_int64s=[4, 2, 9])], {"x": x})
    compare([node("ZipMap", ["x"], domain=ML, classlabels_strings=["a", "b", "c"])], {"x": x})


@pytest.mark.parametrize("count", [1, 64, 65, 200])
def test_maps_of_many_scores(count: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, count)).astype(np.float32)
    labels = rng.permutation(count) - 5
    words = [f"{n} it's \"{{v0}}\" \\ Ä" for n in labels]
    compare([node("ZipMap", ["x"], domain=ML, classlabels_int64s=labels.tolist())], {"x": x})
    compare([node("ZipMap", ["x"], domain=ML, classlabels_strings=words)], {"x": x})


def test_dictionaries_go_in() -> None:
    text = onnx.helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(1, []))
    step = node("DictVectorizer", ["x"], domain=ML, string_vocabulary=["b", "a", "c"])
    model = helper.make_model(
        helper.make_graph([step], "g", [helper.make_value_info("x", text)],
                          [onnx.ValueInfoProto(name="y0")]),
        ir_version=9, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(ML, 3)]
    ).SerializeToString()
    feed = {"x": {"a": 1.5, "c": 2.0, "z": 9.0}}
    theirs, mine = (engine.InferenceSession(model, providers=["CPUExecutionProvider"])
                    for engine in (rt, tz_ort))
    assert mine.get_inputs()[0].type == theirs.get_inputs()[0].type == "map(string,tensor(float))"
    same(mine.run(None, feed), theirs.run(None, feed))


# ---------------------------------------------------------------- encoders
@pytest.mark.parametrize("options, x", [
    ({"keys_strings": ["cat", "dog"], "values_int64s": [3, 5], "default_int64": -7}, WORDS),
    ({"keys_strings": ["cat", "dog"], "values_floats": [3.5, 5.5]}, WORDS),
    ({"keys_strings": ["cat", "dog"], "values_strings": ["Katze", "Hund"]}, WORDS),
    ({"keys_int64s": [1, 2], "values_strings": ["one", "two"], "default_string": "many"},
     np.array([2, 7, 1])),
    ({"keys_floats": [1.5, float("nan")], "values_strings": ["one", "none"]},
     np.array([np.nan, 1.5, 2.0], np.float32)),
], ids=str)
def test_label_encoders(options: dict[str, Any], x: np.ndarray) -> None:
    compare([node("LabelEncoder", ["x"], domain=ML, **options)], {"x": x}, ml=4)


def test_first_label_encoder_and_categories() -> None:
    words = ["cat", "dog"]
    for x in (WORDS, np.array([0, 1, 5])):
        compare([node("LabelEncoder", ["x"], domain=ML, classes_strings=words)], {"x": x}, ml=1)
        compare([node("CategoryMapper", ["x"], domain=ML, cats_strings=words, cats_int64s=[0, 5])],
                {"x": x})


def test_one_hot_of_strings() -> None:
    compare([node("OneHotEncoder", ["x"], domain=ML, cats_strings=["dog", "cat"], zeros=1)],
            {"x": WORDS})
    compare([node("ArrayFeatureExtractor", ["x", "k"], domain=ML)], {"x": WORDS, **I64})


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_one_hot_of_numbers_that_have_to_be_known(dtype: Any) -> None:
    numbers = np.array([[7, -3], [40, 7], [7, 7]], dtype)
    one_hot = [node("OneHotEncoder", ["x"], domain=ML, cats_int64s=[40, -3, 7], zeros=0)]
    compare(one_hot, {"x": numbers})
    session = tz_ort.InferenceSession(model_of(one_hot, {"x": numbers}, ["y0"]),
                                      providers=["CPUExecutionProvider"])
    for unknown in (-4, 8, 41):
        with pytest.raises(Exception, match=f"does not know.*{unknown}"):
            session.run(None, {"x": np.array([[7, unknown]], dtype)})


def columns_of(*ways: str) -> list[Any]:
    """Encoders of the columns of x, in tables of their own."""
    steps = []
    for i, way in enumerate(ways):
        steps.append(helper.make_node("Constant", [], [f"at{i}"], value_ints=[i % 2]))
        if i % 2:
            steps.append(helper.make_node("ArrayFeatureExtractor", ["x", f"at{i}"], [f"c{i}"],
                                          domain=ML))
        else:
            steps.append(helper.make_node("Gather", ["x", f"at{i}"], [f"c{i}"], axis=1))
        keys = [["cat", "dog"], ["dog", "x y", "Äpfel"]][i % 2]
        if way == "hot":
            steps.append(helper.make_node("OneHotEncoder", [f"c{i}"], [f"h{i}"], domain=ML,
                                          cats_strings=keys, zeros=1))
            steps.append(helper.make_node("Flatten", [f"h{i}"], [f"y{i}"], axis=1))
        elif way == "floats":
            steps.append(helper.make_node(
                "LabelEncoder", [f"c{i}"], [f"y{i}"], domain=ML, keys_strings=keys,
                values_floats=[1.5, -2.5, 7.0][:len(keys)], default_float=0.25))
        else:
            steps.append(helper.make_node(
                "LabelEncoder", [f"c{i}"], [f"l{i}"], domain=ML, keys_strings=keys,
                values_int64s=[10, 20, 30][:len(keys)]))
            steps.append(helper.make_node("Cast", [f"l{i}"], [f"y{i}"], to=1))
    steps.append(helper.make_node("Concat", [f"y{i}" for i in range(len(ways))], ["y"], axis=1))
    return steps


@pytest.mark.parametrize("ways", [("ints",), ("hot",), ("hot", "hot"), ("floats", "hot", "ints"),
                                  ("ints", "ints", "floats", "hot")], ids="-".join)
def test_columns_are_encoded(ways: tuple[str, ...]) -> None:
    compare(columns_of(*ways), {"x": WORDS})
    compare(columns_of(*ways), {"x": WORDS[:1]})
    session = tz_ort.InferenceSession(model_of(columns_of(*ways), {"x": WORDS}, ["y"]))
    (looked_up,) = (n for n in session._session.model.graph.node if n.op_type == "Numbers")
    assert looked_up.input[0] == "x"  # all strings at once, before anything is moved


def test_strings_that_somebody_sees_stay_strings() -> None:
    steps = columns_of("hot", "ints")
    for seen in ("c0", "c1"):
        model = model_of(steps, {"x": WORDS}, ["y", seen])
        theirs, mine = (engine.InferenceSession(model, providers=["CPUExecutionProvider"]).run(
            None, {"x": WORDS}) for engine in (rt, tz_ort))
        same(mine, theirs)


def test_strings_that_a_branch_reads_stay_strings() -> None:
    branches = {name: helper.make_graph(
        [helper.make_node("Identity", ["c0"], [f"{name}_z"])], name, [],
        [helper.make_tensor_value_info(f"{name}_z", TensorProto.STRING, None)])
        for name in ("then_branch", "else_branch")}
    steps = [*columns_of("hot", "ints"), helper.make_node("If", ["p"], ["z"], **branches)]
    feeds = {"x": WORDS, "p": np.array(True)}
    model = model_of(steps, feeds, ["y", "z"])
    mine = tz_ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)
    same(mine, rt.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds))


def test_strings_that_have_to_be_known() -> None:
    one_hot = [node("OneHotEncoder", ["x"], domain=ML, cats_strings=["dog", "cat"], zeros=0)]
    known = np.array([["cat"], ["dog"]], object)
    compare(one_hot, {"x": known})
    session = tz_ort.InferenceSession(model_of(one_hot, {"x": known}, ["y0"]),
                                      providers=["CPUExecutionProvider"])
    for _ in range(2):
        with pytest.raises(Exception, match="OneHotEncoder does not know"):
            session.run(None, {"x": np.array([["cat"], ["owl"]], object)})
        assert session.run(None, {"x": known})[0].shape == (2, 1, 2)


# ---------------------------------------------------------------- labels that are strings
def test_classifiers_with_words_for_labels(rng: np.random.Generator) -> None:
    x = rng.standard_normal((6, 3)).astype(np.float32)
    words = ["low", "middle", "high"]
    compare([node("LinearClassifier", ["x"], outputs=2, domain=ML, classlabels_strings=words,
                  coefficients=rng.standard_normal(9).tolist(), intercepts=[0.1, 0.0, -0.1],
                  post_transform="SOFTMAX")], {"x": x})
    compare([node("SVMClassifier", ["x"], outputs=2, domain=ML, classlabels_strings=words[:2],
                  coefficients=rng.standard_normal(4).tolist(), rho=[0.1], kernel_type="RBF",
                  kernel_params=[0.3, 0.0, 3.0], vectors_per_class=[2, 2],
                  support_vectors=rng.standard_normal(12).tolist())], {"x": x})
    compare([helper.make_node(
        "TreeEnsembleClassifier", ["x"], ["label", "scores"], domain=ML,
        classlabels_strings=words, nodes_treeids=[0, 0, 0], nodes_nodeids=[0, 1, 2],
        nodes_featureids=[1, 0, 0], nodes_values=[0.1, 0.0, 0.0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], nodes_truenodeids=[1, 0, 0],
        nodes_falsenodeids=[2, 0, 0], class_treeids=[0, 0, 0], class_nodeids=[1, 2, 2],
        class_ids=[0, 1, 2], class_weights=[0.5, 0.25, 0.75]),
        node("ZipMap", ["scores"], domain=ML, classlabels_strings=words)], {"x": x})
