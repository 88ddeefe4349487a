"""Reductions that only ATen has, beside eager mode."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from terrazzo.torch import backend  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
def test_hashes(kind: Any) -> None:
    torch.manual_seed(0)
    fast = torch.compile(torch.hash_tensor, backend=backend.terrazzo, fullgraph=True,
                         options={"fallback": "error"})
    for shape in ((), (1,), (2, 3, 5), (4, 0, 3)):
        torch._dynamo.reset()
        x = (torch.randn(shape) * 3).to(kind)
        for dim in ([], [0], [-1], [0, 2]) if x.ndim == 3 else ([],):
            if x.numel() == 0 and dim != [0]:
                continue  # which torch refuses, or which has no elements itself
            found, true = fast(x, dim, keepdim=True), torch.hash_tensor(x, dim, keepdim=True)
            assert found.dtype is true.dtype is torch.uint64
            assert found.tolist() == true.tolist()
