"""Runs tensor expressions in numpy: every element from its definition, no schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from terrazzo.base.scalar import (
    REDUCTIONS,
    Axis,
    Call,
    Const,
    FromIndex,
    Item,
    Load,
    Reduce,
    Reducer,
    Scalar,
    Tuple,
    children,
    identity_of,
    parts,
)
from terrazzo.base.unwind import Walk, unwind
from terrazzo.expr.ir import Program, Scan, Tensor, load
from terrazzo.index import Var, evaluate
from terrazzo.loop.interpret import apply, convert


def run(program: Program, arrays: Sequence[np.ndarray],
        dims: Mapping[Var, int]) -> list[np.ndarray]:
    """The outputs of a program for the given inputs and sizes."""
    memory: dict[Tensor, np.ndarray] = dict(zip(program.inputs, arrays, strict=True))
    with np.errstate(all="ignore"):
        inside = {t for scan in program.scans for t in (*scan.body, *scan.results)}
        for stage in program.stages:
            if stage not in inside:
                memory[stage] = compute_tensor(stage, memory, dims)
                continue
            for scan in program.scans:
                if stage is scan.results[0]:
                    _scan(scan, memory, dims)
    return [memory[t] for t in program.outputs]


def _scan(scan: Scan, memory: dict[Tensor, np.ndarray], dims: Mapping[Var, int]) -> None:
    """The results of a recurrence, row by row."""
    for tensor in (*scan.results, *scan.body):
        memory[tensor] = np.zeros(_sizes(tensor, dims), tensor.dtype.np)
    for alias, result in scan.memory_of().items():
        if alias in scan.inits:
            memory[result][:len(memory[alias])] = memory[alias]
        else:
            memory[alias] = memory[result]
    for row in range(int(evaluate(scan.first, dict(dims))), int(evaluate(scan.rows, dict(dims)))):
        for tensor in scan.body:
            memory[tensor][row] = compute_tensor(tensor, memory, dims, row)[0]


def _sizes(tensor: Tensor, dims: Mapping[Var, int]) -> tuple[int, ...]:
    return tuple(int(evaluate(n, dict(dims))) for n in tensor.shape)


def compute_tensor(tensor: Tensor, memory: Mapping[Tensor, np.ndarray], dims: Mapping[Var, int],
                   row: int | None = None) -> np.ndarray:
    """All elements of one computed tensor, or those of one row of its first dimension."""
    shape = _sizes(tensor, dims)
    if row is not None:
        shape = (1, *shape[1:])
    if 0 in shape:
        return np.zeros(shape, tensor.dtype.np)
    grids: dict[Var, Any] = dict(dims)
    rank = len(shape)
    for d, (axis, size) in enumerate(zip(tensor.axes, shape, strict=True)):
        first = row if row is not None and d == 0 else 0
        grids[axis.var] = np.arange(first, first + size).reshape((size,) + (1,) * (rank - d - 1))
    assert tensor.body is not None
    value = unwind(_evaluate(tensor.body, grids, memory, rank, {}))
    return np.array(np.broadcast_to(convert(value, tensor.dtype), shape))


def _evaluate(node: Scalar, env: dict[Var, Any], memory: Mapping[Tensor, np.ndarray],
              rank: int, done: dict[int, Any]) -> Walk[Any]:
    if id(node) in done:
        return done[id(node)]
    if isinstance(node, Reduce):
        result = yield _reduce(node, env, memory, rank)
    elif isinstance(node, Tuple):
        items = []
        for item in node.items:
            items.append((yield _evaluate(item, env, memory, rank, done)))
        result = tuple(items)
    elif isinstance(node, Item):
        result = (yield _evaluate(node.value, env, memory, rank, done))[node.number]
    elif isinstance(node, Const):
        result = np.asarray(node.value).astype(node.dtype.np)
    elif isinstance(node, FromIndex):
        result = np.asarray(evaluate(node.index, env)).astype(node.dtype.np)
    elif isinstance(node, Load):
        array = memory[node.source]
        if array.size == 0:
            result = np.zeros((1,) * rank, array.dtype)
        else:
            places = []
            for d, index in enumerate(node.indices):
                at = ((yield _evaluate(index, env, memory, rank, done))
                      if isinstance(index, Scalar) else evaluate(index, env))
                places.append(np.clip(at, 0, array.shape[d] - 1))
            result = array[tuple(places)] if places else array[()]
    else:
        assert isinstance(node, Call)
        args = []
        for a in children(node):
            args.append((yield _evaluate(a, env, memory, rank, done)))
        result = apply(node, args)
    done[id(node)] = result
    return result


def _reduce(node: Reduce, env: dict[Var, Any], memory: Mapping[Tensor, np.ndarray],
            rank: int) -> Walk[Any]:
    """Reduction axes become leading dimensions; a range that depends on others is masked."""
    inner = dict(env)
    mask: Any = None
    count = len(node.axes)
    sizes = []
    for d, axis in enumerate(node.axes):
        low, high = _range(axis, inner)
        sizes.append(max(high - low, 0))
        lead = (max(high - low, 0),) + (1,) * (count - d - 1 + rank)
        grid = np.arange(low, low + sizes[-1]).reshape(lead)
        inner[axis.var] = grid
        ragged_lo, ragged_hi = evaluate(axis.lo, inner), evaluate(axis.hi, inner)
        if np.ndim(ragged_lo) or np.ndim(ragged_hi):
            inside = (grid >= ragged_lo) & (grid < ragged_hi)
            mask = inside if mask is None else mask & inside
    found = yield _evaluate(node.value, inner, memory, rank + count, {})
    values = [_spread(part, own, rank, sizes, mask) for part, own in zip(
        found if isinstance(found, tuple) else (found,), parts(identity_of(node)), strict=True)]
    if node.reducer is not None:
        return _fold(node.reducer, [v.reshape(-1, *v.shape[count:]) for v in values])
    (value,) = values
    if 0 in sizes:
        return value[(0,) * count]
    for _ in range(count):
        value = REDUCTIONS[node.op].numpy(value, axis=0)
    return convert(value, node.dtype)


def _spread(value: Any, identity: Scalar, rank: int, sizes: Sequence[int],
            mask: Any) -> np.ndarray:
    """Values for all steps of a reduction; where there is none, one step of the identity."""
    assert isinstance(identity, Const)
    value = convert(value, identity.dtype)
    nothing = np.asarray(identity.value).astype(identity.dtype.np)
    tail = np.shape(value)[-rank:] if rank and np.ndim(value) else (1,) * rank
    tail = (1,) * (rank - len(tail)) + tuple(tail)
    value = np.broadcast_to(value, np.broadcast_shapes(np.shape(value), (*sizes, *tail)))
    if 0 in sizes:
        return np.full((1,) * len(sizes) + value.shape[len(sizes):], nothing)
    return value if mask is None else np.where(mask, value, nothing)


def _fold(reducer: Reducer, values: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Tuples combined one after the other, along the first dimension of each array."""
    left, right = ([Tensor(f"{side}{j}", (), c.dtype) for j, c in enumerate(reducer.identity)]
                   for side in "xy")
    formulas = reducer.combine([load(t, ()) for t in left], [load(t, ()) for t in right])
    rank = max(v.ndim for v in values) - 1
    state = [np.asarray(c.value).astype(c.dtype.np) for c in reducer.identity]
    for step in zip(*np.broadcast_arrays(*values), strict=True):
        memory = dict(zip((*left, *right), (*state, *step), strict=True))
        done: dict[int, Any] = {}
        state = [convert(unwind(_evaluate(f, {}, memory, rank, done)), c.dtype)
                 for f, c in zip(formulas, reducer.identity, strict=True)]
    return tuple(state)


def _range(axis: Axis, env: Mapping[Var, Any]) -> tuple[int, int]:
    return int(np.min(evaluate(axis.lo, dict(env)))), int(np.max(evaluate(axis.hi, dict(env))))
