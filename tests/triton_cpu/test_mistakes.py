"""What users get wrong is said clearly, and never ends the process."""

from __future__ import annotations

import pytest

from terrazzo.errors import ArgumentError, UnsupportedOperator

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
    value = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tl.load(x)], tl.float32, True, 1)
    tl.store(out, value)


@triton.jit
def pair_kernel(pair, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(pair[0] + at) * pair[1])


def test_tensors_of_another_device() -> None:
    x, out = torch.ones(16), torch.zeros(16)
    for _ in range(2):  # before the kernel has run, and after
        with pytest.raises(ArgumentError, match=r"on the device meta\n  try: move it"):
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
    line = assembly_kernel.fn.__code__.co_firstlineno + 2
    assert f"test_mistakes.py:{line}" in str(caught.value)
    assert "inline_asm" in str(caught.value)


def test_tuples_are_arguments() -> None:
    x, out = torch.arange(16.0), torch.zeros(16)
    pair_kernel[(1,)]((x, 2.0), out, BLOCK=16)
    assert torch.equal(out, 2 * x)
