"""Half-precision models on an NVIDIA GPU, beside torch.compile.

    python benchmarks/gpu_models.py [--seconds 540] [--kept models.jsonl] [bert_base ...]
    python benchmarks/gpu_models.py --ways ours,default            # without max-autotune
    python benchmarks/gpu_models.py --jobs 16                      # compiling side by side
    python benchmarks/gpu_models.py --simulate                     # small models, on the CPU

Models are those of zoo.py by its names, with random weights, in float16 and bfloat16, at batch 1
and 32. Each is run by `torch.compile(backend="terrazzo")` and by `terrazzo.ort` (exported to ONNX,
tensors of torch's in and out), by launches and by CUDA graphs, by torch's eager mode, by
`torch.compile` and by its `mode="max-autotune"`, which takes minutes to compile. Times are the
least of several runs of 20 calls in a row, in us, and of the host alone in brackets. Ours by
launches is compared with `torch.compile`, ours by CUDA graphs with `max-autotune`, which uses them
too and comes last. Results are compared with float64's: an error may be twice that of torch's own
half precision, or a few roundings of the type.

With `--jobs` each model has a process of its own, which compiles in all ways while others do, and
is timed when none compiles any more, alone. What Inductor measures for `max-autotune` is measured
by one process at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent)]

import zoo  # noqa: E402
from gpu_machine import Machine  # noqa: E402
from gpu_report import Figure, Measured, Report, options, say  # noqa: E402

import terrazzo.ort as ort  # noqa: E402

GPU = "CUDAExecutionProvider"
MODELS = ("bert_base", "gpt2", "vit_base", "resnet50")
WAYS = ("ours", "ort", "eager", "default", "max-autotune")
LEAST_ERROR = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# What makes a model small enough for the CPU to stand in: two layers of it.
_TWO_LAYERS = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
               "intermediate_size": 128}
_SMALL_IMAGE: Callable[[], dict[str, Any]] = lambda: {  # noqa: E731
    "pixel_values": torch.randn(1, 3, 32, 32)}
SMALL: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "bert_base": ({**_TWO_LAYERS, "vocab_size": 100}, lambda: zoo._tokens(100, 16, True)),
    "gpt2": ({"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100, "bos_token_id": 0,
              "eos_token_id": 0}, lambda: zoo._tokens(100, 16, False)),
    "vit_base": ({**_TWO_LAYERS, "image_size": 32, "patch_size": 8, "num_labels": 10},
                 _SMALL_IMAGE),
    "resnet50": ({"depths": [1, 1], "hidden_sizes": [64, 128], "embedding_size": 16,
                  "num_labels": 10}, _SMALL_IMAGE),
}


@dataclass(frozen=True)
class Cell:
    """A model in one precision and batch."""

    name: str
    kind: str
    batch: int

    def __str__(self) -> str:
        return f"{self.name} {self.kind} batch {self.batch}"


@dataclass(frozen=True, eq=False)
class Case:
    """A model in one precision, what it is given, and what it should answer."""

    name: str
    module: Any
    inputs: dict[str, Any]
    want: Any
    error: float  # that torch's own has, at least

    @staticmethod
    @lru_cache(maxsize=1)  # the ways of one come one after the other
    def of(cell: Cell, machine: Machine) -> Case:
        """The case of a cell: weights and inputs are the same in every precision."""
        name, kind, batch = cell.name, getattr(torch, cell.kind), cell.batch
        module, one = zoo.build(name)
        inputs = {n: t.repeat(batch, *[1] * (t.ndim - 1)) if not t.is_floating_point() else
                  torch.randn(batch, *t.shape[1:]) for n, t in one.items()}
        inputs = {n: t.to(machine.device) for n, t in inputs.items()}
        few = [t[:2] for t in inputs.values()]
        half = copy.deepcopy(module).to(machine.device, kind)
        module = module.to(machine.device, torch.float64)
        with torch.inference_mode():
            want = module(*(_in_type(t, torch.float64) for t in few)).cpu()
            apart = _error(half(*(_in_type(t, kind) for t in few)), want)
        return Case(name, half, {n: _in_type(t, kind) for n, t in inputs.items()}, want,
                    max(2 * apart, LEAST_ERROR[kind]))

    def check(self, got: Any) -> None:
        """An error if results are further off than they may be."""
        found = _error(got, self.want)
        if not found <= self.error:
            raise AssertionError(f"off by {found:.1e}, and {self.error:.1e} is allowed")


def _in_type(tensor: Any, kind: torch.dtype) -> Any:
    return tensor.to(kind) if tensor.is_floating_point() else tensor


def _error(got: Any, want: Any) -> float:
    """The largest difference of the first rows, as a part of the largest value."""
    found = torch.as_tensor(got)[:len(want)].double().cpu()
    return float((found - want).abs().max() / want.abs().max())


# ---------------------------------------------------------------- ways to run a model
def runs_of(case: Case, way: str, machine: Machine, folder: Path) -> dict[str, Callable[[], Any]]:
    """The calls that a way of running a model is timed by: by launches, and by CUDA graphs."""
    given = list(case.inputs.values())
    if way == "eager":
        return {"eager": lambda: case.module(*given)}
    if way == "ours":
        plain, graphs = (torch.compile(case.module, backend="terrazzo", dynamic=False,
                                       options={"cuda_graphs": yes}) for yes in (False, True))
        return {"launches": lambda: plain(*given), "graph": lambda: graphs(*given)}
    if way == "ort":
        path = exported(case, folder)
        sessions = [ort.InferenceSession(str(path), providers=[(GPU, told),
                                                               "CPUExecutionProvider"])
                    for told in ({}, {"enable_cuda_graph": "1"})]
        return {word: lambda s=s: s.run(None, case.inputs)[0]
                for word, s in zip(("launches", "graph"), sessions, strict=True)}
    told = {} if way == "default" else {"mode": "max-autotune"}
    compiled = machine.compiled(case.module, **told)
    return {way: lambda: compiled(*given)}


def exported(case: Case, folder: Path) -> Path:
    """The model as a file, in its precision."""
    path = folder / f"{case.name}.onnx"
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses packages of others
    module = copy.deepcopy(case.module).cpu()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, tuple(t.cpu() for t in case.inputs.values()), path, dynamo=True,
                          opset_version=zoo.OPSET, external_data=False, verbose=False,
                          input_names=list(case.inputs), output_names=["out_0"])
    return path


Ready = dict[str, tuple[Callable[[], Any], float]]  # calls, and seconds of the first of each


def ready(cell: Cell, way: str, machine: Machine, folder: Path) -> Ready:
    """The calls of one model in one way, each of which was made once and is right."""
    case = Case.of(cell, machine)
    torch._dynamo.reset()
    made: Ready = {}
    with torch.inference_mode():
        start = time.perf_counter()
        for word, run in runs_of(case, way, machine, folder).items():
            case.check(run())
            made[word] = run, time.perf_counter() - start
            start = time.perf_counter()
    return made


def timed(calls: Ready, machine: Machine) -> Measured:
    """Microseconds of each call, and of the host alone."""
    lines, figures = [], []
    with torch.inference_mode():
        for word, (run, first) in calls.items():
            whole, host = machine.back_to_back(run)
            lines.append(f"{word} {whole:.0f} us (host {host:.0f}, first call {first:.1f} s)")
            figures.append(Figure("d times, us", word, whole))
    return ", ".join(lines), figures


def alone(cell: Cell, way: str, machine: Machine) -> Measured:
    """One model in one way, compiled and timed."""
    with tempfile.TemporaryDirectory() as folder:
        return timed(ready(cell, way, machine, Path(folder)), machine)


# ---------------------------------------------------------------- side by side
@contextlib.contextmanager
def held(lock: Path | None, how: int) -> Iterator[None]:
    """A lock that processes share: with others (LOCK_SH), or alone (LOCK_EX)."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, how)
        yield


def tune_in_turns(lock: Path) -> None:
    """Let Inductor measure its choices while no other process does: they would measure both."""
    from torch._inductor.runtime import benchmarking

    kind = type(benchmarking.benchmarker)
    for name in ("benchmark_gpu", "benchmark_many_gpu"):
        measure = getattr(kind, name, None)
        if measure is not None:
            def alone(*given: Any, measure: Any = measure, **named: Any) -> Any:
                if lock in _TUNING:  # one of these calls the other
                    return measure(*given, **named)
                _TUNING.add(lock)
                try:
                    with held(lock, fcntl.LOCK_EX):
                        return measure(*given, **named)
                finally:
                    _TUNING.discard(lock)

            setattr(kind, name, alone)


_TUNING: set[Path] = set()


def one_beside_others(cell: Cell, ways: Sequence[str], machine: Machine, report: Report,
                      folder: Path) -> None:
    """All ways of one model: compiled while others compile, timed when none does."""
    calls: dict[str, Callable[[], Measured]] = {}

    def failing(error: Exception) -> Callable[[], Measured]:
        def run() -> Measured:
            raise error

        return run

    tune_in_turns(folder / "tuning")
    with held(folder / "compiling", fcntl.LOCK_SH), tempfile.TemporaryDirectory() as own:
        for way in ways:
            try:
                made = ready(cell, way, machine, Path(own))
                calls[way] = lambda made=made: timed(made, machine)  # type: ignore[misc]
            except Exception as error:
                calls[way] = failing(error)
    with held(folder / "compiling", fcntl.LOCK_EX):
        for way, run in calls.items():
            report.measure(f"{cell}, {way}", run)


def side_by_side(cells: Sequence[Cell], jobs: int, told: argparse.Namespace) -> None:
    """A process for each model that is not in the kept file yet."""
    with tempfile.TemporaryDirectory() as folder:
        def run(cell: Cell) -> None:
            command = [sys.executable, __file__, "--beside", folder, "--kept", str(told.kept),
                       "--ways", told.ways, "--kinds", cell.kind, "--batches", str(cell.batch),
                       *(["--simulate"] if told.simulate else []), cell.name]
            try:
                done = subprocess.run(command, capture_output=True, text=True,
                                      timeout=told.seconds, check=False)
                say((done.stdout if done.returncode == 0 else done.stdout + done.stderr[-3000:]
                     ).strip())
            except subprocess.TimeoutExpired as late:
                say(f"{cell}: took longer than {told.seconds:.0f} s\n{late.stdout or ''}")

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(run, cells))


def compared(cell: Cell, report: Report) -> Measured:
    """How ours stands beside its peers, of what was measured."""
    times = {f"{way} {f.what}": f.value for way in WAYS
             for f in report.figures.get(f"{cell}, {way}", ())}
    figures = []
    for peer, ours, item in (("default", "launches", "d torch.compile"),
                             ("max-autotune", "graph", "d max-autotune")):
        mine, theirs = times.get(f"ours {ours}"), times.get(f"{peer} {peer}")
        if mine is not None and theirs is not None:
            figures.append(Figure(item, peer, theirs / mine, 1.0))
    return "", figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each way, a row for each model, and how targets stand."""
    parser = argparse.ArgumentParser(description=__doc__)
    options(parser)
    parser.add_argument("--ways", default=",".join(WAYS), help="with commas")
    parser.add_argument("--kinds", default="float16,bfloat16")
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--jobs", type=int, default=1, help="processes; more want a --kept file")
    parser.add_argument("--beside", type=Path, help=argparse.SUPPRESS)  # others, by a folder
    parser.add_argument("models", nargs="*", default=MODELS)
    told = parser.parse_args(arguments)
    machine = Machine.started(told.simulate)
    if told.simulate:
        for name, (settings, inputs) in SMALL.items():
            recipe = zoo.RECIPES[name]
            zoo.RECIPES[name] = replace(recipe, settings={**recipe.settings, **settings},
                                        inputs=inputs)
    if told.beside is None:
        say(str(machine))
    cells = [Cell(name, kind, int(batch)) for name in told.models for kind in told.kinds.split(",")
             for batch in told.batches.split(",")]
    ways = told.ways.split(",")
    if told.jobs > 1:
        if told.kept is None:
            parser.error("--jobs wants a --kept file, by which processes tell what they found")
        side_by_side(cells, told.jobs, told)
    report = Report(told.seconds, told.kept, told.only)
    if told.beside is not None:
        for cell in cells:
            one_beside_others(cell, ways, machine, report, told.beside)
        return int(bool(report.failed))
    quick = [w for w in WAYS if w in ways and w != "max-autotune"]
    for some in (quick, [w for w in ways if w == "max-autotune"]) if told.jobs == 1 else ():
        for cell in cells:
            for way in some:
                report.measure(f"{cell}, {way}", lambda: alone(cell, way, machine))  # noqa: B023
    for cell in cells:
        report.derive(f"{cell}", lambda: compared(cell, report))  # noqa: B023
    report.mean("d torch.compile", "default", 1.2)
    return report.conclude()


if __name__ == "__main__":
    sys.exit(main())
