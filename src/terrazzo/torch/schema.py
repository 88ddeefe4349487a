"""Torch's schema of an operator: its parameters with their torch types, and its results.

What stands before `*` takes tensors. One that has a number for its default takes either, so there
is an overload for each way to pass those: torch tells them apart by what it is given. What stands
after `*` is plain data, whose type the annotation or the default tells.
"""

from __future__ import annotations

import inspect
import itertools
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.dtypes import DType
from terrazzo.errors import ArgumentError
from terrazzo.graph.ir import Operator

REQUIRED = inspect.Parameter.empty
MOST_MIXED = 3  # parameters that may be numbers: beyond, all or none of them are


@dataclass(frozen=True)
class Parameter:
    """One argument of a torch operator."""

    name: str
    type: str  # as torch writes it
    default: Any = REQUIRED  # torch's own: None stands for a number that is given no tensor
    keyword: bool = False
    stands_for: Any = REQUIRED  # what None means here

    @property
    def takes_tensors(self) -> bool:
        return self.type.startswith("Tensor")

    def __str__(self) -> str:
        default = "" if self.default is REQUIRED else f"={_literal(self.default)}"
        return f"{self.type} {self.name}{default}"


@dataclass(frozen=True)
class Schema:
    """One overload: its parameters, those by keyword last, and the type of its results."""

    name: str  # of the operator, with its namespace
    overload: str
    parameters: tuple[Parameter, ...]
    returns: str = "Tensor[]"

    @property
    def qualified(self) -> str:
        """Operator and overload, as torch's registry calls them."""
        return f"{self.name}.{self.overload}" if self.overload else self.name

    def __str__(self) -> str:
        keyword = next((i for i, p in enumerate(self.parameters) if p.keyword), None)
        listed = [str(p) for p in self.parameters]
        if keyword is not None:
            listed.insert(keyword, "*")
        name = self.qualified.partition("::")[2]
        return f"{name}({', '.join(listed)}) -> {self.returns}"

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """A value for each parameter: torch leaves out what equals its default."""
        found = list(args)
        for parameter in self.parameters[len(args):]:
            found.append(kwargs.get(parameter.name, parameter.default))
        return found

    def call(self, arguments: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The other way round: positional and keyword arguments of a call."""
        pairs = list(zip(self.parameters, arguments, strict=True))
        return ([a for p, a in pairs if not p.keyword],
                {p.name: a for p, a in pairs if p.keyword})

    def extended(self, suffix: str, *more: Parameter) -> Schema:
        """The schema of an operator that is derived from this one, and answers with a list."""
        taken = {p.name for p in self.parameters}
        fresh = [replace(p, name=_unused(p.name, taken)) for p in more]
        own = [replace(p, default=REQUIRED) for p in self.parameters]
        return Schema(f"{self.name}_{suffix}", self.overload, (
            *(p for p in (*own, *fresh) if not p.keyword),
            *(p for p in (*own, *fresh) if p.keyword)))


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def schemas(op: Operator, name: str, kinds: Mapping[str, str], returns: str) -> list[Schema]:
    """Torch's overloads of an operator, the one whose tensors are all tensors first."""
    hints = _hints(op.written or op.body)
    unknown = set(kinds) - set(op.signature.parameters)
    if unknown:
        raise ArgumentError(f"types= names {sorted(unknown)[0]!r}, which {op.name}{op.signature} "
                            "has no parameter of")
    if op.takes_keywords:
        raise ArgumentError(f"{op.name}{op.signature} takes **keywords, which no torch operator "
                            "does", hint="name the parameters")
    tensors = [_tensor(op, p) for p in op.tensor_params]
    attributes = [_attribute(op, p, hints.get(p.name, REQUIRED), kinds.get(p.name))
                  for p in op.attr_params]
    numbers = [p.name for p in tensors if p.stands_for is not REQUIRED]
    return [Schema(name, "_".join(chosen), (
        *(_as_number(p) if p.name in chosen else p for p in tensors), *attributes), returns)
        for chosen in _subsets(numbers)]


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    counts = range(len(names) + 1) if len(names) <= MOST_MIXED else (0, len(names))
    for count in counts:
        yield from itertools.combinations(names, count)


def _tensor(op: Operator, parameter: inspect.Parameter) -> Parameter:
    name, default = parameter.name, parameter.default
    if parameter.kind is parameter.VAR_POSITIONAL:
        return Parameter(name, "Tensor[]")
    if default is REQUIRED:
        return Parameter(name, "Tensor")
    if default is None:
        return Parameter(name, "Tensor?", None)
    if isinstance(default, (bool, int, float)):
        return Parameter(name, "Tensor?", None, stands_for=default)
    raise ArgumentError(f"the tensor {name!r} of {op.name}{op.signature} has a "
                        f"{type(default).__name__} for its default, which torch cannot have",
                        hint="make the default a number or None")


def _as_number(parameter: Parameter) -> Parameter:
    return Parameter(parameter.name, "Scalar", parameter.stands_for)


def _attribute(op: Operator, parameter: inspect.Parameter, hint: Any, kind: str | None
               ) -> Parameter:
    default = parameter.default
    found = kind or _type_of_hint(hint) or _type_of_value(default)
    if found is None:
        raise ArgumentError(
            f"nothing tells torch's type of the parameter {parameter.name!r} of "
            f"{op.name}{op.signature}", hint="annotate it (int, float, bool, str, a dtype, tuples "
            f"and lists of those, or None), or pass types={{{parameter.name!r}: \"SymInt[]?\"}}")
    if default is None and not found.endswith("?"):
        found += "?"
    if found.rstrip("?").endswith("[]") and isinstance(default, (int, float, str)):
        default = [default]
    if isinstance(default, DType):
        raise ArgumentError(f"the parameter {parameter.name!r} of {op.name}{op.signature} has a "
                            "type for its default, which torch cannot have",
                            hint="make the default None")
    return Parameter(parameter.name, found, default, keyword=True)


def _hints(function: Callable[..., Any] | None) -> Mapping[str, Any]:
    if function is None:
        return {}
    try:
        return typing.get_type_hints(function)
    except Exception:  # names that only a type checker sees
        return {}


# Of Python's types, in the order in which they are looked for: True is an int as well.
_PLAIN: dict[type, str] = {bool: "bool", int: "SymInt", float: "float", str: "str",
                           DType: "ScalarType"}


def _type_of_hint(hint: Any) -> str | None:
    """Torch's type for what an annotation says; None where it says nothing of use."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        parts = {_type_of_hint(t) for t in inner if t is not type(None)}
        lists: set[str | None] = {p for p in parts if p is not None and p.endswith("[]")}
        if lists and parts - lists <= {p.removesuffix("[]") for p in lists if p}:
            parts = lists  # a number stands for a list of one
        if len(parts) != 1 or None in parts:
            return None
        return f"{parts.pop()}?" if type(None) in inner else parts.pop()
    if origin is typing.Literal:
        return _type_of_value(list(inner), "")
    if origin in (list, tuple) or (isinstance(origin, type) and issubclass(origin, Sequence)):
        parts = {_type_of_hint(t) for t in inner if t is not Ellipsis}
        (part,) = parts if len(parts) == 1 else (None,)
        return None if part is None or part[-1] in "?]" else f"{part}[]"
    if isinstance(hint, type):
        if f"{hint.__module__}.{hint.__name__}" == "torch.dtype":
            return "ScalarType"
        return next((name for kind, name in _PLAIN.items() if issubclass(hint, kind)), None)
    return None


def _type_of_value(value: Any, suffix: str = "[]") -> str | None:
    if isinstance(value, (tuple, list)):
        parts = {_type_of_value(item) for item in value}
        (part,) = parts if len(parts) == 1 else (None,)
        return None if part is None else part + suffix
    return next((name for kind, name in _PLAIN.items() if isinstance(value, kind)), None)


def _literal(value: Any) -> str:
    """A default as schemas write it."""
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        raise ArgumentError(f"a torch operator cannot have {value} for a default",
                            hint="make the default None")
    return repr(value)


__all__ = ["REQUIRED", "Parameter", "Schema", "schemas"]
