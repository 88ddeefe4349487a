"""A room imports only from the rooms below it.

A room is a folder of the package; `base` (what all others may use) and `top` (the other files at
the top, which hold the public names) are two more. An import counts wherever it stands: at the head
of a file, inside a function, under TYPE_CHECKING, or as the name of a module in a text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import terrazzo.errors

BASE = {"errors", "version", "knobs", "dtypes", "index", "base"}
COMMAND = {"__main__"}  # files at the top that belong to the command line

# What each room may import besides itself, from the lowest room to the highest. "graph.ir" is that
# one file of a room: operators are made of graph nodes, but know nothing of what is done to them. A
# folder inside a room may be a room of its own: a chip is one, and nothing that is for all chips
# imports it.
ROOMS: dict[str, set[str]] = {
    "base": set(),
    "loop": {"base"},
    "expr": {"base", "loop"},
    "ops": {"base", "loop", "expr", "graph.ir", "graph.scopes", "graph.applying", "graph.rebuild",
            "graph.bound", "graph.trace", "graph.sizes",
            "graph.evaluate", "graph.autodiff", "graph.derivatives", "graph.residuals"},
    "graph": {"base", "loop", "expr", "ops"},
    "chips": {"base", "loop", "expr"},
    "codegen": {"base", "loop", "expr", "chips"},
    "runtime": {"base", "loop", "expr", "chips", "graph", "ops"},
    "chips.cpu": {"base", "loop", "expr", "chips", "codegen", "runtime"},
    "chips.cuda": {"base", "loop", "expr", "chips", "codegen", "runtime"},
    "chips.gcu": {"base", "loop", "expr", "chips", "runtime"},
    "compiler": {"base", "loop", "expr", "ops", "graph", "chips", "runtime"},
    "triton_cpu.frontend": {"base", "loop", "chips"},
    "triton_cpu": {"base", "loop", "chips", "chips.cpu", "runtime", "triton_cpu.frontend"},
    "triton_gcu": {"base", "loop", "chips", "chips.gcu", "runtime", "triton_cpu.frontend",
                   "triton_cpu"},
    "te": {"base", "loop", "expr", "chips", "runtime"},
    "frontends": {"base", "expr", "ops", "graph"},
    "frontends.onnx.session": {"base", "ops", "graph", "chips", "runtime", "frontends",
                               "compiler"},
    "ort": {"base", "chips", "runtime", "frontends", "frontends.onnx.session"},
    "calls": {"base", "ops", "graph", "chips", "runtime", "compiler", "frontends",
              "frontends.onnx.session"},
    "torch": {"base", "ops", "graph", "chips", "codegen", "runtime", "compiler", "frontends",
              "calls"},
    "torch_device": {"base", "ops", "graph", "chips", "chips.gcu", "runtime", "compiler", "calls",
                     "torch", "triton_gcu"},
    "tools": {"base", "loop", "expr", "ops", "graph", "chips", "runtime", "compiler",
              "frontends.onnx.session", "calls", "torch"},
    "top": {"base", "ops", "graph", "chips", "chips.gcu", "runtime", "frontends.onnx.session",
            "calls", "tools"},
    "tools.cli": {"base", "loop", "graph", "chips", "chips.gcu", "runtime", "compiler",
                  "frontends.onnx.session", "triton_cpu", "calls", "tools", "top"},
}
# The tables that name what stands above them, to load it when it is asked for: what low rooms ask
# of higher ones, and the chips.
TABLES = {("base", "upcalls"), ("chips", "registry")}
# Who may know the CPU by name, beside its own room and what is for CPUs alone.
ABOUT_CPUS = {("tools", "cli", "triton")}

PACKAGE = Path(terrazzo.errors.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(file: Path) -> tuple[str, ...]:
    """The dotted name of a file below the package, as parts: () is the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


MODULES = {module_of(file) for file in FILES} | {module_of(file)[:-1] for file in FILES}


def room_of(module: tuple[str, ...]) -> str:
    if not module:
        return "top"
    if module[0] in COMMAND:
        return "tools.cli"
    if module[0] in BASE:
        return "base"
    inside = [".".join(module[:n]) for n in range(len(module), 0, -1)]
    return next((room for room in inside if room in ROOMS), "top")


def imported_modules(
    source: str, importer: tuple[str, ...], is_package: bool
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Every terrazzo module that a source text imports, with the line that does it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, *rest = alias.name.split(".")
                if first == "terrazzo":
                    yield node.lineno, tuple(rest)
        elif isinstance(node, ast.ImportFrom):
            named = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                package = importer if is_package else importer[:-1]
                origin = package[: len(package) - (node.level - 1)] + named
            elif named[0] == "terrazzo":
                origin = named[1:]
            else:
                continue
            for alias in node.names:
                # `from terrazzo.graph import ir` means the file ir, not the whole room.
                submodule = (*origin, alias.name)
                yield node.lineno, submodule if submodule in MODULES else origin


def is_allowed(importer: tuple[str, ...], imported: tuple[str, ...]) -> bool:
    here, there = room_of(importer), room_of(imported)
    if there == "chips.cpu" and importer in ABOUT_CPUS:
        return True
    return here == there or there in ROOMS[here] or ".".join(imported) in ROOMS[here]


def modules_by_text(source: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Modules that a source text names, or names something in, by text: to import them later."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            first, *rest = node.value.split(".")
            named = next((tuple(rest[:n]) for n in (len(rest), len(rest) - 1)
                          if n > 0 and tuple(rest[:n]) in MODULES), None)
            if first == "terrazzo" and named is not None:
                yield node.lineno, named


def violations(source: str, importer: tuple[str, ...], is_package: bool = False) -> list[str]:
    return [
        f"line {line}: room {room_of(importer)!r} imports terrazzo.{'.'.join(imported)}"
        for line, imported in (*imported_modules(source, importer, is_package),
                               *(() if importer in TABLES else modules_by_text(source)))
        if not is_allowed(importer, imported)
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_only_from_rooms_below(file: Path) -> None:
    importer = module_of(file)
    assert room_of(importer) in ROOMS, "a new room: say in ROOMS what it may import"
    assert not violations(file.read_text(), importer, file.name == "__init__.py")


def test_rooms_stand_on_those_before_them() -> None:
    order = list(ROOMS)
    for place, room in enumerate(order):
        # The files of graph that ops may use are no dependency on the room.
        above = ROOMS[room].intersection(order[place:])
        assert not above, f"{room} imports {sorted(above)}, which must stand before it"


def test_the_map_shows_the_rooms() -> None:
    design = (Path(__file__).parents[1] / "docs" / "design.md").read_text()
    rows = design.partition("## Rooms")[2].partition("\n## ")[0].splitlines()
    assert [row.split("`")[1] for row in rows if row.startswith("| `")] == list(ROOMS)


def test_tests_stand_in_rooms() -> None:
    """Folders of tests are named after rooms, or say what else they are about."""
    others = {"benchmarks", "docs", "errors", "index", "session"}
    names = {room.partition(".")[0] for room in ROOMS} | others
    folders = {p.name for p in Path(__file__).parent.iterdir()
               if p.is_dir() and any(p.rglob("test_*.py"))}
    assert folders <= names, folders - names


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("loop", "from terrazzo.expr import ir"),
        ("expr", "import terrazzo.chips.cpu.llvm"),
        ("loop", "def f():\n    from ..codegen import llvm"),
        ("ops", "from terrazzo.graph.fusion import fuse"),
        ("graph", "import terrazzo as tz"),
        ("graph", "from terrazzo import compiler"),
        ("chips", "from ..runtime.cache import Cache"),
        ("compiler", "from terrazzo.chips.cpu.description import host"),
        ("runtime", "from terrazzo.chips.cpu import pool"),
        ("triton_cpu.frontend", "from terrazzo.chips.cpu.description import host"),
        ("triton_cpu.frontend", "from terrazzo.triton_cpu.launch import launcher"),
        ("calls", "from terrazzo.tools.verify import verifier"),
        ("calls", "from terrazzo.torch.autograd import Keeping"),
        ("tools", "import terrazzo as tz"),
        ("graph", "import_module('terrazzo.calls.api')"),
        ("graph", "HOOKS = {'jit': 'terrazzo.calls.compiled.jit'}"),
    ],
)
def test_upward_imports_are_found(room: str, source: str) -> None:
    assert len(violations(source, (*room.split("."), "file"))) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("expr", "from terrazzo import dtypes"),
        ("expr", "from ..errors import ShapeError"),
        ("expr", "from .nodes import Load"),
        ("ops", "from terrazzo.graph.ir import Node"),
        ("ops", "from terrazzo.graph.trace import Traced"),
        ("runtime", "from terrazzo.chips.registry import chip_named"),
        ("tools", "from terrazzo.calls.compiled import Compiled"),
        ("loop", "import numpy\nfrom dataclasses import dataclass"),
    ],
)
def test_downward_imports_are_not(room: str, source: str) -> None:
    assert not violations(source, (*room.split("."), "file"))
