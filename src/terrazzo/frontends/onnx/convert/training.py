"""Steps of gradient descent (domain ai.onnx.preview.training).

A node updates any number of tensors; its inputs are the learning rate, the number of the step, and
then all tensors, all gradients and all states of each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from terrazzo.frontends.onnx.importer import astype
from terrazzo.frontends.onnx.registry import Call, Result, converts
from terrazzo.graph.ir import Value
from terrazzo.ops import elementwise as e

TRAINING = "ai.onnx.preview.training"


def _adagrad(call: Call, rate: Value, step: Value, x: Value, g: Value, h: Value
             ) -> tuple[Any, ...]:
    """Duchi, Hazan and Singer (2011)."""
    rate = rate / (step * call.attr("decay_factor", 0.0) + 1.0)
    h = h + g * g
    return x - rate * g / (e.sqrt(h) + call.attr("epsilon", 1e-6)), h


def _adam(call: Call, rate: Value, step: Value, x: Value, g: Value, v: Value, h: Value
          ) -> tuple[Any, ...]:
    """Kingma and Ba (2014)."""
    alpha, beta = call.attr("alpha", 0.9), call.attr("beta", 0.999)
    v = v * alpha + g * (1 - alpha)
    h = h * beta + g * g * (1 - beta)
    adjusted = rate * e.sqrt(1.0 - e.power(beta, step)) / (1.0 - e.power(alpha, step))
    rate = e.where(e.greater(step, 0.0), adjusted, rate)
    x = x - rate * v / (e.sqrt(h) + call.attr("epsilon", 1e-6))
    return x * (1 - call.attr("norm_coefficient_post", 0.0)), v, h


def _momentum(call: Call, rate: Value, step: Value, x: Value, g: Value, v: Value
              ) -> tuple[Any, ...]:
    alpha = call.attr("alpha")
    v = v * alpha + g * e.where(e.greater(step, 0.0), call.attr("beta"), 1.0)
    direction = g + v * alpha if call.attr("mode") == "nesterov" else v
    return x - rate * direction, v


# The rule of an operator, and how many tensors it has of each that it updates.
_RULES: dict[str, tuple[Callable[..., tuple[Any, ...]], int]] = {
    "Adagrad": (_adagrad, 3),
    "Adam": (_adam, 4),
    "Momentum": (_momentum, 3),
}


@converts(*_RULES, domain=TRAINING)
def descent(call: Call) -> Result:
    rule, kinds = _RULES[call.node.op_type]
    count = (len(call) - 2) // kinds
    rate = call.value(0)
    updated = []
    for k in range(count):
        x, g, *states = (call.value(2 + kind * count + k) for kind in range(kinds))
        g = x * call.attr("norm_coefficient", 0.0) + g
        updated.append(rule(call, rate, astype(call.value(1), dtype=x.dtype), x, g, *states))
    return [value for kind in zip(*updated, strict=True) for value in kind]
