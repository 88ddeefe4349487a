"""Matrix products on a GPU: how they are cut into tiles, by rules with reasons.

| product | kernel |
|---|---|
| one row | the same, or none of its own: where k is contiguous, each result is a sum along a row |
| up to 64 rows | tiles of all rows and few columns, so that every multiprocessor reads its share |
| more | tiles of up to 128 x 256, one program for each multiprocessor where there are many |
| few tiles, and long sums | each sum in parts (split-K), which a second kernel joins |
| 8-bit floats, many tiles | warps with roles: one loads, two groups multiply (`gluon/float8.py`) |
| a convolution | the same: positions are rows, taps and channels are k (`expr/implicit.py`) |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from terrazzo.base.scalar import Axis, Reduce, rewrite, substitute_indices, walk
from terrazzo.base.shapes import num_elements
from terrazzo.chips.spec import FAST_FP8_SUMS, ChipSpec
from terrazzo.codegen.gluon import float8
from terrazzo.codegen.triton.dot import Tiling, product_kernel
from terrazzo.codegen.triton.dot_factors import (
    FLOAT8,
    HALVES,
    comes_in_pieces,
    described,
    dot_type,
)
from terrazzo.codegen.triton.module import Written
from terrazzo.dtypes import float32, int8
from terrazzo.expr.collapse import collapse
from terrazzo.expr.contraction import ContractionStage, match_contraction
from terrazzo.expr.implicit import PIECE, implicit_product
from terrazzo.expr.ir import Program, Tensor, fresh_axis, load, reads
from terrazzo.expr.matmul import MatrixProduct, match_product
from terrazzo.index import Index, Var, bounds, coefficient

FEW_ROWS = (16, 64)  # up to which there are kernels of their own, where their number varies
# Tiles of many rows: rows, columns, and what part of the peak they come to on an H200.
_TILES = ((128, 256, 1.0), (128, 128, 0.8), (64, 128, 0.55), (128, 64, 0.5), (64, 64, 0.35))
# The same of float32, whose three products for each take the time: a step of 32 of a tile of
# 128 x 64 takes 1 us. So few tiles are small ones, which all multiprocessors share.
_TILES_OF_FLOAT32 = ((128, 64, 1.0), (64, 64, 0.8), (64, 32, 0.55))
# And of 8-bit floats whose pieces are added in float32: that takes as many registers once more, so
# eight warps share the largest tile.
_TILES_OF_FLOAT8 = ((128, 128, 1.0), (64, 128, 0.65), (128, 64, 0.6), (64, 64, 0.4))
_LONG_SUM = 1024  # steps of k from which a second kernel is worth it
_LEAST_DEPTH = {True: 256, False: 512}  # steps of k in a part of a sum: of float32, of others
# A convolution with fewer outputs a group leaves more than half of the least tile empty, and with
# fewer steps of k most of a multiplication: depthwise ones are sums along rows.
_LEAST_OUTPUTS, _LEAST_STEPS = 8, PIECE


def matched(program: Program) -> MatrixProduct | None:
    """The product that a program is, if tensor cores multiply its factors; None for all others."""
    product = match_product(program)
    if product is None or dot_type(product) is None:
        return None
    if product.row is None and product.b.stride(product.column.var) == 1:
        # One row of a matrix whose columns are neighbours: sums along rows would jump.
        return replace(product, row=Axis(Var("%row", 0, 0), 0, 1))
    return None if product.row is None else product


def whole(program: Program) -> Program | None:
    """The program in the form in which it is a product, several axes of a sum as one.

    A convolution that reads neighbours one after the other (a window of 1) is one already; others
    become one by addresses. None of too few channels: what is left is a sum along a row for each
    result.
    """
    convolution = match_contraction(program)
    plain = None
    for made in (form(program) for form in (lambda same: same, collapse)):  # the second if needed
        product = matched(made)
        if product is not None and (convolution is None or _has_all_rows(product, convolution)):
            return made
        plain = plain or (None if product is None else made)
    moved = implicit_product(program)
    product = None if moved is None else matched(moved)
    if product is None or _is_less(product.column.extent, _LEAST_OUTPUTS) or _is_less(
            product.k.extent, _LEAST_STEPS):
        return plain
    return moved


def _has_all_rows(product: MatrixProduct, convolution: ContractionStage) -> bool:
    """Whether the positions of an image, or of all images, are rows of one matrix."""
    assert product.row is not None
    return not convolution.positions or product.row.extent in (
        num_elements([a.extent for a in convolution.positions]),
        num_elements([a.extent for a in convolution.places]))


def _is_less(extent: Index, least: int) -> bool:
    return isinstance(extent, int) and extent < least


def rows_of(program: Program) -> Index:
    """How many rows a product has."""
    product = matched(program)
    assert product is not None and product.row is not None
    return product.row.extent


def versions(program: Program, spec: ChipSpec, chosen: Tiling | None = None
             ) -> list[tuple[Written, int]]:
    """Kernels of a product, each with the rows up to which it is the best; 0: any.

    How one of so many rows is cut may be `chosen`, instead of by rule.
    """
    product = matched(program)
    assert product is not None and product.row is not None
    rows = product.row.extent
    if isinstance(rows, int):
        return [(w, 0) for w in written(program, product, spec, rows, chosen)]
    least = bounds(rows)[0] or 0
    found = [(w, most) for most in FEW_ROWS if least <= most
             for w in written(program, product, spec, most)[-1:]]
    return [*found, *((w, 0) for w in written(program, product, spec, None))]


def written(program: Program, product: MatrixProduct, spec: ChipSpec, rows: int | None,
            chosen: Tiling | None = None) -> list[Written]:
    """The kernel for so many rows, or any; behind one that reads by descriptors one that does not.
    """
    if chosen is None:
        chosen = with_roles(program, product, spec, tiling(product, spec, rows))
    else:
        chosen = replace(chosen, pieces=comes_in_pieces(product, chosen.depth))
    sizes = [bounds(num_elements(t.shape))[1] for t in (*program.inputs, *program.outputs)]
    large = any(top is None or top >= 1 << 31 for top in sizes)
    fixed = not program.dims
    if chosen.roles:
        plain = replace(tiling(product, spec, rows), descriptors=False, persistent=False)
        return [float8.product_kernel(program, product, spec),
                product_kernel(program, product, spec, plain)]
    made = [product_kernel(program, product, spec, chosen, wide=large and fixed)]
    if chosen.descriptors:
        plain = replace(chosen, descriptors=False, persistent=False)
        made.append(product_kernel(program, product, spec, plain, wide=large and fixed))
    if large and not fixed and rows is None:
        made.append(product_kernel(program, product, spec, replace(
            chosen, descriptors=False, persistent=False), wide=True))
    return made


# ---------------------------------------------------------------- the rules
def tiling(product: MatrixProduct, spec: ChipSpec, rows: int | None) -> Tiling:
    """How a product of so many rows is cut; None: of many. All figures are an H200's."""
    cut = _cut(product, spec, rows)
    depth = cut.depth
    least = PIECE if dot_type(product) in (*HALVES, float32) else 2 * PIECE  # that is multiplied
    while depth >= least:
        if comes_in_pieces(product, depth):
            return replace(cut, depth=depth, pieces=True)
        depth //= 2
    if cut.rows == 128 and any(coefficient(i, product.k.var) is None for i in product.a.indices):
        # Each element has a place and a condition of its own, which four warps have no room for.
        return replace(cut, warps=8)
    return cut


def _cut(product: MatrixProduct, spec: ChipSpec, rows: int | None) -> Tiling:
    dtype = dot_type(product)
    assert dtype is not None and product.row is not None
    if dtype is float32:  # three products of tf32: its digits, at more than the rate of float32
        high, wide, _ = min(_TILES_OF_FLOAT32, key=lambda t: _time(
            rows, product.column.extent, _members(product), t, spec.cores))
        return Tiling(_height(rows, high), wide, 32, stages=3)
    if rows is not None and rows <= FEW_ROWS[-1]:
        return _of_few_rows(product, spec, rows)
    columns, members = product.column.extent, _members(product)
    twice = dtype in FLOAT8 and not spec.has(FAST_FP8_SUMS)  # a piece of a sum, and all before it
    high, wide, _ = min(_TILES_OF_FLOAT8 if twice else _TILES,
                        key=lambda t: _time(rows, columns, members, t, spec.cores))
    tiles = _count(rows, columns, members, high, wide)
    depth = 64 if dtype in HALVES else 128
    largest = 128 * 128 if twice else 128 * 256
    if (high, wide) == (128, 128) and _is_wide(product, spec, rows):
        return Tiling(64, 256, depth, warps=8, stages=4)
    if high * wide < largest:
        return Tiling(high, wide, depth, stages=5 if high * wide == 128 * 128 else 4)
    # To make descriptors takes longer than they save where each program has one tile.
    descriptors = (tiles is None or tiles > spec.cores) and can_describe(product, spec)
    return Tiling(high, wide, depth, warps=8, stages=4 if twice else 3, persistent=descriptors,
                  descriptors=descriptors)


def _is_wide(product: MatrixProduct, spec: ChipSpec, rows: int | None) -> bool:
    """Whether 64 x 256 is better than 128 x 128, where those are one for each multiprocessor.

    It is where k is not what lies side by side in b: 128 x 14336 x 4096 in bfloat16 came to 1.003
    of cuBLAS, to 0.977 by the others; to 0.877, and 0.950, where k is. (Images were not measured.)
    """
    columns, members = product.column.extent, _members(product)
    counts = [_count(rows, columns, members, *tile) for tile in ((128, 128), (64, 256))]
    return dot_type(product) in HALVES and _are_matrices(product) and (
        product.b.stride(product.k.var) != 1) and all(
            n is not None and n <= spec.cores for n in counts)


def _are_matrices(product: MatrixProduct) -> bool:
    """Whether steps of k are equally far apart, in both factors."""
    return all(coefficient(i, product.k.var) is not None
               for f in (product.a, product.b) for i in f.indices)


def with_roles(program: Program, product: MatrixProduct, spec: ChipSpec, plain: Tiling) -> Tiling:
    """The kernel whose warps have roles, where that is faster.

    That is where each multiprocessor has more than one tile: of 8-bit floats with exact sums it
    came to 1204 TFLOP/s at 8192 cubed (plain: 758), to 1172 at 4096 cubed (841).
    """
    if product.row is None or not isinstance(product.row.extent, int):
        return plain
    cut = float8.TILING
    tiles = _count(product.row.extent, product.column.extent, _members(product), cut.rows,
                   cut.columns)
    many = tiles is not None and tiles > spec.cores
    return cut if many and float8.serves(program, product, spec) else plain


def can_describe(product: MatrixProduct, spec: ChipSpec) -> bool:
    """Whether both factors can be read through tensor descriptors."""
    dtype = dot_type(product)
    assert dtype is not None and product.row is not None
    return not product.batch and spec.has("tma") and described(
        product, product.a, product.row.var, dtype) and described(
            product, product.b, product.column.var, dtype)


def _of_few_rows(product: MatrixProduct, spec: ChipSpec, rows: int) -> Tiling:
    """All rows at once: the other factor is read once, and that is what takes the time.

    So many bytes must be under way, of so few columns that all multiprocessors have some: 32
    columns of 4096 x 4096 are 128 programs, each with 64 KB on their way. With half of that, 64
    rows came to 0.88 of cuBLAS, with it to 1.01.
    """
    high = _height(rows, 64)
    columns, members = product.column.extent, _members(product) or 1
    wide = 32
    # One row of 14336 columns: 1.055 of cuBLAS by 64 columns, 0.74 by 32. Of 4096 columns, where
    # half the multiprocessors would idle, 32 are better: 1.11, and 0.96.
    if high == 16 and isinstance(columns, int) and 2 * columns * members >= 3 * 64 * spec.cores:
        wide = 64
    while isinstance(columns, int) and columns * members >= 8 * wide * spec.cores and wide < 128:
        wide *= 2
    # Of 64 rows that is 192 KB of shared memory. (Images and other types were not measured.)
    deep = high <= 32 or (dot_type(product) in HALVES and _are_matrices(product)
                          and spec.l1_bytes >= 192 << 10)
    depth = 64 if wide == 128 else 256 if wide == 32 and deep else 128
    if dot_type(product) in FLOAT8:  # the same bytes
        depth *= 2
    return Tiling(high, wide, depth, stages=4)


def _height(rows: int | None, most: int) -> int:
    return most if rows is None else min(most, max(16, 1 << (rows - 1).bit_length()))


def _members(product: MatrixProduct) -> int | None:
    """The members of a batch, if their number is known."""
    members = num_elements([a.extent for a in product.batch])
    return members if isinstance(members, int) else None


def _count(rows: int | None, columns: Index, members: int | None, high: int, wide: int
           ) -> int | None:
    """The number of tiles, if it is known."""
    if rows is None or not isinstance(columns, int) or members is None:
        return None
    return math.ceil(rows / high) * math.ceil(columns / wide) * members


def _time(rows: int | None, columns: Index, members: int | None, tile: tuple[int, int, float],
          cores: int) -> float:
    """The time that all tiles take (of many rows: for a row), at the peak an element's is 1."""
    high, wide, rate = tile
    tiles = _count(rows, columns, members, high, wide)
    if tiles is not None:
        return math.ceil(tiles / cores) * high * wide / rate
    return (math.ceil(columns / wide) * wide if isinstance(columns, int) else 1) / rate


# ---------------------------------------------------------------- split-K
def split_sums(program: Program, spec: ChipSpec, parts: int = 0) -> Sequence[Program]:
    """A product of few tiles as two programs: sums of parts of k, and what joins them.

    The number of parts is that of a rule where it is 0.
    """
    product = matched(program)
    assert product is not None
    parts = parts or parts_by_rule(product, spec)
    k = product.k.extent
    if parts < 2 or not isinstance(k, int):
        return [program]
    return _split(program, product, parts, k // parts)


def parts_by_rule(product: MatrixProduct, spec: ChipSpec) -> int:
    """Into how many parts the sums of a product are cut."""
    assert product.row is not None
    rows, columns, k = product.row.extent, product.column.extent, product.k.extent
    if not isinstance(rows, int) or not isinstance(k, int) or dot_type(product) is int8:
        return 1
    cut = tiling(product, spec, rows)
    tiles = _count(rows, columns, _members(product), cut.rows, cut.columns)
    # A second kernel takes 3 us: half the multiprocessors idle is better than that.
    if not tiles or 2 * tiles > spec.cores or k < _LONG_SUM:
        return 1
    parts = min(2 * spec.cores // tiles, k // _LEAST_DEPTH[dot_type(product) is float32])
    return next((n for n in range(parts, 1, -1) if k % (n * cut.depth) == 0), 1)


def _split(program: Program, product: MatrixProduct, parts: int, size: int) -> list[Program]:
    (stage,) = program.stages
    assert stage.body is not None
    (own,) = (n for n in walk(stage.body) if isinstance(n, Reduce))
    part, inner = fresh_axis("part", parts), fresh_axis("k", size)
    value = substitute_indices(own.value, {own.axes[0].var: part.var * size + inner.var})
    axes = (part, *stage.axes)
    name = f"{stage.name}_parts"
    body = replace(own, axes=(inner,), value=value, contraction=None)
    made = Tensor(name, tuple(a.hi for a in axes), own.dtype, axes, body, origin=stage.origin)
    source = Tensor(name, made.shape, made.dtype)
    joined = replace(own, axes=(part,), contraction=None,
                     value=load(source, [a.var for a in axes]))
    last = replace(stage, body=rewrite(stage.body, lambda n: joined if n is own else None))
    factors, others = (tuple(t for t in program.inputs if t in reads(s)) for s in (made, last))
    return [Program(f"{program.name}_parts", factors, (made,), (made,), "contraction"),
            Program(program.name, (*others, source), (last,), (last,), "rows",
                    {"rows": len(stage.axes), "tiles": True})]
