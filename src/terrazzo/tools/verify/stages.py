"""Says what within a level is to blame for a kernel: which of the steps that lead down to it.

Each step is left out or taken alone, and the kernel computed again: the step without which it comes
out right is the one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from terrazzo.base.scalar import Call, Load, Scalar, walk
from terrazzo.chips.chip import Chip
from terrazzo.dtypes import DType
from terrazzo.errors import TerrazzoError
from terrazzo.expr.ir import Tensor
from terrazzo.expr.lower import lower
from terrazzo.expr.schedule import Schedule
from terrazzo.graph.fusion import DOING_NOTHING, Group, fuse
from terrazzo.graph.ir import Graph
from terrazzo.index import Var
from terrazzo.loop import interpret
from terrazzo.loop.ir import Buffer, For, Function, Store
from terrazzo.loop.ir import walk as statements
from terrazzo.tools.verify.kernels import in_memory_of, interpreted

IsRight = Callable[[Sequence[np.ndarray]], bool]
_COUNT = 64  # elements on which a function of elements is tried
_ULP = 64  # by which it may be off: what is broken is off by far more


def stage_of_program(group: Group, graph: Graph, chip: Chip, is_right: Callable[[Group], bool]
                     ) -> str:
    """Which pass of fusion made a program wrong, by leaving them out from the last one on."""
    limits, nodes = chip.fusion_limits, set(group.nodes)
    for name, nothing in reversed(DOING_NOTHING):
        limits = replace(limits, **nothing)
        if all(is_right(g) for g in fuse(graph, limits).groups if not nodes.isdisjoint(g.nodes)):
            return name
    return "an operator's own expression"


def stage_of_loops(group: Group, chip: Chip, constants: frozenset[Tensor],
                   inputs: Sequence[np.ndarray], dims: Mapping[Var, int], is_right: IsRight) -> str:
    """Which step between a program and its loops made them wrong."""
    program = group.program
    if program.kind == "opaque":
        return "the operator's own loops"

    def right(function: Function | None) -> bool:
        try:
            return function is not None and is_right(interpreted(function, group, inputs, dims))
        except (TerrazzoError, IndexError, ValueError):
            return False

    made = chip.template(program, constants)
    if made is None:
        scheduled, schedule = chip.schedule(program)
        if right(lower(scheduled, schedule, program.name)):
            return "the simplifier of loops"
        return "the schedule" if right(lower(program, Schedule(), program.name)) else (
            "lowering to loops")
    if right(made):
        return "the simplifier of loops"
    if made.packed and right(chip.template(program, frozenset())):
        return "packing of constants"
    return "the chip's template"


def stage_of_code(function: Function, chip: Chip) -> str:
    """Which function of elements the chip computes wrongly, if it is one of those."""
    values = [v for s in statements(function.body) if isinstance(s, Store)
              for v in (s.value, s.mask) if isinstance(v, Scalar)]
    tried: set[tuple[str, tuple[DType, ...]]] = set()
    for value in values:
        for node in walk(value):
            if not isinstance(node, Call) or not node.dtype.is_float:
                continue
            key = node.op, tuple(a.dtype for a in node.args)
            if key not in tried and all(t.is_float for t in key[1]):
                tried.add(key)
                if not _computes(node, chip):
                    return f"the function {node.op!r} of {node.dtype.name}"
    return "code generation"


def _computes(node: Call, chip: Chip) -> bool:
    """Whether native code computes one function of elements as the interpreter does."""
    buffers = [Buffer(f"x{i}", a.dtype, _COUNT) for i, a in enumerate(node.args)]
    result = Buffer("y", node.dtype, _COUNT)
    i = Var("i", 0, _COUNT - 1)
    call = Call(node.dtype, node.op, tuple(Load(b.dtype, b, (i,)) for b in buffers))
    body = For(i, 0, _COUNT, Store(result, i, call), "vector")
    function = Function("element", (*buffers, result), (), body, node.op)
    rng = np.random.default_rng(0)
    arrays = [rng.uniform(0.1, 2.0, _COUNT).astype(b.dtype.np) for b in buffers]
    wanted, got = (np.zeros(_COUNT, node.dtype.np) for _ in range(2))
    interpret.run(function, [*arrays, wanted], {})
    with in_memory_of(chip, [*arrays, got]) as pointers:
        chip.alone(function).run(pointers, 0, 1)
    wide = wanted.astype(np.float64)
    spread = _ULP * np.abs(wide) * float(np.finfo(np.float16).eps if node.dtype.itemsize < 4 else
                                         np.finfo(node.dtype.np).eps) + 1e-30
    return bool(np.all((np.abs(got.astype(np.float64) - wide) <= spread) | (
        np.isnan(wide) & np.isnan(got.astype(np.float64)))))
