"""All that is to be shown on a GPU, by one command that may be given again until it is done.

    python benchmarks/gpu_all.py [--folder build/gpu] [--seconds 540] [--simulate]

Kernels, compile times and calls (`gpu.py`), PyTorch's samples of its operators in float32 and
bfloat16 (`torch_operators.py`), models (`gpu_models.py`), and last what takes longest, models by
`max-autotune`. What was measured is kept in the folder; after so many seconds nothing new is begun,
and the next command goes on. Each ends with how its targets stand. The process answers with 1 if
something failed, and says what.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
QUICK_WAYS = "ours,ort,eager,default"
LEAST = 20  # seconds without which a step is not begun


def steps(folder: Path, simulated: bool) -> dict[str, list[str]]:
    """The command of each, but for its seconds."""
    told = ["--simulate"] if simulated else []
    place = "simulated" if simulated else "cuda"
    models = ["gpu_models.py", *told, "--kept", f"{folder}/models.jsonl"]
    operators = {
        f"operators, {kind}": ["torch_operators.py", "--place", place, "--dtype", kind, "--samples",
                               "2", "--kept", f"{folder}/operators_{kind}.jsonl"]
        for kind in ("float32", "bfloat16")}
    jobs = [] if simulated else ["--jobs", str(os.cpu_count() or 1)]  # most of it is compiling
    return {"kernels": ["gpu.py", *told, "--kept", f"{folder}/kernels.jsonl"],
            "models": [*models, *jobs, "--ways", QUICK_WAYS], **operators,
            "models by max-autotune": models}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps one after the other, within their time."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/gpu"))
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--simulate", action="store_true")
    told = parser.parse_args(arguments)
    told.folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + told.seconds
    outcomes = {}
    for name, (script, *rest) in steps(told.folder, told.simulate).items():
        left = end - time.monotonic()
        if left < LEAST:
            outcomes[name] = "not begun, no time left"
            continue
        print(f"== {name}", flush=True)
        done = subprocess.run([sys.executable, str(HERE / script), *rest, "--seconds",
                               f"{left:.0f}"], check=False)
        outcomes[name] = "ended well" if done.returncode == 0 else "something failed"
    print("\n" + "\n".join(f"{name}: {outcome}" for name, outcome in outcomes.items()))
    return int("something failed" in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
