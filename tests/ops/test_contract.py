"""Matrix products and einsum against numpy, on every level."""

from __future__ import annotations

import numpy as np
import pytest
from checking import (
    HALVES,
    check_gradient,
    check_primitive,
    close,
    draw,
    evaluate,
    infer,
    op,
    symbolic_shapes,
    type_of,
)

from terrazzo.base.shapes import dims
from terrazzo.dtypes import as_dtype, bool_, float32
from terrazzo.errors import ArgumentError, DTypeError, RankError, ShapeError
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace
from terrazzo.ops.contract import einsum

MATRICES = [
    ((3, 4), (4, 5)), ((1, 1), (1, 1)), ((1, 7), (7, 1)), ((2, 3, 4), (2, 4, 5)),
    ((2, 3, 4), (4, 5)), ((3, 4), (2, 4, 5)), ((2, 1, 3, 4), (5, 4, 2)), ((1, 3, 4), (6, 4, 2)),
    ((3, 0), (0, 2)), ((0, 3), (3, 2)), ((2, 0, 3), (3, 2)),
]


def turned(x: np.ndarray, turn: bool) -> np.ndarray:
    return np.ascontiguousarray(np.swapaxes(x, -1, -2)) if turn else x


@pytest.mark.parametrize("transpose", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("left", "right"), MATRICES)
def test_batch_matmul(rng, left, right, transpose):
    x, y = draw(rng, left), draw(rng, right)
    got = check_primitive("batch_matmul", turned(x, transpose[0]), turned(y, transpose[1]),
                          transpose_x=transpose[0], transpose_y=transpose[1])
    close(got, np.matmul(x, y), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float64", *HALVES, "int8", "uint8", "int32", "complex64"])
def test_types(rng, dtype):
    x, y = draw(rng, (3, 70), dtype), draw(rng, (70, 4), dtype)
    got = check_primitive("batch_matmul", x, y)
    wide = as_dtype(dtype).compute.np
    close(got, np.matmul(x.astype(wide), y.astype(wide)).astype(x.dtype))


def test_mixed_types_meet(rng):
    got = check_primitive("batch_matmul", draw(rng, (3, 4), "int8"), draw(rng, (4, 2), "float16"))
    assert got.dtype == np.float16


def test_half_types_accumulate_in_float32():
    got = check_primitive("batch_matmul", np.ones((1, 4096), np.float16),
                          np.ones((4096, 1), np.float16))
    assert got.item() == 4096


@pytest.mark.parametrize(("left", "right"), [*MATRICES, ((4,), (4,)), ((4,), (4, 3)),
                                             ((3, 4), (4,)), ((4,), (2, 4, 3)), ((2, 3, 4), (4,)),
                                             ((0,), (0,))])
def test_matmul(rng, left, right):
    x, y = draw(rng, left), draw(rng, right)
    close(evaluate(lambda a, b: a @ b, x, y), np.matmul(x, y), rtol=1e-5)
    close(evaluate(op("matmul"), x, y, shapes=symbolic_shapes([x, y])[0]), np.matmul(x, y),
          rtol=1e-5)


def test_matmul_of_booleans(rng):
    x, y = draw(rng, (3, 4), "bool"), draw(rng, (4, 5), "bool")
    close(evaluate(op("matmul"), x, y), np.matmul(x, y))
    with pytest.raises(DTypeError, match="booleans"):
        infer(op("batch_matmul"), TensorType((2, 2), bool_), TensorType((2, 2), bool_))


@pytest.mark.parametrize(("left", "right", "error"), [
    ((3, 4), (3, 4), ShapeError), ((), (3, 4), RankError), ((2, 3, 4), (3, 4, 5), ShapeError),
])
def test_matmul_refuses(left, right, error):
    with pytest.raises(error):
        infer(op("matmul"), TensorType(left, float32), TensorType(right, float32))


def test_symbolic_sizes_must_be_the_same():
    n, m, k = dims("n m k")
    result = infer(op("matmul"), TensorType((n, k), float32), TensorType((k, m), float32))
    assert result == TensorType((n, m), float32)
    with pytest.raises(ShapeError, match="sizes k and m"):
        infer(op("matmul"), TensorType((n, k), float32), TensorType((m, k), float32))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (0, 4)])
@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_linear(rng, dtype, shape, bias):
    x, w = draw(rng, shape, dtype), draw(rng, (5, 4), dtype)
    b = draw(rng, (5,), dtype) if bias else None
    expected = x.astype(np.float64) @ w.astype(np.float64).T
    # The product is rounded before the bias is added, hence a rounding error of its size.
    close(evaluate(op("linear"), x, w, b), expected + (0 if b is None else b.astype(np.float64)),
          atol=None if dtype == "float32" else 16 * as_dtype(dtype).eps)


@pytest.mark.parametrize(("x", "y", "axis"), [((4,), (4,), -1), ((3, 4), (3, 4), 1),
                                              ((3, 4), (3, 4), 0), ((2, 3, 4), (4,), -1)])
def test_vecdot(rng, x, y, axis):
    a, b = draw(rng, x), draw(rng, y)
    close(evaluate(op("vecdot"), a, b, axis=axis), (a * b).sum(axis), rtol=1e-5)
    ints = draw(rng, x, "int8"), draw(rng, y, "int8")
    assert evaluate(op("vecdot"), *ints, axis=axis).dtype == np.int8


@pytest.mark.parametrize(("x", "y"), [((), ()), ((), (3,)), ((4,), (4,)), ((3, 4), (4,)),
                                      ((3, 4), (4, 5)), ((2, 3, 4), (5, 4, 6)), ((4,), (5, 4, 6))])
def test_dot(rng, x, y):
    a, b = draw(rng, x), draw(rng, y)
    close(evaluate(op("dot"), a, b), np.dot(a, b), rtol=1e-5)


def test_outer(rng):
    a, b = draw(rng, (3,)), draw(rng, (5,))
    close(evaluate(op("outer"), a, b), np.outer(a, b))
    with pytest.raises(RankError, match="two vectors"):
        infer(op("outer"), TensorType((3, 3), float32), TensorType((3,), float32))


@pytest.mark.parametrize(("x", "y", "axes"), [
    ((3, 4, 5), (4, 5, 2), 2), ((3, 4), (4, 5), 1), ((3,), (4,), 0),
    ((3, 4, 5), (2, 5, 3), ((0, 2), (2, 1))), ((3, 4), (5, 4), (1, 1)), ((3, 4), (4, 3), ((-1, 0),
                                                                                    (0, 1))),
])
def test_tensordot(rng, x, y, axes):
    a, b = draw(rng, x), draw(rng, y)
    close(evaluate(op("tensordot"), a, b, axes=axes), np.tensordot(a, b, axes), rtol=1e-5)


@pytest.mark.parametrize(("axes", "error"), [(3, ArgumentError), (((0,), (0, 1)), ArgumentError),
                                             (((0,), (1,)), ShapeError)])
def test_tensordot_refuses(axes, error):
    with pytest.raises(error):
        infer(op("tensordot"), TensorType((3, 4), float32), TensorType((3, 5), float32), axes=axes)


# ---------------------------------------------------------------- einsum
SIZES = {"a": 2, "b": 3, "c": 4, "d": 5, "i": 3, "j": 4, "k": 5, "h": 2, "q": 3, "s": 1, "z": 0}
EQUATIONS = [
    "i->i", "i->", "ij->ji", "ij->", "ij->j", "ii->i", "ii->", "ii", "iji->j", "iij->ij", "bii->bi",
    "ij,jk->ik", "ij,jk", "ij,kj->ik", "ji,jk->ik", "ji,kj->ki", "bij,bjk->bik", "bij,bjk->kib",
    "bhic,bhjc->bhij", "bhij,bhjc->bihc", "bij,jk->bik", "i,j->ij", "ij,ij->ij", "ij,ij->",
    "ij,ij->i", "ij,j->i", "i,i", "ijk,jil->kl", "abc,cd->abd", "abc,bad->cd", "ab,ab,ab->b",
    "ij,jk,ka->ia", "ij,ik,ia->jka", "ijk,i->jk", "ij,k->i", "ba", "iz,zj->ij", ",ij->ij", ",->",
    "ij , jk -> ik", "a,ab,abc->abc", "si,ij->sj", "aij,bij->ab", "abij,cbij->ac",
]


def operands(rng, equation, sizes=SIZES, dtype="float32"):
    left = equation.replace(" ", "").partition("->")[0]
    return [draw(rng, [sizes.get(c, 2) for c in term], dtype) for term in left.split(",")]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum(rng, equation):
    xs = operands(rng, equation)
    close(evaluate(lambda *v: einsum(equation, *v), *xs), np.einsum(equation, *xs), rtol=1e-5)


@pytest.mark.parametrize(("equation", "shapes"), [
    ("...ij,...jk->...ik", [(2, 3, 4), (2, 4, 5)]), ("...ij,...jk", [(6, 2, 3, 4), (2, 4, 5)]),
    ("...ij,jk->...ik", [(2, 3, 4), (4, 5)]), ("i...->...i", [(2, 3, 4)]), ("...", [(2, 3)]),
    ("...i->...", [(2, 3)]), ("...ij,...jk->...ik", [(3, 4), (4, 5)]), ("i...j->ij...", [(2, 3)]),
    ("b...i,...i->b...", [(2, 3, 4), (3, 4)]), ("...a,...a->...", [(1, 3), (5, 3)]),
])
def test_ellipsis(rng, equation, shapes):
    xs = [draw(rng, s) for s in shapes]
    close(evaluate(lambda *v: einsum(equation, *v), *xs), np.einsum(equation, *xs), rtol=1e-5)


def test_einsum_stretches_axes_of_size_1(rng):
    x, y = draw(rng, (3, 1)), draw(rng, (4, 5))
    close(evaluate(lambda *v: einsum("ij,jk->ik", *v), x, y), np.einsum("ij,jk->ik", x, y))
    x = draw(rng, (1, 4))
    close(evaluate(lambda *v: einsum("ij,ij->ij", *v), x, draw(rng, (3, 4))).shape, (3, 4))


@pytest.mark.parametrize("dtype", ["float16", "int8", "float64"])
def test_einsum_keeps_the_type(rng, dtype):
    xs = operands(rng, "bij,bjk->ki", dtype=dtype)
    got = evaluate(lambda *v: einsum("bij,bjk->ki", *v), *xs)
    assert got.dtype == xs[0].dtype
    expected = np.einsum("bij,bjk->ki", *[x.astype(np.float64) for x in xs])
    close(got, expected.astype(xs[0].dtype), atol=2e-2 if dtype == "float16" else None)


@pytest.mark.parametrize("equation", ["bij,bjk->bik", "ij,ij->i", "ijk->ki", "ij,jk,ka->ia"])
def test_einsum_with_symbolic_sizes(rng, equation):
    xs = operands(rng, equation, {"b": 2, "i": 3, "j": 4, "k": 5, "a": 6})
    got = evaluate(lambda *v: einsum(equation, *v), *xs, shapes=symbolic_shapes(xs)[0])
    close(got, np.einsum(equation, *xs), rtol=1e-5)


@pytest.mark.parametrize("equation", ["ij,jk->ik", "ij,kj->ik", "ji,jk->ik", "bij,bkj->bik"])
def test_einsum_uses_transposing_products(rng, equation):
    graph, _ = trace(lambda *v: op("einsum").body(*v, equation=equation),
                     [type_of(x) for x in operands(rng, equation)])
    assert [node.op.name for node in graph.nodes] == ["batch_matmul"]


@pytest.mark.parametrize(("equation", "shapes", "error"), [
    ("ij,jk->ik", [(2, 3)], ArgumentError), ("ij->ijk", [(2, 3)], ArgumentError),
    ("ij->ii", [(2, 3)], ArgumentError), ("i->i", [(2, 3)], RankError),
    ("i1->i", [(2, 3)], ArgumentError), ("ii->i", [(2, 3)], ShapeError),
    ("ij,jk->ik", [(2, 3), (4, 5)], ShapeError), ("ijk", [(2, 3)], RankError),
])
def test_einsum_refuses(equation, shapes, error):
    with pytest.raises(error):
        infer(lambda *v: einsum(equation, *v), *[TensorType(s, float32) for s in shapes])


# ---------------------------------------------------------------- gradients
@pytest.mark.parametrize("transpose", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("left", "right"), [((2, 3), (3, 2)), ((2, 2, 3), (3, 2)),
                                             ((2, 3), (2, 3, 2)), ((2, 1, 2, 3), (2, 3, 1))])
def test_gradient(rng, left, right, transpose):
    check_gradient(op("batch_matmul"), turned(draw(rng, left), transpose[0]),
                   turned(draw(rng, right), transpose[1]), wrt=(0, 1),
                   transpose_x=transpose[0], transpose_y=transpose[1])


def test_gradient_of_a_shared_matrix_is_one_product(rng):
    from terrazzo.graph import autodiff

    graph, _ = trace(lambda x, w: op("sum")(op("batch_matmul")(x, w)),
                     [TensorType((8, 3, 4), float32), TensorType((4, 5), float32)])
    backward = autodiff.grad_graph(graph, wrt=(1,))
    products = [n for n in backward.nodes if n.op.name == "batch_matmul"]
    assert [str(n.types[0]) for n in products] == ["f32[4, 5]"]


@pytest.mark.parametrize("equation", ["bij,bjk->ki", "ij,ij->i", "iij->j", "i,j->ij"])
def test_gradient_of_einsum(rng, equation):
    xs = operands(rng, equation, {"b": 2, "i": 2, "j": 3, "k": 2})
    check_gradient(lambda *v: einsum(equation, *v), *xs, wrt=tuple(range(len(xs))))


@pytest.mark.parametrize("shape", [(3,), (2, 2, 3)])
def test_gradient_of_linear(rng, shape):
    check_gradient(op("linear"), draw(rng, shape), draw(rng, (2, 3)), draw(rng, (2,)),
                   wrt=(0, 1, 2))
