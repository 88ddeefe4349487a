"""Neighbouring vector loops over the same range become one: a row is read once, not five times.

Loops come into being one by one, where something needs elements: two sums over a row, copies of
what was loaded before a store might change it, several outputs. Here a loop moves up to an earlier
one of the same range if nothing in between is in its way, and joins it (loop fusion).

Two arguments of a kernel either do not overlap or are the same tensor, element for element, as
everywhere in this room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from terrazzo.base.scalar import Call, Const, FromIndex, Load, Scalar
from terrazzo.base.scalar import walk as walk_scalar
from terrazzo.index import Index, IndexExpr, Var, coefficient, free_vars, proves_le
from terrazzo.loop.ir import (
    Alloc,
    Block,
    Buffer,
    For,
    If,
    Let,
    Stmt,
    Store,
    block,
    children,
    substitute_vars,
)

Item = Stmt | tuple[Var, Scalar]  # a statement, or a name for the rest of its block
MOST_STORES = 8  # in one loop: more would not find registers


@dataclass(frozen=True)
class Access:
    """One load or store: where, and in which loop if that is a vector loop."""

    buffer: Buffer
    index: Index | Scalar
    stores: bool
    loop: For | None = None

    def offset(self) -> Index | None:
        """What is added to the loop's variable, where an access goes through memory in steps."""
        if self.loop is None or isinstance(self.index, Scalar) or (
                coefficient(self.index, self.loop.var) != 1):
            return None
        return self.index - self.loop.var


def fused(items: Sequence[Item]) -> list[Item]:
    """The items of a block, with loops joined to earlier ones where that changes nothing."""
    flat: list[Item] = []
    for item in items:
        flat.extend(item.stmts if isinstance(item, Block) else (item,))
    done: list[Item] = []
    reach: list[list[Access] | None] = []  # what each of them touches; None: anything
    for item in flat:
        found = _partner(item, done, reach) if isinstance(item, For) else None
        if found is None:
            done.append(item)
            reach.append(_accesses(item))
            continue
        place, starts = found
        earlier = done[place]
        assert isinstance(earlier, For) and isinstance(item, For)
        body = substitute_vars(item.body, {item.var: earlier.var})
        joined = replace(earlier, body=block(earlier.body, body))
        kept = [done[n] for n in range(place + 1, len(done)) if n not in starts]
        done[place:] = [*(done[n] for n in starts), joined, *kept]
        reach[place:] = [_accesses(each) for each in done[place:]]
    return done


def _partner(loop: For, done: Sequence[Item], reach: Sequence[list[Access] | None]
             ) -> tuple[int, list[int]] | None:
    """The nearest earlier loop that a loop may join, and the starts of sums that go along."""
    mine = _accesses(loop)
    if mine is None or not _plain(loop):
        return None
    needed = _variables(loop)
    starts: list[int] = []
    for place in range(len(done) - 1, -1, -1):
        other, theirs = done[place], reach[place]
        if theirs is None:
            return None
        if isinstance(other, For) and _alike(other, loop) and _may_join(theirs, mine):
            return place, starts[::-1]
        if isinstance(other, tuple) and other[0] in needed:
            return None
        if not all(_apart(a, b) for a in theirs for b in mine):
            if not _is_start(other):
                return None
            starts.append(place)
            mine = [*mine, *theirs]
    return None


def _is_start(item: Item) -> bool:
    """Whether an item sets the number from which something is summed up."""
    return isinstance(item, Store) and isinstance(item.value, Const) and item.buffer.bounded and (
        isinstance(item.index, int) and item.mask is None)


def _plain(loop: For) -> bool:
    """Whether a loop is a vector loop of stores that go step by step, or add up."""
    if loop.kind != "vector":
        return False
    for stmt in _stores(loop):
        if not isinstance(stmt, Store) or isinstance(stmt.index, Scalar):
            return False
        if coefficient(stmt.index, loop.var) != (1 if stmt.reduce is None else 0):
            return False
    return True


def _stores(loop: For) -> tuple[Stmt, ...]:
    return loop.body.stmts if isinstance(loop.body, Block) else (loop.body,)


def _alike(first: For, second: For) -> bool:
    """Whether two loops run over the same range, with vectors of the same number of elements."""
    if not _plain(first) or first.lo != second.lo or first.hi != second.hi:
        return False
    stores = [*_stores(first), *_stores(second)]
    return len(stores) <= MOST_STORES and len({_widest(s) for s in stores}) == 1


def _widest(stmt: Stmt) -> int:
    assert isinstance(stmt, Store)
    return max(stmt.buffer.dtype.compute.bits, *(
        node.dtype.compute.bits for node in walk_scalar(stmt.value)
        if isinstance(node, (Load, Call)) and not node.dtype.is_bool), 0)


def _may_join(theirs: Sequence[Access], mine: Sequence[Access]) -> bool:
    """Whether each iteration of the second loop may run right after the same one of the first."""
    for a in theirs:
        for b in mine:
            if not (a.stores or b.stores):
                continue
            if a.buffer is b.buffer:
                if a.offset() is None or a.offset() != b.offset():
                    return False
            elif not a.buffer.bounded and not b.buffer.bounded and a.stores and not b.stores:
                return False  # the same tensor perhaps: loaded after it was written
    return True


def _apart(a: Access, b: Access) -> bool:
    """Whether two accesses may change places."""
    if not (a.stores or b.stores):
        return True
    if a.buffer is not b.buffer:
        return a.buffer.bounded or b.buffer.bounded
    if a.loop is None or b.loop is None or a.offset() is None or a.offset() != b.offset():
        return False
    return proves_le(a.loop.hi, b.loop.lo) or proves_le(b.loop.hi, a.loop.lo)


def _accesses(item: Item, loop: For | None = None) -> list[Access] | None:
    """All loads and stores of a statement or name; None where they cannot be told."""
    if isinstance(item, tuple):
        return list(_loads(item[1], None))
    if isinstance(item, Store):
        found = [Access(item.buffer, item.index, True, loop)]
        if item.reduce is not None:
            found.append(Access(item.buffer, item.index, False, loop))
        for root in (item.index, item.value, item.mask, item.streaming):
            found += _loads(root, loop)
        return found
    if isinstance(item, For):
        inner = item if item.kind == "vector" else None
    elif isinstance(item, (Block, If, Let, Alloc)):
        inner = None
    else:
        return None
    found = []
    if isinstance(item, If):
        found += _loads(item.cond, None)
    elif isinstance(item, Let):
        found += _loads(item.value, None)
    for child in children(item):
        more = _accesses(child, inner if isinstance(item, For) else loop)
        if more is None:
            return None
        found += more
    return found


def _loads(root: object, loop: For | None) -> Iterator[Access]:
    if isinstance(root, Scalar):
        for node in walk_scalar(root):
            if isinstance(node, Load):
                yield Access(node.source, node.indices[0], False, loop)


def _variables(loop: For) -> set[Var]:
    """The variables that a loop of stores uses."""
    used: set[Var] = set(free_vars(loop.lo)) | free_vars(loop.hi)
    for stmt in _stores(loop):
        assert isinstance(stmt, Store)
        for root in (stmt.index, stmt.value, stmt.mask, stmt.streaming):
            if isinstance(root, IndexExpr):
                used |= free_vars(root)
            elif isinstance(root, Scalar):
                for node in walk_scalar(root):
                    index = (node.index if isinstance(node, FromIndex) else
                             node.indices[0] if isinstance(node, Load) else None)
                    if isinstance(index, IndexExpr):
                        used |= free_vars(index)
    return used
