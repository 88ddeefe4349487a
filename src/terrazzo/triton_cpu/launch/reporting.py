"""Launches of kernels that print, assert, wait or are sanitized: an area, and its records after."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from terrazzo.errors import KernelAssertion, KernelFault, KernelStuck
from terrazzo.knobs import knobs
from terrazzo.triton_cpu.frontend.lower_debug import assertion_text, printed_text
from terrazzo.triton_cpu.frontend.patience import waiting_text
from terrazzo.triton_cpu.frontend.reports import FOUND, PRINTED, Area, Launch, firsts
from terrazzo.triton_cpu.frontend.sanitizer import finding_text
from terrazzo.triton_cpu.launch import shadows
from terrazzo.triton_cpu.launch.arguments import expression
from terrazzo.triton_cpu.launch.entry import MOST_WAITING
from terrazzo.triton_cpu.launch.launcher import Launcher


class Reporting:
    """The launcher of a kernel that prints, asserts, waits or is sanitized, around a plain one."""

    def __init__(self, launcher: Launcher):
        self.launcher, self.signature = launcher, launcher.signature
        assert launcher.reports is not None
        self.table = launcher.reports
        launcher.sanitizable = False
        if self.table.get("sanitized"):
            shadows.watch()

    def __call__(self, gx: int, gy: int, gz: int, stream: Any, *rest: Any) -> None:
        if gx <= 0 or gy <= 0 or gz <= 0:
            self.launcher(gx, gy, gz, stream, *rest, 0)
            return
        values = rest[len(rest) - len(self.signature):]
        given = [pair for (name, kind), value in zip(self.signature.items(), values, strict=True)
                 for pair in _passed(kind, str(name), value)]
        area = Area(Launch(self.table, (gx, gy, gz), [name for name, _ in given]))
        held = []  # memory that the kernel uses
        if self.table.get("sanitized"):
            held = shadows.prepare(area, [value for _, value in given])
        self.launcher(gx, gy, gz, stream, *rest, area.address)
        self.launcher.finish(stream)
        held.clear()
        tell(area)


def _passed(kind: Any, name: str, value: Any) -> list[tuple[str, Any]]:
    """Names of the integers that an argument becomes, with the tensor where one is an address."""
    if isinstance(kind, (tuple, list)):
        return [pair for i, k in enumerate(kind) for pair in _passed(k, f"{name}[{i}]", value[i])]
    if kind.startswith("*"):
        return [(name, value)]
    numbers = [(name, None)] * len(expression(kind, name))
    return [(name, value.base), *numbers[1:]] if kind.startswith("tensordesc") else list(numbers)


def reporting(launcher: Launcher) -> Callable[..., None]:
    """What Triton calls to launch a kernel: the launcher, with what reports need around it."""
    return launcher if launcher.reports is None else Reporting(launcher)


def tell(area: Area) -> None:
    """Print what a launch printed; raise what was found wrong or asserted in vain."""
    text = [printed_text(area.launch, r) for r in area.records(PRINTED)]
    if area.lost(PRINTED):
        text.append(f"({area.lost(PRINTED)} more lines of kernel `{area.launch.table['kernel']}` "
                    f"were lost: there is room for {len(text)})")
    if text:
        sys.stdout.write("\n".join(text) + "\n")
        sys.stdout.flush()
    records = firsts(area.records(FOUND))
    stuck = [r for r in records if r.site["kind"] == "wait"]
    if stuck:
        raise KernelStuck(
            "\n".join(waiting_text(area.launch, r) for r in stuck),
            hint=f"programs of a grid start in order, {MOST_WAITING} at once at most: one that "
                 f"waits for a later one may wait for ever; TZ_WAIT_LIMIT sets how long "
                 f"({knobs.wait_limit:g} s), 0 no limit")
    faults = [r for r in records if r.site["kind"] != "assert"]
    if faults:
        raise KernelFault("\n".join(finding_text(area, r) for r in faults))
    failed = [r for r in records if r.site["kind"] == "assert"]
    if failed:
        raise KernelAssertion("\n".join(assertion_text(area.launch, r) for r in failed))
