"""Long sums of products are as exact as sums in blocks, in every kind of kernel.

We promise that a sum is no less exact than one in blocks of 192 steps that are added up in order,
each step a fused multiply-add. That is what the libraries we know do at best (MKL on Zen 4), so no
processor has a peer that is more exact; and it is a sum that can be made here, whatever is
installed. Convolutions, whose peers sum up whole windows, get blocks of 384. The measure is the
root mean square over some 1500 elements, which varies by 2 % between two sums of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from terrazzo.chips.cpu import pool
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.chips.cpu.description import host
from terrazzo.chips.cpu.llvm.kernel import compile_function
from terrazzo.chips.cpu.templates import lower
from terrazzo.chips.spec import ChipSpec
from terrazzo.compiler.lowering import Lowering
from terrazzo.dtypes import float32
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace
from terrazzo.knobs import knobs
from terrazzo.ops.attention import scaled_dot_product_attention
from terrazzo.ops.contract import batch_matmul, matmul
from terrazzo.ops.conv import convolve

PROMISED_BLOCK, PROMISED_WINDOW, CHANCE = 192, 384, 1.04
WIDTHS = [bits for bits in (256, 512) if bits <= host().vector_bits]


@pytest.fixture(params=WIDTHS)
def chip(request: pytest.FixtureRequest) -> ChipSpec:
    with knobs.override(vector_bits=request.param):
        return host()


def numbers(shape: Sequence[int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(function: Callable[..., Any], inputs: Sequence[np.ndarray], chip: ChipSpec,
        shape: Sequence[int], constant: bool = False) -> np.ndarray:
    """One kernel, whose second input may be a constant."""
    graph, _ = trace(function, [TensorType(a.shape, float32) for a in inputs])
    (group,) = Lowering(graph, Cpu(chip)).fused.groups
    constants = frozenset(group.program.inputs[1:2]) if constant else frozenset()
    lowered = lower(group.program, chip, constants)
    assert lowered is not None and bool(lowered.packed) == constant
    kernel = compile_function(lowered, chip, dict(pool.symbols()))
    out = np.full(shape, np.nan, np.float32)
    given = lowered.arranged(inputs)
    kernel([a.ctypes.data for a in given] + [out.ctypes.data], [], 1)
    return out


def product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) @ y.astype(np.float64)


def blocked(x: np.ndarray, y: np.ndarray, steps: int = PROMISED_BLOCK) -> np.ndarray:
    """The promised sum; a product in float64 is exact, so only additions are rounded."""
    exact_x, exact_y = x.astype(np.float64), y.astype(np.float64)
    total = np.zeros((len(x), y.shape[1]), np.float32)
    for start in range(0, x.shape[1], steps):
        part = np.zeros_like(total)
        for p in range(start, min(start + steps, x.shape[1])):
            part = (part + exact_x[:, p:p + 1] * exact_y[p]).astype(np.float32)
        total += part
    return total


def rms(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got.astype(np.float64) - want)**2)))


@pytest.fixture(scope="module", params=[
    *((m, k) for k in (193, 2100) for m in (1, 2, 8, 40, 300)), (1, 16384), (2, 16384),
    (300, 16384)], ids=str)
def factors(request: pytest.FixtureRequest) -> tuple[np.ndarray, np.ndarray, float]:
    """Factors of some number of rows and length, and the error that we promise."""
    m, k = request.param
    x, y = numbers((m, k)), numbers((k, max(96, 1536 // m)), seed=1)
    return x, y, rms(blocked(x[:16], y), product(x[:16], y))


@pytest.mark.parametrize("kind", ["rows", "transposed", "constant"])
def test_products(factors: tuple[np.ndarray, np.ndarray, float], chip: ChipSpec, kind: str
                  ) -> None:
    x, y, promised = factors
    turned = kind == "transposed"
    got = run(lambda a, b: batch_matmul(a, b, transpose_y=turned),
              [x, np.ascontiguousarray(y.T) if turned else y], chip, (len(x), y.shape[1]),
              kind == "constant")
    assert rms(got, product(x, y)) <= CHANCE * promised


def test_batches_and_what_follows_a_product(chip: ChipSpec) -> None:
    x, y, rest = numbers((3, 20, 5000)), numbers((3, 5000, 96), 1), numbers((3, 20, 96), 2)
    promised = rms(np.stack([blocked(a, b) for a, b in zip(x, y, strict=True)]), product(x, y))
    got = run(lambda x, y, r: matmul(x, y) * 2.0 + r, [x, y, rest], chip, rest.shape)
    assert rms(got, product(x, y) * 2 + rest) <= 2 * CHANCE * promised


@pytest.mark.parametrize(("x_shape", "w_shape", "apart"), [
    ((1, 9, 9, 1024), (1, 1, 1024, 48), 1), ((1, 9, 9, 400), (3, 3, 400, 48), 1),
    ((1, 12, 12, 96), (5, 5, 96, 40), 1), ((1, 12, 12, 70), (3, 3, 70, 40), 2)], ids=str)
def test_convolutions(chip: ChipSpec, x_shape: tuple[int, ...], w_shape: tuple[int, ...],
                      apart: int) -> None:
    x, w = numbers(x_shape), numbers(w_shape, 1)
    reach, depth = (w_shape[0] - 1) * apart + 1, int(np.prod(w_shape[:3]))
    windows = np.lib.stride_tricks.sliding_window_view(x[0], (reach, reach), axis=(0, 1))
    size = windows.shape[0]
    rows = np.moveaxis(windows[..., ::apart, ::apart], 2, -1).reshape(size * size, depth)
    weights = w.reshape(depth, w_shape[-1])
    got = run(lambda x, w: convolve(x, w, strides=(1, 1), padding=((0, 0), (0, 0)),
                                    dilation=(apart, apart), groups=1),
              [x, w], chip, (1, size, size, w_shape[-1]), constant=True)
    want = product(rows, weights)
    assert rms(got.reshape(want.shape), want) <= CHANCE * rms(
        blocked(rows, weights, PROMISED_WINDOW), want)


@pytest.mark.parametrize("queries", [1, 4, 70])
def test_attention_over_many_keys(chip: ChipSpec, queries: int) -> None:
    """Queries of zero weigh all keys the same: the result is a plain sum of values."""
    keys = 8192
    q, k, v = np.zeros((24, queries, 64), np.float32), numbers((24, keys, 64)), numbers(
        (24, keys, 64), 1)
    got = run(scaled_dot_product_attention, [q, k, v], chip, q.shape)
    want = v.astype(np.float64).mean(1)
    ones = np.ones((1, keys), np.float32)
    promised = rms(np.concatenate([blocked(ones, head) for head in v]) / np.float32(keys), want)
    assert rms(got, want[:, None]) <= CHANCE * promised
