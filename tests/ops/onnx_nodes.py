"""What onnx's reference implementation says about one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def onnx_node(operator: str, inputs: Sequence[np.ndarray | None], *, opset: int = 22,
              outputs: int = 1, **attributes: Any) -> list[np.ndarray]:
    """The results of a model of a single node; inputs that are None are left out."""
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    names = ["" if a is None else f"x{i}" for i, a in enumerate(inputs)]
    results = [f"y{i}" for i in range(outputs)]
    attributes = {k: v for k, v in attributes.items() if v is not None}
    node = helper.make_node(operator, names, results, **attributes)
    given = {n: np.asarray(a) for n, a in zip(names, inputs, strict=True) if n}
    graph = helper.make_graph(
        [node], "one",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
         for n, a in given.items()],
        [helper.make_tensor_value_info(n, TensorProto.UNDEFINED, None) for n in results])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    with np.errstate(all="ignore"):
        return ReferenceEvaluator(model).run(None, given)
