"""Three scalar operations of no use to anybody, each one entry of the table, on every way.

`test_scalar_table.py` runs this file; what it prints are the ways that were gone.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(sys.argv[1])
os.environ["TZ_CACHE_DIR"] = str(FOLDER)

from terrazzo.base.scalar_op import Absent, composed, primitive  # noqa: E402
from terrazzo.base.scalar_table import OPS, enter  # noqa: E402

# One made of others, one of others that torch, numpy and ONNX have names for, one of its own.
enter(composed("cube", lambda op, x: op("mul", op("mul", x, x), x), OPS, "x * x * x"))
enter(composed("slope", lambda op, x: op("div", x, op("add", op("abs", x), 1.0)), OPS,
               "x / (|x| + 1)", onnx="Softsign", torch="deg2rad"))
enter(primitive(
    "tenfold", lambda x: np.power(np.asarray(10, x.dtype), x), "10 ** x", cost=20,
    gradient=lambda f, x, y, g: g * y * math.log(10), cpu="libm.exp10",
    triton="tl.exp2({0} * 3.321928094887362)", libdevice="exp10",
    torch=Absent("torch has none"), onnx=Absent("ONNX has none")))

import terrazzo as tz  # noqa: E402
import terrazzo.torch.aten.pointwise  # noqa: E402 (fills CONVERTERS)
from terrazzo import te  # noqa: E402
from terrazzo.chips.cpu.chip import Cpu  # noqa: E402
from terrazzo.chips.cpu.description import avx2_spec  # noqa: E402
from terrazzo.chips.cuda.description import h100  # noqa: E402
from terrazzo.codegen.triton import triton_source  # noqa: E402
from terrazzo.compiler.driver import Lowering  # noqa: E402
from terrazzo.frontends.onnx.export import export  # noqa: E402
from terrazzo.graph.ir import OPERATORS, TensorType  # noqa: E402
from terrazzo.graph.trace import trace  # noqa: E402
from terrazzo.session import Session  # noqa: E402
from terrazzo.tools.fuzz.fuzzing import outcome  # noqa: E402
from terrazzo.tools.fuzz.generate import operators, random_program  # noqa: E402
from terrazzo.torch.aten.registry import CONVERTERS  # noqa: E402
from terrazzo.torch.eager import run_in_torch  # noqa: E402

MEANING = {"cube": lambda x: x**3, "slope": lambda x: x / (abs(x) + 1), "tenfold": lambda x: 10**x}
SLOPE = {"cube": lambda x: 3 * x**2, "slope": lambda x: 1 / (abs(x) + 1) ** 2,
         "tenfold": lambda x: math.log(10) * 10**x}
X = np.linspace(-3, 3, 37).astype(np.float32)
WIDE = X.astype(np.float64)


def close(got, want) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2e-6, atol=1e-7)


def numpy() -> None:
    for name, meaning in MEANING.items():
        close(OPERATORS[name].reference(X, out=TensorType(X.shape, tz.float32))
              if OPERATORS[name].reference else OPS[name].numpy(X), meaning(WIDE))


def in_te() -> None:
    for name, meaning in MEANING.items():
        a = te.placeholder((37,), name="a")
        f = getattr(te, name)
        b = te.compute((37,), lambda i, f=f, a=a: f(a[i]), name="b")
        out = np.empty_like(X)
        te.build(te.schedule(b), [a, b])(X, out)
        close(out, meaning(WIDE))


def compiled() -> None:
    for name, meaning in MEANING.items():
        f = getattr(tz, name)
        close(f(X), meaning(WIDE))
        close(tz.jit(lambda x, f=f: f(x) + 1)(X), meaning(WIDE) + 1)


def gradient() -> None:
    for name, slope in SLOPE.items():
        f = getattr(tz, name)
        close(tz.grad(lambda x, f=f: tz.sum(f(x)))(X), slope(WIDE))


def graph_of(name: str):
    return trace(getattr(tz, name), [TensorType((37,), tz.float32)], name=name, names=["x"])[0]


def source() -> None:
    for name, word in {"cube": "*", "slope": "tl.abs", "tenfold": "libdevice.exp10("}.items():
        (group,) = Lowering(graph_of(name), Cpu(avx2_spec())).fused.groups
        text = triton_source(group.program, h100())
        assert word in text, text
        compile(text, "printed", "exec")


def in_torch() -> None:
    close(run_in_torch(graph_of("cube"), [X])[0], WIDE**3)
    close(run_in_torch(graph_of("slope"), [X])[0], np.deg2rad(WIDE))  # the name counts
    assert CONVERTERS["aten.deg2rad"].function is OPERATORS["slope"]


def verified() -> None:
    for name in MEANING:
        report = tz.verify(getattr(tz, name), dtypes=["float32", "float64"])
        assert all(report.elements(level) for level in ("graph", "expr", "loop", "code",
                                                        "gradient")), report


def fuzzed() -> None:
    assert set(MEANING) <= set(operators())
    rng, taken = np.random.default_rng(3), set()
    for _ in range(12):
        program = random_program(rng, [*MEANING, "add", "maximum"])
        taken |= {step.op for step in program.steps}
        assert outcome(program) is None, outcome(program)
    assert set(MEANING) <= taken


def onnx() -> None:
    for name, meaning in MEANING.items():
        model = export(graph_of(name), ["y"])
        assert name != "slope" or model.graph.node[0].op_type == "Softsign"
        close(Session(model).run({"x": X})[0], meaning(WIDE))


for way, name in {numpy: "numpy", in_te: "te", compiled: "compile", gradient: "gradient",
                  source: "source", in_torch: "torch", verified: "verify", fuzzed: "fuzz",
                  onnx: "onnx"}.items():
    way()
    print(name)
