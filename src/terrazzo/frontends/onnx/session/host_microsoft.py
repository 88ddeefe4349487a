"""What the host does of com.microsoft: inverses, hashes, and what counts as it goes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from terrazzo.errors import ModelError
from terrazzo.frontends.onnx.session.host_ops import Attrs, host_op

MS = "com.microsoft"


@host_op("Inverse", domain=MS)
def _inverse(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    x = np.asarray(inputs[0])
    try:
        return [np.linalg.inv(x.astype(np.float64)).astype(x.dtype)]
    except np.linalg.LinAlgError as error:
        raise ModelError(f"Inverse: {error}") from None


@host_op("Unique", domain=MS)
def _unique(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    """What is there in order of appearance, where each element is in that, and how often."""
    found, first, inverse, counts = np.unique(
        np.asarray(inputs[0]).reshape(-1), return_index=True, return_inverse=True,
        return_counts=True)
    order = np.argsort(first, kind="stable")
    place = np.argsort(order, kind="stable")
    return [found[order], place[inverse].astype(np.int64), counts[order].astype(np.int64)]


@host_op("NGramRepeatBlock", domain=MS)
def _ngram_repeat_block(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    """Scores without the tokens that would repeat a run of n that is there already."""
    ids, scores = np.asarray(inputs[0]), np.array(inputs[1])
    n, length = attrs["ngram_size"], ids.shape[1]
    if n <= 0:
        raise ModelError(f"NGramRepeatBlock has an ngram_size of {n}")
    for row, tokens in zip(scores, ids, strict=True):
        last = tokens[length - n + 1:] if n > 1 else tokens[:0]
        for start in range(length - n + 1):
            if np.array_equal(tokens[start:start + n - 1], last):
                row[tokens[start + n - 1]] = -np.inf
    return [scores]


# ---------------------------------------------------------------- hashes
@host_op("MurmurHash3", domain=MS, makes=True, steady=True)
def _murmur_hash(attrs: Attrs, version: int, inputs: Sequence[Any]) -> list[Any]:
    """MurmurHash3 (Appleby), 32 bits, of each element's bytes."""
    x, seed = np.asarray(inputs[0]), attrs.get("seed", 0)
    items = [t.encode() for t in x.reshape(-1)] if x.dtype.kind in "OUS" else [
        v.tobytes() for v in x.reshape(-1)]
    hashed = np.array([_murmur(data, seed) for data in items], np.uint32).reshape(x.shape)
    return [hashed if attrs.get("positive", 1) else hashed.view(np.int32)]


@lru_cache(maxsize=1 << 16)  # words come again and again
def _murmur(data: bytes, seed: int) -> int:
    mask, h = 0xFFFFFFFF, seed

    def turned(v: int, bits: int) -> int:
        return (v << bits | v >> (32 - bits)) & mask

    def mixed(v: int) -> int:
        return turned(v * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask

    whole = len(data) // 4 * 4
    for at in range(0, whole, 4):
        h = turned(h ^ mixed(int.from_bytes(data[at:at + 4], "little")), 13) * 5 + 0xE6546B64
        h &= mask
    h ^= mixed(int.from_bytes(data[whole:], "little"))
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16
