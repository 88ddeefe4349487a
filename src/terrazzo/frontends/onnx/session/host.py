"""What the host runs between compiled parts: control flow, dynamic shapes, and the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from terrazzo.dtypes import as_dtype
from terrazzo.errors import DTypeError, ModelError, TerrazzoError, UnsupportedOperator
from terrazzo.frontends.onnx.functions import (
    function_body,
    has_function,
    missing_part,
    opset_table,
    proto_of,
    steps_of,
)
from terrazzo.frontends.onnx.importer import MISFITS
from terrazzo.frontends.onnx.model import needed_names, node_text, outer_names, tensor_array
from terrazzo.frontends.onnx.reasons import Reason
from terrazzo.frontends.onnx.registry import attribute_value
from terrazzo.frontends.onnx.session import host_microsoft, host_ml, host_strings, host_tokens
from terrazzo.frontends.onnx.session.host_ops import (
    HOST_OPS,
    MAKERS,
    PLAIN,
    STEADY,
    TELLERS,
    HostOp,
    NodeAttributes,
)
from terrazzo.frontends.onnx.session.reference import ReferenceNode
from terrazzo.graph.ir import TensorType

if TYPE_CHECKING:
    from terrazzo.frontends.onnx.session.block import Block

assert host_ml and host_microsoft and host_strings and host_tokens  # they register what they run
Env = Mapping[str, Any]


def type_of(value: Any) -> TensorType | None:
    """The type of what can be given to compiled code; None for strings, sequences and the like."""
    if not hasattr(value, "dtype"):
        return None
    try:
        return TensorType(tuple(value.shape), as_dtype(value.dtype))
    except DTypeError:
        return None


# A function, its first two arguments, and the names of the inputs that are the third.
Direct = tuple[HostOp, Mapping[str, Any], int, tuple[str, ...]]


class HostStep(Protocol):
    """A node that the host runs."""

    where: str  # "host" or "reference"
    makes: bool  # whether its results are new in every run
    steady: bool  # whether they lie alike wherever its inputs do
    tells: bool  # whether they are equal wherever its inputs lie alike
    direct: Direct | None  # what it calls, for those who know its inputs
    outputs: tuple[str, ...]  # their names, "" for those that nobody reads

    def run(self, env: Env) -> Sequence[Any]:
        """The node's outputs in order."""
        ...


class _Step:
    def __init__(self, node: Any, function: Callable[[Env], Sequence[Any]], where: str = "host",
                 makes: bool = False, steady: bool = False, tells: bool = False,
                 direct: Direct | None = None):
        self.node, self.function, self.where, self.makes = node, function, where, makes
        self.steady, self.tells, self.direct = steady or tells, tells, direct
        self.outputs = tuple(node.output)

    def run(self, env: Env) -> Sequence[Any]:
        try:
            return self.function(env)
        except MISFITS as error:
            raise _no_sense(self.node, error) from error


def _no_sense(node: Any, error: Exception) -> TerrazzoError:
    """What Python objects to in a node's attributes or inputs is the model's mistake."""
    return error if isinstance(error, TerrazzoError) else ModelError(
        f"{node_text(node)} makes no sense: {type(error).__name__}: {error}")


def host_step(node: Any, why: Reason, block: Block) -> HostStep:
    """The way to run a node that is not compiled; UnsupportedOperator when there is none."""
    setting = block.setting
    missing = missing_part(node, setting.opsets)
    if missing is not None:
        raise ModelError(f"{node_text(node)} has no {missing}", where=setting.where or None)
    domain = "" if node.domain == "ai.onnx" else node.domain
    attrs = NodeAttributes({a.name: attribute_value(a, setting.where) for a in node.attribute},
                           len(node.output))
    if not domain and node.op_type in CONTROL:
        try:
            return _Step(node, CONTROL[node.op_type](node, attrs, block))
        except MISFITS as error:
            raise _no_sense(node, error) from error
    function = HOST_OPS.get((domain, node.op_type))
    if function is not None:
        version, names = setting.opsets.get(domain, 1), tuple(node.input)

        def run(env: Env) -> Sequence[Any]:
            return function(attrs, version, [env[n] if n else None for n in names])

        name = (domain, node.op_type)
        return _Step(node, run, makes=name in MAKERS, steady=name in STEADY,
                     tells=name in TELLERS, direct=(PLAIN[name], attrs, version, names))
    body = _defining_function(node, block)
    if body is not None:
        return _Step(node, body)
    if setting.reference:
        setting.announce(node, why)
        return _Step(node, ReferenceNode(node, setting.opsets).run, "reference")
    raise UnsupportedOperator(
        f"{node_text(node)} cannot be compiled: {why}", where=setting.where or None,
        hint="add 'ReferenceExecutionProvider' to the providers to run such nodes in numpy")


# ---------------------------------------------------------------- functions
def _defining_function(node: Any, block: Block) -> Callable[[Env], Sequence[Any]] | None:
    """The function that ONNX defines an operator by, run as a block of its own."""
    from terrazzo.frontends.onnx.session.block import Block

    setting = block.setting
    if not has_function(node, setting.opsets):
        return None
    blocks: dict[Any, tuple[Any, Block]] = {}

    def run(env: Env) -> Sequence[Any]:
        types = {n: proto_of(env[n]) for n in node.input if n}
        key = tuple(map(str, types.values()))
        if key not in blocks:
            body = function_body(node, setting.opsets, types)
            if body is None:
                raise UnsupportedOperator(f"{node_text(node)} has no definition for these types")
            opsets = {**setting.opsets, **opset_table(body.opset_import)}
            inner = replace(setting, opsets=opsets)
            blocks[key] = body, Block(steps_of(node, body), {}, list(body.output), inner,
                                      node.op_type)
        body, inside = blocks[key]
        given = {formal: env[actual] for formal, actual in zip(body.input, node.input)
                 if actual}
        wanted = [formal for formal, actual in zip(body.output, node.output) if actual]
        results = dict(zip(wanted, inside.run(given, wanted), strict=True))
        return [results.get(formal) for formal in body.output]

    return run


# ---------------------------------------------------------------- control flow
def _inner(graph: Any, block: Block, name: str, nodes: Sequence[Any] | None = None,
           outputs: Sequence[str] | None = None) -> Block:
    """A graph inside a node as a block; of a loop's body perhaps without some nodes."""
    from terrazzo.frontends.onnx.session.block import Block

    weights = {t.name: tensor_array(t, None, block.setting.where) for t in graph.initializer}
    return Block(list(graph.node if nodes is None else nodes), weights,
                 outputs or [o.name for o in graph.output], block.setting, name)


def _repeated(block: Block) -> Callable[[Env], list[Any]]:
    """A block as one function, which goes again the ways that it went."""
    from terrazzo.frontends.onnx.session.route import Onward

    names, onward = block.start.varying, Onward(block, block.start, block.wanted, own=False)

    def run(env: Env) -> list[Any]:
        try:
            given = [env[n] for n in names]
        except KeyError:  # perhaps of a branch that is not taken
            return block.run(env)
        return onward(given)

    return run


def _capturing(graph: Any) -> Callable[[Env], dict[str, Any]]:
    """What a graph reads of the values around it."""
    names = tuple(outer_names(graph))
    return lambda env: {n: env[n] for n in names if n in env}


def _scalar(value: Any, what: str) -> Any:
    array = np.asarray(value)
    if array.size != 1:
        raise ModelError(f"{what} should be one value, has shape {array.shape}")
    return array.reshape(-1)[0].item()


def _if(node: Any, attrs: Mapping[str, Any], block: Block) -> Callable[[Env], Sequence[Any]]:
    branches = {taken: _repeated(_inner(attrs[key], block, key)) for taken, key in (
        (True, "then_branch"), (False, "else_branch"))}

    def run(env: Env) -> Sequence[Any]:
        return branches[bool(_scalar(env[node.input[0]], "the condition of If"))](env)

    return run


def _loop(node: Any, attrs: Mapping[str, Any], block: Block) -> Callable[[Env], Sequence[Any]]:
    graph = attrs["body"]
    appends = _appends(graph)
    left = [n for i, n in enumerate(graph.node) if i not in appends.values()]
    wanted = [o.name for o in graph.output]
    for number, at in appends.items():
        wanted[1 + number] = graph.node[at].input[1]
    inner, captured = _repeated(_inner(graph, block, "body", left, wanted)), _capturing(graph)
    names = [i.name for i in graph.input]
    carried_count = len(names) - 2

    def run(env: Env) -> Sequence[Any]:
        inputs = [env[n] if n else None for n in node.input] + [None] * 2
        trips, condition = inputs[0], inputs[1]
        most = None if trips is None else int(_scalar(trips, "the trip count of Loop"))
        going = True if condition is None else bool(_scalar(condition, "Loop's condition"))
        carried = [env[n] for n in node.input[2:]]
        outside = captured(env)
        pieces = {number: [carried[number]] for number in appends}
        collected: list[list[Any]] = [[] for _ in range(len(graph.output) - 1 - carried_count)]
        trip = 0
        while going and (most is None or trip < most):
            scope = {**outside, **dict(zip(names, [np.int64(trip), np.bool_(going), *carried],
                                           strict=True))}
            scope[names[0]] = np.asarray(scope[names[0]])
            scope[names[1]] = np.asarray(scope[names[1]])
            results = inner(scope)
            going = bool(_scalar(results[0], "Loop's condition"))
            carried = list(results[1:1 + carried_count])
            for number, found in pieces.items():
                found.append(carried[number])
            for column, item in zip(collected, results[1 + carried_count:], strict=True):
                column.append(item)
            trip += 1
        for number, found in pieces.items():
            axis = next(a.i for a in graph.node[appends[number]].attribute if a.name == "axis")
            carried[number] = np.concatenate([np.asarray(p) for p in found], axis=axis)
        return [*carried, *(_stacked(c, graph.output[1 + carried_count + i], 0)
                            for i, c in enumerate(collected))]

    return run


def _appends(graph: Any) -> dict[int, int]:
    """Which nodes only append to a value that a loop carries, by the number of that value.

    Nothing else reads it, so its pieces are joined once, after the last trip: to copy all that has
    been found in each trip would take time that grows with the square of their number.
    """
    found = {}
    reads = [set(needed_names(n)) for n in graph.node]
    results = [o.name for o in graph.output]
    maker = {o: i for i, n in enumerate(graph.node) for o in n.output if o}
    for number, (given, made) in enumerate(zip(graph.input[2:], results[1:], strict=False)):
        at = maker.get(made)
        if at is None:
            continue
        node = graph.node[at]
        readers = [i for i, names in enumerate(reads) if given.name in names or made in names]
        if (node.op_type == "Concat" and node.domain in ("", "ai.onnx") and node.attribute
                and len(node.input) == 2 and node.input[0] == given.name != node.input[1]
                and readers == [at] and results.count(made) == 1 and given.name not in results):
            found[number] = at
    return found


def _stacked(items: Sequence[Any], info: Any, axis: int) -> np.ndarray:
    """Results of all trips in one array; without any trip, what the declared type says."""
    if items:
        return np.stack([np.asarray(i) for i in items], axis=axis)
    from onnx import helper

    tensor = info.type.tensor_type
    shape = [d.dim_value for d in tensor.shape.dim]
    return np.empty((0, *shape), helper.tensor_dtype_to_np_dtype(tensor.elem_type or 1))


def _scan(node: Any, attrs: Mapping[str, Any], block: Block) -> Callable[[Env], Sequence[Any]]:
    if block.setting.opsets.get("", 1) < 9:
        return _scan_8(node, attrs, block)
    graph, scanned = attrs["body"], attrs["num_scan_inputs"]
    inner, captured = _repeated(_inner(graph, block, "body")), _capturing(graph)
    states = len(node.input) - scanned
    outputs = len(graph.output) - states

    def listed(name: str, count: int) -> list[int]:
        return list(attrs.get(name) or [0] * count)

    in_axes, out_axes = listed("scan_input_axes", scanned), listed("scan_output_axes", outputs)
    in_back = listed("scan_input_directions", scanned)
    out_back = listed("scan_output_directions", outputs)

    def run(env: Env) -> Sequence[Any]:
        state = [np.asarray(env[n]) for n in node.input[:states]]
        series = [np.moveaxis(np.asarray(env[n]), axis, 0)[::-1 if back else 1] for n, axis, back
                  in zip(node.input[states:], in_axes, in_back, strict=True)]
        outside = captured(env)
        names = [i.name for i in graph.input]
        collected: list[list[Any]] = [[] for _ in range(outputs)]
        lengths = {len(s) for s in series}
        if len(lengths) > 1:
            raise ModelError(f"{node_text(node)} scans inputs of different lengths {lengths}")
        for items in zip(*series, strict=True):
            here = [*state, *(np.array(i) for i in items)]
            results = inner({**outside, **dict(zip(names, here, strict=True))})
            state = [np.asarray(r) for r in results[:states]]
            for column, item in zip(collected, results[states:], strict=True):
                column.append(item)
        stacks = [_stacked(c[::-1] if back else c, graph.output[states + i], axis)
                  for i, (c, axis, back) in enumerate(zip(collected, out_axes, out_back,
                                                          strict=True))]
        return [*state, *stacks]

    return run


def _scan_8(node: Any, attrs: Mapping[str, Any], block: Block) -> Callable[[Env], Sequence[Any]]:
    """Opset 8 scans each member of a batch by itself, over the second axis."""
    graph, scanned = attrs["body"], attrs["num_scan_inputs"]
    inner, captured = _repeated(_inner(graph, block, "body")), _capturing(graph)
    states = len(node.input) - 1 - scanned
    back = list(attrs.get("directions") or [0] * scanned)
    names = [i.name for i in graph.input]

    def run(env: Env) -> Sequence[Any]:
        given = [np.asarray(env[n]) for n in node.input[1:]]
        lengths = env[node.input[0]] if node.input[0] else None
        outside = captured(env)
        members = []
        for b in range(given[0].shape[0]):
            state = [g[b] for g in given[:states]]
            series = [g[b][::-1 if r else 1] for g, r in zip(given[states:], back, strict=True)]
            stop = len(series[0]) if lengths is None else int(lengths[b])
            collected: list[list[Any]] = []
            for t in range(stop):
                here = [*state, *(np.array(s[t]) for s in series)]
                results = inner({**outside, **dict(zip(names, here, strict=True))})
                state = list(results[:states])
                collected.append(list(results[states:]))
            members.append([*state, *(np.stack(c) for c in zip(*collected, strict=True))])
        return [np.stack(column) for column in zip(*members, strict=True)]

    return run


CONTROL: dict[str, Callable[[Any, Mapping[str, Any], Block], Callable[[Env], Sequence[Any]]]] = {
    "If": _if, "Loop": _loop, "Scan": _scan,
}
