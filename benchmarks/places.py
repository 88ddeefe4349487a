"""Where samples of operators are run: on the CPU, on a GPU, or on a GPU that the CPU simulates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NAMES = ("cpu", "cuda", "simulated")


@dataclass(frozen=True)
class Place:
    """A device of torch's for samples that were made on the CPU, and the way back."""

    name: str = "cpu"

    @property
    def device(self) -> str:
        return "cuda" if self.name == "cuda" else "cpu"

    @property
    def environment(self) -> dict[str, str]:
        """What processes are told, so that terrazzo compiles for it."""
        return {"TZ_CUDA_SIMULATE": "1", "TZ_CHIP": "cuda"} if self.name == "simulated" else {}

    def given(self, value: Any) -> Any:
        """An argument there: a tensor, or the name of the device that results shall be on."""
        import torch

        if self.device == "cpu":
            return value
        if isinstance(value, torch.Tensor):
            return value.to(self.device)
        is_cpu = isinstance(value, torch.device) and value.type == "cpu"
        return torch.device(self.device) if is_cpu or value == "cpu" else value

    def back(self, found: list[Any]) -> list[Any]:
        """Results on the CPU."""
        return found if self.device == "cpu" else [t.cpu() for t in found]


CPU = Place()
