"""Which tensors lie channels last, chosen for a whole graph at once.

Convolutions and pooling work on channels last and so stand between two permutes: from channels
first ([N, C, *S], as models are written) and back. What lies between two of them (activations,
sums, joins, padding, means) can be computed in either layout. So every such node chooses one of
two, and a value that is made in one layout and read in the other costs its elements: a minimum cut
finds the cheapest choice of all. So a permute never moves to where it costs more (a second output,
another large operand). Where the costs are equal, a permute back to channels first moves towards
the outputs, as what then follows the convolution becomes part of its kernel; everything else stays.
Of three axes both directions are the same permutation, and moving may go on for ever; so whoever
repeats it goes on only while fewer elements are moved (`permuted_elements`).

`MOVERS` says which operators have a channels-last form, and how each looks then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from terrazzo.base.scalar_table import by_operator
from terrazzo.base.shapes import Shape, normalize_axes, normalize_axis, num_elements
from terrazzo.graph.applying import constant
from terrazzo.graph.ir import Graph, Node, TensorType, Value, operator_named
from terrazzo.graph.min_cut import Network
from terrazzo.graph.patterns import constant_array, same_shape
from terrazzo.graph.rewrite import LEVELS, Applied, describe
from terrazzo.index import evaluate, free_vars

NOMINAL = 16  # what a symbolic size counts as when costs are compared
UNCUTTABLE = float("inf")


# ---------------------------------------------------------------- the two layouts
def last_from_first(rank: int) -> tuple[int, ...]:
    """The axes that bring channels first to channels last: (0, 2, 3, 1) for images."""
    return (0, *range(2, rank), 1)


def first_from_last(rank: int) -> tuple[int, ...]:
    """The axes that bring channels last to channels first: (0, 3, 1, 2) for images."""
    return (0, rank - 1, *range(1, rank - 1))


def _permuted(items: Sequence[Any], axes: Sequence[int]) -> tuple[Any, ...]:
    return tuple(items[a] for a in axes)


def _keeps_order(shape: Shape, axes: Sequence[int]) -> bool:
    """Whether a permutation moves only axes of size 1, and so no element."""
    moved = [a for a in axes if shape[a] != 1]
    return moved == sorted(moved)


def _cost(shape: Shape) -> int:
    """The price of having a tensor in the other layout, too."""
    if len(shape) < 3 or _keeps_order(shape, last_from_first(len(shape))):
        return 1  # a mere reshape, but it still parts what could be one kernel
    return 1 + _elements(shape)


def _elements(shape: Shape) -> int:
    size = num_elements(shape)
    return int(evaluate(size, {v: NOMINAL for v in free_vars(size)}))


def _axes_moved(node: Node) -> tuple[int, ...] | None:
    """The axes of a permute, or of a reshape that does the same."""
    source = node.inputs[0] if node.inputs else None
    if source is None or source.ndim < 3:
        return None
    if node.op.name == "permute_dims":
        return tuple(a % source.ndim for a in node.attrs["axes"])
    if node.op.name == "reshape" and len(node.types[0].shape) == source.ndim:
        for axes in (last_from_first(source.ndim), first_from_last(source.ndim)):
            if _keeps_order(source.shape, axes) and same_shape(
                    _permuted(source.shape, axes), node.types[0].shape):
                return axes
    return None


# ---------------------------------------------------------------- operators with two layouts
class Mover(NamedTuple):
    """How some operators are computed channels last.

    `attrs` gives the attributes in the other layout, or None for a node that has no such form.
    `same_rank` are operators whose operands broadcast: those of lower rank get axes in front.
    """

    name: str
    operators: tuple[str, ...]
    attrs: Callable[[Node], Mapping[str, Any] | None]
    same_rank: bool = False


def _rank(node: Node) -> int:
    assert node.inputs[0] is not None
    return node.inputs[0].ndim


def _unchanged(node: Node) -> Mapping[str, Any]:
    return node.attrs


def _axis_moved(node: Node) -> Mapping[str, Any]:
    axis = normalize_axis(node.attrs["axis"], _rank(node))
    return {**node.attrs, "axis": last_from_first(_rank(node)).index(axis)}


def _reduced_axes_moved(node: Node) -> Mapping[str, Any]:
    order = last_from_first(_rank(node))
    axes = normalize_axes(node.attrs["axis"], _rank(node))
    return {**node.attrs, "axis": tuple(sorted(order.index(a) for a in axes))}


def _every_axis_moved(node: Node) -> Mapping[str, Any] | None:
    """For attributes that hold one entry an axis."""
    rank = _rank(node)
    if len(node.types[0].shape) != rank:
        return None
    each = {k: v for k, v in node.attrs.items() if isinstance(v, (tuple, list)) and len(v) == rank}
    return {**node.attrs, **{k: _permuted(v, last_from_first(rank)) for k, v in each.items()}}


def _taken_axis_moved(node: Node) -> Mapping[str, Any] | None:
    """Slices at a vector of indices: the axis keeps its place."""
    if len(node.inputs) != 2 or node.inputs[1] is None or node.inputs[1].ndim != 1:
        return None
    return {"axes": (last_from_first(_rank(node)).index(node.attrs["axes"][0]),)}


def _places_regrouped(node: Node) -> Mapping[str, Any] | None:
    """[N, C, H, W] as [N, C, H*W] is [N, H, W, C] as [N, H*W, C]: batch and channels stay."""
    shape, source = node.types[0].shape, node.inputs[0]
    assert source is not None
    if len(shape) < 3 or source.ndim < 3 or not same_shape(shape[:2], source.shape[:2]):
        return None
    return {"shape": _permuted(shape, last_from_first(len(shape)))}


def _quantised_axis_moved(node: Node) -> Mapping[str, Any] | None:
    """Scales lie along an axis, which moves, unless there is one for all."""
    single = all(v is None or all(n == 1 for n in v.shape) for v in node.inputs[1:])
    if single:
        return node.attrs
    return None if node.attrs["block_size"] else _axis_moved(node)


REDUCTIONS = ("sum", "prod", "max", "min", "any", "all")
ELEMENTWISE = tuple(by_operator())

MOVERS = (
    Mover("channels last past an elementwise operator", ELEMENTWISE, _unchanged, same_rank=True),
    Mover("channels last past a join", ("concat",), _axis_moved),
    Mover("channels last past a slice or a border", ("slice", "place"), _every_axis_moved),
    Mover("channels last past a stretch", ("broadcast_to",), _every_axis_moved),
    Mover("channels last past a choice of places", ("take_at",), _taken_axis_moved),
    Mover("channels last past a reduction", REDUCTIONS, _reduced_axes_moved),
    Mover("channels last past a regrouping of places", ("reshape",), _places_regrouped),
    Mover("channels last past quantisation", ("quantize_linear", "dequantize_linear"),
          _quantised_axis_moved),
)
_FIRST_ONLY = ("take_at", "quantize_linear", "dequantize_linear")
_MOVER_OF = {op: mover for mover in MOVERS for op in mover.operators}


@dataclass(frozen=True, eq=False)
class _Movable:
    """A node that could be computed channels last."""

    node: Node
    mover: Mover
    attrs: Mapping[str, Any]
    carried: tuple[Value, ...]  # operands that are needed in the same layout
    stays: bool  # whether the result is then channels last, too
    extra: int = 0  # the cost of operands that it alone would move


def _movable(node: Node) -> _Movable | None:
    mover = _MOVER_OF.get(node.op.name)
    first = node.inputs[0] if node.inputs else None
    if mover is None or first is None or len(node.types) != 1:
        return None
    rank = len(node.types[0].shape) if mover.same_rank else first.ndim
    if rank < 3:
        return None
    attrs = mover.attrs(node)
    if attrs is None:
        return None
    operands = [v for v in _laid_out(node) if not _has_both(v)]
    full = tuple(dict.fromkeys(v for v in operands if v.ndim == rank))
    stays, extra = True, sum(_cost(v.shape) for v in operands if 0 < v.ndim < rank)
    if node.op.name in REDUCTIONS and not node.attrs["keepdims"]:
        stays = False
        gone = normalize_axes(node.attrs["axis"], rank)
        left = [a for a in last_from_first(rank) if a not in gone]
        if left != sorted(left):
            extra += 1 + _elements(node.types[0].shape)  # the result has to be permuted itself
    return _Movable(node, mover, attrs, full, stays, extra)


def _has_both(value: Value) -> bool:
    """Whether a value can be had in either layout at no cost: literals, filled tensors."""
    return constant_array(value) is not None or (
        value.node is not None and value.node.op.name == "full")


def _is_product(node: Node) -> bool:
    """Whether a node reads three axes in either layout, by a flag."""
    return node.op.name == "batch_matmul"


def _laid_out(node: Node) -> list[Value]:
    """The operands that have a layout; indices of a choice and scales have none."""
    inputs = node.inputs[:1] if node.op.name in _FIRST_ONLY else node.inputs
    return [v for v in inputs if v is not None]


# ---------------------------------------------------------------- the cheapest choice
def _directions(graph: Graph) -> dict[Node, str]:
    """Permutes between the layouts: whether their result is channels "first" or "last".

    Of three axes both are the same permutation. Then what comes from an operator with one layout
    only (a convolution, a product), possibly through others, is taken to be channels last; so is
    an input that such an operator does not want permuted.
    """
    wanted = {v for node in graph.nodes if node.op.kind == "contract" for v in node.inputs}
    found: dict[Node, str] = {}
    lies_last: set[Value] = set()
    for node in graph.nodes:
        axes = _axes_moved(node)
        source = node.inputs[0] if node.inputs else None
        if axes is None:
            if node.op.kind == "contract" or (node.op.name in _MOVER_OF and any(
                    v in lies_last for v in node.inputs if v is not None)):
                lies_last.update(node.outputs)
            continue
        assert source is not None
        first, last = first_from_last(len(axes)), last_from_first(len(axes))
        if axes in (first, last):
            if first == last and source.node is None and node.outputs[0] not in wanted:
                lies_last.add(source)
            found[node] = "first" if axes != last or (
                first == last and source in lies_last) else "last"
            if found[node] == "last":
                lies_last.add(node.outputs[0])
    return found


def _behind_permutes(directions: Mapping[Node, str], movable: Mapping[Node, _Movable]
                     ) -> set[Node]:
    """The movable nodes that what is permuted to channels first reaches."""
    reached = {node.outputs[0] for node, direction in directions.items() if direction == "first"}
    behind: set[Node] = set()
    for node, move in movable.items():
        if any(v in reached for v in move.carried):
            behind.add(node)
            if move.stays:
                reached.add(node.outputs[0])
    return behind


def _choose(graph: Graph, directions: Mapping[Node, str], movable: Mapping[Node, _Movable]
            ) -> set[Node]:
    """The movable nodes that are better computed channels last."""
    network = Network()
    scale = len(movable) + 1  # all ties together weigh less than one element
    behind = _behind_permutes(directions, movable)
    choice = {node: network.node() for node in movable}
    made: dict[Value, int] = {v: 0 for v in graph.inputs}
    readers: dict[Value, list[int]] = {}
    for node in graph.nodes:
        direction = directions.get(node)
        if direction is not None:
            assert node.inputs[0] is not None
            made[node.outputs[0]] = 1 if direction == "first" else 0
            readers.setdefault(node.inputs[0], []).append(1 if direction == "last" else 0)
            continue
        move = movable.get(node)
        for output in node.outputs:
            made[output] = choice[node] if move is not None and move.stays else 0
        carried = set() if move is None else set(move.carried)
        for v in dict.fromkeys(v for v in node.inputs if v is not None):
            if v in carried:
                readers.setdefault(v, []).append(choice[node])
            elif not _has_both(v) and not (_is_product(node) and v.ndim == 3):
                readers.setdefault(v, []).append(0)
        if move is not None and move.extra:
            network.edge(0, choice[node], move.extra * scale)
        if node in behind:
            network.edge(choice[node], 1, 1)
    for output in graph.outputs:
        readers.setdefault(output, []).append(0)
    for value, users in readers.items():
        _price(network, made.get(value, 0), list(dict.fromkeys(users)), _cost(value.shape) * scale)
    chosen = network.sink_side()
    return {node for node, number in choice.items() if number in chosen}


def _price(network: Network, maker: int, users: Sequence[int], cost: int) -> None:
    """A value costs once if somebody reads it in another layout than it is made in."""
    others = [u for u in users if u != maker]
    if not others:
        return
    if maker != 1:
        wanted = network.node()
        network.edge(maker, wanted, cost)
        for user in others:
            network.edge(wanted, user, UNCUTTABLE)
    if maker != 0:
        wanted = network.node()
        network.edge(wanted, maker, cost)
        for user in others:
            network.edge(user, wanted, UNCUTTABLE)


# ---------------------------------------------------------------- building the graph anew
@dataclass
class _Builder:
    """Values of the old graph in the layouts they are needed in, each made once."""

    natural: dict[Value, Value] = field(default_factory=dict)
    last: dict[Value, Value] = field(default_factory=dict)

    def first(self, value: Value, where: str) -> Value:
        """A value as the old graph had it."""
        if value not in self.natural:
            if value in self.last:
                source = self.last[value]
                self.natural[value] = _apply("permute_dims", (source,), {
                    "axes": first_from_last(source.ndim)}, where)
            else:
                self.natural[value] = value
        return self.natural[value]

    def channels_last(self, value: Value, rank: int, where: str) -> Value:
        """A value channels last, with axes of size 1 in front up to a rank."""
        if value.ndim == 0:
            return self.first(value, where)
        array = constant_array(value)
        if array is not None:
            wide = array.reshape((1,) * (rank - array.ndim) + array.shape)
            return constant(np.transpose(wide, last_from_first(rank)), value.dtype)
        if value.node is not None and value.node.op.name == "full" and value.ndim == rank:
            return _apply("full", (), {**value.node.attrs, "shape": _permuted(
                value.shape, last_from_first(rank))}, where)
        if value.ndim < rank:
            shape = (1,) * (rank - value.ndim) + value.shape
            source = _apply("reshape", (self.first(value, where),), {"shape": shape}, where)
            return _apply("permute_dims", (source,), {"axes": last_from_first(rank)}, where)
        if value not in self.last:
            self.last[value] = _apply("permute_dims", (self.first(value, where),), {
                "axes": last_from_first(rank)}, where)
        return self.last[value]

    def move(self, move: _Movable) -> None:
        node = move.node
        output = node.outputs[0]
        rank = len(output.shape) if move.mover.same_rank else _rank(node)
        operands = _laid_out(node)
        inputs: list[Value | None] = [self.channels_last(v, rank, node.where) for v in operands]
        rest = node.inputs[len(operands):]
        inputs += [None if v is None else self.first(v, node.where) for v in rest]
        result = _apply(node.op.name, tuple(inputs), move.attrs, node.where)
        if move.stays:
            self.last[output] = result
            return
        gone = normalize_axes(node.attrs["axis"], rank)
        left = [a for a in last_from_first(rank) if a not in gone]
        if left != sorted(left):
            result = _apply("permute_dims", (result,), {
                "axes": tuple(left.index(a) for a in sorted(left))}, node.where)
        self.natural[output] = result

    def keep(self, node: Node) -> None:
        attrs = dict(node.attrs)
        inputs: list[Value | None] = []
        for v, flag in zip(node.inputs, ("transpose_x", "transpose_y") if _is_product(node)
                           else ("",) * len(node.inputs), strict=True):
            if flag and v in self.last and v not in self.natural and v.ndim == 3:
                inputs.append(self.last[v])
                attrs[flag] = not attrs[flag]
            else:
                inputs.append(None if v is None else self.first(v, node.where))
        fresh = node
        if any(a is not b for a, b in zip(inputs, node.inputs, strict=True)):
            fresh = Node(node.op, tuple(inputs), attrs, node.types, node.where)
        self.natural.update(zip(node.outputs, fresh.outputs, strict=True))


def _apply(name: str, inputs: tuple[Value | None, ...], attrs: Mapping[str, Any], where: str
           ) -> Value:
    op = operator_named(name)
    assert op.infer is not None
    type: TensorType = op.infer(*(None if v is None else v.type for v in inputs), **attrs)
    return Node(op, inputs, dict(attrs), (type,), where).outputs[0]


def permuted_elements(graph: Graph) -> int:
    """How many elements the permutes of a graph move, those of constants left out."""
    return sum(_elements(node.types[0].shape) for node in graph.nodes
               if node.op.name == "permute_dims" and node.inputs[0] is not None
               and constant_array(node.inputs[0]) is None)


def layout(graph: Graph, log: list[Applied] | None = None, level: str = "all") -> Graph:
    """Move permutes between channels first and last to where they cost least, or away."""
    if LEVELS.index(level) < LEVELS.index("layout"):
        return graph
    directions = _directions(graph)
    if not directions:
        return graph
    movable = {node: move for node in graph.nodes if node not in directions
               and (move := _movable(node)) is not None}
    chosen = _choose(graph, directions, movable)
    if not chosen:
        return graph
    builder = _Builder()
    for node in graph.nodes:
        output = node.outputs[0]
        if node in chosen:
            builder.move(movable[node])
            if log is not None:
                log.append(Applied(movable[node].mover.name, describe(node), node.where))
        elif directions.get(node) == "first" and node.inputs[0] is not None:
            builder.last[output] = builder.first(node.inputs[0], node.where)
        elif directions.get(node) == "last" and node.inputs[0] in builder.last:
            builder.natural[output] = builder.last[node.inputs[0]]
        else:
            builder.keep(node)
            if directions.get(node) == "last" and node.inputs[0] is not None:
                builder.last[node.inputs[0]] = builder.natural[output]
    outputs = tuple(builder.first(v, "") for v in graph.outputs)
    return Graph(graph.name, graph.inputs, outputs)

