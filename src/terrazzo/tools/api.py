"""Checking, timing and profiling, by one call each; what does it loads when it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from terrazzo.runtime.profile import Recording
    from terrazzo.tools.benchmark import BenchReport
    from terrazzo.tools.verify.report import Report


def verify(function: Callable[..., Any], *args: Any, levels: Sequence[str] | None = None,
           dtypes: Sequence[Any] | None = None, kinds: Sequence[str] | None = None, seed: int = 0,
           **attrs: Any) -> Report:
    """Check every level of a function or operator against the one above, and its gradient.

    Arguments are examples: their shapes are taken over, and floats are drawn anew for every kind
    of input. Without any, shapes are found by trying. `attrs` go to the function. Raises
    VerifyError, which names the level, the operator and the element that is wrong.

    levels  of graph, expr, loop, code and gradient; all by default
    dtypes  such as ["float32"]; all that the function takes by default
    kinds   of random, special, extreme, one, odd, empty, strided, symbolic; all by default
    seed    of the random inputs

    >>> import terrazzo as tz
    >>> print(tz.verify(tz.relu, dtypes=["float32"], levels=["expr"], kinds=["odd"]).name)
    relu
    """
    from terrazzo.tools.verify import verifier

    chosen = verifier.KINDS if kinds is None else kinds
    return verifier.verify(function, *args, levels=levels, dtypes=dtypes, kinds=chosen, seed=seed,
                           **attrs)


def bench(function: Callable[..., Any], *args: Any, rounds: int | None = None, torch: bool = True,
          **attrs: Any) -> BenchReport:
    """Time a function or operator on some arguments beside numpy and torch, and the roofline.

    rounds  how often each is timed, in turns
    torch   whether torch is timed too, if it is installed

    `attrs` go to the function. What it answers prints as a table, and shows as one in notebooks.

    >>> import numpy as np, terrazzo as tz
    >>> report = tz.bench(tz.relu, np.ones((8, 8), np.float32), rounds=1, torch=False)
    >>> report.name, report.lines[0].name
    ('relu', 'terrazzo')
    """
    from terrazzo.tools import benchmark

    return benchmark.bench(function, *args, rounds=rounds or benchmark.ROUNDS, torch=torch,
                           **attrs)


def profile() -> AbstractContextManager[Recording]:
    """Record every run of compiled code, in any thread, for the length of a `with`.

    >>> import numpy as np, terrazzo as tz
    >>> with tz.profile() as recorded:
    ...     made = tz.relu(np.ones((8, 8), np.float32))
    >>> len(recorded.runs)
    1

    `recorded.table()` is a text, `recorded.chrome_trace(path)` a file for Perfetto.
    """
    from terrazzo.runtime import profile as profiling

    return profiling.profile()
