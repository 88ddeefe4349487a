"""Programs of the fuzzer: what they are, what they compute, and their text in Python.

A program is a list of calls of operators, each on inputs or on earlier results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from terrazzo.dtypes import as_dtype
from terrazzo.graph.ir import OPERATORS, Graph, TensorType
from terrazzo.graph.trace import trace
from terrazzo.index import Index, Var
from terrazzo.ops import PUBLIC
from terrazzo.tools import samples

LITERAL_ELEMENTS = 24  # arrays up to this size are written out in a reproducer


@dataclass(frozen=True)
class Input:
    """One input: its type, and how its values are made."""

    shape: tuple[int, ...]
    dtype: str
    fill: str = "draw"  # a function of tools.samples; "ones"; "index"; or "literal"
    seed: int = 0
    below: int = 1  # for "index": the values are 0..below-1
    strided: bool = False
    literal: tuple[Any, ...] = ()

    def array(self) -> np.ndarray:
        """The values."""
        kind, rng = as_dtype(self.dtype), np.random.default_rng(self.seed)
        if self.fill == "ones":
            made = np.ones(self.shape, kind.np)
        elif self.fill == "index":
            made = rng.integers(0, max(self.below, 1), self.shape).astype(kind.np)
        elif self.fill == "literal":
            made = np.array(self.literal, kind.np).reshape(self.shape)
        else:
            made = np.asarray(getattr(samples, self.fill)(rng, self.shape, kind))
        return samples.strided(made, rng) if self.strided else made

    def text(self) -> str:
        """The values as a Python expression."""
        np_dtype = f"tz.{'bool_' if self.dtype == 'bool' else self.dtype}.np"
        if self.fill == "ones":
            return f"np.ones({self.shape}, {np_dtype})"
        if self.fill == "index":
            return (f"np.random.default_rng({self.seed}).integers(0, {max(self.below, 1)}, "
                    f"{self.shape}).astype({np_dtype})")
        if self.fill == "literal" or math.prod(self.shape) <= LITERAL_ELEMENTS:
            flat = replace(self, strided=False).array().reshape(-1)
            numbers = ", ".join(_number(n) for n in flat.tolist())
            return f"np.array([{numbers}], {np_dtype}).reshape({self.shape})"
        return (f"samples.{self.fill}(np.random.default_rng({self.seed}), {self.shape}, "
                f"tz.{'bool_' if self.dtype == 'bool' else self.dtype})")


def _number(n: Any) -> str:
    n = float(n) if not isinstance(n, (int, bool)) else n
    return f"np.{n}".replace("-", "").replace("np.", "-np." if n < 0 else "np.") if (
        isinstance(n, float) and not math.isfinite(n)) else repr(n)


@dataclass(frozen=True)
class Ref:
    """A value of a program: input number `at` (step None), or a result of a step."""

    at: int
    step: bool = False
    output: int = 0

    def name(self, several: Mapping[int, bool]) -> str:
        """How the text calls it."""
        if not self.step:
            return f"x{self.at}"
        return f"v{self.at}[{self.output}]" if several.get(self.at) else f"v{self.at}"


@dataclass(frozen=True)
class Step:
    """One call; arguments are references, numbers, None, or for variadic operators all of them."""

    op: str
    args: tuple[Any, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    several: bool = False  # answers with a tuple

    def refs(self) -> Iterator[Ref]:
        """The values it needs."""
        yield from (a for a in self.args if isinstance(a, Ref))


@dataclass(frozen=True)
class Program:
    """Inputs, calls and results."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Ref, ...]
    symbolic: bool = False
    gradient: bool = False

    def function(self, *values: Any) -> tuple[Any, ...]:
        """The program as a function of tensors."""
        results: list[Any] = []

        def resolve(arg: Any) -> Any:
            if not isinstance(arg, Ref):
                return arg
            if not arg.step:
                return values[arg.at]
            found = results[arg.at]
            return found[arg.output] if isinstance(found, (tuple, list)) else found

        for step in self.steps:
            results.append(call(step.op, [resolve(a) for a in step.args], dict(step.attrs)))
        return tuple(resolve(o) for o in self.outputs)

    def types(self) -> list[TensorType]:
        """The types to trace with; with `symbolic`, one dimension for each size over 1."""
        names: dict[int, Var] = {}

        def size(n: int) -> Index:
            if not self.symbolic or n < 2:
                return n
            return names.setdefault(n, Var(f"n{n}", 0))

        return [TensorType(tuple(map(size, i.shape)), as_dtype(i.dtype)) for i in self.inputs]

    def graph(self) -> Graph:
        """The traced graph."""
        return trace(self.function, self.types(), name="program")[0]

    def script(self, why: str) -> str:
        """A Python script that shows the failure."""
        several = {i: s.several for i, s in enumerate(self.steps)}
        lines = [f'"""{why}"""', "", "import numpy as np", ""]
        lines += ["import terrazzo as tz"]
        texts = [i.text() for i in self.inputs]
        if any("samples." in t for t in texts) or any(i.strided for i in self.inputs):
            lines.append("from terrazzo.tools import samples")
        lines += ["", "", f"def program({', '.join(f'x{i}' for i in range(len(self.inputs)))}):"]
        for i, step in enumerate(self.steps):
            lines.append(f"    v{i} = {_call_text(step, several)}")
        lines += [f"    return {', '.join(o.name(several) for o in self.outputs)}", "", ""]
        for i, (given, text) in enumerate(zip(self.inputs, texts, strict=True)):
            if given.strided:
                text = f"samples.strided({text}, np.random.default_rng({given.seed}))"
            lines.append(f"x{i} = {text}")
        kinds = ("given", "symbolic") if self.symbolic else ("given",)
        names = ", ".join(["program", *(f"x{i}" for i in range(len(self.inputs)))])
        levels = "" if self.gradient else ', levels=("graph", "expr", "loop", "code")'
        return "\n".join([*lines, f"print(tz.verify({names}, kinds={kinds}{levels}))", ""])


def _call_text(step: Step, several: Mapping[int, bool]) -> str:
    args = [a.name(several) if isinstance(a, Ref) else repr(a) for a in step.args]
    if step.op == "[]":
        return f"{args[0]}[{_key_text(dict(step.attrs)['key'])}]"
    named = [f"{k}={v!r}" for k, v in step.attrs]
    return f"tz.{step.op}({', '.join(args + named)})"


def _key_text(key: Sequence[Any]) -> str:
    parts = []
    for item in key:
        if isinstance(item, slice):
            ends = ["" if e is None else str(e) for e in (item.start, item.stop, item.step)]
            parts.append(":".join(ends))
        else:
            parts.append("..." if item is Ellipsis else str(item))
    return ", ".join(parts)


def call(op: str, args: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Call an operator by name; "[]" is a subscript."""
    if op == "[]":
        return args[0][tuple(attrs["key"])]
    return (PUBLIC.get(op) or OPERATORS[op])(*args, **attrs)


def pruned(program: Program) -> Program:
    """The program without what no output needs."""
    needed: set[Ref] = set(program.outputs)
    kept: list[int] = []
    for i in reversed(range(len(program.steps))):
        if any(r.step and r.at == i for r in needed):
            kept.append(i)
            needed.update(program.steps[i].refs())
    kept.reverse()
    steps = {old: new for new, old in enumerate(kept)}
    used = sorted({r.at for r in needed if not r.step})
    inputs = {old: new for new, old in enumerate(used)}

    def moved(arg: Any) -> Any:
        if not isinstance(arg, Ref):
            return arg
        return replace(arg, at=steps[arg.at] if arg.step else inputs[arg.at])

    return replace(
        program, inputs=tuple(program.inputs[i] for i in used),
        steps=tuple(replace(program.steps[i], args=tuple(map(moved, program.steps[i].args)))
                    for i in kept),
        outputs=tuple(dict.fromkeys(moved(o) for o in program.outputs)))
