"""Runs PyTorch's own tests of Inductor with terrazzo's backend in Inductor's place.

    python benchmarks/inductor_suite.py ~/pytorch/test/inductor/test_torchinductor.py [--only REGEX]

The tests are those of a checkout, of the release that is installed; nothing is copied or written.
What they compile with is replaced by another backend of torch.compile (`--backend`, ours unless
told otherwise). Tests that look into what Inductor has made (its code, its counters, its lowerings)
say nothing about another compiler. They are found by the names that they use; and what fails is run
again with `aot_eager`, where torch's own operators run: what fails there too asks for Inductor in a
way that no name tells. Both are counted apart.

The tests run in processes of some dozens each (in_pieces.py); a line says of each that failed why.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import types
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from in_pieces import limited, outcomes, said

TOGETHER = 40  # tests in one process
LIMIT = 120  # seconds for one test
REFERENCE = "aot_eager"  # the backend of torch.compile that runs torch's own operators
# Names that a test uses only to look at what Inductor made, or at how it works inside.
INSIDE = {
    "run_and_get_code", "run_and_get_cpp_code", "run_and_get_triton_code", "run_and_get_kernels",
    "run_fw_bw_and_get_code", "get_code", "FileCheck", "metrics", "counters", "compile_fx_inner",
    "GraphLowering", "lowering", "lowerings", "V", "ir", "codecache", "PyCodeCache", "scheduler",
    "assert_alignment", "assert_size_stride", "DataTypePropagation", "OptimizationContext",
    "_check_has_dynamic_shape", "fresh_cache", "logs_to_string", "aoti_eager", "aoti_compile",
    "load_aoti_eager_cache", "fx_passes", "pattern_matcher", "add_scheduler_init_hook",
    "InductorChoices", "triton", "custom_post_pass", "post_grad_custom_pre_pass",
    "select_algorithm",
}  # fmt: skip


# ---------------------------------------------------------------- inside a process
def load(path: Path, backend: str) -> Any:
    """The module of tests, which compiles by another backend from then on."""
    import torch._inductor.compile_fx as inductor
    compiler = backend_named(backend)

    def compiled(model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return compiler(model, inputs)

    inductor.compile_fx = compiled
    fill_in(path)
    sys.argv = [str(path)]
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def backend_named(name: str) -> Any:
    """A backend of torch.compile; ours from these sources, installed or not."""
    from torch._dynamo.backends.registry import lookup_backend

    if name == "terrazzo":
        from terrazzo.torch.backend import terrazzo

        return terrazzo
    return lookup_backend(name)


def fill_in(path: Path) -> None:
    """What the tests import and this torch does not have, where the checkout is not its release."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "torch":
            assert node.module is not None
            module = importlib.import_module(node.module)
            for name in [a.name for a in node.names if not hasattr(module, a.name)]:
                try:
                    importlib.import_module(f"{node.module}.{name}")
                except ImportError:
                    setattr(module, name, not_in_this_torch)


def not_in_this_torch(*_: Any, **__: Any) -> None:
    raise unittest.SkipTest("for a torch of another day")


def names_used(code: types.CodeType) -> Iterator[str]:
    """Every name in a function, and in those inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from names_used(inner)


def looks_inside(test: Any) -> bool:
    """Whether a test is about what Inductor does, not about results."""
    return not INSIDE.isdisjoint(names_used(inspect.unwrap(test).__code__))


class Outcomes(unittest.TestResult):
    """Writes what became of each test as soon as it is known."""

    def __init__(self, out: Any):
        super().__init__()
        self.out = out

    def note(self, test: Any, outcome: str, why: str = "") -> None:
        print(json.dumps({"name": test.id().rpartition(".")[2], "outcome": outcome, "why": why}),
              file=self.out, flush=True)

    def addSuccess(self, test: Any) -> None:
        self.note(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        self.note(test, "skipped", reason)

    def addFailure(self, test: Any, err: Any) -> None:
        self.note(test, "failed", said(err[1]))

    addError = addFailure

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        self.note(test, "passed")

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.note(test, "passed")


def run(path: Path, backend: str, kind: str, tests: list[str], out: Any) -> None:
    """Run tests of a class by name."""
    cases = getattr(load(path, backend), kind)
    result = Outcomes(out)
    for name in tests:
        with limited(LIMIT):
            unittest.TestSuite([cases(name)]).run(result)


# ---------------------------------------------------------------- all of them
def listed(command: list[str]) -> dict[str, bool]:
    """The tests of a class, and whether each looks into Inductor."""
    answer = subprocess.run([*command, "--list"], capture_output=True, text=True, timeout=600)
    if answer.returncode:
        sys.exit(answer.stderr)
    found: dict[str, bool] = json.loads(answer.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--backend", default="terrazzo")
    parser.add_argument("--kind", default="CpuTests", help="the class of tests")
    parser.add_argument("--only", default="", help="a regular expression over names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write every outcome here")
    for hidden in ("--list", "--names", "--out"):
        parser.add_argument(hidden, help=argparse.SUPPRESS, **(
            {"action": "store_true"} if hidden == "--list" else
            {"nargs": "*"} if hidden == "--names" else {}))
    given = parser.parse_args()
    if given.list:
        cases = getattr(load(given.path, given.backend), given.kind)
        print(json.dumps({n: looks_inside(getattr(cases, n)) for n in dir(cases)
                          if n.startswith("test_")}))
        return
    if given.names is not None:
        with open(given.out, "w") as out:
            run(given.path, given.backend, given.kind, given.names, out)
        return
    report(given)


def report(given: argparse.Namespace) -> None:
    """Run the tests that were chosen, and print what became of them."""
    command = [sys.executable, __file__, str(given.path), "--kind", given.kind, "--backend"]
    inside = {n: i for n, i in listed([*command, given.backend]).items()
              if re.search(given.only, n)}
    names = [n for n, i in inside.items() if not i]
    found = outcomes([*command, given.backend], names, given.jobs, TOGETHER, 60 + 4 * LIMIT)
    failed = [n for n in names if found[n]["outcome"] == "failed"]
    # What fails with torch's own operators in eager mode is not about results either.
    eager = outcomes([*command, REFERENCE], failed, given.jobs, TOGETHER, 60 + 4 * LIMIT)
    for name in failed:
        if eager[name]["outcome"] != "passed":
            found[name]["outcome"] = "about Inductor"
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    count = Counter(r["outcome"] for r in found.values())
    for outcome in ("about Inductor", "failed"):
        for name in names:
            if found[name]["outcome"] == outcome:
                print(f"{outcome}: {name}: {found[name]['why']}")
    ran = count["passed"] + count["failed"]
    print(f"{len(inside)} tests: {sum(inside.values())} look into Inductor by name, "
          f"{count['about Inductor']} more fail with {REFERENCE} too, {count['skipped']} skipped "
          f"themselves; of {ran} others {count['passed']} passed "
          f"({100 * count['passed'] / max(ran, 1):.1f} %)")


if __name__ == "__main__":
    main()
