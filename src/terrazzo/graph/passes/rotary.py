"""Rotary embeddings as exporters write them, found again: x * cos + rotated(x) * sin.

`rotated` negates one half of x and exchanges the halves (Slice or Split, Neg, Concat), or does so
with neighbours (Slices of every second element, stacked). The second form reads memory with gaps
and is several times faster as one operator, which reads runs; the first is as fast either way.
"""

from __future__ import annotations

from terrazzo.graph.ir import Node, Value
from terrazzo.graph.passes.parts import made_by, op, operands
from terrazzo.graph.patterns import P, same_shape, splat
from terrazzo.graph.rewrite import Rule, RuleTable
from terrazzo.index import Index, proves_eq

Part = tuple[Value, Index, Index, int]  # of a value: the last axis from, up to, by


def _part(value: Value) -> Part | None:
    """What a value is a slice of, if only the last axis is cut."""
    node = made_by(value, "slice")
    if node is None:
        return None
    (source,) = operands(node)
    starts, stops, steps = (node.attrs[k] for k in ("starts", "stops", "steps"))
    whole = all(a == 0 and s == 1 and proves_eq(b, n) for a, b, s, n in zip(
        starts[:-1], stops[:-1], steps[:-1], source.shape[:-1], strict=True))
    return (source, starts[-1], stops[-1], steps[-1]) if whole else None


def _negated(value: Value) -> Value | None:
    node = made_by(value, "negative", "multiply")
    if node is None:
        return None
    first, *rest = operands(node)
    if not rest:
        return first
    for number, other in ((first, rest[0]), (rest[0], first)):
        if splat(number) == -1:
            return other
    return None


def _joined(value: Value) -> tuple[Part, Part] | None:
    """The parts of a value in a join (-first, second) along the last axis."""
    node = made_by(value, "concat")
    if node is None or len(node.inputs) != 2 or node.attrs["axis"] not in (-1, value.ndim - 1):
        return None
    left, right = (_without_last_axis(v) if made_by(v, "reshape") else v for v in operands(node))
    first = None if left is None else _negated(left)
    if first is None or right is None:
        return None
    parts = _part(first), _part(right)
    return None if parts[0] is None or parts[1] is None else (parts[0], parts[1])


def _without_last_axis(value: Value) -> Value | None:
    """A value before an axis of size 1 was put at its end."""
    node = made_by(value, "reshape")
    source = None if node is None else operands(node)[0]
    added = source is not None and same_shape((*source.shape, 1), value.shape)
    return source if added else None


def _rotated(value: Value) -> tuple[Value, bool] | None:
    """What a value is a quarter turn of, and whether pairs are neighbours."""
    stacked = made_by(value, "reshape")
    joined = _joined(value if stacked is None else operands(stacked)[0])
    if joined is None:
        return None
    (x, *first), (other, *second) = joined
    if x is not other or not same_shape(x.shape, value.shape):
        return None
    size = x.shape[-1]
    half = size // 2
    wanted: list[list[Index]] = [[1, size, 2], [0, size, 2]] if stacked is not None else [
        [half, size, 1], [0, half, 1]]
    if not proves_eq(2 * half, size) or not all(
            _same_elements(a, b) for a, b in zip((first, second), wanted, strict=True)):
        return None
    return x, stacked is not None


def _same_elements(found: list[Index], wanted: list[Index]) -> bool:
    """Whether slices pick the same elements; one of every second may stop one element early."""
    start, stop, step = found
    return proves_eq(start, wanted[0]) and step == wanted[2] and (
        proves_eq(stop, wanted[1]) or (step == 2 and proves_eq(stop + 1 - start, wanted[1])))


def _rotary(node: Node) -> Value | None:
    products = [made_by(v, "multiply") for v in operands(node)]
    for plain, turned in (products, products[::-1]):
        if plain is None or turned is None:
            continue
        for rotated, sin in (operands(turned), operands(turned)[::-1]):
            found = _rotated(rotated)
            for x, cos in (operands(plain), operands(plain)[::-1]):
                if found is not None and x is found[0] and x.dtype.is_float:
                    return op("rotary_embedding", x, cos, sin, interleaved=found[1])
    return None


ROTARY = RuleTable((Rule("rotary embedding", P.add(...), _rotary, "extended"),))
