"""Loading a model takes work that grows with its length, and no faster; counted, not timed."""

from __future__ import annotations

import cProfile
import pstats
import re
from typing import Any

import numpy as np
import pytest

from terrazzo.compiler.levels import level_text
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.options import Options
from terrazzo.compiler.rewriting import inlined
from terrazzo.frontends.onnx.session import Session

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

pytestmark = pytest.mark.onnx
SHORT, LONG = 150, 600


def chain(count: int) -> Any:
    """Products, sums and activations in turns: kernels that are equal, and buffers that are not."""
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.normal(size=(8, 8)).astype(np.float32) / 3, "w"),
               numpy_helper.from_array(rng.normal(size=8).astype(np.float32), "b")]
    nodes, value = [], "x"
    for i in range(count):
        kind = ("MatMul", "Add", "Relu", "Mul", "Tanh")[i % 5]
        other = {"MatMul": ["w"], "Add": ["b"], "Mul": ["b"]}.get(kind, [])
        nodes.append(helper.make_node(kind, [value, *other], [f"h{i}"]))
        value = f"h{i}"
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (4, 8)) for n in ("x", value)]
    return helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:], weights),
                             opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def calls_of(count: int, stage: str) -> int:
    """Python calls of one stage on the way of a chain from file to machine code."""
    session = Session(chain(count), compile_now=False)
    options = Options.now()
    profile = cProfile.Profile()
    with profile if stage == "import" else _nothing():
        imported = session.imported
    assert imported is not None and not imported.put_off
    with profile if stage == "rewrites" else _nothing():
        graph = inlined(imported.graph, options=options)
        lowering = Lowering(graph, options.chip, (), options, is_inlined=True)
        assert lowering.graph
    with profile if stage == "code" else _nothing():
        assert level_text(lowering, "llvm")
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("stage", ["import", "rewrites", "code"])
def test_work_is_linear_in_the_number_of_nodes(stage: str) -> None:
    calls_of(10, stage)  # what is made once is made now
    short, long = calls_of(SHORT, stage), calls_of(LONG, stage)
    assert short > 1000, "the stage was looked at"
    assert long < 1.3 * LONG / SHORT * short


def test_no_function_grows_with_the_number_of_kernels() -> None:
    """LLVM's time for a function of many branches grows with their square."""
    def largest(count: int) -> int:
        options = Options.now()
        imported = Session(chain(count), compile_now=False).imported
        assert imported is not None
        text = level_text(Lowering(imported.graph, options.chip, (), options), "llvm")
        return max(body.count("\n") for body in re.findall(r"^define .*?^}", text, re.M | re.S))

    assert largest(600) == pytest.approx(largest(1200), rel=0.1)


def test_a_long_chain_is_right() -> None:
    model = chain(LONG)
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
    weight, bias = (numpy_helper.to_array(t).astype(np.float64)
                    for t in model.graph.initializer)
    steps = (lambda h: h @ weight, lambda h: h + bias, lambda h: np.maximum(h, 0),
             lambda h: h * bias, np.tanh)
    expected = x.astype(np.float64)
    for i in range(LONG):
        expected = steps[i % 5](expected)
    session = Session(model)
    assert session.whole is not None and len(session.whole.executable.artifact.kernels) > 64
    np.testing.assert_allclose(session.run({"x": x})[0], expected, atol=1e-4)
