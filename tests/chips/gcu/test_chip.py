"""Our own compiler on a described chip: the operator tests, models, and times that never vary."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.gcu.build import compiler
from terrazzo.chips.gcu.chip import Described
from terrazzo.chips.gcu.counting import counted
from terrazzo.chips.gcu.device import devices
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.options import Options
from terrazzo.errors import MissingDependency

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import test_every_operator as every  # noqa: E402
from test_every_operator import test_values  # noqa: E402  (the very same, on another chip)

try:
    compiler()
except MissingDependency as missing:  # the runtime library is built by one
    pytest.skip(str(missing), allow_module_level=True)


@pytest.fixture(autouse=True)
def gcu() -> Iterator[tz.Chip]:
    with tz.chip("gcu") as chip:
        yield chip


def test_no_mark_of_another_file_leaves_the_operator_tests_out() -> None:
    assert {m.name for m in test_values.pytestmark} <= {"parametrize"}


@pytest.mark.slow
@pytest.mark.parametrize(*every.test_symbolic_sizes.pytestmark[0].args)
def test_symbolic_sizes(name: str, row: every.Case, rng: np.random.Generator) -> None:
    every.test_symbolic_sizes(name, row, rng)


def attention(q: Any, k: Any, v: Any) -> Any:
    return tz.scaled_dot_product_attention(q, k, v)


CASES = {
    "softmax": (tz.softmax, [(64, 300)]),
    "layer_norm": (lambda x, w, b: tz.layer_norm(x, weight=w, bias=b), [(50, 96), (96,), (96,)]),
    "matmul": (tz.matmul, [(130, 70), (70, 90)]),
    "attention": (attention, [(2, 4, 33, 16)] * 3),
}


@pytest.mark.parametrize("name", CASES)
def test_cycles_are_the_same_in_every_run(name: str, gcu: Described, rng: np.random.Generator
                                          ) -> None:
    function, shapes = CASES[name]
    arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    call = tz.jit(function)
    np.testing.assert_allclose(call(*arrays), tz.jit(function).on("cpu")(*arrays), rtol=1e-4,
                               atol=1e-5)
    times = {gcu.seconds(lambda: call(*arrays)) for _ in range(10)}
    assert len(times) == 1 and times.pop() > 0


def test_profiles_tell_modelled_time(gcu: Described, rng: np.random.Generator) -> None:
    x = rng.standard_normal((300, 200)).astype(np.float32)
    call = tz.jit(lambda x: tz.softmax(tz.matmul(x, x.T)))
    call(x)
    with tz.profile() as recorded:
        call(x)
        call(x)
    first, again = recorded.runs
    assert [k.duration_ns for k in first.kernels] == [k.duration_ns for k in again.kernels]
    assert first.duration_ns == again.duration_ns == sum(k.duration_ns for k in first.kernels)
    with devices(gcu.description).traced() as records:
        call(x)
    kernels = {k.name for k in first.kernels}
    cycles = sum(r.cycles for r in records if r.name.decode() in kernels)
    assert first.duration_ns == cycles * 1_000_000 // gcu.description.clock_khz > 0


SYMBOLIC = [case for case in every.CASES if case.values[0] in (
    "scaled_dot_product_attention", "batch_matmul", "tensordot", "nll_loss", "matmul_integer",
    "conv", "layer_norm", "softmax", "cumsum", "max_pool_indices")]


@pytest.mark.parametrize(("name", "row"), SYMBOLIC)
def test_counts_of_symbolic_sizes_stay_short(name: str, row: every.Case, gcu: Described,
                                             rng: np.random.Generator) -> None:
    """Compile time goes by the length of the code: counts must not outgrow what they count."""
    graph = every.symbolic_graph(name, every.inputs_of(row, rng, "float32"), row)
    functions = Lowering(graph, gcu, options=Options.now()).functions
    assert functions
    for function in functions:
        plain, long = (len(str(f)) for f in (
            function, counted(function, gcu.description, per="task")))
        assert long < 5 * plain + 1000, (function.name, plain, long)
