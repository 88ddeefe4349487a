"""Where the commands of `tz` print."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_WIDTH = 120  # of files and pipes, which have none


def wide_console() -> Console:
    """The terminal; where there is none, lines that are wide enough for every table."""
    screen = sys.stdout  # None where it was closed before Python began
    known = (screen is not None and screen.isatty()) or "COLUMNS" in os.environ
    return Console(width=None if known else _WIDTH)
