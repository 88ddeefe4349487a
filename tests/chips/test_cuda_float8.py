"""Products of 8-bit floats on GPUs: numbers through our Triton backend, code for sm_90, spellings.

The same functions run on the CPU, which widens, and both are compared with float64.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import terrazzo as tz
from terrazzo.chips.cuda import products
from terrazzo.chips.cuda.binaries import compiled
from terrazzo.chips.cuda.chip import Cuda
from terrazzo.chips.cuda.description import h200
from terrazzo.chips.cuda.forms import form_of, space_of
from terrazzo.chips.spec import FAST_FP8_SUMS, ChipSpec
from terrazzo.codegen.triton.dot import Tiling, product_kernel
from terrazzo.expr.ir import Program
from terrazzo.graph.applying import constant
from terrazzo.knobs import knobs

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.triton, pytest.mark.torch]

sys.path[:0] = [str(Path(__file__).parent)]

from test_cuda_products import close, launched, program  # noqa: E402

__all__ = ["launched"]  # a fixture

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
F32, BF16 = tz.float32, tz.bfloat16


def narrow(*shape: int, dtype: str = E4M3) -> Any:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return made.to(getattr(torch, dtype))


def scales(*shape: int) -> Any:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) + 0.5


def checked(function: Callable[..., Any], x: Any, w: Any, *rest: Any, want: Any, slack: float,
            found: list[str]) -> None:
    """Right on the simulated GPU by one kernel that multiplies 8-bit floats, and on the CPU."""
    with knobs.override(dynamic="never"):
        close(tz.jit(function)(x, w, *rest), want, slack)
        with tz.chip("cpu"):
            close(tz.jit(function)(x, w, *rest), want, slack)
    (text,) = found
    assert "tl.dot" in text and "max_num_imprecise_acc=DEPTH" in text, text
    assert "tl.float32)" not in text.split("for start")[1].split("sums = tl.dot")[0]  # not widened


def rows_and_columns(x: Any, w: Any, sx: Any, sw: Any, b: Any) -> Any:
    return tz.gelu((tz.astype(x, dtype=F32) * sx) @ (tz.astype(w, dtype=F32) * sw).T + b)


@pytest.mark.parametrize(("kinds", "shape"), [
    ((E4M3, E4M3), (64, 96, 128)), ((E4M3, E5M2), (5, 33, 70)), ((E5M2, E5M2), (1, 64, 64)),
    ((E5M2, E4M3), (200, 136, 72))])
def test_scales_of_rows_and_columns(launched: list[str], kinds: tuple[str, str],
                                    shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, w = narrow(m, k, dtype=kinds[0]), narrow(n, k, dtype=kinds[1])
    sx, sw, b = scales(m, 1), scales(n, 1), torch.randn(n)
    want = torch.nn.functional.gelu(
        (x.double() * sx.double()) @ (w.double() * sw.double()).T + b.double())
    if m > 1:
        checked(rows_and_columns, x, w, sx, sw, b, want=want, slack=1e-5, found=launched)
    else:  # one row, whose factors are contiguous, is a sum along each row of w
        close(tz.jit(rows_and_columns)(x, w, sx, sw, b), want, 1e-5)


def wide(x: Any, dtype: Any = F32) -> Any:
    return tz.astype(x, dtype=dtype)


# What people write, with a scale of x (one number), a scale of w (a number, or of columns).
SPELLINGS: dict[str, tuple[Callable[..., Any], float]] = {
    "scales after": (lambda x, w, s, c: (wide(x) @ wide(w)) * s * c, 1e-5),
    "scales before": (lambda x, w, s, c: (wide(x) * s) @ (wide(w) * c), 1e-5),
    "divided": (lambda x, w, s, c: (wide(x) / s) @ (c * wide(w)) * (s * s), 1e-5),
    "in bfloat16": (lambda x, w, s, c: (wide(x, BF16) * wide(s, BF16)) @ wide(
        wide(w) * c, BF16), 2e-2),
    "by hand": (lambda x, w, s, c: tz.float8_matmul(x, w) * s * c, 1e-5),
    "turned": (lambda x, w, s, c: (wide(x.T).T * s) @ (wide(w.T) * c[:, None]).T, 1e-5),
    "linear": (lambda x, w, s, c: tz.linear(wide(x) * s, (wide(w) * c).T), 1e-5),
}


@pytest.mark.parametrize("way", SPELLINGS)
def test_spellings(launched: list[str], way: str) -> None:
    function, slack = SPELLINGS[way]
    x, w, s, c = narrow(40, 64), narrow(64, 72), scales()[()], scales(72)
    want = (x.double() * s.double()) @ (w.double() * c.double())
    checked(function, x, w, s, c, want=want, slack=slack, found=launched)


def test_batches(launched: list[str]) -> None:
    x, w, s = narrow(3, 40, 64), narrow(3, 64, 72), scales(3, 40, 1)
    checked(lambda x, w, s: (wide(x) * s) @ wide(w), x, w, s,
            want=(x.double() * s.double()) @ w.double(), slack=1e-5, found=launched)


def test_results_of_eight_bits(launched: list[str]) -> None:
    """`x @ w` of 8-bit floats is 8-bit floats, rounded once."""
    x, w = narrow(40, 64), narrow(64, 72)
    got = tz.matmul(x, w)
    assert got.dtype == x.dtype and "tl.dot" in launched[-1]
    close(got, x.double() @ w.double(), 2.0 ** -4)
    with tz.chip("cpu"):
        assert torch.equal(tz.matmul(x, w).float(), (x.float() @ w.float()).to(x.dtype).float())


def test_scales_along_the_sum_stay(launched: list[str]) -> None:
    x, w, s = narrow(40, 64), narrow(64, 72), scales(64)
    close(tz.jit(lambda x, w, s: (wide(x) * s) @ wide(w))(x, w, s),
          (x.double() * s.double()) @ w.double(), 1e-5)
    assert not any("max_num_imprecise_acc" in text for text in launched)


def test_weights_that_are_constants_stay_narrow(launched: list[str]) -> None:
    import numpy as np

    w = narrow(72, 64).view(torch.uint8).numpy().view(tz.float8_e4m3fn.np)
    x = narrow(40, 64)
    want = x.double() @ torch.from_numpy(w.astype(np.float64)).T * 0.25
    function = tz.jit(lambda x: wide(x) @ (wide(constant(w, tz.float8_e4m3fn)) * 0.25).T)
    close(function(x), want, 1e-5)
    assert len(launched) == 1 and "max_num_imprecise_acc" in launched[0]


@pytest.mark.parametrize("fast", [False, True])
def test_the_setting_for_sums(fast: bool) -> None:
    with knobs.override(cuda_simulate=True, fp8_fast_sums=fast), tz.chip("cuda"):
        text = tz.float8_matmul.lower(narrow(64, 256), narrow(256, 64), "triton", chip="cuda")
    assert ("max_num_imprecise_acc" in text) != fast


def test_older_gpus_widen() -> None:
    older = Cuda(replace(h200(), features=frozenset({"sm_80", "tensor_cores"})))
    assert not older.keeps("float8_matmul") and Cuda(h200()).keeps("float8_matmul")


@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_what_does_not_fit_becomes_what_it_does_on_the_cpu(launched: list[str], kind: str) -> None:
    """Triton's own conversion saturates; numpy's, which operators mean, does not."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(
        torch.float16).float()
    x = torch.cat([every, every * 0.9375, torch.tensor([1e6, 464.0, 464.1, -61439.0, -61440.0])])
    function = tz.jit(lambda x: tz.astype(x, dtype=getattr(tz, kind)))
    on_gpu = function(x).view(torch.int8)
    assert launched
    with tz.chip("cpu"):
        on_cpu = function(x).view(torch.int8)
    nan = x.isnan() if kind == E5M2 else ~(x.abs() <= 464)  # whose sign is nobody's
    assert torch.equal(on_gpu[~nan], on_cpu[~nan]) and bool(
        on_gpu.view(getattr(torch, kind)).float().isnan()[nan].all())


# ---------------------------------------------------------------- torch
@pytest.mark.parametrize(("out", "by_rows"), [("float32", False), ("bfloat16", True)])
def test_torch_scaled_mm(launched: list[str], out: str, by_rows: bool) -> None:
    x, w = narrow(40, 64), narrow(72, 64)
    sa, sb = (scales(40, 1), scales(1, 72)) if by_rows else (scales()[()], scales(1)[0])
    bias = torch.randn(72).to(torch.bfloat16)

    def layer(x: Any, w: Any, sa: Any, sb: Any, bias: Any) -> Any:
        return torch.relu(torch._scaled_mm(x, w.t(), scale_a=sa, scale_b=sb, bias=bias,
                                           out_dtype=getattr(torch, out)))

    torch._dynamo.reset()
    got = torch.compile(layer, backend="terrazzo", fullgraph=True)(x, w, sa, sb, bias)
    want = torch.relu((x.double() * sa.double()) @ (w.double().T * sb.double()) + bias.double())
    assert got.dtype == getattr(torch, out)
    close(got, want, {"float32": 1e-5, "bfloat16": 1e-2}[out])
    assert len(launched) == 1 and "max_num_imprecise_acc" in launched[0]


# ---------------------------------------------------------------- rules and code
def product_of(rows: int, n: int, k: int, turned: bool, kinds: tuple[str, str] = (E4M3, E4M3)
               ) -> Any:
    made = program(lambda x, w, s: wide(tz.gelu(tz.float8_matmul(
        x, w, transpose_y=turned) * s), BF16), ((rows, k), kinds[0]), (
            (n, k) if turned else (k, n), kinds[1]), ((), "float32"))
    product = products.matched(made)
    assert product is not None
    return made, product


def test_rules() -> None:
    _, product = product_of(8192, 8192, 8192, True)
    large = products.tiling(product, h200(), 8192)
    assert (large.rows, large.columns, large.depth, large.warps) == (128, 128, 128, 8)
    assert large.persistent and large.descriptors
    fast = products.tiling(product, with_fast_sums(), 8192)
    assert (fast.rows, fast.columns, fast.depth, fast.descriptors) == (128, 256, 128, True)


def with_fast_sums() -> ChipSpec:
    return replace(h200(), features=h200().features | {FAST_FP8_SUMS})


@pytest.mark.parametrize(("rows", "turned", "kinds", "spec"), [
    (2048, True, (E4M3, E4M3), h200()), (512, False, (E4M3, E5M2), h200()),
    pytest.param(2048, True, (E5M2, E5M2), with_fast_sums(), marks=pytest.mark.slow)])
def test_code_for_hopper(rows: int, turned: bool, kinds: tuple[str, str], spec: ChipSpec) -> None:
    made, product = product_of(rows, 4096, 1024, turned, kinds)
    written = product_kernel(made, product, spec, products.tiling(product, spec, rows))
    tensors = (*made.inputs, *made.outputs)
    ptx = compiled(written, [t.dtype for t in tensors], dict(written.constants), written.warps,
                   [True] * len(tensors), False, spec).ptx
    names = [kind.removeprefix("float8_").removesuffix("fn") for kind in kinds]
    assert re.search(rf"wgmma\S+k32\.f32\.{names[0]}\.{names[1]}", ptx)


@pytest.mark.parametrize("tiling", [
    Tiling(128, 128, 128, warps=8, stages=4, persistent=True, descriptors=True),
    Tiling(64, 64, 32, descriptors=True)])
def test_descriptors_give_the_same(tiling: Tiling) -> None:
    from terrazzo.base.upcalls import UPCALLS
    from terrazzo.chips.cuda.binaries import jit_function

    m, n, k = 200, 136, 80
    made, product = product_of(m, n, k, True)
    x, w, s, y = narrow(m, k), narrow(n, k), scales()[()], torch.empty(m, n, dtype=torch.bfloat16)
    UPCALLS["triton_on_cpu"]()
    written = product_kernel(made, product, h200(), tiling)
    jit_function(written.jit_text(), written.name)[(written.programs,)](
        x, w, s, y, **written.constants, num_warps=written.warps)
    close(y, torch.nn.functional.gelu(x.double() @ w.double().T * s.double()), 1e-2)


# ---------------------------------------------------------------- warps with roles (Gluon)
def biased(x: Any, w: Any, s: Any, b: Any) -> Any:
    return wide(tz.gelu(tz.float8_matmul(x, w, transpose_y=True) * s + b), BF16)


def types(m: int, n: int, k: int, kinds: tuple[str, str] = (E4M3, E4M3)) -> Any:
    return ((m, k), kinds[0]), ((n, k), kinds[1]), ((), "float32"), ((n,), "bfloat16")


def kernels(function: Any, *types: Any, spec: ChipSpec | None = None) -> tuple[Program, Any]:
    """A product, and its kernels by rule."""
    found = products.whole(program(function, *types))
    assert found is not None
    return found, [kernel for kernel, _ in products.versions(found, spec or h200())]


@pytest.mark.parametrize(("function", "types"), [
    (biased, types(2048, 2304, 1024)), (biased, types(2041, 2312, 1040, (E5M2, E5M2))),
    (lambda x, w, s, r: wide(tz.relu(tz.float8_matmul(x, w, transpose_y=True) * s), BF16) + r,
     (*types(2048, 2304, 1024)[:3], ((2048, 2304), "bfloat16"))),
    (lambda x, w: tz.float8_matmul(x, w, transpose_y=True), types(2048, 2304, 1024)[:2]),
    (lambda x, w: x @ w.T, types(2048, 2304, 1024)[:2])])
def test_warps_with_roles_add_pieces_in_float32(function: Any, types: Any) -> None:
    found, (kernel, plain) = kernels(function, *types)
    assert kernel.gluon and kernel.descriptors
    assert not plain.gluon and not plain.descriptors  # for memory that begins anywhere
    text = kernel.jit_text()
    assert "gl.warp_specialize" in text and "sums_1 += made" in text
    tensors = (*found.inputs, *found.outputs)
    made = compiled(kernel, [t.dtype for t in tensors], dict(kernel.constants), kernel.warps,
                    [True] * len(tensors), False, h200())
    assert made.warps == 12 and made.scratch and made.ptx.count("m64n128k32") >= 8


def test_when_warps_have_roles() -> None:
    def gluon(*types: Any, spec: ChipSpec | None = None) -> bool:
        function: Any = biased if len(types) == 4 else lambda x, w: x @ w
        return bool(kernels(function, *types, spec=spec)[1][0].gluon)

    assert gluon(*types(2048, 2304, 1024))
    assert not gluon(*types(2048, 2048, 1024))  # no more tiles than multiprocessors
    assert not gluon(*types(2048, 2304, 512))  # a short sum
    assert not gluon(*types(2048, 2303, 1024))  # rows of the result begin anywhere
    assert not gluon(*types(2048, 2304, 1024, (E4M3, E5M2)))  # one with the other
    assert not gluon(((2048, 1024), E4M3), ((1024, 2304), E4M3))  # k far apart
    assert not gluon(((2, 2048, 1024), E4M3), ((2, 1024, 2304), E4M3))  # a batch
    assert not gluon(((2048, 1024), "bfloat16"), ((1024, 2304), "bfloat16"))
    assert not gluon(*types(2048, 2304, 1024), spec=with_fast_sums())
    assert not gluon(*types(2048, 2304, 1024), spec=replace(
        h200(), features=h200().features - {"wgmma"}))  # a simulated GPU


def test_choices_about_roles() -> None:
    found, _ = kernels(biased, *types(2048, 2304, 1024))
    form = form_of(found, h200())
    space = space_of(found, h200(), form)
    assert space is not None and space.rule["roles"] and space.holds(space.rule)
    plain = {**space.rule, "roles": False, "columns": 128}
    assert space.holds(plain) and not space.holds({**space.rule, "columns": 128})
    changed = [c for axis in space.axes for c in space.changed(plain, axis)]
    assert space.rule in changed
    assert not form_of(found, h200(), plain).kernels[0].written.gluon
    half = program(lambda x, w: x @ w, ((2048, 1024), "bfloat16"), ((1024, 2304), "bfloat16"))
    others = space_of(half, h200(), form_of(half, h200()))
    assert others is not None and "roles" not in others.rule
