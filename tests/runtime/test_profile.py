"""The profiler: every kernel of every run, as a table and as a trace whose events nest."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.knobs import knobs
from terrazzo.runtime.profile import KernelTime, Profile, Recording


def work() -> None:
    x = np.ones((64, 64), np.float32)
    tz.jit(lambda x: tz.matmul(tz.log_softmax(tz.matmul(x, x)), x))(x)


def test_every_kernel_is_recorded() -> None:
    work()  # compiled before: compiling is not profiled
    with tz.profile() as recorded:
        work()
        tz.exp(np.ones(100, np.float32))
    assert len(recorded.runs) == 2
    whole, small = recorded.runs
    assert len(whole.kernels) >= 3 and len(small.kernels) == 1
    (kernel,) = small.kernels
    assert kernel.bytes == 800 and kernel.flops > 0 and "exp" in kernel.origin
    assert sum(k.duration_ns for k in whole.kernels) <= whole.duration_ns * 1.01
    assert all(k.duration_ns >= 0 for k in whole.kernels)


def test_table() -> None:
    runs = [Profile("model", 0, 1000, (KernelTime("k_add", "add", 0, 250, 100, 500),
                                       KernelTime("k_exp", "exp, mul", 250, 750, 1500, 750)))
            for _ in range(2)]
    lines = Recording(runs).table().splitlines()
    assert len(lines) == 4
    assert lines[1].split() == ["1.5", "75.0%", "2", "1.0", "2.0", "model/k_exp", "(exp,", "mul)"]
    assert lines[2].split() == ["0.5", "25.0%", "2", "2.0", "0.4", "model/k_add", "(add)"]
    assert "2.0 us in 2 runs" in lines[3]


def test_chrome_trace_nests(tmp_path: Path) -> None:
    work()
    both = threading.Barrier(2)  # a thread that has ended may give its number to the next

    def worker() -> None:
        work()
        both.wait(60)

    with tz.profile() as recorded:
        threads = [threading.Thread(target=worker) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    recorded.chrome_trace(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    runs = [e for e in events if e["cat"] == "run"]
    kernels = [e for e in events if e["cat"] == "kernel"]
    assert len(runs) == 2 and len({e["tid"] for e in runs}) == 2
    assert len(kernels) == sum(len(run.kernels) for run in recorded.runs)
    slack = 1e-2  # microseconds, of rounding
    for kernel in kernels:
        assert kernel["ph"] == "X" and kernel["dur"] >= 0
        assert any(run["tid"] == kernel["tid"] and run["ts"] - slack <= kernel["ts"]
                   and kernel["ts"] + kernel["dur"] <= run["ts"] + run["dur"] + slack
                   for run in runs)
    for run in runs:
        own = sorted((e for e in kernels if e["tid"] == run["tid"]), key=lambda e: e["ts"])
        for before, after in itertools.pairwise(own):
            assert before["ts"] + before["dur"] <= after["ts"] + slack


def test_recordings_nest_and_end() -> None:
    x = np.ones(3, np.float32)
    with tz.profile() as outer:
        tz.exp(x)
        with tz.profile() as inner:
            tz.exp(x)
        tz.exp(x)
    tz.exp(x)
    assert (len(outer.runs), len(inner.runs)) == (3, 1)


def test_the_setting_alone_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with knobs.override(profile=True):
        tz.exp(np.ones(3, np.float32))
    assert "k_exp" in capsys.readouterr().out


def test_profiling_changes_no_code() -> None:
    function = tz.jit(lambda x: x + 1.0)
    x = np.ones(3, np.float32)
    function(x)
    entries = function.table.entries
    with tz.profile():
        function(x)
        assert function.table.entries is entries
