"""Which products tensor cores multiply, in what type, and how their factors can be read."""

from __future__ import annotations

from terrazzo.base.scalar import Load
from terrazzo.dtypes import (
    DType,
    bfloat16,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
    int8,
    int32,
)
from terrazzo.expr.matmul import Factor, MatrixProduct
from terrazzo.index import Index, Var, coefficient, divisible, free_vars, substitute

HALVES = (float16, bfloat16)
FLOAT8 = (float8_e4m3fn, float8_e5m2)  # which tensor cores multiply with each other, too
DESCRIPTOR_BYTES = 16  # what strides and addresses that a descriptor describes are multiples of


def dot_type(product: MatrixProduct) -> DType | None:
    """The type in which the factors of a product are multiplied; None where `tl.dot` has none."""
    wide = product.reduce.dtype
    read = [factor.guarded for factor in (product.a, product.b)]
    types = {None if found is None else found[0].dtype for found in read}
    if wide is int32:
        return int8 if types == {int8} else None
    if wide is float32 and types <= set(FLOAT8):
        return FLOAT8[0]
    if wide is float32 and len(types) == 1 and (only := types.pop()) in HALVES:
        return only
    return float32 if wide is float32 else None


def as_it_lies(load: Load, dtype: DType) -> bool:
    """Whether what is loaded is multiplied as it is, where factors are multiplied in a type."""
    return load.dtype is dtype or (dtype in FLOAT8 and load.dtype in FLOAT8)


def described(product: MatrixProduct, factor: Factor, side: Var | None, dtype: DType) -> bool:
    """Whether a tensor descriptor can read a factor: neighbours in memory, and strides of 16 bytes.
    """
    load = factor.load
    if load is None or not as_it_lies(load, dtype) or side is None:
        return False
    steps = [factor.stride(side), factor.stride(product.k.var)]
    if 1 not in steps:
        return False
    steps.remove(1)
    address = factor.address
    batch = [factor.stride(a.var) for a in product.batch_of(factor)]
    if None in steps or None in batch or address is None:
        return False
    first = substitute(address, {v: 0 for v in free_vars(address) if v in {
        side, product.k.var, *(a.var for a in product.batch)}})
    return all(divisible(n * dtype.itemsize, DESCRIPTOR_BYTES)
               for n in (*steps, *batch, first) if n is not None)


def comes_in_pieces(product: MatrixProduct, depth: int) -> bool:
    """Whether k is cut by quotients (into taps, say), but never inside a piece so deep.

    What depends on the quotients is then the same for all steps of a piece: single numbers and
    columns of a tile where there would be tiles of them.
    """
    k = product.k
    indices = [i for f in (product.a, product.b) for i in f.indices]
    if not isinstance(k.extent, int) or not k.extent or k.extent % depth or all(
            coefficient(i, k.var) is not None for i in indices):
        return False
    piece, lane = numbered("%piece", k.extent // depth), numbered("%k", depth)
    return all(coefficient(substitute(i, {k.var: piece * depth + lane}), lane) is not None
               for i in indices)


def numbered(name: str, extent: Index) -> Var:
    """A variable of so many values."""
    if isinstance(extent, int):
        return Var(name, 0, max(extent - 1, 0))
    return Var(name, 0, extent - 1)
