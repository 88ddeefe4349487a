"""Tensor expressions by hand, with a schedule apart from the algorithm, as in Halide and TVM.

    n = te.dim("n")
    A, B = te.placeholder((n, 64), name="A"), te.placeholder((64, 64), name="B")
    k = te.reduce_axis(64)
    C = te.compute((n, 64), lambda i, j: te.sum(A[i, k] * B[k, j], axis=k), name="C")

    s = te.schedule(C)
    i, j = s[C].axis
    io, ii = s[C].split(i, 4)
    s[C].reorder(io, k, ii, j)
    s[C].vectorize(j)
    s[C].parallel(io)
    matmul = te.build(s, [A, B, C])
    matmul(a, b, c)

Every element function of the table `scalar.OPS` is here by its name: `te.exp`, `te.where`, ...
`te.max` and `te.min` reduce; of two elements take `te.maximum` and `te.minimum`.
"""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from terrazzo.dtypes import float32
from terrazzo.errors import (
    ArgumentError,
    DTypeError,
    IndexOutOfRange,
    NotContiguous,
    ScheduleError,
    ShapeError,
    user_location,
)
from terrazzo.expr import ir
from terrazzo.expr.access import Access, accesses, clipped, inside
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.lower import lower as lower_program
from terrazzo.expr.plan import Plan, plan
from terrazzo.expr.schedule import Schedule, name_of
from terrazzo.expr.tensorize import Intrinsic, register_intrinsic
from terrazzo.index import Index, Var, bounds, evaluate
from terrazzo.loop import interpret
from terrazzo.loop.ir import For, Function, Stmt, TileIntrinsic, children, walk
from terrazzo.loop.simplify import simplify
from terrazzo.scalar import OPS, Axis, Scalar, as_scalar, call, cast
from terrazzo.scalar import reduce as reduce_scalar
from terrazzo.shapes import dim, dims, dims_text

__all__ = [
    "Intrinsic", "Kernel", "ScheduleBuilder", "StageHandle", "Tensor", "TileIntrinsic",
    "build", "cast", "compute", "dim", "dims", "lower", "max", "maximum", "min", "minimum",
    "placeholder", "prod", "reduce_axis", "register_intrinsic", "schedule", "sum",
]  # fmt: skip

_reduce_names = itertools.count()


# ---------------------------------------------------------------- the algorithm
class ReduceAxis(Axis):
    """An axis to reduce over that can stand in index arithmetic: `A[i + k]`."""

    def __add__(self, other: Any) -> Any:
        return self.var + other

    def __radd__(self, other: Any) -> Any:
        return other + self.var

    def __sub__(self, other: Any) -> Any:
        return self.var - other

    def __rsub__(self, other: Any) -> Any:
        return other - self.var

    def __mul__(self, other: Any) -> Any:
        return self.var * other

    def __rmul__(self, other: Any) -> Any:
        return other * self.var

    def __floordiv__(self, other: Any) -> Any:
        return self.var // other

    def __mod__(self, other: Any) -> Any:
        return self.var % other


def placeholder(shape: Iterable[Index], dtype: Any = float32, name: str | None = None) -> Tensor:
    """An input."""
    return ir.placeholder(shape, dtype, name)


def compute(shape: Iterable[Index], element: Callable[..., Any], name: str | None = None,
            dtype: Any = None) -> Tensor:
    """A tensor given by a function from its indices to the value there.

    What it reads must exist, or stand under a `where` that keeps it from being read; sizes that are
    symbolic are checked at the call. Indices that are computed from data are clipped.
    """
    made = ir.compute(shape, element, name=name, dtype=dtype, origin=name or "")
    assert made.body is not None
    made = replace(made, body=clipped(made.body))
    for access in accesses(made):
        _refuse_outside(made.name, access, {})
    return made


def _refuse_outside(name: str, access: Access, sizes: Mapping[Var, int]) -> None:
    if inside(access, sizes) is False:
        given = "".join(f", {var} = {size}" for var, size in sizes.items())
        raise IndexOutOfRange(f"{name} reads outside its input: {access}{given}",
                              where=user_location(),
                              hint="choose by te.where(condition, x[i], 0) what is read")


def reduce_axis(extent: Index | tuple[Index, Index], name: str | None = None) -> ReduceAxis:
    """An axis to reduce over: all of `0..extent`, or `lo..hi` for a pair."""
    lo, hi = extent if isinstance(extent, tuple) else (0, extent)
    if name is None:
        number = next(_reduce_names)
        name = f"k{number}" if number else "k"
    axis = ir.fresh_axis(name, hi, lo)
    return ReduceAxis(axis.var, axis.lo, axis.hi)


def _reduce(op: str, value: Any, axis: Axis | Sequence[Axis]) -> Scalar:
    axes = [axis] if isinstance(axis, Axis) else list(axis)
    for each in axes:
        if not isinstance(each, Axis):
            raise ArgumentError(f"cannot reduce over {each!r}", hint="make axes with reduce_axis")
    return reduce_scalar(op, as_scalar(value), [Axis(a.var, a.lo, a.hi) for a in axes])


def sum(value: Any, axis: Axis | Sequence[Axis]) -> Scalar:
    """The sum of an expression over axes made with `reduce_axis`."""
    return _reduce("add", value, axis)


def prod(value: Any, axis: Axis | Sequence[Axis]) -> Scalar:
    """The product of an expression over axes made with `reduce_axis`."""
    return _reduce("mul", value, axis)


def max(value: Any, axis: Axis | Sequence[Axis]) -> Scalar:
    """The greatest value of an expression over axes made with `reduce_axis`."""
    return _reduce("max", value, axis)


def min(value: Any, axis: Axis | Sequence[Axis]) -> Scalar:
    """The least value of an expression over axes made with `reduce_axis`."""
    return _reduce("min", value, axis)


def maximum(a: Any, b: Any) -> Scalar:
    """The greater of two elements."""
    return call("max", a, b)


def minimum(a: Any, b: Any) -> Scalar:
    """The lesser of two elements."""
    return call("min", a, b)


def __getattr__(name: str) -> Callable[..., Scalar]:
    """The element functions of the table OPS."""
    if name not in OPS:
        raise AttributeError(f"terrazzo.te has no {name!r}")

    def function(*args: Any) -> Scalar:
        return call(name, *args)

    function.__name__ = name
    function.__doc__ = f"{name} of elements."
    return function


# ---------------------------------------------------------------- the schedule
def schedule(*outputs: Tensor) -> ScheduleBuilder:
    """Start a schedule for what the given tensors are computed from."""
    inputs: dict[Tensor, None] = {}
    stages: dict[Tensor, None] = {}

    def visit(tensor: Tensor) -> None:
        if tensor in inputs or tensor in stages:
            return
        if tensor.is_input:
            inputs[tensor] = None
            return
        for source in ir.reads(tensor):
            visit(source)
        stages[tensor] = None

    for output in outputs:
        visit(output)
    program = Program(outputs[0].name, tuple(inputs), tuple(stages), outputs)
    return ScheduleBuilder(program)


class ScheduleBuilder:
    """A schedule being written; `schedule` is the data so far, checked after every step."""

    def __init__(self, program: Program):
        self.program = program
        self.schedule = Schedule()
        self.plan: Plan = plan(program, self.schedule)

    def __getitem__(self, stage: Tensor | str | StageHandle) -> StageHandle:
        if isinstance(stage, StageHandle):
            return stage
        self.plan.stage(name_of(stage))
        return StageHandle(self, name_of(stage))

    def cache_read(self, tensor: Tensor | str | StageHandle, scope: str,
                   readers: Sequence[Any]) -> StageHandle:
        """Copy a tensor into memory of its own for some readers; answers with the new stage."""
        source = _stage_name(tensor)
        self.set(self.schedule.cache_read(source, scope, [_stage_name(r) for r in readers]))
        return StageHandle(self, f"{source}.{scope}")

    def cache_write(self, tensor: Tensor | str | StageHandle, scope: str = "local") -> StageHandle:
        """Compute a tensor in memory of its own and copy it out; answers with the new stage."""
        source = _stage_name(tensor)
        self.set(self.schedule.cache_write(source, scope))
        return StageHandle(self, f"{source}.{scope}")

    def set(self, schedule: Schedule) -> None:
        """Take over a schedule if it fits the program."""
        self.plan = plan(self.program, schedule, complete=False)
        self.schedule = schedule

    def __str__(self) -> str:
        return str(self.schedule)


def _stage_name(stage: Any) -> str:
    return stage.name if isinstance(stage, StageHandle) else name_of(stage)


@dataclass(frozen=True)
class StageHandle:
    """One stage of a schedule being written. Axes go by name, or as Axis objects."""

    builder: ScheduleBuilder
    name: str

    @property
    def axes(self) -> tuple[str, ...]:
        """The loops there are now, outside in."""
        return self.builder.plan.stage(self.name).nest.order

    @property
    def axis(self) -> tuple[str, ...]:
        """The axes of the tensor's dimensions."""
        return self.builder.plan.stage(self.name).nest.data

    @property
    def reduce_axis(self) -> tuple[str, ...]:
        """The axes that are reduced over."""
        return self.builder.plan.stage(self.name).nest.reduction

    def _axis(self, axis: Any) -> str:
        name = name_of(axis)
        if isinstance(axis, ReduceAxis) and name in self.axis:
            raise ScheduleError(f"{name!r} names both a dimension of {self.name} and a reduction",
                                hint="give reduce_axis another name")
        return name

    def _do(self, schedule: Schedule) -> None:
        self.builder.set(schedule)

    def split(self, axis: Any, factor: int) -> tuple[str, str]:
        """Cut a loop into pieces of `factor`; answers with the outer and the inner loop."""
        name = self._axis(axis)
        self._do(self.builder.schedule.split(self.name, name, factor))
        return f"{name}.o", f"{name}.i"

    def tile(self, first: Any, second: Any, first_factor: int, second_factor: int,
             ) -> tuple[str, str, str, str]:
        """Split two loops; answers with both outer and then both inner loops."""
        x, y = self._axis(first), self._axis(second)
        self._do(self.builder.schedule.tile(self.name, x, y, first_factor, second_factor))
        return f"{x}.o", f"{y}.o", f"{x}.i", f"{y}.i"

    def reorder(self, *axes: Any) -> None:
        """Nest the named loops in this order."""
        self._do(self.builder.schedule.reorder(self.name, *map(self._axis, axes)))

    def fuse(self, outer: Any, inner: Any, *more: Any) -> str:
        """Turn neighbouring loops into one; answers with it."""
        names = [self._axis(a) for a in (outer, inner, *more)]
        self._do(self.builder.schedule.fuse(self.name, *names))
        return "_".join(names)

    def vectorize(self, axis: Any) -> None:
        """Run a loop in the lanes of the vector unit."""
        self._do(self.builder.schedule.vectorize(self.name, self._axis(axis)))

    def unroll(self, axis: Any) -> None:
        """Repeat a loop's body instead of looping."""
        self._do(self.builder.schedule.unroll(self.name, self._axis(axis)))

    def parallel(self, axis: Any, grain: int = 1) -> None:
        """Spread a loop over the cores."""
        self._do(self.builder.schedule.parallel(self.name, self._axis(axis), grain))

    def bind(self, axis: Any, kind: str = "program") -> None:
        """Give each iteration of a loop to a program instance of the chip."""
        self._do(self.builder.schedule.bind(self.name, self._axis(axis), kind))

    def tensorize(self, axis: Any, intrinsic: str | Intrinsic) -> None:
        """Replace the loops from `axis` inwards by a registered tile intrinsic."""
        name = intrinsic if isinstance(intrinsic, str) else intrinsic.tile.name
        self._do(self.builder.schedule.tensorize(self.name, self._axis(axis), name))

    def compute_at(self, consumer: Any, axis: Any) -> None:
        """Compute this stage inside a loop of one that reads it."""
        target = self.builder[consumer]
        self._do(self.builder.schedule.compute_at(self.name, target.name, target._axis(axis)))

    def compute_inline(self) -> None:
        """Compute this stage's elements where they are read."""
        self._do(self.builder.schedule.compute_inline(self.name))

    def pack(self, *axes: Any) -> None:
        """Lay out this stage's own memory in the given order of its axes."""
        self._do(self.builder.schedule.pack(self.name, *map(self._axis, axes)))

    def streaming(self) -> None:
        """Say that what this stage stores will not be read soon."""
        self._do(self.builder.schedule.streaming(self.name))


# ---------------------------------------------------------------- code
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
        copies *= 1 if most is None else builtins.max(most, 1)
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
    unproved = tuple((stage.name, access) for stage in s.program.stages
                     for access in accesses(stage) if inside(access, {}) is None)
    return Kernel(tuple(args), function, ways[target](function), frozenset(s.program.outputs),
                  unproved)


Run = Callable[[Sequence[np.ndarray], Mapping[Var, int]], None]


def _interpreted(function: Function) -> Run:
    return lambda arrays, sizes: interpret.run(function, [a.reshape(-1) for a in arrays], sizes)


def _compiled(function: Function) -> Run:
    from terrazzo.chips.cpu import host
    from terrazzo.codegen.llvm.kernel import compile_function
    from terrazzo.knobs import thread_count
    from terrazzo.runtime import pool

    concurrent = any(isinstance(s, For) and s.kind == "parallel" for s in walk(function.body))
    kernel = compile_function(function, host(), dict(pool.symbols()) if concurrent else None)

    def run(arrays: Sequence[np.ndarray], sizes: Mapping[Var, int]) -> None:
        threads = 1
        if concurrent:
            pool.sync()
            threads = thread_count()
        kernel([a.ctypes.data for a in arrays], [sizes[d] for d in function.dims], threads)

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
                _refuse_outside(stage, access, sizes)
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
