"""Operators on lists of tensors (`_foreach_add`), which optimizers are written with: one by one.

Torch's own step of Adam is a dozen of them. Taken apart they are pointwise operators like any
other, so a whole step is compiled together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

aten = torch.ops.aten

# Without an operator on one tensor that means the same, or not in what AOTAutograd makes.
_LEFT_OUT = ("copy", "zero", "powsum")
_LISTS = ("List[Tensor]", "List[number]")


def _with_value(op: Any) -> Callable[..., Any]:
    def call(x: Any, first: Any, second: Any, value: Any = 1) -> Any:
        return op(x, first, second, value=value)

    return call


def _bounded(by_tensor: Any, by_number: Any) -> Callable[..., Any]:
    def call(x: Any, bound: Any) -> Any:
        return (by_tensor if isinstance(bound, torch.Tensor) else by_number)(x, bound)

    return call


def _norm(x: Any, ord: Any = 2, dtype: Any = None) -> Any:
    return aten.linalg_vector_norm(x, ord, dtype=dtype)


# Those that are called otherwise on one tensor; all others have an operator of the same name.
_OTHERWISE: Mapping[str, Callable[..., Any]] = {
    "addcmul": _with_value(aten.addcmul), "addcdiv": _with_value(aten.addcdiv),
    "maximum": _bounded(aten.maximum, aten.clamp_min),
    "minimum": _bounded(aten.minimum, aten.clamp_max), "norm": _norm}


def names() -> list[str]:
    """What there is of `_foreach_...`, but for those that write into tensors.

    Told by the dispatcher: what `dir(torch.ops.aten)` lists is what somebody has used before.
    """
    found = (n.removeprefix("aten::_foreach_").split(".")[0]
             for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::_foreach_"))
    return sorted({n for n in found if not n.endswith("_")})


def foreach_rules(host_too: bool) -> dict[Any, Callable[..., Any]]:
    """Decompositions of all operators on lists.

    Without `host_too`, numbers in tensors of the host stay in their lists: torch computes those in
    a few calls, and a chip does not.
    """
    made: dict[Any, Callable[..., Any]] = {}
    for base in names():
        if base in _LEFT_OUT:
            continue
        packet = getattr(aten, f"_foreach_{base}")
        one = _OTHERWISE.get(base) or getattr(aten, base)
        for op in (getattr(packet, overload) for overload in packet.overloads()):
            arguments = op._schema.arguments
            # Where a tensor holds numbers, one for each of the list, it stays as it is.
            by_place = any(a.name == "scalars" and str(a.type) == "Tensor" for a in arguments)
            if not by_place and not any(a.is_out for a in arguments):
                listed = [str(a.type) in _LISTS for a in arguments]
                made[op] = partial(_one_by_one, one, listed, host_too)
    return made


def _one_by_one(one: Callable[..., Any], listed: list[bool], host_too: bool, *args: Any,
                **kwargs: Any) -> Any:
    tensors = next(a for a, is_list in zip(args, listed) if is_list)
    if not host_too and all(t.device.type == "cpu" and t.dim() == 0 for t in tensors):
        return NotImplemented
    return [one(*(a[i] if is_list else a for a, is_list in zip(args, listed)), **kwargs)
            for i in range(len(tensors))]
