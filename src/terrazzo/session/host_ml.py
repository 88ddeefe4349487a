"""What the host does of ai.onnx.ml: maps (dictionaries), and encoders of strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from terrazzo.errors import ModelError
from terrazzo.session.host_ops import Attrs, host_op
from terrazzo.session.host_strings import read_number, spelled

ML = "ai.onnx.ml"


# ---------------------------------------------------------------- maps
@host_op("ZipMap", domain=ML)
def _zip_map(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    """A dictionary for each row, from class to score."""
    labels = attrs.get("classlabels_strings") or attrs.get("classlabels_int64s") or []
    scores = np.atleast_2d(inputs[0])
    if scores.shape[1] != len(labels):
        raise ModelError(f"ZipMap has {len(labels)} labels for {scores.shape[1]} columns")
    order = sorted(range(len(labels)), key=labels.__getitem__)  # as onnxruntime's maps are
    names = [labels[i] for i in order]
    # Without a line of Python for each row: half the time of a comprehension.
    rows = zip(*scores.T[order].tolist(), strict=True)
    return [list(map(dict, map(zip, repeat(names), rows)))]


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


@host_op("LabelEncoder", domain=ML)
def _label_encoder(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    x = np.asarray(inputs[0])
    if version < 2:
        return [_first_label_encoder(attrs, x)]
    keys, _ = _listed(attrs, "keys")
    values, default = _listed(attrs, "values")
    dtype = values.dtype
    table = dict(zip(map(_comparable, keys.tolist()), values.tolist(), strict=True))
    found = [table.get(_comparable(v), default) for v in x.reshape(-1).tolist()]
    return [np.array(found, dtype).reshape(x.shape)]


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


@host_op("CategoryMapper", domain=ML)
def _category_mapper(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    x = np.asarray(inputs[0])
    pairs = list(zip(attrs["cats_strings"], attrs["cats_int64s"], strict=True))
    if x.dtype.kind in "OUS":
        table, default = dict(pairs), attrs.get("default_int64", -1)
        return [np.array([table.get(t, default) for t in x.reshape(-1)], np.int64).reshape(x.shape)]
    names, other = {n: t for t, n in pairs}, attrs.get("default_string", "_Unused")
    found = [names.get(v, other) for v in x.reshape(-1).tolist()]
    return [np.array(found, object).reshape(x.shape)]


@host_op("OneHotEncoder", domain=ML)
def _one_hot_encoder(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    x = np.asarray(inputs[0])
    classes = attrs.get("cats_strings") or attrs.get("cats_int64s") or []
    table = {c: n for n, c in enumerate(classes)}
    items = x.reshape(-1).tolist()
    places = np.array([table.get(v if isinstance(v, str) else int(v), -1) for v in items], np.int64)
    if not attrs.get("zeros", 1) and (places < 0).any():
        raise ModelError(f"OneHotEncoder does not know {items[int(np.argmin(places))]!r}")
    rows = np.zeros((len(items), len(classes)), np.float32)
    known = np.flatnonzero(places >= 0)
    rows[known, places[known]] = 1
    return [rows.reshape(*x.shape, len(classes))]


@host_op("ArrayFeatureExtractor", domain=ML)
def _array_feature_extractor(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    x = np.asarray(inputs[0])
    return [np.take(x.reshape(1, -1) if x.ndim == 1 else x, np.reshape(inputs[1], -1), axis=-1)]
