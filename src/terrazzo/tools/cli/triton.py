"""The command `tz triton`: list the Triton kernels of a file, show one at any level."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from terrazzo.errors import ArgumentError, MissingDependency, TerrazzoError, is_users
from terrazzo.tools.cli.screen import wide_console

console = wide_console()
LEVELS = ("ttir", "loop", "llvm", "asm")
_FILES = {"ttir": "ttir", "loop": "loop", "llvm": "llir"}  # what Triton's cache calls the levels


# ---------------------------------------------------------------- what a file defines
@dataclass(frozen=True)
class Definition:
    """A function of a source file as it is written, whether a kernel or not."""

    name: str
    line: int
    parameters: tuple[str, ...]
    constants: tuple[str, ...]
    decorators: tuple[str, ...]

    @property
    def is_kernel(self) -> bool:
        return "jit" in self.decorators


def definitions(path: Path) -> list[Definition]:
    """Every function of a file, nested ones too, in the order of their lines.

    Read from the text: looking for kernels should not run a program.
    """
    tree = ast.parse(_checked_source(path))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [_definition(node) for node in sorted(found, key=lambda node: node.lineno)]


def _checked_source(path: Path) -> str:
    """The text of a file, if it is Python."""
    try:
        text = path.read_text()
        ast.parse(text, filename=str(path))
    except SyntaxError as error:
        raise ArgumentError(f"{path} is not Python: {error.msg}",
                            where=f"{path}:{error.lineno}") from None
    except ValueError as error:  # bytes that are no text, or a zero among them
        raise ArgumentError(f"{path} is not Python: {error}") from None
    return text


def _definition(node: ast.FunctionDef) -> Definition:
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    constants = {a.arg for a in given
                 if a.annotation is not None and "constexpr" in ast.unparse(a.annotation)}
    return Definition(
        node.name, node.lineno,
        tuple(a.arg for a in given if a.arg not in constants),
        tuple(a.arg for a in given if a.arg in constants),
        tuple(map(_last_name, node.decorator_list)))


def _last_name(decorator: ast.expr) -> str:
    """`jit` of `@triton.jit`, `@jit` and `@triton.jit(debug=True)`."""
    if isinstance(decorator, ast.Call):
        return _last_name(decorator.func)
    if isinstance(decorator, ast.Attribute):
        return decorator.attr
    return decorator.id if isinstance(decorator, ast.Name) else ""


def kernels(path: Path) -> list[Definition]:
    """The kernels of a file, and the functions that kernels call."""
    return [d for d in definitions(path) if d.is_kernel]


def check_kernel(path: Path, name: str) -> None:
    """Refuse a name that cannot be a kernel of a file, before anything runs."""
    functions = {d.name: d for d in definitions(path)}
    there = ", ".join(d.name for d in functions.values() if d.is_kernel)
    if name in functions:
        if not functions[name].is_kernel:
            raise ArgumentError(f"`{name}` is an ordinary function, not a Triton kernel",
                                where=f"{path}:{functions[name].line}",
                                hint="decorate it with @triton.jit" +
                                     (f", or choose from {there}" if there else ""))
    elif not re.search(rf"\b{re.escape(name)}\b", path.read_text()):
        raise ArgumentError(f"{path} has no kernel `{name}`",
                            hint=f"it has {there}" if there else
                            "it has no function decorated with @triton.jit")


# ---------------------------------------------------------------- compiling
@dataclass(frozen=True)
class Version:
    """A kernel compiled for certain types and constants, and where its levels are stored."""

    title: str
    files: Mapping[str, str]

    def show(self, level: str) -> str:
        """The text of one level."""
        if level == "asm":
            from terrazzo.chips.cpu.description import host
            from terrazzo.chips.cpu.llvm import jit
            from terrazzo.triton_cpu.stages import effort

            text = self.show("llvm")
            return jit.assembly(text, host(), effort(text))
        path = next((p for n, p in self.files.items() if n.endswith("." + _FILES[level])), None)
        if path is None:
            raise ArgumentError(f"Triton's cache holds no {level} of this kernel",
                                hint="unset TRITON_STORE_BINARY_ONLY")
        text = Path(path).read_text()
        return _without_locations(text) if level == "ttir" else text


def _without_locations(text: str) -> str:
    """MLIR without the places that each value came from: they are longer than the program."""
    lines = [line for line in text.splitlines() if not line.startswith("#loc")]
    return re.sub(r" loc\((?:[^()]|\([^()]*\))*\)", "", "\n".join(lines)) + "\n"


class _Found(BaseException):
    """Ends the program that launched the kernel; not an Exception, lest the program catch it."""

    def __init__(self, version: Version):
        self.version = version


def use_cpu_backend() -> None:
    """Make Triton compile for the CPU in this process, whatever the machine has."""
    os.environ.pop("TRITON_INTERPRET", None)
    try:
        import triton  # noqa: F401
    except ImportError:
        raise MissingDependency("showing Triton kernels needs the package triton",
                                hint='pip install "terrazzo[triton]"') from None
    from terrazzo.triton_cpu.activate import activate

    activate()


def compiled_by(program: Callable[[], Any], name: str) -> Version:
    """Run a program until it has compiled the kernel of a name."""
    from triton import knobs

    others: list[str] = []

    def listen(*, src: Any, metadata_group: Mapping[str, str], **_: Any) -> None:
        version = Version(_title(src), dict(metadata_group))
        if src.fn.fn.__name__ == name:
            raise _Found(version)
        if src.fn.fn.__name__ not in others:
            others.append(src.fn.fn.__name__)

    before, knobs.compilation.listener = knobs.compilation.listener, listen
    try:
        # What the program prints is not what was asked for: `tz triton ... > file` stays clean.
        with redirect_stdout(sys.stderr):
            program()
    except _Found as found:
        return found.version
    except SystemExit:
        pass
    finally:
        knobs.compilation.listener = before
    said = f"it launched {', '.join(others)}" if others else "it launched no kernel"
    raise ArgumentError(
        f"the program ended without launching `{name}`; {said}",
        hint="name a function that launches it with --run, or give the types of its arguments: "
             '--signature "*fp32,*fp32,i32" --constexpr BLOCK=1024')


def _title(src: Any) -> str:
    names = src.fn.arg_names
    constants = {names[path[0]]: value for path, value in sorted(src.constants.items())
                 if len(path) == 1}
    types = [f"{name}: {kind}" for name, kind in src.signature.items() if name not in constants]
    values = [f"{name}={value}" for name, value in constants.items()]
    return f"{src.fn.fn.__name__}({', '.join([*types, *values])})"


def load_file(path: Path) -> ModuleType:
    """A Python file as a module, with its own folder on the path as when it is run."""
    if not path.is_file():
        raise ArgumentError(f"there is no file {str(path)!r}",
                            hint="give it as path/to/file.py::name")
    _checked_source(path)
    loader = SourceFileLoader(path.stem, str(path))  # whatever the name ends in
    spec = importlib.util.spec_from_loader(path.stem, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, TerrazzoError):
            raise
        said = " ".join(str(error).split())
        raise ArgumentError(f"{path} does not load: {type(error).__name__}: {said}",
                            where=last_line(error)) from error
    return module


def last_line(error: BaseException) -> str | None:
    """Where an error was raised, as "file.py:17 in f": the last line that is the user's, if any."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [f for f in frames
             if is_users(f[0]) and "site-packages" not in f[0].f_code.co_filename]
    if not frames:
        return None
    frame, line = (users or frames)[-1]
    return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"


def _run_as_program(path: Path, words: Sequence[str]) -> None:
    sys.argv = [str(path), *words]
    sys.path.insert(0, str(path.parent.resolve()))
    runpy.run_path(str(path), run_name="__main__")


def _run_function(path: Path, name: str) -> None:
    function = getattr(load_file(path), name, None)
    if not callable(function):
        raise ArgumentError(f"{path} defines no function `{name}` to run",
                            hint="--run wants a function without arguments that launches the "
                                 "kernel")
    function()


# ---------------------------------------------------------------- types by hand
def compiled_for(path: Path, name: str, signature: str, constants: Sequence[str]) -> Version:
    """Compile a kernel for types given as text, without running anything."""
    import triton
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    kernel: Any = getattr(load_file(path), name, None)
    while not isinstance(kernel, JITFunction) and hasattr(kernel, "fn"):
        kernel = kernel.fn  # an autotuner, or heuristics
    if not isinstance(kernel, JITFunction):
        raise ArgumentError(f"`{name}` is no kernel at the top of {path}",
                            hint="leave --signature out, and the program runs until it launches "
                                 "the kernel")
    values = {p.name: p.default for p in kernel.params
              if p.is_constexpr and p.has_default} | parse_constants(constants)
    unknown = [n for n in values if n not in kernel.arg_names]
    if unknown:
        raise ArgumentError(f"`{name}` has no parameter `{unknown[0]}`",
                            hint=f"it has {', '.join(kernel.arg_names)}")
    missing = [p.name for p in kernel.params if p.is_constexpr and p.name not in values]
    if missing:
        raise ArgumentError(f"`{name}` needs a value for its constant `{missing[0]}`",
                            hint=f"give --constexpr {missing[0]}=...")
    open_ones = [n for n in kernel.arg_names if n not in values]
    words = [w.strip() for w in signature.split(",") if w.strip()]
    if len(words) != len(open_ones):
        raise ArgumentError(
            f"--signature gives {len(words)} types, but `{name}` has {len(open_ones)} arguments",
            hint=f"give one for each of {', '.join(open_ones)}")
    types, attributes = {}, {}
    for argument, word in zip(open_ones, words, strict=True):
        types[argument], divisor = parse_type(word)
        if divisor > 1:
            attributes[(kernel.arg_names.index(argument),)] = [["tt.divisibility", divisor]]
    source = ASTSource(
        fn=kernel, attrs=attributes, constexprs=values,
        signature={n: types.get(n, "constexpr") for n in kernel.arg_names})
    return compiled_by(lambda: triton.compile(source), kernel.fn.__name__)


def parse_type(text: str) -> tuple[str, int]:
    """`*fp32:16` as a type and what its value is divisible by, as Triton's own tools write it."""
    from triton.language.core import dtype

    kind, _, divisor = text.partition(":")
    known = [f"{s}{n}" for s in "iu" for n in (1, 8, 16, 32, 64)] + list(dtype.FP_TYPES)
    if kind.lstrip("*") not in known or (divisor and not divisor.isdigit()):
        raise ArgumentError(
            f"{text!r} is not a type", hint=f"write a star for pointers, then one of "
            f"{', '.join(known)}; *fp32:16 is a pointer divisible by 16")
    return kind, int(divisor or 1)


def parse_constants(texts: Sequence[str]) -> dict[str, Any]:
    """`BLOCK=1024`, `TYPE=tl.float32` and the like as a table."""
    import triton.language as tl

    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        try:
            if not name.isidentifier() or not equals:
                raise ValueError
            values[name] = (getattr(tl, value.removeprefix("tl.")) if value.startswith("tl.")
                            else ast.literal_eval(value))
        except (ValueError, SyntaxError, AttributeError):
            raise ArgumentError(f"{text!r} is not a constant", hint="write it as BLOCK=1024, "
                                "FLAG=True or TYPE=tl.float32") from None
    return values


# ---------------------------------------------------------------- the command
def triton(target: Annotated[str, typer.Argument(
               metavar="FILE[::KERNEL]", help="A Python file, alone or with one of its kernels.")],
           words: Annotated[list[str] | None, typer.Argument(
               metavar="[ARGUMENTS]", help="What the program gets on its command line.")] = None,
           show: Annotated[str, typer.Option(
               "--show", help="Levels, such as ttir,loop: any of ttir, loop, llvm, asm.")] = "loop",
           run: Annotated[str, typer.Option(
               "--run", help="Call this function of the file instead of running it.")] = "",
           signature: Annotated[str, typer.Option(
               help='Types of the arguments, such as "*fp32,*fp32,i32": nothing is run.')] = "",
           constexpr: Annotated[list[str] | None, typer.Option(
               help="With --signature: a constant, as BLOCK=1024.")] = None) -> None:
    """List the Triton kernels of a file, or show one as the CPU backend compiles it.

    The file is run until it launches the kernel: the first compiled version is shown.
    """
    file, _, name = target.partition("::")
    path = Path(file)
    if not path.is_file():
        raise ArgumentError(f"there is no file {file!r}",
                            hint="give it as path/to/file.py::kernel")
    if not name:
        console.print(_listing(path))
        return
    levels = [level.strip() for level in show.split(",") if level.strip()]
    unknown = [level for level in levels if level not in LEVELS]
    if unknown:
        raise ArgumentError(f"there is no level {unknown[0]!r}",
                            hint=f"choose from {', '.join(LEVELS)}")
    check_kernel(path, name)
    use_cpu_backend()
    if signature:
        version = compiled_for(path, name, signature, constexpr or [])
    elif constexpr:
        raise ArgumentError("--constexpr goes with --signature",
                            hint="without it, constants come from the launch")
    else:
        version = compiled_by((lambda: _run_function(path, run)) if run else
                              (lambda: _run_as_program(path, words or [])), name)
    for level in levels:
        print(f"# {version.title}: {level}")
        print(version.show(level))


def _listing(path: Path) -> Table:
    found = kernels(path)
    if not found:
        raise ArgumentError(f"{path} has no kernels",
                            hint="a kernel is a function decorated with @triton.jit")
    table = Table("kernel", "line", "arguments", "constants", "decorators")
    for d in found:
        table.add_row(d.name, str(d.line), escape(", ".join(d.parameters)),
                      ", ".join(d.constants), ", ".join(d.decorators))
    return table
