"""What a user is told of every name: signatures, help, completion, examples that run, types."""

from __future__ import annotations

import doctest
import inspect
import pydoc
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.graph.ir import Operator

FUNCTIONS = {name: value for name, value in vars(tz.public)["NAMES"].items()
             if inspect.isfunction(value)}
FRONTED = {name: getattr(tz, name) for name in ("cond", "while_loop", "scan")}
OPERATORS = {name: value for name, value in vars(tz.public)["NAMES"].items()
             if isinstance(value, Operator)}


# ---------------------------------------------------------------- examples
@pytest.mark.parametrize("name", [*FUNCTIONS, *FRONTED])
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(getattr(tz, name)) or ""
    found = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    runner.run(found, out=said.append)
    assert not runner.failures, "".join(said)
    assert runner.tries or name == "compile"  # which needs a model: docs/onnx.md runs it


def test_the_example_of_lower_runs() -> None:
    (found,) = doctest.DocTestFinder(recurse=False).find(Operator.lower, "lower", globs={})
    assert doctest.DocTestRunner().run(found) == (0, 2)


# ---------------------------------------------------------------- signatures
@pytest.mark.parametrize("name", [*FUNCTIONS, *FRONTED])
def test_functions_have_typed_signatures(name: str) -> None:
    value = getattr(tz, name)
    found = inspect.signature(value)
    assert found.return_annotation is not found.empty
    assert all(p.annotation is not p.empty for p in found.parameters.values())
    wrapped = [p for p in found.parameters.values() if p.kind is p.VAR_KEYWORD]
    assert not wrapped or name in ("verify", "bench")  # attributes of the function
    doc = inspect.getdoc(value) or ""
    assert len(doc.splitlines()) >= 4, doc


def test_operators_have_typed_signatures_and_help() -> None:
    told = 0
    for name, op in OPERATORS.items():
        if name in FRONTED or name in ("getitem", "nonzero"):
            continue
        shown = inspect.signature(op)
        assert list(shown.parameters) == list(op.signature.parameters), name
        assert all(p.annotation is not p.empty for p in shown.parameters.values()), name
        assert "kwargs" not in str(shown)
        text = pydoc.plain(pydoc.render_doc(op))
        assert "Operator in module terrazzo\n" in text, name
        assert f"{op.name}(" in text and op.doc.splitlines()[0] in text, name
        assert "gradient" in text
        told += f"{op.name}(" in text.partition("\n\n")[2].partition("\n")[2]
    assert told > 0.75 * len(OPERATORS)  # by an example with shapes


def test_help_of_an_operator() -> None:
    text = pydoc.plain(pydoc.render_doc(tz.softmax))
    assert "softmax(x: Array, *, axis: int | tuple[int, ...] | None = -1) -> Array" in text
    assert "exp(x) scaled to a sum of 1 along an axis" in text
    assert "axis  the axis, counted from the front" in text
    assert "softmax(f32[2, 3]) is f32[2, 3]." in text
    assert str(inspect.signature(tz.add)) == "(x: Array, y: Array, /) -> Array"
    assert "Make a function of tensors an operator" in pydoc.plain(pydoc.render_doc(tz.op))


def test_help_of_a_user_s_operator() -> None:
    @tz.op(name="test_help_mine")
    def mine(x: tz.Array, weight: tz.Array, *, power: int = 2) -> tz.Array:
        """x times a power of weight

        Second paragraph.
        """
        return x * weight ** power

    text = pydoc.plain(pydoc.render_doc(mine))
    assert "test_help_mine(x: tz.Array, weight: tz.Array, *, power: int = 2) -> tz.Array" in text
    assert "x times a power of weight" in text and "Second paragraph." in text
    assert "a gradient" in text or "the gradient of its body" in text
    assert mine.__module__ == __name__

    class Layer:
        @tz.op
        def forward(self, x: Any, *, scale: float = 1.0) -> Any:
            """one layer"""
            return x * scale

    assert str(inspect.signature(Layer().forward)) == "(x: Any, *, scale: float = 1.0)"
    assert "one layer" in (inspect.getdoc(Layer().forward) or "")
    assert inspect.signature(Operator).parameters["name"]  # the class itself is no operator


def test_functions_that_were_made_of_others() -> None:
    def loss(x: Any, y: Any = 1.0) -> Any:
        return tz.sum(x * y)

    for derived in (tz.grad(loss), tz.value_and_grad(loss), tz.vmap(loss), tz.jit(loss)):
        assert list(inspect.signature(derived).parameters) == ["x", "y"]
    assert tz.grad(loss).__name__ == "grad_loss" and "loss" in (tz.grad(loss).__doc__ or "")


def test_methods_of_traced_values() -> None:
    from terrazzo.graph.ir import Value

    assert list(inspect.signature(Value.sum).parameters) == ["x", "axis", "keepdims", "dtype"]


# ---------------------------------------------------------------- completion
def test_names_complete_before_anything_is_loaded() -> None:
    program = """
import rlcompleter, terrazzo as tz
complete = rlcompleter.Completer({"tz": tz}).complete
found = [complete("tz.soft", i) for i in range(9)]
assert "tz.softmax(" in found and "tz.softplus(" in found, found
names = dir(tz)
assert {"te", "ort", "errors", "knobs", "softmax", "op", "float32", "__version__"} <= {*names}
assert not {"Any", "find_spec", "import_module", "TYPE_CHECKING", "public", "api"} & {*names}
assert all(hasattr(tz, name) for name in names)
assert {*tz.__all__} <= {*names}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr


def test_arrays_of_all_kinds_are_arrays() -> None:
    seen = []
    tz.jit(lambda x: seen.append(isinstance(x, tz.Array)) or x)(np.ones(3))
    assert seen == [True] and isinstance(np.ones(3), tz.Array) and not isinstance(3.0, tz.Array)


# ---------------------------------------------------------------- type checkers
PROGRAM = '''
import numpy as np
import terrazzo as tz

@tz.op
def scaled(x: tz.Array, *, power: int = 2) -> tz.Array:
    return tz.softmax(x, axis=-1) ** power

@tz.op(name="named", grad=lambda node, g: [g])
def named(x: tz.Array) -> tz.Array:
    return tz.einsum("ij->ji", x) + tz.sum(x, 0, keepdims=True)

@tz.jit
def step(state: dict[str, tz.Array], rate: float = 0.1) -> dict[str, tz.Array]:
    return {k: v - rate * v for k, v in state.items()}

def turn(h: np.ndarray, x: tz.Array) -> tuple[np.ndarray, int]:
    return h, 3

x: np.ndarray = np.ones((4, 4), np.float32)
y: np.ndarray = scaled(x, power=3)
print(scaled.verify(dtypes=["float32"]), scaled.bench(x), scaled.lower(x, "loop").splitlines())
print(tz.topk(x, k=2, largest=False)[0], tz.conv(x, x, padding=((1, 1), (0, 0)), strides=2))
new = step({"w": x}, rate=0.2)
scaled(x, out=y)
tz.add(x, x, out=y)
last, ys = tz.scan(turn, x, x)
g = tz.grad(lambda x: tz.sum(x))(x)
n = tz.dim("n")
z = tz.zeros(shape=(n, 3), dtype="float32")
with tz.knobs.override(threads=1):
    tz.softmax(x)
'''
MISTAKES = {
    "tz.softmax(x, axes=1)": "call-overload",
    'tz.softmax(x, axis="left")': "call-overload",
    "tz.softmax()": "call-overload",
    "tz.sofmax(x)": "attr-defined",
    "scaled(x, powre=3)": "call-overload",
    'scaled(x, power="two")': "call-overload",
    "tz.einsum(x, x)": "arg-type",
    "tz.vmap(3)": "arg-type",
    "step(3)": "call-overload",
    'tz.verify(scaled, seed="x")': "arg-type",
    "tz.scan(turn)": "call-overload",
    'tz.topk(x, k=2, largest="yes")': "call-overload",
}


def test_a_typed_program(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    wrong = [f"{call}  # wrong" for call in MISTAKES]
    program.write_text(PROGRAM + "\n".join(wrong) + "\n")
    source = Path(tz.__file__).parents[1]
    # The stub alone, without what lies behind it: that takes half a minute.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "--no-error-summary",
         "--show-error-codes", "--follow-imports", "skip", str(program),
         str(source / "terrazzo" / "__init__.pyi")],
        capture_output=True, text=True, timeout=280, cwd=tmp_path)
    lines = PROGRAM.count("\n")
    said: dict[int, str] = {}
    for line in done.stdout.splitlines():
        if line.startswith(str(program)) or line.startswith(program.name):
            said.setdefault(int(line.split(":")[1]), line)
    assert not {k: v for k, v in said.items() if k <= lines}, done.stdout + done.stderr
    for number, (call, kind) in enumerate(MISTAKES.items(), lines + 1):
        assert f"[{kind}]" in said.get(number, ""), (call, done.stdout)


def test_types_are_shipped() -> None:
    package = Path(tz.__file__).parent
    assert (package / "py.typed").exists() and (package / "__init__.pyi").exists()
