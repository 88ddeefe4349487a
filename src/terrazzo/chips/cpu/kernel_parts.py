"""What kernels written by hand share: names for index expressions, places of matrices, tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from terrazzo.base.scalar import Axis, Load, Reduce, Scalar, rewrite, substitute_indices
from terrazzo.chips.spec import ChipSpec
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.reductions import fresh_name
from terrazzo.index import Index, IndexExpr, Var, bounds, ceildiv, maximum
from terrazzo.loop.ir import Buffer, For, Let, Stmt

TASK_PRODUCTS = 1 << 18  # multiplications worth a task of their own: about 5 us


class Place(NamedTuple):
    """Where a matrix lies: element (i, j) of it is at `at + i*outer + j*inner`."""

    buffer: Buffer
    at: Index
    outer: Index
    inner: Index

    def moved(self, rows: Index, columns: Index) -> Place:
        """The matrix from another row and column on."""
        return Place(self.buffer, self.at + rows * self.outer + columns * self.inner, self.outer,
                     self.inner)


class Kernel:
    """A kernel in the making: its parameters, and names that nothing else in it has."""

    def __init__(self, program: Program, chip: ChipSpec):
        self.program, self.chip = program, chip
        self.names = {d.name for d in program.dims}
        self.buffers: dict[Tensor, Buffer] = {}

    def fresh(self, name: str) -> str:
        """A name that nothing else in the kernel has."""
        result = fresh_name(name, self.names)
        self.names.add(result)
        return result

    def var(self, name: str, extent: Index | None = None) -> Var:
        """A loop variable from 0 to below an extent."""
        top = None if extent is None else bounds(extent)[1]
        return Var(self.fresh(name), 0, None if top is None else max(top - 1, 0))

    def on_buffers(self, value: Scalar, values: Mapping[Var, Index], total: Scalar | None = None
                   ) -> Scalar:
        """An expression with flat addresses, at some place; `total` stands for the sum."""

        def visit(node: Scalar) -> Scalar | None:
            if isinstance(node, Reduce):
                return total
            if isinstance(node, Load) and isinstance(node.source, Tensor):
                address = node.source.flat(node.indices)
                return Load(node.dtype, self.buffers[node.source], (address,))
            return None

        return rewrite(substitute_indices(value, values), visit)


class Names:
    """Names for index expressions: each is computed once, by a loop that runs once.

    Such a loop tells those who simplify what the name stands for; that of a scalar does not."""

    def __init__(self, fresh: Callable[[str], str]):
        self.fresh = fresh  # makes a name that nothing else in the kernel has
        self.bound: list[tuple[Var, Index | Scalar]] = []

    def __call__(self, name: str, value: Index | Scalar, most: int | None = None) -> Index:
        """A variable for a value that is not negative (and at most `most`); numbers stay.

        What is computed as a scalar, a number of parts for instance, is at least 1.
        """
        if isinstance(value, Scalar):
            var = Var(self.fresh(name), 1, most)
            self.bound.append((var, value))
            return var
        if not isinstance(value, IndexExpr) or isinstance(value, Var):
            return value
        var = Var(self.fresh(name), 0, bounds(value)[1] if most is None else most)
        self.bound.append((var, value))
        return var

    def place(self, name: str, place: Place) -> Place:
        """A place with a name for its address."""
        return Place(place.buffer, self(name, place.at), place.outer, place.inner)

    def around(self, body: Stmt) -> Stmt:
        """A statement that uses the names."""
        for var, value in reversed(self.bound):
            body = Let(var, value, body) if isinstance(value, Scalar) else For(
                var, value, value + 1, body)
        return body


def digits(number: Index, axes: Iterable[Axis]) -> dict[Var, Index]:
    """The axes of the element with a number, counted row by row."""
    values: dict[Var, Index] = {}
    ordered = tuple(axes)
    for axis in reversed(ordered):
        values[axis.var] = number if axis is ordered[0] else number % axis.extent
        number = number // axis.extent
    return values


def product_of(extents: Iterable[Index]) -> Index:
    total: Index = 1
    for extent in extents:
        total = total * extent
    return total


def is_below(value: Index, limit: int) -> bool:
    top = bounds(value)[1]
    return top is not None and top < limit


def grain_of(worth: int, work: Index) -> Index:
    """Iterations worth a task, given the work of one."""
    return ceildiv(worth, maximum(work, 1))


def grain(products: Index, worth: int = TASK_PRODUCTS) -> int:
    """Iterations of so many products that make a task."""
    most = bounds(products)[1]
    return 1 if most is None else max(1, worth // max(most, 1))
