"""TZ_SANITIZE=1: every access of a kernel to memory is checked before it happens.

Each load, store and atomic becomes a loop over single elements. An element that its mask leaves out
is never looked at. For the others the index is checked against the tensor's storage; what lies
outside is reported and not touched. A shadow of each tensor remembers which program wrote an
element, so a second writer is found (as in Eraser and FastTrack, with one clock for all atomics: a
program that used an atomic after its write, as one that frees a lock does, has handed the element
on to those that use one later). Another shadow remembers which elements of memory from
`torch.empty` have been written at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from terrazzo.base.scalar import Call, Const, FromIndex, Scalar, call, cast, children, where
from terrazzo.dtypes import bool_, int64, uint8
from terrazzo.index import Index, Var
from terrazzo.loop.ir import Atomic, Buffer, For, If, Let, Stmt, Store, block
from terrazzo.triton_cpu.frontend import reports
from terrazzo.triton_cpu.frontend.elementwise import RULES, constant
from terrazzo.triton_cpu.frontend.lower import Handler, Lowering
from terrazzo.triton_cpu.frontend.lower_memory import only_alive
from terrazzo.triton_cpu.frontend.nest import Write
from terrazzo.triton_cpu.frontend.pointers import ANYWHERE, memory
from terrazzo.triton_cpu.frontend.reports import (
    CLOCK,
    GRANULE,
    HIGH,
    LAST,
    LOW,
    WRITERS,
    WRITTEN,
    Area,
    Launch,
    Record,
    lane_text,
    shorter,
    word,
)
from terrazzo.triton_cpu.frontend.ttir import Op, Type, walk
from terrazzo.triton_cpu.frontend.values import Indices, Value, dtype_of, flat

OUTSIDE, MISALIGNED, UNWRITTEN, TWICE, TWICE_THE_SAME, BY_ZERO = range(6)  # what can be wrong
DIVISIONS = ("arith.divsi", "arith.divui", "arith.remsi", "arith.remui", "arith.ceildivsi",
             "arith.floordivsi")
ATOMICS = frozenset({"tt.atomic_rmw", "tt.atomic_cas", "tt.atomic_load", "tt.atomic_store",
                     "tt.atomic_poll"})
PROGRAM_BITS = 32  # of a word of the writers' shadow; the clock has the rest


# ---------------------------------------------------------------- in the kernel
class Sanitizer:
    """Lowers what touches memory in a kernel with checks around it."""

    def __init__(self, lowering: Lowering):
        self.lowering = lowering
        self.report = reports.of(lowering)
        self.divisions: dict[int, tuple[Scalar, Scalar, Op]] = {}  # quotient, divisor
        self.stores: dict[int, int] = {}  # the smallest element stored through an argument
        self.anywhere = False  # whether it writes through pointers that come from no argument
        self.sites: dict[tuple[Op, str, int], int] = {}
        self.before = lowering.local("before", int64, 1)
        self.mine: Buffer | None = None  # the clock at the program's latest atomic
        if any(op.name in ATOMICS for f in lowering.module.functions.values()
               for region in f.regions for op in walk(region)):
            self.mine = lowering.local("mine", int64, 1)
            lowering.watch.prologue.append(Store(self.mine, 0, word(0)))
        self.handlers: dict[str, Handler] = {
            "tt.load": self.load, "tt.store": self.store, **dict.fromkeys(DIVISIONS, self.division)}

    def table(self) -> dict[str, Any]:
        """What the launcher must know beyond the sites."""
        return {"sanitized": True, "anywhere": self.anywhere,
                "stores": {str(n): size for n, size in self.stores.items()}}

    # ------------------------------------------------------------ arithmetic
    def division(self, lowering: Lowering, op: Op) -> None:
        """An integer division stays an expression, so that its lanes are known where it is used."""
        numerator, divisor = (lowering.operand(op, n) for n in (0, 1))
        rule = RULES[op.name]

        def element(i: Indices) -> Scalar:
            by = divisor.scalar(i)
            made = rule(op, [numerator.scalar(i), by])
            if not (isinstance(by, Const) and by.value):
                self.divisions[id(made)] = made, by, op
            return made

        value = lowering.define(op, element)
        value.weight = 1 + numerator.weight + divisor.weight

    def zeros_in(self, root: Scalar) -> list[tuple[Scalar, Op]]:
        """When an address divides by zero, and where."""
        zero: list[tuple[Scalar, Op]] = []
        seen: set[int] = set()
        todo: list[tuple[Scalar, Scalar | None]] = [(root, None)]
        while todo:
            node, guard = todo.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if id(node) in self.divisions:
                _, by, op = self.divisions[id(node)]
                zero.append((_both(guard, call("eq", by, Const(by.dtype, 0))), op))
            if isinstance(node, Call) and node.op == "where":
                condition, yes, no = node.args
                todo += [(condition, guard), (yes, _both(guard, condition)),
                         (no, _both(guard, call("not", condition)))]
            else:
                todo += [(child, guard) for child in children(node)]
        return zero

    # ------------------------------------------------------------ one access
    def site(self, op: Op, kind: str, type_: Type, argument: int) -> int:
        """The site of an access, or of a division in its address."""
        key = op, kind, argument  # a function that is called twice has two sites
        if key not in self.sites:
            own = self.lowering.module.entry.regions[0][0].args[argument][1].elem
            self.sites[key] = self.report.site(
                kind, self.lowering.module.where(op), argument=argument, shape=list(type_.shape),
                size=dtype_of(type_.elem).itemsize, itemsize=dtype_of(own).itemsize)
        return self.sites[key]

    def access(self, op: Op, kind: str, pointers: Value, mask: Value | None, reads: bool,
               touch: Callable[[Indices, Buffer, Index], Stmt]) -> None:
        """For each element that the mask allows: the checks, then the statement that touches it."""
        lowering, report, type_ = self.lowering, self.report, pointers.type
        size = dtype_of(type_.elem).itemsize
        argument = lowering.signature.argument_of(lowering.base(pointers))
        known: list[tuple[Var, Scalar]] = []

        def named(name: str, value: Scalar) -> Var:
            known.append((lowering.fresh(name), value))
            return known[-1][0]

        def element(i: Indices) -> Stmt:
            pointer, lane = pointers.pointer(i), flat(type_.shape, i)
            place = lowering.fresh("place")
            stmt = touch(i, pointer.buffer, place)
            if argument != ANYWHERE:
                site = self.site(op, kind, type_, argument)
                low, high = (named(n, report.of_argument(argument, w))
                             for n, w in (("low", LOW), ("high", HIGH)))
                byte = place * size

                def fault(detail: int, beyond: Scalar | None = None) -> Stmt:
                    at = FromIndex(int64, byte)
                    return report.first(site, detail, lane,
                                        at if beyond is None else call("add", at, beyond))

                if reads:
                    shadow = named("written", report.of_argument(argument, WRITTEN))
                    stmt = If(_unwritten(lowering, shadow, byte - low), fault(UNWRITTEN), stmt)
                inside = call("and", _less(low - 1, byte), _less(byte + (size - 1), high))
                stmt = If(inside, stmt, fault(OUTSIDE))
                if size > 1:
                    address = lowering.signature.address_of(argument)
                    skew = named("skew", FromIndex(int64, address % size))
                    if pointer.rest is not None:
                        stmt = If(call("ne", pointer.rest, word(0)),
                                  fault(MISALIGNED, pointer.rest), stmt)
                    stmt = If(call("ne", FromIndex(int64, skew), word(0)), fault(MISALIGNED), stmt)
            stmt = Let(place, cast(pointer.offset, int64), stmt)
            for condition, divider in self.zeros_in(pointer.offset):
                stmt = If(condition, report.first(
                    self.site(divider, "division", type_, argument), BY_ZERO, lane), stmt)
            return stmt if mask is None else If(mask.scalar(i), stmt)

        body = reports.each(lowering, type_.shape, element)
        for var, value in reversed(known):
            body = Let(var, value, body)
        lowering.emit(body)

    def load(self, lowering: Lowering, op: Op) -> None:
        segments = op.attrs.get("operandSegmentSizes",
                                [1, len(op.operands) > 1, len(op.operands) > 2])
        pointers = lowering.operand(op, 0)
        mask = only_alive(lowering, lowering.operand(op, 1) if segments[1] else None, op.type)
        other = lowering.operand(op, 1 + segments[1]) if segments[2] else None
        dtype, shape = dtype_of(op.type.elem), op.type.shape
        tile = lowering.local("loaded", dtype, op.type.count)
        lowering.emit(lowering.nest(shape, lambda i: [Write(
            tile, flat(shape, i), constant(dtype, 0) if other is None else other.scalar(i))]))
        self.access(op, "load", pointers, mask, True, lambda i, buffer, place: Store(
            tile, flat(shape, i), buffer[place]))
        lowering.env[op.results[0]] = lowering.stored(op.type, tile)

    def store(self, lowering: Lowering, op: Op) -> None:
        pointers, given = (lowering.operand(op, n) for n in (0, 1))
        shape = pointers.type.shape
        mask = only_alive(lowering, lowering.operand(op, 2) if len(op.operands) > 2 else None,
                          pointers.type)
        dtype = dtype_of(pointers.type.elem)
        tile = lowering.local("given", dtype, pointers.type.count)
        lowering.emit(lowering.nest(shape, lambda i: [
            Write(tile, flat(shape, i), given.scalar(i))]))

        def touch(i: Indices, buffer: Buffer, place: Index) -> Stmt:
            value = tile[flat(shape, i)]
            return block(self.written_by(op, pointers.type, buffer, place, flat(shape, i), value),
                         self.mark(buffer, place), Store(buffer, place, value))

        self.access(op, "store", pointers, mask, False, touch)

    def allowed(self, op: Op, pointers: Value, mask: Value | None, reads: bool) -> Value:
        """Where an atomic operation may go on; the others are reported."""
        lowering, type_ = self.lowering, pointers.type
        tile = lowering.local("allowed", bool_, type_.count)
        lowering.emit(lowering.nest(type_.shape, lambda i: [
            Write(tile, flat(type_.shape, i), Const(bool_, False))]))
        self.access(op, "atomic", pointers, mask, reads, lambda i, buffer, place: block(
            self.mark(buffer, place), Store(tile, flat(type_.shape, i), Const(bool_, True))))
        return lowering.stored(Type(type_.shape, "i1", is_tile=type_.is_tile), tile)

    def tick(self, acquired: bool) -> None:
        """Around an atomic: before it, all that was written is handed on; after it, taken over."""
        report, mine = self.report, self.mine
        if mine is None:
            return
        self.lowering.emit(Atomic("add", report.area, CLOCK, word(1), None, (self.before, 0)))
        now = call("add", self.before[0], word(1))
        self.lowering.emit(Store(mine, 0, now) if acquired else Store(
            report.area, call("add", report.area[LAST], report.program()), now))

    # ------------------------------------------------------------ shadows
    def mark(self, buffer: Buffer, place: Index) -> Stmt:
        """Remember that an element has been written."""
        argument = self.lowering.signature.argument_of(buffer)
        if argument == ANYWHERE:
            self.anywhere = True
            return block()
        size = buffer.dtype.itemsize
        shadow, low, n = (self.lowering.fresh(name) for name in ("written", "low", "byte"))
        bytes_ = memory(self.lowering, uint8)
        return Let(shadow, self.report.of_argument(argument, WRITTEN), Let(
            low, self.report.of_argument(argument, LOW), If(
                call("ne", FromIndex(int64, shadow), word(0)),
                For(n, 0, size, Store(bytes_, shadow + place * size - low + n,
                                      Const(uint8, 1))))))

    def written_by(self, op: Op, type_: Type, buffer: Buffer, place: Index, lane: Index,
                   value: Scalar) -> Stmt:
        """Remember who writes an element, and report it if another program has."""
        argument = self.lowering.signature.argument_of(buffer)
        if argument == ANYWHERE:
            return block()
        size, report = buffer.dtype.itemsize, self.report
        self.stores[argument] = min(size, self.stores.get(argument, size))
        site = self.site(op, "store", type_, argument)
        writers, granule, low = (report.of_argument(argument, w) for w in (WRITERS, GRANULE, LOW))
        entry = call("add", call("shr", writers, word(3)), call(
            "shr", call("sub", FromIndex(int64, place * size), low), granule))
        me = call("add", report.program(), word(1))
        stamp = word(0) if self.mine is None else call(
            "shl", self.mine[0], word(PROGRAM_BITS))
        before = self.before[0]
        other = call("and", before, word((1 << PROGRAM_BITS) - 1))
        at = FromIndex(int64, place * size)
        found: Stmt = If(
            call("eq", buffer[place], value),
            report.first(site, TWICE_THE_SAME, lane, at, other),
            report.first(site, TWICE, lane, at, other))
        if self.mine is not None:
            then = call("shr", before, word(PROGRAM_BITS))
            last = call("add", report.area[LAST], call("sub", other, word(1)))
            handed_on = call("and", call("gt", report.area[last], then),
                             call("gt", self.mine[0], then))
            found = If(call("not", handed_on), found)
        return If(call("ne", writers, word(0)), block(
            Atomic("exchange", memory(self.lowering, int64), entry, call("or", stamp, me), None,
                   (self.before, 0)),
            If(call("and", call("ne", other, word(0)), call("ne", other, me)), found)))


def _unwritten(lowering: Lowering, shadow: Var, byte: Index) -> Scalar:
    found = where(call("ne", FromIndex(int64, shadow), word(0)),
                  memory(lowering, uint8)[FromIndex(int64, shadow + byte)], Const(uint8, 1))
    return call("eq", found, Const(uint8, 0))


def _less(a: Index, b: Index) -> Scalar:
    return Call(bool_, "lt", (FromIndex(int64, a), FromIndex(int64, b)))


def _both(a: Scalar | None, b: Scalar) -> Scalar:
    return b if a is None else call("and", a, b)


# ---------------------------------------------------------------- what users read
_VERBS = {"load": "reads", "store": "writes", "atomic": "updates"}


def finding_text(area: Area, record: Record) -> str:
    """One finding as users see it."""
    launch, site = area.launch, record.site
    lane = lane_text(site["shape"], record.lane)
    what, why = _explain(area, launch, record)
    more = f" ({record.count - 1} more like this at this line)" if record.count > 1 else ""
    return (f"{shorter(site['where'])}: {what} in `{launch.table['kernel']}`, program "
            f"{launch.program(record.program)}{lane}{why}{more}")


def _explain(area: Area, launch: Launch, record: Record) -> tuple[str, str]:
    site, detail = record.site, record.detail
    kind = site["kind"]
    if detail == BY_ZERO:
        return "integer division by zero in an index", ""
    size, itemsize, argument = site["size"], site["itemsize"], site["argument"]
    amount = "" if size == itemsize else f"{size} bytes at "
    access = f": {_VERBS[kind]} {amount}`{launch.names[argument]}`[{record.value // itemsize}]"
    if detail == OUTSIDE:
        count = int(area.rows[argument][HIGH]) // itemsize
        return f"out-of-bounds {kind}", f"{access}, which has {count} elements. Missing mask?"
    if detail == MISALIGNED:
        return f"misaligned {kind}", (
            f"{access}, whose address is no multiple of {size} bytes.")
    if detail == UNWRITTEN:
        return f"{kind} of uninitialised memory", (
            f"{access}, which comes from torch.empty and has not been written yet.")
    value = "the same value" if detail == TWICE_THE_SAME else "another value"
    other = launch.program(record.other - 1)
    return "two programs write one element", (
        f"{access} after program {other} wrote {value} there, and no atomic orders them.")
