"""Triton source of fused groups, run in Triton's own interpreter and held to their expressions.

Triton decides when it is imported whether kernels are interpreted, so a process of its own runs
them: this file, started as a script, with arrays going back and forth as pickles. What an older
interpreter cannot do (see OLDER) runs on the backend `cpu`. With a GPU, the same cases are compiled
for it as well, with and without NVIDIA's device library.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pickle
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

if __name__ != "__main__":
    import pytest

    import terrazzo.ops  # fills OPERATORS
    from terrazzo.base.scalar import Axis, Call, FromIndex, call, cast, const, where
    from terrazzo.base.scalar import reduce as reduce_scalar
    from terrazzo.base.scalar_table import OPS, Absent
    from terrazzo.base.shapes import dims
    from terrazzo.chips.cuda.description import h100, h200
    from terrazzo.chips.spec import ChipSpec, LaunchRules
    from terrazzo.codegen.triton import triton_source
    from terrazzo.codegen.triton.maths import FUNCTIONS, needed_functions
    from terrazzo.dtypes import (
        DType,
        as_dtype,
        bfloat16,
        bool_,
        complex64,
        float8_e5m2,
        float16,
        float32,
        float64,
        int8,
        int32,
        int64,
        uint8,
    )
    from terrazzo.errors import UnsupportedDType, UnsupportedOperator
    from terrazzo.expr.evaluate import run as evaluate
    from terrazzo.expr.ir import Program, compute, placeholder, reduce_axis
    from terrazzo.expr.limits import FusionLimits
    from terrazzo.graph import fusion
    from terrazzo.graph.ir import OPERATORS as ops
    from terrazzo.graph.ir import TensorType
    from terrazzo.graph.passes import canonicalize
    from terrazzo.graph.trace import trace
    from terrazzo.index import Var
    from terrazzo.index import evaluate as index_value

    pytestmark = pytest.mark.triton


# ---------------------------------------------------------------- the process that runs kernels
def to_torch(array: np.ndarray, device: str) -> Any:
    import torch

    if array.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        bits = torch.from_numpy(array.view(f"int{8 * array.dtype.itemsize}").copy())
        return bits.view(getattr(torch, array.dtype.name)).to(device)
    return torch.from_numpy(array.copy()).to(device)


def to_numpy(tensor: Any, like: np.ndarray) -> np.ndarray:
    import torch

    tensor = tensor.cpu()
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int8).numpy()
        return bits.view(like.dtype)
    return tensor.numpy()


def run_source(source: str, inputs: list[np.ndarray], outputs: list[np.ndarray],
               sizes: dict[str, int], device: str) -> list[np.ndarray]:
    """Import a printed module, launch it on copies and answer with what is in the outputs."""
    with tempfile.TemporaryDirectory() as folder:  # Triton reads a kernel's text from its file
        file = Path(folder) / "printed.py"
        file.write_text(source)
        spec = importlib.util.spec_from_file_location("printed", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        tensors = [to_torch(a, device) for a in (*inputs, *outputs)]
        module.launch(*tensors, **sizes)
        results = tensors[len(inputs):]
        return [to_numpy(t, a) for t, a in zip(results, outputs)]


def serve() -> None:
    """Answer requests until the pipe closes."""
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not get between the answers
    np.seterr(all="ignore")
    if "TRITON_INTERPRET" not in os.environ:
        from terrazzo.triton_cpu.activate import activate

        activate()
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Any = run_source(*request, "cpu")
        except Exception as error:  # the test shows it, with the source
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, channel)
        channel.flush()


if __name__ == "__main__":
    serve()
    sys.exit()


# Before 3.8 Triton's interpreter fails with numpy 2: loops up to an argument take an array of one
# element for a number (3.6), and `~` of unsigned integers puts -1 into them (3.6 and 3.7).
OLDER = importlib.util.find_spec("triton") is not None and (
    tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) < (3, 8))


SOURCE = os.pathsep.join((str(Path(terrazzo.ops.__file__).parents[2]),
                          os.environ.get("PYTHONPATH", "")))


class Runner:
    """The other process: Triton's interpreter, or the backend `cpu`."""

    def __init__(self, interpret: bool) -> None:
        self.interpret = interpret
        self.backend: Runner | None = None  # for what an older interpreter cannot do
        self.start()

    def start(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = SOURCE
        if self.interpret:
            environment["TRITON_INTERPRET"] = "1"
        self.process = subprocess.Popen([sys.executable, __file__], env=environment,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, *request: Any) -> Any:
        try:
            pickle.dump(request, self.process.stdin)
            self.process.stdin.flush()
            answer = pickle.load(self.process.stdout)
        except (EOFError, BrokenPipeError):  # it read or wrote outside a tensor, most likely
            answer = f"the process died with status {self.process.wait(timeout=10)}"
            self.start()
        if OLDER and isinstance(answer, str) and answer.startswith("InterpreterError"):
            self.backend = self.backend or Runner(interpret=False)
            return self.backend(*request)
        if isinstance(answer, str):
            pytest.fail(f"{answer}\n{request[0]}")
        return answer

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=10)
        if self.backend is not None:
            self.backend.close()


@pytest.fixture(scope="session")
def interpreter() -> Any:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("the interpreter runs on torch tensors")
    process = Runner(interpret=True)
    yield process
    process.close()


# ---------------------------------------------------------------- programs and comparisons
def T(*shape: Any, dtype: DType = float32) -> TensorType:
    return TensorType(shape, dtype)


def programs(function: Any, *types: TensorType) -> tuple[Any, list[fusion.Group]]:
    graph, _ = trace(function, list(types))
    graph, _ = canonicalize(graph)
    fused = fusion.fuse(graph, FusionLimits())
    return fused, list(fused.groups)


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    if dtype.is_bool:
        return rng.random(shape) < 0.5
    if dtype.is_integer:
        return rng.integers(0 if dtype.kind == "u" else -9, 10, shape).astype(dtype.np)
    return np.asarray(rng.standard_normal(shape)).astype(dtype.np)


TOLERANCE = {"float64": 1e-6, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}


def compare(got: np.ndarray, expected: np.ndarray, source: str) -> None:
    assert got.dtype == expected.dtype
    tolerance = TOLERANCE.get(expected.dtype.name, 0)
    wide = np.float64 if tolerance else expected.dtype
    np.testing.assert_allclose(got.astype(wide), expected.astype(wide), tolerance, tolerance,
                               err_msg=source)


def check(runner: Any, program: Program, arrays: list[np.ndarray],
          sizes: dict[Var, int] | None = None, chip: ChipSpec | None = None) -> list[np.ndarray]:
    """Run a program's source and its expressions; answer with what the expressions say."""
    expected = evaluate(program, arrays, sizes or {})
    source = triton_source(program, chip)
    keywords = {n.name: v for n, v in (sizes or {}).items() if f"*, {n.name}" in source}
    # Filled with ones, so that an element nobody writes shows.
    empty = [np.ones(a.shape).astype(a.dtype) for a in expected]
    for got, wanted in zip(runner(source, arrays, empty, keywords), expected):
        compare(got, wanted, source)
    return expected


def check_function(runner: Any, rng: np.random.Generator, function: Any, *types: TensorType,
                   sizes: dict[Var, int] | None = None, chip: ChipSpec | None = None) -> None:
    """Every group of a function, each fed with what the expressions before it computed."""
    fused, groups = programs(function, *types)
    arrays = {v: random(rng, tuple(int(index_value(n, sizes or {})) for n in v.shape), v.dtype)
              for v in fused.graph.inputs}
    arrays.update(fused.constants)
    assert groups
    for group in groups:
        for value in group.inputs:
            if value in fused.aliases:
                shape = tuple(int(index_value(n, sizes or {})) for n in value.shape)
                arrays[value] = arrays[fused.aliases[value]].reshape(shape)
        results = check(runner, group.program, [arrays[v] for v in group.inputs], sizes, chip)
        arrays.update(zip(group.outputs, results))


def local(name: str) -> Any:
    """An operator by name."""
    return ops[name]


n, m = dims("n m")
CASES: dict[str, tuple[Any, list[TensorType], dict[Var, int]]] = {
    "gelu": (lambda x: local("gelu")(x), [T(5, 7)], {}),
    "gelu tanh": (lambda x: local("gelu")(x, approximate="tanh"), [T(37)], {}),
    "silu of a sum": (lambda x, y: local("silu")(x + y) * x, [T(3, 11), T(3, 11)], {}),
    "many blocks": (lambda x: x * 2.0 + 1.0, [T(2051)], {}),
    "scalar": (lambda x, y: x * y, [T(), T()], {}),
    "broadcast": (lambda x, y, z: x * y + z, [T(2, 3, 5), T(3, 1), T(2, 1, 5)], {}),
    "transpose": (lambda x, y: local("transpose")(x) + y, [T(3, 5), T(5, 3)], {}),
    "two outputs": (lambda x, y: (x + y, local("exp")(x + y)), [T(3, 5), T(5)], {}),
    "softmax": (lambda x: local("softmax")(x), [T(4, 9)], {}),
    "softmax of a row": (lambda x: local("softmax")(x), [T(3, 200)], {}),
    "softmax of 128": (lambda x: local("softmax")(x), [T(2, 2, 128)], {}),
    "softmax down": (lambda x: local("softmax")(x, axis=0), [T(9, 5)], {}),
    "log_softmax": (lambda x: local("log_softmax")(x), [T(3, 70)], {}),
    "log_softmax inside": (lambda x: local("log_softmax")(x, axis=1), [T(3, 5, 4)], {}),
    "layer_norm": (lambda x, w, b: local("layer_norm")(x, w, b), [T(2, 3, 80), T(80), T(80)], {}),
    "layer_norm narrow": (lambda x, w, b: local("layer_norm")(x, w, b), [T(7, 8), T(8), T(8)],
                          {}),
    "rms_norm": (lambda x, w: local("rms_norm")(x, w), [T(5, 100), T(100)], {}),
    "batch_norm": (lambda x: local("batch_norm_train")(x), [T(3, 5, 4)], {}),
    "group_norm": (lambda x: local("group_norm")(x, groups=2), [T(3, 4, 4)], {}),
    "cross_entropy": (lambda x, t: local("cross_entropy")(x, t),
                      [T(4, 9), T(4, dtype=int64)], {}),
    "sum 0": (lambda x: local("sum")(x, axis=0), [T(50, 7, 3)], {}),
    "sum 1": (lambda x: local("sum")(x, axis=1), [T(3, 50, 7)], {}),
    "sum 2": (lambda x: local("sum")(x, axis=2), [T(3, 7, 90)], {}),
    "sum 0, 2": (lambda x: local("sum")(x, axis=(0, 2)), [T(3, 5, 4)], {}),
    "sum 0, 2, long": (lambda x: local("sum")(x, axis=(0, 2)), [T(9, 2, 13)], {}),
    "sum of all": (lambda x: local("sum")(x), [T(7, 31)], {}),
    "sum of many": (lambda x: local("sum")(x), [T(17, 1001)], {}),
    "max down": (lambda x: local("max")(x, axis=0), [T(5, 7)], {}),
    "min": (lambda x: local("min")(x, axis=-1), [T(5, 7)], {}),
    "prod": (lambda x: local("prod")(x, axis=-1), [T(5, 7)], {}),
    "prod in a loop": (lambda x: local("prod")(x, axis=0), [T(40, 3)], {}),
    "mean of a square": (lambda x: local("mean")(x * x, axis=-1), [T(5, 7)], {}),
    "argmax 0": (lambda x: local("argmax")(x, axis=0), [T(5, 7)], {}),
    "argmax 1": (lambda x: local("argmax")(x, axis=1), [T(5, 7)], {}),
    "argmin of all": (lambda x: local("argmin")(x), [T(5, 7)], {}),
    "any": (lambda x: local("any")(x > 1.0, axis=-1), [T(5, 7)], {}),
    "all": (lambda x: local("all")(x < 1.0, axis=0), [T(40, 7)], {}),
    "where": (lambda x, y: local("where")(x > y, x, y * 2.0), [T(3, 5), T(5)], {}),
    "pad": (lambda x: local("pad")(x, pad_width=((1, 2), (0, 1)), value=3.0), [T(3, 5)], {}),
    "concat": (lambda x, y, z: local("concat")((x, y, z), axis=1),
               [T(3, 5), T(3, 2), T(3, 4)], {}),
    "slice": (lambda x: x[1:, ::2] * 2.0, [T(4, 9)], {}),
    "flip": (lambda x: local("flip")(x, axis=1), [T(4, 9)], {}),
    "roll": (lambda x: local("roll")(x, shift=2, axis=1), [T(4, 9)], {}),
    "flipped softmax": (lambda x: local("flip")(local("softmax")(x), axis=-1), [T(3, 9)], {}),
    "tril": (lambda x: local("tril")(x), [T(6, 7)], {}),
    "take": (lambda x, i: local("take")(x, i, axis=1), [T(3, 5), T(4, dtype=int64)], {}),
    "embedding": (lambda w, i: local("embedding")(w, i), [T(9, 6), T(2, 3, dtype=int32)], {}),
    "take along": (lambda x, i: local("take_along_axis")(x, i, axis=1),
                   [T(3, 5), T(3, 2, dtype=int64)], {}),
    "arange": (lambda x: x + local("arange")(start=0, stop=7, dtype="float32"), [T(3, 7)], {}),
    "random bits": (lambda k: local("random_bits")(k, shape=(3, 5)), [T(dtype=int64)], {}),
    "padded sum": (lambda x: local("pad")(local("sum")(x, axis=1), pad_width=((1, 1),)),
                   [T(4, 6)], {}),
    "part of a softmax": (lambda x: local("softmax")(x)[:, 1:4], [T(4, 6)], {}),
    "rolled softmax": (lambda x: local("roll")(local("softmax")(x), shift=2, axis=1),
                       [T(4, 100)], {}),
    "concat softmax": (lambda x, y: local("concat")((local("softmax")(x), y), axis=1),
                       [T(4, 6), T(4, 3)], {}),
    "windows": (lambda x: local("sum")(local("sliding_window")(x, size=3), axis=-1),
                [T(4, 9)], {}),
    "dropout": (lambda x, k: local("dropout")(x, k), [T(4, 6), T(dtype=int64)], {}),
    "float8": (lambda x: x * 2.0, [T(4, 6, dtype=float8_e5m2)], {}),
    "empty": (lambda x: x * 2.0, [T(0, 5)], {}),
    "sum of nothing": (lambda x: local("sum")(x, axis=1), [T(3, 0)], {}),
    "symbolic gelu": (lambda x: local("gelu")(x), [T(n, m)], {n: 3, m: 7}),
    "symbolic broadcast": (lambda x, y: x + y, [T(n, m), T(m)], {n: 3, m: 7}),
    "symbolic softmax": (lambda x: local("softmax")(x), [T(n, m)], {n: 3, m: 70}),
    "symbolic mask": (lambda x: local("tril")(x), [T(n, m)], {n: 4, m: 3}),
    "symbolic sum 0": (lambda x: local("sum")(x, axis=0), [T(n, m)], {n: 40, m: 5}),
    "symbolic sum": (lambda x: local("sum")(x), [T(n, m)], {n: 4, m: 5}),
    "symbolic concat": (lambda x, y: local("concat")((x, y), axis=1), [T(3, n), T(3, m)],
                        {n: 4, m: 5}),
    "symbolic embedding": (lambda w, i: local("embedding")(w, i), [T(n, m), T(6, dtype=int32)],
                           {n: 9, m: 3}),
    "symbolic flip": (lambda x: local("flip")(x), [T(n, m)], {n: 4, m: 5}),
    "symbolic pad": (lambda x: local("pad")(x, pad_width=((1, 1), (2, 1))), [T(n, m)],
                     {n: 4, m: 5}),
    "symbolic layer_norm": (lambda x: local("layer_norm")(x), [T(n, 3, m)], {n: 4, m: 5}),
    "symbolic argmax": (lambda x: local("argmax")(x, axis=1), [T(n, m)], {n: 4, m: 5}),
    "symbolic one": (lambda x: local("softmax")(x), [T(n, m)], {n: 1, m: 1}),
    "symbolic empty": (lambda x: local("gelu")(x), [T(n, m)], {n: 0, m: 5}),
    "symbolic empty rows": (lambda x: local("sum")(x, axis=1), [T(n, m)], {n: 3, m: 0}),
}


@pytest.mark.parametrize("case", CASES)
def test_source_computes_what_the_expressions_say(case: str, interpreter: Any,
                                                  rng: np.random.Generator) -> None:
    function, types, sizes = CASES[case]
    check_function(interpreter, rng, function, *types, sizes=sizes)


# ---------------------------------------------------------------- scalar operations and types
WIDE = np.array([-3.5, -2.5, -1.25, -1.0, -0.5, -1e-3, 0.0, 1e-3, 0.25, 0.5, 0.99, 1.0, 1.5, 2.5,
                 7.5, 20.0], np.float32)
SPECIAL = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-30, 1e30, -1e30], np.float32)
BINARY = ("add", "sub", "mul", "div", "floordiv", "mod", "fmod", "min", "max", "pow", "atan2",
          "hypot", "copysign", "eq", "ne", "lt", "le", "gt", "ge")
INTEGER = ("add", "sub", "mul", "floordiv", "mod", "fmod", "min", "max", "neg", "abs", "sign",
           "floor", "ceil", "trunc", "round", "eq", "ne", "lt", "le", "gt", "ge", "and", "or",
           "xor", "not", "shl", "shr", "isnan", "isinf", "isfinite", "where", "pow")
BOOLEAN = ("and", "or", "xor", "not", "eq", "ne", "lt", "where", "min", "max")
# What only libraries have is not there without libdevice; fma takes three operands.
FLOATING = [op for op, row in OPS.items() if op != "fma" and "f" in row.kinds
            and (row.meaning is not None or not isinstance(row.triton, Absent))]


def one_operation(op: str, dtype: DType, size: int) -> Program:
    """A program that applies one operation to as many inputs as it takes."""
    row = OPS[op]
    x = [placeholder((size,), dtype, f"x{i}") for i in range(2 if row.arity > 1 else 1)]

    def element(i: Any) -> Any:
        if op == "where":
            return where(call("ne", x[0][i], x[1][i]), x[0][i], x[1][i])
        if op == "cast":
            return cast(x[0][i], int32)
        if op == "bitcast":
            return Call(as_dtype(f"int{dtype.bits}"), "bitcast", (x[0][i],))
        return call(op, *(t[i] for t in x))

    y = compute((size,), element, name="y", origin=op)
    return Program(f"k_{op}", tuple(x), (y,), (y,))


def pairs(values: np.ndarray) -> list[np.ndarray]:
    a, b = np.meshgrid(values, values)
    return [a.ravel().copy(), b.ravel().copy()]


def operands(op: str, values: np.ndarray) -> list[np.ndarray]:
    return pairs(values) if OPS[op].arity > 1 else [values]


@pytest.mark.parametrize("op", FLOATING)
def test_every_float_operation(op: str, interpreter: Any) -> None:
    values = operands(op, WIDE)
    check(interpreter, one_operation(op, float32, len(values[0])), values)


@pytest.mark.parametrize("op", [op for op in FLOATING if op not in ("cast", "lgamma")])
def test_floats_at_the_edges(op: str, interpreter: Any) -> None:
    values = operands(op, SPECIAL if op not in ("sin", "cos", "tan", "mod", "fmod", "floordiv",
                                                 "pow", "digamma", "expm1", "exp")
                      else SPECIAL[2:6])
    check(interpreter, one_operation(op, float32, len(values[0])), values)


@pytest.mark.parametrize("dtype", [int8, int32, int64, uint8], ids=str)
@pytest.mark.parametrize("op", INTEGER)
def test_integer_operations(op: str, dtype: DType, interpreter: Any) -> None:
    low = 0 if dtype.kind == "u" else -7
    values = operands(op, np.arange(low, 12, 3).astype(dtype.np))
    if op in ("floordiv", "mod", "fmod"):
        values[1] = np.where(values[1] == 0, 5, values[1]).astype(dtype.np)
    if op == "pow":
        values[1] = np.abs(values[1])
    check(interpreter, one_operation(op, dtype, len(values[0])), values)


def test_fused_product_and_sum(interpreter: Any) -> None:
    x = [placeholder((7,), float32, f"x{i}") for i in range(3)]
    y = compute((7,), lambda i: call("fma", *(t[i] for t in x)), name="y", origin="fma")
    values = [np.arange(7, dtype=np.float32) + k for k in range(3)]
    check(interpreter, Program("k_fma", tuple(x), (y,), (y,)), values)


@pytest.mark.parametrize("op", BOOLEAN)
def test_boolean_operations(op: str, interpreter: Any) -> None:
    values = operands(op, np.array([True, False]))
    check(interpreter, one_operation(op, bool_, len(values[0])), values)


@pytest.mark.parametrize("op", ["exp", "tanh", "log1p", "atan", "pow", "cbrt"])
def test_double_precision(op: str, interpreter: Any) -> None:
    values = operands(op, np.array([0.125, 0.3, 1.0, 2.75]))
    check(interpreter, one_operation(op, float64, len(values[0])), values)


def test_constants_keep_the_precision_of_double(interpreter: Any) -> None:
    x = placeholder((3,), float64, "x")
    y = compute((3,), lambda i: call("max", x[i] * 0.1, const(1 / 3, float64)), name="y")
    check(interpreter, Program("k_thirds", (x,), (y,), (y,)), [np.array([1.0, 2.0, 4.0])])


@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
@pytest.mark.parametrize("operator", ["gelu", "softmax", "sum", "layer_norm", "add"])
def test_half_types_are_stored_narrow_and_computed_wide(
        operator: str, dtype: DType, interpreter: Any, rng: np.random.Generator) -> None:
    def function(x: Any) -> Any:
        return x + x if operator == "add" else ops[operator](x)

    check_function(interpreter, rng, function, T(3, 9, dtype=dtype))


@pytest.mark.parametrize("dtype", [int8, int32, uint8, int64, bool_], ids=str)
@pytest.mark.parametrize("reduction", ["add", "max", "min", "mul", "and", "or"])
@pytest.mark.parametrize("shape", [(3, 5), (2, 70)], ids=str)
def test_reductions_of_integers(shape: tuple[int, int], reduction: str, dtype: DType,
                                interpreter: Any, rng: np.random.Generator) -> None:
    if dtype is bool_ and reduction not in ("and", "or"):
        pytest.skip("booleans have only these two")
    x = placeholder(shape, dtype, "x")
    k = reduce_axis(shape[1])
    y = compute(shape[:1], lambda i: reduce_scalar(reduction, x[i, k], [k]), name="y")
    check(interpreter, Program("k_reduce", (x,), (y,), (y,), "rows"), [random(rng, shape, dtype)])


def test_nan_wins_a_maximum(interpreter: Any) -> None:
    x = placeholder((2, 3), float32, "x")
    k = reduce_axis(3)
    y = compute((2,), lambda i: reduce_scalar("max", x[i, k], [k]), name="y")
    values = np.array([[1, np.nan, 2], [3, 4, 5]], np.float32)
    (expected,) = check(interpreter, Program("k_max", (x,), (y,), (y,), "rows"), [values])
    assert np.isnan(expected[0]) and expected[1] == 5


# ---------------------------------------------------------------- what programs may look like
def test_strides_of_inputs_are_followed(interpreter: Any, rng: np.random.Generator) -> None:
    from dataclasses import replace

    x = replace(placeholder((3, 4), float32, "x"), strides=(1, 3))
    y = compute((3, 4), lambda i, j: x[i, j] + 1, name="y")
    program = Program("k_strided", (x,), (y,), (y,))
    values = random(rng, (3, 4), float32)
    source = triton_source(program)
    (got,) = interpreter(source, [np.ascontiguousarray(values.T)], [np.zeros((3, 4), np.float32)],
                         {})
    compare(got, evaluate(program, [values], {})[0], source)


@pytest.mark.parametrize("length", [5, 100, 128])
def test_rows_that_do_not_exist_are_not_read(length: int, interpreter: Any,
                                             rng: np.random.Generator) -> None:
    x = placeholder((3, length), float32, "x")
    k = reduce_axis(length)
    y = compute((5,), lambda i: reduce_scalar("add", where(
        call("lt", FromIndex(int64, i), 3), x[i, k], 0.0), [k]), name="y")
    program = Program("k_rows", (x,), (y,), (y,), "rows")
    assert "inside" in triton_source(program)
    check(interpreter, program, [random(rng, (3, length), float32)])


def test_rows_of_different_lengths(interpreter: Any, rng: np.random.Generator) -> None:
    x = placeholder((5, 9), float32, "x")

    def element(i: Any) -> Any:
        k = Axis(Var("k", 0, 8), 0, i + 2)
        return reduce_scalar("add", x[i, k], [k])

    y = compute((5,), element, name="y")
    program = Program("k_ragged", (x,), (y,), (y,), "rows")
    check(interpreter, program, [random(rng, (5, 9), float32)])


def test_a_size_no_tensor_shows_is_an_argument(interpreter: Any,
                                               rng: np.random.Generator) -> None:
    x = placeholder((n * 2,), float32, "x")
    y = compute((n * 2,), lambda i: x[i] * 3, name="y")
    program = Program("k_pairs", (x,), (y,), (y,))
    assert "def launch(x, y, *, n):" in triton_source(program)
    check(interpreter, program, [random(rng, (6,), float32)], {n: 3})


def test_a_chip_with_launch_rules_gets_grids_it_accepts(interpreter: Any,
                                                       rng: np.random.Generator) -> None:
    chip = ChipSpec("toy", "gcu", 4, 512, 32,
                    launch=LaunchRules(free_grid=4, grid_multiple=4, warps=(1,)))
    counts = []
    for function, shape in ((local("softmax"), (6, 70)), (local("softmax"), (6, 9)),
                            (local("exp"), (5 * 1024,))):
        check_function(interpreter, rng, function, T(*shape), chip=chip)
        _, (group,) = programs(function, T(*shape))
        source = triton_source(group.program, chip)
        (count,) = re.findall(r"programs = (\d+)\n", source)
        assert chip.launch.accepts_grid(int(count))
        counts.append(int(count))
        assert "num_warps=1" in source
    assert counts == [8, 1, 8]  # 6, 1 and 5 programs


def test_grids_of_symbolic_sizes_follow_the_rules(interpreter: Any,
                                                  rng: np.random.Generator) -> None:
    rules = LaunchRules(free_grid=3, grid_multiple=5)
    chip = ChipSpec("toy", "gcu", 4, 512, 32, launch=rules)
    x = placeholder((n,), float32, "x")
    y = compute((n,), lambda i: x[i] * 3, name="y")
    program = Program("k_triple", (x,), (y,), (y,))
    source = triton_source(program, chip)
    (grid,) = re.findall(r"k_triple\[\((.*),\)\]\(", source)
    counts = range(1, 40)
    assert [eval(grid, {"programs": count}) for count in counts] == [
        rules.round_up_grid(count) for count in counts]
    assert all(rules.accepts_grid(eval(grid, {"programs": count})) for count in counts)
    for size in (1, 1024, 5 * 1024 + 1):
        check(interpreter, program, [random(rng, (size,), float32)], {n: size}, chip=chip)


def test_libdevice_is_used_where_a_chip_has_it() -> None:
    source = triton_source(one_operation("erfc", float32, 8), h200())
    assert "from triton.language.extra import libdevice" in source
    assert "libdevice.erfc(x0)" in source
    assert "libdevice" not in triton_source(one_operation("erfc", float32, 8))


def test_a_gpu_is_described() -> None:
    chip = h200()
    assert (chip.kind, chip.cores, chip.lanes(32)) == ("cuda", 132, 32)
    assert chip.memory_gbps > h100().memory_gbps
    assert chip.peak("bf16") > 10 * chip.peak("f32") > chip.peak("f64")
    assert chip.launch.accepts_grid(1 << 20)


def test_large_and_symbolic_tensors_are_addressed_with_64_bits() -> None:
    def source(size: Any) -> str:
        x = placeholder((size,), float32, "x")
        y = compute((size,), lambda i: x[i] + 1, name="y")
        return triton_source(Program("k_add", (x,), (y,), (y,)))

    assert "tl.int64" in source(1 << 31)
    assert "tl.int64" in source(n)
    assert "tl.int64" not in source(1 << 20)


def test_functions_come_with_those_they_call() -> None:
    texts = needed_functions(["y = _erfinv(x)"])
    assert [t.split("def ")[1].split("(")[0] for t in texts] == ["_log1p", "_min", "_erfc",
                                                                  "_erfinv"]
    assert all(name in text for name, text in FUNCTIONS.items())


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize("kind", ["contraction", "attention", "opaque", "host"])
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    x = placeholder((4,), float32, "x")
    y = compute((4,), lambda i: x[i], name="y")
    with pytest.raises(UnsupportedOperator, match=f"'k_it' of kind '{kind}' has no Triton source"):
        triton_source(Program("k_it", (x,), (y,), (y,), kind))


def test_types_triton_lacks_are_refused_by_name() -> None:
    x = placeholder((4,), complex64, "x")
    y = compute((4,), lambda i: x[i], name="y")
    with pytest.raises(UnsupportedDType, match="complex64"):
        triton_source(Program("k_copy", (x,), (y,), (y,)))


def test_a_reduction_of_reductions_is_refused() -> None:
    x = placeholder((4, 5), float32, "x")
    j, k = reduce_axis(4, "j"), reduce_axis(5, "k")
    inner = reduce_scalar("add", x[j, k], [k])
    y = compute((), lambda: reduce_scalar("max", call("exp", inner), [j]), name="y")
    with pytest.raises(UnsupportedOperator, match="a reduction inside another"):
        triton_source(Program("k_nested", (x,), (y,), (y,), "rows"))


# ---------------------------------------------------------------- the text itself
def gelu_program() -> Program:
    x = placeholder((3, 5), bfloat16, "x")

    def element(i: Any, j: Any) -> Any:
        wide = cast(x[i, j], float32)
        return cast(wide * 0.5 * (call("erf", wide * 0.70710678) + 1.0), bfloat16)

    y = compute((3, 5), element, name="gelu", origin="multiply, erf, add")
    return Program("k_gelu", (x,), (y,), (y,))


def softmax_program(rows: Any, columns: Any) -> Program:
    x = placeholder((rows, columns), float32, "x")
    k = reduce_axis(columns)
    top = compute((rows,), lambda i: reduce_scalar("max", x[i, k], [k]), name="max", origin="max")
    e = compute((rows, columns), lambda i, j: call("exp", x[i, j] - top[i]), name="exp",
                origin="subtract, exp")
    total = compute((rows,), lambda i: reduce_scalar("add", e[i, k], [k]), name="sum",
                    origin="sum")
    y = compute((rows, columns), lambda i, j: e[i, j] / total[i], name="softmax", origin="divide")
    return Program("k_softmax", (x,), (top, e, total, y), (y,), "rows", {"rows": 1})


def test_a_row_too_long_for_a_block_is_walked(interpreter: Any, rng: np.random.Generator) -> None:
    program = softmax_program(2, 40000)
    assert "for start in range(0, 40000, BLOCK):" in triton_source(program)
    check(interpreter, program, [random(rng, (2, 40000), float32)])


def test_gelu_reads_like_this() -> None:
    assert triton_source(gelu_program()) == '''\
"""k_gelu (pointwise): multiply, erf, add."""

import triton
import triton.language as tl


@triton.jit
def k_gelu(x_ptr, gelu_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < 15
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    gelu = (x * 0.5 * (tl.erf(x * 0.70710677) + 1.0)).to(tl.bfloat16)  # multiply, erf, add
    tl.store(gelu_ptr + offsets, gelu, mask=mask)


def launch(x, gelu):
    """Run the kernel: x: bf16[3, 5] -> gelu: bf16[3, 5]."""
    programs = 1
    k_gelu[(programs,)](x, gelu, BLOCK=16, num_warps=1)
'''


SOFTMAX_HEAD = '''\
"""k_softmax (rows): max, subtract, exp, sum, divide."""

import triton
import triton.language as tl


@triton.jit
def _max(a, b):
    # numpy's rule: NaN wins, where tl.max would drop it
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
'''


def test_softmax_reads_like_this() -> None:
    assert triton_source(softmax_program(32, 1000)) == SOFTMAX_HEAD + '''\
def k_softmax(x_ptr, softmax_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    mask = k < 1000
    x = tl.load(x_ptr + i * 1000 + k, mask=mask)
    max = tl.reduce(tl.where(mask, x, float("-inf")), 0, _max)  # max
    exp = tl.exp(x - max)  # subtract, exp
    sum = tl.sum(tl.where(mask, exp, 0.0), axis=0)  # sum
    softmax = exp / sum  # divide
    tl.store(softmax_ptr + i * 1000 + k, softmax, mask=mask)


def launch(x, softmax):
    """Run the kernel: x: f32[32, 1000] -> softmax: f32[32, 1000]."""
    programs = 32
    k_softmax[(programs,)](x, softmax, BLOCK=1024, num_warps=4)
'''


def test_softmax_of_unknown_size_walks_its_rows() -> None:
    assert triton_source(softmax_program(*dims("n m"))) == SOFTMAX_HEAD + '''\
def k_softmax(x_ptr, softmax_ptr, m, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    max_lanes = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, m, BLOCK):
        k = (start + tl.arange(0, BLOCK)).to(tl.int64)
        mask = k < m
        x = tl.load(x_ptr + i * m + k, mask=mask)
        max_lanes = _max(max_lanes, tl.where(mask, x, float("-inf")))
    max = tl.reduce(max_lanes, 0, _max)  # max
    sum_lanes = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, m, BLOCK):
        k = (start + tl.arange(0, BLOCK)).to(tl.int64)
        mask = k < m
        x = tl.load(x_ptr + i * m + k, mask=mask)
        exp = tl.exp(x - max)  # subtract, exp
        sum_lanes += tl.where(mask, exp, 0.0)
    sum = tl.sum(sum_lanes, axis=0)  # sum
    for start in range(0, m, BLOCK):
        k = (start + tl.arange(0, BLOCK)).to(tl.int64)
        mask = k < m
        x = tl.load(x_ptr + i * m + k, mask=mask)
        exp = tl.exp(x - max)  # subtract, exp
        softmax = exp / sum  # divide
        tl.store(softmax_ptr + i * m + k, softmax, mask=mask)


def launch(x, softmax):
    """Run the kernel: x: f32[n, m] -> softmax: f32[n, m]."""
    m = x.shape[1]
    n = x.shape[0]
    programs = n
    BLOCK = 4096 if m > 4096 else triton.next_power_of_2(m) or 1
    if programs > 0:
        k_softmax[(programs,)](x, softmax, m, n, BLOCK=BLOCK, num_warps=16 if BLOCK >= 1024 else 4)
'''


# ---------------------------------------------------------------- on a GPU
def on_gpu(source: str, inputs: Any, outputs: Any, sizes: Any) -> Any:
    return run_source(source, inputs, outputs, sizes, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_cases_on_a_gpu(case: str, rng: np.random.Generator) -> None:
    function, types, sizes = CASES[case]
    check_function(on_gpu, rng, function, *types, sizes=sizes, chip=h200())


@pytest.mark.gpu
@pytest.mark.parametrize("chip", [None, h200()], ids=["any", "h200"])
@pytest.mark.parametrize("op", FLOATING)
def test_float_operations_on_a_gpu(op: str, chip: ChipSpec | None) -> None:
    values = operands(op, WIDE)
    check(on_gpu, one_operation(op, float32, len(values[0])), values, chip=chip)
