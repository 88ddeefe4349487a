"""PyTorch's own operator samples through `torch.compile(backend="terrazzo")`, beside eager.

    python benchmarks/torch_operators.py [--only REGEX] [--dtype bfloat16] [--samples 6] [--write]
    python benchmarks/torch_operators.py --place cuda --samples 2 --seconds 500 --kept a.jsonl

Every operator of torch.testing's op_db is compiled with fullgraph=True for its own samples, forward
and (float types) backward. A sample is right if it is within torch's own tolerance of eager, or its
error against float64 is like eager's own (`errs_like_eager`). An operator counts as ours if no
sample ran a call of torch's in between, as told by the backend; samples that torch.compile cannot
run with torch's own operators either (`aot_eager`) are told apart, and an operator that has no
others is not ours. `--samples 0` takes all of them; else that many, spread evenly. `--write` writes
docs/torch-operators.md.

`--place cuda` runs ours on a GPU, `--place simulated` its kernels on the CPU, and torch's on the
CPU as ever; where that draws other random numbers, torch's own on the GPU counts too. After
`--seconds` no other operator is begun, and those left are named: with the same `--kept` file the
next run goes on with them. Away from the CPU the process answers with 1 if something is wrong.

Left out: sparse and quantised operators, factorisations of linear algebra, operators without
samples of the type, and those whose results are memory that nobody has written (`empty`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

from closeness import distance, is_close, is_right, parts
from in_pieces import Outcome, limited, outcomes, said
from places import CPU, NAMES, Place

PAGE = Path(__file__).parent.parent / "docs" / "torch-operators.md"
TOGETHER = 12  # parts in one process
AT_ONCE = 60  # samples of an operator in one part
LIMIT = 240  # seconds for one part
DRAWS = 9  # of inputs near a sample, where one draw tells nothing
FACTORISATIONS = re.compile(
    r"cholesky|\bqr\b|linalg\.(eig|svd|lu|ldl|inv|solve|lstsq|det|slogdet|householder|matrix_rank"
    r"|pinv|cond|tensorinv|tensorsolve)|^(svd|lu|eig|geqrf|ormqr|pinverse|logdet|pca_lowrank"
    r"|svd_lowrank|symeig|triangular_solve|lobpcg)|ldl_|lu_|matrix_exp|orgqr|householder")
UNWRITTEN = re.compile(r"empty|^new_empty|resize_")
SPARSE = re.compile(r"sparse|to_sparse|_jagged|nested|quantiz")


# ---------------------------------------------------------------- one operator
def operators(dtype: Any) -> dict[str, Any]:
    """Those that are counted, by name."""
    _without_expecttest()
    from torch.testing._internal import common_methods_invocations as torchs

    # Samples of random operators seed torch inside of what is compiled, which dynamo refuses for
    # every backend; `run` seeds before the call.
    torchs.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    found = {}
    for op in torchs.op_db:
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        if dtype in op.supported_dtypes("cpu") and not (
                FACTORISATIONS.search(op.name) or UNWRITTEN.search(op.name)
                or SPARSE.search(op.name)):
            found[name] = op
    return found


def _without_expecttest() -> None:
    """torch's tests are built on a package that its samples do not need."""
    try:
        import expecttest  # noqa: F401
    except ImportError:
        made: Any = ModuleType("expecttest")
        made.TestCase = unittest.TestCase
        sys.modules["expecttest"] = made


def chosen(samples: list[Any], count: int) -> list[Any]:
    """So many of them, spread evenly; all where count is zero."""
    if not count or len(samples) <= count:
        return samples
    return [samples[i * len(samples) // count] for i in range(count)]


def leaves(tree: Any) -> list[Any]:
    import torch

    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def gradients(results: list[Any], given: list[Any], by_value: bool) -> list[Any]:
    """Of a weighted sum of the results, by what was given; weights hang on places or on values."""
    import torch

    smooth = [r for r in results if r.requires_grad]
    if not smooth or not given:
        return []
    weights = [r.detach().sigmoid() + 0.5 if by_value else
               torch.linspace(0.5, 1.5, r.numel(), dtype=torch.float64).reshape(r.shape).to(
                   r.device, r.dtype) for r in smooth]
    return [g for g in torch.autograd.grad(smooth, given, weights, allow_unused=True)
            if g is not None]


def run(function: Any, sample: Any, backward: bool, dtype: Any, place: Place = CPU
        ) -> tuple[list[Any], list[Any]]:
    """Results and gradients for a fresh copy of a sample, in a type, at a place."""
    import torch

    def fresh(value: Any) -> Any:
        if value is sample.kind:  # what makes tensors is told their type
            return dtype
        if not isinstance(value, torch.Tensor):
            return place.given(value)
        made = place.given(value.detach().clone())
        if made.is_floating_point():
            made = made.to(dtype) if value.dtype is sample.kind else made
            made.requires_grad_(backward and value.requires_grad)
        return made

    args, kwargs = torch.utils._pytree.tree_map(fresh, (sample.args, sample.kwargs))
    torch.manual_seed(0)
    results = leaves(function(*args, **kwargs))
    given = [t for t in leaves((args, kwargs)) if t.requires_grad]
    found = gradients(results, given, sample.any_order) if backward else []
    if sample.any_order:
        results = _without_order(results, args, kwargs, sample.axis_at)
    return place.back(results), place.back(found)


class Sample:
    """Arguments of a call, and the type that they are in."""

    def __init__(self, sample: Any, kind: Any, name: str):
        self.args, self.kwargs, self.kind = (sample.input, *sample.args), sample.kwargs, kind
        # Which of two equal elements comes first is only told where stable=True asks for it.
        self.any_order = name in ("sort", "argsort", "topk") and not sample.kwargs.get("stable")
        self.axis_at = 2 if name == "topk" else 1  # which argument says along what is sorted

    def near(self, draw: int) -> Sample:
        """The same with numbers a little larger or smaller, drawn by chance."""
        import torch

        chance = torch.Generator().manual_seed(draw)

        def moved(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or x.dtype is not self.kind:
                return x
            factor = 1 + (torch.rand(x.shape, generator=chance, dtype=torch.float64) - 0.5) / 32
            return (x.detach() * factor).to(self.kind).requires_grad_(x.requires_grad)

        other = copy(self)
        other.args, other.kwargs = torch.utils._pytree.tree_map(moved, (self.args, self.kwargs))
        return other


def _without_order(results: list[Any], args: Any, kwargs: Any, at: int) -> list[Any]:
    """Results of sorting, with what is at indices in their place, and whether each is another."""
    x, places = args[0].detach(), results[-1]
    dim = kwargs.get("dim", args[at] if len(args) > at else -1)
    if x.ndim == 0:
        return results
    return [*results[:-1], x.gather(dim, places), places.sort(dim).values.diff(dim=dim) > 0]


def errs_like_eager(compiled: Any, function: Any, sample: Sample, backward: bool, dtype: Any,
                    part: int, place: Place = CPU) -> bool:
    """Whether errors against float64 are no larger than twice eager's, over draws near a sample.

    torch's tolerance is of each element. One that is a small difference of large terms has the
    rounding of those, in eager as here, and which of two orders of summing errs more in the worst
    element of one draw is chance: over 25 draws of gradients of conv3d, conv_transpose3d, stft and
    attention the ratio of the largest errors is from 0.1 to 6.5, with medians from 0.3 to 1.7.
    """
    import torch

    ratios: list[list[float]] = []
    for draw in range(DRAWS):
        near = sample.near(draw)
        ours, theirs, exact = (run(f, near, backward, kind, at)[part] for f, kind, at in (
            (compiled, dtype, place), (function, dtype, CPU), (function, torch.float64, CPU)))
        errors = [[distance(parts(v), parts(e).double()) for v, e in zip(found, exact)]
                  for found in (ours, theirs)]
        ratios.append([0.0 if is_close(x, y) else a / max(b, 1e-12)
                       for x, y, a, b in zip(ours, theirs, *errors, strict=True)])
    return all(median(each) <= 2 and max(each) <= 16 for each in zip(*ratios, strict=True))


def measure(name: str, op: Any, dtype: Any, count: int, part: slice = slice(None),
            place: Place = CPU) -> Outcome:
    """Every chosen sample of an operator, or a part of them, compiled and in eager."""
    row = {"name": name, **empty_row()}
    for sample in chosen(samples_of(op, dtype), count)[part]:
        backward = any(t.requires_grad for t in leaves((sample.args, sample.kwargs)))
        try:
            eager = run(op.get_op(), sample, backward, dtype)
        except Exception:
            continue  # a sample that eager itself refuses
        row["samples"] += 1
        row["backward"] += bool(eager[1])
        try:
            why = compared(op.get_op(), sample, backward, dtype, eager, row["torch"], place)
        except Uncaptured as refused:
            row["uncaptured"].append(said(refused.error))
            continue
        if why:
            row["wrong"].append(why)
    return row


class Uncaptured(Exception):
    """torch.compile itself refuses a call, or fails in it."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


def empty_row() -> Outcome:
    return {"samples": 0, "backward": 0, "wrong": [], "torch": [], "uncaptured": []}


def samples_of(op: Any, dtype: Any) -> list[Sample]:
    smooth = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    return [Sample(s, dtype, op.name)
            for s in op.sample_inputs("cpu", dtype, requires_grad=smooth)]


def compared(function: Any, sample: Sample, backward: bool, dtype: Any, eager: Any,
             in_torch: list[str], place: Place = CPU) -> str:
    """How a compiled call differs from eager; what torch ran in between is added to a list."""
    import torch

    from terrazzo.torch.backend import terrazzo

    torch._dynamo.reset()
    with watched(in_torch):
        try:
            compiled = torch.compile(partial(_call, function), backend=terrazzo, fullgraph=True)
            found = run(compiled, sample, backward, dtype, place)
        except Exception as error:
            if fails_in_torch(function, sample, backward, dtype, place):
                raise Uncaptured(error) from error
            return said(error)
    for part, what in enumerate(("", "gradients: ")):
        exact = partial(exactly, function, sample, backward, part)
        why = is_right(found[part], eager[part], exact)
        if why and not _is_chance(found[part], eager[part], partial(
                errs_like_eager, compiled, function, sample, backward, dtype, part, place)) and (
                not _is_torchs_there(found[part], function, sample, backward, dtype, part, place)):
            return what + why
    return ""


def _is_chance(found: list[Any], eager: list[Any], further: Callable[[], bool]) -> bool:
    """Whether results in the same form differ by rounding alone, as further draws tell."""
    same = len(found) == len(eager) and all(
        a.shape == b.shape and a.dtype is b.dtype and (a.is_floating_point() or a.is_complex()
                                                       or a.equal(b))
        for a, b in zip(found, eager))
    try:
        return same and further()
    except Exception:
        return False


def _is_torchs_there(found: list[Any], function: Any, sample: Sample, backward: bool, dtype: Any,
                     part: int, place: Place) -> bool:
    """Whether results are those of torch on the same device, which draws its own numbers."""
    if place.device == "cpu":
        return False
    return not is_right(found, run(function, sample, backward, dtype, place)[part], lambda: None)


def fails_in_torch(function: Any, sample: Sample, backward: bool, dtype: Any, place: Place = CPU
                   ) -> bool:
    """Whether torch.compile refuses a sample for the backend that runs torch's own operators."""
    import torch

    torch._dynamo.reset()
    try:
        run(torch.compile(partial(_call, function), backend="aot_eager", fullgraph=True), sample,
            backward, dtype, place)
    except Exception:
        return True
    return False


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def exactly(function: Any, sample: Any, backward: bool, part: int) -> list[Any] | None:
    """What float64 says; nothing where an operator does not take it."""
    import torch

    try:
        return run(function, sample, backward, torch.float64)[part]
    except Exception:
        return None


@contextmanager
def watched(into: list[str]) -> Iterator[None]:
    """Collects torch's operators that run between pieces of ours, and why."""
    from terrazzo.torch.backend import WATCHERS

    def watch(program: Any) -> None:
        into.extend(dict.fromkeys(f"{r.operator}: {r.why}" for r in program.reasons))

    WATCHERS.append(watch)
    try:
        yield
    finally:
        WATCHERS.remove(watch)


# ---------------------------------------------------------------- all of them
def status(row: Outcome) -> str:
    if row["wrong"]:
        return "wrong"
    if not row["samples"]:
        return "no sample"
    if len(row["uncaptured"]) == row["samples"]:
        return "not captured"
    return "in torch" if row["torch"] else "ours"


def table(rows: dict[str, Outcome]) -> Iterator[str]:
    """The page's lines."""
    count = Counter(map(status, rows.values()))
    ran = len(rows) - count["no sample"]
    captured = ran - count["not captured"]
    yield (f"{ran} operators, {sum(r['samples'] for r in rows.values())} samples: "
           f"{count['ours']} run in our code alone ({100 * count['ours'] / max(ran, 1):.1f} % of "
           f"all, {100 * count['ours'] / max(captured, 1):.1f} % of the {captured} that "
           f"torch.compile can capture), {count['in torch']} with calls of torch's in between, "
           f"{count['not captured']} are refused by torch.compile with any backend, "
           f"{count['wrong']} differ from eager or are refused by ours.")
    yield ""
    yield "| operator | samples | with gradients | runs | remarks |"
    yield "|---|---|---|---|---|"
    for name, row in rows.items():
        if status(row) == "no sample":
            continue
        remarks = row["wrong"] or row["torch"] or row["uncaptured"]
        text = "; ".join(dict.fromkeys(remarks))[:200].replace("|", "/").replace("\n", " ")
        yield (f"| {name} | {row['samples']} | {row['backward']} | {status(row)} | "
               f"{text} |")


def units(known: dict[str, Any], dtype: Any, count: int) -> list[str]:
    """Parts of operators that take about as long: "name@first:stop", the longest first."""
    found = []
    for name, op in known.items():
        total = len(chosen(samples_of(op, dtype), count))
        found += [(min(total - i, AT_ONCE), f"{name}@{i}:{i + AT_ONCE}")
                  for i in range(0, max(total, 1), AT_ONCE)]
    return [unit for _, unit in sorted(found, key=lambda part: -part[0])]


def measured(unit: str, known: dict[str, Any], dtype: Any, count: int, place: Place) -> Outcome:
    name, _, part = unit.rpartition("@")
    try:
        with limited(LIMIT):
            row = measure(name, known[name], dtype, count, slice(*map(int, part.split(":"))), place)
    except Exception as error:
        row = {"outcome": "failed", "why": said(error)}
    return {**row, "name": unit}


def kept(file: Path | None) -> dict[str, Outcome]:
    """What became of parts in earlier runs."""
    if file is None or not file.exists():
        return {}
    return {row["name"]: row for row in map(json.loads, file.read_text().splitlines())}


def all_of(known: dict[str, Any], dtype: Any, given: argparse.Namespace) -> dict[str, Outcome]:
    """What became of each operator, all its parts together."""
    command = [sys.executable, __file__, "--dtype", given.dtype, "--samples", str(given.samples),
               "--place", given.place]
    parts = units(known, dtype, given.samples)
    before = kept(given.kept)

    def keep(parts: Sequence[Outcome]) -> None:
        if given.kept:
            with given.kept.open("a") as file:
                file.writelines(json.dumps(part) + "\n" for part in parts if "why" not in part)

    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TZ_CACHE_DIR": cache, "TZ_THREADS": "1"}  # processes are enough
        os.environ |= Place(given.place).environment
        found = outcomes(command, [p for p in parts if p not in before], given.jobs, TOGETHER,
                         LIMIT * 4, end=time.monotonic() + given.seconds, keep=keep)
    found |= {part: before[part] for part in parts if part in before}
    left = sorted({unit.rpartition("@")[0] for unit in parts if unit not in found})
    if left:
        print(f"no time was left for all of {len(left)} operators: {' '.join(left)}")
    rows: dict[str, Outcome] = {n: {"name": n, **empty_row()} for n in known}
    for unit, part in found.items():
        row = rows[unit.rpartition("@")[0]]
        for key in empty_row():
            row[key] += part.get(key, type(row[key])())
        if "why" in part:
            row["wrong"].append(part["why"])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression over names")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--place", default="cpu", choices=NAMES)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--kept", type=Path, help="a file of what was found: it is not run again")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--names", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    given = parser.parse_args()
    import torch

    warnings.simplefilter("ignore")
    dtype = getattr(torch, given.dtype)
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    torch._dynamo.config.reorderable_logging_functions.add(warnings.warn)
    known = operators(dtype)
    if given.names is not None:
        torch.set_num_threads(1)
        with open(given.out, "w") as out:
            for unit in given.names:
                print(json.dumps(measured(unit, known, dtype, given.samples, Place(given.place))),
                      file=out, flush=True)
        return 0
    wanted = {n: op for n, op in known.items() if re.search(given.only, n)}
    rows = all_of(wanted, dtype, given)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    text = "\n".join(table(rows))
    print(text if given.place == "cpu" else "\n".join(
        line for line in text.splitlines() if line[:1] != "|" or "| wrong |" in line))
    if given.write:
        page = PAGE.read_text()
        mark = f"<!-- {given.dtype}: begin -->", f"<!-- {given.dtype}: end -->"
        before, after = page.split(mark[0])[0], page.split(mark[1])[1]
        PAGE.write_text(f"{before}{mark[0]}\n{text}\n{mark[1]}{after}")
    nothing = not any(row["samples"] for row in rows.values())
    return int(given.place != "cpu" and (nothing or "wrong" in map(status, rows.values())))


if __name__ == "__main__":
    sys.exit(main())
