"""Decoders with a cache, token by token, beside onnxruntime: time a token, and compilations.

    python benchmarks/decoders.py                     # exports the models first, if missing
    python benchmarks/decoders.py --models FOLDER --tokens 100 --threads 2 --write

Models of `transformers` with random weights are exported by both of torch's exporters, with all of
batch, new and past places open. Decoders of T5, BART and Whisper get the keys and values of their
encoder as inputs, as in the second and later steps of a generation. A prompt of 16 tokens, then one
token after the other, each engine fed with its own cache; the two take turns within each token, and
results are compared. `--write` puts the table into docs/onnx.md between its markers.
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
MODELS = ("llama", "mistral", "qwen2", "gpt2", "t5", "bart", "whisper")
EXPORTERS = {"dynamo": True, "torchscript": False}
SOURCE = 24  # places of the encoder that a decoder looks at


# ---------------------------------------------------------------- models
def _config(kind: str) -> Any:
    """The configuration of a small model of transformers."""
    import transformers as t

    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    many = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH,
            "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS // 2, **ends}
    coder = {"vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 1,
             "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
             "decoder_attention_heads": HEADS, "encoder_ffn_dim": 4 * WIDTH,
             "decoder_ffn_dim": 4 * WIDTH, "decoder_start_token_id": 0, **ends}
    return {
        "llama": lambda: t.LlamaConfig(**many),
        "mistral": lambda: t.MistralConfig(**many),
        "qwen2": lambda: t.Qwen2Config(**many),
        "gpt2": lambda: t.GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS,
                                     n_head=HEADS, **ends),
        "t5": lambda: t.T5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=WIDTH // HEADS,
                                 d_ff=4 * WIDTH, num_layers=1, num_decoder_layers=LAYERS,
                                 num_heads=HEADS, decoder_start_token_id=0,
                                 # torch.export stumbles over strides of its fused attention
                                 attn_implementation="eager", **ends),
        "bart": lambda: t.BartConfig(**coder),
        "whisper": lambda: t.WhisperConfig(**coder),
    }[kind]()


def _model(kind: str) -> Any:
    """A model of transformers with random weights."""
    import transformers as t

    classes = {"llama": t.LlamaForCausalLM, "mistral": t.MistralForCausalLM,
               "qwen2": t.Qwen2ForCausalLM, "gpt2": t.GPT2LMHeadModel,
               "t5": t.T5ForConditionalGeneration, "bart": t.BartForConditionalGeneration,
               "whisper": t.WhisperForConditionalGeneration}
    return classes[kind](_config(kind)).eval()


def cache_names(prefix: str) -> list[str]:
    """The names of a cache's tensors, as inputs or as outputs."""
    return [f"{prefix}.{i}.{part}" for i in range(LAYERS) for part in ("key", "value")]


def _causal_step(model: Any) -> Callable[..., tuple[Any, ...]]:
    from transformers.cache_utils import DynamicCache

    def step(ids: Any, mask: Any, *past: Any) -> tuple[Any, ...]:
        cache = DynamicCache()
        for i in range(LAYERS):
            cache.update(past[2 * i], past[2 * i + 1], i)
        out = model(input_ids=ids, attention_mask=mask, past_key_values=cache)
        return out.logits, *_held(out.past_key_values)

    return step


def _cross_step(model: Any) -> Callable[..., tuple[Any, ...]]:
    """A step of a decoder that looks at an encoder, whose keys and values are made already."""
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    def step(ids: Any, states: Any, *caches: Any) -> tuple[Any, ...]:
        own, cross = DynamicCache(), DynamicCache()
        for i in range(LAYERS):
            own.update(caches[2 * i], caches[2 * i + 1], i)
            cross.update(*caches[2 * (LAYERS + i):2 * (LAYERS + i) + 2], i)
        both = EncoderDecoderCache(own, cross)
        both.is_updated = dict.fromkeys(range(LAYERS), True)
        out = model(decoder_input_ids=ids, encoder_outputs=(states,), past_key_values=both)
        return out.logits, *_held(out.past_key_values.self_attention_cache)

    return step


def _held(cache: Any) -> list[Any]:
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


@dataclass(frozen=True)
class Exported:
    """What an exporter is given: a step, its inputs by name, and which axes are open."""

    step: Any
    inputs: dict[str, Any]
    axes: dict[str, dict[int, str]]


def _exported(kind: str) -> Exported:
    import torch

    torch.manual_seed(0)
    model = _model(kind)
    crosses = model.config.is_encoder_decoder
    heads = HEADS if crosses else getattr(model.config, "num_key_value_heads", HEADS)

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.step = (_cross_step if crosses else _causal_step)(model)

        def forward(self, *inputs: Any) -> tuple[Any, ...]:
            return self.step(*inputs)

    batch, new, past = 2, 3, 5
    inputs = {"input_ids": torch.randint(0, VOCABULARY, (batch, new))}
    axes = {"input_ids": {0: "batch", 1: "new"}}
    if crosses:
        inputs["states"] = torch.randn(batch, SOURCE, WIDTH)
        axes["states"] = {0: "batch", 1: "source"}
    else:
        inputs["attention_mask"] = torch.ones(batch, past + new, dtype=torch.int64)
        axes["attention_mask"] = {0: "batch", 1: "total"}
    for prefix, length, name in (("past", past, "past"), ("cross", SOURCE, "source")):
        if prefix == "past" or crosses:
            for n in cache_names(prefix):
                inputs[n] = torch.randn(batch, heads, length, WIDTH // HEADS)
                axes[n] = {0: "batch", 2: name}
    return Exported(Step().eval(), inputs, axes)


def export(kind: str, dynamo: bool, path: Path) -> None:
    """Write a model with its cache as inputs and outputs."""
    import torch

    made = _exported(kind)
    how: dict[str, Any] = {"dynamo": False, "dynamic_axes": made.axes}
    if dynamo:
        open_axes = tuple({d: torch.export.Dim.DYNAMIC for d in made.axes[n]} for n in made.inputs)
        how = {"dynamo": True, "external_data": False, "verbose": False,
               "dynamic_shapes": (open_axes,)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(made.step, tuple(made.inputs.values()), str(path),
                          input_names=list(made.inputs),
                          output_names=["logits", *cache_names("present")], **how)


# ---------------------------------------------------------------- decoding
class Decoder:
    """One engine in the middle of a text."""

    def __init__(self, run: Callable[[dict[str, Any]], list[Any]], shapes: dict[str, Any]):
        self.run, self.seconds = run, list[float]()
        rng = np.random.default_rng(1)
        heads = shapes["past.0.key"][1]
        empty = np.zeros((1, heads, 0, WIDTH // HEADS), np.float32)
        self.cache = [empty for _ in cache_names("past")]
        sizes = {"states": (1, SOURCE, WIDTH),
                 **{n: (1, heads, SOURCE, WIDTH // HEADS) for n in cache_names("cross")}}
        self.fixed = {n: rng.standard_normal(size).astype(np.float32)
                      for n, size in sizes.items() if n in shapes}
        self.masked = "attention_mask" in shapes

    def step(self, ids: np.ndarray) -> np.ndarray:
        """The logits after some more tokens."""
        total = self.cache[0].shape[2] + ids.shape[1]
        feeds = {"input_ids": ids, **self.fixed,
                 **dict(zip(cache_names("past"), self.cache, strict=True))}
        if self.masked:
            feeds["attention_mask"] = np.ones((1, total), np.int64)
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
    shapes = {i.name: i.shape for i in theirs.get_inputs()}
    engines = [Decoder(ours.run, shapes), Decoder(lambda f: theirs.run(None, f), shapes)]
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
    parser.add_argument("--only", default=",".join(MODELS), help="of them, with commas")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="put the table into docs/onnx.md")
    args = parser.parse_args()
    args.models.mkdir(parents=True, exist_ok=True)
    rows = []
    for model in args.only.split(","):
        for exporter, dynamo in EXPORTERS.items():
            path = args.models / f"{model}_{exporter}.onnx"
            if not path.exists():
                try:
                    export(model, dynamo, path)
                except Exception as error:  # an exporter's limits are not ours
                    print(f"{path.stem} is not exported: {type(error).__name__}", flush=True)
                    path.unlink(missing_ok=True)
                    continue
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
