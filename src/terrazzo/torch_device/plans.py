"""One call of an ATen operator as code of the chip: what is done when it comes for the first time.

The call is a graph of one node where there is a converter (`terrazzo.torch.aten`), else what
torch's decompositions make of it; our compiler makes one plan of that, whose outputs are new
tensors, or those that the operator changes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

from terrazzo.chips.registry import chip_named
from terrazzo.compiler.driver import compile_graph
from terrazzo.compiler.options import Options
from terrazzo.dtypes import as_dtype
from terrazzo.errors import TerrazzoError
from terrazzo.graph.ir import TensorType, Value
from terrazzo.graph.scopes import trace_scope
from terrazzo.knobs import knobs
from terrazzo.ops.gaps import written_with_gaps
from terrazzo.torch.convert import refusal
from terrazzo.torch.decompositions import decompositions
from terrazzo.torch.placement import FORMS
from terrazzo.torch.segment import Piece, is_dense, results, traced
from terrazzo.torch_device.forms import Form, form_of
from terrazzo.torch_device.start import name, start

_fakes = FakeTensorMode(allow_non_fake_inputs=True)


@dataclass(eq=False)
class _Given:
    """The arguments of a call, as nodes of a graph and as tensors without data."""

    flat: bool = False  # whether tensors with gaps are read out of memory by computed places
    graph: FxGraph = field(default_factory=FxGraph)
    tensors: list[Any] = field(default_factory=list)  # fakes of the device's, in their order
    inputs: dict[Node, int] = field(default_factory=dict)  # tensors; ~n: number n
    numbers: dict[Node, Value] = field(default_factory=dict)
    views: list[Node] = field(default_factory=list)  # of memory with gaps
    seen: int = 0  # numbers so far

    def argument(self, arg: Any, reads: bool) -> tuple[Any, Any]:
        """An argument as a node and as a fake one; `reads`: numbers are read when the plan runs."""
        if isinstance(arg, torch.Tensor):
            return self._tensor(arg)
        if isinstance(arg, (list, tuple)):
            self.seen += sum(type(a) is float for a in arg)  # numbers that no plan reads
            pairs = [self.argument(a, reads) for a in arg]
            return [n for n, _ in pairs], [f for _, f in pairs]
        return arg, arg

    def number(self, arg: Any, reads: bool) -> tuple[Any, Any]:
        place, self.seen = self.seen, self.seen + 1
        if not reads:
            return arg, arg
        node = self.graph.placeholder(f"n{place}")
        node.meta["val"] = arg
        self.inputs[node] = ~place
        kind = "int64" if isinstance(arg, int) else "float64"
        self.numbers[node] = Value(TensorType((), as_dtype(kind)), name=node.name)
        return node, arg

    def forget(self, node: Any) -> None:
        """Take a tensor out of the inputs that is written and never read."""
        if node in self.views:
            self.views.remove(node)
            node = node.args[0]
        self.inputs.pop(node, None)

    def _tensor(self, tensor: Any) -> tuple[Any, Any]:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if tensor.device.type == "cpu":  # of no dimensions: it comes as a number does
            place, self.seen = ~self.seen, self.seen + 1
        else:
            place = len(self.tensors)
            self.tensors.append(fake)
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        self.inputs[node] = place
        node.meta["val"] = fake
        if self.flat and not is_dense(fake):
            span = 1 + sum((n - 1) * s for n, s in zip(fake.shape, fake.stride()))
            node.meta["val"] = torch.empty(span, dtype=fake.dtype)
            how = (list(fake.shape), list(fake.stride()), 0)
            node = self.graph.call_function(torch.ops.aten.as_strided.default, (node, *how))
            node.meta["val"] = fake
            self.views.append(node)
        return node, fake


def compiled_call(operator_name: str, overload: str, args: Sequence[Any], reads_numbers: bool
                  ) -> Any:
    """The plan of a call; None where there is none and the CPU has to do it."""
    packet = getattr(torch.ops.aten, operator_name.removeprefix("aten::"), None)
    if packet is None or not operator_name.startswith("aten::"):
        return None
    form = form_of(getattr(packet, overload or "default"))
    if form is None:
        return None
    chip_named(name())  # that there is no such chip is an error, and nothing for the CPU
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        try:
            return _plan(form, args, reads_numbers, flat=form.is_copy)
        except _Unread:
            flat = True
        except (TerrazzoError, *FORMS):
            return None
        try:
            return _plan(form, args, reads_numbers, flat)
        except (TerrazzoError, *FORMS):
            return None


class _Unread(Exception):
    """Code that was asked to read a tensor with gaps by its strides cannot."""


def _plan(form: Form, args: Sequence[Any], reads_numbers: bool, flat: bool) -> Any:
    given = _Given(flat)
    with _fakes:  # constants of the code are tensors of the device, so it is not made in here
        traced_call = _traced(form, args, given, reads_numbers)
    if traced_call is None:
        return None
    return _compiled(form, *traced_call, given)


def _traced(form: Form, args: Sequence[Any], given: _Given, reads_numbers: bool
            ) -> tuple[Piece, list[Node | None], list[_Target]] | None:
    nodes, fakes = [], []
    for arg, kind in zip(args, form.kinds, strict=True):
        is_number = kind == "number" and type(arg) in (int, float)
        node, fake = (given.number if is_number else given.argument)(arg, reads_numbers)
        nodes.append(node)
        fakes.append(fake)
    for i in {*form.targets} - form.read:
        given.forget(nodes[i])
    if any(refusal(t) is not None for t in given.tensors):
        return None
    piece, outputs = (_one_node if form.is_converted else _decomposed)(form, given, nodes, fakes)
    targets = [_target(form, i, given, fakes, node) for i, node in enumerate(outputs)]
    if None in targets:
        return None
    return piece, outputs, [t for t in targets if t is not None]


def _one_node(form: Form, given: _Given, nodes: Sequence[Any], fakes: Sequence[Any]
              ) -> tuple[Piece, list[Node | None]]:
    args, kwargs = form.functional_arguments(nodes)
    fake_args, fake_kwargs = form.functional_arguments(fakes)
    made = form.function(*fake_args, **fake_kwargs)
    node = given.graph.call_function(form.function, tuple(args), kwargs)
    node.meta["val"] = made
    found: list[Node | None] = []
    parts = made if isinstance(made, (tuple, list)) else [made]
    for i, part in enumerate(parts):
        if part is None:
            found.append(None)
        elif part is made:
            found.append(node)
        else:
            one = given.graph.call_function(operator.getitem, (node, i))
            one.meta["val"] = part
            found.append(one)
    inside = [n for n in found if n is not None and n is not node]
    module = GraphModule({}, given.graph)
    return Piece(form.title, module, (*given.views, node, *inside), tuple(
        n for n in given.inputs if n not in given.numbers),
        tuple(n for n in found if n is not None)), found


def _decomposed(form: Form, given: _Given, nodes: Sequence[Any], fakes: Sequence[Any]
                ) -> tuple[Piece, list[Node | None]]:
    """The same of what torch makes of the operator; numbers are those of this call."""
    from torch.fx.experimental.proxy_tensor import make_fx

    if given.numbers:
        raise TypeError("numbers that a decomposition may look at")
    order = list(given.inputs)
    values = [node.meta["val"] for node in order]

    def call(*tensors: Any) -> Any:
        table = dict(zip(order, tensors))
        args, kwargs = form.functional_arguments(nodes)
        made = form.function(*_replaced(args, table), **{
            key: _replaced(arg, table) for key, arg in kwargs.items()})
        return tuple(made) if isinstance(made, (tuple, list)) else (made,)

    module = make_fx(call, decomposition_table=decompositions(), tracing_mode="real")(*values)
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    given.inputs = {n: given.inputs[old] for n, old in zip(inputs, order, strict=True)}
    found = [n if isinstance(n, Node) else None for n in
             next(n for n in module.graph.nodes if n.op == "output").args[0]]
    inside = tuple(n for n in module.graph.nodes if n.op == "call_function")
    return Piece(form.title, module, inside, tuple(inputs),
                 tuple(n for n in found if n is not None)), found


def _replaced(arg: Any, table: dict[Node, Any]) -> Any:
    if isinstance(arg, Node):
        if arg not in table:  # a view of memory with gaps
            table[arg] = arg.target(table[arg.args[0]], *arg.args[1:])
        return table[arg]
    if isinstance(arg, (list, tuple)):
        return [_replaced(a, table) for a in arg]
    return arg


# ---------------------------------------------------------------- where results go
@dataclass(frozen=True)
class _Target:
    tensor: int = -1  # of the call; -1: a new one
    is_input: bool = False  # whether the operator reads it as well
    gaps: bool = False  # whether it is written by its strides


def _target(form: Form, i: int, given: _Given, fakes: Sequence[Any], node: Node | None
            ) -> _Target | None:
    """Where a result goes; None where our code cannot put it there."""
    if not form.targets or node is None or i < form.fresh:
        return _Target()
    argument = form.targets[i - form.fresh]
    wanted, made = fakes[argument], node.meta["val"]
    if not isinstance(wanted, torch.Tensor) or not torch.can_cast(made.dtype, wanted.dtype):
        return None
    place = next(n for n, t in enumerate(given.tensors) if t is wanted)
    if wanted.shape != made.shape:  # an empty one becomes the result
        is_new = wanted.numel() == 0 and argument not in form.read and wanted.dtype is made.dtype
        return _Target(place) if is_new else None
    if wanted.dtype is made.dtype and is_dense(wanted):
        node.meta["val"] = wanted  # it is stored as it lies there
    elif form.is_copy:
        node.meta["val"] = torch.empty(wanted.shape, dtype=wanted.dtype)
        return _Target(place, gaps=True) if _is_apart(wanted) else None
    return _Target(place, argument in form.read)


def _is_apart(fake: Any) -> bool:
    """Whether each element of a tensor with gaps has a place of its own."""
    step = 1
    for s, n in sorted((s, n) for n, s in zip(fake.shape, fake.stride()) if n > 1):
        if s < step:
            return False
        step += (n - 1) * s
    return True


def _compiled(form: Form, piece: Piece, outputs: Sequence[Node | None],
              targets: Sequence[_Target], given: _Given) -> Any:
    kept = [t for t, node in zip(targets, outputs) if node is not None]
    if not any(node.meta["val"].numel() for node in piece.outputs):
        if given.numbers:  # fails where a number decides sizes, which are those of this call
            traced(piece, {}, {}, given.numbers)
        made = [(r.shape, r.strides, r.dtype, t.tensor,
                 t.tensor >= 0 and given.tensors[t.tensor].shape == r.shape)
                for r, t in zip(results(piece, {}), kept)]
        return _native().Plan(0, [], [], made, _returns(form, outputs, targets), 0,
                              bool(given.numbers), None)
    graph, nodes, _ = traced(piece, {}, {}, given.numbers)
    if kept[0].gaps:
        with trace_scope():
            graph = replace(graph, outputs=(written_with_gaps(
                graph.outputs[0], strides=given.tensors[kept[0].tensor].stride()),))
    places = [given.inputs[n] for n in (*nodes, *given.numbers)]
    over = tuple(places.index(t.tensor) if t.is_input and t.tensor in places else None
                 for t in kept)
    strides = [*(_strides(n.meta["val"]) for n in nodes), *(None for _ in given.numbers)]
    executable = compile_graph(graph, _chip(), tuple(strides), over, options=Options(knobs.now))
    code = getattr(executable, "code", None)
    if code is None:
        return None
    if any(wanted is not None and found is None
           for wanted, found in zip(strides, executable.strides)):
        raise _Unread
    made = []
    for i, (result, target, node) in enumerate(zip(results(piece, {}), kept, piece.outputs)):
        if result.spread is not None:
            return None
        wanted = given.tensors[target.tensor] if target.tensor >= 0 else None
        direct = target.gaps or (wanted is not None and node.meta["val"] is wanted and (
            not target.is_input or (over[i] is not None and executable.over[i] == over[i])
            or target.tensor not in places))
        made.append((result.shape, result.strides, result.dtype, target.tensor, direct))
    types = [getattr(torch, value.dtype.name) for value, place in zip(graph.inputs, places)
             if place < 0]
    if any(t in (torch.float16, torch.bfloat16) for t in types):
        return None
    return _native().Plan(
        code.function, places, types, made, _returns(form, outputs, targets),
        executable.arena_size(()), 0 < given.seen == len(types), executable)


def _returns(form: Form, outputs: Sequence[Node | None], targets: Sequence[_Target]
             ) -> list[tuple[str, int]]:
    made, at = [], 0
    for node, target in zip(outputs, targets):
        if node is None:
            made.append(("n", 0))
            continue
        made.append(("t", target.tensor) if target.tensor >= 0 else ("o", at))
        at += 1
    return made[:form.returns]


def _strides(fake: Any) -> tuple[int, ...] | None:
    """The strides of an input that has gaps or repeats; dense ones are read as they lie."""
    if is_dense(fake):
        return None
    return tuple(0 if n == 1 else s for n, s in zip(fake.shape, fake.stride()))


@cache
def _chip() -> Any:
    return chip_named(name())


def _native() -> ModuleType:
    return start()
