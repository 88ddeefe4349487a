"""Scatters on a GPU: programs before, after and around the kernel of their updates.

- Sums, maxima and minima are atomics, on the result or, where memory has none of its type, on a
  tensor of a wider one. Floats are compared as integers that order as they do, so that nan wins.
- Where updates are set, the last one of a place wins: a first kernel finds which that is, and every
  element of the result then knows where it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from terrazzo.base.places import in_range
from terrazzo.base.scalar import Call, Const, Scalar, as_scalar, call, cast, where
from terrazzo.base.shapes import (
    Shape,
    broadcast_shapes,
    contiguous_strides,
    normalize_axis,
    num_elements,
)
from terrazzo.chips.cuda.parts import Part, Parts
from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.triton.scatter import Place, Updates, updates_kernel
from terrazzo.dtypes import DType, float32, float64, int32, int64
from terrazzo.errors import UnsupportedOperator
from terrazzo.expr.ir import Program, Tensor, compute, load
from terrazzo.index import Index, bounds


@dataclass(frozen=True, eq=False)
class Scatter:
    """Which updates go where; both ways of indexing are one.

    The axes `along` of the result are indexed. In the updates stand, from axis `first` on, the axes
    of the indices (`joint`) in their place: these number the updates that may meet.
    """

    base: Tensor
    updates: Tensor
    result: Tensor
    indices: tuple[Tensor, ...]
    along: tuple[int, ...]
    joint: Shape
    by_element: bool  # each element has an index of its own
    reduce: str

    @staticmethod
    def of(program: Program) -> Scatter:
        attrs = program.attrs["node"].attrs
        (result,) = program.outputs
        if program.attrs["node"].op.name == "scatter":
            base, index, updates = program.inputs
            axis = normalize_axis(attrs["axis"], len(result.shape))
            return Scatter(base, updates, result, (index,), (axis,), (index.shape[axis],), True,
                           attrs["reduce"])
        base, updates, *indices = program.inputs
        return Scatter(base, updates, result, tuple(indices), tuple(attrs["axes"]),
                       broadcast_shapes(*(i.shape for i in indices)), False, attrs["reduce"])

    @property
    def first(self) -> int:
        return self.along[0]

    def own(self, at: Sequence[Index]) -> Sequence[Index]:
        """The place of an update among those of the indices."""
        return at if self.by_element else at[self.first:self.first + len(self.joint)]

    def chosen(self, own: Sequence[Index]) -> list[Scalar]:
        """The indices at a place of theirs."""
        return [in_range(_spread(index, own), self.result.shape[axis])
                for index, axis in zip(self.indices, self.along, strict=True)]

    def place(self, at: Sequence[Index]) -> Place:
        """Where an update goes."""
        kept = iter((*at[:self.first], *at[self.first + len(self.joint):]))
        chosen = dict(zip(self.along, self.chosen(self.own(at)), strict=True))
        return [chosen[d] if d in chosen else next(kept) for d in range(len(self.result.shape))]

    def before(self, *at: Index) -> Scalar:
        """What an element of the result was before all updates."""
        return load(self.base, at if self.base.shape else ())

    def source(self, at: Sequence[Index], step: Scalar) -> Scalar:
        """An update of an element of the result, by its number among those that may meet."""
        kept = [i for d, i in enumerate(at) if d not in self.along]
        steps: list[Scalar] = []
        for d, stride in enumerate(contiguous_strides(self.joint)):
            part = step if stride == 1 else call("floordiv", step, as_scalar(stride))
            steps.append(part if d == 0 else call("mod", part, as_scalar(self.joint[d])))
        return load(self.updates, [*kept[:self.first], *steps, *kept[self.first:]])


def _spread(index: Tensor, at: Sequence[Index]) -> Scalar:
    """What broadcasting puts at a place of the joint shape."""
    own = at[len(at) - len(index.shape):]
    return load(index, [0 if isinstance(n, int) and n == 1 else i
                        for n, i in zip(index.shape, own, strict=True)])


def kernels(program: Program, spec: ChipSpec) -> Parts:
    """The programs of a scatter in order."""
    made = _Programs(program, Scatter.of(program), spec)
    scatter = made.scatter
    if scatter.reduce == "mul":
        raise UnsupportedOperator("products of updates wait for each other, as no GPU multiplies "
                                  "in memory")
    if num_elements(scatter.updates.shape) == 0:
        return [made.pointwise("", scatter.result.shape, scatter.before, scatter.base)]
    return made.setting() if scatter.reduce == "set" else made.combining()


@dataclass(frozen=True, eq=False)
class _Programs:
    """The programs of one scatter."""

    whole: Program
    scatter: Scatter
    spec: ChipSpec

    def setting(self) -> Parts:
        """The number of the last update of each place, then the elements that it leads to."""
        s = self.scatter
        result, steps = s.result, num_elements(s.joint)
        most = bounds(steps)[1]
        kind = int64 if most is None or most >= 1 << 31 else int32
        slots = result.shape if s.by_element else tuple(result.shape[a] for a in s.along)
        first = self.pointwise("_last", slots, lambda *_: Const(kind, -1))
        updates = Updates(
            s.indices[0].shape if s.by_element else s.joint, first[0].outputs[0],
            s.place if s.by_element else s.chosen,
            lambda at: cast(as_scalar(at[s.first] if s.by_element else _flat(at, s.joint)), kind),
            "max")
        last = Tensor(updates.target.name, slots, kind)

        def element(*at: Index) -> Scalar:
            step = load(last, at if s.by_element else [at[a] for a in s.along])
            return where(call("ge", step, 0), cast(s.source(at, cast(step, int64)), result.dtype),
                         s.before(*at))

        return [first, self.updating("_updates", updates, *s.indices),
                self.pointwise("", result.shape, element, s.base, s.updates, last)]

    def combining(self) -> Parts:
        """Updates by atomics, in a type that memory has them for."""
        s = self.scatter
        result = s.result
        kind = _carried(result.dtype, s.reduce)
        direct = kind is result.dtype
        first = self.pointwise("" if direct else "_wide", result.shape,
                               lambda *at: _coded(s.before(*at), kind, s.reduce), s.base)
        updates = Updates(s.updates.shape, first[0].outputs[0], s.place,
                          lambda at: _coded(load(s.updates, at), kind, s.reduce), s.reduce)
        steps = [first, self.updating("_updates", updates, s.updates, *s.indices)]
        if direct:
            return steps
        wide = Tensor(updates.target.name, result.shape, kind)
        return [*steps, self.pointwise("", result.shape, lambda *at: _decoded(
            load(wide, at), result.dtype), wide)]

    def pointwise(self, kind: str, shape: Shape, element: Callable[..., Scalar], *inputs: Tensor
                  ) -> Part:
        """A program that is an expression: of the result, or of something on the way."""
        made = compute(shape, element, name=f"{self.scatter.result.name}{kind}",
                       origin=f"scatter {self.scatter.reduce}")
        return Program(f"{self.whole.name}{kind}", inputs, (made,), (made,)), None

    def updating(self, kind: str, updates: Updates, *inputs: Tensor
                 ) -> Part:
        outputs = (updates.target,)
        program = Program(f"{self.whole.name}{kind}", inputs, outputs, outputs, self.whole.kind,
                          self.whole.attrs)
        return program, partial(updates_kernel, program, updates, self.spec)


def _flat(at: Sequence[Index], shape: Shape) -> Index:
    flat: Index = 0
    for i, stride in zip(at, contiguous_strides(shape), strict=True):
        flat = flat + i * stride
    return flat


# ---------------------------------------------------------------- types that memory combines
def _carried(dtype: DType, reduce: str) -> DType:
    """The type that updates are combined in: floats are compared as integers."""
    if dtype.is_float and reduce != "add":
        return int64 if dtype is float64 else int32
    return int32 if not dtype.is_float and dtype.bits < 32 else dtype.compute


def _coded(value: Scalar, kind: DType, reduce: str) -> Scalar:
    """A number in the type that it is combined in; of floats, an integer that orders as they do."""
    if kind.is_float or not value.dtype.is_float:
        return cast(value, kind)
    wide = cast(value, float64 if kind is int64 else float32)
    nan = Const(kind, _top(kind) if reduce == "max" else ~_top(kind))
    return where(call("ne", wide, wide), nan, _turned(Call(kind, "bitcast", (wide,))))


def _decoded(value: Scalar, dtype: DType) -> Scalar:
    """The number of a result."""
    if value.dtype.is_float or not dtype.is_float:
        return cast(value, dtype)
    wide = float64 if value.dtype is int64 else float32
    return cast(Call(wide, "bitcast", (_turned(value),)), dtype)


def _turned(bits: Scalar) -> Scalar:
    """Sign and magnitude as two's complement without a second zero, and back; both bits of nan."""
    return where(call("lt", bits, 0), call("xor", bits, _top(bits.dtype)), bits)


def _top(kind: DType) -> int:
    return 2 ** (kind.bits - 1) - 1
