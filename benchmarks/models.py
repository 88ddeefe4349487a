"""Whole models beside onnxruntime and OpenVINO: time, memory, loading and error in one command.

    python benchmarks/models.py                        # makes the models first, if they are missing
    python benchmarks/models.py --models FOLDER --threads 1,2 --write

Every engine has a process of its own. All of a model's processes stay alive and take turns, so
that what disturbs the machine disturbs all alike; a turn is kept only if the rest of the machine
was quiet during it. `--write` puts the tables into README.md between its markers.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
MARKS = "<!-- models -->", "<!-- /models -->"
NOISE = 0.15  # cores that others may keep busy during a turn
FEWEST_TURNS = 3  # kept in any case: the quietest ones, where none was quiet
MOST_WAITING = 60.0  # seconds a model waits for quiet moments, all turns together
PAUSE = 0.05  # before a turn, so that spinning threads of the engine before it go to sleep

Feeds = Mapping[str, np.ndarray]
Runner = Callable[[], Any]


# ---------------------------------------------------------------- engines
def _terrazzo(path: str, feeds: Feeds, threads: int) -> Runner:
    import terrazzo.ort as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, feeds)


def _onnxruntime(path: str, feeds: Feeds, threads: int) -> Runner:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, feeds)


def _openvino(path: str, feeds: Feeds, threads: int) -> Runner:
    import openvino

    core = openvino.Core()
    # Its default is bfloat16 on processors that have it; this is a race in float32.
    compiled = core.compile_model(core.read_model(path), "CPU", {
        "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32"})
    request = compiled.create_infer_request()
    return lambda: list(request.infer(feeds, share_inputs=True, share_outputs=True).values())


OURS = "terrazzo"
ENGINES = {OURS: _terrazzo, "onnxruntime": _onnxruntime, "openvino": _openvino}
PACKAGES = {OURS: "terrazzo.ort", "onnxruntime": "onnxruntime", "openvino": "openvino"}


# ---------------------------------------------------------------- one engine's process
@dataclass
class Measured:
    """What one engine did with one model."""

    load_s: float = math.nan  # from the cache, where there is one
    first_s: float = math.nan
    cold_s: float = math.nan  # loading with nothing in the cache
    error: float = math.nan  # the largest, over the largest value of torch's output
    peak_mb: float = math.nan
    cold_peak_mb: float = math.nan
    times: list[float] = field(default_factory=list)
    quiet: int = 0  # turns in which nobody else needed the machine

    @property
    def median_ms(self) -> float:
        """The middle time of a call."""
        return 1e3 * statistics.median(self.times) if self.times else math.nan


def _peak_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return math.nan


def _serve(connection: Connection, engine: str, model: str, threads: int, cache: str) -> None:
    """Load a model, tell of it, then time calls for as long as each request says."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["TZ_CACHE_DIR"] = cache
    if engine == OURS:
        sys.path.insert(0, str(ROOT / "src"))
    __import__(PACKAGES[engine])
    with np.load(Path(model).with_suffix(".npz")) as file:
        arrays = dict(file)
    wanted = arrays.pop("out_0")
    feeds = {n.removeprefix("in_"): a for n, a in arrays.items()}
    start = time.perf_counter()
    call = ENGINES[engine](model, feeds, threads)
    loaded = time.perf_counter()
    result = np.asarray(call()[0], np.float64)
    first = time.perf_counter()
    error = float(np.abs(result - wanted).max() / np.abs(wanted).max())
    connection.send({"load_s": loaded - start, "first_s": first - loaded, "error": error,
                     "peak_mb": _peak_mb()})
    while (seconds := connection.recv()) is not None:
        call()
        times = []
        end = time.perf_counter() + seconds
        while not times or time.perf_counter() < end:
            before = time.perf_counter()
            call()
            times.append(time.perf_counter() - before)
        connection.send({"times": times, "peak_mb": _peak_mb()})


class Server:
    """A process that holds one engine with one model loaded."""

    def __init__(self, engine: str, model: Path, threads: int, cache: str):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, engine, str(model), threads, cache), daemon=True)
        self.process.start()
        theirs.close()
        try:
            self.loaded: dict[str, float] = self.connection.recv()
        except EOFError:
            raise SystemExit(f"{engine} did not get through {model.name}; see above") from None

    def turn(self, seconds: float) -> tuple[list[float], float, float]:
        """Times of calls for some seconds, the peak memory, and what others had of the machine."""
        busy, own, start = _busy_seconds(), self._own_seconds(), time.perf_counter()
        self.connection.send(seconds)
        answer = self.connection.recv()
        others = _busy_seconds() - busy - (self._own_seconds() - own)
        return answer["times"], answer["peak_mb"], others / (time.perf_counter() - start)

    def _own_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End the process."""
        self.connection.send(None)
        self.process.join()


def _busy_seconds() -> float:
    """Processor time of the whole machine that was not idle, stolen time included."""
    fields = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def _wait_for_quiet(until: float) -> None:
    while time.monotonic() < until:
        busy, start = _busy_seconds(), time.perf_counter()
        time.sleep(0.2)
        if (_busy_seconds() - busy) / (time.perf_counter() - start) < NOISE:
            return


# ---------------------------------------------------------------- one model
def measure(model: Path, engines: Sequence[str], threads: int, rounds: int, seconds: float
            ) -> dict[str, Measured]:
    """All engines on one model."""
    results = {engine: Measured() for engine in engines}
    servers: dict[str, Server] = {}
    with tempfile.TemporaryDirectory(prefix="terrazzo-bench-") as cache:
        for engine, result in results.items():
            if engine == OURS:
                cold = Server(engine, model, threads, cache)
                result.cold_s = cold.loaded["load_s"]
                result.cold_peak_mb = cold.loaded["peak_mb"]
                cold.stop()
            servers[engine] = Server(engine, model, threads, cache)
            for name, value in servers[engine].loaded.items():
                setattr(result, name, value)
        turns: dict[str, list[tuple[float, list[float]]]] = {e: [] for e in engines}
        deadline = time.monotonic() + MOST_WAITING
        for _ in range(rounds):
            for engine, server in servers.items():
                time.sleep(PAUSE)
                _wait_for_quiet(deadline)
                times, peak, others = server.turn(seconds)
                results[engine].peak_mb = peak
                turns[engine].append((others, times))
        for server in servers.values():
            server.stop()
    for engine, found in turns.items():
        found.sort(key=lambda turn: turn[0])
        quiet = [t for t in found if t[0] < NOISE]
        results[engine].times = [t for _, times in quiet or found[:FEWEST_TURNS] for t in times]
        results[engine].quiet = len(quiet)
    return results


def ratio(results: Mapping[str, Measured]) -> float:
    """Our median time over that of the faster peer: below 1 we are faster."""
    peers = [r.median_ms for e, r in results.items() if e != OURS and r.times]
    return results[OURS].median_ms / min(peers) if peers else math.nan


# ---------------------------------------------------------------- tables
def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def tables(measured: Mapping[int, Mapping[str, Mapping[str, Measured]]]) -> str:
    """Everything that was measured, by threads and model, as Markdown."""
    lines: list[str] = []
    for threads, models in measured.items():
        engines = list(next(iter(models.values())))
        head = ["model", *(f"{e}, ms" for e in engines), "ours / the faster peer"]
        rows = [[name, *(_number(r.median_ms, 1) for r in found.values()),
                 _number(ratio(found), 2)] for name, found in models.items()]
        ratios = [ratio(found) for found in models.values()]
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        rows.append(["geometric mean", *[""] * len(engines), f"**{_number(mean, 2)}**"])
        word = "thread" if threads == 1 else "threads"
        lines += [f"Median time of a call, {threads} {word}:", "", *_table(head, rows), ""]
    lines += _speed_ups(measured)
    models = measured[max(measured)]
    engines = list(next(iter(models.values())))
    rows = [[name, _number(found[OURS].cold_s, 1), *(_number(r.load_s, 2) for r in found.values()),
             *(_number(1e3 * r.first_s, 0) for r in found.values())]
            for name, found in models.items()]
    lines += ["Loading a model: ours compiles when it first sees a model, and then loads it from "
              "its cache:", "", *_table(
                  ["model", "compiling, s", *(f"{e}, s" for e in engines),
                   *(f"first call, {e}, ms" for e in engines)], rows), ""]
    rows = [[name, *(_number(r.peak_mb, 0) for r in found.values()),
             _number(found[OURS].cold_peak_mb, 0), f"{found[OURS].error:.0e}"]
            for name, found in models.items()]
    lines += ["Peak memory of each engine's process, and our largest error against PyTorch over "
              "its largest output. Compiling happens in a process of its own, which takes another "
              "125 MB for those seconds:", "", *_table(
                  ["model", *(f"{e}, MB" for e in engines), "ours while compiling, MB",
                   "largest error"], rows)]
    return "\n".join(lines)


def _speed_ups(measured: Mapping[int, Mapping[str, Mapping[str, Measured]]]) -> list[str]:
    """How many times faster several threads are than the fewest that were measured."""
    fewest, *more = sorted(measured)
    if not more:
        return []
    engines = list(next(iter(measured[fewest].values())))
    rows = [[name, *(_number(found[e].median_ms / measured[t][name][e].median_ms, 1)
                     for e in engines for t in more)] for name, found in measured[fewest].items()]
    word = "thread" if fewest == 1 else "threads"
    return [f"Speed-up over {fewest} {word}:", "", *_table(
        ["model", *(f"{e}, {t} threads" for e in engines for t in more)], rows), ""]


def _number(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def write_between_marks(page: Path, text: str, marks: tuple[str, str] = MARKS) -> None:
    """Put a text between a page's marks, in place of what is there."""
    before, start, rest = page.read_text().partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not start or not end:
        raise SystemExit(f"{page} has no {marks[0]} and {marks[1]}")
    page.write_text(f"{before}{start}\n{text}\n{end}{after}")


def _made(folder: Path, names: Sequence[str]) -> None:
    missing = [n for n in names if not (folder / f"{n}.npz").exists()]
    if missing:  # in a process of its own: torch is large, and none of what is measured
        subprocess.run([sys.executable, Path(__file__).with_name("zoo.py"), folder, *missing],
                       check=True)


def main() -> None:
    from zoo import RECIPES

    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "models",
                        help="folder of the models; those missing are made")
    parser.add_argument("--only", default=",".join(RECIPES), help="names of models")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each engine")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one turn")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    given = parser.parse_args()
    names, engines = given.only.split(","), given.engines.split(",")
    _made(given.models, names)
    measured: dict[int, dict[str, dict[str, Measured]]] = {}
    for threads in map(int, given.threads.split(",")):
        measured[threads] = {}
        for name in names:
            found = measure(given.models / f"{name}.onnx", engines, threads, given.rounds,
                            given.seconds)
            measured[threads][name] = found
            print(f"{name}, {threads} threads: " + ", ".join(
                f"{e} {r.median_ms:.1f} ms ({r.quiet} quiet turns)"
                for e, r in found.items()) + f"; ratio {ratio(found):.2f}", flush=True)
    text = tables(measured)
    print(f"\n{text}")
    if given.json:
        given.json.write_text(json.dumps(
            {t: {n: {e: asdict(r) for e, r in found.items()} for n, found in models.items()}
             for t, models in measured.items()}))
    if given.write:
        write_between_marks(ROOT / "README.md", text)


if __name__ == "__main__":
    main()
