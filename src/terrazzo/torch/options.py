"""What `torch.compile(..., options={...})` takes for this backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from terrazzo.errors import ArgumentError

MODES: Mapping[str | None, Mapping[str, Any]] = {
    None: {}, "default": {}, "reduce-overhead": {"cuda_graphs": True},
    "max-autotune": {"cuda_graphs": True, "tune": True},
    "max-autotune-no-cudagraphs": {"tune": True}}


@dataclass(frozen=True)
class BackendOptions:
    """How graphs are compiled and run."""

    threads: int = 0  # 0: those of the knob
    freeze: bool = False  # parameters as constants, packed once, while gradients are off
    cuda_graphs: bool = False  # what a GPU runs for fixed sizes is recorded once, and repeated
    tune: bool = False  # kernels are measured when they are compiled, where that has not been done
    fallback: str = "torch"  # what has no code of ours runs in torch, or is an "error"

    @staticmethod
    def of(given: Mapping[str, Any] | None, mode: str | None = None) -> BackendOptions:
        """Options by name, each checked, or those that a mode of torch's stands for."""
        if mode not in MODES:
            raise ArgumentError(f"the backend terrazzo has no mode {mode!r}",
                                hint=f"there are {', '.join(m for m in MODES if m)}")
        given = {**MODES[mode], **(given or {})}
        known = {f.name: f.type for f in fields(BackendOptions)}
        for name in given or ():
            if name not in known:
                raise ArgumentError(f"the backend terrazzo has no option {name!r}",
                                    hint=f"there are {', '.join(known)}")
        made = BackendOptions(**dict(given or {}))
        if type(made.threads) is not int or made.threads < 0:
            raise ArgumentError(f"threads={made.threads!r} is no number of threads")
        if made.fallback not in ("torch", "error"):
            raise ArgumentError(f"fallback={made.fallback!r} is neither 'torch' nor 'error'")
        for name in ("freeze", "cuda_graphs", "tune"):
            if type(getattr(made, name)) is not bool:
                raise ArgumentError(f"{name}={getattr(made, name)!r} is neither True nor False")
        return made
