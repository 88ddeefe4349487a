"""What low rooms ask of higher ones: one table says what, and where it stands.

An operator is a node of graphs, and users expect more of it: that it runs, compiles, shows its
levels, is checked and timed. The rooms that can do so build upon graphs, so graphs cannot import
them. They ask by name instead, and the module that answers is imported when it is first asked.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

ABOVE = {
    # of operators and functions on arrays
    "compiled": "terrazzo.calls.compiled.of_operator",  # (operator): what compiles and runs it
    "jit": "terrazzo.calls.compiled.jit",  # (function): the same of any function
    "lower": "terrazzo.calls.levels.lower_operator",  # (operator, args, kwargs): a level as text
    "kernel": "terrazzo.calls.kernels.declare",  # (operator, chip, language): a decorator
    "on": "terrazzo.calls.placed.Placed",  # (function, chip): the function on a chip
    "op": "terrazzo.calls.api.unpickled_op",  # (function, name, grad): an operator
    # of tools
    "verify": "terrazzo.tools.api.verify",  # (function, *args, **options): a Report
    "bench": "terrazzo.tools.api.bench",  # (function, *args, **options): a BenchReport
    "check": "terrazzo.tools.verify.verifier.check_call",  # (graph, arrays): TZ_CHECK
    # of Triton on CPUs, where a GPU is simulated
    "triton_on_cpu": "terrazzo.triton_cpu.activate.activate",  # (): kernels run on the CPU from now
    # of torch, where a tensor wants a gradient
    "differentiable": "terrazzo.torch.autograd.Differentiable",  # (name, function)
    "keeping": "terrazzo.torch.autograd.Keeping",  # (name, parts, structure)
}


class _Upcalls(dict[str, Callable[..., Any]]):
    def __missing__(self, name: str) -> Callable[..., Any]:
        module, _, function = ABOVE[name].rpartition(".")
        self[name] = getattr(import_module(module), function)
        return self[name]


UPCALLS = _Upcalls()
