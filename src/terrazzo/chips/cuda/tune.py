"""Measures ways to run a program on a GPU, and remembers the best (`runtime/tuned.py`).

From what the rules choose, one kind of value after the other is changed for the better: some twenty
kernels are compiled and run of the thousands that there could be. Each has to compute what the
rules' kernel does, on the same random data, or is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from terrazzo.base import log
from terrazzo.base.shapes import contiguous_strides
from terrazzo.chips.cuda import native
from terrazzo.chips.cuda.choices import Space
from terrazzo.chips.cuda.forms import Form, form_of, space_of
from terrazzo.chips.cuda.launch import Launched
from terrazzo.chips.cuda.plan import Planner
from terrazzo.chips.memory import aligned_bytes
from terrazzo.errors import TerrazzoError
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import maximum
from terrazzo.loop.ir import Block, Buffer, Function
from terrazzo.loop.steps import Argument, Call, Recipe
from terrazzo.runtime.targets import addresses_of
from terrazzo.runtime.tuned import (
    Measured,
    choice_text,
    database,
    noted,
    program_key,
    program_text,
)

if TYPE_CHECKING:
    from terrazzo.chips.cuda.chip import Cuda

_WORTH = 0.98  # of the time so far: less than that is noise
_ROUNDS, _LAUNCHES = 5, 10  # launches are repeated as one recording, the best of some rounds counts
_MOST_COPIES = 16  # of all tensors, so that caches do not hold what is read next
_CLOSE = {16: 2e-2, 32: 1e-3}  # of the largest result, by bits: parts are added in another order


def form_for(program: Program, chip: Cuda) -> Form:
    """How a program runs: as was measured, now where that is wanted, or by rule."""
    by_rule = form_of(program, chip.spec)
    space = space_of(program, chip.spec, by_rule)
    if space is None:
        return by_rule
    key = program_key(program)
    found = database().find(chip.tunes, key)
    again = noted()
    if again is not None and key in again:
        found = again[key]
    elif (again is not None or (chip.measures and found is None)) and not chip.absence:
        found = _measured(program, chip, by_rule, space)
        database().keep(chip.tunes, key, found)
        if again is not None:
            again[key] = found
    return _chosen(program, chip, by_rule, space, replace(by_rule, key=key), found)


def _chosen(program: Program, chip: Cuda, by_rule: Form, space: Space, form: Form,
            found: Measured | None) -> Form:
    if found is not None and not space.holds(found.choice):
        log.warning("what was measured for %s is no choice of this version: %s", found.text,
                    choice_text(found.choice))
        found = None
    if found is None:
        return replace(form, remark=f"{choice_text(space.rule)}: by rule")
    said = (f"{choice_text(found.choice)}: measured, {found.seconds * 1e6:.1f} us "
            f"({found.by_rule * 1e6:.1f} by rule)")
    if found.choice == space.rule:
        return replace(form, choice=found.choice, remark=said)
    made = form_of(program, chip.spec, found.choice)
    return replace(made, key=form.key, choice=found.choice, remark=said)


# ---------------------------------------------------------------- the search
def _measured(program: Program, chip: Cuda, by_rule: Form, space: Space) -> Measured:
    bench = Bench.of(program, chip)
    best, least = space.rule, bench.seconds(by_rule)
    first = least
    for axis in space.axes:
        for choice in space.changed(best, axis):
            try:
                seconds = bench.seconds(form_of(program, chip.spec, choice))
            except (TerrazzoError, MemoryError) as error:  # too much of something for this chip
                log.debug("%s with %s: %s", program.name, choice_text(choice), error)
                continue
            if seconds < _WORTH * least:
                best, least = choice, seconds
    return Measured(dict(best), least, first, program_text(program))


@dataclass(eq=False)
class Bench:
    """Data for a program, on which its kernels are timed and compared."""

    program: Program
    chip: Cuda
    copies: list[tuple[list[Any], list[Any]]]  # inputs and outputs in the chip's memory
    wanted: list[np.ndarray] | None = None  # what the first kernel computed

    @staticmethod
    def of(program: Program, chip: Cuda) -> Bench:
        rng = np.random.default_rng(0)
        inputs = [_random(t, program.kind == "contraction", rng) for t in program.inputs]
        sizes = [*(a.nbytes for a in inputs), *(_size(t) * t.dtype.itemsize
                                                for t in program.outputs)]
        count = 1
        if not chip.simulated:
            count = max(1, min(_MOST_COPIES, 2 * chip.spec.l2_bytes // max(sum(sizes), 1)))
        memory = chip.memory
        return Bench(program, chip, [
            ([memory.brought(a if i == 0 else a.copy()) for a in inputs],
             [memory.brought(_bytes(t)) for t in program.outputs]) for i in range(count)])

    def seconds(self, form: Form) -> float:
        """The time of one run; an error where it computes something else than the first did."""
        code = self.loaded(form)
        device, prepared = code.device, code.prepared(())
        _owner, room = device.room(prepared.room)
        places = [addresses_of([*inputs, *outputs]) for inputs, outputs in self.copies]

        def launch(stream: int, number: int) -> int:
            return int(native.launch()(prepared.table.address, *places[number], 0, room, stream))

        stream = device.stream(device.number)
        device.require(launch(stream, 0))
        self.compare()
        if self.chip.simulated:
            return min(self.chip.seconds(lambda: launch(stream, 0)) for _ in range(2))
        turns = [n % len(places) for n in range(max(_LAUNCHES, len(places)))]
        recording = device.record(_all(launch, turns))
        recording.play(stream)
        return min(self.chip.seconds(lambda: recording.play(stream))
                   for _ in range(_ROUNDS)) / len(turns)

    def loaded(self, form: Form) -> Launched:
        if not form.kernels:
            raise TerrazzoError(form.reason)
        program, chip = self.program, self.chip
        buffers = tuple(Buffer(t.name, t.dtype, _size(t))
                        for t in (*program.inputs, *program.outputs))
        function = Function(program.name, buffers, (), Block(()), program=program)
        slots = tuple(Argument("slot", i) for i in range(len(buffers)))
        made = Planner(chip.spec, chip.host, chip.simulated, lambda _: form).plan(
            Recipe(program.name, (Call(function, slots, program.name),), len(slots), 0, ()))
        code = chip.load(program.name, made, [])
        assert isinstance(code, Launched)
        return code

    def compare(self) -> None:
        memory = self.chip.memory
        memory.wait()
        found = [_numbers(memory.to_host(a), t)
                 for a, t in zip(self.copies[0][1], self.program.outputs, strict=True)]
        if self.wanted is None:
            self.wanted = found
            return
        for tensor, got, want in zip(self.program.outputs, found, self.wanted, strict=True):
            if not _is_close(got, want, _CLOSE.get(tensor.dtype.bits, 1e-6)):
                raise TerrazzoError(f"{tensor.name} is not what the rules' kernel computes")


def _all(launch: Callable[[int, int], int], turns: Sequence[int]) -> Callable[[int], int]:
    return lambda stream: next(filter(None, (launch(stream, n) for n in turns)), 0)


# ---------------------------------------------------------------- data
def _size(tensor: Tensor) -> int:
    """Elements from the beginning of its memory to its last one."""
    strides = tensor.strides or contiguous_strides(tensor.shape)
    reach = tensor.offset + 1
    for n, stride in zip(tensor.shape, strides, strict=True):
        reach = reach + maximum((n - 1) * stride, 0)
    assert isinstance(reach, int)
    return reach


def _bytes(tensor: Tensor) -> np.ndarray:
    """Zeros as raw bytes: memory that a kernel writes to."""
    made = aligned_bytes(_size(tensor) * tensor.dtype.itemsize)
    made[...] = 0
    return made


def _random(tensor: Tensor, factors: bool, rng: np.random.Generator) -> np.ndarray:
    """Numbers below 1 as raw bytes; integers may be indices, but not as factors of a product."""
    made, count = _bytes(tensor), _size(tensor)
    kind = tensor.dtype
    if kind.is_float:
        made.view(kind.np)[...] = rng.random(count, np.float32).astype(kind.np)
    elif factors and not kind.is_bool:
        made.view(kind.np)[...] = rng.integers(0, 8, count).astype(kind.np)
    return made


def _numbers(raw: Any, tensor: Tensor) -> np.ndarray:
    data = np.asarray(raw).view(tensor.dtype.np)
    return data.astype(np.complex128 if tensor.dtype.is_complex else np.float64)


def _is_close(got: np.ndarray, want: np.ndarray, part: float) -> bool:
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    known = np.isfinite(want)
    most = np.abs(want[known]).max(initial=0.0)
    with np.errstate(invalid="ignore"):
        return bool((same | (np.abs(got - want) <= part * most)).all())
