"""Operators that the host runs, against ONNX's evaluator, numpy and Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

from terrazzo.errors import IndexOutOfRange, ModelError
from terrazzo.frontends.onnx.session.host_ops import HOST_OPS, NodeAttributes
from terrazzo.frontends.onnx.session.re2 import python_pattern

pytestmark = pytest.mark.onnx


def host(operator: str, *inputs: Any, version: int = 22, **attributes: Any) -> list[Any]:
    return HOST_OPS["", operator](attributes, version, list(inputs))


def reference(operator: str, inputs: Sequence[np.ndarray | None], outputs: int = 1,
              opset: int = 22, **attributes: Any) -> list[Any]:
    from onnx import ValueInfoProto, helper
    from onnx.reference import ReferenceEvaluator

    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    results = [f"y{i}" for i in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(operator, names, results, **attributes)], "one",
        [ValueInfoProto(name=n) for n in names if n], [ValueInfoProto(name=r) for r in results])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return ReferenceEvaluator(model).run(None, {
        n: x for n, x in zip(names, inputs, strict=True) if n})


def check(operator: str, *inputs: np.ndarray | None, outputs: int = 1, opset: int = 22,
          **attributes: Any) -> None:
    expected = reference(operator, inputs, outputs, opset, **attributes)
    found = host(operator, *inputs, version=opset, **attributes)
    for mine, theirs in zip(found, expected, strict=False):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        np.testing.assert_array_equal(mine, theirs)


# ---------------------------------------------------------------- as many as there are
@pytest.mark.parametrize("x", [
    np.array([[1, 0], [0, 2], [3, 4]], np.int32), np.array([0.0, -0.0, np.nan, 1e-40], np.float32),
    np.zeros((0, 3), np.float32), np.zeros((2, 2), bool), np.array([0, 1.5], ml_dtypes.bfloat16)],
    ids=lambda x: str(x.dtype))
def test_non_zero(x: np.ndarray) -> None:
    check("NonZero", x)


def test_non_zero_of_a_scalar_has_no_rows() -> None:
    (found,) = host("NonZero", np.asarray(3.0))
    assert found.shape == (0, 1) and found.dtype == np.int64


@pytest.mark.parametrize("axis", [None, 0, -1])
def test_compress(axis: int | None) -> None:
    x = np.arange(12.0).reshape(3, 4)
    check("Compress", x, np.array([False, True, True]), **({} if axis is None else {"axis": axis}))


@pytest.mark.parametrize("dtype", [np.float32, np.int8, ml_dtypes.bfloat16])
def test_unique_without_an_axis(dtype: Any, rng: np.random.Generator) -> None:
    x = rng.integers(-3, 3, (4, 5)).astype(dtype)
    check("Unique", x, outputs=4)
    check("Unique", x.reshape(-1), outputs=4, sorted=0)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_unique_along_an_axis(axis: int, rng: np.random.Generator) -> None:
    x = rng.integers(0, 2, (3, 4, 2)).astype(np.float32)
    check("Unique", x, outputs=4, axis=axis)


@pytest.mark.parametrize("axis", [0, 1])
def test_unique_in_the_order_of_appearance(axis: int, rng: np.random.Generator) -> None:
    x = rng.integers(0, 2, (6, 2)).astype(np.int64)
    x = x if axis == 0 else x.T
    found, first, inverse, counts = host("Unique", x, axis=axis, sorted=0)
    assert (np.diff(first) > 0).all() and counts.sum() == x.shape[axis]
    np.testing.assert_array_equal(np.take(x, first, axis=axis), found)
    np.testing.assert_array_equal(np.take(found, inverse, axis=axis), x)


def test_unique_of_nothing() -> None:
    check("Unique", np.zeros(0, np.float32), outputs=4)


@pytest.mark.parametrize("numbers", [(0, 7, 2), (7, 0, -3), (3, 3, 1), (0.0, 1.0, 0.25)], ids=str)
def test_range(numbers: tuple[float, ...]) -> None:
    dtype = np.float32 if isinstance(numbers[0], float) else np.int32
    check("Range", *(np.asarray(dtype(n)) for n in numbers))


def test_range_without_steps_is_refused() -> None:
    with pytest.raises(ModelError, match="delta of 0"):
        host("Range", *(np.asarray(n) for n in (0, 3, 0)))


# ---------------------------------------------------------------- boxes
def boxes(rng: np.random.Generator, count: int) -> np.ndarray:
    corners = rng.random((2, count, 2, 2)).astype(np.float32)
    return corners.reshape(2, count, 4)  # any two opposite corners


@pytest.mark.parametrize("centred", [0, 1])
@pytest.mark.parametrize("most, overlap, least", [(3, 0.3, 0.4), (50, 0.0, None), (2, 0.9, 0.0)])
def test_non_max_suppression(centred: int, most: int, overlap: float, least: float | None,
                             rng: np.random.Generator) -> None:
    scores = rng.integers(0, 8, (2, 3, 20)).astype(np.float32) / 8  # with ties
    check("NonMaxSuppression", boxes(rng, 20), scores, np.array([most]),
          np.array([overlap], np.float32), None if least is None else np.array([least], np.float32),
          opset=11, center_point_box=centred)


def test_non_max_suppression_keeps_none_by_default(rng: np.random.Generator) -> None:
    (found,) = host("NonMaxSuppression", boxes(rng, 4), np.ones((2, 1, 4), np.float32))
    assert found.shape == (0, 3) and found.dtype == np.int64


# ---------------------------------------------------------------- sequences
def test_sequences() -> None:
    a, b, c = (np.full(k, k) for k in (1, 2, 3))
    (items,) = host("SequenceConstruct", a, b)
    assert host("SequenceEmpty") == [[]] and len(items) == 2
    (longer,) = host("SequenceInsert", items, c, np.asarray(-1))
    assert [len(i) for i in longer] == [1, 3, 2] and len(items) == 2
    assert [len(i) for i in host("SequenceInsert", items, c)[0]] == [1, 2, 3]
    assert [len(i) for i in host("SequenceInsert", items, c, np.asarray(2))[0]] == [1, 2, 3]
    assert [len(i) for i in host("SequenceErase", longer)[0]] == [1, 3]
    assert [len(i) for i in host("SequenceErase", longer, np.array([0]))[0]] == [3, 2]
    assert host("SequenceAt", longer, np.asarray(-1))[0] is b
    (count,) = host("SequenceLength", longer)
    assert count == 3 and count.dtype == np.int64 and count.shape == ()


def test_positions_outside_a_sequence_are_refused() -> None:
    for operator, inputs in (("SequenceAt", [np.asarray(2)]), ("SequenceErase", [np.asarray(-3)]),
                             ("SequenceInsert", [np.zeros(1), np.asarray(3)])):
        with pytest.raises(IndexOutOfRange, match="outside a sequence of 2"):
            host(operator, [np.zeros(1), np.zeros(1)], *inputs)


@pytest.mark.parametrize("split", [None, np.asarray(2), np.array([1, 4]), np.array([5])], ids=str)
@pytest.mark.parametrize("keepdims", [0, 1])
def test_split_to_sequence(split: np.ndarray | None, keepdims: int) -> None:
    x = np.arange(10).reshape(2, 5)
    (expected,) = reference("SplitToSequence", [x, split], axis=1, keepdims=keepdims)
    (found,) = host("SplitToSequence", x, split, axis=1, keepdims=keepdims)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_split_to_sequence_has_to_use_all() -> None:
    with pytest.raises(ModelError, match="5 elements into parts"):
        host("SplitToSequence", np.arange(5), np.array([2, 2]))


def test_concat_from_sequence() -> None:
    items = [np.ones((2, 3)), np.zeros((2, 3))]
    assert host("ConcatFromSequence", items, axis=1)[0].shape == (2, 6)
    assert host("ConcatFromSequence", items, axis=-1, new_axis=1)[0].shape == (2, 3, 2)
    with pytest.raises(ModelError, match="ConcatFromSequence cannot work"):
        host("ConcatFromSequence", [np.ones(2), np.ones((2, 2))], axis=0)


def test_optionals() -> None:
    x = np.ones(3)
    assert host("Optional", x)[0] is x and host("Optional")[0] is None
    assert host("OptionalHasElement", x)[0] and not host("OptionalHasElement", None)[0]
    assert not host("OptionalHasElement")[0] and host("OptionalHasElement", [])[0].dtype == bool
    assert host("OptionalGetElement", x)[0] is x and host("Identity", [x])[0] == [x]
    with pytest.raises(ModelError, match="empty"):
        host("OptionalGetElement", None)


# ---------------------------------------------------------------- strings
def test_string_concat() -> None:
    (found,) = host("StringConcat", np.array([["a"], ["ü"]], object), np.array(["x", ""], object))
    assert found.tolist() == [["ax", "a"], ["üx", "ü"]] and found.dtype == object
    assert host("StringConcat", np.array("a", object), np.array("b", object))[0].shape == ()


@pytest.mark.parametrize("attributes", [
    {}, {"delimiter": ""}, {"delimiter": ","}, {"delimiter": ",", "maxsplit": 1}], ids=str)
def test_string_split(attributes: dict[str, Any]) -> None:
    x = np.array([["a,b  c", " one two "], ["z", ",,"]], object)
    check("StringSplit", x, outputs=2, **attributes)


def test_string_split_of_an_empty_text() -> None:
    """No pieces, as in onnxruntime; onnx's evaluator finds one where there is a delimiter."""
    for attributes in ({}, {"delimiter": ","}):
        pieces, counts = host("StringSplit", np.array(["", "a"], object), **attributes)
        assert counts.tolist() == [0, 1] and pieces.tolist() == [[""], ["a"]]


def test_string_split_of_nothing() -> None:
    pieces, counts = host("StringSplit", np.zeros((0, 2), object))
    assert pieces.shape == (0, 2, 0) and counts.shape == (0, 2)


def test_regex_full_match() -> None:
    check("RegexFullMatch", np.array([["www.a.com", "a.com!"]], object), pattern=r"[\w.]+\.com")
    with pytest.raises(ModelError, match="RegexFullMatch"):
        host("RegexFullMatch", np.array(["a"], object), pattern="(")


@pytest.mark.parametrize("action", ["NONE", "LOWER", "UPPER"])
@pytest.mark.parametrize("sensitive", [0, 1])
def test_string_normalizer(action: str, sensitive: int) -> None:
    words = ["monday", "Tuesday", "TUESDAY", "friday"]
    kept = [w for w in words if (w if sensitive else w.lower()) not in ("monday", "tuesday")]
    changed = [{"NONE": w, "LOWER": w.lower(), "UPPER": w.upper()}[action] for w in kept]
    for shape in ((4,), (1, 4)):
        (found,) = host("StringNormalizer", np.array(words, object).reshape(shape),
                        case_change_action=action, is_case_sensitive=sensitive,
                        stopwords=["monday", "tuesday"])
        assert found.reshape(-1).tolist() == changed and found.ndim == len(shape)


def test_string_normalizer_that_drops_all_leaves_one_empty_string() -> None:
    (found,) = host("StringNormalizer", np.array([["a", "a"]], object), stopwords=["a"])
    assert found.tolist() == [[""]]
    with pytest.raises(ModelError, match="of shape"):
        host("StringNormalizer", np.full((2, 2), "a", object))


def test_constants_and_equality_of_strings() -> None:
    assert host("Constant", value_string="a")[0].tolist() == "a"
    assert host("Constant", value_strings=["a", "b"])[0].tolist() == ["a", "b"]
    (found,) = host("Equal", np.array([["a"], ["b"]], object), np.array(["a", "c"], object))
    assert found.tolist() == [[True, False], [False, False]] and found.dtype == bool


def texts(*items: Any) -> np.ndarray:
    return np.array(items, object)


@pytest.mark.parametrize("maxsplit, expected", [
    (-1, ["a", "b", "c"]), (0, ["a  b c"]), (1, ["a", "b c"]), (2, ["a", "b", "c"])])
def test_blanks_at_the_end_belong_to_no_piece(maxsplit: int, expected: list[str]) -> None:
    """As in onnxruntime; onnx's evaluator leaves them to the rest that is not split."""
    pieces, counts = host("StringSplit", texts(" a  b c ", "  "), maxsplit=maxsplit)
    assert pieces.tolist() == [expected, [""] * len(expected)]
    assert counts.tolist() == [len(expected), 0]


@pytest.mark.parametrize("pattern, fits, other", [
    (r"\w+", ["a_1"], ["ä", "a b", ""]), (r"\W", ["ä", " "], ["a"]), (r"\d+", ["12"], ["٣"]),
    (r"\s", [" ", "\n"], ["\v", "\xa0"]), (r"[\s\d]+", [" 1"], ["\v", "٣"]),
    (r"[\Wx]+", ["ä x"], ["y"]), ("[[:alpha:]_]+", ["aZ_"], ["ä", "1", ":"]),
    ("[[:^alpha:]]", ["ä", "1"], ["a"]), ("[^[:space:]x]+", ["ab"], ["a\v", "x"]),
    ("[[:punct:]]+", ["[]\\^-~!"], ["a"]), ("(?i)ä", ["ä", "Ä"], ["a"]), ("[[a]+", ["[a"], ["b"]),
    ("[]a]+", ["a]"], ["["]), ("[:al]+", [":al"], ["[", "b"]), (r"a\z", ["a"], ["az"]),
    (r"\\w", [r"\w"], ["a"]), (r".*\bb.*", ["a b", "äb"], ["ab"]),
])
def test_patterns_are_those_of_re2(pattern: str, fits: list[str], other: list[str]) -> None:
    (found,) = host("RegexFullMatch", texts(*fits, *other), pattern=pattern)
    assert found.dtype == bool and found.tolist() == [True] * len(fits) + [False] * len(other)


def test_a_pattern_with_a_class_that_there_is_not_is_refused() -> None:
    with pytest.raises(ModelError, match="foo"):
        host("RegexFullMatch", texts("a"), pattern="[[:foo:]]")
    assert python_pattern("[a-z]+(x|y)[^0-9]") == "[a-z]+(x|y)[^0-9]"


def test_tokens_by_patterns_of_re2() -> None:
    for options in ({"tokenexp": r"\w+"}, {"separators": [r"[^[:alnum:]]"]}):
        (found,) = HOST_OPS["com.microsoft", "Tokenizer"](
            {"mark": 0, "mincharnum": 1, "pad_value": "#", **options}, 1, [texts("Äb 1", "c")])
        assert found.tolist() == [["b", "1"], ["c", "#"]]


# ---------------------------------------------------------------- strings that move
@pytest.mark.parametrize("to, text, expected", [
    ("UINT8", "300", 44), ("UINT8", "-3", 253), ("INT8", "300", 44), ("INT16", "-40000", 25536),
    ("INT32", "3000000000", -1294967296), ("UINT64", "-3", 2**64 - 3), ("BOOL", "-1", True),
    ("INT64", "-9223372036854775808", -2**63), ("UINT64", str(2**64 - 1), 2**64 - 1),
    ("INT64", "0x10", 0), ("FLOAT", "0x10", 16), ("DOUBLE", " -0X1.8p-1z", -0.75),
    ("FLOAT", "0x", 0), ("FLOAT", "0x.8", 0.5),
])
def test_strings_become_numbers_as_in_c(to: str, text: str, expected: Any) -> None:
    (found,) = host("Cast", texts(text), to=TensorProto.DataType.Value(to))
    assert found.tolist() == [expected]
    assert found.dtype == {"FLOAT": "float32", "DOUBLE": "float64"}.get(to, to.lower())


@pytest.mark.parametrize("to, number", [("INT64", 2**63), ("INT8", 2**63), ("UINT8", 2**64)])
def test_integers_beyond_64_bits_are_refused(to: str, number: int) -> None:
    with pytest.raises(ModelError, match="beyond 64 bits"):
        host("Cast", texts(str(number)), to=TensorProto.DataType.Value(to))


@pytest.mark.parametrize("start, end, expected", [
    (-5, -10, ["a"]), (-1, -10, ["c", "b", "a"]), (9, 0, ["c", "b"]), (-5, 0, [])])
def test_slices_of_strings_that_go_back(start: int, end: int, expected: list[str]) -> None:
    for x, wanted in ((texts("a", "b", "c"), expected), (texts(), [])):
        (found,) = host("Slice", x, *(np.array([n]) for n in (start, end, 0, -1)))
        assert found.tolist() == wanted


def test_gather_and_scatter_of_elements_do_not_stretch() -> None:
    x = texts("a", "b", "c", "d").reshape(2, 2)
    for axis, at, gathered, scattered in [
            (1, [[1, -2]], [["b", "a"]], [["1", "0"], ["c", "d"]]),
            (0, [[1], [0]], [["c"], ["a"]], [["1", "b"], ["0", "d"]]),
            (-1, [[0]], [["a"]], [["0", "b"], ["c", "d"]])]:
        places, new = np.array(at), texts("0", "1")[:np.size(at)].reshape(np.shape(at))
        assert host("GatherElements", x, places, axis=axis)[0].tolist() == gathered
        assert host("ScatterElements", x, places, new, axis=axis)[0].tolist() == scattered
    assert x.tolist() == [["a", "b"], ["c", "d"]]


def test_equal_parts_are_as_many_as_there_are_outputs() -> None:
    split = HOST_OPS["", "Split"]
    parts = split(NodeAttributes({}, 3), 13, [texts(*"abcdef")])
    assert [p.tolist() for p in parts] == [["a", "b"], ["c", "d"], ["e", "f"]]
    with pytest.raises(ModelError, match="not equal"):
        split(NodeAttributes({}, 4), 13, [texts(*"abcdef")])
    parts = split(NodeAttributes({"num_outputs": 4}, 4), 18, [texts(*"abcde")])
    assert [p.tolist() for p in parts] == [["a", "b"], ["c", "d"], ["e"], []]


def test_unique_rows_and_columns_of_strings() -> None:
    x = texts("b", "a", "b", "a", "b", "A").reshape(3, 2)
    found, first, inverse, counts = host("Unique", x, axis=1)
    assert found.tolist() == [["a", "b"], ["a", "b"], ["A", "b"]]
    assert (first.tolist(), inverse.tolist(), counts.tolist()) == ([1, 0], [1, 0], [1, 1])
    found, first, inverse, counts = host("Unique", x, axis=0, sorted=0)
    assert found.tolist() == [["b", "a"], ["b", "A"]]
    assert (first.tolist(), inverse.tolist(), counts.tolist()) == ([0, 2], [0, 0, 1], [2, 1])


@pytest.mark.parametrize("shape, axis, expected", [((0, 2), 1, (0, 2)), ((2, 0), 1, (2, 0)),
                                                   ((0, 2), 0, (1, 0)), ((3, 0, 2), -1, (0, 2)),
                                                   ((3, 0, 2), 3, (0, 1))])
def test_flatten_of_no_strings(shape: tuple[int, ...], axis: int, expected: tuple[int, ...]
                               ) -> None:
    assert host("Flatten", np.zeros(shape, object), axis=axis)[0].shape == expected


def test_one_hot_of_strings_and_numbers() -> None:
    at, depth = np.array([0, 2, -1, 3]), np.array([3])
    (found,) = host("OneHot", at, depth, texts("no", "yes"))
    assert found.tolist() == [["yes", "no", "no"], ["no", "no", "yes"], ["no", "no", "yes"],
                              ["no", "no", "no"]]
    assert found.dtype == object
    check("OneHot", at, np.array(3), np.array([-1, 5], np.float32), axis=0)
    check("OneHot", at.reshape(2, 2), np.array(3), np.array([-1, 5], np.float32), axis=1)


def test_squeeze_of_strings_without_axes() -> None:
    assert host("Squeeze", texts("a").reshape(1, 1), np.zeros(0, np.int64))[0].tolist() == "a"
