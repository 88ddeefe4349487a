"""Chooses the backend `gcu` in this process, also where terrazzo is not installed."""

from __future__ import annotations

from triton.backends import Backend, backends
from triton.runtime import driver

from terrazzo.triton_gcu.compiler import GCUBackend
from terrazzo.triton_gcu.driver import GCUDriver


def activate() -> None:
    """Make Triton compile for the virtual chip from now on."""
    backends.setdefault("gcu", Backend(GCUBackend, GCUDriver))
    GCUDriver.wanted = True
    driver.set_active(GCUDriver())
