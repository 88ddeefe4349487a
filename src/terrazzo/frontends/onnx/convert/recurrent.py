"""Recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from terrazzo.frontends.onnx.registry import Call, Result, converts
from terrazzo.ops import recurrent

# The operator, how many tensors it takes, and the attributes that only it has.
_LAYERS: dict[str, tuple[Callable[..., Any], int, tuple[str, ...]]] = {
    "LSTM": (recurrent.lstm, 8, ("input_forget",)),
    "GRU": (recurrent.gru, 6, ("linear_before_reset",)),
    "RNN": (recurrent.rnn, 6, ()),
}


@converts(*_LAYERS)
def layer(call: Call) -> Result:
    function, inputs, own = _LAYERS[call.node.op_type]
    lists = {name: tuple(call.attr(name) or ()) or None
             for name in ("activations", "activation_alpha", "activation_beta")}
    return function(*(call.optional(i) for i in range(inputs)),
                    direction=call.attr("direction", "forward"), layout=call.attr("layout", 0),
                    clip=call.attr("clip"), **lists,
                    **{name: bool(call.attr(name, 0)) for name in own})
