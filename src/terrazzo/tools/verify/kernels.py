"""Runs one kernel at the levels below the graph, on values of the verifier's choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from terrazzo.base.scalar import Load, walk
from terrazzo.base.unwind import Walk, unwind
from terrazzo.chips.chip import Chip
from terrazzo.graph import evaluate as graph_evaluate
from terrazzo.graph.fusion import Group
from terrazzo.graph.ir import Value
from terrazzo.index import Var, evaluate
from terrazzo.loop import interpret
from terrazzo.loop.ir import THREADS, Block, For, Function, Let, Stmt, Store, Tile, children

GARBAGE = 0xA5
_FENCE = 64  # bytes before and after an output that nobody may write to


def statements(stmt: Stmt, env: dict[Var, Any]) -> int:
    """About how many statements the interpreter will run."""
    return unwind(_statements(stmt, {THREADS: 1, **env}))


def _statements(stmt: Stmt, env: dict[Var, Any]) -> Walk[int]:
    if isinstance(stmt, For):
        lo, hi = (int(np.max(evaluate(n, env))) for n in (stmt.lo, stmt.hi))
        stores = stmt.body.stmts if isinstance(stmt.body, Block) else (stmt.body,)
        if stmt.kind == "vector" and all(isinstance(s, Store) for s in stores):
            return len(stores)
        if hi <= lo:  # nothing inside need make sense then
            return 1
        return 1 + (hi - lo) * (yield _statements(stmt.body, {**env, stmt.var: lo}))
    if isinstance(stmt, Let):
        return (yield _statements(stmt.body, {**env, stmt.var: _named(stmt, env)}))
    if isinstance(stmt, Tile):
        return (yield _statements(stmt.expand(), env))
    total = 1
    for child in children(stmt):
        total += yield _statements(child, env)
    return total


def _named(let: Let, env: dict[Var, Any]) -> int:
    """What a name stands for; of one that hangs on memory, the least that it may be."""
    if any(isinstance(n, Load) for n in walk(let.value)):
        return let.var.lo or 0
    return int(interpret.evaluate_scalar(let.value, env, {}))


def interpreted(function: Function, group: Group, inputs: Sequence[np.ndarray],
               dims: Mapping[Var, int]) -> list[np.ndarray]:
    """The outputs of a kernel as the interpreter of Loop IR computes them."""
    outputs = [_garbage(v, dims) for v in group.outputs]
    flat = [np.ravel(a).copy() for a in function.arranged(inputs)]
    interpret.run(function, flat + [y.reshape(-1) for y in outputs], dims)
    return outputs


def _garbage(value: Value, dims: Mapping[Var, int]) -> np.ndarray:
    shape = graph_evaluate.concrete(value.shape, dims)
    fresh = np.empty(shape, value.dtype.np)
    fresh.reshape(-1).view(np.uint8).fill(1 if value.dtype.is_bool else GARBAGE)
    return fresh


@contextmanager
def in_memory_of(chip: Chip, arrays: Sequence[np.ndarray]) -> Iterator[list[int]]:
    """Where arrays lie for a chip's kernels, with what is around them; afterwards they hold that.

    In the host's memory that is where they are.
    """
    wholes = [a if a.base is None else a.base for a in arrays]
    blocks = [chip.memory.copy_in(whole) for whole in wholes]
    yield [block.address + a.ctypes.data - whole.ctypes.data
           for block, a, whole in zip(blocks, arrays, wholes, strict=True)]
    for block, whole in zip(blocks, wholes, strict=True):
        chip.memory.copy_out(block, whole)


def fenced(value: Value, dims: Mapping[Var, int]) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Garbage for an output, and the bytes before and after it."""
    like = _garbage(value, dims)
    room = np.full(like.nbytes + 2 * _FENCE, GARBAGE, np.uint8)
    inner = room[_FENCE:_FENCE + like.nbytes]
    inner[:] = like.reshape(-1).view(np.uint8)
    return inner.view(like.dtype).reshape(like.shape), (room[:_FENCE],
                                                        room[_FENCE + like.nbytes:])


