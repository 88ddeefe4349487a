"""How torch.onnx.export writes registered operators: as nodes of their own domain."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from terrazzo.dtypes import as_dtype
from terrazzo.errors import MissingDependency, UnsupportedOperator
from terrazzo.torch.overload import Overload
from terrazzo.torch.registration import registered
from terrazzo.torch.schema import REQUIRED, Parameter

Translation = Callable[..., Any]
_ATTRIBUTES: dict[str, Any] = {
    "bool": int, "SymInt": int, "float": float, "str": str, "ScalarType": str,
    "SymInt[]": Sequence[int], "bool[]": Sequence[int], "float[]": Sequence[float],
    "str[]": Sequence[str]}
VERSION = 1  # of a user's domain: it has no history


def onnx_translations() -> dict[Any, Translation]:
    """For `torch.onnx.export(..., dynamo=True, custom_translation_table=...)`: every operator.

    One that was registered as "mylib::f" becomes a node `f` of the domain `mylib`, as our session
    reads it.
    """
    return {overload.torch: _translation(overload)
            for operator in registered() for overload in operator.overloads}


def _translation(overload: Overload) -> Translation:
    """A function of the values and attributes of a call, which writes its node."""
    parameters = overload.schema.parameters

    def write(*args: Any, **kwargs: Any) -> Any:
        arguments = overload.schema.arguments(args, kwargs)
        inputs: list[Any] = []
        attributes: dict[str, Any] = {}
        for parameter, value in zip(parameters, arguments, strict=True):
            if parameter.keyword:
                if value is not None:
                    attributes[parameter.name] = _attribute(parameter, value)
            elif isinstance(value, (list, tuple)):
                inputs += value
            else:
                inputs.append(value if parameter.takes_tensors else
                              _constant(value, inputs[0] if inputs else None))
        while inputs and inputs[-1] is None:
            inputs.pop()
        return _operator(overload)(*inputs, **attributes)

    write.__name__ = overload.schema.name.partition("::")[2]
    write.__signature__ = inspect.Signature([_as_python(p) for p in parameters])  # type: ignore[attr-defined]
    write.__annotations__ = {p.name: _kind(p) for p in parameters if p.keyword
                             and p.type.rstrip("?") in _ATTRIBUTES}
    return write


def _attribute(parameter: Parameter, value: Any) -> Any:
    if parameter.type.startswith("ScalarType"):  # the exporter has made it a number of ONNX
        from onnx.helper import tensor_dtype_to_np_dtype

        return as_dtype(tensor_dtype_to_np_dtype(value) if isinstance(value, int) else value).name
    return int(value) if isinstance(value, bool) else value


def _as_python(parameter: Parameter) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY if parameter.keyword else (
        inspect.Parameter.POSITIONAL_OR_KEYWORD)
    default = inspect.Parameter.empty if parameter.default is REQUIRED else parameter.default
    return inspect.Parameter(parameter.name, kind, default=default)


def _operator(overload: Overload) -> Translation:
    """The operator as onnxscript calls one."""
    values = _onnxscript().values
    domain, _, name = overload.schema.name.partition("::")
    return values.Op(values.Opset(domain, VERSION), name, _onnx_schema(overload))


def _onnx_schema(overload: Overload) -> Any:
    """What ONNX knows of the operator: its inputs and results are tensors of any type."""
    from onnx.defs import OpSchema, get_schema

    domain, _, name = overload.schema.name.partition("::")
    kinds = {int: OpSchema.AttrType.INT, float: OpSchema.AttrType.FLOAT,
             str: OpSchema.AttrType.STRING, Sequence[int]: OpSchema.AttrType.INTS,
             Sequence[float]: OpSchema.AttrType.FLOATS, Sequence[str]: OpSchema.AttrType.STRINGS}
    free = OpSchema.FormalParameterOption
    tensors = [p for p in overload.schema.parameters if not p.keyword]
    inputs = [OpSchema.FormalParameter(p.name, f"T{i}", param_option=(
        free.Variadic if p.type == "Tensor[]" else free.Single if p.default is REQUIRED else
        free.Optional), is_homogeneous=False) for i, p in enumerate(tensors)]
    outputs = [OpSchema.FormalParameter(f"result{i}", f"R{i}")
               for i in range(_results(overload))]
    types = list(get_schema("Identity").type_constraints[0].allowed_type_strs)
    names = [*(f"T{i}" for i in range(len(inputs))), *(f"R{i}" for i in range(len(outputs)))]
    return OpSchema(name, domain, VERSION, inputs=inputs, outputs=outputs,
                    type_constraints=[(n, types, "") for n in names],
                    attributes=[OpSchema.Attribute(p.name, kinds[_kind(p)], "", required=False)
                                for p in overload.schema.parameters if p.keyword])


def _results(overload: Overload) -> int:
    return len(overload.schema.returns.split(","))


def _kind(parameter: Parameter) -> Any:
    """The type of an attribute in Python."""
    kind = parameter.type.rstrip("?")
    if kind not in _ATTRIBUTES:
        raise UnsupportedOperator(f"the parameter {parameter.name!r} has torch's type "
                                  f"{parameter.type}, which no attribute of ONNX has")
    return _ATTRIBUTES[kind]


def _constant(number: Any, beside: Any) -> Any:
    """A number as an input: of the type of the floats that it meets."""
    standard = _onnxscript().opset18
    if isinstance(number, float):
        made = standard.Constant(value_float=number)
        dtype = getattr(beside, "dtype", None)
        floats = dtype is None or dtype.is_floating_point()
        return standard.CastLike(made, beside) if beside is not None and floats else made
    made = standard.Constant(value_int=int(number))
    return made if beside is None else standard.CastLike(made, beside)


def _onnxscript() -> Any:
    try:
        import onnxscript
    except ImportError:
        raise MissingDependency("torch.onnx.export needs the package onnxscript",
                                hint="install it with: pip install onnxscript") from None
    return onnxscript


__all__ = ["onnx_translations"]
