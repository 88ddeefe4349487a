"""What a model says of its inputs, outputs and itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from terrazzo.errors import TerrazzoError
from terrazzo.frontends.onnx.session.ports import Port
from terrazzo.frontends.onnx.types import STRING, dtype_of, type_text


class NodeArg:
    """An input or output as a program sees it."""

    def __init__(self, info: Any):
        self.name: str = info.name
        self.type = written_type(info.type)
        self.shape = _shape(info.type)

    @classmethod
    def of_port(cls, port: Port) -> NodeArg:
        """The same for what a compiled file says."""
        made = cls.__new__(cls)
        made.name, made.shape = port.name, list(port.shape or ())
        made.type = "tensor(undefined)" if port.dtype is None else type_text(port.dtype)
        return made

    def __repr__(self) -> str:
        return f"NodeArg(name={self.name!r}, type={self.type!r}, shape={self.shape})"


def written_type(type: Any) -> str:
    """A TypeProto as onnxruntime writes it: "tensor(float)", "seq(map(int64,tensor(float)))"."""
    kind = type.WhichOneof("value")
    if kind == "sequence_type":
        return f"seq({written_type(type.sequence_type.elem_type)})"
    if kind == "optional_type":
        return f"optional({written_type(type.optional_type.elem_type)})"
    if kind == "map_type":
        key = _element(type.map_type.key_type).removeprefix("tensor(").removesuffix(")")
        return f"map({key},{written_type(type.map_type.value_type)})"
    if kind == "sparse_tensor_type":
        return "sparse_" + _element(type.sparse_tensor_type.elem_type)
    return _element(type.tensor_type.elem_type)


def _element(code: int) -> str:
    try:
        return type_text("string" if code == STRING else dtype_of(code))
    except TerrazzoError:
        return "tensor(undefined)"


def _shape(type: Any) -> list[Any]:
    """Sizes: numbers, names, or None."""
    if type.WhichOneof("value") != "tensor_type":
        return []
    return [d.dim_value if d.HasField("dim_value") else d.dim_param or None
            for d in type.tensor_type.shape.dim]


def with_inferred(infos: list[Any], graph: Any) -> list[Any]:
    """ValueInfoProtos of outputs, where they say little those that inference found."""
    known = {o.name: o for o in graph.output}
    return [known.get(i.name, i) if _says_little(i) else _numbered(i, known.get(i.name, i))
            for i in infos]


def _numbered(info: Any, inferred: Any) -> Any:
    """A ValueInfoProto with the sizes that inference knows as numbers."""
    made = type(info)()
    made.CopyFrom(info)
    pairs = zip(made.type.tensor_type.shape.dim, inferred.type.tensor_type.shape.dim, strict=False)
    for size, found in pairs:
        if not size.HasField("dim_value") and found.HasField("dim_value"):
            size.dim_value = found.dim_value
    return made


def _says_little(info: Any) -> bool:
    tensor = info.type.tensor_type
    return not info.type.WhichOneof("value") or (
        info.type.WhichOneof("value") == "tensor_type" and (
            not tensor.elem_type or not tensor.HasField("shape")))


class ModelMetadata:
    """What a model says of itself."""

    def __init__(self, proto: Any):
        self.producer_name = proto.producer_name
        self.graph_name = proto.graph.name
        self.domain = proto.domain
        self.description = proto.doc_string
        self.graph_description = proto.graph.doc_string
        self.version = proto.model_version
        self.custom_metadata_map = {e.key: e.value for e in proto.metadata_props}

    @classmethod
    def of_notes(cls, name: str, made_with: Mapping[str, Any]) -> ModelMetadata:
        """The same for a compiled file: what it is called, and what it was made with."""
        made = cls.__new__(cls)
        made.producer_name, made.graph_name, made.version = "terrazzo", name, 0
        made.domain = made.description = made.graph_description = ""
        made.custom_metadata_map = {k: str(v) for k, v in made_with.items()}
        return made
