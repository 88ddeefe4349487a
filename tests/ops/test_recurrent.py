"""Recurrent layers: against onnxruntime, onnx.reference and torch; their loops by themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checking import check, close, op, type_of

import terrazzo as tz
from terrazzo.base.shapes import dim
from terrazzo.compiler.driver import compile_graph
from terrazzo.dtypes import float32
from terrazzo.errors import ArgumentError, DTypeError, ShapeError
from terrazzo.graph.evaluate import run
from terrazzo.graph.ir import TensorType, Value
from terrazzo.graph.trace import trace
from terrazzo.ops.recurrent import units_of_tile
from terrazzo.ops.recurrent_cells import ACTIVATIONS

GATES = {"lstm": 4, "gru": 3, "rnn": 1}
NAMES = ("x", "w", "r", "b", "lengths", "h", "c", "p")
WAYS = {"forward": 1, "reverse": 1, "bidirectional": 2}


def layer(rng: np.random.Generator, kind: str, steps: int = 5, batch: int = 3, inputs: int = 4,
          hidden: int = 6, directions: int = 1, without: str = "lengths p", layout: int = 0,
          dtype: str = "float32") -> list[np.ndarray | None]:
    """The tensors of a layer in ONNX's order; `without` names those left out."""
    def values(*shape: int) -> np.ndarray:
        return rng.uniform(-0.8, 0.8, shape).astype(dtype)

    def turned(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.swapaxes(x, 0, 1)) if layout else x

    rows = GATES[kind] * hidden
    made = [turned(values(steps, batch, inputs)), values(directions, rows, inputs),
            values(directions, rows, hidden), values(directions, 2 * rows),
            rng.integers(1, steps + 1, batch).astype(np.int32),
            turned(values(directions, batch, hidden))]
    if kind == "lstm":
        made += [turned(values(directions, batch, hidden)), values(directions, 3 * hidden)]
    return [None if name in without.split() else a for name, a in zip(NAMES, made)]


def model_bytes(kind: str, tensors: list[np.ndarray | None], opset: int, **attrs: Any) -> bytes:
    from onnx import helper

    names = [name if a is not None else "" for name, a in zip(NAMES, tensors)]
    outputs = ["y", "y_h", "y_c"][:3 if kind == "lstm" else 2]
    node = helper.make_node(kind.upper(), names, outputs, hidden_size=tensors[2].shape[2], **{
        k: list(v) if isinstance(v, tuple) else v for k, v in attrs.items()})
    given = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
             for name, a in zip(NAMES, tensors) if a is not None]
    made = [helper.make_tensor_value_info(name, given[0].type.tensor_type.elem_type, None)
            for name in outputs]
    graph = helper.make_graph([node], "layer", given, made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)],
                             ir_version=8).SerializeToString()


def feeds(tensors: list[np.ndarray | None]) -> dict[str, np.ndarray]:
    return {name: a for name, a in zip(NAMES, tensors) if a is not None}


def by_onnxruntime(kind: str, tensors: list[np.ndarray | None], **attrs: Any) -> list[np.ndarray]:
    ort = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model_bytes(kind, tensors, 14, **attrs), options,
                                   providers=["CPUExecutionProvider"])
    return session.run(None, feeds(tensors))


def agree(kind: str, tensors: list[np.ndarray | None], expected: list[np.ndarray],
          rtol: float = 1e-5, **attrs: Any) -> None:
    got = op(kind)(*tensors, **attrs)
    for mine, theirs in zip(got, expected, strict=True):
        close(mine, theirs, rtol=rtol)


@pytest.mark.parametrize("direction", list(WAYS))
@pytest.mark.parametrize("kind", list(GATES))
def test_directions_and_lengths(kind: str, direction: str, rng: np.random.Generator) -> None:
    # One sequence, a tile with an empty row, hidden units that fill no tile.
    for batch, hidden, without in ((1, 16, "b h c p"), (7, 20, "lengths p"), (2, 97, "")):
        tensors = layer(rng, kind, batch=batch, hidden=hidden, directions=WAYS[direction],
                        without=without)
        agree(kind, tensors, by_onnxruntime(kind, tensors, direction=direction),
              direction=direction)


@pytest.mark.parametrize(("kind", "attrs"), [
    ("lstm", {"clip": 0.3}), ("lstm", {"input_forget": 1}), ("gru", {"clip": 0.3}),
    ("gru", {"linear_before_reset": 1}), ("gru", {"linear_before_reset": 1, "clip": 0.2}),
    ("rnn", {"clip": 0.3}),
])
def test_options(kind: str, attrs: dict[str, Any], rng: np.random.Generator) -> None:
    for without in ("lengths b", "lengths"):
        tensors = layer(rng, kind, hidden=20, without=without)
        agree(kind, tensors, by_onnxruntime(kind, tensors, **attrs), **attrs)


@pytest.mark.parametrize("first", range(len(ACTIVATIONS)))
def test_activations(first: int, rng: np.random.Generator) -> None:
    names = ("Relu", "Tanh", "Sigmoid", "Affine", "LeakyRelu", "ThresholdedRelu", "ScaledTanh",
             "HardSigmoid", "Elu", "Softsign", "Softplus")
    chosen = tuple(names[(first + k) % len(names)] for k in (0, 1, 3))
    attrs = {"activations": chosen, "activation_alpha": (0.3, 0.4, 0.5),
             "activation_beta": (0.1, 0.2, 0.3)}
    tensors = layer(rng, "lstm")
    agree("lstm", tensors, by_onnxruntime("lstm", tensors, **attrs), **attrs)


def test_each_direction_has_its_functions(rng: np.random.Generator) -> None:
    attrs = {"activations": ("Sigmoid", "Tanh", "Relu", "Softsign"), "direction": "bidirectional"}
    tensors = layer(rng, "gru", directions=2)
    agree("gru", tensors, by_onnxruntime("gru", tensors, **attrs), **attrs)


@pytest.mark.onnx
@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("kind", list(GATES))
def test_layouts(kind: str, layout: int, rng: np.random.Generator) -> None:
    from onnx import load_model_from_string
    from onnx.reference import ReferenceEvaluator

    for direction in ("reverse", "bidirectional"):
        tensors = layer(rng, kind, directions=WAYS[direction], layout=layout)
        attrs = {"layout": layout, "direction": direction}
        model = load_model_from_string(model_bytes(kind, tensors, 22, **attrs))
        agree(kind, tensors, ReferenceEvaluator(model).run(None, feeds(tensors)), **attrs)


@pytest.mark.parametrize("kind", list(GATES))
def test_layout_with_lengths(kind: str, rng: np.random.Generator) -> None:
    """The same layer in both layouts."""
    tensors = layer(rng, kind, directions=2, without="")
    turned = [a if a is None or name not in ("x", "h", "c") else np.swapaxes(a, 0, 1)
              for name, a in zip(NAMES, tensors)]
    y, *last = op(kind)(*tensors, direction="bidirectional")
    expected = [np.transpose(y, (2, 0, 1, 3)), *(np.swapaxes(s, 0, 1) for s in last)]
    agree(kind, turned, expected, direction="bidirectional", layout=1)


@pytest.mark.parametrize(("dtype", "rtol"), [("float64", 1e-12), ("float16", 4e-3)])
@pytest.mark.parametrize("kind", list(GATES))
def test_other_floats(kind: str, dtype: str, rtol: float, rng: np.random.Generator) -> None:
    tensors = layer(rng, kind, hidden=17, dtype=dtype)
    wide = [a if a is None else a.astype(np.float64) for a in tensors]
    graph, _ = trace(op(kind), [None if a is None else TensorType(a.shape, tz.float64)
                                for a in wide], name="layer")
    expected = run(graph, [a for a in wide if a is not None])
    got = op(kind)(*tensors)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == dtype
        close(mine, theirs, rtol=rtol)


@pytest.mark.parametrize("kind", list(GATES))
def test_loops_by_themselves(kind: str, rng: np.random.Generator) -> None:
    """The kernel in the interpreter against the numpy reference, with peepholes and lengths."""
    given = [a for a in layer(rng, kind, steps=3, hidden=5, directions=2, without="")
             if a is not None]
    check(op(kind), *given, direction="bidirectional", rtol=1e-5)


@pytest.mark.parametrize("kind", list(GATES))
def test_symbolic_steps_and_batch(kind: str, rng: np.random.Generator) -> None:
    weights = layer(rng, kind, hidden=20)[1:4]
    types = [TensorType((dim("steps"), dim("batch"), 4), float32),
             *(TensorType(a.shape, float32) for a in weights if a is not None)]
    compiled = compile_graph(trace(op(kind), types, name="layer")[0])
    for steps, batch in ((5, 3), (1, 1), (7, 9)):
        x = rng.uniform(-1, 1, (steps, batch, 4)).astype(np.float32)
        expected = run(trace(op(kind), [type_of(a) for a in (x, *weights)], name="layer")[0],
                       [x, *weights])
        for mine, theirs in zip(compiled.run([x, *weights]), expected, strict=True):
            close(mine, theirs, rtol=1e-5)


def test_lengths_of_zero_and_no_steps(rng: np.random.Generator) -> None:
    tensors = layer(rng, "lstm", without="p")
    tensors[4] = np.array([0, 2, 5], np.int32)
    agree("lstm", tensors, by_onnxruntime("lstm", tensors))
    tensors = layer(rng, "gru", steps=1)
    tensors[0] = tensors[0][:0]
    y, last = tz.gru(*tensors)
    assert y.shape == (0, 1, 3, 6)
    close(last, tensors[5])


def test_what_is_not_finite_stays_in_its_sequence(rng: np.random.Generator) -> None:
    tensors = layer(rng, "gru")
    expected = tz.gru(*tensors)[0]
    tensors[0][2, 1] = np.nan
    got = tz.gru(*tensors)[0]
    assert np.isnan(got[2:, 0, 1]).all()
    for n in (0, 2):
        close(got[:, :, n], expected[:, :, n])


@pytest.mark.torch
@pytest.mark.parametrize(("batch", "hidden"), [(37, 64), (1, 256)])
def test_long_sequences_against_torch(batch: int, hidden: int, rng: np.random.Generator) -> None:
    """Groups of sequences, and sizes that threads share."""
    import torch

    tensors = layer(rng, "lstm", steps=40, batch=batch, inputs=33, hidden=hidden,
                    without="lengths h c p")
    x, w, r, b = tensors[:4]
    w, r = w * np.float32(0.2), r * np.float32(0.2)
    theirs = torch.nn.LSTM(33, hidden)

    def in_torch_order(a: np.ndarray) -> torch.Tensor:
        i, o, f, c = np.split(a, 4)
        return torch.from_numpy(np.concatenate([i, f, c, o]))

    with torch.no_grad():
        theirs.weight_ih_l0.copy_(in_torch_order(w[0]))
        theirs.weight_hh_l0.copy_(in_torch_order(r[0]))
        theirs.bias_ih_l0.copy_(in_torch_order(b[0, :4 * hidden]))
        theirs.bias_hh_l0.copy_(in_torch_order(b[0, 4 * hidden:]))
        expected, (h, c) = theirs(torch.from_numpy(x))
    got = tz.lstm(x, w, r, b)
    close(got[0][:, 0], expected.numpy(), rtol=1e-5)
    close(got[1], h.numpy(), rtol=1e-5)
    close(got[2], c.numpy(), rtol=1e-5)


def test_tiles_need_no_padding_where_a_size_has_divisors() -> None:
    for gates in (1, 2, 3, 4):
        for size in (64, 96, 128, 200, 256, 300, 512, 1000):
            for batch in (1, 8):
                units = units_of_tile(gates, size, batch)
                assert size % units == 0
                assert gates * units <= 160


def test_errors() -> None:
    def tensor(*shape: int) -> Value:
        return Value(TensorType(shape, float32))

    x, w, r = tensor(5, 3, 4), tensor(1, 24, 4), tensor(1, 24, 6)
    with pytest.raises(ShapeError, match="of known sizes"):
        tz.lstm(x, tensor(1, 24, 5), r)
    with pytest.raises(ShapeError, match="bidirectional"):
        tz.lstm(x, w, r, direction="bidirectional")
    with pytest.raises(ArgumentError, match="no direction 'sideways'"):
        tz.lstm(x, w, r, direction="sideways")
    with pytest.raises(ArgumentError, match="no activation 'Sine'"):
        tz.lstm(x, w, r, activations=("Sine", "Tanh", "Tanh"))
    with pytest.raises(ArgumentError, match="has 3 activations, not 2"):
        tz.lstm(x, w, r, activations=("Tanh", "Tanh"))
    for name, wrong in {"b": tensor(1, 24), "sequence_lens": Value(TensorType((4,), tz.int32)),
                        "initial_h": tensor(3, 1, 6), "initial_c": tensor(1, 3, 5),
                        "p": tensor(1, 24)}.items():
        with pytest.raises(ShapeError, match="of shape"):
            tz.lstm(x, w, r, **{name: wrong})
    with pytest.raises(DTypeError, match="lengths that are integers"):
        tz.lstm(x, w, r, sequence_lens=tensor(3))
    with pytest.raises(DTypeError, match="one float type"):
        tz.lstm(Value(TensorType((5, 3, 4), tz.int32)), w, r)
