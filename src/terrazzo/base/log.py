"""Messages by Python's logging, which is loaded for the first of them: that takes 3 ms."""

from __future__ import annotations

from typing import Any


def debug(message: str, *args: Any) -> None:
    """Say what only those want to know who look for a cause."""
    from logging import getLogger

    getLogger("terrazzo").debug(message, *args, stacklevel=2)


def warning(message: str, *args: Any) -> None:
    """Say what a user should know, though all goes on."""
    from logging import getLogger

    getLogger("terrazzo").warning(message, *args, stacklevel=2)
