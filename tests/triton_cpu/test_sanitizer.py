"""The sanitizer: each kind of fault is found where it is, and sound kernels stay clean."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator

import pytest

from terrazzo.errors import KernelFault
from terrazzo.knobs import knobs

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [pytest.mark.triton, pytest.mark.torch]


@pytest.fixture(autouse=True)
def sanitizing(cpu_backend: None) -> Iterator[None]:
    """The sanitizer is on; torch is as it was afterwards."""
    from terrazzo.triton_cpu.launch import shadows

    with pytest.MonkeyPatch.context() as patch, knobs.override(sanitize=True):
        for name in shadows._MAKERS:
            patch.setattr(torch, name, getattr(torch, name))
        for name in (*shadows._METHODS, *shadows._EXPORTS):
            patch.setattr(torch.Tensor, name, getattr(torch.Tensor, name))
        patch.setattr(shadows, "_watching", False)
        shadows.watch()
        yield


def findings(launch) -> list[str]:
    """What the sanitizer says about a launch, without the folders of files."""
    with pytest.raises(KernelFault) as caught:
        launch()
    return [line.rpartition("/")[2] if "/" in line.partition(": ")[0] else line
            for line in str(caught.value).splitlines()]


def line(kernel, mark: str) -> str:
    """The line of a kernel that carries a mark, as findings begin."""
    lines, first = inspect.getsourcelines(kernel.fn)
    return f"test_sanitizer.py:{first + next(n for n, x in enumerate(lines) if mark in x)}: "


# ---------------------------------------------------------------- faults
@triton.jit
def unmasked(inp, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(inp + i)  # too far
    tl.store(out + i, x + 1, mask=i < n)


def test_load_out_of_bounds() -> None:
    x, out = torch.randn(1000), torch.zeros(1000)
    assert findings(lambda: unmasked[(4,)](x, out, 1000, BLOCK=256)) == [
        line(unmasked, "# too far") + "out-of-bounds load in `unmasked`, program (3, 0, 0), "
        "lane 232: reads `inp`[1000], which has 1000 elements. Missing mask? "
        "(23 more like this at this line)"]
    assert torch.equal(out, x + 1)
    unmasked[(4,)](torch.randn(1024), out, 1000, BLOCK=256)


@triton.jit
def shifted(inp, out, shift, M: tl.constexpr, N: tl.constexpr):
    rows = tl.arange(0, M)[:, None]
    columns = tl.arange(0, N)[None, :]
    x = tl.load(inp + rows * N + columns, mask=(rows < 3) & (columns < N), other=2.0)
    tl.store(out + rows * N + columns - shift, x)  # may miss


def test_store_out_of_bounds_in_two_dimensions() -> None:
    x = torch.zeros(3, 8)
    whole = torch.zeros(6, 8)
    found = findings(lambda: shifted[(1,)](x, whole[:4], 2, M=4, N=8))
    assert found == [
        line(shifted, "# may miss") + "out-of-bounds store in `shifted`, program (0, 0, 0), "
        "lane (0, 0): writes `out`[-2], which has 48 elements. Missing mask? "
        "(1 more like this at this line)"]
    shifted[(1,)](x, whole[1:5], 2, M=4, N=8)  # other rows of the storage are no fault
    assert whole[4].tolist() == [2] * 6 + [0] * 2


@triton.jit
def counted(out, at, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(out + tl.load(at + i), 1)  # counts


def test_atomic_out_of_bounds() -> None:
    out = torch.zeros(4, dtype=torch.int32)
    at = torch.tensor([0, 1, 4, 1 << 40, -1, 0, 1, 3])
    found = findings(lambda: counted[(2,)](out, at, BLOCK=8))
    assert found == [
        line(counted, "# counts") + "out-of-bounds atomic in `counted`, program (0, 0, 0), lane 2: "
        "updates `out`[4], which has 4 elements. Missing mask? (5 more like this at this line)"]
    assert out.tolist() == [4, 4, 0, 2]


@triton.jit
def copy(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i))  # copies


@triton.jit
def read_as_words(x, y, skip, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    words = (x + skip + 4 * i).to(tl.pointer_type(tl.int32))
    tl.store(y + i, tl.load(words))  # reads


def test_misaligned() -> None:
    odd = torch.frombuffer(bytearray(65), dtype=torch.float32, count=16, offset=1)
    assert findings(lambda: copy[(1,)](odd, torch.zeros(16), BLOCK=16))[0].startswith(
        line(copy, "# copies") + "misaligned load in `copy`, program (0, 0, 0), lane 0: "
        "reads `x`[0], whose address is no multiple of 4 bytes.")
    x, y = torch.arange(64, dtype=torch.int8), torch.zeros(8, dtype=torch.int32)
    read_as_words[(1,)](x, y, 8, BLOCK=8)
    assert y.tolist() == x.view(torch.int32)[2:10].tolist()
    found = findings(lambda: read_as_words[(1,)](x, y, 6, BLOCK=8))
    assert found[0].startswith(
        line(read_as_words, "# reads") + "misaligned load in `read_as_words`, program (0, 0, 0), "
        "lane 0: reads 4 bytes at `x`[6], whose")


@pytest.mark.parametrize("make", [
    lambda: torch.empty(64), lambda: torch.empty(8, 8).view(64),
    lambda: torch.zeros(1).new_empty(64), lambda: torch.empty_like(torch.ones(64)),
    lambda: torch.empty_strided((64,), (1,)), lambda: torch.nn.Parameter(torch.empty(64)),
])
def test_memory_that_was_never_written(make) -> None:
    x, y = make(), torch.empty(64)
    found = findings(lambda: copy[(1,)](x, y, BLOCK=64))
    assert found == [
        line(copy, "# copies") + "load of uninitialised memory in `copy`, program (0, 0, 0), "
        "lane 0: reads `x`[0], which comes from torch.empty and has not been written yet. "
        "(63 more like this at this line)"]


def test_memory_that_kernels_or_torch_have_written() -> None:
    x, y = torch.empty(64), torch.zeros(64)
    copy[(1,)](y, x, BLOCK=32)
    copy[(1,)](x, y, BLOCK=32)
    assert "lane 32: reads `x`[32]" in findings(lambda: copy[(1,)](x, y, BLOCK=64))[0]
    with torch.no_grad():
        torch.add(x, 1, out=x)
    copy[(1,)](x, y, BLOCK=64)
    for write in (lambda t: t.numpy().fill(1), lambda t: t.data.fill_(1), lambda t: t.zero_(),
                  lambda t: t[:1].normal_()):
        x = torch.empty(64)
        write(x)
        copy[(1,)](x, y, BLOCK=64)
        assert torch.equal(x.view(torch.int32), y.view(torch.int32))


@triton.jit
def divided(x, by, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    k = tl.load(by + i)
    at = i // k  # divides
    rest = tl.where(k > 0, i % k, 0)  # never by zero
    tl.store(y + i, tl.load(x + at + rest, mask=i < n))


def test_division_by_zero() -> None:
    x, y = torch.zeros(128), torch.zeros(64)
    by = torch.ones(64, dtype=torch.int32)
    by[40:50] = 0
    divided[(1,)](x, by, y, 40, BLOCK=64)
    assert findings(lambda: divided[(1,)](x, by, y, 45, BLOCK=64)) == [
        line(divided, "# divides") + "integer division by zero in an index in `divided`, "
        "program (0, 0, 0), lane 40 (4 more like this at this line)"]


@triton.jit
def all_write(out, same: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0) + tl.program_id(1)
    i = tl.arange(0, BLOCK)
    tl.store(out + i, 7.0 if same else pid + 1.0, mask=i < 5)  # writes


@pytest.mark.parametrize("same", [False, True])
def test_two_programs_write_one_element(same: bool) -> None:
    out = torch.zeros(16)
    with knobs.override(threads=1):
        found = findings(lambda: all_write[(1, 2)](out, same, BLOCK=16))
    value = "the same" if same else "another"
    assert found == [
        line(all_write, "# writes") + "two programs write one element in `all_write`, program "
        f"(0, 1, 0), lane 0: writes `out`[0] after program (0, 0, 0) wrote {value} value there, "
        "and no atomic orders them. (4 more like this at this line)"]
    all_write[(1, 1)](out, same, BLOCK=16)


@triton.jit
def write_and_count(out, count, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), tl.program_id(0))  # not ordered
    tl.atomic_add(count, 1)


def test_an_atomic_afterwards_orders_nothing() -> None:
    out, count = torch.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    found = findings(lambda: write_and_count[(4,)](out, count, BLOCK=8))
    assert found[0].startswith(line(write_and_count, "# not ordered") + "two programs write one")
    assert count.item() == 4


def test_arguments_without_a_storage_are_not_checked() -> None:
    class Address:
        def __init__(self, tensor) -> None:
            self.tensor, self.dtype = tensor, tensor.dtype

        def data_ptr(self) -> int:
            return self.tensor.data_ptr()

    x, y = torch.arange(32.0), torch.zeros(16)
    copy[(1,)](Address(x[:4]), y, BLOCK=16)
    assert torch.equal(x[:16], y)


# ---------------------------------------------------------------- sound kernels
@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x_ptr + i, mask=i < n) + tl.load(y_ptr + i, mask=i < n)
    tl.store(out_ptr + i, total, mask=i < n)


def test_vector_add_is_clean() -> None:
    x, y, out = torch.randn(1001), torch.randn(1001), torch.empty(1001)
    add[(8,)](x, y, out, 1001, BLOCK=128)
    assert torch.equal(out, x + y)


@triton.jit
def softmax(x_ptr, out_ptr, rows, columns, stride, BLOCK: tl.constexpr):
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        i = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + i, mask=i < columns, other=-float("inf"))
        e = tl.exp(x - tl.max(x, 0))
        tl.store(out_ptr + row * stride + i, e / tl.sum(e, 0), mask=i < columns)


def test_softmax_is_clean() -> None:
    x = torch.randn(13, 100)
    out = torch.empty_like(x)
    softmax[(4,)](x, out, 13, 100, x.stride(0), BLOCK=128)
    torch.testing.assert_close(out, torch.softmax(x, 1))


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, m, n, k, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
           K: tl.constexpr):
    across, down = tl.cdiv(n, N), tl.cdiv(m, M)
    group = tl.program_id(0) // (GROUP * across)
    height = min(down - group * GROUP, GROUP)
    at = tl.program_id(0) % (GROUP * across)
    rows = ((group * GROUP + at % height) * M + tl.arange(0, M)) % m
    columns = (at // height * N + tl.arange(0, N)) % n
    steps = tl.arange(0, K)
    a, b = a_ptr + rows[:, None] * k + steps[None, :], b_ptr + steps[:, None] * n + columns[None, :]
    total = tl.zeros((M, N), tl.float32)
    for step in range(0, tl.cdiv(k, K)):
        left = steps < k - step * K
        total = tl.dot(tl.load(a, mask=left[None, :], other=0.0),
                       tl.load(b, mask=left[:, None], other=0.0), total)
        a += K
        b += K * n
    i = (group * GROUP + at % height) * M + tl.arange(0, M)[:, None]
    j = at // height * N + tl.arange(0, N)[None, :]
    tl.store(c_ptr + i * n + j, total, mask=(i < m) & (j < n))


def test_matmul_is_clean() -> None:
    a, b, c = torch.randn(50, 40), torch.randn(40, 70), torch.empty(50, 70)
    matmul[(4 * 5,)](a, b, c, 50, 70, 40, GROUP=2, M=16, N=16, K=32)
    torch.testing.assert_close(c, a @ b, atol=1e-4, rtol=1e-4)


@triton.jit
def summed_under_locks(x_ptr, sums_ptr, locks_ptr, counts_ptr, n, GROUPS: tl.constexpr,
                       BLOCK: tl.constexpr):
    """As the backward pass of a layer norm: rows are added up in groups, each with a lock."""
    row = tl.program_id(0)
    group = row % GROUPS
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + i, mask=i < n, other=0.0)
    lock = locks_ptr + group
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    if tl.load(counts_ptr + group) == 0:
        tl.atomic_xchg(counts_ptr + group, 1)
    else:
        x += tl.load(sums_ptr + group * n + i, mask=i < n)
    tl.store(sums_ptr + group * n + i, x, mask=i < n)  # under a lock
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


def test_writes_under_a_lock_are_clean() -> None:
    x, sums = torch.randn(40, 50), torch.empty(3, 50)
    locks, counts = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    summed_under_locks[(40,)](x, sums, locks, counts, 50, GROUPS=3, BLOCK=64)
    torch.testing.assert_close(sums.sum(0), x.sum(0), atol=1e-4, rtol=1e-4)


@triton.jit
def attention(q_ptr, k_ptr, v_ptr, out_ptr, n, scale, D: tl.constexpr, M: tl.constexpr,
              N: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, D)
    start = tl.program_id(1) * n * D
    q = tl.load(q_ptr + start + rows[:, None] * D + d[None, :], mask=rows[:, None] < n, other=0.0)
    best = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, D), tl.float32)
    for first in range(0, tl.minimum((tl.program_id(0) + 1) * M, n), N):
        columns = first + tl.arange(0, N)
        at = start + columns[:, None] * D + d[None, :]
        k = tl.load(k_ptr + at, mask=columns[:, None] < n, other=0.0)
        v = tl.load(v_ptr + at, mask=columns[:, None] < n, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(rows[:, None] >= columns[None, :], scores, -float("inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        p = tl.exp(scores - better[:, None])
        shrink = tl.exp(best - better)
        total = total * shrink + tl.sum(p, 1)
        out = tl.dot(p, v, out * shrink[:, None])
        best = better
    tl.store(out_ptr + start + rows[:, None] * D + d[None, :], out / total[:, None],
             mask=rows[:, None] < n)


def test_flash_attention_is_clean() -> None:
    q, k, v = (torch.randn(2, 50, 16) for _ in range(3))
    out = torch.empty_like(q)
    attention[(4, 2)](q, k, v, out, 50, 1 / math.sqrt(16), D=16, M=16, N=16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


@triton.jit
def dropout(x_ptr, out_ptr, n, p, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, tl.where(tl.rand(seed, i) > p, x / (1 - p), 0.0), mask=i < n)


def test_dropout_is_clean() -> None:
    x, out = torch.ones(1000), torch.empty(1000)
    dropout[(8,)](x, out, 1000, 0.5, 3, BLOCK=128)
    assert set(out.tolist()) == {0.0, 2.0}
