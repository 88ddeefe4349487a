"""Matrix products on a GPU: how they are cut into tiles, by rules with reasons.

| product | kernel |
|---|---|
| one row | none of its own: each result is a sum along a row (`split.py`) |
| up to 64 rows | tiles of all rows and few columns, so that every multiprocessor reads its share |
| more | tiles of up to 128 x 256, one program for each multiprocessor where there are many |
| few tiles, and long sums | each sum in parts (split-K), which a second kernel joins |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from terrazzo.base.scalar import Call, Reduce, as_scalar, call, rewrite, substitute_indices, where
from terrazzo.base.shapes import num_elements
from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.triton.dot import HALVES, Tiling, described, dot_type, product_kernel
from terrazzo.codegen.triton.module import Written
from terrazzo.dtypes import DType, int8
from terrazzo.expr.collapse import collapse
from terrazzo.expr.ir import Program, Tensor, fresh_axis, load
from terrazzo.expr.matmul import MatrixProduct, match_product
from terrazzo.index import Index, bounds

FEW_ROWS = (16, 64)  # up to which there are kernels of their own, where their number varies
# Tiles of many rows, from best: rows, columns, and what part of the peak they come to.
_TILES = ((128, 256, 1.0), (128, 128, 0.85), (64, 128, 0.65), (64, 64, 0.45))
_LEAST_DEPTH = 512  # steps of k that a part of a sum has at least


def matched(program: Program) -> MatrixProduct | None:
    """The product that a program is, if tensor cores multiply its factors; None for all others."""
    product = match_product(program)
    if product is None or product.row is None or dot_type(product) is None:
        return None
    return product


def whole(program: Program) -> Program | None:
    """The program in the form in which it is a product, several axes of a sum as one."""
    if matched(program) is not None:
        return program
    merged = collapse(program)
    return merged if matched(merged) is not None else None


def rows_of(program: Program) -> Index:
    """How many rows a product has."""
    product = matched(program)
    assert product is not None and product.row is not None
    return product.row.extent


def versions(program: Program, spec: ChipSpec) -> list[tuple[Written, int]]:
    """Kernels of a product, each with the rows up to which it is the best; 0: any."""
    product = matched(program)
    assert product is not None and product.row is not None
    rows = product.row.extent
    if isinstance(rows, int):
        return [(w, 0) for w in written(program, product, spec, rows)]
    found = [(w, most) for most in FEW_ROWS for w in written(program, product, spec, most)[-1:]]
    return [*found, *((w, 0) for w in written(program, product, spec, None))]


def written(program: Program, product: MatrixProduct, spec: ChipSpec, rows: int | None
            ) -> list[Written]:
    """The kernel for so many rows, or any; behind one that reads by descriptors one that does not.
    """
    chosen = tiling(product, spec, rows)
    sizes = [bounds(num_elements(t.shape))[1] for t in (*program.inputs, *program.outputs)]
    large = any(top is None or top >= 1 << 31 for top in sizes)
    fixed = not program.dims
    made = [product_kernel(program, product, spec, chosen, wide=large and fixed)]
    if chosen.descriptors:
        plain = replace(chosen, descriptors=False, persistent=False, parts=1)
        made.append(product_kernel(program, product, spec, plain, wide=large and fixed))
    if large and not fixed and rows is None:
        made.append(product_kernel(program, product, spec, replace(
            chosen, descriptors=False, persistent=False, parts=1), wide=True))
    return made


# ---------------------------------------------------------------- the rules
def tiling(product: MatrixProduct, spec: ChipSpec, rows: int | None) -> Tiling:
    """How a product of so many rows is cut; None: of many."""
    dtype = dot_type(product)
    assert dtype is not None
    if dtype not in HALVES and dtype is not int8:
        return _of_wide_types(product, rows, dtype)
    if rows is not None and rows <= FEW_ROWS[-1]:
        return _of_few_rows(product, spec, rows)
    columns, members = product.column.extent, _known(product, rows)
    high, wide, _ = min(_TILES, key=lambda t: _waves(rows, columns, members, t, spec.cores))
    side = product.row.var if product.row is not None else None
    descriptors = spec.has("tma") and not product.batch and described(
        product, product.a, side, dtype) and described(product, product.b, product.column.var,
                                                       dtype)
    # Two programs share a multiprocessor's registers and shared memory unless a tile is large.
    large = high * wide >= 128 * 256
    return Tiling(high, wide, 64 if dtype in HALVES else 128, warps=8 if large else 4,
                  stages=4 if descriptors else 3, persistent=descriptors,
                  descriptors=descriptors, parts=2 if descriptors and large else 1)


def _of_few_rows(product: MatrixProduct, spec: ChipSpec, rows: int) -> Tiling:
    """All rows at once: the other factor is read once, and that is what takes the time."""
    high = max(16, 1 << (rows - 1).bit_length())
    columns = product.column.extent
    members = _known(product, rows)
    wide = 128 if high <= 32 else 64
    while wide > 32 and (not isinstance(columns, int) or math.ceil(
            columns / wide) * (members or 1) < spec.cores):
        wide //= 2
    return Tiling(high, wide, 128, warps=4, stages=4)


def _of_wide_types(product: MatrixProduct, rows: int | None, dtype: DType) -> Tiling:
    high = 16 if rows is not None and rows <= 16 else 64
    return Tiling(high, 64, 32, warps=4, stages=3)


def _known(product: MatrixProduct, rows: int | None) -> int | None:
    """The members of a batch, if their number is known."""
    members = num_elements([a.extent for a in product.batch])
    return members if isinstance(members, int) else None


def _waves(rows: int | None, columns: Index, members: int | None, tile: tuple[int, int, float],
           cores: int) -> float:
    """The time that all tiles take, in that of one element of a tile at the peak."""
    high, wide, rate = tile
    if rows is None or not isinstance(columns, int) or members is None:
        return 1 / rate
    tiles = math.ceil(rows / high) * math.ceil(columns / wide) * members
    return math.ceil(tiles / cores) * high * wide / rate


# ---------------------------------------------------------------- split-K
def split_sums(program: Program, spec: ChipSpec) -> Sequence[Program]:
    """A product of few tiles as two programs: sums of parts of k, and what joins them."""
    product = matched(program)
    assert product is not None and product.row is not None
    rows, columns, k = product.row.extent, product.column.extent, product.k.extent
    members = _known(product, None)
    if not (isinstance(rows, int) and isinstance(columns, int) and isinstance(k, int)) or (
            members is None or dot_type(product) is int8):
        return [program]
    cut = tiling(product, spec, rows)
    tiles = math.ceil(rows / cut.rows) * math.ceil(columns / cut.columns) * members
    parts = min(2 * spec.cores // max(tiles, 1), k // _LEAST_DEPTH)
    parts = next((n for n in range(parts, 1, -1) if k % (n * cut.depth) == 0), 0)
    if parts < 2:
        return [program]
    return _split(program, product, parts, k // parts)


def _split(program: Program, product: MatrixProduct, parts: int, size: int) -> list[Program]:
    (stage,) = program.stages
    sums = product.reduce
    own = next(n for n in _reductions(stage))
    part, inner = fresh_axis("part", parts), fresh_axis("k", size)
    value = substitute_indices(own.value, {own.axes[0].var: part.var * size + inner.var})
    axes = (part, *stage.axes)
    name = f"{stage.name}_parts"
    body = replace(own, axes=(inner,), value=value, contraction=None)
    made = Tensor(name, tuple(a.hi for a in axes), sums.dtype, axes, body, origin=stage.origin)
    source = Tensor(name, made.shape, made.dtype)
    joined = replace(own, axes=(part,), contraction=None,
                     value=load(source, [a.var for a in axes]))
    assert stage.body is not None
    last = replace(stage, body=rewrite(stage.body, lambda n: joined if n is own else None))
    factors = [t for t in program.inputs if t in _sources(body)]
    others = [t for t in program.inputs if t in _sources(last.body)]
    return [Program(f"{program.name}_parts", tuple(factors), (made,), (made,), "contraction"),
            Program(program.name, (*others, source), (last,), (last,), "rows",
                    {"rows": len(stage.axes), "tiles": True})]


def _reductions(stage: Tensor) -> list[Reduce]:
    from terrazzo.base.scalar import walk

    assert stage.body is not None
    return [n for n in walk(stage.body) if isinstance(n, Reduce)]


def _sources(body: object) -> set[Tensor]:
    from terrazzo.base.scalar import loads

    return {read.source for read in loads(body)}  # type: ignore[arg-type]


__all__ = ["Call", "as_scalar", "call", "split_sums", "tiling", "versions", "where", "whole"]
