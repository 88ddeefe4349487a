"""The algorithm: tensors given element by element, and reductions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.base.scalar import (
    Axis,
    Const,
    Item,
    Reduce,
    Reducer,
    Scalar,
    Tuple,
    cast,
    const,
    loads,
    parts,
)
from terrazzo.base.scalar import reduce as reduce_scalar
from terrazzo.dtypes import DType, as_dtype, float32
from terrazzo.errors import ArgumentError, DTypeError, IndexOutOfRange, user_location
from terrazzo.expr import ir
from terrazzo.expr.access import Access, accesses, clipped, inside
from terrazzo.expr.reductions import fresh_name
from terrazzo.index import Index, IndexExpr, Var
from terrazzo.te.terms import ReduceAxis, Term, formula, plain, scalar

_reduce_names = itertools.count()
_tensor_names = itertools.count()


@dataclass(frozen=True, eq=False)
class Tensor(ir.Tensor):
    """An input, or what `compute` made; its elements are terms of formulas."""

    # The states of scans that it is computed from: it exists row by row, inside of those.
    waits: frozenset[State] = frozenset()

    def __getitem__(self, indices: Any) -> Term:  # type: ignore[override]
        where = tuple(map(plain, indices if isinstance(indices, tuple) else (indices,)))
        for index in where:
            if not isinstance(index, (int, IndexExpr, Scalar)) or isinstance(index, bool):
                raise ArgumentError(f"cannot read {self.name} at {index!r}",
                                    hint="an index is a whole number, an axis or a computed value")
        return Term(ir.load(self, where))


@dataclass(frozen=True, eq=False)
class State(Tensor):
    """Stands for the rows of a scan that are computed already."""


def new_name(kind: str) -> str:
    """A name for what has none."""
    return f"{kind}{next(_tensor_names)}"


def placeholder(shape: Iterable[Index], dtype: Any = float32, name: str | None = None) -> Tensor:
    """An input."""
    return Tensor(name or new_name("in"), tuple(map(plain, shape)), as_dtype(dtype))


def compute(shape: Iterable[Index], element: Callable[..., Any], name: str | None = None,
            dtype: Any = None) -> Any:
    """A tensor given by a function from its indices to the value there.

    If the function answers with a tuple, there is a tensor for each of its values, and all are
    computed in the same loops.

    What it reads must exist, or stand under a `where` that keeps it from being read; sizes that are
    symbolic are checked at the call. Indices that are computed from data are clipped.
    """
    shape = tuple(map(plain, shape))
    like = None if dtype is None else as_dtype(dtype)
    axes, found = _written(shape, element)
    several = isinstance(found, (tuple, list))
    whole = name or new_name("t")
    # Clipped as one, so that what they share stays shared.
    bodies = [_value(value, like, whole) for value in (found if several else (found,))]
    if not bodies:
        raise ArgumentError(f"{whole} computes nothing", hint="answer with one value or more")
    bodies = list(parts(clipped(Tuple(bodies[0].dtype, tuple(bodies)))))
    waits = frozenset().union(*(_waits(x.source) for body in bodies for x in loads(body)))
    made = [Tensor(f"{whole}.{j}" if several else whole, shape, body.dtype, axes, body,
                   origin=name or "", joint=whole if several else "", waits=waits)
            for j, body in enumerate(bodies)]
    for tensor in made:
        for access in () if waits else accesses(tensor):  # a scan knows which rows there are
            refuse_outside(tensor.name, access, {})
    return tuple(made) if several else made[0]


def _value(value: Any, like: DType | None, name: str) -> Scalar:
    if not isinstance(plain(value), (int, float, IndexExpr, Scalar)):
        raise ArgumentError(f"the function of {name} answers with {value!r}",
                            hint="it gives the value of one element")
    return scalar(value, like)


def _waits(source: ir.Tensor) -> frozenset[State]:
    if isinstance(source, State):
        return frozenset((source,))
    return source.waits if isinstance(source, Tensor) else frozenset()


def _written(shape: tuple[Index, ...], element: Callable[..., Any]) -> tuple[
        tuple[Axis, ...], Any]:
    """A formula and its axes, which have other names than those it reduces over."""
    axes = ir.axes_for(shape)
    with formula() as reduced:
        found = element(*(Term(a.var) for a in axes))
        taken = set(reduced)
    if taken.isdisjoint(a.var.name for a in axes):
        return axes, found
    names: list[str] = []
    for axis in axes:
        names.append(fresh_name(axis.var.name, {*taken, *names}))
    axes = tuple(ir.fresh_axis(name, a.hi) for name, a in zip(names, axes))
    with formula():
        return axes, element(*(Term(a.var) for a in axes))


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
    if not all(isinstance(end, (int, IndexExpr)) for end in (lo, hi)):
        raise ArgumentError(f"an axis cannot run over {extent!r}",
                            hint="give its length, or where it begins and ends")
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
    for each in axes:
        plain(each)  # it belongs to the formula, even if no index mentions it
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


# ---------------------------------------------------------------- reductions of a user's own
def comm_reducer(combine: Callable[[Any, Any], Any], identity: Callable[..., Any],
                 name: str = "reduce") -> Callable[..., Any]:
    """A reduction by a function of two values, which may be tuples: `argmax((k, x[k]), axis=k)`.

    `identity` gets the types of the values and answers with what changes nothing. The order in
    which values are combined is the schedule's affair: `combine` must not depend on it.
    """

    def reduction(values: Any, axis: ReduceAxis | Sequence[ReduceAxis]) -> Any:
        several = isinstance(values, (tuple, list))
        given = [scalar(v) for v in (values if several else (values,))]
        wide = [cast(v, v.dtype.compute) for v in given]
        begin = identity(*(v.dtype.name for v in wide))
        begin = tuple(begin) if isinstance(begin, (tuple, list)) else (begin,)
        if len(begin) != len(wide):
            raise ArgumentError(f"the identity of {name} has {len(begin)} values, not {len(wide)}",
                                hint="answer with one value for each that is reduced")
        reducer = Reducer(name, _on_scalars(combine, [v.dtype for v in wide], several, name),
                          tuple(_literal(b, v.dtype, name) for b, v in zip(begin, wide)))
        first = wide[0].dtype
        whole = Reduce(first, name, tuple(plain_axes(axis)), Tuple(first, tuple(wide)), reducer)
        reducer.combine(wide, wide)  # what is wrong with it shows now
        results = tuple(Term(cast(Item(w.dtype, whole, j), v.dtype))
                        for j, (w, v) in enumerate(zip(wide, given)))
        return results if several else results[0]

    reduction.__name__ = name
    return reduction


def _literal(value: Any, dtype: DType, name: str) -> Const:
    number = plain(value)
    number = number.value if isinstance(number, Const) else number
    if not isinstance(number, (bool, int, float)):
        raise ArgumentError(f"the identity of {name} is {value}, not a number",
                            hint="use te.const, te.min_value or te.max_value")
    return const(number, dtype)


def _on_scalars(combine: Callable[[Any, Any], Any], dtypes: Sequence[DType], several: bool,
                name: str) -> Callable[[Sequence[Scalar], Sequence[Scalar]], list[Scalar]]:
    """A user's function on terms as one on scalars, which gives the types that it was given."""

    def run(x: Sequence[Scalar], y: Sequence[Scalar]) -> list[Scalar]:
        left, right = tuple(map(Term, x)), tuple(map(Term, y))
        found = combine(left, right) if several else (combine(left[0], right[0]),)
        if not isinstance(found, (tuple, list)) or len(found) != len(dtypes):
            raise ArgumentError(f"{name} combines {len(dtypes)} values, but its function answers "
                                f"with {found!r}", hint="answer with a tuple of as many")
        results = [scalar(value, dtype) for value, dtype in zip(found, dtypes)]
        for j, (result, dtype) in enumerate(zip(results, dtypes)):
            if result.dtype is not dtype:
                raise DTypeError(f"value {j} of {name} is {dtype.name}, but what it combines to "
                                 f"is {result.dtype.name}", hint="convert it with te.cast")
        return results

    return run
