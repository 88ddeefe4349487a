"""What compile time hangs on: how much code a kernel becomes, and that large tiles are not more."""

from __future__ import annotations

import cProfile
import gc
import importlib.util
import pstats
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from terrazzo.chips.cpu.description import host

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from terrazzo.triton_cpu import stages  # noqa: E402
from terrazzo.triton_cpu.deep import with_room  # noqa: E402

pytestmark = [pytest.mark.triton, pytest.mark.torch]
EXAMPLE = Path(__file__).parents[2] / "examples" / "triton" / "flash_attention.py"


@pytest.fixture(scope="module")
def attention() -> dict[int, dict[str, str]]:
    """The texts of the attention kernel of the examples, by elements in a tile."""
    spec = importlib.util.spec_from_file_location("triton_flash_attention", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x = torch.empty(1 << 14)
    kernels = {side * side: module.attention_kernel.warmup(
        x, x, x, x, 999, 8, *(999, 99, 9) * 4, 0.1, CAUSAL=True, D=side, BLOCK_M=side,
        BLOCK_N=side, grid=(1,)) for side in (32, 128)}
    return {tile: dict(kernel.asm) for tile, kernel in kernels.items()}


def instructions(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("  ")]


def test_attention_is_a_bounded_amount_of_code(attention: dict[int, dict[str, str]]) -> None:
    if host().vector_bits != 512:
        pytest.skip("counted for vectors of 512 bits")
    # 1231 and 1564 when this was written; each costs some 40 microseconds to compile.
    assert len(instructions(attention[1024]["llir"])) < 1350
    assert len(instructions(attention[16384]["llir"])) < 1700


def test_code_hardly_grows_with_the_tile(attention: dict[int, dict[str, str]]) -> None:
    small, large = (attention[tile] for tile in (1024, 16384))
    assert len(instructions(large["llir"])) < 1.5 * len(instructions(small["llir"]))
    assert len(large["loop"].splitlines()) < 1.2 * len(small["loop"].splitlines())


def test_what_lies_outside_the_mask_is_one_loop(attention: dict[int, dict[str, str]]) -> None:
    # After the diagonal and after the last key: the same weights, so the same loop.
    pieces = [line for line in attention[16384]["loop"].splitlines() if "exp2(-inf" in line]
    assert len(pieces) == 2  # kept, and added up


def test_copies_of_whole_rows_are_written_once(attention: dict[int, dict[str, str]]) -> None:
    copies = [line for line in attention[16384]["loop"].splitlines()
              if " = v[" in line and "vector" not in line]
    assert len(copies) == 1


def test_memory_for_tiles_is_one_piece(attention: dict[int, dict[str, str]]) -> None:
    assert attention[16384]["llir"].count("call ptr @aligned_alloc") == 1


# ---------------------------------------------------------------- many operations
@triton.jit
def _steps(x, out, STEPS: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr):
    i = tl.arange(0, N)
    total = tl.zeros((N,), tl.float32)
    for s in tl.static_range(STEPS):
        v = tl.load(x + s * N + i)
        if KIND == "solve":
            total = tl.where(i == s, tl.sum(tl.where(i < s, total, 0.0) * v), total)
        elif KIND == "branches":
            if tl.load(x + s) > 0:
                total += tl.exp(v)
            tl.store(out + s * N + i, total)
        else:
            w = tl.load(x + s + i, mask=i < tl.load(x + s).to(tl.int32), other=0.0)
            total = tl.maximum(total, w * v)
    tl.store(out + i, total)


@triton.jit
def _of_numbers(out, STEPS: tl.constexpr, N: tl.constexpr):
    v = tl.arange(0, N)
    for _ in tl.static_range(STEPS):
        v = v * v + v
    tl.store(out + tl.arange(0, N // 2), tl.sum(tl.reshape(v, (N // 2, 2)), 1))


def _calls(steps: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many functions our own stages of a compilation call."""
    profile = cProfile.Profile()

    def counted(function: Callable[..., Any], *args: Any, lines: int = 0) -> Any:
        return with_room(profile.runcall, function, *args)  # its names fit Python's own stack

    with monkeypatch.context() as patch:
        patch.setattr(stages, "with_room", counted)
        _steps.warmup(torch.float32, torch.float32, steps, 64, kind, grid=(1,))
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["solve", "branches", "masks"])
def test_compiling_is_linear_in_the_number_of_operations(
        kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _calls(5, kind, monkeypatch)
    once, twice = (_calls(steps, kind, monkeypatch) for steps in (100, 200))
    assert once > 10_000
    assert twice < 2.1 * once


def test_what_is_made_of_numbers_alone_is_looked_at_once() -> None:
    """Each step asks for the one before twice, and all of them are fixed."""
    out, v = torch.zeros(32, dtype=torch.int32), torch.arange(64, dtype=torch.int32)
    _of_numbers[(1,)](out, 60, 64)
    for _ in range(60):
        v = v * v + v
    assert torch.equal(out, v.view(32, 2).sum(1, dtype=torch.int32))


def test_garbage_is_collected_again_after_compiling() -> None:
    assert gc.isenabled()
    with_room(lambda: with_room(gc.isenabled))
    assert not with_room(gc.isenabled) and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        with_room(lambda: 1 // 0)
    assert gc.isenabled()
    gc.disable()
    try:
        with_room(lambda: 1)
        assert not gc.isenabled()
    finally:
        gc.enable()
