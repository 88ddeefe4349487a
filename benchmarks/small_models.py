"""Small and long models beside onnxruntime: what a call costs, and what loading costs.

    python benchmarks/small_models.py                  # half a minute on two idle cores
    python benchmarks/small_models.py --nodes 1000 --rounds 3

Calls are timed in turns in one process, one thread each, and compared by minimums. Each load has a
process of its own, in which all imports are done before the clock starts; `cold` is with a cache
that knows other models only, `cached` with one that knows this one. Beside the time on the wall
stands the processor time of the process and of those it started, which means something on a busy
machine too. All results are compared with onnxruntime's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

WIDTH = 16
CALLS = 300  # in one sample


# ---------------------------------------------------------------- models
def _model(nodes: Sequence[Any], inputs: dict[str, Any], output: tuple[str, Any],
           weights: dict[str, np.ndarray]) -> bytes:
    from onnx import TensorProto, helper, numpy_helper

    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
             for n, s in (*inputs.items(), output)]
    graph = helper.make_graph(list(nodes), "g", infos[:-1], infos[-1:],
                              [numpy_helper.from_array(w, n) for n, w in weights.items()])
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def one_node() -> bytes:
    """Relu of sixteen numbers."""
    from onnx.helper import make_node

    return _model([make_node("Relu", ["x"], ["y"])], {"x": (1, WIDTH)}, ("y", (1, WIDTH)), {})


def perceptron(batch: Any = 1) -> bytes:
    """Ten nodes: three layers and a softmax."""
    from onnx.helper import make_node

    rng = np.random.default_rng(0)
    nodes, value, sizes = [], "x", (WIDTH, 32, 32, 4)
    weights: dict[str, np.ndarray] = {}
    for i, (rows, columns) in enumerate(itertools.pairwise(sizes)):
        weights[f"w{i}"] = rng.normal(size=(rows, columns)).astype(np.float32)
        weights[f"b{i}"] = rng.normal(size=columns).astype(np.float32)
        nodes += [make_node("MatMul", [value, f"w{i}"], [f"m{i}"]),
                  make_node("Add", [f"m{i}", f"b{i}"], [f"a{i}"]),
                  make_node(("Relu", "Tanh", "Softmax")[i], [f"a{i}"], [f"h{i}"])]
        value = f"h{i}"
    nodes.append(make_node("Identity", [value], ["y"]))
    return _model(nodes, {"x": (batch, WIDTH)}, ("y", (batch, 4)), weights)


def chain(count: int) -> bytes:
    """MatMul, Add, Relu, Mul and Tanh in turns."""
    from onnx.helper import make_node

    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4 for i in range(7)}
    weights |= {f"b{i}": rng.normal(size=WIDTH).astype(np.float32) for i in range(5)}
    nodes, value = [], "x"
    for i in range(count):
        other = {"MatMul": [f"w{i % 7}"], "Add": [f"b{i % 3}"], "Mul": [f"b{i % 5}"]}
        kind = ("MatMul", "Add", "Relu", "Mul", "Tanh")[i % 5]
        nodes.append(make_node(kind, [value, *other.get(kind, [])], [f"h{i}"]))
        value = f"h{i}"
    return _model(nodes, {"x": (4, WIDTH)}, (value, (4, WIDTH)), weights)


def unrolled(count: int) -> bytes:
    """A recurrent network whose exporter unrolled its steps: thirteen nodes each."""
    from onnx.helper import make_node

    rng = np.random.default_rng(0)
    weights = {n: rng.normal(size=(WIDTH, 3 * WIDTH)).astype(np.float32) / 4 for n in ("wi", "wh")}
    weights |= {"split": np.full(3, WIDTH), "one": np.ones((), np.float32)}
    nodes, state, steps = [], "h", max(count // 13, 1)
    for t in range(steps):
        weights[f"t{t}"] = np.array(t)
        rows = [("Gather", ["x", f"t{t}"], ["x"]), ("MatMul", [".x", "wi"], ["i"]),
                ("MatMul", [state, "wh"], ["j"]), ("Add", [".i", ".j"], ["g"]),
                ("Split", [".g", "split"], ["r", "z", "n"]), ("Sigmoid", [".z"], ["u"]),
                ("Sigmoid", [".r"], ["s"]), ("Mul", [".s", ".n"], ["m"]), ("Tanh", [".m"], ["c"]),
                ("Sub", ["one", ".u"], ["v"]), ("Mul", [".v", ".c"], ["a"]),
                ("Mul", [".u", state], ["b"]), ("Add", [".a", ".b"], ["h"])]
        for kind, given, made in rows:
            axis = {"Gather": {"axis": 0}, "Split": {"axis": 1}}.get(kind, {})
            nodes.append(make_node(kind, [f"{t}{n}" if n[0] == "." else n for n in given],
                                   [f"{t}.{n}" for n in made], **axis))
        state = f"{t}.h"
    return _model(nodes, {"x": (steps, 2, WIDTH), "h": (2, WIDTH)}, (state, (2, WIDTH)), weights)


def feeds_of(session: Any) -> dict[str, np.ndarray]:
    """Inputs of the declared shapes; symbolic sizes are 8."""
    rng = np.random.default_rng(1)
    return {i.name: rng.normal(size=[n if isinstance(n, int) else 8 for n in i.shape]).astype(
        np.float32) for i in session.get_inputs()}


# ---------------------------------------------------------------- calls
def sessions(model: bytes) -> dict[str, Any]:
    """One of ours and one of onnxruntime's, one thread each."""
    import onnxruntime

    import terrazzo.ort

    made = {}
    for name, module in (("ours", terrazzo.ort), ("onnxruntime", onnxruntime)):
        options = module.SessionOptions()
        options.intra_op_num_threads = 1
        made[name] = module.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return made


def call_times(model: bytes, rounds: int) -> dict[str, float]:
    """The least microseconds of a call, taking turns; the answers are compared first."""
    engines = sessions(model)
    feeds = feeds_of(engines["ours"])
    ours, theirs = (e.run(None, feeds)[0] for e in engines.values())
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    best = dict.fromkeys(engines, float("inf"))
    for _ in range(rounds * 5):
        for name, engine in engines.items():
            run: Callable[..., Any] = engine.run
            start = time.perf_counter()
            for _ in range(CALLS):
                run(None, feeds)
            best[name] = min(best[name], (time.perf_counter() - start) / CALLS * 1e6)
    return best


# ---------------------------------------------------------------- loads
@dataclass(frozen=True)
class Load:
    """Seconds that making a session took."""

    wall: float
    cpu: float  # of the process and its children


def measured_load(path: str, engine: str) -> Load:
    """Make one session in this process, all imports done."""
    import onnx  # noqa: F401
    import onnxruntime

    import terrazzo.ort

    module = terrazzo.ort if engine == "ours" else onnxruntime

    def used() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + children.ru_utime + children.ru_stime

    start, before = time.perf_counter(), used()
    module.InferenceSession(path, providers=["CPUExecutionProvider"])
    return Load(time.perf_counter() - start, used() - before)


def load_in_process(path: Path, engine: str, cache: Path) -> Load:
    """The same in a process of its own, with modules as they are after their first use."""
    source = str(Path(__file__).parents[1] / "src")
    given = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    finished = subprocess.run(
        [sys.executable, __file__, "--load", str(path), "--engine", engine], check=True, text=True,
        stdout=subprocess.PIPE, env={
            **os.environ, "PYTHONPATH": given, "TZ_CACHE_DIR": str(cache),
            "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache / "bytecode")})
    return Load(**json.loads(finished.stdout))


def loads(model: bytes, folder: Path, rounds: int) -> dict[str, Load]:
    """The quickest of some loads: compiled, from the cache, and onnxruntime's."""
    path, cache = folder / "model.onnx", folder / "cache"
    path.write_bytes(model)
    found: dict[str, list[Load]] = {"cold": [], "cached": [], "onnxruntime": []}
    for _ in range(rounds):
        for file in cache.glob("??/*.tzx"):
            file.unlink()
        found["cold"].append(load_in_process(path, "ours", cache))
        found["cached"].append(load_in_process(path, "ours", cache))
        found["onnxruntime"].append(load_in_process(path, "onnxruntime", cache))
    return {name: min(results, key=lambda load: load.cpu) for name, results in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=5000, help="of the long models")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.load:
        print(json.dumps(vars(measured_load(options.load, options.engine))))
        return 0
    print(f"{'us a call, one thread':34} {'ours':>9} {'onnxruntime':>12} {'ratio':>7}")
    for name, model in (("one node", one_node()), ("ten nodes", perceptron()),
                        ("ten nodes, any batch (8)", perceptron("batch")),
                        ("100 nodes", chain(100))):
        best = call_times(model, options.rounds)
        ratio = best["ours"] / best["onnxruntime"]
        print(f"{name:34} {best['ours']:9.2f} {best['onnxruntime']:12.2f} {ratio:7.2f}", flush=True)
    print(f"\n{'ms to load, wall (processor)':34} {'cold':>15} {'cached':>13} {'onnxruntime':>13}")
    long = options.nodes
    with tempfile.TemporaryDirectory() as folder:
        for name, model in (("one node", one_node()), ("ten nodes", perceptron()),
                            ("ten nodes, any batch", perceptron("batch")),
                            (f"chain of {long} nodes", chain(long)),
                            (f"unrolled steps, {long} nodes", unrolled(long))):
            times = loads(model, Path(folder), options.rounds)
            cells = [f"{1000 * t.wall:.0f} ({1000 * t.cpu:.0f})" for t in times.values()]
            print(f"{name:34} {cells[0]:>15} {cells[1]:>13} {cells[2]:>13}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
