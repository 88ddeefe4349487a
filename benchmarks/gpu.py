"""Kernels on an NVIDIA GPU, beside torch's, its copies, cuBLAS, cuDNN and Inductor.

    python benchmarks/gpu.py                               # all parts that have targets
    python benchmarks/gpu.py rows products --seconds 300
    python benchmarks/gpu.py --kept h200.jsonl             # goes on where the last run ended
    python benchmarks/gpu.py attention --only d128
    TZ_TUNE_DB=h200.json python benchmarks/gpu.py tune
    python benchmarks/gpu.py --simulate                    # every line, on the CPU

| part | what is measured |
|---|---|
| `rows` | gelu, softmax and norms: 40 rows beside `copy_`, eager and Inductor |
| `sums`, `transposes` | the same, along each axis |
| `products`, `fp8` | with bias and GELU, beside cuBLAS alone; 8-bit floats beside bfloat16 |
| `attention`, `gradient` | beside cuDNN's and FlashAttention-2, and decoding beside `copy_` |
| `compiling`, `calls` | cold and warm; what a call takes of the host |
| `convolutions`, `graphs`, `tune` | beside cuDNN alone; CUDA graphs; what measuring gains |

The last three have no targets, and are run when asked for.

Times are medians, peers in turns with ours. Every result is compared with float64's, or a peer's,
before it is timed. Each figure is printed with its target, and at the end how each item stands; the
process answers with 1 if a row failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

import gpu_attention  # noqa: E402
import gpu_host  # noqa: E402
import gpu_memory  # noqa: E402
import gpu_products  # noqa: E402
from gpu_machine import Machine  # noqa: E402
from gpu_report import Report, options, say  # noqa: E402

Part = Callable[[Machine, Report], None]
WITH_TARGETS: dict[str, Part] = {
    "rows": gpu_memory.rows, "sums": gpu_memory.sums, "transposes": gpu_memory.transposes,
    "products": gpu_products.products, "fp8": gpu_products.products_of_float8,
    "attention": gpu_attention.attention, "gradient": gpu_attention.attention_gradient,
    "compiling": gpu_host.compiling, "calls": gpu_host.calls}
PARTS: dict[str, Part] = {
    **WITH_TARGETS, "convolutions": gpu_products.convolutions, "graphs": gpu_host.graphs,
    "tune": gpu_host.tuned}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows of some parts, and how targets stand."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser)
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    told = parser.parse_args(arguments)
    unknown = [part for part in told.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    machine = Machine.started(told.simulate)
    say(str(machine))
    report = Report(told.seconds, told.kept, told.only)
    for name in told.parts or WITH_TARGETS:
        PARTS[name](machine, report)
    return report.conclude()


if __name__ == "__main__":
    sys.exit(main())
