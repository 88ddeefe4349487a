"""A kernel of Triton text, what a launch must know of it, and the module around both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from terrazzo.base.shapes import dims_text
from terrazzo.chips.spec import LaunchRules
from terrazzo.codegen.triton.lines import Names
from terrazzo.codegen.triton.maths import needed_functions
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import Index, Var, compile_python

RESERVED = ("tl", "gl", "gluon", "triton", "libdevice", "float", "range", "launch", "programs")
MAX_WARPS = 32
# Copies by descriptor have other names from Triton 3.7 on.
GLUON_IMPORTS = """import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
send = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global"""
SHORT_BLOCK = 1024  # a block that sizes make shorter than this has few elements for many warps


@dataclass(frozen=True)
class UpTo:
    """A power of two that is enough for an extent, `most` at most."""

    most: int
    extent: Index


Size: TypeAlias = int | UpTo


@dataclass(frozen=True, eq=False)
class Written:
    """A kernel: its lines, its parameters in order, and how it is launched."""

    name: str
    lines: tuple[str, ...]
    pointers: Mapping[Tensor, str]
    dims: Mapping[Var, str]
    programs: Index
    constants: Mapping[str, Size]  # constexpr parameters
    warps: int
    wide: bool  # whether addresses, and so sizes, have 64 bits
    rules: LaunchRules
    stages: int = 0  # loads of a loop that are under way at once; 0: as Triton likes
    descriptors: bool = False  # whether it makes tensor descriptors, which take memory
    gluon: bool = False  # whether it is Gluon: Triton with layouts and warps told by hand
    helpers: tuple[str, ...] = ()  # functions of its own that it calls
    registers: int = 0  # that a thread has at most; 0: as Triton likes

    @property
    def varies(self) -> bool:
        """Whether sizes decide how large its blocks are."""
        return any(isinstance(n, UpTo) for n in self.constants.values())

    @property
    def few_warps(self) -> int:
        """The warps of a launch whose blocks are short."""
        return min(self.warps, 4)

    def jit_text(self) -> str:
        """The kernel with the functions it calls, as Triton compiles it."""
        if self.gluon:
            return self._gluon_text()
        imports = ["import triton", "import triton.language as tl"]
        if any("libdevice." in line for line in self.lines):
            imports.append("from triton.language.extra import libdevice")
        parameters = [*self.pointers.values(), *self.dims.values(),
                      *(f"{name}: tl.constexpr" for name in self.constants)]
        head = wrapped(f"def {self.name}(", parameters, "):")
        return "\n\n\n".join(["\n".join(imports), *needed_functions(self.lines),
                              "\n".join(["@triton.jit", *head, *self.lines])])

    def _gluon_text(self) -> str:
        """The same in Gluon, whose language has the operators of Triton's under another name."""
        parameters = [*self.pointers.values(), *self.dims.values(),
                      *(f"{name}: tl.constexpr" for name in self.constants)]
        own = [*self.helpers, "\n".join([
            "@gluon.jit", *wrapped(f"def {self.name}(", parameters, "):"), *self.lines])]
        text = "\n\n\n".join([*needed_functions(own), *own])
        own_name = "import triton.language as tl\n" * ("tl.PropagateNan" in text)  # not in Gluon
        text = re.sub(r"\btl\.(?!PropagateNan)", "gl.", text).replace("@triton.jit", "@gluon.jit")
        return "\n\n\n".join([own_name + GLUON_IMPORTS, text])


def warps_for(lanes: int, bits: int, rules: LaunchRules) -> int:
    """How many warps an instance with this many elements wants, of those a chip accepts.

    Loads have 16 bytes a thread, of which two to four are under way at once.
    """
    an_element = 8 if bits >= 32 else 16
    return rules.warps_for(max(1, min(MAX_WARPS, lanes // (32 * an_element))))


@dataclass
class _Launch:
    """The lines of `launch` that find sizes, and its keyword-only parameters."""

    lines: list[str] = field(default_factory=list)
    keywords: list[str] = field(default_factory=list)


def module_text(program: Program, kernel: Written) -> str:
    """A module with the kernel and a `launch` that knows its grid."""
    origins = ", ".join(dict.fromkeys(
        part for s in program.stages for part in s.origin.split(", ") if part))
    if "node" in program.attrs:
        origins = program.attrs["node"].op.name
    title = f'"""{program.name} ({program.kind}): {origins or "copies"}."""'
    return "\n\n\n".join([f"{title}\n\n{kernel.jit_text()}",
                          "\n".join(_launch(program, kernel))]) + "\n"


def _launch(program: Program, kernel: Written) -> list[str]:
    """The function that runs the kernel on given tensors."""
    names = Names([*RESERVED, kernel.name, *kernel.dims.values(), *kernel.constants])
    tensors = [*program.inputs, *program.outputs]  # not collapsed: with the shapes users know
    arguments = [names.fresh(t.name) for t in tensors]
    sizes = _find_sizes(tensors, arguments, kernel.dims)
    signature = [*arguments, *(["*", *sizes.keywords] if sizes.keywords else [])]
    types = [f"{a}: {t.dtype.short}{dims_text(t.shape)}" for a, t in zip(arguments, tensors)]
    count = len(program.inputs)
    text = ", ".join(types[:count]) + " -> " + ", ".join(types[count:])
    lines = [*wrapped("def launch(", signature, "):"),
             *_docstring(f"Run the kernel: {text.strip()}."), *sizes.lines]
    rules, programs = kernel.rules, kernel.programs
    known = isinstance(programs, int)
    grid = "programs" if known else compile_python(rules.round_up_grid(Var("programs", 1)))
    if known and programs:
        programs = rules.round_up_grid(programs)
    lines.append(f"    programs = {compile_python(programs, kernel.dims)}")
    warps = str(kernel.warps)
    given = [*arguments, *kernel.dims.values()]
    for name, value in kernel.constants.items():
        if isinstance(value, UpTo):  # depends on sizes: so should the number of warps
            extent = compile_python(value.extent, kernel.dims)
            lines.append(f"    {name} = {value.most} if {extent} > {value.most} else "
                         f"triton.next_power_of_2({extent}) or 1")
            warps = f"{warps} if {name} >= {SHORT_BLOCK} else {kernel.few_warps}"
        given.append(f"{name}={name if isinstance(value, UpTo) else value}")
    given.append(f"num_warps={warps}")
    if kernel.registers:
        given.append(f"maxnreg={kernel.registers}")
    if kernel.stages and not kernel.gluon:
        given.append(f"num_stages={kernel.stages}")
    call = f"{kernel.name}[({grid},)]("
    if known and kernel.programs:
        return [*lines, *wrapped("    " + call, given, ")")]
    return [*lines, "    if programs > 0:", *wrapped("        " + call, given, ")")]


def _find_sizes(tensors: Sequence[Tensor], arguments: Sequence[str],
                dims: Mapping[Var, str]) -> _Launch:
    """Where `launch` reads each symbolic size: the first tensor that has it as a dimension."""
    found = _Launch()
    for var, name in dims.items():
        places = [f"{argument}.shape[{d}]" for argument, tensor in zip(arguments, tensors)
                  for d, size in enumerate(tensor.shape) if size is var]
        if places:
            found.lines.append(f"    {name} = {places[0]}")
        else:
            found.keywords.append(name)
    return found


def _docstring(text: str) -> list[str]:
    lines = _filled(text.split(" "), 4, 8)
    if len(lines) == 1:
        return [f'    """{lines[0].strip()}"""']
    return [f'    """{lines[0].strip()}', *lines[1:], '    """']


def wrapped(head: str, items: Sequence[str], tail: str) -> list[str]:
    """`head item, item tail`, on as many lines as it takes."""
    line = f"{head}{', '.join(items)}{tail}"
    if len(line) <= 100:
        return [line]
    indent = len(re.match(" *", head)[0]) + 8  # type: ignore[index]
    words = [f"{item}," for item in items[:-1]] + [items[-1]]
    lines = _filled(words, indent, indent)
    return [head, *lines[:-1], lines[-1] + tail]


def _filled(words: Sequence[str], first: int, rest: int) -> list[str]:
    lines = [" " * first]
    for word in words:
        if len(lines[-1]) + len(word) > 94 and lines[-1].strip():
            lines.append(" " * rest)
        lines[-1] += word if not lines[-1].strip() else f" {word}"
    return lines
