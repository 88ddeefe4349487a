"""Recurrent layers: lstm, gru and rnn, with all that ONNX's operators of these names can say.

The products of all steps' inputs are one matrix product; what depends on the step before is one
kernel (see recurrent_steps.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from terrazzo.base.shapes import Shape, dims_text
from terrazzo.errors import ArgumentError, DTypeError, ShapeError, user_location
from terrazzo.graph.ir import Value
from terrazzo.index import Index
from terrazzo.index.guards import all_equal, known
from terrazzo.ops.arrange import pad
from terrazzo.ops.contract import linear
from terrazzo.ops.define import operator
from terrazzo.ops.joining import concat
from terrazzo.ops.recurrent_cells import Cell, choose_activations
from terrazzo.ops.recurrent_steps import recurrent_steps
from terrazzo.ops.reduce import in_type
from terrazzo.ops.shape import permute_dims, reshape, span

_LANES = 16
# Columns of a tile: with one sequence the weights are read once for each of its few products, and
# wide tiles keep enough sums apart; with more the registers hold several sequences' sums.
_COLUMNS_OF_ONE, _COLUMNS_OF_MORE = 160, 64


# ---------------------------------------------------------------- weights in the tiles' order
def units_of_tile(gates: int, size: int, batch: Index) -> int:
    """How many hidden units a tile computes all gates of.

    A divisor of their number if there is one, so that the weights need no padding; whole vectors
    if possible.
    """
    most = (_COLUMNS_OF_ONE if batch == 1 else _COLUMNS_OF_MORE) // gates
    least = max(1, _COLUMNS_OF_MORE // 2 // gates)
    fitting = [n for n in range(least, most + 1) if size % n == 0]
    if size < least:
        return size
    whole = [n for n in fitting if n % _LANES == 0]
    return max(whole or fitting or [most - most % _LANES])


def packed_weights(r: Any, gates: Sequence[int], count: int, units: int) -> Any:
    """Recurrent weights [directions, count * size, size] of some gates, in the order of tiles.

    The result is [directions, blocks of units, size, gates, units].
    """
    directions, _, size = r.shape
    parts = reshape(r, shape=(directions, count, size, size))
    parts = span(parts, 1, gates[0], gates[-1] + 1)
    missing = -size % units
    if missing:
        parts = pad(parts, pad_width=((0, 0), (0, 0), (0, missing), (0, 0)))
    blocks = (size + missing) // units
    parts = reshape(parts, shape=(directions, len(gates), blocks, units, size))
    return permute_dims(parts, axes=(0, 2, 4, 1, 3))


# ---------------------------------------------------------------- what users call
_DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}
_MEANINGS = {"b": "biases", "lengths": "lengths of sequences", "h": "initial states",
             "c": "initial memories", "p": "peepholes"}
_DEFAULT = {"lstm": ("sigmoid", "tanh", "tanh"), "gru": ("sigmoid", "tanh"), "rnn": ("tanh",)}


def _check_layer(kind: str, x: Value, w: Value, r: Value, direction: str) -> None:
    count = Cell(kind, ()).gates
    where = user_location()
    if direction not in _DIRECTIONS:
        raise ArgumentError(f"{kind} has no direction {direction!r}", where=where,
                            hint="use " + ", ".join(_DIRECTIONS))
    if not x.dtype.is_float or w.dtype is not x.dtype or r.dtype is not x.dtype:
        raise DTypeError(f"{kind} needs x, w and r of one float type, not {x.dtype.name}, "
                         f"{w.dtype.name} and {r.dtype.name}", where=where)
    if x.ndim != 3 or w.ndim != 3 or r.ndim != 3:
        raise ShapeError(f"{kind} needs x, w and r with three axes each, not {dims_text(x.shape)}, "
                         f"{dims_text(w.shape)} and {dims_text(r.shape)}", where=where)
    size = known(r.shape[2])
    directions = _DIRECTIONS[direction]
    if not isinstance(size, int) or not all_equal(
            r.shape, (directions, count * size, size)) or not all_equal(
            w.shape, (directions, count * size, x.shape[2])):
        raise ShapeError(
            f"a {kind} of direction {direction!r} needs w [{directions}, {count}*hidden, inputs] "
            f"and r [{directions}, {count}*hidden, hidden] of known sizes, not "
            f"{dims_text(w.shape)} and {dims_text(r.shape)} for x {dims_text(x.shape)}",
            where=where)


def _check_rest(kind: str, x: Value, r: Value, tensors: dict[str, Any], layout: int) -> None:
    directions, rows, size = r.shape
    batch = x.shape[0 if layout else 1]
    state = (batch, directions, size) if layout else (directions, batch, size)
    expected: dict[str, Shape] = {"b": (directions, 2 * rows), "lengths": (batch,), "h": state,
                                  "c": state, "p": (directions, 3 * size)}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        shape = expected[name]
        if not all_equal(tensor.shape, shape):
            raise ShapeError(f"{kind} needs {_MEANINGS[name]} of shape {dims_text(shape)}, not "
                             f"{dims_text(tensor.shape)}", where=user_location())
        if name == "lengths" and not tensor.dtype.is_integer:
            raise DTypeError(f"{kind} needs lengths that are integers, not {tensor.dtype.name}",
                             where=user_location())


def _layer(kind: str, x: Any, w: Any, r: Any, b: Any, states: dict[str, Any], *, direction: str,
           layout: int, activations: Any, alphas: Any, betas: Any, clip: float | None,
           input_forget: bool = False, linear_before_reset: bool = False) -> Any:
    """A layer as the product of its inputs and the kernel of its steps."""
    _check_layer(kind, x, w, r, direction)
    _check_rest(kind, x, r, {"b": b, **states}, layout)
    narrow, wide = x.dtype, x.dtype.compute
    x, w, r = (in_type(v, wide) for v in (x, w, r))
    directions, rows, size = r.shape
    cell = Cell(kind, (), linear_before_reset=linear_before_reset)
    names = tuple(activations) if activations else _DEFAULT[kind] * directions
    chosen = choose_activations(names, alphas, betas)
    per = len(_DEFAULT[kind])
    if len(chosen) != per * directions:
        raise ArgumentError(f"a {kind} of direction {direction!r} has {per * directions} "
                            f"activations, not {len(chosen)}", where=user_location())
    of_inputs, inner = (None, None) if b is None else _biases(in_type(b, wide), rows, size,
                                                              linear_before_reset)
    outputs = directions * rows
    tensors = {"gates": linear(
        x, reshape(w, shape=(outputs, w.shape[2])),
        None if of_inputs is None else reshape(of_inputs, shape=(outputs,)))}
    if inner is not None:
        tensors["bias"] = inner
    batch = x.shape[0 if layout else 1]
    units = tuple(units_of_tile(len(phase), size, batch) for phase in cell.phases)
    for k, (phase, width) in enumerate(zip(cell.phases, units, strict=True)):
        tensors[f"weights{k}"] = packed_weights(r, phase, cell.gates, width)
    for name, value in states.items():
        if value is not None:
            tensors[name] = value if name == "lengths" else in_type(value, wide)
    results = recurrent_steps(
        *tensors.values(), kind=kind, given=tuple(tensors), direction=direction,
        functions=tuple(chosen[k:k + per] for k in range(0, len(chosen), per)), clip=clip or None,
        input_forget=bool(input_forget), linear_before_reset=bool(linear_before_reset),
        batch_first=bool(layout), units=units)
    return tuple(in_type(v, narrow) for v in results)


def _biases(b: Any, rows: int, size: int, linear_before_reset: bool) -> tuple[Any, Any]:
    """The biases that are added to the inputs' products, and the one inside a gru's reset."""
    of_w, of_r = span(b, 1, 0, rows), span(b, 1, rows, 2 * rows)
    if not linear_before_reset:
        return of_w + of_r, None
    outer = 2 * size
    joined = concat(span(of_w, 1, 0, outer) + span(of_r, 1, 0, outer), span(of_w, 1, outer, rows),
                    axis=1)
    return joined, span(of_r, 1, outer, rows)


@operator(family="recurrent", differentiable=False)
def lstm(x: Any, w: Any, r: Any, b: Any = None, sequence_lens: Any = None, initial_h: Any = None,
         initial_c: Any = None, p: Any = None, *, direction: str = "forward", layout: int = 0,
         activations: Any = None, activation_alpha: Any = None, activation_beta: Any = None,
         clip: float | None = None, input_forget: bool = False) -> Any:
    """a layer of long short-term memory: all hidden states, the last one, the last memory

    Shapes, the order of gates (input, output, forget, memory) and options are those of ONNX.
    """
    states = {"lengths": sequence_lens, "h": initial_h, "c": initial_c, "p": p}
    return _layer("lstm", x, w, r, b, states, direction=direction, layout=layout,
                  activations=activations, alphas=activation_alpha, betas=activation_beta,
                  clip=clip, input_forget=input_forget)


@operator(family="recurrent", differentiable=False)
def gru(x: Any, w: Any, r: Any, b: Any = None, sequence_lens: Any = None, initial_h: Any = None,
        *, direction: str = "forward", layout: int = 0, activations: Any = None,
        activation_alpha: Any = None, activation_beta: Any = None, clip: float | None = None,
        linear_before_reset: bool = False) -> Any:
    """a layer of gated recurrent units: all hidden states, and the last one

    Shapes, the order of gates (update, reset, hidden) and options are those of ONNX.
    """
    states = {"lengths": sequence_lens, "h": initial_h}
    return _layer("gru", x, w, r, b, states, direction=direction, layout=layout,
                  activations=activations, alphas=activation_alpha, betas=activation_beta,
                  clip=clip, linear_before_reset=linear_before_reset)


@operator(family="recurrent", differentiable=False)
def rnn(x: Any, w: Any, r: Any, b: Any = None, sequence_lens: Any = None, initial_h: Any = None,
        *, direction: str = "forward", layout: int = 0, activations: Any = None,
        activation_alpha: Any = None, activation_beta: Any = None,
        clip: float | None = None) -> Any:
    """a layer of plain recurrent units: all hidden states, and the last one

    Shapes and options are those of ONNX.
    """
    states = {"lengths": sequence_lens, "h": initial_h}
    return _layer("rnn", x, w, r, b, states, direction=direction, layout=layout,
                  activations=activations, alphas=activation_alpha, betas=activation_beta,
                  clip=clip)
