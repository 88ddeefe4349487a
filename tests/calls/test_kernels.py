"""Kernels written by hand: called, chosen by time, checked by verify, and refused with reasons."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.calls import kernels
from terrazzo.chips.cpu import cplusplus
from terrazzo.errors import ArgumentError, CompileError, VerifyError
from terrazzo.graph.ir import Operator

needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")

LOOP = """
    const float* x = in[0].as<float>();
    const float alpha = *in[1].as<float>(), beta = *in[2].as<float>();
    float* y = out[0].as<float>();
    for (int64_t i = 0; i < in[0].size(); ++i) {
        const float r = x[i] > 0 ? x[i] : (x[i] == x[i] ? 0.0f : x[i]);
        y[i] = alpha * r * r + beta;
    }
"""


def squared_relu() -> Operator:
    @tz.op
    def squared_relu(x: Any, alpha: Any = 1.0, beta: Any = 0.0) -> Any:
        positive = tz.maximum(x, 0.0)
        return alpha * positive * positive + beta

    return squared_relu


def with_kernel(body: str, operator: Operator | None = None) -> Operator:
    made = operator or squared_relu()

    @made.kernel("cpu", language="c++")
    def _(x: Any, alpha: Any, beta: Any) -> str | None:
        if any(t.dtype != tz.float32 for t in (x, alpha, beta)) or alpha.shape or beta.shape:
            return None
        return "void kernel(const Tensor* in, Tensor* out) {" + body + "}"

    return made


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clock says, the kernel by hand is quicker."""
    monkeypatch.setattr(kernels, "_timed", lambda chip, entries, leaves: {
        name: float(name == "generated") for name in entries})


@needs_compiler
@pytest.mark.usefixtures("by_hand")
def test_results() -> None:
    op, x = with_kernel(LOOP.replace("+ beta", "+ beta + 100")), np.float32([[-1, 2], [3, -4]])
    want = np.float32([[0, 4], [9, 0]]) + 100  # to tell it from the generated one
    assert np.array_equal(op(x), want)
    assert np.array_equal(op(x.T, 2.0), (want.T - 100) * 2 + 100)
    assert np.array_equal(op(x, np.float32(2), beta=1.0), (want - 100) * 2 + 101)
    assert op(x[:0]).shape == (0, 2)
    assert np.array_equal(op(x.astype(np.float64)), want - 100)  # not for these
    assert np.array_equal(tz.jit(lambda x: op(x))(x), want - 100)  # inside a graph it is fused


@needs_compiler
@pytest.mark.torch
@pytest.mark.usefixtures("by_hand")
def test_tensors_and_gradients() -> None:
    torch = pytest.importorskip("torch")
    op = with_kernel(LOOP.replace("+ beta", "+ beta + 100"))
    registered = tz.torch.register(op, "tzkernel::squared_relu")
    x = torch.randn(3, 4)
    for call in (op, registered):
        y = x.clone().requires_grad_()
        torch.testing.assert_close(call(x), torch.relu(x) ** 2 + 100)
        torch.testing.assert_close(call(x.t()), torch.relu(x.t()) ** 2 + 100)
        call(y).sum().backward()
        torch.testing.assert_close(y.grad, 2 * torch.relu(x))


@needs_compiler
@pytest.mark.usefixtures("by_hand")
def test_several_results_attributes_and_absent_tensors() -> None:
    @tz.op
    def halves(x: Any, weight: Any = None, *, scale: float = 1.0) -> Any:
        y = x * scale if weight is None else x * weight * scale
        return y[:1], tz.sum(y, axis=1)

    @halves.kernel("cpu", language="c++")
    def _(x: Any, weight: Any, *, scale: float) -> str:
        kind = {"float32": "float", "float64": "double"}[x.dtype.name]
        return f"""
        void kernel(const Tensor* in, Tensor* out) {{
            const auto* x = in[0].as<{kind}>();
            const auto* w = in[1].as<{kind}>();
            const int64_t rows = in[0].shape[0], columns = in[0].shape[1];
            for (int64_t i = 0; i < rows; ++i) {{
                {kind} sum = 0;
                for (int64_t j = 0; j < columns; ++j) {{
                    const {kind} y = x[i * columns + j] * (w ? w[j] : 1) * {scale};
                    if (i == 0) out[0].as<{kind}>()[j] = y;
                    sum += y;
                }}
                out[1].as<{kind}>()[i] = sum;
            }}
        }}"""

    x = np.arange(6.0).reshape(2, 3)
    for weight in (None, np.array([1.0, 2.0, 3.0])):
        for dtype in (np.float32, np.float64):
            given = () if weight is None else (weight.astype(dtype),)
            first, sums = halves(x.astype(dtype), *given, scale=2.0)
            want = x * 2 * (1 if weight is None else weight)
            assert np.array_equal(first, want[:1]) and np.array_equal(sums, want.sum(1))
    assert tz.verify(halves, x, dtypes=["float32"], kinds=["random", "odd"],
                     levels=["kernel"]).elements("kernel") > 0


@needs_compiler
def test_the_quicker_one_is_chosen() -> None:
    slow = """
        for (volatile int64_t turn = 0; turn < 3000000; turn = turn + 1) {}
    """
    op, x = with_kernel(slow + LOOP), np.ones(8, np.float32)
    assert np.array_equal(op(x), x)
    (choice,) = kernels.kernels_of(op).choices.values()
    assert choice.chosen == "generated" and len(choice.seconds) == 2
    op(np.ones(9, np.float32))  # of the same class
    assert len(kernels.kernels_of(op).choices) == 1
    op(np.ones(900, np.float32))
    assert len(kernels.kernels_of(op).choices) == 2
    assert "f32[8]: generated (generated" in op.lower(x, "kernels")
    report = op.bench(x, rounds=1, torch=False)
    assert [line.name.partition(",")[0] for line in report.lines[:3]] == [
        "terrazzo", "generated", "c++ kernel"]
    assert any("chosen for f32[8]: generated" in note for note in report.notes)


@needs_compiler
def test_verify_holds_it_to_the_meaning() -> None:
    x = np.ones((3, 5), np.float32)
    report = with_kernel(LOOP).verify(x, 2.0, 0.5, dtypes=["float32"])
    assert report.elements("kernel") > 100 and "kernel" in str(report)
    assert "kernel" not in str(squared_relu().verify(x, dtypes=["float32"], kinds=["odd"]))
    for body, what in ((LOOP.replace("r * r", "r"), "kernel"),
                       (LOOP + "y[in[0].size()] = 1;", "writes outside of result 0"),
                       (LOOP + "in[0].as<float>()[0] = 7;", "changes input 0")):
        with pytest.raises(VerifyError) as error:
            with_kernel(body).verify(x, 2.0, 0.5, dtypes=["float32"], kinds=["random", "odd"])
        assert error.value.level == "kernel" and what in str(error.value)


@needs_compiler
def test_errors_of_the_compiler_name_the_users_line() -> None:
    op = squared_relu()

    @op.kernel("cpu", language="c++")
    def _(x: Any, alpha: Any, beta: Any) -> str:
        return """
        void kernel(const Tensor* in, Tensor* out) {
            int64_t wrong = no_such_name;
        }
        """

    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1)
                if "wrong = no_such_name;" in text)
    with pytest.raises(CompileError, match=rf"test_kernels.py:{line}:\d+: error: .*no_such_name"):
        op(np.ones(3, np.float32))


@needs_compiler
def test_code_is_kept_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    compiled = cplusplus._compiled

    def counted(command: list[str], source: str) -> bytes:
        made.append(source)
        return compiled(command, source)

    monkeypatch.setattr(cplusplus, "_compiled", counted)
    x = np.ones(3, np.float32)
    with tz.knobs.override(cache_dir=str(tmp_path)):
        for turn in range(3):
            if turn == 2:
                for file in tmp_path.rglob("*.tzc"):
                    file.write_bytes(file.read_bytes()[:-9] + b"123456789")
            assert np.array_equal(with_kernel(LOOP)(x), x)
            assert len(made) == (1 if turn < 2 else 2)


def test_without_a_compiler_the_generated_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler --fast")
    op, x = with_kernel(LOOP), np.ones(3, np.float32)
    with pytest.warns(UserWarning, match="no C.. compiler was found .no-such-compiler.*generated"):
        assert np.array_equal(op(x), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(op(np.ones(300, np.float32)), np.ones(300))


def test_what_is_refused() -> None:
    op = squared_relu()

    def refused(match: str, chip: str, language: str) -> None:
        with pytest.raises((ArgumentError, tz.errors.DeviceError), match=match):
            op.kernel(chip, language=language)

    refused("kernels in triton come with a chip that runs Triton", "cpu", "triton")
    refused("kernels in cuda come with a chip of NVIDIA's", "cpu", "cuda")
    refused("takes no kernels in 'fortran'", "cpu", "fortran")

    def answer(source: Any) -> Callable[..., Any]:
        return lambda x, alpha, beta: source

    op.kernel("cpu", language="c++")(answer(3))
    with pytest.raises(ArgumentError, match="answered with a int"):
        op(np.ones(3, np.float32))
