"""Tensor expressions: `Tensor` (an input, or computed element by element) and `Program`.

    softmax_max[i] = max(k in 0..n: x[i, k])

A program is a list of tensors in the order they are computed; fusing two tensors is composing
their bodies. Nothing here says how loops run: that is the schedule's part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from terrazzo.base.scalar import (
    Axis,
    Call,
    Const,
    FromIndex,
    Item,
    Load,
    Reduce,
    Scalar,
    Tuple,
    as_scalar,
    loads,
    rewrite,
    substitute_indices,
    walk,
)
from terrazzo.base.scalar_table import OPS
from terrazzo.base.scalar_text import format_shared
from terrazzo.base.shapes import Shape, contiguous_strides, dims_text
from terrazzo.dtypes import DType, as_dtype, float32
from terrazzo.errors import RankError
from terrazzo.index import Index, IndexExpr, Var, free_vars, proves_le, proves_lt, substitute

_counter = itertools.count()


@dataclass(frozen=True, eq=False)
class Tensor:
    """An input (no body) or a tensor whose element at `axes` is `body`."""

    name: str
    shape: Shape
    dtype: DType
    axes: tuple[Axis, ...] = ()
    body: Scalar | None = None
    strides: tuple[Index, ...] | None = None  # in elements; None is row major
    origin: str = ""  # the operator it comes from
    offset: Index = 0  # of the first element from the start of its memory
    joint: str = ""  # the name of the stage, if it computes other tensors in the same loops

    def __getitem__(self, indices: Any) -> Load:
        return load(self, indices if isinstance(indices, tuple) else (indices,))

    @property
    def is_input(self) -> bool:
        return self.body is None

    def flat(self, indices: Sequence[Index | Scalar]) -> Index | Scalar:
        """The address of an element, in elements from the start."""
        strides = self.strides or contiguous_strides(self.shape)
        if any(isinstance(i, Scalar) for i in indices):
            total: Any = as_scalar(_as_expr(self.offset))
            for i, stride in zip(indices, strides, strict=True):
                term = i if isinstance(i, Scalar) else as_scalar(_as_expr(i))
                total = total + term * as_scalar(_as_expr(stride))
            return total
        address: Any = self.offset
        for i, stride in zip(indices, strides, strict=True):
            address = address + i * stride
        return address

    def __str__(self) -> str:
        return format_tensor(self)


def load(tensor: Tensor, indices: Sequence[Any]) -> Load:
    """An element of a tensor, at one index a dimension: an index, an axis or a computed one."""
    if len(indices) != len(tensor.shape):
        raise RankError(f"{tensor.name} has {len(tensor.shape)} dimensions, got {len(indices)} "
                        "indices")
    return Load(tensor.dtype, tensor, tuple(i.var if isinstance(i, Axis) else i for i in indices))


def _as_expr(value: Index) -> Any:
    return value if isinstance(value, IndexExpr) else int(value)


def placeholder(shape: Iterable[Index], dtype: Any = float32, name: str | None = None) -> Tensor:
    """An input of a program."""
    return Tensor(name or f"in{next(_counter)}", tuple(shape), as_dtype(dtype))


def fresh_axis(name: str, hi: Index, lo: Index = 0) -> Axis:
    """An iteration variable of its own for `lo <= var < hi`."""
    # A symbolic bound also tells the axis "k" from a dimension that a user named "k".
    return Axis(Var(name, lo if isinstance(lo, int) else 0,
                    max(hi - 1, 0) if isinstance(hi, int) else hi - 1), lo, hi)


_LETTERS = "ijlmpqrstuvw"


def axes_for(shape: Shape) -> tuple[Axis, ...]:
    """The canonical axes of a shape. Tensors of one shape share them, so fusion shares terms."""
    return tuple(fresh_axis(_LETTERS[d] if d < len(_LETTERS) else f"i{d}", n)
                 for d, n in enumerate(shape))


def compute(shape: Iterable[Index], element: Callable[..., Any], *, name: str | None = None,
            dtype: Any = None, origin: str = "") -> Tensor:
    """A tensor given by a function from its indices to the value there."""
    shape = tuple(shape)
    axes = axes_for(shape)
    like = None if dtype is None else as_dtype(dtype)
    body = as_scalar(element(*(a.var for a in axes)), like)
    return Tensor(name or f"t{next(_counter)}", shape, body.dtype, axes, body, origin=origin)


def reduce_axis(extent: Index, name: str = "k") -> Axis:
    """An axis to reduce over; give it to `scalar.reduce`."""
    return fresh_axis(name, extent)


# ---------------------------------------------------------------- composition
def inline(body: Scalar, producers: Mapping[Tensor, Scalar | None]) -> Scalar:
    """Replace loads of the given tensors by their (already inlined) bodies: fusion."""
    memo: dict[tuple[Any, ...], Scalar] = {}

    def visit(node: Scalar) -> Scalar | None:
        if not isinstance(node, Load) or node.source not in producers:
            return None
        source: Tensor = node.source
        key = (source, *(id(i) if isinstance(i, Scalar) else i for i in node.indices))
        if key not in memo:
            definition = producers[source]
            assert definition is not None
            table: dict[Var, Any] = {}
            for axis, index in zip(source.axes, node.indices, strict=True):
                if index is not axis.var:
                    table[axis.var] = index
            memo[key] = substitute_any(definition, table)
        return memo[key]

    return share_terms(rewrite(body, visit))


def share_terms(root: Scalar) -> Scalar:
    """The same expression with equal terms as one node, so that each is computed (once).

    And `f32(bf16(x))` is x inside a kernel: half types are for storage, arithmetic is float32. What
    decides (compares, rounds) sees what is stored: the largest element is equal to one of them.
    """
    terms: dict[tuple[Any, ...], Scalar] = {}

    def visit(node: Scalar) -> Scalar:
        node = _without_round_trips(node)
        key: tuple[Any, ...]
        if isinstance(node, Call):
            key = (node.op, *map(id, node.args))
        elif isinstance(node, Load):
            key = (node.source, *(id(i) if isinstance(i, Scalar) else (i,) for i in node.indices))
        elif isinstance(node, Reduce):
            key = (node.op, id(node.reducer), node.axes, id(node.value))
        elif isinstance(node, FromIndex):
            key = (node.index,)
        elif isinstance(node, Tuple):
            key = tuple(map(id, node.items))
        elif isinstance(node, Item):
            key = (id(node.value), node.number)
        else:
            assert isinstance(node, Const)
            key = (repr(node.value),)
        return terms.setdefault((type(node), node.dtype, *key), node)

    return _without_round_trip(rewrite(root, visit))


def substitute_any(root: Scalar, table: Mapping[Var, Any]) -> Scalar:
    """Replace index variables by indices or by scalars (a computed index)."""
    # All at once: what an index brings in must not be taken for a variable that a scalar replaces.
    stand_ins = {v: Var(f"{v.name}{next(_counter)}", v.lo, v.hi)
                 for v, s in table.items() if isinstance(s, Scalar)}
    computed = {stand_in: table[v] for v, stand_in in stand_ins.items()}
    plain = {v: s for v, s in table.items() if not isinstance(s, Scalar)}
    root = _rename_reductions(root, plain, computed.values())
    if table:
        root = substitute_indices(root, {**plain, **stand_ins})
    if not computed:
        return root

    def visit(node: Scalar) -> Scalar | None:
        if isinstance(node, FromIndex):
            return index_to_scalar(node.index, computed)
        if isinstance(node, Load):
            return Load(node.dtype, node.source, tuple(
                i if isinstance(i, Scalar) or not (free_vars(i) & computed.keys())
                else _computed_place(i, n, computed)
                for i, n in zip(node.indices, node.source.shape, strict=True)))
        return None

    return rewrite(root, visit)


def _computed_place(index: Index, size: Index, values: Mapping[Var, Scalar]) -> Scalar:
    """An index of a dimension, computed, and within it.

    Whoever computes an index brings it into the dimension that it was for. Of another one, as
    `where(i > 0, x[i - 1], 0)` reads it, it may be outside where the condition does not hold.
    """
    from terrazzo.base.scalar import call, cast

    place = index_to_scalar(index, values)
    if proves_le(0, index) and proves_lt(index, size):
        return place
    return call("max", call("min", cast(place, "int64"), as_scalar(size - 1)), 0)


def index_to_scalar(index: Index, values: Mapping[Var, Scalar]) -> Scalar:
    """An index expression whose variables may be computed values, as scalar arithmetic."""
    from terrazzo.base.scalar import call
    from terrazzo.index import Algebra, interpret

    return interpret(index, Algebra(
        constant=as_scalar,
        variable=lambda var: values[var] if var in values else as_scalar(var),
        add=lambda a, b: call("add", a, b),
        multiply=lambda a, b: call("mul", a, b),
        floordiv=lambda a, b: call("floordiv", a, b),
        mod=lambda a, b: call("mod", a, b),
        minimum=lambda a, b: call("min", a, b),
        maximum=lambda a, b: call("max", a, b),
    ))


def _rename_reductions(root: Scalar, table: Mapping[Var, Index], scalars: Collection[Scalar]
                       ) -> Scalar:
    """Give reduction axes new names where what is substituted would be captured by them."""
    incoming = {v for index in table.values() for v in free_vars(index)}
    if not incoming and not scalars:
        return root
    for node in (n for s in scalars for n in walk(s)):
        indices = [node.index] if isinstance(node, FromIndex) else (
            node.indices if isinstance(node, Load) else ())
        incoming |= {v for i in indices if not isinstance(i, Scalar) for v in free_vars(i)}
    clash = {a.var: a for n in walk(root) if isinstance(n, Reduce) for a in n.axes
             if a.var in incoming}
    if not clash:
        return root
    fresh = {var: Var(f"{var.name}{next(_counter)}", var.lo, var.hi) for var in clash}

    def visit(node: Scalar) -> Scalar | None:
        if isinstance(node, Reduce):
            axes = tuple(Axis(fresh.get(a.var, a.var), a.lo, a.hi) for a in node.axes)
            return replace(node, axes=axes)
        return None

    return rewrite(substitute_indices(root, fresh), visit)


def _without_round_trips(node: Scalar) -> Scalar:
    """A node of arguments as they are before they are rounded to be stored, unless it decides."""
    if isinstance(node, Call):
        if OPS[node.op].decides or (node.op == "cast" and not node.dtype.is_float):
            return node
        args = tuple(map(_without_round_trip, node.args))
        return node if args == node.args else replace(node, args=args)
    if isinstance(node, Reduce):
        value = _without_round_trip(node.value)
        return node if value is node.value else replace(node, value=value)
    if isinstance(node, Tuple):
        return replace(node, items=tuple(map(_without_round_trip, node.items)))
    return node


def _without_round_trip(node: Scalar) -> Scalar:
    if isinstance(node, Call) and node.op == "cast":
        inner = node.args[0]
        if isinstance(inner, Call) and inner.op == "cast" and inner.dtype.is_float:
            first = inner.args[0]
            if first.dtype is node.dtype and inner.dtype.compute is node.dtype:
                return first
    return node


# ---------------------------------------------------------------- programs
@dataclass(frozen=True, eq=False)
class Scan:
    """A recurrence along the first axis of its results, one after the other.

    `inits` are their first rows. For each further row `body` is computed, in order; it reads rows
    before this one by way of `states`, and the `updates` among it are the row. Results, states and
    updates have one shape and are one piece of memory, of which the inits are the beginning.
    """

    name: str
    states: tuple[Tensor, ...]
    inits: tuple[Tensor, ...]
    updates: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    body: tuple[Tensor, ...]

    @property
    def first(self) -> Index:
        """The first row that is not given."""
        return self.inits[0].shape[0]

    @property
    def rows(self) -> Index:
        return self.results[0].shape[0]

    def memory_of(self) -> dict[Tensor, Tensor]:
        """The result in whose memory each of the others lies."""
        return {t: result for group in (self.states, self.inits, self.updates)
                for t, result in zip(group, self.results, strict=True)}


@dataclass(frozen=True, eq=False)
class Program:
    """A fused group: inputs, the tensors that are computed in order, and those that leave it."""

    name: str
    inputs: tuple[Tensor, ...]
    stages: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    kind: str = "pointwise"  # pointwise | rows | contraction | attention | opaque
    attrs: Mapping[str, Any] = field(default_factory=dict)
    scans: tuple[Scan, ...] = ()

    @property
    def dims(self) -> tuple[Var, ...]:
        """The symbolic sizes it depends on, by name."""
        found: set[Var] = set()
        for tensor in (*self.inputs, *self.stages):
            for index in (*tensor.shape, *(tensor.strides or ())):
                found |= free_vars(index)
            for axis in reduction_axes(tensor):
                found |= free_vars(axis.lo) | free_vars(axis.hi)
            for node in walk(tensor.body) if tensor.body is not None else ():
                indices = (node.index,) if isinstance(node, FromIndex) else (
                    node.indices if isinstance(node, Load) else ())
                found |= {v for i in indices if not isinstance(i, Scalar) for v in free_vars(i)}
        found -= {a.var for t in self.stages for a in (*t.axes, *reduction_axes(t))}
        return tuple(sorted(found, key=lambda v: v.name))

    def __str__(self) -> str:
        return format_program(self)


def reduction_axes(tensor: Tensor) -> list[Axis]:
    """All axes a tensor's body reduces over."""
    if tensor.body is None:
        return []
    return [a for n in walk(tensor.body) if isinstance(n, Reduce) for a in n.axes]


def reads(tensor: Tensor) -> list[Tensor]:
    """The tensors a tensor's body loads, each once."""
    if tensor.body is None:
        return []
    return list(dict.fromkeys(load.source for load in loads(tensor.body)))


def substitute_shape(shape: Shape, table: Mapping[Var, Index]) -> Shape:
    """A shape with symbolic sizes replaced."""
    return tuple(substitute(n, dict(table)) for n in shape)


# ---------------------------------------------------------------- printing
def format_tensor(tensor: Tensor) -> str:
    """`y[i, j]: f32[8, 8] = ...`, with shared terms named on lines of their own."""
    head = f"{tensor.name}: {tensor.dtype.short}{dims_text(tensor.shape)}"
    if tensor.body is None:
        strides = "" if tensor.strides is None else f" strides {dims_text(tensor.strides)}"
        if tensor.offset != 0:
            strides += f" from {tensor.offset}"
        return f"input {head}{strides}"
    *shared, value = format_shared(tensor.body)
    axes = ", ".join(str(a.var) for a in tensor.axes)
    origin = f"  # {tensor.origin}" if tensor.origin else ""
    lines = [f"{head}{origin}", *("    " + line for line in shared),
             f"    {tensor.name}[{axes}] = {value}"]
    return "\n".join(lines)


def format_program(program: Program) -> str:
    """The text form of a fused group."""
    lines = [f"program {program.name} ({program.kind}):"]
    for tensor in (*program.inputs, *program.stages):
        lines += ["  " + line for line in format_tensor(tensor).splitlines()]
    lines.append("  return " + ", ".join(t.name for t in program.outputs))
    return "\n".join(lines)
