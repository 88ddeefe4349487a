"""Models imported with symbolic sizes: what shapes come out, and whether results are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from terrazzo import index
from terrazzo.base.shapes import dim
from terrazzo.dtypes import as_dtype
from terrazzo.frontends.onnx import convert
from terrazzo.frontends.onnx.importer import Imported, import_nodes
from terrazzo.frontends.onnx.model import load_model
from terrazzo.graph import evaluate
from terrazzo.graph.ir import TensorType

assert convert  # importing it registers the converters

Shapes = Mapping[str, Sequence[Any]]  # names of sizes, sizes, or symbolic ones


def imported(model: onnx.ModelProto, shapes: Shapes, known: Mapping[str, np.ndarray]) -> Imported:
    """The model as a graph for inputs of these shapes; the rest of them is known."""
    loaded = load_model(model.SerializeToString())
    infos = {i.name: i for i in loaded.input_infos}
    types = {n: TensorType(
        tuple(dim(s) if isinstance(s, str) else s for s in shape),
        as_dtype(onnx.helper.tensor_dtype_to_np_dtype(infos[n].type.tensor_type.elem_type)))
        for n, shape in shapes.items()}
    result = import_nodes(list(enumerate(loaded.graph.node)), loaded.opsets, types,
                          {**loaded.weights, **known}, [o.name for o in loaded.graph.output])
    assert not result.put_off, result.put_off
    return result


def shapes_of(model: onnx.ModelProto, shapes: Shapes, known: Mapping[str, np.ndarray], *,
              guards: bool = False) -> Any:
    """The shapes of the model's results, and what of sizes they rely on."""
    result = imported(model, shapes, known)
    found = [v.shape for v in result.graph.outputs]
    return (found, result.guards) if guards else found


def check_symbolic(model: onnx.ModelProto, shapes: Shapes, known: Mapping[str, np.ndarray],
                   sizes: Sequence[Mapping[str, int]], rtol: float = 1e-5) -> Imported:
    """Compare one import for all sizes with ONNX's evaluator at several."""
    from onnx.reference import ReferenceEvaluator

    result = imported(model, shapes, known)
    rng = np.random.default_rng(0)
    reference = ReferenceEvaluator(model)
    for given in sizes:
        feeds = {v.name: _sample(rng, [index.evaluate(n, given) for n in v.shape], v.dtype)
                 for v in result.graph.inputs}
        assert all(guard.holds(given) for guard in result.guards)
        found = {**result.constants, **dict(zip(result.outputs, evaluate.run(
            result.graph, [feeds[n] for n in result.inputs]), strict=True))}
        expected = reference.run(None, {**known, **feeds})
        for info, theirs in zip(model.graph.output, expected, strict=True):
            mine = np.asarray(found[info.name])
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
            np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=1e-6)
    return result


def _sample(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray:
    if dtype.is_float:
        return np.asarray(rng.standard_normal(shape)).astype(dtype.np)
    return np.asarray(rng.integers(0, 2, shape)).astype(dtype.np)
