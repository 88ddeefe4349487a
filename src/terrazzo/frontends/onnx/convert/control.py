"""Control flow that is decided while importing."""

from __future__ import annotations

from terrazzo.frontends.onnx.registry import Call, converts
from terrazzo.graph.ir import Value


@converts("If")
def if_(call: Call) -> list[Value]:
    """The branch that is taken, in place of the node."""
    return call.importer.inline(call.attr("then_branch" if call.number(0) else "else_branch"))
