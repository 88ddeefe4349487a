"""ONNX models through the drop-in for onnxruntime, timed beside onnxruntime and OpenVINO.

    python examples/run_onnx.py

Builds a ResNet-50 and a BERT-base with random weights, so nothing is downloaded.
"""

import tempfile
import time
from pathlib import Path

import numpy as np
from onnx_models import bert, resnet

import terrazzo as tz
import terrazzo.ort as ort  # the one line to change in a program written for onnxruntime
from terrazzo.tools.cli.models import bench

rng = np.random.default_rng(0)
MODELS = {
    "resnet50": (resnet, {"image": rng.standard_normal((1, 3, 224, 224), np.float32)}),
    "bert_base": (bert, {"input_ids": rng.integers(0, 30522, (1, 128)),
                         "attention_mask": np.ones((1, 128), np.int64)}),
}

# Compiled models go to the same folder, to be gone with it afterwards.
with tempfile.TemporaryDirectory() as folder, tz.knobs.override(cache_dir=folder):
    for name, (build, feeds) in MODELS.items():
        path = Path(folder) / f"{name}.onnx"
        path.write_bytes(build().SerializeToString())

        started = time.perf_counter()
        session = ort.InferenceSession(path)
        ready = time.perf_counter()
        (output,) = session.run(None, feeds)
        print(f"{name}: ready in {ready - started:.1f} s, output {list(output.shape)}, "
              f"{output.reshape(-1)[:3]} ...")
        del session

        bench(str(path), ["ort", "openvino"], [], threads=0)
        path.unlink()
