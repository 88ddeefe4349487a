"""PyTorch's own samples of its operators (op_db), float32, on the device against the CPU.

    python tests/torch_device/operator_samples.py [--only NAME] [--samples 5]

Counts what is equal, and which operators needed no call on the CPU: a suite that fell back for
everything would pass without testing a kernel of ours.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

LEFT_OUT = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty",
                      "new_empty_strided"})  # what they give is not said


@dataclass
class Found:
    """What was found for one operator."""

    name: str
    samples: int = 0
    wrong: list[str] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)


def operators(only: str = "") -> Iterator[Any]:
    for op in op_db:
        if torch.float32 in op.dtypes and op.name not in LEFT_OUT and only in op.name:
            yield op


def moved(value: Any, where: str) -> Any:
    def one(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            # Its own strides and base, as some samples are about those.
            return x.detach().to(where).requires_grad_(x.requires_grad)
        return torch.device(where) if isinstance(x, torch.device) else x

    return tree_map(one, value)


def called(op: Any, sample: Any, where: str) -> Any:
    torch.manual_seed(0)
    given, args, kwargs = moved((sample.input, sample.args, sample.kwargs), where)
    if "device" in kwargs or op.name in FACTORIES:
        kwargs = {**kwargs, "device": where}
    return op.op(given, *args, **kwargs)


FACTORIES = frozenset({"arange", "linspace", "logspace", "ones", "zeros", "full", "eye", "randn",
                       "rand", "scalar_tensor", "tril_indices", "triu_indices"})


def tried(op: Any, most: int) -> Found:
    """One operator: its samples on both, compared."""
    found = Found(op.formatted_name if hasattr(op, "formatted_name") else op.name)
    torch.gcu.reset_fallbacks()
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=False)
    for number, sample in enumerate(islice(samples, most or None)):
        try:
            expected = called(op, sample, "cpu")
        except Exception:
            continue  # not for this machine's CPU either
        found.samples += 1
        try:
            compare(called(op, sample, "gcu"), expected)
        except Exception as error:
            found.wrong.append(f"sample {number}: {type(error).__name__}: {error}")
    found.fallbacks.update(torch.gcu.fallbacks())
    return found


def compare(found: Any, expected: Any) -> None:
    ours, theirs = tree_flatten(found)[0], tree_flatten(expected)[0]
    assert len(ours) == len(theirs), f"{len(ours)} results where the CPU has {len(theirs)}"
    for a, b in zip(ours, theirs):
        if not isinstance(b, torch.Tensor):
            assert a == b or (a != a and b != b), f"{a} where the CPU has {b}"
            continue
        assert a.device.type == "gcu" or b.numel() == 0, f"a result on {a.device}"
        a = a.detach().cpu()
        assert a.dtype is b.dtype and a.shape == b.shape
        if b.is_floating_point() or b.is_complex():
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)
        else:
            assert torch.equal(a, b), "whole numbers differ"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="operators whose name has this in it")
    parser.add_argument("--samples", type=int, default=5, help="of each operator; 0: all")
    options = parser.parse_args(argv)
    from terrazzo.torch_device import register

    register()
    start, everything = time.perf_counter(), []
    for op in operators(options.only):
        found = tried(op, options.samples)
        everything.append(found)
        for line in found.wrong[:2]:
            print(f"{found.name}: {line[:300]}", flush=True)
        if options.only:
            print(found.name, found.samples, dict(found.fallbacks))
    whole = [f for f in everything if f.samples]
    ours = [f for f in whole if not f.fallbacks]
    wrong = sum(len(f.wrong) for f in whole)
    print(f"{len(whole)} operators, {sum(f.samples for f in whole)} samples, {wrong} wrong; "
          f"{len(ours)} operators ({100 * len(ours) / max(len(whole), 1):.0f} %) without the CPU; "
          f"{time.perf_counter() - start:.0f} s")
    common = sum((f.fallbacks for f in whole), Counter())
    print("on the CPU: " + ", ".join(f"{name} {n}" for name, n in common.most_common(40)))
    return int(bool(wrong) or not whole)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
