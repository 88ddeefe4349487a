"""Random programs: operators drawn one after the other, each called as its recipe says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from terrazzo.graph.ir import OPERATORS, Operator
from terrazzo.tools.fuzz.maker import Maker
from terrazzo.tools.fuzz.programs import Program, pruned
from terrazzo.tools.fuzz.recipes import RECIPES, NotApplicable, plain_call

# Building blocks that users do not call, graphs as attributes, and results whose order is free.
LEFT_OUT = {
    "cond", "while_loop", "scan", "getitem", "take_at", "scatter_at", "place", "cumulative",
    "linear_recurrence", "sort_pairs", "top_pairs", "random_bits", "split_key", "fold_in",
    "permutation", "randint", "nonzero", "gather_nd", "scatter_nd", "searchsorted", "meshgrid",
    "full_like", "diag", "binary_entropy", "stop_gradient", "tree_ensemble", "pairwise_coupling",
}  # fmt: skip


def operators() -> list[str]:
    """The operators that programs are made of."""
    known = [n for n, o in OPERATORS.items() if n not in LEFT_OUT and _built_in(o)]
    return [*known, "[]"]


def _built_in(op: Operator) -> bool:
    """Whether an operator is ours: what users define must not change the programs of a seed."""
    definition = op.body or op.expr or op.loops or op.reference
    # What is registered in torch may have been made from text, which is in no module.
    return str(getattr(definition, "__module__", None)).startswith("terrazzo.")


def random_program(rng: np.random.Generator, names: Sequence[str] | None = None) -> Program:
    """A program of a few operators."""
    maker = Maker(rng)
    names = names or operators()
    wanted = int(rng.integers(1, 9))
    for _ in range(6 * wanted):
        name = maker.one(names)
        before = len(maker.inputs), len(maker.values)
        try:
            args, attrs = RECIPES.get(name, plain_call(name))(maker)
        except (NotApplicable, KeyError):
            continue
        if not maker.add(name, args, attrs):
            del maker.inputs[before[0]:], maker.values[before[1]:]
        if len(maker.steps) >= wanted:
            break
    refs = [r for r, _ in maker.values if r.step]
    used = {r for s in maker.steps for r in s.refs()}
    outputs = [r for r in refs if r not in used] or refs[-1:]
    outputs += [r for r in refs if r in used and maker.chance(0.15)]
    program = Program(tuple(maker.inputs), tuple(maker.steps), tuple(outputs[:4]),
                      symbolic=maker.chance(0.15), gradient=maker.chance(0.15))
    return pruned(program)
