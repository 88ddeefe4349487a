"""Models of transformers by `torch.compile(backend="terrazzo")`, beside eager and Inductor.

    python benchmarks/torch_models.py [--only REGEX] [--batch 1,8] [--threads 2] [--json FILE]

Random weights. A row is a model at a batch size, in a process of its own with empty caches: how far
results are from eager's (of the largest value), how long the first call took (compiling), the least
time of calls in turns, and the first call of a second process, which finds the caches. Rows named
train/.. are steps of AdamW: forward, backward and update.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 4.0  # of timing a row
LIMIT = 900  # seconds for a row
ENGINES = ("eager", "inductor", "inductor frozen", "ours", "ours frozen")
Call = Callable[[], Any]


# ---------------------------------------------------------------- models
def bert(batch: int, **sizes: Any) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**sizes)), {"input_ids": torch.randint(1, 1000, (batch, 128))}


def gpt2(batch: int, **sizes: Any) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(use_cache=False, **sizes)), {
        "input_ids": torch.randint(1, 1000, (batch, 128))}


def vit(batch: int) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig()), {"pixel_values": torch.randn(batch, 3, 224, 224)}


def resnet(batch: int, **sizes: Any) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import ResNetConfig, ResNetModel

    return ResNetModel(ResNetConfig(**sizes)), {"pixel_values": torch.randn(batch, 3, 224, 224)}


def llama(batch: int) -> tuple[Any, dict[str, Any]]:
    """A decoder of eight layers that writes one token after 127 others."""
    import torch
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(hidden_size=768, intermediate_size=2048, num_hidden_layers=8,
                         num_attention_heads=12, num_key_value_heads=4, vocab_size=8000)
    return _Cached(LlamaModel(config), config, batch), {
        "token": torch.randint(1, 1000, (batch, 1)),
        "past": torch.randn(2 * config.num_hidden_layers, batch, 4, 127, 64)}


def _Cached(model: Any, config: Any, batch: int) -> Any:
    import torch
    from transformers import DynamicCache

    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, token: Any, past: Any) -> Any:
            cache = DynamicCache(config=config)
            for layer in range(config.num_hidden_layers):
                cache.update(past[2 * layer], past[2 * layer + 1], layer)
            return self.model(input_ids=token, past_key_values=cache).last_hidden_state

    return Cached()


def t5(batch: int) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config()), {"input_ids": torch.randint(1, 1000, (batch, 128))}


def whisper(batch: int) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return WhisperEncoder(WhisperConfig(d_model=384, encoder_layers=4, encoder_attention_heads=6,
                                        encoder_ffn_dim=1536)), {
        "input_features": torch.randn(batch, 80, 3000)}


def convnext(batch: int) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import ConvNextConfig, ConvNextModel

    return ConvNextModel(ConvNextConfig()), {"pixel_values": torch.randn(batch, 3, 224, 224)}


def mamba(batch: int) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import MambaConfig, MambaModel

    return MambaModel(MambaConfig(hidden_size=384, num_hidden_layers=4, vocab_size=8000,
                                  use_cache=False)), {
        "input_ids": torch.randint(1, 1000, (batch, 64))}


def bert_small(batch: int) -> tuple[Any, dict[str, Any]]:
    return bert(batch, hidden_size=512, num_hidden_layers=4, num_attention_heads=8,
                intermediate_size=2048, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def gpt2_small(batch: int) -> tuple[Any, dict[str, Any]]:
    return gpt2(batch, n_layer=4, n_embd=512, n_head=8, attn_pdrop=0.0, embd_pdrop=0.0,
                resid_pdrop=0.0)


def resnet18(batch: int) -> tuple[Any, dict[str, Any]]:
    return resnet(batch, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2],
                  layer_type="basic")


INFERENCE: dict[str, Callable[[int], tuple[Any, dict[str, Any]]]] = {
    "bert": bert, "gpt2": gpt2, "vit": vit, "resnet50": resnet, "llama": llama, "t5": t5,
    "whisper": whisper, "convnext": convnext, "mamba": mamba}
TRAINING: dict[str, Callable[[int], tuple[Any, dict[str, Any]]]] = {
    "train/bert_small": bert_small, "train/gpt2_small": gpt2_small, "train/resnet18": resnet18}


# ---------------------------------------------------------------- one row
def first(answer: Any) -> Any:
    """The first tensor of what a model answers."""
    import torch

    while not isinstance(answer, torch.Tensor):
        answer = answer[0]
    return answer


def compiled(model: Any, engine: str) -> Any:
    import torch

    if engine == "eager":
        return model
    if engine.startswith("inductor"):
        return torch.compile(model, options={"freezing": True} if "frozen" in engine else None)
    from terrazzo.torch.backend import terrazzo

    return torch.compile(model, backend=terrazzo,
                         options={"freeze": True} if "frozen" in engine else None)


def inference(name: str, batch: int, engine: str) -> Call:
    import torch

    torch.manual_seed(0)
    model, inputs = INFERENCE[name](batch)
    run = compiled(model.eval(), engine)

    def call() -> Any:
        with torch.no_grad():
            return first(run(**inputs))

    return call


def training(name: str, batch: int, engine: str) -> Call:
    import torch

    torch.manual_seed(0)
    model, inputs = TRAINING[name](batch)
    run = compiled(model.train(), engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def call() -> Any:
        optimizer.zero_grad()
        loss = first(run(**inputs)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return call


def measure(name: str, batch: int, threads: int, engines: list[str], seconds: float
            ) -> dict[str, Any]:
    """First calls, distances from eager, and the least times of calls in turns."""
    import torch

    from terrazzo.knobs import knobs

    torch.set_num_threads(threads)
    knobs.threads = threads
    make = training if name in TRAINING else inference
    row: dict[str, Any] = {"name": name, "batch": batch, "first": {}, "error": {}, "ms": {}}
    calls: dict[str, Call] = {}
    wanted = make(name, batch, "eager")().double()
    for engine in engines:
        torch._dynamo.reset()
        call = make(name, batch, engine)
        at = time.perf_counter()
        try:
            found = call().double()
        except Exception as error:
            row["error"][engine] = f"{type(error).__name__}: {str(error).strip()[:200]}"
            continue
        row["first"][engine] = time.perf_counter() - at
        row["error"][engine] = float((found - wanted).abs().max() / wanted.abs().max())
        calls[engine] = call
    times: dict[str, list[float]] = {e: [] for e in calls}
    until = time.perf_counter() + seconds * len(calls)
    while seconds and (time.perf_counter() < until or len(times[engines[0]]) < 5):
        for engine, call in calls.items():
            time.sleep(0.01)  # until threads of another engine have stopped spinning
            for _ in range(2):  # the first brings its weights back into the caches
                at = time.perf_counter()
                call()
                took = time.perf_counter() - at
            times[engine].append(took)
    row["ms"] = {e: 1e3 * min(t) for e, t in times.items() if t}
    return row


# ---------------------------------------------------------------- all rows
def apart(name: str, batch: int, threads: int) -> dict[str, Any]:
    """A row, measured in one process, and its first calls again in a second one."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TZ_CACHE_DIR": f"{folder}/tz"}

        def child(*more: str) -> dict[str, Any]:
            command = [sys.executable, __file__, "--one", name, "--batch", str(batch),
                       "--threads", str(threads), *more]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT,
                                  env={**os.environ, **caches, "OMP_NUM_THREADS": str(threads)})
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if not lines:
                return {"name": name, "batch": batch, "failed": done.stderr.strip()[-300:]}
            row: dict[str, Any] = json.loads(lines[-1])
            return row

        row = child()
        if "first" in row:
            row["again"] = {e: child("--engines", e, "--seconds", "0").get("first", {}).get(e)
                            for e in ("inductor", "ours")}
    return row


def mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else float("nan")


def report(rows: list[dict[str, Any]]) -> None:
    print("| model | batch | eager ms | " + " | ".join(ENGINES[1:])
          + " | compile: inductor, ours s | again | error |\n|" + "---|" * 10)
    for r in rows:
        if "ms" not in r:
            print(f"| {r['name']} | {r['batch']} | failed: {r['failed']} |")
            continue
        eager = r["ms"]["eager"]
        speeds = [f"{eager / r['ms'][e]:.2f}" if e in r["ms"] else "-" for e in ENGINES[1:]]
        cold = ", ".join(f"{r['first'].get(e, float('nan')):.1f}" for e in ("inductor", "ours"))
        again = ", ".join(f"{v:.1f}" if v else "-" for v in r["again"].values())
        errors = ", ".join(f"{v:.0e}" if isinstance(v, float) else v[:80]
                           for e, v in r["error"].items() if e.startswith("ours"))
        print(f"| {r['name']} | {r['batch']} | {eager:.1f} | {' | '.join(speeds)} | {cold} | "
              f"{again} | {errors} |")
    for kind, names in (("inference", INFERENCE), ("training", TRAINING)):
        ran = [r["ms"] for r in rows if r["name"] in names and "ms" in r]
        for ours, others in (("ours", ("eager", "inductor")),
                             ("ours frozen", ("eager", "inductor", "inductor frozen"))):
            for other in others:
                found = [m[other] / m[ours] for m in ran if ours in m and other in m]
                if found:
                    print(f"{kind}: {ours} {mean(found):.2f} times {other} (least "
                          f"{min(found):.2f}, {len(found)} rows)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression over names")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--engines", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    batches = [int(b) for b in given.batch.split(",")]
    if given.one:
        training_row = given.one in TRAINING
        engines = [given.engines] if given.engines else [
            e for e in ENGINES if not (training_row and "frozen" in e)]
        print(json.dumps(measure(given.one, batches[0], given.threads, engines, given.seconds)))
        return
    rows = []
    for name in [*INFERENCE, *TRAINING]:
        if re.search(given.only, name):
            for batch in [8] if name in TRAINING else batches:
                rows.append(apart(name, batch, given.threads))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                if given.json:
                    given.json.write_text(json.dumps(rows, indent=1))
    report(rows)


if __name__ == "__main__":
    main()
