"""Mask R-CNN of torchvision, picture after picture of other sizes, beside onnxruntime.

    make bench-wild BENCH_ARGS="--only NONE"          # once: it installs torchvision in .venv/wild
    PYTHONPATH=.venv/wild python benchmarks/detector.py [--threads 1] [--model FILE]

What a detector finds has a size that data tells, and so have most of its tensors. The first calls
compile; then both engines run each picture in turns. A row is a size of picture: the first call
there, and the least time of later ones. Results are compared: which boxes are found, in which
order, hangs on scores of random weights that differ by less than rounding does, so a row tells how
many of the scores agree. Suppression and pooling of regions are traced by stand-ins of ours, as
torchvision's compiled operators may not fit the torch that is installed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

SIZES = [(300, 400), (333, 500), (480, 360), (300, 300), (420, 640)]
ROUNDS = 4
OPERATORS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, "
                 "SymInt pooled_width, int sampling_ratio, bool aligned) -> Tensor",
}


def _assert_has_ops() -> None:
    """In the place of torchvision's own, which the exporter looks into."""


def _torchvision() -> Any:
    """torchvision with the operators that a detector is traced with."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in OPERATORS.items():
        library.define(name + schema)
    # What a trace records are the operators; these numbers only have to be such that it goes on.
    library.impl("nms", lambda boxes, scores, limit: scores.argsort(descending=True), "CPU")
    library.impl("roi_align", lambda x, rois, scale, height, width, ratio, aligned: x.mean() + (
        torch.zeros(len(rois), x.shape[1], height, width)), "CPU")
    import torchvision

    parts = [sys.modules[f"torchvision.{n}"] for n in ("extension", "ops.boxes", "ops.roi_align")]
    for part in parts:
        part._assert_has_ops, part._has_ops = _assert_has_ops, lambda: True
    from torchvision.ops import _register_onnx_ops

    _register_onnx_ops._register_custom_op()
    return library, torchvision


def export(path: Path) -> None:
    """Write the model, with random weights, for pictures of any size."""
    import torch

    library, torchvision = _torchvision()
    torch.manual_seed(0)
    model = torchvision.models.detection.maskrcnn_resnet50_fpn(
        weights=None, weights_backbone=None, box_score_thresh=0.011).eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, ([torch.rand(3, 300, 400)],), path, dynamo=False,
                          opset_version=16, input_names=["picture"],
                          dynamic_axes={"picture": {1: "height", 2: "width"}})
    del library


def _session(engine: Any, path: Path, threads: int) -> Any:
    options = engine.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return engine.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _timed(session: Any, picture: np.ndarray) -> tuple[float, list[Any]]:
    start = time.perf_counter()
    found = session.run(None, {"picture": picture})
    return time.perf_counter() - start, found


def _alike(ours: list[Any], theirs: list[Any]) -> float:
    """The share of scores that agree."""
    (mine, other) = (next(a for a in found if a.ndim == 1 and a.dtype == np.float32)
                     for found in (ours, theirs))
    return float(np.isclose(mine, other, atol=1e-3).mean()) if mine.shape == other.shape else 0.0


def measure(path: Path, threads: int) -> int:
    """Print a row for each size; tells how many of them gave other results."""
    import onnxruntime

    import terrazzo.ort

    mine, theirs = (_session(e, path, threads) for e in (terrazzo.ort, onnxruntime))
    rng = np.random.default_rng(0)
    pictures = [rng.random((3, *size), dtype=np.float32) for size in SIZES]
    first = [_timed(mine, p)[0] for p in pictures]
    least = np.full((len(SIZES), 2), np.inf)
    agree = [1.0] * len(SIZES)
    for _ in range(ROUNDS):
        for i, picture in enumerate(pictures):
            (b, wanted), (a, got) = _timed(theirs, picture), _timed(mine, picture)
            least[i] = np.minimum(least[i], (a, b))
            agree[i] = min(agree[i], _alike(got, wanted))
    print("| picture | first call, s | ours, s | onnxruntime, s | ratio | scores that agree |")
    print("|---|---|---|---|---|---|")
    for size, begun, (a, b), share in zip(SIZES, first, least, agree):
        print(f"| {size[0]} x {size[1]} | {begun:.1f} | {a:.2f} | {b:.2f} | {a / b:.2f} "
              f"| {share:.0%} |")
    ratios = least[:, 0] / least[:, 1]
    print(f"\ngeometric mean {np.exp(np.log(ratios).mean()):.2f}, {threads} threads")
    return sum(share < 0.9 for share in agree)


def main() -> int:
    """Export the model if need be, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path, help="a file to keep the model in")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or Path(folder) / "mask_rcnn.onnx"
        if not path.exists():
            export(path)
        return int(measure(path, args.threads) > 0)


if __name__ == "__main__":
    sys.exit(main())
