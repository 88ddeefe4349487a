"""The commands `tz gcu` and `tz chip`: virtual chips, programs on them, and new ones."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from terrazzo.chips.gcu.description import Description, files, find, parse
from terrazzo.errors import ArgumentError
from terrazzo.knobs import described_chip, knobs
from terrazzo.tools.cli.screen import wide_console

app = typer.Typer(help="The virtual chip gcu: what it is, and programs on it by modelled time.",
                  no_args_is_help=True)
chip_app = typer.Typer(help="Chips that do not exist yet.", no_args_is_help=True)
console = wide_console()

Script = Annotated[Path, typer.Argument(metavar="FILE", help="A Python program.")]
Words = Annotated[list[str] | None, typer.Argument(help="What the program is given.")]
Chip = Annotated[str, typer.Option("--chip", help="The chip that PyTorch and Triton have, by its "
                                   "name or its file; else what TZ_TORCH_DEVICE says, or gcu.")]
_OTHERS = {"ignore_unknown_options": True}  # which are the program's


def _say(text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


@app.command("info")
def info(name: Annotated[str, typer.Argument(help="A described chip, or its file.")] = ""
         ) -> None:
    """Show what a virtual chip is."""
    asked = name or described_chip()
    file = Path(asked) if asked.endswith(".toml") else files().get(asked)
    _say(described(find(asked), str(file)))


def described(chip: Description, file: str) -> str:
    """A chip in a few lines."""
    spec, hertz = chip.spec(), chip.clock_khz * 1e3
    rates = ", ".join(f"{name} {spec.peak(name) / 1e12:.1f}" for name, _ in
                      chip.matrix_depth)
    rule = f"at most {chip.free_grid} programs or a multiple of {chip.grid_multiple}" if (
        chip.free_grid) else "any"
    return "\n".join([
        f"{chip.name}: {chip.units} units at {hertz / 1e9:.2f} GHz, {chip.devices} devices",
        f"  vectors      {chip.vector_bits} bits, {spec.cores} x {chip.lanes(32)} lanes of float32",
        f"  matrix unit  {chip.matrix_rows} x {chip.matrix_columns}, TFLOP/s: {rates}",
        f"  memory       {chip.memory_bytes >> 30} GiB a device, {spec.memory_gbps:.0f} GB/s",
        f"  scratchpad   {chip.scratchpad_bytes >> 10} KiB a unit",
        f"  launches     {spec.launch.cost_us:.1f} us; warps: {chip.warps}; grids: {rule}",
        f"  host link    {chip.link_bytes_per_cycle * hertz / 1e9:.0f} GB/s",
        f"  file         {file}"])


@app.command("run", context_settings=_OTHERS)
def run(file: Script, words: Words = None, chip: Chip = "") -> None:
    """Run a program with Triton's kernels on the chip, and show what took how long."""
    _traced(file, words or [], None, chip)


@app.command("trace", context_settings=_OTHERS)
def trace(file: Script, words: Words = None, chip: Chip = "", output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write, which Perfetto opens.")
        ] = Path("trace.json")) -> None:
    """Run a program and write what ran on the chip as a trace."""
    _traced(file, words or [], output, chip)
    _say(f"{output}: open it with https://ui.perfetto.dev")


def _traced(file: Path, words: list[str], output: Path | None, chip: str) -> None:
    from terrazzo import gcu

    if not file.is_file():
        raise ArgumentError(f"there is no file {file}")
    if chip:
        find(chip)  # or tells what is wrong with it
        chip = str(Path(chip).resolve()) if chip.endswith(".toml") else chip
        os.environ["TZ_TORCH_DEVICE"] = chip  # for its child processes
        setattr(knobs, "torch_device", chip)  # noqa: B010 - a setting, read-only to type checkers
    os.environ.setdefault("TRITON_DEFAULT_BACKEND", "gcu")
    sys.argv = [str(file), *words]
    sys.path.insert(0, str(file.parent.resolve()))
    with gcu.trace(output) as made:
        runpy.run_path(str(file), run_name="__main__")
    _say(str(made))


@chip_app.command("new")
def new(target: Annotated[Path, typer.Argument(metavar="NAME.toml", help="The file to write.")],
        source: Annotated[str, typer.Option("--from", help="The chip to begin with.")] = "gcu"
        ) -> None:
    """Write the description of a chip of one's own, to be changed by hand."""
    if target.suffix != ".toml" or target.exists():
        raise ArgumentError(f"{target} {'is there already' if target.exists() else 'is no .toml'}",
                            hint="the file is named after the chip: mychip.toml")
    known = files()
    place = Path(source) if source.endswith(".toml") else known.get(source)
    if place is None or not place.is_file():
        raise ArgumentError(f"no chip {source!r} is described",
                            hint=f"there are {', '.join(known)}")
    text = re.sub(r'(?m)^name = ".*?"', f'name = "{target.stem}"', place.read_text("utf-8"))
    parse(text, str(target))  # a name that torch has already is refused here
    target.write_text(text, "utf-8")
    _say(f"{target}: change its numbers; `tz gcu info {target}` shows it, and "
         f"TZ_TORCH_DEVICE={target.resolve()} makes it PyTorch's device {target.stem}")
