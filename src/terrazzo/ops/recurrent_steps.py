"""The steps of recurrent layers: the kernel that runs a cell over time.

One kernel is a loop over time, in it the products of the hidden state with the recurrent weights,
and the gates. The weights are laid out so that one tile computes all gates of a few hidden units;
what becomes of the gates happens right there, while the sums are in the cache. Sequences of a batch
are independent tasks; a single one shares the units of each step among the threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from terrazzo.dtypes import DType, int64
from terrazzo.errors import ShapeError, user_location
from terrazzo.expr.ir import fresh_axis
from terrazzo.graph.ir import TensorType
from terrazzo.index import Index, ceildiv, minimum
from terrazzo.loop.ir import Alloc, Block, Buffer, For, If, Stmt, Store, block
from terrazzo.loop.tiles import fma_tile
from terrazzo.ops.define import primitive
from terrazzo.ops.recurrent_cells import (
    Cell,
    Chosen,
    array_math,
    gru_hidden,
    lstm_hidden,
    lstm_memory,
)
from terrazzo.scalar import Const, Scalar, as_scalar, call
from terrazzo.scalar import cast as cast_scalar
from terrazzo.scalar import where as where_scalar
from terrazzo.shapes import Shape

# Sequences of a tile, by the number of gates: as many as registers hold sums for.
_ROWS = {1: 6, 2: 6, 3: 8, 4: 6}
_ROWS_IF_UNKNOWN = 4
_TASK_PRODUCTS = 1 << 16  # multiplications of a step that are worth a task of their own


# ---------------------------------------------------------------- the steps: types, reference
@dataclass(frozen=True)
class _Layer:
    """Shapes and settings of all steps of a layer, as the attributes say."""

    kind: str
    given: tuple[str, ...]
    direction: str
    functions: tuple[tuple[Chosen, ...], ...]
    clip: float | None
    input_forget: bool
    linear_before_reset: bool
    batch_first: bool
    units: tuple[int, ...]
    types: tuple[TensorType, ...]

    @cached_property
    def named(self) -> dict[str, TensorType]:
        return dict(zip(self.given, self.types, strict=True))

    def cell(self, number: int) -> Cell:
        return Cell(self.kind, self.functions[number], self.clip, self.input_forget,
                    self.linear_before_reset)

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    def backwards(self, number: int) -> bool:
        return self.direction == "reverse" or number == 1

    @property
    def hidden(self) -> int:
        size = self.named["weights0"].shape[2]
        if not isinstance(size, int):
            raise ShapeError(f"recurrent_steps needs a known number of hidden units, not {size}",
                             where=user_location())
        return size

    @property
    def steps(self) -> Index:
        return self.named["gates"].shape[1 if self.batch_first else 0]

    @property
    def batch(self) -> Index:
        return self.named["gates"].shape[0 if self.batch_first else 1]

    @property
    def dtype(self) -> DType:
        return self.named["gates"].dtype

    def out_types(self) -> tuple[TensorType, ...]:
        states, size = (self.directions, self.batch), self.hidden
        every: Shape = (self.steps, *states, size)
        last: Shape = (*states, size)
        if self.batch_first:
            every = (self.batch, self.steps, self.directions, size)
            last = (self.batch, self.directions, size)
        count = 2 if self.kind == "lstm" else 1
        return tuple(TensorType(s, self.dtype) for s in (every, *[last] * count))

    # Where things lie, for sequence n of the batch and direction d.
    def gates_at(self, t: Any, n: Index, d: int) -> Any:
        width = self.cell(0).gates * self.hidden
        row = n * self.steps + t if self.batch_first else t * self.batch + n
        return (row * self.directions + d) * width

    def y_at(self, t: Any, n: Index, d: int) -> Any:
        if self.batch_first:
            return ((n * self.steps + t) * self.directions + d) * self.hidden
        return ((t * self.directions + d) * self.batch + n) * self.hidden

    def state_at(self, n: Index, d: int) -> Index:
        row = n * self.directions + d if self.batch_first else d * self.batch + n
        return row * self.hidden


def _steps_type(*types: TensorType, **attrs: Any) -> tuple[TensorType, ...]:
    return _Layer(**attrs, types=types).out_types()


def _steps_numpy(*arrays: np.ndarray, out: tuple[TensorType, ...], **attrs: Any
                 ) -> tuple[np.ndarray, ...]:
    given: dict[str, np.ndarray] = dict(zip(attrs["given"], arrays, strict=True))
    types = tuple(TensorType(a.shape, out[0].dtype) for a in arrays)
    layer = _Layer(**attrs, types=types)
    gates, size = given["gates"], layer.hidden
    if layer.batch_first:
        gates = np.swapaxes(gates, 0, 1)
    steps, batch = gates.shape[:2]
    gates = gates.reshape(steps, batch, layer.directions, -1, size)
    lengths = given.get("lengths", np.full(batch, steps))
    lengths = np.clip(lengths, 0, steps)
    states = {name: np.zeros((layer.directions, batch, size), gates.dtype) for name in "hc"}
    for name in states.keys() & given.keys():
        states[name] = given[name].copy()
        if layer.batch_first:
            states[name] = np.swapaxes(states[name], 0, 1).copy()
    y = np.zeros((steps, layer.directions, batch, size), gates.dtype)
    for d in range(layer.directions):
        weights = [_unpacked_numpy(given[f"weights{k}"][d], size)
                   for k in range(len(layer.cell(d).phases))]
        extra: dict[str, np.ndarray] = {
            name: given[name][d].reshape(-1, size) for name in ("p", "bias") if name in given}
        for n in range(batch):
            h, c = states["h"][d, n], states["c"][d, n]
            times = range(int(lengths[n]))
            for t in reversed(times) if layer.backwards(d) else times:
                h, c = _step_numpy(layer.cell(d), gates[t, n, d], weights, h, c, extra)
                y[t, d, n] = h
            alive = lengths[n] > 0 or "lengths" not in given
            states["h"][d, n], states["c"][d, n] = (h, c) if alive else (0, 0)
    results = [y, *(states[name] for name in "hc"[:len(out) - 1])]
    if layer.batch_first:
        results = [np.transpose(y, (2, 0, 1, 3)), *(np.swapaxes(s, 0, 1) for s in results[1:])]
    return tuple(np.ascontiguousarray(r) for r in results)


def _unpacked_numpy(weights: np.ndarray, size: int) -> np.ndarray:
    """[gates, units, k] from the tiles' layout."""
    return np.moveaxis(weights, (2, 0, 3, 1), (0, 1, 2, 3)).reshape(
        weights.shape[2], -1, size)[:, :size]


def _step_numpy(cell: Cell, gates: np.ndarray, weights: Sequence[np.ndarray], h: np.ndarray,
                c: np.ndarray, extra: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """One step of one sequence: the new hidden state and memory."""
    op = array_math
    products = weights[0] @ h
    if cell.kind == "rnn":
        return cell.act(op, 0, gates[0] + products[0]), c
    if cell.kind == "lstm":
        sums = list(gates + products)
        fresh = lstm_memory(cell, op, sums, c, extra.get("p"))
        return lstm_hidden(cell, op, sums, fresh, extra.get("p")), fresh
    update = cell.act(op, 0, gates[0] + products[0])
    reset = cell.act(op, 0, gates[1] + products[1])
    if cell.linear_before_reset:
        candidate = gates[2] + reset * (products[2] + extra["bias"][0] if extra else products[2])
    else:
        candidate = gates[2] + weights[1][0] @ (reset * h)
    return gru_hidden(cell, op, update, candidate, h), c


# ---------------------------------------------------------------- the steps: loops
@primitive(family="recurrent", infer=_steps_type, reference=_steps_numpy, loops=True,
           differentiable=False)
def recurrent_steps(*tensors: Any, kind: str, given: tuple[str, ...], direction: str,
                    functions: tuple[tuple[Chosen, ...], ...], clip: float | None,
                    input_forget: bool, linear_before_reset: bool, batch_first: bool,
                    units: tuple[int, ...], out: tuple[TensorType, ...]) -> Any:
    """the steps of an lstm, gru or rnn whose inputs are multiplied already

    `given` names the tensors: the inputs' part of the gates, the weights as `packed_weights` lays
    them out, and, if there are any, lengths, h, c, p (peepholes) and the bias inside a gru's reset.
    """
    layer = _Layer(kind, given, direction, functions, clip, input_forget, linear_before_reset,
                   batch_first, units, tensors)

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        if layer.batch == 0:
            return Block(())
        named = dict(zip(given, inputs, strict=True))
        if isinstance(layer.batch, int):
            return _Steps(layer, named, outputs, rows_of_tile(kind, layer.batch)).tasks()
        single, several = (_Steps(layer, named, outputs, rows).tasks()
                           for rows in (1, _ROWS_IF_UNKNOWN))
        return If(call("le", as_scalar(layer.batch), 1), single, several)

    return build


def rows_of_tile(kind: str, batch: int) -> int:
    """How many sequences share a tile: as evenly spread as it goes."""
    most = _ROWS[{"lstm": 4, "gru": 3, "rnn": 1}[kind]]
    return -(-batch // -(-batch // most))


class _Steps:
    """The loops over all steps, for tiles of some number of sequences."""

    def __init__(self, layer: _Layer, named: Mapping[str, Buffer], outputs: Sequence[Buffer],
                 rows: int):
        self.layer, self.named, self.rows, self.size = layer, named, rows, layer.hidden
        self.y, *self.last = outputs
        self.blocks = ceildiv(layer.batch, rows)

    def tasks(self) -> Stmt:
        """Blocks of sequences and directions are independent of each other."""
        count = self.blocks * self.layer.directions
        if count == 1:
            return self.sequence(0, 0, "parallel")
        task = fresh_axis("task", count)
        body = self.sequence(task.var, 0, "serial")
        if self.layer.directions == 2:
            body = If(call("lt", as_scalar(task.var), as_scalar(self.blocks)), body,
                      self.sequence(task.var - self.blocks, 1, "serial"))
        return For(task.var, 0, count, body, "parallel")

    def sequence(self, number: Index, d: int, kind: str) -> Stmt:
        """All steps of one block of sequences in one direction."""
        states = self.rows * self.size
        dtype = self.layer.dtype
        task = _Task(self, self.layer.cell(d), d, number * self.rows, kind,
                     Buffer("hidden", dtype, 2 * states), Buffer("memory", dtype, states),
                     Buffer("update", dtype, states), Buffer("reset", dtype, states))
        return task.loops()


@dataclass(frozen=True)
class _Task:
    """One block of sequences in one direction: its state and its loops."""

    steps: _Steps
    cell: Cell
    d: int
    first: Index
    kind: str  # of the loop over blocks of units
    hidden: Buffer  # the state before and after a step, which change places
    memory: Buffer  # an lstm's
    update: Buffer  # a gru's update gate
    reset: Buffer  # a gru's state times its reset gate

    @property
    def live(self) -> Index:
        return minimum(self.steps.rows, self.steps.layer.batch - self.first)

    def loops(self) -> Stmt:
        layer, size = self.steps.layer, self.steps.size
        s = fresh_axis("s", layer.steps)
        body = block(self.start(), For(s.var, 0, layer.steps, block(
            *(self.phase(number, s.var) for number in range(len(self.cell.phases))))),
            self.finish(size))
        used = [self.hidden]
        if self.cell.kind == "lstm":
            used.append(self.memory)
        if len(self.cell.phases) > 1:
            used += [self.update, self.reset]
        for buffer in used:
            body = Alloc(buffer, body)
        return body

    def start(self) -> Stmt:
        """The initial states; rows of the tile without a sequence are zeros."""
        layer, size, rows = self.steps.layer, self.steps.size, self.steps.rows
        q = fresh_axis("q", 2 * rows * size)
        zero = Const(layer.dtype, 0.0)
        stmts: list[Stmt] = [For(q.var, 0, 2 * rows * size, Store(self.hidden, q.var, zero),
                                 "vector")]
        targets = {"h": self.hidden}
        if self.cell.kind == "lstm":
            targets["c"] = self.memory
            stmts.append(For(q.var, 0, rows * size, Store(self.memory, q.var, zero), "vector"))
        row, j = fresh_axis("row", rows), fresh_axis("j", size)
        for name, target in targets.items():
            source = self.steps.named.get(name)
            if source is not None:
                at = layer.state_at(self.first + row.var, self.d)
                stmts.append(For(row.var, 0, self.live, For(j.var, 0, size, Store(
                    target, row.var * size + j.var, source[at + j.var]), "vector")))
        return block(*stmts)

    def finish(self, size: int) -> Stmt:
        """The last states, as results."""
        layer = self.steps.layer
        row, j = fresh_axis("row", self.steps.rows), fresh_axis("j", size)
        at = layer.state_at(self.first + row.var, self.d) + j.var
        newest = layer.steps % 2 * (self.steps.rows * size)
        sources: list[Scalar] = [self.hidden[newest + row.var * size + j.var]]
        if self.cell.kind == "lstm":
            sources.append(self.memory[row.var * size + j.var])
        lengths = self.steps.named.get("lengths")
        if lengths is not None:  # no step, no state: as onnxruntime
            some = call("gt", lengths[self.first + row.var], 0)
            sources = [where_scalar(some, v, Const(layer.dtype, 0.0)) for v in sources]
        return For(row.var, 0, self.live, block(*(
            For(j.var, 0, size, Store(target, at, value), "vector")
            for target, value in zip(self.steps.last, sources, strict=True))))

    # ------------------------------------------------------------ one step
    def phase(self, number: int, s: Index) -> Stmt:
        """Products of the state with some gates' weights, and what becomes of these gates."""
        size, rows = self.steps.size, self.steps.rows
        gates, units = self.cell.phases[number], self.steps.layer.units[number]
        columns = len(gates) * units
        weights = self.steps.named[f"weights{number}"]
        blocks = -(-size // units)
        unit_block = fresh_axis("units", blocks)
        sums = Buffer("sums", self.steps.layer.dtype, rows * columns)
        state, at = (self.reset, 0) if number else (self.hidden, s % 2 * (rows * size))
        product = fma_tile(
            sums, 0, state, at, weights,
            (unit_block.var + self.d * blocks) * (size * columns), size, size, 1, columns, columns,
            rows, columns, False)
        row, u = fresh_axis("row", rows), fresh_axis("u", units)
        first_unit = unit_block.var * units
        width: Index = units if size % units == 0 else minimum(units, size - first_unit)

        def each_unit(stmts: Callable[[_Unit], list[Stmt]], t: Index | Scalar) -> Stmt:
            unit = _Unit(self, s, t, row.var, first_unit + u.var, gates,
                         [sums[row.var * columns + k * units + u.var] for k in range(len(gates))])
            return For(u.var, 0, width, block(*stmts(unit)), "vector")

        body = For(row.var, 0, self.live, self.one_row(number, s, row.var, each_unit))
        grain = -(-_TASK_PRODUCTS // (rows * size * columns))
        return For(unit_block.var, 0, blocks, Alloc(sums, block(product, body)), self.kind, grain)

    def one_row(self, number: int, s: Index, row: Index,
                each_unit: Callable[[Callable[[_Unit], list[Stmt]], Index | Scalar], Stmt]) -> Stmt:
        layer = self.steps.layer
        backwards = layer.backwards(self.d)
        advance = _advance_first if number == 0 else _advance_last
        lengths = self.steps.named.get("lengths")
        if lengths is None:
            return each_unit(advance, layer.steps - 1 - s if backwards else s)
        length = call("min", cast_scalar(lengths[self.first + row], int64), as_scalar(layer.steps))
        t = length - 1 - as_scalar(s) if backwards else s
        dead = _keep if number == len(self.cell.phases) - 1 else None
        return If(call("lt", as_scalar(s), length), each_unit(advance, t),
                  None if dead is None else each_unit(dead, s))


@dataclass(frozen=True)
class _Unit:
    """One hidden unit of one sequence in one step."""

    task: _Task
    s: Index
    t: Index | Scalar  # the step as the inputs count them
    row: Index
    j: Index
    gates: tuple[int, ...]
    sums: Sequence[Scalar]

    @property
    def n(self) -> Index:
        return self.task.first + self.row

    def given(self, gate: int) -> Scalar:
        """The inputs' part of a gate."""
        steps = self.task.steps
        at = steps.layer.gates_at(self.t, self.n, self.task.d)
        return steps.named["gates"][_plus(at, gate * steps.size + self.j)]

    def pre(self) -> list[Scalar]:
        """The gates of this phase before their functions."""
        return [self.given(g) + x for g, x in zip(self.gates, self.sums, strict=True)]

    def place(self, buffer: Buffer, half: Index = 0) -> tuple[Buffer, Index]:
        steps = self.task.steps
        return buffer, (half * steps.rows + self.row) * steps.size + self.j

    def old(self) -> Scalar:
        buffer, at = self.place(self.task.hidden, self.s % 2)
        return buffer[at]

    def extra(self, name: str, which: int) -> Scalar:
        steps = self.task.steps
        count = 3 if name == "p" else 1
        return steps.named[name][(self.task.d * count + which) * steps.size + self.j]

    def result(self, h: Scalar) -> list[Stmt]:
        """Stores of the new hidden state."""
        steps = self.task.steps
        buffer, at = self.place(self.task.hidden, (self.s + 1) % 2)
        y = _plus(steps.layer.y_at(self.t, self.n, self.task.d), self.j)
        return [Store(buffer, at, h), Store(steps.y, y, buffer[at])]


def _plus(at: Any, offset: Index) -> Any:
    return at + as_scalar(offset) if isinstance(at, Scalar) else at + offset


def _advance_first(unit: _Unit) -> list[Stmt]:
    """What becomes of the first products: all of a step, but for a gru with an inner reset."""
    cell, task, op = unit.task.cell, unit.task, call
    pre = unit.pre()
    if cell.kind == "rnn":
        return unit.result(cell.act(op, 0, pre[0]))
    if cell.kind == "lstm":
        peephole = [unit.extra("p", k) for k in range(3)] if "p" in task.steps.named else None
        memory, at = unit.place(task.memory)
        fresh = lstm_memory(cell, op, pre, memory[at], peephole)
        return [Store(memory, at, fresh),
                *unit.result(lstm_hidden(cell, op, pre, memory[at], peephole))]
    update, reset = cell.act(op, 0, pre[0]), cell.act(op, 0, pre[1])
    if cell.linear_before_reset:
        product = unit.sums[2]
        if "bias" in task.steps.named:
            product = product + unit.extra("bias", 0)
        return unit.result(gru_hidden(cell, op, update, unit.given(2) + reset * product,
                                       unit.old()))
    return [Store(*unit.place(task.update), update),
            Store(*unit.place(task.reset), reset * unit.old())]


def _advance_last(unit: _Unit) -> list[Stmt]:
    """The second half of a gru's step: the candidate, from the state after its reset."""
    buffer, at = unit.place(unit.task.update)
    return unit.result(gru_hidden(unit.task.cell, call, buffer[at], unit.pre()[0], unit.old()))


def _keep(unit: _Unit) -> list[Stmt]:
    """A sequence that has ended keeps its state; its results are zeros."""
    buffer, at = unit.place(unit.task.hidden, (unit.s + 1) % 2)
    steps = unit.task.steps
    y = steps.layer.y_at(unit.t, unit.n, unit.task.d) + unit.j
    return [Store(buffer, at, unit.old()), Store(steps.y, y, Const(steps.layer.dtype, 0.0))]
