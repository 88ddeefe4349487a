"""Chooses the backend `cpu` in this process, also where terrazzo is not installed."""

from __future__ import annotations

from triton.backends import Backend, backends
from triton.runtime import driver

from terrazzo.triton_cpu.compiler import CPUBackend
from terrazzo.triton_cpu.driver import CPUDriver


def activate() -> None:
    """Make Triton compile for the CPU from now on, whatever the machine has."""
    backends.setdefault("cpu", Backend(CPUBackend, CPUDriver))
    driver.set_active(CPUDriver())
