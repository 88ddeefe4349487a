"""Attention on a GPU: which kernels there are for it, by rules with reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from terrazzo.base.shapes import num_elements
from terrazzo.chips.spec import ChipSpec
from terrazzo.codegen.gluon import attention as gluon
from terrazzo.codegen.triton.attention import (
    attention_kernel,
    joined_program,
    joining_kernel,
    parts_program,
)
from terrazzo.codegen.triton.attention_gradient import Gradients, keys_kernel, queries_kernel
from terrazzo.codegen.triton.attention_lines import Attention, Tiles, describable
from terrazzo.codegen.triton.dot_factors import HALVES
from terrazzo.codegen.triton.module import Written
from terrazzo.dtypes import float32
from terrazzo.expr.ir import Program
from terrazzo.index import Index, bounds, proves_eq

MOST_SIZE = 256  # of a key or a value: sums of a tile stay in registers
MOST_SIZE_F32 = 128  # of a gradient, which has two sums and factors in three parts
FEW_ROWS = 64  # up to here queries share a tile, and parts of the keys are attended to apart
LONG = 256  # queries and keys from which on tiles of Gluon's kernel are full enough
# By size, and whether causal; other attention is plain Triton's. Two groups of 64 queries leave
# each thread 240 registers: for a sum and two tiles of scores of size 128, and for the weights that
# are multiplied meanwhile. Of size 64 three groups fit; with a mask they do not, and spill.
_TWO_GROUPS = Tiles(64, 128, warps=4, stages=2, descriptors=True, groups=2)
GLUON_TILES = {(64, False): replace(_TWO_GROUPS, groups=3), (64, True): _TWO_GROUPS,
               (128, False): _TWO_GROUPS, (128, True): _TWO_GROUPS}
_PART_KEYS = 128  # that a part has at least
_PROGRAMS, _MOST_PARTS = 8, 32  # programs a multiprocessor that are wanted, parts that are joined


def has_kernel(operator: str, inputs: Sequence[Any]) -> bool:
    """Whether an operator of such inputs has a kernel; the rest is products and softmax."""
    if operator == "scaled_dot_product_attention":
        return _fits(*_operands(inputs))
    if operator == "attention_with_logsumexp":  # which is for the gradient
        return _has_gradient(*_operands(inputs))
    assert operator == "attention_gradients"
    g, q, k, v, _, _, *rest = inputs
    return g.dtype in (float32, *HALVES) and _has_gradient(*_operands([q, k, v, *rest]))


def _operands(inputs: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    q, k, v, *rest = inputs
    return q, k, v, rest[0] if rest else None


def _fits(q: Any, k: Any, v: Any, mask: Any) -> bool:
    sizes = [q.shape[-1], v.shape[-1]]
    empty = any(isinstance(n, int) and n == 0 for t in (q, k, v) for n in t.shape)
    return not empty and all(isinstance(n, int) and n <= MOST_SIZE for n in sizes) and all(
        t in (float32, *HALVES) for t in {x.dtype for x in (q, k, v)}) and (
            mask is None or mask.dtype.is_bool or mask.dtype in (float32, *HALVES))


def _has_gradient(q: Any, k: Any, v: Any, mask: Any) -> bool:
    most = MOST_SIZE if len(types := {x.dtype for x in (q, k, v)}) == 1 and (
        types <= set(HALVES)) else MOST_SIZE_F32
    return _fits(q, k, v, mask) and max(q.shape[-1], v.shape[-1]) <= most and _alike(q, k, v, mask)


def _alike(q: Any, k: Any, v: Any, mask: Any) -> bool:
    """Whether nothing is stretched but heads and the mask: gradients of the rest are sums."""
    stretched = () if mask is None else mask.shape
    if not len(k.shape) == len(v.shape) == len(q.shape) >= len(stretched):
        return False
    # From the axis before heads on; k and v have the same heads besides.
    pairs = [*zip(q.shape[:-3], k.shape), *zip(k.shape[:-2], v.shape)]
    shared = zip(reversed(stretched[:-2]), reversed(q.shape[:-2]))
    return all(proves_eq(n, m) for n, m in pairs) and all(
        proves_eq(n, 1) or proves_eq(n, m) for n, m in shared)


def kernels(program: Program, spec: ChipSpec, chosen: Tiles | None = None
            ) -> list[tuple[Program, list[Written]]]:
    """The programs that attention or its gradient becomes, each with kernels, the best first.

    How attention is cut may be `chosen`, instead of by rule.
    """
    if program.attrs["node"].op.name == "attention_gradients":
        gradients = Gradients.of(program)
        by_q, by_kv = gradients.programs(program)
        cut = gradient_tiles(gradients, spec)
        return [(by_q, _forms(queries_kernel, by_q, gradients, cut[0], spec)),
                (by_kv, _forms(keys_kernel, by_kv, gradients, cut[1], spec))]
    attention = Attention.of(program)
    cut_once = chosen or tiles(attention, spec)
    if cut_once.groups:
        plain = plain_tiles(attention, spec)  # for what is not aligned
        wide = _is_large(program)
        return [(program, [gluon.attention_kernel(program, attention, spec, cut_once, wide=wide),
                           *_forms(attention_kernel, program, attention, plain, spec)])]
    if cut_once.parts == 1:
        return [(program, _forms(attention_kernel, program, attention, cut_once, spec))]
    parts = parts_program(program, attention, cut_once)
    joined = joined_program(program, parts)
    return [(parts, _forms(attention_kernel, parts, attention, cut_once, spec)),
            (joined, _forms(joining_kernel, joined, attention, cut_once, spec))]


def _forms(make: Any, program: Program, what: Any, cut: Tiles, spec: ChipSpec) -> list[Written]:
    """The kernels of one program: with descriptors, for any memory, and for large sizes."""
    large = _is_large(program)

    def of(cut: Tiles, wide: bool) -> Written:
        made: Written = make(program, what, spec, cut, wide=wide)
        return made

    plain = replace(cut, descriptors=False)
    if program.dims:
        return [*([of(cut, False)] if cut.descriptors else []), of(plain, False),
                *([of(plain, True)] if large else [])]
    return [of(cut, large), *([of(plain, large)] if cut.descriptors else [])]


def _is_large(program: Program) -> bool:
    sizes = [bounds(num_elements(t.shape))[1] for t in (*program.inputs, *program.outputs)]
    return any(top is None or top >= 1 << 31 for top in sizes)


def tiles(attention: Attention, spec: ChipSpec) -> Tiles:
    """How attention is cut."""
    rows = few_rows(attention)
    if rows is not None:
        return _of_few_rows(attention, spec, rows)
    return gluon_tiles(attention, spec) or plain_tiles(attention, spec)


def gluon_tiles(attention: Attention, spec: ChipSpec) -> Tiles | None:
    """How attention is cut in Gluon, where there are enough queries and keys for it."""
    a = attention
    if not gluon.has_kernel(a, spec) or any(
            isinstance(n, int) and n < LONG for n in (a.queries, a.keys)):
        return None
    return GLUON_TILES.get((a.size, a.causal))


def plain_tiles(attention: Attention, spec: ChipSpec) -> Tiles:
    """How attention to many queries is cut in plain Triton."""
    largest = max(attention.size, attention.value_size)
    if attention.dtype is float32:
        if largest > 128:  # two stages of keys and values are more than there is of shared memory
            return Tiles(32, 32, warps=4, stages=1)
        return Tiles(64, 32 if largest > 64 else 64, warps=4, stages=2)
    descriptors = can_describe(attention, spec)
    # Two programs share a multiprocessor, so that one weighs while the other multiplies.
    if largest > 128:
        return Tiles(64, 64, warps=4, stages=2, descriptors=descriptors)
    if largest > 64:
        return Tiles(128, 64, warps=4, stages=2, descriptors=descriptors)
    return Tiles(128, 64, warps=4, stages=3, descriptors=descriptors) if (
        attention.causal) else Tiles(64, 128, warps=4, stages=2, descriptors=descriptors)


def can_describe(attention: Attention, spec: ChipSpec) -> bool:
    """Whether keys and values can be read through tensor descriptors."""
    return spec.has("tma") and describable(attention.k, attention.size) and describable(
        attention.v, attention.value_size)


def gradient_tiles(gradients: Gradients, spec: ChipSpec) -> tuple[Tiles, Tiles]:
    """How the gradient is cut: where programs own queries, and where they own keys.

    Registers decide: a thread has 255. Programs that own queries hold one sum and two tiles of
    scores: 64 queries and 4 warps, of which two programs share a multiprocessor, so that one weighs
    while the other multiplies. Those that own keys hold two sums, which at size 128 take half the
    registers: there one program has 128 keys and 8 warps, so that queries are read half as often.
    Scores have 64 columns where they can: with fewer, factors come more slowly than they are
    multiplied.
    """
    a = gradients.attention
    largest = max(a.size, a.value_size)
    if a.dtype is float32:  # three products each, whose factors take registers too
        if largest > 64:
            return Tiles(32, 32, warps=4, stages=1), Tiles(32, 32, warps=4, stages=1)
        return Tiles(64, 32, warps=4, stages=1), Tiles(32, 64, warps=8, stages=1)
    tma, rows = spec.has("tma"), can_describe(a, spec)
    # The descriptors of heads that share keys would be made anew in a loop.
    keys = tma and a.shared == 1 and describable(a.q, a.size) and describable(
        gradients.g, a.value_size)
    if largest > 128:
        return (Tiles(64, 32, warps=8, stages=2, descriptors=rows),
                Tiles(32, 64, warps=8, stages=1, descriptors=keys))
    queries = Tiles(64, 64, warps=4, stages=2, descriptors=rows)
    if largest > 64:
        return queries, Tiles(64, 128, warps=8, stages=2, descriptors=keys)
    return queries, Tiles(64, 64, warps=4, stages=2, descriptors=keys)


def few_rows(attention: Attention) -> int | None:
    """The rows of a tile for all heads that share keys, where there are few."""
    shared, queries = attention.shared, attention.queries
    if isinstance(shared, int) and isinstance(queries, int) and shared * queries <= FEW_ROWS:
        return shared * queries
    return None


def _of_few_rows(attention: Attention, spec: ChipSpec, rows: int) -> Tiles:
    """Keys and values are read once, by as many programs as keep memory busy."""
    high = max(16, 1 << (rows - 1).bit_length())
    largest = max(attention.size, attention.value_size)
    keys: Index = attention.keys
    members = num_elements([*attention.batch, attention.heads]) // attention.shared
    parts = 1
    if isinstance(members, int) and isinstance(keys, int):
        parts = max(1, min(_PROGRAMS * spec.cores // members, keys // _PART_KEYS, _MOST_PARTS))
    wide = 32 if attention.dtype is float32 or largest > 128 else 64
    return Tiles(high, wide, warps=4, stages=3, parts=parts, packed=attention.shared != 1)
