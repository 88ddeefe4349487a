"""Levels of a compilation as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terrazzo.base.tables import Listing
from terrazzo.errors import ArgumentError
from terrazzo.graph.ir import Graph, Operator
from terrazzo.knobs import knobs

if TYPE_CHECKING:
    from terrazzo.runtime.artifact import Over


def lower_operator(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """`op.lower(x, "loop")`: the last positional string is the level."""
    chip = kwargs.pop("chip", "") or kwargs.pop("target", "")  # its older name
    if not args or not isinstance(args[-1], str):
        raise ArgumentError(f"{op.name}.lower needs a level as its last argument",
                            hint=f'for example {op.name}.lower(x, "loop")')
    *tensors, level = args
    if level == "kernels":  # of the operator, not of a graph
        from terrazzo.calls import kernels

        op(*tensors, **kwargs)
        return Listing(kernels.shown(op))
    graph, over = op.compiled.graph_over(tensors, kwargs)
    return lower(graph, level, chip, over)


def lower(graph: Graph, level: str, chip: str = "", over: Over = ()) -> str:
    """One level of a graph's compilation as text, for a chip by its name."""
    from terrazzo.compiler.levels import graph_level
    from terrazzo.compiler.options import Options

    with knobs.override(chip=chip or knobs.chip):
        return Listing(graph_level(graph, level, Options.now(), over=over))
