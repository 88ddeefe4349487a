"""What an overload of an ATen operator computes: a function, and where its results go.

`add.Tensor` gives a new tensor, `add_.Tensor` changes its first argument, `add.out` its last; all
three compute what the first one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from terrazzo.torch.aten.registry import converter_of

_PLACEMENT = {"dtype", "layout", "device", "pin_memory"}
# Those that give new tensors and change arguments besides, which the others give after them.
_BESIDES = {torch.ops.aten._native_batch_norm_legit.default:
            torch.ops.aten._native_batch_norm_legit_functional.default}


@dataclass(frozen=True, eq=False)
class Form:
    """An overload in terms of one that changes nothing."""

    function: Any  # the overload that gives new tensors
    kinds: tuple[str, ...]  # of each argument: "number" where a number is one that varies
    places: tuple[int, ...]  # which arguments the function takes, in its order
    names: tuple[str, ...]  # the names of those that it takes by name only, the last ones
    targets: tuple[int, ...]  # arguments that take the results, those after `fresh` new ones
    read: frozenset[int]  # arguments that are read
    returns: int
    is_converted: bool
    fresh: int = 0
    is_copy: bool = False  # which other forms use to put results where they cannot write them
    typed: int | None = None  # the argument whose type the function is asked for by `dtype`

    @property
    def title(self) -> str:
        return str(self.function).removeprefix("aten.").replace(".", "_")

    def functional_arguments(self, args: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of `function` among those of a call."""
        taken = [args[i] for i in self.places]
        by_place = len(taken) - len(self.names)
        by_name = dict(zip(self.names, taken[by_place:]))
        if self.typed is not None:
            given = args[self.typed]
            by_name["dtype"] = (given.meta["val"] if isinstance(given, Node) else given).dtype
        return taken[:by_place], by_name


@cache
def form_of(overload: Any) -> Form | None:
    """The form of an overload; None where we have no code for such ones."""
    schema = overload._schema
    if overload is torch.ops.aten.copy_.default:
        return _COPY
    function = _functional(overload)
    if function is None or any(
            a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments):
        return None
    if not all(str(r.type) in ("Tensor", "Optional[Tensor]") for r in schema.returns):
        return None
    converted = converter_of(function) is not None
    if not converted and not _is_decomposed(function):
        return None
    arguments = schema.arguments
    known = {a.name: i for i, a in enumerate(arguments)}
    wanted = [a for a in function._schema.arguments if a.name in known]
    targets = tuple(i for i, a in enumerate(arguments)
                    if a.alias_info is not None and a.alias_info.is_write)
    fresh = len(schema.returns) if overload in _BESIDES else 0
    if targets and not fresh and len(targets) != len(schema.returns):
        return None
    places = tuple(known[a.name] for a in wanted)
    chooses = "dtype" in {a.name for a in function._schema.arguments} - known.keys()
    return Form(function, tuple(map(_kind, arguments)), places,
                tuple(a.name for a in wanted if a.kwarg_only), targets, frozenset(places),
                len(schema.returns), converted, fresh,
                typed=targets[0] if targets and chooses else None)


# Of its arguments the second is read, in the type of the first.
_COPY = Form(torch.ops.aten._to_copy.default, ("", "", ""), (1,), (), (0,), frozenset({1}), 1,
             True, is_copy=True, typed=0)


def _kind(argument: Any) -> str:
    kind = argument.type
    if kind.kind() == "OptionalType":
        kind = kind.getElementType()
    return "number" if kind.kind() in ("NumberType", "FloatType", "TensorType") else ""


def _functional(overload: Any) -> Any:
    """The overload of the same meaning that gives new tensors."""
    schema = overload._schema
    if not schema.is_mutable:
        return overload
    if overload in _BESIDES:
        return _BESIDES[overload]
    name = schema.name.removeprefix("aten::")
    plain = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    packet = getattr(torch.ops.aten, plain, None)
    if packet is None:
        return None
    wanted = _signature(schema.arguments)
    for other in packet.overloads():
        found = getattr(packet, other)
        if not found._schema.is_mutable and wanted == _signature(
                found._schema.arguments):
            return found
    return None


def _signature(arguments: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in arguments
            if not a.is_out and a.name not in _PLACEMENT]


def _is_decomposed(function: Any) -> bool:
    from terrazzo.torch.decompositions import decompositions

    return function in decompositions()
