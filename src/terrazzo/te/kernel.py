"""From a schedule to loops, and to a function of numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from terrazzo.base.shapes import dims_text
from terrazzo.errors import ArgumentError, DTypeError, NotContiguous, ScheduleError, ShapeError
from terrazzo.expr.access import Access, inside
from terrazzo.expr.ir import Tensor
from terrazzo.expr.lower import lower as lower_program
from terrazzo.index import Var, bounds, evaluate
from terrazzo.loop import interpret
from terrazzo.loop.ir import For, Function, Stmt, children, walk
from terrazzo.loop.simplify import simplify
from terrazzo.te.algorithm import refuse_outside
from terrazzo.te.builder import ScheduleBuilder
from terrazzo.te.recurrence import all_accesses


def lower(s: ScheduleBuilder, args: Sequence[Tensor], name: str | None = None) -> Function:
    """The loops of a schedule, with parameters in the order of `args`."""
    program = s.program
    tensors = (*program.inputs, *program.outputs)
    if len(args) != len(tensors) or set(args) != set(tensors):
        raise ArgumentError(
            f"{program.name} takes {', '.join(t.name for t in tensors)}, "
            f"got {', '.join(t.name for t in args)}", hint="name every input and output once")
    loops = lower_program(program, s.schedule, name)
    _check_unrolled(loops.body, 1)
    # Loops that the schedule keeps apart stay apart.
    function = simplify(loops, skip=("merge_loops",))
    by_tensor = dict(zip(tensors, function.params, strict=True))
    return replace(function, params=tuple(by_tensor[t] for t in args))


_MOST_COPIES = 1 << 12  # of an unrolled body; more takes minutes to compile and runs no faster


def _check_unrolled(stmt: Stmt, copies: int) -> None:
    """Refuse loops that would be repeated too often, each by itself or inside each other."""
    if isinstance(stmt, For) and stmt.kind == "unrolled":
        most = bounds(stmt.hi - stmt.lo)[1]
        copies *= 1 if most is None else max(most, 1)
        if copies > _MOST_COPIES:
            raise ScheduleError(f"unrolling {stmt.var} repeats its body {copies} times",
                                hint=f"split it first, and unroll up to {_MOST_COPIES} steps")
    for inner in children(stmt):
        _check_unrolled(inner, copies)


def build(s: ScheduleBuilder, args: Sequence[Tensor], target: str = "cpu",
          name: str | None = None) -> Kernel:
    """A function of numpy arrays, one for each of `args`; outputs are written in place."""
    function = lower(s, args, name)
    ways = {"interpreter": _interpreted, "cpu": _compiled}
    if target not in ways:
        raise ArgumentError(f"there is no target {target!r}", hint="use 'cpu' or 'interpreter'")
    unproved = tuple((stage, access) for stage, access in all_accesses(s.program)
                     if inside(access, {}) is None)
    return Kernel(tuple(args), function, ways[target](function), frozenset(s.program.outputs),
                  unproved)


Run = Callable[[Sequence[np.ndarray], Mapping[Var, int]], None]


def _interpreted(function: Function) -> Run:
    return lambda arrays, sizes: interpret.run(function, [a.reshape(-1) for a in arrays], sizes)


def _compiled(function: Function) -> Run:
    from terrazzo.chips.registry import chip_for
    from terrazzo.knobs import knobs, thread_count

    concurrent = any(isinstance(s, For) and s.kind == "parallel" for s in walk(function.body))
    code = chip_for(knobs.now).alone(function)

    def run(arrays: Sequence[np.ndarray], sizes: Mapping[Var, int]) -> None:
        code.run([*(a.ctypes.data for a in arrays), *(sizes[d] for d in function.dims)], 0,
                 thread_count() if concurrent else 1)

    return run


@dataclass(frozen=True, eq=False)
class Kernel:
    """A scheduled program, ready to call with numpy arrays."""

    args: tuple[Tensor, ...]
    function: Function
    run: Run
    outputs: frozenset[Tensor]
    unproved: tuple[tuple[str, Access], ...]  # what is read, by stages, if sizes allow it
    checked: set[tuple[int, ...]] = field(default_factory=set)  # sizes that do

    def __call__(self, *arrays: np.ndarray) -> None:
        if len(arrays) != len(self.args):
            raise ArgumentError(f"{self.function.name} takes {len(self.args)} arrays, "
                                f"got {len(arrays)}")
        sizes: dict[Var, int] = {}
        for tensor, array in zip(self.args, arrays, strict=True):
            _check_array(tensor, array)
            for size, have in zip(tensor.shape, array.shape):
                if isinstance(size, Var):
                    sizes.setdefault(size, have)
        for d in self.function.dims:
            if d not in sizes:
                raise ShapeError(f"the size {d} follows from the shape of no argument",
                                 hint=f"let some argument have {d} as a dimension of its own")
        for tensor, array in zip(self.args, arrays, strict=True):
            want = tuple(int(evaluate(n, sizes)) for n in tensor.shape)
            if array.shape != want:
                raise ShapeError(f"{tensor.name} has shape {dims_text(array.shape)}, but "
                                 f"{dims_text(tensor.shape)} is {dims_text(want)} here")
            if tensor in self.outputs and not array.flags.writeable:
                raise ArgumentError(f"{tensor.name} is written, but its array is read-only",
                                    hint="pass a copy")
        key = tuple(sizes.values())
        if self.unproved and key not in self.checked:
            for stage, access in self.unproved:
                refuse_outside(stage, access, sizes)
            self.checked.add(key)
        self.run(arrays, sizes)

    def __str__(self) -> str:
        return str(self.function)


def _check_array(tensor: Tensor, array: np.ndarray) -> None:
    if array.dtype != tensor.dtype.np:
        raise DTypeError(f"{tensor.name} is {tensor.dtype.name}, got an array of {array.dtype}",
                         hint=f"convert it with .astype({tensor.dtype.name!r})")
    if array.ndim != len(tensor.shape):
        raise ShapeError(f"{tensor.name} has {len(tensor.shape)} dimensions, "
                         f"got an array of {array.ndim}")
    if tensor.strides is None and not array.flags.c_contiguous:
        raise NotContiguous(f"{tensor.name} got an array with gaps or another order of axes")
