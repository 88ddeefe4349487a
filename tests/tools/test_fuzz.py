"""The fuzzer makes sound programs, shrinks failing ones, and survives crashes."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cpu.llvm import scalars
from terrazzo.graph.ir import OPERATORS
from terrazzo.tools import samples
from terrazzo.tools.fuzz import fuzzing as fuzz
from terrazzo.tools.fuzz.generate import operators, random_program
from terrazzo.tools.fuzz.programs import Input, Program, Ref, Step, pruned
from terrazzo.tools.fuzz.recipes import RECIPES

SECONDS = 10.0
SEED = 11


def test_random_programs_agree_at_every_level() -> None:
    end = time.perf_counter() + SECONDS
    case = 0
    while time.perf_counter() < end:
        found = fuzz.outcome(fuzz.program_of(SEED, case))
        assert found is None, f"tz fuzz --seed {SEED} --first {case}: {found}"
        case += 1
    assert case > 5


def test_programs_are_the_same_for_the_same_seed() -> None:
    assert fuzz.program_of(3, 7) == fuzz.program_of(3, 7)
    assert fuzz.program_of(3, 7) != fuzz.program_of(3, 8)


def test_programs_reach_most_operators(rng: np.random.Generator) -> None:
    used = {step.op for _ in range(400) for step in random_program(rng).steps}
    assert len(used) > 0.7 * len(operators())
    assert set(RECIPES) <= {*OPERATORS, "[]"}


def test_programs_vary_types_sizes_and_memory(rng: np.random.Generator) -> None:
    programs = [random_program(rng) for _ in range(300)]
    inputs = [i for p in programs for i in p.inputs]
    assert {"float32", "float64", "float16", "bfloat16", "bool"} <= {i.dtype for i in inputs}
    assert any(i.strided for i in inputs) and any(0 in i.shape for i in inputs)
    assert any(p.symbolic for p in programs) and any(p.gradient for p in programs)
    assert any(len(p.outputs) > 1 for p in programs)


# ---------------------------------------------------------------- shrinking
def long_program() -> Program:
    """Six calls, of which only one is at fault."""
    steps = (
        Step("add", (Ref(0), Ref(1))), Step("sin", (Ref(0, True),)), Step("exp", (Ref(1, True),)),
        Step("tanh", (Ref(2, True),)), Step("sum", (Ref(3, True),), (("axis", 0),)),
        Step("multiply", (Ref(3, True), 2.0)),
    )
    inputs = (Input((8, 16), "float64", "special"), Input((8, 16), "float64", strided=True))
    return Program(inputs, steps, (Ref(4, True), Ref(5, True)), symbolic=True, gradient=True)


def test_shrinking_leaves_only_what_matters() -> None:
    small = fuzz.shrink(long_program(), lambda p: any(s.op == "exp" for s in p.steps))
    assert [s.op for s in small.steps] == ["exp"]
    (given,) = small.inputs
    assert (given.shape, given.dtype, given.fill) == ((1, 1), "float32", "ones")
    assert not given.strided
    assert not small.symbolic and not small.gradient


def test_unneeded_parts_are_pruned() -> None:
    program = long_program()
    kept = pruned(Program(program.inputs, program.steps, (Ref(1, True),)))
    assert [s.op for s in kept.steps] == ["add", "sin"]


def test_a_failure_becomes_a_script_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scalars._FLOAT, "mul", lambda b, x, y: b.fadd(x, y))
    program = Program((Input((3, 17), "float32"),),
                      (Step("exp", (Ref(0),)), Step("multiply", (Ref(0, True), Ref(0, True))),
                       Step("sin", (Ref(1, True),))), (Ref(2, True),))
    found = fuzz.outcome(program)
    assert found is not None and found[0] == "code"
    failure = fuzz.failure_of(0, 0, found, program)
    assert "tz.multiply(x0, x0)" in failure.script and "tz.sin" not in failure.script
    with pytest.raises(tz.errors.VerifyError, match="level code"):
        exec(failure.script, {})
    monkeypatch.undo()
    exec(failure.script, {})


@pytest.mark.parametrize("program", [
    Program((Input((2, 5), "bool"), Input((5,), "bfloat16", "special")),
            (Step("[]", (Ref(0),), (("key", (slice(None, None, -1), 2)),)),
             Step("split", (Ref(1),), (("indices_or_sections", (2,)), ("axis", 0)), True)),
            (Ref(0, True), Ref(1, True, 1))),
    Program((Input((40, 3), "int64", "index", 5, below=7), Input((2,), "float16", strided=True)),
            (Step("negative", (Ref(0),)), Step("absolute", (Ref(1),))),
            (Ref(0, True), Ref(1, True))),
])
def test_scripts_run(program: Program) -> None:
    given: dict[str, Any] = {}
    exec(program.script("as it should be"), given)
    for i, made in enumerate(program.inputs):
        assert given[f"x{i}"].tobytes() == made.array().tobytes()


def test_literal_inputs_keep_special_values() -> None:
    made = Input((4,), "float32", "literal", literal=(np.inf, -np.inf, np.nan, -0.0))
    array = eval(made.text(), {"np": np, "tz": tz, "samples": samples})
    assert array.tobytes() == made.array().tobytes()


# ---------------------------------------------------------------- worker processes
def start(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


def test_a_crash_is_a_failure_and_the_search_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def worker(seed: int, first: int, count: int) -> subprocess.Popen[str]:
        started.append(first)
        if len(started) == 1:
            return start('import os; print(\'{"start": 4}\', flush=True); os.abort()')
        return start('print(\'{"start": 5}\'); print(\'{"done": 5}\')')

    monkeypatch.setattr(fuzz, "_start_worker", worker)
    monkeypatch.setattr(fuzz, "_crashes", lambda program: False)
    report = fuzz.fuzz(minutes=0.01, seed=1, first=4)
    assert started[1] == 5
    crash = report.failures[0]
    assert crash.level == "crash" and crash.case == 4
    assert "def program(" in crash.script and "--seed 1, program 4" in crash.script


def test_a_hanging_program_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "HANG_SECONDS", 0.5)
    monkeypatch.setattr(fuzz, "_start_worker", lambda *_: start(
        'import time; print(\'{"start": 0}\', flush=True); time.sleep(60)'))
    report = fuzz.fuzz(minutes=0.001)
    assert [f.level for f in report.failures] == ["hang"]


def test_workers_report_what_they_do() -> None:
    report = fuzz.fuzz(minutes=0.03, seed=SEED)
    assert report.programs > 0 and not report.failures
    assert "programs in" in str(report)
