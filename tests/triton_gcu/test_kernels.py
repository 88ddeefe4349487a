"""Kernels on a virtual chip: exact results, any grid, one warp, and what does not fit."""

from __future__ import annotations

import ctypes
import gc
import importlib
import warnings

import numpy as np
import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from device_arrays import DeviceArray, normal, zeros  # noqa: E402
from kernels import add, matmul, softmax, visit  # noqa: E402

from terrazzo.chips.gcu.library import ERRORS, GcuError, check  # noqa: E402
from terrazzo.errors import WrongDevice  # noqa: E402
from terrazzo.triton_gcu import compiler  # noqa: E402
from terrazzo.triton_gcu.chip import description, runtime  # noqa: E402
from terrazzo.triton_gcu.driver import stream_cycles  # noqa: E402
from terrazzo.triton_gcu.launch import LoadedKernel  # noqa: E402

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("programs", [1, 47, 48, 49, 57, 96, 1000])
def test_addition_on_any_grid(programs: int) -> None:
    n = programs * 64 - 5
    x, y, out = normal(n), normal(n, seed=1), zeros(n)
    add[(programs,)](x, y, out, n, BLOCK=64)
    assert np.array_equal(out.numpy(), x.values + y.values)


@pytest.mark.parametrize("grid", [
    (1,), (47,), (48,), (49,), (57,), (96,), (1000,), (0,), (1, 49), (7, 7), (2, 3, 5), (4, 4, 3),
    (1, 1, 57), (48, 2, 2), (5, 0, 3)])
def test_every_program_runs_once(grid: tuple[int, ...]) -> None:
    x, y, z = (*grid, 1, 1)[:3]
    seen, who = zeros(x * y * z, dtype=np.int32), zeros(max(x * y * z, 1), 3, dtype=np.int32)
    visit[grid](seen, who)
    assert np.array_equal(seen.numpy(), np.ones(x * y * z, np.int32))
    if x * y * z:
        expected = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
        assert who.numpy().tolist() == [list(e) for e in expected]


@pytest.mark.parametrize("columns", [1, 63, 64, 781, 2048])
def test_softmax(columns: int) -> None:
    x, out = normal(57, columns), zeros(57, columns)
    softmax[(57,)](x, out, columns, BLOCK=triton.next_power_of_2(columns))
    e = np.exp(x.values.astype(np.float64) - x.values.max(1, keepdims=True))
    np.testing.assert_allclose(out.numpy(), e / e.sum(1, keepdims=True), rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize(("m", "n", "k", "block"), [
    (64, 64, 64, (32, 32, 32)), (100, 70, 30, (32, 64, 16)), (16, 300, 129, (16, 128, 64))])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_matmul(m: int, n: int, k: int, block: tuple[int, int, int], dtype: type) -> None:
    a, b, c = normal(m, k, dtype=dtype), normal(k, n, seed=1, dtype=dtype), zeros(m, n)
    grid = (triton.cdiv(m, block[0]) * triton.cdiv(n, block[1]),)
    matmul[grid](a, b, c, m, n, k, *block)
    exact = a.values.astype(np.float64) @ b.values.astype(np.float64)
    np.testing.assert_allclose(c.numpy(), exact, rtol=1e-5, atol=1e-5)


@triton.jit
def _count_down(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_add(out, tl.sum(tl.load(x + i), 0))
    tl.atomic_max(out + 1, tl.program_id(0).to(tl.float32))


def test_atomics() -> None:
    x, out = DeviceArray(np.ones(256, np.float32)), zeros(2)
    _count_down[(1000,)](x, out, N=256)
    assert out.numpy().tolist() == [256000.0, 999.0]


# ---------------------------------------------------------------- the chip's own rules
@pytest.mark.parametrize("num_warps", [1, 2, 8, 32])
def test_a_program_has_one_warp(num_warps: int) -> None:
    x, y, out = normal(100), normal(100, seed=1), zeros(100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernel = add[(2,)](x, y, out, 100, BLOCK=64, num_warps=num_warps)
    assert kernel.metadata.num_warps == 1
    assert np.array_equal(out.numpy(), x.values + y.values)


@triton.jit
def _by_threads(out):
    threads: tl.constexpr = tl.extra.cuda.num_threads()
    tl.atomic_add(out + tl.program_id(0) * threads + tl.arange(0, threads), 1)


@pytest.mark.parametrize("num_warps", [1, 2, 8])
def test_grids_made_for_so_many_threads_cover_everything(num_warps: int) -> None:
    out = zeros(1024, dtype=np.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernel = _by_threads[(1024 // (32 * num_warps),)](out, num_warps=num_warps)
    assert kernel.metadata.num_warps == 1
    assert out.numpy().tolist() == [1] * 1024


def test_that_warps_change_nothing_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_warned", set())
    backend = compiler.GCUBackend(triton.runtime.driver.active.get_current_target())
    with pytest.warns(UserWarning, match="num_warps=8") as said:
        for _ in range(3):
            backend.parse_options({"num_warps": 8})
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(compiler, "_warned", set())
        backend.parse_options({})  # nothing was asked for
    with pytest.raises(AssertionError, match="power of 2"):
        backend.parse_options({"num_warps": 3})


@triton.jit
def _large(x, out, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tile = tl.load(x + i)
    tl.store(out + i, tile / tl.sum(tl.exp(tile), 1)[:, None])


def test_a_tile_beyond_the_scratchpad_is_refused() -> None:
    room = description().scratchpad_bytes
    side = 1 << (room // 4).bit_length() // 2
    x, out = zeros(side, 2 * side), zeros(side, 2 * side)
    with pytest.raises(triton.runtime.OutOfResources, match=f"scratchpad.*{room}") as refused:
        _large[(1,)](x, out, side, 2 * side)
    assert refused.value.required > room
    small = _large[(1,)](x, out, 16, 16)
    assert 16 * 16 * 4 <= small.metadata.shared <= 4 * 16 * 16 * 4 + 1024


def test_pointers_of_the_host_are_refused() -> None:
    class OnTheHost:
        dtype, values = np.dtype(np.float32), np.zeros(64, np.float32)

        def data_ptr(self) -> int:
            return int(self.values.ctypes.data)

    class Elsewhere(OnTheHost):
        class device:
            type = "cpu"

    x, out = normal(64), zeros(64)
    with pytest.raises(GcuError, match="gcuErrorInvalidPointer"):
        add[(1,)](x, OnTheHost(), out, 64, BLOCK=64)
    with pytest.raises(WrongDevice, match=r"given a tensor on the device .* as y"):
        add[(1,)](x, Elsewhere(), out, 64, BLOCK=64)
    add[(1,)](x, x, out, 64, BLOCK=64)  # nothing has stayed behind
    assert np.array_equal(out.numpy(), 2 * x.values)


def test_arguments_by_address_and_none() -> None:
    x, out = normal(64), zeros(64)
    kernel = add[(1,)](zeros(64), zeros(64), out, 64, BLOCK=64)
    kernel[(1, 1, 1)](x.data_ptr(), x, out.data_ptr(), np.int64(64), 64)
    assert np.array_equal(out.numpy(), 2 * x.values)


@triton.jit
def _unless_none(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    if x is not None:
        tl.store(out + i, tl.load(x + i))


def test_nothing_in_place_of_a_tensor() -> None:
    x, out = normal(64), zeros(64)
    _unless_none[(1,)](None, out, N=64)
    assert not out.numpy().any()
    _unless_none[(1,)](x, out, N=64)
    assert np.array_equal(out.numpy(), x.values)


# ---------------------------------------------------------------- by the library itself
def test_the_library_launches_what_triton_compiled() -> None:
    x, y, out = normal(57 * 64), normal(57 * 64, seed=1), zeros(57 * 64)
    kernel = add[(57,)](x, y, out, 57 * 64, BLOCK=64)
    words = (ctypes.c_int64 * 4)(x.data_ptr(), y.data_ptr(), out.data_ptr(), 57 * 64)
    launch, function = runtime().gcuLaunchKernel, kernel.function.function
    code = launch(function, 57, 1, 1, words, 4, None)
    assert ERRORS[code] == "gcuErrorInvalidGrid"
    assert runtime().gcuGetLastErrorMessage().decode() == (
        "Invalid grid size 57 (must be <= 48 or multiple of 48)")
    runtime().gcuMemset(out.data_ptr(), 0, out.values.nbytes)
    check(launch(function, 48, 1, 1, words, 4, None))
    assert np.array_equal(out.numpy()[:48 * 64], (x.values + y.values)[:48 * 64])
    assert not out.numpy()[48 * 64:].any()


@pytest.mark.parametrize("active", ["cpu", "gcu"])
def test_code_goes_away_with_its_last_reference_whichever_driver_is_active(active: str) -> None:
    """Triton unloads by the driver that is active when it collects, not by that which loaded."""
    x, out = normal(64), zeros(64)
    image = add[(1,)](x, x, out, 64, BLOCK=64).asm["gcuimg"]
    utils = importlib.import_module(f"terrazzo.triton_{active}.driver")._Utils()
    kernel = LoadedKernel.load(image, "add")
    module = kernel.module
    utils.unload_module(kernel)
    del kernel
    gc.collect()
    code = runtime().gcuModuleUnload(module)
    assert ERRORS[code] == "gcuErrorInvalidHandle"


def test_texts_of_all_stages() -> None:
    x, out = normal(64), zeros(64)
    kernel = add[(1,)](x, x, out, 64, BLOCK=64)
    assert list(kernel.asm) == ["ttir", "loop", "llir", "gcuimg"] or (
        set(kernel.asm) >= {"ttir", "loop", "llir", "gcuimg"})
    assert kernel.asm["gcuimg"].startswith(b"GCUIMAGE")


def test_folded_waves_take_longer() -> None:
    def cycles(programs: int) -> int:
        x, out = zeros(programs * 4096), zeros(programs * 4096)
        begin = stream_cycles()
        add[(programs,)](x, x, out, programs * 4096, BLOCK=4096)
        return stream_cycles() - begin

    taken = [cycles(p) for p in (1, 48, 49, 96)]
    assert 0 < taken[0] < taken[1] < taken[2] <= taken[3]
