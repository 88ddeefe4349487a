"""Holds the derivative of a graph against differences in float64, in directions over all elements.

All elements of all float inputs are moved at once along a random direction; the slope of the loss
along it must be what the gradient says. The difference quotient is taken at three steps: how far
they are apart says how much of it can be trusted (Richardson). A kink shows in the slopes to the
right and to the left: smooth functions let them meet as the step shrinks. Where a direction tells
nothing, its elements are divided in two and tried again, so that only those that sit on a kink
themselves drop out.

Rules that mean something else than the derivative are respected: the graph is cut at
`stop_gradient`, and at operators of the user's whose body is flat while their rule is not
(straight-through estimators). Behind a cut the rule's own answer is what is pulled back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from terrazzo.dtypes import as_dtype
from terrazzo.errors import TerrazzoError
from terrazzo.graph import autodiff
from terrazzo.graph import evaluate as graph_evaluate
from terrazzo.graph.ir import Graph, Node, Value
from terrazzo.graph.passes import inline_composites
from terrazzo.graph.scopes import trace_scope
from terrazzo.tools.verify import error_bounds
from terrazzo.tools.verify.comparison import Difference
from terrazzo.tools.verify.levels import cut

_STAIRS = ("floor", "ceil", "trunc", "round", "remainder", "fmod", "floor_divide")
_TRANSFORMS = ("fft_lines", "fft_columns", "real_halves", "real_rows")
_SMALLEST_STAIR = 1e-3
_PATIENCE = 0.5  # seconds for the differences of one graph
_STEP = 1e-6  # near the cube root of float64's eps, where a central difference is most exact
_DIRECTIONS = 2  # over all elements: what cancels in one does not in the other
_MOST_DIRECTIONS = 48
_ALONE = 8  # elements whose gradient is not finite are looked at one by one
_HUGE = 1e100
_TINY = 1e-300  # nothing at all may be off where nothing moves


class NoGradient(Exception):
    """Why a graph has no derivative that could be checked."""


def check_gradient(graph: Graph, arrays: Sequence[np.ndarray], rng: np.random.Generator
                   ) -> Difference:
    """Compare gradients of a graph in float64 with differences; raises `NoGradient`."""
    if not any(v.dtype.is_float for v in graph.inputs):
        raise NoGradient("no input is a float")
    if not any(v.dtype.is_float for v in graph.outputs):
        raise NoGradient("no result is a float")
    if any(n.op.name == "bitcast" and n.inputs[0] is not None and n.inputs[0].dtype.is_float
           for n in graph.nodes):
        raise NoGradient("it reads the bits of floats, which change but carry no gradient")
    try:
        loss = _loss(graph, arrays, rng)
    except TerrazzoError as error:
        raise NoGradient(error.message) from error
    return _Search(loss, rng).result()


# ---------------------------------------------------------------- the loss
@dataclass(frozen=True, eq=False)
class _Loss:
    """A weighted sum of all results as a function of one vector, with its gradient there."""

    shapes: tuple[tuple[int, ...], ...]
    start: np.ndarray
    gradient: np.ndarray
    stairs: bool
    tame: bool  # no value on the way is near infinity: by the chain rule, 0 times that is nan
    at: Callable[[np.ndarray], tuple[float, float]]  # the sum, and the sum of magnitudes
    rounding: Callable[[], np.ndarray]  # how far the gradient itself may be off, in float64
    noise: Callable[[], float]  # how far the sum may be, where large terms cancel on the way

    def index(self, place: int) -> tuple[int, ...]:
        """The index of an element in its own array."""
        for shape in self.shapes:
            size = int(np.prod(shape))
            if place < size:
                return tuple(int(i) for i in np.unravel_index(place, shape)) if shape else ()
            place -= size
        raise IndexError(place)


def _loss(graph: Graph, arrays: Sequence[np.ndarray], rng: np.random.Generator) -> _Loss:
    # Operators without a rule of their own are differentiated through, and may hold a cut.
    graph = inline_composites(graph, whole=lambda node: node.op.grad is not None)
    backward = autodiff.vjp_graph(graph)
    base = graph_evaluate.run(graph, arrays, wide=True)
    carried = [y for v, y in zip(graph.outputs, base, strict=True) if v.dtype.is_float]
    # Every result weighs about as much, so that none drowns in the rounding of another. Where one
    # is rounded as the largest beside it is, it tells nothing by itself.
    spreads = any(n.op.name in _TRANSFORMS for n in _primitive(graph).nodes)
    weights = [np.where(np.isfinite(y), rng.uniform(0.5, 1.5, y.shape) / np.maximum(
        1.0, _largest(y) if spreads else np.abs(y)), 0.0) for y in carried]
    found = graph_evaluate.run(backward, [*arrays, *weights], wide=True)
    held = [n for n in graph.nodes if _has_own_meaning(n, graph, arrays, rng)]
    behind = _behind(graph, held, [*arrays, *weights])
    leaves = [v for v in graph.inputs if v.dtype.is_float] + [y for y, _, _ in behind.leaves]
    rest = [(v, a) for v, a in zip(graph.inputs, arrays, strict=True) if not v.dtype.is_float]
    values = [a for v, a in zip(graph.inputs, arrays, strict=True) if v.dtype.is_float] + [
        a for _, a, _ in behind.leaves]
    gradients = list(found) + [g for _, _, g in behind.leaves]
    carriers = [v for v in graph.outputs if v.dtype.is_float]
    part = cut([*carriers, *(v for v, _ in behind.pulls)], [*leaves, *(v for v, _ in rest)])
    factors = weights + [w for _, w in behind.pulls]
    shapes = tuple(a.shape for a in values)
    ends = np.cumsum([a.size for a in values])[:-1]

    def at(point: np.ndarray) -> tuple[float, float]:
        moved = [p.reshape(s) for p, s in zip(np.split(point, ends), shapes, strict=True)]
        results = graph_evaluate.run(part, [*moved, *(a for _, a in rest)], wide=True)
        with np.errstate(all="ignore"):
            terms = [np.where(w == 0, 0.0, y * w) for y, w in zip(results, factors, strict=True)]
            return float(sum(t.sum() for t in terms)), float(sum(np.abs(t).sum() for t in terms))

    primitive = _primitive(part)
    flat = np.concatenate([np.asarray(a, np.float64).reshape(-1) for a in values])
    return _Loss(shapes, flat, np.concatenate([np.asarray(g, np.float64).reshape(-1)
                                               for g in gradients]),
                 any(n.op.name in _STAIRS for n in primitive.nodes),
                 _is_tame(primitive, [*values, *(a for _, a in rest)]), at,
                 lambda: _rounding(backward, [*arrays, *weights], flat.size),
                 lambda: _noise(part, [*values, *(a for _, a in rest)], factors))


def _noise(part: Graph, arrays: Sequence[np.ndarray], factors: Sequence[np.ndarray]) -> float:
    """The rounding of a weighted sum of results in float64, by running error analysis."""
    given = [a.astype(v.dtype.np) for v, a in zip(part.inputs, arrays, strict=True)]
    found = error_bounds.run(part, given)
    coarsest = max(v.dtype.eps for v in found if v.dtype.is_float)
    with np.errstate(all="ignore"):
        off = sum(float(np.abs(np.where(w == 0, 0.0, found[v].error * w)).sum())
                  for v, w in zip(part.outputs, factors, strict=True))
    return off * (np.finfo(float).eps / coarsest) if np.isfinite(off) else 0.0


def _rounding(backward: Graph, arrays: Sequence[np.ndarray], size: int) -> np.ndarray:
    """The rounding of a gradient that was computed in float64, by running error analysis.

    Bounds are of first order, so those of the graph's own types tell those of float64. Where there
    is none (an inexact value decides something), nothing is allowed for.
    """
    found = error_bounds.run(backward, arrays)
    coarsest = max(v.dtype.eps for v in found if v.dtype.is_float)
    bounds = [found[v].error.reshape(-1) for v in backward.outputs]
    flat = np.concatenate(bounds) * (np.finfo(float).eps / coarsest)
    flat = np.where(np.isfinite(flat), flat, 0.0)
    return np.concatenate([flat, np.zeros(size - flat.size)])  # results behind a cut come last


def _primitive(graph: Graph) -> Graph:
    return inline_composites(graph, whole=lambda node: False)


def _largest(y: np.ndarray) -> float:
    return float(np.max(np.abs(y), where=np.isfinite(y), initial=0.0))


def _is_tame(graph: Graph, arrays: Sequence[np.ndarray]) -> bool:
    floats = tuple(v for n in graph.nodes for v in n.outputs if v.dtype.is_float)
    values = graph_evaluate.run(Graph("values", graph.inputs, floats), arrays, wide=True)
    with np.errstate(invalid="ignore"):
        return all((np.abs(v) < _HUGE).all() for v in (*values, *arrays))


# ---------------------------------------------------------------- rules with a meaning of their own
def _has_own_meaning(node: Node, graph: Graph, arrays: Sequence[np.ndarray],
                     rng: np.random.Generator) -> bool:
    """Whether a rule is not meant to be the derivative: the body is flat, and the rule is not."""
    if node.op.name == "stop_gradient":
        return True
    if node.op.family != "user" or node.op.grad is None or node.op.body is None:
        return False
    given = [v for v in node.inputs if v is not None]
    inputs = graph_evaluate.run(Graph("inputs", graph.inputs, tuple(given)), arrays, wide=True)
    table = dict(zip(given, (Value(v.type) for v in given), strict=True))
    alone = Node(node.op, tuple(None if v is None else table[v] for v in node.inputs),
                 node.attrs, node.types, node.where)
    rule = Graph(node.op.name, tuple(table.values()), alone.outputs)
    by_rule, by_body = (autodiff.vjp_graph(g) for g in (
        rule, inline_composites(rule, whole=lambda n: n.op is not node.op and (
            n.op.grad is not None))))
    arrays_of = dict(zip(given, inputs, strict=True))
    values = [arrays_of[v] for v in table]
    dims = graph_evaluate.bind_dims(graph, arrays)
    weights = [rng.uniform(0.5, 1.5, graph_evaluate.concrete(t.shape, dims))
               for t in node.types if t.dtype.is_float]
    steep, flat = (graph_evaluate.run(g, [*values, *weights], wide=True)
                   for g in (by_rule, by_body))
    return any(s.any() and not f.any() for s, f in zip(steep, flat, strict=True))


@dataclass(frozen=True, eq=False)
class _Behind:
    """What a cut leaves open: results as inputs, and inputs as results that the rule weighs."""

    leaves: list[tuple[Value, np.ndarray, np.ndarray]]  # a result, what it is, its gradient
    pulls: list[tuple[Value, np.ndarray]]  # an input, and the gradient that the rule gives it


def _behind(graph: Graph, held: Sequence[Node], arrays: Sequence[np.ndarray]) -> _Behind:
    given = {v: Value(v.type) for v in graph.outputs if v.dtype.is_float}
    weights = [given.get(v) for v in graph.outputs]
    kinds: list[tuple[Value, Value, bool]] = []
    with trace_scope():
        for node in held:
            reached = autodiff.gradients(graph.outputs, weights, node.outputs)
            filled = [autodiff.zeros(v.type) if g is None else g
                      for v, g in zip(node.outputs, reached, strict=True)]
            kinds += [(y, g, True) for y, g in zip(node.outputs, filled, strict=True)
                      if y.dtype.is_float]
            kinds += [(x, g, False) for x, g in zip(
                node.inputs, autodiff.rule_gradients(node, filled), strict=True)
                if x is not None and g is not None and x.dtype.is_float]
    wanted = [v for y, g, _ in kinds for v in (y, g)]
    results = graph_evaluate.run(
        Graph("behind", (*graph.inputs, *given.values()), tuple(wanted)), arrays, wide=True)
    pairs = list(zip(kinds, results[::2], results[1::2], strict=True))
    return _Behind([(v, y, g) for (v, _, leaf), y, g in pairs if leaf],
                   [(v, g) for (v, _, leaf), _, g in pairs if not leaf])


# ---------------------------------------------------------------- the search
class _Search:
    """Tries directions, divides those that tell nothing, and counts what was settled."""

    def __init__(self, loss: _Loss, rng: np.random.Generator):
        self.loss, self.rng = loss, rng
        self.deadline = time.perf_counter() + _PATIENCE
        self.left = _MOST_DIRECTIONS
        self.worst = Difference()
        self.centre = loss.at(loss.start)[0] if loss.start.size else 0.0

    @cached_property
    def rounding(self) -> np.ndarray:
        return self.loss.rounding()

    @cached_property
    def noise(self) -> float:
        """What rounding on the way to the sum may do to a quotient of differences."""
        return 2 * self.loss.noise() / _STEP

    def result(self) -> Difference:
        loss = self.loss
        movable = np.isfinite(loss.start)
        if loss.stairs:  # over many stairs of a rounding differences see a slope that is nowhere
            movable &= _STEP * np.abs(loss.start) <= _SMALLEST_STAIR
            # A stair of a remainder is as high as the divisor, which a step must not outdo.
            rise = _STEP * np.maximum(1.0, np.abs(loss.start)) * np.abs(loss.gradient)
            movable &= ~(rise > 0.1 * np.abs(loss.start))
        sound = np.flatnonzero(movable & np.isfinite(loss.gradient))
        odd = np.flatnonzero(movable & ~np.isfinite(loss.gradient))
        # Steps grow with the numbers. What moves by more than 1 may jump over an edge, so it does
        # not move together with what tells a slope.
        far = _STEP * np.abs(loss.start[sound]) > 1
        checked = 0
        for _ in range(_DIRECTIONS):
            settled = 0
            for group in (sound[~far], sound[far]):
                self.left = _MOST_DIRECTIONS
                settled += self._settle(group)
            checked = max(checked, settled)
        for place in self.rng.permutation(odd)[:_ALONE] if loss.tame else ():
            checked += self._settle(np.array([place]))
        return replace(self.worst, checked=checked, open=loss.start.size - checked)

    def _settle(self, places: np.ndarray) -> int:
        """How many of some elements have a slope, and the right one."""
        stack, settled = [places] if places.size else [], 0
        while stack and self.worst.index is None and self.left > 0 and (
                time.perf_counter() < self.deadline):
            self.left -= 1
            block = stack.pop()
            verdict = self._try(block)
            if verdict:
                settled += block.size
            elif block.size > 1:
                mixed = self.rng.permutation(block)
                stack += [mixed[:block.size // 2], mixed[block.size // 2:]]
        return settled

    def _try(self, block: np.ndarray) -> bool:
        """Whether the slope along a direction over some elements is known, and right."""
        loss = self.loss
        along = self.rng.uniform(0.5, 1.0, block.size) * self.rng.choice([-1.0, 1.0], block.size)
        along = along * np.maximum(1.0, np.abs(loss.start[block]))
        want, doubt = self._slope(block, along)
        parts = along * loss.gradient[block]
        got = float(parts.sum())
        if block.size == 1 and want == 0 and not np.isfinite(got):
            return False  # by the chain rule 0 times what is infinite or undefined, as in PyTorch
        room = _TINY + doubt + 1e-6 * float(
            np.abs(parts).sum() if np.isfinite(got) else abs(want))
        unit = 1.0 + abs(want) if block.size == 1 else 1e-3 + float(np.abs(parts).mean())
        if not np.isfinite(want + doubt) or doubt > 1e-2 * unit:
            return False
        if abs(got - want) > room:  # what cancelled on the way left its rounding behind
            # Between three equal elements a sort bends by little, and has three slopes.
            if self.noise > 1e-2 * unit or doubt > 1e-4 * unit:
                return False
            room += self.noise + 2 * float((np.abs(along) * self.rounding[block]).sum())
        self.worst = replace(self.worst, share=max(self.worst.share, abs(got - want) / room))
        if abs(got - want) <= room:
            return True
        self._blame(block, want, got, float(along[0]))
        return False

    def _blame(self, block: np.ndarray, want: float, got: float, unit: float) -> None:
        """Name an element: of a block that is wrong, one that is wrong by itself."""
        while block.size > 1:
            half = block[:block.size // 2]
            if self._agrees(half):
                half = block[block.size // 2:]
                if self._agrees(half):
                    break  # only their sum is out of bounds
            block = half
        if block.size == 1:
            along = np.maximum(1.0, np.abs(self.loss.start[block]))
            want, _ = self._slope(block, along)
            unit, got = float(along[0]), float(self.loss.gradient[block[0]] * along[0])
        self.worst = replace(self.worst, index=self.loss.index(int(block[0])),
                             expected=want / unit, got=got / unit)

    def _agrees(self, block: np.ndarray) -> bool:
        along = np.maximum(1.0, np.abs(self.loss.start[block]))
        want, doubt = self._slope(block, along)
        parts = along * self.loss.gradient[block]
        room = doubt + 2 * float((along * self.rounding[block]).sum())
        return bool(abs(float(parts.sum()) - want) <= room + 1e-6 * float(np.abs(parts).sum()))

    def _slope(self, block: np.ndarray, along: np.ndarray) -> tuple[float, float]:
        """The slope in a direction, and how far it may be off."""
        loss = self.loss
        quotients, bends, size = [], [], 0.0
        for h in (_STEP, 2 * _STEP, 4 * _STEP):
            up, down = loss.start.copy(), loss.start.copy()
            with np.errstate(over="ignore"):
                up[block] += h * along
                down[block] -= h * along
            (above, a), (below, b) = loss.at(up), loss.at(down)
            quotients.append((above - below) / (2 * h))
            bends.append((above - 2 * self.centre + below) / h)
            size = max(a, b)
        kink = abs(2 * bends[0] - bends[1])
        noise = 64 * float(np.finfo(float).eps) * size / _STEP
        if _is_jump(quotients, noise):
            return quotients[0], np.inf
        return quotients[0], 4 * (max(quotients) - min(quotients)) + kink + noise


def _is_jump(quotients: Sequence[float], noise: float) -> bool:
    """Whether quotients at steps of h, 2h and 4h go up by as much as the step goes down.

    Steps grow with the numbers (1e-6 of 1e38 is 1e32), while a softmax changes over a step of 1:
    seen from so far a steep slope is a jump, f(x + h) - f(x - h) is the same for all h, and no
    difference says how steep. What is smooth at these steps has s + c h^2, whose quotients come
    together four times as fast as the steps shrink; those of a jump part twice as fast.
    """
    first, second = quotients[0] - quotients[1], quotients[1] - quotients[2]
    return abs(first) > noise and first * second > 0 and abs(first) >= abs(second)


def as_float64(array: np.ndarray) -> np.ndarray:
    """An array of floats in float64; others as they are."""
    return array.astype(np.float64) if as_dtype(array.dtype).is_float else array
