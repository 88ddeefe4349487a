"""Inline PTX that touches memory, waits, or asks where and when it runs."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402


@triton.jit
def _through_pointers(x, out, ORDER: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    LOAD: tl.constexpr = ("ld.acquire.gpu.global.b32 $0, [$1];" if ORDER
                          else "ld.global.b32 $0, [$1];")
    STORE: tl.constexpr = ("st.release.sys.global.b32 [$1], $2;" if ORDER
                           else "st.global.wt.b32 [$1 + 4], $2;")
    value = tl.inline_asm_elementwise(LOAD, "=r,l", [x + i], tl.float32, False, 1)
    word = (value * 2).to(tl.int32, bitcast=True)  # Triton 3.6: no floats beside pointers
    tl.inline_asm_elementwise(STORE, "=r,l,r", [out + i, word], tl.int32, False, 1)


@pytest.mark.parametrize("ordered", [False, True])
def test_loads_and_stores(ordered: bool) -> None:
    x, out = torch.randn(64), torch.zeros(65)
    _through_pointers[(1,)](x, out, ordered, 64)
    assert torch.equal(out[:64] if ordered else out[1:], x * 2)


@triton.jit
def _vectors(x, out, mask, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b, c, d = tl.inline_asm_elementwise(
        """{
            .reg .pred %p0;
            setp.eq.s32 %p0, $5, 1;
            @!%p0 bra end;
            ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];
            end:
        }""", "=r,=r,=r,=r,l,r", [x + 4 * i, tl.load(mask + i)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1)
    tl.inline_asm_elementwise("st.global.v2.b32 [$1], {$2, $3};", "=r,l,r,r",
                              [out + 2 * i, a + b, c + d], tl.int32, False, 1)


def test_vectors_of_words_and_a_jump_over_a_load() -> None:
    x = torch.arange(64, dtype=torch.int32)
    mask = (torch.arange(16) % 3 != 0).int()
    out = torch.full((32,), -1, dtype=torch.int32)
    _vectors[(1,)](x, out, mask, 16)
    pairs = x.view(16, 2, 2).sum(2) * mask[:, None]
    assert torch.equal(out.view(16, 2), pairs.int())


@triton.jit
def _atomics(total, floats, seen, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.inline_asm_elementwise("red.release.gpu.global.add.u32 [$1], $2;", "=r,l,r",
                              [total + i * 0, i], tl.int32, False, 1)
    tl.inline_asm_elementwise("red.global.add.f32 [$1], 0f3F000000;", "=r,l", [floats + i * 0],
                              tl.int32, False, 1)
    before = tl.inline_asm_elementwise("atom.global.gpu.acq_rel.max.s32 $0, [$1], $2;", "=r,l,r",
                                       [total + 1 + i * 0, i], tl.int32, False, 1)
    tl.store(seen + i, before)
    swapped = tl.inline_asm_elementwise("atom.global.cas.b32 $0, [$1], 0, 9;", "=r,l",
                                        [total + 2 + i * 0], tl.int32, False, 1)
    tl.store(seen + N + i, swapped)


def test_atomics() -> None:
    total, floats = torch.zeros(3, dtype=torch.int32), torch.zeros(1)
    seen = torch.zeros(64, dtype=torch.int32)
    _atomics[(1,)](total, floats, seen, 32)
    assert total.tolist() == [32 * 31 // 2, 31, 9] and floats.item() == 16.0
    assert torch.equal(seen[:32], (torch.arange(32, dtype=torch.int32) - 1).clamp(0))
    assert seen[32:].tolist() == [0] + [9] * 31


@triton.jit
def _signals(flags, out, LAST: tl.constexpr):
    me = tl.program_id(0)
    if me < LAST:  # programs with higher numbers go first
        tl.inline_asm_elementwise(
            """{
                .reg .u32 %tmp32_<1>;
                .reg .pred %p<1>;
                wait_signal:
                    atom.global.sys.acquire.cas.b32 %tmp32_0, [$1], 1, 0;
                    setp.eq.u32 %p0, %tmp32_0, 1;
                    @!%p0 bra wait_signal;
            }""", "=r, l", [flags + me + 1], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out + me, tl.atomic_add(out + LAST + 1, 1))
    tl.inline_asm_elementwise(
        """{
            .reg .u32 t;
            .reg .pred p;
            send: atom.global.release.sys.cas.b32 t, [$1], 0, 1;
            setp.eq.u32 p, t, 0;
            @p bra done;
            nanosleep.u32 20;
            bra send;
            done:
        }""", "=r,l", [flags + me], dtype=tl.int32, is_pure=False, pack=1)


def test_signals_between_programs() -> None:
    flags, out = torch.zeros(9, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    _signals[(8,)](flags, out, 7)
    assert out.tolist() == [7, 6, 5, 4, 3, 2, 1, 0, 8]
    assert flags.tolist() == [1] + [0] * 8


@triton.jit
def _where_and_when(out, times):
    me = tl.program_id(0) + 2 * tl.program_id(1)
    x = tl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], tl.int32, True, 1)
    y = tl.inline_asm_elementwise("{ .reg .u32 t; mov.u32 t, %nctaid.y; mad.lo.u32 $0, t, 10, "
                                  "%ctaid.y; }", "=r", [], tl.int32, True, 1)
    thread, threads = tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x; mov.u32 $1, %ntid.x;", "=r,=r", [],
        dtype=(tl.int32, tl.int32), is_pure=True, pack=1)
    tl.store(out + me, x * 1000 + y * 10 + thread + threads)
    start = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, False, 1)
    tl.inline_asm_elementwise(
        "{.reg .u64 start, now, elapsed; .reg .pred done; mov.u64 start, %globaltimer; "
        "L: mov.u64 now, %globaltimer; sub.u64 elapsed, now, start; "
        "setp.ge.u64 done, elapsed, 2000000; @!done bra L; mov.u32 $0, 0;}",
        "=r", [], tl.int32, False, 1)
    tl.inline_asm_elementwise("bar.sync 0; membar.gl; fence.acq_rel.gpu; griddepcontrol.wait; "
                              "nanosleep.u32 100;", "=r", [], tl.int32, False, 1)
    end = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, False, 1)
    tl.store(times + me, end - start)


def test_programs_threads_and_clocks() -> None:
    out, times = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    begin = time.perf_counter_ns()
    _where_and_when[(2, 2)](out, times)
    took = time.perf_counter_ns() - begin
    assert out.tolist() == [201, 1201, 211, 1211]
    assert (times >= 2_000_000).all() and (times <= took).all()


@triton.jit
def _sum_with_assembly(a, b):
    return tl.inline_asm_elementwise("add.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1)


@triton.jit
def _reduced(x, out, N: tl.constexpr):
    tl.store(out, tl.reduce(tl.load(x + tl.arange(0, N)), 0, _sum_with_assembly))


def test_assembly_inside_a_reduction() -> None:
    x, out = torch.arange(64.0), torch.zeros(1)
    _reduced[(1,)](x, out, 64)
    assert out.item() == 64 * 63 / 2


@triton.jit
def _order(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    before = tl.load(x + i)
    tl.inline_asm_elementwise("st.global.b32 [$1], 0;", "=r,l", [x + i], tl.int32, False, 1)
    tl.store(out + i, before + tl.load(x + i, volatile=True))  # Triton would take the first


def test_loads_stay_on_their_side_of_a_store() -> None:
    x: Any = torch.randn(32)
    wanted, out = x.clone(), torch.zeros(32)
    _order[(1,)](x, out, 32)
    assert torch.equal(out, wanted) and not x.any()
