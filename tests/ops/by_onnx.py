"""One ONNX operator run by onnx.reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest


def by_onnx(name: str, inputs: Sequence[Any], outputs: int = 1, opset: int = 23, **attrs: Any
            ) -> list[np.ndarray]:
    """The results of a model of a single node; None stands for a missing input."""
    pytest.importorskip("onnx")
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    given = {f"x{k}": np.asarray(a) for k, a in enumerate(inputs) if a is not None}
    node = helper.make_node(
        name, [f"x{k}" if a is not None else "" for k, a in enumerate(inputs)],
        [f"y{k}" for k in range(outputs)], **{
            k: list(v) if isinstance(v, tuple) else v for k, v in attrs.items()})
    graph = helper.make_graph(
        [node], "one", [helper.make_tensor_value_info(
            k, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for k, a in given.items()],
        [helper.make_tensor_value_info(f"y{k}", 0, None) for k in range(outputs)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return ReferenceEvaluator(model).run(None, given)
