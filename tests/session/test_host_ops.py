"""Operators that the host runs, against ONNX's evaluator, numpy and Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from terrazzo.errors import IndexOutOfRange, ModelError
from terrazzo.frontends.onnx.session.host_ops import HOST_OPS

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
    {}, {"delimiter": ""}, {"delimiter": ","}, {"delimiter": ",", "maxsplit": 1}, {"maxsplit": 1}],
    ids=str)
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
