"""Runs the tests of torch's own reference device (openreg) for the device gcu.

    python benchmarks/openreg_suite.py ~/pytorch [--file 'test_m*'] [--only REGEX]

openreg shows how a device is added to PyTorch from outside; its tests lie in a checkout (`TESTS`).
They are read from there, and the name of the device is another one in what is run: in names,
attributes, texts, and in an archive that one of them holds. Nothing is copied or written. There are
two devices, as openreg has. Tests that openreg itself skips because it lacks something are run.

`LEFT_OUT` has the tests that are not about what a device does for its users, and why. The tests of
a file run in one process (in_pieces.py); a line says of each that failed why.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import types
import unittest
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from in_pieces import limited, outcomes, said

TESTS = Path("test/cpp_extensions/open_registration_extension/torch_openreg/tests")
LIMIT = 120  # seconds for one test
NAMES = {"openreg": "gcu", "OpenReg": "gcu", "OPENREG": "GCU"}

_ITS_OPERATORS = "calls an operator that openreg alone registers"
_ITS_CHOICE = ("asks that attention be one operator of the device, as openreg chooses; on gcu it "
               "is taken apart, so that compilers see into it")
LEFT_OUT = {
    "test_ops.TestAutogradFunction.test_compile_autograd_function_returns_self": _ITS_OPERATORS,
    "test_ops.TestAutogradFunction.test_compile_autograd_function_aliasing": _ITS_OPERATORS,
    "test_ops.TestCustomAutogradFunctions.test_custom_autograd_fn_returns_self_basic":
        _ITS_OPERATORS,
    "test_ops.TestCustomAutogradFunctions.test_custom_autograd_fn_aliasing_basic": _ITS_OPERATORS,
    "test_ops.TestCustomAutogradFunctions.test_custom_autograd_fn_returns_self_no_grad":
        _ITS_OPERATORS,
    "test_ops.TestCustomAutogradFunctions.test_custom_autograd_fn_aliasing_no_grad":
        _ITS_OPERATORS,
    "test_ops.TestSTUBExtended.test_custom_abs": _ITS_OPERATORS,
    "test_ops.TestSDPA.test_fused_sdp_choice_privateuseone": _ITS_CHOICE,
    "test_ops.TestSDPAExtended.test_fused_sdp_choice_with_mask": _ITS_CHOICE,
    "test_ops.TestSDPA.test_scaled_dot_product_fused_attention_overrideable_backward": _ITS_CHOICE,
    "test_ops.TestFactory.test_empty":
        "names dimensions, which torch 2.13 no longer has",
    "test_utils.TestDLPack.test_dlpack_different_dtypes":
        "draws whole numbers from randn, which torch does on no device",
    "test_event.TestEvent.test_event_elapsed_time":
        "asks for time to pass between events without work: on a modelled clock none does",
    "test_rng.TestRNG.test_rng_state_consistency":
        "asks that devices with one seed, which its class sets, have different states",
    "test_testing.TestDistributedBackendHookGCU.test_distributed_backend_for_openreg_gcu":
        "asks for openreg's own backend of torch.distributed by its name",
}

OTHER_FILES = {"test_distributed": "is about collectives that do nothing, of openreg's own backend"}


# ---------------------------------------------------------------- inside a process
def renamed(text: str) -> str:
    """A text that speaks of gcu in place of openreg."""
    for theirs, ours in NAMES.items():
        text = text.replace(theirs, ours)
    return text


def renamed_archive(data: bytes) -> bytes:
    """An archive of torch.save with the device renamed; its pickle says how long each text is."""
    def text(found: re.Match[bytes]) -> bytes:
        name = renamed(found[1].decode()).encode()
        return b"X" + len(name).to_bytes(4, "little") + name

    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(made, "w") as target:
        for entry in source.namelist():
            inside = source.read(entry)
            target.writestr(entry, re.sub(rb"X.\0\0\0(openreg:\d)", text, inside, flags=re.DOTALL))
    return made.getvalue()


class Renaming(ast.NodeTransformer):
    """Every name of the other device in a module becomes ours; its import, and its skips, go."""

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, str):
            node.value = renamed(node.value)
        elif isinstance(node.value, bytes) and b"openreg" in node.value:
            node.value = renamed_archive(node.value)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        node.attr = renamed(node.attr)
        return self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> Any:
        node.names = [a for a in node.names if a.name != "torch_openreg"]
        return node if node.names else None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.decorator_list = [d for d in node.decorator_list if not is_skipped(d)]
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        node.decorator_list = [d for d in node.decorator_list if not is_skipped(d)]
        return self.generic_visit(node)


def is_skipped(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).startswith("unittest.skip(")


def load(path: Path) -> types.ModuleType:
    """A module of tests, for our device."""
    import torch

    from terrazzo.torch_device import register

    register()
    tree = ast.fix_missing_locations(Renaming().visit(ast.parse(path.read_text())))
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    sys.argv = [str(path)]
    assert torch.gcu.is_available()
    exec(compile(tree, path, "exec"), module.__dict__)
    return module


def tests_of(module: types.ModuleType) -> Iterator[unittest.TestCase]:
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, unittest.TestCase) and (
                kind.__module__ == module.__name__):
            yield from (kind(name) for name in unittest.TestLoader().getTestCaseNames(kind))


class Outcomes(unittest.TestResult):
    """Writes what became of each test as soon as it is known."""

    def __init__(self, out: Any):
        super().__init__()
        self.out = out

    def note(self, test: Any, outcome: str, why: str = "") -> None:
        print(json.dumps({"name": test.id(), "outcome": outcome, "why": why}), file=self.out,
              flush=True)

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
        self.note(test, "failed", "passed where it is said to fail")


def run(folder: Path, names: list[str], out: Any) -> None:
    """Run tests of one file by name, and what the ends of their classes check."""
    wanted = set(names)
    for file in sorted({name.partition(".")[0] for name in names}):
        chosen = [t for t in tests_of(load(folder / f"{file}.py")) if t.id() in wanted]
        with limited(LIMIT + 5 * len(chosen)):
            unittest.TestSuite(chosen).run(Outcomes(out))


# ---------------------------------------------------------------- all of them
def listed(command: list[str], file: str) -> list[str]:
    """The names of the tests of a file."""
    answer = subprocess.run([*command, "--list", file], capture_output=True, text=True,
                            timeout=600)
    if answer.returncode:
        sys.exit(answer.stderr)
    return list(json.loads(answer.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of PyTorch, or the folder of the tests")
    parser.add_argument("--file", default="test_*", help="a pattern over names of files")
    parser.add_argument("--only", default="", help="a regular expression over names of tests")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every outcome here")
    for hidden in ("--list", "--names", "--out"):
        parser.add_argument(hidden, help=argparse.SUPPRESS, **(
            {"nargs": "*"} if hidden == "--names" else {}))
    given = parser.parse_args()
    whole = given.checkout / TESTS
    folder = whole if whole.is_dir() else given.checkout
    if given.list:
        print(json.dumps([t.id() for t in tests_of(load(folder / f"{given.list}.py"))]))
        return 0
    if given.names is not None:
        with open(given.out, "w") as out:
            run(folder, given.names, out)
        return 0
    return report(folder, given)


def report(folder: Path, given: argparse.Namespace) -> int:
    """Run the tests that were chosen, and print what became of them."""
    os.environ |= {"GCU_VISIBLE_DEVICES": "0,1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, __file__, str(folder)]
    found: dict[str, Any] = {}
    for file in sorted({f.stem for f in folder.glob(f"{given.file}.py")} - set(OTHER_FILES)):
        names = [n for n in listed(command, file) if re.search(given.only, n)]
        names = [n for n in names if n not in LEFT_OUT]
        if names:
            found |= outcomes(command, names, given.jobs, len(names), LIMIT + 10 * len(names))
        count = Counter(found[n]["outcome"] for n in names)
        print(f"{file}: " + ", ".join(f"{n} {what}" for what, n in sorted(count.items())))
        for name in names:
            if found[name]["outcome"] != "passed":
                print(f"  {found[name]['outcome']}: {name}: {found[name]['why']}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    count = Counter(what["outcome"] for what in found.values())
    print(f"{len(found)} tests: {count['passed']} passed, {count['failed']} failed, "
          f"{count['skipped']} skipped themselves; {len(LEFT_OUT)} left out")
    return int(count["failed"] > 0 or not count["passed"])


if __name__ == "__main__":
    sys.exit(main())
