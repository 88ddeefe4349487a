"""What users read when the machine, a file or a setting is not as it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from messages import refuses

import terrazzo as tz
from terrazzo import te
from terrazzo.errors import (
    ArgumentError,
    ArtifactError,
    DeviceError,
    DTypeError,
    KnobError,
    NotContiguous,
    OutOfMemory,
    ScheduleError,
    ShapeError,
)
from terrazzo.runtime.artifact import unpack
from terrazzo.runtime.executable import Executable


# ---------------------------------------------------------------- memory
@pytest.mark.parametrize("call", [
    lambda x: tz.broadcast_to(x[:1, :1], shape=(1 << 20, 1 << 20, 1 << 10)),
    lambda x: tz.zeros(shape=(1 << 45,)),
    lambda x: tz.outer(np.ones(1 << 24, np.float32), np.ones(1 << 24, np.float32)),
    lambda x: tz.broadcast_to(x[:1, :1], shape=(1 << 31, 1 << 30)),
], ids=["broadcast", "zeros", "outer", "beyond 64 bits"])
def test_absurd_sizes_run_out_of_memory(call: Any, x: np.ndarray) -> None:
    refuses(lambda: call(x), OutOfMemory, r"an output of shape \(.*\) needs \d+ MiB",
            hint="smaller")


# ---------------------------------------------------------------- executables and files
@pytest.fixture(scope="module")
def executable() -> Executable:
    return tz.exp.compile(np.ones((3, 4), np.float32))


@pytest.mark.parametrize(("args", "error", "message"), [
    ((np.ones((3, 4), np.float32),) * 2, ArgumentError, "exp takes 1 inputs, got 2"),
    ((np.ones((5, 4), np.float32),), ShapeError,
     r"input 'x0' of exp has shape \(5, 4\), expected \(3, 4\)"),
    ((np.ones(4, np.float32),), ShapeError, "has 1 dimensions, expected 2"),
    ((np.ones((3, 4), np.float64),), DTypeError, "is float64, compiled for float32"),
    (("text",), ArgumentError, "input 'x0' of exp is a str"),
], ids=["count", "shape", "rank", "dtype", "text"])
def test_wrong_inputs_of_an_executable(executable: Executable, args: Any, error: type[Any],
                                       message: str) -> None:
    refuses(lambda: executable(*args), error, message)


def test_files_that_are_none_of_ours(tmp_path: Path, executable: Executable) -> None:
    path = tmp_path / "exp.tzx"
    path.write_bytes(b"nonsense")
    refuses(lambda: tz.load(path), ArtifactError, "not a compiled terrazzo file",
            hint="Executable.save", where="exp.tzx")
    executable.save(path)
    whole = path.read_bytes()
    for damaged in (whole[:len(whole) // 2], whole[:-8] + b"12345678",
                    whole[:100] + bytes([whole[100] ^ 255]) + whole[101:]):
        path.write_bytes(damaged)
        refuses(lambda: tz.load(path), ArtifactError, "damaged|not a compiled", where="exp.tzx")
    refuses(lambda: tz.load(tmp_path / "nowhere.tzx"), ArtifactError, r"cannot read .*nowhere\.tzx")


def test_an_empty_file(tmp_path: Path) -> None:
    refuses(lambda: unpack(b"", "empty.tzx"), ArtifactError, "not a compiled|damaged",
            where="empty.tzx")


# ---------------------------------------------------------------- torch tensors
@pytest.mark.torch
def test_tensors_elsewhere_than_in_memory() -> None:
    torch = pytest.importorskip("torch")
    refuses(lambda: tz.exp(torch.ones(3, device="meta")), DeviceError,
            "exp got a tensor on meta", hint="no values")
    refuses(lambda: tz.exp(torch.ones(3, 3).to_sparse()), ArgumentError,
            "layout torch.sparse_coo", hint="to_dense")


# ---------------------------------------------------------------- settings
def test_settings() -> None:
    refuses(lambda: setattr(tz.knobs, "threads", -1), KnobError,
            r"setting threads \(environment variable TZ_THREADS\) cannot be -1",
            hint="at least 0")
    refuses(lambda: setattr(tz.knobs, "nope", 1), KnobError, "no setting called 'nope'",
            hint="threads")


# ---------------------------------------------------------------- schedules by hand
def add_one() -> tuple[Any, Any, Any]:
    a = te.placeholder((8, 8), name="a")
    b = te.compute((8, 8), lambda i, j: a[i, j] + 1.0, name="b")
    return a, b, te.schedule(b)


@pytest.mark.parametrize(("step", "message"), [
    (lambda s, b: s[b].split("q", 4), "q"),
    (lambda s, b: s[b].split("i", 0), "0"),
    (lambda s, b: s[b].reorder("i", "i"), "twice"),
], ids=["axis", "factor", "twice"])
def test_steps_that_do_not_fit(step: Any, message: str) -> None:
    _, b, s = add_one()
    refuses(lambda: step(s, b), ScheduleError, message)


def test_an_instruction_that_does_not_exist() -> None:
    _, b, s = add_one()
    refuses(lambda: s[b].tensorize("i", "no such instruction"), ScheduleError,
            "no such instruction")


def test_arrays_that_do_not_fit_a_kernel() -> None:
    a, b, s = add_one()
    kernel = te.build(s, [a, b], target="interpreter")
    good = np.ones((8, 8), np.float32)
    refuses(lambda: kernel(good), ArgumentError, "takes 2 arrays, got 1")
    refuses(lambda: kernel(good.astype(np.float64), good), DTypeError,
            "a is float32, got an array of float64", hint="astype")
    refuses(lambda: kernel(good[:4], good), ShapeError, r"a has shape \[4, 8\]")
    refuses(lambda: kernel(good.T, good), NotContiguous, "gaps or another order",
            hint="ascontiguousarray")
    refuses(lambda: te.build(s, [a, b], target="fpga"), ArgumentError, "no target 'fpga'",
            hint="cpu")


# ---------------------------------------------------------------- size of a program
def test_a_long_chain_of_operators_is_no_deep_recursion() -> None:
    def chain(x: Any) -> Any:
        for _ in range(300):
            x = x * 0.5 + 1.0
        return x

    result = tz.jit(chain)(np.zeros(4, np.float32))
    np.testing.assert_array_equal(result, np.full(4, 2.0, np.float32))
