"""Ensembles of decision trees (domain ai.onnx.ml), walked by gathers.

All trees of all rows take a step at a time: the place in the tree is an index into tables of
features, thresholds and children. Leaves lead to themselves, so that after as many steps as the
deepest tree has, every place is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from terrazzo.dtypes import float32
from terrazzo.frontends.onnx.convert.ml import (
    ML,
    POST_TRANSFORMS,
    floating,
    labels_of,
    post_transform,
)
from terrazzo.frontends.onnx.importer import astype, literal
from terrazzo.frontends.onnx.registry import Call, Result, converts
from terrazzo.graph.ir import Value
from terrazzo.ops import elementwise as e
from terrazzo.ops.indexing import gather, take
from terrazzo.ops.reduce import any_, argmax, max_, min_, sum_
from terrazzo.ops.shape import broadcast_to, concat, expand_dims, reshape, span

_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ",
          "BRANCH_MEMBER")
_COMPARE: dict[str, Callable[..., Value]] = {
    "BRANCH_LEQ": e.less_equal, "BRANCH_LT": e.less, "BRANCH_GTE": e.greater_equal,
    "BRANCH_GT": e.greater, "BRANCH_EQ": e.equal, "BRANCH_NEQ": e.not_equal,
}
_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")  # as TreeEnsemble counts


@dataclass(frozen=True, eq=False)
class Forest:
    """Tables over the places of all trees; leaves are places that lead to themselves."""

    roots: np.ndarray  # the first place of each tree
    feature: np.ndarray
    threshold: np.ndarray
    mode: np.ndarray  # numbers of _MODES
    when_true: np.ndarray
    when_false: np.ndarray
    missing_is_true: np.ndarray
    weights: np.ndarray  # [places, targets], 0 where nothing is said
    says: np.ndarray  # [places, targets], whether it is
    members: np.ndarray  # [sets, most members], filled up with nan
    member_set: np.ndarray  # which of these sets a place tests

    @property
    def depth(self) -> int:
        """How many steps lead to a leaf, at most; a circle of places has no depth."""
        here, steps = self.roots, 0
        while True:
            inner = here[self.when_true[here] != here]
            if not inner.size:
                return steps
            if steps > len(self.feature):
                raise ValueError("the nodes of a tree form a circle")
            here = np.unique(np.concatenate([self.when_true[inner], self.when_false[inner]]))
            steps += 1


def _leaves(forest: Forest, x: Value) -> Value:
    """The leaf that each row of x ends at in each tree."""
    trees = len(forest.roots)
    place: Any = broadcast_to(literal(forest.roots.reshape(1, trees)), shape=(x.shape[0], trees))

    def look(table: np.ndarray) -> Value:
        if (table == table[0]).all():  # the same everywhere: no need to look
            return literal(table[0].reshape(()))
        return take(literal(table), place, axis=0)

    modes = [m for m in range(len(_MODES)) if (forest.mode == m).any()]
    for _ in range(forest.depth):
        feature = take(literal(forest.feature), place, axis=0)
        value = gather(x, feature, axis=1)
        threshold = look(forest.threshold)
        decision: Any = None
        for mode in modes:
            if _MODES[mode] == "BRANCH_MEMBER":
                sets = take(literal(forest.members), look(forest.member_set), axis=0)
                test = any_(e.equal(expand_dims(value, axis=2), sets), axis=-1)
            else:
                test = _COMPARE[_MODES[mode]](value, threshold)
            decision = test if decision is None else e.where(
                e.equal(look(forest.mode), np.int64(mode)), test, decision)
        if forest.missing_is_true.any():
            decision = e.logical_or(decision, e.logical_and(
                e.isnan(value), look(forest.missing_is_true)))
        place = e.where(decision, take(literal(forest.when_true), place, axis=0),
                        take(literal(forest.when_false), place, axis=0))
    return place


def _aggregated(call: Call, forest: Forest, x: Value, how: str) -> Value:
    """What all trees say about each target."""
    place = _leaves(forest, x)
    if how in ("SUM", "AVERAGE"):
        total = sum_(take(literal(forest.weights), place, axis=0), axis=1)
        return total / float(len(forest.roots)) if how == "AVERAGE" else total
    if how not in ("MIN", "MAX"):
        call.unsupported(f"has an unknown aggregate_function {how!r}")
    limits = np.finfo(forest.weights.dtype)
    silent = limits.max if how == "MIN" else limits.min
    table = np.where(forest.says, forest.weights, silent).astype(forest.weights.dtype)
    return (min_ if how == "MIN" else max_)(take(literal(table), place, axis=0), axis=1)


# ---------------------------------------------------------------- the operator of version 5
@converts("TreeEnsemble", domain=ML)
def tree_ensemble(call: Call) -> Result:
    x = call.value(0)
    forest = _forest(call, x.dtype.np)
    result = _aggregated(call, forest, x, _AGGREGATES[call.attr("aggregate_function", 1)])
    return POST_TRANSFORMS[_TRANSFORMS[call.attr("post_transform", 0)]](result)


def _forest(call: Call, dtype: Any) -> Forest:
    """The tables of a TreeEnsemble: its leaves come after its nodes."""
    def column(name: str) -> np.ndarray:
        return np.asarray(call.attr(name), np.int64)

    nodes, leaves = len(call.attr("nodes_featureids")), len(call.attr("leaf_targetids"))
    places = np.arange(nodes, nodes + leaves)

    def children(side: str) -> np.ndarray:
        ids = column(f"nodes_{side}nodeids")
        return np.concatenate([np.where(column(f"nodes_{side}leafs") != 0, ids + nodes, ids),
                               places])

    def padded(values: Any, kind: Any) -> np.ndarray:
        return np.concatenate([np.asarray(values, kind), np.zeros(leaves, kind)])

    modes = padded(call.attr("nodes_modes"), np.int64)
    missing = call.attr("nodes_missing_value_tracks_true") or [0] * nodes
    targets = call.attr("n_targets", 1) or 1
    says = np.zeros((nodes + leaves, targets), bool)
    weights = np.zeros(says.shape, dtype)
    at = (places, column("leaf_targetids"))
    says[at], weights[at] = True, call.attr("leaf_weights")
    true, false = children("true"), children("false")
    if max(true.max(), false.max()) >= nodes + leaves or min(true.min(), false.min()) < 0:
        call.unsupported("has a branch to a node that does not exist")
    roots = column("tree_roots")
    testers = _in_order_of_visit(roots, true, false, modes)
    members, sets = _member_sets(call, testers, nodes + leaves, dtype)
    return Forest(roots, padded(call.attr("nodes_featureids"), np.int64),
                  padded(call.attr("nodes_splits"), dtype), modes, true, false,
                  padded(missing, bool), weights, says, members, sets)


def _in_order_of_visit(roots: np.ndarray, true: np.ndarray, false: np.ndarray, modes: np.ndarray
                       ) -> list[int]:
    """The nodes that test membership, each before its branches, the true one first."""
    found: list[int] = []
    stack = [int(r) for r in reversed(roots)]
    seen: set[int] = set()
    while stack:
        place = stack.pop()
        if place in seen or true[place] == place:
            continue
        seen.add(place)
        if modes[place] == _MODES.index("BRANCH_MEMBER"):
            found.append(place)
        stack += [int(false[place]), int(true[place])]
    return found


def _member_sets(call: Call, testers: list[int], places: int, dtype: Any
                 ) -> tuple[np.ndarray, np.ndarray]:
    """The sets that nodes test membership of; a nan ends each in the list of all members."""
    which = np.zeros(places, np.int64)
    if not testers:
        return np.full((1, 1), np.nan, dtype), which
    values = np.asarray(call.attr("membership_values"), dtype)
    ends = np.flatnonzero(np.isnan(values))
    if len(ends) < len(testers):
        call.unsupported("has fewer sets of members than nodes that test membership")
    pieces = np.split(values, ends + 1)[:len(testers)]
    members = np.full((len(testers), max(len(p) for p in pieces)), np.nan, dtype)
    for k, (piece, tester) in enumerate(zip(pieces, testers, strict=True)):
        members[k, :len(piece)] = piece
        which[tester] = k
    return members, which


# ---------------------------------------------------------------- the older operators
def _older_forest(call: Call, dtype: Any, kind: str, targets: int) -> Forest:
    """The tables of TreeEnsembleRegressor ("target") and TreeEnsembleClassifier ("class")."""
    trees = np.asarray(call.attr("nodes_treeids"), np.int64)
    ids = np.asarray(call.attr("nodes_nodeids"), np.int64)
    place_of = {key: k for k, key in enumerate(zip(trees.tolist(), ids.tolist(), strict=True))}
    modes = call.attr("nodes_modes")
    places = np.arange(len(ids))
    is_leaf = np.array([m == "LEAF" for m in modes], bool)
    if any(m != "LEAF" and m not in _COMPARE for m in modes):
        call.unsupported(f"has nodes of an unknown mode among {sorted(set(modes))}")

    def column(name: str) -> list[Any]:
        given = call.attr(f"{name}_as_tensor")
        return given.tolist() if given is not None else call.attr(name) or []

    def children(name: str) -> np.ndarray:
        given = call.attr(name)
        return np.array([k if leaf else place_of[tree, child] for k, leaf, tree, child in zip(
            places.tolist(), is_leaf, trees.tolist(), given, strict=True)], np.int64)

    weights = np.zeros((len(ids), targets), dtype)
    says = np.zeros(weights.shape, bool)
    for tree, node, target, weight in zip(
            call.attr(f"{kind}_treeids"), call.attr(f"{kind}_nodeids"), call.attr(f"{kind}_ids"),
            column(f"{kind}_weights"), strict=True):
        at = place_of[tree, node], target
        weights[at] += weight
        says[at] = True
    _, roots = np.unique(trees, return_index=True)
    first = ids[roots].min() if len(roots) else 0
    roots = np.array([place_of[t, first] for t in np.unique(trees).tolist()], np.int64)
    missing = call.attr("nodes_missing_value_tracks_true") or [0] * len(ids)
    numbers = [0 if m == "LEAF" else _MODES.index(m) for m in modes]
    used = sorted({n for n, leaf in zip(numbers, is_leaf, strict=True) if not leaf}) or [0]
    return Forest(
        roots, np.where(is_leaf, 0, np.asarray(call.attr("nodes_featureids"), np.int64)),
        np.asarray(column("nodes_values"), dtype),
        np.where(is_leaf, used[0], np.asarray(numbers, np.int64)),
        children("nodes_truenodeids"), children("nodes_falsenodeids"),
        np.asarray(missing, bool), weights, says, np.full((1, 1), np.nan, dtype),
        np.zeros(len(ids), np.int64))


def _base_values(call: Call, dtype: Any) -> Value | None:
    given = call.attr("base_values_as_tensor")
    values = given if given is not None else np.array(call.attr("base_values") or [], dtype)
    return literal(values.astype(dtype)) if values.size else None


@converts("TreeEnsembleRegressor", domain=ML)
def tree_ensemble_regressor(call: Call) -> Result:
    x = floating(call.value(0))
    forest = _older_forest(call, x.dtype.np, "target", call.attr("n_targets", 1))
    result = _aggregated(call, forest, x, call.attr("aggregate_function", "SUM"))
    base = _base_values(call, x.dtype.np)
    result = result if base is None else result + base
    return astype(post_transform(call, result), dtype=float32)


@converts("TreeEnsembleClassifier", domain=ML)
def tree_ensemble_classifier(call: Call) -> Result:
    labels = labels_of(call, "classlabels_int64s")
    x = floating(call.value(0))
    forest = _older_forest(call, x.dtype.np, "class", len(labels))
    scores = _aggregated(call, forest, x, "SUM")
    base = _base_values(call, x.dtype.np)
    scores = scores if base is None else scores + base
    if len(set(call.attr("class_ids"))) == 1:  # the score of one class tells that of the other
        column = call.attr("class_ids")[0] if len(labels) > 1 else 0
        score = span(scores, 1, column, column + 1)
        plain = call.attr("post_transform", "NONE") in ("NONE", "PROBIT")
        scores = concat(1.0 - score if plain else -score, score, axis=1)
        labels = labels if len(labels) > 1 else [0, labels[0]]
    scores = post_transform(call, scores)
    chosen = take(literal(np.array(labels, np.int64)), argmax(scores, axis=1), axis=0)
    return reshape(chosen, shape=(x.shape[0],)), astype(scores, dtype=float32)
