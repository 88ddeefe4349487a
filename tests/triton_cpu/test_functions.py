"""Functions within kernels: mapped over elements, combining them, called; and odd constants."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

maps = pytest.mark.skipif(not hasattr(tl, "map_elementwise"), reason="since Triton 3.5")


@triton.jit
def _compare(x, y):
    if x < y:
        return -1
    elif x == y:
        return 0
    else:
        return 1


@triton.jit
def _careful_quotient(x, y):
    """Most processors stop at a division by zero."""
    if y == 0:
        return x, 0
    return x // y, x % y


@triton.jit
def _collatz(x):
    steps = 0
    while x > 1:
        if x % 2 == 0:
            x = x // 2
        else:
            x = 3 * x + 1
        steps += 1
    return steps


@triton.jit
def _sorted_pair(a, b):
    return tl.minimum(a, b), tl.maximum(a, b)


@triton.jit
def _map(x, y, out, N: tl.constexpr, FUNCTION: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    if FUNCTION == "compare":
        tl.store(out + i, tl.map_elementwise(_compare, a, b))
    elif FUNCTION == "quotient":
        quotient, rest = tl.map_elementwise(_careful_quotient, a, b)
        tl.store(out + i, quotient * 1000 + rest)
    elif FUNCTION == "collatz":
        tl.store(out + i, tl.map_elementwise(_collatz, a))
    else:
        pairs = tl.reshape(a, (N // 8, 8))
        mapped = tl.map_elementwise(_sorted_pair, pairs, pack=2)[0]
        tl.store(out + i, tl.reshape(mapped, (N,)))


def _collatz_steps(x: int) -> int:
    steps = 0
    while x > 1:
        x = x // 2 if x % 2 == 0 else 3 * x + 1
        steps += 1
    return steps


@maps
@pytest.mark.parametrize("function", ["compare", "quotient", "collatz", "pairs"])
def test_a_function_of_elements(function: str) -> None:
    x, y = (torch.randint(0, 9, (64,), dtype=torch.int32) for _ in range(2))
    out = torch.empty_like(x)
    _map[(1,)](x, y, out, 64, function)
    safe = torch.where(y == 0, 1, y)
    expected = {
        "compare": torch.sign(x - y),
        "quotient": torch.where(y == 0, x * 1000, x // safe * 1000 + x % safe),
        "collatz": torch.tensor([_collatz_steps(int(n)) for n in x], dtype=torch.int32),
        "pairs": x.reshape(-1, 2).sort().values.flatten(),
    }[function]
    assert torch.equal(out, expected)


@maps
def test_branches_of_a_mapped_function_stay_vectors() -> None:
    x = torch.zeros(64, dtype=torch.int32)
    text = _map.warmup(x, x, x, 64, "compare", grid=(1,)).asm["loop"]
    assert "vector for" in text and not re.search(r"^ *if ", text, re.MULTILINE)


@triton.jit
def _farthest(a, b):
    """The one that is farther from zero, by branches."""
    if tl.abs(a) >= tl.abs(b):
        return a
    return b


@triton.jit
def _reduce_and_scan(x, best, running, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i)
    tl.store(best, tl.reduce(value, 0, _farthest))
    tl.store(running + i, tl.associative_scan(value, 0, _farthest))


def test_combining_functions_with_branches() -> None:
    x, best, running = torch.randn(64), torch.empty(1), torch.empty(64)
    _reduce_and_scan[(1,)](x, best, running, 64)
    expected = torch.stack([x[: n + 1][x[: n + 1].abs().argmax()] for n in range(64)])
    torch.testing.assert_close(running, expected, rtol=0, atol=0)
    torch.testing.assert_close(best, expected[-1:], rtol=0, atol=0)


@triton.jit(noinline=True)
def _first_good(x, i, limit):
    """Comes back from three places, once from within a loop's ruins."""
    if i > limit:
        return tl.zeros((8,), tl.float32), -1
    row = tl.load(x + i * 8 + tl.arange(0, 8))
    if i == limit:
        return row * 0 + 5, i
    return row * 2, i + 100


@triton.jit
def _caller(x, out, seen, limit):
    pid = tl.program_id(0)
    row, number = _first_good(x, pid, limit)
    tl.store(out + pid * 8 + tl.arange(0, 8), row + 1)
    tl.store(seen + pid, number)


def test_calls_that_return_early() -> None:
    x, out = torch.randn(4, 8), torch.empty(4, 8)
    seen = torch.empty(4, dtype=torch.int32)
    _caller[(4,)](x, out, seen, 2)
    expected = torch.cat([x[:2] * 2 + 1, torch.full((1, 8), 6.0), torch.ones(1, 8)])
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert seen.tolist() == [100, 101, 2, -1]


@triton.jit
def _maybe(x):
    never = False
    if never:
        return x


@triton.jit
def _uses_nothing(out):
    tl.store(out, _maybe(0))


def test_an_undefined_value_is_left_to_llvm() -> None:
    kernel = _uses_nothing.warmup(torch.empty(1, dtype=torch.int32), grid=(1,))
    left = "ub.poison" in kernel.asm["ttir"]  # Triton 3.9 removes such a store
    assert ("undefined" in kernel.asm["loop"]) == left
    assert ("poison" in kernel.asm["llir"]) == left


@triton.jit
def _loops(x, n, STAY: tl.constexpr):
    for i in tl.range(0, n, disable_licm=STAY):
        tl.store(x + i, i)


@pytest.mark.parametrize("stay", [False, True])
def test_hoisting_can_be_forbidden(stay: bool) -> None:
    x = torch.zeros(8, dtype=torch.int32)
    kernel = _loops[(1,)](x, 8, stay)
    assert ("llvm.licm.disable" in kernel.asm["llir"]) == stay
    assert x.tolist() == list(range(8))


def test_warps_come_in_powers_of_two() -> None:
    x = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(AssertionError, match="power of 2"):
        _loops.warmup(x, 8, False, grid=(1,), num_warps=3)


CONSTANTS = """
module {
  tt.func public @kernel(%out: !tt.ptr<f32> {tt.divisibility = 16 : i32}) {
    %values = arith.constant dense<[1.0, -2.5, 3.25, 1.0e+30]> : tensor<4xf32>
    %i = tt.make_range {end = 4 : i32, start = 0 : i32} : tensor<4xi32>
    %base = tt.splat %out : !tt.ptr<f32> -> tensor<4x!tt.ptr<f32>>
    %places = tt.addptr %base, %i : tensor<4x!tt.ptr<f32>>, tensor<4xi32>
    tt.store %places, %values : tensor<4x!tt.ptr<f32>>
    tt.return
  }
}
"""


def test_a_constant_tile_of_different_numbers(tmp_path: Path) -> None:
    path = tmp_path / "kernel.ttir"
    path.write_text(CONSTANTS)
    out = torch.zeros(4)
    triton.compile(str(path))[(1, 1, 1)](out)
    torch.testing.assert_close(out, torch.tensor([1.0, -2.5, 3.25, 1e30]), rtol=0, atol=0)


@triton.jit(noinline=True)
def _swap(a, b):
    i = tl.arange(0, 16)
    x = tl.load(a + i)
    y = tl.load(b + i)
    tl.store(a + i, y)
    tl.store(b + i, x)


@triton.jit
def _swap_often(a, b):
    _swap(a, b)
    _swap(a + 16, b + 16)


def test_a_function_that_is_called_twice() -> None:
    a, b = torch.randn(32), torch.randn(32)
    old = a.clone(), b.clone()
    _swap_often[(1,)](a, b)
    torch.testing.assert_close(a, old[1], rtol=0, atol=0)
    torch.testing.assert_close(b, old[0], rtol=0, atol=0)


@triton.jit
def _swap_after_branch(a, b, c, N: tl.constexpr):
    """What follows the branch is reached in two ways, for one of them returns."""
    i = tl.arange(0, N)
    if tl.load(c) > 0:
        tl.store(c, 7)
        if tl.load(c + 1) > 0:
            return
    x = tl.load(a + i)
    y = tl.load(b + i)
    tl.store(a + i, y)
    tl.store(b + i, x)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("second", [0, 1])
def test_code_that_is_reached_in_two_ways(first: int, second: int) -> None:
    a, b = torch.randn(16), torch.randn(16)
    old = a.clone(), b.clone()
    _swap_after_branch[(1,)](a, b, torch.tensor([first, second]), 16)
    stays = first and second
    torch.testing.assert_close(a, old[0] if stays else old[1], rtol=0, atol=0)
    torch.testing.assert_close(b, old[1] if stays else old[0], rtol=0, atol=0)


@triton.jit
def _swap_while(a, b, count, N: tl.constexpr):
    """The condition of a loop swaps two tensors each time that it is asked for."""
    i = tl.arange(0, N)
    turns = 0
    while _swapped(a, b, i) + tl.load(count) > turns:
        turns += 1
    tl.store(count + 1, turns)


@triton.jit
def _swapped(a, b, i):
    x = tl.load(a + i)
    y = tl.load(b + i)
    tl.store(a + i, y)
    tl.store(b + i, x)
    return 0


@pytest.mark.parametrize("turns", [0, 1, 4])
def test_a_condition_that_writes(turns: int) -> None:
    a, b, count = torch.randn(16), torch.randn(16), torch.tensor([turns, -1])
    old = a.clone(), b.clone()
    _swap_while[(1,)](a, b, count, 16)
    assert count[1] == turns
    odd = (turns + 1) % 2
    torch.testing.assert_close(a, old[odd], rtol=0, atol=0)
    torch.testing.assert_close(b, old[1 - odd], rtol=0, atol=0)
