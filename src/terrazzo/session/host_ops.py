"""Operators that the host runs in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HOST_OPS: dict[tuple[str, str], Callable[..., Any]] = {}
