"""Products in microscaling formats: elements of 4 or 8 bits, a power of two for each group.

Elements are widened to f32 and multiplied by their scales on the way into the buffers that the
micro-kernel reads; from there on it is a product like any other. The formats are those of the OCP
microscaling specification; e2m1 comes two to a byte, the lower half first, packed along k or along
the other dimension.

Scales go down to 2^-127, so factors, products and sums can be denormal in f32. Each costs an x86
CPU some 150 cycles for the whole vector it is in: measured on scales of all sizes, that was 99 % of
the time. So both factors are lifted by powers of two, as far as the largest scales of the tiles
allow, and sums begin with 2^-102 rather than 0, by one more step of k. Then nothing is denormal
that counts: what a sum loses beside 2^-102 is, brought down again, below the least denormal.
"""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.base.scalar import Call, Const, FromIndex, Scalar, call, cast, where
from terrazzo.dtypes import DType, float8_e4m3fn, float8_e5m2, float16, float32, int32, uint8
from terrazzo.index import Index, maximum, minimum
from terrazzo.loop.ir import Buffer, Store
from terrazzo.triton_cpu.frontend.lower import Handler, Lowering
from terrazzo.triton_cpu.frontend.lower_dot import Factor, Place, in_rows, multiply, register_tile
from terrazzo.triton_cpu.frontend.nest import Write
from terrazzo.triton_cpu.frontend.ttir import Op
from terrazzo.triton_cpu.frontend.values import Indices, Value, dtype_of, flat

_E2M1 = 4  # its number among Triton's element types; all others carry a type of their own
_HALF = 126 << 23  # the bits of 0.5
_SMALLEST = 1 << 22  # the bits of 2^-127, which is what a scale of 0 stands for
_BIAS = 127  # of e8m0 and of f32
_NAN = 255  # the scale that stands for nan
# Elements of a type are below two to this; those of bfloat16 may be anything.
_BELOW: dict[DType, int] = {float8_e4m3fn: 9, float8_e5m2: 16, float16: 16}
_BELOW_E2M1 = 3
_START = 2.0 ** -51  # of both factors: sums begin with its square
_LEAST_LIFT = 24  # of both factors together: the square is 24 bits above what is normal
_MOST_LIFT = 126  # of a factor: its inverse is not denormal
_PAD = 16  # elements before a row of the left factor: the step of k that sums begin with, and none


@dataclass(frozen=True, eq=False)
class _Side:
    """One factor: its elements, where two share a byte (along k, other or none), its scales."""

    value: Value
    halves: str
    scale: Value | None
    is_left: bool
    shape: tuple[int, int, int]  # batch, rows, columns

    @property
    def depth(self) -> int:
        return self.shape[2 if self.is_left else 1]

    @property
    def other(self) -> int:
        return self.shape[1 if self.is_left else 2]

    @property
    def groups(self) -> int:
        return 1 if self.scale is None else self.scale.type.shape[-1]

    @property
    def scale_shape(self) -> tuple[int, int, int]:
        """Rows by groups of the left factor, groups by columns of the right."""
        count, groups, other = self.shape[0], self.groups, self.other
        return (count, other, groups) if self.is_left else (count, groups, other)


@dataclass(frozen=True, eq=False)
class _Lift:
    """By what powers of two the factors are lifted; and the numbers that follow, see `_lift`."""

    powers: tuple[Index, Index]
    numbers: Buffer


def _dot_scaled(lowering: Lowering, op: Op) -> None:
    _, _, _, has_left, has_right = op.attrs["operandSegmentSizes"]
    a, b, c = (lowering.operand(op, n) for n in range(3))
    keep_nan = not op.attrs["fastMath"]
    *_, rows, columns = op.type.shape
    count = op.type.count // (rows * columns)
    halves = _halves(op, "a", "lhs")
    depth = a.type.shape[-1] * (2 if halves == "k" else 1)
    left = _Side(in_rows(lowering, a), halves, lowering.operand(op, 3) if has_left else None,
                 True, (count, rows, depth))
    right = _Side(in_rows(lowering, b), _halves(op, "b", "rhs"),
                  lowering.operand(op, 3 + has_left) if has_right else None, False,
                  (count, depth, columns))
    exponents = [_exponents(lowering, side) for side in (left, right)]
    lift = _lift(lowering, (left, right), exponents)
    first, second = (
        _factor(lowering, side, _powers(lowering, side, known, power, keep_nan), lift)
        for side, known, power in zip(
            (left, right), exponents, (0, 0) if lift is None else lift.powers, strict=True))
    if lift is None:
        multiply(lowering, op, first, second, depth, c)
        return
    numbers = lift.numbers

    def finish(total: Scalar, part: Scalar) -> Scalar:
        # In one step with the addition, the second product is never denormal by itself.
        lower = call("mul", call("sub", part, numbers[1]), numbers[2])
        return call("fma", lower, numbers[3], total)

    multiply(lowering, op, first, second, depth + 1, c, finish)


def _halves(op: Op, operand: str, side: str) -> str:
    """The dimension along which two elements share a byte: k, other or none."""
    if op.attrs[f"{operand}_elem_type"] != _E2M1:
        return "none"
    return "k" if op.attrs[f"{side}_k_pack"] else "other"


# ---------------------------------------------------------------- factors
def _factor(lowering: Lowering, side: _Side, scales: Buffer | None, lift: _Lift | None) -> Factor:
    """A factor in memory: batch by rows by columns, widened and scaled.

    The loops are over groups of k with one scale, so that it is the same in the innermost loop of
    a left factor; of a right factor, the scales of a row lie side by side.
    """
    value, is_left, groups, other = side.value, side.is_left, side.groups, side.other
    count, size = side.shape[0], side.depth // groups
    k_step, other_step = 2 if side.halves == "k" else 1, 2 if side.halves == "other" else 1
    flat_batch = len(value.type.shape) == 2
    # A step of k that sums begin with comes before all others.
    before = 0 if lift is None else _PAD if is_left else 1
    _, rows, columns = side.shape
    sizes = (count, rows, columns + before) if is_left else (count, rows + before, columns)
    buffer = lowering.local("left" if is_left else "right", float32, sizes[0] * sizes[1] * sizes[2])

    def writes(i: Indices) -> list[Write]:
        batch, group, j, at = (i[0], i[2], i[3], i[1]) if is_left else i
        k = group * (size // k_step) + j
        position = (at, k) if is_left else (k, at)
        element = value.scalar(position if flat_batch else (batch, *position))
        made = []
        for number in range(k_step * other_step):
            full_k = before + group * size + j * k_step + (number if k_step == 2 else 0)
            full_at = at * other_step + (number if other_step == 2 else 0)
            item = cast(element, float32) if side.halves == "none" else _e2m1(element, number)
            if scales is not None:
                row = (batch, full_at, group) if is_left else (batch, group, full_at)
                item = call("mul", item, scales[flat(side.scale_shape, row)])
            target: Indices = (batch, full_at, full_k) if is_left else (batch, full_k, full_at)
            made.append(Write(buffer, flat(sizes, target), item))
        return made

    inner = (groups, size // k_step)
    loops = (count, other // other_step, *inner) if is_left else (
        count, *inner, other // other_step)
    lowering.emit(lowering.nest(loops, writes, innermost=3))
    first = max(before - 1, 0)
    if lift is not None:
        start = lift.numbers[0] if is_left else Const(float32, _START)
        lowering.emit(lowering.nest((count, other), lambda i: [Write(
            buffer, flat(sizes, (i[0], i[1], first) if is_left else (i[0], first, i[1])), start)]))
    panel = register_tile(lowering.target, float32, 1, other)[1]
    return Factor(Place(buffer, first * is_left, sizes[1] * sizes[2], sizes[2], 1, panel))


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


# ---------------------------------------------------------------- scales
def _exponents(lowering: Lowering, side: _Side) -> Buffer | None:
    """Scales of type e8m0 as integers, in the order of `scale_shape`."""
    if side.scale is None or dtype_of(side.scale.type.elem).is_float:
        return None
    buffer = lowering.local("exponents", int32, side.scale.type.count)
    lowering.emit(lowering.nest(side.scale_shape, lambda i: [Write(
        buffer, flat(side.scale_shape, i), cast(cast(_scale(side, i), uint8), int32))]))
    return buffer


def _scale(side: _Side, i: Indices) -> Scalar:
    assert side.scale is not None
    batch, at, group = i if side.is_left else (i[0], i[2], i[1])
    return side.scale.scalar(
        (at, group) if len(side.scale.type.shape) == 2 else (batch, at, group))


def _powers(lowering: Lowering, side: _Side, exponents: Buffer | None, lift: Index,
            keep_nan: bool) -> Buffer | None:
    """What scales multiply by: 2^(scale - 127 + lift) of e8m0, nan if it is 255; floats as such."""
    if side.scale is None:
        return None
    count = side.scale.type.count
    buffer = lowering.local("scales", float32, count)
    if exponents is None:
        lowering.emit(lowering.nest(side.scale_shape, lambda i: [Write(
            buffer, flat(side.scale_shape, i), cast(_scale(side, i), float32))]))
        return buffer

    def power(i: Indices) -> list[Write]:
        bits = call("shl", call("add", exponents[i[0]], FromIndex(int32, lift)), Const(int32, 23))
        found: Scalar = _float(call("max", bits, Const(int32, _SMALLEST)))
        if keep_nan:
            found = where(_is_nan(exponents[i[0]]), Const(float32, float("nan")), found)
        return [Write(buffer, i[0], found)]

    lowering.emit(lowering.nest((count,), power))
    return buffer


def _is_nan(exponent: Scalar) -> Scalar:
    return call("eq", exponent, Const(int32, _NAN))


def _float(bits: Scalar) -> Scalar:
    return Call(float32, "bitcast", (bits,))


# ---------------------------------------------------------------- away from what is denormal
def _lift(lowering: Lowering, sides: tuple[_Side, _Side], exponents: list[Buffer | None]
          ) -> _Lift | None:
    """How far factors can be lifted without any sum of products becoming infinite.

    Scales are what is lifted; a factor whose scales are small takes what the other one leaves. The
    numbers are: what the left factor begins with, what sums begin with, and what brings them down
    again, in two steps.
    """
    left, right = (_top(lowering, side, known)
                   for side, known in zip(sides, exponents, strict=True))
    if left is None or right is None or exponents == [None, None]:
        return None
    reach = (_BIAS - 1 - sides[0].depth.bit_length()) // 2
    lifts: list[Index] = []
    for number, (own, others) in enumerate(((left, right), (right, left))):
        if exponents[number] is None:
            lifts.append(0)
            continue
        taken = others if exponents[1 - number] is None else maximum(others, reach)
        room = 2 * reach - own - taken
        var = lowering.fresh("lift", 0, _MOST_LIFT)
        lowering.items.append((var, FromIndex(int32, maximum(minimum(room, _MOST_LIFT), 0))))
        lifts.append(var)
    numbers = lowering.local("lift", float32, 4)
    high = call("ge", FromIndex(int32, lifts[0] + lifts[1]), Const(int32, _LEAST_LIFT))
    downs = [_float(call("shl", FromIndex(int32, _BIAS - lift), Const(int32, 23)))
             for lift in lifts]
    for place, item in enumerate([
            *(where(high, Const(float32, start), Const(float32, 0.0))
              for start in (_START, _START * _START)), *downs]):
        lowering.emit(Store(numbers, place, item))
    return _Lift((lifts[0], lifts[1]), numbers)


def _top(lowering: Lowering, side: _Side, exponents: Buffer | None) -> Index | None:
    """An exponent of two that all elements of a factor are below; None if none is known."""
    top = _BELOW_E2M1 if side.halves != "none" else _BELOW.get(dtype_of(side.value.type.elem))
    if top is None or side.scale is None:
        return top
    if exponents is None:
        below = _BELOW.get(dtype_of(side.scale.type.elem))
        return None if below is None else top + below
    buffer = lowering.local("largest", int32, 1)
    lowering.emit(Store(buffer, 0, Const(int32, 0)))
    lowering.emit(lowering.nest((side.scale.type.count,), lambda i: [Write(
        buffer, 0, where(_is_nan(exponents[i[0]]), Const(int32, 0), exponents[i[0]]), "max")]))
    largest = lowering.fresh("largest", 0, _NAN - 1)
    lowering.items.append((largest, buffer[0]))
    return top + largest - _BIAS


HANDLERS: dict[str, Handler] = {"tt.dot_scaled": _dot_scaled}
SINKS = frozenset(HANDLERS)
