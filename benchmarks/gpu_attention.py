"""Attention on a GPU, forward and back, beside cuDNN's and FlashAttention-2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from gpu_machine import Machine
from gpu_report import Figure, Measured, Report

import terrazzo as tz

KINDS = (torch.bfloat16, torch.float16)
PEERS = {"cuDNN": "CUDNN_ATTENTION", "FlashAttention-2": "FLASH_ATTENTION"}


@dataclass(frozen=True)
class Heads:
    """Sizes of attention: 2048 wide, or decoding."""

    batch: int
    heads: int
    shared: int  # heads of k and v
    queries: int
    keys: int
    size: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.heads}/{self.shared}x{self.queries}x{self.keys} d{self.size}"

    def given(self, kind: torch.dtype, machine: Machine) -> tuple[Any, Any, Any]:
        q = machine.random(self.batch, self.heads, self.queries, self.size, dtype=kind)
        k, v = (machine.random(self.batch, self.shared, self.keys, self.size, dtype=kind)
                for _ in range(2))
        return q, k, v

    def operations(self, products: int, causal: bool) -> float:
        """Multiplications and additions of so many products of queries and keys."""
        return 2.0 * products * self.batch * self.heads * self.queries * self.keys * self.size * (
            0.5 if causal else 1)

    def peer(self, name: str, causal: bool, machine: Machine) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            with machine.attention_by(PEERS[name]):
                return F.scaled_dot_product_attention(*given, is_causal=causal,
                                                      enable_gqa=self.heads != self.shared)

        return run


WIDE = (Heads(4, 32, 32, 4096, 4096, 64), Heads(1, 32, 32, 16384, 16384, 64),
        Heads(4, 16, 16, 4096, 4096, 128), Heads(1, 16, 16, 16384, 16384, 128))
DECODING = (Heads(8, 16, 16, 1, 16384, 128), Heads(16, 32, 8, 1, 16384, 128))
SHARED = (Heads(4, 16, 4, 4096, 4096, 128),)
SMALL_WIDE, SMALL_DECODING = (Heads(1, 2, 2, 48, 48, 16),), (Heads(1, 4, 2, 1, 200, 16),)
OURS = {causal: tz.jit(lambda q, k, v, causal=causal: tz.scaled_dot_product_attention(
    q, k, v, causal=causal)) for causal in (False, True)}


def forward(heads: Heads, causal: bool, kind: torch.dtype, machine: Machine) -> Measured:
    """Attention of many queries."""
    given = heads.given(kind, machine)
    ours, peers = OURS[causal], [heads.peer(name, causal, machine) for name in PEERS]
    torch.testing.assert_close(ours(*given), peers[-1](*given), rtol=3e-2, atol=3e-2)
    times = machine.in_turns(lambda: ours(*given), *(lambda p=p: p(*given) for p in peers))
    flops = heads.operations(2, causal)
    rates = ", ".join(f"{name} {flops / t / 1e9:.0f}" for name, t in zip(
        ("ours", *PEERS), times, strict=True))
    return f"TFLOP/s {rates}", [Figure("c forward", "cuDNN", times[1] / times[0], 0.9),
                                Figure("c forward", "FlashAttention-2", times[2] / times[0], 1.4)]


def backward(heads: Heads, causal: bool, kind: torch.dtype, target: float | None, machine: Machine
             ) -> Measured:
    """Its gradient alone, and with the pass before it."""
    made = [x.requires_grad_() for x in heads.given(kind, machine)]
    g = machine.random(*made[0].shape, dtype=kind)
    functions = [OURS[causal], *(heads.peer(name, causal, machine) for name in PEERS)]
    results = [f(*made) for f in functions]

    def back(result: Any) -> Any:
        return torch.autograd.grad(result, made, g, retain_graph=True)

    want = back(results[-1])
    torch.testing.assert_close(back(results[0]), want, rtol=5e-2, atol=5e-2 * max(
        1.0, *(float(w.abs().max()) for w in want)))
    alone = machine.in_turns(*(lambda r=r: back(r) for r in results))
    del results, want
    both = machine.in_turns(*(lambda f=f: torch.autograd.grad(f(*made), made, g)
                              for f in functions))
    # Two products forward and five back, however often a kernel computes scores.
    rates = ["/".join(f"{heads.operations(n, causal) / t / 1e9:.0f}" for t in times)
             for n, times in ((5, alone), (7, both))]
    return (f"TFLOP/s of ours/cuDNN/FlashAttention-2: back {rates[0]}, both passes {rates[1]}", [
        Figure("c backward", "cuDNN", alone[1] / alone[0], target),
        Figure("c backward", "FlashAttention-2", alone[2] / alone[0]),
        Figure("c backward", "cuDNN, both passes", both[1] / both[0])])


def decoding(heads: Heads, kind: torch.dtype, machine: Machine) -> Measured:
    """One query: keys and values are read once."""
    given = heads.given(kind, machine)
    ours, peers = OURS[False], [heads.peer(name, False, machine) for name in PEERS]
    torch.testing.assert_close(ours(*given), peers[-1](*given), rtol=3e-2, atol=3e-2)
    both, room = torch.stack(given[1:]), torch.empty_like(torch.stack(given[1:]))
    times = machine.in_turns(lambda: room.copy_(both), lambda: ours(*given),
                             *(lambda p=p: p(*given) for p in peers))
    size = 2 * given[1].nbytes
    rates = [2 * size / times[0] / 1e9, *(size / t / 1e9 for t in times[1:])]
    text = ", ".join(f"{name} {r:.2f}" for name, r in zip(("copy_", "ours", *PEERS), rates,
                                                          strict=True))
    return f"TB/s {text}", [Figure("c decoding", "of copy_", rates[1] / rates[0], 0.9),
                            Figure("c decoding", "cuDNN", times[2] / times[1])]


def attention(machine: Machine, report: Report) -> None:
    """Forward passes of half types, full and causal, and decoding."""
    for kind in KINDS:
        for heads in SMALL_WIDE if machine.simulated else WIDE:
            for causal in (False, True):
                report.measure(_name("attention", heads, causal, kind), lambda: forward(
                    heads, causal, kind, machine))  # noqa: B023
        for heads in SMALL_DECODING if machine.simulated else DECODING:
            report.measure(_name("decoding", heads, False, kind), lambda: decoding(
                heads, kind, machine))  # noqa: B023


def attention_gradient(machine: Machine, report: Report) -> None:
    """Gradients of bfloat16, full and causal."""
    for heads in SMALL_WIDE if machine.simulated else (*WIDE, *SHARED):
        for causal in (False, True):
            report.measure(_name("attention's gradient", heads, causal, KINDS[0]), lambda: backward(
                heads, causal, KINDS[0], 0.8, machine))  # noqa: B023


def _name(what: str, heads: Heads, causal: bool, kind: torch.dtype) -> str:
    return f"{what} {heads} {'causal' if causal else 'full'} {str(kind)[6:]}"
