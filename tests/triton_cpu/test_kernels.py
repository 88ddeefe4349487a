"""Whole kernels as people write them: the tutorials, control flow, reductions and scans."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [pytest.mark.triton, pytest.mark.torch]


@triton.jit
def softmax(out, inp, stride, rows, columns, BLOCK: tl.constexpr):
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        c = tl.arange(0, BLOCK)
        x = tl.load(inp + row * stride + c, mask=c < columns, other=-float("inf"))
        e = tl.exp(x - tl.max(x, axis=0))
        tl.store(out + row * stride + c, e / tl.sum(e, axis=0), mask=c < columns)


@pytest.mark.parametrize("columns", [1, 7, 64, 781, 1024])
def test_softmax(columns: int) -> None:
    x = torch.randn(37, columns)
    out = torch.empty_like(x)
    softmax[(5,)](out, x, x.stride(0), 37, columns, BLOCK=triton.next_power_of_2(columns))
    torch.testing.assert_close(out, torch.softmax(x, 1))


def test_softmax_in_place() -> None:
    x = torch.randn(9, 300)
    expected = torch.softmax(x, 1)
    softmax[(9,)](x, x, x.stride(0), 9, 300, BLOCK=512)
    torch.testing.assert_close(x, expected)


@triton.jit
def layer_norm(x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x_ptr += row * stride
    y_ptr += row * stride
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        c = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + c, mask=c < n, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / n
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + c, mask=c < n, other=0.0).to(tl.float32)
        x = tl.where(c < n, x - mean, 0.0)
        squares += x * x
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / n + eps)
    tl.store(mean_ptr + row, mean)
    for start in range(0, n, BLOCK):
        c = start + tl.arange(0, BLOCK)
        w = tl.load(w_ptr + c, mask=c < n)
        b = tl.load(b_ptr + c, mask=c < n)
        x = tl.load(x_ptr + c, mask=c < n, other=0.0).to(tl.float32)
        tl.store(y_ptr + c, (x - mean) * rstd * w + b, mask=c < n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_layer_norm(dtype: torch.dtype) -> None:
    x, w, b = torch.randn(11, 1000).to(dtype), torch.randn(1000).to(dtype), torch.randn(1000)
    out, mean = torch.empty_like(x), torch.empty(11)
    layer_norm[(11,)](x, out, w, b, mean, x.stride(0), 1000, 1e-5, BLOCK=256)
    expected = torch.nn.functional.layer_norm(x.float(), (1000,), w.float(), b, 1e-5)
    torch.testing.assert_close(out, expected.to(dtype))
    torch.testing.assert_close(mean, x.float().mean(1))


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
           BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    pid = tl.program_id(axis=0)
    along_m, along_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    in_group = GROUP * along_n
    first = pid // in_group * GROUP
    size = min(along_m - first, GROUP)
    pid_m = first + (pid % in_group) % size
    pid_n = (pid % in_group) // size
    m = (pid_m * BM + tl.arange(0, BM)) % M
    n = (pid_n * BN + tl.arange(0, BN)) % N
    k = tl.arange(0, BK)
    a_ptrs = a_ptr + (m[:, None] * stride_am + k[None, :] * stride_ak)
    b_ptrs = b_ptr + (k[:, None] * stride_bk + n[None, :] * stride_bn)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, tl.cdiv(K, BK)):
        a = tl.load(a_ptrs, mask=k[None, :] < K - start * BK, other=0.0)
        b = tl.load(b_ptrs, mask=k[:, None] < K - start * BK, other=0.0)
        total = tl.dot(a, b, total)
        a_ptrs += BK * stride_ak
        b_ptrs += BK * stride_bk
    m = pid_m * BM + tl.arange(0, BM)
    n = pid_n * BN + tl.arange(0, BN)
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(c_ptr + stride_cm * m[:, None] + n[None, :], total.to(c_ptr.dtype.element_ty),
             mask=inside)


@pytest.mark.parametrize("sizes", [(64, 64, 64), (200, 150, 77), (33, 1, 16), (1, 40, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_matmul(sizes: tuple[int, int, int], dtype: torch.dtype, transposed: bool) -> None:
    m, n, k = sizes
    a = torch.randn(m, k).to(dtype)
    b = torch.randn(n, k).to(dtype).T if transposed else torch.randn(k, n).to(dtype)
    c = torch.empty(m, n, dtype=dtype)
    grid = (triton.cdiv(m, 32) * triton.cdiv(n, 64),)
    matmul[grid](a, b, c, m, n, k, *a.stride(), *b.stride(), c.stride(0), BM=32, BN=64, BK=32,
                 GROUP=4)
    expected = (a.double() @ b.double()).to(dtype)
    torch.testing.assert_close(c, expected, rtol=2e-2 if dtype is torch.bfloat16 else 2e-3,
                               atol=1e-4)


@triton.jit
def attention(q_ptr, k_ptr, v_ptr, o_ptr, n, scale, D: tl.constexpr, BM: tl.constexpr,
              BN: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + rows[:, None] * D + d[None, :], mask=rows[:, None] < n, other=0.0)
    best = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * BM, n), BN):
        columns = start + tl.arange(0, BN)
        there = columns[:, None] < n
        k = tl.load(k_ptr + columns[:, None] * D + d[None, :], mask=there, other=0.0)
        v = tl.load(v_ptr + columns[:, None] * D + d[None, :], mask=there, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where((rows[:, None] >= columns[None, :]) & (columns[None, :] < n), s, -1e30)
        new = tl.maximum(best, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        alpha = tl.exp(best - new)
        total = total * alpha + tl.sum(p, 1)
        acc = tl.dot(p, v, acc * alpha[:, None])
        best = new
    tl.store(o_ptr + rows[:, None] * D + d[None, :], acc / total[:, None],
             mask=rows[:, None] < n)


@pytest.mark.parametrize("length", [64, 100])
def test_flash_attention(length: int) -> None:
    q, k, v = (torch.randn(length, 32) for _ in range(3))
    out = torch.empty_like(q)
    attention[(triton.cdiv(length, 32),)](q, k, v, out, length, 32**-0.5, D=32, BM=32, BN=16)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[None, None], k[None, None], v[None, None], is_causal=True)[0, 0]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@triton.jit
def row_reductions(x_ptr, sum_ptr, max_ptr, arg_ptr, xor_ptr, M: tl.constexpr, N: tl.constexpr,
                   AXIS: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + i[:, None] * N + j[None, :])
    R: tl.constexpr = N if AXIS == 0 else M
    r = tl.arange(0, R)
    tl.store(sum_ptr + r, tl.sum(x, AXIS))
    tl.store(max_ptr + r, tl.max(x, AXIS))
    tl.store(arg_ptr + r, tl.argmin(x, AXIS))
    tl.store(xor_ptr + r, tl.xor_sum(x.to(tl.int32), AXIS))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "int32", "float16", "int8"])
@pytest.mark.parametrize("shape", [(4, 64), (64, 4), (1, 32), (32, 1)])
def test_reductions(axis: int, dtype: str, shape: tuple[int, int]) -> None:
    kind = getattr(torch, dtype)
    x = torch.randint(-20, 20, shape).to(kind)
    count = shape[1 - axis]
    total = torch.empty(count, dtype=torch.int32 if dtype == "int8" else kind)
    best, arg = torch.empty(count, dtype=kind), torch.empty(count, dtype=torch.int32)
    bits = torch.empty(count, dtype=torch.int32)
    row_reductions[(1,)](x, total, best, arg, bits, *shape, AXIS=axis)
    torch.testing.assert_close(total, x.sum(axis, dtype=total.dtype))
    assert torch.equal(best, x.amax(axis))
    picked = x.gather(axis, arg.long().unsqueeze(axis)).squeeze(axis)
    assert torch.equal(picked, x.amin(axis))
    expected = torch.zeros(count, dtype=torch.int32)
    for line in x.int().unbind(axis):
        expected ^= line
    assert torch.equal(bits, expected)


@triton.jit
def combine_pairs(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def scans(x_ptr, y_ptr, sum_ptr, last_ptr, N: tl.constexpr, REVERSE: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(sum_ptr + i, tl.cumsum(y, 0, reverse=REVERSE))
    _, state = tl.associative_scan((x, y), 0, combine_pairs)
    tl.store(last_ptr + i, state)


@pytest.mark.parametrize("reverse", [False, True])
def test_scans(reverse: bool) -> None:
    x, y = torch.rand(128), torch.randn(128)
    sums, states = torch.empty(128), torch.empty(128)
    scans[(1,)](x, y, sums, states, N=128, REVERSE=reverse)
    expected = y.flip(0).cumsum(0).flip(0) if reverse else y.cumsum(0)
    torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-5)
    state = torch.tensor(0.0)
    for k in range(128):
        state = x[k] * state + y[k]
        torch.testing.assert_close(states[k], state, rtol=1e-4, atol=1e-5)


@triton.jit
def views(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + i[:, None] * N + j[None, :])
    t = tl.trans(x) + tl.reshape(x, (N, M))
    left, right = tl.split(tl.reshape(t, (N, M // 2, 2)))
    t = tl.reshape(tl.join(right, left), (N, M))
    tl.store(out_ptr + j[:, None] * M + i[None, :], t)


def test_views() -> None:
    x = torch.randn(8, 16)
    out = torch.empty(16, 8)
    views[(1,)](x, out, M=8, N=16)
    t = (x.T + x.reshape(16, 8)).reshape(16, 4, 2)
    assert torch.equal(out, t.flip(-1).reshape(16, 8))


@triton.jit
def control(x_ptr, out_ptr, n, limit):
    pid = tl.program_id(0)
    if pid >= n:
        return
    value = tl.load(x_ptr + pid)
    steps = 0
    while value > limit:
        if value % 2 == 0:
            value = value // 2
        else:
            value = 3 * value + 1
        steps += 1
    total = 0
    for k in range(steps):
        total += k if k % 2 == 0 else -k
    tl.store(out_ptr + pid * 2, steps)
    tl.store(out_ptr + pid * 2 + 1, total)


def test_control_flow() -> None:
    x = torch.tensor([1, 2, 3, 7, 27], dtype=torch.int32)
    out = torch.full((6, 2), -1, dtype=torch.int32)
    control[(6,)](x, out, 5, 1)

    def expected(value: int) -> list[int]:
        steps = 0
        while value > 1:
            value = value // 2 if value % 2 == 0 else 3 * value + 1
            steps += 1
        return [steps, sum(k if k % 2 == 0 else -k for k in range(steps))]

    assert out.tolist() == [*(expected(int(v)) for v in x), [-1, -1]]


@triton.jit
def gather_rows(table_ptr, index_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.load(index_ptr + tl.program_id(0))
    c = tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.program_id(0) * width + c,
             tl.load(table_ptr + row * width + c, mask=c < width), mask=c < width)


def test_gathered_rows_are_vector_copies() -> None:
    table, index = torch.randn(50, 60), torch.randint(0, 50, (20,))
    out = torch.empty(20, 60)
    kernel = gather_rows[(20,)](table, index, out, 60, BLOCK=64)
    assert torch.equal(out, table[index])
    assert "llvm.masked.gather" not in kernel.asm["llir"]


@triton.jit
def shift_in_place(x_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(x_ptr + i + 1, x)


def test_a_tile_is_read_before_it_is_overwritten() -> None:
    x = torch.arange(257.0)
    shift_in_place[(1,)](x, N=256)
    assert torch.equal(x, torch.cat([torch.zeros(1), torch.arange(256.0)]))


@triton.jit
def swap(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(x_ptr + i, y)
    tl.store(y_ptr + i, x)


def test_swap() -> None:
    x, y = torch.randn(256), torch.randn(256)
    a, b = x.clone(), y.clone()
    swap[(1,)](a, b, N=256)
    assert torch.equal(a, y) and torch.equal(b, x)


@triton.jit
def sort_rows(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.sort(tl.load(x_ptr + i)))


def test_sort() -> None:
    x = torch.randn(64)
    out = torch.empty(64)
    sort_rows[(1,)](x, out, N=64)
    assert torch.equal(out, x.sort()[0])


@triton.jit
def small_dot(x_ptr, y_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(x_ptr + m[:, None] * K + k[None, :])
    b = tl.load(y_ptr + k[:, None] * N + n[None, :])
    tl.store(out_ptr + m[:, None] * N + n[None, :],
             tl.dot(a, b, out_dtype=out_ptr.dtype.element_ty))


@pytest.mark.parametrize(("source", "target"), [
    ("int8", "int32"), ("float16", "float16"), ("float16", "float32"), ("bfloat16", "float32"),
    ("float64", "float64"), ("float8_e5m2", "float32"), ("float8_e4m3fn", "float32")])
@pytest.mark.parametrize("sizes", [(16, 16, 16), (2, 64, 32), (128, 4, 1)])
def test_dot_types(source: str, target: str, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    a, b = (torch.randint(-5, 5, s).to(getattr(torch, source)) for s in ((m, k), (k, n)))
    out = torch.empty(m, n, dtype=getattr(torch, target))
    small_dot[(1,)](a, b, out, m, n, k)
    assert torch.equal(out.double(), a.double() @ b.double())  # small integers: no rounding


@triton.jit
def through_descriptors(x_ptr, out_ptr, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    at = [tl.program_id(0) * BM, tl.program_id(1) * BN]
    x = tl.make_tensor_descriptor(x_ptr, [rows, columns], [columns, 1], [BM, BN])
    out = tl.make_tensor_descriptor(out_ptr, [rows, columns], [columns, 1], [BM, BN])
    out.store(at, x.load(at) * 2)


def test_tensor_descriptors() -> None:
    x, out = torch.randn(30, 40), torch.zeros(30, 40)
    through_descriptors[(2, 3)](x, out, 30, 40, BM=16, BN=16)
    assert torch.equal(out, x * 2)


@triton.jit
def random_numbers(out_ptr, seed, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.randint(seed, i))


def test_random_numbers_are_philox() -> None:
    out = torch.empty(64, dtype=torch.int32)
    random_numbers[(1,)](out, 0x1234567890, N=64)

    def philox(counter: int, seed: int) -> int:
        c, k0, k1 = [counter, 0, 0, 0], seed & 0xFFFFFFFF, seed >> 32
        for _ in range(10):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(b >> 32) ^ c[1] ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k1, a & 0xFFFFFFFF]
            k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
        return c[0]

    assert [v & 0xFFFFFFFF for v in out.tolist()] == [philox(i, 0x1234567890) for i in range(64)]


# ---------------------------------------------------------------- tiles first needed in a branch
@triton.jit
def _gathered_in_branches(x, out, flag, turns, N: tl.constexpr):
    i = tl.arange(0, N)
    tile = tl.load(x + i) * 2 + i
    back = N - 1 - i
    if tl.load(flag) > 0:
        tl.store(out + i, tl.gather(tile, back, 0))
    else:
        tl.store(out + i, tl.gather(tile, back, 0) + 1)
    for _ in range(turns):  # perhaps never
        tl.store(out + N + i, tl.gather(tile - 1, back, 0))
    tl.store(out + 2 * N + i, tl.gather(tile - 1, back, 0))


@pytest.mark.parametrize("flag", [0, 1])
@pytest.mark.parametrize("turns", [0, 2])
def test_a_tile_is_in_memory_whichever_branch_needs_it(flag: int, turns: int) -> None:
    x, out = torch.rand(64), torch.zeros(3, 64)
    _gathered_in_branches[(1,)](x, out, torch.tensor([flag]), turns, 64)
    back = (x * 2 + torch.arange(64)).flip(0)
    assert torch.equal(out[0], back + (1 - flag))
    assert torch.equal(out[1], back - 1 if turns else torch.zeros(64))
    assert torch.equal(out[2], back - 1)


@triton.jit
def _swap(x, ids, STRIDE: tl.constexpr, N: tl.constexpr, DOWN: tl.constexpr):
    """Neighbours in order, written with sums over pairs as sorting networks are."""
    right = (tl.arange(0, 2) == 1)[None, :, None].to(tl.int32)
    pairs = tl.reshape(x, [N // (2 * STRIDE), 2, STRIDE])
    low, high = tl.sum(pairs * (1 - right), 1), tl.sum(pairs * right, 1)
    of = tl.reshape(ids, [N // (2 * STRIDE), 2, STRIDE])
    low_id, high_id = tl.sum(of * (1 - right), 1), tl.sum(of * right, 1)
    change = (low < high) if DOWN else (low > high)
    first, second = tl.where(change, high, low), tl.where(change, low, high)
    first_id, second_id = tl.where(change, high_id, low_id), tl.where(change, low_id, high_id)
    is_right = tl.broadcast_to(right == 1, [N // (2 * STRIDE), 2, STRIDE])
    x = tl.where(is_right, second[:, None, :], first[:, None, :])
    ids = tl.where(is_right, second_id[:, None, :], first_id[:, None, :])
    return tl.reshape(x, [N]), tl.reshape(ids, [N])


@triton.jit
def _sorted_in_a_branch(x, out, last, N: tl.constexpr):
    i = tl.arange(0, N)
    best, ids = tl.zeros([N], tl.float32), tl.zeros([N], tl.int32)
    for begin in range(0, last + 1, N):
        place = begin + i
        new = tl.load(x + place)
        new_ids = tl.where(place <= last, place, -1)
        if begin != 0:
            new, new_ids = _swap(new, new_ids, 1, N, True)
            best, ids = _swap(tl.maximum(new, best), new_ids, 1, N, False)
        else:
            best, ids = _swap(new, new_ids, 1, N, False)
    tl.store(out + i, ids)


@pytest.mark.parametrize("last", [3, 30])
def test_pairs_of_a_tile_that_two_branches_sort(last: int) -> None:
    x, out = torch.rand(64), torch.zeros(16, dtype=torch.int32)
    _sorted_in_a_branch[(1,)](x, out, last, 16)
    ids = torch.where(torch.arange(last // 16 * 16, last // 16 * 16 + 16) <= last,
                      torch.arange(last // 16 * 16, last // 16 * 16 + 16), -1)
    # Each pair holds its own two numbers, in one order or the other.
    assert torch.equal(out.view(8, 2).sort(1)[0], ids.int().view(8, 2).sort(1)[0])
