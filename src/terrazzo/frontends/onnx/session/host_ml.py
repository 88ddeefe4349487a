"""What the host does of ai.onnx.ml: maps (dictionaries), and encoders of strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from terrazzo.errors import ModelError
from terrazzo.frontends.onnx.session.host_ops import Attrs, host_op, once
from terrazzo.frontends.onnx.session.host_strings import read_number, spelled

ML = "ai.onnx.ml"
_MOST_WRITTEN_OUT = 64


# ---------------------------------------------------------------- maps
@host_op("ZipMap", domain=ML, makes=True, steady=True)
def _zip_map(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    """A dictionary for each row, from class to score."""
    count, dictionaries = once(attrs, "dictionaries", lambda: _dictionaries(attrs))
    scores = inputs[0] if np.ndim(inputs[0]) == 2 else np.atleast_2d(inputs[0])
    if scores.shape[1] != count:
        raise ModelError(f"ZipMap has {count} labels for {scores.shape[1]} columns")
    return [dictionaries(scores.tolist())]


def _dictionaries(attrs: Attrs
                  ) -> tuple[int, Callable[[list[list[float]]], list[dict[Any, float]]]]:
    """The number of labels, and a function from rows of numbers to dictionaries by label, in order.

    Up to a number of labels it is written for these: a third of the time of `dict(zip(...))`.
    """
    labels = attrs.get("classlabels_strings") or attrs.get("classlabels_int64s") or []
    order = sorted(range(len(labels)), key=labels.__getitem__)  # as onnxruntime's maps are
    if not 0 < len(labels) <= _MOST_WRITTEN_OUT:
        keys = [labels[i] for i in order]
        return len(labels), lambda rows: [
            dict(zip(keys, map(row.__getitem__, order), strict=True)) for row in rows]
    pairs = ", ".join(f"{labels[i]!r}: v{i}" for i in order)
    columns = ", ".join(f"v{i}" for i in range(len(labels)))
    made: Callable[[list[list[float]]], list[dict[Any, float]]] = eval(
        f"lambda rows: [{{{pairs}}} for {columns}, in rows]", {"__builtins__": {}})
    return len(labels), made


@host_op("DictVectorizer", domain=ML)
def _dict_vectorizer(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    """The values of a dictionary in the order of a vocabulary, 0 where it has none."""
    words = attrs.get("string_vocabulary") or attrs.get("int64_vocabulary") or []
    given = inputs[0]
    kinds = {type(v) for v in given.values()}
    if str in kinds:
        row = np.array([[given.get(w, "") for w in words]], object)
    else:
        dtype = np.int64 if kinds and kinds <= {int, np.int64} else np.float64 if (
            kinds <= {np.float64} and kinds) else np.float32
        row = np.array([[given.get(w, 0) for w in words]], dtype)
    return [row]


@host_op("CastMap", domain=ML)
def _cast_map(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    """The values of a dictionary by their keys, as a row; sparse rows have a place for each key."""
    table: Mapping[int, Any] = dict(sorted(inputs[0].items()))
    values: list[Any] = list(table.values())
    to = attrs.get("cast_to", "TO_FLOAT")
    if attrs.get("map_form", "DENSE") == "SPARSE":
        width = attrs.get("max_map", 1)
        values = [table.get(k, "" if to == "TO_STRING" else 0) for k in range(width)]
    if to == "TO_STRING":
        made = np.array([[v if isinstance(v, str) else spelled(v) for v in values]], object)
    else:
        dtype = np.float32 if to == "TO_FLOAT" else np.int64
        whole = dtype is np.int64
        made = np.array([[read_number(v, whole) if isinstance(v, str) else v for v in values]],
                        dtype)
    return [made]


# ---------------------------------------------------------------- encoders
_ENDINGS = (("strings", object, "string", "_Unused"), ("int64s", np.int64, "int64", -1),
            ("floats", np.float32, "float", -0.0))


@host_op("LabelEncoder", domain=ML, makes=True, steady=True)
def _label_encoder(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    x = np.asarray(inputs[0])
    if version < 2:
        return [_first_label_encoder(attrs, x)]
    table, default, dtype = once(attrs, "table", lambda: _label_table(attrs))
    items = x.reshape(-1).tolist()
    if x.dtype.kind == "f":
        items = list(map(_comparable, items))
    return [np.array(list(map(table.get, items, repeat(default))), dtype).reshape(x.shape)]


def _label_table(attrs: Attrs) -> tuple[dict[Any, Any], Any, Any]:
    """The labels by their keys, that of anything else, and their type."""
    keys, _ = _listed(attrs, "keys")
    values, default = _listed(attrs, "values")
    return dict(zip(map(_comparable, keys.tolist()), values.tolist(), strict=True)), default, (
        values.dtype)


def _first_label_encoder(attrs: Attrs, x: np.ndarray) -> np.ndarray:
    """In version 1 the classes are strings, and a label is its place among them."""
    words = attrs["classes_strings"]
    if x.dtype.kind in "OUS":
        table = {word: number for number, word in enumerate(words)}
        default = attrs.get("default_int64", -1)
        return np.array([table.get(t, default) for t in x.reshape(-1)], np.int64).reshape(x.shape)
    default = attrs.get("default_string", "_Unused")
    names = [words[v] if 0 <= v < len(words) else default for v in x.reshape(-1).tolist()]
    return np.array(names, object).reshape(x.shape)


def _comparable(value: Any) -> Any:
    """A key of a dictionary: nan equals itself there."""
    return "nan of floats" if isinstance(value, float) and value != value else value


def _listed(attrs: Attrs, name: str) -> tuple[np.ndarray, Any]:
    """A list of an encoder as an array, and what stands for anything else."""
    tensor = attrs.get(f"{name}_tensor")
    if tensor is not None:
        array = np.asarray(tensor)
        default = attrs.get("default_tensor")
        if default is not None:
            return array, np.asarray(default).reshape(-1)[0]
        usual = "_Unused" if array.dtype.kind in "OUS" else -1 if array.dtype.kind in "iu" else -0.0
        return array, usual
    for ending, dtype, word, usual in _ENDINGS:
        if attrs.get(f"{name}_{ending}") is not None:
            return np.array(attrs[f"{name}_{ending}"], dtype), attrs.get(f"default_{word}", usual)
    raise ModelError(f"LabelEncoder has no {name}")


@host_op("CategoryMapper", domain=ML, makes=True, steady=True)
def _category_mapper(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    x = np.asarray(inputs[0])
    pairs = list(zip(attrs["cats_strings"], attrs["cats_int64s"], strict=True))
    if x.dtype.kind in "OUS":
        table, default = dict(pairs), attrs.get("default_int64", -1)
        return [np.array([table.get(t, default) for t in x.reshape(-1)], np.int64).reshape(x.shape)]
    names, other = {n: t for t, n in pairs}, attrs.get("default_string", "_Unused")
    found = [names.get(v, other) for v in x.reshape(-1).tolist()]
    return [np.array(found, object).reshape(x.shape)]


@host_op("OneHotEncoder", domain=ML, makes=True, steady=True)
def _one_hot_encoder(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    x = np.asarray(inputs[0])
    classes = attrs.get("cats_strings") or attrs.get("cats_int64s") or []
    items = x.reshape(-1)
    if items.dtype.kind in "OUS":
        table = once(attrs, "table", lambda: {c: n for n, c in enumerate(classes)})
        places = np.array(list(map(table.get, items.tolist(), repeat(-1))), np.int64)
    else:
        if items.dtype.kind == "f":
            with np.errstate(invalid="ignore"):  # nan is no category
                items = items.astype(np.int64)
        places = _places(once(attrs, "sorted", lambda: _sorted(classes)), items)
    known = places >= 0
    if not attrs.get("zeros", 1) and not known.all():
        raise ModelError(f"OneHotEncoder does not know {items[int(np.argmin(known))]!r}")
    # A row that is not known is the last one, which nobody keeps.
    ones = once(attrs, "rows", lambda: np.eye(len(classes) + 1, dtype=np.float32)[:, :-1].copy())
    return [ones[places].reshape(*x.shape, len(classes))]


def _sorted(numbers: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers in order, and where each was; strings among them are no numbers."""
    whole = np.array([n for n in numbers if not isinstance(n, str)], np.int64)
    order = np.argsort(whole, kind="stable")
    return whole[order], order


def _places(listed: tuple[np.ndarray, np.ndarray], items: np.ndarray) -> np.ndarray:
    """Where numbers are in a list, -1 for those that are not."""
    numbers, order = listed
    if not len(numbers):
        return np.full(items.shape, -1)
    at = np.minimum(np.searchsorted(numbers, items), len(numbers) - 1)
    return np.where(numbers[at] == items, order[at], -1)


@host_op("ArrayFeatureExtractor", domain=ML, makes=True, steady=True)
def _array_feature_extractor(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    x = np.asarray(inputs[0])
    return [(x.reshape(1, -1) if x.ndim == 1 else x).take(inputs[1].reshape(-1), -1)]
