"""Ensembles of decision trees, in loops: many walks at once, and no branch on data.

A walk from root to leaf is a chain of loads, each of which waits for the one before; so several
walks go side by side, those of several rows through one tree, or, where rows are few, those of one
row through several trees. A leaf leads to itself, so that walks of different lengths can share a
loop. Rows come in blocks, and a block goes through one tree after the other: the tree stays in the
nearest cache meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from terrazzo.base.scalar import Const, Scalar, as_scalar, call
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.scalar import where as where_scalar
from terrazzo.dtypes import int32, uint32
from terrazzo.errors import ArgumentError, DTypeError, RankError, user_location
from terrazzo.expr.ir import fresh_axis
from terrazzo.graph.ir import TensorType
from terrazzo.index import Index, Var, ceildiv, minimum
from terrazzo.index.guards import ask
from terrazzo.loop.ir import Alloc, Block, Buffer, For, If, Let, Stmt, Store, While, block
from terrazzo.ops.define import primitive

# A node is four integers: the feature it tests, where to go when the test holds and when not (as
# offsets of nodes in this table), and what is special about it. They have no sign: to extend signs
# takes a fifth of a step.
FEATURE, WHEN_TRUE, WHEN_FALSE, SPECIAL, NODE = range(5)
TESTS = ("le", "lt", "ge", "gt", "eq", "ne")  # by the number that SPECIAL holds, times two
MISSING_IS_TRUE = 1  # the lowest bit of SPECIAL: nan passes the test

SIDE_BY_SIDE = 16  # walks; more do not fit what a core looks ahead (Zen 4, Sapphire Rapids)
_ROWS = 128  # of a block: 16 KiB of 32 features, beside a tree in the nearest cache


def _ensemble_type(x: TensorType, nodes: TensorType, thresholds: TensorType, roots: TensorType,
                   steps: TensorType, weights: TensorType, columns: TensorType | None = None, *,
                   tests: tuple[str, ...], missing: str, combine: str, trees: int | None = None,
                   targets: int | None = None) -> TensorType:
    if len(x.shape) != 2 or len(weights.shape) != 2:
        raise RankError(f"tree_ensemble takes rows of features and leaves of targets, not "
                        f"{x.shape} and {weights.shape}", where=user_location())
    if not x.dtype.is_float or thresholds.dtype is not x.dtype or weights.dtype is not x.dtype:
        raise DTypeError("tree_ensemble takes features, thresholds and weights of one float type",
                         where=user_location())
    if any(t not in TESTS for t in tests) or combine not in ("add", "min", "max") or (
            missing not in ("none", "some", "all")):
        raise ArgumentError(f"tree_ensemble does not know {tests}, {combine!r} or {missing!r}",
                            where=user_location())
    if ask("!=", roots.shape[0] % SIDE_BY_SIDE, 0):
        raise ArgumentError(f"tree_ensemble takes a multiple of {SIDE_BY_SIDE} trees",
                            where=user_location())
    if (columns is None) != (targets is None) or (columns is not None and (
            columns.shape != roots.shape or weights.shape[1] != 1)):
        raise ArgumentError("tree_ensemble takes a column for each tree where it takes targets",
                            where=user_location())
    return TensorType((x.shape[0], weights.shape[1] if targets is None else targets), x.dtype)


_NUMPY_TESTS: dict[str, Callable[..., Any]] = {
    "le": np.less_equal, "lt": np.less, "ge": np.greater_equal, "gt": np.greater,
    "eq": np.equal, "ne": np.not_equal}
_NUMPY_COMBINE: dict[str, Any] = {"add": np.sum, "min": np.min, "max": np.max}
_EMPTY = {"add": 0.0, "min": np.inf, "max": -np.inf}  # what no tree says


def _ensemble_numpy(x: np.ndarray, nodes: np.ndarray, thresholds: np.ndarray, roots: np.ndarray,
                    steps: np.ndarray, weights: np.ndarray, columns: np.ndarray | None = None, *,
                    tests: tuple[str, ...], missing: str, combine: str, trees: int | None = None,
                    targets: int | None = None, out: TensorType) -> np.ndarray:
    at = np.broadcast_to(roots, (len(x), len(roots))).astype(np.int64)
    while True:
        value = np.take_along_axis(x, nodes[at + FEATURE], axis=1)
        special = nodes[at + SPECIAL]
        passes = np.zeros(at.shape, bool)
        for number, test in enumerate(TESTS):
            chosen = np.full(at.shape, test in tests) if len(tests) == 1 else special >> 1 == number
            passes |= chosen & _NUMPY_TESTS[test](value, thresholds[at // NODE])
        if missing != "none":
            passes |= np.isnan(value) & ((special & MISSING_IS_TRUE != 0) | (missing == "all"))
        after = np.where(passes, nodes[at + WHEN_TRUE], nodes[at + WHEN_FALSE])
        if (after == at).all():
            break
        at = after
    said = weights[nodes[at + SPECIAL]]
    if columns is None or targets is None:
        return _NUMPY_COMBINE[combine](said, axis=1)
    empty = said.dtype.type(_EMPTY[combine])
    return np.stack([_NUMPY_COMBINE[combine](said[:, columns == t, 0], axis=1, initial=empty)
                     for t in range(targets)], axis=1)


@primitive(family="classical", infer=_ensemble_type, reference=_ensemble_numpy, loops=True,
           differentiable=False)
def tree_ensemble(x: Any, nodes: Any, thresholds: Any, roots: Any, steps: Any, weights: Any,
                  columns: Any = None, *, tests: tuple[str, ...], missing: str = "none",
                  combine: str = "add", trees: int | None = None, targets: int | None = None,
                  out: TensorType) -> Any:
    """what the leaves that each row of features ends at say, over all trees, for each target

    `nodes` holds four integers a node (see `terrazzo.ops.trees`), `roots` offsets in it, `steps`
    how far a walk through each tree goes before it is looked whether it has ended. Leaves hold the
    number of their row in `weights`. Only the first `trees` trees say anything. With `columns`,
    each tree speaks of one of so many targets alone, and weights are one number a leaf.
    """
    rows, features = x.shape
    all_trees, spoken = roots.shape[0], weights.shape[1]
    results = spoken if targets is None else targets
    speaking = all_trees if trees is None else trees

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        if rows == 0 or results == 0:
            return Block(())
        (result,) = outputs
        here = fresh_axis("block", ceildiv(rows, _ROWS)).var
        first = here * _ROWS
        last = minimum(first + _ROWS, rows)
        i = fresh_axis("i", _ROWS * results).var
        clear = For(i, first * results, last * results,
                    Store(result, i, Const(x.dtype, _EMPTY[combine])), "vector")
        t = fresh_axis("t", spoken).var

        def say(leaf: Scalar, row: Index, tree: Index) -> Stmt:
            """Add what a leaf says to a row of the result."""
            base = call("mul", cast_scalar(leaf, as_scalar(t).dtype), as_scalar(spoken))
            if len(inputs) > 6:
                place = call("add", as_scalar(row * results),
                             cast_scalar(inputs[6][tree], as_scalar(t).dtype))
                return Store(result, place, inputs[5][base], combine)
            if spoken == 1:
                return Store(result, row, inputs[5][base], combine)
            return For(t, 0, spoken, Store(result, row * results + t, inputs[5][
                call("add", base, as_scalar(t))], combine), "vector")

        def walks(missing: str) -> Stmt:
            walk = _Walk(inputs[0], inputs[1], inputs[2], features, tests, missing)
            groups = (last - first) // SIDE_BY_SIDE
            tree, group = fresh_axis("tree", all_trees).var, fresh_axis("group", groups).var
            start = first + group * SIDE_BY_SIDE
            by_rows = For(tree, 0, speaking, For(group, 0, groups, walk.side_by_side(
                lambda k: inputs[3][tree], lambda k: start + k, lambda k: inputs[4][tree],
                lambda leaf, k: say(leaf, start + k, tree))))
            return block(by_rows, rest(walk, first + groups * SIDE_BY_SIDE))

        def rest(walk: _Walk, start: Index) -> Stmt:
            """Fewer rows than go side by side: those of one tree do all the same, else trees."""
            if speaking == 1:
                return If(call("lt", as_scalar(start), as_scalar(last)), walk.side_by_side(
                    lambda k: inputs[3][0], lambda k: minimum(start + k, last - 1),
                    lambda k: inputs[4][0], lambda leaf, k: If(
                        call("lt", as_scalar(start + k), as_scalar(last)),
                        say(leaf, start + k, 0))))
            row, several = fresh_axis("row", rows).var, fresh_axis("several", all_trees).var
            return For(row, start, last, For(
                several, 0, ceildiv(speaking, SIDE_BY_SIDE), walk.side_by_side(
                    lambda k: inputs[3][several * SIDE_BY_SIDE + k], lambda k: row,
                    lambda k: inputs[4][several * SIDE_BY_SIDE],
                    lambda leaf, k: say(leaf, row, several * SIDE_BY_SIDE + k))))

        body = walks(missing) if missing == "none" else _if_any_nan(
            inputs[0], first * features, last * features, walks(missing), walks("none"))
        return For(here, 0, ceildiv(rows, _ROWS), block(clear, body), "parallel")

    return build


def _if_any_nan(x: Buffer, start: Index, stop: Index, then: Stmt, orelse: Stmt) -> Stmt:
    """One of two statements: to ask of each feature whether it is missing takes half of a step."""
    found = Buffer("found", int32, 1)
    i = fresh_axis("i", 1).var
    look = For(i, start, stop, Store(found, 0, cast_scalar(call("ne", x[i], x[i]), int32), "max"),
               "vector")
    return Alloc(found, block(Store(found, 0, Const(int32, 0)), look,
                              If(call("ne", found[0], 0), then, orelse)))


class _Walk:
    """How a walk takes a step."""

    def __init__(self, x: Buffer, nodes: Buffer, thresholds: Buffer, features: Index,
                 tests: tuple[str, ...], missing: str):
        self.x, self.nodes, self.thresholds = x, nodes, thresholds
        self.features, self.tests, self.missing = features, tests, missing

    def side_by_side(self, root: Callable[[Index], Scalar], row: Callable[[Index], Index],
                     steps: Callable[[Index], Scalar], say: Callable[[Scalar, Index], Stmt]
                     ) -> Stmt:
        """Several walks from their roots to what their leaves say."""
        at, going = Buffer("at", uint32, SIDE_BY_SIDE), Buffer("going", uint32, 1)
        k, step = fresh_axis("k", SIDE_BY_SIDE).var, fresh_axis("step", 1).var
        sure = Var("sure")

        def each(body: Stmt, kind: str = "serial") -> Stmt:
            return For(k, 0, SIDE_BY_SIDE, body, kind)

        moved = self.step(at[k], row(k))
        goes_on = call("xor", at[k], moved)
        return Alloc(at, Alloc(going, block(
            each(Store(at, k, root(k))),
            Let(sure, steps(0), For(step, 0, sure, each(
                Store(at, k, self.step(at[k], row(k))), "unrolled"))),
            Store(going, 0, Const(uint32, 1)),
            While(call("ne", going[0], 0), block(
                Store(going, 0, Const(uint32, 0)),
                each(block(Store(going, 0, call("or", going[0], goes_on)),
                           Store(at, k, moved))))),
            each(say(self.nodes[call("add", at[k], SPECIAL)], k)))))

    def step(self, at: Scalar, row: Index) -> Scalar:
        """Where a walk goes from a node."""
        index = as_scalar(row).dtype
        here = cast_scalar(at, index)
        value = self.x[call("add", as_scalar(row * self.features), cast_scalar(
            self.nodes[here], index))]
        threshold = self.thresholds[call("shr", here, 2)]
        special = self.nodes[call("add", here, SPECIAL)]
        passes = call(self.tests[0], value, threshold)
        for test in self.tests[1:]:
            number = TESTS.index(test)
            passes = where_scalar(call("eq", call("shr", special, 1), number),
                                  call(test, value, threshold), passes)
        if self.missing != "none":
            lacking = call("ne", value, value)
            if self.missing == "some":
                lacking = call("and", lacking, call("ne", call("and", special, MISSING_IS_TRUE), 0))
            passes = call("or", passes, lacking)
        turn = call("sub", as_scalar(WHEN_FALSE), cast_scalar(passes, index))
        return self.nodes[call("add", here, turn)]
