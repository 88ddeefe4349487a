"""Ways to run a program on a GPU: what its rules choose, and what may be chosen instead.

A choice is plain data: sizes of tiles, warps and the like (`runtime/tuned.py` keeps those that were
measured). Sizes that are known are what choices are for: programs of others go by rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.base.shapes import num_elements
from terrazzo.chips.cuda import attention, products
from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.gluon import attention as gluon_attention
from terrazzo.codegen.gluon import float8
from terrazzo.codegen.triton.attention_lines import Attention, Tiles
from terrazzo.codegen.triton.dot import Tiling
from terrazzo.codegen.triton.dot_factors import dot_type
from terrazzo.codegen.triton.module import MAX_WARPS, Written
from terrazzo.codegen.triton.source import ROW_BLOCK, Blocks, longest_row
from terrazzo.dtypes import int8
from terrazzo.expr.ir import Program
from terrazzo.expr.matmul import MatrixProduct
from terrazzo.runtime.tuned import Choice

# Rows, columns and warps of tiles of many rows; of few rows columns and warps.
_TILES = ((128, 256, 8), (128, 128, 8), (128, 128, 4), (64, 256, 4), (64, 128, 4), (64, 64, 4))
_NARROW_TILES = ((16, 4), (32, 4), (64, 4), (128, 4), (32, 2), (64, 8))
_DEPTHS, _STAGES = (32, 64, 128, 256), (2, 3, 4, 5)
_PARTS, _LEAST_DEPTH = (1, 2, 4, 8, 16), 128  # of sums, and steps of k that each has at least
# Queries, keys and warps of attention; keys where there are few queries.
_ATTENTION = ((128, 128, 8), (128, 64, 8), (128, 64, 4), (64, 128, 4), (64, 64, 4), (64, 32, 4),
              (32, 32, 4))
_GLUON = ((64, 128, 4, 2), (64, 64, 4, 2), (64, 128, 4, 3))  # the last: groups of warps
_FEW_KEYS, _FEW_PARTS = (16, 32, 64, 128), (1, 2, 4, 8, 16, 32)
# Elements that a thread holds: with fewer loads are narrow, with more registers do not suffice.
_A_THREAD = (2, 4, 8, 16, 32, 64)
_POINTWISE = (512, 1024, 2048, 4096, 8192)
_TURNED_BY_A_THREAD = (8, 16, 32)
_LOOPED = (2048, 4096, 8192)  # positions at once of a row that is walked in a loop
_SIDE_BY_SIDE, _FEW_WARPS = (8, 16, 32, 64, 128), (1, 2, 4, 8)
_MOST_IN_A_TILE = 8192


@dataclass(frozen=True, eq=False)
class Space:
    """What may be chosen: values that go together are alternatives of one another."""

    rule: Choice
    axes: tuple[tuple[Choice, ...], ...]
    fits: Callable[[Choice], bool]

    def changed(self, choice: Choice, axis: Sequence[Choice]) -> list[Choice]:
        """A choice with other values of an axis."""
        made = [{**choice, **values} for values in axis]
        return [c for c in made if c != choice and self.fits(c)]

    def holds(self, choice: Choice) -> bool:
        """Whether this is one of it: what a file says may be for another version of this."""
        if choice == self.rule:
            return True
        return choice.keys() == self.rule.keys() and self.fits(choice) and all(
            any(values.items() <= choice.items() for values in (
                *axis, {name: self.rule[name] for name in axis[0]})) for axis in self.axes)


def space_of(program: Program, main: Program, written: Written, spec: ChipSpec) -> Space | None:
    """What may be chosen for a program that is this one kernel by rule, or for attention."""
    if not _is_fixed(program):
        return None
    if program.kind == "attention":
        return _without_gaps(_attention(Attention.of(program), spec))
    if main.kind == "pointwise" and "ROWS" in written.constants:
        return _without_gaps(_turned(main, written, spec))
    if main.kind == "pointwise":
        return _without_gaps(_pointwise(program, written)) if "BLOCK" in (
            written.constants) else None
    return _without_gaps(_tile(written) if "ROWS" in written.constants else _rows(main, written))


def of_product(program: Program, part: Program, spec: ChipSpec) -> Space | None:
    """What may be chosen for a product whose sums are a part, or all, of it by rule."""
    product, cut = products.matched(program), products.matched(part)
    assert product is not None and cut is not None
    return _without_gaps(_product(part, product, cut, spec)) if _is_fixed(program) else None


def _is_fixed(program: Program) -> bool:
    return not program.dims and all(num_elements(t.shape) != 0
                                    for t in (*program.inputs, *program.stages))


def _without_gaps(space: Space) -> Space | None:
    axes = tuple(filter(None, space.axes))
    return replace(space, axes=axes) if axes else None


# ---------------------------------------------------------------- kinds of programs
def _alternatives(names: str, rows: Sequence[Sequence[int]]) -> tuple[Choice, ...]:
    return tuple(dict(zip(names.split(), row, strict=True)) for row in rows)


def _product(part: Program, product: MatrixProduct, cut: MatrixProduct, spec: ChipSpec) -> Space:
    dtype = dot_type(product)
    assert dtype is not None and product.row is not None
    rows, columns, k = product.row.extent, product.column.extent, product.k.extent
    assert isinstance(rows, int) and isinstance(columns, int) and isinstance(k, int)
    tiling = products.with_roles(part, cut, spec, products.tiling(cut, spec, rows))
    rule = {"rows": tiling.rows, "columns": tiling.columns, "warps": tiling.warps,
            "depth": tiling.depth, "stages": tiling.stages, "persistent": tiling.persistent,
            "descriptors": tiling.descriptors, "parts": products.parts_by_rule(product, spec)}
    if rows <= products.FEW_ROWS[-1]:
        tiles = [(tiling.rows, c, w) for c, w in _NARROW_TILES]
    else:
        tiles = [t for t in _TILES if t[0] < 2 * rows and t[1] < 2 * max(columns, 64)]
    described = products.can_describe(product, spec)
    ways = _alternatives("persistent descriptors", [(False, False), (True, False)] + (
        [(False, True), (True, True)] if described else []))
    with_roles: Choice = {}
    if float8.serves(part, cut, spec):  # a kernel that is cut in one way
        with_roles = {**{name: getattr(float8.TILING, name) for name in rule if name != "parts"},
                      "parts": 1, "roles": True}
        rule["roles"] = tiling.roles
        ways = (*({**way, "roles": False} for way in ways), with_roles)
    sums = [n for n in _PARTS if n == 1 or (k % (16 * n) == 0 and k >= n * _LEAST_DEPTH
                                            and dtype is not int8)]

    def fits(choice: Choice) -> bool:
        if choice.get("roles"):
            return choice == with_roles
        held = (choice["rows"] + choice["columns"]) * choice["depth"] * choice["stages"]
        return held * dtype.itemsize <= spec.l1_bytes and not (
            choice["descriptors"] and choice["parts"] > 1)

    return Space(rule, (
        _alternatives("rows columns warps", tiles), _alternatives("parts", [(n,) for n in sums]),
        _alternatives("depth stages", [
            (d, s) for d in _DEPTHS for s in _STAGES if d < 2 * max(k, 32)]),
        ways), fits)


def _attention(a: Attention, spec: ChipSpec) -> Space:
    cut = attention.tiles(a, spec)
    rule = {"rows": cut.rows, "keys": cut.keys, "warps": cut.warps, "stages": cut.stages,
            "descriptors": cut.descriptors, "parts": cut.parts}
    few = attention.few_rows(a) is not None
    assert isinstance(a.keys, int)
    tiles = [(cut.rows, n, 4) for n in _FEW_KEYS] if few else _ATTENTION
    parts = [n for n in _FEW_PARTS if n == 1 or 64 * n <= a.keys] if few else [1]
    described = attention.can_describe(a, spec) and not few
    size = (a.size + a.value_size) * a.dtype.itemsize

    def fits(choice: Choice) -> bool:
        if choice.get("groups"):
            held = gluon_attention.shared_bytes(_made(Tiles, choice), a.size)
            return held + gluon_attention.SPARE_BYTES <= spec.l1_bytes and bool(
                choice["descriptors"])
        held = choice["keys"] * choice["stages"] + choice["rows"]
        return held * size <= spec.l1_bytes

    ways = _alternatives("rows keys warps", tiles)
    if cut.groups:
        rule["groups"] = cut.groups
        ways = _alternatives("rows keys warps groups", [*_GLUON, *((*t, 0) for t in tiles)])
    return Space(rule, (
        ways, _alternatives("parts", [(n,) for n in parts]),
        _alternatives("stages", [(n,) for n in (1, 2, 3, 4)]),
        _alternatives("descriptors", [(False,), (True,)] if described else [(False,)])), fits)


def _pointwise(program: Program, written: Written) -> Space:
    total = num_elements(program.outputs[0].shape)
    assert isinstance(total, int)
    rule = {"block": _block(written), "warps": written.warps}
    return Space(rule, (_shared([n for n in _POINTWISE if n <= max(total, 512)]),), _any)


def _turned(program: Program, written: Written, spec: ChipSpec) -> Space:
    rows, block = written.constants["ROWS"], _block(written)
    assert isinstance(rows, int)
    size = max(t.dtype.itemsize for t in (*program.inputs, *program.outputs))
    tiles = [(r, b, r * b // (32 * a)) for r in (rows // 2, rows, 2 * rows)
             for b in (block // 2, block, 2 * block) for a in _TURNED_BY_A_THREAD]
    rule = {"rows": rows, "block": block, "warps": written.warps}

    def fits(choice: Choice) -> bool:  # half of a multiprocessor, which another turns meanwhile
        return bool(choice["rows"] * choice["block"] * size * 2 <= spec.l1_bytes)

    return Space(rule, (_alternatives("rows block warps", [
        t for t in tiles if min(t) and t[2] <= MAX_WARPS]),), fits)


def _rows(program: Program, written: Written) -> Space:
    whole = 1 << max((longest_row(program) or 1) - 1, 0).bit_length()
    rule = {"block": _block(written), "warps": written.warps}
    return Space(rule, (_shared([*(n for n in _LOOPED if n < whole), whole]),), _any)


def _tile(written: Written) -> Space:
    rows = written.constants["ROWS"]
    assert isinstance(rows, int)
    positions = _block(written)
    sides = [n for n in _SIDE_BY_SIDE if n * positions <= max(_MOST_IN_A_TILE, rows * positions)]
    rule = {"rows": rows, "warps": written.warps}
    return Space(rule, (_alternatives("rows", [(n,) for n in sides]),
                        _alternatives("warps", [(n,) for n in _FEW_WARPS])), _any)


def _any(choice: Choice) -> bool:
    return True


def _block(written: Written) -> int:
    return max((n for name, n in written.constants.items()
                if name.startswith("BLOCK") and isinstance(n, int)), default=1)


def _shared(blocks: Sequence[int]) -> tuple[Choice, ...]:
    """Blocks with the warps that share them."""
    return _alternatives("block warps", [
        (n, n // (32 * a)) for n in blocks if n <= ROW_BLOCK
        for a in _A_THREAD if 1 <= n // (32 * a) <= MAX_WARPS])


# ---------------------------------------------------------------- as kernels are told
def tiling(choice: Choice | None) -> Tiling | None:
    """The choice for a product."""
    return _made(Tiling, choice, "parts") if choice else None


def tiles(choice: Choice | None, a: Attention) -> Tiles | None:
    """The choice for attention."""
    few = attention.few_rows(a) is not None
    return _made(Tiles, {**choice, "packed": few and a.shared != 1}) if choice else None


def blocks(choice: Choice | None) -> Blocks:
    """The choice for pointwise programs and rows."""
    return _made(Blocks, choice or {})


def _made(kind: Any, choice: Choice, *without: str) -> Any:
    return kind(**{name: value for name, value in choice.items() if name not in without})
