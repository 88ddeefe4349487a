"""Products in microscaling formats: elements of 4 or 8 bits, a power of two for each group.

Elements are widened to f32 and multiplied by their scales on the way into the buffers that the
micro-kernel reads; from there on it is a product like any other. The formats are those of the OCP
microscaling specification; e2m1 comes two to a byte, the lower half first, packed along k or along
the other dimension.
"""

from __future__ import annotations

from terrazzo.dtypes import float32, int32, uint8
from terrazzo.index import Index
from terrazzo.loop.ir import Buffer
from terrazzo.scalar import Call, Const, Scalar, call, cast, where
from terrazzo.triton_cpu.lower import Handler, Lowering
from terrazzo.triton_cpu.lower_dot import Factor, Place, multiply, register_tile
from terrazzo.triton_cpu.nest import Write
from terrazzo.triton_cpu.ttir import Op
from terrazzo.triton_cpu.values import Indices, Value, flat

_E2M1 = 4  # its number among Triton's element types; all others carry a type of their own
_HALF = 126 << 23  # the bits of 0.5
_SMALLEST = 1 << 22  # the bits of 2^-127, which is what a scale of 0 stands for


def _dot_scaled(lowering: Lowering, op: Op) -> None:
    _, _, _, has_left, has_right = op.attrs["operandSegmentSizes"]
    a, b, c = (lowering.operand(op, n) for n in range(3))
    left_scale = lowering.operand(op, 3) if has_left else None
    right_scale = lowering.operand(op, 3 + has_left) if has_right else None
    keep_nan = not op.attrs["fastMath"]
    *_, rows, columns = op.type.shape
    count = op.type.count // (rows * columns)
    halves = _halves(op, "a", "lhs")
    depth = a.type.shape[-1] * (2 if halves == "k" else 1)
    left = _factor(lowering, a, halves, left_scale, (count, rows, depth), True, keep_nan)
    right = _factor(lowering, b, _halves(op, "b", "rhs"), right_scale, (count, depth, columns),
                    False, keep_nan)
    multiply(lowering, op, left, right, depth, c)


def _halves(op: Op, operand: str, side: str) -> str:
    """The dimension along which two elements share a byte: k, other or none."""
    if op.attrs[f"{operand}_elem_type"] != _E2M1:
        return "none"
    return "k" if op.attrs[f"{side}_k_pack"] else "other"


def _factor(lowering: Lowering, value: Value, halves: str, scale: Value | None,
            shape: tuple[int, int, int], is_left: bool, keep_nan: bool) -> Factor:
    """A factor in memory: batch by rows by columns, widened and scaled.

    The loops are over groups of k with one scale, so that it is the same in the innermost loop of
    a left factor; of a right factor, the scales of a row lie side by side.
    """
    count, depth, other = shape[0], shape[2 if is_left else 1], shape[1 if is_left else 2]
    buffer = lowering.local("left" if is_left else "right", float32, count * depth * other)
    groups = 1 if scale is None else scale.type.shape[-1]
    size = depth // groups
    scales = None if scale is None else _scales(lowering, scale, count, is_left, keep_nan)
    k_step, other_step = 2 if halves == "k" else 1, 2 if halves == "other" else 1
    flat_batch = len(value.type.shape) == 2

    def writes(i: Indices) -> list[Write]:
        batch, group, j, place = (i[0], i[2], i[3], i[1]) if is_left else i
        k, at = group * (size // k_step) + j, place
        position = (at, k) if is_left else (k, at)
        element = value.scalar(position if flat_batch else (batch, *position))
        made = []
        for number in range(k_step * other_step):
            full_k = group * size + j * k_step + (number if k_step == 2 else 0)
            full_at = at * other_step + (number if other_step == 2 else 0)
            item = cast(element, float32) if halves == "none" else _e2m1(element, number)
            if scales is not None:
                row = (batch, full_at, group) if is_left else (batch, group, full_at)
                sizes = (count, other, groups) if is_left else (count, groups, other)
                item = call("mul", item, scales[flat(sizes, row)])
            target: Indices = (batch, full_at, full_k) if is_left else (batch, full_k, full_at)
            made.append(Write(buffer, flat(shape, target), item))
        return made

    inner = (groups, size // k_step)
    loops = (count, other // other_step, *inner) if is_left else (
        count, *inner, other // other_step)
    lowering.emit(lowering.nest(loops, writes, innermost=3))
    panel = register_tile(float32, 1, other)[1]
    return Factor(Place(buffer, 0, depth * other, shape[2], 1, panel))


def _scales(lowering: Lowering, scale: Value, count: int, is_left: bool, keep_nan: bool) -> Buffer:
    """The scales as numbers: rows by groups of the left factor, groups by columns of the right."""
    *_, other, groups = scale.type.shape
    buffer = lowering.local("scales", float32, count * other * groups)
    shape = (count, other, groups) if is_left else (count, groups, other)

    def writes(i: Indices) -> list[Write]:
        batch, at, group = i if is_left else (i[0], i[2], i[1])
        place: tuple[Index, ...] = (at, group)
        element = scale.scalar(place if len(scale.type.shape) == 2 else (batch, *place))
        return [Write(buffer, flat(shape, i), _power(element, keep_nan))]

    lowering.emit(lowering.nest(shape, writes))
    return buffer


def _power(scale: Scalar, keep_nan: bool) -> Scalar:
    """What a scale multiplies by: 2^(scale - 127) of e8m0, nan if it is 255; floats as they are."""
    if scale.dtype.is_float:
        return cast(scale, float32)
    exponent = cast(cast(scale, uint8), int32)
    bits = call("max", call("shl", exponent, Const(int32, 23)), Const(int32, _SMALLEST))
    power: Scalar = Call(float32, "bitcast", (bits,))
    if not keep_nan:
        return power
    return where(call("eq", exponent, Const(int32, 255)), Const(float32, float("nan")), power)


def _e2m1(byte: Scalar, half: int) -> Scalar:
    """One of the two elements in a byte: sign, two bits of exponent, one of mantissa."""
    bits = cast(cast(byte, uint8), int32)
    size = call("and", call("shr", bits, Const(int32, 4 * half)), Const(int32, 7))
    sign = call("shl", call("and", bits, Const(int32, 8 << 4 * half)), Const(int32, 28 - 4 * half))
    half_bits = Const(int32, _HALF)
    normal = call("add", call("shl", size, Const(int32, 22)), half_bits)
    small = call("mul", size, half_bits)  # 0 or 0.5
    whole = where(call("lt", size, Const(int32, 2)), small, normal)
    return Call(float32, "bitcast", (call("or", whole, sign),))


HANDLERS: dict[str, Handler] = {"tt.dot_scaled": _dot_scaled}
SINKS = frozenset(HANDLERS)
