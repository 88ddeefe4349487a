"""Loops, branches and results of unknown size in ONNX models, against onnxruntime.

    python benchmarks/control_flow.py [--threads 2] [--seconds 2]

Little models of what keeps engines busy between kernels: a loop of 200 steps, one that ends by its
condition, a branch around an LSTM, nearest neighbours by Scan, suppression of boxes, NonZero,
Unique, TopK with a k that is computed. Both engines get the same model and inputs and run in turns;
minimums are compared, results checked first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

Feeds = dict[str, np.ndarray]
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
rng = np.random.default_rng(0)


def info(name: str, shape: Any, kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def node(op: str, inputs: str, outputs: str, **attrs: Any) -> Any:
    return helper.make_node(op, ["" if n == "_" else n for n in inputs.split()], outputs.split(),
                            **attrs)


def model(nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any],
          **weights: np.ndarray) -> bytes:
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs),
                              [numpy_helper.from_array(a, n) for n, a in weights.items()])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(made.SerializeToString())


def floats(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.normal(size=shape) * scale).astype(np.float32)


TURN = [info("i", [], INT64), info("go", [], BOOL), info("v", [1, 16])]
STEP = [node("MatMul", "v W", "p"), node("Tanh", "p", "v2")]


def counted_loop() -> tuple[bytes, Feeds]:
    body = helper.make_graph([*STEP, node("Identity", "go", "go2"), node("Identity", "v2", "y")],
                             "body", TURN,
                             [info("go2", [], BOOL), info("v2", [1, 16]), info("y", [1, 16])])
    made = model([node("Loop", "trips _ x", "z ys", body=body)], [info("x", [1, 16])],
                 [info("z", [1, 16]), info("ys", [200, 1, 16])], W=floats(16, 16, scale=0.3),
                 trips=np.array(200))
    return made, {"x": floats(1, 16)}


def conditional_loop() -> tuple[bytes, Feeds]:
    body = helper.make_graph([*STEP, node("ReduceSum", "v2", "s", keepdims=0),
                              node("Less", "s limit", "go2")], "body", TURN,
                             [info("go2", [], BOOL), info("v2", [1, 16])])
    made = model([node("Loop", "trips _ x", "z", body=body)],
                 [info("x", [1, 16]), info("trips", [], INT64)], [info("z", [1, 16])],
                 W=floats(16, 16, scale=0.3), limit=np.array(1e9, np.float32))
    return made, {"x": floats(1, 16), "trips": np.array(200)}


def branch() -> tuple[bytes, Feeds]:
    then = helper.make_graph([node("LSTM", "x W R", "Y", hidden_size=16),
                              node("ReduceMean", "Y", "a", keepdims=0, axes=[0, 1, 2, 3])],
                             "then", [], [info("a", [])])
    orelse = helper.make_graph([node("ReduceMean", "x", "b", keepdims=0, axes=[0, 1, 2])], "else",
                               [], [info("b", [])])
    made = model([node("If", "p", "z", then_branch=then, else_branch=orelse)],
                 [info("p", [], BOOL), info("x", [10, 1, 16])], [info("z", [])],
                 W=floats(1, 64, 16, scale=0.2), R=floats(1, 64, 16, scale=0.2))
    return made, {"p": np.array(True), "x": floats(10, 1, 16)}


def neighbours() -> tuple[bytes, Feeds]:
    body = helper.make_graph([node("Sub", "points row", "d"), node("Identity", "points", "points2"),
                              node("ReduceSumSquare", "d", "dist", axes=[1], keepdims=0)], "body",
                             [info("points", [500, 8]), info("row", [8])],
                             [info("points2", [500, 8]), info("dist", [500])])
    made = model([node("Scan", "known x", "unused d", body=body, num_scan_inputs=1),
                  node("TopK", "d k", "v i", axis=1, largest=0)],
                 [info("known", [500, 8]), info("x", ["n", 8])],
                 [info("v", ["n", 5]), info("i", ["n", 5], INT64)], k=np.array([5]))
    return made, {"known": floats(500, 8), "x": floats(64, 8)}


def suppression() -> tuple[bytes, Feeds]:
    made = model([node("NonMaxSuppression", "boxes scores most overlap least", "rows")],
                 [info("boxes", [1, 8400, 4]), info("scores", [1, 80, 8400])],
                 [info("rows", ["n", 3], INT64)], most=np.array([100]),
                 overlap=np.array([0.45], np.float32), least=np.array([0.25], np.float32))
    centre, size = rng.uniform(0, 640, (1, 8400, 2)), rng.uniform(4, 120, (1, 8400, 2))
    boxes = np.concatenate([centre - size / 2, centre + size / 2], -1).astype(np.float32)
    return made, {"boxes": boxes, "scores": rng.random((1, 80, 8400)).astype(np.float32)}


def nonzero() -> tuple[bytes, Feeds]:
    made = model([node("Greater", "x zero", "c"), node("NonZero", "c", "y")],
                 [info("x", [1000, 200])], [info("y", [2, "n"], INT64)], zero=np.float32(0))
    return made, {"x": floats(1000, 200)}


def unique() -> tuple[bytes, Feeds]:
    made = model([node("Unique", "x", "y i inverse counts")], [info("x", [50_000], INT64)],
                 [info(n, ["n"], INT64) for n in ("y", "i", "inverse", "counts")])
    return made, {"x": rng.integers(0, 3000, 50_000)}


def computed_top() -> tuple[bytes, Feeds]:
    made = model([node("Min", "limit k", "m"), node("TopK", "x m", "v i")],
                 [info("x", [64, 4000]), info("k", [1], INT64)],
                 [info("v", [64, "m"]), info("i", [64, "m"], INT64)], limit=np.array([1000]))
    return made, {"x": floats(64, 4000), "k": np.array([37])}


CASES: dict[str, Callable[[], tuple[bytes, Feeds]]] = {
    "Loop of 200 steps": counted_loop, "Loop until a condition, 200 steps": conditional_loop,
    "If around an LSTM": branch, "nearest neighbours by Scan": neighbours,
    "NonMaxSuppression, 8400 x 80": suppression, "NonZero of 200,000": nonzero,
    "Unique of 50,000": unique, "TopK with a computed k": computed_top,
}


def measure(case: tuple[bytes, Feeds], threads: int, seconds: float) -> tuple[float, float]:
    """Our time and onnxruntime's, in microseconds."""
    import onnxruntime

    from terrazzo import ort

    made, feeds = case
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    ours = ort.SessionOptions()
    ours.intra_op_num_threads = threads
    engines = [ort.InferenceSession(made, ours), onnxruntime.InferenceSession(
        made, options, providers=["CPUExecutionProvider"])]
    for got, want in zip(*(e.run(None, feeds) for e in engines), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    best = [float("inf")] * 2
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for i, engine in enumerate(engines):
            time.sleep(0.01)  # until threads of the other engine have stopped spinning
            for _ in range(5):
                start = time.perf_counter()
                engine.run(None, feeds)
                best[i] = min(best[i], time.perf_counter() - start)
    return best[0] * 1e6, best[1] * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    print("| model | ours, us | onnxruntime, us | ratio |\n|---|---|---|---|")
    for name, make in CASES.items():
        ours, theirs = measure(make(), given.threads, given.seconds)
        print(f"| {name} | {ours:.0f} | {theirs:.0f} | {ours / theirs:.2f} |", flush=True)


if __name__ == "__main__":
    main()
