"""A scalar operation is one row: each column is filled, derived, or absent with a reason."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from terrazzo.base.scalar import Call, Const, call
from terrazzo.base.scalar_op import KINDS
from terrazzo.base.scalar_table import INSTRUCTIONS, OPS, Absent, ScalarOp, by_operator
from terrazzo.chips.cpu.llvm import scalars, vmath
from terrazzo.chips.cpu.llvm.builder import Builder, Module
from terrazzo.codegen.triton.maths import FUNCTIONS, needed_functions
from terrazzo.dtypes import DType, bool_, float32, float64, int32, uint32
from terrazzo.errors import UnsupportedDType
from terrazzo.graph.ir import OPERATORS
from terrazzo.ops import elementwise

ROWS = pytest.mark.parametrize("row", OPS.values(), ids=lambda row: row.name)
TYPES: dict[str, DType] = {"f": float32, "i": int32, "u": uint32, "b": bool_}
COLUMNS = ("operator", "gradient", "ufunc", "triton", "libdevice", "mlir", "torch", "onnx")


def filled(row: ScalarOp, column: str) -> bool:
    return not isinstance(getattr(row, column), Absent)


def texts(entry: Any) -> list[str]:
    return [entry] if isinstance(entry, str) else list(entry.values())


# ---------------------------------------------------------------- what is missing
@ROWS
def test_every_column_is_filled_or_says_why_not(row: ScalarOp) -> None:
    assert row.name == next(name for name, other in OPS.items() if other is row)
    assert row.doc and row.arity and row.kinds and set(row.kinds) <= set(KINDS)
    assert row.result in ("promote", "float", "bits", "bool")
    for column in COLUMNS:
        entry = getattr(row, column)
        assert entry.why if isinstance(entry, Absent) else entry, column
    for column in (row.triton, row.onnx):
        if not isinstance(column, (str, Absent)):
            assert set("".join(column)) <= set(row.kinds), "a kind that the row does not have"
    if row.meaning is None and filled(row, "triton"):
        missing = [kind for kind in row.kinds if row.text(row.triton, kind) is None]
        assert not missing, f"Triton has no text for {missing}"


@ROWS
def test_numpy_knows_it_for_its_kinds_of_types(row: ScalarOp) -> None:
    for kind in row.kinds:
        one = np.ones(3, TYPES[kind].np)
        with np.errstate(divide="ignore"):
            made = row.numpy(*[one] * row.arity)
        assert made.shape == (3,)
        assert (made.dtype == bool) == (row.result == "bool" or kind == "b")
    if isinstance(row.ufunc, str):
        function = getattr(np, row.ufunc)
        assert isinstance(function, np.ufunc) and function.nin == row.arity


@ROWS
def test_the_cpu_has_code_for_its_kinds_of_types(row: ScalarOp) -> None:
    if row.meaning is not None:  # nothing of it comes as far as code
        made = call(row.name, *[Const(float32, 1.0)] * row.arity)
        assert isinstance(made, Call) and OPS[made.op].meaning is None
        return
    if row.cpu[0] != INSTRUCTIONS:
        assert all(callable(vmath.routine(name)) for name in row.cpu)
    if row.written:
        return  # selections and conversions, which have types of their own
    for dtype in (*TYPES.values(), float64):
        b = Builder(Module(), "f", [])
        args = [b.undefined(scalars.register_type(dtype))] * row.arity
        if dtype.kind in row.kinds:
            made = scalars.emit(b, row.name, args, dtype)
            assert made.elem == ("i1" if row.result == "bool" else args[0].elem)
        elif dtype.kind != "f":
            with pytest.raises(UnsupportedDType):
                scalars.emit(b, row.name, args, dtype)


@ROWS
def test_the_words_of_triton_exist(row: ScalarOp) -> None:
    if not filled(row, "triton"):
        assert row.meaning is not None or filled(row, "libdevice") or row.name in ("jn", "yn")
        return
    for text in texts(row.triton):
        ours = set(re.findall(r"\b_[a-z]\w*", text))
        assert ours <= set(FUNCTIONS), "not in codegen/triton/maths.py"
        places = set(re.findall(r"{(\w+)}", text))
        assert places <= {*map(str, range(row.arity)), "type", "bits"}
        assert str(row.arity - 1) in places


@pytest.mark.triton
def test_the_words_of_tritons_libraries_exist() -> None:
    language = pytest.importorskip("triton.language")
    from triton.language.extra import libdevice

    words = {word for row in OPS.values() if filled(row, "triton") for text in texts(row.triton)
             for word in re.findall(r"\btl\.(\w+)\(", "\n".join([text, *needed_functions([text])]))}
    assert len(words) > 15
    assert not [word for word in words if not hasattr(language, word)]
    names = [row.libdevice for row in OPS.values() if isinstance(row.libdevice, str)]
    assert len(names) > 30 and not [name for name in names if not hasattr(libdevice, name)]


@pytest.mark.torch
def test_the_functions_of_torch_exist_and_mean_the_same() -> None:
    torch = pytest.importorskip("torch")
    compared = 0
    for row in OPS.values():
        if not isinstance(row.torch, str):
            continue
        function = getattr(torch, row.torch)
        kind = "f" if "f" in row.kinds else "i"
        given = [np.array(v, TYPES[kind].np) for v in ([0.25, 0.5, 0.75], [2, 1, 3], [4, 5, 6])]
        given = [given[0] * (4 if kind == "i" else 1), *given[1:]][:row.arity]
        given = [g.astype(TYPES[kind].np) for g in given]
        if row.name == "where":
            given[0] = given[0] > 0.3
        if row.name == "acosh":
            given[0] = given[0] + 1
        want = row.numpy(*given)
        np.testing.assert_allclose(function(*map(torch.from_numpy, given)).numpy(), want,
                                   rtol=1e-5, err_msg=row.name)
        compared += 1
    assert compared > 50


@pytest.mark.onnx
def test_the_operators_of_onnx_exist_and_are_converted() -> None:
    onnx = pytest.importorskip("onnx")
    from terrazzo.frontends.onnx import convert  # noqa: F401 (registers)
    from terrazzo.frontends.onnx.export import OPSET
    from terrazzo.frontends.onnx.registry import find

    names = {name for row in OPS.values() if not isinstance(row.onnx, Absent)
             for name in texts(row.onnx)}
    assert len(names) > 35
    for name in names:
        schema = onnx.defs.get_schema(name, OPSET)
        assert find("", name, OPSET) is not None, name
        assert not any(a.required for a in schema.attributes.values()), name


def test_operators_are_those_of_the_table() -> None:
    rows = by_operator()
    assert len(rows) > 60
    for name, row in rows.items():
        op = OPERATORS[name]
        assert getattr(elementwise, name) is op and op.doc == row.doc
        assert op.differentiable == (row.result != "bool" and row.name not in (
            "floordiv", "digamma", "bitcast") and row.result != "bits")


# ---------------------------------------------------------------- one more
NEW = Path(__file__).with_name("new_scalar_operations.py")


@pytest.mark.torch
@pytest.mark.onnx
def test_a_new_operation_is_one_entry(tmp_path: Path) -> None:
    """In a process of its own: rooms read the table when they are imported."""
    pytest.importorskip("torch")
    pytest.importorskip("onnx")
    done = subprocess.run([sys.executable, str(NEW), str(tmp_path)], capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "numpy", "te", "compile", "gradient", "source", "torch", "verify", "fuzz", "onnx"]
