"""Operators that ONNX itself defines by a function: the body, ready to be converted or run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from terrazzo.dtypes import as_dtype
from terrazzo.frontends.onnx.types import code_of
from terrazzo.graph.ir import TensorType


def opset_table(imports: Iterable[Any]) -> dict[str, int]:
    """Versions by domain, with one name for ai.onnx."""
    return {("" if o.domain == "ai.onnx" else o.domain): o.version for o in imports}


def _schema(node: Any, opsets: Mapping[str, int]) -> Any:
    from onnx import defs

    domain = "" if node.domain == "ai.onnx" else node.domain
    try:
        return defs.get_schema(node.op_type, opsets.get(domain, 1), domain)
    except defs.SchemaError:
        return None


def missing_part(node: Any, opsets: Mapping[str, int]) -> str | None:
    """What ONNX says that a node must have and it has not: an input or an attribute."""
    schema = _schema(node, opsets)
    if schema is None:
        return None
    for i, formal in enumerate(schema.inputs):
        if formal.option.name == "Single" and not (i < len(node.input) and node.input[i]):
            return f"input {formal.name!r}"
    given = {a.name for a in node.attribute}
    return next((f"attribute {name!r}" for name, attribute in schema.attributes.items()
                 if attribute.required and name not in given), None)


def has_function(node: Any, opsets: Mapping[str, int]) -> bool:
    """Whether ONNX defines a node's operator by a function."""
    schema = _schema(node, opsets)
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def function_body(node: Any, opsets: Mapping[str, int], types: Mapping[str, Any]) -> Any:
    """The FunctionProto that defines a node's operator, for these TypeProtos of its inputs."""
    from onnx import FunctionProto

    schema = _schema(node, opsets)
    version = opsets.get("" if node.domain == "ai.onnx" else node.domain, 1)

    def newest(versions: Iterable[int]) -> int | None:
        return max((v for v in versions if v <= version), default=None)

    if schema.has_context_dependent_function:
        if any(n and types.get(n) is None for n in node.input):
            return None
        protos = [types[n].SerializeToString() if n else b"" for n in node.input]
        chosen = newest(schema.context_dependent_function_opset_versions)
        text = chosen and schema.get_context_dependent_function_with_opset_version(
            chosen, node.SerializeToString(), protos)
    else:
        chosen = newest(schema.function_opset_versions)
        text = chosen and schema.get_function_with_opset_version(chosen)
    if not text:
        return None
    return FunctionProto.FromString(text) if isinstance(text, bytes) else text


def type_proto(type: TensorType) -> Any:
    """A tensor's type as onnx writes it; symbolic sizes stay open."""
    from onnx import helper

    return helper.make_tensor_type_proto(
        code_of(type.dtype), [n if isinstance(n, int) else None for n in type.shape])


def proto_of(value: Any) -> Any:
    """The TypeProto of a value at run time: an array, or a sequence of arrays; else None."""
    from onnx import helper

    if isinstance(value, list) and value:
        item = proto_of(value[0])
        return None if item is None else helper.make_sequence_type_proto(
            helper.make_tensor_type_proto(item.tensor_type.elem_type, None))
    try:
        return type_proto(TensorType(tuple(value.shape), as_dtype(value.dtype)))
    except (AttributeError, TypeError):
        return None


def steps_of(node: Any, body: Any) -> list[Any]:
    """The nodes of a function body, with the attributes that refer to the caller's filled in."""
    given = {a.name: a for a in node.attribute}
    for default in body.attribute_proto:
        given.setdefault(default.name, default)
    return [_filled(step, given) for step in body.node]


def _filled(step: Any, given: Mapping[str, Any]) -> Any:
    if not any(a.ref_attr_name for a in step.attribute):
        return step
    fresh = type(step)()
    fresh.CopyFrom(step)
    del fresh.attribute[:]
    for attribute in step.attribute:
        source = given.get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
        if source is not None:
            copy = fresh.attribute.add()
            copy.CopyFrom(source)
            copy.name = attribute.name
    return fresh
