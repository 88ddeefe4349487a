"""Large results of torch tensors ask for large pages; small ones cost nothing more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.runtime import pages

torch = pytest.importorskip("torch")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    ask = pages.ask_for_large_pages

    def recording(address: int, size: int) -> None:
        found.append((address, size))
        ask(address, size)

    monkeypatch.setattr(pages, "ask_for_large_pages", recording)
    return found


def test_large_results_ask_for_large_pages(asked: list[tuple[int, int]]) -> None:
    x = torch.arange(9 << 20, dtype=torch.float32)
    double = tz.jit(lambda x: (x * 2, tz.sum(x[:8])))
    for _ in range(2):
        asked.clear()
        large, small = double(x)
        assert asked == [(large.data_ptr(), large.nbytes)]
        assert torch.equal(large, x * 2) and small == 28


def test_small_results_do_not(asked: list[tuple[int, int]]) -> None:
    tz.exp(torch.zeros(1 << 20))
    tz.exp(np.zeros(9 << 20, np.float32))  # numpy asks by itself
    assert not asked


@pytest.mark.parametrize("size", [0, 100, pages._PAGE, 3 * pages._PAGE + 5])
def test_only_whole_pages_inside_are_asked_for(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(pages, "_madvise", lambda: lambda *args: calls.append(args))
    monkeypatch.setattr(pages.mmap, "MADV_HUGEPAGE", 14, raising=False)
    for address in (0, 64, pages._PAGE - 1):
        calls.clear()
        pages.ask_for_large_pages(address, size)
        for start, length, advice in calls:
            assert start % pages._PAGE == length % pages._PAGE == 0 < length and advice == 14
            assert address <= start and start + length <= address + size
        assert len(calls) == (size >= (2 if address else 1) * pages._PAGE)
