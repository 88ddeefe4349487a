"""Products that stay apart from sums where one bit decides: before rounding and comparing.

LLVM may make a product and a sum one fused multiply-add, which keeps digits that a product alone
loses. Nearly always that is good. But 112 - 112 * (30 / 28) is -8 in float32, and -7.999996 with
those digits: what a program makes a whole number of, or compares, would then be another number
than that of every engine that computes step by step. So what decides is computed step by step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from terrazzo.base.scalar import Call, Const, Load, Scalar, loads
from terrazzo.base.scalar import children as arguments
from terrazzo.base.scalar import walk as scalars_of
from terrazzo.base.scalar_table import OPS
from terrazzo.loop.ir import Atomic, Buffer, If, Let, Stmt, Store, While, rewrite, walk

_DECIDES = frozenset(name for name, row in OPS.items() if row.decides)


def products_apart(body: Stmt) -> Stmt:
    """A body whose products are never fused with a sum where that could change a decision."""
    marked = _deciding_products(body)
    if not marked:
        return body
    done: dict[int, Scalar] = {}  # for all statements: what they share stays one value

    def scalar(value: Any) -> Any:
        return _apart(value, marked, done) if isinstance(value, Scalar) else value

    def visit(stmt: Stmt) -> Stmt | None:
        fresh = {name: scalar(getattr(stmt, name)) for name in _SCALARS.get(type(stmt), ())}
        changed = any(new is not getattr(stmt, name) for name, new in fresh.items())
        return replace(stmt, **fresh) if changed else None  # type: ignore[type-var]

    return rewrite(body, visit)


_SCALARS: dict[type, tuple[str, ...]] = {
    If: ("cond",), Let: ("value",), While: ("cond",),
    Store: ("index", "value", "mask", "streaming"), Atomic: ("index", "value", "expected")}


def _scalars(stmt: Stmt) -> Iterator[Scalar]:
    for name in _SCALARS.get(type(stmt), ()):
        value = getattr(stmt, name)
        if isinstance(value, Scalar):
            yield value


def _decides(node: Scalar) -> bool:
    if not isinstance(node, Call) or not node.args[0].dtype.is_float:
        return False
    return node.op in _DECIDES or (node.op == "cast" and not node.dtype.is_float)


def _deciding_products(body: Stmt) -> set[int]:
    """The products that some decision is computed from, by their identities.

    Values that go through memory of the kernel are followed, those that a loop adds up are not:
    a sum over many products is no number of a user's that falls on another exactly.
    """
    stored: dict[Buffer, list[Scalar]] = {}
    todo: list[Scalar] = []
    for stmt in walk(body):
        for value in _scalars(stmt):
            todo += [arg for node in scalars_of(value) if _decides(node)
                     for arg in arguments(node)]
        if isinstance(stmt, Store) and stmt.reduce is None:
            stored.setdefault(stmt.buffer, []).append(stmt.value)
    seen: set[int] = set()
    products: set[int] = set()
    followed: set[Buffer] = set()
    while todo:
        node = todo.pop()
        if id(node) in seen or not node.dtype.is_float:
            continue
        seen.add(id(node))
        if isinstance(node, Load) and node.source not in followed:
            followed.add(node.source)
            todo += [value for value in stored.get(node.source, ())
                     if all(load.source is not node.source for load in loads(value))]
        elif isinstance(node, Call):
            todo += node.args
            if node.op == "mul":
                products.add(id(node))
    return products


def _apart(root: Scalar, marked: set[int], done: dict[int, Scalar]) -> Scalar:
    for node in scalars_of(root):
        if id(node) in done:
            continue
        fresh = node
        if isinstance(node, Call):
            args = tuple([done[id(a)] for a in node.args])
            if id(node) in marked:  # adds nothing, not even to a zero, and is no product
                fresh = Call(node.dtype, "fma", (*args, Const(node.dtype, -0.0)))
            elif any(new is not old for new, old in zip(args, node.args)):
                fresh = Call(node.dtype, node.op, args)
        elif isinstance(node, Load):
            indices = tuple([done[id(i)] if isinstance(i, Scalar) else i for i in node.indices])
            if any(new is not old for new, old in zip(indices, node.indices)):
                fresh = Load(node.dtype, node.source, indices)
        done[id(node)] = fresh
    return done[id(root)]
