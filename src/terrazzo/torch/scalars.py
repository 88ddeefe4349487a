"""Numbers that a graph reads out of tensors (`item`), before AOTAutograd traces it.

Torch puts the tensor in place of its number where that meets other tensors. Up to torch 2.11 it
does so as the tensor is, and the axes of one element that a number does not have show in results.
"""

from __future__ import annotations

from typing import Any

from torch._subclasses import FakeTensor
from torch.fx import GraphModule


def read_from_rank_0(gm: GraphModule) -> None:
    """Let every number of a graph be that of a tensor without axes."""
    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        reads = [n for n in module.graph.nodes if n.op == "call_method" and n.target == "item"
                 and _has_axes(n.args[0].meta.get("example_value"))]
        for node in reads:
            source: Any = node.args[0]
            with module.graph.inserting_before(node):
                number = module.graph.call_method("reshape", (source, ()))
            fake = source.meta["example_value"]
            with fake.fake_mode:
                number.meta["example_value"] = fake.reshape(())
            node.args = (number,)
        if reads:
            module.recompile()


def _has_axes(fake: Any) -> bool:
    """Whether a tensor is known to have one element, and has axes all the same."""
    return isinstance(fake, FakeTensor) and fake.dim() > 0 and all(
        isinstance(n, int) and n == 1 for n in fake.shape)
