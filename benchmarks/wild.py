"""A hundred and more models as people have them, against onnxruntime: right, and how fast.

    python benchmarks/wild.py [--only REGEX] [--threads 2] [--jobs 1] [--write]

One model of each family of timm, several of torchvision and of transformers, with random weights,
are exported by PyTorch and run in both engines. Each model has a process of its own, so that one
that fails costs one row. A row says how far results are from onnxruntime's (of the largest value),
how long we take of its time (minimums of alternating runs), and how long loading took cold. Models
that PyTorch itself cannot export or onnxruntime cannot run are listed, and not counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).parent.parent / "docs" / "onnx.md"
MARKS = "<!-- wild: begin -->", "<!-- wild: end -->"
SEED = 20260101
TOLERANCE = 2e-3  # of the largest value: dozens of random layers amplify the last bits
SECONDS = 2.0  # of timing a model
LIMIT = 900  # seconds for a model
# With settled statistics a change of 1e-7 in the input changes half of the result, in float64 too.
CHAOTIC = {"transformers/levit"}

TIMM = """
beit_base_patch16_224 halonet26t mobileone_s0 cait_xxs24_224 coat_tiny convit_tiny convnext_atto
crossvit_tiny_240 cs3darknet_s davit_tiny deit_tiny_patch16_224 densenet121 dla34 dpn68
edgenext_xx_small efficientformer_l1 efficientformerv2_s0 efficientnet_b0 efficientvit_b0
efficientvit_m0 eva02_tiny_patch14_224 fasternet_t0 fastvit_t12 focalnet_tiny_lrf gcvit_xtiny
ghostnet_050 hardcorenas_a hgnet_tiny hiera_tiny_224 hrnet_w18_small inception_next_atto
inception_v3 levit_128s mambaout_femto maxvit_pico_rw_256 caformer_s18 gmlp_s16_224
mobilenetv3_small_050 mobilevit_xxs mvitv2_tiny nest_tiny nextvit_small nf_regnet_b0 pit_xs_224
pvt_v2_b0 rdnet_tiny regnety_002 repghostnet_050 repvit_m0_9 res2net50_14w_8s
resnest50d_1s4x24d resnet18 resnetv2_18 rexnet_100 selecsls42 sequencer2d_s shvit_s1 skresnet18
starnet_s050 swiftformer_xs swin_s3_tiny_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224
tiny_vit_5m_224 tnt_s_patch16_224 twins_svt_small vgg11 visformer_tiny
vit_xsmall_patch16_clip_224 vit_relpos_small_patch16_224 vitamin_small_224 volo_d1_224
ese_vovnet19b_slim xception41 xcit_nano_12_p8_224
"""
TORCHVISION = """
alexnet deeplabv3_mobilenet_v3_large fcn_resnet50 googlenet lraspp_mobilenet_v3_large mc3_18
mnasnet1_0 mobilenet_v2 r2plus1d_18 raft_small shufflenet_v2_x1_0 squeezenet1_1 swin_t
swin3d_t vit_b_32
"""

_SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
          "intermediate_size": 1024, "vocab_size": 1000}
_DECODER = {**_SMALL, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0}
# class of the model, settings of its configuration that differ, what it is called with
TRANSFORMERS: dict[str, tuple[str, dict[str, Any], str]] = {
    **{name.lower(): (f"{name}Model", _SMALL, "tokens") for name in (
        "Albert", "Bert", "Camembert", "Data2VecText", "Electra", "Ernie", "Esm", "IBert",
        "MPNet", "MegatronBert", "MobileBert", "Roberta", "RoFormer", "XLMRoberta",
        "ConvBert", "SqueezeBert", "DebertaV2", "LayoutLM", "ModernBert", "RemBert", "Splinter")},
    **{name.lower(): (f"{name}Model", _DECODER, "tokens") for name in (
        "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Phi", "StableLm", "Cohere", "Olmo",
        "Granite", "Starcoder2", "GPTNeoX", "Persimmon", "Falcon")},
    "distilbert": ("DistilBertModel", {"dim": 256, "n_layers": 4, "n_heads": 4,
                                       "hidden_dim": 1024, "vocab_size": 1000}, "tokens"),
    "gpt2": ("GPT2Model", {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 1000,
                           "use_cache": False}, "tokens"),
    "opt": ("OPTModel", {**_DECODER, "ffn_dim": 1024, "word_embed_proj_dim": 256}, "tokens"),
    "bloom": ("BloomModel", {"hidden_size": 256, "n_layer": 4, "n_head": 4, "vocab_size": 1000,
                             "use_cache": False}, "tokens"),
    "xlnet": ("XLNetModel", {"d_model": 256, "n_layer": 4, "n_head": 4, "d_inner": 1024,
                             "vocab_size": 1000}, "tokens"),
    "funnel": ("FunnelModel", {"d_model": 256, "n_head": 4, "d_head": 64, "d_inner": 1024,
                               "block_sizes": [2, 2, 2], "vocab_size": 1000}, "tokens"),
    "fnet": ("FNetModel", _SMALL, "tokens"),
    "t5": ("T5EncoderModel", {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4,
                              "num_heads": 4, "vocab_size": 1000}, "tokens"),
    "whisper": ("WhisperEncoder", {"d_model": 256, "encoder_layers": 4,
                                   "encoder_attention_heads": 4, "encoder_ffn_dim": 1024}, "mel"),
    "wav2vec2": ("Wav2Vec2Model", {**_SMALL, "conv_dim": (128,) * 7}, "sound"),
    "hubert": ("HubertModel", {**_SMALL, "conv_dim": (128,) * 7}, "sound"),
    **{name.lower(): (f"{name}Model", {"hidden_size": 256, "num_hidden_layers": 4,
                                       "num_attention_heads": 4, "intermediate_size": 1024},
                      "image") for name in ("ViT", "DeiT", "Beit", "Dinov2", "ViTMAE")},
    **{name.lower(): (f"{name}Model", {}, "image") for name in (
        "ConvNext", "ConvNextV2", "MobileNetV1", "MobileViT", "PoolFormer", "RegNet", "ResNet",
        "Segformer", "Swin", "PvtV2", "Levit", "EfficientFormer", "Bit", "FocalNet")},
    "swin2sr": ("Swin2SRModel", {"depths": [2, 2], "num_heads": [2, 2], "embed_dim": 60}, "patch"),
}


# ---------------------------------------------------------------- making models
def names() -> list[str]:
    """Every model, as library/name."""
    listed = {"timm": TIMM.split(), "torchvision": TORCHVISION.split(),
              "transformers": TRANSFORMERS}
    return [f"{library}/{name}" for library, found in listed.items() for name in found]


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """A torch module that answers one tensor, and inputs for it by name."""
    import torch

    library, _, which = name.partition("/")
    torch.manual_seed(SEED)
    module, inputs = _BUILDERS[library](which)
    module = _OneOutput(module.eval(), inputs, named=library == "transformers").eval()
    if name not in CHAOTIC:
        _settle_statistics(module, inputs)
    return module, inputs


def _OneOutput(inner: Any, inputs: dict[str, Any], named: bool) -> Any:
    import torch

    class OneOutput(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *tensors: Any) -> Any:
            answer = self.inner(**dict(zip(inputs, tensors))) if named else self.inner(*tensors)
            while not isinstance(answer, torch.Tensor):
                if isinstance(answer, dict) or hasattr(answer, "values"):
                    answer = next(iter(answer.values()))
                else:
                    answer = answer[-1]
            return answer

    return OneOutput()


def _settle_statistics(model: Any, inputs: dict[str, Any]) -> None:
    """Batch norms measure what passes through them, or dozens of random layers fade to nothing."""
    import torch

    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    if norms:
        with torch.no_grad():
            model(*(torch.randn(4, *t.shape[1:]) if t.is_floating_point() else
                    t.repeat(4, *[1] * (t.ndim - 1)) for t in inputs.values()))
    for norm in norms:
        norm.eval()


def _timm(name: str) -> tuple[Any, dict[str, Any]]:
    _torchvision_library()
    import timm
    import torch

    model = timm.create_model(name, pretrained=False)
    return model, {"x": torch.randn(1, *model.default_cfg["input_size"])}


def _torchvision(name: str) -> tuple[Any, dict[str, Any]]:
    import torch

    models = _torchvision_library().models
    model = models.get_model(name, weights=None, **(
        {"weights_backbone": None} if "deeplab" in name or "fcn" in name or "lraspp" in name
        else {}))
    if name.startswith("raft"):
        return model, {n: torch.randn(1, 3, 128, 128) for n in ("first", "second")}
    video = name in ("mc3_18", "r2plus1d_18", "swin3d_t")
    return model, {"x": torch.randn(1, 3, 8, 64, 64) if video else torch.randn(1, 3, 224, 224)}


def _torchvision_library() -> Any:
    """torchvision, also where its compiled operators do not fit the torch that is installed."""
    import torch

    try:
        import torchvision
    except RuntimeError:
        for name in [m for m in sys.modules if m.startswith("torchvision")]:
            del sys.modules[name]
        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, "
                                 "float iou_threshold) -> Tensor")
        import torchvision
    return torchvision


def _transformers(name: str) -> tuple[Any, dict[str, Any]]:
    if importlib.util.find_spec("torchvision") is not None:
        _torchvision_library()  # which transformers imports by itself
    import torch
    import transformers
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    class_name, settings, kind = TRANSFORMERS[name]
    model = WhisperEncoder if class_name == "WhisperEncoder" else getattr(transformers, class_name)
    allowed = model.config_class()
    config = model.config_class(**{k: v for k, v in settings.items() if hasattr(allowed, k)})
    inputs = {
        "tokens": lambda: {"input_ids": torch.randint(1, 1000, (1, 64)),
                           "attention_mask": torch.ones(1, 64, dtype=torch.int64)},
        "image": lambda: {"pixel_values": torch.randn(1, 3, 224, 224)},
        "patch": lambda: {"pixel_values": torch.randn(1, 3, 64, 64)},
        "mel": lambda: {"input_features": torch.randn(1, 80, 3000)},
        "sound": lambda: {"input_values": torch.randn(1, 16000)},
    }[kind]()
    if name in ("layoutlm",):
        inputs["bbox"] = torch.zeros(1, 64, 4, dtype=torch.int64)
    if name == "vitmae":
        inputs["noise"] = torch.rand(1, 196)  # which patches it looks at: else at random
    return model(config), inputs


_BUILDERS: dict[str, Callable[[str], tuple[Any, dict[str, Any]]]] = {
    "timm": _timm, "torchvision": _torchvision, "transformers": _transformers,
}


def export(name: str, path: Path) -> dict[str, np.ndarray]:
    """Write a model; answers inputs for it."""
    import torch

    module, inputs = build(name)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        arguments = tuple(inputs.values())
        options = {"input_names": list(inputs), "output_names": ["out"], "opset_version": 18}
        try:
            torch.onnx.export(module, arguments, path, dynamo=False, **options)
        except Exception:
            torch.onnx.export(module, arguments, path, dynamo=True, external_data=False,
                              verbose=False, **options)
    return {n: t.numpy() for n, t in inputs.items()}


# ---------------------------------------------------------------- one model
def measure(name: str, threads: int) -> dict[str, Any]:
    """Export, run in both engines, compare, time."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TZ_CACHE_DIR"] = str(Path(folder) / "cache")
        path = Path(folder) / "model.onnx"
        try:
            feeds = export(name, path)
        except Exception as error:
            return {"name": name, "status": "not exported", "why": _line(error)}
        import onnx
        import onnxruntime

        known = {i.name for i in onnx.load(path, load_external_data=False).graph.input}
        feeds = {n: a for n, a in feeds.items() if n in known}
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        try:
            peer = onnxruntime.InferenceSession(str(path), options,
                                                providers=["CPUExecutionProvider"])
            (wanted,) = peer.run(None, feeds)
        except Exception as error:
            return {"name": name, "status": "not run by onnxruntime", "why": _line(error)}
        return {"name": name, **_ours(path, feeds, wanted, peer, threads)}


def _ours(path: Path, feeds: dict[str, np.ndarray], wanted: np.ndarray, peer: Any,
          threads: int) -> dict[str, Any]:
    from terrazzo import ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    started = time.perf_counter()
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        load = time.perf_counter() - started
        (found,) = session.run(None, feeds)
    except Exception as error:
        return {"status": "refused", "why": _line(error)}
    scale = max(float(np.nanmax(np.abs(wanted), initial=0)), 1e-30)
    error = float(np.max(np.abs(found.astype(np.float64) - wanted), initial=0)) / scale
    if error > TOLERANCE and found.shape == wanted.shape:
        # Its own rewrites may lose digits: those of transformers/bit are off by 1.4e-2.
        plainly = _without_rewrites(path, feeds)
        error = float(np.max(np.abs(found.astype(np.float64) - plainly), initial=0)) / scale
    right = found.shape == wanted.shape and error <= TOLERANCE and np.isfinite(wanted).all()
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until or len(times["ours"]) < 5:
        for who, engine in (("ours", session), ("theirs", peer)):
            time.sleep(0.01)  # until threads of the other engine have stopped spinning
            at = time.perf_counter()
            engine.run(None, feeds)
            times[who].append(time.perf_counter() - at)
    return {"status": "right" if right else "wrong", "error": error, "load": load,
            "ms": min(times["ours"]) * 1e3,
            "ratio": min(times["ours"]) / min(times["theirs"])}


def _without_rewrites(path: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """What onnxruntime answers when it runs a model node by node, as it is written."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def _line(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:160].replace("|", "/")


# ---------------------------------------------------------------- all of them
def in_a_process(name: str, threads: int) -> dict[str, Any]:
    """One row, measured in a process of its own."""
    command = [sys.executable, __file__, "--one", name, "--threads", str(threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"name": name, "status": "refused", "why": f"not done in {LIMIT} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"name": name, "status": "refused", "why": f"ended with {done.returncode}: {last}"}
    row: dict[str, Any] = json.loads(lines[-1])
    return row


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The rows as lines of a page."""
    ran = [r for r in rows if "ratio" in r]
    mean = math.exp(sum(math.log(r["ratio"]) for r in ran) / max(len(ran), 1))
    counted = [r for r in rows if not r["status"].startswith("not ")]
    yield (f"{len(counted)} models: {sum(r['status'] == 'right' for r in counted)} right, "
           f"{sum(r['status'] == 'wrong' for r in counted)} wrong, "
           f"{sum(r['status'] == 'refused' for r in counted)} refused, "
           f"{sum(r['ratio'] > 1.2 for r in ran)} slower than 1.2 of onnxruntime's time; "
           f"geometric mean of the ratios {mean:.2f}.")
    yield ""
    yield "| model | result | error | ms | of onnxruntime's time | load, s |"
    yield "|---|---|---|---|---|---|"
    for r in rows:
        if "ratio" in r:
            yield (f"| {r['name']} | {r['status']} | {r['error']:.1e} | {r['ms']:.1f} | "
                   f"{r['ratio']:.2f} | {r['load']:.1f} |")
        else:
            yield f"| {r['name']} | {r['status']}: {r['why']} | | | | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression over library/name")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1, help="models measured at the same time")
    parser.add_argument("--write", action="store_true", help="put the table into docs/onnx.md")
    parser.add_argument("--json", default="", help="a file for the rows")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one, given.threads)))
        return
    chosen = [n for n in names() if re.search(given.only, n)]
    rows = []
    with ThreadPoolExecutor(given.jobs) as executor:
        for row in executor.map(lambda n: in_a_process(n, given.threads), chosen):
            rows.append(row)
            print({k: v for k, v in row.items()}, flush=True)
            if given.json:
                Path(given.json).write_text(json.dumps(rows, indent=1))
    text = "\n".join(table(rows))
    print(text)
    if given.write:
        page = PAGE.read_text()
        before, after = page.split(MARKS[0])[0], page.split(MARKS[1])[1]
        PAGE.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
