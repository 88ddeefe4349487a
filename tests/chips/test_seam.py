"""A second chip goes through the operator tests, verify, a session and a model, unchanged."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips import registry
from terrazzo.chips.spec import Roofline
from terrazzo.compiler.driver import compile_graph
from terrazzo.compiler.options import Options
from terrazzo.errors import ArgumentError, DeviceError
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "examples")]

from abacus import Abacus, Beads  # noqa: E402
from test_every_operator import (  # noqa: E402  (the very same tests, on another chip)
    test_gradients,
    test_symbolic_sizes,
    test_values,
)


@pytest.fixture(autouse=True)
def abacus() -> Iterator[tz.Chip]:
    registry.register(Abacus)
    with tz.chip("abacus") as chip:
        yield chip
    registry._registered.pop("abacus")


@pytest.fixture
def x(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((3, 5)).astype(np.float32)


def test_no_mark_of_another_file_leaves_the_operator_tests_out() -> None:
    for test in (test_values, test_gradients, test_symbolic_sizes):
        assert {m.name for m in test.pytestmark} <= {"parametrize"}


def test_the_chip_is_under_150_lines() -> None:
    assert len((HERE / "abacus.py").read_text().splitlines()) < 150


def test_it_is_the_abacus_that_counts(x: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Any] = []
    step = Beads.step

    def counting(self: Any, *args: Any) -> None:
        counted.append(self)
        step(self, *args)

    monkeypatch.setattr(Beads, "step", counting)
    np.testing.assert_allclose(tz.gelu(x), tz.gelu.on("cpu")(x), rtol=1e-6, atol=1e-7)
    assert len(counted) == 1, "once, and not on the CPU"


def test_verify_and_levels(x: np.ndarray) -> None:
    report = tz.softmax.verify(kinds=("random", "odd"), dtypes=["float32"])
    assert "every level agrees" in str(report)
    assert tz.softmax.lower(x, "beads").startswith("count k_")
    with pytest.raises(ArgumentError, match="'abacus' has no level 'asm'"):
        tz.softmax.lower(x, "asm")
    assert "llvm" not in str(Abacus.levels) and "ret void" in tz.exp.lower(x, "llvm", chip="cpu")


def test_gradients_of_a_step(x: np.ndarray) -> None:
    loss = lambda w: tz.sum(tz.tanh(tz.matmul(x, w)) ** 2)  # noqa: E731
    w = np.ones((5, 2), np.float32)
    np.testing.assert_allclose(tz.grad(loss)(w), tz.jit(tz.grad(loss)).on("cpu")(w), rtol=1e-5)


def test_control_flow_and_profile(x: np.ndarray) -> None:
    def grows(x: Any) -> Any:
        return tz.while_loop(lambda y: tz.sum(y * y) < 100, lambda y: y * 1.5, x)

    graph, _ = trace(grows, [TensorType(x.shape, tz.float32)], name="grows")
    executable = compile_graph(graph)
    assert executable.chip.name == "abacus"
    with tz.profile() as recorded:
        (got,) = executable.run([x])
    np.testing.assert_allclose(got, tz.jit(grows).on("cpu")(x), rtol=1e-6)
    assert len(recorded.runs) == 1 and recorded.runs[0].duration_ns > 0


@pytest.mark.onnx
@pytest.mark.parametrize("name", ["bert", "resnet"])
def test_a_model_in_a_session(name: str, rng: np.random.Generator) -> None:
    import onnx_models

    import terrazzo.ort as ort

    model = {
        "bert": lambda: onnx_models.bert(layers=1, hidden=8, heads=2, vocabulary=20, positions=8,
                                         sequence=4),
        "resnet": lambda: onnx_models.resnet(depths=(1,), width=4, image=8, classes=3),
    }[name]().SerializeToString()

    def run() -> list[Any]:
        session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        generator = np.random.default_rng(0)
        feeds = {i.name: generator.integers(0, 2, i.shape) if "int" in i.type else
                 generator.standard_normal(i.shape).astype(np.float32)
                 for i in session.get_inputs()}
        return session.run(None, feeds)

    here = run()
    with tz.chip("cpu"):
        there = run()
    for got, want in zip(here, there, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_chips_are_listed_and_found_by_name(x: np.ndarray, monkeypatch: pytest.MonkeyPatch
                                            ) -> None:
    listed = tz.chips()
    assert next(iter(listed)) == "cpu" and "abacus" in listed and isinstance(listed["cpu"], tz.Chip)
    assert "levels" in repr(listed) and "beads" in repr(listed)
    assert Options.now().chip.name == "abacus"
    with pytest.raises(DeviceError, match="there is no chip 'tpu'") as error:
        tz.exp.on("tpu")
    assert "abacus" in str(error.value) and "register" in str(error.value)
    monkeypatch.setattr(type(listed["cuda"]), "absence", "there is no GPU")  # nor elsewhere
    with pytest.raises(DeviceError, match="nothing can run on 'cuda'"):
        tz.exp.on("cuda")
    with pytest.raises(ArgumentError, match="taken"):
        tz.chips.register(type("Fake", (Abacus,), {"spec": tz.ChipSpec("mine", "cpu", 1, 64, 8)}))


def test_limits_are_those_of_the_description(abacus: tz.Chip) -> None:
    assert abacus.roofline() == Roofline(1e6, 1e6)
    assert 0 < abacus.seconds(lambda: sum(range(1000))) < 10
