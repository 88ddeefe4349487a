"""Whatever stands on the command line of `tz`: a message and an exit code, never a traceback."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.graph.ir import OPERATORS
from terrazzo.tools.cli import commands as cli

PROGRAM = """
import terrazzo as tz

number = 3

@tz.op
def fine(x):
    return tz.tanh(x)

def plain(x, y):
    return x @ y

def raises(x):
    raise RuntimeError("two\\nlines")
"""
GARBAGE = bytes(random.Random(0).randrange(256) for _ in range(300))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of files that are broken in many ways, which commands run in."""
    monkeypatch.chdir(tmp_path)
    files: dict[str, bytes | str] = {
        "good.py": PROGRAM, "syntax.py": "def f(:\n", "fails.py": "1 / 0\n", "empty.py": "",
        "leaves.py": "raise SystemExit(3)\n", "imports.py": "import no_such_package\n",
        "garbage.py": GARBAGE, "garbage.onnx": GARBAGE, "empty.onnx": b"", "garbage.tzx": GARBAGE,
        "empty.tzx": b"", "text.onnx": "ir_version: 8\n", "garbage.npz": GARBAGE, "empty.npz": b"",
        "zip.npz": b"PK\x03\x04" + GARBAGE,
        "kernel.py": "import triton\n@triton.jit\ndef k(x, N: triton.language.constexpr):\n"
                     "    pass\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "a_folder").mkdir()
    (tmp_path / "a_folder.onnx").mkdir()
    (tmp_path / "a_folder.py").mkdir()
    np.savez(tmp_path / "wrong.npz", nobody=np.zeros(3))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    return tmp_path


def tz_says(capfd: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """The exit code of a command in this process, and what it wrote to the standard error."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as left:
        cli.main(list(args))
    code = left.value.code
    return (0 if code is None else code if isinstance(code, int) else 1), capfd.readouterr().err


def assert_clear(code: int, said: str, *args: str) -> None:
    """A mistake is told in a few lines; usage errors come in a box."""
    assert code in (1, 2), (args, code, said)
    assert "Traceback" not in said and 'File "' not in said, (args, said)
    assert said.strip() and "\n\n\n" not in said, (args, said)
    if code == 1:  # what happened, where, what to do
        first, *more = said.strip().splitlines()
        assert ": " in first and len(first) > 12, (args, said)
        assert all(line.startswith("  ") for line in more), (args, said)


WRONG = [
    # commands and options that do not exist
    ["nonsense"], ["--nonsense"], ["lower", "--nonsense"], ["cache", "nonsense"], ["lower"],
    ["verify"], ["bench"], ["run"], ["compile"], ["triton"], ["ops", "nonsense"],
    ["lower", "softmax"], ["bench", "softmax"], ["lower", "", "-s", "3"], ["verify", ""],
    ["lower", "::", "-s", "3"], ["lower", "tz.", "-s", "3"], ["lower", "\0", "-s", "3"],
    # sizes, types, levels, attributes
    *(["lower", "softmax", "-s", size] for size in (
        "a", "-3", "1.5", "nan", "1e3", "99999999999999999999", "100000,100000,100000",
        "9223372036854775807", "3 4", "\N{SUPERSCRIPT TWO}")),
    *(["lower", "softmax", "-s", "3", "-t", kind] for kind in (
        "float31", "", "object", "str", "U3", "None", "complex64", "datetime64", "f3", ">f4x")),
    *(["lower", "softmax", "-s", "3", "-l", level] for level in ("", "nonsense", "LOOP", "\t")),
    *(["lower", "softmax", "-s", "3", "-a", text] for text in (
        "axis", "axis=", "=1", "axis=left", "axis=7", "axis=1.5",
        "axis={}", "x=1", "nonsense=1", "axis=(((", "axis=1e999", "axis=99999999999999999999")),
    ["lower", "matmul", "-s", "3", "-s", "4"], ["lower", "matmul", "-s", "3,4", "-s", "5,6"],
    ["lower", "softmax", "-s", "3", "-s", "4"], ["lower", "einsum", "-s", "3"],
    ["lower", "einsum", "-s", "3", "-a", "equation=->"], ["lower", "reshape", "-s", "3"],
    ["lower", "reshape", "-s", "3", "-a", "shape=(2,2)"], ["lower", "cond", "-s", "3"],
    ["lower", "scan", "-s", "3", "-a", "body=3"], ["lower", "while_loop", "-s", "3"],
    ["verify", "softmax", "-t", "nonsense"], ["verify", "softmax", "-l", "nonsense"],
    ["verify", "softmax", "--seed", "x"], ["verify", "softmax", "--seed", "-1"],
    ["verify", "softmax", "-s", "3", "-a", "axis=9"], ["verify", "softmax", "-s", "x"],
    ["verify", "cond"], ["bench", "softmax", "-s", "x"], ["bench", "nonsense", "-s", "3"],
    ["bench", "softmax", "-s", "3", "-a", "axis=9"], ["bench", "cond", "-s", "3"],
    ["bench", "softmax", "-s", "3", "--threads", "x"],
    ["fuzz", "--minutes", "x"], ["fuzz", "--minutes", "nan"], ["fuzz", "--minutes", "-1"],
    ["fuzz", "--seed", "-1", "--minutes", "0.001"],
    # files
    *([command, f"{file}{name}", "-s", "3"] for command in ("lower", "verify", "bench")
      for file in ("missing.py", "syntax.py", "fails.py", "leaves.py", "imports.py", "garbage.py",
                   "a_folder.py", "a_folder", "/", "good.py") for name in ("::f",)),
    *([command, f"good.py::{name}", "-s", "3"] for command in ("lower", "verify", "bench")
      for name in ("number", "raises", "plain", "", "tz", "__name__")),
    *([command, file] for command in ("run", "compile", "info", "bench") for file in (
        "missing.onnx", "garbage.onnx", "empty.onnx", "text.onnx", "a_folder.onnx", "/",
        "garbage.tzx", "empty.tzx", "missing.tzx", "good.py", "")
      if (command, file) != ("info", "")),
    *(["triton", file] for file in (
        "missing.py", "syntax.py", "empty.py", "garbage.py", "a_folder.py", "a_folder", "",
        "good.py", "good.py::fine", "good.py::nobody", "kernel.py::k", "kernel.py::nobody")),
]


@pytest.mark.parametrize("args", WRONG, ids=lambda args: " ".join(map(repr, args))[:60])
def test_mistakes(args: list[str], folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert_clear(*tz_says(capfd, *args), *args)


# ---------------------------------------------------------------- every operator, and at random
VALUES = ("", "left", "None", "-1", "7", "1.5", "nan", "(1, 'a')", "{}", "[[1]]", "1j", "b'x'",
          "99999999999999999999", "float32", "True", "lambda: 0")


@pytest.mark.parametrize("seed", range(4))
def test_every_operator_with_attributes_of_all_kinds(
        seed: int, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An operator may mean something by a value; if not, it says so."""
    rng = random.Random(seed)
    refused = 0
    for op in [o for o in OPERATORS.values() if o.family != "user"][seed::4]:
        args = ["lower", op.name, "-l", "graph", "-s", rng.choice(("3", "2,3", "()", "0,4"))]
        for param in op.attr_params:
            if param.default is param.empty or rng.random() < 0.5:
                args += ["-a", f"{param.name}={rng.choice(VALUES)}"]
        code, said = tz_says(capfd, *args)
        if code:
            assert_clear(code, said, *args)
            assert "--debug" not in said, (args, said)  # it is told by an error of our own
            refused += 1
    assert refused > 20


WORDS = {
    "lower": ["softmax", "sum", "good.py::fine", "good.py::plain", "garbage.py::f", "-s", "3,4",
              "-s", "x", "-t", "f16", "int32", "-l", "graph", "-a", "axis=1", "--", "-", "\n"],
    "verify": ["nobody", "-t", "f31", "-l", "expr", "-s", "--seed", "9" * 30, "-a", "good.py::f"],
    "bench": ["nobody", "garbage.onnx", "-s", "--against", "--size", "n=x", "--threads", "-5"],
    "run": ["garbage.onnx", "missing.tzx", "-i", "garbage.npz", "-o", "/no/where", "--size", "=1"],
    "compile": ["garbage.onnx", "text.onnx", "-o", "a_folder", "/no/where", "-o"],
    "info": ["garbage.onnx", "--rewrites", "a_folder.onnx", "\udcff.onnx"],
    "triton": ["kernel.py::k", "good.py", "--show", "ttir,x", "--signature", "*q8", "--constexpr"],
    "fuzz": ["--minutes", "x", "--seed", "-3", "--first", "--most-failures", "0"],
    "ops": ["norm", "nobody", "norm norm", "-x"], "knobs": ["x", "-x"], "cache": ["x", "-x"],
}


@pytest.mark.parametrize("command", WORDS)
def test_words_at_random(command: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(command)
    refused = 0
    for _ in range(25):
        args = [command, *rng.choices(WORDS[command], k=rng.randrange(1, 6))]
        code, said = tz_says(capfd, *args)
        if code:
            assert_clear(code, said, *args)
            refused += 1
    assert refused > 10


# ---------------------------------------------------------------- models
def save_model(path: Path, operator: str = "Relu", shape: tuple[object, ...] = ("n", 4)) -> None:
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node(operator, ["x"], ["y"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    path.write_bytes(model.SerializeToString())


@pytest.mark.onnx
def test_models(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_model(folder / "good.onnx")
    save_model(folder / "unknown.onnx", "Nonsense")
    save_model(folder / "wrong.onnx", "MatMul")
    whole = (folder / "good.onnx").read_bytes()
    (folder / "cut.onnx").write_bytes(whole[:-20])
    (folder / "readonly").mkdir(mode=0o555)
    assert tz_says(capfd, "run", "good.onnx", "-o", "out.npz")[0] == 0
    assert tz_says(capfd, "compile", "good.onnx")[0] == 0
    stored = (folder / "good.tzx").read_bytes()
    (folder / "cut.tzx").write_bytes(stored[:len(stored) // 2])
    (folder / "flipped.tzx").write_bytes(stored[:300] + bytes([stored[300] ^ 255]) + stored[301:])
    for args in (
            *(["run", "good.onnx", *more] for more in (
                ["-i", "missing.npz"], ["-i", "garbage.npz"], ["-i", "empty.npz"],
                ["-i", "zip.npz"], ["-i", "wrong.npz"], ["-i", "objects.npy"], ["-i", "a_folder"],
                ["-i", "good.py"], ["--size", "n"], ["--size", "m=3"], ["--size", "n=x"],
                ["--size", "n=99999999999999"], ["--size", "n=\N{SUPERSCRIPT TWO}"],
                ["--threads", "-1"], ["-o", "a_folder"], ["-o", "/no/where/out.npz"],
                ["-o", "/proc/out.npz"], ["-o", "/dev/full"])),
            *(["compile", "good.onnx", "-o", where] for where in (
                "a_folder", "/no/where/out.tzx", "/proc/out.tzx")),
            *([command, model] for command in ("run", "compile", "bench")
              for model in ("unknown.onnx", "wrong.onnx", "cut.onnx")),
            ["run", "cut.tzx"], ["run", "flipped.tzx"], ["info", "good.tzx"], ["info", "cut.onnx"],
            ["compile", "good.tzx"], ["bench", "good.onnx", "--against", "nobody"]):
        assert_clear(*tz_says(capfd, *args), *args)


# ---------------------------------------------------------------- the process as a whole
def command(*args: str, **variables: str) -> tuple[list[str], dict[str, str]]:
    package = str(Path(tz.__file__).parents[1])
    return [sys.executable, "-m", "terrazzo", *args], {
        **os.environ, "PYTHONPATH": package, **variables}


@pytest.mark.parametrize("variable", ["TZ_THREADS=many", "TZ_OPT_LEVEL=-1", "TZ_DYNAMIC=maybe"])
def test_settings_that_are_wrong(variable: str) -> None:
    name, _, value = variable.partition("=")
    words, env = command("info", **{name: value})
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert_clear(done.returncode, done.stderr, variable)
    assert name in done.stderr


def test_a_full_disk_and_a_reader_that_leaves() -> None:
    words, env = command("ops")
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, env=env, stdout=full, stderr=subprocess.PIPE, text=True,
                              timeout=60)
    assert_clear(done.returncode, done.stderr)
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as left:
        assert left.stdout is not None and left.stderr is not None
        left.stdout.close()
        assert left.stderr.read() == ""
    assert left.returncode == 1


def test_a_closed_output() -> None:
    for args, code in ((["ops"], 0), (["ops", "nobody"], 1)):
        words, env = command(*args)
        done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *words], env=env,
                              stderr=subprocess.PIPE, text=True, timeout=60)
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr


def test_control_c(tmp_path: Path) -> None:
    waits = tmp_path / "waits.py"
    # Many short sleeps: a signal that comes just before a sleep is heard only when that one ends.
    waits.write_text("import time\nprint('here', flush=True)\n"
                     "for _ in range(600):\n    time.sleep(0.1)\n")
    words, env = command("lower", f"{waits}::f", "-s", "3")
    def hear() -> None:  # who runs in the background inherits deafness to ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, preexec_fn=hear) as running:
        assert running.stdout is not None and running.stderr is not None
        assert running.stdout.readline() == "here\n"
        started = time.monotonic()
        running.send_signal(signal.SIGINT)
        said = running.stderr.read()
    assert time.monotonic() - started < 30
    assert running.returncode in (1, 130) and "Traceback" not in said and len(said) < 80
