"""What `torch.compile(..., options={...})` takes for this backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from terrazzo.errors import ArgumentError


@dataclass(frozen=True)
class BackendOptions:
    """How graphs are compiled and run."""

    threads: int = 0  # 0: those of the knob
    freeze: bool = False  # parameters as constants, packed once, while gradients are off
    fallback: str = "torch"  # what has no code of ours runs in torch, or is an "error"

    @staticmethod
    def of(given: Mapping[str, Any] | None) -> BackendOptions:
        """Options by name, each checked."""
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
        if type(made.freeze) is not bool:
            raise ArgumentError(f"freeze={made.freeze!r} is neither True nor False")
        return made
