"""The pass that makes one loop of several: what one writes, the next finds in a register."""

from __future__ import annotations

from dataclasses import replace

from terrazzo.base.unwind import Walk, unwind
from terrazzo.index import Var, proves_eq
from terrazzo.loop.accesses import Access, Footprint, accesses, footprint, meet_in_turn
from terrazzo.loop.ir import (
    Alloc,
    Block,
    Buffer,
    For,
    If,
    Let,
    Stmt,
    block,
    rewrite,
    substitute_vars,
    walk,
)

# Statements between two loops that may still become one: each is a step of the search, and what
# the first loop wrote is in the cache no more.
FARTHEST = 64


def hoist_allocs(stmt: Stmt) -> Stmt:
    """Buffers begin where the loop around them begins, so that statements become neighbours."""
    return unwind(_hoisted(stmt))


def _hoisted(scope: Stmt) -> Walk[Stmt]:
    buffers: list[Buffer] = []
    stmts: list[Stmt] = []
    todo = [scope]
    while todo:
        inner = todo.pop()
        if isinstance(inner, Block):
            todo += reversed(inner.stmts)
        elif isinstance(inner, Alloc):
            buffers.append(inner.buffer)
            todo.append(inner.body)
        elif isinstance(inner, (For, Let)):
            stmts.append(replace(inner, body=(yield _hoisted(inner.body))))
        elif isinstance(inner, If):
            then = yield _hoisted(inner.then)
            orelse = None if inner.orelse is None else (yield _hoisted(inner.orelse))
            stmts.append(If(inner.cond, then, orelse))
        else:
            stmts.append(inner)
    return _in_scope(buffers, block(*stmts))


def _in_scope(buffers: list[Buffer], stmt: Stmt) -> Stmt:
    for buffer in reversed(buffers):
        stmt = Alloc(buffer, stmt)
    return stmt


def _opened(stmt: Stmt) -> tuple[list[Buffer], tuple[Stmt, ...]]:
    """The buffers of a scope and the statements in it."""
    buffers = []
    while isinstance(stmt, Alloc):
        buffers.append(stmt.buffer)
        stmt = stmt.body
    return buffers, stmt.stmts if isinstance(stmt, Block) else (stmt,)


def merge_loops(stmt: Stmt) -> Stmt:
    """Loops of one range become one where each iteration of the second needs only its own first.

    What the first writes and the second reads (or writes) must be a different piece of memory in
    every iteration; a running reduction never is.
    """
    merger = _Merger()

    def visit(node: Stmt) -> Stmt | None:
        return block(*merger.merged(node.stmts, 1)) if isinstance(node, Block) else None

    return rewrite(hoist_allocs(stmt), visit)


class _Merger:
    """Remembers what statements access: each is asked about again and again."""

    def __init__(self) -> None:
        # By id; the statements are kept so that no other gets theirs.
        self._accesses: dict[int, tuple[Stmt, list[Access]]] = {}
        self._footprints: dict[int, tuple[Stmt, Footprint]] = {}

    def accesses(self, stmt: Stmt) -> list[Access]:
        if id(stmt) not in self._accesses:
            self._accesses[id(stmt)] = stmt, accesses(stmt)
        return self._accesses[id(stmt)][1]

    def footprint(self, stmt: Stmt) -> Footprint:
        if id(stmt) not in self._footprints:
            inside = stmt.body if isinstance(stmt, For) else stmt
            self._footprints[id(stmt)] = stmt, footprint(self.accesses(inside))
        return self._footprints[id(stmt)][1]

    def merged(self, stmts: tuple[Stmt, ...], at: int) -> list[Stmt]:
        """Statements of which those before `at` have nothing left to merge among themselves."""
        todo = list(stmts)
        while at < len(todo):
            first = self.merge_into_earlier(todo, at)
            at = at + 1 if first is None else max(first, 1)
        return todo

    def merge_into_earlier(self, stmts: list[Stmt], second: int) -> int | None:
        """Merge a loop into the nearest one before it that can take it; answers from where on
        statements have changed."""
        b = stmts[second]
        if not isinstance(b, For):
            return None
        # What stands between moves before the first loop where the second needs it, else stays.
        needed, moved = Footprint(), Footprint()
        needed.add(self.footprint(b))
        before: list[int] = []
        for first in range(second - 1, max(second - 1 - FARTHEST, -1), -1):
            a = stmts[first]
            own = self.footprint(a)
            if isinstance(a, For) and _same_range(a, b) and not own.conflicts(moved):
                one = self.joined(a, b)
                if one is not None:
                    after = [s for i, s in enumerate(stmts[first + 1:second], first + 1)
                             if i not in before]
                    stmts[first:second + 1] = [*(stmts[i] for i in reversed(before)), one, *after]
                    return first
            if own.conflicts(needed):
                needed.add(own)
                moved.add(own)
                before.append(first)
        return None

    def joined(self, a: For, b: For) -> For | None:
        """One loop that does what two do, if no iteration of one needs another of the other."""
        second = substitute_vars(_rename_loops(b.body, a.var), {b.var: a.var})
        ours, theirs = self.accesses(a.body), self.accesses(second)
        if not meet_in_turn(a, ours, theirs):
            return None
        buffers, stmts = _opened(a.body)
        more, others = _opened(second)
        inside = block(*self.merged((*stmts, *others), max(len(stmts), 1)))
        body = _in_scope(buffers + more, inside)
        self._accesses[id(body)] = body, ours + theirs
        return replace(a, body=body)


def _same_range(a: For, b: For) -> bool:
    return (a.kind == b.kind and a.grain == b.grain and proves_eq(a.lo, b.lo)
            and proves_eq(a.hi, b.hi))


def _rename_loops(stmt: Stmt, var: Var) -> Stmt:
    """Loops over `var` count with another variable, so that `var` can come in from outside."""
    names = {s.var.name for s in walk(stmt) if isinstance(s, For)}
    if var.name not in names:
        return stmt
    number = 1
    while f"{var.name}{number}" in names:
        number += 1

    def visit(node: Stmt) -> Stmt | None:
        if not isinstance(node, For) or node.var.name != var.name:
            return None
        fresh = Var(f"{var.name}{number}", node.var.lo, node.var.hi)
        return replace(node, var=fresh, body=substitute_vars(node.body, {node.var: fresh}))

    return rewrite(stmt, visit)
