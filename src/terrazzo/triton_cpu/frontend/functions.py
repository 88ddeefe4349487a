"""Small functions of TTIR, as reductions, scans and maps hold them, as scalar expressions.

Both sides of a branch are computed and one is chosen, so that vector loops can hold them; a
division by zero on the other side does no harm, as generated code never stops at one. Loops and
memory have no place in an expression: `is_plain` tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from terrazzo.base.scalar import Scalar, Undefined, where
from terrazzo.triton_cpu.frontend.elementwise import RULES, constant
from terrazzo.triton_cpu.frontend.lower import Lowering
from terrazzo.triton_cpu.frontend.ttir import Block, Module, Op, walk
from terrazzo.triton_cpu.frontend.values import dtype_of

_JUMPS = frozenset({"cf.br", "cf.cond_br"})
_ENDS = frozenset({"tt.return", "tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return",
                   "scf.yield"})
_PLAIN = frozenset(RULES) | _JUMPS | _ENDS | {"arith.constant", "ub.poison", "scf.if"}


def is_plain(module: Module, blocks: list[Block]) -> bool:
    """Whether a function, with all that it calls, is nothing but arithmetic and branches."""
    return all(is_plain(module, module.callee(op)) if op.name == "tt.call" else
               op.name in _PLAIN and not any(t.pointer for t in op.types) for op in walk(blocks))


def apply(lowering: Lowering, blocks: Sequence[Block], args: Iterable[Scalar]) -> list[Scalar]:
    """What a plain function gives for some elements."""
    return _Application(lowering, blocks).jump(blocks[0], list(args), {})


class _Application:
    """A function being applied."""

    def __init__(self, lowering: Lowering, blocks: Sequence[Block]):
        self.lowering = lowering
        self.blocks = {b.label: b for b in blocks}

    def jump(self, block: Block, args: Sequence[Scalar], known: dict[str, Scalar]
             ) -> list[Scalar]:
        """The results if control goes on at a block."""
        known = known | {name: a for (name, _), a in zip(block.args, args, strict=True)}
        for op in block.ops[:-1]:
            values = self.op(op, known)
            known.update(zip(op.results, values, strict=True))
        end = block.ops[-1]
        operands = [self.value(o, known) for o in end.operands]
        if end.name == "cf.br":
            return self.jump(self.blocks[end.successors[0]], operands, known)
        if end.name != "cf.cond_br":
            return operands
        condition, *rest = operands
        count = end.attrs["operandSegmentSizes"][1]
        yes, no = (self.blocks[label] for label in end.successors)
        return _choose(condition, self.jump(yes, rest[:count], known),
                       self.jump(no, rest[count:], known))

    def op(self, op: Op, known: dict[str, Scalar]) -> list[Scalar]:
        if op.name == "arith.constant":
            return [constant(dtype_of(op.type.elem), op.attrs["value"])]
        if op.name == "ub.poison":
            return [Undefined(dtype_of(op.type.elem))]
        args = [self.value(o, known) for o in op.operands]
        if op.name == "scf.if":
            yes, no = (self.jump(r[0], (), known) if r else [] for r in op.regions)
            return _choose(args[0], yes, no)
        if op.name == "tt.call":
            body = self.lowering.module.callee(op)
            return _Application(self.lowering, body).jump(body[0], args, {})
        if op.name not in RULES:
            raise self.lowering.unsupported(op, "inside a function of single elements")
        return [RULES[op.name](op, args)]

    def value(self, name: str, known: dict[str, Scalar]) -> Scalar:
        return known[name] if name in known else self.lowering.env[name].scalar()


def _choose(condition: Scalar, yes: list[Scalar], no: list[Scalar]) -> list[Scalar]:
    return [a if a is b else where(condition, a, b) for a, b in zip(yes, no, strict=True)]
