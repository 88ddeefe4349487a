"""Levels of a compilation as text."""

from __future__ import annotations

from terrazzo.chips.chip import LEVELS, Chip
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.options import Options
from terrazzo.compiler.rewriting import inlined
from terrazzo.graph.ir import Graph
from terrazzo.runtime.artifact import Over

WHOLE = ("graph", "canonical")  # levels that hold control flow as it is


def graph_level(graph: Graph, level: str, options: Options | None = None,
                chip: Chip | None = None, over: Over = ()) -> str:
    """One level of a graph's compilation as text; below control flow, of each part by itself."""
    from terrazzo.compiler.control_flow import ControlLowering, is_native
    from terrazzo.runtime.hosted import compiled_parts, needs_host

    options = options or Options.now()
    chip = chip or options.chip
    if level not in chip.levels:
        raise chip.no_level(level)
    flat = inlined(graph, options=options)
    if level in WHOLE or not needs_host(flat):
        return level_text(Lowering(graph, chip, options=options, over=over), level)
    if level not in (*LEVELS, *chip.program_levels) and is_native(flat):
        return chip.text(level, ControlLowering(flat, chip, options).recipe)
    parts = [f"# {g.name}: a part of {graph.name}, inside or between control flow\n"
             + level_text(Lowering(g, chip, options=options), level) for g in compiled_parts(flat)]
    return "\n\n".join(parts)


def level_text(lowering: Lowering, level: str) -> str:
    """One level of a compilation as text."""
    if level == "graph":
        return str(lowering.source)
    if level == "canonical":
        return str(lowering.graph)
    if level == "expr":
        return str(lowering.fused)
    if level == "schedule":
        return "\n\n".join(f"{p.name}:\n{s}" for p, s in lowering.scheduled)
    if level == "loop":
        return "\n\n".join(map(str, lowering.functions))
    if level in lowering.chip.program_levels:
        return "\n\n".join(lowering.chip.source(level, g.program) for g in lowering.fused.groups)
    return lowering.chip.text(level, lowering.recipe)
