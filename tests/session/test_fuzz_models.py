"""A few damaged models in every run of the tests; `make fuzz-models` tries thousands."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from terrazzo.errors import ModelError, OutOfMemory
from terrazzo.frontends.onnx.session import Session

sys.path.insert(0, str(Path(__file__).parent))
import fuzz_models
from models import model, node

pytestmark = pytest.mark.onnx
CONVOLUTION, ATTENTION, CONTROL, LOOPS = 0, 1, 3, 6


def test_mutants_run_or_are_refused() -> None:
    said: list[str] = []
    ends, failures = fuzz_models.run(60, seed=3, jobs=1, say=said.append)
    assert not failures, said
    assert sum(ends.values()) == 60 and ends["refused"] > 0


@pytest.mark.parametrize("number", range(9))
def test_seeds_run_as_they_are(number: int) -> None:
    assert fuzz_models.attempt(fuzz_models.seeds()[number].SerializeToString()) == "runs"


# ---------------------------------------------------------------- what mutants found
def copied(number: int) -> ModelProto:
    return ModelProto.FromString(fuzz_models.seeds()[number].SerializeToString())


def changed(number: int, old: bytes, new: bytes) -> bytes:
    data = fuzz_models.seeds()[number].SerializeToString()
    assert old in data and len(old) == len(new)
    return data.replace(old, new, 1)


def test_control_flow_without_its_branch() -> None:
    proto = copied(CONTROL)
    del next(n for n in proto.graph.node if n.op_type == "If").attribute[:]
    with pytest.raises(ModelError, match=r"If\) has no attribute '\w+_branch'"):
        Session(proto).run({"x": np.ones(4, np.float32)})


def test_an_operator_without_the_input_it_needs() -> None:
    proto = copied(CONTROL)
    next(n for n in proto.graph.node if n.op_type == "NonZero").input[0] = ""
    with pytest.raises(ModelError, match=r"NonZero\) has no input 'X'"):
        Session(proto).run({"x": np.ones(4, np.float32)})


def test_one_row_of_a_constant_at_a_symbolic_place() -> None:
    table = np.arange(12, dtype=np.float32).reshape(6, 2)
    proto = model(
        [node("Shape", "x", "n"), node("Add", "n one", "m"), node("Slice", "table n m", "row"),
         node("Add", "row zero", "y")],
        {"x": ("length",)}, ["y"],
        {"table": table, "one": np.array([1]), "zero": np.float32(0)})
    for length in (2, 5):
        (row,) = Session(proto).run({"x": np.ones(length, np.float32)})
        assert np.array_equal(row, table[length:length + 1])


def test_a_body_that_makes_too_little() -> None:
    proto = copied(LOOPS)
    scan = next(n for n in proto.graph.node if n.op_type == "Scan")
    del next(a for a in scan.attribute if a.name == "body").g.output[1]
    with pytest.raises(ModelError, match=r"Scan\) makes 1 outputs, the model reads 2"):
        Session(proto).run({"x": np.ones(4, np.float32)})


@pytest.mark.parametrize(("number", "old", "new"), [
    (CONTROL, b"Greater", b"Gre\xffter"), (ATTENTION, b"batch", b"b\xffatch"[:5])])
def test_names_that_are_not_text(number: int, old: bytes, new: bytes) -> None:
    with pytest.raises(ModelError, match="is not UTF-8"):
        Session(changed(number, old, new))


def test_padding_beyond_any_memory() -> None:
    proto = copied(CONVOLUTION)
    pads = next(a for n in proto.graph.node for a in n.attribute if a.name == "pads")
    pads.ints[0] = (1 << 63) - 1
    with pytest.raises(OutOfMemory, match=r"Conv\) makes a tensor of shape"):
        Session(proto)


