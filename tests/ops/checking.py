"""What operator tests share: running each level, comparing, and checking gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import terrazzo.ops  # noqa: F401  (registers every operator)
from terrazzo.base.shapes import Shape, dim, num_elements
from terrazzo.dtypes import as_dtype
from terrazzo.expr import evaluate as expr_evaluate
from terrazzo.expr.ir import Program, Tensor, placeholder, reads
from terrazzo.graph import evaluate as graph_evaluate
from terrazzo.graph.applying import expand
from terrazzo.graph.ir import Graph, Node, Operator, TensorType, Value, operator_named
from terrazzo.graph.trace import trace
from terrazzo.index import Var
from terrazzo.loop import interpret
from terrazzo.loop.ir import Buffer, Function

# A few units in the last place: a reference and its rival may round in another order.
TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
HALVES = ("float16", "bfloat16")


def op(name: str) -> Operator:
    """The registered operator."""
    return operator_named(name)


def type_of(array: np.ndarray, shape: Shape | None = None) -> TensorType:
    """The type of an array, with symbolic sizes if a shape is given."""
    return TensorType(tuple(array.shape) if shape is None else shape, as_dtype(array.dtype))


def evaluate(function: Callable[..., Any], *arrays: Any, wide: bool = False,
             shapes: Sequence[Shape | None] | None = None, **attrs: Any) -> Any:
    """Trace a function or operator on the arrays' types and run the graph with numpy."""
    given = [None if a is None else np.asarray(a) for a in arrays]
    types = [None if a is None else type_of(a, None if shapes is None else shapes[i])
             for i, a in enumerate(given)]
    graph, structure = trace(function, types, name="test", **attrs)
    results = graph_evaluate.run(graph, [a for a in given if a is not None], wide=wide)
    for value, result in zip(graph.outputs, results, strict=True):
        assert wide or as_dtype(result.dtype) is value.dtype, "inference and result disagree"
        assert len(value.shape) == result.ndim
        assert all(n == size for n, size in zip(value.shape, result.shape) if isinstance(n, int))
    return results[0] if isinstance(structure, int) else tuple(results)


def infer(function: Callable[..., Any], *types: TensorType | None, **attrs: Any) -> TensorType:
    """The inferred type of a function's only result."""
    return trace(function, types, name="test", **attrs)[0].outputs[0].type


def symbolic_shapes(arrays: Sequence[np.ndarray]) -> tuple[list[Shape], dict[Var, int]]:
    """One symbolic dimension for every distinct size over 1, and what each stands for."""
    names: dict[int, Var] = {}
    shapes: list[Shape] = [tuple(int(n) if n < 2 else names.setdefault(n, dim(f"n{n}"))
                                 for n in a.shape) for a in arrays]
    return shapes, {var: size for size, var in names.items()}


def express(operator: Operator, arrays: Sequence[np.ndarray], symbolic: bool = False,
            **attrs: Any) -> np.ndarray:
    """Run a primitive operator's tensor expression element by element."""
    shapes, dims = symbolic_shapes(arrays)
    types = [type_of(a, s if symbolic else None) for a, s in zip(arrays, shapes, strict=True)]
    assert operator.infer is not None and operator.expr is not None
    bound = operator.bind(arrays, attrs)[1]
    out = operator.infer(*types, **bound)
    inputs = [placeholder(t.shape, t.dtype, f"x{i}") for i, t in enumerate(types)]
    result = operator.expr(*inputs, out=out, **bound)
    assert result.dtype is out.dtype and result.shape == out.shape
    program = Program(operator.name, tuple(inputs), (result,), (result,))
    return expr_evaluate.run(program, arrays, dims if symbolic else {})[0]


def check_primitive(name: str, *arrays: Any, rtol: float | None = None, **attrs: Any) -> np.ndarray:
    """A primitive's expression, with known and with symbolic sizes, equals its reference."""
    given = [np.asarray(a) for a in arrays]
    expected = evaluate(op(name), *given, **attrs)
    for symbolic in (False, True):
        close(express(op(name), given, symbolic, **attrs), expected, rtol=rtol)
    return expected


def close(got: Any, expected: Any, *, rtol: float | None = None, atol: float | None = None) -> None:
    """Equal to a few units in the last place of the type of `got`; integers are equal exactly."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    dtype = as_dtype(got.dtype)
    name, wide = dtype.real.name, np.complex128 if dtype.is_complex else np.float64
    if name not in TOLERANCE:
        np.testing.assert_array_equal(got, expected)
        return
    rtol = TOLERANCE[name] if rtol is None else rtol
    np.testing.assert_allclose(got.astype(wide), expected.astype(wide), rtol=rtol,
                               atol=rtol if atol is None else atol)


def draw(rng: np.random.Generator, shape: Sequence[int], dtype: Any = "float32",
         low: float = -3.0, high: float = 3.0) -> np.ndarray:
    """Random data of any type; integers are spread over the same range."""
    kind = as_dtype(dtype)
    if kind.is_bool:
        return rng.integers(0, 2, shape).astype(bool)
    if kind.is_integer:
        low = low if kind.is_signed else 0
        return rng.integers(int(low), int(high) + 1, shape).astype(kind.np)
    return np.asarray(rng.uniform(low, high, shape)).astype(kind.np)


def to_torch(x: Any) -> Any:
    """A torch tensor with the values of an array, also in bfloat16."""
    torch = pytest.importorskip("torch")
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def from_torch(x: Any) -> np.ndarray:
    """An array with the values of a torch tensor, also in bfloat16."""
    x = x.detach()
    if str(x.dtype) == "torch.bfloat16":
        return x.float().numpy().astype(ml_dtypes.bfloat16)
    return x.numpy()


def check_gradient(function: Callable[..., Any], *arrays: np.ndarray, wrt: Sequence[int] = (0,),
                   step: float = 1e-6, rtol: float = 2e-7, **attrs: Any) -> None:
    """Gradients equal central differences in float64, along a random weighting of the result.

    The error of a central difference is about step^2 + eps/step, and `rtol` is well above it.
    """
    autodiff = pytest.importorskip("terrazzo.graph.autodiff")
    rng = np.random.default_rng(7)
    given = [a if as_dtype(a.dtype).kind != "f" else a.astype(np.float64) for a in arrays]

    def value(*xs: np.ndarray) -> np.ndarray:
        return evaluate(function, *xs, **attrs)

    weight = np.asarray(rng.uniform(0.5, 1.5, value(*given).shape))
    graph, _ = trace(lambda *xs: op("sum")(function(*xs, **attrs) * weight),
                     [type_of(a) for a in given], name="loss")
    gradients = graph_evaluate.run(autodiff.grad_graph(graph, wrt=tuple(wrt)), given)
    for place, got in zip(wrt, gradients[-len(wrt):], strict=True):
        expected = np.zeros_like(given[place])
        for index in np.ndindex(*expected.shape):
            sides = []
            for sign in (1, -1):
                moved = [a.copy() for a in given]
                moved[place][index] += sign * step
                sides.append(float(np.sum(value(*moved) * weight)))
            expected[index] = (sides[0] - sides[1]) / (2 * step)
        close(got, expected, rtol=rtol)


# ---------------------------------------------------------------- every primitive of a graph
def check(function: Callable[..., Any], *arrays: Any, expected: Any = None, symbolic: bool = False,
          rtol: float | None = None, **attrs: Any) -> Any:
    """A function's graph gives what is expected, and each primitive in it agrees with its own
    expression or loops. With `symbolic`, sizes over 1 are symbolic while it is traced."""
    given = [np.asarray(a) for a in arrays]
    shapes, dims = symbolic_shapes(given)
    types = [type_of(a, s if symbolic else None) for a, s in zip(given, shapes, strict=True)]
    graph, structure = trace(function, types, name="test", **attrs)
    results = graph_evaluate.run(graph, given)
    wanted = [] if expected is None else (
        list(expected) if isinstance(expected, (tuple, list)) else [expected])
    if expected is not None:
        assert len(wanted) == len(results)
    for value, result, want in zip(graph.outputs, results, wanted):
        assert as_dtype(result.dtype) is value.dtype, "inference and result disagree"
        assert graph_evaluate.concrete(value.shape, dims) == result.shape
        close(result, want, rtol=rtol)
    lowered = _run_lowered(graph, given, dims if symbolic else {})
    for low, high in zip(lowered, results, strict=True):
        close(low, high, rtol=rtol)
    return results[0] if isinstance(structure, int) else tuple(results)


def _run_lowered(graph: Graph, arrays: Sequence[np.ndarray], dims: dict[Var, int]
                 ) -> list[np.ndarray]:
    """Run a graph by the expressions and loops of its primitives instead of their references."""
    memory: dict[Value, np.ndarray] = dict(zip(graph.inputs, arrays, strict=True))
    for node in graph.nodes:
        inputs = [memory[v] for v in node.inputs if v is not None]
        if node.op.body is not None:
            fresh = [None if v is None else Value(v.type) for v in node.inputs]
            body = Graph(node.op.name, tuple(v for v in fresh if v is not None),
                         expand(node.op, fresh, node.attrs))
            results = _run_lowered(body, inputs, dims)
        elif node.op.name == "constant" or (node.op.expr is None and node.op.loops is None):
            results = graph_evaluate.run_node(node, inputs, dims)
        elif node.op.expr is not None:
            results = _run_expression(node, inputs, dims)
        else:
            results = _run_loops(node, inputs, dims)
        for value, result in zip(node.outputs, results, strict=True):
            assert result.shape == graph_evaluate.concrete(value.shape, dims)
            memory[value] = result
    return [memory[v] for v in graph.outputs]


def _out(node: Node) -> Any:
    return node.types if len(node.types) > 1 else node.types[0]


def _run_expression(node: Node, inputs: Sequence[np.ndarray], dims: dict[Var, int]
                    ) -> list[np.ndarray]:
    assert node.op.expr is not None
    tensors = [placeholder(v.shape, v.dtype, f"x{i}") for i, v in enumerate(node.inputs)
               if v is not None]
    answer = node.op.expr(*tensors, out=_out(node), **node.attrs)
    outputs = tuple(answer) if isinstance(answer, (tuple, list)) else (answer,)
    for tensor, type in zip(outputs, node.types, strict=True):
        assert tensor.dtype is type.dtype and tensor.shape == type.shape
    stages: dict[Tensor, None] = {}

    def visit(tensor: Tensor) -> None:
        if not tensor.is_input and tensor not in stages:
            for source in reads(tensor):
                visit(source)
            stages.setdefault(tensor)

    for tensor in outputs:
        visit(tensor)
    program = Program(node.op.name, tuple(tensors), tuple(stages), outputs)
    return expr_evaluate.run(program, inputs, dims)


def _run_loops(node: Node, inputs: Sequence[np.ndarray], dims: dict[Var, int]
               ) -> list[np.ndarray]:
    assert node.op.loops is not None
    types = [v.type for v in node.inputs if v is not None]
    build = node.op.loops(*types, out=_out(node), **node.attrs)
    params = [Buffer(f"{'x' if i < len(types) else 'y'}{i}", t.dtype, num_elements(t.shape))
              for i, t in enumerate([*types, *node.types])]
    body = build(params[:len(types)], params[len(types):])
    shapes = [graph_evaluate.concrete(t.shape, dims) for t in node.types]
    outputs = [np.zeros(s, t.dtype.np) for s, t in zip(shapes, node.types)]
    function = Function(node.op.name, tuple(params), tuple(dims), body)
    assert str(function).startswith("kernel")
    interpret.run(function, [np.ravel(a).copy() for a in inputs] + [y.reshape(-1) for y in outputs],
                  dims)
    return outputs
