"""Chooses the backend `gcu` in this process, also where terrazzo is not installed."""

from __future__ import annotations

from contextlib import suppress

from triton.backends import Backend, backends
from triton.runtime import driver

from terrazzo.triton_gcu.compiler import GCUBackend
from terrazzo.triton_gcu.driver import GCUDriver


def activate() -> None:
    """Make Triton compile for the virtual chip from now on."""
    backends.setdefault("gcu", Backend(GCUBackend, GCUDriver))
    if not GCUDriver.wanted:
        with suppress(RuntimeError):  # there is none
            _ = driver.default  # Triton looks for it once, and allows for one that wants to be it
        GCUDriver.wanted = True
    driver.set_active(GCUDriver())
