"""The arguments of a launch as 64-bit integers: addresses, numbers, the bits of floats."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from terrazzo.errors import ArgumentError, WrongDevice


def _single_bits(value: float) -> int:
    try:
        return int(struct.unpack("<i", struct.pack("<f", value))[0])
    except OverflowError:
        return int(struct.unpack("<i", struct.pack("<f", float("inf") if value > 0 else
                                                   float("-inf")))[0])


def _double_bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


@dataclass(frozen=True)
class Home:
    """Where the tensors lie that a backend's kernels are given."""

    device: str  # torch's name for devices of its kind
    name: str  # in a sentence
    hint: str  # what to do with a tensor from elsewhere

    def check_all(self, args: Iterable[Any], names: Iterable[Any]) -> None:
        """Refuse the first tensor of another device, by the name of its argument."""
        for value, name in zip(args, names):
            self.check(getattr(value, "base", value), f" as {name}")

    def check(self, value: Any, place: str = "") -> None:
        """Refuse a tensor of another device: reading it would end the process."""
        device = getattr(value, "device", None)
        if getattr(device, "type", self.device) != self.device:
            raise WrongDevice(
                f"a kernel for {self.name} was given a tensor on the device {device}{place}",
                hint=self.hint)

    def address(self, value: Any) -> int:
        """Where an argument lies: anything with `data_ptr()`, an address, or None."""
        if value is None:
            return 0
        if isinstance(value, int):
            return value
        pointer = getattr(value, "data_ptr", None)
        if pointer is None:
            raise ArgumentError(
                f"a kernel was given {type(value).__name__} where it takes a pointer",
                hint="pass a torch tensor, or anything with a method data_ptr()")
        return int(pointer()) or self.nowhere(value)

    def nowhere(self, value: Any) -> int:
        """The address zero, which only tensors without elements may have."""
        self.check(value)
        if getattr(value, "_is_zerotensor", bool)():
            raise ArgumentError("a kernel was given a tensor that is zero without having memory",
                                hint="pass torch.zeros_like(x)")
        return 0


CPU = Home("cpu", "the CPU", "move it with .cpu(), or set TRITON_DEFAULT_BACKEND=gcu for tensors "
                             "of a described chip, and unset it for those of a GPU")


_SPELLING = {"fp64": "double_bits({})", "f64": "double_bits({})"}


def expression(kind: Any, value: str, address: str = "{}.data_ptr()", whole: str = "{}"
               ) -> list[str]:
    """Python code that turns an argument of a kind into integers."""
    if isinstance(kind, (tuple, list)):
        return [e for i, k in enumerate(kind)
                for e in expression(k, f"{value}[{i}]", address, whole)]
    if kind == "constexpr":
        return []
    if kind.startswith("tensordesc"):
        return _descriptor(kind, value, address)
    if kind.startswith("*"):
        return [address.format(value)]
    if kind.startswith(("fp", "bf", "f")):
        return [_SPELLING.get(kind, "single_bits({})").format(value)]
    return [f"int({value})" if kind in ("i1", "u1") else whole.format(value)]


def _descriptor(kind: str, value: str, address: str) -> list[str]:
    """Python code for a tensor descriptor that was made on the host.

    Triton's pass turns it into pointer, shape, strides and flags; its front end asks for the shape
    and the strides once more.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    rank = kind.partition("[")[2].partition("]")[0].count(",") + 1
    extents = [f"{value}.{part}[{i}]" for part in ("shape", "strides") for i in range(rank)]
    flags = [f"{value}.padding == 'nan'"]
    if "round_f32_to_tf32" in TensorDescriptor.__dataclass_fields__:  # since 3.7
        flags.append(f"{value}.round_f32_to_tf32")
    return [*expression("*", f"{value}.base", address), *extents, *flags, *extents]


def caller(kinds: Sequence[Any], home: Home, reports: bool, given: str, call: str,
           **scope: Any) -> tuple[Callable[..., Any], int]:
    """A function that calls native code with the integers of a launch, and how many they are.

    It takes `given`, then the arguments of the kernel, whose kinds are Triton's, then the area of
    its reports, if there is one; `call` says what it does with the integers, which stand for `{}`,
    each with a comma after it. The code is written out, so that a launch costs one call of Python
    and one of the kernel.
    """
    names = [f"a{i}" for i in range(len(kinds))]
    quick, careful = ([e for kind, name in zip(kinds, names)
                       for e in expression(kind, name, *spelling)] + ["area"] * reports
                      for spelling in (("({0}.data_ptr() or nowhere({0}))", "{}"),
                                       ("address({})", "index({})")))
    names += ["area"] * reports
    one, other = (call.format("".join(f"{e}, " for e in words)) for words in (quick, careful))
    text = (f"def run({', '.join([given, *names])}):\n"
            f"    try:\n        return {one}\n"
            f"    except (AttributeError, TypeError):  # an address, None, a number of numpy's\n"
            f"        return {other}\n")
    scope.update(single_bits=_single_bits, double_bits=_double_bits, address=home.address,
                 nowhere=home.nowhere, index=operator.index)
    exec(text, scope)
    return scope["run"], len(quick)
