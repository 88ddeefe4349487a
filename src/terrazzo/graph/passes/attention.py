"""Attention as exporters write it, found again: softmax(q k^T * scale + mask) v.

Today's exporters take `scaled_dot_product_attention` apart into products, a softmax and masks, with
the scale on the scores, on q, or its root on both factors; with k transposed through a merged
axis; with heads repeated for grouped queries; with rows that see no key put to zero through
IsNaN or by a softmax that does so; with batches and heads merged for each product. The rules here
put the operator together again, so that a chip can run it without ever writing the scores to
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from terrazzo.graph.applying import as_value
from terrazzo.graph.ir import Node, Value
from terrazzo.graph.passes.parts import made_by, op, operands
from terrazzo.graph.patterns import P, constant_array, same_shape, splat, wildcards
from terrazzo.graph.rewrite import Rule, RuleTable

x, weights, v = wildcards("x weights v")

_PRODUCTS = ("matmul", "batch_matmul")
_HIDDEN = -1e30  # what is added to a score to hide it: -inf, or near the type's lowest number


# ---------------------------------------------------------------- parts of the pattern
def _without_guard(value: Value) -> Value:
    """`where(isnan(s), 0, s)` is s: the guard is there for rows that see no key."""
    node = made_by(value, "where")
    if node is None:
        return value
    test, zero, kept = operands(node)
    asked = made_by(test, "isnan")
    return kept if asked is not None and asked.inputs[0] is kept and splat(zero) == 0 else value


def _apart(value: Value) -> Value:
    """Matrices before their leading axes were merged, or taken apart."""
    node = made_by(value, "reshape")
    if node is None:
        return value
    source = operands(node)[0]
    same = source.ndim > 1 and same_shape(source.shape[-2:], value.shape[-2:])
    return source if same else value


def _led_by(value: Value, leading: Sequence[Any]) -> Value:
    """Matrices with other leading axes, which come to as many."""
    shape = (*leading, *value.shape[-2:])
    for found in (value, _apart(value)):
        if same_shape(found.shape, shape):
            return found
    return op("reshape", value, shape=shape)


def _product(scores: Value) -> Node | None:
    """The product that scores are, if it is one of as many matrices on both sides."""
    whole = _apart(scores)
    node = made_by(whole, *_PRODUCTS)
    if node is None or whole is scores:
        return node
    spread = any(not same_shape(t.shape[:-2], whole.shape[:-2]) for t in operands(node))
    return None if spread else node


def _scaled(value: Value) -> tuple[Value, float]:
    """A value without the numbers it is multiplied or divided by, and their product."""
    scale = 1.0
    while (node := made_by(value, "multiply", "divide")) is not None:
        first, second = operands(node)
        by, rest = splat(second), first
        if by is None and node.op.name == "multiply":
            by, rest = splat(first), second
        if by is None or by == 0 or rest.shape != value.shape:
            break
        scale = scale / by if node.op.name == "divide" else scale * by
        value = rest
    return value, scale


def _transposed(value: Value) -> Value:
    """A matrix with its last two axes exchanged, undone where it has just been done."""
    rank = value.ndim
    swapped = (*range(rank - 2), rank - 1, rank - 2)
    node = made_by(value, "permute_dims")
    if node is not None and tuple(a % rank for a in node.attrs["axes"]) == swapped:
        return operands(node)[0]
    return op("permute_dims", value, axes=swapped)


def _ungrouped(value: Value) -> Value:
    """k or v before its heads were repeated for grouped queries."""
    outer = made_by(value, "reshape")
    spread = made_by(outer.inputs[0], "broadcast_to") if outer is not None else None
    if spread is None or value.ndim < 3:
        return value
    (source,) = operands(spread)
    inner = made_by(source, "reshape")
    if inner is None or source.ndim != value.ndim + 1 or source.shape[-3] != 1:
        return value
    (whole,) = operands(inner)
    fits = (whole.ndim == value.ndim and whole.shape[:-3] == value.shape[:-3]
            and whole.shape[-2:] == value.shape[-2:] and source.shape[-4] == whole.shape[-3])
    return whole if fits else value


def _is_causal(mask: np.ndarray | None, queries: Any, keys: Any) -> bool:
    """Whether a mask that is added hides exactly the keys after each query's own place."""
    if mask is None or queries != keys or mask.shape[-2:] != (queries, keys):
        return False
    after = np.triu(np.ones((queries, keys), bool), 1)
    return bool(np.all(mask[..., ~after] == 0) and np.all(mask[..., after] <= _HIDDEN))


def _masked(scores: Value) -> tuple[Value, Value | None]:
    """Scores before masking, and the mask: booleans that say what is seen, or what is added.

    A number that hides swallows the score it is added to. So it may be added where it was put in
    the score's place; and a row of nothing else then has equal weights, as it is written.
    """
    node = made_by(scores, "add")
    if node is not None:
        for whole, mask in (operands(node), operands(node)[::-1]):
            if whole.shape == scores.shape and _product(_scaled(whole)[0]) is not None:
                return whole, mask
    node = made_by(scores, "where")
    if node is not None:
        seen, kept, hidden = operands(node)
        number = splat(hidden)
        if kept.shape == scores.shape and number is not None and number <= _HIDDEN:
            return kept, seen if number == -np.inf else _added(seen, number, kept)
    return scores, None


def _added(seen: Value, hidden: float, scores: Value) -> Value:
    """What is added to scores to hide those that are not seen."""
    known = constant_array(seen)
    if known is None:
        return op("where", seen, 0.0, as_value(np.asarray(hidden, scores.dtype.np)))
    return as_value(np.where(known, 0.0, hidden).astype(scores.dtype.np))


def _factors(product: Node, scores: Value) -> tuple[Value, Value] | None:
    """q and k of the scores' product, k with its size last."""
    left, right = operands(product)
    if left.ndim < 2 or right.ndim < 2 or product.attrs.get("transpose_x"):
        return None
    if product.outputs[0] is not scores:
        left, right = (_led_by(t, scores.shape[:-2]) for t in (left, right))
    right, by = _scaled(right)
    k = right if product.attrs.get("transpose_y") else _transposed(right)
    return left, k if by == 1.0 else op("multiply", k, float(by))


def _attention(weights: Value, v: Value, node: Node) -> Value | None:
    if node.attrs.get("transpose_x") or node.attrs.get("transpose_y") or v.ndim < 2:
        return None
    guarded = _apart(weights)
    if guarded is not weights:
        if not same_shape(v.shape[:-2], weights.shape[:-2]):
            return None
        v = _led_by(v, guarded.shape[:-2])
    unguarded = _without_guard(guarded)
    soft = made_by(unguarded, "softmax", "safe_softmax")
    if soft is None or soft.attrs["axis"] not in (-1, guarded.ndim - 1):
        return None
    scores = operands(soft)[0]
    scores, mask = _masked(scores)
    scores, scale = _scaled(scores)
    product = _product(scores)
    if product is None or scores.dtype is not v.dtype or not v.dtype.is_float:
        return None
    pair = _factors(product, scores)
    if pair is None:
        return None
    q, by_q = _scaled(pair[0])
    k, by_k = _scaled(pair[1])
    queries, keys = scores.shape[-2:]
    causal = mask is not None and _is_causal(constant_array(mask), queries, keys)
    groups = _ungrouped(k), _ungrouped(v)
    if len({t.shape[:-2] for t in groups}) == 1:  # both were repeated, or none
        k, v = groups
    zeros = soft.op.name == "safe_softmax" or unguarded is not guarded
    found = op("scaled_dot_product_attention", q, k, v,
               *([] if mask is None or causal else [mask]), causal=causal,
               scale=float(scale * by_q * by_k),
               unseen="zeros" if mask is None or causal or zeros else "nan")
    return found if guarded is weights else _led_by(found, weights.shape[:-2])


# ---------------------------------------------------------------- a transpose through merged axes
def _permute_of_merged(x: Value, node: Node) -> Value | None:
    """reshape(permute(reshape(x))) that merges leading axes and takes them apart again."""
    middle = made_by(node.inputs[0], "permute_dims")
    assert middle is not None
    merged, shape = operands(middle)[0], node.types[0].shape
    axes = tuple(a % merged.ndim for a in middle.attrs["axes"])
    leading = len(shape) - merged.ndim + 1
    if leading < 2 or axes[0] != 0 or not same_shape(
            shape[leading:], [merged.shape[a] for a in axes[1:]]):
        return None
    apart = (*shape[:leading], *merged.shape[1:])
    whole = x if same_shape(x.shape, apart) else op("reshape", x, shape=apart)
    return op("permute_dims", whole, axes=(*range(leading), *(a + leading - 1 for a in axes[1:])))


ATTENTION = RuleTable((
    Rule("transpose through merged axes",
         P.reshape(P.permute_dims(P.reshape(x))), _permute_of_merged, "basic"),
    Rule("attention", P.one_of(*_PRODUCTS)(weights, v), _attention, "extended",
         "a row of scores that are all nan gave zeros under the guard, and gives nan now"),
))
