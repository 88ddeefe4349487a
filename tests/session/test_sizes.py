"""One plan for many sizes: names that mean the same, sizes and numbers that come from data."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from terrazzo.errors import TerrazzoError
from terrazzo.frontends.onnx.model import sort_nodes
from terrazzo.frontends.onnx.session import CompiledModel, Session, host

sys.path.insert(0, str(Path(__file__).parents[1] / "frontends" / "onnx"))
from models import model, node

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
Feeds = dict[str, Any]


def serve(proto: onnx.ModelProto, calls: Iterable[Feeds], most: int) -> Session:
    """A session answers all calls as onnx's reference does, with so many compilations."""
    session, reference = Session(proto), ReferenceEvaluator(proto)
    count = 0
    for feeds in calls:
        count += 1
        for got, want in zip(session.run(feeds), reference.run(None, feeds), strict=True):
            assert np.asarray(got).dtype == np.asarray(want).dtype
            assert np.shape(got) == np.shape(want)
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert count and session.compilations <= most, f"{session.compilations} in {count} calls"
    return session


# ---------------------------------------------------------------- names that mean the same
def test_a_size_of_zero_is_not_divided_out(rng: np.random.Generator) -> None:
    """n*m elements are k*m where m is 0, whatever n and k are."""
    steps = [node("Shape", "w", "s"), node("Reshape", "x s", "y", allowzero=1)]

    def calls() -> Iterable[Feeds]:
        for x, w in [((3, 2), (3, 2)), ((3, 0), (2, 0)), ((5, 0), (1, 0)), ((4, 3), (4, 3))]:
            yield {"x": rng.standard_normal(x, np.float32), "w": np.zeros(w, np.float32)}

    serve(model(steps, {"x": ("n", "m"), "w": ("k", "m")}, ["y"]), calls(), most=3)


def test_a_slice_that_goes_back_from_before_the_first_element() -> None:
    proto = model([node("Slice", "x from to zero step", "y")], {"x": ("n",)}, ["y"], {
        "from": np.array([-5]), "to": np.array([-10]), "zero": np.array([0]),
        "step": np.array([-1])})
    session = Session(proto)
    for n, expected in [(3, [0]), (7, [2, 1, 0]), (1, [0]), (0, []), (12, [7, 6, 5, 4, 3])]:
        x = np.arange(n, dtype=np.float32)
        np.testing.assert_array_equal(session.run({"x": x})[0], expected)


def cached_attention(key: str, value: str, mask: str, batches: tuple[str, str]
                     ) -> onnx.ModelProto:
    """One head with a cache; the exporter's names for the sizes of keys, values and mask."""
    rng = np.random.default_rng(0)
    weights = {f"w{n}": rng.standard_normal((8, 8), np.float32) for n in "qkv"}
    one, other = batches
    return model(
        [*(node("MatMul", f"x w{n}", n) for n in "qkv"),
         node("Concat", "past_k k", "keys", axis=1), node("Concat", "past_v v", "values", axis=1),
         node("Transpose", "keys", "turned", perm=[0, 2, 1]), node("MatMul", "q turned", "scores"),
         node("Unsqueeze", "mask one", "wide"), node("Add", "scores wide", "masked"),
         node("Softmax", "masked", "weights"), node("MatMul", "weights values", "y")],
        {"x": (one, "seq", 8), "mask": (other, mask), "past_k": (one, key, 8),
         "past_v": (one, value, 8)}, ["y", "keys", "values"],
        {**weights, "one": np.array([1])})


@pytest.mark.parametrize(("key", "value", "mask", "batches"), [
    ("past", "past", "past + seq", ("batch", "batch")),  # as optimum names them
    ("s15", "s89", "s31", ("s23", "s64")),  # torch.onnx.export with Dim.DYNAMIC
    ("past", "past", "total", ("batch", "batch")),  # dynamic_axes
    ("", "", "", ("", "")),
])
def test_a_decoder_compiles_once(key: str, value: str, mask: str, batches: tuple[str, str],
                                 rng: np.random.Generator) -> None:
    def calls() -> Iterable[Feeds]:
        for past, new, batch in [(0, 7, 1), *((7 + t, 1, 1) for t in range(20)), (3, 5, 2)]:
            yield {"x": rng.standard_normal((batch, new, 8), np.float32),
                   "mask": np.zeros((batch, past + new), np.float32),
                   **{f"past_{n}": rng.standard_normal((batch, past, 8), np.float32)
                      for n in "kv"}}

    session = serve(cached_attention(key, value, mask, batches), calls(), most=1)
    assert session.whole is not None


def test_what_was_assumed_is_checked(rng: np.random.Generator, tmp_path: Path) -> None:
    """Two names are taken for one size; where they are not, another plan answers."""
    proto = model([node("Mul", "x y", "z"), node("Relu", "z", "r")],
                  {"x": (2, "n"), "y": (2, "m")}, ["r"])

    def call(n: int, m: int) -> Feeds:
        return {"x": rng.standard_normal((2, n), np.float32),
                "y": rng.standard_normal((2, m), np.float32)}

    session = serve(proto, [call(3, 3), call(5, 5), *(call(n, 1) for n in (2, 4, 9)),
                            *(call(1, n) for n in (2, 4, 9)), call(7, 7)], most=3)
    with pytest.raises(TerrazzoError, match=r"'z' \(Mul\)"):
        session.run(call(3, 4))
    assert session.whole is not None
    session.whole.executable.save(tmp_path / "model.tzx")
    alone = CompiledModel.load(tmp_path / "model.tzx")
    assert alone.run(call(4, 4))[0].shape == (2, 4)
    with pytest.raises(TerrazzoError, match="other sizes"):
        alone.run(call(4, 1))


def test_a_size_that_only_a_guard_mentions_is_checked(rng: np.random.Generator) -> None:
    """Only the size of y is read, and it is taken to be that of x."""
    proto = model([node("Shape", "y", "shape"), node("Reshape", "x shape", "r"),
                   node("Relu", "r", "z")], {"x": ("n", 3), "y": ("m", 3)}, ["z"])

    def call(n: int, m: int) -> Feeds:
        return {"x": rng.standard_normal((n, 3), np.float32), "y": np.ones((m, 3), np.float32)}

    session = serve(proto, [call(2, 2), call(5, 5)], most=1)
    with pytest.raises(TerrazzoError, match="reshape"):
        session.run(call(4, 2))


# ---------------------------------------------------------------- names bind nobody
def test_one_name_may_have_two_sizes(rng: np.random.Generator) -> None:
    """As in optimum's merged decoders: nothing in the graph needs the two to be equal."""
    proto = model([node("Relu", "x", "y"), node("Concat", "past x", "present", axis=1)],
                  {"x": (2, "n"), "past": (2, "n")}, ["y", "present"])
    serve(proto, [{"x": rng.standard_normal((2, n), np.float32),
                   "past": rng.standard_normal((2, past), np.float32)}
                  for n, past in [(7, 7), (7, 0), (1, 7), (1, 8), (3, 9)]], most=2)


def test_a_declared_formula_that_does_not_hold(rng: np.random.Generator) -> None:
    proto = model([node("Neg", "x", "y"), node("Exp", "z", "w")],
                  {"x": ("n",), "z": ("n + 1",)}, ["y", "w"])
    serve(proto, [{"x": rng.standard_normal(n, np.float32), "z": rng.standard_normal(m, np.float32)}
                  for n, m in [(3, 4), (3, 3), (5, 2), (0, 0)]], most=2)


def test_sizes_of_minus_one(rng: np.random.Generator) -> None:
    proto = model([node("Relu", "x", "y")], {"x": (2, 3)}, ["y"])
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    session = serve(proto, [{"x": rng.standard_normal((n, 3), np.float32)} for n in (1, 4, 2)], 1)
    assert session.inputs[0].shape == (None, 3)


def test_nodes_in_any_order(rng: np.random.Generator) -> None:
    branch = helper.make_graph([node("Neg", "late", "b"), node("Exp", "x", "late")], "branch", [],
                               [helper.make_tensor_value_info("b", FLOAT, None)])
    other = helper.make_graph([node("Add", "x made", "a")], "other", [],
                              [helper.make_tensor_value_info("a", FLOAT, None)])
    proto = model([node("Relu", "h", "y"),
                   helper.make_node("If", ["which"], ["h"], then_branch=branch, else_branch=other),
                   node("Sin", "x", "made")], {"x": (3,), "which": ()}, ["y"],
                  kinds={"which": BOOL})
    session = Session(proto)
    x = rng.standard_normal(3).astype(np.float32)
    for which, want in ((True, -np.exp(x)), (False, x + np.sin(x))):
        got = session.run({"x": x, "which": np.array(which)})[0]
        np.testing.assert_allclose(got, np.maximum(want, 0), rtol=1e-5)


# ---------------------------------------------------------------- sizes that come from data
def test_counts_from_data_compile_once(rng: np.random.Generator) -> None:
    proto = model(
        [node("Greater", "x limit", "above"), node("NonZero", "above", "places"),
         node("Transpose", "places", "rows", perm=[1, 0]), node("GatherND", "x rows", "found"),
         node("Shape", "found", "shape"), node("Concat", "shape last", "target", axis=0),
         node("Unsqueeze", "found minus", "column"), node("Expand", "column target", "wide"),
         node("MatMul", "wide w", "h"), node("Relu", "h", "y")],
        {"x": (50,)}, ["y"],
        {"limit": np.array(0.0, np.float32), "last": np.array([4]), "minus": np.array([1]),
         "w": rng.standard_normal((4, 3), np.float32)})

    def call(count: int) -> Feeds:
        return {"x": rng.permutation(np.where(np.arange(50) < count, 1.0, -1.0)).astype(
            np.float32) * rng.uniform(1, 2, 50).astype(np.float32)}

    serve(proto, map(call, range(50)), most=2)


@pytest.mark.parametrize("operator", ["Compress", "Unique"])
def test_other_operators_that_count(operator: str, rng: np.random.Generator) -> None:
    first = node("Compress", "x which", "found", axis=-1) if operator == "Compress" else (
        node("Unique", "x", "found", axis=1))
    proto = model([first, node("Transpose", "found", "t", perm=[1, 0]), node("MatMul", "t w", "y")],
                  {"x": (2, 9), "which": (9,)}, ["y"],
                  {"w": rng.standard_normal((2, 3), np.float32)}, kinds={"which": BOOL})

    def call(count: int) -> Feeds:
        return {"x": np.tile(np.arange(9) % max(count, 1), (2, 1)).astype(np.float32),
                "which": np.arange(9) < count}

    serve(proto, map(call, range(1, 9)), most=2)


def test_numbers_from_data_become_symbols(rng: np.random.Generator) -> None:
    """The end of a range and a target of Reshape that are contents of inputs."""
    proto = model(
        [node("Range", "zero end one", "steps"), node("Cast", "steps", "floats", to=FLOAT),
         node("Reshape", "x target", "shaped"),
         node("ReduceSum", "shaped last", "rows", keepdims=0),
         node("Add", "rows floats", "y")],
        {"x": ("n",), "end": (), "target": (2,)}, ["y"],
        {"zero": np.array(0), "one": np.array(1), "last": np.array([1])},
        kinds={"end": INT64, "target": INT64})
    calls = [{"x": rng.standard_normal(n * m, np.float32), "end": np.array(n),
              "target": np.array([n, m])} for n, m in [(2, 3), (4, 3), (5, 6), (7, 1), (3, 3)]]
    calls.append({**calls[0], "target": np.array([2, -1])})
    serve(proto, calls, most=4)


def test_another_plan_keeps_the_plans_after_it(rng: np.random.Generator) -> None:
    """What a branch answers has a size that nobody announces: its reader is planned again, once."""
    branches = {name: helper.make_graph(
        [node("Slice", f"x zero {end}", f"{name}_out")], name, [],
        [helper.make_tensor_value_info(f"{name}_out", FLOAT, None)])
        for name, end in (("then_branch", "few"), ("else_branch", "many"))}
    nodes = [helper.make_node("If", ["long"], ["v0"], **branches)]
    for i in range(4):
        nodes += [node("Greater", f"v{i} limit", f"above{i}"),
                  node("NonZero", f"above{i}", f"p{i}"), node("Squeeze", f"p{i} zero", f"rows{i}"),
                  node("Gather", f"v{i} rows{i}", f"g{i}"), node("Sub", f"g{i} step", f"v{i + 1}")]
    proto = model(nodes, {"x": (40,), "long": ()}, ["v4"],
                  {"limit": np.array(0, np.float32), "step": np.array(0.1, np.float32),
                   "zero": np.array([0]), "few": np.array([20]), "many": np.array([30])},
                  kinds={"long": BOOL})
    first = {"x": rng.uniform(0.5, 1, 40).astype(np.float32), "long": np.array(True)}
    alone = serve(proto, [first], most=20).compilations
    serve(proto, [first, *({"x": rng.uniform(-1, 1, 40).astype(np.float32), "long": np.array(b)}
                           for b in (False, True, False))], most=alone + 2)


def test_shapes_that_fit_by_what_was_granted(rng: np.random.Generator) -> None:
    """Rewrites (two reshapes are one) rely on what the model needs, where algebra proves nothing.

    As the boxes of a detector: rows in one target, groups of every fourth number, another target.
    """
    proto = model(
        [node("Reshape", "x target", "rows"),
         *(node("Slice", f"rows start{i} far one four", f"part{i}") for i in range(2)),
         *(node("Unsqueeze", f"part{i} two", f"thin{i}") for i in range(2)),
         node("Concat", "thin0 thin1", "pairs", axis=2), node("Flatten", "pairs", "flat", axis=1),
         node("Reshape", "flat final", "y")],
        {"x": ("m", 24), "target": (2,), "final": (3,)}, ["y"],
        {"start0": np.array([0]), "start1": np.array([1]), "far": np.array([1 << 40]),
         "one": np.array([1]), "two": np.array([2]), "four": np.array([4])},
        kinds={"target": INT64, "final": INT64})
    calls = [{"x": rng.standard_normal((m, 24)).astype(np.float32), "target": np.array([n, -1]),
              "final": np.array([n, -1, 2])} for m, n in [(2, 2), (3, 3), (5, 5), (4, 4), (6, 6)]]
    serve(proto, calls, most=2)


def test_a_loop_that_grows(rng: np.random.Generator) -> None:
    body = helper.make_graph(
        [node("Concat", "state item", "longer", axis=0), node("Identity", "going", "still"),
         node("Sin", "longer", "grown")], "body",
        [helper.make_tensor_value_info("i", INT64, []),
         helper.make_tensor_value_info("going", BOOL, []),
         helper.make_tensor_value_info("state", FLOAT, None)],
        [helper.make_tensor_value_info("still", BOOL, []),
         helper.make_tensor_value_info("grown", FLOAT, None)])
    proto = model([helper.make_node("Loop", ["trips", "", "start"], ["all"], body=body),
                   node("Relu", "all", "y")],
                  {"trips": (), "start": (1,), "item": (1,)}, ["y"],
                  kinds={"trips": INT64})
    session = Session(proto)
    for trips in (20, 9, 31):
        want, item = np.ones(1, np.float32), rng.standard_normal(1).astype(np.float32)
        (got,) = session.run({"trips": np.array(trips), "start": want, "item": item})
        for _ in range(trips):
            want = np.sin(np.concatenate([want, item]))
        np.testing.assert_allclose(got, np.maximum(want, 0), rtol=1e-4, atol=1e-6)
    assert session.compilations <= 4


@pytest.mark.parametrize("read", [False, True], ids=["appended", "read as well"])
@pytest.mark.parametrize("axis", [0, 1])
def test_what_a_loop_appends_is_joined_once(axis: int, read: bool, rng: np.random.Generator
                                            ) -> None:
    """Pieces of any size, no trips at all, and a carried value that the body reads as well."""
    tail = [node("ReduceSum", "all" if read else "start", "seen", keepdims=0),
            node("Concat", "all piece", "more", axis=axis), node("Identity", "going", "still")]
    body = helper.make_graph(
        [node("Mul", "item i_float", "scaled"), node("Cast", "i", "i_float", to=FLOAT),
         node("Slice", "scaled zero i_up one_axis", "piece"), node("Add", "i one", "i_next"),
         node("Reshape", "i_next minus", "i_up"), *tail], "body",
        [helper.make_tensor_value_info("i", INT64, []),
         helper.make_tensor_value_info("going", BOOL, []),
         helper.make_tensor_value_info("all", FLOAT, None)],
        [helper.make_tensor_value_info("still", BOOL, []),
         helper.make_tensor_value_info("more", FLOAT, None),
         helper.make_tensor_value_info("seen", FLOAT, [])],
        [helper.make_tensor("zero", INT64, [1], [0]), helper.make_tensor("one", INT64, [], [1]),
         helper.make_tensor("one_axis", INT64, [1], [axis]),
         helper.make_tensor("minus", INT64, [1], [-1])])
    sort_nodes(body)
    proto = model([helper.make_node("Loop", ["trips", "", "start"], ["y", "seen_all"], body=body)],
                  {"trips": (), "start": ("a", "b"), "item": ("c", "d")}, ["y", "seen_all"],
                  kinds={"trips": INT64})
    (loop,) = proto.graph.node
    assert len(host._appends(loop.attribute[0].g)) == (not read)
    start = rng.standard_normal((2, 3)).astype(np.float32)
    item = rng.standard_normal((40, 3) if axis == 0 else (2, 40)).astype(np.float32)
    session = Session(proto)
    for trips in (5, 1, 30, 0):
        want, sums = [start], []
        for i in range(trips):
            sums.append((np.concatenate(want, axis) if read else start).sum())
            want.append((item * np.float32(i)).take(range(i + 1), axis))
        feeds = {"trips": np.array(trips), "start": start, "item": item}
        y, seen = session.run(feeds)
        np.testing.assert_allclose(y, np.concatenate(want, axis), rtol=1e-6)
        np.testing.assert_allclose(seen, np.array(sums, np.float32), rtol=1e-4, atol=1e-4)
        y[:] = 7  # the caller's own
        assert not (start == 7).any()


def test_the_tail_of_a_detector(rng: np.random.Generator) -> None:
    """Boxes are suppressed, the best k of them cut out of the features, masks made and resized."""
    proto = model(
        [node("NonMaxSuppression", "boxes scores most overlap least", "chosen"),
         node("Gather", "chosen two", "rows", axis=1), node("Squeeze", "boxes front", "flat"),
         node("Gather", "flat rows", "kept", axis=0),
         node("Squeeze", "scores both", "plain"), node("Gather", "plain rows", "marks", axis=0),
         node("Shape", "rows", "count"), node("Min", "count five", "k"),
         node("TopK", "marks k", "best order", axis=0), node("Gather", "kept order", "top", axis=0),
         node("Shape", "order", "left"), node("ConstantOfShape", "left", "batch",
                                              value=helper.make_tensor("", INT64, [1], [0])),
         node("RoiAlign", "features top batch", "crops", output_height=4, output_width=4),
         node("Conv", "crops w", "masks"), node("Sigmoid", "masks", "soft"),
         node("ReduceMax", "top", "corner", keepdims=0), node("Cast", "corner", "edge", to=INT64),
         node("Unsqueeze", "edge front", "side"),
         node("Concat", "left one side side", "sizes", axis=0),
         node("Resize", "soft _ _ sizes", "large", mode="linear")],
        {"boxes": (1, 12, 4), "scores": (1, 1, 12), "features": (1, 3, 16, 16)},
        ["best", "large"],
        {"most": np.array([12]), "overlap": np.array([0.5], np.float32), "two": np.array(2),
         "least": np.array([0.3], np.float32), "front": np.array([0]), "both": np.array([0, 1]),
         "five": np.array([5]), "one": np.array([1]), "w": rng.standard_normal(
             (1, 3, 1, 1), np.float32)})

    def call(likely: int) -> Feeds:
        low = rng.uniform(0, 8, (1, 12, 2)).astype(np.float32)
        return {"boxes": np.concatenate([low, low + rng.uniform(4, 8, low.shape)], -1).astype(
                    np.float32),
                "scores": np.where(np.arange(12) < likely, rng.uniform(0.4, 1, 12), 0.1).astype(
                    np.float32).reshape(1, 1, 12),
                "features": rng.standard_normal((1, 3, 16, 16)).astype(np.float32)}

    serve(proto, map(call, [3, 12, 5, 7, 1, 9, 12, 4, 8, 2]), most=3)


READS_IMAGES = {
    "RoiAlign": (node("RoiAlign", "x rois batch", "y", output_height=2, output_width=3,
                      sampling_ratio=2, spatial_scale=0.5),),
    "RoiAlign by sizes": (node("RoiAlign", "x rois batch", "y", output_height=3, output_width=2),),
    "RoiAlign of maxima": (node("RoiAlign", "x rois batch", "y", output_height=3, output_width=2,
                                mode="max"),),
    "GridSample": (node("GridSample", "x grid", "y"),),
    "GridSample at borders": (node("GridSample", "x grid", "y", mode="cubic", align_corners=1,
                                   padding_mode="border"),),
    "GridSample reflected": (node("GridSample", "x grid", "y", padding_mode="reflection"),),
    "DeformConv": (node("Conv", "x turns", "moves", pads=[0, 0, 1, 1]),
                   node("DeformConv", "x w moves", "y", pads=[0, 0, 1, 1])),
}


@pytest.mark.parametrize("name", READS_IMAGES)
def test_images_of_all_sizes_are_read_by_one_code(name: str, rng: np.random.Generator) -> None:
    low = rng.uniform(0, 5, (6, 2)).astype(np.float32)
    weights = {"rois": np.concatenate([low, low + 4], 1), "batch": np.array([0, 1, 1, 0, 1, 0]),
               "grid": rng.uniform(-1.4, 1.4, (2, 3, 4, 2)).astype(np.float32),
               "turns": rng.uniform(-0.2, 0.2, (8, 3, 2, 2)).astype(np.float32),
               "w": rng.standard_normal((5, 3, 2, 2), np.float32)}
    nodes = READS_IMAGES[name]
    used = {n for each in nodes for n in each.input}
    proto = model(nodes, {"x": (2, 3, "h", "w_")}, ["y"],
                  {n: a for n, a in weights.items() if n in used})
    sizes = [(7, 9), (12, 5), (9, 8), (16, 21)]
    calls = ({"x": rng.standard_normal((2, 3, *size)).astype(np.float32)} for size in sizes)
    session = serve(proto, calls, most=1)
    assert not session.setting.announced, "none of it in the reference"


def test_sizes_by_float_arithmetic_compile_once(rng: np.random.Generator) -> None:
    """A picture whose short side becomes 16, padded to multiples of 8, as detectors begin."""
    weights = {"short": np.float32(16), "eight": np.float32(8), "whole": np.array([2, 3]),
               "front": np.array([1, 3]), "none": np.zeros(6, np.int64),
               "w": rng.standard_normal((4, 3, 3, 3), np.float32)}
    proto = model(
        [node("Shape", "x", "sizes"), node("Gather", "sizes whole", "spatial"),
         node("Cast", "spatial", "real", to=FLOAT), node("ReduceMin", "real", "least", keepdims=0),
         node("Div", "short least", "scale"), node("Mul", "real scale", "scaled"),
         node("Floor", "scaled", "floored"), node("Cast", "floored", "target", to=INT64),
         node("Concat", "front target", "shape", axis=0),
         node("Resize", "x _ _ shape", "small", mode="linear"),
         node("Div", "floored eight", "blocks"), node("Ceil", "blocks", "most"),
         node("Mul", "most eight", "padded"), node("Sub", "padded floored", "more"),
         node("Cast", "more", "after", to=INT64), node("Concat", "none after", "pads", axis=0),
         node("Pad", "small pads", "full"), node("Conv", "full w", "features", pads=[1, 1, 1, 1]),
         node("Relu", "features", "y")],
        {"x": (1, 3, "h", "w_")}, ["y"], weights)
    sizes = [(20, 30), (32, 16), (25, 25), (41, 33), (19, 40), (64, 48), (50, 21)]
    calls = ({"x": rng.standard_normal((1, 3, *size)).astype(np.float32)} for size in sizes)
    serve(proto, calls, most=5)
