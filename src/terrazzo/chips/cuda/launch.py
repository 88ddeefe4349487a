"""Launches kernels on a GPU through its driver, with arguments that are packed once.

A plan that only launches is written out as one Python function: of each kernel it packs the
addresses, and calls the driver.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from terrazzo.chips.chip import Assembled
from terrazzo.chips.cuda import driver
from terrazzo.chips.cuda.follow import Followed
from terrazzo.chips.cuda.plan import ALIGN
from terrazzo.errors import DeviceError
from terrazzo.index import compile_python
from terrazzo.runtime.artifact import index_from

_POINTER, _SIZE, _END = 1, 2, 0  # of the list that says where packed arguments are

_MOST_KNOWN = 4096  # sizes whose version of a kernel is remembered


class Packed:
    """One version of a kernel with a buffer for its arguments."""

    def __init__(self, facts: Mapping[str, Any], version: Mapping[str, Any], code: bytes):
        start, length = version["code"]
        self.module = driver.Module(code[start:start + length])
        self.handle = self.module.function(version["symbol"], version["shared"])
        sizes = ("q" if version["wide"] else "i") * len(facts["dims"])
        # Triton's own pointers are last: memory for descriptors where there are any, and some that
        # stay zero because nothing packs them.
        form = "Q" * len(facts["types"]) + sizes
        self.scratch: int = version["scratch"]
        self.pack = struct.Struct(form + "Q" * bool(self.scratch)).pack_into
        self.buffer = ctypes.create_string_buffer(struct.calcsize(form + "Q" * version["extra"]))
        self.size = ctypes.c_size_t(len(self.buffer))
        self.extra = (ctypes.c_void_p * 5)(_POINTER, ctypes.addressof(self.buffer), _SIZE,
                                           ctypes.addressof(self.size), _END)
        self.extra_address = ctypes.addressof(self.extra)
        self.threads, self.shared = 32 * version["warps"], version["shared"]


class Device:
    """The GPU that code was loaded for."""

    def __init__(self, made: Assembled):
        import torch

        self.number: int = torch.cuda.current_device()
        self.stream = driver.current_stream()
        self.launches = driver.launcher()
        self.kernels = [[Packed(k, v, made.code) for v in k["versions"]]
                        for k in made.facts["kernels"]]

    def launch(self, kernel: int, version: int, grid: int, pointers: Sequence[int],
               sizes: Sequence[int]) -> None:
        found = self.kernels[kernel][version]
        owner, scratch = self.room(grid * found.scratch) if found.scratch else (None, 0)
        last = (scratch,) if owner is not None else ()

        def run() -> int:
            found.pack(found.buffer, 0, *pointers, *sizes, *last)
            return self.launches(found.handle, grid, 1, 1, found.threads, 1, 1, found.shared,
                                 self.stream(self.number), None, found.extra_address)

        driver.check(driver.with_context(run), "to launch a kernel")

    def room(self, size: int) -> tuple[Any, int]:
        import torch

        owner = torch.empty(max(size, 1), dtype=torch.uint8, device=f"cuda:{self.number}")
        return owner, owner.data_ptr()

    def to_host(self, target: int, source: int, size: int) -> None:
        driver.to_host(target, source, size, self.stream(self.number))

    def to_device(self, target: int, source: int, size: int) -> None:
        driver.to_device(target, source, size, self.stream(self.number))

    def on_device(self, target: int, source: int, size: int) -> None:
        driver.on_device(target, source, size, self.stream(self.number))

    def wait(self) -> None:
        driver.wait(self.stream(self.number))


class Launched(Followed):
    """Code of one executable on a GPU."""

    def __init__(self, made: Assembled, constants: Sequence[int], device: Device):
        super().__init__(made, constants, device)
        self.device = device
        steps = made.facts["steps"]
        if all(step[0] == "launch" for step in steps):
            self.call_pointers = self.written_out(made, device)

    def written_out(self, made: Assembled, device: Device) -> Callable[..., Any]:
        """A function of addresses, sizes, arena and threads that does nothing but launch."""
        facts = made.facts
        slots = [f"s{i}" for i in range(len(facts["slots"]))]
        names = {name: f"d{i}" for i, name in enumerate(facts["dims"])}
        parameters = ", ".join([*slots, *names.values(), "arena", "threads"])
        scope: dict[str, Any] = {"launch": device.launches, "stream_of": device.stream,
                                 "room": device.room, "careful": self.careful, "min": min,
                                 "max": max}
        lines = [f"def run({parameters}):"]
        if slots:
            lines += [f"    if ({' | '.join(slots)}) & {ALIGN - 1}:",
                      f"        return careful({parameters})"]
        lines += [f"    stream = stream_of({device.number})", "    status = 0"]
        for i, size in enumerate(facts["rooms"]):
            lines.append(f"    owner{i}, r{i} = room({_text(size, names)})")
        for i, (_, number, places) in enumerate(facts["steps"]):
            lines += self.launch_lines(i, number, places, facts, names, scope)
        lines += ["    if status:", f"        return careful({parameters})"]
        exec("\n".join(lines), scope)
        run: Callable[..., Any] = scope["run"]
        return run

    def launch_lines(self, i: int, number: int, places: Sequence[Any], facts: Mapping[str, Any],
                     names: Mapping[str, str], scope: dict[str, Any]) -> list[str]:
        kernel, versions = facts["kernels"][number], self.device.kernels[number]
        given = ", ".join([*(self.place_text(p, names) for p in places),
                           *(_text(d, names) for d in kernel["dims"])])
        if len(versions) == 1:
            return self.one_version(i, kernel, versions[0], given, names, scope)
        scope |= {f"found{i}": self.chooser(number), f"known{i}": {}}
        sizes = ", ".join(f"{n!r}: {d}" for n, d in names.items())
        dims = ", ".join(_text(d, names) for d in kernel["dims"])
        lines = [f"    found = known{i}.get(({', '.join(names.values())},))",
                 "    if found is None:",
                 f"        found = found{i}({{{sizes}}}, ({dims},))",
                 f"        if len(known{i}) < {_MOST_KNOWN}:",
                 f"            known{i}[{', '.join(names.values())},] = found",
                 "    v, grid = found",
                 "    if grid > 0:"]
        if any(v.scratch for v in versions):
            lines += ["        if v.scratch:",
                      f"            owner{i}s, scratch = room(grid * v.scratch)",
                      f"            v.pack(v.buffer, 0, {given}, scratch)",
                      "        else:",
                      f"            v.pack(v.buffer, 0, {given})"]
        else:
            lines.append(f"        v.pack(v.buffer, 0, {given})")
        return [*lines, "        status |= launch(v.handle, grid, 1, 1, v.threads, 1, 1, v.shared, "
                "stream, None, v.extra_address)"]

    def chooser(self, number: int) -> Callable[..., tuple[Packed, int]]:
        """What finds the version for some sizes, and how many programs it has."""
        kernel, versions = self.kernels[number], self.device.kernels[number]

        def found(sizes: Mapping[str, int], dims: Sequence[int]) -> tuple[Packed, int]:
            chosen = kernel.choice(sizes, dims)
            return versions[chosen], kernel.programs[chosen](sizes)

        return found

    def one_version(self, i: int, kernel: Mapping[str, Any], chosen: Packed, given: str,
                    names: Mapping[str, str], scope: dict[str, Any]) -> list[str]:
        scope |= {f"pack{i}": chosen.pack, f"buffer{i}": chosen.buffer}
        grid, indent, lines = _text(kernel["versions"][0]["programs"], names), "    ", []
        if not grid.isdigit():
            lines += [f"    grid = {grid}", "    if grid > 0:"]
            indent, grid = "        ", "grid"
        elif grid == "0":
            return []
        if chosen.scratch:
            lines.append(f"{indent}owner{i}s, scratch = room({grid} * {chosen.scratch})")
            given += ", scratch"
        return [*lines, f"{indent}pack{i}(buffer{i}, 0, {given})",
                f"{indent}status |= launch({chosen.handle}, {grid}, 1, 1, {chosen.threads}, 1, 1, "
                f"{chosen.shared}, stream, None, {chosen.extra_address})"]

    def place_text(self, place: Sequence[Any], names: Mapping[str, str]) -> str:
        kind, number, offset = place
        base = {"slot": f"s{number}", "arena": "arena", "room": f"r{number}",
                "constant": str(self.constants[number]) if kind == "constant" else ""}[kind]
        return base if offset == 0 else f"{base} + {_text(offset, names)}"

    def careful(self, *given: int) -> None:
        """The same step by step: addresses that kernels cannot load from, and what fails."""
        *slots, arena, threads = given
        self.run(slots, arena, threads)


def _text(data: Any, names: Mapping[str, str]) -> str:
    text = compile_python(index_from(data), names)
    return text if text.isdigit() else f"({text})"


def check_made_for(name: str, facts: Mapping[str, Any], here: frozenset[str], chip: str) -> None:
    """Refuse code of another kind of GPU."""
    wanted = {f for f in facts["features"] if f.startswith("sm_")}
    if facts["simulated"] or not wanted <= here:
        raise DeviceError(f"{name} was compiled for {', '.join(sorted(wanted))} and this is {chip}",
                          hint="compile it on this machine")
