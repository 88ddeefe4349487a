"""The algorithm: tensors given element by element, and reductions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.dtypes import as_dtype, float32
from terrazzo.errors import ArgumentError, IndexOutOfRange, user_location
from terrazzo.expr import ir
from terrazzo.expr.access import Access, accesses, clipped, inside
from terrazzo.index import Index, Var
from terrazzo.scalar import Axis
from terrazzo.scalar import reduce as reduce_scalar
from terrazzo.te.terms import ReduceAxis, Term, plain, scalar

_reduce_names = itertools.count()
_tensor_names = itertools.count()


@dataclass(frozen=True, eq=False)
class Tensor(ir.Tensor):
    """An input, or what `compute` made; its elements are terms of formulas."""

    def __getitem__(self, indices: Any) -> Term:  # type: ignore[override]
        where = indices if isinstance(indices, tuple) else (indices,)
        return Term(ir.load(self, tuple(map(plain, where))))


def placeholder(shape: Iterable[Index], dtype: Any = float32, name: str | None = None) -> Tensor:
    """An input."""
    return Tensor(name or f"in{next(_tensor_names)}", tuple(map(plain, shape)), as_dtype(dtype))


def compute(shape: Iterable[Index], element: Callable[..., Any], name: str | None = None,
            dtype: Any = None) -> Tensor:
    """A tensor given by a function from its indices to the value there.

    What it reads must exist, or stand under a `where` that keeps it from being read; sizes that are
    symbolic are checked at the call. Indices that are computed from data are clipped.
    """
    shape = tuple(map(plain, shape))
    axes = ir.axes_for(shape)
    like = None if dtype is None else as_dtype(dtype)
    body = clipped(scalar(element(*(Term(a.var) for a in axes)), like))
    made = Tensor(name or f"t{next(_tensor_names)}", shape, body.dtype, axes, body,
                  origin=name or "")
    for access in accesses(made):
        refuse_outside(made.name, access, {})
    return made


def refuse_outside(name: str, access: Access, sizes: Mapping[Var, int]) -> None:
    """Raise where a stage surely reads what does not exist."""
    if inside(access, sizes) is False:
        given = "".join(f", {var} = {size}" for var, size in sizes.items())
        raise IndexOutOfRange(f"{name} reads outside its input: {access}{given}",
                              where=user_location(),
                              hint="choose by te.where(condition, x[i], 0) what is read")


# ---------------------------------------------------------------- reductions
def reduce_axis(extent: Index | tuple[Index, Index], name: str | None = None) -> ReduceAxis:
    """An axis to reduce over: all of `0..extent`, or `lo..hi` for a pair."""
    lo, hi = map(plain, extent if isinstance(extent, tuple) else (0, extent))
    if name is None:
        number = next(_reduce_names)
        name = f"k{number}" if number else "k"
    return ReduceAxis(ir.fresh_axis(name, hi, lo))


def plain_axes(axis: Any) -> list[Axis]:
    """The axes that a reduction is given: one, or several."""
    axes = [axis] if isinstance(axis, (ReduceAxis, Axis)) else list(axis)
    for each in axes:
        if not isinstance(each, (ReduceAxis, Axis)):
            raise ArgumentError(f"cannot reduce over {each!r}", hint="make axes with reduce_axis")
    return [a.axis if isinstance(a, ReduceAxis) else a for a in axes]


def _reduce(op: str, value: Any, axis: Any) -> Term:
    return Term(reduce_scalar(op, scalar(value), plain_axes(axis)))


def sum(value: Any, axis: ReduceAxis | Sequence[ReduceAxis]) -> Term:
    """The sum of an expression over axes made with `reduce_axis`."""
    return _reduce("add", value, axis)


def prod(value: Any, axis: ReduceAxis | Sequence[ReduceAxis]) -> Term:
    """The product of an expression over axes made with `reduce_axis`."""
    return _reduce("mul", value, axis)


def max(value: Any, axis: ReduceAxis | Sequence[ReduceAxis]) -> Term:
    """The greatest value of an expression over axes made with `reduce_axis`."""
    return _reduce("max", value, axis)


def min(value: Any, axis: ReduceAxis | Sequence[ReduceAxis]) -> Term:
    """The least value of an expression over axes made with `reduce_axis`."""
    return _reduce("min", value, axis)
