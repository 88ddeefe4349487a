"""Models on a GPU by `terrazzo.ort`, beside torch's eager mode, and what calls take of the host.

    python benchmarks/gpu_models.py [--seconds 150] [--compiled] [model ...]

Models are those of examples/onnx_models.py (bert: BERT-base with 128 tokens, resnet: ResNet-50) and
of zoo.py by its names. Times are the best of several runs: `run` from and to numpy, `tensors` from
and to torch's on the GPU, each by launches and by CUDA graphs (`graph`), `bound` with inputs and
outputs bound there. `host` is what a call takes until it returns, without waiting for the GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "examples")]

import onnx_models  # noqa: E402
import zoo  # noqa: E402

import terrazzo as tz  # noqa: E402
import terrazzo.ort as ort  # noqa: E402

OWN = {"bert": (onnx_models.bert, "bert_base"), "resnet": (onnx_models.resnet, "resnet50")}
GPU = "CUDAExecutionProvider"


def best(call: Callable[[], Any], rounds: int = 7, each: int = 20) -> tuple[float, float]:
    """Microseconds of a call with all that it queued, and until it returns."""
    whole = host = math.inf
    for _ in range(3):
        call()
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(each):
            call()
        host = min(host, (time.perf_counter() - start) / each)
        torch.cuda.synchronize()
        whole = min(whole, (time.perf_counter() - start) / each)
    return whole * 1e6, host * 1e6


def say(text: str) -> None:
    print(text, flush=True)


def operators() -> None:
    """What calls of small operators take of the host."""
    x, y = (torch.randn(32, 32, device="cuda") for _ in range(2))
    three = tz.jit(lambda x, y: tz.sum(tz.softmax(x @ y) @ y, axis=0))
    for name, ours, theirs in (
            ("gelu", lambda: tz.gelu(x), lambda: torch.nn.functional.gelu(x)),
            ("add", lambda: tz.add(x, y), lambda: torch.add(x, y)),
            ("softmax(x @ y) @ y, summed", lambda: three(x, y),
             lambda: ((x @ y).softmax(-1) @ y).sum(0))):
        mine, other = (best(f, each=200)[1] for f in (ours, theirs))
        say(f"host, us a call: {name}: {mine:.2f}, torch {other:.2f}")
    from terrazzo.compiler.driver import compile_graph
    from terrazzo.graph.ir import TensorType
    from terrazzo.graph.trace import trace

    graph, _ = trace(lambda x: tz.gelu(x), [TensorType((32, 32), tz.float32)], name="one")
    with tz.chip("cuda"):
        call = compile_graph(graph).code.call_pointers
    given = x.data_ptr(), y.data_ptr(), 0, 1
    say(f"host, us: a launch from native code alone {best(lambda: call(*given), each=200)[1]:.2f}")


def session_of(path: Path, **options: str) -> Any:
    return ort.InferenceSession(str(path), providers=[(GPU, options), "CPUExecutionProvider"])


def model(name: str, path: Path, compiled: bool) -> None:
    """One model in every way."""
    start = time.perf_counter()
    plain = session_of(path)
    cold = time.perf_counter() - start
    start = time.perf_counter()
    session_of(path)
    warm = time.perf_counter() - start
    whole = plain._session.whole
    if whole is None:
        say(f"{name}: not one executable")
        return
    say(f"{name}: {len(whole.executable.artifact.kernels)} kernels, compiled in {cold:.1f} s, "
        f"loaded in {warm:.2f} s, on the CPU: {plain._session.elsewhere or 'none'}")
    rng = np.random.default_rng(0)
    feeds = {i.name: rng.integers(0, 2, i.shape) if "int" in i.type else
             rng.standard_normal(i.shape).astype(np.float32) for i in plain.get_inputs()}
    on_cpu = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (want, *_) = on_cpu.run(None, feeds)
    tensors = {n: torch.from_numpy(a).cuda() for n, a in feeds.items()}
    for word, session in (("launches", plain), ("graph", session_of(path, enable_cuda_graph="1"))):
        (got, *_) = session.run(None, feeds)
        apart = float(np.abs(got - want).max() / np.abs(want).max())
        binding = bound(session, tensors)
        ways = {"run": lambda s=session: s.run(None, feeds),
                "tensors": lambda s=session: s.run(None, tensors),
                "bound": lambda s=session, b=binding: s.run_with_iobinding(b)}
        times = {way: best(call) for way, call in ways.items()}
        say(f"{name}, {word}: " + ", ".join(
            f"{way} {a:.0f} us (host {b:.0f})" for way, (a, b) in times.items())
            + f"; apart from the CPU by {apart:.1e}")
    known = OWN.get(name, (None, name))[1]
    module, inputs = zoo.build(known)
    module, given = module.cuda(), [t.cuda() for t in inputs.values()]
    with torch.inference_mode():
        a, b = best(lambda: module(*given))
        say(f"{name}, torch eager ({known}): {a:.0f} us (host {b:.0f})")
        if compiled:
            fast = torch.compile(module)
            a, b = best(lambda: fast(*given))
            say(f"{name}, torch.compile: {a:.0f} us (host {b:.0f})")


def bound(session: Any, tensors: dict[str, Any]) -> Any:
    binding = session.io_binding()
    for name, tensor in tensors.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.from_dlpack(tensor))
    outputs = session.run(None, tensors)
    for output, value in zip(session.get_outputs(), outputs, strict=True):
        binding.bind_ortvalue_output(output.name, ort.OrtValue.from_dlpack(value))
    return binding


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("models", nargs="*", default=["bert", "gpt2", "resnet", "vit_base"])
    told = parser.parse_args()
    end = time.perf_counter() + told.seconds
    operators()
    with tempfile.TemporaryDirectory() as folder:
        for name in told.models:
            if time.perf_counter() > end:
                say(f"{name}: no time left")
                continue
            path = Path(folder) / f"{name}.onnx"
            if name in OWN:
                path.write_bytes(OWN[name][0]().SerializeToString())
            else:
                zoo.export(name, Path(folder))
            try:
                model(name, path, told.compiled)
            except Exception as error:
                say(f"{name}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
