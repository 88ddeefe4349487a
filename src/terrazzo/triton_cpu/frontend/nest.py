"""Loop nests over the elements of a tile: where lazy expressions become loops.

Every need for elements in memory comes through `loops`: a store to memory, a tile that is written
to a local buffer, a reduction. It chooses the innermost loop, settles addresses and masks along it
and turns conditions into loop bounds where that is possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from terrazzo.base.scalar import REDUCTIONS, Load, Scalar, call, loads, same, walk
from terrazzo.index import Index, Var, coefficient, maximum, minimum, proves_lt
from terrazzo.loop.conditions import cut_loop
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
    rewrite,
    substitute_vars,
)
from terrazzo.loop.lanes import lanes_in_vector
from terrazzo.triton_cpu.frontend.addresses import (
    Names,
    Reader,
    assuming,
    below,
    conjuncts,
    depends,
    distance,
    extremes,
    guards,
    known_number,
    reciprocals,
    remainders,
    replaced,
)
from terrazzo.triton_cpu.frontend.quotients import (
    SHORTEST,
    has_quotients,
    read_quotients,
    row_lengths,
)
from terrazzo.triton_cpu.frontend.values import Indices, flat, unflat

WIDEST = 16  # elements of four bytes in a vector
PIECES = 4  # copies of a loop cut at conditions: compile time grows with each


@dataclass(frozen=True, eq=False)
class Write:
    """One store of a loop nest, as a function of the nest's indices."""

    buffer: Buffer
    index: Index | Scalar
    value: Scalar
    reduce: str | None = None
    mask: Scalar | None = None
    streaming: bool | Scalar = False  # see Store


Fresh = Callable[..., Var]


def loops(shape: Sequence[int], fresh: Fresh, writes: Callable[[Indices], list[Write]],
          innermost: int | None = None, precise: bool = False, twice: bool = True,
          foreseen: bool = False, known: Sequence[Index] = ()) -> Stmt:
    """Loops over all elements of a tile that do some stores, in order, for each of them.

    Unless they shall be precise, divisions by what stays the same in a loop are products. `twice`
    allows for a second copy of the loops, for tiles that lie inside their tensors as a whole.
    Quotients in addresses that do not go in steps are `foreseen` where tiles are brought to the
    chip as a whole; else they are computed, for a gather. `known` integers are not negative here.
    """
    if innermost is None and len(shape) > 2:
        one = _flat_loop(shape, fresh, writes, precise)
        if one is not None:
            return one
    axes, made = _axes(shape, fresh, writes, foreseen, known)
    ranges = {v: n for axis in axes for v, n in axis}
    if not ranges:
        return _straight(made, fresh)
    inner = axes[innermost][-1][0] if innermost is not None and axes[innermost] else _innermost(
        made, [axis[-1][0] for axis in axes if axis])

    def around(made: Sequence[Write]) -> Stmt:
        tables, made = _tabulated(made, inner, ranges, fresh)
        body = _one_loop(inner, ranges[inner], made, fresh, precise)
        for var, count in reversed(ranges.items()):
            if var is not inner:
                body = For(var, 0, count, body)
        for table, fill in tables:
            body = Alloc(table, block(fill, body))
        return body

    whole = whole_tile(made, ranges, fresh, inner) if twice else None
    if whole is None:
        return around(made)
    condition, simpler, names = whole
    return _bind(names, If(condition, around(simpler), around(made)))


Axis = list[tuple[Var, int]]  # the loops over a dimension, outside in


def _axes(shape: Sequence[int], fresh: Fresh, writes: Callable[[Indices], list[Write]],
          foreseen: bool, known: Sequence[Index]) -> tuple[list[Axis], list[Write]]:
    """Loops over each dimension of a tile, and its stores in them.

    Where addresses take a dimension apart, by quotients, it has two: over rows and in a row.
    """
    axes: list[Axis] = [[(fresh(f"i{d}", 0, n - 1), n)] if n > 1 else []
                        for d, n in enumerate(shape)]
    made = writes(tuple(_index(axis) for axis in axes))
    if not has_quotients(_roots(made)):
        return axes, made
    ranges = dict(loop for axis in axes for loop in axis)
    lengths = {v: n for v, n in row_lengths(_roots(made), ranges).items() if n >= SHORTEST}
    rows = [[(fresh(f"{axis[0][0].name}_row", 0, axis[0][1] // n - 1), axis[0][1] // n),
             (fresh(f"{axis[0][0].name}_rest", 0, n - 1), n)]
            if axis and (n := lengths.get(axis[0][0], axis[0][1])) < axis[0][1] else axis
            for axis in axes]
    if lengths:
        apart = writes(tuple(_index(axis) for axis in rows))
        if not row_lengths(_roots(apart), dict(axis[-1] for axis in rows if axis)):
            axes, made = rows, apart
    steady = [axis[-1][0] for axis in axes if axis]

    def accepts(index: Index) -> bool:
        return foreseen or all(coefficient(index, var) is not None for var in steady)

    return axes, [replace(
        w, value=read_quotients(w.value, w.mask, accepts, known),
        index=read_quotients(w.index, w.mask, accepts, known) if isinstance(w.index, Scalar) else (
            w.index),
        mask=None if w.mask is None else read_quotients(w.mask, None, accepts, known))
        for w in made]


def _index(axis: Axis) -> Index:
    """The number of an element in a dimension."""
    place: Index = 0
    for var, count in axis:
        place = place * count + var
    return place


def _roots(writes: Sequence[Write]) -> list[Scalar]:
    return [root for w in writes for root in (w.value, w.index, w.mask)
            if isinstance(root, Scalar)]


def _flat_loop(shape: Sequence[int], fresh: Fresh, writes: Callable[[Indices], list[Write]],
               precise: bool) -> Stmt | None:
    """One loop over all elements of a tile that lies in pairs, as sorting networks lay them.

    Its vectors go across the pairs, which would be loops of two; what they read must lie together
    all the same.
    """
    count = math.prod(shape)
    if 2 not in shape or count & (count - 1) or count < WIDEST:
        return None
    var = fresh("i", 0, count - 1)
    made = writes(unflat(tuple(shape), var))
    for write in made:
        if write.index is not var or write.reduce is not None or write.mask is not None:
            return None
        for node in walk(write.value):
            if isinstance(node, Load):
                index = node.indices[0]
                if isinstance(index, Scalar) or not node.source.bounded or (
                        lanes_in_vector(index, var, WIDEST) is None):
                    return None
    return _one_loop(var, count, made, fresh, precise)


def whole_tile(writes: Sequence[Write], ranges: dict[Var, int], fresh: Fresh,
               inner: Var | None = None) -> tuple[Scalar, list[Write], Names] | None:
    """When a tile lies inside its tensors as a whole, and its stores without their conditions.

    Most tiles do, and their loops then have fixed lengths. Where only stores are masked, or along
    one dimension, the bounds of loops do as well; where no mask changes along the innermost loop,
    a branch around it. Then only remainders in addresses (a gather otherwise) are worth a copy.
    """
    variables = tuple(ranges)
    names = Names(variables, fresh)
    reader = Reader(names)
    roots = [r for w in writes for r in (w.value, w.index) if isinstance(r, Scalar)]
    tests: list[Scalar] = []
    table: dict[int, Scalar] = {}
    for part in {id(p): p for r in roots for p in remainders(r, variables)}.values():
        number, divisor = (reader.index(a) for a in part.args)
        span = None if number is None else extremes(number, ranges)
        if span is not None and divisor is not None:
            tests += [below(-1, span[0]), below(span[1], divisor)]
            table[id(part)] = part.args[0]
    if not tests and (len(ranges) < 2 or not any(
            inner is None or depends(g, (inner,)) for w in writes for g in guards(w.value))):
        return None
    facts: list[Scalar] = []
    tested: set[Index] = set()
    settled: list[Write] = []
    for write in writes:
        index = write.index
        value = reader.settle(replaced(write.value, table))
        if isinstance(index, Scalar):
            index = replaced(index, table)
            found = reader.index(index)
            index = index if found is None else found
        mask = None if write.mask is None else reader.settle(write.mask)
        settled.append(replace(write, index=index, value=value, mask=mask))
        for condition in [*guards(value), *([] if mask is None else [mask])]:
            for fact in conjuncts(condition):
                apart = distance(fact)
                span = None if apart is None else extremes(apart, ranges)
                if span is not None:
                    facts.append(fact)
                    if span[1] not in tested and not proves_lt(span[1], 0):
                        tested.add(span[1])
                        tests.append(below(span[1], 0))
    if not tests:
        return None
    simpler = [replace(w, value=assuming(w.value, facts),
                       mask=None if w.mask is None else assuming(w.mask, facts)) for w in settled]
    joint = tests[0]
    for test in tests[1:]:
        joint = call("and", joint, test)
    return joint, simpler, names


def _tabulated(writes: Sequence[Write], inner: Var, ranges: dict[Var, int], fresh: Fresh
               ) -> tuple[list[tuple[Buffer, Stmt]], Sequence[Write]]:
    """Remainders along the innermost loop as tables: loops around it need not take them again."""
    tables: list[tuple[Buffer, Stmt]] = []
    known: dict[int, Scalar] = {}
    for part in {id(p): p for w in writes for p in remainders(w.value, (inner,))}.values():
        varying = {v: n for v, n in ranges.items() if depends(part, (v,))}
        if len(varying) == len(ranges) or loads(part):
            continue
        sizes = tuple(varying.values())
        place = flat(sizes, tuple(varying))
        table = Buffer(str(fresh("remainders")), part.dtype, math.prod(sizes))
        known[id(part)] = table[place]
        fill: Stmt = Store(table, place, part)
        for var, count in reversed(varying.items()):
            fill = For(var, 0, count, fill)
        tables.append((table, fill))
    return tables, [replace(w, value=replaced(w.value, known)) for w in writes]


def _innermost(writes: Sequence[Write], axes: Sequence[Var]) -> Var:
    """The loop along which a store goes step by step through memory; else the last."""
    for write in writes:
        reader = Reader(None)
        index = reader.index(write.index) if isinstance(write.index, Scalar) else write.index
        if index is None:
            continue
        for var in reversed(axes):
            if coefficient(index, var) == 1:
                return var
    return axes[-1]


def _bind(names: Names, body: Stmt) -> Stmt:
    for var, value in reversed(names.bound):
        body = Let(var, value, body)
    return body


def _straight(writes: Sequence[Write], fresh: Fresh) -> Stmt:
    """Stores of single elements."""
    stmts: list[Stmt] = []
    for write in writes:
        names = Names((), fresh)
        reader = Reader(names)
        index = write.index
        if isinstance(index, Scalar):
            found = reader.index(index)
            index = index if found is None else found
        store: Stmt = Store(write.buffer, index, reader.settle(write.value), write.reduce)
        if write.mask is not None and conjuncts(write.mask):
            store = If(write.mask, _bind(names, store))
        else:
            store = _bind(names, store)
        stmts.append(store)
    return block(*stmts)


def _one_loop(inner: Var, extent: int, writes: Sequence[Write], fresh: Fresh, precise: bool
              ) -> Stmt:
    names = Names((inner,), fresh)
    reader = Reader(names)
    lo: Index = 0
    hi: Index = extent
    outside: list[Scalar] = []
    facts: list[Scalar] = []
    rest: list[list[Scalar]] = [[] for _ in writes]
    # A condition becomes a bound or a branch around the loop if it holds for all its stores.
    common = len(writes) == 1
    for i, write in enumerate(writes):
        for part in () if write.mask is None else conjuncts(reader.settle(write.mask)):
            apart = distance(part)
            step = None if apart is None else coefficient(apart, inner)
            if common and apart is not None and step in (1, -1):
                assert isinstance(step, int)
                left = apart - step * inner
                if step == 1:
                    hi = minimum(hi, -left)
                else:
                    lo = maximum(lo, left + 1)
                facts.append(part)
            elif common and not depends(part, (inner,)):
                outside.append(part)
                facts.append(part)
            else:
                rest[i].append(part)
    stores: list[Stmt] = []
    for write, masks in zip(writes, rest, strict=True):
        index = write.index
        if isinstance(index, Scalar):
            found = reader.index(index)
            index = reader.settle(index) if found is None else found
        mask = None
        for part in masks:
            mask = part if mask is None else call("and", mask, part)
        value = assuming(reader.settle(write.value), facts)
        if not precise and extent > 1:
            value = reciprocals(value, inner)
        stores.append(Store(write.buffer, index, value, write.reduce, write.streaming, mask))
    body = _joined(_without_nothing(
        cut_loop(For(inner, lo, hi, block(*stores), "vector"), PIECES)))
    for part in outside:
        body = If(part, body)
    return _bind(names, body)


def _joined(stmt: Stmt) -> Stmt:
    """Neighbouring pieces of a loop that turned out to do the same are one loop again."""
    if not isinstance(stmt, Block):
        return stmt
    done: list[Stmt] = []
    for piece in stmt.stmts:
        last = done[-1] if done else None
        if (isinstance(piece, For) and isinstance(last, For) and last.hi == piece.lo
                and _same(last, piece)):
            var = Var(piece.var.name, last.var.lo, piece.var.hi)
            body = substitute_vars(piece.body, {piece.var: var})
            done[-1] = replace(piece, var=var, lo=last.lo, body=body)
        else:
            done.append(piece)
    return block(*done)


def _same(first: For, second: For) -> bool:
    """Whether two vector loops of stores do the same, but for their ranges."""
    ours, theirs = (body.stmts if isinstance(body, Block) else (body,) for body in (
        first.body, substitute_vars(second.body, {second.var: first.var})))
    return len(ours) == len(theirs) and all(
        isinstance(a, Store) and isinstance(b, Store) and a.buffer is b.buffer
        and a.reduce == b.reduce and a.streaming is b.streaming and a.mask is b.mask
        and not isinstance(a.index, Scalar) and not isinstance(b.index, Scalar)
        and a.index == b.index and same(a.value, b.value)
        for a, b in zip(ours, theirs, strict=True))


def _without_nothing(stmt: Stmt) -> Stmt:
    """Without stores that combine with what changes nothing, as masked-off elements often do."""

    def visit(node: Stmt) -> Stmt | None:
        if isinstance(node, Store) and node.reduce is not None and (
                known_number(node.value) == REDUCTIONS[node.reduce].identity(node.buffer.dtype)):
            return block()
        if isinstance(node, For) and isinstance(node.body, Block) and not node.body.stmts:
            return block()
        return None

    return rewrite(stmt, visit)
