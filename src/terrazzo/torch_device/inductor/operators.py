"""Operators that only our graphs have, in place of torch's: Inductor lowers those as we say."""

from __future__ import annotations

from typing import Any

import torch

from terrazzo.torch_device.start import name

TYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_library = torch.library.Library("terrazzo_inductor", "DEF")


def define(operator: str, does: Any, takes: str = "Tensor a, Tensor b") -> Any:
    """An operator of ours; outside of Inductor it does what `does` does."""
    _library.define(f"{operator}({takes}) -> Tensor")
    _library.impl(operator, does, "CompositeExplicitAutograd")
    return getattr(torch.ops.terrazzo_inductor, operator).default


def is_ours(value: Any) -> bool:
    """Whether a value of a graph is on the device, of a type that its matrix unit takes."""
    return isinstance(value, torch.Tensor) and value.device.type == name() and value.dtype in TYPES
