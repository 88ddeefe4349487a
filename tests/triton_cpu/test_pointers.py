"""Pointers that lead into no tensor or into one of several."""

from __future__ import annotations

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402


@triton.jit
def _copy_from_number(address, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = address.to(tl.int64).to(tl.pointer_type(tl.float32))  # low ones are passed as int32
    tl.store(y + i, tl.load(x + i, i < n, other=-1.0))


def test_an_address_that_is_a_number() -> None:
    x, y = torch.randn(50), torch.empty(64)
    kernel = _copy_from_number[(1,)](x.data_ptr(), y, 50, 64)
    torch.testing.assert_close(y, torch.cat([x, -torch.ones(14)]), rtol=0, atol=0)
    assert "<16 x float>" in kernel.asm["llir"] or "<8 x float>" in kernel.asm["llir"]


@triton.jit
def _grouped(xs, ys, sizes, BLOCK: tl.constexpr):
    which = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    x = tl.load(xs + which).to(tl.pointer_type(tl.float32))
    y = tl.load(ys + which).to(tl.pointer_type(tl.float32))
    mask = i < tl.load(sizes + which)
    tl.store(y + i, tl.load(x + i, mask) * 2, mask)


def test_addresses_in_memory() -> None:
    sizes = [3, 0, 64, 17]
    xs = [torch.randn(n) for n in sizes]
    ys = [torch.zeros(n + 1) for n in sizes]
    _grouped[(4,)](torch.tensor([x.data_ptr() for x in xs]),
                   torch.tensor([y.data_ptr() for y in ys]),
                   torch.tensor(sizes, dtype=torch.int32), 64)
    for x, y in zip(xs, ys):
        torch.testing.assert_close(y, torch.cat([x * 2, torch.zeros(1)]), rtol=0, atol=0)


@triton.jit
def _each_its_own(addresses, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    pointers = tl.load(addresses + i).to(tl.pointer_type(tl.int16))
    tl.store(y + i, tl.load(pointers) + 1)
    tl.store(pointers, tl.full((BLOCK,), 7, tl.int16))


def test_a_tile_of_addresses() -> None:
    x = torch.arange(100, 200, dtype=torch.int16)
    places = torch.randperm(100)[:32]
    y = torch.empty(32, dtype=torch.int16)
    _each_its_own[(1,)](x.data_ptr() + 2 * places, y, 32)
    assert torch.equal(y, places.to(torch.int16) + 101)
    assert set((x == 7).nonzero().flatten().tolist()) == set(places.tolist())


@triton.jit
def _select(a, b, which, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    pointers = tl.where(tl.load(which + i) > 0, a + i, b + i)
    x = tl.load(pointers)
    tl.store(pointers, x + 1)
    tl.store(y + i, x)


def test_a_choice_for_each_element() -> None:
    a, b = torch.randn(32), torch.randn(32)
    which, y = torch.randint(0, 2, (32,)), torch.empty(32)
    old_a, old_b = a.clone(), b.clone()
    _select[(1,)](a, b, which, y, 32)
    torch.testing.assert_close(y, torch.where(which > 0, old_a, old_b), rtol=0, atol=0)
    torch.testing.assert_close(a, old_a + (which > 0), rtol=0, atol=0)
    torch.testing.assert_close(b, old_b + (which == 0), rtol=0, atol=0)


@triton.jit
def _branch(a, b, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    if tl.program_id(0) % 2 == 0:
        source = a + i
    else:
        source = b + BLOCK - 1 - i
    tl.store(y + tl.program_id(0) * BLOCK + i, tl.load(source))


def test_a_choice_for_each_program() -> None:
    a, b, y = torch.randn(16), torch.randn(16), torch.empty(32)
    _branch[(2,)](a, b, y, 16)
    torch.testing.assert_close(y, torch.cat([a, b.flip(0)]), rtol=0, atol=0)


@triton.jit
def _take_turns(a, b, y, turns, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    here, there = a + i, b + i
    for _ in range(turns):
        tl.store(there, tl.load(here) + 1)
        here, there = there, here
    tl.store(y + i, tl.load(here))


@pytest.mark.parametrize("turns", [0, 1, 2, 7])
def test_pointers_that_change_places_in_a_loop(turns: int) -> None:
    a, b, y = torch.randn(16), torch.randn(16), torch.empty(16)
    expected = a.clone()
    for _ in range(turns):
        expected = expected + 1
    _take_turns[(1,)](a, b, y, turns, 16)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)


@triton.jit
def _walk_a_list(head, total):
    """Each node is the address of the next one, then a number."""
    node = tl.load(head)
    found = tl.load(head) * 0
    while node != 0:
        pointer = node.to(tl.pointer_type(tl.int64))
        found += tl.load(pointer + 1)
        node = tl.load(pointer)
    tl.store(total, found)


def test_a_linked_list() -> None:
    nodes = torch.zeros(5, 2, dtype=torch.int64)
    nodes[:, 1] = torch.tensor([1, 10, 100, 1000, 10000])
    order = [3, 0, 4, 1]
    for here, there in pairwise(order):
        nodes[here, 0] = nodes[there].data_ptr()
    total = torch.zeros(1, dtype=torch.int64)
    _walk_a_list[(1,)](torch.tensor([nodes[3].data_ptr()]), total)
    assert total.item() == 11011


@triton.jit
def _loop_while(a, b, y, n):
    """A pointer carried by a while loop that goes from one tensor to another."""
    pointer, i, total = a, 0, 0.0
    while i < n:
        total += tl.load(pointer)
        pointer = b + i
        i += 1
    tl.store(y, total)


def test_a_while_loop_changes_tensors() -> None:
    a, b, y = torch.randn(1), torch.randn(8), torch.zeros(1)
    _loop_while[(1,)](a, b, y, 6)
    torch.testing.assert_close(y, a + b[:5].sum())


@triton.jit
def _addresses(x, y, BLOCK: tl.constexpr):
    tl.store(y + tl.arange(0, BLOCK), (x + tl.arange(0, BLOCK) * 3).to(tl.int64))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float64])
def test_pointers_as_numbers(dtype: torch.dtype) -> None:
    x, y = torch.zeros(48, dtype=dtype), torch.zeros(16, dtype=torch.int64)
    _addresses[(1,)](x, y, 16)
    assert torch.equal(y, x.data_ptr() + torch.arange(16) * 3 * dtype.itemsize)


@triton.jit
def _one_of(a, b, first):
    if first:
        return a
    return b + 1


@triton.jit(noinline=True)
def _one_of_apart(a, b, first):
    if first:
        return a
    return b + 1


@triton.jit
def _returned(a, b, y, first, APART: tl.constexpr):
    pointer = _one_of_apart(a, b, first) if APART else _one_of(a, b, first)
    tl.store(y + tl.arange(0, 8), tl.load(pointer + tl.arange(0, 8)))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_pointers_that_functions_return(first: int, apart: bool) -> None:
    a, b, y = torch.randn(9), torch.randn(9), torch.zeros(8)
    _returned[(1,)](a, b, y, first + 5 * first, apart)
    torch.testing.assert_close(y, a[:8] if first else b[1:], rtol=0, atol=0)


@triton.jit
def _shift_through(address, x, BLOCK: tl.constexpr):
    """Writes what it reads, moved by one, through a pointer of unknown origin."""
    i = tl.arange(0, BLOCK)
    pointer = address.to(tl.int64).to(tl.pointer_type(tl.float32))
    tl.store(pointer + i, tl.load(x + i))


def test_memory_of_unknown_origin_may_overlap() -> None:
    x = torch.randn(65)
    expected = torch.cat([x[:1], x[:-1]])
    _shift_through[(1,)](x.data_ptr() + 4, x, 64)
    torch.testing.assert_close(x, expected, rtol=0, atol=0)


@triton.jit
def _shift_as_bits(x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    bits = x.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(bits + i + 1, tl.load(x + i).to(tl.int32, bitcast=True))


def test_two_types_of_one_tensor_overlap() -> None:
    x = torch.randn(65)
    expected = torch.cat([x[:1], x[:-1]])
    _shift_as_bits[(1,)](x, 64)
    torch.testing.assert_close(x, expected, rtol=0, atol=0)


@triton.jit
def _round_trip(a, b, which, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    one = tl.load(a + i).to(tl.pointer_type(tl.int32))
    two = tl.load(b + i).to(tl.pointer_type(tl.int32)) + 1
    chosen = tl.where(tl.load(which + i) > 0, one, two)
    tl.store(y + i, chosen.to(tl.pointer_type(tl.int16), bitcast=True).to(tl.int64))


def test_any_number_survives_being_a_pointer() -> None:
    a, b = (torch.randint(-2**62, 2**62, (32,)) for _ in range(2))
    which, y = torch.randint(0, 2, (32,)), torch.empty(32, dtype=torch.int64)
    _round_trip[(1,)](a, b, which, y, 32)
    assert torch.equal(y, torch.where(which > 0, a, b + 4))


@triton.jit
def _both(a, b, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    pointers = tl.cat(a + i, b + (BLOCK - 1 - i), can_reorder=True)
    x = tl.load(pointers)
    tl.store(pointers, x + 1)
    tl.store(y + tl.arange(0, 2 * BLOCK), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_tiles_of_pointers_side_by_side(dtype: torch.dtype) -> None:
    a, b = (torch.randint(0, 100, (16,)).to(dtype) for _ in range(2))
    old_a, old_b, y = a.clone(), b.clone(), torch.empty(32, dtype=dtype)
    _both[(1,)](a, b, y, 16)
    assert torch.equal(y, torch.cat([old_a, old_b.flip(0)]))
    assert torch.equal(a, old_a + 1) and torch.equal(b, old_b + 1)


@triton.jit
def _both_in_turns(a, b, y, turns, BLOCK: tl.constexpr):
    i = tl.arange(0, 2 * BLOCK)
    pointers = y + i
    for _ in range(turns):  # from one tensor to two others
        tl.store(pointers, i.to(tl.float32))
        half = tl.arange(0, BLOCK)
        pointers = tl.cat(a + half, b + half, can_reorder=True)


def test_a_loop_goes_on_with_them() -> None:
    a, b, y = torch.zeros(16), torch.zeros(16), torch.zeros(32)
    _both_in_turns[(1,)](a, b, y, 2, 16)
    assert torch.equal(y, torch.arange(32.0)) and torch.equal(torch.cat([a, b]), y)


@triton.jit
def _permuted(x, order, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    pointers = tl.gather(x + i, tl.load(order + i), 0)
    tl.store(y + i, tl.load(pointers))


def test_pointers_picked_from_a_tile() -> None:
    x, order, y = torch.randn(32), torch.randperm(32).int(), torch.empty(32)
    _permuted[(1,)](x, order, y, 32)
    assert torch.equal(y, x[order.long()])
