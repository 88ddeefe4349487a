"""Loops, branches, early returns and calls.

What a loop carries from one iteration to the next lies in local buffers, except for numbers and
pointers that grow by the same amount each time: those are expressions over the loop's variable, so
that addresses inside stay as plain as they were outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from terrazzo.base.scalar import Const, FromIndex, Load, Scalar, call, cast, loads
from terrazzo.dtypes import bool_, int64
from terrazzo.index import Index, Var, bounds, ceildiv, maximum
from terrazzo.loop.ir import Buffer, For, If, Store, While
from terrazzo.triton_cpu.frontend.lower import Handler, Lowering
from terrazzo.triton_cpu.frontend.nest import Write
from terrazzo.triton_cpu.frontend.patience import Patience
from terrazzo.triton_cpu.frontend.pointers import address, kept, memory_type
from terrazzo.triton_cpu.frontend.quotients import not_negative
from terrazzo.triton_cpu.frontend.state import Lazy
from terrazzo.triton_cpu.frontend.ttir import Block, Op, Type, walk
from terrazzo.triton_cpu.frontend.uses import LAZY, find_uses
from terrazzo.triton_cpu.frontend.values import (
    Indices,
    Pointer,
    Value,
    constant_value,
    dtype_of,
    flat,
)
from terrazzo.triton_cpu.frontend.waiting import waits


def blocks(lowering: Lowering, all_blocks: Sequence[Block],
           returned: Callable[[Op], None] = lambda end: None) -> None:
    """A function's blocks: jumps go forward only, so each becomes a branch of an If."""
    by_label = {b.label: b for b in all_blocks}

    def follow(block: Block) -> None:
        end = lowering.block(block)
        if end is None:
            return
        if not end.successors:
            returned(end)
            return
        if end.name == "cf.br":
            jump(end.successors[0], end.operands)
            return
        _, yes_count, no_count = end.attrs["operandSegmentSizes"]
        yes = end.operands[1: 1 + yes_count]
        no = end.operands[1 + yes_count: 1 + yes_count + no_count]
        condition = lowering.env[end.operands[0]].scalar()
        lazy, done = lowering.lazy.copy(), set(lowering.done)
        then = lowering.inside(lambda: jump(end.successors[0], yes), not_negative(condition))
        # Both ways may lead through the same blocks.
        lowering.lazy, lowering.done = lazy, done
        orelse = lowering.inside(lambda: jump(end.successors[1], no),
                                 not_negative(condition, holds=False))
        lowering.emit(If(condition, then, orelse))

    def jump(label: str, operands: Sequence[str]) -> None:
        target = by_label[label]
        for (name, _), operand in zip(target.args, operands, strict=True):
            lowering.env[name] = lowering.env[operand]
        follow(target)

    follow(all_blocks[0])


# ---------------------------------------------------------------- what is carried
class Carried:
    """A value that lives in a buffer across iterations; of pointers, the offsets do.

    Where a pointer may lead into one tensor or another, the address does.
    """

    def __init__(self, lowering: Lowering, type_: Type, name: str, init: Value | None):
        self.lowering, self.type = lowering, type_
        self.base: Buffer | None = None
        self.absolute = type_.pointer and lowering.uses.roots.get(name) is None
        self.buffer = lowering.local(name.strip("%").replace("#", "_"), memory_type(type_),
                                     type_.count)
        if init is not None:
            self.store(init)

    def element(self, value: Value, i: Indices) -> Scalar:
        if not self.type.pointer:
            return value.scalar(i)
        pointer = value.pointer(i)
        if self.absolute:
            return address(self.lowering, pointer)
        assert self.base in (None, pointer.buffer), "a pointer changes from one tensor to another"
        self.base = pointer.buffer
        return pointer.offset

    def store(self, value: Value, target: Buffer | None = None) -> None:
        buffer, shape = target or self.buffer, self.type.shape
        if value.buffer is buffer:
            return
        self.lowering.emit(self.lowering.nest(shape, lambda i: [
            Write(buffer, flat(shape, i), self.element(value, i))]))

    @property
    def value(self) -> Value:
        shape, buffer = self.type.shape, self.buffer
        if not self.type.pointer:
            return self.lowering.stored(self.type, buffer)
        if self.absolute:
            return Value(self.type, lambda i: kept(
                self.lowering, self.type, buffer, flat(shape, i)))
        base = self.base
        assert base is not None
        return Value(self.type, lambda i: Pointer(base, buffer[flat(shape, i)]))


def assign(lowering: Lowering, carried: Sequence[Carried], values: Sequence[Value]) -> None:
    """Store new values as if all at once: none may overwrite what another still reads."""
    waiting = [(c, v) for c, v in zip(carried, values, strict=True) if v.buffer is not c.buffer]
    reads = [_reads(c, v) for c, v in waiting]
    shadows: list[tuple[Carried, Buffer]] = []
    for n, (c, v) in enumerate(waiting):
        read_later = any(c.buffer in r for r in reads[n + 1:])
        moved = c.buffer in reads[n] and not _in_place(c, v)
        if read_later or moved:
            shadow = lowering.local("next", c.buffer.dtype, c.type.count)
            c.store(v, shadow)
            shadows.append((c, shadow))
        else:
            c.store(v)
    for c, shadow in shadows:
        lowering.emit(lowering.nest(c.type.shape, partial(_copy, c, shadow)))


def _copy(carried: Carried, source: Buffer, i: Indices) -> list[Write]:
    place = flat(carried.type.shape, i)
    return [Write(carried.buffer, place, source[place])]


def _probe(carried: Carried, value: Value) -> tuple[Scalar, Indices]:
    shape = carried.type.shape
    i = tuple(carried.lowering.fresh("probe", 0, n - 1) if n > 1 else 0 for n in shape)
    return carried.element(value, i), i


def _reads(carried: Carried, value: Value) -> set[Buffer]:
    return {n.source for n in loads(_probe(carried, value)[0])}


def _in_place(carried: Carried, value: Value) -> bool:
    """Whether each new element depends on the old one at the same place only."""
    element, i = _probe(carried, value)
    place = flat(carried.type.shape, i)
    return all(_at(n) == place for n in loads(element) if n.source is carried.buffer)


def _at(load: Load) -> Index | None:
    index = load.indices[0]
    return None if isinstance(index, Scalar) else index


# ---------------------------------------------------------------- for
PRODUCTS = frozenset({"tt.dot", "tt.dot_scaled"})  # they can add to a tile where it is carried
SUMS = frozenset({"f32", "f64", "i32"})  # of these types


def _for(lowering: Lowering, op: Op) -> None:
    body = op.regions[0][0]
    end = body.ops[-1]
    first, last, step = (lowering.index(lowering.operand(op, n)) for n in range(3))
    count = maximum(ceildiv(last - first, step), 0)
    highest = bounds(count)[1]
    if not isinstance(count, int) and not isinstance(count, Var):
        named = lowering.fresh("count", 0, highest)
        lowering.items.append((named, FromIndex(int64, count)))
        count = named
    turn = lowering.fresh("turn", 0, None if highest is None else max(highest - 1, 0))
    counter, *args = body.args
    lowering.env[counter[0]] = constant_value(
        counter[1], FromIndex(dtype_of(counter[1].elem), first + turn * step))
    made = {r: o for o in body.ops for r in o.results}
    own = {name for name, _ in body.args}
    grows: dict[int, Value] = {}
    carried: dict[int, Carried] = {}
    inits = [lowering.operand(op, 3 + n) for n in range(len(args))]
    for n, (name, type_) in enumerate(args):
        amount = _growth(name, type_, end.operands[n], made, own)
        if amount is not None:
            for helper in amount[1]:
                lowering.op(helper)
            grows[n] = lowering.env[amount[0]]
            lowering.env[name] = _grown(inits[n], grows[n], turn)
    for n, (name, type_) in enumerate(args):
        if n not in grows:
            carried[n] = Carried(lowering, type_, name, inits[n])
            lowering.env[name] = carried[n].value
            result = made.get(end.operands[n])
            if (result is not None and result.name in PRODUCTS
                    and type_.elem in SUMS
                    and lowering.uses.count.get(end.operands[n]) == 1
                    and lowering.uses.sinks.get(name, set()) <= {result}):
                lowering.memory.inplace[end.operands[n]] = carried[n].buffer
    outer = lowering.lazy.copy()

    def run() -> None:
        lowering.block(body)
        assign(lowering, list(carried.values()),
               [lowering.env[end.operands[n]] for n in carried])

    turns, lowering.turns = lowering.turns, lowering.turns * count
    inner = lowering.inside(run)
    lowering.turns = turns
    lowering.lazy = outer
    lowering.emit(For(turn, 0, count, inner, hoist=may_hoist(op)))
    for n, name in enumerate(op.results):
        lowering.env[name] = (_grown(inits[n], grows[n], count) if n in grows
                              else carried[n].value)


def may_hoist(loop: Op) -> bool:
    """Whether what stays the same may leave a loop: `disable_licm` forbids it by an annotation."""
    return "llvm.loop_annotation" not in loop.attrs


def _growth(name: str, type_: Type, new: str, made: dict[str, Op], own: set[str]
            ) -> tuple[str, list[Op]] | None:
    """What is added in each iteration, if it is always the same, and what must be made for it."""
    op = made.get(new)
    if op is None or op.name not in ("tt.addptr", "arith.addi") or name not in op.operands:
        return None
    if not type_.pointer and type_.elem not in ("i32", "i64"):
        return None
    step = op.operands[1] if op.operands[0] == name else op.operands[0]
    if step == name:
        return None
    helpers = _invariant(step, made, own)
    return None if helpers is None else (step, helpers)


def _invariant(name: str, made: dict[str, Op], own: set[str]) -> list[Op] | None:
    """The operations of the loop that a value needs, if none of them changes in it."""
    op = made.get(name)
    if op is None:
        return None if name in own else []
    if op.name not in LAZY or op.name == "tt.load":
        return None
    needed: list[Op] = []
    for operand in op.operands:
        inner = _invariant(operand, made, own)
        if inner is None:
            return None
        needed += [o for o in inner if o not in needed]
    return [*needed, op]


def _grown(init: Value, step: Value, turns: Index) -> Value:
    def element(i: Indices) -> Scalar | Pointer:
        start = init.at(i)
        amount = step.scalar(i)
        times = FromIndex(amount.dtype, turns)
        added = amount if isinstance(turns, int) and turns == 1 else (
            call("mul", amount, times))
        if isinstance(start, Pointer):
            return start.moved(cast(added, int64))
        return call("add", start, added)

    return Value(init.type, element)


# ---------------------------------------------------------------- while, if, call
def _while(lowering: Lowering, op: Op) -> None:
    before, after = op.regions[0][0], op.regions[1][0]
    carried = [Carried(lowering, t, name, lowering.env[o])
               for (name, t), o in zip(before.args, op.operands, strict=True)]
    going = lowering.local("going", dtype_of("i1"), 1)
    patience = Patience(lowering, op) if waits(op) else None
    passed: list[Carried] = []

    def test() -> None:
        lowering.done.difference_update(walk([before]))  # it is written twice
        for c, (name, _) in zip(carried, before.args, strict=True):
            lowering.env[name] = c.value
        end = lowering.block(before)
        assert end is not None and end.name == "scf.condition"
        lowering.emit(lowering.nest((), lambda i: [
            Write(going, 0, lowering.env[end.operands[0]].scalar())]))
        values = [lowering.env[o] for o in end.operands[1:]]
        if not passed:
            passed.extend(Carried(lowering, t, name, None) for name, t in after.args)
        for c, v in zip(passed, values, strict=True):
            c.store(v)

    def turn() -> None:
        for c, (name, _) in zip(passed, after.args, strict=True):
            lowering.env[name] = c.value
        end = lowering.block(after)
        assert end is not None
        assign(lowering, carried, [lowering.env[o] for o in end.operands])
        if patience is not None:
            lowering.emit(patience.turn())
        test()
        if patience is not None:
            lowering.emit(If(patience.over[0], Store(going, 0, Const(bool_, False))))

    if patience is not None:
        lowering.emit(patience.begin())
    test()
    outer = lowering.lazy.copy()
    body = lowering.inside(turn)
    lowering.lazy = outer
    lowering.emit(While(going[0], body, may_hoist(op)))
    for c, name in zip(passed, op.results, strict=True):
        lowering.env[name] = c.value


def _if(lowering: Lowering, op: Op) -> None:
    results = [Carried(lowering, t, name, None)
               for name, t in zip(op.results, op.types, strict=True)]

    def branch(region: list[Block]) -> None:
        if not region:
            return
        end = lowering.block(region[0])
        for c, operand in zip(results, [] if end is None else end.operands, strict=True):
            c.store(lowering.env[operand])

    condition = lowering.operand(op, 0).scalar()
    outer = lowering.lazy.copy()
    then = lowering.inside(lambda: branch(op.regions[0]), not_negative(condition))
    lowering.lazy = outer.copy()
    orelse = lowering.inside(lambda: branch(op.regions[1]), not_negative(
        condition, holds=False)) if op.regions[1] else None
    lowering.lazy = outer
    lowering.emit(If(condition, then, orelse))
    for c, name in zip(results, op.results, strict=True):
        lowering.env[name] = c.value


def _call(lowering: Lowering, op: Op) -> None:
    """A function that Triton did not inline is inlined here."""
    body = lowering.module.callee(op)
    results = [Carried(lowering, t, name, None)
               for name, t in zip(op.results, op.types, strict=True)]
    outer = lowering.env, lowering.uses, lowering.lazy, lowering.done
    lowering.env = {name: lowering.env[operand]
                    for (name, _), operand in zip(body[0].args, op.operands, strict=True)}
    lowering.uses, lowering.lazy, lowering.done = find_uses(body), Lazy(), set()

    def returned(end: Op) -> None:
        for c, operand in zip(results, end.operands, strict=True):
            c.store(lowering.env[operand])

    blocks(lowering, body, returned)
    lowering.env, lowering.uses, lowering.lazy, lowering.done = outer
    for c, name in zip(results, op.results, strict=True):
        lowering.env[name] = c.value


HANDLERS: dict[str, Handler] = {
    "scf.for": _for, "scf.while": _while, "scf.if": _if, "tt.call": _call,
}
SINKS = frozenset(HANDLERS)
