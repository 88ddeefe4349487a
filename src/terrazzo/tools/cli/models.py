"""The commands of `tz` that take a model: run, bench, info, compile."""

from __future__ import annotations

import os
import statistics
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from zipfile import BadZipFile

import numpy as np
import typer
from rich.markup import escape
from rich.table import Table

from terrazzo.errors import ArgumentError, MissingDependency
from terrazzo.index import IndexExpr
from terrazzo.knobs import thread_count
from terrazzo.runtime.artifact import MAGIC
from terrazzo.tools.cli.screen import wide_console

console = wide_console()
Threads = Annotated[int, typer.Option(
    "--threads", min=0, help="Threads to run on; 0 means every core.")]
Sizes = Annotated[list[str] | None, typer.Option(
    "--size", help="A symbolic size of the model's inputs, as name=number.")]
ModelFile = Annotated[str, typer.Argument(metavar="MODEL", help="An .onnx or .tzx file.")]
Runner = Callable[[], Any]
_SYMBOLIC = 8  # the size random inputs get where the model leaves it open


def is_model(target: str) -> bool:
    """Whether a target on the command line is a model's file."""
    return target.endswith((".onnx", ".tzx")) or is_compiled(target)


def is_compiled(path: str) -> bool:
    """Whether a file holds compiled code, of any version and whatever its name."""
    try:
        if not Path(path).is_file():
            return False
        with open(path, "rb") as file:
            return file.read(3) == MAGIC[:3]
    except OSError:  # which whoever reads it tells of
        return False


def refuse_compiled(path: str) -> None:
    """Refuse a compiled model where its graph is needed."""
    if is_compiled(path):
        raise ArgumentError("this is a compiled model", where=path, hint="give the .onnx file")


def refuse_unwritable(path: str) -> None:
    """Refuse a file that cannot be written, before anybody waits for what would be in it."""
    place, folder = Path(path), Path(path).parent
    if place.is_dir():
        why = "it is a folder"
    elif not folder.is_dir():
        why = f"there is no folder {folder}"
    elif not os.access(place if place.exists() else folder, os.W_OK):
        why = "you may not write there"
    else:
        return
    raise ArgumentError(f"cannot write to {path}: {why}")


def open_model(path: str, threads: int = 0) -> Any:
    """A session for an .onnx file, or the compiled model in a file."""
    from terrazzo.frontends.onnx.session import CompiledModel, Session

    if path.endswith(".tzx") or is_compiled(path):
        return CompiledModel.load(path, threads=threads)
    return Session(path, threads=threads)


def parse_sizes(texts: Sequence[str]) -> dict[str, int]:
    """`batch=4` and the like as a table."""
    sizes = {}
    for text in texts:
        name, _, number = text.partition("=")
        if not name or not number.isdecimal():
            raise ArgumentError(f"{text!r} is not a size", hint="write it as batch=4")
        sizes[name] = int(number)
    return sizes


def random_inputs(ports: Sequence[Any], sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Inputs that fit a model's signature: normal floats, small integers, true booleans."""
    names = {n for port in ports for n in port.shape or () if isinstance(n, str)}
    unknown = sorted(sizes.keys() - names)
    if unknown:
        raise ArgumentError(f"the model has no size {unknown[0]!r}",
                            hint=f"it has {', '.join(sorted(names)) or 'fixed sizes only'}")
    rng = np.random.default_rng(0)
    made = {}
    for port in ports:
        if port.dtype is None or port.shape is None:
            raise ArgumentError(f"input {port} cannot be made up", hint="give it with --input")
        shape = tuple(n if isinstance(n, int) else sizes.get(n or "", _SYMBOLIC)
                      for n in port.shape)
        if port.dtype.is_float:
            made[port.name] = rng.standard_normal(shape).astype(port.dtype.np)
        elif port.dtype.is_bool:
            made[port.name] = np.ones(shape, bool)
        else:  # ones do for token ids, masks and lengths alike
            made[port.name] = np.ones(shape, port.dtype.np)
    return made


def given_inputs(path: str) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name."""
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            raise ValueError("it is one array, without the name of an input")
        with found:
            return dict(found)
    # What is cut off or none of numpy's files ends in many kinds of errors.
    except (OSError, ValueError, TypeError, EOFError, BadZipFile, zlib.error) as error:
        raise ArgumentError(f"cannot read inputs from {path}: {error}",
                            hint="write them with numpy.savez(path, name=array, ...)") from None


# ---------------------------------------------------------------- run
def run(model: ModelFile,
        given: Annotated[str, typer.Option(
            "--input", "-i", help="An .npz file with inputs by name; made up when not given.")
        ] = "",
        output: Annotated[str, typer.Option(
            "--output", "-o", help="Write the outputs to this .npz file.")] = "",
        size: Sizes = None, threads: Threads = 0) -> None:
    """Run a model once and show its outputs."""
    if given and size:
        raise ArgumentError("--size means nothing beside --input: the arrays have their sizes",
                            hint="leave one of them out")
    if output:
        refuse_unwritable(output)
    started = time.perf_counter()
    session = open_model(model, threads)
    loaded = time.perf_counter()
    feeds = given_inputs(given) if given else random_inputs(
        session.inputs, parse_sizes(size or []))
    results = session.run(feeds)
    ran = time.perf_counter()
    console.print(f"loaded in {loaded - started:.2f} s, ran in {1e3 * (ran - loaded):.1f} ms")
    table = Table("output", "type", "shape", "smallest", "mean", "largest")
    for port, value in zip(session.outputs, results, strict=True):
        table.add_row(escape(port.name), *_summary(value))
    console.print(table)
    if output:
        named: dict[str, Any] = {p.name: np.asarray(v)
                                 for p, v in zip(session.outputs, results, strict=True)}
        with open(output, "wb") as file:  # by the name that was given, whatever it ends in
            np.savez(file, **named)
        console.print(f"written to {output}")


def _summary(value: Any) -> list[str]:
    array = np.asarray(value)
    cells = [str(array.dtype), str(list(array.shape))]
    if array.size == 0 or array.dtype.kind not in "biuf":
        return [*cells, "", "", ""]
    wide = array.astype(np.float64)
    return [*cells, *(f"{f(wide):.6g}" for f in (np.min, np.mean, np.max))]


# ---------------------------------------------------------------- compile
def compile_model(model: Annotated[str, typer.Argument(metavar="MODEL", help="An .onnx file.")],
                  output: Annotated[str, typer.Option(
                      "--output", "-o", help="Where to write it; beside the model by default.")
                  ] = "") -> None:
    """Compile a model into one .tzx file that loads without compiling."""
    from terrazzo.calls.api import compile as compile_file

    refuse_compiled(model)
    if output:
        refuse_unwritable(output)
    started = time.perf_counter()
    executable = compile_file(model)
    path = Path(output or Path(model).with_suffix(".tzx"))
    executable.save(path)
    console.print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB, "
                  f"{len(executable.artifact.kernels)} kernels, "
                  f"{time.perf_counter() - started:.1f} s")


# ---------------------------------------------------------------- info
def info(path: str, rewrites: bool, chip: str = "") -> None:
    """Show what a model is, what it costs, and what runs where and why."""
    from terrazzo.frontends.onnx.session import Session
    from terrazzo.frontends.onnx.session.report import COMPILED, report

    refuse_compiled(path)
    shown = report(Session(path, compile_now=False, chip=chip))
    table = Table(show_header=False, box=None)
    table.add_row("model", shown.file)
    table.add_row("opsets", ", ".join(f"{d or 'ai.onnx'} {v}" for d, v in shown.opsets.items()))
    for word, ports in (("inputs", shown.inputs), ("outputs", shown.outputs)):
        table.add_row(word, escape("\n".join(map(str, ports))))
    table.add_row("parameters", f"{shown.parameters / 1e6:.1f} M, "
                                f"{shown.parameter_bytes / 2**20:.1f} MiB")
    table.add_row("operators", ", ".join(f"{n} {c}" for n, c in shown.operators.most_common()))
    table.add_row("kernels", f"{shown.kernels} on {shown.chip}" + (
        f", {len(shown.elsewhere)} of them run by the CPU on copies" if shown.elsewhere else ""))
    table.add_row("work", f"{_scaled(shown.flops, 1e9)} GFLOP a run")
    table.add_row("arena", f"{_scaled(shown.arena, 2**20)} MiB between kernels")
    console.print(table)
    places = Counter(p.where for p in shown.placement)
    console.print("runs: " + ", ".join(f"{count} nodes {where}" for where, count in
                                       places.most_common()))
    others = [p for p in shown.placement if p.where != COMPILED]
    if others:
        rest = Table("node", "runs", "because")
        for placed in others:
            rest.add_row(escape(placed.node), placed.where, escape(placed.why))
        console.print(rest)
    if shown.elsewhere:
        left = Table("kernel", f"not on {shown.chip} because")
        for origin, why in shown.elsewhere:
            left.add_row(escape(origin), escape(why))
        console.print(left)
    if rewrites:
        fired = Table("rewrite", "times", "first at")
        first = {r.rule: r for r in reversed(shown.rewrites)}
        for name, count in Counter(r.rule for r in shown.rewrites).most_common():
            fired.add_row(name, str(count), escape(first[name].where or first[name].node))
        console.print(fired)


def _scaled(size: Any, unit: float) -> str:
    return f"({size}) / {unit:g}" if isinstance(size, IndexExpr) else f"{size / unit:.3g}"


# ---------------------------------------------------------------- bench
def bench(path: str, against: Sequence[str], sizes: Sequence[str], threads: int) -> None:
    """Time a model in several engines, interleaved."""
    if against:  # the other engines need the graph
        refuse_compiled(path)
    threads = threads or thread_count()
    session = open_model(path, threads)
    feeds = random_inputs(session.inputs, parse_sizes(sizes))
    names = [o.name for o in session.outputs]
    runners: dict[str, Runner] = {"terrazzo": lambda: session.run(feeds)}
    for engine in against:
        if engine not in _ENGINES:
            raise ArgumentError(f"there is no engine {engine!r}",
                                hint=f"choose from {', '.join(_ENGINES)}")
        try:
            runners[engine] = _ENGINES[engine](path, feeds, threads)
        except ImportError:
            console.print(f"{engine} is not installed and left out")
    wanted = np.asarray(runners["terrazzo"]()[0], np.float64)
    table = Table("engine", "median", "fastest", "ours is faster by", "largest difference",
                  title=f"{Path(path).name}, {threads} threads, {names[0]}")
    times = interleaved(runners)
    ours = statistics.median(times["terrazzo"])
    for engine, seconds in times.items():
        result = np.asarray(runners[engine]()[0], np.float64)
        scale = float(np.abs(wanted).max()) or 1.0
        median = statistics.median(seconds)
        table.add_row(engine, f"{1e3 * median:.2f} ms", f"{1e3 * min(seconds):.2f} ms",
                      f"{median / ours:.2f}", f"{np.abs(result - wanted).max() / scale:.1e}")
    console.print(table)


def interleaved(runners: Mapping[str, Runner], rounds: int = 6, slice_s: float = 0.5
                ) -> dict[str, list[float]]:
    """Seconds of every call, the engines taking turns so that all meet the same disturbances."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, call in runners.items():
            call()
            end = time.perf_counter() + slice_s
            while True:
                start = time.perf_counter()
                call()
                stop = time.perf_counter()
                times[name].append(stop - start)
                if stop > end:
                    break
    return times


def _ort(path: str, feeds: Mapping[str, np.ndarray], threads: int) -> Runner:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, dict(feeds))


def _openvino(path: str, feeds: Mapping[str, np.ndarray], threads: int) -> Runner:
    import openvino

    core = openvino.Core()
    # Its default is bfloat16 on processors that have it; the others compute as the model says.
    compiled = core.compile_model(core.read_model(path), "CPU", {
        "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32"})
    request = compiled.create_infer_request()
    return lambda: list(request.infer(dict(feeds), share_inputs=True,
                                      share_outputs=True).values())


def _torch(path: str, feeds: Mapping[str, np.ndarray], threads: int) -> Runner:
    try:
        from onnx2torch import convert
    except ImportError:
        raise MissingDependency("running an ONNX model in torch needs the package onnx2torch",
                                hint="pip install onnx2torch") from None
    import torch

    torch.set_num_threads(threads)
    model = convert(path).eval()
    inputs = [torch.from_numpy(a) for a in feeds.values()]

    def call() -> list[Any]:
        with torch.inference_mode():
            found = model(*inputs)
        return list(found) if isinstance(found, (tuple, list)) else [found]

    return call


_ENGINES: dict[str, Callable[[str, Mapping[str, np.ndarray], int], Runner]] = {
    "ort": _ort, "openvino": _openvino, "torch": _torch}

