"""Attention in Gluon: what it is chosen for, and its code; its numbers need a GPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import terrazzo as tz
from terrazzo.chips.cuda import attention as rules
from terrazzo.chips.cuda.description import h200
from terrazzo.chips.cuda.forms import Kernel, Version
from terrazzo.chips.cuda.plan import serving
from terrazzo.codegen.gluon.attention import _Axes, _evenest, _longest
from terrazzo.dtypes import bfloat16
from terrazzo.expr.ir import Tensor
from terrazzo.knobs import knobs

sys.path[:0] = [str(Path(__file__).parent)]

from test_cuda_attention import check, launched, random  # noqa: E402

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.triton, pytest.mark.torch]

kernels = launched  # the simulated chip, and the names of the kernels that it launches


def lowered(level: str, q: Any, k: Any, *rest: Any, **options: Any) -> str:
    with knobs.override(dynamic="never"):
        text: str = tz.scaled_dot_product_attention.lower(q, k, k, *rest, level, chip="cuda",
                                                          **options)
    return text


def constants(text: str) -> dict[str, str]:
    return dict(re.findall(r"^(\w+) = gl\.constexpr\((.*?)\)", text, re.M))


@pytest.mark.parametrize(("causal", "queries", "keys"), [(False, 300, 1000), (True, 1024, 1024)])
def test_code_for_hopper(causal: bool, queries: int, keys: int) -> None:
    q, k = random(1, 4, queries, 128, dtype="bfloat16"), random(1, 2, keys, 128, dtype="bfloat16")
    text = lowered("triton", q, k, causal=causal)
    assert "@gluon.jit" in text and constants(text)["SHARED"] == "2"
    assert all(len(line) <= 100 for line in text.splitlines())
    assert ("seen = " in text) == (causal or keys % 128 != 0)
    ptx = lowered("ptx", q, k, causal=causal)
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor.4d" in ptx
    assert "setmaxnreg" in ptx


def test_products_are_under_way_while_scores_are_weighed() -> None:
    q = random(1, 2, 1024, 128, dtype="float16")
    found = re.findall(r"\b(HGMMA|WARPGROUP\.DEPBAR\.LE gsb0, 0x[01]|MUFU\.EX2|STL)\b",
                       lowered("sass", q, q))
    assert "STL" not in found  # registers suffice
    text = " ".join(found).replace("WARPGROUP.DEPBAR.LE gsb0, ", "wait")
    # Eight products of scores and eight of values, the wait for the scores alone, what is computed
    # of them, and only then the wait for the sums.
    loop = r"(HGMMA ){16}wait0x1 (MUFU\.EX2 ){64,}wait0x0"
    assert len(re.findall(loop, text)) == 2  # in each of two groups


@pytest.mark.parametrize("what", ["size", "few queries", "few keys", "float32", "mask"])
def test_plain_triton_serves_the_rest(what: str) -> None:
    size, queries, keys = 128, 512, 512
    if what == "size":
        size = 96
    elif what == "few queries":
        queries = 200
    elif what == "few keys":
        keys = 200
    dtype = "float32" if what == "float32" else "bfloat16"
    q, k = random(1, 2, queries, size, dtype=dtype), random(1, 2, keys, size, dtype=dtype)
    mask = [torch.ones(queries, keys, dtype=torch.bool)] if what == "mask" else []
    assert "gluon" not in lowered("triton", q, k, *mask)


def test_views_that_a_descriptor_knows() -> None:
    def axes(*shape: int, strides: tuple[int, ...] | None = None, batch: tuple[int, ...]) -> Any:
        found = _Axes.of(Tensor("x", shape, bfloat16, strides=strides), batch)
        return found and (found.sizes, found.strides)

    assert axes(2, 4, 512, 128, batch=(2,)) == ((2, 4, 512), (262144, 65536, 128))
    turned = (262144, 128, 512, 1)  # rows before heads
    assert axes(2, 4, 512, 128, strides=turned, batch=(2,)) == ((2, 4, 512), turned[:3])
    assert axes(3, 2, 4, 512, 128, batch=(3, 2)) == ((6, 4, 512), (262144, 65536, 128))
    assert axes(512, 128, batch=(2,)) == ((1, 1, 512), (0, 0, 128))  # all share these
    assert axes(3, 1, 4, 512, 128, batch=(3, 2)) is None
    assert axes(4, 512, 128, strides=(65536, 1, 512), batch=(1,)) is None


def test_a_simulated_gpu_runs_plain_triton(kernels: list[str]) -> None:
    check(random(1, 1, 256, 128, dtype="float16"), random(1, 1, 256, 128, dtype="float16", seed=1),
          random(1, 1, 256, 128, dtype="float16", seed=2), causal=True)
    assert len(kernels) == 1


def test_memory_that_is_not_aligned_is_plain_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Kernel] = []

    def noting(program: Any, *rest: Any) -> Any:
        found = kernels_of(program, *rest)
        made.extend(Kernel(part, tuple(map(Version, written))) for part, written in found)
        return found

    kernels_of = rules.kernels
    monkeypatch.setattr(rules, "kernels", noting)
    q = random(1, 2, 512, 128, dtype="bfloat16")
    lowered("triton", q, q)
    assert [v.written.gluon for v in serving(made[0], [True] * 4)] == [True]
    assert not any(v.written.gluon for v in serving(made[0], [True, False, True, True]))


@pytest.mark.parametrize(("members", "blocks"), [(64, 32), (16, 128), (128, 32)])
def test_programs_of_causal_attention_have_like_work(members: int, blocks: int) -> None:
    cores = h200().cores
    side = _evenest(members, blocks, cores, min(members, 24))
    work = sum(block + 2 for block in range(blocks)) * members
    assert _longest(members, blocks, cores, side) < 1.05 * work / cores
