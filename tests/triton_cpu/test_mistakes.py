"""What users get wrong is said clearly, and never ends the process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from terrazzo.errors import ArgumentError, KernelFault, UnsupportedDType, UnsupportedOperator
from terrazzo.knobs import knobs
from terrazzo.triton_cpu.frontend.values import dtype_of

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [pytest.mark.triton, pytest.mark.torch]


@triton.jit
def copy_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def assembly_kernel(x, out):
    word = tl.load(x)
    # On one line: older versions of Triton name the last line of an expression, newer the first.
    value = tl.inline_asm_elementwise("activemask.b32 $0;", "=r,r", [word], tl.float32, True, 1)
    tl.store(out, value)


@triton.jit
def pair_kernel(pair, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(pair[0] + at) * pair[1])


def test_tensors_of_another_device() -> None:
    x, out = torch.ones(16), torch.zeros(16)
    for _ in range(2):  # before the kernel has run, and after
        with pytest.raises(ArgumentError, match=r"on the device meta( as x)?\n  try: move it"):
            copy_kernel[(1,)](x.to("meta"), out, 16, BLOCK=16)
        copy_kernel[(1,)](x, out, 16, BLOCK=16)
    assert torch.equal(out, x)


def test_tensors_without_elements() -> None:
    out = torch.zeros(16)
    copy_kernel[(1,)](torch.empty(0), out, 0, BLOCK=16)
    assert not out.any()


def test_operations_of_gpus_are_named_with_their_line() -> None:
    with pytest.raises(UnsupportedOperator) as caught:
        assembly_kernel[(1,)](torch.zeros(1), torch.zeros(1))
    line = assembly_kernel.fn.__code__.co_firstlineno + 4
    assert f"test_mistakes.py:{line}" in str(caught.value)
    assert "activemask.b32 $0;" in str(caught.value)
    assert "try: docs/triton-cpu.md lists the instructions that run" in str(caught.value)


def test_tuples_are_arguments() -> None:
    x, out = torch.arange(16.0), torch.zeros(16)
    pair_kernel[(1,)]((x, 2.0), out, BLOCK=16)
    assert torch.equal(out, 2 * x)


@triton.jit
def clock_kernel(out):
    tl.store(out, tl.extra.cuda.globaltimer())


@triton.jit
def specialised_kernel(x, out, n, BLOCK: tl.constexpr):
    for turn in tl.range(0, n, warp_specialize=True):
        at = turn * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at))


@triton.jit
def multiply_add_kernel(x, out):
    value = tl.load(x)
    tl.store(out, value * value - 1.0)


@triton.jit
def transposing_kernel(x, out, row, column, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(out + i * N + j, tl.load(x + i * row + j * column))


@pytest.mark.parametrize("grid", [(-1,), (4, -2), (1, 1, -3), lambda meta: (-1,)])
def test_negative_grids(grid: Any) -> None:
    out = torch.zeros(16)
    with pytest.raises(ArgumentError, match=r"on a grid of \(.*-\d.*\) programs\n  try: sizes of"):
        copy_kernel[grid](torch.ones(16), out, 16, BLOCK=16)
    assert not out.any()


@pytest.mark.parametrize("grid", [(0,), (4, 0), (1, 1, 0)])
def test_empty_grids_run_nothing(grid: tuple[int, ...]) -> None:
    out = torch.zeros(16)
    copy_kernel[grid](torch.ones(16), out, 16, BLOCK=16)
    assert not out.any()


def test_clocks_of_gpus_run() -> None:
    out = torch.zeros(1, dtype=torch.int64)
    clock_kernel[(1,)](out)
    assert out.item() > 0


def test_warp_specialisation_is_a_loop() -> None:
    x, out = torch.rand(64), torch.zeros(64)
    specialised_kernel[(1,)](x, out, 4, BLOCK=16)
    assert torch.equal(out, x)


def test_objects_without_an_address() -> None:
    for wrong in (np.ones(16, np.float32), [1.0, 2.0], "x"):  # Triton's own words
        with pytest.raises(TypeError, match="failed to specialize argument of type"):
            copy_kernel[(1,)](wrong, torch.zeros(16), 16, BLOCK=16)


def test_numpy_arrays_of_any_layout_through_torch() -> None:
    x = np.arange(64, dtype=np.float32).reshape(8, 8).T
    tensor, out = torch.from_numpy(x), torch.zeros(8, 8)
    transposing_kernel[(1,)](tensor, out, *tensor.stride(), N=8)
    assert np.array_equal(out.numpy(), x)


def test_types_without_counterpart() -> None:
    with pytest.raises(UnsupportedDType, match="elements of type f128"):
        dtype_of("f128")


def test_fusion_of_products_and_sums_can_be_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    x, out = torch.tensor([1 + 2.0 ** -12]), torch.zeros(1)
    rounded, exact = x * x - 1, (x.double() * x.double() - 1).float()
    assert not torch.equal(rounded, exact)
    multiply_add_kernel[(1,)](x, out)
    assert torch.equal(out, exact)
    multiply_add_kernel[(1,)](x, out, enable_fp_fusion=False)
    assert torch.equal(out, rounded)
    language = triton.knobs.language
    names = ["default_fp_fusion", *(
        ["force_disable_fp_fusion"] if hasattr(language, "force_disable_fp_fusion") else [])]
    for name in names:
        multiply_add_kernel.device_caches.clear()
        with monkeypatch.context() as patch:
            patch.setattr(language, name, name.startswith("force"))
            multiply_add_kernel[(1,)](x, out)
        assert torch.equal(out, rounded), name
    multiply_add_kernel.device_caches.clear()


def test_the_sanitizer_can_be_switched_on_between_launches() -> None:
    x, out = torch.ones(16), torch.zeros(32)[:16]
    copy_kernel[(2,)](x, torch.zeros(32), 16, BLOCK=16)
    with knobs.override(sanitize=True), pytest.raises(KernelFault, match="out-of-bounds load"):
        copy_kernel[(2,)](x, torch.zeros(32), 20, BLOCK=16)
    copy_kernel[(1,)](x, out, 16, BLOCK=16)
    assert torch.equal(out, x)
