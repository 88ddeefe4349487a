"""Which function converts which ATen operator, and how one is added.

A converter is a small function from values of our graph, numbers and other plain arguments to
values, written with the operators of `terrazzo.ops`. Its parameters are those of the ATen schema,
by position or by name:

    @aten("softplus.default")                    # one overload; "softplus" stands for all of them
    def softplus(x, beta=1.0, threshold=20.0):
        return ops.softplus(x, beta=beta, threshold=threshold)

- Where the type of the result is needed, `@aten(..., typed=True)` hands it over as `out=`: a
  `TensorType`, or a tuple of them (None for results there are not).
- Where memory counts (`as_strided`), `@aten(..., placed=True)` hands over as `lies=` the strides
  and the offset of the first argument, as torch knew them when it traced.
- Sizes that vary (`dynamic=True`) come as index expressions, as in the shapes of values. Compare
  them with `terrazzo.index.guards.ask`, never with `==`.
- An operator with several results answers with a tuple, None for what nobody may use.
- `unsupported("why")` leaves this call to torch: the user is shown the reason.
- Arguments that say where and how memory is laid out (`device`, `layout`, `memory_format`,
  `pin_memory`) never arrive: results lie as torch said they would.
- Pointwise operators are rows of `base/scalar_table.py` or lines of the table in `pointwise.py`;
  operators that only move elements are made from those of `shapes.py`.

Every result is checked against the type that torch found when it traced: another shape is an error
of the converter, another float or integer type is converted. An operator that has a converter is
not decomposed; one that has none is, if torch knows how, and runs in torch otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from terrazzo.errors import UnsupportedOperator

Function = Callable[..., Any]


@dataclass(frozen=True)
class Converter:
    """A function that converts calls of one operator."""

    function: Function
    typed: bool = False  # whether it is told the type of its result
    promotes: str = ""  # how torch finds the type in which tensors meet; empty: they stay as is
    placed: bool = False  # whether it is told how its first argument lies in memory


CONVERTERS: dict[str, Converter] = {}  # by "aten.add.Tensor", or "aten.add" for all overloads


def aten(*names: str, typed: bool = False, promotes: str = "", placed: bool = False
         ) -> Callable[[Function], Function]:
    """Register a function as the converter of some ATen operators, by overload or by packet."""
    return converts(*(f"aten.{name}" for name in names), typed=typed, promotes=promotes,
                    placed=placed)


def converts(*names: str, typed: bool = False, promotes: str = "", placed: bool = False
             ) -> Callable[[Function], Function]:
    """The same for operators of any namespace: "prims.iota.default"."""
    def register(function: Function) -> Function:
        for name in names:
            if name in CONVERTERS:
                raise ValueError(f"{name} has a converter already")
            CONVERTERS[name] = Converter(function, typed, promotes, placed)
        return function

    return register


def converter_of(target: Any) -> Converter | None:
    """The converter of an operator's overload, if there is one."""
    name = str(target)
    return CONVERTERS.get(name) or CONVERTERS.get(name.rpartition(".")[0])


def unsupported(why: str) -> NoReturn:
    """Leave a call to torch, for a reason that the user is shown."""
    raise UnsupportedOperator(why)


# Where and how results lie is torch's to say, and not a matter of what is computed.
PLACEMENT = frozenset({"device", "layout", "memory_format", "pin_memory", "non_blocking",
                       "generator", "copy"})


def without_placement(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments that say what is computed."""
    return {k: v for k, v in kwargs.items() if k not in PLACEMENT}
