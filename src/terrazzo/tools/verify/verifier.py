"""Checks every level of a compilation against the one above, and says which level is to blame.

    graph   an operator's reference disagrees with its meaning in float64, or a rewrite
            changed the value of the graph
    expr    fusion made a program that computes something else
    loop    schedule, lowering or simplification did
    code    the machine code of a kernel does, or the executable puts kernels together wrongly
    gradient  the derivative is not what differences say

How a graph is checked: `verify_levels`, `verify_gradient`; who is to blame: `verify_blame`. A
level at which nothing could be compared has failed, and what was left out is a line of the report.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from terrazzo.base.nests import leaves
from terrazzo.base.shapes import likely_shapes
from terrazzo.calls.compiled import Compiled
from terrazzo.calls.kernels import kernels_of
from terrazzo.chips import registry
from terrazzo.chips.registry import chip_named
from terrazzo.compiler.rewriting import inlined
from terrazzo.dtypes import as_dtype, float64
from terrazzo.errors import ArgumentError, NotDifferentiable, TerrazzoError, VerifyError
from terrazzo.graph import autodiff
from terrazzo.graph import evaluate as graph_evaluate
from terrazzo.graph.applying import as_value
from terrazzo.graph.ir import Graph, Operator, TensorType, Value
from terrazzo.graph.trace import trace
from terrazzo.ops.complex import view_as_complex, whole
from terrazzo.runtime.artifact import Over
from terrazzo.tools.samples import KINDS, Sample, samples
from terrazzo.tools.verify.gradient import NoGradient, as_float64, check_gradient
from terrazzo.tools.verify.levels import KERNEL, LEVELS, Subject, Wrong
from terrazzo.tools.verify.report import Report, Row
from terrazzo.tools.verify.written import check_written
from terrazzo.torch.eager import to_numpy

FLOATS = ("float64", "float32", "float16", "bfloat16")
OTHERS = ("int64", "int32", "int8", "uint8", "bool")
# What is particular about memory and sizes shows with floats already.
_UNENDING = ("special", "extreme")  # nan and inf stay what they are, whatever a loop does to them
_OTHER_KINDS = ("given", "random", "special", "odd")


# ---------------------------------------------------------------- verify
def verify(function: Any, *args: Any, levels: Sequence[str] | None = None,
           dtypes: Sequence[Any] | None = None, kinds: Sequence[str] = KINDS, seed: int = 0,
           chip: str = "", **attrs: Any) -> Report:
    """Check a function or operator at every level; raises VerifyError with the level to blame.

    Arguments are examples: their shapes are taken over, float values are drawn anew for every
    kind of input (the given ones are tried as well), integers keep their values because they may
    be indices. Without arguments shapes are found by trying. `attrs` go to the function; with
    `out=`, machine code is also run over the inputs that are given there. With `chip`, programs,
    loops and code are those of that chip, which must be here or simulated.
    """
    if chip:
        with registry.chip(chip):
            return verify(function, *args, levels=levels, dtypes=dtypes, kinds=kinds, seed=seed,
                          **attrs)
    target = _Target(function, attrs)
    own = (KERNEL,) if target.kernels else ()  # written by hand
    # A kink has no slope that could be checked.
    must = (*LEVELS[:-1], *own) if levels is None else levels
    levels = (*LEVELS, *own) if levels is None else levels
    _known("level", levels, (*LEVELS, KERNEL))
    _known("kind of input", kinds, (*KINDS, "given"))
    started = time.perf_counter()
    report = Report(target.name)
    examples = target.examples(args)
    wanted = _dtypes(examples, dtypes)
    if args and "given" not in kinds and tuple(kinds) == KINDS:
        kinds = ("given", *KINDS)
    with _progress(target.name, len(wanted) * len(kinds)) as advance:
        for name in wanted:
            trial = _Trial(target, examples, name, levels, Row(name), report)
            for kind in kinds:
                rng = np.random.default_rng([seed, *map(ord, name + kind)])
                if dtypes is not None or name not in OTHERS or kind in _OTHER_KINDS:
                    trial.run(kind, rng)
                else:
                    report.refused += [_FLOATS_DO] * (_FLOATS_DO not in report.refused)
                advance()
            if trial.row.kinds:
                report.rows.append(trial.row)
    if not report.rows:
        raise ArgumentError(f"{target.name} could not be verified: no type of input suits it",
                            where=None, hint="; ".join(report.refused[:3]) or "pass examples")
    _require_checked(report, must)
    report.seconds = time.perf_counter() - started
    return report


_FLOATS_DO = ("integers, kinds other than " + ", ".join(_OTHER_KINDS)
              + ": what is particular about memory and sizes shows with floats")


def _require_checked(report: Report, levels: Sequence[str]) -> None:
    """A level at which no element could be compared has not passed."""
    for level in levels:
        if report.open(level) and not report.elements(level):
            raise VerifyError(
                f"{report.name} could not be checked at level {level}: none of "
                f"{report.open(level)} elements has a bound that it could be held to",
                level=level, hint="verify its parts, or pass examples on which less hangs on "
                "rounding")
    if not any(map(report.elements, levels)):
        raise VerifyError(f"{report.name} could not be checked: no element was compared",
                          level=levels[0] if levels else None,
                          hint="; ".join(report.skipped[:3]) or "pass examples with elements")


def check_call(graph: Graph, given: Sequence[Any]) -> None:
    """Check the levels of a graph for the arguments of one call: what `knobs.check` asks for."""
    arrays = [_in_pairs(_as_array(a)) for a in given]
    if any(v.dtype.is_complex for v in (*graph.inputs, *graph.outputs)):
        graph = inlined(graph)
    try:
        Subject(graph).check(arrays, [level for level in LEVELS if level != "gradient"])
    except Wrong as wrong:
        types = ", ".join(str(TensorType(a.shape, as_dtype(a.dtype))) for a in arrays)
        raise _as_error(graph.name, wrong, f"a call with {types}", (
            f"call it again with TZ_CHECK=1, and read {graph.name}.lower(..., "
            f"{_TEXT.get(wrong.level, wrong.level)!r})")) from None


def _as_array(x: Any) -> np.ndarray:
    if not hasattr(x, "detach"):
        return np.asarray(x)
    return np.asarray(to_numpy(x, as_dtype(x.dtype)))


def _in_pairs(x: np.ndarray) -> np.ndarray:
    """Complex numbers as real ones with one more axis, as kernels see them."""
    return np.stack([x.real, x.imag], -1) if x.dtype.kind == "c" else x


def _known(what: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    for name in given:
        if name not in allowed:
            raise ArgumentError(f"there is no {what} {name!r}", hint=f"one of {', '.join(allowed)}")


def _dtypes(examples: Sequence[np.ndarray], asked: Sequence[Any] | None) -> list[str]:
    if asked is not None:
        return [as_dtype(d).name for d in asked]
    kinds = [as_dtype(a.dtype) for a in examples]
    if any(t.is_float for t in kinds):
        # Where integers stand beside floats they are indices or labels and stay as they are.
        return list(FLOATS if any(t.is_integer for t in kinds) else (*FLOATS, *OTHERS))
    return list(dict.fromkeys(t.name for t in kinds))[:1] or ["float32"]


class _Target:
    """What is verified: an operator, a compiled function or a plain function."""

    def __init__(self, function: Any, attrs: dict[str, Any]):
        self.attrs = attrs
        self.over: Over = ()  # the inputs that results are to be written over
        self.complex: list[bool] = []  # which inputs are
        self.kernels = [w for w in kernels_of(function).written if not chip_named(w.chip).absence
                        ] if isinstance(function, Operator) else []
        if isinstance(function, Operator):
            self.compiled, self.name = function.compiled, function.name
            self.count = sum(p.default is p.empty for p in function.tensor_params)
        elif isinstance(function, Compiled):
            self.compiled, self.name = function, function.name
            self.count = _parameters(function.function)
        elif callable(function):
            self.name = getattr(function, "__name__", "function")
            self.compiled, self.count = Compiled(function, self.name), _parameters(function)
        else:
            raise ArgumentError(f"cannot verify {function!r}",
                                hint="pass an operator or a function of tensors")

    def examples(self, args: Sequence[Any]) -> list[Any]:
        if args:
            self.over = self.compiled.graph_over(args, self.attrs)[1]
            self.attrs = self.compiled.without_out(self.attrs)[0]
            given, self.rebuild = self.compiled.arguments(args, self.attrs)
            arrays = [_as_array(a) for a in given]
            self.complex = [a.dtype.kind == "c" for a in arrays]
            return list(map(_in_pairs, arrays))
        error: Exception | None = None
        for dtype, shapes in itertools.product((np.float32, np.int32),
                                               likely_shapes(self.count)):
            arrays = [np.ones(s, dtype) for s in shapes]
            try:
                self.compiled.graph(arrays, self.attrs)
            except (TerrazzoError, TypeError, ValueError) as e:
                error = error or e
                continue
            self.rebuild = self.compiled.arguments(arrays, self.attrs)[1]
            return arrays
        raise ArgumentError(f"no inputs could be found that suit {self.name}: "
                            f"{str(error).splitlines()[0]}",
                            hint=f"pass examples: {self.name}.verify(x, ...)") from error

    def graph(self, types: Sequence[TensorType]) -> Graph:
        """The function on real numbers: complex ones come and go in pairs."""
        seen = self.complex or [False] * len(types)

        def function(*values: Value) -> list[Value]:
            given = [view_as_complex(v) if pairs else v
                     for v, pairs in zip(values, seen, strict=True)]
            return [whole(v) if v.dtype.is_complex else v
                    for v in map(as_value, leaves(self.rebuild.call(given)))]

        return trace(function, types, name=self.name)[0]


def _parameters(function: Callable[..., Any]) -> int:
    import inspect

    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
               for p in inspect.signature(function).parameters.values())


@dataclass
class _Trial:
    """All kinds of inputs of one type."""

    target: _Target
    examples: Sequence[np.ndarray]
    dtype: str
    levels: Sequence[str]
    row: Row
    report: Report
    subjects: dict[Any, Subject] = field(default_factory=dict)
    backwards: dict[Any, Subject] = field(default_factory=dict)

    def run(self, kind: str, rng: np.random.Generator) -> None:
        """Check everything on inputs of one kind."""
        reason = None
        for sample in samples(self.examples, as_dtype(self.dtype), kind, rng):
            key = tuple(sample.types)
            try:
                if key not in self.subjects:
                    self.subjects[key] = Subject(self.target.graph(sample.types),
                                                 self.target.over)
            except (TerrazzoError, TypeError, ValueError, ZeroDivisionError, IndexError) as error:
                reason = f"{self.dtype}, {kind}: {str(error).splitlines()[0]}"
                continue
            if kind in _UNENDING and _has_loop(self.subjects[key].inlined):
                reason = f"{self.dtype}, {kind}: a while_loop need not end for such numbers"
                continue
            if not _has_meaning(self.subjects[key], sample):
                reason = f"{self.dtype}, {kind}: the reference does not accept such inputs"
                continue
            try:
                self.subjects[key].check(sample.arrays, self.levels, self.row)
                if KERNEL in self.levels:
                    self._check_kernels(self.subjects[key], sample)
                if "gradient" in self.levels and kind != "strided":  # the numbers are like random
                    self._check_gradient(sample, rng)
            except Wrong as wrong:
                raise self._error(kind, sample, wrong) from None
            self.row.kinds.append(kind)
        if reason is not None and kind not in self.row.kinds:
            self.report.refused.append(reason)

    def _check_kernels(self, subject: Subject, sample: Sample) -> None:
        """Kernels by hand against what the operator means."""
        for written in self.target.kernels:
            if not check_written(written, self.target.rebuild, subject, sample.arrays, self.row):
                self.row.skipped(KERNEL, written.name, "it is not for such types, or nothing here "
                                 "compiles it")

    def _check_gradient(self, sample: Sample, rng: np.random.Generator) -> None:
        """The derivative against differences, then the derivative's own compilation."""
        name = self.target.name
        try:
            graph, arrays = self._in_float64(sample)
        except TerrazzoError as error:  # it is about a type, as a bitcast is
            self.row.skipped("gradient", name, f"in float64, {str(error).splitlines()[0]}")
            return
        try:
            difference = check_gradient(graph, arrays, rng)
        except NoGradient as error:
            self.row.skipped("gradient", name, str(error))
            return
        self.row.compared("gradient", difference)
        if difference.index is not None:
            raise Wrong("gradient", f"the gradient of {name}", difference)
        key = tuple(sample.types)
        source = self.subjects[key].source
        if key not in self.backwards:
            try:
                self.backwards[key] = Subject(autodiff.vjp_graph(source))
            except NotDifferentiable as error:  # its parts may be, which is what was compared
                self.row.skipped("gradient", f"the compiled gradient of {name}", error.message)
                return
        backward = self.backwards[key]
        dims = graph_evaluate.bind_dims(source, sample.arrays)
        weights = [rng.uniform(0.5, 1.5, graph_evaluate.concrete(v.shape, dims)).astype(v.dtype.np)
                   for v in backward.source.inputs[len(source.inputs):]]
        backward.check([*sample.arrays, *weights], self.levels, self.row)

    def _in_float64(self, sample: Sample) -> tuple[Graph, list[np.ndarray]]:
        """Traced in float64, so that constants in the function are not rounded to another type."""
        types = [TensorType(t.shape, float64 if t.dtype.is_float else t.dtype)
                 for t in sample.types]
        return self.target.graph(types), [as_float64(a) for a in sample.arrays]

    def _error(self, kind: str, sample: Sample, wrong: Wrong) -> VerifyError:
        name = self.target.name
        types = ", ".join(str(TensorType(a.shape, as_dtype(a.dtype))) for a in sample.arrays)
        again = f"tz.verify({name}, ..., dtypes=[{self.dtype!r}], kinds=[{kind!r}])"
        return _as_error(name, wrong, f"{self.dtype}, {kind} inputs {types}", (
            f"reproduce with {again}, and read {name}.lower(..., "
            f"{_TEXT.get(wrong.level, wrong.level)!r})"))


def _has_loop(graph: Graph) -> bool:
    return any(node.op.name == "while_loop" or any(
        isinstance(g, Graph) and _has_loop(g) for g in node.attrs.values())
        for node in graph.nodes)


def _has_meaning(subject: Subject, sample: Sample) -> bool:
    """Whether numpy accepts the inputs: it refuses, for instance, the maximum of nothing."""
    try:
        graph_evaluate.run(subject.source, sample.arrays)
    except (ValueError, IndexError):
        return False
    return True


def _as_error(name: str, wrong: Wrong, circumstances: str, hint: str) -> VerifyError:
    return VerifyError(
        f"{name} is wrong at level {wrong.level}, in {wrong.what}: {wrong.describe()} "
        f"({circumstances})",
        level=wrong.level, operator=wrong.what, index=wrong.difference.index,
        expected=wrong.difference.expected, got=wrong.difference.got, where=wrong.where or None,
        hint=hint)


_TEXT = {"graph": "canonical", "code": "llvm", "gradient": "graph", KERNEL: "kernels"}


# ---------------------------------------------------------------- progress
@contextmanager
def _progress(name: str, steps: int) -> Iterator[Callable[[], None]]:
    """A progress bar on the terminal, once the work has taken a second."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    started = time.perf_counter()
    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(f"verifying {name}", total=steps)

    def advance() -> None:
        bar.advance(task)
        if not bar.live.is_started and time.perf_counter() - started > 1.0:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()


__all__ = ["FLOATS", "KINDS", "LEVELS", "OTHERS", "Report", "Subject", "VerifyError", "Wrong",
           "check_call", "verify"]
