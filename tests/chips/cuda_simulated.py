"""What tests of the simulated GPU share: the chip that notes its launches, numbers, closeness."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import terrazzo as tz
from terrazzo.chips.cuda.simulate import Simulator
from terrazzo.knobs import knobs


@contextmanager
def simulated(monkeypatch: pytest.MonkeyPatch, texts: bool = False, **settings: Any
              ) -> Iterator[list[str]]:
    """The simulated chip, and the names, or the texts, of the kernels that it launches."""
    found: list[str] = []
    launch = Simulator.launch

    def noting(self: Any, kernel: int, version: int, *args: Any) -> None:
        facts = self.kernels[kernel]
        found.append(facts["versions"][version]["text"] if texts else facts["name"])
        launch(self, kernel, version, *args)

    monkeypatch.setattr(Simulator, "launch", noting)
    with knobs.override(cuda_simulate=True, **settings), tz.chip("cuda"):
        yield found


def random(*shape: int, dtype: str = "float32", seed: int | None = None) -> Any:
    import torch

    made = torch.Generator().manual_seed(sum(shape) if seed is None else seed)
    return torch.randn(shape, generator=made).to(getattr(torch, dtype))


def close(got: Any, want: Any, slack: float) -> None:
    """Within some slack of the largest value."""
    import torch

    torch.testing.assert_close(got.double(), want, rtol=slack, atol=slack * max(
        1.0, float(want.abs().max()) if want.numel() else 0))
