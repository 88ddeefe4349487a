"""Modelled time of training steps on the virtual chip: eager, by Inductor, by our own compiler.

    python benchmarks/gcu.py                                  # both networks, three ways
    python benchmarks/gcu.py --only transformer --ways inductor --kernels 20

A step is forward, backward and Adam. The transformer is a small decoder: two layers of width 128,
four heads, eight sequences of 64 tokens. The network of convolutions is that of the tests on
pictures of 32 x 32. Compiled, the loss of a batch is one function and the optimizer's step another.
Modelled times are those of the chip's description, the same on every machine and in every run; what
is counted is everything between the start of a step and its end, copies included.

"least" is the time that the counted work of a kernel needs at best: its bytes at the bandwidth of
the memory, its vector and matrix cycles spread over all units. "of least" near 1 is well; launches
are part of a kernel's time and not of the least one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from terrazzo import gcu

WAYS = ("eager", "inductor", "terrazzo")
Batch = tuple[torch.Tensor, torch.Tensor]


# ---------------------------------------------------------------- networks
class Block(nn.Module):
    """Attention and a layer of perceptrons, each after its norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2)
                   for part in self.queries_keys_values(self.norm(x)).split(width, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class Transformer(nn.Module):
    """A decoder that learns what token comes next."""

    def __init__(self, width: int = 128, heads: int = 4, length: int = 64, tokens: int = 256):
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places.weight)))


class ConvNet(nn.Module):
    """Two convolutions with batch norm, pools, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32),
            nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(32 * 8 * 8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1))


def transformer() -> tuple[nn.Module, Batch]:
    tokens = torch.randint(0, 256, (8, 65), generator=torch.Generator().manual_seed(1))
    return Transformer(), (tokens[:, :-1], tokens[:, 1:])


def wider_transformer() -> tuple[nn.Module, Batch]:
    tokens = torch.randint(0, 256, (16, 129), generator=torch.Generator().manual_seed(1))
    return Transformer(256, 8, 128), (tokens[:, :-1], tokens[:, 1:])


def conv_net() -> tuple[nn.Module, Batch]:
    made = torch.Generator().manual_seed(1)
    return ConvNet(), (torch.randn(32, 3, 32, 32, generator=made),
                       torch.randint(0, 10, (32,), generator=made))


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "transformer": transformer, "wider transformer": wider_transformer, "convnet": conv_net}


# ---------------------------------------------------------------- steps
@dataclass(frozen=True)
class Step:
    """A step of training as it was traced, and the losses of the steps up to it."""

    trace: gcu.Trace
    losses: list[float]

    @property
    def microseconds(self) -> float:
        return self.trace.microseconds(self.trace.cycles)

    def least(self, record: Any) -> float:
        """Cycles that the counted work of a kernel takes at best."""
        chip = self.trace.chip
        vector, matrix, _, loaded, stored, *_ = record.counts
        return max(vector / chip.units, matrix / chip.units,
                   (loaded + stored + record.bytes) / chip.memory_bytes_per_cycle)


def trained(network: str, way: str, steps: int = 4) -> Step:
    """Some steps on the chip; the last one is traced."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = NETWORKS[network]()
    model, (x, y) = model.to("gcu"), (part.to("gcu") for part in batch)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    update = optimizer.step
    if way != "eager":
        loss_of = torch.compile(loss_of, backend=way, fullgraph=True)
        update = torch.compile(optimizer.step, backend=way)
    losses = []
    for _ in range(steps):
        with gcu.trace() as trace:
            loss = loss_of(x, y)
            loss.backward()
            update()
            optimizer.zero_grad()
        losses.append(loss.item())
    return Step(trace, losses)


# ---------------------------------------------------------------- tables
def kernels(step: Step, most: int) -> str:
    """The kernels that took longest, and how far each is from the least time."""
    found: dict[str, list[float]] = {}
    for record in step.trace.records:
        name = record.name.decode() or "copy"
        row = found.setdefault(name, [0, 0, 0, 0])
        for i, amount in enumerate((record.cycles, 1, step.least(record), record.programs)):
            row[i] += amount
    total = max(step.trace.cycles, 1)
    lines = [f"{'us':>9} {'share':>6} {'calls':>5} {'least us':>9} {'of least':>8} {'grid':>6}"]
    for name, (cycles, calls, least, programs) in sorted(
            found.items(), key=lambda item: -item[1][0])[:most]:
        us, best = (step.trace.microseconds(int(n)) for n in (cycles, least))
        lines.append(f"{us:9.1f} {cycles / total:6.1%} {calls:5.0f} {best:9.1f} "
                     f"{cycles / max(least, 1):8.1f} {programs / calls:6.0f}  {name}")
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__,
                                      formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", choices=NETWORKS, action="append")
    options.add_argument("--ways", choices=WAYS, action="append")
    options.add_argument("--kernels", type=int, default=0, help="show so many of each step")
    given = options.parse_args()
    ways = given.ways or WAYS
    print(f"{'step of':20}" + "".join(f"{way:>20}" for way in ways) + "   (us, kernels; x eager)")
    tables = []
    for network in given.only or NETWORKS:
        line, eager = f"{network:20}", 0.0
        for way in ways:
            step = trained(network, way)
            eager = step.microseconds if way == "eager" else eager
            gain = f"{eager / step.microseconds:.2f}x" if eager and way != "eager" else ""
            line += f"{step.microseconds:9.0f} {len(step.trace.records):4d} {gain:>5}"
            tables.append(f"\n{network}, {way}; losses {step.losses}\n"
                          + kernels(step, given.kernels))
        print(line)
    if given.kernels:
        print("\n".join(tables))


if __name__ == "__main__":
    main()
