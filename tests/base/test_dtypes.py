"""Data types: facts agree with numpy, all spellings lead home, and promotion is lawful."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrazzo import dtypes as d
from terrazzo.dtypes import DTYPES, DType, as_dtype, promote, result_type
from terrazzo.errors import DTypeError

some_dtype = st.sampled_from(DTYPES)
several_dtypes = st.lists(some_dtype, min_size=1, max_size=5)

# The pairs for which the Python array API defines promotion: within one kind, save for uint64 with
# a signed type, and real with complex floats. Types that numpy lacks are outside the standard.
STANDARD = [t for t in DTYPES if t.np.isbuiltin == 1 and t is not d.float16]


def array_api_defines(a: DType, b: DType) -> bool:
    kinds = {a.kind, b.kind}
    if kinds == {"i", "u"}:
        return d.uint64 not in (a, b)
    return kinds in ({"i"}, {"u"}, {"b"}, {"f"}, {"c"}, {"f", "c"})


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_spelling_leads_to_the_same_object(dtype: DType) -> None:
    for spelling in (dtype, dtype.name, dtype.np, dtype.np.type):
        assert as_dtype(spelling) is dtype
    if dtype.bits > 8 or not dtype.is_integer:  # "i8" is numpy's, who counts bytes
        assert as_dtype(dtype.short) is dtype


@pytest.mark.parametrize("kind", "fiuc")
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_codes_mean_what_they_mean_in_numpy(kind: str, size: int) -> None:
    try:
        wanted = as_dtype(np.dtype(f"{kind}{size}"))
    except (TypeError, d.DTypeError):
        return  # numpy has no such type, or only some machines do
    for order in ("", "<", "="):
        assert as_dtype(f"{order}{kind}{size}") is wanted


def test_python_types_and_c_aliases() -> None:
    assert as_dtype(bool) is d.bool_
    assert as_dtype(int) is d.int64
    assert as_dtype(float) is d.float32
    assert as_dtype(complex) is d.complex64
    assert as_dtype(np.longlong) is d.int64


@pytest.mark.torch
def test_torch_types() -> None:
    import torch

    for dtype in DTYPES:
        if dtype.is_bool or dtype.bits > 4:  # torch packs what is smaller, and names it otherwise
            assert as_dtype(getattr(torch, dtype.name)) is dtype


@pytest.mark.parametrize("wrong", ["float31", "f3", ">f4", np.dtype(">f4"), np.dtype("O"), [], 3])
def test_what_is_no_dtype_is_refused_with_the_known_ones(wrong: Any) -> None:
    with pytest.raises(DTypeError, match=r"not a data type(.|\n)*float32"):
        as_dtype(wrong)


@given(some_dtype)
def test_copies_and_pickles_are_the_same_object(dtype: DType) -> None:
    assert copy.deepcopy(dtype) is dtype
    assert pickle.loads(pickle.dumps(dtype)) is dtype


def test_types_differ_from_each_other() -> None:
    assert len(set(DTYPES)) == len(DTYPES) == 24
    assert len({t.short for t in DTYPES}) == len(DTYPES)


@pytest.mark.parametrize("dtype", STANDARD)
def test_facts_agree_with_numpy(dtype: DType) -> None:
    assert dtype.itemsize == dtype.np.itemsize
    assert dtype.kind == dtype.np.kind
    assert dtype.is_float == np.issubdtype(dtype.np, np.floating)
    assert dtype.is_integer == np.issubdtype(dtype.np, np.integer)
    assert dtype.is_complex == np.issubdtype(dtype.np, np.complexfloating)
    assert dtype.is_bool == (dtype.np == np.bool_)


@pytest.mark.parametrize("dtype", [t for t in DTYPES if t.is_float or t.is_integer])
def test_limits_are_the_last_values_that_survive_storing(dtype: DType) -> None:
    for limit in (dtype.min, dtype.max):
        assert type(limit) is (float if dtype.is_float else int)
        assert np.array(limit, dtype=dtype.np).item() == limit
    assert (dtype.min < 0) == dtype.is_signed


@pytest.mark.parametrize("dtype", [t for t in DTYPES if t.is_float])
def test_eps_is_the_gap_above_one(dtype: DType) -> None:
    above_one = np.array(1 + dtype.eps).astype(dtype.np).astype(np.float64)
    assert above_one == 1 + dtype.eps
    # A quarter of the gap is below the tie, so rounding must fall back to one.
    assert np.array(1 + dtype.eps / 4).astype(dtype.np).astype(np.float64) == 1.0


def test_limits_that_make_no_sense_are_refused() -> None:
    with pytest.raises(DTypeError, match="unordered"):
        _ = d.complex64.max
    with pytest.raises(DTypeError, match="only floating-point"):
        _ = d.int32.eps


@given(some_dtype)
def test_compute_type_holds_every_value_and_is_its_own_compute_type(dtype: DType) -> None:
    assert dtype.compute.compute is dtype.compute
    assert dtype.compute.kind == dtype.kind
    assert dtype.compute.bits >= dtype.bits


def test_compute_type_of_narrow_types() -> None:
    for narrow in (d.float16, d.bfloat16, d.float8_e4m3fn, d.float8_e5m2):
        assert narrow.compute is d.float32
    assert d.int4.compute is d.int8 and d.uint4.compute is d.uint8
    assert d.float64.compute is d.float64 and d.int16.compute is d.int16


@pytest.mark.parametrize(("a", "b"), list(itertools.product(STANDARD, STANDARD)))
def test_promotion_agrees_with_numpy_where_the_array_api_defines_it(a: DType, b: DType) -> None:
    if array_api_defines(a, b):
        assert promote(a, b).np == np.promote_types(a.np, b.np)
    else:
        assert promote(a, b) in DTYPES


@given(several_dtypes, st.randoms(use_true_random=False))
def test_promotion_depends_neither_on_order_nor_on_repetition(
    dtypes: list[DType], random: Any
) -> None:
    shuffled = dtypes + dtypes
    random.shuffle(shuffled)
    assert promote(*shuffled) is promote(*dtypes)


@given(some_dtype, some_dtype)
def test_promotion_is_idempotent_and_an_upper_bound(a: DType, b: DType) -> None:
    joined = promote(a, b)
    assert promote(a, a) is a
    assert promote(joined, a) is joined
    assert promote(joined, b) is joined


@given(some_dtype, some_dtype, some_dtype)
def test_promotion_in_steps_equals_promotion_at_once(a: DType, b: DType, c: DType) -> None:
    # Two steps lead elsewhere only where a first step must leave its kind or its width for want of
    # a common type: uint64 with a signed type, and floats of 8 bits and fewer.
    present = {a, b, c}
    no_common_integer = d.uint64 in present and any(t.kind == "i" for t in present)
    small_floats = sum(t.is_float and t.bits <= 8 for t in present)
    # float16 with bfloat16 is float32 in any grouping, so it needs no exception.
    if not no_common_integer and small_floats < 2:
        assert promote(promote(a, b), c) is promote(a, b, c)
        assert promote(a, promote(b, c)) is promote(a, b, c)


@given(some_dtype, some_dtype)
def test_integer_promotion_loses_no_value(a: DType, b: DType) -> None:
    joined = promote(a, b)
    if a.is_integer and b.is_integer and joined.is_integer:
        assert joined.min <= min(a.min, b.min) and joined.max >= max(a.max, b.max)


@pytest.mark.parametrize(
    ("a", "b", "joined"),
    [
        ("int64", "float32", "float32"),
        ("int64", "float16", "float16"),
        ("float16", "bfloat16", "float32"),
        ("float8_e4m3fn", "bfloat16", "bfloat16"),
        ("float8_e5m2", "float16", "float16"),
        ("float8_e4m3fn", "float8_e5m2", "float16"),
        ("float8_e5m2", "int64", "float8_e5m2"),
        ("int4", "uint4", "int8"),
        ("int4", "uint8", "int16"),
        ("uint4", "int8", "int8"),
        ("uint64", "int8", "float64"),
        ("bool", "int4", "int4"),
        ("int64", "complex64", "complex64"),
        ("float64", "complex64", "complex128"),
        ("bfloat16", "complex64", "complex64"),
    ],
)
def test_promotion_where_standards_are_silent(a: str, b: str, joined: str) -> None:
    assert promote(a, b).name == joined


def test_ints_do_not_widen_floats_in_company() -> None:
    # Pairwise from the left, uint64 + int8 would become float64 first.
    assert promote("uint64", "int8", "float32") is d.float32
    assert promote("float8_e4m3fn", "float8_e5m2", "bfloat16") is d.bfloat16


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ((3, d.float32), "float32"),
        ((3, d.float16), "float16"),
        ((1.5, d.float8_e4m3fn), "float8_e4m3fn"),
        ((1.5, d.int32), "float32"),
        ((True, d.int8), "int8"),
        ((True, d.bool_), "bool"),
        ((1, d.bool_), "int64"),
        ((1.5, d.bool_), "float32"),
        ((1, d.uint8), "uint8"),
        ((1j, d.float32), "complex64"),
        ((1j, d.float64), "complex128"),
        ((1j, d.bfloat16), "complex64"),
        ((1j, d.int32), "complex64"),
        ((1, 2.5), "float32"),
        ((1, True), "int64"),
        ((True,), "bool"),
        ((2j, 1), "complex64"),
        ((np.float64(1), d.float32), "float64"),
        ((np.ones(2, "float16"), 1.5), "float16"),
        ((np.ones(2, "int32"), np.ones(2, "float16"), 3), "float16"),
        (("i32", d.int8), "int32"),
    ],
)
def test_python_scalars_are_weak(args: tuple[Any, ...], name: str) -> None:
    assert result_type(*args).name == name
    assert result_type(*reversed(args)).name == name


@given(some_dtype, st.sampled_from([True, 3, 1.5]))
def test_weak_scalars_agree_with_numpy_where_kinds_match(dtype: DType, scalar: Any) -> None:
    if dtype in STANDARD and not (isinstance(scalar, float) and dtype.kind not in "fc"):
        assert result_type(dtype, scalar).np == np.result_type(dtype.np, scalar)


def test_nothing_has_no_type() -> None:
    with pytest.raises(DTypeError, match="at least one"):
        promote()
    with pytest.raises(DTypeError, match="at least one"):
        result_type()
