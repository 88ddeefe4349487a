"""Matrix products of tiles, through the FMA micro-kernel of the code generator.

A left factor is read where it lies, if its tile is inside the tensor as a whole; otherwise it is
copied to a local buffer first. A right factor is copied into panels as wide as the register tile
(BLIS), unless its rows lie close together anyway; if it is contiguous along k it is transposed on
the way. The sums stay in one buffer, the one that a loop carries where there is one.

Products of bytes are made as floats that hold them exactly: FMAs do sixteen at once, and integers
of 32 bits have no such instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from terrazzo.base.scalar import Const, Load, Scalar, call, cast, loads
from terrazzo.chips.spec import ChipSpec
from terrazzo.dtypes import (
    DType,
    bfloat16,
    float8_e4m3fn,
    float8_e4m3fnuz,
    float8_e5m2,
    float8_e5m2fnuz,
    float16,
    float32,
    float64,
    int8,
    int32,
)
from terrazzo.index import Index, Var, coefficient, free_vars, substitute
from terrazzo.loop.ir import Buffer, For, If, Stmt, Store, block
from terrazzo.loop.tile_transpose import transposed_copy
from terrazzo.loop.tiles import fma_tile, transpose_tile
from terrazzo.triton_cpu.frontend.addresses import Names, Reader
from terrazzo.triton_cpu.frontend.lower import Handler, Lowering
from terrazzo.triton_cpu.frontend.nest import Write, loops, whole_tile
from terrazzo.triton_cpu.frontend.state import Target
from terrazzo.triton_cpu.frontend.ttir import Op
from terrazzo.triton_cpu.frontend.values import Indices, Value, dtype_of, flat

# Vectors of columns and sums of a register tile, by number of vector registers. Sizes of tiles are
# powers of two; so are these, and one micro-kernel does for all rows: on AVX-512 as fast as 6 rows
# of 4 vectors, in half the code.
_REGISTER_TILES = {32: (4, 16), 16: (2, 8)}
# Elements from row to row up to which a right factor is not copied: rows a page apart, as in a
# matrix of 1024 columns, fall on the same few places of the nearest cache.
_CLOSE = 128
_EXACT = 1 << 24  # integers up to here are floats of 32 bits
Finish = Callable[[Scalar, Scalar], Scalar]  # the sum so far, and what a product adds to it


@dataclass(frozen=True, eq=False)
class Place:
    """Where a batch of matrices lies: element (n, i, j) is at `at + n*batch + i*down + j*right`.

    From one panel of columns to the next it is `panel`.
    """

    buffer: Buffer
    at: Index
    batch: Index
    down: Index
    right: Index
    panel: Index = 0


@dataclass(frozen=True, eq=False)
class Factor:
    """A factor of a product: where it lies, or, if it may lie elsewhere, how to bring it there."""

    place: Place
    condition: Scalar | None = None  # when it lies at `place` as a whole
    copy: Stmt | None = None  # what to do otherwise,
    copied: Place | None = None  # and where it lies then


def _dot(lowering: Lowering, op: Op) -> None:
    a, b, c = (lowering.operand(op, n) for n in range(3))
    depth = a.type.shape[-1]
    made_in = wide = _wide(dtype_of(op.type.elem))
    finish: Finish | None = None
    if wide is int32 and all(dtype_of(v.type.elem) is int8 for v in (a, b)):
        made_in = float32 if depth << 14 <= _EXACT else float64
        finish = _add_integers
    left = _factor(lowering, a, made_in, True)
    multiply(lowering, op, left, _factor(lowering, b, made_in, False), depth, c, finish)


def _add_integers(total: Scalar, part: Scalar) -> Scalar:
    return call("add", total, cast(part, int32))


def _wide(dtype: DType) -> DType:
    """The type that a product is summed up in."""
    return float64 if dtype is float64 else float32 if dtype.is_float else int32


# ---------------------------------------------------------------- the product
def multiply(lowering: Lowering, op: Op, left: Factor, right: Factor, depth: int, c: Value,
             finish: Finish | None = None) -> None:
    """The product of two factors, added to a tile, as the result of an operation.

    `finish` says how, where that is not by a plain addition; sums of its second argument have the
    factors' type.
    """
    *_, rows, columns = op.type.shape
    dtype = dtype_of(op.type.elem)
    wide, made_in = _wide(dtype), _wide(left.place.buffer.dtype)
    target = lowering.memory.inplace.get(op.results[0])
    if target is None or target.dtype is not wide or not _may_overwrite(lowering, op, target):
        target = lowering.local("product", wide, op.type.count)
    accumulate = _start(lowering, c, target, wide)
    mr, nr = register_tile(lowering.target, made_in, rows, columns)
    part = None if finish is None else lowering.local("part", made_in, mr * nr)

    def product(a: Place, b: Place) -> Stmt:
        def tiles(which: Index) -> Stmt:
            column = lowering.fresh("column", 0, columns // nr - 1)
            row = lowering.fresh("row", 0, rows // mr - 1)
            at = which * (rows * columns) + row * (mr * columns) + column * nr
            to, to_at, step = (target, at, columns) if part is None else (part, 0, nr)
            tile: Stmt = fma_tile(
                to, to_at, a.buffer, a.at + which * a.batch + row * a.down * mr,
                b.buffer, b.at + which * b.batch + column * b.panel,
                depth, a.down, a.right, b.down, step, mr, nr, accumulate and part is None,
                near=True)
            if part is not None:
                tile = block(tile, finished(part, at))
            return For(column, 0, columns // nr, For(row, 0, rows // mr, tile))

        return _for_each(lowering, op.type.count // (rows * columns), tiles)

    def finished(part: Buffer, at: Index) -> Stmt:
        assert finish is not None
        i, j = lowering.fresh("i", 0, mr - 1), lowering.fresh("j", 0, nr - 1)
        place = at + i * columns + j
        total = target[place] if accumulate else Const(wide, 0)
        return For(i, 0, mr, For(
            j, 0, nr, Store(target, place, finish(total, part[i * nr + j])), "vector"))

    conditions = [f.condition for f in (left, right) if f.condition is not None]
    whole = product(left.place, right.place)
    if conditions:
        joint = conditions[0] if len(conditions) == 1 else call("and", *conditions)
        lowering.emit(If(joint, whole, block(left.copy, right.copy, product(
            left.copied or left.place, right.copied or right.place))))
    else:
        lowering.emit(whole)
    result = lowering.env[op.results[0]] = lowering.stored(op.type, target, dtype)
    if dtype is not wide:
        result.buffer = None


def _for_each(lowering: Lowering, count: int, body: Callable[[Index], Stmt]) -> Stmt:
    """A statement for each matrix of a batch."""
    if count == 1:
        return body(0)
    which = lowering.fresh("batch", 0, count - 1)
    return For(which, 0, count, body(which))


def register_tile(target: Target, wide: DType, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of the micro-kernel."""
    if target.matrix is not None:
        return min(rows, target.matrix[0]), min(columns, target.matrix[1])
    vectors, sums = _REGISTER_TILES[32 if target.spec.vector_registers >= 32 else 16]
    lanes = target.spec.lanes(wide.bits)
    while vectors > 1 and vectors * lanes > columns:
        vectors //= 2
    return min(rows, sums // vectors), min(columns, vectors * lanes)


def _may_overwrite(lowering: Lowering, op: Op, target: Buffer) -> bool:
    """Whether a product reads where its sums go nothing but the sum that goes there."""
    for number, name in enumerate(op.operands):
        value = lowering.env[name]
        probe = _probe(lowering, value)
        for load in loads(value.scalar(probe)):
            if load.source is target and (
                    number != 2 or load.indices[0] != flat(value.type.shape, probe)):
                return False
    return True


def _probe(lowering: Lowering, value: Value) -> Indices:
    """Indices of any element of a tile."""
    return tuple(lowering.fresh("probe", 0, n - 1) if n > 1 else 0 for n in value.type.shape)


def _start(lowering: Lowering, c: Value, target: Buffer, wide: DType) -> bool:
    """Bring the addend to where the sums go; false if there is nothing to add to."""
    shape = c.type.shape
    probe = _probe(lowering, c)
    element = c.scalar(probe)
    if isinstance(element, Const) and element.value == 0:
        return False
    if not (isinstance(element, Load) and element.source is target
            and element.indices[0] == flat(shape, probe)):
        lowering.emit(lowering.nest(shape, lambda i: [
            Write(target, flat(shape, i), cast(c.scalar(i), wide))]))
    return True


# ---------------------------------------------------------------- its factors
@dataclass(frozen=True, eq=False)
class _Lying:
    """Where the elements of a tile are loaded from, and when that is all there is to them."""

    place: Place
    condition: Scalar | None
    dtype: DType


def _factor(lowering: Lowering, value: Value, wide: DType, is_left: bool) -> Factor:
    """A factor in the type that is computed in; on the right, in panels that rows pass by."""
    if lowering.target.scratchpad:
        return _brought(lowering, value, wide, is_left)
    if not is_left:
        value = in_rows(lowering, value)
    lying = _lying(lowering, value)
    return (_left if is_left else _right)(lowering, value, wide, lying)


# What holds the factors of a matrix unit that widens them as it multiplies, where others would do.
_HELD_AS = {int8: bfloat16, float8_e4m3fn: float16, float8_e5m2: float16,
            float8_e4m3fnuz: float16, float8_e5m2fnuz: float16}


def _brought(lowering: Lowering, value: Value, wide: DType, is_left: bool) -> Factor:
    """A factor in the chip's own memory, in the type it has or one that holds it exactly."""
    *_, rows, columns = value.type.shape
    dtype = dtype_of(value.type.elem)
    held = _HELD_AS.get(dtype, dtype)
    if held not in (float16, bfloat16) or wide is float64:
        held = wide
    buffer = value.buffer
    if buffer is None or buffer.dtype is not held:
        buffer = lowering.local("left" if is_left else "right", held, value.type.count)
        lowering.emit(lowering.nest(value.type.shape, lambda i: [
            Write(buffer, flat(value.type.shape, i), cast(value.scalar(i), held))]))
    _, nr = register_tile(lowering.target, wide, 1, columns)
    return Factor(Place(buffer, 0, rows * columns, columns, 1, nr))


def in_rows(lowering: Lowering, value: Value) -> Value:
    """A tile of bytes that lies column by column in memory, brought to rows; others as they are.

    Vectors of bytes from a column would be gathered one by one.
    """
    lying = _lying(lowering, value)
    if lying is None or lying.dtype.itemsize != 1 or lying.place.down != 1 or (
            lying.place.right == 1):
        return value
    *_, rows, columns = value.type.shape
    source = lying.place
    buffer = lowering.local("turned", lying.dtype, value.type.count)
    place = Place(buffer, 0, rows * columns, columns, 1)
    turned = _for_each(lowering, value.type.count // (rows * columns), lambda n: transposed_copy(
        buffer, n * place.batch, source.buffer, source.at + n * source.batch, rows, columns,
        columns, source.right))
    lowering.emit(turned if lying.condition is None else If(
        lying.condition, turned, _copy(lowering, value, place, columns, twice=False)))
    return lowering.stored(value.type, buffer)


def _left(lowering: Lowering, value: Value, wide: DType, lying: _Lying | None) -> Factor:
    if lying is not None and lying.dtype is wide and lying.condition is None:
        return Factor(lying.place)
    *_, rows, columns = value.type.shape
    buffer = lowering.local("left", wide, value.type.count)
    place = Place(buffer, 0, rows * columns, columns, 1)
    if lying is not None and lying.dtype is wide:
        return Factor(lying.place, lying.condition,
                      _copy(lowering, value, place, columns, twice=False), place)
    if lying is not None and lying.place.down == 1:
        place = Place(buffer, 0, rows * columns, 1, rows)
    lowering.emit(_copy(lowering, value, place, columns))
    return Factor(place)


def _right(lowering: Lowering, value: Value, wide: DType, lying: _Lying | None) -> Factor:
    *_, rows, columns = value.type.shape
    _, nr = register_tile(lowering.target, wide, 1, columns)
    if lying is not None and lying.dtype is wide and lying.condition is None and (
            lying.place.right == 1 and isinstance(lying.place.down, int)
            and lying.place.down <= _CLOSE):
        return Factor(replace(lying.place, panel=nr))
    buffer = lowering.local("right", wide, value.type.count)
    place = Place(buffer, 0, rows * columns, nr, 1, rows * nr)
    if lying is None or lying.place.right == 1 or lying.place.down != 1 or not (
            _can_transpose(lowering.target.spec, wide, lying.dtype, nr)):
        lowering.emit(_copy(lowering, value, place, nr))
        return Factor(place)
    source = lying.place
    panel = lowering.fresh("panel", 0, columns // nr - 1)
    turned = _for_each(lowering, value.type.count // (rows * columns), lambda n: For(
        panel, 0, columns // nr, transpose_tile(
            buffer, n * place.batch + panel * place.panel, source.buffer,
            source.at + n * source.batch + panel * nr * source.right, rows, nr, source.right, nr)))
    lowering.emit(turned if lying.condition is None else If(
        lying.condition, turned, _copy(lowering, value, place, nr, twice=False)))
    return Factor(place)


def _can_transpose(chip: ChipSpec, wide: DType, source: DType, columns: int) -> bool:
    """Whether the generator has code for it."""
    return columns % chip.lanes(wide.bits) == 0 and (source is wide or (
        wide is float32 and source.is_float and source.bits == 16))


def _copy(lowering: Lowering, value: Value, place: Place, width: int, twice: bool = True) -> Stmt:
    """Write a factor into its local buffer, panel by panel of some width."""
    *batch, rows, columns = value.type.shape
    shape = (value.type.count // (rows * columns), columns // width, rows, width)

    def writes(i: Indices) -> list[Write]:
        n, panel, row, column = i
        element = value.scalar((*([n] if batch else []), row, panel * width + column))
        at = n * place.batch + panel * place.panel + row * place.down + column * place.right
        return [Write(place.buffer, at, cast(element, place.buffer.dtype))]

    return loops(shape, lowering.fresh, writes, precise=lowering.precise, twice=twice,
                 foreseen=lowering.target.scratchpad, known=lowering.known)


def _lying(lowering: Lowering, value: Value) -> _Lying | None:
    """Where a tile lies, if its elements are loads at addresses with fixed steps."""
    shape = value.type.shape
    axes = [lowering.fresh("probe", 0, n - 1) if n > 1 else None for n in shape]
    element = value.scalar(tuple(0 if v is None else v for v in axes))
    ranges: dict[Var, int] = {v: n for v, n in zip(axes, shape, strict=True) if v is not None}
    probe = Write(Buffer("probe", element.dtype, value.type.count), 0, element)
    found = whole_tile([probe], ranges, lowering.fresh)
    if found is None:
        names = Names(tuple(ranges), lowering.fresh)
        condition, settled = None, Reader(names).settle(element)
    else:
        condition, (write,), names = found
        settled = write.value
    if not isinstance(settled, Load) or isinstance(settled.indices[0], Scalar):
        return None
    index = settled.indices[0]
    steps: list[Index] = []
    for var in axes:
        step = 0 if var is None else coefficient(index, var)
        if step is None or not ranges.keys().isdisjoint(free_vars(step)):
            return None
        steps.append(step)
    lowering.items.extend(names.bound)
    at = substitute(index, {v: 0 for v in ranges})
    batch, down, right = steps if len(steps) == 3 else (0, *steps)
    return _Lying(Place(settled.source, at, batch, down, right), condition, settled.dtype)


HANDLERS: dict[str, Handler] = {"tt.dot": _dot}
SINKS = frozenset(HANDLERS)
