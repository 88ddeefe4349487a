"""Runs a traced graph in torch, operator by operator: the rival that benchmarks compare with.

A composite operator that torch has a function of its own for is one call, as a torch user would
write it; any other is run by its body.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from terrazzo.base.scalar_table import by_operator
from terrazzo.dtypes import DType
from terrazzo.errors import MissingDependency, UnsupportedOperator
from terrazzo.graph.applying import expand
from terrazzo.graph.evaluate import bind_dims, concrete
from terrazzo.graph.ir import OPERATORS, Graph, Node, Value
from terrazzo.runtime.layout import literal

# terrazzo's name -> torch's, where call and meaning are the same for tensors.
_SAME = {
    **{name: row.torch for name, row in by_operator().items() if isinstance(row.torch, str)},
    "matmul": "matmul", "outer": "outer", "relu": "relu",
}

# Functions of torch.nn.functional with the same call.
_FUNCTIONAL = {
    "relu6": "relu6", "hardswish": "hardswish", "silu": "silu", "mish": "mish",
    "softsign": "softsign", "tanhshrink": "tanhshrink", "logsigmoid": "logsigmoid",
    "selu": "selu", "linear": "linear",
}  # fmt: skip

Rule = Callable[..., Any]

# With these, a literal is written as a number, as a person would: torch has faster ways for it.
_ARITHMETIC = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul,
               "divide": operator.truediv, "power": operator.pow}


def _with_number(node: Node) -> tuple[int, Rule] | None:
    """Which operand of an arithmetic node is not a literal, and the operation on that one."""
    function = _ARITHMETIC.get(node.op.name)
    if function is None:
        return None
    for i, value in enumerate(node.inputs):
        source = None if value is None else value.node
        if source is not None and source.op.name == "constant" and source.types[0].shape == ():
            number = source.attrs["value"].item()
            if not isinstance(number, float):
                return None
            if node.op.name == "power" and number == int(number):
                number = int(number)
            return (1, partial(function, number)) if i == 0 else (
                0, partial(_swapped, function, number))
    return None


def _swapped(function: Rule, second: Any, first: Any) -> Any:
    return function(first, second)


def _rules(torch: Any) -> dict[str, Rule]:
    """What each operator is in torch: functions of the tensors and the attributes."""
    nn = torch.nn.functional
    rules: dict[str, Rule] = {name: getattr(torch, other) for name, other in _SAME.items()}
    rules |= {name: getattr(nn, other) for name, other in _FUNCTIONAL.items()}

    def reduced(function: Callable[..., Any]) -> Rule:
        def rule(x: Any, *, axis: Any, keepdims: bool, dtype: Any = None) -> Any:
            axes = tuple(range(x.ndim)) if axis is None else axis
            extra = {} if dtype is None else {"dtype": torch_dtype(torch, dtype)}
            return function(x, dim=axes, keepdim=keepdims, **extra)

        return rule

    def one_axis(function: Callable[..., Any]) -> Rule:
        return lambda x, *, axis, **_: function(x, dim=axis)

    def batch_matmul(x: Any, y: Any, *, transpose_x: bool, transpose_y: bool) -> Any:
        return torch.matmul(x.mT if transpose_x else x, y.mT if transpose_y else y)

    def layer_norm(x: Any, weight: Any = None, bias: Any = None, *, axis: Any, eps: float) -> Any:
        if axis not in (-1, x.ndim - 1):
            raise KeyError("layer_norm over another axis")
        return nn.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def rms_norm(x: Any, weight: Any = None, *, axis: Any, eps: float) -> Any:
        if axis not in (-1, x.ndim - 1):
            raise KeyError("rms_norm over another axis")
        return nn.rms_norm(x, x.shape[-1:], weight, eps)

    def attention(q: Any, k: Any, v: Any, mask: Any = None, *, causal: bool, scale: Any,
                  unseen: str) -> Any:
        if unseen != "zeros":
            raise KeyError("attention that gives nan where torch's gives zeros")
        return nn.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)

    def sliced(x: Any, *, starts: Any, stops: Any, steps: Any) -> Any:
        return x[tuple(slice(*bounds) for bounds in zip(starts, stops, steps))]

    rules |= {
        "sum": reduced(torch.sum), "mean": reduced(torch.mean), "max": reduced(torch.amax),
        "min": reduced(torch.amin), "logsumexp": reduced(torch.logsumexp),
        "softmax": one_axis(nn.softmax), "log_softmax": one_axis(nn.log_softmax),
        "cumsum": one_axis(torch.cumsum), "cumprod": one_axis(torch.cumprod),
        "batch_matmul": batch_matmul, "layer_norm": layer_norm, "rms_norm": rms_norm,
        "scaled_dot_product_attention": attention, "slice": sliced,
        "gelu": lambda x, *, approximate: nn.gelu(x, approximate=approximate),
        "leaky_relu": lambda x, *, negative_slope: nn.leaky_relu(x, negative_slope),
        "elu": lambda x, *, alpha: nn.elu(x, alpha),
        "reshape": lambda x, *, shape: x.reshape(shape),
        "permute_dims": lambda x, *, axes: x.permute(axes),
        "broadcast_to": lambda x, *, shape: x.expand(shape),
        "concat": lambda *xs, axis: torch.cat(xs, dim=axis),
        "take": lambda x, i, *, axis: torch.index_select(x.reshape(-1) if axis is None else x,
                                                         axis or 0, i.reshape(-1)),
        "embedding": lambda weight, i: nn.embedding(i, weight),
        "astype": lambda x, *, dtype: x.to(torch_dtype(torch, dtype)),
        "full": lambda *, shape, value, dtype=None: torch.full(
            shape, value, dtype=None if dtype is None else torch_dtype(torch, dtype)),
        "constant": lambda *, value: to_torch(value),
    }  # fmt: skip
    return rules


def torch_dtype(torch: Any, dtype: Any) -> Any:
    """The torch type of the same name."""
    from terrazzo.dtypes import as_dtype

    return getattr(torch, as_dtype(dtype).name)


def import_torch() -> Any:
    """torch, or an error that says what it is needed for."""
    try:
        import torch
    except ImportError:
        raise MissingDependency("comparing with torch needs the package torch",
                                hint="install it with: pip install torch") from None
    return torch


def to_torch(array: Any) -> Any:
    """A tensor on the memory of an array (a copy only for types that numpy does not know)."""
    import torch

    if hasattr(array, "data_ptr"):
        return array
    array = np.asarray(array)
    if array.dtype.kind in "biuf":
        return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    kind = torch_dtype(torch, array.dtype)
    return torch.from_numpy(array.astype(np.float32)).to(kind)


def to_numpy(tensor: Any, dtype: DType) -> np.ndarray:
    """An array of the values of a tensor."""
    tensor = literal(tensor.detach()).cpu()
    if dtype.np.kind in "biuf":
        return tensor.numpy()
    return tensor.float().numpy().astype(dtype.np)


def torch_function(graph: Graph, dims: Mapping[Any, int] | None = None) -> Callable[..., Any]:
    """A function of torch tensors that computes a graph, for eager mode and for torch.compile.

    Raises UnsupportedOperator when an operator has no counterpart.
    """
    torch = import_torch()
    places = {v: i for i, v in enumerate(graph.inputs)}
    code = _steps(graph, _rules(torch), dims or {}, places)
    outputs = [places[v] for v in graph.outputs]

    def run(*tensors: Any) -> Any:
        memory = list(tensors)
        for rule, inputs, attrs in code:
            memory.append(rule(*[None if i is None else memory[i] for i in inputs], **attrs))
        results = [memory[i] for i in outputs]
        return results[0] if len(results) == 1 else tuple(results)

    return run


_Code = list[tuple[Rule, list[int | None], dict[str, Any]]]


def _steps(graph: Graph, rules: Mapping[str, Rule], dims: Mapping[Any, int],
           places: dict[Value, int]) -> _Code:
    """Calls in order, each putting one more result into memory; `places` says where values are."""
    code: _Code = []
    base = len(places)

    def add(rule: Rule, inputs: Sequence[int | None], attrs: dict[str, Any]) -> int:
        code.append((rule, list(inputs), attrs))
        return base + len(code) - 1

    def visit(node: Node, table: dict[Value, int]) -> None:
        inputs = [None if v is None else table[v] for v in node.inputs]
        attrs = {k: concrete(v, dims) for k, v in node.attrs.items()}
        ours = OPERATORS.get(node.op.name) is node.op  # a user may have one of the same name
        rule = rules.get(node.op.name) if ours else None
        literal = _with_number(node) if ours else None
        if literal is not None:
            which, operation = literal
            table[node.outputs[0]] = add(operation, [inputs[which]], {})
            return
        if rule is not None and len(node.types) == 1:
            if node.op.name == "constant":
                value = to_torch(node.attrs["value"])
                table[node.outputs[0]] = add(lambda value=value: value, [], {})
            else:
                table[node.outputs[0]] = add(rule, inputs, attrs)
            return
        if node.op.body is None:
            raise UnsupportedOperator(f"operator {node.op.name!r} has no counterpart in torch",
                                      where=node.where or None)
        fresh = [None if v is None else Value(v.type) for v in node.inputs]
        inner = {v: i for v, i in zip(fresh, inputs) if v is not None and i is not None}
        results = expand(node.op, fresh, attrs)
        for part in Graph(node.op.name, (), results).nodes:
            visit(part, inner)
        table.update((v, inner[r]) for v, r in zip(node.outputs, results, strict=True))

    for node in graph.nodes:
        visit(node, places)
    return code


def run_in_torch(graph: Graph, arrays: Sequence[Any]) -> list[Any]:
    """The outputs of a graph, computed by torch."""
    given = [np.asarray(a) if not hasattr(a, "data_ptr") else a for a in arrays]
    dims = bind_dims(graph, given)
    result = torch_function(graph, dims)(*map(to_torch, given))
    return list(result) if isinstance(result, tuple) else [result]
