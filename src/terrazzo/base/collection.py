"""No search for garbage while something is compiled.

What a compilation makes is in use until it ends: each search for garbage looks at all of it, and at
all of torch, 0.2 seconds a time.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_counting = threading.Lock()
_compiling: list[bool] = []  # for each who compiles: whether to go on with collections after it


@contextmanager
def without_collection() -> Iterator[None]:
    """No search for garbage until the last of those who compile at once is done."""
    with _counting:
        _compiling.append(gc.isenabled() or (bool(_compiling) and _compiling[0]))
        gc.disable()
    try:
        yield
    finally:
        with _counting:
            before = _compiling.pop()
            if not _compiling and before:
                gc.enable()
