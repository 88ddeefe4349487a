"""Packed constants: panels gathered by strides, filled up with zeros."""

from __future__ import annotations

import numpy as np
import pytest

from terrazzo.dtypes import as_dtype, float16, float32, int8
from terrazzo.loop.interpret import run
from terrazzo.loop.packing import Packing
from terrazzo.loop.packing_kernel import packing_function
from terrazzo.loop.simplify import simplify


def test_a_matrix_in_panels() -> None:
    matrix = np.arange(15, dtype=np.float32).reshape(3, 5)  # [k][n]
    packing = Packing(float32, 4, (5, 1), ((3, 5),))
    assert packing.shape == (2, 3, 4)
    packed = packing.apply(matrix).reshape(packing.shape)
    np.testing.assert_array_equal(packed[0], matrix[:, :4])
    np.testing.assert_array_equal(packed[1], [[4, 0, 0, 0], [9, 0, 0, 0], [14, 0, 0, 0]])


def test_the_transposed_matrix_gives_the_same_panels() -> None:
    matrix = np.arange(42, dtype=np.float32).reshape(6, 7)
    by_rows = Packing(float32, 4, (7, 1), ((6, 7),)).apply(matrix)
    by_columns = Packing(float32, 4, (7, 6), ((6, 1),)).apply(np.ascontiguousarray(matrix.T))
    np.testing.assert_array_equal(by_rows, by_columns)


@pytest.mark.parametrize("groups", [1, 2])
def test_weights_of_a_convolution(groups: int) -> None:
    """[O, I, h, w] as [group][O / 4][I / 2][h][w][2][4]: the axes of k in any order."""
    weights = np.random.default_rng(0).standard_normal((12, 4, 3, 2)).astype(np.float32)
    each = 12 // groups
    packing = Packing(float32, 4, (each, 24), ((2, 12), (3, 2), (2, 1), (2, 6)),
                      ((groups, each * 24),))
    packed = packing.apply(weights).reshape(packing.shape)
    for o in range(12):
        for i in range(4):
            place = (o // each, o % each // 4, i // 2, slice(None), slice(None), i % 2,
                     o % each % 4)
            np.testing.assert_array_equal(packed[place], weights[o, i])


def test_steps_together_are_filled_up_too() -> None:
    matrix = np.arange(1, 31, dtype=np.int8).reshape(6, 5)  # [k][n]
    packing = Packing(int8, 4, (5, 1), ((6, 5),), together=4)
    packed = packing.apply(matrix).reshape(packing.shape)
    assert packed.shape == (2, 2, 4, 4)
    whole = np.zeros((8, 8), np.int8)
    whole[:6, :5] = matrix
    np.testing.assert_array_equal(
        packed, whole.reshape(2, 4, 2, 4).transpose(2, 0, 3, 1))


def test_a_start_a_wider_type_and_a_place() -> None:
    vector = np.arange(10, dtype=np.float16)
    packing = Packing(float32, 2, (2, 3), ((2, 1),), start=4)
    room = np.full(6, -1, np.float32)
    assert packing.apply(vector, room[1:5]).base is room
    np.testing.assert_array_equal(room, [-1, 4, 7, 5, 8, -1])
    assert Packing(float16, 2, (2, 3), ((2, 1),), start=4).apply(vector).dtype == np.float16


def test_nothing_to_pack() -> None:
    assert Packing(float32, 8, (0, 1), ((3, 5),)).apply(np.empty(0, np.float32)).size == 0
    assert Packing(float32, 8, (5, 1), ((0, 5),)).apply(np.empty(0, np.float32)).size == 0


def test_the_layout_in_words() -> None:
    assert Packing(float32, 8, (20, 1), ((3, 20),)).text == "columns 20:1, k 3:20 in panels of 8"


@pytest.mark.parametrize("packing", [
    Packing(float32, 4, (5, 1), ((6, 5),)), Packing(float32, 4, (5, 6), ((6, 1),)),
    Packing(float32, 8, (24, 1), ((5, 24),)), Packing(float32, 16, (5, 6), ((6, 1),)),
    Packing(float32, 4, (6, 24), ((2, 12), (3, 2), (2, 1)), ((2, 144),)),
    Packing(float32, 4, (6, 18), ((3, 3), (3, 1), (2, 9)), ((2, 108),)),
    Packing(float32, 16, (19, 12), ((2, 2), (2, 1), (3, 4))),
    Packing(float32, 4, (3, 6), ((3, 2), (2, 1), (5, 18))),
    Packing(float32, 4, (5, 1), ((6, 5),), together=4), Packing(float32, 2, (2, 3), ((2, 1),),
                                                                start=4),
    Packing(float32, 4, (5, 3), ((7, 1),), ((2, 60), (2, 15)), together=2),
    Packing(float16, 4, (6, 7), ((7, 1),), ((2, 60),), together=2),
    Packing(float16, 4, (6, 1), ((8, 7),), ((2, 60),), together=2),
], ids=lambda p: p.text)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_kernel_packs_the_same(packing: Packing, dtype: type) -> None:
    flat = np.random.default_rng(0).standard_normal(300).astype(dtype)
    packed = np.full(packing.size, np.nan, packing.dtype.np)
    function = packing_function("pack", packing, as_dtype(flat.dtype), flat.size)
    run(simplify(function), [flat, packed], {})
    np.testing.assert_array_equal(packed, packing.apply(flat))
