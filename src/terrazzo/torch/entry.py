"""The way from torch tensors to native code and back: a function written for one layout.

Everything that layouts, types and sizes decide is decided once, and written down as the source of a
small Python function; a call allocates results, hands over addresses, and runs.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from terrazzo.errors import ShapeError, UnsupportedOperator
from terrazzo.index import evaluate
from terrazzo.knobs import knobs, thread_count
from terrazzo.runtime import pages
from terrazzo.torch.devices import HOST, current

_APART = 16  # bytes from one number that is brought to the next: kernels load no smaller pieces


@dataclass(frozen=True)
class Result:
    """How a result is allocated; by expressions of sizes where those are not known yet."""

    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    dtype: Any
    spread: tuple[Any, ...] | None = None  # strides that torch wants of it in the end, with gaps

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def sized(self, numbers: Mapping[str, int]) -> Result:
        """With numbers for the names of sizes."""
        def known(sizes: Sequence[Any]) -> tuple[int, ...]:
            return tuple(evaluate(n, numbers) for n in sizes)

        return Result(known(self.shape), known(self.strides), self.dtype,
                      None if self.spread is None else known(self.spread))


def _general(shape: Any, strides: Any, dtype: Any) -> Any:
    return torch.empty_strided(shape, strides, dtype=dtype)


# What the code of torch.compile calls: half the time of torch.empty's general way.
_empty: Callable[..., Any] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cpu", None) or _general
# A view by shape, strides and offset, where this torch has it.
reinterpret: Callable[..., Any] | None = getattr(
    torch._C._dynamo.guards, "_reinterpret_tensor", None)


def _empty_on(device: torch.device) -> Callable[..., Any]:
    quick: Callable[..., Any] | None = getattr(
        torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if quick is not None:  # on the current device, which this one is by then
        return quick

    def empty(shape: Any, strides: Any, dtype: Any) -> Any:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return empty


def _large(shape: Any, strides: Any, dtype: Any) -> Any:
    made = _empty(shape, strides, dtype)
    pages.ask_for_large_pages(made.data_ptr(), made.nbytes)
    return made


def _spread(tensor: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """A copy that lies as torch said, with gaps; what repeats elements is one of them."""
    made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    if 0 in strides:
        once = tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)
        made[once].copy_(tensor[once])
        return made
    return made.copy_(tensor)


def laid(tensor: Any, strides: tuple[int, ...]) -> Any:
    """A tensor in these strides: itself where that is so, or where torch foretold another rank."""
    if tensor.stride() == strides or tensor.dim() != len(strides):
        return tensor
    return _spread(tensor, tensor.shape, strides)


def held(tensor: Any, strides: tuple[int, ...], shape: tuple[int, ...], source: str) -> Any:
    """The same where our code reads it, which is made for the shape that torch foretold."""
    if tensor.shape != shape:
        raise UnsupportedOperator(
            f"{source} answered a tensor of shape {tuple(tensor.shape)}, and {shape} when torch "
            "traced it", hint="this torch is wrong about it: leave it out of what is compiled")
    return laid(tensor, strides)


def as_saved(tensor: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """What a hook handed back of a saved tensor, in the strides that it had."""
    if tensor.shape != shape:
        raise ShapeError(f"a tensor of shape {shape} was saved for the backward pass, and one of "
                         f"{tuple(tensor.shape)} came back",
                         hint="hooks of saved tensors have to hand back what they were given")
    if all(n == 1 or s == t for n, s, t in zip(shape, strides, tensor.stride())):
        return tensor
    return _spread(tensor, shape, strides)


def laid_in_order(tensor: Any, order: tuple[int, ...] | None) -> Any:
    """A tensor that is dense in this order of axes, or row major."""
    if order is None:
        return tensor.contiguous()
    back = [order.index(d) for d in range(len(order))]
    return tensor.permute(order).contiguous().permute(back)


class Threads:
    """How many threads a call runs on: a number, or that of the knob, looked up when it changes."""

    __slots__ = ("code", "fixed", "knob", "now")

    def __init__(self, code: Any, fixed: int):
        self.code, self.fixed = code, fixed
        self.renew()

    def renew(self) -> int:
        """Look up the knob."""
        self.knob = knobs.threads
        self.code.prepare()
        self.now = self.fixed or thread_count()
        return self.now


@dataclass(frozen=True, eq=False)
class Source:
    """Where an input of an executable comes from."""

    place: int = -1  # the number of an argument
    row: Any = None  # or a tensor of our own, which tells a size
    order: tuple[int, ...] | None = None  # of axes in memory, where it is not row major
    has_gaps: bool = False  # not dense: read by strides, or copied
    is_elsewhere: bool = False  # on another device than the results: brought there
    number: Any = None  # a number of the host's, in a tensor of this type: brought with all others

    def stored(self, tensors: Sequence[Any]) -> Any:
        """The tensor that the executable is to see."""
        if self.row is not None:
            return self.row
        tensor = tensors[self.place].detach()
        return tensor if self.order is None else tensor.permute(self.order)


def rows(symbols: Sequence[str], numbers: Mapping[str, int], device: torch.device = HOST
         ) -> list[Source]:
    """Inputs that tell sizes which no tensor has, or numbers that are none: they take no memory."""
    return [Source(row=torch.empty_strided((numbers[name],), (0,), dtype=torch.int8, device=device))
            for name in symbols]


def entry(executable: Any, made: Sequence[Result], sources: Sequence[Source],
          sizes: Sequence[int], threads: int, device: torch.device = HOST,
          over: Sequence[int | None] = (), records: bool = False) -> Callable[..., Sequence[Any]]:
    """A function from tensors to the list of results, for one layout and the values of sizes.

    `over` are the arguments whose memory results are written to; `records` has the chip repeat what
    it recorded of earlier calls, if it can.
    """
    code = getattr(executable, "code", None)  # none where the host takes part
    runner = executable.chip.recorded(executable) if records and code is not None else executable
    slow = _there(device, _by_running(runner, made, sources, threads, over))
    if code is None or (code.call_slots is None and code.call_pointers is None):
        return slow
    names = [f"x{i}" for i in range(1 + max((s.place for s in sources), default=-1))]
    given = ", ".join(names)
    scope: dict[str, Any] = {"array": array, "executable": executable, "knobs": knobs,
                             "slow": slow, "device": device, "stack": torch.stack,
                             "spread": _spread, "here": _here}
    lines = [f"def run({', '.join([*names, '*_'])}):",
             f"    if knobs.profile: return slow({given})"]
    if device.index is not None:
        lines.append(f"    if here() != {device.index}: return elsewhere({given})")
    pointers = []
    brought, numbers = _numbers(sources)
    lines += brought
    for i, source in enumerate(sources):
        if i in numbers:
            pointers.append(numbers[i])
            continue
        if source.row is not None:
            scope[f"row{i}"] = source.row
            pointers.append(f"row{i}.data_ptr()")
            continue
        if source.is_elsewhere:
            lines.append(f"    x{source.place} = x{source.place}.to(device)")
        if executable.strides[i] is None and source.has_gaps:
            lines.append(f"    x{source.place} = x{source.place}.contiguous()")
        pointers.append(f"x{source.place}.data_ptr()")
    for i, result in enumerate(made):
        if over and over[i] is not None:
            lines.append(f"    y{i} = x{over[i]}")
            pointers.append(f"y{i}.data_ptr()")
            continue
        scope[f"make{i}"] = _empty_on(device) if device != HOST else (
            _large if result.nbytes >= pages.FRESH else _empty)
        scope |= {f"shape{i}": result.shape, f"strides{i}": result.strides,
                  f"dtype{i}": result.dtype}
        lines.append(f"    y{i} = make{i}(shape{i}, strides{i}, dtype{i})")
        pointers.append(f"y{i}.data_ptr()")
    answer = "[" + ", ".join(f"spread(y{i}, shape{i}, {r.spread})" if r.spread else f"y{i}"
                             for i, r in enumerate(made)) + "]"
    if runner is executable:
        scope |= {"native": code.call_pointers, "on_slots": code.call_slots,
                  "threads": Threads(code, threads)}
        lines += _call(executable, [*pointers, *map(str, sizes)], sizes)
    else:
        scope["recorded"] = runner.on_addresses(sizes)
        lines.append(f"    recorded(({', '.join(pointers)},))")
    run = made_function("call", "\n".join([*lines, f"    return {answer}"]), scope)
    run.__globals__["elsewhere"] = _there(device, run)
    return run


# The number of the current device, without the function around it.
_here: Callable[[], int] = getattr(
    torch._C, "_accelerator_getDeviceIndex", torch.accelerator.current_device_index)


def _there(device: torch.device, run: Callable[..., Sequence[Any]]
           ) -> Callable[..., Sequence[Any]]:
    """What runs with a device being the current one, of which there may be several."""
    if device == HOST:
        return run

    def call(*args: Any) -> Sequence[Any]:
        with current(device):
            return run(*args)

    return call


def _numbers(sources: Sequence[Source]) -> tuple[list[str], dict[int, str]]:
    """Lines that bring the numbers of the host, one copy for each type; and where each is then.

    Each begins where kernels load, 16 bytes after the one before.
    """
    by_type: dict[Any, list[int]] = {}
    for i, source in enumerate(sources):
        if source.number is not None:
            by_type.setdefault(source.number, []).append(i)
    lines: list[str] = []
    places: dict[int, str] = {}
    for n, (dtype, found) in enumerate(by_type.items()):
        listed = "".join(f"x{sources[i].place}, " for i in found)
        apart = f".view(-1, 1).repeat(1, {_APART // dtype.itemsize})" if len(found) > 1 else ""
        lines.append(f"    numbers{n} = stack(({listed})){apart}.to(device)")
        places |= {i: f"numbers{n}.data_ptr() + {at * _APART}" for at, i in enumerate(found)}
    return lines, places


def _call(executable: Any, arguments: Sequence[str], sizes: Sequence[int]) -> list[str]:
    """Lines that run native code, with what it needs in memory."""
    lines = ["    count = threads.now if knobs.threads == threads.knob else threads.renew()"]
    arena = executable.arena_size(sizes)
    place = "arena.address" if arena else "0"
    if executable.code.call_pointers is not None:
        call = [f"    native({', '.join(arguments)}, {place}, count)"]
    else:
        call = [f"    slots = array('q', [{', '.join(arguments)}])",
                f"    on_slots(slots.buffer_info()[0], {place}, count, 0)"]
    if arena:
        look = ["    word = executable.word(arena)"] if executable.reaches else []
        call = [f"    arena = executable.take_arena({arena})", *call, *look,
                "    executable.give_arena(arena)"]
    lines += call
    if executable.code.allocates:
        lines.append("    executable.check_memory()")
    if executable.reaches:
        lines.append(f"    if word > 0: raise executable.fault(word, {tuple(sizes)})")
    return lines


def made_function(name: str, source: str, scope: Mapping[str, Any]) -> Callable[..., Any]:
    """The function `run` that is written in a source."""
    names = dict(scope)
    exec(compile(source, f"<terrazzo {name}>", "exec"), names)
    run: Callable[..., Any] = names["run"]
    return run


def _by_running(executable: Any, made: Sequence[Result], sources: Sequence[Source], threads: int,
                over: Sequence[int | None]) -> Callable[..., Sequence[Any]]:
    """The general way: also through the host, and with times of kernels."""
    orders = [_order(r) for r in made]

    def run(*tensors: Any) -> Sequence[Any]:
        found = executable.run([s.stored(tensors) for s in sources], threads=threads)
        laid_out = [_in_order(torch.as_tensor(y), order, r)
                    for y, order, r in zip(found, orders, made, strict=True)]
        return [y if place is None else tensors[place].copy_(y)
                for y, place in zip(laid_out, over or [None] * len(laid_out), strict=True)]

    return run


def _order(result: Result) -> tuple[int, ...]:
    """Which axis of what is stored each axis of a result is."""
    stored = sorted(range(len(result.shape)), key=lambda d: -result.strides[d])
    return tuple(stored.index(d) for d in range(len(stored)))


def _in_order(stored: Any, order: tuple[int, ...], result: Result) -> Any:
    if stored.shape != result.shape or order != tuple(range(len(order))):
        stored = torch.as_strided(stored, result.shape, result.strides)
    return stored if result.spread is None else _spread(stored, result.shape, result.spread)
