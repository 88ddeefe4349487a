"""Loop IR that counts what it does: one more parameter, to which each program adds its counts.

What is computed stays bit for bit the same. Counts are closed forms of sizes and loop variables
(tally.py), written down once at the outermost place where they are known: for most kernels that is
once a program. Only what data decides is counted where it runs. They hang on the description of the
chip and on the Loop IR alone, never on the machine that compiles or runs it.

`work.py` says what is counted of arithmetic, `traffic.py` what of main memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from terrazzo.base.scalar import Scalar, as_scalar, call, const
from terrazzo.base.unwind import Walk, unwind
from terrazzo.chips.gcu.description import Description
from terrazzo.chips.gcu.naming import named
from terrazzo.chips.gcu.tally import COUNTERS, LAUNCHES, Tally, is_unit, trips
from terrazzo.chips.gcu.traffic import Traffic
from terrazzo.chips.gcu.work import Places, work
from terrazzo.dtypes import int64
from terrazzo.index import Index, Var, ceildiv, free_vars, minimum
from terrazzo.loop.ir import (
    THREADS,
    Alloc,
    Atomic,
    Block,
    Buffer,
    For,
    Function,
    If,
    Let,
    Pause,
    Stmt,
    Store,
    While,
    block,
    children,
    rewrite,
    walk,
)

Per = Literal["program", "task"]
PARALLEL = ("parallel", "program")


def counted(function: Function, chip: Description, per: Per = "program", first: int = 0,
            launches: bool = True) -> Function:
    """The function with a last parameter `counters` that it adds its counts to.

    Of a "program" `n` of the outermost parallel loop they are in row n, which is its own. A "task"
    adds to row `(first + n) % units`, together with others; row `first` also counts how often the
    kernel was called, if `launches`. What runs outside of parallel loops belongs to row `first`.
    """
    body = _unshared(function.body)
    known = frozenset((*function.dims, THREADS))
    tasks = _tasks(body, known)
    counters = _counters(function, tasks, chip, per)
    places = _count(body, chip, known, tasks, per)
    return replace(function, params=(*function.params, counters), program=None,
                   body=_Writer(chip, per, counters, places, first).function(body, launches))


def _counters(function: Function, tasks: list[_Task], chip: Description, per: Per) -> Buffer:
    if per == "task":
        return Buffer("counters", int64, chip.units * COUNTERS)
    size: Index = tasks[0].loop.hi * COUNTERS if tasks else COUNTERS
    is_known = isinstance(size, int) or free_vars(size) <= {*function.dims, THREADS}
    return Buffer("counters", int64, size if is_known else 0, bounded=is_known)


def _unshared(stmt: Stmt) -> Stmt:
    """The statement with no part in two places of it: places are told apart by their identity."""
    seen: set[int] = set()

    def visit(node: Stmt) -> Stmt | None:  # what has parts was just made anew
        if id(node) in seen:
            return replace(node)  # type: ignore[type-var]
        seen.add(id(node))
        return None

    return rewrite(stmt, visit)


# ---------------------------------------------------------------- tasks
@dataclass(frozen=True)
class _Task:
    """An outermost parallel loop, and what has a name around it."""

    loop: For
    known: frozenset[Var]


def _tasks(body: Stmt, known: frozenset[Var]) -> list[_Task]:
    found: list[_Task] = []
    todo = [(body, known)]
    while todo:
        stmt, names = todo.pop()
        if isinstance(stmt, (For, Let)):
            names = names | {stmt.var}
        if isinstance(stmt, For) and stmt.kind in PARALLEL:
            found.append(_Task(stmt, names))
        else:
            todo += [(child, names) for child in reversed(children(stmt))]
    return found


def _count(body: Stmt, chip: Description, known: frozenset[Var], tasks: list[_Task], per: Per
           ) -> Places:
    """All counts, by the statement in whose body they are written; (0, 0) is the function."""
    loops = frozenset(id(task.loop) for task in tasks)
    once = _run_once(body, loops).union(*(_run_once(t.loop.body, loops) for t in tasks))
    places = Places(loops, once, _waiting(body))
    whole = work(body, chip, places)
    for task in tasks:
        walk_of = _traffic(task.loop.body, chip, places)
        if per == "task":
            walk_of.task = task.loop.var
        places.add(task.loop, walk_of.count(task.loop.body, task.known))
    whole.include(_traffic(body, chip, places, loops).count(body, known))
    places.inside[0, 0] = whole
    return places


def _waiting(body: Stmt) -> frozenset[int]:
    """Loops in which programs wait for others, and all in them: their turns are the host's."""
    return frozenset(id(inner) for stmt in walk(body) if isinstance(stmt, While)
                     and any(isinstance(s, Pause) for s in walk(stmt)) for inner in walk(stmt))


def _run_once(stmt: Stmt, tasks: frozenset[int]) -> frozenset[int]:
    """The names of a task or a function that are given outside of its loops."""
    found: set[int] = set()
    todo = [stmt]
    while todo:
        node = todo.pop()
        if isinstance(node, Let) or (isinstance(node, For) and is_unit(node)):
            found.add(id(node))
        elif isinstance(node, (For, While)):
            continue
        todo += children(node)
    return frozenset(found)


def _traffic(body: Stmt, chip: Description, places: Places, tasks: frozenset[int] = frozenset()
             ) -> Traffic:
    """The walk over a task: what it allocates lies in the scratchpad, if it may.

    What tasks share does not: it is memory like any other.
    """
    local = frozenset[Buffer]() if tasks else frozenset(
        s.buffer for s in walk(body) if isinstance(s, Alloc)
        and not (isinstance(s.buffer.size, int)
                 and s.buffer.size * s.buffer.dtype.itemsize > chip.scratchpad_bytes))
    return Traffic(chip, local, chip.scratchpad_bytes - _peak(body, local), places, tasks)


def _peak(stmt: Stmt, local: frozenset[Buffer]) -> Index:
    """The most bytes of buffers that live at the same time, as far as their sizes are known."""
    most = 0
    todo = [(stmt, 0)]
    while todo:
        node, around = todo.pop()
        if isinstance(node, Alloc) and node.buffer in local and isinstance(node.buffer.size, int):
            around += node.buffer.size * node.buffer.dtype.itemsize
            most = max(most, around)
        todo += [(child, around) for child in children(node)]
    return most


# ---------------------------------------------------------------- writing
def _with_names(given: Sequence[tuple[Var, Index]], body: Stmt) -> Stmt:
    for var, value in reversed(given):
        body = Let(var, as_scalar(value, int64), body)
    return body


Sink = Callable[[Tally], Stmt]


@dataclass(frozen=True)
class _Writer:
    """Puts the counts into the statements."""

    chip: Description
    per: Per
    counters: Buffer
    places: Places
    first: int  # the row of the first task
    numbers: Iterator[int] = field(default_factory=itertools.count)  # for names of parts

    def function(self, body: Stmt, launches: bool) -> Stmt:
        """The body of a function, with all it counts."""
        whole = self.places.inside[0, 0]
        if self.per == "task" and launches:
            if isinstance(body, For) and id(body) in self.places.tasks:
                # The loop stays the outermost statement: its first task counts the call.
                first = self.places.inside.setdefault((id(body), 0), Tally())
                first.add(LAUNCHES, 1, (body.lo - body.var,))
            else:
                whole.add(LAUNCHES, 1)
        head = self.added(whole, self.first) if whole.terms else None
        return block(head, unwind(self.rebuilt(body, lambda tally: self.added(
            tally, self.first))))

    def written(self, tally: Tally, add: Callable[[int, Scalar], Stmt]) -> Stmt:
        """Counts, each by a statement that adds it; what they have in common has a name."""
        given, short = named(tally, f"part{next(self.numbers)}_")
        return _with_names(given, block(*(add(*each) for each in short.amounts())))

    def added(self, tally: Tally, row: Index) -> Stmt:
        """Adds to a row that nobody else writes to."""
        return self.written(tally, lambda counter, amount: Store(
            self.counters, row * COUNTERS + counter, amount, "add"))

    def by_units(self, loop: For, known: Tally) -> Stmt:
        """What tasks count that know it before they start: the first one counts for all."""
        units = self.chip.units
        unit, turn = Var("unit", 0, units - 1), Var("turn", 0)
        mine = known.where({loop.var: loop.lo + unit + units * turn})
        tasks = trips(loop)
        closed, left = mine.over(For(turn, 0, ceildiv(tasks - unit, units), Block(())))
        if left.terms:
            return self.written(known, lambda counter, amount: self.shared(
                counter, self.row(loop.var - loop.lo), amount))
        adds = self.written(closed, lambda counter, amount: self.shared(
            counter, self.row(unit), amount))
        return If(call("eq", as_scalar(loop.var), as_scalar(loop.lo, int64)),
                  For(unit, 0, minimum(tasks, units), adds))

    def row(self, task: Index) -> Index:
        """Where a task counts."""
        return (task + self.first) % self.chip.units

    def shared(self, counter: int, row: Index, amount: Scalar) -> Stmt:
        """Adds to a row of several tasks."""
        return Atomic("add", self.counters, row * COUNTERS + counter, amount)

    def rebuilt(self, stmt: Stmt, sink: Sink) -> Walk[Stmt]:
        """The statement with counts written into it, by way of `sink`."""
        if isinstance(stmt, For) and id(stmt) in self.places.tasks:
            return (yield self.task(stmt))
        inside = self.places.inside
        fresh = stmt
        if isinstance(stmt, Block):
            stmts = []
            for inner in stmt.stmts:
                stmts.append((yield self.rebuilt(inner, sink)))
            fresh = block(*stmts)
        elif isinstance(stmt, (For, Let, While, Alloc)):
            body = yield self.rebuilt(stmt.body, sink)
            more = inside.get((id(stmt), 0))
            fresh = replace(stmt, body=body if more is None else block(sink(more), body))
        elif isinstance(stmt, If):
            branches: list[Stmt | None] = []
            for number, branch in enumerate((stmt.then, stmt.orelse)):
                more = inside.get((id(stmt), number))
                made = None if branch is None else (yield self.rebuilt(branch, sink))
                branches.append(made if more is None else block(sink(more), made))
            assert branches[0] is not None
            fresh = If(stmt.cond, branches[0], branches[1])
        return fresh

    def task(self, loop: For) -> Walk[Stmt]:
        """A parallel loop: each task adds up what it counts on its way, and hands it over."""
        number = loop.var - loop.lo
        known = self.places.inside.get((id(loop), 0), Tally())
        on_the_way = {(id(s), b) for s in walk(loop.body) for b in (0, 1)} & set(
            self.places.inside)
        if not on_the_way:
            body = yield self.rebuilt(loop.body, lambda tally: Block(()))
            head = self.added(known, number) if self.per == "program" else self.by_units(
                loop, known)
            return replace(loop, body=block(head, body))
        used = {counter for place in on_the_way
                for counter in self.places.inside[place].counters()}
        given, short = named(known, f"part{next(self.numbers)}_")
        amounts = dict(short.amounts())
        mine = Buffer("counted", int64, COUNTERS)
        body = yield self.rebuilt(loop.body, lambda tally: self.written(
            tally, lambda counter, amount: Store(mine, counter, amount, "add")))
        first = [Store(mine, c, amounts.get(c, const(0))) for c in sorted(used)]
        last = [self._handed(c, number, mine[c] if c in used else amounts[c])
                for c in sorted(used | amounts.keys())]
        whole = block(*first, body, *last)
        return replace(loop, body=Alloc(mine, _with_names(given, whole)))

    def _handed(self, counter: int, number: Index, amount: Scalar) -> Stmt:
        if self.per == "task":
            return self.shared(counter, self.row(number), amount)
        return Store(self.counters, number * COUNTERS + counter, amount, "add")
