"""Control flow that depends on values: cond, while_loop and scan hold graphs as attributes.

The functions a user gives are traced into graphs whose inputs are the operands. Values of the
surrounding trace that a function mentions become further operands by themselves, so every graph
inside a node is closed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from terrazzo.base.nests import flatten, pack
from terrazzo.base.shapes import dims_text
from terrazzo.dtypes import as_dtype, result_type
from terrazzo.errors import ArgumentError, DTypeError, NotDifferentiable, ShapeError, user_location
from terrazzo.graph.applying import apply, constant
from terrazzo.graph.ir import Graph, Node, Operator, TensorType, Value
from terrazzo.graph.trace import trace
from terrazzo.index import Index
from terrazzo.index.guards import all_equal, granted
from terrazzo.ops.define import FrontedOperator, fronted

State = TypeVar("State")
Result = TypeVar("Result")


# ---------------------------------------------------------------- nested arguments
def _tensors(leaves: Sequence[Any]) -> list[Any]:
    """Leaves with Python numbers made into arrays of the default types."""
    return [leaf if hasattr(leaf, "dtype") else np.asarray(leaf, result_type(leaf).np)
            for leaf in leaves]


def _type_of(x: Any) -> TensorType:
    return x.type if isinstance(x, Value) else TensorType(tuple(x.shape), as_dtype(x.dtype))


def _subgraph(function: Callable[..., Any], structure: Any, types: Sequence[TensorType],
              name: str) -> tuple[Graph, Any]:
    """The graph of a function of nested arguments, given the types of their leaves."""
    return trace(lambda *flat: function(*pack(structure, flat)), types, name=name)


# ---------------------------------------------------------------- closing over outer values
def _mark() -> int:
    """A number between those of the nodes made so far and of those made later."""
    node = constant(0).node
    assert node is not None
    return node.serial


def _close(graphs: Sequence[Graph], mark: int) -> tuple[list[Value], list[Graph]]:
    """Graphs that take what they mention of the surrounding trace as further inputs.

    All get the same further inputs, so one list of operands serves them all.
    """
    captured: dict[Value, None] = {}
    inner = [_inner_nodes(graph, mark, captured) for graph in graphs]
    closed = []
    for graph, nodes in zip(graphs, inner):
        table = {v: Value(v.type, name=v.name) for v in captured}
        extra = tuple(table.values())
        for node in nodes:
            inputs = tuple(None if v is None else table.get(v, v) for v in node.inputs)
            if any(a is not b for a, b in zip(inputs, node.inputs)):
                fresh = Node(node.op, inputs, node.attrs, node.types, node.where).outputs
                table.update(zip(node.outputs, fresh))
        closed.append(Graph(graph.name, graph.inputs + extra,
                            tuple(table.get(v, v) for v in graph.outputs)))
    return list(captured), closed


def _inner_nodes(graph: Graph, mark: int, captured: dict[Value, None]) -> list[Node]:
    """The nodes of a graph that were made in its own trace, producers first."""
    own = set(graph.inputs)
    order: dict[Node, None] = {}
    stack: list[tuple[Value, bool]] = [(v, False) for v in reversed(graph.outputs)]
    while stack:
        value, ready = stack.pop()
        node = value.node
        if value in own or value in captured or node in order:
            continue
        if node is None or (node.serial < mark and node.inputs):
            captured.setdefault(value)
        elif ready:
            order.setdefault(node)
        else:
            stack.append((value, True))
            stack.extend((v, False) for v in reversed(node.inputs) if v is not None)
    return list(order)


def _run(graph: Graph, arrays: Sequence[Any], types: Sequence[TensorType]) -> list[np.ndarray]:
    """Evaluate a graph, in float64 where that is what the results are wanted in."""
    from terrazzo.graph.evaluate import run

    wide = any(t.dtype is not v.dtype for t, v in zip(types, graph.outputs))
    return run(graph, arrays, wide=wide)


def _define(name: str, params: Callable[..., None], front: Callable[..., Any],
            **rules: Any) -> FrontedOperator:
    """Register an operator whose attributes are graphs; it runs on the host, node by node."""
    op = Operator(name, inspect.signature(params), kind="opaque", family="control",
                  doc=inspect.getdoc(front) or "", **rules)
    return fronted(op, front)


def _check_operands(name: str, graph: Graph, types: Sequence[TensorType]) -> None:
    wanted = [v.type for v in graph.inputs]
    if len(wanted) != len(types) or not all(map(_same_type, wanted, types)):
        raise ArgumentError(
            f"{name}: the graph {graph.name} takes ({', '.join(map(str, wanted))}), but is given "
            f"({', '.join(map(str, types))})", where=user_location())


def _same_type(a: TensorType, b: TensorType) -> bool:
    return a.dtype is b.dtype and all_equal(a.shape, b.shape)


def _check_same(what: str, hint: str, a: Sequence[TensorType], b: Sequence[TensorType]) -> None:
    if len(a) != len(b) or not all(map(_same_type, a, b)):
        raise DTypeError(f"{what}: ({', '.join(map(str, a))}) and ({', '.join(map(str, b))})",
                         where=user_location(), hint=hint)


def _check_predicate(name: str, pred: TensorType) -> None:
    if pred.shape != () or not (pred.dtype.is_bool or pred.dtype.is_integer):
        raise DTypeError(f"{name} needs a single truth value to decide by, not {pred}",
                         where=user_location(),
                         hint="reduce it with tz.all(x) or tz.any(x), or choose by element with "
                              "tz.where")


def _floats(values: Sequence[Any]) -> list[bool]:
    return [v.dtype.is_float for v in values]


def _chosen(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    return [v for v, flag in zip(values, flags, strict=True) if flag]


def _spread(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    """The values at the places flagged, None at the others."""
    source = iter(values)
    return [next(source) if flag else None for flag in flags]


# ---------------------------------------------------------------- cond
def _cond_type(pred: TensorType, *operands: TensorType, then_graph: Graph,
               else_graph: Graph) -> tuple[TensorType, ...]:
    _check_predicate("cond", pred)
    for graph in (then_graph, else_graph):
        _check_operands("cond", graph, operands)
    types = tuple(v.type for v in then_graph.outputs)
    _check_same("the branches of cond give different types",
                "cast or reshape the results so that both branches agree",
                types, [v.type for v in else_graph.outputs])
    return types


def _cond_numpy(pred: np.ndarray, *operands: np.ndarray, then_graph: Graph, else_graph: Graph,
                out: Any) -> list[np.ndarray]:
    types = out if isinstance(out, tuple) else (out,)
    return _run(then_graph if bool(pred) else else_graph, operands, types)


def _cond_grad(node: Node, *gs: Value | None) -> list[Value | None]:
    """The gradient of the branch that was taken: a cond of the two gradients."""
    from terrazzo.graph.autodiff import vjp_graph

    pred, *operands = node.inputs
    flags = _floats(operands)
    found = apply(cond, [pred, *operands, *(g for g in gs if g is not None)],
                  {k: vjp_graph(node.attrs[k]) for k in ("then_graph", "else_graph")})
    return [None, *_spread(found, flags)]


def _cond_front(pred: Any, then_fn: Callable[..., Result], else_fn: Callable[..., Result],
                *operands: Any) -> Result:
    """then_fn(*operands) if pred else else_fn(*operands), of which only one runs

    The functions may mention values around them. Both must give results of the same types.

    >>> import numpy as np, terrazzo as tz
    >>> halved = tz.jit(lambda x: tz.cond(tz.sum(x) > 1, lambda a: a / 2, lambda a: a, x))
    >>> halved(np.array([3.0, 1.0]))
    array([1.5, 0.5])
    """
    leaves: list[Any] = []
    structure = flatten(operands, leaves)
    tensors = _tensors(leaves)
    types = [_type_of(t) for t in tensors]
    mark = _mark()
    yes, yes_structure = _subgraph(then_fn, structure, types, "then")
    no, no_structure = _subgraph(else_fn, structure, types, "else")
    if yes_structure != no_structure:
        raise ArgumentError("the branches of cond give results of different nesting",
                            where=user_location(),
                            hint="return the same tuples, lists and dicts from both")
    captured, (yes, no) = _close([yes, no], mark)
    result = Operator.__call__(cond, *_tensors([pred]), *tensors, *captured, then_graph=yes,
                               else_graph=no)
    return pack(yes_structure, result)


cond = _define("cond", lambda pred, *operands, then_graph, else_graph: None, _cond_front,
               infer=_cond_type, reference=_cond_numpy, grad=_cond_grad)


# ---------------------------------------------------------------- while_loop
def _while_type(*operands: TensorType, cond_graph: Graph, body_graph: Graph,
                carries: int) -> tuple[TensorType, ...]:
    for graph in (cond_graph, body_graph):
        _check_operands("while_loop", graph, operands)
    if len(cond_graph.outputs) != 1:
        raise ArgumentError("the condition of while_loop gives more than one result",
                            where=user_location(), hint="return a single truth value")
    _check_predicate("while_loop", cond_graph.outputs[0].type)
    types = operands[:carries]
    _check_same("the body of while_loop changes the types of what it carries",
                "cast or reshape so that the body returns what it was given", types,
                [v.type for v in body_graph.outputs])
    return types


def _while_numpy(*operands: np.ndarray, cond_graph: Graph, body_graph: Graph, carries: int,
                 out: Any) -> list[np.ndarray]:
    types = out if isinstance(out, tuple) else (out,)
    state, rest = list(operands[:carries]), list(operands[carries:])
    truth = [v.type for v in cond_graph.outputs]
    while bool(_run(cond_graph, state + rest, truth)[0]):
        state = _run(body_graph, state + rest, types)
    return state


def _while_grad(node: Node, *gs: Value | None) -> list[Value | None]:
    raise NotDifferentiable(
        "a gradient through while_loop would need every state it passes, and their number is not "
        "known", where=node.where or None, hint="use tz.scan with a known length instead")


def _while_front(cond_fn: Callable[[State], Any], body_fn: Callable[[State], State],
                 init: State) -> State:
    """state = body_fn(state) from init as long as cond_fn(state) holds

    The state may be nested tuples, lists and dicts; the body must keep its types. It has no
    gradient; `scan` has.

    >>> import numpy as np, terrazzo as tz
    >>> turns, x = tz.while_loop(lambda s: s[1] < 100, lambda s: (s[0] + 1, 3 * s[1]), (0, 1.0))
    >>> int(turns), float(x)
    (5, 243.0)
    """
    leaves: list[Any] = []
    structure = flatten((init,), leaves)
    tensors = _tensors(leaves)
    types = [_type_of(t) for t in tensors]
    mark = _mark()
    test, _ = _subgraph(cond_fn, structure, types, "condition")
    body, body_structure = _subgraph(body_fn, structure, types, "body")
    if body_structure != structure[0]:
        raise ArgumentError("the body of while_loop gives a state of another nesting than init",
                            where=user_location(), hint="return the same tuples, lists and dicts")
    captured, (test, body) = _close([test, body], mark)
    result = Operator.__call__(while_loop, *tensors, *captured, cond_graph=test, body_graph=body,
                               carries=len(tensors))
    return pack(structure[0], result)


while_loop = _define(
    "while_loop", lambda *operands, cond_graph, body_graph, carries: None, _while_front,
    infer=_while_type, reference=_while_numpy, grad=_while_grad)


# ---------------------------------------------------------------- scan
def _scan_type(*operands: TensorType, body: Graph, carries: int, sequences: int, length: Index,
               reverse: bool) -> tuple[TensorType, ...]:
    types = operands[:carries]
    rows = []
    for t in operands[carries:carries + sequences]:
        if not t.shape or not granted("==", t.shape[0], length):
            raise ShapeError(f"scan over {length} steps is given a sequence of shape "
                             f"{dims_text(t.shape)}", where=user_location(),
                             hint="the first axis of all of xs must have the length of the scan")
        rows.append(TensorType(t.shape[1:], t.dtype))
    _check_operands("scan", body, [*types, *rows, *operands[carries + sequences:]])
    results = [v.type for v in body.outputs]
    _check_same("the body of scan changes the types of what it carries",
                "cast or reshape so that the carry it returns is like the one it was given", types,
                results[:carries])
    return (*types, *(TensorType((length, *t.shape), t.dtype) for t in results[carries:]))


def _scan_numpy(*operands: np.ndarray, body: Graph, carries: int, sequences: int, length: Any,
                reverse: bool, out: Any) -> list[np.ndarray]:
    types = out if isinstance(out, tuple) else (out,)
    state = list(operands[:carries])
    xs = operands[carries:carries + sequences]
    rest = list(operands[carries + sequences:])
    stacked = [np.zeros(t.shape, t.dtype.np) for t in types[carries:]]
    for k in range(int(length))[::-1 if reverse else 1]:
        results = _run(body, [*state, *(np.asarray(x[k]) for x in xs), *rest], types)
        state = results[:carries]
        for y, row in zip(stacked, results[carries:], strict=True):
            y[k] = row
    return [*state, *stacked]


def _scan_grad(node: Node, *gs: Value | None) -> list[Value | None]:
    from terrazzo.ops.scan_gradient import scan_gradient

    return scan_gradient(node, gs)


def _scan_front(fn: Callable[[State, Any], tuple[State, Result]], init: State, xs: Any = None, *,
                length: Any = None, reverse: bool = False) -> tuple[State, Result]:
    """carry, y = fn(carry, x) for every row x of xs: the last carry, and all y stacked

    Carry, rows and results may be nested tuples, lists and dicts; the carry keeps its types.
    Without xs, `length` says how many steps, and x is None; `reverse` starts at the last row.

    >>> import numpy as np, terrazzo as tz
    >>> last, all_of_them = tz.scan(lambda h, x: (h / 2 + x, h), 0.0, np.float32([1, 2, 3]))
    >>> float(last), all_of_them.tolist()
    (4.25, [0.0, 1.0, 2.5])
    """
    leaves: list[Any] = []
    structure = flatten((init,), leaves)
    carries = len(leaves)
    x_structure = None if xs is None else flatten(xs, leaves)
    tensors = _tensors(leaves)
    types = [_type_of(t) for t in tensors]
    rows = types[carries:]
    if any(not t.shape for t in rows):
        raise ShapeError("scan walks over the first axis of xs, and a scalar has none",
                         where=user_location(), hint="let fn mention the scalar instead")
    if length is None:
        if not rows:
            raise ArgumentError("scan without xs needs length=", where=user_location())
        length = rows[0].shape[0]
    mark = _mark()
    row_types = [TensorType(t.shape[1:], t.dtype) for t in rows]
    body, out_structure = trace(
        lambda *flat: fn(pack(structure[0], flat),
                         None if xs is None else pack(x_structure, flat)),
        [*types[:carries], *row_types], name="body")
    if not isinstance(out_structure, (tuple, list)) or len(out_structure) != 2:
        raise ArgumentError("the function of scan must return a pair (carry, y)",
                            where=user_location(), hint="return (carry, ()) where there is no y")
    if out_structure[0] != structure[0]:
        raise ArgumentError("the function of scan returns a carry of another nesting than init",
                            where=user_location(), hint="return the same tuples, lists and dicts")
    captured, (body,) = _close([body], mark)
    result = Operator.__call__(scan, *tensors, *captured, body=body, carries=carries,
                               sequences=len(rows), length=length, reverse=reverse)
    return pack(tuple(out_structure), result)


scan = _define(
    "scan", lambda *operands, body, carries, sequences, length, reverse: None, _scan_front,
    infer=_scan_type, reference=_scan_numpy, grad=_scan_grad)
