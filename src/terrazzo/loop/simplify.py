"""Small passes over Loop IR, by name in PASSES: each leaves what a kernel computes unchanged.

Widening vector loops and repeating unrolled ones is the code generator's part, as is forwarding a
stored value to a load of the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce

from terrazzo.index import (
    Algebra,
    FloorDiv,
    Index,
    Max,
    Min,
    Mod,
    Sum,
    Var,
    bounds,
    coefficient,
    free_vars,
    interpret,
    maximum,
    minimum,
    proves_eq,
    proves_le,
    proves_lt,
    substitute,
)
from terrazzo.loop.bounds import Interval, interval_of
from terrazzo.loop.conditions import cut_at_conditions
from terrazzo.loop.ir import (
    Alloc,
    Block,
    Buffer,
    For,
    Function,
    If,
    Let,
    Stmt,
    Store,
    Tile,
    block,
    children,
    rewrite,
    substitute_vars,
    walk,
)
from terrazzo.scalar import Load, Scalar, call, loads
from terrazzo.scalar import as_scalar as scalar_of
from terrazzo.scalar import rewrite as rewrite_scalar

# A bound that large is a loop anyway, and knowing it is not worth a second copy of the code.
LARGEST_TILE = 128


def simplify(function: Function, skip: Container[str] = ()) -> Function:
    """Run the passes in the order of PASSES, but for those named in `skip`."""
    body = function.body
    for name, apply in PASSES.items():
        if name not in skip:
            body = apply(body)
    return replace(function, body=body)


# ---------------------------------------------------------------- unit loops, empty statements
def unit_loops(stmt: Stmt) -> Stmt:
    """A loop that runs exactly once becomes its body."""
    return _tightened(stmt, {})


def drop_empty(stmt: Stmt) -> Stmt:
    """Loops that never run, branches without statements and buffers that nobody uses go away."""

    def visit(node: Stmt) -> Stmt | None:
        if isinstance(node, For) and (_is_empty(node.body) or proves_le(node.hi, node.lo)):
            return block()
        if isinstance(node, If) and _is_empty(node.then) and (
                node.orelse is None or _is_empty(node.orelse)):
            return block()
        if isinstance(node, Alloc) and node.buffer not in _buffers(node.body):
            return node.body
        return None

    return rewrite(stmt, visit)


def _is_empty(stmt: Stmt) -> bool:
    return isinstance(stmt, Block) and not stmt.stmts


# ---------------------------------------------------------------- allocations
def hoist_allocs(stmt: Stmt) -> Stmt:
    """Buffers begin where the loop around them begins, so that statements become neighbours."""

    def scope(node: Stmt) -> Stmt:
        buffers: list[Buffer] = []
        stmts: list[Stmt] = []

        def flatten(inner: Stmt) -> None:
            if isinstance(inner, Block):
                for s in inner.stmts:
                    flatten(s)
            elif isinstance(inner, Alloc):
                buffers.append(inner.buffer)
                flatten(inner.body)
            elif isinstance(inner, (For, Let)):
                stmts.append(replace(inner, body=scope(inner.body)))
            elif isinstance(inner, If):
                orelse = None if inner.orelse is None else scope(inner.orelse)
                stmts.append(If(inner.cond, scope(inner.then), orelse))
            else:
                stmts.append(inner)

        flatten(node)
        result = block(*stmts)
        for buffer in reversed(buffers):
            result = Alloc(buffer, result)
        return result

    return scope(stmt)


# ---------------------------------------------------------------- merging
@dataclass(frozen=True)
class _Access:
    buffer: Buffer
    index: Index | Scalar
    writes: bool
    inner: dict[Var, Interval]  # the loops around it, inside the statement that was asked about


def merge_loops(stmt: Stmt) -> Stmt:
    """Loops of one range become one where each iteration of the second needs only its own first.

    What the first writes and the second reads (or writes) must be a different piece of memory in
    every iteration; a running reduction never is.
    """

    def visit(node: Stmt) -> Stmt | None:
        return _merge_block(node.stmts) if isinstance(node, Block) else None

    return rewrite(hoist_allocs(stmt), visit)


def _merge_block(stmts: tuple[Stmt, ...]) -> Stmt:
    todo = list(stmts)
    at = 1
    while at < len(todo):
        for earlier in range(at - 1, -1, -1):
            merged = _try_merge(todo, earlier, at)
            if merged is not None:
                todo = merged
                at = 0
                break
        at += 1
    return block(*todo)


def _try_merge(stmts: list[Stmt], first: int, second: int) -> list[Stmt] | None:
    """The statements with the loop at `second` merged into the one at `first`, if that is right."""
    a, b = stmts[first], stmts[second]
    if not (isinstance(a, For) and isinstance(b, For) and a.kind == b.kind and a.grain == b.grain
            and proves_eq(a.lo, b.lo) and proves_eq(a.hi, b.hi)):
        return None
    # What stands between moves before the first loop where the second needs it, else stays after.
    needed: list[Stmt] = [b]
    before: list[Stmt] = []
    after: list[Stmt] = []
    for stmt in reversed(stmts[first + 1:second]):
        if any(_conflict(stmt, other) for other in needed):
            if any(_conflict(stmt, other) for other in (a,)):
                return None
            needed.append(stmt)
            before.insert(0, stmt)
        else:
            after.insert(0, stmt)
    between = stmts[first + 1:second]
    for stmt in before:
        earlier = between[:between.index(stmt)]
        if any(_conflict(stmt, other) for other in earlier if other in after):
            return None
    second_body = substitute_vars(_rename_loops(b.body, a.var), {b.var: a.var})
    if not _iterations_independent(a, second_body):
        return None
    body = hoist_allocs(block(a.body, second_body))
    merged = replace(a, body=merge_loops(body))
    return [*stmts[:first], *before, merged, *after, *stmts[second + 1:]]


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


def _iterations_independent(a: For, body: Stmt) -> bool:
    """Whether no iteration of `body` touches what another iteration of the loop touches."""
    accesses_a = list(_accesses(a.body, {}))
    accesses_b = list(_accesses(body, {}))
    around = {a.var: Interval(a.lo, a.hi - 1)}
    for x in accesses_a:
        for y in accesses_b:
            if x.buffer is y.buffer and (x.writes or y.writes) and not _apart(x, y, a.var, around):
                return False
    return True


def _apart(x: _Access, y: _Access, var: Var, around: dict[Var, Interval]) -> bool:
    """Whether two accesses meet only in the same iteration of `var`.

    They do if each moves by `step` and both stay within less than a step of each other.
    """
    if isinstance(x.index, Scalar) or isinstance(y.index, Scalar):
        return False
    step = coefficient(x.index, var)
    if step is None or coefficient(y.index, var) != step:
        return False
    spans = [interval_of(index - step * var, _closed(inner, around))
             for index, inner in ((x.index, x.inner), (y.index, y.inner))]
    for p, q in (spans, spans[::-1]):
        if p.hi is None or q.lo is None or not proves_lt(p.hi - q.lo, step):
            return False
    return True


def _closed(inner: dict[Var, Interval], around: dict[Var, Interval]) -> dict[Var, Interval]:
    """The inner loops' ranges with ends that depend on nothing that varies."""
    ranges = dict(around)
    for var, (lo, hi) in inner.items():
        ranges[var] = Interval(None if lo is None else interval_of(lo, ranges).lo,
                               None if hi is None else interval_of(hi, ranges).hi)
    return ranges


def _accesses(stmt: Stmt, inner: dict[Var, Interval]) -> Iterator[_Access]:
    def reads(values: Iterable[object]) -> Iterator[_Access]:
        for value in values:
            if isinstance(value, Scalar):
                for load in loads(value):
                    yield _Access(load.source, load.indices[0], False, inner)

    if isinstance(stmt, For):
        inner = {**inner, stmt.var: Interval(stmt.lo, stmt.hi - 1)}
    elif isinstance(stmt, If):
        yield from reads((stmt.cond,))
    elif isinstance(stmt, Store):
        yield from reads((stmt.value, stmt.index))
        yield _Access(stmt.buffer, stmt.index, True, inner)
    elif isinstance(stmt, Tile):
        yield from _accesses(stmt.expand(), inner)
    for child in children(stmt):
        yield from _accesses(child, inner)


def _buffers(stmt: Stmt) -> set[Buffer]:
    return {access.buffer for access in _accesses(stmt, {})}


def _conflict(a: Stmt, b: Stmt) -> bool:
    """Whether the order of two statements matters."""
    in_a, in_b = list(_accesses(a, {})), list(_accesses(b, {}))
    written_a, written_b = ({x.buffer for x in group if x.writes} for group in (in_a, in_b))
    return not (written_a.isdisjoint(x.buffer for x in in_b)
                and written_b.isdisjoint(x.buffer for x in in_a))


# ---------------------------------------------------------------- ragged loops
def partition_ragged(stmt: Stmt) -> Stmt:
    """Full pieces get constant bounds, and what is left over is code of its own.

    A loop `o` around vector or unrolled loops up to `min(f, n - o*f)` is cut at `n // f`. Where
    iterations run concurrently, or the ragged ones do not come last, a branch inside decides.
    """
    if isinstance(stmt, For):
        ragged = _find_ragged(stmt)
        if ragged is not None:
            return _cut_loop(stmt, ragged)
    if isinstance(stmt, (For, Alloc, Let)):
        return replace(stmt, body=partition_ragged(stmt.body))
    if isinstance(stmt, Block):
        return block(*map(partition_ragged, stmt.stmts))
    if isinstance(stmt, If):
        orelse = None if stmt.orelse is None else partition_ragged(stmt.orelse)
        return If(stmt.cond, partition_ragged(stmt.then), orelse)
    return stmt


@dataclass
class _Ragged:
    """Bounds `min(size, left)` inside a loop, and what they are in full and in other pieces."""

    size: int
    left: Index
    full: dict[Min, Index]
    rest: dict[Min, Index]


def _find_ragged(loop: For) -> _Ragged | None:
    inner = {s.var for s in walk(loop.body) if isinstance(s, For)}
    found: _Ragged | None = None
    for stmt in walk(loop.body):
        if not isinstance(stmt, For) or stmt.kind not in ("vector", "unrolled"):
            continue
        for node in _minima(stmt.hi):
            size = next((arg for arg in node.args if isinstance(arg, int)), None)
            left = next((arg for arg in node.args if loop.var in free_vars(arg)
                         and free_vars(arg).isdisjoint(inner)), None)
            if size is None or left is None or size > LARGEST_TILE:
                continue
            if found is None:
                found = _Ragged(size, left, {}, {})
            if found.size == size and found.left is left:
                found.full[node] = _least(arg for arg in node.args if arg is not left)
                found.rest[node] = _least(arg for arg in node.args if not isinstance(arg, int))
    return found


def _cut_loop(loop: For, ragged: _Ragged) -> Stmt:
    step = coefficient(ragged.left, loop.var)
    at: Index | None = None
    last: dict[Var, Index] = {}
    if isinstance(step, int) and step < 0:  # the full pieces come first
        at = (ragged.left - step * loop.var - ragged.size - step) // -step
        at = minimum(maximum(at, loop.lo), loop.hi)
        if proves_eq(loop.hi - at, 1):
            last = {loop.var: at}
    body = partition_ragged(_tightened(_replace_bounds(loop.body, ragged.full), {}))
    rest = partition_ragged(_tightened(_replace_bounds(loop.body, ragged.rest), last))
    if at is None or loop.kind in ("parallel", "program"):
        is_full = call("ge", scalar_of(ragged.left), scalar_of(ragged.size))
        return replace(loop, body=If(is_full, body, rest))
    main = replace(loop, hi=at, body=body)
    return block(main, rest if last else replace(loop, lo=at, body=rest))


def _least(args: Iterable[Index]) -> Index:
    return reduce(minimum, args)


def _minima(index: Index) -> Iterator[Min]:
    if isinstance(index, (Min, Max)):
        if isinstance(index, Min):
            yield index
        for arg in index.args:
            yield from _minima(arg)
    elif isinstance(index, (FloorDiv, Mod)):
        yield from _minima(index.num)
        yield from _minima(index.den)
    elif isinstance(index, Sum):
        for monomial, _ in index.terms:
            for atom in monomial:
                yield from _minima(atom)


def _replace_bounds(stmt: Stmt, full: dict[Min, Index]) -> Stmt:
    """Loops with some minima in their bounds known."""

    def smaller(a: Index, b: Index) -> Index:
        result = minimum(a, b)
        return full.get(result, result) if isinstance(result, Min) else result

    algebra = Algebra[Index](
        constant=lambda number: number, variable=lambda var: var,
        add=lambda a, b: a + b, multiply=lambda a, b: a * b,
        floordiv=lambda a, b: a // b, mod=lambda a, b: a % b,
        minimum=smaller, maximum=maximum)

    def visit(node: Stmt) -> Stmt | None:
        if isinstance(node, For):
            return replace(node, lo=interpret(node.lo, algebra), hi=interpret(node.hi, algebra))
        return None

    return rewrite(stmt, visit)


def _tightened(stmt: Stmt, table: dict[Var, Index]) -> Stmt:
    """Substitute variables; loops inside that now run once go away, others learn their bounds."""
    if isinstance(stmt, Block):
        return block(*(_tightened(s, table) for s in stmt.stmts))
    if isinstance(stmt, Alloc):
        old = stmt.buffer
        size = substitute(old.size, table)
        if size == old.size:
            return Alloc(old, _tightened(stmt.body, table))
        new = replace(old, size=size)
        return Alloc(new, _tightened(replace_buffer(stmt.body, old, new), table))
    if isinstance(stmt, If):
        bare = substitute_vars(If(stmt.cond, block()), table)
        assert isinstance(bare, If)
        orelse = None if stmt.orelse is None else _tightened(stmt.orelse, table)
        return If(bare.cond, _tightened(stmt.then, table), orelse)
    if not isinstance(stmt, For):
        return substitute_vars(stmt, table) if table else stmt
    lo, hi = substitute(stmt.lo, table), substitute(stmt.hi, table)
    if proves_eq(hi - lo, 1):
        return _tightened(stmt.body, {**table, stmt.var: lo})
    low, top = bounds(lo)[0], bounds(hi - 1)[1]
    var = stmt.var
    if low is not None and isinstance(top, int):
        var = Var(stmt.var.name, low, max(top, low))
    inner = table if var is stmt.var else {**table, stmt.var: var}
    return For(var, lo, hi, _tightened(stmt.body, inner), stmt.kind,
               substitute(stmt.grain, table), stmt.hoist)


def replace_buffer(stmt: Stmt, old: Buffer, new: Buffer) -> Stmt:
    """Read and write another buffer instead of one."""

    def scalar(value: Scalar) -> Scalar:
        return rewrite_scalar(value, lambda n: Load(n.dtype, new, n.indices)
                              if isinstance(n, Load) and n.source is old else None)

    def visit(node: Stmt) -> Stmt | None:
        if isinstance(node, Store):
            index = scalar(node.index) if isinstance(node.index, Scalar) else node.index
            return replace(node, buffer=new if node.buffer is old else node.buffer, index=index,
                           value=scalar(node.value))
        if isinstance(node, If):
            return If(scalar(node.cond), node.then, node.orelse)
        if isinstance(node, Tile):
            return replace(node, places=tuple(
                (new if b is old else b, at) for b, at in node.places))
        return None

    return rewrite(stmt, visit)


PASSES: dict[str, Callable[[Stmt], Stmt]] = {
    "unit_loops": unit_loops,
    "hoist_allocs": hoist_allocs,
    "merge_loops": merge_loops,
    "partition_ragged": partition_ragged,
    "cut_at_conditions": cut_at_conditions,
    "drop_empty": drop_empty,
}
