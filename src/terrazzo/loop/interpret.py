"""Runs Loop IR in Python, statement by statement: slow, plain, and what code is checked against."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from terrazzo.base.scalar import (
    OPS,
    REDUCTIONS,
    Call,
    Const,
    FromIndex,
    Load,
    Scalar,
    Undefined,
    walk,
)
from terrazzo.base.unwind import Walk, unwind
from terrazzo.dtypes import DType
from terrazzo.errors import IndexOutOfRange
from terrazzo.index import Index, Var, evaluate
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
    Tile,
    While,
)

Env = dict[Var, Any]


def run(function: Function, arrays: Sequence[np.ndarray], dims: Mapping[Var, int]) -> None:
    """Execute a kernel on flat arrays, one a parameter, in place."""
    memory: dict[Buffer, np.ndarray] = dict(zip(function.params, arrays, strict=True))
    with np.errstate(all="ignore"):
        unwind(_run(function.body, {THREADS: 1, **dims}, memory))


def _run(stmt: Stmt, env: Env, memory: dict[Buffer, np.ndarray]) -> Walk[None]:
    if isinstance(stmt, Block):
        for inner in stmt.stmts:
            yield _run(inner, env, memory)
    elif isinstance(stmt, For):
        lo, hi = int(evaluate(stmt.lo, env)), int(evaluate(stmt.hi, env))
        if stmt.kind == "vector" and isinstance(stmt.body, (Store, Block)):
            yield _run_vector(stmt, lo, hi, env, memory)
            return
        for i in range(lo, hi):
            env[stmt.var] = i
            yield _run(stmt.body, env, memory)
        env.pop(stmt.var, None)
    elif isinstance(stmt, If):
        if evaluate_scalar(stmt.cond, env, memory):
            yield _run(stmt.then, env, memory)
        elif stmt.orelse is not None:
            yield _run(stmt.orelse, env, memory)
    elif isinstance(stmt, Let):
        env[stmt.var] = int(evaluate_scalar(stmt.value, env, memory))
        yield _run(stmt.body, env, memory)
        env.pop(stmt.var, None)
    elif isinstance(stmt, While):
        while evaluate_scalar(stmt.cond, env, memory):
            yield _run(stmt.body, env, memory)
    elif isinstance(stmt, Atomic):
        _atomic(stmt, env, memory)
    elif isinstance(stmt, Pause):
        if stmt.clock is not None:
            memory[stmt.clock[0]][evaluate(stmt.clock[1], env)] = time.monotonic_ns()
    elif isinstance(stmt, Alloc):
        size = int(evaluate(stmt.buffer.size, env))
        memory[stmt.buffer] = np.zeros(size, stmt.buffer.dtype.np)
        yield _run(stmt.body, env, memory)
        del memory[stmt.buffer]
    elif isinstance(stmt, Tile):
        yield _run(stmt.expand(), env, memory)
    else:
        assert isinstance(stmt, Store)
        _store(stmt, env, memory)


def _run_vector(loop: For, lo: int, hi: int, env: Env, memory: dict[Buffer, np.ndarray]
                ) -> Walk[None]:
    """All lanes of a vector loop at once, statement by statement, as the vector unit does."""
    if hi <= lo:
        return
    body = loop.body.stmts if isinstance(loop.body, Block) else (loop.body,)
    if not all(isinstance(s, Store) for s in body):
        for i in range(lo, hi):
            env[loop.var] = i
            yield _run(loop.body, env, memory)
    else:
        env[loop.var] = np.arange(lo, hi)
        for stmt in body:
            assert isinstance(stmt, Store)
            _store(stmt, env, memory, lanes=hi - lo)
    env.pop(loop.var, None)


def _store(stmt: Store, env: Env, memory: dict[Buffer, np.ndarray], lanes: int = 0) -> None:
    array = memory[stmt.buffer]
    index = _index(stmt.index, env, memory)
    value = evaluate_scalar(stmt.value, env, memory)
    value = convert(value, stmt.buffer.dtype)
    if stmt.mask is not None:
        kept = np.broadcast_to(evaluate_scalar(stmt.mask, env, memory), (max(lanes, 1),))
        if not kept.any():
            return
        index = np.broadcast_to(index, kept.shape)[kept]
        value, lanes = np.broadcast_to(value, kept.shape)[kept], len(index)
    _check(stmt.buffer, index, array)
    if stmt.reduce is None:
        if lanes and np.ndim(index) == 0:  # all lanes store to one place: the last one stays
            value = np.broadcast_to(value, (lanes,))[-1]
        array[index] = value
        return
    row = REDUCTIONS[stmt.reduce]
    if lanes and np.ndim(index) == 0:
        value = row.numpy(np.broadcast_to(value, (lanes,)))
        array[index] = convert(OPS[row.op].numpy(array[index], value), stmt.buffer.dtype)
    elif np.ndim(index) > 0 and len(np.unique(index)) < len(index):
        for i, v in zip(index, np.broadcast_to(value, index.shape), strict=True):
            array[i] = convert(OPS[row.op].numpy(array[i], v), stmt.buffer.dtype)
    else:
        array[index] = convert(OPS[row.op].numpy(array[index], value), stmt.buffer.dtype)


def _atomic(stmt: Atomic, env: Env, memory: dict[Buffer, np.ndarray]) -> None:
    array = memory[stmt.buffer]
    at = _index(stmt.index, env, memory)
    _check(stmt.buffer, at, array)
    before = array[at].copy()
    value = convert(evaluate_scalar(stmt.value, env, memory), stmt.buffer.dtype)
    if stmt.kind == "compare":
        assert stmt.expected is not None
        if before.tobytes() == convert(evaluate_scalar(stmt.expected, env, memory),
                                       stmt.buffer.dtype).tobytes():
            array[at] = value
    elif stmt.kind != "load":
        array[at] = value if stmt.kind == "exchange" else OPS[stmt.kind].numpy(before, value)
    if stmt.old is not None:
        memory[stmt.old[0]][evaluate(stmt.old[1], env)] = before


def _index(index: Index | Scalar, env: Env, memory: Mapping[Buffer, np.ndarray]) -> Any:
    if isinstance(index, Scalar):
        return evaluate_scalar(index, env, memory)
    return evaluate(index, env)


def _check(buffer: Buffer, index: Any, array: np.ndarray) -> None:
    low, high = np.min(index), np.max(index)
    if low < 0 or high >= array.size:
        raise IndexOutOfRange(
            f"{buffer.name}[{low if low < 0 else high}] is outside its {array.size} elements",
            hint="this is a bug in lowering: the loop bounds and the address disagree")


def convert(value: Any, dtype: DType) -> Any:
    """numpy's cast with C semantics for what numpy only warns about."""
    value = np.asarray(value)
    return value if value.dtype == dtype.np else value.astype(dtype.np)


def evaluate_scalar(root: Scalar, env: Env, memory: Mapping[Any, np.ndarray]) -> Any:
    """The value of a scalar expression (an array where a vector loop's variable is one)."""
    done: dict[int, Any] = {}
    for node in walk(root):
        if isinstance(node, Const):
            result: Any = np.asarray(node.value).astype(node.dtype.np)
        elif isinstance(node, Undefined):
            result = np.zeros((), node.dtype.np)
        elif isinstance(node, FromIndex):
            result = np.asarray(evaluate(node.index, env)).astype(node.dtype.np)
        elif isinstance(node, Load):
            array = memory[node.source]
            place = node.indices[0]
            at = done[id(place)] if isinstance(place, Scalar) else evaluate(place, env)
            # A guarded load (where(inside, x[i], 0)) may point outside: it reads something
            # harmless here, as masked lanes do in machine code.
            clipped = np.clip(at, 0, max(array.size - 1, 0))
            result = array[clipped] if array.size else np.zeros(np.shape(at), array.dtype)
        else:
            assert isinstance(node, Call)
            result = apply(node, [done[id(a)] for a in node.args])
        done[id(node)] = result
    return done[id(root)]


def apply(node: Call, args: Sequence[Any]) -> Any:
    """One operation on numpy values, with the node's result type."""
    if node.op == "cast":
        return convert(args[0], node.dtype)
    if node.op == "bitcast":
        return np.asarray(args[0]).view(node.dtype.np)
    return convert(OPS[node.op].numpy(*args), node.dtype)
