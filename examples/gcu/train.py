"""Train a small network on a virtual chip, or on the CPU for comparison.

    python examples/gcu/train.py                                        # the ConvNet on gcu, eager
    python examples/gcu/train.py --network transformer --compile inductor --autocast
    python examples/gcu/train.py --device cpu --double                  # as exact as it gets

Prints the loss of each epoch, what the work takes on the chip by its description, and which
operators had to run on the CPU. Data are made up: eight patterns, and noise.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CLASSES, SAMPLES, BATCH = 8, 64, 16
TOKENS, LENGTH = 32, 16


class ConvNet(nn.Module):
    """Two convolutions with batch norm and pools, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(16 * 4 * 4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1))


class Transformer(nn.Module):
    """Two layers that predict the next token of a sequence."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH - 1, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu",
                                           batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, TOKENS)
        later = torch.triu(torch.ones(LENGTH - 1, LENGTH - 1, dtype=torch.bool), 1)
        self.register_buffer("later", later)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.layers(self.tokens(x) + self.places, mask=self.later,
                             is_causal=True)
        return self.head(self.norm(inside)).flatten(0, 1)


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    """Eight patterns under noise, and which is which."""
    kinds = torch.arange(SAMPLES) % CLASSES
    return torch.randn(CLASSES, 1, 16, 16)[kinds] + torch.randn(SAMPLES, 1, 16, 16), kinds


def sentences() -> tuple[torch.Tensor, torch.Tensor]:
    """Eight sequences, one token in ten another one; and each with its next tokens."""
    whole = torch.randint(TOKENS, (CLASSES, LENGTH))[torch.arange(SAMPLES) % CLASSES]
    whole = torch.where(torch.rand(whole.shape) < 0.1, torch.randint(TOKENS, whole.shape), whole)
    return whole[:, :-1], whole[:, 1:]


NETWORKS = {"convnet": (ConvNet, pictures), "transformer": (Transformer, sentences)}


@dataclass(frozen=True)
class Run:
    """What is trained, and how."""

    network: str = "convnet"
    device: str = "gcu"
    compiled: str = "none"
    autocast: bool = False
    epochs: int = 10
    double: bool = False
    order: int | None = None
    """Another order of the samples in each batch, which changes how sums are rounded."""


def batches(run: Run, x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[Any, Any]]:
    """The samples of an epoch, in parts."""
    shuffle = torch.Generator().manual_seed(run.order or 0)
    for start in range(0, SAMPLES, BATCH):
        part = torch.arange(start, start + BATCH)
        if run.order is not None:
            part = part[torch.randperm(BATCH, generator=shuffle)]
        yield x[part], y[part].flatten()


def train(run: Run, tell: Callable[[int, float], None] = lambda epoch, loss: None) -> list[float]:
    """The loss of every step; the same network and data whatever the device."""
    torch.manual_seed(0)
    network, data = NETWORKS[run.network]
    x, y = data()
    x = x.double() if run.double and x.is_floating_point() else x
    model = network().to(run.device, torch.float64 if run.double else torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(run.device, dtype=torch.bfloat16, enabled=run.autocast):
            return F.cross_entropy(model(x), y)

    forward = loss_of if run.compiled == "none" else torch.compile(loss_of, backend=run.compiled)
    losses: list[float] = []
    for epoch in range(run.epochs):
        for some, wanted in batches(run, x, y):
            loss = forward(some.to(run.device), wanted.to(run.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        tell(epoch, losses[-1])
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    chip = os.environ.get("TZ_TORCH_DEVICE", "gcu")
    parser.add_argument("--network", choices=NETWORKS, default="convnet")
    parser.add_argument("--device", default=chip,
                        help="cpu, gcu, or the chip that TZ_TORCH_DEVICE names")
    parser.add_argument("--compile", choices=["none", "inductor", "terrazzo"], default="none")
    parser.add_argument("--autocast", action="store_true", help="bfloat16 where it is good enough")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--double", action="store_true", help="in float64")
    asked = parser.parse_args()
    run = Run(asked.network, asked.device, asked.compile, asked.autocast, asked.epochs,
              asked.double)
    on_chip = run.device != "cpu"
    import terrazzo as tz

    with tz.gcu.trace(chip=run.device) if on_chip else contextlib.nullcontext() as trace:
        train(run, lambda epoch, loss: print(f"epoch {epoch + 1:2}: loss {loss:.6f}"))
    if trace is not None:
        rows = trace.rows()
        print(f"{trace.microseconds(trace.cycles):.0f} us on {run.device}, modelled, in "
              f"{sum(row.calls for row in rows)} kernels and copies; the longest:")
        for row in rows[:5]:
            print(f"{trace.microseconds(row.cycles):12.1f} us {row.calls:6} x {row.name}")
        on_cpu = getattr(torch, run.device).fallbacks()
        print("operators that ran on the CPU: "
              + (", ".join(f"{name} x {count}" for name, count in on_cpu.items()) or "none"))


if __name__ == "__main__":
    main()
