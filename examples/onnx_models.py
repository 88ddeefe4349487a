"""A ResNet and a BERT as ONNX models with random weights, written node by node: nothing is loaded.

    python examples/onnx_models.py FOLDER      # resnet50.onnx and bert_base.onnx

`resnet()` and `bert()` take other sizes, small ones for tests included. Both settle what random
weights would spoil: activations neither fade to zero nor grow from layer to layer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

OPSET = 18
Size = int | str  # a number, or the name of a size that calls choose


class GraphWriter:
    """A model being written: nodes in order, and weights as they are needed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """The output of a new node."""
        output = f"{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output

    def weight(self, value: Any) -> str:
        """The name of a constant."""
        name = f"weight_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def normal(self, *shape: int, std: float) -> str:
        """The name of a weight drawn at random."""
        return self.weight(self.rng.standard_normal(shape, np.float32) * np.float32(std))

    def model(self, name: str, inputs: Sequence[Any], output: str, shape: Sequence[Size]
              ) -> ModelProto:
        """The whole model, with one float output."""
        self.nodes.append(helper.make_node("Identity", [output], ["output"], name="output"))
        made = helper.make_tensor_value_info("output", TensorProto.FLOAT, shape)
        graph = helper.make_graph(self.nodes, name, inputs, [made], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)],
                                 ir_version=10, producer_name="terrazzo's examples")


# ---------------------------------------------------------------- ResNet
def resnet(depths: Sequence[int] = (3, 4, 6, 3), width: int = 64, image: int = 224,
           classes: int = 1000, batch: Size = 1, seed: int = 0) -> ModelProto:
    """A ResNet of bottleneck blocks, batch norm folded into its convolutions: ResNet-50."""
    graph = GraphWriter(seed)

    def conv(x: str, wide: int, out: int, kernel: int, stride: int = 1, gain: float = 2.0) -> str:
        # He's initialisation keeps the variance through convolution and relu (gain 2). Without
        # statistics of a batch, the sums of a long chain of blocks stay bounded only if each
        # block adds little: its last convolution has a small gain (as in SkipInit).
        weights = graph.normal(out, wide, kernel, kernel, std=(gain / (wide * kernel**2)) ** 0.5)
        return graph.node("Conv", x, weights, graph.normal(out, std=0.1),
                          kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[kernel // 2] * 4)

    def block(x: str, wide: int, inner: int, stride: int) -> str:
        out = 4 * inner
        y = graph.node("Relu", conv(x, wide, inner, 1))
        y = graph.node("Relu", conv(y, inner, inner, 3, stride))
        y = conv(y, inner, out, 1, gain=0.2)
        shortcut = x if wide == out and stride == 1 else conv(x, wide, out, 1, stride, gain=1.0)
        return graph.node("Relu", graph.node("Add", y, shortcut))

    x = graph.node("Relu", conv("image", 3, width, 7, 2))
    x = graph.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    wide = width
    for stage, depth in enumerate(depths):
        inner = width << stage
        for i in range(depth):
            x = block(x, wide, inner, 2 if stage and not i else 1)
            wide = 4 * inner
    x = graph.node("Flatten", graph.node("GlobalAveragePool", x))
    x = graph.node("Gemm", x, graph.normal(classes, wide, std=wide**-0.5),
                   graph.normal(classes, std=0.1), transB=1)
    given = helper.make_tensor_value_info("image", TensorProto.FLOAT, [batch, 3, image, image])
    return graph.model("resnet", [given], x, [batch, classes])


# ---------------------------------------------------------------- BERT
def bert(layers: int = 12, hidden: int = 768, heads: int = 12, vocabulary: int = 30522,
         positions: int = 512, batch: Size = 1, sequence: Size = 128, seed: int = 0
         ) -> ModelProto:
    """A BERT encoder with its embeddings: BERT-base. Sizes may be names: bert(batch="batch")."""
    graph = GraphWriter(seed)
    each = hidden // heads

    def linear(x: str, wide: int, out: int) -> str:
        y = graph.node("MatMul", x, graph.normal(wide, out, std=wide**-0.5))
        return graph.node("Add", y, graph.normal(out, std=0.02))

    def norm(x: str) -> str:
        scale, shift = np.ones(hidden, np.float32), np.zeros(hidden, np.float32)
        return graph.node("LayerNormalization", x, graph.weight(scale), graph.weight(shift),
                          axis=-1, epsilon=1e-12)

    def gelu(x: str) -> str:
        erf = graph.node("Erf", graph.node("Mul", x, graph.weight(np.float32(0.5**0.5))))
        half = graph.node("Mul", x, graph.weight(np.float32(0.5)))
        return graph.node("Mul", half, graph.node("Add", erf, graph.weight(np.float32(1))))

    split = graph.weight(np.array([0, 0, heads, each]))
    join = graph.weight(np.array([0, 0, hidden]))

    def per_head(x: str, order: Sequence[int]) -> str:
        return graph.node("Transpose", graph.node("Reshape", x, split), perm=order)

    def attention(x: str, mask: str) -> str:
        query, key, value = (linear(x, hidden, hidden) for _ in range(3))
        scores = graph.node("MatMul", per_head(query, [0, 2, 1, 3]), per_head(key, [0, 2, 3, 1]))
        scores = graph.node("Mul", scores, graph.weight(np.float32(each**-0.5)))
        weights = graph.node("Softmax", graph.node("Add", scores, mask), axis=-1)
        mixed = graph.node("MatMul", weights, per_head(value, [0, 2, 1, 3]))
        mixed = graph.node("Reshape", graph.node("Transpose", mixed, perm=[0, 2, 1, 3]), join)
        return linear(mixed, hidden, hidden)

    words = graph.node("Gather", graph.normal(vocabulary, hidden, std=0.5), "input_ids")
    zero = graph.weight(np.array([0]))
    length = graph.node("Shape", "input_ids", start=1, end=2)
    places = graph.node("Slice", graph.normal(positions, hidden, std=0.5), zero, length, zero)
    x = norm(graph.node("Add", words, places))
    # A token that is masked out gets a score that no softmax lets through.
    present = graph.node("Cast", "attention_mask", to=TensorProto.FLOAT)
    absent = graph.node("Sub", graph.weight(np.float32(1)), present)
    mask = graph.node("Mul", absent, graph.weight(np.float32(np.finfo(np.float32).min)))
    mask = graph.node("Unsqueeze", mask, graph.weight(np.array([1, 2])))
    for _ in range(layers):
        x = norm(graph.node("Add", x, attention(x, mask)))
        y = linear(gelu(linear(x, hidden, 4 * hidden)), 4 * hidden, hidden)
        x = norm(graph.node("Add", x, y))
    given = [helper.make_tensor_value_info(n, TensorProto.INT64, [batch, sequence])
             for n in ("input_ids", "attention_mask")]
    return graph.model("bert", given, x, [batch, sequence, hidden])


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    folder.mkdir(parents=True, exist_ok=True)
    for name, build in (("resnet50", resnet), ("bert_base", bert)):
        path = folder / f"{name}.onnx"
        path.write_bytes(build().SerializeToString())
        print(f"{path}: {path.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
