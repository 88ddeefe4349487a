"""Decoders that optimum merges: one file for the first step and for those with a cache.

The file is an `If` over `use_cache_branch` around two decoders. Its first call has no past, yet
gives it all the same, empty or of one place, under names of sizes that other inputs have too; the
branch with a cache answers for the encoder's keys and values with nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from terrazzo.frontends.onnx.session import Session

sys.path.insert(0, str(Path(__file__).parents[1] / "frontends" / "onnx"))
from models import node

WIDTH, VOCABULARY = 8, 32
SELF, CROSS = ("decoder.key", "decoder.value"), ("encoder.key", "encoder.value")


def attention(query: str, keys: str, values: str, result: str) -> list[Any]:
    return [node("Transpose", keys, f"{result}_turned", perm=[0, 2, 1]),
            node("MatMul", f"{query} {result}_turned", f"{result}_scores"),
            node("Softmax", f"{result}_scores", f"{result}_weights"),
            node("MatMul", f"{result}_weights {values}", result)]


def branch(cached: bool) -> onnx.GraphProto:
    """One of the two decoders: a layer that looks at itself and at the encoder."""
    b = "1" if cached else "0"  # names are each branch's own, as exporters make them
    nodes = [node("Gather", "embedding input_ids", f"x{b}"),
             *(node("MatMul", f"x{b} w{n}", f"{n}{b}") for n in "qkv")]
    own, cross = [f"{n}_{b}" for n in SELF], [f"{n}_{b}" for n in CROSS]
    if cached:
        nodes += [node("Concat", f"past.{n} {made}", name, axis=1)
                  for n, made, name in zip(SELF, (f"k{b}", f"v{b}"), own, strict=True)]
        seen = [f"past.{n}" for n in CROSS]
        empty = numpy_helper.from_array(np.zeros((0, 1, WIDTH), np.float32))
        nodes += [node("Constant", "", name, value=empty) for name in cross]
    else:
        nodes += [node("Identity", made, name) for made, name in zip((f"k{b}", f"v{b}"), own)]
        nodes += [node("MatMul", f"states w{n}", name) for n, name in zip("kv", cross)]
        seen = cross
    nodes += [*attention(f"q{b}", *own, f"a{b}"), node("Add", f"x{b} a{b}", f"h{b}"),
              *attention(f"h{b}", *seen, f"c{b}"), node("Add", f"h{b} c{b}", f"o{b}"),
              node("MatMul", f"o{b} head", f"logits_{b}")]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None)
               for n in (f"logits_{b}", *own, *cross)]
    return helper.make_graph(nodes, f"branch{b}", [], outputs)


def merged() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = {n: rng.standard_normal((WIDTH, WIDTH), np.float32) for n in ("wq", "wk", "wv")}
    weights["embedding"] = rng.standard_normal((VOCABULARY, WIDTH), np.float32)
    weights["head"] = rng.standard_normal((WIDTH, VOCABULARY), np.float32)
    shapes: dict[str, tuple[int, list[Any]]] = {
        "input_ids": (TensorProto.INT64, ["batch_size", "decoder_sequence_length"]),
        "states": (TensorProto.FLOAT, ["batch_size", "encoder_sequence_length", WIDTH]),
        **{f"past.{n}": (TensorProto.FLOAT, ["batch_size", "past_sequence_length", WIDTH])
           for n in SELF},
        **{f"past.{n}": (TensorProto.FLOAT, ["batch_size", "encoder_sequence_length", WIDTH])
           for n in CROSS},
        "use_cache_branch": (TensorProto.BOOL, [1])}
    outputs = ["logits", *(f"present.{n}" for n in (*SELF, *CROSS))]
    graph = helper.make_graph(
        [helper.make_node("If", ["use_cache_branch"], outputs, then_branch=branch(True),
                          else_branch=branch(False))], "merged",
        [helper.make_tensor_value_info(n, kind, s) for n, (kind, s) in shapes.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
        [numpy_helper.from_array(a, n) for n, a in weights.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def generated(run: Any, batch: int, source: int, dummy: int, steps: int) -> list[np.ndarray]:
    """The logits of a greedy generation, fed as optimum feeds a merged decoder."""
    rng = np.random.default_rng(batch)
    states = rng.standard_normal((batch, source, WIDTH)).astype(np.float32)
    ids = rng.integers(0, VOCABULARY, (batch, 3))
    past = {f"past.{n}": np.zeros((batch, dummy, WIDTH), np.float32) for n in (*SELF, *CROSS)}
    all_logits = []
    for turn in range(steps):
        logits, *present = run({"input_ids": ids, "states": states, **past,
                                "use_cache_branch": np.array([turn > 0])})
        held = SELF if turn else (*SELF, *CROSS)  # the encoder's are made once
        past.update({f"past.{n}": p for n, p in zip(held, present)})
        ids = logits[:, -1:].argmax(-1)
        all_logits.append(logits)
    return all_logits


@pytest.mark.parametrize("dummy", [0, 1])
def test_a_merged_decoder_generates_as_in_onnxruntime(dummy: int) -> None:
    ort = pytest.importorskip("onnxruntime")
    proto = merged()
    session = Session(proto)
    theirs = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for batch, source in ((2, 5), (1, 7), (3, 4)):
        found = generated(session.run, batch, source, dummy, 12)
        wanted = generated(lambda feeds: theirs.run(None, feeds), batch, source, dummy, 12)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)
    assert session.compilations <= 6


GENERATE = """
import json, sys
if sys.argv[2] == "terrazzo":
    import terrazzo.ort
    sys.modules["onnxruntime"] = terrazzo.ort
import torch
from optimum.onnxruntime import ORTModelForSeq2SeqLM
model = ORTModelForSeq2SeqLM.from_pretrained(sys.argv[1])
ids = torch.arange(2, 20).reshape(2, 9)
found = [model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=20,
                        min_new_tokens=20, num_beams=n, do_sample=False).tolist() for n in (1, 3)]
print(json.dumps(found))
"""
EXPORT = """
import sys, torch, transformers as t
from optimum.onnxruntime import ORTModelForSeq2SeqLM
torch.manual_seed(0)
config = t.T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                    decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
t.T5ForConditionalGeneration(config).save_pretrained(sys.argv[1] + "/torch")
model = ORTModelForSeq2SeqLM.from_pretrained(sys.argv[1] + "/torch", export=True, use_merged=True)
model.save_pretrained(sys.argv[1] + "/merged")
"""


@pytest.mark.slow
def test_optimum_generates_with_its_merged_decoder(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("optimum.onnxruntime", reason="optimum-onnx is not installed")

    def python(code: str, *args: str) -> str:
        made = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True,
                              check=False)
        assert made.returncode == 0, made.stderr[-2000:]
        return made.stdout.splitlines()[-1] if made.stdout.strip() else ""

    python(EXPORT, str(tmp_path))
    folder = tmp_path / "merged"
    assert (folder / "decoder_model_merged.onnx").exists()
    ours, theirs = (python(GENERATE, str(folder), who) for who in ("terrazzo", "onnxruntime"))
    assert json.loads(ours) == json.loads(theirs)
