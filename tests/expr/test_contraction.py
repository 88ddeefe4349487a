"""Roles of axes: what an operator says of them holds in the kernel, whatever names they have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from terrazzo.base.scalar import Axis, Reduce, Scalar, rewrite, substitute_indices, walk
from terrazzo.base.shapes import dim
from terrazzo.chips.cpu import templates
from terrazzo.chips.cpu.description import host
from terrazzo.dtypes import as_dtype
from terrazzo.expr.contraction import match_contraction
from terrazzo.expr.ir import Program, Tensor
from terrazzo.expr.limits import FusionLimits
from terrazzo.expr.reductions import rename_axes
from terrazzo.expr.structure import structure
from terrazzo.graph import fusion
from terrazzo.graph.ir import TensorType
from terrazzo.graph.passes import canonicalize
from terrazzo.graph.trace import trace
from terrazzo.index import Index, Var
from terrazzo.knobs import knobs
from terrazzo.ops.activation import relu
from terrazzo.ops.contract import matmul
from terrazzo.ops.conv import conv, conv_transpose
from terrazzo.ops.quant import (
    conv_integer,
    dequantize_linear,
    matmul_integer,
    qlinear_conv,
    quantize_linear,
)
from terrazzo.ops.shape import permute_dims

N = dim("n")
BYTES = np.arange(-36, 36, dtype=np.int8).reshape(8, 1, 3, 3)


def _dequantised(x: Any, w: Any) -> Any:
    """A convolution of floats that are bytes: it becomes one of bytes."""
    scale = np.float32(0.1)
    return quantize_linear(conv(dequantize_linear(x, scale, np.uint8(4)),
                                dequantize_linear(w, scale, np.int8(0)), padding=1), scale,
                           np.uint8(9))


@dataclass(frozen=True)
class Case:
    """A program with one contraction: sizes of its axes by role."""

    function: Callable[..., Any]
    inputs: Sequence[tuple[Sequence[Any], str]]
    batch: Sequence[Index]
    positions: Sequence[Index]
    outputs: Index
    taps: Sequence[int | None]
    channel: int | None
    groups: int = 1


CASES = {
    "plain": Case(lambda x, w: conv(x, w), [((2, 4, 9, 8), "float32"), ((6, 4, 3, 2), "float32")],
                  [2], [7, 7], 6, [3, 2], 4),
    "epilogue": Case(lambda x, w, b: relu(conv(x, w, b, padding=1)),
                     [((2, 4, 9, 8), "float32"), ((6, 4, 3, 1), "float32"),
                      ((6,), "float32")], [2], [9, 10], 6, [3, None], 4),
    "one place": Case(lambda x, w: relu(conv(x, w) * 2), [
        ((2, 4, 9, 3), "float32"), ((6, 4, 3, 3), "float32")], [2], [7, 1], 6, [3, 3], 4),
    "one image": Case(lambda x, w: relu(conv(x, w)), [
        ((1, 4, 3, 3), "float32"), ((6, 4, 3, 3), "float32")], [1], [1, 1], 6, [3, 3], 4),
    "groups": Case(lambda x, w: conv(x, w, groups=2, strides=2), [
        ((2, 4, 9, 8), "float32"), ((6, 2, 3, 3), "float32")], [2], [4, 3], 6, [3, 3], 2, 2),
    "apart": Case(lambda x, w: conv(x, w, groups=4), [
        ((2, 4, 9, 8), "float32"), ((4, 1, 3, 3), "float32")], [2], [7, 6], 4, [3, 3], None, 4),
    "columns first": Case(lambda x, w: conv(permute_dims(x, axes=(0, 1, 3, 2)), w), [
        ((2, 4, 9, 8), "float32"), ((6, 4, 3, 3), "float32")], [2], [6, 7], 6, [3, 3], 4),
    "line": Case(lambda x, w: conv(x, w, dilation=2), [
        ((2, 4, 9), "float32"), ((6, 4, 3), "float32")], [2], [5], 6, [3], 4),
    "volume": Case(lambda x, w: conv(x, w), [
        ((2, 4, 5, 6, 7), "float32"), ((6, 4, 1, 2, 3), "float32")], [2], [5, 5, 5], 6,
        [None, 2, 3], 4),
    "transposed": Case(lambda x, w: conv_transpose(x, w, padding=2), [
        ((2, 4, 9, 8), "float32"), ((4, 6, 3, 3), "float32")], [2], [7, 6], 6, [3, 3], 4),
    "symbolic": Case(lambda x, w: relu(conv(x, w)), [
        ((N, 4, 9, 8), "float32"), ((6, 4, 3, 3), "float32")], [N], [7, 6], 6, [3, 3], 4),
    "bytes": Case(lambda x, w: conv_integer(permute_dims(x, axes=(0, 3, 1, 2)), w, np.uint8(3)), [
        ((2, 9, 8, 4), "uint8"), ((6, 4, 3, 3), "int8")], [2], [7, 6], 6, [3, 3], 4),
    "bytes apart": Case(lambda x: qlinear_conv(
        permute_dims(x, axes=(0, 3, 1, 2)), np.float32(0.1), np.uint8(3), BYTES, np.float32(0.1),
        np.int8(0), np.float32(0.1), np.uint8(7), groups=8), [((2, 9, 8, 8), "uint8")],
        [2], [7, 6], 8, [3, 3], None, 8),
    "rewritten to bytes": Case(_dequantised, [
        ((2, 4, 9, 8), "uint8"), ((6, 4, 3, 3), "int8")], [2], [9, 8], 6, [3, 3], 4),
    "product": Case(lambda x, w: relu(matmul(x, w)), [
        ((2, 5, 7), "float32"), ((2, 7, 3), "float32")], [2, 5], [], 3, [], 7),
    "product of bytes": Case(lambda x, w: matmul_integer(x, w), [
        ((2, 5, 7), "uint8"), ((7, 3), "int8")], [2, 5], [], 3, [], 7),
}


def contraction(case: Case) -> tuple[Program, frozenset[Tensor]]:
    types = [TensorType(tuple(shape), as_dtype(dtype)) for shape, dtype in case.inputs]
    graph, _ = trace(case.function, types)
    fused = fusion.fuse(canonicalize(graph)[0], FusionLimits())
    (group,) = [g for g in fused.groups if g.program.kind == "contraction"]
    constants = frozenset(t for t, v in zip(group.program.inputs, group.inputs, strict=True)
                          if fused.root(v) in fused.constants)
    return group.program, constants


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def test_roles_are_those_of_the_operator(case: Case) -> None:
    found = match_contraction(contraction(case)[0])
    assert found is not None

    def sizes(axes: Sequence[Axis | None]) -> list[Index | None]:
        return [None if a is None else a.extent for a in axes]

    assert sizes(found.batch) == case.batch
    assert sizes(found.positions) == case.positions
    assert sizes([found.outputs]) == [case.outputs]
    assert sizes(found.taps) == case.taps
    assert sizes([found.channel]) == [case.channel]
    assert found.groups == case.groups


def renamed(program: Program) -> Program:
    """The same program, its variables called in such a way that names say nothing."""
    (stage,) = program.stages
    assert stage.body is not None
    kept = {a.var: Var(f"c{d}", a.var.lo, a.var.hi) for d, a in enumerate(stage.axes)}

    def visit(node: Scalar) -> Scalar | None:
        if not isinstance(node, Reduce):
            return None
        return rename_axes(node, {a.var: Var(f"q{d}", a.var.lo, a.var.hi)
                                  for d, a in enumerate(node.axes)})

    body = rewrite(substitute_indices(stage.body, kept), visit)
    fresh = replace(stage, body=body, origin="", axes=tuple(
        Axis(kept[a.var], a.lo, a.hi) for a in stage.axes))
    return replace(program, stages=(fresh,), outputs=(fresh,))


@pytest.mark.parametrize("bits", [256, 512])
def test_names_and_texts_do_not_count(case: Case, bits: int) -> None:
    program, constants = contraction(case)
    with knobs.override(vector_bits=min(bits, host().vector_bits)):
        ours = templates.lower(program, host(), constants)
        other = templates.lower(renamed(program), host(), constants)
    assert ours is not None and other is not None
    assert str(replace(other, origin=ours.origin)) == str(ours)
    assert other.packed == ours.packed


def test_roles_count_in_the_structure(case: Case) -> None:
    program, _ = contraction(case)
    (stage,) = program.stages
    assert stage.body is not None
    body = rewrite(stage.body, lambda n: replace(n, contraction=None) if isinstance(
        n, Reduce) else None)
    plain = replace(stage, body=body)
    assert all(n.contraction is None for n in walk(body) if isinstance(n, Reduce))
    assert match_contraction(replace(program, stages=(plain,), outputs=(plain,))) is None
    assert structure(replace(program, stages=(plain,), outputs=(plain,))) != structure(program)
