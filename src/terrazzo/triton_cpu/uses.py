"""Who needs a value in the end: the operations that make loops out of lazy expressions."""

from __future__ import annotations

from dataclasses import dataclass, field

from terrazzo.triton_cpu.elementwise import RULES
from terrazzo.triton_cpu.ttir import Block, Op, walk

# Operations whose result is an expression over their operands' elements.
LAZY = frozenset(RULES) | {
    "arith.constant", "tt.splat", "tt.unsplat", "tt.broadcast", "tt.expand_dims", "tt.reshape",
    "tt.trans", "tt.addptr", "tt.make_range", "tt.load", "tt.join", "tt.split", "tt.cat",
    "tt.extern_elementwise", "tt.ptr_to_int", "tt.int_to_ptr",
}
WRITES = frozenset({"tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.call",
                    "tt.atomic_store", "tt.atomic_poll", "tt.descriptor_store"})
LOOPS = frozenset({"scf.for", "scf.while"})


@dataclass
class Uses:
    """For every value its sinks and the number of its direct uses."""

    sinks: dict[str, set[Op]] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)
    home: dict[str, Op | None] = field(default_factory=dict)  # the loop a value is made in
    loop: dict[Op, Op | None] = field(default_factory=dict)  # the loop an operation is in

    def needed_again(self, name: str) -> bool:
        """Whether more than one loop nest will ask for a value."""
        sinks = self.sinks.get(name, set())
        home = self.home.get(name)
        return len(sinks) > 1 or any(self.loop[s] is not home for s in sinks)


def find_uses(blocks: list[Block]) -> Uses:
    """Walk a function backwards, handing sinks on from results to operands."""
    uses = Uses()
    _places(blocks, None, uses)
    _visit(blocks, uses)
    return uses


def _places(blocks: list[Block], loop: Op | None, uses: Uses) -> None:
    for block in blocks:
        for name, _ in block.args:
            uses.home[name] = loop
        for op in block.ops:
            uses.loop[op] = loop
            for name in op.results:
                uses.home[name] = loop
            for name in op.operands:
                uses.count[name] = uses.count.get(name, 0) + 1
            inner = op if op.name in LOOPS else loop
            for region in op.regions:
                _places(region, inner, uses)


def _visit(blocks: list[Block], uses: Uses) -> None:
    for block in reversed(blocks):
        for op in reversed(block.ops):
            if op.name not in ("tt.reduce", "tt.scan", "tt.map_elementwise"):
                for region in reversed(op.regions):
                    _visit(region, uses)
            if op.name in LAZY:
                passed: set[Op] = set()
                for name in op.results:
                    passed |= uses.sinks.get(name, set())
            else:
                passed = {op}
            for name in op.operands:
                uses.sinks.setdefault(name, set()).update(passed)


def writes_memory(op: Op) -> bool:
    """Whether an operation or one in its regions may change memory."""
    return op.name in WRITES or any(
        inner.name in WRITES for region in op.regions for inner in walk(region))


def inner_ops(op: Op) -> set[Op]:
    """An operation and all in its regions."""
    return {op} | {inner for region in op.regions for inner in walk(region)}
