"""The inputs and outputs of a model, and checking what a caller gives against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from terrazzo.dtypes import DType, as_dtype
from terrazzo.errors import ModelError, TerrazzoError
from terrazzo.frontends.onnx.model import Model
from terrazzo.frontends.onnx.types import STRING, dtype_of


@dataclass(frozen=True)
class Port:
    """An input or output of a model."""

    name: str
    dtype: DType | None  # None for strings and for what is no tensor
    shape: tuple[Any, ...] | None  # of sizes: int, a name, or None; None: any rank
    kind: str = "tensor"  # tensor | string | sequence | optional | map

    def __str__(self) -> str:
        if self.dtype is None:
            return f"{self.name}: {self.kind}"
        sizes = "any rank" if self.shape is None else ", ".join(
            "?" if n is None else str(n) for n in self.shape)
        return f"{self.name}: {self.dtype.name}[{sizes}]"


@dataclass(frozen=True)
class Ports:
    """All that goes into a model and comes out of it."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    overridable: tuple[Port, ...]  # weights that a caller may replace
    names: tuple[str, ...]  # of the inputs
    tensors: tuple[str, ...]  # of the inputs that are tensors: `names` itself where all are


def ports_of(model: Model) -> Ports:
    """What a model declares."""
    inputs = tuple(map(port_of, model.input_infos))
    names = tuple(p.name for p in inputs)
    tensors = tuple(p.name for p in inputs if p.kind in ("tensor", "string"))
    return Ports(inputs, tuple(map(port_of, model.graph.output)),
                 tuple(map(port_of, model.overridable_infos)), names,
                 names if tensors == names else tensors)


def port_of(info: Any) -> Port:
    """What a ValueInfoProto says."""
    kind = info.type.WhichOneof("value") or "tensor_type"
    if kind not in ("tensor_type", "sparse_tensor_type"):
        return Port(info.name, None, None, kind.removesuffix("_type"))
    tensor = getattr(info.type, kind)
    shape = tuple(map(_declared, tensor.shape.dim)) if tensor.HasField("shape") else None
    if tensor.elem_type == STRING:
        return Port(info.name, None, shape, "string")
    try:
        return Port(info.name, dtype_of(tensor.elem_type), shape)
    except TerrazzoError:
        return Port(info.name, None, shape)


def _declared(size: Any) -> Any:
    """A number, a name, or None: some programs write -1 for a size that they do not know."""
    if size.HasField("dim_value"):
        return size.dim_value if size.dim_value >= 0 else None
    return size.dim_param or None


def checked(feeds: Mapping[str, Any], inputs: Sequence[Port], overridable: Sequence[Port] = ()
            ) -> dict[str, Any]:
    """What a caller gives, by name, if it fits the inputs; ModelError says what does not."""
    ports = {p.name: p for p in (*inputs, *overridable)}
    for name in feeds:
        if name not in ports:
            raise ModelError(f"the model has no input {name!r}",
                             hint=f"it takes {', '.join(ports) or 'none'}")
    missing = [p.name for p in inputs if p.name not in feeds and p.kind != "optional"]
    if missing:
        raise ModelError(f"the model needs its input {missing[0]!r}",
                         hint=f"given were {', '.join(feeds) or 'none'}")
    return {n: _fitting(ports[n], value) for n, value in feeds.items()}


def _fitting(port: Port, value: Any) -> Any:
    # Names of sizes bind nobody: one that two inputs disagree about may well be needed by neither.
    if port.kind != "tensor":
        return value
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        try:
            value = np.asarray(value, None if port.dtype is None else port.dtype.np)
        except (TypeError, ValueError, OverflowError):
            raise ModelError(f"input {port.name!r} is a {type(value).__name__}, the model takes "
                             f"{port}") from None
    elif isinstance(value, np.generic):
        value = np.asarray(value)
    if port.dtype is not None and value.dtype is not port.dtype.np:
        given = as_dtype(value.dtype)
        if given is not port.dtype:
            raise ModelError(f"input {port.name!r} is {given.name}, the model takes "
                             f"{port.dtype.name}")
    if port.shape is None:
        return value
    if len(port.shape) != len(value.shape):
        raise ModelError(f"input {port.name!r} has {len(value.shape)} dimensions "
                         f"{tuple(value.shape)}, the model takes {len(port.shape)}: {port.shape}")
    for wanted, size in zip(port.shape, value.shape, strict=True):
        if isinstance(wanted, int) and wanted != size:
            raise ModelError(f"input {port.name!r} has shape {tuple(value.shape)}, the model takes "
                             f"{port.shape}")
    return value


def known_outputs(names: Sequence[str] | None, outputs: Sequence[Port]) -> list[str]:
    """The outputs that are wanted: all, or those named, which must exist."""
    known = [o.name for o in outputs]
    for name in names or ():
        if name not in known:
            raise ModelError(f"the model has no output {name!r}",
                             hint=f"it has {', '.join(sorted(known))}")
    return list(names) if names else known
