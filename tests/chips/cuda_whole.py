"""Operators whose kernels for GPUs are written for them: what their tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cuda import forms
from terrazzo.chips.cuda.chip import Cuda
from terrazzo.chips.cuda.follow import HostPart
from terrazzo.codegen.triton.module import module_text
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.options import Options
from terrazzo.compiler.rewriting import inlined
from terrazzo.dtypes import as_dtype
from terrazzo.expr.ir import Program
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace
from terrazzo.knobs import knobs

sys.path[:0] = [str(Path(__file__).parents[1] / "codegen"), str(Path(__file__).parent)]

from cuda_simulated import simulated  # noqa: E402
from test_triton_source import Runner  # noqa: E402


def slow(*values: Any) -> Any:
    """Values of a case that takes long."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The simulated chip without help by the CPU, and the names of the kernels that it launches."""
    def refuse(self: Any, *args: Any) -> None:
        raise AssertionError("the CPU runs a part")

    monkeypatch.setattr(HostPart, "run", refuse)
    with simulated(monkeypatch, dynamic="never") as names:
        yield names


@pytest.fixture
def with_wide_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels with addresses of 64 bits, as large tensors have them."""
    monkeypatch.setattr(forms, "elements", lambda program: [1 << 31])


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Runner]:
    process = Runner(interpret=True)
    yield process
    process.close()


def chip() -> Cuda:
    return Cuda(simulated=True)


def whole_program(function: Any, *given: np.ndarray | TensorType) -> Program:
    """The one program of a function that is an operator with kernels of its own."""
    graph, _ = trace(function, [a if isinstance(a, TensorType) else TensorType(
        a.shape, as_dtype(a.dtype)) for a in given])
    with knobs.override(cuda_simulate=True), tz.chip("cuda"):
        options = Options.now()
        groups = Lowering(inlined(graph, options=options), options.chip,
                          options=options).fused.groups
    (found,) = [g.program for g in groups if g.program.kind == "opaque"]
    return found


def interpreted(runner: Runner, program: Program, inputs: Sequence[np.ndarray]
                ) -> list[np.ndarray]:
    """The results of a program, by Triton's own interpreter."""
    values = {t.name: a for t, a in zip(program.inputs, inputs, strict=True)}
    for kernel in chip().form(program).kernels:
        given = [values[t.name] for t in kernel.program.inputs]
        results = [values.get(t.name, np.zeros(t.shape, t.dtype.np))  # type: ignore[arg-type]
                   for t in kernel.program.outputs]
        made = runner(module_text(kernel.program, kernel.written), given, results, {})
        values.update(zip((t.name for t in kernel.program.outputs), made, strict=True))
    return [values[t.name] for t in program.outputs]
