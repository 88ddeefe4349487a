"""Who needs a value in the end: the operations that make loops out of lazy expressions."""

from __future__ import annotations

from dataclasses import dataclass, field

from terrazzo.triton_cpu.frontend.elementwise import RULES
from terrazzo.triton_cpu.frontend.inline_asm import EFFECTS
from terrazzo.triton_cpu.frontend.ttir import Block, Op, walk

# Operations whose result is an expression over their operands' elements.
LAZY = frozenset(RULES) | {
    "arith.constant", "tt.splat", "tt.unsplat", "tt.broadcast", "tt.expand_dims", "tt.reshape",
    "tt.trans", "tt.addptr", "tt.make_range", "tt.load", "tt.join", "tt.split", "tt.cat",
    "tt.extern_elementwise", "tt.ptr_to_int", "tt.int_to_ptr",
}
_THIN = frozenset({"tt.bitcast", "arith.bitcast", "tt.reshape", "arith.muli"})
WRITES = frozenset({"tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.call",
                    "tt.atomic_store", "tt.atomic_poll", "tt.descriptor_store",
                    EFFECTS})
LOOPS = frozenset({"scf.for", "scf.while"})


@dataclass
class Uses:
    """For every value its sinks and the number of its direct uses."""

    sinks: dict[str, set[Op]] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)
    home: dict[str, Op | None] = field(default_factory=dict)  # the loop a value is made in
    loop: dict[Op, Op | None] = field(default_factory=dict)  # the loop an operation is in
    roots: dict[str, str | None] = field(default_factory=dict)  # see `find_roots`
    makers: dict[str, Op] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)  # made of nothing but literals and ranges

    def needed_again(self, name: str) -> bool:
        """Whether more than one loop nest will ask for a value."""
        sinks = self.sinks.get(name, set())
        home = self.home.get(name)
        return len(sinks) > 1 or any(self.loop[s] is not home for s in sinks)

    def way_to_tile(self, pair: Op) -> list[str]:
        """From what a reduction of pairs reads, through views and masks, to the tile behind.

        The last is empty where all of it is fixed.
        """
        way = [pair.operands[0]]
        while way[-1] not in self.fixed:
            maker = self.makers.get(way[-1])
            if maker is None or maker.name not in _THIN:
                return way
            way.append(next(o for o in maker.operands if o not in self.fixed))
        return [""]


def is_pair(op: Op) -> bool:
    """Whether an operation reduces two elements each: an expression, as in sorting networks."""
    return op.name == "tt.reduce" and op.operand_types[0].shape[op.attrs["axis"]] == 2


def find_uses(blocks: list[Block]) -> Uses:
    """Walk a function backwards, handing sinks on from results to operands."""
    uses = Uses(roots=find_roots(blocks))
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
                uses.home[name], uses.makers[name] = loop, op
            if op.name in LAZY and op.name != "tt.load" and uses.fixed.issuperset(op.operands):
                uses.fixed.update(op.results)
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
            passed: set[Op] = set() if op.name in LAZY else {op}
            if op.name in LAZY or is_pair(op):
                for name in op.results:
                    passed |= uses.sinks.get(name, set())
            for name in op.operands:
                uses.sinks.setdefault(name, set()).update(passed)


# ---------------------------------------------------------------- where pointers come from
_SAME_TENSOR = frozenset({"tt.addptr", "tt.splat", "tt.unsplat", "tt.broadcast", "tt.expand_dims",
                          "tt.reshape", "tt.trans", "tt.bitcast", "tt.split"})


def find_roots(blocks: list[Block]) -> dict[str, str | None]:
    """The argument that each pointer leads back to; None where it is not always the same one."""
    roots: dict[str, str | None] = {name: name for name, _ in blocks[0].args}
    flows: list[tuple[str, str]] = []  # a pointer, and one that leads into the same tensor
    _collect(blocks, roots, flows)
    changed = True
    while changed:
        changed = False
        for target, source in flows:
            if source in roots and (target not in roots
                                    or roots[target] not in (None, roots[source])):
                roots[target] = None if target in roots else roots[source]
                changed = True
    return roots


def _collect(blocks: list[Block], roots: dict[str, str | None], flows: list[tuple[str, str]]
             ) -> None:
    labels = {b.label: b for b in blocks}
    for op in (op for block in blocks for op in block.ops):
        for region in op.regions:
            _collect(region, roots, flows)
        if op.name in _SAME_TENSOR:
            flows += [(result, op.operands[0]) for result in op.results]
        elif op.name == "arith.select":
            flows += [(op.results[0], operand) for operand in op.operands[1:]]
        elif op.name == "scf.if":
            for region in op.regions:
                for block in region:
                    flows += zip(op.results, block.ops[-1].operands, strict=True)
        elif op.name == "scf.for":
            body = op.regions[0][0]
            for sources in (op.operands[3:], body.ops[-1].operands):
                flows += [*zip(_names(body)[1:], sources, strict=True),
                          *zip(op.results, sources, strict=True)]
        elif op.name == "scf.while":
            before, after = (region[0] for region in op.regions)
            for sources in (op.operands, after.ops[-1].operands):
                flows += zip(_names(before), sources, strict=True)
            for targets in (_names(after), op.results):
                flows += zip(targets, before.ops[-1].operands[1:], strict=True)
        elif op.successors:
            operands = op.operands[op.name == "cf.cond_br":]
            for label in op.successors:
                args = _names(labels[label])
                flows += zip(args, operands[:len(args)], strict=True)
                operands = operands[len(args):]
        else:
            roots.update({name: None for name, type_ in zip(op.results, op.types, strict=True)
                          if type_.pointer})


def _names(block: Block) -> list[str]:
    return [name for name, _ in block.args]


def writes_memory(op: Op) -> bool:
    """Whether an operation or one in its regions may change memory."""
    return op.name in WRITES or any(
        inner.name in WRITES for region in op.regions for inner in walk(region))


def inner_ops(op: Op) -> set[Op]:
    """An operation and all in its regions."""
    return {op} | {inner for region in op.regions for inner in walk(region)}
