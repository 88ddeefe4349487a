"""What a model is and what becomes of it: inputs, operators, parameters, work, who runs what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.compiler.lowering import Lowering
from terrazzo.frontends.onnx.functions import has_function
from terrazzo.frontends.onnx.model import node_text
from terrazzo.frontends.onnx.reasons import NotConverted, Reason
from terrazzo.frontends.onnx.session.host import CONTROL
from terrazzo.frontends.onnx.session.host_ops import HOST_OPS
from terrazzo.frontends.onnx.session.ports import Port
from terrazzo.frontends.onnx.session.session import Session
from terrazzo.graph.rewrite import Applied
from terrazzo.index import Index

COMPILED, HOST, REFERENCE, LATER = "compiled", "host", "reference", "at run time"


@dataclass(frozen=True)
class Placed:
    """Where a node runs, and why not elsewhere."""

    node: str
    operator: str
    where: str  # compiled | host | reference | at run time
    why: str = ""


@dataclass(frozen=True)
class ModelReport:
    """Everything `tz info` shows of a model."""

    file: str
    opsets: dict[str, int]
    inputs: Sequence[Port]
    outputs: Sequence[Port]
    operators: Counter[str]
    parameters: int
    parameter_bytes: int
    kernels: int
    flops: Index
    arena: Index
    placement: Sequence[Placed]
    rewrites: Sequence[Applied]
    chip: str
    elsewhere: Sequence[tuple[str, str]]  # kernels that the chip leaves to another one, and why


def placement(session: Session) -> list[Placed]:
    """Where each node of a model will run, as far as that can be said before it runs."""
    imported = session.imported
    found = []
    for number, node in enumerate(session.model.graph.node):
        why = None if imported is None else imported.put_off.get(number)
        found.append(Placed(node_text(node), node.op_type, _where(node, why, session),
                            "" if why is None else str(why)))
    return found


def _where(node: Any, why: Reason | None, session: Session) -> str:
    domain = "" if node.domain == "ai.onnx" else node.domain
    if not domain and node.op_type in CONTROL and why is not None:
        return HOST
    if why is None and session.imported is not None:
        return COMPILED
    if (domain, node.op_type) in HOST_OPS:
        return HOST
    if not isinstance(why, NotConverted):
        return LATER
    if has_function(node, session.model.opsets):
        return HOST
    return REFERENCE


def report(session: Session) -> ModelReport:
    """Look at a model without running it."""
    model = session.model
    kernels = 0
    flops: Index = 0
    arena: Index = 0
    rewrites: list[Applied] = []
    elsewhere: list[tuple[str, str]] = []
    if session.imported is not None and session.imported.outputs:
        lowering = Lowering(session.imported.graph, session.options.chip,
                            options=session.options)
        rewrites = lowering.rewrites
        kernels, arena = len(lowering.calls), lowering.plan.arena
        for call in lowering.calls:
            flops = flops + call.function.flops
            why = session.options.chip.elsewhere(call.function)
            if why:
                elsewhere.append((call.function.origin, why))
    return ModelReport(
        model.where, dict(model.opsets), session.inputs, session.outputs,
        Counter(n.op_type for n in model.graph.node),
        sum(w.size for w in model.weights.values()),
        sum(w.nbytes for w in model.weights.values()), kernels, flops, arena,
        placement(session), rewrites, session.options.chip.name, elsewhere)
