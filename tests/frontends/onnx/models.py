"""Little ONNX models for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT


def model(nodes: Sequence[Any], inputs: Mapping[str, tuple[Any, ...]], outputs: Sequence[str],
          weights: Mapping[str, np.ndarray] | None = None, *, opset: int = 20,
          kinds: Mapping[str, int] | None = None, functions: Sequence[Any] = (),
          domains: Mapping[str, int] | None = None) -> onnx.ModelProto:
    """A model of some nodes; `kinds` gives element types that are not float."""
    kinds = kinds or {}
    graph = helper.make_graph(
        list(nodes), "test",
        [helper.make_tensor_value_info(n, kinds.get(n, FLOAT), s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, kinds.get(n, FLOAT), None) for n in outputs],
        [numpy_helper.from_array(a, n) for n, a in (weights or {}).items()])
    imports = [helper.make_opsetid("", opset)]
    imports += [helper.make_opsetid(d, v) for d, v in (domains or {}).items()]
    return helper.make_model(graph, opset_imports=imports, functions=list(functions),
                             ir_version=10)


def node(op: str, inputs: str, outputs: str, **attrs: Any) -> Any:
    """A node, with names separated by blanks; "_" leaves an input out."""
    names = ["" if n == "_" else n for n in inputs.split()]
    domain = attrs.pop("domain", "")
    return helper.make_node(op, names, outputs.split(), domain=domain, **attrs)
