"""Runs the own tests of a Triton library on the CPU backend, from a checkout of it.

    python benchmarks/triton_libraries.py ~/Liger-Kernel/test/transformers --each 3
    python benchmarks/triton_libraries.py ~/attorch/tests --only 'softmax|norm' --stand-in
    python benchmarks/triton_libraries.py ~/flash-linear-attention/tests/ops --json fla.json

Every test file runs in a process of its own, so that one which dies takes no other along. `--each`
keeps so many cases of every test function, spread evenly over its parameters: every kernel is
reached, and a suite of thousands takes minutes. `--configs` keeps so many configurations of
autotuned kernels: trying dozens takes most of the time of some tests.

A test that fails because its library wants a GPU (tensors on "cuda", torch.cuda, another maker's
compiler) is counted apart from one that fails by us. With `--stand-in` the CPU answers to the name
"cuda" (gpu_stand_in.py), so that the kernels of a library that insists on it are tried at all. The
checkout's own folder (and `src` in it) is put on the path; nothing is installed or written. A test
that passes without having launched a kernel says nothing about kernels, and is counted apart too.

`--jobs` runs so many processes at a time, a long file in several; `--minutes` ends the whole after
a while: what has not begun by then is named.

Kernels that took more than a second of processor time to compile are named at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

# What a test says that asks for a GPU, or for the tools of one.
DEMANDS = re.compile(
    r"not compiled with CUDA|NVIDIA driver|CUDA error|CUDA is not available|No CUDA|cuda runtime"
    r"|torch\.cuda\.|_cuda_getDeviceCount|Cannot access accelerator device|no attribute '_cuda_"
    r"|module 'torch\._C' has no attribute|requires a GPU|no GPU|nvcc|CUDA_HOME|tilelang|cutlass"
    r"|cuda\.tile|device type:? cuda|'cuda'.*not available|torch\.cpu.* has no attribute"
    r"|module 'torch\.cpu' has no attribute|CPUDeviceProperties|Invalid device string|bitsandbytes"
    r"|\.is_cuda|NUM_SMS|gcnArchName|CPU only\. There seems a mistake|CUDA (?:tensor|device)"
    r"|support CUDA|from the 'CPU' backend|device\.type (?:==|!=|in|not in) ",
    re.IGNORECASE)
FUNCTIONS = 20  # of a file, in one process
SLOW = 1.0  # seconds of processor time for one kernel
OUTCOMES = ("passed", "passed without a kernel", "skipped", "wants a GPU", "failed")


# ---------------------------------------------------------------- inside the process of a file
class Sampler:
    """A plugin of pytest: keeps some cases, ends long ones, and notes what became of each."""

    def __init__(self, each: int, limit: int, piece: tuple[int, int]):
        self.each, self.limit, self.piece = each, limit, piece
        self.found: dict[str, Any] = {"cases": 0, "launches": 0, "outcomes": {}, "reasons": {}}
        self.launched = 0  # before the test under way

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self.found["cases"] = len(items)
        groups: dict[str, list[Any]] = {}
        for item in items:
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
        which, pieces = self.piece
        items[:] = [item for group in list(groups.values())[which::pieces]
                    for item in spread(group, self.each)]

    def pytest_runtest_setup(self, item: Any) -> None:
        def ring(*_: Any) -> None:
            raise TimeoutError(f"longer than {self.limit} s")

        signal.signal(signal.SIGALRM, ring)
        signal.alarm(self.limit)
        self.launched = self.found["launches"]
        self.found["running"] = item.nodeid  # for the case that the process dies of it
        self.save()

    def save(self) -> None:
        Path(os.environ["TZ_LIBRARY_OUT"]).write_text(json.dumps(self.found))

    def pytest_runtest_logreport(self, report: Any) -> None:
        signal.alarm(0)
        name = report.nodeid
        if report.skipped:
            self.found["outcomes"][name] = "skipped"
        elif report.failed:
            text = str(report.longrepr)
            outcome = "wants a GPU" if DEMANDS.search(text) else "failed"
            if self.found["outcomes"].get(name) != "failed":
                self.found["outcomes"][name] = outcome
                self.found["reasons"][name] = reason(text)
        elif report.when == "call":
            launched = self.found["launches"] > self.launched
            self.found["outcomes"].setdefault(
                name, "passed" if launched else "passed without a kernel")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            text = str(report.longrepr)
            self.found["outcomes"][report.nodeid] = (
                "wants a GPU" if DEMANDS.search(text) else "failed")
            self.found["reasons"][report.nodeid] = reason(text)


def reason(text: str) -> str:
    """The last line of an error that says something."""
    lines = [line.removeprefix("E").strip() for line in text.splitlines() if line.startswith("E ")]
    lines = [line for line in lines if line] or text.strip().splitlines()[-1:]
    return " / ".join(lines[:3])[:400]


def spread(items: list[Any], count: int) -> list[Any]:
    """So many of some items, evenly; all of them for zero."""
    if not count or len(items) <= count:
        return items
    step = (len(items) - 1) / max(count - 1, 1)
    return [items[round(n * step)] for n in range(count)]


def time_compilation(found: dict[str, Any]) -> None:
    """Note the processor time of every kernel's way from TTIR to machine code."""
    from terrazzo.triton_cpu import cpu_stages

    slow = found.setdefault("slow", {})
    found["compiled"] = 0
    spent: dict[str, float] = {}
    facts: dict[str, Any] = {}  # of the kernel that is being compiled

    def timed(name: str) -> None:
        stage = getattr(cpu_stages, name)

        def run(*args: Any) -> Any:
            begin = time.process_time()
            result = stage(*args)
            spent[name] = time.process_time() - begin
            if name == "make_loops":
                facts.update(args[1])
            if name == "make_object":
                found["compiled"] += 1
                total = sum(spent.values())
                if total > SLOW:
                    kernel = facts["name"]
                    known = slow.get(kernel, {"seconds": 0.0})
                    if known["seconds"] < total:
                        slow[kernel] = {"seconds": round(total, 2), **{
                            k.removeprefix("make_"): round(v, 2) for k, v in spent.items()}}
            return result

        setattr(cpu_stages, name, run)

    for name in ("make_loops", "make_llvm", "make_object"):
        timed(name)


def count_launches(found: dict[str, Any]) -> None:
    """Count the launches of kernels in this process."""
    from terrazzo.triton_cpu.launch.launcher import Launcher

    launch = Launcher.__call__

    def __call__(self: Any, *args: Any) -> None:
        found["launches"] += 1
        launch(self, *args)

    Launcher.__call__ = __call__  # type: ignore[method-assign]


def keep_configurations(count: int) -> None:
    """Let autotuned kernels try no more than so many configurations; zero: all of them."""
    from triton.runtime.autotuner import Autotuner

    begin = Autotuner.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.configs = spread(self.configs, count)

    Autotuner.__init__ = __init__


def run_file(args: argparse.Namespace) -> None:
    """Run the tests of a file in this process."""
    import pytest

    from terrazzo.triton_cpu.activate import activate

    activate()
    if args.stand_in:
        import gpu_stand_in

        gpu_stand_in.install()
    sampler = Sampler(args.each, args.limit, args.piece)
    time_compilation(sampler.found)
    count_launches(sampler.found)
    keep_configurations(args.configs)
    del sys.argv[1:]  # some libraries read them too
    status = pytest.main(["-q", "-p", "no:cacheprovider", "--tb=short", "--no-header",
                          str(args.path[0])], plugins=[sampler])
    sampler.found.pop("running", None)
    if status == pytest.ExitCode.USAGE_ERROR:
        raise SystemExit(f"pytest could not begin: {status}")
    sampler.save()


# ---------------------------------------------------------------- over all files
def root_of(path: Path) -> Path:
    """The checkout that a path lies in."""
    return next((p for p in (path, *path.parents) if (p / ".git").exists()), path)


def pieces(path: Path) -> list[tuple[int, int]]:
    """A file in pieces of so many test functions: which of how many."""
    count = math.ceil(path.read_text().count("def test_") / FUNCTIONS) or 1
    return [(n, count) for n in range(count)]


def run_apart(path: Path, piece: tuple[int, int], args: argparse.Namespace, end: float
              ) -> dict[str, Any] | None:
    """Run a piece of a file in a process of its own; what it was at when it died is a failure.

    None where the time of all files is up.
    """
    root = root_of(path)
    limit = min(args.file_limit, end - time.monotonic())
    if limit <= 0:
        return None
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        folders = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(f for f in folders if f),
            "TZ_LIBRARY_OUT": out.name, "TRITON_DEFAULT_BACKEND": "cpu",
            "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, __file__, str(path), "--each", str(args.each),
                   "--limit", str(args.limit), "--configs", str(args.configs),
                   "--piece", *map(str, piece),
                   *(["--stand-in"] if args.stand_in else [])]
        try:
            done = subprocess.run(command, cwd=root, env=environment, capture_output=True,
                                  text=True, timeout=limit)
            ended = f"the process ended with {done.returncode}: {done.stderr[-200:]}"
        except subprocess.TimeoutExpired:
            ended = f"the file took longer than {limit:.0f} s"
        text = Path(out.name).read_text()
    found: dict[str, Any] = json.loads(text) if text else {
        "cases": 0, "outcomes": {str(path): "failed"}, "reasons": {str(path): ended}}
    if "running" in found:
        found["outcomes"][found["running"]] = "failed"
        found["reasons"][found["running"]] = ended
    return found


def together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What the pieces of a file gave."""
    whole: dict[str, Any] = {"cases": max((f["cases"] for f in found), default=0)}
    for key in ("outcomes", "reasons", "slow"):
        whole[key] = {k: v for f in found for k, v in f.get(key, {}).items()}
    return whole


def row(name: str, found: list[dict[str, Any]]) -> str:
    """A line of the table."""
    counts = Counter(outcome for f in found for outcome in f["outcomes"].values())
    numbers = [sum(f["cases"] for f in found), counts.total(), *(counts[o] for o in OUTCOMES)]
    return f"| {name} | {' | '.join(map(str, numbers))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path, nargs="+", help="folders or files of tests")
    parser.add_argument("--each", type=int, default=2, help="cases of a function; 0: all")
    parser.add_argument("--configs", type=int, default=2, help="of an autotuned kernel; 0: all")
    parser.add_argument("--limit", type=int, default=60, help="seconds for a case")
    parser.add_argument("--file-limit", type=int, default=900, help="seconds for a file")
    parser.add_argument("--jobs", type=int, default=1, help="files at a time")
    parser.add_argument("--minutes", type=float, default=1e6, help="for all files together")
    parser.add_argument("--stand-in", action="store_true", help='the CPU answers to "cuda"')
    parser.add_argument("--only", default="", help="a pattern for names of files")
    parser.add_argument("--json", type=Path, help="write outcomes and reasons there")
    parser.add_argument("--piece", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.piece:
        run_file(args)
        return
    files = [f.resolve() for path in args.path for f in (
        sorted(path.rglob("test_*.py")) if path.is_dir() else [path])
        if re.search(args.only, f.name)]
    end = time.monotonic() + 60 * args.minutes
    everything: dict[str, Any] = {}
    parts: dict[Path, list[dict[str, Any]]] = {path: [] for path in files}
    left_out = set()
    print(f"| file | cases | run | {' | '.join(OUTCOMES)} |\n|---|---|---|{'---|' * len(OUTCOMES)}")
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(run_apart, path, piece, args, end): path
                   for path in files for piece in pieces(path)}
        for done in as_completed(running):
            path, found = running[done], done.result()
            if found is None:
                left_out.add(path.name)
                continue
            parts[path].append(found)
            everything[str(path)] = together(parts[path])
            if len(parts[path]) == len(pieces(path)):
                print(row(path.name, [everything[str(path)]]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(everything, indent=1))
    print(row("all", list(everything.values())) + "\n")
    if left_out:
        print("not begun, or not to the end:", *sorted(left_out))
    for path_, found in sorted(everything.items()):
        for name, why in found["reasons"].items():
            if found["outcomes"][name] == "failed":
                print(f"failed: {Path(path_).name}::{name.rpartition('::')[2]}: {why}")
    slow = {k: v for found in everything.values() for k, v in found.get("slow", {}).items()}
    for kernel, seconds in sorted(slow.items(), key=lambda item: -item[1]["seconds"]):
        print(f"slow to compile: {kernel}: {seconds}")


if __name__ == "__main__":
    main()
