"""Models of a single node: run compiled, and by onnx.reference or onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import terrazzo.frontends.onnx.convert  # noqa: F401 - registers the converters
from terrazzo.base.shapes import dim
from terrazzo.compiler.driver import compile_graph
from terrazzo.dtypes import as_dtype
from terrazzo.frontends.onnx.importer import Imported, import_nodes
from terrazzo.frontends.onnx.model import load_model
from terrazzo.graph.ir import TensorType

IR = 10


def one_node(operator: str, inputs: Sequence[np.ndarray | None], *, opset: int = 22,
             domain: str = "", outputs: int = 1, **attributes: Any) -> onnx.ModelProto:
    """A model of one node whose inputs are all the model's."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    results = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(operator, names, results, domain=domain, name="node", **attributes)
    graph = helper.make_graph(
        [node], "one_node",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
         for n, x in zip(names, inputs, strict=True) if x is not None],
        [helper.make_tensor_value_info(n, TensorProto.UNDEFINED, None) for n in results])
    opsets = [helper.make_opsetid("", opset if not domain else 22)]
    if domain:
        opsets.append(helper.make_opsetid(domain, opset if domain == "ai.onnx.ml" else 1))
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR)


def imported(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> Imported:
    """The model as a graph; contents of inputs are known where a converter asks for them."""
    loaded = load_model(model.SerializeToString())
    types = {n: TensorType(x.shape, as_dtype(x.dtype)) for n, x in feeds.items()}
    known = dict(loaded.weights)
    while True:
        result = import_nodes(list(enumerate(loaded.graph.node)), loaded.opsets, types, known,
                              [o.name for o in loaded.graph.output])
        asked = [n for n in result.needed if n in types]
        if not asked:
            return result
        for name in asked:
            known[name] = feeds[name]
            del types[name]


def run(operator: str, inputs: Sequence[np.ndarray | None], *, outputs: int = 1,
        **options: Any) -> list[np.ndarray]:
    """The results of one compiled node."""
    model = one_node(operator, inputs, outputs=outputs, **options)
    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    result = imported(model, feeds)
    assert not result.put_off, result.put_off
    found = dict(result.constants)
    if result.outputs:
        made = compile_graph(result.graph)(*(feeds[n] for n in result.inputs))
        made = made if isinstance(made, (tuple, list)) else [made]
        found.update(zip(result.outputs, made, strict=True))
    return [np.asarray(found[f"y{i}"]) for i in range(outputs)]


def reference(operator: str, inputs: Sequence[np.ndarray | None], **options: Any
              ) -> list[np.ndarray]:
    """The results of one node by ONNX's own evaluator."""
    from onnx.reference import ReferenceEvaluator

    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    return ReferenceEvaluator(one_node(operator, inputs, **options)).run(None, feeds)


def by_onnxruntime(operator: str, inputs: Sequence[np.ndarray | None], **options: Any
                   ) -> list[Any]:
    """The results of onnxruntime, its optimiser off; skips the test where it is not installed."""
    ort = pytest.importorskip("onnxruntime")
    settings = ort.SessionOptions()
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    settings.log_severity_level = 4
    model = one_node(operator, inputs, **options)
    for output in model.graph.output:
        output.ClearField("type")  # onnxruntime works them out
    session = ort.InferenceSession(model.SerializeToString(), settings,
                                   providers=["CPUExecutionProvider"])
    return session.run(None, {f"x{i}": x for i, x in enumerate(inputs) if x is not None})


def check(operator: str, inputs: Sequence[np.ndarray | None], *, rtol: float = 1e-5,
          atol: float = 1e-6, expected: Sequence[np.ndarray] | None = None, **options: Any) -> None:
    """Compare a compiled node with ONNX's evaluator, or with what is expected."""
    wanted = reference(operator, inputs, **options) if expected is None else expected
    got = run(operator, inputs, **options)
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, (
            mine.dtype, mine.shape, theirs.dtype, theirs.shape)
        if mine.dtype.kind not in "biufc":  # 4-bit integers, 8-bit floats, bfloat16
            mine, theirs = mine.astype(np.float32), theirs.astype(np.float32)
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=atol, equal_nan=True)


def check_symbolic(operator: str, inputs: Sequence[np.ndarray | None],
                   symbolic: Mapping[int, Sequence[int]], **options: Any) -> None:
    """One graph with symbolic sizes, at several sizes, against a graph for each size."""
    model = load_model(one_node(operator, inputs, **options).SerializeToString())
    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    types = {n: TensorType(x.shape, as_dtype(x.dtype)) for n, x in feeds.items()}
    for i, axes in symbolic.items():
        shape = [dim(f"n{i}_{a}") if a in axes else n for a, n in enumerate(feeds[f"x{i}"].shape)]
        types[f"x{i}"] = TensorType(tuple(shape), types[f"x{i}"].dtype)
    result = import_nodes(list(enumerate(model.graph.node)), model.opsets, types,
                          dict(model.weights), ["y0"])
    assert not result.put_off, result.put_off
    compiled = compile_graph(result.graph)
    for more in (0, 1, 3):
        grown = dict(feeds)
        for i, axes in symbolic.items():
            grown[f"x{i}"] = np.pad(feeds[f"x{i}"], [
                (0, more if a in axes else 0) for a in range(feeds[f"x{i}"].ndim)], "wrap")
        got = compiled(*(grown[n] for n in result.inputs))
        (wanted,) = run(operator, [grown.get(f"x{i}") for i in range(len(inputs))], **options)
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
