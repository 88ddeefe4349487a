"""Matrix products for GPUs: numbers through our Triton backend, code for sm_90, and the rules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import terrazzo as tz
from terrazzo.chips.cuda import products
from terrazzo.chips.cuda.binaries import compiled
from terrazzo.chips.cuda.description import h200
from terrazzo.codegen.triton.dot import Tiling, product_kernel
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.options import Options
from terrazzo.compiler.rewriting import inlined
from terrazzo.expr.ir import Program
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace
from terrazzo.knobs import knobs

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.triton, pytest.mark.torch]

sys.path[:0] = [str(Path(__file__).parent)]

from cuda_simulated import close, random, simulated  # noqa: E402

SLACK = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3, "float64": 1e-12}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    with simulated(monkeypatch, texts=True) as texts:
        yield texts


def program(function: Any, *types: tuple[tuple[int, ...], str]) -> Program:
    """The one program that a function becomes."""
    with knobs.override(cuda_simulate=True), tz.chip("cuda"):
        options = Options.now()
        graph, _ = trace(function, [TensorType(s, getattr(tz, t)) for s, t in types], name="p")
        (group,) = Lowering(inlined(graph, options=options), options.chip,
                            options=options).fused.groups
    found: Program = group.program
    return found


LAYER = ((512, 256), "bfloat16"), ((256, 512), "bfloat16"), ((512,), "bfloat16")


def layer(x: Any, w: Any, b: Any) -> Any:
    return tz.gelu(x @ w + b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("shape", [(64, 96, 128), (5, 33, 70), (1, 64, 64), (16, 64, 2048),
                                   (200, 136, 72), (3, 3, 3), (0, 8, 8), (17, 8, 0)])
def test_products_with_what_follows(launched: list[str], dtype: str, shape: tuple[int, int, int]
                                    ) -> None:
    m, n, k = shape
    x, w, b = (random(*s, dtype=dtype) for s in ((m, k), (k, n), (n,)))
    with knobs.override(dynamic="never"):
        got = tz.jit(layer)(x, w, b)
    close(got, torch.nn.functional.gelu(x.double() @ w.double() + b.double()), SLACK[dtype])
    assert bool(launched) == (m > 0)
    assert any("tl.dot" in text for text in launched) == (m > 0 and dtype != "float64")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("left", "right"), [
    ((2, 3, 40, 64), (2, 3, 64, 72)), ((2, 3, 40, 20), (3, 20, 72)), ((2, 3, 40, 20), (20, 72)),
    ((4, 1, 64), (4, 64, 32)), ((40, 20), (5, 20, 16))])
def test_batches(launched: list[str], dtype: str, left: tuple[int, ...], right: tuple[int, ...]
                 ) -> None:
    x, w = random(*left, dtype=dtype), random(*right, dtype=dtype)
    close(tz.matmul(x, w), x.double() @ w.double(), SLACK[dtype])
    assert any("tl.dot" in text for text in launched)


@pytest.mark.parametrize("way", ["x @ w.T", "x.T @ w", "x.T @ w.T"])
def test_transposed_factors(launched: list[str], way: str) -> None:
    x, w = (random(96, 96, dtype="bfloat16") for _ in range(2))
    got = tz.jit(lambda x, w: eval(way, {}, {"x": x, "w": w}))(x, w)
    close(got, eval(way, {}, {"x": x.double(), "w": w.double()}), 1e-2)
    assert "tl.dot" in launched[0]


def test_the_number_of_rows_may_vary(launched: list[str]) -> None:
    function = tz.jit(layer)
    w, b = random(48, 40, dtype="bfloat16"), random(40, dtype="bfloat16")
    for m in (3, 5, 16, 17, 64, 65, 300):
        x = random(m, 48, dtype="bfloat16")
        close(function(x, w, b), torch.nn.functional.gelu(
            x.double() @ w.double() + b.double()), 1e-2)
    assert 3 <= len(set(launched)) <= 5  # one for the first size alone, then one for each range


def test_integers(launched: list[str]) -> None:
    x, w = (torch.randint(-128, 128, s, dtype=torch.int8) for s in ((70, 64), (64, 50)))
    form = program(lambda x, w: tz.matmul(x, w, ), ((70, 64), "int8"), ((64, 50), "int8"))
    assert form.kind == "contraction"
    got = tz.matmul(x, w)
    assert torch.equal(got.to(torch.int8), (x.int() @ w.int()).to(torch.int8))
    assert launched


@pytest.mark.parametrize("tiling", [
    Tiling(128, 256, 64, warps=8, stages=3, persistent=True, descriptors=True),
    Tiling(64, 64, 32, descriptors=True), Tiling(64, 64, 32, persistent=True),
    Tiling(16, 32, 256, stages=4), Tiling(64, 256, 64, warps=8, stages=4)])
@pytest.mark.parametrize("ragged", [False, True])
def test_every_way_to_read_gives_the_same(tiling: Tiling, ragged: bool) -> None:
    """Kernels as they are printed, on this machine: descriptors, persistent ones, ragged edges."""
    from terrazzo.base.upcalls import UPCALLS
    from terrazzo.chips.cuda.binaries import jit_function
    from terrazzo.codegen.triton.module import module_text

    m, n, k = (200, 136, 72) if ragged else (256, 256, 128)
    made = program(layer, ((m, k), "bfloat16"), ((k, n), "bfloat16"), ((n,), "bfloat16"))
    product = products.matched(made)
    assert product is not None
    x, w, b = (random(*s, dtype="bfloat16") for s in ((m, k), (k, n), (n,)))
    y = torch.empty(m, n, dtype=torch.bfloat16)
    UPCALLS["triton_on_cpu"]()
    written = product_kernel(made, product, h200(), tiling)
    assert ("make_tensor_descriptor" in module_text(made, written)) == tiling.descriptors
    jit_function(written.jit_text(), written.name)[(written.programs,)](
        x, w, b, y, **written.constants, num_warps=written.warps)
    close(y, torch.nn.functional.gelu(x.double() @ w.double() + b.double()), 1e-2)


@pytest.mark.parametrize(("dtype", "rows", "columns"), [
    *((dtype, rows, 4096) for dtype in ("bfloat16", "float32") for rows in (1, 16, 512)),
    ("bfloat16", 64, 4096), ("bfloat16", 1, 14336), ("bfloat16", 128, 14336)])
def test_code_for_hopper(dtype: str, rows: int, columns: int) -> None:
    made = program(layer, ((rows, 256), dtype), ((256, columns), dtype), ((columns,), dtype))
    product = products.matched(made)
    assert product is not None
    written = product_kernel(made, product, h200(), products.tiling(product, h200(), rows))
    tensors = (*made.inputs, *made.outputs)
    binary = compiled(written, [t.dtype for t in tensors], dict(written.constants), written.warps,
                      [True] * len(tensors), False, h200())
    assert "mma" in binary.ptx
    if rows >= 64 and dtype == "bfloat16":
        assert "wgmma" in binary.ptx


def test_rules() -> None:
    def chosen(m: int, n: int, k: int, dtype: str = "bfloat16", turned: bool = False) -> Tiling:
        made = program(lambda x, w, b: tz.gelu((x @ w.T if turned else x @ w) + b), (
            (m, k), dtype), ((n, k) if turned else (k, n), dtype), ((n,), dtype))
        product = products.matched(made)
        assert product is not None
        return products.tiling(product, h200(), m)

    large = chosen(4096, 4096, 4096)
    assert (large.rows, large.columns, large.descriptors, large.persistent) == (
        128, 256, True, True)
    assert not chosen(4096, 4096, 4092).descriptors or 4092 * 2 % 16 == 0  # rows of 16 bytes
    assert not chosen(4096, 4095, 4096).descriptors
    wide = chosen(128, 14336, 4096)  # one wave of 112 tiles, none of 56
    assert (wide.rows, wide.columns, wide.warps, wide.depth, wide.stages) == (64, 256, 8, 64, 4)
    assert chosen(128, 14336, 4096, turned=True).columns == 128
    assert chosen(16, 4096, 4096).columns == 32
    for rows in (16, 64):
        few = chosen(rows, 4096, 4096)
        assert (few.rows, few.columns, few.depth, few.stages) == (rows, 32, 256, 4)
    for n, columns in ((12000, 32), (14336, 64), (100_000, 128)):
        assert chosen(1, n, 4096).columns == columns
    assert chosen(1, 14336, 4096).depth == 128 and chosen(17, 14336, 4096).columns == 32
    long = program(layer, ((64, 8192), "bfloat16"), ((8192, 64), "bfloat16"), ((64,), "bfloat16"))
    assert [p.kind for p in products.split_sums(long, h200())] == ["contraction", "rows"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gelu_of_half_types(launched: list[str], dtype: str) -> None:
    """A polynomial instead of the error function: at most a rounding away, anywhere."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(
        getattr(torch, dtype))
    got, exact = tz.gelu(every), torch.nn.functional.gelu(every.double())
    assert torch.equal(got.isnan(), exact.isnan()) and "_gelu_" in launched[0]
    near = exact.to(every.dtype).double()
    slack = {"bfloat16": 2.0 ** -7, "float16": 2.0 ** -10}[dtype]  # one step, at most
    counts = ~exact.isnan() & (exact.abs() > max(1e-6, torch.finfo(every.dtype).tiny))
    inside = exact.abs() < torch.finfo(every.dtype).max
    error = ((got.double() - near).abs() / near.abs())[counts & inside]
    assert float(error.max()) <= slack and float((error > 0).double().mean()) < 0.02
    tiny = (got.double() - exact).abs()[~counts & ~exact.isnan()]
    assert float(tiny.max()) < 1e-7  # a step of float16 there
