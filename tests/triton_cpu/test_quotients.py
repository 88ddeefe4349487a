"""Addresses that take a number apart into rows and columns, as generated kernels have them."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [pytest.mark.triton, pytest.mark.torch]


@triton.jit
def turned(x, out, n, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """A tensor of (n / A / B / C, C, B, A) with its middle dimensions exchanged."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = (i // A) % B
    column = (i // (A * B)) % C
    value = tl.load(x + i % A + A * column + A * C * row + A * B * C * (i // (A * B * C)), i < n)
    tl.store(out + i, value * 2, i < n)


@triton.jit
def scattered(x, out, n, A: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + (i % A) * B + i // A, tl.load(x + i, i < n), i < n)


@triton.jit
def behind(x, out, n, FIRST: tl.constexpr, A: tl.constexpr, BLOCK: tl.constexpr):
    """What lies behind a place; the remainders of what lies before it are negative."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = i - FIRST
    value = tl.load(x + j % A + A * ((j // A) % 3), (i < n) & (i >= FIRST), other=-1.0)
    tl.store(out + i, value, i < n)


@triton.jit
def of_negatives(out, A: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK) - BLOCK // 2
    tl.store(out + BLOCK // 2 + i, (i % A) * 1000 + i // A)


@triton.jit
def parts(x, y, z, out, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr):
    """Three tensors of rows of 32, one after the other in one launch; every other row is left out.

    What a program does tells that its place in a tensor is not negative.
    """
    program = tl.program_id(0)
    if program < FIRST:
        i = program * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + program * BLOCK + tl.arange(0, BLOCK), tl.load(x + i // 32 * 64 + i % 32))
    elif program < FIRST + SECOND:
        i = (program - FIRST) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + program * BLOCK + tl.arange(0, BLOCK), tl.load(y + i // 32 * 64 + i % 32))
    else:
        i = (program - FIRST - SECOND) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + program * BLOCK + tl.arange(0, BLOCK), tl.load(z + i // 32 * 64 + i % 32))


@triton.jit
def ended(x, out, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    if program < FIRST:
        return
    i = (program - FIRST) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i // 32 * 64 + i % 32))


@triton.jit
def of_either(x, out, chosen, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Branches that say nothing of what is divided, or that it may be negative."""
    program = tl.program_id(0)
    i = (program - FIRST) * BLOCK + tl.arange(0, BLOCK)
    place = program * BLOCK + tl.arange(0, BLOCK)
    if tl.load(chosen + program) > 0:
        tl.store(out + place, i // 32 * 1000 + i % 32)
    elif (program >= 1) & (program < FIRST):
        tl.store(out + place, i // 16 * 1000 + i % 16)
    elif program < FIRST + 1:
        tl.store(out + place, i // 64 * 1000 + i % 64)


def loops_of(kernel: object) -> str:
    (kernels, *_), = kernel.device_caches.values()
    return str(list(kernels.values())[-1].asm["loop"])


@pytest.mark.parametrize(("a", "b", "c", "block"), [
    (32, 4, 8, 1024), (32, 4, 8, 64), (16, 3, 5, 256), (64, 6, 2, 128), (7, 4, 8, 256),
    (33, 2, 3, 512), (1, 32, 8, 1024), (128, 1, 4, 64), (96, 2, 2, 1024)])
def test_dimensions_exchanged(a: int, b: int, c: int, block: int) -> None:
    x = torch.arange(a * b * c * 5.0)
    out = torch.zeros_like(x)
    turned[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), a, b, c, BLOCK=block)
    expected = 2 * x.view(5, b, c, a).transpose(1, 2).flatten()
    assert torch.equal(out, expected)


def test_loops_are_over_rows() -> None:
    x = torch.arange(32 * 4 * 8.0)
    out = torch.zeros_like(x)
    turned[(1,)](x, out, x.numel(), 32, 4, 8, BLOCK=1024)
    (address,) = set(re.findall(r"= x\[(.*?)\] \*", loops_of(turned)))
    assert "rest" in address and not re.search(r"rest\w* (//|%)", address) and "fmod" not in address


@pytest.mark.parametrize(("a", "block"), [(32, 256), (48, 256), (5, 64), (64, 64)])
def test_scattered(a: int, block: int) -> None:
    x = torch.arange(a * 20.0)
    out = torch.zeros_like(x)
    scattered[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), a, 20, BLOCK=block)
    assert torch.equal(out, x.view(20, a).T.flatten())


@pytest.mark.parametrize(("first", "a", "block"), [
    (256, 32, 1024), (64, 32, 64), (100, 32, 512), (3, 7, 128), (128, 128, 128)])
def test_what_a_mask_tells(first: int, a: int, block: int) -> None:
    x, out = torch.arange(3.0 * a), torch.zeros(900)
    behind[(triton.cdiv(900, block),)](x, out, 900, first, a, BLOCK=block)
    expected = torch.cat([-torch.ones(first), x.repeat(900)[:900 - first]])
    assert torch.equal(out, expected)


@pytest.mark.parametrize("a", [3, 16, 32])
def test_negative_numbers_are_divided_towards_zero(a: int) -> None:
    out = torch.zeros(256, dtype=torch.int32)
    of_negatives[(1,)](out, a, BLOCK=256)
    i = torch.arange(256) - 128
    quotient = torch.div(i, a, rounding_mode="trunc")
    assert torch.equal(out, ((i - quotient * a) * 1000 + quotient).int())


@pytest.mark.parametrize("block", [64, 256])
def test_what_a_branch_tells(block: int) -> None:
    counts = (2, 3, 4)
    given = [torch.randn(n * block // 32, 64) for n in counts]
    out = torch.zeros(sum(counts) * block)
    parts[(sum(counts),)](*given, out, *counts[:2], BLOCK=block)
    assert torch.equal(out, torch.cat([x[:, :32].flatten() for x in given]))
    read = re.findall(r"= [xyz]\[(.*?)\]", loops_of(parts))
    assert len(read) == 3 and not re.search("fmod|rest\\w* (//|%)", "".join(read))


def test_what_an_early_end_tells() -> None:
    x, out = torch.randn(32, 64), torch.zeros(1024)
    ended[(3 + 4,)](x, out, 3, BLOCK=256)
    assert torch.equal(out, x[:, :32].flatten())
    (address,) = set(re.findall(r"= x\[(.*?)\]", loops_of(ended)))
    assert "fmod" not in address and "//" not in address


def test_branches_that_tell_nothing() -> None:
    first, block = 3, 64
    chosen = torch.tensor([1, 0, 0, 0, 1], dtype=torch.int32)
    out = torch.zeros(5 * block, dtype=torch.int32)
    of_either[(5,)](out, out, chosen, first, BLOCK=block)
    for program, row in enumerate((32, 16, 16, 64, 32)):
        i = (program - first) * block + torch.arange(block)
        quotient = torch.div(i, row, rounding_mode="trunc")
        expected = (quotient * 1000 + i - quotient * row).int()
        assert torch.equal(out[program * block:][:block], expected)
