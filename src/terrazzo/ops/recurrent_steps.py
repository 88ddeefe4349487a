"""The steps of recurrent layers: the kernel that runs a cell over time.

One kernel is a loop over time, in it the products of the hidden state with the recurrent weights,
and the gates. The weights are laid out so that one tile computes all gates of a few hidden units;
what becomes of the gates happens right there, while the sums are in the cache. Threads share the
units of each step, so that each keeps its part of the weights in its own cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from terrazzo.base.scalar import Const, Scalar, as_scalar, call
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.scalar import where as where_scalar
from terrazzo.base.shapes import Shape, dims_text
from terrazzo.dtypes import DType, int64
from terrazzo.errors import ShapeError, user_location
from terrazzo.expr.ir import fresh_axis
from terrazzo.graph.ir import TensorType
from terrazzo.index import Index, ceildiv, minimum
from terrazzo.index.guards import all_equal, known
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

# Sequences of a tile, by the number of gates: as many as registers hold sums for.
_ROWS = {1: 6, 2: 6, 3: 8, 4: 6}
_ROWS_IF_UNKNOWN = 4
_GROUP_ROWS = 32  # sequences that a piece of work takes at most
_TASK_WEIGHTS = 1 << 16  # weights that are worth a task of their own
_WORTH_SHARING = 1 << 17  # multiplications of a step, below which one thread does them all


# ---------------------------------------------------------------- the steps: types, reference
@dataclass(frozen=True, eq=False)
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
        size = known(self.named["weights0"].shape[2])
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
    layer = _Layer(**attrs, types=types)
    cell, size = layer.cell(0), layer.hidden
    expected: dict[str, Shape] = {
        "gates": (*layer.named["gates"].shape[:2], layer.directions * cell.gates * size)}
    for k, (gates, units) in enumerate(zip(cell.phases, layer.units, strict=True)):
        expected[f"weights{k}"] = (layer.directions, -(-size // units), size, len(gates), units)
    for name, shape in expected.items():
        if not all_equal(layer.named[name].shape, shape):
            raise ShapeError(f"recurrent_steps needs {name} {dims_text(shape)}, not "
                             f"{dims_text(layer.named[name].shape)}", where=user_location())
    return layer.out_types()


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
            return _Steps(layer, named, outputs, rows_of_tile(kind, layer.batch)).loops()
        single, several = (_Steps(layer, named, outputs, rows).loops()
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
        total, dtype = layer.directions * self.states, layer.dtype
        self.hidden = Buffer("hidden", dtype, 2 * total)  # before and after a step, in turns
        self.memory = Buffer("memory", dtype, total)  # an lstm's
        self.update = Buffer("update", dtype, total)  # a gru's update gate
        self.reset = Buffer("reset", dtype, total)  # a gru's state times its reset gate

    @property
    def tiles(self) -> Index:
        return ceildiv(self.layer.batch, self.rows)

    @property
    def tiles_of_group(self) -> int:
        return -(-_GROUP_ROWS // self.rows)

    @property
    def groups(self) -> Index:
        return ceildiv(self.tiles, self.tiles_of_group)

    @property
    def states(self) -> Index:
        """The states of a direction; tiles reach beyond the last sequence."""
        return self.tiles * self.rows * self.size

    def loops(self) -> Stmt:
        """Everything: initial states, steps, results."""
        cell = self.layer.cell(0)
        s = fresh_axis("s", self.layer.steps)
        body = block(self.start(), For(s.var, 0, self.layer.steps, block(
            *(self.phase(number, s.var) for number in range(len(cell.phases))))), self.finish())
        used = [self.hidden]
        if cell.kind == "lstm":
            used.append(self.memory)
        if len(cell.phases) > 1:
            used += [self.update, self.reset]
        for buffer in used:
            body = Alloc(buffer, body)
        return body

    def state_at(self, d: int, n: Index, half: Index = 0) -> Index:
        return (half * self.layer.directions + d) * self.states + n * self.size

    def start(self) -> Stmt:
        """The initial states; rows of tiles without a sequence are zeros."""
        layer, size = self.layer, self.size
        zero = Const(layer.dtype, 0.0)
        targets = {"h": self.hidden}
        if layer.kind == "lstm":
            targets["c"] = self.memory
        stmts: list[Stmt] = []
        for name, target in targets.items():
            q = fresh_axis("q", target.size)
            stmts.append(For(q.var, 0, target.size, Store(target, q.var, zero), "vector"))
            source = self.named.get(name)
            for d in range(layer.directions) if source is not None else ():
                assert source is not None
                n, j = fresh_axis("n", layer.batch), fresh_axis("j", size)
                stmts.append(For(n.var, 0, layer.batch, For(j.var, 0, size, Store(
                    target, self.state_at(d, n.var) + j.var,
                    source[layer.state_at(n.var, d) + j.var]), "vector")))
        return block(*stmts)

    def finish(self) -> Stmt:
        """The last states, as results."""
        layer, size = self.layer, self.size
        stmts: list[Stmt] = []
        for d in range(layer.directions):
            n, j = fresh_axis("n", layer.batch), fresh_axis("j", size)
            sources: list[Scalar] = [
                self.hidden[self.state_at(d, n.var, layer.steps % 2) + j.var]]
            if layer.kind == "lstm":
                sources.append(self.memory[self.state_at(d, n.var) + j.var])
            lengths = self.named.get("lengths")
            if lengths is not None:  # no step, no state: as onnxruntime
                some = call("gt", lengths[n.var], 0)
                sources = [where_scalar(some, v, Const(layer.dtype, 0.0)) for v in sources]
            stmts.append(For(n.var, 0, layer.batch, block(*(
                For(j.var, 0, size, Store(target, layer.state_at(n.var, d) + j.var, value),
                    "vector") for target, value in zip(self.last, sources, strict=True)))))
        return block(*stmts)

    # ------------------------------------------------------------ one step
    def phase(self, number: int, s: Index) -> Stmt:
        """Products of the state with some gates' weights, and what becomes of these gates.

        The pieces of this work are directions, blocks of units, and groups of sequences. A chunk of
        pieces stays with the same weights, which its core then keeps in its cache.
        """
        units = self.layer.units[number]
        columns = len(self.layer.cell(0).phases[number]) * units
        blocks = -(-self.size // units)
        pieces = blocks * self.groups
        piece = fresh_axis("piece", pieces * self.layer.directions)

        def body(d: int, at: Index) -> Stmt:
            group = at % self.groups * self.tiles_of_group
            tile = fresh_axis("tile", self.tiles)
            sums = Buffer("sums", self.layer.dtype, self.rows * columns)
            work = _Piece(self, self.layer.cell(d), d, s, number, tile.var * self.rows,
                          at // self.groups, sums)
            return Alloc(sums, For(tile.var, group, minimum(self.tiles, group
                                                            + self.tiles_of_group), work.stmt()))

        every = body(0, piece.var)
        if self.layer.directions == 2:
            every = If(call("lt", as_scalar(piece.var), as_scalar(pieces)), every,
                       body(1, piece.var - pieces))
        weights = self.size * columns
        rows = self.layer.batch if isinstance(self.layer.batch, int) else self.rows
        small = isinstance(piece.hi, int) and piece.hi * weights * rows < _WORTH_SHARING
        return For(piece.var, 0, piece.hi, every, "serial" if small else "parallel",
                   -(-_TASK_WEIGHTS // weights))


class _Piece(NamedTuple):
    """Some hidden units of the sequences of a tile, in one direction and one step."""

    steps: _Steps
    cell: Cell
    d: int
    s: Index
    number: int  # of the phase
    first: Index  # sequence
    block: Index  # of units
    sums: Buffer

    @property
    def gates(self) -> tuple[int, ...]:
        return self.cell.phases[self.number]

    @property
    def units(self) -> int:
        return self.steps.layer.units[self.number]

    def stmt(self) -> Stmt:
        steps, size = self.steps, self.steps.size
        batch, rows, columns = steps.layer.batch, steps.rows, len(self.gates) * self.units
        blocks = -(-size // self.units)
        state, half = (steps.reset, 0) if self.number else (steps.hidden, self.s % 2)
        product = fma_tile(
            self.sums, 0, state, steps.state_at(self.d, self.first, half),
            steps.named[f"weights{self.number}"], (self.block + self.d * blocks) * (size * columns),
            size, size, 1, columns, columns, rows, columns, False)
        row = fresh_axis("row", rows)
        live: Index = rows
        if not isinstance(batch, int) or batch % rows:
            live = minimum(rows, batch - self.first)
        return block(product, For(row.var, 0, live, self.one_row(row.var)))

    def one_row(self, row: Index) -> Stmt:
        """What becomes of the sums of one sequence, if it has not ended."""
        layer = self.steps.layer
        backwards = layer.backwards(self.d)
        advance = _advance_last if self.number else _advance_first
        lengths = self.steps.named.get("lengths")
        if lengths is None:
            return self.each_unit(row, advance, layer.steps - 1 - self.s if backwards else self.s)
        length = call("min", cast_scalar(lengths[self.first + row], int64), as_scalar(layer.steps))
        t = length - 1 - as_scalar(self.s) if backwards else self.s
        last = self.number == len(self.cell.phases) - 1
        return If(call("lt", as_scalar(self.s), length), self.each_unit(row, advance, t),
                  self.each_unit(row, _keep, self.s) if last else None)

    def each_unit(self, row: Index, stmts: Callable[[_Unit], list[Stmt]], t: Index | Scalar
                  ) -> Stmt:
        size, units = self.steps.size, self.units
        u = fresh_axis("u", units)
        start = self.block * units
        sums = [self.sums[(row * len(self.gates) + k) * units + u.var]
                for k in range(len(self.gates))]
        unit = _Unit(self, t, self.first + row, start + u.var, sums)
        width: Index = units if size % units == 0 else minimum(units, size - start)
        return For(u.var, 0, width, block(*stmts(unit)), "vector")


class _Unit(NamedTuple):
    """One hidden unit of one sequence in one step."""

    piece: _Piece
    t: Index | Scalar  # the step as the inputs count them
    n: Index
    j: Index
    sums: Sequence[Scalar]

    @property
    def steps(self) -> _Steps:
        return self.piece.steps

    def given(self, gate: int) -> Scalar:
        """The inputs' part of a gate."""
        at = self.steps.layer.gates_at(self.t, self.n, self.piece.d)
        return self.steps.named["gates"][_plus(at, gate * self.steps.size + self.j)]

    def pre(self) -> list[Scalar]:
        """The gates of this phase before their functions."""
        return [self.given(g) + x for g, x in zip(self.piece.gates, self.sums, strict=True)]

    def place(self, buffer: Buffer, half: Index = 0) -> tuple[Buffer, Index]:
        return buffer, self.steps.state_at(self.piece.d, self.n, half) + self.j

    def old(self) -> Scalar:
        buffer, at = self.place(self.steps.hidden, self.piece.s % 2)
        return buffer[at]

    def extra(self, name: str, which: int) -> Scalar:
        count = 3 if name == "p" else 1
        return self.steps.named[name][(self.piece.d * count + which) * self.steps.size + self.j]

    def result(self, h: Scalar) -> list[Stmt]:
        """Stores of the new hidden state."""
        buffer, at = self.place(self.steps.hidden, (self.piece.s + 1) % 2)
        y = _plus(self.steps.layer.y_at(self.t, self.n, self.piece.d), self.j)
        return [Store(buffer, at, h), Store(self.steps.y, y, buffer[at])]


def _plus(at: Any, offset: Index) -> Any:
    return at + as_scalar(offset) if isinstance(at, Scalar) else at + offset


def _advance_first(unit: _Unit) -> list[Stmt]:
    """What becomes of the first products: all of a step, but for a gru with an inner reset."""
    cell, steps, op = unit.piece.cell, unit.steps, call
    pre = unit.pre()
    if cell.kind == "rnn":
        return unit.result(cell.act(op, 0, pre[0]))
    if cell.kind == "lstm":
        peephole = [unit.extra("p", k) for k in range(3)] if "p" in steps.named else None
        memory, at = unit.place(steps.memory)
        fresh = lstm_memory(cell, op, pre, memory[at], peephole)
        return [Store(memory, at, fresh),
                *unit.result(lstm_hidden(cell, op, pre, memory[at], peephole))]
    update, reset = cell.act(op, 0, pre[0]), cell.act(op, 0, pre[1])
    if cell.linear_before_reset:
        product = unit.sums[2]
        if "bias" in steps.named:
            product = product + unit.extra("bias", 0)
        return unit.result(gru_hidden(cell, op, update, unit.given(2) + reset * product,
                                       unit.old()))
    return [Store(*unit.place(steps.update), update),
            Store(*unit.place(steps.reset), reset * unit.old())]


def _advance_last(unit: _Unit) -> list[Stmt]:
    """The second half of a gru's step: the candidate, from the state after its reset."""
    buffer, at = unit.place(unit.steps.update)
    return unit.result(gru_hidden(unit.piece.cell, call, buffer[at], unit.pre()[0], unit.old()))


def _keep(unit: _Unit) -> list[Stmt]:
    """A sequence that has ended keeps its state; its results are zeros."""
    steps = unit.steps
    buffer, at = unit.place(steps.hidden, (unit.piece.s + 1) % 2)
    y = steps.layer.y_at(unit.t, unit.n, unit.piece.d) + unit.j
    return [Store(buffer, at, unit.old()), Store(steps.y, y, Const(steps.layer.dtype, 0.0))]
