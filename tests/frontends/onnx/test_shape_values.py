"""Shape arithmetic on symbolic sizes, as exporters write it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, helper, numpy_helper
from symbolic import check_symbolic, imported, shapes_of

from terrazzo.base.shapes import dims
from terrazzo.dtypes import bool_, float32, int32, int64
from terrazzo.frontends.onnx.shape_values import Sizes, compute
from terrazzo.frontends.onnx.sizes import Assumed
from terrazzo.index import maximum, minimum
from terrazzo.index.guards import Guard, asking

pytestmark = pytest.mark.onnx

B, N = dims("b n")


def sizes(*items: Any) -> Sizes:
    """A vector of sizes."""
    return Sizes(np.array([*items, None], object)[:-1])


def known(*items: int) -> Sizes:
    return Sizes(np.array(items, np.int64))


def result_of(operator: str, *inputs: Sizes | None, outputs: int = 1, **attributes: Any) -> Any:
    """The elements of what a rule answers, as nested lists; None where it has no answer."""
    with asking(Assumed()):
        found = compute(operator, inputs, lambda name, default=None: attributes.get(name, default),
                        outputs)
    if found is None:
        return None
    return [f.items.tolist() for f in found] if outputs > 1 else found[0].items.tolist()


@pytest.mark.parametrize("operator, inputs, attributes, expected", [
    ("Gather", [sizes(B, N, 8), known(1, -1)], {}, [N, 8]),
    ("Gather", [sizes(B, N, 8), Sizes(np.asarray(1))], {}, N),
    ("Slice", [sizes(B, N, 8), known(0), known(-1)], {}, [B, N]),
    ("Slice", [sizes(B, N, 8), known(-1), known(-100), known(0), known(-1)], {}, [8, N, B]),
    ("Slice", [sizes(B, N, 8)], {"starts": [1], "ends": [2**62], "axes": [0]}, [N, 8]),
    ("Unsqueeze", [Sizes(np.array(B, object)), known(0)], {}, [B]),
    ("Slice", [sizes(B, N, 8), known(-9), known(-100), known(0), known(-1)], {}, [B]),
    ("Squeeze", [sizes(N), known(0)], {}, N),
    ("Squeeze", [sizes(N), known()], {}, N),
    ("Concat", [sizes(B), known(-1), sizes(N * 2)], {"axis": 0}, [B, -1, N * 2]),
    ("Add", [sizes(B, N), known(1)], {}, [B + 1, N + 1]),
    ("Sub", [sizes(B, N), sizes(B, 0)], {}, [0, N]),
    ("Mul", [sizes(B, N), sizes(2, N)], {}, [B * 2, N * N]),
    ("Div", [sizes(N * 4, -7), known(2)], {}, [N * 2, -3]),
    ("Mod", [sizes(N * 4 + 1), known(4)], {}, [1]),
    ("Min", [sizes(N), known(5), known(3)], {}, [minimum(N, 3)]),
    ("Max", [sizes(N), known(5)], {}, [maximum(N, 5)]),
    ("Neg", [sizes(N)], {}, [-N]),
    ("Abs", [sizes(N, -3)], {}, [N, 3]),
    ("Clip", [sizes(N), None, Sizes(np.asarray(4))], {}, [minimum(N, 4)]),
    ("Equal", [sizes(B, -1, N + 1), known(-1, -1, 0)], {}, [False, True, False]),
    ("Less", [sizes(N, N), sizes(N + 1, 0)], {}, [True, False]),
    ("GreaterOrEqual", [sizes(N), known(0)], {}, [True]),
    ("Where", [Sizes(np.array([True, False]), bool_), sizes(B, N), known(3, 4)], {}, [B, 4]),
    ("ReduceProd", [sizes(B, N, 2)], {"keepdims": 0}, B * N * 2),
    ("ReduceSum", [sizes(B, N), known(0)], {}, [B + N]),
    ("ReduceMax", [sizes(N, N + 1)], {"keepdims": 1, "axes": [0]}, [N + 1]),
    ("Reshape", [sizes(B, N), known(2, -1)], {}, [[B], [N]]),
    ("Expand", [sizes(N), known(2)], {}, [N, N]),
    ("Tile", [sizes(B, N), known(2)], {}, [B, N, B, N]),
    ("Transpose", [Sizes(np.array([[B, N]], object))], {}, [[B], [N]]),
    ("Cast", [sizes(N)], {"to": 6}, [N]),
    ("Floor", [Sizes(np.array([N], object), float32)], {}, [N]),
], ids=lambda v: v if isinstance(v, str) else "")
def test_rules(operator: str, inputs: Sequence[Sizes], attributes: dict[str, Any], expected: Any
               ) -> None:
    assert result_of(operator, *inputs, **attributes) == expected


def test_split_of_sizes_has_several_results() -> None:
    assert result_of("Split", sizes(B, N, 8), known(1, 2), outputs=2) == [[B], [N, 8]]
    assert result_of("Split", sizes(B, N), outputs=2) == [[B], [N]]


@pytest.mark.parametrize("operator, inputs", [
    ("Equal", [sizes(N), known(5)]),  # true for one N only
    ("Less", [sizes(B), sizes(N)]),
    ("Sqrt", [sizes(N)]),
    ("Gather", [known(1, 2), sizes(N)]),
    ("Mul", [sizes(N), Sizes(np.array([0.5], np.float32), float32)]),
    ("Div", [Sizes(np.array([N], object), float32), Sizes(np.array([2.0]), float32)]),
])
def test_what_hangs_on_the_size_has_no_answer(operator: str, inputs: Sequence[Sizes]) -> None:
    assert result_of(operator, *inputs) is None


def test_division_says_what_it_assumes() -> None:
    assumed = Assumed()
    with asking(assumed):
        (found,) = compute("Div", [sizes(N - 3), known(2)], lambda *_: None) or ()
    assert found.items[0] == (N - 3) // 2 and assumed.all == (Guard("<=", 3, N),)


def test_types_follow() -> None:
    def dtype_of(operator: str, *inputs: Sizes, **attributes: Any) -> Any:
        found = compute(operator, inputs, lambda n, d=None: attributes.get(n, d))
        return found and found[0].dtype

    small = Sizes(np.array([N], object), int32)
    assert dtype_of("Add", small, Sizes(np.array([1], np.int32), int32)) is int32
    assert dtype_of("Cast", small, to=7) is int64
    assert dtype_of("Cast", small, to=1) is float32
    assert dtype_of("Equal", small, Sizes(np.array([-1], np.int32), int32)) is bool_
    assert dtype_of("Cast", small, to=9) is None  # truth of a size


# ---------------------------------------------------------------- as exporters write it
def model_of(nodes: list[NodeProto], inputs: dict[str, tuple[int, list[Any]]], outputs: list[str],
             **weights: np.ndarray) -> ModelProto:
    graph = helper.make_graph(
        nodes, "shapes",
        [helper.make_tensor_value_info(n, *t) for n, t in inputs.items()],
        [helper.make_tensor_value_info(o, 0, None) for o in outputs],
        [numpy_helper.from_array(np.asarray(w), n) for n, w in weights.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_heads_split_by_shape_gather_unsqueeze_concat() -> None:
    node = helper.make_node
    model = model_of([
        node("Shape", ["x"], ["shape"]),
        node("Gather", ["shape", "zero"], ["batch"]),
        node("Gather", ["shape", "one"], ["length"]),
        node("Unsqueeze", ["batch", "front"], ["b1"]),
        node("Unsqueeze", ["length", "front"], ["n1"]),
        node("Concat", ["b1", "n1", "heads"], ["target"], axis=0),
        node("Reshape", ["x", "target"], ["y"]),
        node("Transpose", ["y"], ["z"], perm=[0, 2, 1, 3]),
    ], {"x": (1, ["b", "n", 8])}, ["z"], zero=0, one=1, front=[0], heads=[2, 4])
    result = check_symbolic(model, {"x": ("b", "n", 8)}, {}, [{"b": 2, "n": 3}, {"b": 1, "n": 7}])
    assert result.graph.outputs[0].shape == (B, 2, N, 4) and not result.guards


def test_expand_with_the_guard_against_minus_one() -> None:
    """TorchScript's expand: Where(Equal(shape, -1), ones, shape), where shape holds sizes."""
    node = helper.make_node
    model = model_of([
        node("Shape", ["x"], ["shape"]),
        node("Gather", ["shape", "zero"], ["batch"]),
        node("Unsqueeze", ["batch", "front"], ["b1"]),
        node("Concat", ["b1", "rest"], ["target"], axis=0),
        node("Shape", ["target"], ["count"]),
        node("ConstantOfShape", ["count"], ["ones"], value=numpy_helper.from_array(
            np.array([1], np.int64))),
        node("Mul", ["ones", "minus"], ["minus_ones"]),
        node("Equal", ["target", "minus_ones"], ["unsaid"]),
        node("Where", ["unsaid", "ones", "target"], ["sizes"]),
        node("Expand", ["token", "sizes"], ["y"]),
        node("Concat", ["y", "x"], ["z"], axis=1),
    ], {"x": (1, ["b", "n", 4])}, ["z"], zero=0, front=[0], rest=[-1, -1], minus=-1,
        token=np.ones((1, 1, 4), np.float32))
    result = check_symbolic(model, {"x": ("b", "n", 4)}, {}, [{"b": 2, "n": 3}, {"b": 1, "n": 1}])
    assert result.graph.outputs[0].shape == (B, N + 1, 4)


def test_positions_cut_from_a_table_assume_that_they_fit() -> None:
    node = helper.make_node
    model = model_of([
        node("Shape", ["x"], ["n"], start=1, end=2),
        node("Slice", ["table", "front", "n", "axis"], ["positions"]),
        node("Add", ["x", "positions"], ["y"]),
    ], {"x": (1, ["b", "n"])}, ["y"], table=np.arange(32, dtype=np.float32)[None], front=[0],
        axis=[1])
    result = check_symbolic(model, {"x": ("b", "n")}, {}, [{"b": 2, "n": 3}, {"b": 1, "n": 32}])
    assert result.guards == (Guard("<=", N, 32),)


def test_integers_of_32_bits_stay_sizes() -> None:
    """As TensorFlow's converter writes shapes."""
    node = helper.make_node
    model = model_of([
        node("Shape", ["x"], ["shape"]),
        node("Cast", ["shape"], ["small"], to=6),
        node("Slice", ["small", "front", "one"], ["b1"]),
        node("Concat", ["b1", "rest"], ["packed"], axis=0),
        node("Cast", ["packed"], ["target"], to=7),
        node("Reshape", ["x", "target"], ["y"]),
        node("Identity", ["small"], ["z"]),
    ], {"x": (1, ["b", "n", 4])}, ["y", "z"], front=[0], one=[1],
        rest=np.array([-1], np.int32))
    result = check_symbolic(model, {"x": ("b", "n", 4)}, {}, [{"b": 2, "n": 3}])
    assert result.graph.outputs[0].shape == (B, N * 4)


def test_a_condition_on_sizes_that_is_decided_is_inlined() -> None:
    node = helper.make_node
    branches = {
        "then_branch": helper.make_graph([node("Neg", ["x"], ["a"])], "then", [], [
            helper.make_tensor_value_info("a", 1, None)]),
        "else_branch": helper.make_graph([node("Exp", ["x"], ["c"])], "else", [], [
            helper.make_tensor_value_info("c", 1, None)])}
    model = model_of([
        node("Shape", ["x"], ["shape"]),
        node("Gather", ["shape", "one"], ["width"]),
        node("Equal", ["width", "four"], ["same"]),
        node("If", ["same"], ["y"], **branches),
    ], {"x": (1, ["b", 4])}, ["y"], one=1, four=4)
    result = imported(model, {"x": ("b", 4)}, {})
    assert [n.op.name for n in result.graph.nodes] == ["negative"]
    assert shapes_of(model, {"x": ("b", 4)}, {}) == [(B, 4)]


@pytest.mark.torch
@pytest.mark.slow
def test_exported_attention_with_dynamic_sizes() -> None:
    """PyTorch's own exporter, both sizes dynamic: all of it is one graph."""
    import io

    import torch

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(16, 48)
            self.positions = torch.nn.Embedding(64, 16)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            x = x + self.positions(torch.arange(length))
            q, k, v = self.project(x).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return y.transpose(1, 2).reshape(batch, length, 16)

    sizes = ({0: torch.export.Dim("b"), 1: torch.export.Dim("n", max=64)},)
    program = torch.onnx.export(Attention().eval(), (torch.randn(2, 5, 16),), dynamo=True,
                                dynamic_shapes=sizes, verbose=False)
    buffer = io.BytesIO()
    program.save(buffer)
    from onnx import load_model_from_string

    model = load_model_from_string(buffer.getvalue())
    result = imported(model, {"x": ("b", "n", 16)}, {})
    assert result.graph.outputs[0].shape == (B, N, 16)


def test_inputs_of_which_only_the_size_is_used_stay() -> None:
    node = helper.make_node
    model = model_of([
        node("Shape", ["x"], ["n"], start=1, end=2),
        node("Squeeze", ["n"], ["limit"]),
        node("Range", ["zero", "limit", "one"], ["y"]),
    ], {"x": (1, ["b", "n"]), "z": (1, ["b"])}, ["y"], zero=0, one=1)
    result = check_symbolic(model, {"x": ("b", "n"), "z": ("b",)}, {}, [{"b": 2, "n": 5}])
    assert result.inputs == ("x",)


def test_a_range_written_as_the_places_of_ones() -> None:
    """As exporters wrote torch.arange before there was Range."""
    node = helper.make_node
    model = model_of([
        node("Shape", ["x"], ["n"], start=1, end=2),
        node("ConstantOfShape", ["n"], ["ones"], value=numpy_helper.from_array(
            np.array([1], np.int64))),
        node("NonZero", ["ones"], ["places"]),
        node("Transpose", ["places"], ["column"], perm=[1, 0]),
        node("Squeeze", ["column", "one"], ["counted"]),
        node("Cast", ["counted"], ["floats"], to=1),
        node("Add", ["x", "floats"], ["y"]),
    ], {"x": (1, ["b", "n"])}, ["y"], one=[1])
    check_symbolic(model, {"x": ("b", "n")}, {}, [{"b": 2, "n": 5}, {"b": 1, "n": 1}])
