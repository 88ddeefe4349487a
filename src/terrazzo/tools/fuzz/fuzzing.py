"""Compiles random programs and checks every level; what fails is shrunk to a short script.

False alarms are kept out by the bounds of `error_bounds`: where an inexact value decides something
(floor, a comparison, an index, a cast to integer), the elements it may reach are not compared, and
since every kernel is also checked by itself, on the values that the graph level computes, little
is lost by that.

Programs run in a worker process, so that one that crashes is caught and reported like any other.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from terrazzo.dtypes import as_dtype
from terrazzo.errors import TerrazzoError
from terrazzo.graph import autodiff
from terrazzo.graph import evaluate as graph_evaluate
from terrazzo.tools.fuzz.generate import random_program
from terrazzo.tools.fuzz.programs import LITERAL_ELEMENTS, Input, Program, Ref, pruned
from terrazzo.tools.verify.gradient import NoGradient, check_gradient
from terrazzo.tools.verify.verifier import Subject, Wrong

LEVELS = ("graph", "expr", "loop", "code")
BATCH = 150  # programs for one worker process: loaded machine code is never unloaded
HANG_SECONDS = 60.0
SHRINK_SECONDS = 20.0


@dataclass(frozen=True)
class Failure:
    """A program that went wrong, as short as it could be made."""

    seed: int
    case: int
    level: str  # graph, expr, loop, code, gradient; crash, hang, or the class of an exception
    message: str
    script: str


# ---------------------------------------------------------------- one program
class Refused(Exception):
    """A program that has no meaning: the reference itself does not accept it."""


def check(program: Program) -> None:
    """Raises whatever is wrong with the compilation of a program."""
    arrays = [i.array() for i in program.inputs]
    try:
        graph = program.graph()
        graph_evaluate.run(graph, arrays)
    except (TerrazzoError, ValueError, IndexError, ZeroDivisionError) as error:
        raise Refused(str(error)) from error
    Subject(graph).check(arrays, LEVELS)
    if program.gradient:
        _check_gradient(program, arrays)


def _check_gradient(program: Program, arrays: list[np.ndarray]) -> None:
    """The derivative against differences in float64, then its compilation in its own types."""
    rng = np.random.default_rng(0)
    try:
        backward = autodiff.vjp_graph(program.graph())
    except TerrazzoError:
        return
    wide = replace(program, inputs=tuple(_in_float64(i) for i in program.inputs))
    try:
        difference = check_gradient(wide.graph(), [i.array() for i in wide.inputs], rng)
    except (NoGradient, TerrazzoError, ValueError):  # or bits of float32 asked of a float64
        difference = None
    if difference is not None and difference.index is not None:
        raise Wrong("gradient", "the gradient", difference)
    dims = graph_evaluate.bind_dims(program.graph(), arrays)
    if dims:  # sizes of cotangents are symbolic too, and read off inputs only
        return
    weights = [rng.uniform(0.5, 1.5, graph_evaluate.concrete(v.shape, dims)).astype(v.dtype.np)
               for v in backward.inputs[len(arrays):]]
    Subject(backward).check([*arrays, *weights], LEVELS)


def _in_float64(given: Input) -> Input:
    if not as_dtype(given.dtype).is_float:
        return given
    ordinary = given.fill if given.fill in ("ones", "literal", "unit") else "draw"
    return replace(given, dtype="float64", fill=ordinary)


def outcome(program: Program) -> tuple[str, str] | None:
    """The level and the message of what is wrong with a program; None when nothing is."""
    try:
        check(program)
    except Refused:
        return None
    except Wrong as wrong:
        return wrong.level, f"level {wrong.level}, in {wrong.what}: {wrong.describe()}"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.filename.rpartition('/')[2]}:{last.lineno} in {last.name}"
        return type(error).__name__, f"{type(error).__name__}: {error} ({place})"
    return None


# ---------------------------------------------------------------- shrinking
def shrink(program: Program, fails: Callable[[Program], bool],
           seconds: float = SHRINK_SECONDS) -> Program:
    """The smallest program found that still fails, by trying ever simpler ones (greedy ddmin)."""
    deadline = time.perf_counter() + seconds
    progress = True
    while progress:
        progress = False
        for candidate in simpler(program):
            if time.perf_counter() > deadline:
                return program
            if cost(candidate) < cost(program) and fails(candidate):
                program, progress = candidate, True
                break
    return program


def cost(program: Program) -> tuple[int, ...]:
    """What shrinking makes smaller, the weightiest first."""
    return (len(program.steps), len(program.outputs), len(program.inputs),
            program.gradient + program.symbolic + sum(i.strided for i in program.inputs),
            sum(len(i.shape) for i in program.inputs),
            sum(int(np.prod(i.shape)) for i in program.inputs),
            sum(_DTYPE_COST.get(i.dtype, 2) for i in program.inputs),
            sum(_FILL_COST[i.fill] for i in program.inputs))


_DTYPE_COST = {"float32": 0, "int64": 0, "bool": 0, "float64": 1, "int32": 1}
_FILL_COST = {"ones": 0, "index": 0, "draw": 1, "unit": 1, "literal": 2, "special": 3, "extreme": 3}


def simpler(program: Program) -> Iterator[Program]:
    """Programs that are simpler in one respect, the boldest steps first."""
    for output in program.outputs if len(program.outputs) > 1 else ():
        yield pruned(replace(program, outputs=(output,)))
    if program.gradient:
        yield replace(program, gradient=False)
    if program.symbolic:
        yield replace(program, symbolic=False)
    for i in reversed(range(len(program.steps))):
        yield from _without_step(program, i)
    sizes = sorted({n for given in program.inputs for n in given.shape}, reverse=True)
    for n in sizes:
        for m in (1, 2, 3, n // 2, n - 1):
            if 0 < m < n:
                yield replace(program, inputs=tuple(replace(
                    given, shape=tuple(m if k == n else k for k in given.shape))
                    for given in program.inputs))
    for i, given in enumerate(program.inputs):
        for other in _simpler_inputs(given):
            yield replace(program, inputs=(*program.inputs[:i], other, *program.inputs[i + 1:]))
    if any(as_dtype(i.dtype).is_float and i.dtype != "float32" for i in program.inputs):
        yield replace(program, inputs=tuple(
            replace(i, dtype="float32") if as_dtype(i.dtype).is_float else i
            for i in program.inputs))


def _simpler_inputs(given: Input) -> Iterator[Input]:
    if given.strided:
        yield replace(given, strided=False)
    for fill in ("ones", "draw"):
        if given.fill not in (fill, "index", "literal", "unit"):
            yield replace(given, fill=fill)
    for d in range(len(given.shape)):
        if given.shape[d] > 1:
            yield replace(given, shape=(*given.shape[:d], 1, *given.shape[d + 1:]))


def _without_step(program: Program, i: int) -> Iterator[Program]:
    """The program with a step's results passed over, or given as inputs."""
    step = program.steps[i]
    for argument in step.refs():
        yield _redirected(program, i, {0: argument})
    values = _values_of(program, i)
    if values is None:
        return
    fresh = [Input(v.shape, as_dtype(v.dtype).name, "draw", seed=1) for v in values]
    small = all(v.size <= LITERAL_ELEMENTS for v in values)
    exact = [replace(given, fill="literal", literal=tuple(_plain(n) for n in v.reshape(-1)))
             for given, v in zip(fresh, values)] if small else []
    for inputs in (fresh, exact):
        if inputs:
            base = len(program.inputs)
            wider = replace(program, inputs=(*program.inputs, *inputs))
            yield _redirected(wider, i, {k: Ref(base + k) for k in range(len(inputs))})


def _plain(n: Any) -> Any:
    return n.item() if np.asarray(n).dtype.kind in "biuf" else float(n)


def _redirected(program: Program, i: int, table: dict[int, Ref]) -> Program:
    def visit(arg: Any) -> Any:
        return table.get(arg.output, arg) if isinstance(arg, Ref) and arg.step and (
            arg.at == i) else arg

    return pruned(replace(
        program, outputs=tuple(map(visit, program.outputs)),
        steps=tuple(replace(s, args=tuple(map(visit, s.args))) for s in program.steps)))


def _values_of(program: Program, i: int) -> list[np.ndarray] | None:
    """What a step computes at the graph level."""
    count = 8 if program.steps[i].several else 1
    for several in range(count, 0, -1):
        part = replace(program, symbolic=False,
                       outputs=tuple(Ref(i, True, k) for k in range(several)))
        try:
            return graph_evaluate.run(part.graph(), [x.array() for x in part.inputs])
        except IndexError:
            continue
        except Exception:  # what fails may be this very step
            return None
    return None


# ---------------------------------------------------------------- the worker
def program_of(seed: int, case: int) -> Program:
    """The program that a seed and a number stand for."""
    return random_program(np.random.default_rng([seed, case]))


def failure_of(seed: int, case: int, found: tuple[str, str], program: Program) -> Failure:
    """A failure with its program made small."""
    level = found[0]

    def fails(candidate: Program) -> bool:
        again = outcome(candidate)
        return again is not None and again[0] == level

    small = shrink(program, fails)
    _, message = outcome(small) or found
    why = f"{message}\n\nFound by tz fuzz --seed {seed}, program {case}.\n"
    return Failure(seed, case, level, message, small.script(why))


def worker(seed: int, first: int, count: int) -> None:
    """Check programs one after the other, and say so line by line on standard output."""
    for case in range(first, first + count):
        _say(start=case)
        program = program_of(seed, case)
        found = outcome(program)
        if found is not None:
            _say(failing=case, level=found[0], message=found[1])
            failure = failure_of(seed, case, found, program)
            _say(failure={"seed": seed, "case": case, "level": failure.level,
                          "message": failure.message, "script": failure.script})
        _say(done=case)


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


# ---------------------------------------------------------------- the parent
@dataclass
class FuzzReport:
    """What a run of the fuzzer found."""

    seed: int
    programs: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    def distinct(self) -> list[Failure]:
        """One failure of each kind: the same level and words, numbers aside."""
        seen: dict[tuple[str, str], Failure] = {}
        for failure in self.failures:
            words = "".join(c for c in failure.message if not c.isdigit())[:160]
            seen.setdefault((failure.level, words), failure)
        return list(seen.values())

    def __str__(self) -> str:
        rate = self.programs / max(self.seconds, 1e-9)
        head = (f"{self.programs} programs in {self.seconds:.0f} s ({rate:.1f} a second), seed "
                f"{self.seed}: {len(self.failures)} failed")
        return "\n\n".join([head, *(f.script for f in self.distinct())])


def fuzz(minutes: float = 5.0, seed: int = 0, first: int = 0, most_failures: int = 20,
         progress: Callable[[FuzzReport], None] = lambda report: None) -> FuzzReport:
    """Check random programs until the time is over."""
    report = FuzzReport(seed)
    started = time.perf_counter()
    deadline = started + 60 * minutes
    case = first
    while time.perf_counter() < deadline and len(report.failures) < most_failures:
        run = _Batch(seed, case, deadline)
        for event in run.events():
            if "done" in event:
                report.programs += 1
            elif "failure" in event:
                report.failures.append(Failure(**event["failure"]))
            report.seconds = time.perf_counter() - started
            progress(report)
        if run.died is not None:
            report.programs += 1
            report.failures.append(run.died)
        case = run.next_case
    report.seconds = time.perf_counter() - started
    return report


class _Batch:
    """A worker process for some programs, watched from outside."""

    def __init__(self, seed: int, first: int, deadline: float):
        self.seed, self.deadline = seed, deadline
        self.next_case = first
        self.died: Failure | None = None
        self.process = _start_worker(seed, first, BATCH)

    def events(self) -> Iterator[dict[str, Any]]:
        """What the worker says, until it ends, dies, hangs or the time is over."""
        import queue
        import threading

        lines: queue.Queue[str | None] = queue.Queue()

        def listen() -> None:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=listen, daemon=True).start()
        current, found = None, None
        while True:
            limit = HANG_SECONDS + (SHRINK_SECONDS if found else 0.0)
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                self._end()
                self.died = self._failure(current, "hang", f"no end within {limit:.0f} s")
                self.next_case = (current or self.next_case) + 1
                return
            if line is None:
                break
            event = json.loads(line)
            current = event.get("start", current)
            found = (event["level"], event["message"]) if "failing" in event else found
            if "done" in event:
                found, self.next_case = None, event["done"] + 1
                if time.perf_counter() > self.deadline:
                    yield event
                    self._end()
                    return
            yield event
        code = self.process.wait()
        if code != 0:
            _, errors = self.process.communicate()
            kind, words = found or ("crash", f"the process ended with {code}\n{errors[-2000:]}")
            self.died = self._failure(current, kind, words)
            self.next_case = (current or self.next_case) + 1

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()

    def _failure(self, case: int | None, level: str, message: str) -> Failure:
        assert case is not None, f"the worker did not start: {message}"
        program = program_of(self.seed, case)
        if level == "crash":
            program = shrink(program, _crashes, 3 * SHRINK_SECONDS)
        why = f"{message}\n\nFound by tz fuzz --seed {self.seed}, program {case}.\n"
        return Failure(self.seed, case, level, message, program.script(why))


def _start_worker(seed: int, first: int, count: int) -> subprocess.Popen[str]:
    command = f"from terrazzo.tools.fuzz.fuzzing import worker; worker({seed}, {first}, {count})"
    return subprocess.Popen([sys.executable, "-X", "faulthandler", "-c", command],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _crashes(program: Program) -> bool:
    """Whether a program ends a process of its own."""
    text = "\n".join(["from terrazzo.tools.fuzz.fuzzing import *",
                      "from terrazzo.tools.fuzz.programs import *", f"check({program!r})"])
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, timeout=HANG_SECONDS)
    return done.returncode < 0


__all__ = ["Failure", "FuzzReport", "check", "failure_of", "fuzz", "outcome", "program_of",
           "shrink", "worker"]
