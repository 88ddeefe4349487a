"""Attention in programs: operands, sizes and options, and what is done with scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from terrazzo.base.scalar import Const, Scalar, as_scalar, call, cast, where
from terrazzo.base.shapes import contiguous_strides
from terrazzo.dtypes import DType, float32, promote
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.place import storage_size
from terrazzo.index import Index, minimum, proves_eq
from terrazzo.loop.ir import Buffer

# e to this is the last normal number, by bits of the type.
_SMALLEST = {32: -87.0, 64: -708.0}


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor of [..., heads, places, size] and the buffer it lies in."""

    tensor: Tensor
    buffer: Buffer

    @staticmethod
    def of(tensor: Tensor) -> Operand:
        return Operand(tensor, Buffer(tensor.name, tensor.dtype, storage_size(tensor)))

    def stride(self, axis: int) -> Index:
        """The distance of neighbours along an axis counted from the back; 0 where it stretches."""
        if -axis > len(self.tensor.shape) or self.tensor.shape[axis] == 1:
            return 0
        return (self.tensor.strides or contiguous_strides(self.tensor.shape))[axis]

    def at(self, *places: Index) -> Index:
        """The address of an element, given its place along every axis of the result."""
        address = self.tensor.offset
        for axis, place in enumerate(reversed(places)):
            address = address + place * self.stride(-axis - 1)
        return address


@dataclass(frozen=True, eq=False)
class Attention:
    """The operands, sizes and options of one attention."""

    q: Operand
    k: Operand
    v: Operand
    mask: Operand | None
    out: Operand
    batch: tuple[Index, ...]
    heads: Index
    shared: Index  # heads of q for each of k and v
    queries: Index
    keys: Index  # those that some query sees
    size: Index  # of a query and a key
    value_size: Index
    causal: bool
    nan_if_unseen: bool  # what a query that sees no key gives: nan, or zeros
    scale: Scalar
    wide: DType  # what is computed in

    @staticmethod
    def of(program: Program) -> Attention:
        q, k, v, *rest = map(Operand.of, program.inputs)
        out = Operand.of(program.outputs[0])
        attrs = program.attrs["node"].attrs
        *batch, heads, queries, value_size = (1, *out.tensor.shape)[-max(len(out.tensor.shape), 3):]
        keys, size = k.tensor.shape[-2:]
        kv_heads = k.tensor.shape[-3] if len(k.tensor.shape) > 2 else 1
        one_to_one = kv_heads == 1 or proves_eq(heads, kv_heads)
        wide = promote(float32, *(o.tensor.dtype.compute for o in (q, k, v)))
        causal = bool(attrs["causal"])
        if causal:  # places are counted from the first, so no query sees keys past their number
            keys = minimum(keys, q.tensor.shape[-2])
            causal = q.tensor.shape[-2] != 1
        return Attention(q, k, v, rest[0] if rest else None, out, tuple(batch), heads,
                         1 if one_to_one else heads // kv_heads, queries, keys, size, value_size,
                         causal, attrs["unseen"] == "nan", _scale(attrs["scale"], size, wide), wide)

    @property
    def params(self) -> tuple[Buffer, ...]:
        """The buffers of the operands, the result last."""
        operands = (self.q, self.k, self.v, self.mask, self.out)
        return tuple(o.buffer for o in operands if o is not None)

    @property
    def lowest(self) -> Const:
        """The maximum of no scores: a number, for which exp(-inf - lowest) is 0 and not nan."""
        return self.const(float(np.finfo(self.wide.np).min))

    def const(self, value: float) -> Const:
        """A number of the type computed in."""
        return Const(self.wide, value)

    def masked(self, score: Scalar, element: Scalar) -> Scalar:
        """A score with the mask's element applied to it."""
        if element.dtype.is_bool:
            return where(element, score, -math.inf)
        return score + cast(element, self.wide)

    def hidden(self, score: Scalar, query: Index, key: Index) -> Scalar:
        """A score, unless its key comes after its query."""
        return where(call("ge", as_scalar(query), as_scalar(key)), score, -math.inf)

    def weight(self, score: Scalar) -> Scalar:
        """e to a score of at most 0. A denormal would cost 100 cycles; it becomes 0."""
        least = self.const(_SMALLEST[self.wide.bits])
        vanishes = call("lt", score, least)
        return where(vanishes, self.const(0), call("exp", where(vanishes, least, score)))

    def inverse(self, total: Scalar) -> Scalar:
        """1 / total; a query that saw no key has sums of 0, which stay 0 or become nan."""
        if self.nan_if_unseen:
            return self.const(1) / total
        return self.const(1) / where(call("eq", total, self.const(0)), 1.0, total)


def _scale(given: float | None, size: Index, wide: DType) -> Scalar:
    if given is not None:
        return Const(wide, float(given))
    if isinstance(size, int):
        return Const(wide, 1 / math.sqrt(size) if size else 1.0)
    return call("rsqrt", cast(as_scalar(size), wide))
