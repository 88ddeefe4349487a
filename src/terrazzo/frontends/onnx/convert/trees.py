"""Ensembles of decision trees (domain ai.onnx.ml): their attributes as tables of `ops.trees`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from terrazzo.dtypes import float32
from terrazzo.frontends.onnx.convert.ml import (
    ML,
    POST_TRANSFORMS,
    floating,
    label_above,
    labels_of,
    post_transform,
    two_scores,
)
from terrazzo.frontends.onnx.importer import astype, literal
from terrazzo.frontends.onnx.registry import Call, Result, converts
from terrazzo.graph.ir import Value
from terrazzo.ops import elementwise as e
from terrazzo.ops.creation import full
from terrazzo.ops.joining import concat
from terrazzo.ops.lookups import take
from terrazzo.ops.reduce import argmax
from terrazzo.ops.shape import span
from terrazzo.ops.trees import NODE, SIDE_BY_SIDE, TESTS, tree_ensemble

_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ",
          "BRANCH_MEMBER")
_MEMBER = _MODES.index("BRANCH_MEMBER")
_EQUAL = _MODES.index("BRANCH_EQ")
_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
_COMBINE = {"AVERAGE": "add", "SUM": "add", "MIN": "min", "MAX": "max"}
_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")  # as TreeEnsemble counts


@dataclass(frozen=True, eq=False)
class Forest:
    """Tables over the nodes of all trees; leaves are nodes that lead to themselves."""

    roots: np.ndarray  # the first node of each tree
    feature: np.ndarray
    threshold: np.ndarray
    mode: np.ndarray  # numbers of _MODES
    when_true: np.ndarray
    when_false: np.ndarray
    missing_is_true: np.ndarray
    leaf: np.ndarray  # its row in the next two, for leaves
    weights: np.ndarray  # [leaves, targets], 0 where nothing is said
    says: np.ndarray  # [leaves, targets], whether it is

    @property
    def inner(self) -> np.ndarray:
        """Which nodes are no leaves."""
        return self.when_true != np.arange(len(self.when_true))


def _walks(forest: Forest) -> tuple[np.ndarray, np.ndarray]:
    """How far the last leaf of each tree is, and the one in the middle; circles are errors."""
    here, tree = forest.roots, np.arange(len(forest.roots))
    longest = np.zeros(len(forest.roots), np.int32)
    ends = [np.zeros(len(forest.roots), np.int64)]
    inner = forest.inner
    for steps in range(len(forest.feature) + 1):
        going = inner[here]
        ends.append(ends[-1] + np.bincount(tree[~going], minlength=len(forest.roots)))
        here, tree = here[going], tree[going]
        if not here.size:
            half = np.array([np.searchsorted(column, column[-1] / 2) - 1
                             for column in np.stack(ends, 1)], np.int32)
            return longest, np.maximum(half, 0)
        longest[tree] = steps + 1
        here, first = np.unique(np.concatenate([forest.when_true[here], forest.when_false[here]]),
                                return_index=True)
        tree = np.concatenate([tree, tree])[first]
    raise ValueError("the nodes of a tree form a circle")


def _aggregated(call: Call, forest: Forest, x: Value, how: str) -> Value:
    """What all trees say about each target."""
    if how not in _COMBINE:
        call.unsupported(f"has an unknown aggregate_function {how!r}")
    if not isinstance(x.shape[1], int):
        call.unsupported("needs to know how many features there are")
    tested = forest.feature[forest.inner]
    if tested.size and not 0 <= tested.min() <= tested.max() < x.shape[1]:
        call.unsupported(f"tests features {tested.min()} to {tested.max()} of {x.shape[1]}")
    trees, targets = len(forest.roots), forest.weights.shape[1]
    combine = _COMBINE[how]
    silent = {"add": 0.0, "min": np.inf, "max": -np.inf}[combine]
    weights = np.where(forest.says, forest.weights, silent).astype(forest.weights.dtype)
    total = _walked(_rounded_up(replace(forest, weights=weights), silent), x, combine, trees)
    if how == "AVERAGE":
        total = total / float(trees)
    if combine != "add" and not _all_said(forest, targets):
        total = e.where(e.equal(total, silent), 0.0, total)  # as onnxruntime
    return total


def _all_said(forest: Forest, targets: int) -> bool:
    return bool(forest.says.all(axis=0).sum() == targets)


def _rounded_up(forest: Forest, silent: float) -> Forest:
    """As many trees as a kernel walks side by side: those added say nothing."""
    lacking = -len(forest.roots) % SIDE_BY_SIDE
    if not lacking:
        return forest
    place, leaf = len(forest.feature), len(forest.weights)

    def longer(table: np.ndarray, item: Any) -> np.ndarray:
        return np.concatenate([table, np.full((1, *table.shape[1:]), item, table.dtype)])

    return Forest(
        np.concatenate([forest.roots, np.full(lacking, place, forest.roots.dtype)]),
        longer(forest.feature, 0), longer(forest.threshold, 0), longer(forest.mode, 0),
        longer(forest.when_true, place), longer(forest.when_false, place),
        longer(forest.missing_is_true, False), longer(forest.leaf, leaf),
        longer(forest.weights, silent), longer(forest.says, False))


def _walked(forest: Forest, x: Value, combine: str, trees: int) -> Value:
    """The trees as the kernel reads them, and what it makes of the features."""
    inner = forest.inner
    modes = np.unique(forest.mode[inner]) if inner.any() else np.zeros(1, np.int64)
    lacking = forest.missing_is_true[inner]
    missing = "none" if not lacking.any() else "all" if lacking.all() else "some"
    nodes = np.stack([
        np.where(inner, forest.feature, 0), forest.when_true * NODE, forest.when_false * NODE,
        np.where(inner, forest.mode * 2 + forest.missing_is_true, forest.leaf)], axis=1)
    longest, half = _walks(forest)
    # Where few leaves lie deep, most walks end early: from then on it is looked whether all did.
    steps = np.where(longest <= half + 2, longest, half).astype(np.int32)
    # Trees of one length go together, those that were added last.
    order = np.lexsort((steps, np.arange(len(steps)) >= trees))
    columns, weights, targets = None, forest.weights, None
    spoken = _spoken_of(forest)
    if weights.shape[1] > 1 and spoken is not None:
        columns, targets = literal(spoken[order]), weights.shape[1]
        weights = weights[np.arange(len(weights)), np.argmax(forest.says, axis=1)][:, None]
    return tree_ensemble(
        x, literal(_filled(nodes.astype(np.uint32)).reshape(-1)),
        literal(_filled(forest.threshold)),
        literal((forest.roots[order] * NODE).astype(np.uint32)), literal(steps[order]),
        literal(_filled(weights)), columns, tests=tuple(TESTS[m] for m in modes), missing=missing,
        combine=combine, trees=trees, targets=targets)


def _spoken_of(forest: Forest) -> np.ndarray | None:
    """The one target that each tree speaks of; None where some tree speaks of several."""
    column = np.zeros(len(forest.roots), np.int32)
    here, tree = forest.roots, np.arange(len(forest.roots))
    inner = forest.inner
    leaves, trees = [], []
    while here.size:
        going = inner[here]
        leaves.append(forest.leaf[here[~going]])
        trees.append(tree[~going])
        here, tree = here[going], np.concatenate([tree[going], tree[going]])
        here = np.concatenate([forest.when_true[here], forest.when_false[here]])
        here, first = np.unique(here, return_index=True)
        tree = tree[first]
    leaf, tree = np.concatenate(leaves), np.concatenate(trees)
    said, column_of = forest.says[leaf], np.argmax(forest.says[leaf], axis=1)
    if (said.sum(axis=1) > 1).any():
        return None
    speaking = said.any(axis=1)
    column[tree[speaking]] = column_of[speaking]
    return column if (column[tree[speaking]] == column_of[speaking]).all() else None


def _filled(table: np.ndarray) -> np.ndarray:
    """A table of the next larger power of two of rows: ensembles of similar size share a kernel."""
    rows = max(64, 1 << (len(table) - 1).bit_length())
    return np.concatenate([table, np.zeros((rows - len(table), *table.shape[1:]), table.dtype)])


# ---------------------------------------------------------------- the operator of version 5
@converts("TreeEnsemble", domain=ML)
def tree_ensemble_5(call: Call) -> Result:
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

    missing = call.attr("nodes_missing_value_tracks_true") or [0] * nodes
    says = np.zeros((leaves, call.attr("n_targets", 1) or 1), bool)
    weights = np.zeros(says.shape, dtype)
    at = (np.arange(leaves), column("leaf_targetids"))
    says[at], weights[at] = True, call.attr("leaf_weights")
    true, false = children("true"), children("false")
    if max(true.max(), false.max()) >= nodes + leaves or min(true.min(), false.min()) < 0:
        call.unsupported("has a branch to a node that does not exist")
    forest = Forest(
        column("tree_roots"), padded(call.attr("nodes_featureids"), np.int64),
        padded(call.attr("nodes_splits"), dtype), padded(call.attr("nodes_modes"), np.int64),
        true, false, padded(missing, bool),
        np.concatenate([np.zeros(nodes, np.int64), np.arange(leaves)]), weights, says)
    return _without_sets(call, forest) if (forest.mode == _MEMBER).any() else forest


def _in_order_of_visit(forest: Forest) -> list[int]:
    """The nodes that test membership, each before its branches, the true one first."""
    found: list[int] = []
    stack = [int(r) for r in reversed(forest.roots)]
    seen: set[int] = set()
    while stack:
        place = stack.pop()
        if place in seen or forest.when_true[place] == place:
            continue
        seen.add(place)
        if forest.mode[place] == _MEMBER:
            found.append(place)
        stack += [int(forest.when_false[place]), int(forest.when_true[place])]
    return found


def _without_sets(call: Call, forest: Forest) -> Forest:
    """A test of membership as a chain of nodes, one for each member.

    A nan ends each set in the list of all members.
    """
    testers = _in_order_of_visit(forest)
    values = np.asarray(call.attr("membership_values"), forest.threshold.dtype)
    ends = np.flatnonzero(np.isnan(values))
    if len(ends) < len(testers):
        call.unsupported("has fewer sets of members than nodes that test membership")
    threshold, mode = list(forest.threshold), list(forest.mode)
    false = list(forest.when_false)
    like = list(range(len(mode)))  # the node that a node of a chain is like in all else
    for tester, members in zip(testers, np.split(values, ends + 1)[:len(testers)], strict=True):
        members = members[~np.isnan(members)]
        otherwise, mode[tester] = false[tester], _EQUAL
        if not members.size:  # nothing is equal to nan
            threshold[tester] = np.nan
            continue
        here = tester
        threshold[here] = members[0]
        for member in members[1:]:
            false[here] = len(mode)
            here = len(mode)
            threshold.append(member)
            mode.append(_EQUAL)
            false.append(otherwise)
            like.append(tester)
    return replace(
        forest, threshold=np.array(threshold, forest.threshold.dtype), mode=np.array(mode),
        when_false=np.array(false), feature=forest.feature[like], when_true=forest.when_true[like],
        missing_is_true=forest.missing_is_true[like], leaf=forest.leaf[like])


# ---------------------------------------------------------------- the older operators
def _older_forest(call: Call, dtype: Any, kind: str, targets: int) -> Forest:
    """The tables of TreeEnsembleRegressor ("target") and TreeEnsembleClassifier ("class")."""
    def column(name: str) -> np.ndarray:
        given = call.attr(f"{name}_as_tensor")
        return np.asarray(given if given is not None else call.attr(name) or [], dtype)

    def whole(name: str) -> np.ndarray:
        return np.asarray(call.attr(name) or [], np.int64)

    trees, ids = whole("nodes_treeids"), whole("nodes_nodeids")
    span_of_ids = int(ids.max(initial=0)) + 1
    keys = trees * span_of_ids + ids
    order = np.argsort(keys, kind="stable")

    def find(tree: np.ndarray, node: np.ndarray) -> np.ndarray:
        at = np.searchsorted(keys[order], tree * span_of_ids + node)
        found = order[np.minimum(at, len(order) - 1)]
        if (trees[found] != tree).any() or (ids[found] != node).any():
            call.unsupported("has a branch to a node that does not exist")
        return found

    modes = np.array(call.attr("nodes_modes"), str)
    inner, places = modes != "LEAF", np.arange(len(ids))
    numbers = np.zeros(len(ids), np.int64)
    for name in np.unique(modes[inner]):
        if name not in _MODES[:_MEMBER]:
            call.unsupported(f"has nodes of an unknown mode {name!r}")
        numbers[modes == name] = _MODES.index(str(name))
    true, false = places.copy(), places.copy()
    for table, name in ((true, "nodes_truenodeids"), (false, "nodes_falsenodeids")):
        table[inner] = find(trees[inner], whole(name)[inner])
    leaf = np.cumsum(~inner) - 1
    weights = np.zeros((int((~inner).sum()), targets), dtype)
    says = np.zeros(weights.shape, bool)
    speakers = find(whole(f"{kind}_treeids"), whole(f"{kind}_nodeids"))
    speaking = ~inner[speakers]
    at = leaf[speakers[speaking]], whole(f"{kind}_ids")[speaking]
    np.add.at(weights, at, column(f"{kind}_weights")[speaking])
    says[at] = True
    missing = call.attr("nodes_missing_value_tracks_true") or [0] * len(ids)
    _, roots = np.unique(trees, return_index=True)
    return Forest(roots, np.where(inner, whole("nodes_featureids"), 0), column("nodes_values"),
                  numbers, true, false, np.asarray(missing, bool), np.where(inner, 0, leaf),
                  weights, says)


def _base_values(call: Call, dtype: Any) -> np.ndarray:
    given = call.attr("base_values_as_tensor")
    return (given if given is not None else np.array(call.attr("base_values") or [])).astype(dtype)


@converts("TreeEnsembleRegressor", domain=ML)
def tree_ensemble_regressor(call: Call) -> Result:
    x = floating(call.value(0))
    forest = _older_forest(call, x.dtype.np, "target", call.attr("n_targets", 1))
    result = _aggregated(call, forest, x, call.attr("aggregate_function", "SUM"))
    base = _base_values(call, x.dtype.np)
    result = result + literal(base) if base.size else result
    return astype(post_transform(call, result), dtype=float32)


@converts("TreeEnsembleClassifier", domain=ML)
def tree_ensemble_classifier(call: Call) -> Result:
    labels = labels_of(call, "classlabels_int64s")
    x = floating(call.value(0))
    forest = _older_forest(call, x.dtype.np, "class", len(labels))
    scores = _aggregated(call, forest, x, "SUM")
    base = _base_values(call, x.dtype.np)
    spoken = np.flatnonzero(forest.says.any(axis=0))
    if len(labels) == 2 and len(spoken) == 1:
        return _one_of_two(call, scores, labels, int(spoken[0]), base,
                           bool((forest.weights >= 0).all()))
    scores = scores + literal(base) if base.size else scores
    chosen = take(literal(np.array(labels, np.int64)), argmax(scores, axis=1), axis=0)
    return chosen, astype(post_transform(call, scores), dtype=float32)


def _one_of_two(call: Call, scores: Value, labels: list[int], spoken: int, base: np.ndarray,
                positive: bool) -> Result:
    """Two classes of which the leaves name one, as onnxruntime reads that.

    Weights that are all positive make a probability, others a distance from 0. What is said of
    the second class alone leaves the first at 0, and with two base values the other one's counts.
    """
    score = span(scores, 1, spoken, spoken + 1)
    silent = full(shape=score.shape, value=0, dtype=score.dtype)
    threshold = 0.5 if positive else 0.0
    if spoken == 0 and base.size < 2:
        score = score + float(base[0]) if base.size else score
        return label_above(score, threshold, labels), astype(
            two_scores(call, score, probability=positive), dtype=float32)
    if spoken == 0:
        score = score + float(base[0])
        both = concat(score, silent, axis=1)
    else:
        score = score if base.size < 2 else silent + float(base[1])
        both = concat(silent, score, axis=1)
    return label_above(score, threshold, labels), astype(
        post_transform(call, both), dtype=float32)
