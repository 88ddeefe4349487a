"""A function in two parts for training: what runs forward, and what runs backward later.

The forward part answers the results and what it keeps for the backward part (`graph/residuals.py`
says what is worth keeping). Both are graphs of fixed sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.compiler.options import Options
from terrazzo.compiler.rewriting import inlined
from terrazzo.graph.applying import apply
from terrazzo.graph.autodiff import differentiated_inside, vjp_graph
from terrazzo.graph.ir import Graph, Node, Value
from terrazzo.graph.passes import attention_kept, canonicalize
from terrazzo.graph.passes.cse import common_subexpressions
from terrazzo.graph.rebuild import computed_from
from terrazzo.graph.residuals import likely_count, worth_keeping
from terrazzo.graph.rewrite import sweep

# Another tensor takes about 1.5 us: to be allocated, to be held by torch, to be handed over.
_HANDING_ON = 6e4  # additions


@dataclass(frozen=True, eq=False)
class Parts:
    """The graphs of a step of training."""

    forward: Graph  # inputs -> results, kept
    backward: Graph  # inputs, kept, weights of the float results -> gradients of the inputs `wrt`
    results: int
    wrt: tuple[int, ...]

    def gradients(self, wanted: Sequence[int]) -> Graph:
        """The backward part for some of the inputs."""
        outputs = tuple(self.backward.outputs[self.wrt.index(i)] for i in wanted)
        return Graph(self.backward.name, self.backward.inputs, outputs)


def training_parts(graph: Graph, wrt: Sequence[int], options: Options) -> Parts | None:
    """The two parts; None where nothing is worth keeping."""
    plain = differentiated_inside(graph)
    pull = vjp_graph(plain, wrt)
    weights = pull.inputs[len(plain.inputs):]
    count = len(graph.outputs)
    whole = _with_loops_that_keep(Graph(graph.name, pull.inputs, plain.outputs + pull.outputs))
    whole = attention_kept(whole, options.guide.keeps)
    results, gradients = whole.outputs[:count], whole.outputs[count:]
    loops = _results_of_loops(Graph(graph.name, graph.inputs, results), gradients)
    held = {v: Value(v.type, name=v.name) for v in loops}
    own = {v: v for v in pull.inputs}
    # Each is rewritten by itself, as it will be when it is compiled: what the forward part computes
    # in a kernel of its own (attention) it does not hand on in pieces.
    forward = _rewritten(Graph(graph.name, graph.inputs, (*results, *loops)), options)
    backward = _rewritten(Graph(pull.name, (*pull.inputs, *held.values()), computed_from(
        gradients, {**own, **held})), options)
    both = common_subexpressions(Graph(graph.name, backward.inputs,
                                       forward.outputs + backward.outputs))
    ends = len(forward.outputs)
    forward = Graph(graph.name, graph.inputs, both.outputs[:ends])
    backward = Graph(pull.name, backward.inputs, both.outputs[ends:])
    size = sum(likely_count(v.shape) * v.dtype.itemsize for v in (*graph.inputs, *graph.outputs))
    kept = worth_keeping(forward, backward, _HANDING_ON, size)
    if not loops and not kept:
        return None
    fresh = {v: Value(v.type, name=v.name) for v in kept}
    found = computed_from(backward.outputs, {v: v for v in backward.inputs} | fresh)
    return Parts(Graph(graph.name, graph.inputs, (*forward.outputs, *kept)),
                 Graph(pull.name, (*graph.inputs, *held.values(), *fresh.values(), *weights),
                       found), count, tuple(wrt))


def _rewritten(graph: Graph, options: Options) -> Graph:
    """What is the same in both parts is then written in the same way."""
    for _ in range(2):  # what was inside of operators is recognised the second time
        graph = inlined(graph, options=options)
    return canonicalize(graph, options.guide)[0]


# ---------------------------------------------------------------- loops
def _with_loops_that_keep(graph: Graph) -> Graph:
    """A graph where the scans of the forward pass also keep what the backward pass wants of them.

    The gradient of a scan runs it once more, with further results.
    """
    scans = [n for n in graph.nodes if n.op.name == "scan"]
    longer: dict[Graph, Graph] = {}
    for node in scans:
        body = node.attrs["body"]
        for other in scans:
            more = other.attrs["body"]
            if len(more.outputs) > len(longer.get(body, body).outputs) and _start_with(
                    more.inputs, body.inputs) and _start_with(more.outputs, body.outputs):
                longer[body] = more

    def visit(node: Node) -> tuple[Value, ...] | None:
        if node.op.name != "scan" or node.attrs["body"] not in longer:
            return None
        found = apply(node.op, node.inputs, {**node.attrs, "body": longer[node.attrs["body"]]})
        return tuple(found[:len(node.outputs)])

    return common_subexpressions(sweep(graph, visit))


def _start_with(values: Sequence[Value], first: Sequence[Value]) -> bool:
    return all(a is b for a, b in zip(values, first))


def _results_of_loops(forward: Graph, gradients: Sequence[Value]) -> list[Value]:
    """What loops and branches of the forward pass answer and the backward pass wants."""
    own = {n for n in forward.nodes if any(isinstance(a, Graph) for a in n.attrs.values())}
    both = set(forward.nodes)
    wanted = {v: None for n in Graph("", (), tuple(gradients)).nodes if n not in both
              for v in n.inputs if v is not None and v.node in own}
    return list(wanted)
