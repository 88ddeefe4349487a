"""Counts of n-grams, in loops: one walk down a trie from each element of a row.

The edges of the trie lie in one hash table with open addressing, so that the time does not grow
with the number of n-grams that are looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from terrazzo.base.scalar import Const, Scalar, as_scalar, call
from terrazzo.base.scalar import cast as cast_scalar
from terrazzo.base.shapes import Shape, dims_text
from terrazzo.dtypes import int32, int64
from terrazzo.errors import ArgumentError, RankError, user_location
from terrazzo.expr.ir import fresh_axis
from terrazzo.graph.applying import constant
from terrazzo.graph.ir import TensorType
from terrazzo.index import Index
from terrazzo.loop.ir import Block, Buffer, For, If, Stmt, Store, While, block
from terrazzo.ops.define import operator, primitive
from terrazzo.ops.elementwise import astype, less
from terrazzo.ops.shape import reshape
from terrazzo.ops.sorting import allocate

_ROOT, _NONE = 0, -1
_LOW_BITS = 2**31 - 1  # products of what they leave with the factors stay below 2**63
_OF_PARENT, _OF_ALL = 40503, 0x9E3779B1  # Knuth's multiplicative hashing: the golden ratio


class Trie(NamedTuple):
    """Edges by the slots of a hash table, and what each node counts."""

    parents: np.ndarray  # the node that the edge in a slot leaves; -1: an empty slot
    labels: np.ndarray  # the element that it stands for
    children: np.ndarray  # the node that it leads to
    counted: np.ndarray  # for each node the column of its n-gram, -1 where it is none


def _slot(parents: Any, labels: Any, size: int) -> Any:
    """Where the search for an edge begins; numbers of numpy."""
    mixed = (labels & _LOW_BITS) + parents.astype(np.int64) * _OF_PARENT & _LOW_BITS
    return (mixed * _OF_ALL >> 16) & (size - 1)


def trie_of(pools: Sequence[np.ndarray], columns: Sequence[np.ndarray]) -> Trie:
    """The trie of some n-grams, rows of arrays of one length each, with a column for each."""
    at = [np.full(len(pool), _ROOT, np.int64) for pool in pools]
    edges: list[np.ndarray] = []
    nodes = 1
    for depth in range(max((pool.shape[1] for pool in pools), default=0)):
        longer = [i for i, pool in enumerate(pools) if pool.shape[1] > depth]
        pairs = np.concatenate([np.stack([at[i], pools[i][:, depth]], 1) for i in longer])
        found, numbers = np.unique(pairs, axis=0, return_inverse=True)
        ends = np.cumsum([len(at[i]) for i in longer])[:-1]
        for i, part in zip(longer, np.split(numbers.reshape(-1) + nodes, ends), strict=True):
            at[i] = part
        edges.append(found)
        nodes += len(found)
    counted = np.full(nodes, _NONE, np.int32)
    for where, numbers in zip(at, columns, strict=True):
        if len(np.unique(where)) < len(where):
            raise ArgumentError("tfidf_vectorizer has an n-gram twice in its pool",
                                where=user_location())
        counted[where] = numbers
    return Trie(*_table(np.concatenate([np.zeros((0, 2), np.int64), *edges])), counted)


def _table(edges: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges in slots, each in the first free one from where the search for it begins."""
    size = 1 << max(2 * len(edges), 1).bit_length()
    parents, children = (np.full(size, _NONE, np.int32) for _ in range(2))
    labels = np.zeros(size, np.int64)
    waiting = np.arange(len(edges))
    slots = _slot(edges[:, 0], edges[:, 1], size)
    while len(waiting):
        free, first = np.unique(slots[waiting], return_index=True)
        first = first[children[free] == _NONE]
        placed = waiting[first]
        parents[slots[placed]], labels[slots[placed]] = edges[placed].T
        children[slots[placed]] = placed + 1  # nodes are numbered as their edges are
        waiting = np.delete(waiting, first)
        slots[waiting] = (slots[waiting] + 1) & (size - 1)
    return parents, labels, children


# ---------------------------------------------------------------- counting
def _counts_type(x: TensorType, parents: TensorType, labels: TensorType, children: TensorType,
                 counted: TensorType, *, columns: int, longest: int, skips: int) -> TensorType:
    if len(x.shape) != 2 or x.dtype is not int64:
        raise RankError(f"counts_of_ngrams takes rows of int64, not {dims_text(x.shape)} of "
                        f"{x.dtype.name}", where=user_location())
    return TensorType((x.shape[0], columns), int32)


def _counts_numpy(x: np.ndarray, parents: np.ndarray, labels: np.ndarray, children: np.ndarray,
                  counted: np.ndarray, *, columns: int, longest: int, skips: int,
                  out: TensorType) -> np.ndarray:
    edges = {(p, v): c for p, v, c in zip(parents.tolist(), labels.tolist(), children.tolist(),
                                          strict=True) if c != _NONE}
    result = np.zeros((len(x), columns), np.int32)
    for row, numbers in enumerate(x.tolist()):
        for distance in range(1, skips + 2):
            for start in range(len(numbers)):
                node = _ROOT
                for depth, number in enumerate(numbers[start::distance][:longest]):
                    node = edges.get((node, number), _NONE)
                    if node == _NONE:
                        break
                    if counted[node] != _NONE and (depth or distance == 1):
                        result[row, counted[node]] += 1
    return result


@primitive(family="sequence", infer=_counts_type, reference=_counts_numpy, loops=True,
           differentiable=False)
def counts_of_ngrams(x: Any, parents: Any, labels: Any, children: Any, counted: Any, *,
                     columns: int, longest: int, skips: int, out: TensorType) -> Any:
    """how often the n-grams of a trie (see `terrazzo.ops.ngrams`) occur in rows of integers

    Their elements may lie 1 to skips + 1 apart, evenly.
    """
    rows, length = x.shape

    def build(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> Stmt:
        if rows == 0 or columns == 0:
            return Block(())
        row, start = fresh_axis("row", rows).var, fresh_axis("start", length).var
        column = fresh_axis("column", columns).var
        walk = _Walk(inputs, outputs[0], x.shape, row, columns, longest)
        clear = For(column, row * columns, (row + 1) * columns,
                    Store(outputs[0], column, Const(int32, 0)), "vector")
        walks = [For(start, 0, length, walk.down(Const(int32, _ROOT), start, distance))
                 for distance in range(1, skips + 2)]
        return For(row, 0, rows, block(clear, *walks), "parallel")

    return build


class _Walk:
    """Walks down the trie from the elements of one row."""

    def __init__(self, inputs: Sequence[Buffer], result: Buffer, x_shape: Shape, row: Index,
                 columns: int, longest: int):
        self.x, self.parents, self.labels, self.children, self.counted = inputs
        self.result, self.x_shape, self.row = result, x_shape, row
        self.columns, self.longest = columns, longest

    def down(self, node: Scalar, at: Index, distance: int, depth: int = 1) -> Stmt:
        """From a node along the edge of the element at a place of the row, and on from there."""
        length, size = self.x_shape[1], self.parents.size
        label, slot, child = (Buffer(n, t, 1) for n, t in (
            ("label", int64), ("slot", int64), ("child", int32)))
        mixed = call("add", call("and", label[0], _LOW_BITS),
                     call("mul", cast_scalar(node, int64), _OF_PARENT))
        begin = call("shr", call("mul", call("and", mixed, _LOW_BITS), _OF_ALL), 16)
        other = call("or", call("ne", self.parents[slot[0]], node),
                     call("ne", self.labels[slot[0]], label[0]))
        search = While(call("and", call("ge", self.children[slot[0]], 0), other), Store(
            slot, 0, call("and", call("add", slot[0], 1), size - 1)))
        column = self.counted[cast_scalar(child[0], int64)]
        place = call("add", as_scalar(self.row * self.columns), cast_scalar(column, int64))
        count = If(call("ge", column, 0), Store(self.result, place, Const(int32, 1), "add"))
        found = [count] if depth > 1 or distance == 1 else []
        if depth < self.longest:
            after = at + distance
            found.append(If(call("lt", as_scalar(after), as_scalar(length)),
                            self.down(child[0], after, distance, depth + 1)))
        return allocate([label, slot, child], block(
            Store(label, 0, self.x[self.row * length + at]),
            Store(slot, 0, call("and", begin, size - 1)), search,
            Store(child, 0, self.children[slot[0]]),
            If(call("ge", child[0], 0), block(*found))))


# ---------------------------------------------------------------- what users call
@operator(family="sequence", differentiable=False)
def tfidf_vectorizer(x: Any, *, mode: str, min_gram_length: int, max_gram_length: int,
                     max_skip_count: int, ngram_counts: Any, ngram_indexes: Any, pool_int64s: Any,
                     weights: Any = None) -> Any:
    """how often each n-gram of a pool occurs in rows of integers, maybe weighted; as ONNX's

    An n-gram's elements may lie 1 to max_skip_count + 1 apart, evenly.
    """
    if x.ndim not in (1, 2):
        raise RankError(f"tfidf_vectorizer needs a row or rows, not {dims_text(x.shape)}",
                        where=user_location())
    if mode not in ("TF", "IDF", "TFIDF"):
        raise ArgumentError(f"tfidf_vectorizer has no mode {mode!r}", where=user_location(),
                            hint="use TF, IDF or TFIDF")
    rows = astype(x if x.ndim == 2 else reshape(x, shape=(1, x.shape[0])), dtype="int64")
    size = max(ngram_indexes, default=-1) + 1
    pools, columns = _pools(min_gram_length, max_gram_length, ngram_counts, ngram_indexes,
                            pool_int64s)
    trie = trie_of(pools, columns)
    totals = counts_of_ngrams(
        rows, *map(constant, (trie.parents, trie.labels, trie.children, trie.counted)),
        columns=size, longest=max((p.shape[1] for p in pools), default=0),
        skips=max_skip_count if max_gram_length > 1 else 0)
    result = astype(totals, dtype="float32")
    if mode == "IDF":
        result = astype(less(0, totals), dtype="float32")
    if mode != "TF" and weights:
        result = result * constant(np.asarray(weights[:size], np.float32))
    return result if x.ndim == 2 else reshape(result, shape=(size,))


def _pools(shortest: int, longest: int, ngram_counts: Any, ngram_indexes: Any, pool_int64s: Any
           ) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The n-grams of the lengths that count, an array for each length, and their columns."""
    pools, columns = [], []
    starts = [*ngram_counts, len(pool_int64s)]
    first = 0
    for n in range(1, len(ngram_counts) + 1):
        pool = np.asarray(pool_int64s[starts[n - 1]:starts[n]], np.int64).reshape(-1, n)
        if shortest <= n <= longest and len(pool):
            pools.append(pool)
            columns.append(np.asarray(ngram_indexes[first:first + len(pool)], np.int32))
        first += len(pool)
    return pools, columns
