"""Which calls of an FX graph run in our code, and in what order pieces of it run.

Every call is tried out with its converter. What has none, or is refused, runs in torch in between.
Pieces are as few as dependences allow: a call belongs to the first level of its kind (ours even,
torch's odd) at which all that it needs is there. Views of what torch or the caller holds are made
wherever they are wanted, and are no reason for a piece of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from terrazzo.errors import TerrazzoError, UnsupportedOperator
from terrazzo.graph.scopes import trace_scope
from terrazzo.index.guards import CallQuestions, asking
from terrazzo.torch.aten.shapes import PARTS, VIEWS
from terrazzo.torch.convert import READS, Conversion, converted, fresh, location, refusal
from terrazzo.torch.devices import device_of
from terrazzo.torch.symbols import Names, hints_in, symbols_in, variable

# How code fails that was given a call in a form that it was not written for.
FORMS = (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError, AssertionError,
         ArithmeticError)


@dataclass(frozen=True)
class Reason:
    """Why a call runs in torch."""

    operator: str
    why: str
    where: str  # in the user's code

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return f"{self.operator}{place}: {self.why}"


@dataclass(frozen=True, eq=False)
class Placement:
    """Levels of calls: even ones are pieces of ours, odd ones calls of torch."""

    level: Mapping[Node, int]
    reasons: Mapping[Node, Reason]
    hints: Mapping[str, int]  # sizes of the call that was traced, by torch's symbols
    unbacked: frozenset[str]  # sizes that only data tells

    @property
    def levels(self) -> list[int]:
        return sorted(set(self.level.values()))


def tensors_in(val: Any) -> Iterator[Any]:
    """The tensors that a call answers with."""
    if isinstance(val, torch.Tensor):
        yield val
    elif isinstance(val, (tuple, list)):
        for v in val:
            yield from tensors_in(v)


def is_scalar(node: Node) -> bool:
    """Whether a node is a number of Python's."""
    val = node.meta.get("val")
    return isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def sizes_of(gm: GraphModule) -> tuple[dict[str, int], frozenset[str]]:
    """The symbols of all sizes with what they are in this call, and those that have no number."""
    hints: dict[str, int] = {}
    names: set[str] = set()
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        sizes = [n for t in tensors_in(val) for n in (*t.shape, *_strides(t))]
        if isinstance(val, torch.SymInt):
            sizes.append(val)
        for n in sizes:
            if isinstance(n, torch.SymInt):
                names |= symbols_in(n)
                hints.update(hints_in(n))
    return hints, frozenset(names - hints.keys())


def _strides(tensor: Any) -> tuple[Any, ...]:
    return tuple(tensor.stride()) if tensor.layout is torch.strided else ()


def trial_names(hints: Mapping[str, int]) -> Names:
    """Variables for the symbols that have a number."""
    return {name: variable(name) for name in hints}


def place(gm: GraphModule, forced: Mapping[Node, str]) -> Placement:
    """Decide where every call runs; `forced` names some that are known to be torch's, and why."""
    hints, unbacked = sizes_of(gm)
    names = {**trial_names(hints), **trial_names(dict.fromkeys(unbacked, 2))}
    reasons: dict[Node, Reason] = {}
    into = Conversion({}, names, lambda path: _attribute(gm, path))
    device = device_of(n.meta.get("val") for n in gm.graph.nodes)
    numbers = {**{names[n]: v for n, v in hints.items()}, **{names[n]: 7 for n in unbacked}}
    with asking(CallQuestions(numbers)), trace_scope():
        for node in gm.graph.nodes:
            why = forced.get(node) or _elsewhere(node, device) or _tried(node, into)
            if why is not None:
                reasons[node] = Reason(str(node.target), why, location(node))
    return Placement(_levels(gm, reasons), reasons, hints, unbacked)


def _elsewhere(node: Node, device: torch.device) -> str | None:
    """Why a call is none of a graph's device: a number that is made on the host, for one."""
    if node.op != "call_function" or is_scalar(node) or node.target is operator.getitem:
        return None
    other = next((t.device for t in tensors_in(node.meta.get("val")) if t.device != device), None)
    return None if other is None else f"a tensor on {other}, where the others are on {device}"


def _attribute(gm: GraphModule, path: str) -> Any:
    return operator.attrgetter(path)(gm)


def _tried(node: Node, into: Conversion) -> str | None:
    """Why a call cannot be converted; None where it can, and for what is no call."""
    try:
        if node.op == "placeholder":
            if isinstance(node.meta.get("val"), torch.Tensor) and not refusal(node.meta["val"]):
                into.values[node] = fresh(node, into.names)
        elif node.op == "call_function" and node.target is operator.getitem:
            source, index = node.args
            if isinstance(source, Node) and source in into.values:
                found = into.values[source][index]
                if found is None and any(not is_dead(u) for u in node.users):
                    return "a result that there is no code for"
                into.values[node] = found
            else:
                _hold(node, into)
        elif node.op == "call_function" and not is_scalar(node):
            into.values[node] = converted(node, into)
    except TerrazzoError as error:
        _hold(node, into)
        return _short(error)
    except FORMS as error:
        # A call in a form that its converter was not written for.
        _hold(node, into)
        return f"{type(error).__name__}: {_short(error)}"
    return None


def is_dead(node: Node) -> bool:
    """Whether nobody uses a node."""
    return node.op != "output" and not node.users


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:300]


def _hold(node: Node, into: Conversion) -> None:
    """What torch computes is an input of what follows, where our code can hold it."""
    into.values.pop(node, None)
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        try:
            into.values[node] = fresh(node, into.names)
        except UnsupportedOperator:
            return


def base_of(node: Node, reasons: Mapping[Node, Any]) -> Node | None:
    """What a node is a view of, where it is one that we may make anywhere."""
    if node.op != "call_function" or node in reasons or not node.args:
        return None
    source = node.args[0]
    if not isinstance(source, Node):
        return None
    if node.target is operator.getitem:
        if str(source.target) in PARTS and source not in reasons:
            return source.args[0] if isinstance(source.args[0], Node) else None
        return None
    return source if str(node.target) in VIEWS else None


def root_of(node: Node, reasons: Mapping[Node, Any]) -> Node:
    """What a chain of such views begins with."""
    base = base_of(node, reasons)
    while base is not None:
        node, base = base, base_of(base, reasons)
    return node


def _levels(gm: GraphModule, reasons: Mapping[Node, Reason]) -> dict[Node, int]:
    level: dict[Node, int] = {}
    numbers: dict[Node, int] = {}  # levels at which numbers are known that are computed anywhere
    ordered = -1  # of the last call whose order counts: random numbers, effects

    def ready(node: Node) -> int:
        """The level at which something may be used."""
        root = root_of(node, reasons)
        own = level.get(node, -1)  # a view may take a number that is known later than its root
        if root.op == "call_function" and root.target is operator.getitem:
            return max(own, ready(root.args[0]))
        return max(own, level.get(root, numbers.get(root, -1)))

    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        ours = node not in reasons and not is_scalar(node)
        least = max((ready(n) for n in node.all_input_nodes), default=-1)
        if ours:
            parts = str(node.target) in PARTS and isinstance(node.args[0], Node)
            root = root_of(node.args[0] if parts else node, reasons)
            if root is not node and ready(root) % 2:
                continue  # a view of what is held outside: made wherever it is wanted
            level[node] = least if least % 2 == 0 else least + 1
            continue
        if is_scalar(node) and str(node.target) != READS and all(
                n.op == "placeholder" or (is_scalar(n) and n not in level)
                for n in node.all_input_nodes):
            numbers[node] = least
            continue  # computed wherever it is wanted
        if _is_ordered(node):
            least = max(least, ordered)
        level[node] = least if least % 2 else least + 1
        if _is_ordered(node):
            ordered = level[node]
    return level


def _is_ordered(node: Node) -> bool:
    """Whether torch's calls before and after this one must stay so."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True  # higher-order operators: nobody knows what is inside
    return torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable
