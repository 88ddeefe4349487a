"""What a run answers is the caller's: writing into it changes no later run, input or other output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.frontends.onnx.session import Session

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper  # noqa: E402

FLOAT = TensorProto.FLOAT
X = np.array([1.0, -2.0, 3.0], np.float32)


def arrays_in(value: Any) -> list[np.ndarray]:
    if isinstance(value, (list, tuple)):
        return [a for v in value for a in arrays_in(v)]
    if isinstance(value, dict):
        return arrays_in(list(value.values()))
    if hasattr(value, "detach"):
        return [value.detach().numpy()]
    return [value] if isinstance(value, np.ndarray) else []


def held(run: Callable[[], Sequence[Any]], given: Sequence[np.ndarray]) -> None:
    """Run, spoil every output, and run again."""
    before = [a.copy() for a in given]
    first = arrays_in(run())
    expected = [a.copy() for a in first]
    assert first
    for array in first:
        assert array.flags.writeable
        for other in (*given, *(o for o in first if o is not array)):
            assert not np.shares_memory(array, other)
        array[...] = np.full((), "spoilt") if array.dtype.kind in "OU" else 77
    for array, unchanged in zip(given, before, strict=True):
        np.testing.assert_array_equal(array, unchanged)
    for _ in range(2):
        again = arrays_in(run())
        assert len(again) == len(expected)
        for got, wanted in zip(again, expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
            got[...] = np.full((), "spoilt") if got.dtype.kind in "OU" else 88


def info(name: str, kind: int = FLOAT, shape: Any = (3,)) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def model(nodes: Sequence[Any], outputs: Sequence[Any], weights: Sequence[Any] = (),
          inputs: Sequence[Any] = ()) -> Any:
    graph = helper.make_graph(list(nodes), "g", list(inputs or [info("x")]), list(outputs),
                              list(weights))
    return helper.make_model(graph, opset_imports=[
        helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)], ir_version=8)


WEIGHT = helper.make_tensor("w", FLOAT, (3,), [4.0, 5.0, 6.0])
TEXTS = helper.make_tensor("t", TensorProto.STRING, (2,), [b"a", b"b"])
node = helper.make_node
BRANCHES = {name: helper.make_graph([node("Identity", [source], ["out"])], name, [],
                                    [info("out")]) for name, source in (
    ("then_branch", "x"), ("else_branch", "w"))}
BODY = helper.make_graph(
    [node("Identity", ["go"], ["go_on"]), node("Identity", ["state"], ["kept"])], "body",
    [info("i", TensorProto.INT64, ()), info("go", TensorProto.BOOL, ()), info("state")],
    [info("go_on", TensorProto.BOOL, ()), info("kept")])
MODELS: dict[str, Any] = {
    "constant": model([node("Identity", ["w"], ["y"])], [info("y")], [WEIGHT]),
    "folded constant": model([node("Neg", ["w"], ["y"])], [info("y")], [WEIGHT]),
    "weight itself": model([node("Neg", ["x"], ["z"])], [info("w"), info("z")], [WEIGHT]),
    "Constant node": model([node("Constant", [], ["y"], value=WEIGHT)], [info("y")]),
    "input": model([node("Identity", ["x"], ["y"])], [info("y")]),
    "twice": model([node("Exp", ["x"], ["y"]), node("Identity", ["y"], ["z"])],
                   [info("y"), info("z")]),
    "views": model([node("Exp", ["x"], ["y"]), node("Reshape", ["y", "s"], ["z"])],
                   [info("y"), info("z", FLOAT, (3, 1))],
                   [helper.make_tensor("s", TensorProto.INT64, (2,), [3, 1])]),
    "NonZero between": model(
        [node("NonZero", ["x"], ["n"]), node("Identity", ["n"], ["m"]),
         node("Identity", ["w"], ["y"]), node("Identity", ["x"], ["z"])],
        [info("n", TensorProto.INT64, (1, None)), info("m", TensorProto.INT64, (1, None)),
         info("y"), info("z")], [WEIGHT]),
    "strings": model([node("Identity", ["t"], ["y"]), node("Exp", ["x"], ["z"])],
                     [info("y", TensorProto.STRING, (2,)), info("z")], [TEXTS]),
    "sequence": model(
        [node("SequenceConstruct", ["x", "w"], ["y"])],
        [helper.make_tensor_sequence_value_info("y", FLOAT, None)], [WEIGHT]),
    "If": model([node("ReduceSum", ["x"], ["s"], keepdims=0), node("Greater", ["s", "zero"], ["c"]),
                 node("If", ["c"], ["y"], **BRANCHES)], [info("y")],
                [WEIGHT, helper.make_tensor("zero", FLOAT, (), [0.0])]),
    "Loop without a turn": model(
        [node("Loop", ["n", "", "x"], ["y"], body=BODY)], [info("y")],
        [helper.make_tensor("n", TensorProto.INT64, (), [0])]),
    "Loop of turns": model(
        [node("Loop", ["n", "", "w"], ["y"], body=BODY)], [info("y")],
        [WEIGHT, helper.make_tensor("n", TensorProto.INT64, (), [2])]),
    "encoders": model(
        [node("OneHotEncoder", ["t"], ["y"], domain="ai.onnx.ml", cats_strings=["b", "a"]),
         node("LabelEncoder", ["t"], ["z"], domain="ai.onnx.ml", keys_strings=["a", "b"],
              values_strings=["c", "d"]),
         node("LabelEncoder", ["t"], ["n"], domain="ai.onnx.ml", keys_strings=["a"],
              values_int64s=[5])],
        [info("y", FLOAT, (2, 2)), info("z", TensorProto.STRING, (2,)),
         info("n", TensorProto.INT64, (2,))], [TEXTS]),
    "reference": model(
        [node("StringNormalizer", ["t"], ["y"]), node("Identity", ["x"], ["z"])],
        [info("y", TensorProto.STRING, (2,)), info("z")], [TEXTS]),
}


@pytest.mark.onnx
@pytest.mark.parametrize("now", [True, False], ids=["whole", "block"])
@pytest.mark.parametrize("case", MODELS)
def test_of_sessions(case: str, now: bool) -> None:
    session = Session(MODELS[case], compile_now=now)
    x = X.copy()
    held(lambda: session.run({"x": x}), [x])


@pytest.mark.onnx
@pytest.mark.parametrize("case", MODELS)
def test_of_sessions_asked_for_an_output_twice(case: str) -> None:
    session = Session(MODELS[case])
    name = session.outputs[0].name
    held(lambda: session.run({"x": X.copy()}, [name, name]), [])


@pytest.mark.onnx
def test_dictionaries_of_a_run_are_its_own() -> None:
    session = Session(model([node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml",
                                  classlabels_int64s=[7, 5, 6])],
                            [onnx.ValueInfoProto(name="y")], (), [info("x", FLOAT, ("n", 3))]))
    for rows in (1, 4, 1):
        x = np.arange(3.0 * rows, dtype=np.float32).reshape(rows, 3)
        for _ in range(3):
            (found, again) = session.run({"x": x}, ["y", "y"])
            assert found == again == [{5: r[1], 6: r[2], 7: r[0]} for r in x.tolist()]
            assert list(found[0]) == [5, 6, 7] and found[0] is not again[0]
            found[0].clear()
            found.clear()


@pytest.mark.onnx
def test_an_output_may_be_written_over_an_input() -> None:
    nodes = [node("Concat", ["b", "a"], ["y"], axis=0)]
    turned = model(
        [node("Slice", ["x", "one", "end"], ["b"]), node("Slice", ["x", "zero", "one"], ["a"]),
         *nodes], [info("y")],
        [helper.make_tensor(n, TensorProto.INT64, (1,), [v]) for n, v in (
            ("zero", 0), ("one", 1), ("end", 3))])
    for now in (True, False):
        x = X.copy()
        (y,) = Session(turned, compile_now=now).run({"x": x}, into={"y": x})
        assert y is x
        np.testing.assert_array_equal(x, np.roll(X, -1))


CONSTANT = np.array([4.0, 5.0, 6.0], np.float32)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "input": lambda x: x,
    "constant": lambda x: (tz.exp(x), CONSTANT),
    "twice": lambda x: (x, x),
    "views": lambda x: (x, tz.reshape(x, (3, 1)), tz.flip(x, axis=0)),
    "cond": lambda x: tz.cond(tz.sum(x) > 0, lambda x: x, lambda x: x + 1, x),
    "loop without a turn": lambda x: tz.while_loop(
        lambda x: tz.sum(x) > 1000, lambda x: x + 1, x),
    "host and input": lambda x: (x, tz.while_loop(
        lambda y: tz.sum(y) > 1000, lambda y: y + 1, x), x),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_of_functions(case: str) -> None:
    function, x = tz.jit(FUNCTIONS[case]), X.copy()
    constant = CONSTANT.copy()
    held(lambda: [function(x)], [x])
    np.testing.assert_array_equal(CONSTANT, constant)


@pytest.mark.torch
@pytest.mark.parametrize("case", FUNCTIONS)
def test_of_functions_of_tensors(case: str) -> None:
    torch = pytest.importorskip("torch")
    function, x = tz.jit(FUNCTIONS[case]), torch.from_numpy(X.copy())
    held(lambda: [function(x)], [x.numpy()])
