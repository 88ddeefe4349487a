"""PyTorch's own samples of its operators on the device (`operator_samples.py`), a few of each."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")
pytest.importorskip("expecttest")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

FILE = Path(__file__).with_name("operator_samples.py")
# Sparse tensors there are none of; the others are about the device itself: they are given one that
# is the CPU, an argument that has to be there, or memory beside a tensor's own.
ABOUT_OTHERS = {"sparse_sampled_addmm", "sparse_mm_reduce", "to_sparse", "to", "tensor_split",
                "as_strided_partial_views"}


def test_samples_are_right_and_mostly_ours(device: ModuleType) -> None:
    spec = importlib.util.spec_from_file_location("operator_samples", FILE)
    assert spec is not None and spec.loader is not None
    samples = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["operator_samples"] = samples
    spec.loader.exec_module(samples)
    found = [samples.tried(op, 2) for op in samples.operators()]
    tried = [f for f in found if f.samples and f.name.partition(" ")[0] not in ABOUT_OTHERS]
    assert len(tried) > 600
    wrong = {f.name: f.wrong for f in tried if f.wrong}
    assert not wrong
    assert sum(not f.fallbacks for f in tried) >= 0.6 * len(tried)
