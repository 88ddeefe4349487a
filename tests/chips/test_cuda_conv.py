"""Convolutions as products for GPUs: numbers through our Triton backend, code for sm_90, rules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import terrazzo as tz
from terrazzo.base.scalar import Load, Scalar, call, cast, const, rewrite
from terrazzo.base.upcalls import UPCALLS
from terrazzo.chips.cuda import layouts, products
from terrazzo.chips.cuda.binaries import compiled, jit_function
from terrazzo.chips.cuda.description import h200
from terrazzo.chips.cuda.forms import form_of
from terrazzo.codegen.triton.dot import product_kernel
from terrazzo.codegen.triton.module import Written
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

SLACK = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3, "float64": 1e-12}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    with simulated(monkeypatch, texts=True) as texts:
        yield texts


def exact(x: Any, w: Any, b: Any, **options: Any) -> Any:
    """What torch finds in float64."""
    layer = {3: torch.nn.functional.conv1d, 4: torch.nn.functional.conv2d,
             5: torch.nn.functional.conv3d}[x.ndim]
    options["stride"] = options.pop("strides", 1)
    return torch.relu(layer(x.double(), w.double(), b.double(), **options))


# x, weights, and how they are read
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1x1": ((3, 32, 9, 7), (24, 32, 1, 1), {}),
    "1x1 in strides": ((1, 32, 9, 8), (40, 32, 1, 1), {"strides": 2}),
    "3x3": ((1, 32, 7, 7), (40, 32, 3, 3), {"padding": 1}),
    "3x3 of a batch": ((3, 16, 6, 5), (33, 16, 3, 3), {"padding": 1}),
    "3x3 in strides": ((3, 48, 9, 8), (16, 48, 3, 3), {"padding": 1, "strides": 2}),
    "without padding": ((2, 16, 8, 8), (16, 16, 3, 3), {}),
    "odd channels": ((2, 19, 7, 9), (21, 19, 3, 3), {"padding": (1, 0)}),
    "first layer": ((1, 3, 23, 21), (32, 3, 7, 7), {"padding": 3, "strides": 2}),
    "patches": ((2, 3, 16, 16), (24, 3, 8, 8), {"strides": 8}),
    "dilated": ((2, 16, 11, 9), (16, 16, 3, 3), {"padding": 2, "dilation": 2}),
    "groups": ((3, 64, 6, 6), (48, 32, 3, 3), {"padding": 1, "groups": 2}),
    "groups of a window of 1": ((2, 64, 5, 5), (64, 16, 1, 1), {"groups": 4}),
    "more padding than image": ((1, 16, 2, 2), (16, 16, 3, 3), {"padding": 4, "dilation": 3}),
    "lines": ((2, 32, 50), (24, 32, 5), {"padding": 2, "strides": 3}),
    "volumes": ((1, 16, 4, 5, 6), (8, 16, 3, 3, 2), {"padding": 1}),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_convolutions_with_what_follows(launched: list[str], dtype: str, case: str) -> None:
    x_shape, w_shape, options = CASES[case]
    x, w, b = (random(*s, dtype=dtype) for s in (x_shape, w_shape, w_shape[:1]))
    with knobs.override(dynamic="never"):
        got = tz.jit(lambda x, w, b: tz.relu(tz.conv(x, w, b, **options)))(x, w, b)
    close(got, exact(x, w, b, **options), SLACK[dtype])
    assert "tl.dot" in launched[0]


@pytest.mark.parametrize("case", ["3x3 of a batch", "odd channels", "groups"])
def test_channels_last(launched: list[str], case: str) -> None:
    """As they lie between layers, with a residual that is added on the tile."""
    x_shape, w_shape, options = CASES[case]
    x, w, b = (random(*s) for s in (x_shape, w_shape, w_shape[:1]))
    pads = options["padding"]
    pads = (pads, pads) if isinstance(pads, int) else pads
    want = torch.nn.functional.conv2d(x.double(), w.double(), b.double(), **options)
    r = random(*want.permute(0, 2, 3, 1).shape)

    def layer(x: Any, w: Any, b: Any, r: Any) -> Any:
        made = tz.convolve(x, w, strides=(1, 1), padding=tuple((p, p) for p in pads),
                           dilation=(1, 1), groups=options.get("groups", 1))
        return tz.relu(made * 0.5 + b + r)

    with knobs.override(dynamic="never"):
        got = tz.jit(layer)(x.permute(0, 2, 3, 1).contiguous(), w.permute(2, 3, 1, 0).contiguous(),
                            b, r)
    sums = (want - b.double()[:, None, None]).permute(0, 2, 3, 1)
    close(got, torch.relu(sums * 0.5 + b.double() + r.double()), SLACK["float32"])
    assert len(launched) == 1 and "tl.dot" in launched[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dynamic", ["never", "always"])
def test_larger_images_get_channels_last_before(launched: list[str], dtype: str, dynamic: str
                                                ) -> None:
    x, w, b = (random(*s, dtype=dtype) for s in ((2, 32, 33, 34), (16, 32, 3, 3), (16,)))
    with knobs.override(dynamic=dynamic):
        got = tz.jit(lambda x, w, b: tz.relu(tz.conv(x, w, b, padding=1)))(x, w, b)
    close(got, exact(x, w, b, padding=1), SLACK[dtype])
    (product,) = (text for text in launched if "tl.dot" in text)
    assert "tl.dot" not in launched[0]
    assert " + k - " in product  # channels are neighbours


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["3x3 of a batch", "first layer", "groups", "odd channels"])
def test_weights_are_packed_before_many_positions(
        monkeypatch: pytest.MonkeyPatch, launched: list[str], dtype: str, case: str) -> None:
    """Where they are no constants; those that lie well already are left alone."""
    monkeypatch.setattr(layouts, "_POSITIONS", 1)
    x_shape, w_shape, options = CASES[case]
    x, w, b = (random(*s, dtype=dtype) for s in (x_shape, w_shape, w_shape[:1]))
    with knobs.override(dynamic="never"):
        got = tz.jit(lambda x, w, b: tz.relu(tz.conv(x, w, b, **options)))(x, w, b)
    close(got, exact(x, w, b, **options), SLACK[dtype])
    # Of these float32 has steps of k side by side already.
    lies_well = dtype == "float32" and case in ("first layer", "odd channels")
    packing = [text for text in launched if "_packed_ptr" in text and "tl.dot" not in text]
    assert len(packing) == (not lies_well) and sum("tl.dot" in text for text in launched) == 1


def test_sizes_may_vary(launched: list[str]) -> None:
    function = tz.jit(lambda x, w, b: tz.relu(tz.conv(x, w, b, padding=1, strides=2)))
    w, b = random(24, 32, 3, 3), random(24)
    for n, h, v in ((1, 7, 7), (2, 7, 7), (3, 7, 7), (2, 9, 12), (1, 1, 1), (5, 10, 3)):
        x = random(n, 32, h, v)
        launched.clear()
        close(function(x, w, b), exact(x, w, b, padding=1, strides=2), SLACK["float32"])
        assert any("tl.dot" in text for text in launched) or (n, h, v) == (1, 1, 1)
    assert function(random(0, 32, 7, 7), w, b).shape == (0, 24, 4, 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_sums_of_few_positions_are_split(launched: list[str], dtype: str) -> None:
    x, w, b = (random(*s, dtype=dtype) for s in ((1, 256, 4, 4), (32, 256, 3, 3), (32,)))
    with knobs.override(dynamic="never"):
        got = tz.jit(lambda x, w, b: tz.relu(tz.conv(x, w, b, padding=1)))(x, w, b)
    close(got, exact(x, w, b, padding=1), SLACK[dtype])
    assert "tl.dot" in launched[0] and "tl.dot" not in launched[1]


@pytest.mark.parametrize(("x", "w", "groups"), [
    ((2, 16, 7, 7), (16, 1, 3, 3), 16),  # depthwise: nothing is shared
    ((1, 1, 7, 7), (16, 1, 3, 3), 1),  # nine steps of k
    ((2, 16, 7, 7), (2, 16, 3, 3), 1)])  # two outputs
def test_few_channels_are_sums_along_rows(launched: list[str], x: tuple[int, ...],
                                          w: tuple[int, ...], groups: int) -> None:
    given = random(*x), random(*w), random(*w[:1])
    got = tz.jit(lambda x, w, b: tz.relu(tz.conv(x, w, b, padding=1, groups=groups)))(*given)
    close(got, exact(*given, padding=1, groups=groups), SLACK["float32"])
    assert not any("tl.dot" in text for text in launched)


def test_float64_is_not_for_tensor_cores(launched: list[str]) -> None:
    x, w, b = (random(*s, dtype="float64") for s in ((2, 16, 5, 5), (16, 16, 3, 3), (16,)))
    close(tz.jit(lambda x, w, b: tz.relu(tz.conv(x, w, b, padding=1)))(x, w, b),
          exact(x, w, b, padding=1), SLACK["float64"])
    assert not any("tl.dot" in text for text in launched)


def test_gradients(launched: list[str]) -> None:
    x, w = random(2, 16, 6, 6), random(16, 16, 3, 3)

    def loss(x: Any, w: Any) -> Any:
        return tz.sum(tz.conv(x, w, padding=1) ** 2)

    got = tz.jit(tz.grad(loss, argnums=(0, 1)))(x, w)
    wide = [t.double().requires_grad_() for t in (x, w)]
    (torch.nn.functional.conv2d(*wide, padding=1) ** 2).sum().backward()
    for mine, theirs in zip(got, wide, strict=True):
        close(mine, theirs.grad, 1e-5)
    assert sum("tl.dot" in text for text in launched) >= 2


# ---------------------------------------------------------------- pools
@pytest.mark.parametrize("kind", ["max", "mean"])
@pytest.mark.parametrize(("shape", "window", "options"), [
    ((2, 20, 9, 7), (3, 3), {"strides": 2, "padding": 1}), ((1, 3, 8, 8), (2, 2), {"strides": 2}),
    ((2, 5, 6, 9), (5, 3), {"strides": 1, "padding": (2, 1)})])
def test_windows_at_edges_run_side_by_side(launched: list[str], kind: str, shape: tuple[int, ...],
                                           window: tuple[int, int], options: dict[str, Any]
                                           ) -> None:
    x = random(*shape)
    ours = tz.max_pool if kind == "max" else tz.average_pool
    with knobs.override(dynamic="never"):
        got = tz.jit(lambda x: ours(x, window=window, **options))(x)
    given: dict[str, Any] = {"stride": options["strides"], "padding": options.get("padding", 0)}
    theirs = torch.nn.functional.max_pool2d if kind == "max" else torch.nn.functional.avg_pool2d
    if kind == "mean":
        given["count_include_pad"] = False
    close(got, theirs(x.double(), window, **given), 1e-6)
    pooled = [text for text in launched if "tl.reduce(" in text or "tl.sum(" in text]
    assert pooled and all("ROWS" in text and "for start" not in text for text in pooled)


# ---------------------------------------------------------------- models
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("batch", [2, "N"])
def test_weights_of_a_model_are_packed_once(launched: list[str], dtype: str, batch: int | str
                                            ) -> None:
    """A block of a ResNet with groups: one kernel a layer, weights as it multiplies them."""
    onnx = pytest.importorskip("onnx")
    import terrazzo.ort as ort

    kind = getattr(onnx.TensorProto, dtype.upper().replace("32", ""))
    weights = {"w0": random(32, 3, 5, 5, dtype=dtype), "w1": random(32, 16, 3, 3, dtype=dtype),
               "w2": random(48, 32, 1, 1, dtype=dtype)}
    layers = [("Conv", ["x", "w0"], "a", {"strides": [2, 2], "pads": [2] * 4}),
              ("Relu", ["a"], "b", {}), ("Conv", ["b", "w1"], "c", {"pads": [1] * 4, "group": 2}),
              ("Add", ["c", "b"], "d", {}), ("Relu", ["d"], "e", {}),
              ("Conv", ["e", "w2"], "y", {"strides": [2, 2]})]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(op, inputs, [out], **attrs) for op, inputs, out, attrs in layers],
        "block", [onnx.helper.make_tensor_value_info("x", kind, [batch, 3, 12, 12])],
        [onnx.helper.make_tensor_value_info("y", kind, None)],
        [onnx.numpy_helper.from_array(w.numpy(), n) for n, w in weights.items()])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    session = ort.InferenceSession(model.SerializeToString(),
                                   providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    x = random(2, 3, 12, 12, dtype=dtype)
    (got,) = session.run(None, {"x": x.numpy()})
    layer = torch.nn.functional.conv2d
    w0, w1, w2 = (w.double() for w in weights.values())
    b = torch.relu(layer(x.double(), w0, stride=2, padding=2))
    e = torch.relu(layer(b, w1, padding=1, groups=2) + b)
    close(torch.from_numpy(got), layer(e, w2, stride=2), SLACK[dtype])
    assert sum("tl.dot" in text for text in launched) == 3
    (grouped,) = (text for text in launched if "member" in text)
    # Outputs of a group, taps and channels: of float32 the channels are neighbours.
    want = "m * 144 + " if dtype == "float32" else "* 16 + m"
    assert want in grouped and "k_1 * 9" not in grouped


# ---------------------------------------------------------------- rules and code
def convolution(x: tuple[int, ...], w: tuple[int, ...], dtype: str, **options: Any) -> Program:
    """A layer between layers: channels last, weights [*sizes, channels, outputs]."""
    rank = len(x) - 2
    whole = {"strides": (1,) * rank, "padding": ((1, 1),) * rank, "dilation": (1,) * rank}
    with knobs.override(cuda_simulate=True), tz.chip("cuda"):
        chosen = Options.now()
        graph, _ = trace(lambda x, w, b: tz.relu(tz.convolve(x, w, **{**whole, **options}) + b),
                         [TensorType(s, getattr(tz, dtype)) for s in (x, w, w[-1:])], name="p")
        (group,) = Lowering(inlined(graph, options=chosen), chosen.chip,
                            options=chosen).fused.groups
    made: Program = group.program
    return made


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("x", "w", "options"), [
    ((32, 14, 14, 256), (3, 3, 256, 256), {}),
    ((1, 56, 56, 64), (3, 3, 64, 64), {}),
    ((1, 7, 7, 512), (3, 3, 512, 512), {}),
    ((1, 224, 224, 3), (7, 7, 3, 64), {"strides": (2, 2), "padding": ((3, 3), (3, 3))}),
    ((8, 28, 28, 256), (3, 3, 32, 256), {"groups": 8})])
def test_code_for_hopper(dtype: str, x: tuple[int, ...], w: tuple[int, ...],
                         options: dict[str, Any]) -> None:
    form = form_of(convolution(x, w, dtype, **options), h200())
    kernel = next(k for k in form.kernels if "tl.dot" in k.written.jit_text())
    written = kernel.written
    binary = compiled(written, [t.dtype for t in kernel.tensors], dict(written.constants),
                      written.warps, [True] * len(kernel.tensors), False, h200())
    assert "mma" in binary.ptx
    if x[-1] % 16 == 0:  # neighbouring channels: 16 bytes at a time, while others are multiplied
        assert "cp.async" in binary.ptx and ", 0x10" in binary.ptx


def run_simulated(written: Written, *tensors: Any) -> None:
    """Run a kernel as it is printed."""
    UPCALLS["triton_on_cpu"]()
    jit_function(written.jit_text(), written.name)[(written.programs,)](
        *tensors, **written.constants, num_warps=written.warps)


@pytest.mark.parametrize("channels", [16, 5])
def test_addresses_of_64_bits(channels: int) -> None:
    made = products.whole(convolution((2, 6, 7, channels), (3, 3, channels, 24), "float32"))
    assert made is not None
    product = products.matched(made)
    assert product is not None
    written = product_kernel(made, product, h200(), products.tiling(product, h200(), 84), wide=True)
    assert any(".to(tl.int64)" in line for line in written.lines)
    x, w, b = (random(*t.shape) for t in made.inputs)
    y = torch.empty(84, 24)
    run_simulated(written, x, w, b, y)
    want = exact(x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1), b, padding=1)
    close(y, want.permute(0, 2, 3, 1).reshape(84, 24), SLACK["float32"])
    tensors = (*made.inputs, *made.outputs)
    assert "mma" in compiled(written, [t.dtype for t in tensors], dict(written.constants),
                             written.warps, [True] * len(tensors), False, h200()).ptx


@pytest.mark.parametrize("channels", [16, 5])
def test_a_factor_may_be_an_expression(channels: int) -> None:
    """What a program computes before it multiplies is computed on the tile; padding stays zero."""
    made = convolution((2, 6, 7, channels), (3, 3, channels, 24), "bfloat16")
    (stage,) = made.stages
    assert stage.body is not None

    def before(node: Scalar) -> Scalar | None:
        if not isinstance(node, Load) or node.source is not made.inputs[0]:
            return None
        return cast(call("max", cast(node, tz.float32) + 1, const(0, tz.float32)), tz.bfloat16)

    body = rewrite(stage.body, before)
    fresh = replace(stage, body=body)
    (kernel,) = form_of(replace(made, stages=(fresh,), outputs=(fresh,)), h200()).kernels
    written = kernel.written
    assert any("tl.dot" in line for line in written.lines)
    x, w, b = (random(*t.shape, dtype="bfloat16") for t in made.inputs)
    y = torch.empty(84, 24, dtype=torch.bfloat16)
    run_simulated(written, x, w, b, y)
    want = exact(torch.relu(x.float() + 1).bfloat16().permute(0, 3, 1, 2), w.permute(3, 2, 0, 1), b,
                 padding=1)
    close(y, want.permute(0, 2, 3, 1).reshape(84, 24), SLACK["bfloat16"])


def test_rules() -> None:
    def chosen(x: tuple[int, ...], w: tuple[int, ...], dtype: str) -> Any:
        made = products.whole(convolution(x, w, dtype))
        assert made is not None
        product = products.matched(made)
        assert product is not None and product.row is not None
        return products.tiling(product, h200(), product.row.extent)

    large = chosen((32, 56, 56, 64), (3, 3, 64, 256), "bfloat16")
    assert (large.rows, large.columns, large.depth, large.pieces) == (128, 256, 64, True)
    assert chosen((1, 14, 14, 48), (3, 3, 48, 64), "bfloat16").depth == 16  # inside of one tap
    assert not chosen((1, 14, 14, 20), (3, 3, 20, 64), "bfloat16").pieces
    assert chosen((1, 56, 56, 64), (3, 3, 64, 64), "float32").columns == 32  # 98 tiles, not 25
    assert chosen((32, 56, 56, 64), (3, 3, 64, 64), "float32").rows == 128
    last = convolution((1, 7, 7, 512), (3, 3, 512, 512), "float32")
    first, second = products.split_sums(products.whole(last), h200())
    assert (first.kind, first.stages[0].shape[0], second.kind) == ("contraction", 16, "rows")


def test_a_window_of_1_is_a_product_as_it_is() -> None:
    plain = convolution((2, 7, 7, 32), (1, 1, 32, 64), "float32", padding=((0, 0), (0, 0)))
    product = products.matched(products.whole(plain))
    assert product is not None and product.row is not None
    assert product.row.extent == 98 and product.a.stride(product.row.var) == 32
