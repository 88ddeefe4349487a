"""Scalar expressions: the arithmetic that tensor expressions (L2) and Loop IR (L3) share.

A `Scalar` is an immutable DAG. Nodes compare by identity; sharing a node means computing it once.
Float arithmetic happens in float32 or float64 only: `call` widens half types on the way in and
rounds on the way out, and fusion drops the round trips inside a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from terrazzo.base.arithmetic import Arithmetic
from terrazzo.base.contraction import Contraction
from terrazzo.base.scalar_table import OPS, REDUCTIONS
from terrazzo.dtypes import DType, as_dtype, bool_, float32, int64, promote
from terrazzo.errors import DTypeError, UnknownOperator
from terrazzo.index import Index, IndexExpr, Var, substitute


class Source(Protocol):
    """What can be loaded from: a tensor of an expression or a buffer of a loop nest."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> DType: ...


@dataclass(frozen=True, eq=False)
class Scalar(Arithmetic["Scalar"]):
    """One value of one element; see the subclasses."""

    dtype: DType

    def apply(self, op: str, *args: Any) -> Scalar:
        return call(op, *args)

    def __str__(self) -> str:
        from terrazzo.base.scalar_text import format_scalar

        return format_scalar(self)


@dataclass(frozen=True, eq=False)
class Const(Scalar):
    """A literal."""

    value: Any


@dataclass(frozen=True, eq=False)
class Load(Scalar):
    """An element of a tensor (one index a dimension) or of a flat buffer (one index)."""

    source: Any
    indices: tuple[Index | Scalar, ...]


@dataclass(frozen=True, eq=False)
class FromIndex(Scalar):
    """The value of an index expression: what iota, masks and padding are made of."""

    index: Index


@dataclass(frozen=True, eq=False)
class Undefined(Scalar):
    """A value that does not matter: any will do."""


@dataclass(frozen=True, eq=False)
class Call(Scalar):
    """An operation of the table OPS on other scalars."""

    op: str
    args: tuple[Scalar, ...]


@dataclass(frozen=True)
class Axis:
    """One iteration variable and the range `lo <= var < hi` it runs over."""

    var: Var
    lo: Index
    hi: Index

    @property
    def extent(self) -> Index:
        return self.hi - self.lo

    def __str__(self) -> str:
        return f"{self.var} in {self.lo}..{self.hi}"


@dataclass(frozen=True, eq=False)
class Reduce(Scalar):
    """All values of `value` over `axes` combined with a reduction of the table REDUCTIONS.

    By a `reducer` several values are combined at once: `value` is a Tuple, and so is the result;
    `op` is its name then.
    """

    op: str
    axes: tuple[Axis, ...]
    value: Scalar
    reducer: Reducer | None = None
    contraction: Contraction | None = None  # of a sum of products: which axis is which


@dataclass(frozen=True, eq=False)
class Reducer:
    """A reduction of a user's own: how two tuples become one, in any order, and what begins it."""

    name: str
    combine: Callable[[Sequence[Scalar], Sequence[Scalar]], Sequence[Scalar]]
    identity: tuple[Const, ...]


@dataclass(frozen=True, eq=False)
class Tuple(Scalar):
    """Several values at once; its type is that of the first."""

    items: tuple[Scalar, ...]


@dataclass(frozen=True, eq=False)
class Item(Scalar):
    """One of the values of a tuple, or of a reduction that has several."""

    value: Scalar
    number: int


# ---------------------------------------------------------------- building
def const(value: Any, dtype: DType | None = None) -> Const:
    """A literal of the given type (float32, int64 or bool when none is given)."""
    if dtype is None:
        dtype = bool_ if isinstance(value, bool) else int64 if isinstance(value, int) else float32
    return Const(dtype, value)


def as_scalar(value: Any, like: DType | None = None) -> Scalar:
    """A Scalar from a Scalar, an index expression or a Python number (typed like `like`)."""
    if isinstance(value, Scalar):
        return value
    if isinstance(value, IndexExpr):
        return FromIndex(int64, value)
    if like is not None and not (isinstance(value, float) and like.is_integer):
        return Const(like, value)
    return const(value)


def call(op: str, *args: Any, dtype: DType | None = None) -> Scalar:
    """Apply an operation of OPS; converts Python numbers, promotes types, widens half types."""
    row = OPS.get(op)
    if row is None:
        raise UnknownOperator(f"there is no scalar operation {op!r}", hint="see scalar.OPS")
    if len(args) != row.arity:
        raise DTypeError(f"{op} takes {row.arity} arguments, got {len(args)}")
    operands = args[1:] if op == "where" else args  # numbers are typed by these, not by a mask
    like = next((a.dtype for a in operands if isinstance(a, Scalar)), None)
    values = [as_scalar(a, like) for a in args]
    if op == "cast":
        return cast(values[0], dtype or values[0].dtype)
    if op == "where":
        joint = promote(values[1].dtype, values[2].dtype)
        return Call(joint, op, (values[0], cast(values[1], joint), cast(values[2], joint)))
    joint = promote(*(v.dtype for v in values))
    wide = joint.compute
    if row.meaning is not None:
        made = row.meaning(call, *(cast(v, wide) for v in values))
        return made if row.result == "bool" else cast(made, joint)
    result = Call(bool_ if row.result == "bool" else wide, op,
                  tuple(cast(v, wide) for v in values))
    return result if row.result == "bool" else cast(result, joint)


def cast(value: Scalar, dtype: DType | Any) -> Scalar:
    """Convert to another type; nothing happens when it has that type already."""
    dtype = as_dtype(dtype)
    if value.dtype is dtype:
        return value
    if isinstance(value, Const) and dtype.is_float and not value.dtype.is_complex:
        return Const(dtype, float(np.asarray(value.value, value.dtype.np).astype(dtype.np)))
    return Call(dtype, "cast", (value,))


def reduce(op: str, value: Scalar, axes: Sequence[Axis],
           contraction: Contraction | None = None) -> Scalar:
    """Combine `value` over `axes`; half types are accumulated in float32."""
    wide = value.dtype.compute
    return cast(Reduce(wide, op, tuple(axes), cast(value, wide), contraction=contraction),
                value.dtype)


def identity_of(reduction: Reduce) -> Scalar:
    """What a reduction of nothing gives: one value, or a Tuple."""
    if reduction.reducer is not None:
        return Tuple(reduction.dtype, reduction.reducer.identity)
    return const(REDUCTIONS[reduction.op].identity(reduction.dtype), reduction.dtype)


def parts(value: Scalar) -> tuple[Scalar, ...]:
    """The values of a Tuple, or the one value."""
    return value.items if isinstance(value, Tuple) else (value,)


def where(condition: Scalar, yes: Any, no: Any) -> Scalar:
    """`yes` where the condition holds, else `no`."""
    return call("where", condition, yes, no)


# ---------------------------------------------------------------- walking
def children(node: Scalar) -> tuple[Scalar, ...]:
    """The scalars a node is computed from."""
    if isinstance(node, Call):
        return node.args
    if isinstance(node, Load):
        return tuple([i for i in node.indices if isinstance(i, Scalar)])
    if isinstance(node, Tuple):
        return node.items
    return (node.value,) if isinstance(node, (Reduce, Item)) else ()


def walk(root: Scalar) -> Iterator[Scalar]:
    """Every node once, arguments before their users."""
    return iter(_in_order(root))


@lru_cache(maxsize=64)  # passes look at an expression several times before they go on
def _in_order(root: Scalar) -> list[Scalar]:
    seen: set[int] = set()
    order: list[Scalar] = []
    stack: list[Scalar | tuple[Scalar]] = [root]  # a tuple: its arguments are done
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            order.append(node[0])
        elif id(node) not in seen:
            seen.add(id(node))
            arguments = children(node)
            if arguments:
                stack.append((node,))
                stack.extend(arguments[::-1])
            else:
                order.append(node)
    return order


def rewrite(root: Scalar, visit: Callable[[Scalar], Scalar | None]) -> Scalar:
    """Rebuild bottom up; `visit` gets each rebuilt node and may answer with a replacement."""
    done: dict[int, Scalar] = {}
    for node in walk(root):
        fresh = node
        if isinstance(node, Call):
            for arg in node.args:
                if done[id(arg)] is not arg:
                    fresh = Call(node.dtype, node.op, tuple([done[id(a)] for a in node.args]))
                    break
        elif isinstance(node, Load):
            for index in node.indices:
                if isinstance(index, Scalar) and done[id(index)] is not index:
                    fresh = Load(node.dtype, node.source, tuple(
                        [done[id(i)] if isinstance(i, Scalar) else i for i in node.indices]))
                    break
        elif isinstance(node, Reduce) and done[id(node.value)] is not node.value:
            fresh = replace(node, value=done[id(node.value)])
        elif isinstance(node, Tuple) and any(done[id(i)] is not i for i in node.items):
            fresh = Tuple(node.dtype, tuple([done[id(i)] for i in node.items]))
        elif isinstance(node, Item) and done[id(node.value)] is not node.value:
            whole = done[id(node.value)]
            fresh = whole.items[node.number] if isinstance(whole, Tuple) else Item(
                node.dtype, whole, node.number)
        answer = visit(fresh)
        done[id(node)] = fresh if answer is None else answer
    return done[id(root)]


def substitute_indices(root: Scalar, values: Mapping[Var, Index]) -> Scalar:
    """Replace index variables everywhere, in addresses, masks and reduction ranges."""
    if not values:
        return root
    table = dict(values)

    def visit(node: Scalar) -> Scalar | None:
        if isinstance(node, Load):
            indices = tuple(i if isinstance(i, Scalar) else substitute(i, table)
                            for i in node.indices)
            return Load(node.dtype, node.source, indices)
        if isinstance(node, FromIndex):
            return FromIndex(node.dtype, substitute(node.index, table))
        if isinstance(node, Reduce):
            axes = tuple(Axis(a.var, substitute(a.lo, table), substitute(a.hi, table))
                         for a in node.axes)
            roles = node.contraction and node.contraction.mapped(lambda i: substitute(i, table))
            return replace(node, axes=axes, contraction=roles)
        return None

    return rewrite(root, visit)


def same(a: Scalar, b: Scalar) -> bool:
    """Whether two expressions are alike node for node, and share nodes alike."""
    ours, theirs = list(walk(a)), list(walk(b))
    if len(ours) != len(theirs):
        return False
    partner: dict[int, int] = {}
    for x, y in zip(ours, theirs, strict=True):
        if x.dtype is not y.dtype or _own(x) != _own(y) or (
                [partner[id(c)] for c in children(x)] != [id(c) for c in children(y)]):
            return False
        partner[id(x)] = id(y)
    return True


def _own(node: Scalar) -> tuple[object, ...]:
    """What a node is, apart from its type and its arguments."""
    if isinstance(node, Call):
        return Call, node.op
    if isinstance(node, Const):
        return Const, repr(node.value)  # nan is nan, and 0.0 is not -0.0
    if isinstance(node, FromIndex):
        return FromIndex, node.index
    if isinstance(node, Load):
        return Load, id(node.source), *(None if isinstance(i, Scalar) else i for i in node.indices)
    return type(node), id(node)


def loads(root: Scalar) -> list[Load]:
    """Every load, in order of first use."""
    return [node for node in walk(root) if isinstance(node, Load)]


def cost(root: Scalar) -> int:
    """How dear one evaluation is, counted in additions."""
    return sum(OPS[n.op].cost for n in walk(root) if isinstance(n, Call) and n.op != "cast")
