"""Exported models in a process without torch: how soon they are ready, and what memory they take.

    python benchmarks/exported.py [--only REGEX] [--runs 3] [--folder KEPT]

BERT-base (128 tokens) and ResNet-50 of transformers, random weights, batch 1. Each way of running
one has processes of its own:

- ours, first: `tz.load` of what `tz.torch.export` wrote, with an empty cache
- ours: the same, where a process before has left what calls native code in the cache
- torch.export: `torch.export.load` of a file of `torch.export.save`; torch alone is imported
- transformers: `from_pretrained` of a folder of safetensors

Ready is the time from the start of the process until the model can be called, the interpreter and
imports included: wall clock, and that of its threads on processors, which others' work disturbs
less. Python's bytecode is there, as after an installation.
Memory is the peak of resident memory after three calls (`VmHWM`): libraries and the pages of mapped
files that the process has touched count, what the system keeps of files for itself does not.
The error is to eager mode's result, over its largest value. The least of all runs is told.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MODELS = ("bert", "resnet50")
WAYS = ("ours, first", "ours", "torch.export", "transformers")
CALLS = 3
LIMIT = 600  # seconds for a process
Run = Callable[[], Any]


# ---------------------------------------------------------------- files
def write(name: str, folder: Path) -> None:
    """A model in the form of each way, an input, and eager mode's result."""
    import torch
    from torch_models import INFERENCE, first

    import terrazzo as tz

    torch.manual_seed(0)
    model, inputs = INFERENCE[name](1)
    model.eval()
    model.config.return_dict = False  # a tuple of tensors, which every exporter takes
    ((key, x),) = inputs.items()
    with torch.no_grad():
        np.savez(folder / f"{name}.npz", x=x.numpy(), y=first(model(x)).numpy())
        torch.export.save(torch.export.export(model, (x,), strict=False), folder / f"{name}.pt2")
    tz.torch.export(model, (x,), folder / f"{name}.tzx", input_names=[key])
    model.save_pretrained(folder / name)


# ---------------------------------------------------------------- one process
def ours(path: Path, x: np.ndarray) -> Run:
    import terrazzo as tz

    model = tz.load(path.with_suffix(".tzx"))
    return lambda: model(x)


def torch_export(path: Path, x: np.ndarray) -> Run:
    import torch

    model, tensor = torch.export.load(path.with_suffix(".pt2")).module(), torch.from_numpy(x)
    return lambda: _numbers(model, tensor)


def transformers(path: Path, x: np.ndarray) -> Run:
    import torch
    from transformers import AutoModel

    model, tensor = AutoModel.from_pretrained(path).eval(), torch.from_numpy(x)
    return lambda: _numbers(model, tensor)


def _numbers(model: Any, x: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(x)[0].numpy()


def measure(name: str, way: str, folder: Path, began: float) -> dict[str, float]:
    """What one process finds, which began at a time of the clock."""
    load = {"torch.export": torch_export, "transformers": transformers}.get(way, ours)
    with np.load(folder / f"{name}.npz") as file:
        x, wanted = file["x"], file["y"]
    call = load(folder / name, x)
    ready = time.time() - began, time.process_time()
    found = [call() for _ in range(CALLS)][-1]
    found = found[0] if isinstance(found, tuple) else found
    if ("torch" in sys.modules) != (load is not ours):
        raise SystemExit(f"torch is imported where it should not be, or the reverse: {way}")
    return {"ready_s": ready[0], "processor_s": ready[1], "peak_mb": peak_mb(),
            "error": float(np.abs(found - wanted).max() / np.abs(wanted).max())}


def peak_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


# ---------------------------------------------------------------- all of them
def child(folder: Path, name: str, way: str, cache: str) -> dict[str, float]:
    variables = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, __file__, "--one", name, "--way", way, "--folder", str(folder),
         "--began", str(time.time())],
        capture_output=True, text=True, timeout=LIMIT,
        env={**variables, "TZ_CACHE_DIR": cache, "PYTHONPYCACHEPREFIX": str(folder / "bytecode")})
    if done.returncode:
        raise SystemExit(f"{name}, {way}: {done.stderr.strip()[-500:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(folder: Path, name: str, way: str, runs: int) -> dict[str, float]:
    """The least of some processes."""
    found = []
    with tempfile.TemporaryDirectory() as kept:
        child(folder, name, way, kept)
        for _ in range(runs):
            with tempfile.TemporaryDirectory() as empty:
                found.append(child(folder, name, way, kept if way == "ours" else empty))
    return {key: min(one[key] for one in found) for key in found[0]}


def report(folder: Path, only: str, runs: int) -> None:
    print("| model | runs by | ready, s | on processors, s | memory, MB | of the least "
          "with torch | error |\n|" + "---|" * 7)
    for name in MODELS:
        if not re.search(only, name):
            continue
        if not (folder / name).exists():
            write(name, folder)
        rows = {way: row(folder, name, way, runs) for way in WAYS}
        least = min(rows[way]["peak_mb"] for way in ("torch.export", "transformers"))
        for way, r in rows.items():
            print(f"| {name} | {way} | {r['ready_s']:.2f} | {r['processor_s']:.2f} | "
                  f"{r['peak_mb']:.0f} | {r['peak_mb'] / least:.2f} | {r['error']:.0e} |",
                  flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression over names")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where files are kept, and found again")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.one:
        print(json.dumps(measure(given.one, given.way, given.folder, given.began)))
    elif given.folder:
        given.folder.mkdir(parents=True, exist_ok=True)
        report(given.folder, given.only, given.runs)
    else:
        with tempfile.TemporaryDirectory() as folder:
            report(Path(folder), given.only, given.runs)


if __name__ == "__main__":
    main()
