"""How a schedule is checked: at every level, against one reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from terrazzo import te
from terrazzo.expr import evaluate
from terrazzo.index import Var

Check = Callable[..., list[np.ndarray]]


def _run(s: te.ScheduleBuilder, args: Sequence[Any], given: Sequence[np.ndarray],
         shapes: Sequence[tuple[int, ...]], target: str, kernels: dict[str, te.Kernel],
         ) -> list[np.ndarray]:
    inputs, outputs = args[:len(given)], args[len(given):]
    if target == "expression":
        sizes = {d: have for tensor, array in zip(inputs, given, strict=True)
                 for d, have in zip(tensor.shape, array.shape) if isinstance(d, Var)}
        by_tensor = dict(zip(inputs, given, strict=True))
        results = evaluate.run(s.program, [by_tensor[t] for t in s.program.inputs], sizes)
        found = dict(zip(s.program.outputs, results, strict=True))
        return [found[t] for t in outputs]
    if target not in kernels:
        kernels[target] = te.build(s, list(args), target)
    # What is not written shows: a number that no test computes.
    arrays = [np.full(shape, 77, t.dtype.np) for t, shape in zip(outputs, shapes, strict=True)]
    kernels[target](*given, *arrays)
    return arrays


@pytest.fixture
def check() -> Check:
    """Runs a schedule as expression, loops and machine code; all must give what is wanted."""
    kernels: dict[int, dict[str, te.Kernel]] = {}

    def run(s: te.ScheduleBuilder, args: Sequence[Any], given: Sequence[np.ndarray],
            *wanted: np.ndarray, rtol: float = 1e-5, atol: float = 1e-6,
            targets: Sequence[str] = ("expression", "interpreter", "cpu")) -> list[np.ndarray]:
        built = kernels.setdefault(id(s), {})
        results: list[np.ndarray] = []
        assert len(args) == len(given) + len(wanted) and targets
        for target in targets:
            results = _run(s, args, given, [w.shape for w in wanted], target, built)
            for result, want in zip(results, wanted, strict=True):
                np.testing.assert_allclose(result, want, rtol, atol, err_msg=target)
        return results

    return run
