"""Models of many nodes in one compilation, and of nodes whose sizes are symbolic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from one_node import IR, imported, one_node, run
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from terrazzo.compiler.driver import compile_graph
from terrazzo.dtypes import as_dtype
from terrazzo.frontends.onnx.importer import import_nodes
from terrazzo.frontends.onnx.model import load_model
from terrazzo.graph.ir import TensorType

Case = tuple[str, Sequence[int | None], dict[str, Any]]  # operator, numbers of inputs, attributes


def check_all(cases: Sequence[Case], inputs: Sequence[np.ndarray], *, opset: int = 22,
              rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Compare the first output of each case with ONNX's evaluator."""
    nodes = [helper.make_node(op, ["" if i is None else f"x{i}" for i in reads], [f"y{n}"],
                              name=f"{op}{attributes}", **attributes)
             for n, (op, reads, attributes) in enumerate(cases)]
    graph = helper.make_graph(
        nodes, "several",
        [helper.make_tensor_value_info(f"x{i}", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
         for i, x in enumerate(inputs)],
        [helper.make_tensor_value_info(f"y{n}", TensorProto.UNDEFINED, None)
         for n in range(len(nodes))])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)],
                              ir_version=IR)
    feeds = {f"x{i}": x for i, x in enumerate(inputs)}
    with np.errstate(all="ignore"):
        expected = ReferenceEvaluator(model).run(None, feeds)
    result = imported(model, feeds)
    assert not result.put_off, result.put_off
    found = dict(result.constants)
    if result.outputs:
        made = compile_graph(result.graph)(*(feeds[n] for n in result.inputs))
        made = made if isinstance(made, (tuple, list)) else [made]
        found.update(zip(result.outputs, made, strict=True))
    for n, (node, theirs) in enumerate(zip(nodes, expected, strict=True)):
        mine = np.asarray(found[f"y{n}"])
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), node.name
        if mine.dtype.kind not in "biufc":
            mine, theirs = mine.astype(np.float32), theirs.astype(np.float32)
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=atol, err_msg=node.name)


def check_symbolic(operator: str, inputs: Sequence[np.ndarray | None],
                   shapes: Sequence[tuple[Any, ...] | None], *, outputs: int = 1, **options: Any
                   ) -> None:
    """Compare a node compiled for symbolic sizes with the same node compiled for known ones."""
    model = load_model(one_node(operator, inputs, outputs=outputs, **options).SerializeToString())
    given = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    types = {n: TensorType(shapes[int(n[1:])] or x.shape, as_dtype(x.dtype))
             for n, x in given.items()}
    result = import_nodes(list(enumerate(model.graph.node)), model.opsets, types, {},
                          [o.name for o in model.graph.output])
    assert not result.put_off, result.put_off
    made = compile_graph(result.graph)(*(given[n] for n in result.inputs))
    made = made if isinstance(made, (tuple, list)) else [made]
    expected = run(operator, inputs, outputs=outputs, **options)
    for name, mine in zip(result.outputs, made, strict=True):
        np.testing.assert_allclose(mine, expected[int(name[1:])], rtol=1e-4, atol=1e-5)
