"""Decoders with a cache, token by token, beside onnxruntime: time a token, and compilations.

    python benchmarks/decoders.py                     # exports the models first, if missing
    python benchmarks/decoders.py --models FOLDER --tokens 100 --threads 2 --write

Models of `transformers` with random weights are exported by both of torch's exporters, with all of
batch, new and past places open. A prompt of 16 tokens, then one token after the other, each engine
fed with its own cache; the two take turns within each token, and results are compared. `--write`
puts the table into docs/onnx.md between its markers.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
MARKS = "<!-- decoders -->", "<!-- /decoders -->"
VOCABULARY, WIDTH, LAYERS, HEADS, PROMPT = 2048, 512, 4, 8, 16
MODELS = ("llama", "gpt2")
EXPORTERS = {"dynamo": True, "torchscript": False}


# ---------------------------------------------------------------- models
def _causal_model(kind: str) -> tuple[Any, int]:
    """A model of transformers with random weights, and how many heads its cache has."""
    import transformers as t

    if kind == "llama":
        config = t.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS // 2)
        return t.LlamaForCausalLM(config).eval(), HEADS // 2
    config = t.GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
                          bos_token_id=0, eos_token_id=0)
    return t.GPT2LMHeadModel(config).eval(), HEADS


def cache_names(prefix: str) -> list[str]:
    """The names of the cache's tensors, as inputs or as outputs."""
    return [f"{prefix}.{i}.{part}" for i in range(LAYERS) for part in ("key", "value")]


def export(kind: str, dynamo: bool, path: Path) -> None:
    """Write a model with its cache as inputs and outputs."""
    import torch
    from transformers.cache_utils import DynamicCache

    torch.manual_seed(0)
    model, heads = _causal_model(kind)

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, mask: Any, *past: Any) -> tuple[Any, ...]:
            cache = DynamicCache()
            for i in range(LAYERS):
                cache.update(past[2 * i], past[2 * i + 1], i)
            out = self.model(input_ids=ids, attention_mask=mask, past_key_values=cache)
            layers = out.past_key_values.layers
            return (out.logits, *(x for layer in layers for x in (layer.keys, layer.values)))

    batch, new, past = 2, 3, 5
    ids = torch.randint(0, VOCABULARY, (batch, new))
    mask = torch.ones(batch, past + new, dtype=torch.int64)
    caches = [torch.randn(batch, heads, past, WIDTH // HEADS) for _ in cache_names("past")]
    names = ["input_ids", "attention_mask", *cache_names("past")]
    outputs = ["logits", *cache_names("present")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            any_size = torch.export.Dim.DYNAMIC
            both = {0: any_size, 1: any_size}
            torch.onnx.export(
                Step(), (ids, mask, *caches), str(path), dynamo=True, external_data=False,
                input_names=names, output_names=outputs, verbose=False,
                dynamic_shapes=(both, both, tuple({0: any_size, 2: any_size} for _ in caches)))
        else:
            axes = {"input_ids": {0: "batch", 1: "new"}, "attention_mask": {0: "batch", 1: "total"},
                    **{n: {0: "batch", 2: "past"} for n in cache_names("past")}}
            torch.onnx.export(Step(), (ids, mask, *caches), str(path), dynamo=False,
                              input_names=names, output_names=outputs, dynamic_axes=axes)


# ---------------------------------------------------------------- decoding
class Decoder:
    """One engine in the middle of a text."""

    def __init__(self, run: Callable[[dict[str, Any]], list[Any]], heads: int):
        self.run, self.seconds = run, list[float]()
        empty = np.zeros((1, heads, 0, WIDTH // HEADS), np.float32)
        self.cache = [empty for _ in cache_names("past")]

    def step(self, ids: np.ndarray) -> np.ndarray:
        """The logits after some more tokens."""
        total = self.cache[0].shape[2] + ids.shape[1]
        feeds = {"input_ids": ids, "attention_mask": np.ones((1, total), np.int64),
                 **dict(zip(cache_names("past"), self.cache, strict=True))}
        start = time.perf_counter()
        logits, *self.cache = self.run(feeds)
        self.seconds.append(time.perf_counter() - start)
        return np.asarray(logits)


@dataclass(frozen=True)
class Row:
    """What was measured for one model."""

    model: str
    exporter: str
    compilations: int
    ours: float  # milliseconds a token
    theirs: float
    error: float  # of logits, against the largest


def measure(path: Path, model: str, exporter: str, tokens: int, threads: int) -> Row:
    """Decode with both engines in turns."""
    import onnxruntime as ort

    from terrazzo.frontends.onnx.session import Session

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    theirs = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    ours = Session(str(path), threads=threads)
    heads = next(i.shape[1] for i in theirs.get_inputs() if i.name.startswith("past"))
    engines = [Decoder(ours.run, heads), Decoder(lambda f: theirs.run(None, f), heads)]
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (1, PROMPT))
    error = 0.0
    for turn in range(tokens + 1):
        found = {}
        for i in (0, 1) if turn % 2 else (1, 0):
            time.sleep(0.01)  # so that idle workers of the other engine stop spinning
            found[i] = engines[i].step(ids)
        error = max(error, float(np.abs(found[0] - found[1]).max() / np.abs(found[1]).max()))
        ids = found[1][:, -1:].argmax(-1)
    # What disturbs the machine only ever adds: the fastest tenth of the tokens counts.
    times = [statistics.quantiles(e.seconds[1:], n=10)[0] * 1e3 for e in engines]
    return Row(model, exporter, max(ours.compilations, 1), times[0], times[1], error)


# ---------------------------------------------------------------- the table
def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| model | exporter | compilations | ms a token | onnxruntime | ratio |",
             "|---|---|---:|---:|---:|---:|"]
    lines += [f"| {r.model} | {r.exporter} | {r.compilations} | {r.ours:.2f} | {r.theirs:.2f} | "
              f"{r.ours / r.theirs:.2f} |" for r in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "decoders")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="put the table into docs/onnx.md")
    args = parser.parse_args()
    args.models.mkdir(parents=True, exist_ok=True)
    rows = []
    for model in MODELS:
        for exporter, dynamo in EXPORTERS.items():
            path = args.models / f"{model}_{exporter}.onnx"
            if not path.exists():
                export(model, dynamo, path)
            rows.append(measure(path, model, exporter, args.tokens, args.threads))
            if rows[-1].error > 1e-4:
                raise SystemExit(f"{path}: logits are off by {rows[-1].error:.1e}")
            print(rows[-1], flush=True)
    print(table(rows))
    if args.write:
        page = ROOT / "docs" / "onnx.md"
        text = page.read_text()
        before, rest = text.split(MARKS[0])
        after = rest.split(MARKS[1])[1]
        page.write_text(f"{before}{MARKS[0]}\n{table(rows)}\n{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
