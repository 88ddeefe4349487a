"""PyTorch's own samples of its operators (op_db), float32, on the device gcu against the CPU.

    python benchmarks/device_operators.py [--only REGEX] [--samples 2] [--gradients] [--jobs 2]

Samples are made on the device, as PyTorch's own comparison with the CPU makes them (strides, gaps
and arguments that have to lie on the CPU are theirs), and moved to the CPU to be run there again.
What is equal is counted, and which operators needed no call on the CPU: a suite that fell back for
everything would pass without testing a kernel of ours. `--samples 0` takes all of them;
`--gradients` compares those of eager autograd as well, where an operator has any.

Sparse operators, and those whose results are memory that nobody has written, are left out. The
operators run in processes of some dozens (in_pieces.py), so one that ended its process would show.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

from in_pieces import Outcome, limited, outcomes, said

TOGETHER = 40  # operators in one process
LIMIT = 1500  # seconds for one operator
TOLERANCE = 1e-4  # relative and absolute; PyTorch's own comparison with the CPU allows 1e-3
LEFT_OUT = re.compile(r"sparse|^(new_)?empty|resize_$")
# Reads memory beside that of the tensor it is given: what lies there is nobody's to say.
BESIDE = {"as_strided.partial_views"}


def operators() -> dict[str, Any]:
    """Those that are compared, by name."""
    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    found = {}
    for op in op_db:
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        if torch.float32 in op.dtypes and not LEFT_OUT.search(op.name) and name not in BESIDE:
            found[name] = op
    return found


# ---------------------------------------------------------------- one operator
def on_cpu(value: Any) -> Any:
    """The same as if it had been made on the CPU."""
    import torch

    def one(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.detach().cpu().requires_grad_(x.requires_grad)
        is_place = isinstance(x, torch.device) or (isinstance(x, str) and x.startswith("gcu"))
        return torch.device("cpu") if is_place else x

    return torch.utils._pytree.tree_map(one, value)


def called(op: Any, call: Any, gradients: bool) -> tuple[Any, list[Any]]:
    """What a call gives, and its gradients."""
    import torch

    given, args, kwargs = call
    torch.manual_seed(0)
    results = op.op(given, *args, **kwargs)
    if not gradients:
        return results, []
    leaves = torch.utils._pytree.tree_leaves
    made = [r for r in leaves(results) if isinstance(r, torch.Tensor) and r.requires_grad]
    by = [t for t in leaves(call) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not made or not by:
        return results, []
    weights = [torch.linspace(0.5, 1.5, r.numel(), dtype=torch.float64).reshape(r.shape).to(
        r.device, r.dtype) for r in made]
    found = torch.autograd.grad(made, by, weights, allow_unused=True)
    return results, [g for g in found if g is not None]


def compare(found: Any, expected: Any) -> None:
    import torch

    leaves = torch.utils._pytree.tree_leaves
    ours, theirs = leaves(found), leaves(expected)
    assert len(ours) == len(theirs), f"{len(ours)} results where the CPU has {len(theirs)}"
    for a, b in zip(ours, theirs):
        if not isinstance(b, torch.Tensor):
            places = isinstance(a, torch.device)
            assert places or a == b or (a != a and b != b), f"{a} where the CPU has {b}"
            continue
        a, b = a.detach().cpu(), b.detach()
        assert a.dtype is b.dtype and a.shape == b.shape, (
            f"{a.dtype} {tuple(a.shape)} where the CPU has {b.dtype} {tuple(b.shape)}")
        loose = b.is_floating_point() or b.is_complex()
        allowed = TOLERANCE if loose else 0
        torch.testing.assert_close(a, b, rtol=allowed, atol=allowed, equal_nan=True)


def tried(name: str, op: Any, most: int, gradients: bool) -> Outcome:
    """One operator: its samples on both, compared."""
    import torch

    gradients = gradients and op.supports_autograd
    wrong: list[str] = []
    fallbacks: Counter[str] = Counter()
    ran = alone = 0
    samples = op.sample_inputs("gcu", torch.float32, requires_grad=gradients)
    for number, sample in enumerate(islice(samples, most or None)):
        call = (sample.input, sample.args, sample.kwargs)
        try:
            expected = called(op, on_cpu(call), gradients)
        except Exception:
            continue  # not for this machine's CPU either
        ran += 1
        torch.gcu.reset_fallbacks()
        try:
            found = called(op, call, gradients)
            fallbacks.update(torch.gcu.fallbacks())
            alone += not torch.gcu.fallbacks()
            compare(found, expected)
        except Exception as error:
            wrong.append(f"sample {number}: {said(error)}")
    return {"name": name, "outcome": "ran", "samples": ran, "alone": alone, "wrong": wrong,
            "fallbacks": dict(fallbacks)}


def run(names: list[str], most: int, gradients: bool, out: Any) -> None:
    """Operators by name, a line for each."""
    warnings.simplefilter("ignore")
    from terrazzo.torch_device import register

    register()
    known = operators()
    for name in names:
        try:
            with limited(LIMIT):
                answer = tried(name, known[name], most, gradients)
        except TimeoutError as error:
            answer = {"name": name, "outcome": "failed", "why": str(error)}
        print(json.dumps(answer), file=out, flush=True)


# ---------------------------------------------------------------- all of them
def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression over names")
    parser.add_argument("--samples", type=int, default=2, help="of each operator; 0: all")
    parser.add_argument("--gradients", action="store_true", help="compare gradients as well")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write what was found for each operator here")
    parser.add_argument("--names", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.names is not None:
        with open(given.out, "w") as out:
            run(given.names, given.samples, given.gradients, out)
        return 0
    start = time.perf_counter()
    command = [sys.executable, __file__, "--samples", str(given.samples),
               *(["--gradients"] if given.gradients else [])]
    names = [name for name in operators() if re.search(given.only, name)]
    found = outcomes(command, names, given.jobs, TOGETHER, TOGETHER * LIMIT)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    return report(list(found.values()), time.perf_counter() - start)


def report(found: list[Outcome], seconds: float) -> int:
    """Print what was found; 1 where something is wrong, or nothing ran."""
    ended = [f for f in found if f["outcome"] != "ran"]
    for operator in ended:
        print(f"{operator['name']}: {operator['why']}")
    ran = [f for f in found if f["outcome"] == "ran" and f["samples"]]
    for operator in ran:
        for line in operator["wrong"][:3]:
            print(f"{operator['name']}: {line}")
    wrong = sum(len(f["wrong"]) for f in ran)
    samples, alone = sum(f["samples"] for f in ran), sum(f["alone"] for f in ran)
    ours = sum(not f["fallbacks"] for f in ran)
    print(f"{len(ran)} operators, {samples} samples, {wrong} wrong in "
          f"{sum(bool(f['wrong']) for f in ran)} operators; {len(ended)} operators did not end; "
          f"without the CPU: {ours} operators ({100 * ours / max(len(ran), 1):.0f} %), {alone} "
          f"samples ({100 * alone / max(samples, 1):.0f} %); {seconds:.0f} s")
    common = sum((Counter(f["fallbacks"]) for f in ran), Counter())
    print("on the CPU: " + ", ".join(f"{name} {n}" for name, n in common.most_common(40)))
    return int(bool(wrong) or bool(ended) or not ran)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
