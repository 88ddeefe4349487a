"""The command `tz`: look at operators, lower, verify, time and fuzz them from a shell."""

from __future__ import annotations

import ast
import contextlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import terrazzo
from terrazzo.calls import levels
from terrazzo.calls.compiled import Compiled, jit
from terrazzo.chips.registry import Chips
from terrazzo.dtypes import DType, as_dtype
from terrazzo.errors import ArgumentError, OutOfMemory, TerrazzoError
from terrazzo.graph.ir import OPERATORS, Operator, operator_named
from terrazzo.knobs import knobs
from terrazzo.runtime.cache import default_cache
from terrazzo.tools import samples
from terrazzo.tools.cli import gcu as cli_gcu
from terrazzo.tools.cli import models as cli_models
from terrazzo.tools.cli import triton as cli_triton
from terrazzo.tools.cli.screen import wide_console

app = typer.Typer(
    help="Terrazzo: write an operator once, run it fast on every chip.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
cache_app = typer.Typer(help="The compile cache on disk.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")
app.add_typer(cli_gcu.app, name="gcu")
app.add_typer(cli_gcu.chip_app, name="chip")
console = wide_console()

Target = Annotated[str, typer.Argument(
    metavar="TARGET", help="An operator: file.py::name, or the name of a built-in one.")]
Shapes = Annotated[list[str], typer.Option(
    "--shape", "-s", help="Sizes of a tensor, such as 8,16. Give it once for each tensor, or "
                          "once for all of them; () is a scalar.")]
Types = Annotated[str, typer.Option(
    "--dtype", "-t", help="Type of the tensors: float32, f16, bfloat16, int32, ...")]
Attributes = Annotated[list[str] | None, typer.Option(
    "--attr", "-a", help="An attribute, such as axis=-1 or approximate=tanh; may be given several "
                         "times.")]
Debug = Annotated[bool, typer.Option(
    "--debug", help="Show the whole traceback of an error (also TZ_DEBUG=1).")]


def _debugging() -> bool:
    return os.environ.get("TZ_DEBUG", "") not in ("", "0")


def _show_version(asked: bool) -> None:
    if asked:
        print(f"terrazzo {terrazzo.__version__}")
        raise typer.Exit()


@app.callback()
def _options(debug: Debug = False, version: Annotated[bool, typer.Option(
        "--version", help="Show the version.", callback=_show_version, is_eager=True)] = False
             ) -> None:
    if debug:
        os.environ["TZ_DEBUG"] = "1"


def main(args: list[str] | None = None) -> None:
    """Run the command line; whatever goes wrong is one message, not a traceback."""
    try:
        app(args)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # `tz ops | head` has seen enough
        _stop_writing()
        sys.exit(1)
    except Exception as error:
        if _debugging():
            raise
        if isinstance(error, OSError):
            _stop_writing()  # whatever is left to write would fail again
        report(error if isinstance(error, TerrazzoError) else _unforeseen(error))
        sys.exit(1)


def _stop_writing() -> None:
    """Point a standard output that takes no more nowhere, lest Python complain at the end."""
    if sys.stdout is None:  # closed before Python began, which then prints nothing
        return
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


class Unforeseen(TerrazzoError):
    """An error that is none of terrazzo's own: of the user's code, the system, or a fault here."""


def _unforeseen(error: Exception) -> TerrazzoError:
    text = " ".join(str(error).split()) or "no message"
    where = cli_triton.last_line(error) if not isinstance(error, (OSError, MemoryError)) else None
    return Unforeseen(f"{type(error).__name__}: {text}", where=where,
                      hint="tz --debug ... shows the whole traceback")


def report(error: TerrazzoError) -> None:
    """Print an error the way a user should see it."""
    shown = Console(stderr=True)
    if not isinstance(error, Unforeseen):
        shown.print(f"[bold red]{type(error).__name__}[/]: ", end="")
    shown.print(str(error), markup=False, highlight=False, soft_wrap=True)


# ---------------------------------------------------------------- finding what is meant
def find(target: str) -> Any:
    """An operator or function from `file.py::name`, or a built-in operator from its name."""
    if "::" not in target:
        return operator_named(target.removeprefix("tz."))
    file, _, name = target.partition("::")
    module = cli_triton.load_file(Path(file))
    found = getattr(module, name, None)
    if not callable(found):
        known = [n for n, v in vars(module).items() if isinstance(v, (Operator, Compiled))]
        raise ArgumentError(f"{file} defines no {name!r}" if found is None else
                            f"{name!r} of {file} is no function or operator",
                            hint=f"it defines {', '.join(known) or 'no operators'}")
    return found


def tensors(function: Any, shapes: list[str], dtype: str) -> list[np.ndarray]:
    """Random tensors of the shapes that were asked for, one for each parameter."""
    count = len(shapes)
    if isinstance(function, Operator) and len(shapes) == 1:
        count = max(1, sum(p.default is p.empty and p.kind is not p.VAR_POSITIONAL
                           for p in function.tensor_params))
    sizes = [parse_shape(s) for s in shapes] * (count if len(shapes) == 1 else 1)
    rng = np.random.default_rng(0)
    return [_drawn(rng, s, as_dtype(dtype)) for s in sizes]


def _drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    try:
        return samples.draw(rng, shape, dtype)
    except (MemoryError, ValueError):  # of numpy: too many elements to have, or to count
        size = math.prod(shape) * dtype.itemsize
        raise OutOfMemory(f"a tensor of shape {list(shape)} takes {size / 2**30:.3g} GiB",
                          hint="give smaller sizes") from None


def attributes(function: Any, given: list[str] | None) -> dict[str, Any]:
    """Attributes from texts such as `axis=-1`; what is no literal of Python's is a string."""
    found: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ArgumentError(f"{text!r} is not an attribute", hint="write it as name=value")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    if isinstance(function, Operator):
        known = [p.name for p in function.attr_params]
        for name in function.spelled(found).keys() - set(known):
            if not function.takes_keywords:
                raise ArgumentError(f"{function.name} has no attribute {name!r}",
                                    hint=f"it has {', '.join(known) or 'none'}")
    return found


def parse_shape(text: str) -> tuple[int, ...]:
    """A shape from text such as `8,16`, `8x16` or `()`."""
    inner = text.strip().strip("()[]").replace("x", ",")
    try:
        shape = tuple(int(part) for part in inner.split(",") if part.strip())
    except ValueError:
        raise ArgumentError(f"{text!r} is not a shape", hint="write sizes as 8,16") from None
    if any(n < 0 for n in shape):
        raise ArgumentError(f"{text!r} is not a shape: sizes are not negative")
    return shape


def refuse_unused(context: typer.Context, names: Sequence[str], what: str) -> None:
    """Refuse options that were given but mean nothing for what is asked."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ArgumentError(f"--{name} means nothing for {what}", hint="leave it out")


# ---------------------------------------------------------------- commands
@app.command()
def info(context: typer.Context,
         model: Annotated[str, typer.Argument(
             metavar="[MODEL]", help="An .onnx file: show what it is and what runs where.")] = "",
         rewrites: Annotated[bool, typer.Option(
             "--rewrites", help="List the rewrites that changed the graph.")] = False,
         chip: Annotated[str, typer.Option(
             "--chip", help="The chip that a model is looked at for.")] = "") -> None:
    """Show version, chip, settings and cache; or, of a model, its inputs, work and placement."""
    if model:
        cli_models.info(model, rewrites, chip)
        return
    refuse_unused(context, ("rewrites", "chip"), "tz info without a model")
    table = Table(show_header=False, box=None)
    table.add_row("terrazzo", terrazzo.__version__)
    table.add_row("python", sys.version.split()[0])
    for name, found in Chips().items():
        table.add_row(f"chip {name}", found.absence or str(found.under(knobs.now).spec))
    table.add_row("operators", str(len(OPERATORS)))
    table.add_row("cache", f"{_megabytes(default_cache().size())} in {knobs.cache_dir}")
    console.print(table)
    console.print(_knob_table())


@app.command("knobs")
def list_knobs() -> None:
    """List every setting: its value, its variable and what it means."""
    console.print(_knob_table())


def _knob_table() -> Table:
    table = Table(title="settings", title_justify="left")
    for head in ("name", "value", "variable", "allowed", "meaning"):
        table.add_column(head)
    for row in knobs.describe():
        table.add_row(row.name, str(row.value), row.variable, row.allowed, row.meaning)
    return table


@app.command()
def ops(family: Annotated[str, typer.Argument(help="Only this family.")] = "") -> None:
    """List the operators there are."""
    table = Table()
    for head in ("family", "operator", "gradient", "meaning"):
        table.add_column(head, no_wrap=head == "family")
    families = sorted({o.family for o in OPERATORS.values() if o.family})
    if family and family not in families:
        raise ArgumentError(f"there is no family {family!r}", hint=", ".join(families))
    chosen = [o for o in OPERATORS.values() if not family or o.family == family]
    for o in sorted(chosen, key=lambda o: (o.family, o.name)):
        table.add_row(o.family, escape(f"{o.name}{o.signature}"),
                      "yes" if o.differentiable else "no",
                      escape(o.doc.splitlines()[0]) if o.doc else "")
    console.print(table)


@app.command()
def lower(target: Target, shape: Shapes, dtype: Types = "float32",
          level: Annotated[str, typer.Option(
              "--level", "-l", help="graph, canonical, expr, schedule, loop, llvm, asm or "
                                    "triton.")] = "loop", attr: Attributes = None) -> None:
    """Print one level of an operator's compilation."""
    function = find(target)
    given = tensors(function, shape, dtype)
    compiled = function.compiled if isinstance(function, Operator) else (
        function if isinstance(function, Compiled) else jit(function))
    print(levels.lower(compiled.graph(given, attributes(function, attr)), level))


@app.command()
def verify(target: Target,
           shape: Annotated[list[str] | None, typer.Option(
               "--shape", "-s", help="Sizes of the tensors; found by trying when not given.")
           ] = None,
           dtype: Annotated[list[str] | None, typer.Option(
               "--dtype", "-t", help="Only this type; may be given several times.")] = None,
           level: Annotated[list[str] | None, typer.Option(
               "--level", "-l", help="Only this level; may be given several times.")] = None,
           seed: Annotated[int, typer.Option(min=0, help="Of the random inputs.")] = 0,
           chip: Annotated[str, typer.Option("--chip", help="The chip that is checked.")] = "",
           attr: Attributes = None) -> None:
    """Check every level of an operator against the one above, and its gradient."""
    from terrazzo.tools.verify.verifier import verify as check

    function = find(target)
    given = tensors(function, shape, "float32") if shape else []
    result = check(function, *given, levels=level or None,
                   dtypes=dtype or None, seed=seed, chip=chip, **attributes(function, attr))
    console.print(result)


@app.command()
def bench(context: typer.Context,
          target: Annotated[str, typer.Argument(
              metavar="TARGET", help="An operator (file.py::name, or a built-in name), or an "
                                     ".onnx model.")],
          shape: Annotated[list[str] | None, typer.Option(
              "--shape", "-s", help="Sizes of an operator's tensors, such as 8,16.")] = None,
          dtype: Types = "float32",
          torch: Annotated[bool, typer.Option(help="Time torch as well, if installed.")] = True,
          against: Annotated[str, typer.Option(
              help="Engines to run a model in beside ours: ort, openvino, torch.")] = "ort",
          size: cli_models.Sizes = None, threads: cli_models.Threads = 0,
          attr: Attributes = None) -> None:
    """Time an operator beside numpy and torch, or a model beside other engines."""
    from terrazzo.tools.benchmark import bench as measure

    if cli_models.is_model(target):
        refuse_unused(context, ("shape", "dtype", "torch", "attr"), "timing a model")
        cli_models.bench(target, [a for a in against.split(",") if a], size or [], threads)
        return
    refuse_unused(context, ("against", "size", "threads"), "timing an operator")
    if not shape:
        raise ArgumentError("an operator is timed for some shape", hint="give --shape 1024,1024")
    function = find(target)
    result = measure(function, *tensors(function, shape, dtype), torch=torch,
                     **attributes(function, attr))
    console.print(result)


app.command("run")(cli_models.run)
app.command("compile")(cli_models.compile_model)
app.command("triton")(cli_triton.triton)


@app.command()
def fuzz(minutes: Annotated[float, typer.Option(min=0, help="How long to try.")] = 5.0,
         seed: Annotated[int, typer.Option(min=0, help="Which programs to try.")] = 0,
         first: Annotated[int, typer.Option(min=0, help="Number of the first program.")] = 0,
         most_failures: Annotated[int, typer.Option(min=1, help="Stop after so many.")] = 20
         ) -> None:
    """Compile random programs and check every level; prints a script for each failure."""
    from terrazzo.tools.fuzz.fuzzing import fuzz as search

    if math.isnan(minutes):  # which is not below 0 either
        raise ArgumentError("nan is no number of minutes", hint="give --minutes 5")
    with _FuzzProgress(minutes) as progress:
        result = search(minutes, seed, first, most_failures, progress.show)
    console.print(str(result), markup=False, highlight=False, soft_wrap=True)
    if result.failures:
        raise typer.Exit(1)


class _FuzzProgress:
    """A bar on a terminal, else a line now and then."""

    def __init__(self, minutes: float):
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.seconds, self.said = 60 * minutes, 0.0
        self.bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(),
                            console=Console(stderr=True), transient=True,
                            disable=not sys.stderr.isatty())
        self.task = self.bar.add_task("starting", total=self.seconds)

    def __enter__(self) -> _FuzzProgress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, result: Any) -> None:
        """Take over where the search stands."""
        rate = result.programs / max(result.seconds, 1e-9)
        text = f"{result.programs} programs, {rate:.1f} a second, {len(result.failures)} failed"
        self.bar.update(self.task, description=text, completed=result.seconds)
        if not sys.stderr.isatty() and result.seconds > self.said + 30:
            self.said = result.seconds
            print(text, file=sys.stderr)


# ---------------------------------------------------------------- the cache
@cache_app.command("size")
def cache_size() -> None:
    """Show how much the compile cache holds."""
    print(f"{_megabytes(default_cache().size())} in {knobs.cache_dir}")


@cache_app.command("clear")
def cache_clear() -> None:
    """Remove everything from the compile cache."""
    size = default_cache().size()
    default_cache().clear()
    print(f"removed {_megabytes(size)} from {knobs.cache_dir}")


def _megabytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
