"""`tz.torch.explain`: what became of a model, and where its time goes.

    print(tz.torch.explain(model, x))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from terrazzo.runtime.profile import Recording, profile
from terrazzo.torch import backend
from terrazzo.torch.placement import Reason
from terrazzo.torch.program import Program


@dataclass(frozen=True)
class Break:
    """Where dynamo ended a graph, and why."""

    why: str
    where: str

    def __str__(self) -> str:
        return f"{self.why} ({self.where})" if self.where else self.why


@dataclass(frozen=True, eq=False)
class Explanation:
    """What `tz.torch.explain` answers; printing it tells all."""

    programs: tuple[Program, ...]
    breaks: tuple[Break, ...]
    recording: Recording

    @property
    def fallbacks(self) -> list[tuple[Reason, int]]:
        """Calls that torch runs, each with how many there are."""
        return Counter(r for p in self.programs for r in p.reasons).most_common()

    @property
    def kernels(self) -> int:
        """Of all segments, those compiled first."""
        return sum(len(v.executable.artifact.kernels) for p in self.programs for s in p.segments
                   for v in s.variants[:1] if hasattr(v.executable, "artifact"))

    def __str__(self) -> str:
        segments = sum(len(p.segments) for p in self.programs)
        calls = sum(p.calls for p in self.programs)
        lines = [f"{len(self.programs)} graph(s), {segments} segment(s) with {self.kernels} "
                 f"kernels, {calls} call(s) of torch in between, {len(self.breaks)} graph break(s)"]
        lines += [f"graph break: {b}" for b in self.breaks]
        lines += [f"in torch: {count} x {reason}" for reason, count in self.fallbacks]
        if self.recording.runs:
            lines += ["", self.recording.table()]
        return "\n".join(lines)


def explain(model: Any, *args: Any, options: Any = None, dynamic: bool | None = None,
            **kwargs: Any) -> Explanation:
    """Compile a model anew, run it on these arguments, and tell what became of it.

    Graph breaks, calls that torch runs and why, and the time of every kernel in one run with the
    rates that it reached. With gradients on, the backward pass is compiled and timed as well where
    the result is a tensor. `options` and `dynamic` are those of `torch.compile`.
    """
    torch._dynamo.reset()
    made: list[Program] = []
    watch = made.append
    backend.WATCHERS.append(watch)
    try:
        breaks = _breaks(model, args, kwargs)
        made.clear()
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend.terrazzo, dynamic=dynamic, options=options)
        _run(compiled, args, kwargs)
        with profile() as recording:
            _run(compiled, args, kwargs)
    finally:
        backend.WATCHERS.remove(watch)
    return Explanation(tuple(made), tuple(breaks), recording)


def _run(compiled: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    result = compiled(*args, **kwargs)
    if isinstance(result, torch.Tensor) and result.requires_grad:
        result.sum().backward()


def _breaks(model: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Break]:
    with torch.no_grad():
        told = torch._dynamo.explain(model)(*args, **kwargs)
    found = []
    for reason in told.break_reasons:
        frames = list(reason.user_stack or ())
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        found.append(Break(str(reason.reason).splitlines()[0], where))
    return found
