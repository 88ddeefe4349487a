"""Kernels of hundreds of statements compile, in time that grows with their size, and run."""

from __future__ import annotations

import sys

import pytest

from terrazzo.errors import CompileError
from terrazzo.knobs import knobs
from terrazzo.triton_cpu.deep import with_room

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [pytest.mark.triton, pytest.mark.torch]


@triton.jit
def copies_kernel(x, out, n, TURNS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for k in tl.static_range(0, TURNS):
        place = at + k * BLOCK
        value = tl.load(x + place, mask=place < n)
        tl.store(out + place, value + k, mask=place < n)


@triton.jit
def running_sums_kernel(x, out, TURNS: tl.constexpr):
    total = 0.0
    for k in tl.static_range(0, TURNS):
        if tl.load(x + k) > 0.5:
            total += tl.load(x + k)
        tl.store(out + k, total)


def test_many_loops_are_several_functions() -> None:
    turns, block = 100, 64
    x, n = torch.rand(turns * block), turns * block - 5
    out = torch.zeros_like(x)
    kernel = copies_kernel[(1,)](x, out, n, TURNS=turns, BLOCK=block)
    expected = x + torch.arange(turns).repeat_interleave(block)
    assert torch.equal(out[:n], expected[:n])
    assert not out[n:].any()
    assert "copies_kernel.part" in kernel.asm["llir"]


def test_hundreds_of_numbers_and_branches() -> None:
    x, out = torch.rand(120), torch.zeros(120)
    running_sums_kernel[(1,)](x, out, TURNS=120)
    expected = torch.where(x > 0.5, x, 0).double().cumsum(0)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_many_sanitized_accesses() -> None:
    x, out = torch.rand(20 * 16), torch.zeros(20 * 16)
    with knobs.override(sanitize=True):
        copies_kernel[(1,)](x, out, x.numel(), TURNS=20, BLOCK=16)
    assert torch.equal(out, x + torch.arange(20).repeat_interleave(16))


def _depth(left: int) -> int:
    return 0 if left == 0 else 1 + _depth(left - 1)


def _forever(left: int) -> int:
    return _forever(left + 1)


def _wrong() -> int:
    _depth(20_000)
    raise ValueError("no")


def test_deep_recursion_has_room() -> None:
    limit = sys.getrecursionlimit()
    assert with_room(_depth, 20_000) == 20_000
    with pytest.raises(CompileError, match=r"too large to compile\n  try: loop with tl\.range"):
        with_room(_forever, 0)
    with pytest.raises(ValueError, match="no"):
        with_room(_wrong)
    assert sys.getrecursionlimit() == limit


def test_deep_recursion_has_room_where_torch_looks_at_every_call() -> None:
    found: list[int] = []

    @torch.compile(backend="eager")
    def calling(x: object) -> object:
        torch._dynamo.graph_break()
        found.append(with_room(_depth, 20_000))
        return x + 1  # type: ignore[operator]

    assert torch.equal(calling(torch.ones(2)), torch.full((2,), 2.0))
    assert found == [20_000]
    assert torch.equal(calling(torch.ones(2)), torch.full((2,), 2.0))  # and it is active again
