"""Little models as exporters write them, for tests of rewrites: by hand, and exported from torch.

Those by hand follow TorchScript's spelling of layers that newer exporters keep whole.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).parents[1] / "frontends" / "onnx"))
from models import model, node

BATCH, PLACES, HEADS, SIZE = 2, 7, 4, 8
WIDTH = HEADS * SIZE


@dataclass
class Layers:
    """A model in the making: nodes and weights, with names that count up."""

    seed: int = 0
    nodes: list[Any] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def weight(self, *shape: int, around: float = 0.0) -> str:
        scale = 1 / math.sqrt(shape[-2]) if len(shape) == 2 else 0.3
        return self.constant((around + scale * self.rng.standard_normal(shape)).astype(np.float32))

    def constant(self, value: Any) -> str:
        name = f"w{len(self.weights)}"
        array = np.asarray(value)
        self.weights[name] = array.astype(np.float32) if array.dtype == np.float64 else array
        return name

    def __call__(self, op: str, *inputs: str, outputs: int = 1, **attrs: Any) -> Any:
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(node(op, " ".join(inputs), " ".join(names), **attrs))
        return names[0] if outputs == 1 else names

    def built(self, result: str, inputs: dict[str, tuple[Any, ...]], opset: int = 17,
              kinds: dict[str, int] | None = None) -> onnx.ModelProto:
        self.nodes.append(node("Identity", result, "result"))
        return model(self.nodes, inputs, ["result"], self.weights, opset=opset, kinds=kinds)

    # ------------------------------------------------------------ as exporters take them apart
    def linear(self, x: str, inputs: int, outputs: int) -> str:
        return self("Add", self.weight(outputs), self("MatMul", x, self.weight(inputs, outputs)))

    def layer_norm(self, x: str, width: int) -> str:
        centred = self("Sub", x, self("ReduceMean", x, axes=[-1]))
        square = self("Pow", centred, self.constant(2.0))
        variance = self("ReduceMean", square, axes=[-1])
        deviation = self("Sqrt", self("Add", variance, self.constant(1e-5)))
        scaled = self("Mul", self("Div", centred, deviation), self.weight(width, around=1.0))
        return self("Add", scaled, self.weight(width))

    def rms_norm(self, x: str, width: int) -> str:
        mean = self("ReduceMean", self("Pow", x, self.constant(2.0)), axes=[-1])
        root = self("Sqrt", self("Add", mean, self.constant(1e-6)))
        return self("Mul", self.weight(width, around=1.0),
                    self("Mul", x, self("Div", self.constant(1.0), root)))

    def gelu(self, x: str) -> str:
        erf = self("Erf", self("Div", x, self.constant(math.sqrt(2))))
        return self("Mul", self("Mul", x, self("Add", erf, self.constant(1.0))),
                    self.constant(0.5))

    def tanh_gelu(self, x: str) -> str:
        cube = self("Mul", self("Pow", x, self.constant(3.0)), self.constant(0.044715))
        inner = self("Mul", self("Add", x, cube), self.constant(math.sqrt(2 / math.pi)))
        gate = self("Add", self("Tanh", inner), self.constant(1.0))
        return self("Mul", self("Mul", x, self.constant(0.5)), gate)

    def quick_gelu(self, x: str) -> str:
        return self("Mul", x, self("Sigmoid", self("Mul", x, self.constant(1.702))))

    def heads(self, x: str, count: int = HEADS) -> str:
        split = self("Reshape", x, self.constant(np.array([0, 0, count, SIZE])))
        return self("Transpose", split, perm=[0, 2, 1, 3])

    def attention(self, q: str, k: str, v: str, mask: str | None = None) -> str:
        scores = self("MatMul", q, self("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self("Div", scores, self.constant(math.sqrt(SIZE)))
        if mask is not None:
            scores = self("Add", scores, mask)
        y = self("MatMul", self("Softmax", scores, axis=-1), v)
        return self("Reshape", self("Transpose", y, perm=[0, 2, 1, 3]),
                    self.constant(np.array([0, 0, WIDTH])))

    def rotary(self, x: str, cos: str, sin: str) -> str:
        def part(start: int, end: int) -> str:
            return self("Slice", x, *(self.constant(np.array([n])) for n in (start, end, 3)))

        turned = self("Concat", self("Neg", part(SIZE // 2, SIZE)), part(0, SIZE // 2), axis=-1)
        return self("Add", self("Mul", x, cos), self("Mul", turned, sin))

    def rotary_of_neighbours(self, x: str, cos: str, sin: str) -> str:
        def every_second(start: int) -> str:
            cut = (self.constant(np.array([n])) for n in (start, SIZE, 3, 2))
            return self("Slice", x, *cut)

        axis = self.constant(np.array([-1]))
        parts = [self("Unsqueeze", p, axis)
                 for p in (self("Neg", every_second(1)), every_second(0))]
        turned = self("Reshape", self("Concat", *parts, axis=-1),
                      self.constant(np.array([BATCH, HEADS, PLACES, SIZE])))
        return self("Add", self("Mul", x, cos), self("Mul", turned, sin))

    def conv(self, x: str, inputs: int, outputs: int, size: int = 3, **attrs: Any) -> str:
        attrs = {"pads": [size // 2] * 4, **attrs}
        within = inputs // attrs.get("group", 1)
        return self("Conv", x, self.weight(outputs, within, size, size), **attrs)

    def batch_norm(self, x: str, channels: int) -> str:
        variance = self.constant((0.5 + self.rng.random(channels)).astype(np.float32))
        return self("BatchNormalization", x, self.weight(channels, around=1.0),
                    self.weight(channels), self.weight(channels), variance)

    def clipped(self, x: str) -> str:
        return self("Clip", x, self.constant(0.0), self.constant(6.0))


ROWS = {"x": (BATCH, PLACES, WIDTH)}
IMAGES = {"x": (1, 8, 9, 7)}


# ---------------------------------------------------------------- models by hand
def residual_block() -> onnx.ModelProto:
    n = Layers()
    y = n("Relu", n.batch_norm(n.conv("x", 8, 8), 8))
    y = n.batch_norm(n.conv(y, 8, 8), 8)
    return n.built(n("Relu", n("Add", y, "x")), IMAGES)


def inverted_residual() -> onnx.ModelProto:
    n = Layers()
    y = n.clipped(n.batch_norm(n.conv("x", 8, 16, 1), 16))
    padded = n("Pad", y, n.constant(np.array([0, 0, 1, 1, 0, 0, 1, 1])))
    y = n.clipped(n.batch_norm(n.conv(padded, 16, 16, group=16, pads=[0] * 4), 16))
    return n.built(n("Add", n.batch_norm(n.conv(y, 16, 8, 1), 8), "x"), IMAGES)


def norm_before_convolution() -> onnx.ModelProto:
    n = Layers()
    y = n.conv(n.batch_norm("x", 8), 8, 6, pads=[0] * 4)
    y = n("Mul", y, n.weight(6, 1, 1))
    return n.built(n("Sub", y, n.weight(1, 6, 1, 1)), IMAGES)


def encoder() -> onnx.ModelProto:
    """A layer of BERT, with a mask that is added."""
    n = Layers()
    q, k, v = (n.heads(n.linear("x", WIDTH, WIDTH)) for _ in range(3))
    y = n.linear(n.attention(q, k, v, "mask"), WIDTH, WIDTH)
    x = n.layer_norm(n("Add", y, "x"), WIDTH)
    y = n.linear(n.gelu(n.linear(x, WIDTH, 2 * WIDTH)), 2 * WIDTH, WIDTH)
    return n.built(n.layer_norm(n("Add", y, x), WIDTH), {**ROWS, "mask": (BATCH, 1, 1, PLACES)})


def causal_decoder() -> onnx.ModelProto:
    """A layer of GPT-2: products of merged rows, one for q, k and v, and a constant mask."""
    n = Layers()

    def gemm(x: str, inputs: int, outputs: int) -> str:
        rows = n("Reshape", x, n.constant(np.array([-1, inputs])))
        y = n("Gemm", rows, n.weight(inputs, outputs), n.weight(outputs))
        return n("Reshape", y, n.constant(np.array([BATCH, PLACES, outputs])))

    y = gemm(n.layer_norm("x", WIDTH), WIDTH, 3 * WIDTH)
    q, k, v = map(n.heads, n("Split", y, n.constant(np.array([WIDTH] * 3)), axis=2, outputs=3))
    mask = n.constant(np.triu(np.full((PLACES, PLACES), -3.4028235e38), 1))
    x = n("Add", gemm(n.attention(q, k, v, mask), WIDTH, WIDTH), "x")
    y = n.tanh_gelu(gemm(n.layer_norm(x, WIDTH), WIDTH, 2 * WIDTH))
    return n.built(n("Add", gemm(y, 2 * WIDTH, WIDTH), x), ROWS)


def _turned_decoder(neighbours: bool) -> onnx.ModelProto:
    """A layer of Llama: RMS norms, rotations, grouped heads, gated products."""
    n = Layers()
    angles = np.arange(PLACES)[:, None] / 10000 ** (np.arange(SIZE // 2) * 2 / SIZE)
    angles = np.repeat(angles, 2, -1) if neighbours else np.concatenate([angles, angles], -1)
    cos, sin = n.constant(np.cos(angles)), n.constant(np.sin(angles))
    shared = HEADS if neighbours else HEADS // 2
    rotate = n.rotary_of_neighbours if neighbours else n.rotary

    def repeated(x: str) -> str:
        if shared == HEADS:
            return x
        x = n("Unsqueeze", x, n.constant(np.array([2])))
        x = n("Expand", x, n.constant(np.array([BATCH, shared, HEADS // shared, PLACES, SIZE])))
        return n("Reshape", x, n.constant(np.array([BATCH, HEADS, PLACES, SIZE])))

    x = n.rms_norm("x", WIDTH)
    q, k, v = (n.heads(n("MatMul", x, n.weight(WIDTH, h * SIZE)), h)
               for h in (HEADS, shared, shared))
    y = n.attention(rotate(q, cos, sin), repeated(rotate(k, cos, sin)), repeated(v))
    x = n("Add", n("MatMul", y, n.weight(WIDTH, WIDTH)), "x")
    y = n.rms_norm(x, WIDTH)
    gate = n("MatMul", y, n.weight(WIDTH, 2 * WIDTH))
    gate = n("Mul", gate, n("Sigmoid", gate))
    y = n("Mul", gate, n("MatMul", y, n.weight(WIDTH, 2 * WIDTH)))
    return n.built(n("Add", n("MatMul", y, n.weight(2 * WIDTH, WIDTH)), x), ROWS)


def rotary_decoder() -> onnx.ModelProto:
    return _turned_decoder(neighbours=False)


def interleaved_rotary_decoder() -> onnx.ModelProto:
    return _turned_decoder(neighbours=True)


def patches() -> onnx.ModelProto:
    """The beginning of ViT with CLIP's activation: patches, rows, quick GELU."""
    n = Layers()
    y = n.conv("x", 8, WIDTH, pads=[0] * 4, strides=[3, 2])
    y = n("Transpose", n("Reshape", y, n.constant(np.array([1, WIDTH, -1]))), perm=[0, 2, 1])
    y = n.linear(n.quick_gelu(n.linear(n.layer_norm(y, WIDTH), WIDTH, WIDTH)), WIDTH, WIDTH)
    return n.built(y, IMAGES)


def shapes_computed() -> onnx.ModelProto:
    """Sizes read off tensors, chains of reshapes, transposes that cancel."""
    n = Layers()
    size = n("Gather", n("Shape", "x"), n.constant(np.array([0])))
    rows = n("Concat", size, n.constant(np.array([-1])), axis=0)
    y = n("Reshape", n("Reshape", "x", n.constant(np.array([-1]))), rows)
    y = n("Transpose", n("Transpose", y, perm=[1, 0]), perm=[1, 0])
    y = n("Relu", y)
    return n.built(n("Reshape", y, n.constant(np.array([BATCH, PLACES, WIDTH]))), ROWS)


def normed_perceptron() -> onnx.ModelProto:
    n = Layers()
    y = n.batch_norm(n("Gemm", "x", n.weight(16, 12), n.weight(16), transB=1), 16)
    return n.built(n("Gemm", n("Relu", y), n.weight(16, 3), n.weight(3)), {"x": (5, 12)})


BY_HAND: dict[str, Callable[[], onnx.ModelProto]] = {
    f.__name__: f for f in (
        residual_block, inverted_residual, norm_before_convolution, encoder, causal_decoder,
        rotary_decoder, interleaved_rotary_decoder, patches, shapes_computed, normed_perceptron)}


# ---------------------------------------------------------------- models exported from torch
def exported(name: str) -> tuple[onnx.ModelProto, list[np.ndarray], np.ndarray]:
    """One layer of a network as today's exporter writes it, with inputs and torch's result."""
    import torch

    torch.manual_seed(0)
    module, inputs = _NETWORKS[name]()
    module = module.eval()
    for part in module.modules():  # fresh norms are the identity, which exporters drop
        if isinstance(part, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(part.running_mean)
            torch.nn.init.uniform_(part.running_var, 0.5, 2.0)
    for parameter in module.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    with torch.no_grad():
        wanted = module(*inputs).numpy()
    proto = torch.onnx.export(module, inputs, dynamo=True, verbose=False).model_proto
    return proto, [i.numpy() for i in inputs], wanted


def _residual_network() -> tuple[Any, tuple[Any, ...]]:
    import torch

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (torch.nn.Sequential(
                torch.nn.Conv2d(8, 8, 3, padding=1, bias=False), torch.nn.BatchNorm2d(8))
                for _ in range(2))

        def forward(self, x: Any) -> Any:
            return torch.relu(self.second(torch.relu(self.first(x))) + x)

    return Block(), (torch.randn(1, 8, 9, 7),)


def _mobile_network() -> tuple[Any, tuple[Any, ...]]:
    import torch

    def layer(inputs: int, outputs: int, size: int, groups: int = 1) -> list[Any]:
        return [torch.nn.Conv2d(inputs, outputs, size, padding=size // 2, groups=groups,
                                bias=False), torch.nn.BatchNorm2d(outputs)]

    block = torch.nn.Sequential(*layer(8, 16, 1), torch.nn.ReLU6(), *layer(16, 16, 3, 16),
                                torch.nn.ReLU6(), *layer(16, 8, 1))
    return block, (torch.randn(1, 8, 9, 7),)


def _text_network(kind: str, masked: bool = False, **sizes: Any) -> Callable[..., Any]:
    def make() -> tuple[Any, tuple[Any, ...]]:
        import torch
        import transformers

        class First(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                config = getattr(transformers, f"{kind}Config")(
                    vocab_size=50, attn_implementation="sdpa", use_cache=False, **sizes)
                self.inner = getattr(transformers, f"{kind}Model")(config)

            def forward(self, ids: Any, mask: Any = None) -> Any:
                return self.inner(input_ids=ids, attention_mask=mask)[0]

        ids = torch.randint(0, 50, (BATCH, PLACES))
        return First(), (ids, torch.ones_like(ids)) if masked else (ids,)

    return make


def _image_network() -> tuple[Any, tuple[Any, ...]]:
    import torch
    import transformers

    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = transformers.ViTModel(transformers.ViTConfig(
                hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=HEADS,
                intermediate_size=64, image_size=16, patch_size=8, attn_implementation="sdpa"),
                add_pooling_layer=False)

        def forward(self, x: Any) -> Any:
            return self.inner(x).last_hidden_state

    return First(), (torch.randn(1, 3, 16, 16),)


_NETWORKS: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "resnet": _residual_network,
    "mobilenet": _mobile_network,
    "bert": _text_network("Bert", masked=True, hidden_size=WIDTH, num_hidden_layers=1,
                          num_attention_heads=HEADS, intermediate_size=64),
    "gpt2": _text_network("GPT2", n_embd=WIDTH, n_layer=1, n_head=HEADS, n_positions=32),
    "llama": _text_network("Llama", hidden_size=WIDTH, num_hidden_layers=1,
                           num_attention_heads=HEADS, num_key_value_heads=HEADS // 2,
                           intermediate_size=64, max_position_embeddings=32),
    "vit": _image_network,
}
EXPORTED = tuple(_NETWORKS)
