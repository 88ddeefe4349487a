"""Where the commands of `tz` print."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_WIDTH = 120  # of files and pipes, which have none


def wide_console() -> Console:
    """The terminal; where there is none, lines that are wide enough for every table."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else _WIDTH)
