"""The provider of last resort: single nodes through `onnx.reference`, in numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from terrazzo.errors import UnsupportedOperator
from terrazzo.frontends.onnx.model import needed_names, node_text


class ReferenceNode:
    """One node, ready to be run by onnx's reference evaluator."""

    def __init__(self, node: Any, opsets: Mapping[str, int]):
        from onnx import helper
        from onnx.reference import ReferenceEvaluator

        self.node = node
        self.names = needed_names(node)
        graph = helper.make_graph([node], "node", [_info(n) for n in self.names],
                                  [_info(n) for n in node.output if n])
        imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
        try:
            self.evaluator = ReferenceEvaluator(
                helper.make_model(graph, opset_imports=imports, ir_version=10))
        except Exception as error:
            raise UnsupportedOperator(
                f"{node_text(node)}: onnx's reference does not run it either: {error}") from None

    def run(self, env: Mapping[str, Any]) -> list[Any]:
        """The node's outputs, one for each, None for those nobody asked for."""
        feeds = {n: env[n] for n in self.names}
        try:
            results: Sequence[Any] = self.evaluator.run(None, feeds)
        except Exception as error:
            raise UnsupportedOperator(
                f"{node_text(self.node)}: onnx's reference failed: {error}") from error
        given = iter(results)
        return [next(given) if name else None for name in self.node.output]


def _info(name: str) -> Any:
    from onnx import ValueInfoProto

    info = ValueInfoProto()
    info.name = name
    return info

