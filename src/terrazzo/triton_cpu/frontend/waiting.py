"""Which kernels have programs that wait for each other: locks, flags, barriers over the grid.

A loop waits if it goes on until memory says otherwise: its condition depends on what lies at an
address that the loop itself does not move, read atomically or as volatile. Such loops let other
threads run at every turn, and their programs get threads of their own (see `launch`).
"""

from __future__ import annotations

from collections.abc import Iterable

from terrazzo.triton_cpu.frontend.inline_asm import EFFECTS, assembly
from terrazzo.triton_cpu.frontend.ttir import Block, Module, Op, walk

_ATOMICS = frozenset({"tt.atomic_rmw", "tt.atomic_cas", "tt.atomic_load"})


def has_waiting(module: Module) -> bool:
    """Whether any program of a kernel may wait for another one."""
    return any(op.name == "tt.atomic_poll" or waits(op)
               or (op.name == EFFECTS and assembly(op).waits)
               for function in module.functions.values()
               for region in function.regions for op in walk(region))


def waits(loop: Op) -> bool:
    """Whether an operation is a loop that waits for other programs."""
    if loop.name != "scf.while":
        return False
    before, after = loop.regions[0][0], loop.regions[1][0]
    made = {r: op for region in loop.regions for op in walk(region) for r in op.results}
    carried = _fed(before, after.ops[-1].operands)
    passed = _fed(after, before.ops[-1].operands[1:])
    condition = _behind([before.ops[-1].operands[0]], made, {**carried, **passed})
    return any(carried.keys().isdisjoint(_behind([made[name].operands[0]], made, passed))
               for name in condition & made.keys() if _reads(made[name]))


def _reads(op: Op) -> bool:
    """Whether an operation reads what other programs may be writing just then."""
    return op.name in _ATOMICS or (op.name == "tt.load" and bool(op.attrs.get("isVolatile")))


def _fed(block: Block, operands: Iterable[str]) -> dict[str, str]:
    """What each argument of a block is given, name by name."""
    return {name: given for (name, _), given in zip(block.args, operands, strict=True)}


def _behind(names: Iterable[str], made: dict[str, Op], fed: dict[str, str]) -> set[str]:
    """All values of a loop that some values are computed from, turns before included."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        if name in fed:
            waiting.append(fed[name])
        elif name in made:
            op = made[name]
            waiting += op.operands
            waiting += [o for region in op.regions for inner in walk(region)
                        for o in inner.operands]
    return found
