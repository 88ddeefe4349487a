"""What the cells of recurrent layers compute, for scalars of a kernel and for arrays alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from terrazzo.base.scalar import OPS
from terrazzo.errors import ArgumentError, user_location

Math = Callable[..., Any]  # an operation of scalar.OPS by name, on scalars or on arrays


# ---------------------------------------------------------------- activations
class Activation(NamedTuple):
    """A function of a gate, with the defaults of its parameters (None: it has no such)."""

    apply: Callable[[Math, Any, float, float], Any]
    alpha: float | None = None
    beta: float | None = None


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(lambda op, x, a, b: op("max", x, 0.0)),
    "tanh": Activation(lambda op, x, a, b: op("tanh", x)),
    "sigmoid": Activation(lambda op, x, a, b: op("sigmoid", x)),
    "affine": Activation(lambda op, x, a, b: x * a + b, 1.0, 0.0),
    "leakyrelu": Activation(lambda op, x, a, b: op("where", x >= 0.0, x, x * a), 0.01),
    "thresholdedrelu": Activation(lambda op, x, a, b: op("where", x >= a, x, 0.0), 1.0),
    "scaledtanh": Activation(lambda op, x, a, b: op("tanh", x * b) * a, 1.0, 1.0),
    "hardsigmoid": Activation(
        lambda op, x, a, b: op("min", op("max", x * a + b, 0.0), 1.0), 0.2, 0.5),
    "elu": Activation(lambda op, x, a, b: op("where", x >= 0.0, x, op("expm1", x) * a), 1.0),
    "softsign": Activation(lambda op, x, a, b: x / (op("abs", x) + 1.0)),
    "softplus": Activation(
        lambda op, x, a, b: op("max", x, 0.0) + op("log1p", op("exp", op("neg", op("abs", x))))),
}
Chosen = tuple[str, float, float]  # a name in ACTIVATIONS, alpha, beta


def choose_activations(names: Sequence[str], alphas: Sequence[float] | None,
                       betas: Sequence[float] | None) -> tuple[Chosen, ...]:
    """Give every function its parameters: those that take one consume the lists in order."""
    rest_alpha, rest_beta = list(alphas or ()), list(betas or ())
    chosen = []
    for name in names:
        row = ACTIVATIONS.get(name.lower())
        if row is None:
            raise ArgumentError(f"recurrent layers have no activation {name!r}",
                                where=user_location(), hint="use " + ", ".join(ACTIVATIONS))
        alpha = 0.0 if row.alpha is None else rest_alpha.pop(0) if rest_alpha else row.alpha
        beta = 0.0 if row.beta is None else rest_beta.pop(0) if rest_beta else row.beta
        chosen.append((name.lower(), float(alpha), float(beta)))
    return tuple(chosen)


def array_math(name: str, *args: Any) -> Any:
    """An operation of scalar.OPS on arrays."""
    with np.errstate(all="ignore"):
        return OPS[name].numpy(*args)


# ---------------------------------------------------------------- what a cell computes
class Cell(NamedTuple):
    """The settings of a layer's cell in one direction."""

    kind: str  # lstm | gru | rnn
    functions: tuple[Chosen, ...]
    clip: float | None = None
    input_forget: bool = False
    linear_before_reset: bool = False

    @property
    def gates(self) -> int:
        return {"lstm": 4, "gru": 3, "rnn": 1}[self.kind]

    @property
    def phases(self) -> tuple[tuple[int, ...], ...]:
        """The gates whose products can be made at once; a gru's reset comes before its last."""
        if self.kind == "gru" and not self.linear_before_reset:
            return (0, 1), (2,)
        return (tuple(range(self.gates)),)

    def act(self, op: Math, which: int, x: Any) -> Any:
        name, alpha, beta = self.functions[which]
        if self.clip is not None and which < 2:  # gates, not an lstm's memory: as onnxruntime
            x = op("min", op("max", x, -self.clip), self.clip)
        return ACTIVATIONS[name].apply(op, x, alpha, beta)


def lstm_memory(cell: Cell, op: Math, gates: Sequence[Any], c: Any, peephole: Any) -> Any:
    """The new memory of an lstm; gates are those of input, output, forget, memory."""
    gate_in, _, gate_forget, candidate = gates
    if peephole is not None:
        gate_in, gate_forget = gate_in + peephole[0] * c, gate_forget + peephole[2] * c
    taken = cell.act(op, 0, gate_in)
    kept = 1.0 - taken if cell.input_forget else cell.act(op, 0, gate_forget)
    return kept * c + taken * cell.act(op, 1, candidate)


def lstm_hidden(cell: Cell, op: Math, gates: Sequence[Any], c: Any, peephole: Any) -> Any:
    """The new hidden state of an lstm, given its new memory."""
    gate_out = gates[1] if peephole is None else gates[1] + peephole[1] * c
    return cell.act(op, 0, gate_out) * cell.act(op, 2, c)


def gru_hidden(cell: Cell, op: Math, update: Any, candidate: Any, h: Any) -> Any:
    """The new hidden state of a gru: between the candidate and the old one."""
    return (1.0 - update) * cell.act(op, 1, candidate) + update * h
