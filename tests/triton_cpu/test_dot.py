"""Products of tiles: where factors lie, edges of matrices, and microscaling formats."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, a_row, a_column, b_row, b_column,
           BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WRAP: tl.constexpr,
           SUM: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    steps = tl.arange(0, BK)
    from_rows = rows % M if WRAP else rows
    from_columns = columns % N if WRAP else columns
    total = tl.zeros((BM, BN), SUM)
    for k in range(0, K, BK):
        left = a_ptr + from_rows[:, None] * a_row + (k + steps)[None, :] * a_column
        right = b_ptr + (k + steps)[:, None] * b_row + from_columns[None, :] * b_column
        if WRAP:
            a = tl.load(left, mask=(k + steps)[None, :] < K, other=0.0)
            b = tl.load(right, mask=(k + steps)[:, None] < K, other=0.0)
        else:
            a = tl.load(left, mask=(rows[:, None] < M) & ((k + steps)[None, :] < K), other=0.0)
            b = tl.load(right, mask=(columns[None, :] < N) & ((k + steps)[:, None] < K), other=0.0)
        total = tl.dot(a, b, total, out_dtype=SUM)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total,
             mask=(rows[:, None] < M) & (columns[None, :] < N))


def _matrix(rows: int, columns: int, dtype: torch.dtype, turned: bool) -> torch.Tensor:
    shape = (columns, rows) if turned else (rows, columns)
    made = (torch.randn(shape).to(dtype) if dtype.is_floating_point
            else torch.randint(-128, 128, shape, dtype=dtype))
    return made.T if turned else made


ORDERS = [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.parametrize("sizes, tile, turned, dtype, wrap", [
    *[((70, 50, 33), (32, 64, 16), turned, dtype, wrap) for turned in ORDERS
      for dtype, wrap in [("float32", False), ("float32", True), ("bfloat16", True)]],
    ((128, 128, 64), (64, 64, 32), (False, True), "float32", True),
    ((5, 3, 7), (16, 128, 16), (False, False), "float32", True),
    ((96, 260, 80), (32, 128, 64), (False, False), "float32", False),
    ((70, 50, 40), (32, 64, 16), (True, False), "float8_e5m2", True),
    ((70, 50, 40), (32, 64, 16), (False, True), "float8_e4m3fn", True),
    ((128, 128, 64), (64, 64, 32), (False, True), "float8_e5m2", False)])
def test_matmul(sizes: tuple[int, int, int], tile: tuple[int, int, int],
                turned: tuple[bool, bool], dtype: str, wrap: bool) -> None:
    torch.manual_seed(0)
    m, n, k = sizes
    a = _matrix(m, k, getattr(torch, dtype), turned[0])
    b = _matrix(k, n, getattr(torch, dtype), turned[1])
    c = torch.full((m, n), float("nan"))
    grid = (triton.cdiv(m, tile[0]), triton.cdiv(n, tile[1]))
    matmul[grid](a, b, c, m, n, k, *a.stride(), *b.stride(), *tile, wrap, tl.float32)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sizes, tile, turned", [
    *[((70, 50, 40), (32, 64, 16), turned) for turned in ORDERS],
    ((64, 64, 64), (32, 64, 32), (False, True)),
    ((16, 16, 2048), (16, 16, 2048), (False, False))])  # sums past 2^24
def test_product_of_bytes(sizes: tuple[int, int, int], tile: tuple[int, int, int],
                          turned: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    m, n, k = sizes
    a, b = _matrix(m, k, torch.int8, turned[0]), _matrix(k, n, torch.int8, turned[1])
    a[1], b[:, 1] = -128, -128
    a[2], b[:, 2] = 127, 127
    c = torch.empty(m, n, dtype=torch.int32)
    grid = (triton.cdiv(m, tile[0]), triton.cdiv(n, tile[1]))
    matmul[grid](a, b, c, m, n, k, *a.stride(), *b.stride(), *tile, False, tl.int32)
    assert torch.equal(c.long(), a.long() @ b.long())


def test_nan_stays_in_its_row_and_column() -> None:
    a, b = torch.randn(32, 32), torch.randn(32, 32)
    a[3, 5], b[7, 9] = float("nan"), float("inf")
    c = torch.empty(32, 32)
    matmul[(1, 1)](a, b, c, 32, 32, 32, 32, 1, 32, 1, 32, 32, 32, False, tl.float32)
    torch.testing.assert_close(c, a @ b, equal_nan=True, rtol=1e-4, atol=1e-5)


@triton.jit
def chain(x_ptr, w_ptr, out_ptr, turns, N: tl.constexpr, KIND: tl.constexpr):
    i = tl.arange(0, N)
    places = i[:, None] * N + i[None, :]
    x = tl.load(x_ptr + places)
    w = tl.load(w_ptr + places)
    for _ in range(turns):
        if KIND == "left":
            x = tl.dot(x, w)
        elif KIND == "right":
            x = tl.dot(w, x)
        elif KIND == "both":
            x = tl.dot(x, w, x)
        else:
            x = tl.dot(w, w, tl.trans(x))
    tl.store(out_ptr + places, x)


@pytest.mark.parametrize("kind", ["left", "right", "both", "turned"])
def test_a_product_may_read_what_it_replaces(kind: str) -> None:
    n = 32
    x, w = torch.randn(n, n), torch.randn(n, n) / n
    out = torch.empty(n, n)
    chain[(1,)](x, w, out, 3, n, kind)
    expected, wide = x.double(), w.double()
    for _ in range(3):
        expected = {"left": lambda y: y @ wide, "right": lambda y: wide @ y,
                    "both": lambda y: y @ wide + y,
                    "turned": lambda y: wide @ wide + y.T}[kind](expected)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@triton.jit
def batched(a_ptr, b_ptr, c_ptr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
            K: tl.constexpr):
    n, m = tl.arange(0, B)[:, None, None], tl.arange(0, M)
    k, j = tl.arange(0, K), tl.arange(0, N)
    a = tl.load(a_ptr + n * (M * K) + m[None, :, None] * K + k[None, None, :])
    b = tl.load(b_ptr + n * (N * K) + j[None, None, :] * K + k[None, :, None])
    c = tl.dot(a, b)
    tl.store(c_ptr + n * (M * N) + m[None, :, None] * N + j[None, None, :], c)


def test_a_batch_with_a_transposed_factor() -> None:
    a, b = torch.randn(4, 16, 32), torch.randn(4, 64, 32)
    c = torch.empty(4, 16, 64)
    batched[(1,)](a, b, c, 4, 16, 64, 32)
    torch.testing.assert_close(c.double(), a.double() @ b.double().mT, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- microscaling formats
@triton.jit
def scaled(a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, A: tl.constexpr, B: tl.constexpr,
           M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
           A_PACKED: tl.constexpr, B_PACKED: tl.constexpr, A_ALONG_K: tl.constexpr,
           B_ALONG_K: tl.constexpr, FAST: tl.constexpr, B_TURNED: tl.constexpr):
    AM: tl.constexpr = M // 2 if A_PACKED and not A_ALONG_K else M
    AK: tl.constexpr = K // 2 if A_PACKED and A_ALONG_K else K
    BK: tl.constexpr = K // 2 if B_PACKED and B_ALONG_K else K
    BN: tl.constexpr = N // 2 if B_PACKED and not B_ALONG_K else N
    a = tl.load(a_ptr + tl.arange(0, AM)[:, None] * AK + tl.arange(0, AK)[None, :])
    if B_TURNED:
        b = tl.load(b_ptr + tl.arange(0, BN)[:, None] * BK + tl.arange(0, BK)[None, :]).T
    else:
        b = tl.load(b_ptr + tl.arange(0, BK)[:, None] * BN + tl.arange(0, BN)[None, :])
    groups = tl.arange(0, K // GROUP)[None, :]
    if a_scale_ptr is not None:
        a_scale = tl.load(a_scale_ptr + tl.arange(0, M)[:, None] * (K // GROUP) + groups)
    else:
        a_scale = None
    if b_scale_ptr is not None:
        b_scale = tl.load(b_scale_ptr + tl.arange(0, N)[:, None] * (K // GROUP) + groups)
    else:
        b_scale = None
    c = tl.dot_scaled(a, a_scale, A, b, b_scale, B, fast_math=FAST, lhs_k_pack=A_ALONG_K,
                      rhs_k_pack=B_ALONG_K)
    tl.store(c_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], c)


def _encoded(shape: tuple[int, int], kind: str, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in a format, and its numbers; e2m1 is packed along a dimension."""
    if kind == "e2m1":
        codes = torch.randint(0, 16, shape)
        first, second = codes.unflatten(dim, (-1, 2)).unbind(dim % 2 + 1)
        return (first | second << 4).to(torch.uint8), E2M1[codes].double()
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16,
             "fp16": torch.float16}[kind]
    numbers = torch.randn(shape).to(dtype)
    return numbers.view(torch.uint8) if kind[0] == "e" else numbers, numbers.double()


def _run(a_kind: str, b_kind: str, scales: str, a_along_k: bool = True, b_along_k: bool = True,
         change: Any = None, fast: bool = False, b_turned: bool = False
         ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The product of a kernel, that of float64, and the size of what was added up."""
    torch.manual_seed(1)
    m, n, k, group = 32, 64, 64, 32
    a, a_numbers = _encoded((m, k), a_kind, 1 if a_along_k else 0)
    b, b_numbers = _encoded((k, n), b_kind, 0 if b_along_k else 1)
    factors = [torch.randint(117, 137, (size, k // group), dtype=torch.uint8) for size in (m, n)]
    if change is not None:
        change(*factors)
    powers = [torch.where(f == 255, torch.nan, torch.exp2(f.double() - 127)).repeat_interleave(
        group, 1) for f in factors]
    if "a" in scales:
        a_numbers = a_numbers * powers[0]
    if "b" in scales:
        b_numbers = b_numbers * powers[1].T
    c = torch.empty(m, n)
    scaled[(1,)](a, factors[0] if "a" in scales else None, b.T.contiguous() if b_turned else b,
                 factors[1] if "b" in scales else None, c, a_kind, b_kind, m, n, k, group,
                 a_kind == "e2m1", b_kind == "e2m1", a_along_k, b_along_k, fast, b_turned)
    return c.double(), a_numbers @ b_numbers, a_numbers.abs() @ b_numbers.abs()


@pytest.mark.parametrize("kinds, scales", [
    (("e2m1", "e2m1"), "ab"), (("e2m1", "bf16"), "a"), (("e4m3", "e5m2"), "ab"),
    (("e5m2", "e2m1"), "b"), (("fp16", "e4m3"), "b"), (("e4m3", "e2m1"), "")])
def test_scaled_product(kinds: tuple[str, str], scales: str) -> None:
    got, expected, _ = _run(*kinds, scales)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("along_k", [(True, False), (False, True), (False, False)])
def test_halves_of_bytes_along_rows_and_columns(along_k: tuple[bool, bool]) -> None:
    for b_turned in (False, True):
        got, expected, _ = _run("e2m1", "e2m1", "ab", *along_k, b_turned=b_turned)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-3)


# Ranges of scales: factors, products or sums are denormal, or nearly infinite.
@pytest.mark.parametrize("a_range, b_range", [
    ((0, 134), (0, 134)), ((0, 4), (0, 4)), ((0, 2), (225, 237)), ((220, 237), (0, 20)),
    ((0, 237), (0, 120)), ((0, 30), (100, 150)), ((170, 180), (170, 180))])
@pytest.mark.parametrize("kinds, scales", [
    (("e5m2", "e2m1"), "ab"), (("e4m3", "e4m3"), "ab"), (("fp16", "e4m3"), "b"),
    (("e2m1", "bf16"), "a")])
def test_scales_of_all_sizes(kinds: tuple[str, str], scales: str, a_range: tuple[int, int],
                             b_range: tuple[int, int]) -> None:
    def change(a: torch.Tensor, b: torch.Tensor) -> None:
        a.random_(*a_range)
        b.random_(*b_range)

    got, expected, size = _run(*kinds, scales, change=change)
    assert (size < torch.finfo(torch.float32).max).all()
    least = 64 * 2.0 ** -149  # of 64 roundings to denormals
    assert ((got - expected).abs() <= 1e-6 * size + least).all()


def test_scales_at_the_edges() -> None:
    def change(a: torch.Tensor, b: torch.Tensor) -> None:
        a[0, 0], a[1] = 255, 0  # nan, and the smallest power

    got, expected, _ = _run("e4m3", "e4m3", "a", change=change)
    assert got[0].isnan().all()
    torch.testing.assert_close(got[1:], expected[1:], rtol=1e-5, atol=1e-4)
    # Products with 2^-127 are below what is normal in float32, and not lost.
    assert got[1].abs().max() > 0
    torch.testing.assert_close(got[1], expected[1], rtol=1e-3, atol=0)
    fast, *_ = _run("e4m3", "e4m3", "a", change=change, fast=True)
    torch.testing.assert_close(fast[1:], got[1:], rtol=0, atol=0)
