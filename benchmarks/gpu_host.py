"""What the host does for a GPU: compiling, calls, CUDA graphs, and choosing configurations.

Compiling is timed in processes of their own with empty caches (terrazzo's and Triton's), a second
one of which finds what the first one left. Each has run another operator before, so that packages
are loaded and the GPU is awake.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "examples")]

from gpu_attention import DECODING, SMALL_DECODING, SMALL_WIDE, WIDE  # noqa: E402
from gpu_machine import Machine  # noqa: E402
from gpu_memory import ROWS, SHAPES, SMALL_SHAPES  # noqa: E402
from gpu_products import LAYER, PRODUCTS, SMALL_PRODUCTS  # noqa: E402
from gpu_report import Figure, Measured, Report  # noqa: E402

import terrazzo as tz  # noqa: E402
import terrazzo.ort as ort  # noqa: E402

# Seconds that compiling may take, from nothing and from what is on disk.
OPERATORS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], torch.dtype]] = {
    "gelu": (tz.gelu, ((512, 1024),), torch.float32),
    "softmax": (tz.softmax, ((512, 1024),), torch.float32),
    "x @ w + b, gelu": (tz.jit(lambda x, w, b: tz.gelu(x @ w + b)),
                        ((512, 512), (512, 512), (512,)), torch.bfloat16),
}
COLD, WARM = {"operator": 0.5, "model": 20.0}, {"operator": 5e-3, "model": 2.0}
HOST_US = 6.0
_SMALL_BERT = {"layers": 2, "hidden": 32, "heads": 4, "vocabulary": 50, "positions": 16,
               "sequence": 9}


# ---------------------------------------------------------------- compiling
def bert(machine: Machine) -> Any:
    """A session of BERT-base in float32, and its first run."""
    import numpy as np
    import onnx_models

    model = onnx_models.bert(**(_SMALL_BERT if machine.simulated else {})).SerializeToString()
    start = time.perf_counter()
    session = ort.InferenceSession(model, providers=["CUDAExecutionProvider",
                                                     "CPUExecutionProvider"])
    session.run(None, {i.name: np.zeros(i.shape, np.int64 if "int" in i.type else np.float32)
                       for i in session.get_inputs()})
    machine.synchronize()
    return time.perf_counter() - start


def child(name: str, machine: Machine) -> float:
    """Seconds of the first call of an operator, or of a model's session, in this process."""
    tz.exp(machine.random(8, 8))
    machine.synchronize()
    if name == "BERT":
        return float(bert(machine))
    operator, shapes, dtype = OPERATORS[name]
    given = [machine.random(*s, dtype=dtype) for s in shapes]  # torch loads its kernels for that
    machine.synchronize()
    start = time.perf_counter()
    operator(*given)
    machine.synchronize()
    return time.perf_counter() - start


def compiled(name: str, machine: Machine) -> Measured:
    """A first call with empty caches, and one that finds them full."""
    kind = "model" if name == "BERT" else "operator"
    with tempfile.TemporaryDirectory() as folder:
        places = {"TZ_CACHE_DIR": f"{folder}/terrazzo", "TRITON_CACHE_DIR": f"{folder}/triton"}
        cold, warm = (_in_a_process(name, machine, places) for _ in range(2))
    return f"cold {cold:.3f} s, warm {warm * 1e3:.1f} ms", [
        Figure("e compiling", "cold, s", cold, COLD[kind], most=True),
        Figure("e compiling", "warm, s", warm, WARM[kind], most=True)]


def _in_a_process(name: str, machine: Machine, environment: dict[str, str]) -> float:
    line = [sys.executable, __file__, name, *(["--simulate"] if machine.simulated else [])]
    done = subprocess.run(line, env={**os.environ, **environment}, capture_output=True, text=True,
                          timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return float(json.loads(done.stdout.splitlines()[-1]))


def compiling(machine: Machine, report: Report) -> None:
    """Operators and a BERT, cold and warm."""
    for name in (*OPERATORS, "BERT"):
        report.measure(f"compiling {name}", lambda: compiled(name, machine))  # noqa: B023


# ---------------------------------------------------------------- calls
def call(ours: Callable[[], Any], eager: Callable[[], Any], machine: Machine) -> Measured:
    mine, theirs = (machine.back_to_back(f, each=200)[1] for f in (ours, eager))
    return f"ours {mine:.2f} us, eager {theirs:.2f} us", [
        Figure("e calls", "us of the host", mine, HOST_US, most=True)]


def calls(machine: Machine, report: Report) -> None:
    """What calls of small operators take of the host, which nothing waits for."""
    x, y = (machine.random(64, 64) for _ in range(2))
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "gelu": (lambda: tz.gelu(x), lambda: torch.nn.functional.gelu(x)),
        "add": (lambda: tz.add(x, y), lambda: torch.add(x, y)),
        "softmax": (lambda: tz.softmax(x), lambda: torch.softmax(x, -1)),
        "sum": (lambda: tz.sum(x), lambda: torch.sum(x))}
    for name, (ours, eager) in pairs.items():
        report.measure(f"call of {name} 64x64", lambda: call(ours, eager, machine))  # noqa: B023
    report.measure("call of native code alone", lambda: launch(machine))


def launch(machine: Machine) -> Measured:
    """One launch without Python around it: what the driver takes on this machine."""
    from terrazzo.compiler.driver import compile_graph
    from terrazzo.graph.ir import TensorType
    from terrazzo.graph.trace import trace

    x, y = (machine.random(64, 64) for _ in range(2))
    graph, _ = trace(lambda x: tz.gelu(x), [TensorType((64, 64), tz.float32)], name="one")
    with tz.chip("cuda"):
        made = compile_graph(graph).code.call_pointers
    given = x.data_ptr(), y.data_ptr(), 0, 1
    host = machine.back_to_back(lambda: made(*given), each=200)[1]
    return f"{host:.2f} us", [Figure("e calls", "us of a launch", host)]


# ---------------------------------------------------------------- CUDA graphs
def graphs(machine: Machine, report: Report) -> None:
    """A network of small layers by torch.compile, with and without CUDA graphs."""
    from torch import nn

    layers = [m for _ in range(2 if machine.simulated else 24)
              for m in (nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256))]
    model = nn.Sequential(*layers).to(machine.device).eval()
    x = machine.random(16, 256)
    with torch.no_grad():
        want = model.double()(x.double()).float()
        model.float()

    def row(way: Callable[..., Any]) -> Measured:
        torch._dynamo.reset()
        with torch.no_grad():
            for _ in range(4):
                torch.testing.assert_close(way(x), want, rtol=1e-3, atol=1e-3)
            whole, host = machine.back_to_back(lambda: way(x))
        return f"{whole:.1f} us, of the host {host:.1f}", [Figure("graphs", "us", whole)]

    report.measure("network of small layers, eager", lambda: row(model))
    for mode in ("default", "reduce-overhead"):
        report.measure(f"network of small layers, terrazzo, {mode}", lambda: row(torch.compile(
            model, backend="terrazzo", mode=mode)))  # noqa: B023
        report.measure(f"network of small layers, Inductor, {mode}", lambda: row(machine.compiled(
            model, mode=mode)))  # noqa: B023


# ---------------------------------------------------------------- choices
def tuned(machine: Machine, report: Report) -> None:
    """What measuring chooses, with its time and that of the rules' choice."""
    def random(*shape: int) -> Any:
        return machine.random(*shape, dtype=torch.bfloat16)

    def row(name: str, tune: Callable[[], str]) -> None:
        report.measure(f"tune {name}", lambda: (tune(), ()))

    for m, n, k in SMALL_PRODUCTS if machine.simulated else PRODUCTS:
        row(f"x @ w {m}x{n}x{k}", lambda: LAYER[False].tune(
            random(m, k), random(k, n), random(n)))  # noqa: B023
    attention = (*SMALL_WIDE, *SMALL_DECODING) if machine.simulated else (*WIDE, *DECODING)
    for heads in attention:
        for causal in (False, True)[:1 if heads.queries == 1 else 2]:
            row(f"attention {heads} {'causal' if causal else 'full'}", lambda: (
                tz.scaled_dot_product_attention.tune(*heads.given(  # noqa: B023
                    torch.bfloat16, machine), causal=causal)))  # noqa: B023
    for shape in SMALL_SHAPES if machine.simulated else SHAPES:
        for name, (ours, _) in ROWS.items():
            row(f"{name} {shape}", lambda: ours.tune(random(*shape)))  # noqa: B023


def main() -> None:
    parser = argparse.ArgumentParser(description=child.__doc__)
    parser.add_argument("name")
    parser.add_argument("--simulate", action="store_true")
    told = parser.parse_args()
    print(json.dumps(child(told.name, Machine.started(told.simulate))))


if __name__ == "__main__":
    main()
