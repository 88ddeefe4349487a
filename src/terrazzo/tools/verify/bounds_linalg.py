"""Bounds of factorisations and Fourier transforms: exact for inputs that are a little off."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from terrazzo.base.scalar_accuracy import FEW
from terrazzo.dtypes import float64
from terrazzo.graph.ir import Node
from terrazzo.index import Var
from terrazzo.tools.verify.bounded import Bounded, finite, smallest, wide


def determinant(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
                dims: Mapping[Var, int]) -> list[np.ndarray]:
    """Elimination is exact for a matrix that is a little off: Hadamard's bound says what that does.

    Numpy goes through the logarithm of the result's size, which may be 700.
    """
    (x,) = inputs
    assert x is not None
    n = x.value.shape[-1]
    size = np.linalg.norm(wide(x.value), axis=-1)
    off = 8 * n * n * node.types[0].dtype.compute.eps * size + np.linalg.norm(x.error, axis=-1)
    error = (size + off).prod(-1) - size.prod(-1) + 1024 * float64.eps * np.abs(values[0])
    return [np.where(np.isfinite(error), error, np.inf)]


def factored(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
             dims: Mapping[Var, int]) -> list[np.ndarray]:
    """Exact for matrices that are a little off (Higham, chapters 9, 10, 19, 20); what that does to
    results is up to the condition number. The signs of eigenvectors and of singular ones are free.
    """
    x = inputs[0]
    assert x is not None
    n, dtype = max((1, *x.value.shape[-2:])), node.types[0].dtype.compute
    size = np.linalg.norm(finite(x.value), axis=(-2, -1), keepdims=True)
    off = 8 * n * n * dtype.eps + np.divide(
        max(float(b.error.max(initial=0.0)) for b in inputs if b is not None), size,
        out=np.full_like(size, np.inf), where=size > 0)
    sound = np.isfinite(x.value).all(axis=(-2, -1), keepdims=True)
    if node.op.name in ("eigh_lower", "svd"):
        spectrum = 0 if node.op.name == "eigh_lower" else 1
        known = np.where(sound, off * size, np.inf)[..., 0]
        return [np.broadcast_to(known, v.shape) if i == spectrum else np.full(v.shape, np.inf)
                for i, v in enumerate(values)]
    condition = np.full(size.shape, np.inf)
    if sound.all() and x.value.size:
        condition = np.linalg.cond(x.value)[..., None, None]
    loss = np.where(sound & (off * condition < 0.01), off * condition, np.inf)
    if node.op.name == "slogdet":
        return [np.where(np.isfinite(loss[..., 0, 0]), e, np.inf) for e in (
            0.0, n * loss[..., 0, 0] + dtype.eps * np.abs(values[1]))]
    return [loss * np.abs(v).max(axis=(-2, -1), keepdims=True, initial=0.0) for v in values]


def transformed(node: Node, inputs: list[Bounded | None], values: list[np.ndarray],
                dims: Mapping[Var, int]) -> list[np.ndarray]:
    """Every number of a line takes part in every result, by log2(n) stages (Higham, chapter 24).

    What numbers that are not finite become depends on the order in which they are added.
    """
    x = inputs[0]
    assert x is not None
    axes = (-3, -1) if node.op.name == "fft_columns" else (-2, -1)
    n, dtype = x.value.shape[axes[0]], node.types[0].dtype.compute
    scale = abs(node.attrs.get("scale", 1.0))
    size = finite(x.value).sum(axis=axes, keepdims=True)
    error = scale * (FEW * (1 + math.log2(max(n, 2))) * dtype.eps * size
                     + x.error.sum(axis=axes, keepdims=True)) + smallest(dtype) * n
    known = np.isfinite(x.value).all(axis=axes, keepdims=True) & (size < dtype.max / 2)
    return [np.where(known, error, np.inf)]
