"""The virtual chip gcu, for programs: where its library is, what it is, what ran on it.

    >>> from terrazzo import gcu
    >>> gcu.description().units
    48

`library_path()` is the file of the runtime library, which a C compiler of the system's makes when
it is first asked for; `header_path()` is its header. [gcu](docs/gcu.md) has the whole of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from terrazzo.chips.gcu import build, library
from terrazzo.chips.gcu.description import Description, find, read
from terrazzo.chips.gcu.device import devices
from terrazzo.chips.gcu.traces import Trace
from terrazzo.knobs import described_chip

__all__ = ["Trace", "description", "header_path", "library_path", "read", "trace"]


def library_path(chip: str = "") -> str:
    """The file of the runtime library, for ctypes or a linker.

    In this process it is told of the chip here; a program without Python calls gcuConfigure.
    """
    devices(find(chip or described_chip()))
    return str(library.library_path())


def header_path() -> str:
    """The C header of the runtime library."""
    return str(Path(build.SOURCES) / "gcu_runtime.h")


def description(name: str = "") -> Description:
    """What a chip is, by its name or the path of its file; else the chip of this process."""
    return find(name or described_chip())


@contextmanager
def trace(path: str | os.PathLike[str] | None = None, chip: str = "") -> Iterator[Trace]:
    """All that runs on the chip for the length of a `with`: `print(trace)` is a table.

    With a path, Chrome trace events are written there, which Perfetto opens.
    """
    found = find(chip or described_chip())
    made = Trace(found)
    with devices(found).traced() as records:
        yield made
    made.records += records
    if path is not None:
        made.chrome_trace(path)
