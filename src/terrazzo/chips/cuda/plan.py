"""A recipe as plain data: launches of kernels with where their arguments lie, and their code.

Steps are lists that begin with what they are:

    ["launch", kernel, places]          a kernel, and the place of each of its pointers
    ["host", part, places]              a part that the CPU runs
    ["branch", place, bytes, then, orelse]
    ["repeat", counter, count, test, place, bytes, body, after]     place: null where count decides

A place is [kind, number, offset]: a slot, a constant, the arena, or room that one call alone needs
("room"). Sizes are trees of integers and names (`runtime/artifact.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from terrazzo.base.shapes import num_elements
from terrazzo.chips.chip import Assembled, Chip
from terrazzo.chips.cuda.binaries import compiled
from terrazzo.chips.cuda.forms import Form, Kernel, Version, elements, form_of
from terrazzo.chips.cuda.layouts import weights_of
from terrazzo.chips.spec import ChipSpec
from terrazzo.expr.ir import Program, Tensor, compute
from terrazzo.index import Index, divisible
from terrazzo.loop.ir import Function
from terrazzo.loop.steps import Argument, Branch, Call, Recipe, Repeat, Step
from terrazzo.runtime.artifact import index_data

MOVES = "it moves memory"  # why the CPU runs what has loops and no program
ALIGN = 16  # bytes of the widest load; torch's memory, arenas and constants begin at more


@dataclass(eq=False)
class Planner:
    """Collects kernels and code while the steps of a recipe are written down."""

    spec: ChipSpec
    host: Chip
    simulated: bool
    form: Callable[[Program], Form]
    code: bytearray = field(default_factory=bytearray)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    hosts: list[dict[str, Any]] = field(default_factory=list)
    rooms: list[Any] = field(default_factory=list)  # bytes of what only parts of a call share
    slots: dict[int, Any] = field(default_factory=dict)  # bytes, as far as kernels know them
    known: dict[Any, int] = field(default_factory=dict)
    choices: dict[str, Any] = field(default_factory=dict)  # of programs: measured, or null

    def plan(self, recipe: Recipe) -> Assembled:
        steps: list[Any] = []
        begins = []  # where the steps of the recipe do, each of which may be several kernels
        for step in recipe.steps:
            begins.append(len(steps))
            steps += self.step(step)
        return Assembled(bytes(self.code), {
            "chip": self.spec.name, "features": sorted(self.spec.features), "steps": steps,
            "begins": begins,
            "slots": [self.slots.get(i, 0) for i in range(recipe.slots)],
            "dims": [d.name for d in recipe.dims], "rooms": self.rooms, "kernels": self.kernels,
            "hosts": self.hosts, "choices": self.choices, "simulated": self.simulated})

    def steps(self, steps: Sequence[Step]) -> list[Any]:
        return [made for step in steps for made in self.step(step)]

    def step(self, step: Step) -> list[Any]:
        if isinstance(step, Call):
            return self.call(step)
        if isinstance(step, Branch):
            return [["branch", _place(step.flag.place), step.flag.bytes, self.steps(step.then),
                     self.steps(step.orelse)]]
        return [self.repeat(step)]

    def repeat(self, step: Repeat) -> Any:
        flag = step.flag
        return ["repeat", step.counter.name, index_data(step.count), self.steps(step.test),
                None if flag is None else _place(flag.place), 0 if flag is None else flag.bytes,
                self.steps(step.body), self.steps(step.after)]

    def call(self, call: Call) -> list[Any]:
        function = call.function
        for place, buffer in zip(call.arguments, function.params, strict=True):
            if place.kind == "slot" and place.offset == 0:
                self.slots[place.number] = index_data(buffer.size * buffer.dtype.itemsize)
        program = program_of(function)
        if program is not None and all(num_elements(t.shape) == 0 for t in program.outputs):
            return []
        form = Form(reason=MOVES) if program is None else self.form(program)
        if form.key:
            self.choices[form.key] = form.choice and dict(form.choice)
        if program is None or not form.kernels:
            return [["host", self.host_part(function), list(map(_place, call.arguments))]]
        # What kernels write besides the results is read by later ones.
        places: dict[Tensor | str, Argument] = dict(zip(
            (*program.inputs, *form.outputs), call.arguments, strict=True))
        return [self.launch(kernel, places) for kernel in form.kernels]

    def launch(self, kernel: Kernel, places: dict[Tensor | str, Argument]) -> Any:
        for tensor in kernel.program.outputs:
            if tensor not in places:
                # Later kernels know it by its name.
                places[tensor.name] = places[tensor] = Argument("room", len(self.rooms))
                self.rooms.append(index_data(num_elements(tensor.shape) * tensor.dtype.itemsize))
        given = [places[t if t in places else t.name] for t in kernel.tensors]
        aligned = tuple(divisible(p.offset, ALIGN) for p in given)
        key = (kernel, aligned)
        if key not in self.known:
            self.known[key] = len(self.kernels)
            self.kernels.append(self.kernel(kernel, aligned))
        return ["launch", self.known[key], list(map(_place, given))]

    def kernel(self, kernel: Kernel, aligned: tuple[bool, ...]) -> dict[str, Any]:
        written = kernel.written
        extents = kernel.extents or [n.extent for n in written.constants.values()
                                     if not isinstance(n, int)]
        versions = serving(kernel, aligned)
        return {"name": written.name, "aligned": list(aligned),
                "dims": [index_data(d) for d in written.dims],
                "blocks": list(map(index_data, extents)),
                "elements": [index_data(n) for n in elements(kernel.program)],
                "types": [t.dtype.name for t in kernel.tensors],
                "versions": [self.version(kernel, v, aligned) for v in versions]}

    def version(self, kernel: Kernel, version: Version, aligned: tuple[bool, ...]
                ) -> dict[str, Any]:
        written, constants = version.written, version.constants()
        facts: dict[str, Any] = {"wide": written.wide, "sixteen": version.sixteen,
                                 "most": version.most, "warps": version.warps,
                                 "programs": index_data(written.programs)}
        if self.simulated:
            return {**facts, "text": written.jit_text(), "constants": constants}
        types = [t.dtype for t in kernel.tensors]
        made = compiled(written, types, constants, version.warps, aligned, version.sixteen,
                        self.spec)
        return {**facts, "warps": made.warps, "symbol": made.name, "shared": made.shared,
                "extra": made.extra, "scratch": made.scratch, "code": self.keep(made.cubin)}

    def host_part(self, function: Function) -> int:
        """A kernel of the CPU's, by its number; its code lies with the rest."""
        if function not in self.known:
            slots = tuple(Argument("slot", i) for i in range(len(function.params)))
            recipe = Recipe(function.name, (Call(function, slots, function.name),), len(slots), 0,
                            function.dims)
            made = self.host.assemble(recipe)
            self.known[function] = len(self.hosts)
            self.hosts.append({
                "name": function.name, "origin": function.origin, "code": self.keep(made.code),
                "facts": dict(made.facts), "dims": [index_data(d) for d in function.dims],
                "bytes": [index_data(b.size * b.dtype.itemsize) for b in function.params]})
        return self.known[function]

    def keep(self, code: bytes) -> list[int]:
        start = len(self.code)
        self.code += code
        return [start, len(code)]


def serving(kernel: Kernel, aligned: Sequence[bool]) -> list[Version]:
    """The versions that serve these arguments: descriptors describe memory that is aligned."""
    if not all(aligned):
        return [v for v in kernel.versions if not v.written.descriptors]
    best = kernel.versions[0]
    return [best] if best.written.descriptors and not best.written.dims else list(kernel.versions)


def _place(place: Argument) -> list[Any]:
    return [place.kind, place.number, index_data(place.offset)]


def program_of(function: Function) -> Program | None:
    """What a kernel computes; None where it has nothing but loops."""
    if function.origin == "copy":
        return copy_program(function)
    program: Program | None = function.program
    weights = weights_of(program) if program is not None and function.packed else None
    # A part that the CPU runs may have packed other constants, or those in other ways.
    if weights is None or dict(function.packed) != {weights.number: weights.packing}:
        return program
    return weights.program


def copy_program(function: Function) -> Program:
    """A kernel that copies, as a program."""
    source, target = function.params
    size: Index = source.size
    x = Tensor(source.name, (size,), source.dtype)
    y = compute((size,), lambda i: x[i], name=target.name, dtype=target.dtype, origin="copy")
    return Program(function.name, (x,), (y,), (y,))


__all__ = ["Planner", "copy_program", "form_of", "program_of"]
