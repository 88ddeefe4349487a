"""Matrix products and convolutions on a GPU, with what follows them fused, beside cuBLAS and cuDNN
alone, in turns: a GPU that gets warm is slower for all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from gpu_machine import Machine
from gpu_report import Figure, Measured, Report

import terrazzo as tz

# Rows, columns and steps of k, and what part of cuBLAS's rate they shall come to.
PRODUCTS: dict[tuple[int, int, int], float | None] = {
    (4096, 4096, 4096): 0.97, (8192, 8192, 8192): 0.97, (4096, 14336, 4096): 0.97,
    (2048, 2048, 2048): None, (1024, 1024, 1024): None, (128, 14336, 4096): 1.0,
    (64, 4096, 4096): None, (16, 4096, 4096): 0.9, (1, 4096, 4096): 0.9, (1, 14336, 4096): 0.9}
SMALL_PRODUCTS: dict[tuple[int, int, int], float | None] = {
    (80, 96, 64): 0.97, (16, 64, 64): None, (1, 64, 64): 0.9}
# The same of 8-bit floats, beside ours of bfloat16.
OF_FLOAT8: dict[tuple[int, int, int], float | None] = {
    (8192, 8192, 8192): 1.6, (4096, 4096, 4096): None, (4096, 14336, 4096): None,
    (128, 14336, 4096): None, (16, 4096, 4096): None}
SMALL_OF_FLOAT8: dict[tuple[int, int, int], float | None] = {(80, 96, 64): 1.6}
FLOAT8 = torch.float8_e4m3fn
LAYER = {False: tz.jit(lambda x, w, b: tz.gelu(x @ w + b)),
         True: tz.jit(lambda x, w, b: tz.gelu(x @ w.T + b))}


def product(m: int, n: int, k: int, turned: bool, target: float | None, machine: Machine,
            kind: torch.dtype = torch.bfloat16) -> Measured:
    """A layer with bias and GELU, beside the product alone."""
    x = machine.random(m, k, dtype=kind)
    w = machine.random(*((n, k) if turned else (k, n)), dtype=kind, scale=k ** -0.5)
    b = machine.random(n, dtype=kind)
    matrix = w.T if turned else w
    ours = LAYER[turned]
    torch.testing.assert_close(ours(x, w, b).double(), F.gelu(
        x.double() @ matrix.double() + b.double()), rtol=2e-2, atol=2e-2)
    mine, theirs = machine.in_turns(lambda: ours(x, w, b), lambda: x @ matrix)
    rates = ", ".join(f"{name} {2 * m * n * k / t / 1e9:.0f} TFLOP/s"
                      for name, t in (("ours", mine), ("cuBLAS", theirs)))
    return f"{mine * 1e3:.1f} us, {rates}", [Figure("b products", "cuBLAS", theirs / mine, target)]


def products(machine: Machine, report: Report) -> None:
    """Products of bfloat16 with bias and GELU."""
    for (m, n, k), target in (SMALL_PRODUCTS if machine.simulated else PRODUCTS).items():
        for turned in (False, True):
            report.measure(f"{'x @ w.T' if turned else 'x @ w'} {m}x{n}x{k} bfloat16", lambda: (
                product(m, n, k, turned, target, machine)))  # noqa: B023


# ---------------------------------------------------------------- 8-bit floats
def _of_float8() -> Any:
    return tz.jit(lambda x, w, s, t, b: tz.astype(tz.gelu(
        tz.float8_matmul(x, w, transpose_y=True) * s * t + b), dtype=tz.bfloat16))


EXACT, FAST = _of_float8(), _of_float8()  # for each setting code of its own


def product_of_float8(m: int, n: int, k: int, target: float | None, machine: Machine) -> Measured:
    """x @ w.T of 8-bit floats with scales, bias and GELU: beside bfloat16, and torch's alone."""
    x, w = machine.random(m, k, dtype=FLOAT8), machine.random(n, k, dtype=FLOAT8)
    b = machine.random(n, dtype=torch.bfloat16)
    s, t = (torch.tensor(v, device=machine.device) for v in (k ** -0.5, 1.0))
    wide, matrix = x.bfloat16(), w.bfloat16()

    def fast() -> Any:
        with tz.knobs.override(fp8_fast_sums=True):
            return FAST(x, w, s, t, b)

    want = F.gelu(x.double() @ w.double().T * k ** -0.5 + b.double())
    for got in (EXACT(x, w, s, t, b), fast()):
        torch.testing.assert_close(got.double(), want, rtol=3e-2, atol=3e-2)
    del want
    runs = [lambda: EXACT(x, w, s, t, b), fast, lambda: LAYER[True](wide, matrix, b)]
    names = ["ours", "ours with fast sums", "ours of bfloat16"]
    if m % 16 == 0 or machine.simulated:  # which is what torch takes
        for word, quick in (("torch._scaled_mm", False), ("with fast sums", True)):
            names.append(word)
            runs.append(lambda quick=quick: torch._scaled_mm(
                x, w.T, scale_a=s, scale_b=t, out_dtype=torch.bfloat16, use_fast_accum=quick))
    times = machine.in_turns(*runs)
    rates = ", ".join(f"{name} {2 * m * n * k / t / 1e9:.0f}" for name, t in zip(
        names, times, strict=True))
    figures = [Figure("b fp8", "bf16", times[2] / times[0], target),
               Figure("b fp8", "bf16, fast sums", times[2] / times[1], target)]
    if len(times) > 3:
        figures += [Figure("b fp8", "torch._scaled_mm", times[3] / times[0]),
                    Figure("b fp8", "the same, fast sums", times[4] / times[1])]
    return f"TFLOP/s {rates}", figures


def products_of_float8(machine: Machine, report: Report) -> None:
    """Products of 8-bit floats, whose sums are those of float32, and as tensor cores keep them."""
    for (m, n, k), target in (SMALL_OF_FLOAT8 if machine.simulated else OF_FLOAT8).items():
        report.measure(f"x @ w.T {m}x{n}x{k} float8_e4m3fn", lambda: product_of_float8(
            m, n, k, target, machine))  # noqa: B023


# ---------------------------------------------------------------- convolutions
# Size of the image, channels, outputs, window, stride, groups: layers of ResNet-50, and two more.
CONVOLUTIONS = ((224, 3, 64, 7, 2, 1), (56, 64, 64, 3, 1, 1), (56, 64, 256, 1, 1, 1),
                (56, 256, 512, 1, 2, 1), (28, 128, 128, 3, 1, 1), (14, 256, 256, 3, 1, 1),
                (14, 1024, 256, 1, 1, 1), (7, 512, 512, 3, 1, 1), (28, 512, 512, 3, 1, 32),
                (64, 320, 320, 3, 1, 1))
SMALL_CONVOLUTIONS = ((9, 3, 16, 3, 2, 1), (8, 32, 32, 3, 1, 2))


def convolution(size: int, channels: int, outputs: int, window: int, stride: int, groups: int,
                kind: torch.dtype, batch: int, machine: Machine) -> Measured:
    """A convolution with bias and ReLU, channels last for both, beside cuDNN's alone."""
    pad, within = window // 2, channels // groups
    x = machine.random(batch, channels, size, size, dtype=kind)
    w = machine.random(outputs, within, window, window, dtype=kind,
                       scale=(within * window * window) ** -0.5)
    b = machine.random(outputs, dtype=kind)
    x, w = (t.to(memory_format=torch.channels_last) for t in (x, w))
    # As they lie between layers: [N, H, W, C], weights [H, W, C, O], of float32 [O, H, W, C].
    turned = kind == torch.float32
    ours = tz.jit(lambda x, w, b: tz.relu(tz.convolve(
        x, tz.permute_dims(w, axes=(1, 2, 3, 0)) if turned else w, strides=(stride,) * 2,
        padding=((pad, pad),) * 2, dilation=(1, 1), groups=groups) + b))
    given = x.permute(0, 2, 3, 1), (w.permute(0, 2, 3, 1) if turned else w.permute(
        2, 3, 1, 0).contiguous()), b
    want = F.relu(F.conv2d(x.double(), w.double(), b.double(), stride, pad, 1, groups))
    torch.testing.assert_close(ours(*given).double(), want.permute(0, 2, 3, 1), rtol=2e-2,
                               atol=1e-4 if turned else 3e-2)
    mine, theirs = machine.in_turns(lambda: ours(*given), lambda: F.conv2d(
        x, w, None, stride, pad, 1, groups))
    flops = 2 * want.numel() * within * window * window
    rates = ", ".join(f"{name} {flops / t / 1e9:.0f} TFLOP/s"
                      for name, t in (("ours", mine), ("cuDNN", theirs)))
    return f"{mine * 1e3:.1f} us, {rates}", [Figure("convolutions", "cuDNN", theirs / mine)]


def convolutions(machine: Machine, report: Report) -> None:
    """Layers of ResNet-50 at batch 1 and 32."""
    torch.backends.cudnn.allow_tf32 = False  # float32 keeps its digits here; cuDNN shall as well
    torch.backends.cudnn.benchmark = True
    for kind in (torch.float32, torch.bfloat16):
        for batch in (1, 32) if not machine.simulated else (2,):
            for layer in SMALL_CONVOLUTIONS if machine.simulated else CONVOLUTIONS:
                size, channels, outputs, window, stride, groups = layer
                report.measure(
                    f"convolution {batch}x{size}x{size}x{channels} to {outputs}, window {window} "
                    f"by {stride}, {groups} groups {str(kind)[6:]}", lambda: convolution(
                        *layer, kind, batch, machine))  # noqa: B023
