"""Matrix products of tiles, through the FMA micro-kernel of the code generator."""

from __future__ import annotations

from terrazzo.chips.cpu import host
from terrazzo.dtypes import DType, float32, float64, int32
from terrazzo.index import Index
from terrazzo.loop.ir import Buffer, For, Stmt
from terrazzo.loop.tiles import fma_tile
from terrazzo.scalar import Const, Load, cast
from terrazzo.triton_cpu.lower import Handler, Lowering
from terrazzo.triton_cpu.nest import Write
from terrazzo.triton_cpu.ttir import Op
from terrazzo.triton_cpu.values import Indices, Value, dtype_of, flat


def _dot(lowering: Lowering, op: Op) -> None:
    a, b, c = (lowering.operand(op, n) for n in range(3))
    *batch, rows, columns = op.type.shape
    depth = a.type.shape[-1]
    dtype = dtype_of(op.type.elem)
    wide = float64 if dtype is float64 else float32 if dtype.is_float else int32
    left = _operand(lowering, a, wide, "left")
    right = _operand(lowering, b, wide, "right")
    target = lowering.inplace.get(op.results[0])
    if target is None or target.dtype is not wide:
        target = lowering.local("product", wide, op.type.count)
    accumulate = _start(lowering, c, target, wide)
    tile = host().lanes(wide.bits) * 2
    nr = min(columns, tile)
    count = 1
    for n in batch:
        count *= n

    def product(which: Index) -> Stmt:
        at = which * (rows * columns)
        column = lowering.fresh("column", 0, columns // nr - 1)
        call = fma_tile(target, at + column * nr, left, which * (rows * depth), right,
                        which * (depth * columns) + column * nr, depth, depth, 1, columns,
                        columns, rows, nr, accumulate)
        return For(column, 0, columns // nr, call)

    if count > 1:
        which = lowering.fresh("batch", 0, count - 1)
        lowering.emit(For(which, 0, count, product(which)))
    else:
        lowering.emit(product(0))
    lowering.env[op.results[0]] = (
        lowering.stored(op.type, target) if dtype is wide else lowering.stored(
            op.type, target, dtype))
    if dtype is not wide:
        lowering.env[op.results[0]].buffer = None


def _operand(lowering: Lowering, value: Value, wide: DType, name: str) -> Buffer:
    """A factor in memory, row-major, in a type that the micro-kernel can widen itself."""
    dtype = dtype_of(value.type.elem)
    held = dtype if dtype is wide or (wide is float32 and dtype.bits == 16 and dtype.is_float
                                      ) else wide
    if value.buffer is not None and value.buffer.dtype is held:
        return value.buffer
    shape = value.type.shape
    buffer = lowering.local(name, held, value.type.count)
    lowering.emit(lowering.nest(shape, lambda i: [
        Write(buffer, flat(shape, i), cast(value.scalar(i), held))]))
    return buffer


def _start(lowering: Lowering, c: Value, target: Buffer, wide: DType) -> bool:
    """Bring the addend to where the sums go; false if there is nothing to add to."""
    shape = c.type.shape
    probe: Indices = tuple(lowering.fresh("probe", 0, n - 1) if n > 1 else 0 for n in shape)
    element = c.scalar(probe)
    if isinstance(element, Const) and element.value == 0:
        return False
    if not (isinstance(element, Load) and element.source is target
            and element.indices[0] == flat(shape, probe)):
        lowering.emit(lowering.nest(shape, lambda i: [
            Write(target, flat(shape, i), cast(c.scalar(i), wide))]))
    return True


HANDLERS: dict[str, Handler] = {"tt.dot": _dot}
SINKS = frozenset(HANDLERS)
