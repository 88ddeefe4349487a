"""`tl.device_print` and `tl.device_assert`: the text, the order, and what happens afterwards."""

from __future__ import annotations

import inspect

import pytest

from terrazzo.errors import KernelAssertion

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [pytest.mark.triton, pytest.mark.torch]


def place(kernel, mark: str) -> str:
    """The end of the path and the line of a kernel's line that carries a mark."""
    lines, first = inspect.getsourcelines(kernel.fn)
    number = first + next(n for n, text in enumerate(lines) if mark in text)
    return f"{__file__.rpartition('/')[2]}:{number}"


@triton.jit
def prints(x_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    pid = tl.program_id(0) + 10 * tl.program_id(1)
    x = tl.load(x_ptr + i)
    tl.device_print("x", x)
    tl.device_print("both", i, x, hex=True)
    print("pid:", pid)
    print("text only")
    tl.device_print("unsigned", (i - 1).to(tl.uint8))
    tl.device_print("positive", x > 0)


def test_lines_are_what_triton_prints(capsys: pytest.CaptureFixture[str]) -> None:
    prints[(1,)](torch.tensor([-1.5, float("nan")]), N=2)
    assert capsys.readouterr().out.splitlines() == [
        "pid (0, 0, 0) idx (0) x: -1.500000",
        "pid (0, 0, 0) idx (1) x: nan",
        "pid (0, 0, 0) idx (0) both: (operand 0) 0x00000000",
        "pid (0, 0, 0) idx (1) both: (operand 0) 0x00000001",
        "pid (0, 0, 0) idx (0) both: (operand 1) 0xbfc00000",
        "pid (0, 0, 0) idx (1) both: (operand 1) 0x7fc00000",
        "pid (0, 0, 0) idx () pid: 0",
        "pid (0, 0, 0) text only",
        "pid (0, 0, 0) idx (0) unsigned: 255",
        "pid (0, 0, 0) idx (1) unsigned: 0",
        "pid (0, 0, 0) idx (0) positive: 0",
        "pid (0, 0, 0) idx (1) positive: 0",
    ]


def test_programs_come_in_order_also_from_the_disk_cache(
        capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.zeros(2)
    outputs = []
    for _ in range(2):
        prints[(3, 2)](x, N=2)
        outputs.append(capsys.readouterr().out)
        prints.device_caches.clear()
    lines = [line for line in outputs[0].splitlines() if "text only" in line]
    assert lines == [f"pid ({a}, {b}, 0) text only" for b in range(2) for a in range(3)]
    assert outputs[0] == outputs[1]


@triton.jit
def prints_pointers(x_ptr, N: tl.constexpr):
    at = x_ptr + tl.arange(0, 2)[:, None] * N + tl.arange(0, N)[None, :]
    tl.device_print("at", at)


def test_pointers_and_two_dimensions(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.zeros(32, dtype=torch.float16)
    prints_pointers[(1,)](x, N=16)
    assert capsys.readouterr().out.splitlines() == [
        f"pid (0, 0, 0) idx ({a}, {b:2}) at: {x.data_ptr() + 2 * (16 * a + b):#x}"
        for a in range(2) for b in range(16)]


def test_a_full_area_says_how_much_was_lost(capsys: pytest.CaptureFixture[str],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    from terrazzo.triton_cpu.frontend import reports

    monkeypatch.setattr(reports, "MOST_PRINTED", 5)
    prints_pointers[(1,)](torch.zeros(32, dtype=torch.float16), N=16)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[-1] == "(27 more lines of kernel `prints_pointers` were lost: there is room for 5)"


@triton.jit
def guarded(x_ptr, table_ptr, out_ptr, n, N: tl.constexpr):
    i = tl.arange(0, N)
    at = tl.load(x_ptr + tl.program_id(0) * N + i)
    tl.device_assert(at < n, "index, \"too\" large", mask=i < N - 1)  # checked
    tl.store(out_ptr + tl.program_id(0) * N + i, tl.load(table_ptr + at, mask=i < N - 1))


def test_assertions_guard_what_follows() -> None:
    """Without debugging they are not there; with it, memory is left alone after one failed."""
    x = torch.arange(16, dtype=torch.int64) % 8
    table, out = torch.arange(8.0), torch.full((16,), -1.0)
    guarded[(2,)](x, table, out, 8, N=8, debug=True)
    assert out.tolist() == [0, 1, 2, 3, 4, 5, 6, 0] * 2
    x[10], x[12], x[7] = 1 << 45, 1 << 45, 1 << 45  # the last is left out by the mask
    out.fill_(-1)
    with pytest.raises(RuntimeError, match="device-side assert") as caught:
        guarded[(2,)](x, table, out, 8, N=8, debug=True)
    assert isinstance(caught.value, KernelAssertion)
    text = str(caught.value)
    assert f"{place(guarded, '# checked')}: " in text
    assert 'in `guarded`, program (1, 0, 0), lane 2: index, "too" large (1 more)' in text
    assert out.tolist() == [0, 1, 2, 3, 4, 5, 6, 0] + [-1] * 8


@triton.jit
def in_a_loop(out_ptr, n):
    for i in range(n):
        tl.device_assert(i < 3, "too far")
        tl.store(out_ptr + i, i)


def test_assertions_in_loops() -> None:
    out = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(KernelAssertion, match="too far"):
        in_a_loop[(1,)](out, 8, debug=True)
    assert out.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    in_a_loop[(1,)](out, 8)
    assert out.tolist() == list(range(8))


@triton.jit
def adds(x_ptr, y_ptr):
    tl.store(y_ptr, tl.load(x_ptr) + tl.load(y_ptr))


def test_overflow_is_asserted_in_debug_mode() -> None:
    x, y = (torch.tensor([v], dtype=torch.int32) for v in (2**31 - 1, 1))
    with pytest.raises(KernelAssertion, match="int32 overflow detected for operation add"):
        adds[(1,)](x, y, debug=True)
    assert y.item() == 1
    adds[(1,)](x, y)
    assert y.item() == -(2**31)
