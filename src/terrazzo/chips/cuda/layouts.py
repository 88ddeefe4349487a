"""Operands of convolutions as tensor cores want them: weights packed ahead, channels last.

Layers have weights `[outputs, channels, *sizes]`, where neighbouring steps of k (channels under one
tap) lie a window apart. float32 is multiplied faster where steps of k are neighbours (by a half on
an H200), half types where outputs are: each load then brings 16 bytes. So constants are packed
once, when a model is loaded.

Images with channels first have neighbours along rows, of which a window takes any: single elements
are loaded, each for every tap and tile. A kernel of its own brings larger ones into order before,
and weights that are no constants (of a model that is trained) where there are many positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from terrazzo.base.scalar import Load, Scalar, loads, rewrite, substitute_indices
from terrazzo.base.shapes import contiguous_strides, num_elements
from terrazzo.chips.cuda import products
from terrazzo.dtypes import float32
from terrazzo.expr.contraction import ContractionStage, match_contraction
from terrazzo.expr.implicit import PIECE, order_of_k
from terrazzo.expr.ir import Program, Tensor, compute, reads
from terrazzo.index import Index, Var, coefficient, free_vars, substitute
from terrazzo.loop.packing import Packing

_WORTH = 1 << 16  # elements of an image below which another launch takes longer than it saves
_POSITIONS = 1 << 10  # from which on weights are read so often that they are packed first


@dataclass(frozen=True, eq=False)
class Weights:
    """Which input of a program are weights, how they are packed, and the program that reads that.
    """

    number: int
    packing: Packing
    program: Program


_FOUND: WeakKeyDictionary[Program, Weights | None] = WeakKeyDictionary()


def weights_of(program: Program) -> Weights | None:
    """The weights that a program would rather have packed; None where they lie well."""
    if program not in _FOUND:
        _FOUND[program] = _found(program)
    return _FOUND[program]


def _found(program: Program) -> Weights | None:
    convolution = match_contraction(program) if program.kind == "contraction" else None
    if convolution is None or not any(convolution.taps) or products.whole(program) is None:
        return None
    read = convolution.w.guarded
    if read is None or read[1] is not None:
        return None
    load = read[0]
    packing = _packing(convolution, load)
    if packing is None or load.source not in program.inputs or sum(
            n.source is load.source for n in loads(convolution.body)) != 1:
        return None
    packed = Tensor(load.source.name, packing.shape, load.dtype)
    return Weights(program.inputs.index(load.source), packing, _reading(
        program, convolution, load, packing, packed))


def _packing(convolution: ContractionStage, load: Load) -> Packing | None:
    """Where each element comes from, if those are numbers."""
    outputs, k = convolution.outputs, order_of_k(convolution)
    address = load.source.flat(load.indices)
    if isinstance(address, Scalar) or not isinstance(outputs.extent, int):
        return None
    zero: dict[Var, Index] = {a.var: 0 for a in (outputs, *k)}
    steps = [coefficient(address, a.var) for a in (outputs, *k)]
    extents, start = [a.extent for a in k], substitute(address, zero)
    if free_vars(address) - zero.keys():
        return None
    numbers = [n for n in (start, *steps, *extents) if isinstance(n, int)]
    if len(numbers) != 1 + len(steps) + len(extents):
        return None
    first, each, *between = numbers[:1 + len(steps)]
    sizes = numbers[1 + len(steps):]
    if load.dtype is float32:
        if [each, *between] == list(contiguous_strides((outputs.extent, *sizes))):
            return None
        return Packing(load.dtype, 1, (outputs.extent, each), tuple(zip(sizes, between)), (), first)
    share = outputs.extent // convolution.groups
    if convolution.groups == 1 and [*between, each] == list(contiguous_strides((*sizes, share))):
        return None
    return Packing(load.dtype, share, (share, each), tuple(zip(sizes, between)),
                   ((convolution.groups, share * each),), first)


def _reading(program: Program, convolution: ContractionStage, load: Load, packing: Packing,
             packed: Tensor) -> Program:
    """The same program, which reads its weights packed."""
    output, steps = convolution.outputs.var, [a.var for a in order_of_k(convolution)]
    indices: tuple[Index, ...] = (output, *steps, 0) if packing.width == 1 else (
        output // packing.width, 0, *steps, output % packing.width)
    fresh = Load(load.dtype, packed, indices)
    stage = convolution.stage
    made = replace(stage, body=rewrite(
        convolution.body, lambda n: fresh if isinstance(n, Load) and n.source is load.source
        else None))
    return replace(program, stages=(made,), outputs=(made,), inputs=tuple(
        packed if t is load.source else t for t in program.inputs))


# ---------------------------------------------------------------- images
def with_channels_last(program: Program) -> list[Program]:
    """A convolution behind the program that brings its images into order, where that is needed."""
    convolution = match_contraction(program)
    if convolution is None or not any(convolution.taps) or convolution.channel is None:
        return [program]
    read, channel = convolution.x.guarded, convolution.channel
    if read is None or read[0].source not in program.inputs or not (
            isinstance(channel.extent, int) and channel.extent % PIECE == 0):
        return [program]
    load = read[0]
    source: Tensor = load.source
    size = num_elements(source.shape)
    places = [d for d, i in enumerate(load.indices)
              if not isinstance(i, Scalar) and channel.var in free_vars(i)]
    address = source.flat(load.indices)
    if len(places) != 1 or isinstance(address, Scalar) or coefficient(
            address, channel.var) == 1 or (isinstance(size, int) and size < _WORTH):
        return [program]
    order = [*(d for d in range(len(source.shape)) if d != places[0]), places[0]]
    ordered = compute([source.shape[d] for d in order],
                      lambda *at: source[tuple(at[order.index(d)] for d in range(len(order)))],
                      name=f"{source.name}_last", dtype=source.dtype, origin="permute_dims")
    given = Tensor(ordered.name, ordered.shape, ordered.dtype)
    fresh = Load(load.dtype, given, tuple(load.indices[d] for d in order))
    made = replace(convolution.stage, body=rewrite(
        convolution.body, lambda n: fresh if n is load else None))
    others = tuple(t for t in program.inputs if t in reads(made))
    return [Program(f"{program.name}_{ordered.name}", (source,), (ordered,), (ordered,)),
            replace(program, stages=(made,), outputs=(made,), inputs=(*others, given))]


# ---------------------------------------------------------------- weights that are no constants
def with_packed_weights(program: Program) -> list[Program]:
    """A convolution behind the program that packs its weights, where that is worth a launch."""
    weights, convolution = weights_of(program), match_contraction(program)
    if weights is None or convolution is None or convolution.w.guarded is None:
        return [program]
    positions = num_elements([a.extent for a in convolution.places])
    if isinstance(positions, int) and positions < _POSITIONS:
        return [program]
    load, steps = convolution.w.guarded[0], order_of_k(convolution)
    outputs, groups, packing = convolution.outputs, convolution.groups, weights.packing
    share = outputs.extent // groups

    def element(*at: Index) -> Scalar:
        group, taps, output = (0, at[1:-1], at[0]) if packing.width == 1 else (
            at[0] if packing.batch else 0, at[len(packing.batch) + 1:-1], at[-1])
        table: dict[Var, Index] = {outputs.var: group * share + output,
                                   **{a.var: i for a, i in zip(steps, taps, strict=True)}}
        return substitute_indices(load, table)

    packed = compute(packing.shape, element, name=f"{load.source.name}_packed", dtype=load.dtype,
                     origin="permute_dims")
    given = Tensor(packed.name, packed.shape, packed.dtype)
    return [Program(f"{program.name}_{packed.name}", (load.source,), (packed,), (packed,)),
            _reading(program, convolution, load, packing, given)]


__all__ = ["Weights", "weights_of", "with_channels_last", "with_packed_weights"]
