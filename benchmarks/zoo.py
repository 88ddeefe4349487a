"""Nine well-known models with random weights, exported to ONNX by PyTorch; nothing is downloaded.

    python benchmarks/zoo.py FOLDER [name ...]

Leaves NAME.onnx with weights inside, static sizes and batch 1, and NAME.npz with inputs (`in_` and
their name) and PyTorch's own output (`out_0`). Needs torch, transformers, onnx and onnxscript.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

SEED = 20260101
OPSET = 18


@dataclass(frozen=True)
class Recipe:
    """How a model is made from classes of transformers, and what it is called with."""

    model: str
    config: str
    settings: dict[str, Any]
    output: str  # the field of the answer that is compared
    inputs: Callable[[], dict[str, Any]]
    fixed: dict[str, Any] = field(default_factory=dict)  # arguments of every call


def _image() -> dict[str, Any]:
    import torch

    return {"pixel_values": torch.randn(1, 3, 224, 224)}


def _speech() -> dict[str, Any]:
    import torch

    return {"input_features": torch.randn(1, 80, 3000)}


def _tokens(vocabulary: int, length: int, masked: bool) -> dict[str, Any]:
    import torch

    tokens = {"input_ids": torch.randint(vocabulary, (1, length))}
    return {**tokens, "attention_mask": torch.ones(1, length, dtype=torch.int64)} if masked else (
        tokens)


RECIPES = {
    "resnet50": Recipe(
        "ResNetForImageClassification", "ResNetConfig",
        {"depths": [3, 4, 6, 3], "hidden_sizes": [256, 512, 1024, 2048], "embedding_size": 64,
         "layer_type": "bottleneck", "num_labels": 1000}, "logits", _image),
    "mobilenetv2": Recipe("MobileNetV2ForImageClassification", "MobileNetV2Config",
                          {"num_labels": 1001}, "logits", _image),
    "vit_base": Recipe("ViTForImageClassification", "ViTConfig", {"num_labels": 1000}, "logits",
                       _image),
    "bert_base": Recipe("BertModel", "BertConfig", {}, "last_hidden_state",
                        lambda: _tokens(30522, 128, True)),
    "gpt2": Recipe("GPT2LMHeadModel", "GPT2Config", {}, "logits",
                   lambda: _tokens(50257, 64, False), {"use_cache": False}),
    "t5_encoder": Recipe("T5EncoderModel", "T5Config", {}, "last_hidden_state",
                         lambda: _tokens(32128, 128, True)),
    "distilbert": Recipe("DistilBertModel", "DistilBertConfig", {}, "last_hidden_state",
                         lambda: _tokens(30522, 128, True)),
    "whisper_encoder": Recipe("WhisperEncoder", "WhisperConfig",
                              {"d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6,
                               "encoder_ffn_dim": 1536}, "last_hidden_state", _speech),
    "convnext_tiny": Recipe("ConvNextForImageClassification", "ConvNextConfig",
                            {"num_labels": 1000}, "logits", _image),
}


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """A torch module that takes its inputs in order and answers one tensor, and such inputs."""
    import torch
    import transformers

    recipe = RECIPES[name]
    torch.manual_seed(SEED)
    config = getattr(transformers, recipe.config)(**recipe.settings)
    inner = _found(transformers, recipe.model)(config).eval()
    inputs = recipe.inputs()
    _settle_statistics(inner, recipe)

    class OneOutput(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *tensors: Any) -> Any:
            answer = self.inner(**dict(zip(inputs, tensors)), **recipe.fixed)
            return getattr(answer, recipe.output)

    return OneOutput().eval(), inputs


def _found(transformers: Any, name: str) -> Any:
    """A class of transformers; parts of models are not on its first page."""
    if hasattr(transformers, name):
        return getattr(transformers, name)
    from transformers.models.whisper import modeling_whisper

    return getattr(modeling_whisper, name)


def _settle_statistics(model: Any, recipe: Recipe) -> None:
    """Batch norms measure what passes through them, or dozens of random layers fade to nothing."""
    import torch

    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms:
        torch.nn.init.uniform_(norm.weight, 0.6, 1.4)
        torch.nn.init.normal_(norm.bias, std=0.1)
        norm.momentum = 1.0  # the statistics of the last batch are the ones kept
        norm.train()
    if norms:
        with torch.no_grad():
            model(**{n: torch.randn(4, *t.shape[1:]) for n, t in recipe.inputs().items()})
    for norm in norms:
        norm.eval()


def export(name: str, folder: Path) -> Path:
    """Write a model and its inputs and output; answers the model's path."""
    import torch

    module, inputs = build(name)
    arguments = tuple(inputs.values())
    with torch.inference_mode():
        wanted = module(*arguments).numpy()
    path = folder / f"{name}.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names: dict[str, Any] = {"input_names": list(inputs), "output_names": ["out_0"]}
        try:
            torch.onnx.export(module, arguments, path, dynamo=True, opset_version=OPSET,
                              external_data=False, verbose=False, **names)
        except torch.onnx.OnnxExporterError:  # what some versions cannot follow, others trace
            torch.onnx.export(module, arguments, path, dynamo=False, opset_version=17, **names)
    arrays = {f"in_{n}": t.numpy() for n, t in inputs.items()}
    np.savez(path.with_suffix(".npz"), out_0=wanted, **arrays)
    return path


def main() -> None:
    folder, *names = sys.argv[1:] or ["."]
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name in names or RECIPES:
        started = time.perf_counter()
        path = export(name, Path(folder))
        print(f"{path}: {path.stat().st_size / 2**20:.0f} MiB, "
              f"{time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
