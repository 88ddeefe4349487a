"""Prints the modelled cycles of kernels of all kinds: our own, Triton's, and PyTorch's operators.

Run by test_same_everywhere.py in processes that are told of different processors, and by
test_golden_cycles.py. Nothing that another process compiled is used.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import terrazzo as tz
from terrazzo.chips.registry import chip_named
from terrazzo.knobs import knobs

GCU: Any = chip_named("gcu")
Case = tuple[str, Callable[[], Any]]


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def own() -> Iterator[Case]:
    """Graphs, by our own compiler."""
    both = {"strides": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1)}
    attention = tz.scaled_dot_product_attention
    cases: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
        "add": (lambda x, y: x + y, [(300, 130), (130,)]),
        "softmax": (tz.softmax, [(64, 300)]),
        "layer norm": (lambda x, w, b: tz.layer_norm(x, weight=w, bias=b),
                       [(50, 97), (97,), (97,)]),
        "matmul": (tz.matmul, [(128, 64), (64, 96)]),
        "ragged matmul": (tz.matmul, [(131, 71), (71, 93)]),
        "matmul of one row": (tz.matmul, [(1, 75), (75, 401)]),
        "matmul of one column": (tz.matmul, [(75, 401), (401, 1)]),
        "matmul and softmax": (lambda x: tz.softmax(tz.matmul(x, x.T)), [(70, 90)]),
        "attention": (attention, [(2, 4, 33, 16)] * 3),
        "causal attention": (lambda q, k, v: attention(q, k, v, causal=True), [(3, 130, 24)] * 3),
        "masked attention": (attention, [(2, 70, 16)] * 3 + [(70, 70)]),
        "attention of one query": (attention, [(4, 1, 16), (4, 700, 16), (4, 700, 16)]),
        "convolution": (lambda x, w: tz.convolve(x, w, **both), [(2, 9, 11, 6), (3, 3, 6, 10)]),
        "depthwise": (lambda x, w: tz.convolve(x, w, groups=10, **both),
                      [(2, 9, 11, 10), (3, 3, 1, 10)]),
        "sum of columns": (lambda x: tz.sum(x, axis=0), [(70, 130)]),
        "sum of everything": (tz.sum, [(300, 130)]),
        "transposed": (lambda x: tz.permute_dims(x, axes=(1, 0)) + 1.0, [(70, 45)]),
        "cumulative sum": (lambda x: tz.cumsum(x, axis=1), [(20, 65)]),
        "sorted": (lambda x: tz.sort(x, axis=1), [(20, 33)]),
    }
    for name, (function, shapes) in cases.items():
        call, arrays = tz.jit(function), [numbers(*shape) for shape in shapes]
        yield f"own {name}", lambda call=call, arrays=arrays: call(*arrays)
    halves: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
        "matmul": (tz.matmul, [(131, 71), (71, 93)]),
        "attention": (attention, [(2, 4, 33, 16)] * 3),
    }
    for name, (function, shapes) in halves.items():
        for dtype in (np.float16, ml_dtypes.bfloat16):
            call, arrays = tz.jit(function), [numbers(*shape).astype(dtype) for shape in shapes]
            yield (f"own {name} {np.dtype(dtype).name}",
                   lambda call=call, arrays=arrays: call(*arrays))


def triton_kernels() -> Iterator[Case]:
    """Kernels of Triton, by the backend gcu."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "triton_gcu"))
    from terrazzo.triton_gcu.activate import activate

    activate()
    import kernels as k
    import triton
    from device_arrays import normal, zeros

    triton.knobs.compilation.always_compile = True
    x, w, out = normal(57 * 1000), normal(1000), zeros(57 * 1000)
    yield "triton softmax", lambda: k.softmax[(57,)](x, out, 1000, BLOCK=1024)
    yield "triton softmax of rows", lambda: k.softmax_of_rows[(14,)](
        x, out, 55, 1000, ROWS=4, BLOCK=1024)
    yield "triton layer norm", lambda: k.layer_norm[(29,)](
        x, w, w, out, 57, 1000, ROWS=2, BLOCK=1024)
    for dtype in (np.float32, np.float16):
        a, b, c = (normal(*s, dtype=dtype) for s in ((103, 71), (71, 93), (103, 93)))
        yield f"triton ragged matmul {dtype.__name__}", lambda a=a, b=b, c=c: k.matmul[(12,)](
            a, b, c, 103, 93, 71, 32, 32, 32)
    q = normal(2, 128, 64)
    yield "triton attention", lambda: k.attention[(4, 2)](
        q, q, q, zeros(2, 128, 64), 128, D=64, BM=32, BN=32)


def torch_operators() -> Iterator[Case]:
    """Operators of PyTorch in eager mode: plans of the device."""
    import torch

    def on(*shape: int) -> Any:
        return torch.from_numpy(numbers(*shape)).to("gcu")

    f = torch.nn.functional
    x, w, image = on(33, 65), on(65, 65), on(2, 6, 9, 11)
    cases: dict[str, Callable[[], Any]] = {
        "add": lambda: x + x[:, :1], "mm": lambda: x @ w, "softmax": lambda: x.softmax(-1),
        "layer_norm": lambda: f.layer_norm(x, (65,)), "gelu": lambda: f.gelu(x),
        "conv2d": lambda: f.conv2d(image, on(8, 6, 3, 3), padding=1),
        "batch_norm": lambda: f.batch_norm(image, None, None, training=True),
        "max_pool2d": lambda: f.max_pool2d(image, 2), "sum": lambda: x.sum(0),
        "attention": lambda: f.scaled_dot_product_attention(x[None], x[None], x[None]),
        "transpose": lambda: w.t().contiguous(), "cat": lambda: torch.cat([x, w]),
        "index": lambda: w[torch.arange(7, device="gcu") * 3], "cumsum": lambda: x.cumsum(1),
    }
    for name, run in cases.items():
        yield f"torch {name}", run


def main() -> None:
    """All cases, each in its second run: the first one compiles."""
    found: dict[str, float] = {}

    def note(cases: Iterator[Case]) -> None:
        for name, run in cases:
            run()
            found[name] = round(GCU.seconds(run) * GCU.description.clock_khz * 1e3)

    with_torch = "torch" in sys.argv[1:] and importlib.util.find_spec("torch")
    if with_torch:
        from terrazzo.torch_device import register

        register().init()  # built before the cache is left out
    GCU.seconds(lambda: None)
    with knobs.override(cache=False):
        with tz.chip("gcu"):
            note(own())
        if importlib.util.find_spec("triton"):
            note(triton_kernels())
        if with_torch:
            note(torch_operators())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
