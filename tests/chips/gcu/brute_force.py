"""Counting by doing: runs Loop IR statement by statement and writes down what each one did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from terrazzo.base.scalar import Load, Scalar, walk
from terrazzo.chips.gcu.description import Description
from terrazzo.chips.gcu.tally import LOAD, LOCAL, MATRIX, SCALAR, STORE, VECTOR
from terrazzo.chips.gcu.work import Places, _flattened, _is_steered, work
from terrazzo.index import Var, evaluate
from terrazzo.loop import interpret
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
    Stmt,
    Store,
    Tile,
    While,
    roots_of,
)
from terrazzo.loop.ir import walk as walk_statements

PARALLEL = ("parallel", "program")


@dataclass
class Run:
    """What one task, or what is outside of all tasks, did."""

    counts: np.ndarray = field(default_factory=lambda: np.zeros(8, np.int64))
    read: set[tuple[Buffer, int]] = field(default_factory=set)  # of main memory, before a write
    written: set[tuple[Buffer, int]] = field(default_factory=set)

    def row(self) -> list[int]:
        """The counters of computing, then the bytes of places that were read, and written."""
        moved = [sum(b.dtype.itemsize for b, _ in s) for s in (self.read, self.written)]
        return [*(int(self.counts[c]) for c in (VECTOR, MATRIX, SCALAR, LOCAL)), *moved]


def row(counters: np.ndarray) -> list[int]:
    """The same of a row of counters."""
    return [int(counters[c]) for c in (VECTOR, MATRIX, SCALAR, LOCAL, LOAD, STORE)]


class Machine:
    """Runs a kernel and counts."""

    def __init__(self, function: Function, chip: Description, arrays: Sequence[np.ndarray],
                 dims: Mapping[Var, int], threads: int = 1) -> None:
        self.chip = chip
        self.memory: dict[Buffer, np.ndarray] = dict(zip(function.params, arrays))
        self.env: dict[Var, Any] = {THREADS: threads, **dims}
        self.local: set[Buffer] = set()
        self.outside, self.tasks = Run(), []
        self.has_tasks = any(isinstance(s, For) and s.kind in PARALLEL
                             for s in walk_statements(function.body))
        self.current, self.in_task = self.outside, False
        with np.errstate(all="ignore"):
            self.run(function.body)

    def run(self, stmt: Stmt) -> None:
        """Do one statement."""
        if isinstance(stmt, Block):
            for inner in stmt.stmts:
                self.run(inner)
        elif isinstance(stmt, For):
            self.loop(stmt)
        elif isinstance(stmt, (Alloc, Let, If, While)):
            self.other(stmt)
        elif isinstance(stmt, Tile):
            self.count(stmt)
            self.touch_all(stmt.expand())
        else:
            self.count(stmt)
            self.touch(stmt)
            assert isinstance(stmt, (Store, Atomic))
            (interpret._store if isinstance(stmt, Store) else interpret._atomic)(
                stmt, self.env, self.memory)

    def loop(self, stmt: For) -> None:
        lo, hi = (int(evaluate(e, self.env)) for e in (stmt.lo, stmt.hi))
        if _flattened(stmt) is not None:
            self.count(stmt)
            self.touch_all(stmt)
            return
        is_task = stmt.kind in PARALLEL and not self.in_task
        for i in range(lo, hi):
            self.env[stmt.var] = i
            if is_task:
                self.tasks.append(Run())
                self.current, self.in_task = self.tasks[-1], True
            elif stmt.kind == "serial" and stmt.hi - stmt.lo != 1 and not _is_steered(stmt.body):
                self.current.counts[SCALAR] += 1
            self.run(stmt.body)
            if is_task:
                self.current, self.in_task = self.outside, False
        self.env.pop(stmt.var, None)

    def other(self, stmt: Alloc | Let | If | While) -> None:
        if isinstance(stmt, Alloc):
            size = int(evaluate(stmt.buffer.size, self.env))
            self.memory[stmt.buffer] = np.zeros(size, stmt.buffer.dtype.np)
            if self.in_task or not self.has_tasks:
                self.local.add(stmt.buffer)
            self.run(stmt.body)
        elif isinstance(stmt, Let):
            self.count(Let(stmt.var, stmt.value, Block(())))
            self.touch(stmt)
            self.env[stmt.var] = int(interpret.evaluate_scalar(stmt.value, self.env, self.memory))
            self.run(stmt.body)
        elif isinstance(stmt, If):
            if not _is_steered(stmt):
                self.branch(stmt)
            self.touch(stmt)
            if interpret.evaluate_scalar(stmt.cond, self.env, self.memory):
                self.run(stmt.then)
            elif stmt.orelse is not None:
                self.run(stmt.orelse)
        else:
            while interpret.evaluate_scalar(stmt.cond, self.env, self.memory):
                self.touch(stmt)
                self.branch(stmt)
                self.run(stmt.body)

    def branch(self, stmt: If | While) -> None:
        """A branch, or a turn of a loop that data ends."""
        self.count(While(stmt.cond, Block(())))

    def touch_all(self, stmt: Stmt) -> None:
        """Do all single statements of a loop or a tile, and note the places they touch."""
        if isinstance(stmt, Block):
            for inner in stmt.stmts:
                self.touch_all(inner)
        elif isinstance(stmt, For):
            for i in range(*(int(evaluate(e, self.env)) for e in (stmt.lo, stmt.hi))):
                self.env[stmt.var] = i
                self.touch_all(stmt.body)
        elif isinstance(stmt, If):
            self.touch_all(stmt.then if interpret.evaluate_scalar(
                stmt.cond, self.env, self.memory) else stmt.orelse or Block(()))
        elif isinstance(stmt, Alloc):
            self.memory[stmt.buffer] = np.zeros(int(evaluate(stmt.buffer.size, self.env)),
                                                stmt.buffer.dtype.np)
            self.local.add(stmt.buffer)
            self.touch_all(stmt.body)
        else:
            assert isinstance(stmt, Store)
            self.touch(stmt)
            interpret._store(stmt, self.env, self.memory)

    def count(self, stmt: Stmt) -> None:
        """What one statement costs, now that all variables have values."""
        places = Places()
        for made in (work(stmt, self.chip, places), *places.inside.values()):
            for counter, amount in made.amounts():
                self.current.counts[counter] += interpret.evaluate_scalar(
                    amount, self.env, self.memory)

    def touch(self, stmt: Stmt) -> None:
        """Note the places in main memory that a statement reads and writes."""
        current = self.current
        for root in roots_of(stmt):
            for node in walk(root) if isinstance(root, Scalar) else ():
                if isinstance(node, Load) and node.source not in self.local:
                    place = (node.source, self.address(node.indices[0]))
                    if place not in current.written:
                        current.read.add(place)
        if isinstance(stmt, (Store, Atomic)) and stmt.buffer not in self.local:
            place = (stmt.buffer, self.address(stmt.index))
            if (isinstance(stmt, Atomic) or stmt.reduce) and place not in current.written:
                current.read.add(place)
            current.written.add(place)

    def address(self, index: Any) -> int:
        if isinstance(index, Scalar):
            return int(interpret.evaluate_scalar(index, self.env, self.memory))
        return int(evaluate(index, self.env))
