"""Small passes over Loop IR, by name in PASSES: each leaves what a kernel computes unchanged.

Widening vector loops and repeating unrolled ones is the code generator's part, as is forwarding a
stored value to a load of the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce

from terrazzo.base.scalar import Load, Scalar, call
from terrazzo.base.scalar import as_scalar as scalar_of
from terrazzo.base.scalar import rewrite as rewrite_scalar
from terrazzo.base.unwind import Walk, unwind
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
    substitute,
)
from terrazzo.loop.accesses import buffers_of
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
    rewrite,
    substitute_vars,
    walk,
)
from terrazzo.loop.merging import hoist_allocs, merge_loops

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
    return unwind(_tightened(stmt, {}))


def drop_empty(stmt: Stmt) -> Stmt:
    """Loops that never run, branches without statements and buffers that nobody uses go away."""

    def visit(node: Stmt) -> Stmt | None:
        if isinstance(node, For) and (_is_empty(node.body) or proves_le(node.hi, node.lo)):
            return block()
        if isinstance(node, If) and _is_empty(node.then) and (
                node.orelse is None or _is_empty(node.orelse)):
            return block()
        if isinstance(node, Alloc) and node.buffer not in buffers_of(node.body):
            return node.body
        return None

    return rewrite(stmt, visit)


def _is_empty(stmt: Stmt) -> bool:
    return isinstance(stmt, Block) and not stmt.stmts


def unroll_in_vectors(stmt: Stmt) -> Stmt:
    """Unrolled loops of stores inside a vector loop are written out, for all lanes to share."""

    def visit(node: Stmt) -> Stmt | None:
        if not (isinstance(node, For) and node.kind == "vector"
                and isinstance(node.body, For) and node.body.kind == "unrolled"
                and isinstance(node.body.body, Store)):
            return None
        inner = node.body
        if not (isinstance(inner.lo, int) and isinstance(inner.hi, int)):
            return None
        return replace(node, body=block(*(substitute_vars(inner.body, {inner.var: i})
                                          for i in range(inner.lo, inner.hi))))

    return rewrite(stmt, visit)


# ---------------------------------------------------------------- ragged loops
def partition_ragged(stmt: Stmt) -> Stmt:
    """Full pieces get constant bounds, and what is left over is code of its own.

    A loop `o` around vector or unrolled loops up to `min(f, n - o*f)` is cut at `n // f`. Where
    iterations run concurrently, or the ragged ones do not come last, a branch inside decides.
    """
    return unwind(_partitioned(stmt))


def _partitioned(stmt: Stmt) -> Walk[Stmt]:
    if isinstance(stmt, For):
        ragged = _find_ragged(stmt)
        if ragged is not None:
            return (yield _cut_loop(stmt, ragged))
    if isinstance(stmt, (For, Alloc, Let)):
        return replace(stmt, body=(yield _partitioned(stmt.body)))
    if isinstance(stmt, Block):
        stmts = []
        for s in stmt.stmts:
            stmts.append((yield _partitioned(s)))
        return block(*stmts)
    if isinstance(stmt, If):
        then = yield _partitioned(stmt.then)
        orelse = None if stmt.orelse is None else (yield _partitioned(stmt.orelse))
        return If(stmt.cond, then, orelse)
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


def _cut_loop(loop: For, ragged: _Ragged) -> Walk[Stmt]:
    step = coefficient(ragged.left, loop.var)
    at: Index | None = None
    last: dict[Var, Index] = {}
    if isinstance(step, int) and step < 0:  # the full pieces come first
        at = (ragged.left - step * loop.var - ragged.size - step) // -step
        at = minimum(maximum(at, loop.lo), loop.hi)
        if proves_eq(loop.hi - at, 1):
            last = {loop.var: at}
    full, ends = (_replace_bounds(loop.body, known) for known in (ragged.full, ragged.rest))
    body = yield _partitioned((yield _tightened(full, {})))
    rest = yield _partitioned((yield _tightened(ends, last)))
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

    algebra = Algebra(
        constant=lambda number: number, variable=lambda var: var,
        add=lambda a, b: a + b, multiply=lambda a, b: a * b,
        floordiv=lambda a, b: a // b, mod=lambda a, b: a % b,
        minimum=smaller, maximum=maximum)

    def visit(node: Stmt) -> Stmt | None:
        if isinstance(node, For):
            return replace(node, lo=interpret(node.lo, algebra), hi=interpret(node.hi, algebra))
        return None

    return rewrite(stmt, visit)


def _tightened(stmt: Stmt, table: dict[Var, Index]) -> Walk[Stmt]:
    """Substitute variables; loops inside that now run once go away, others learn their bounds."""
    if isinstance(stmt, Block):
        stmts = []
        for s in stmt.stmts:
            stmts.append((yield _tightened(s, table)))
        return block(*stmts)
    if isinstance(stmt, Alloc):
        old = stmt.buffer
        size = substitute(old.size, table)
        if size == old.size:
            return Alloc(old, (yield _tightened(stmt.body, table)))
        new = replace(old, size=size)
        return Alloc(new, (yield _tightened(replace_buffer(stmt.body, old, new), table)))
    if isinstance(stmt, If):
        bare = substitute_vars(If(stmt.cond, block()), table)
        assert isinstance(bare, If)
        orelse = None if stmt.orelse is None else (yield _tightened(stmt.orelse, table))
        return If(bare.cond, (yield _tightened(stmt.then, table)), orelse)
    if not isinstance(stmt, For):
        return substitute_vars(stmt, table) if table else stmt
    lo, hi = substitute(stmt.lo, table), substitute(stmt.hi, table)
    if proves_eq(hi - lo, 1):
        if not _takes_time(lo):
            return (yield _tightened(stmt.body, {**table, stmt.var: lo}))
        # Divisions of sizes take dozens of cycles: they are not put wherever their name stands.
        return replace(stmt, lo=lo, hi=lo + 1, body=(yield _tightened(stmt.body, table)))
    low, top = bounds(lo)[0], bounds(hi - 1)[1]
    var = stmt.var
    if low is not None and isinstance(top, int):
        var = Var(stmt.var.name, low, max(top, low))
    inner = table if var is stmt.var else {**table, stmt.var: var}
    return For(var, lo, hi, (yield _tightened(stmt.body, inner)), stmt.kind,
               substitute(stmt.grain, table), stmt.hoist)


def _takes_time(index: Index) -> bool:
    """Whether it divides by a size, or is made of sizes by more than sums and products."""
    atoms = [a for m, _ in index.terms for a in m] if isinstance(index, Sum) else [index]
    made = [a for a in atoms if isinstance(a, (FloorDiv, Mod, Min, Max))]
    return any(isinstance(a, (FloorDiv, Mod)) and not isinstance(a.den, int) for a in made) or (
        bool(made) and any(var.hi is None for var in free_vars(index)))


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
    "unroll_in_vectors": unroll_in_vectors,
    "cut_at_conditions": cut_at_conditions,
    "drop_empty": drop_empty,
}
