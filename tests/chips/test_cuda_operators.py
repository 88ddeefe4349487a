"""Every operator's kernels for GPUs: their numbers, simulated on the CPU; their code, for sm_90."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cuda.chip import Cuda
from terrazzo.chips.cuda.forms import ON_CPU
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.options import Options
from terrazzo.compiler.rewriting import inlined
from terrazzo.expr.ir import Program
from terrazzo.graph.ir import operator_named
from terrazzo.knobs import knobs
from terrazzo.runtime.hosted import compiled_parts, needs_host

pytest.importorskip("triton")
pytestmark = [pytest.mark.triton]

sys.path[:0] = [str(Path(__file__).parents[1])]

import test_every_operator as every  # noqa: E402


@pytest.fixture(autouse=True)
def cuda() -> Iterator[tz.Chip]:
    with knobs.override(cuda_simulate=True), tz.chip("cuda") as chip:
        yield chip


def slowly(test: Any) -> Any:
    """A copy of a test that is marked slow: marks go to the function, which others run too."""
    copy = FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__,
                        test.__closure__)
    copy.__dict__.update(test.__dict__, pytestmark=[*test.pytestmark, pytest.mark.slow.mark])
    return copy


# The very same tests, on another chip.
test_values = slowly(every.test_values)
test_gradients = slowly(every.test_gradients)
test_symbolic_sizes = slowly(every.test_symbolic_sizes)

SLICE = [c for c in every.CASES if c.id in (
    "gelu-0", "softmax-0", "layer_norm-0", "rms_norm-0", "sum-0", "sum-1", "mean-0", "max-1",
    "argmax-0", "where-0", "take-0", "permute_dims-0", "concat-0", "uniform-0", "cumsum-0",
    "sort-0", "matmul-0", "conv-0", "while_loop-0", "scan-0", "scaled_dot_product_attention-0",
    "bitcast-0", "astype-2", "astype-4", "erfinv-0", "lgamma-0", "isnan-0", "pad-0", "cond-0")]


@pytest.mark.parametrize(("name", "row"), SLICE)
def test_values_of_some(name: str, row: every.Case, rng: np.random.Generator) -> None:
    arrays = every.inputs_of(row, rng, "float32")
    every.check(every.graph_of(operator_named(name), arrays, row), every.present(arrays))


@cache
def programs(name: str, case: int) -> tuple[Program, ...]:
    """The programs that one case of an operator becomes."""
    row = [c for c in every.CASES if c.values[0] == name][case].values[1]
    options = Options.now()
    chip = options.chip
    graph = every.graph_of(operator_named(name), every.inputs_of(
        row, np.random.default_rng(0), "float32"), row)
    flat = inlined(graph, options=options)
    parts = list(compiled_parts(flat)) if needs_host(flat) else [flat]
    return tuple(g.program for part in parts
                 for g in Lowering(part, chip, options=options).fused.groups)


NUMBERS = [(name, i) for name in dict.fromkeys(c.values[0] for c in every.CASES)
           for i in range(sum(c.values[0] == name for c in every.CASES))]


def test_what_has_no_kernel_is_a_short_list_with_reasons(cuda: Cuda) -> None:
    missing, kernels = set(), 0
    for name, case in NUMBERS:
        for program in programs(name, case):
            form = cuda.form(program)
            kernels += len(form.kernels)
            if not form.kernels:
                assert program.kind == "opaque", (name, form.reason)
                missing.add(program.attrs["node"].op.name)
    assert missing == set(ON_CPU)
    assert kernels > 700


@pytest.mark.slow
def test_every_kernel_is_compiled_for_hopper(cuda: Cuda) -> None:
    seen = set()
    for name, case in NUMBERS:
        for program in programs(name, case):
            text = cuda.source("triton", program)
            if cuda.form(program).kernels and text not in seen:
                seen.add(text)
                assert ".target sm_90" in cuda.source("ptx", program), name
    assert len(seen) > 400


@pytest.mark.parametrize("name", ["gelu", "softmax", "layer_norm", "sum", "uniform"])
def test_some_kernels_are_compiled_for_hopper(cuda: Cuda, name: str) -> None:
    for program in programs(name, 0):
        assert ".target sm_90" in cuda.source("ptx", program)
