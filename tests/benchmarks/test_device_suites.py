"""PyTorch's own tests for the device gcu: how they are read, and that a difference is one."""

from __future__ import annotations

import ast
import io
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
FOLDER = Path(__file__).parents[2] / "benchmarks"

MODULE = '''
import unittest
import torch_openreg
@unittest.skip("openreg lacks it")
class TestOpenRegDevice:
    def test_it(self):
        return torch.openreg.name, "openreg:1", f"openreg:{1}", b"bytes"
'''


@pytest.fixture
def suites(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    import device_operators
    import openreg_suite

    return openreg_suite, device_operators


def test_another_device_is_named(suites: tuple[ModuleType, ModuleType]) -> None:
    made = ast.unparse(suites[0].Renaming().visit(ast.parse(MODULE)))
    assert "import torch_openreg" not in made and "unittest.skip" not in made
    assert "torch.gcu.name, 'gcu:1', f'gcu:{1}', b'bytes'" in made


def test_an_archive_names_another_device(suites: tuple[ModuleType, ModuleType]) -> None:
    file = io.BytesIO()
    torch.save({"device": "openreg:0", "x": torch.arange(3.0)}, file)
    found = torch.load(io.BytesIO(suites[0].renamed_archive(file.getvalue())))
    assert found["device"] == "gcu:0" and found["x"].tolist() == [0, 1, 2]


def test_what_is_left_out_says_why(suites: tuple[ModuleType, ModuleType]) -> None:
    left_out = suites[0].LEFT_OUT
    assert left_out and all(len(n.split(".")) == 3 and why for n, why in left_out.items())


@pytest.mark.parametrize("wrong", [
    [torch.tensor([1.0, 2.001])], [torch.tensor([1.0])], [torch.tensor([1, 2])],
    [torch.tensor([1.0, float("nan")])], [], [torch.tensor([1.0, 2.0]), 3]], ids=str)
def test_what_differs_is_found(suites: tuple[ModuleType, ModuleType], wrong: object) -> None:
    expected = [torch.tensor([1.0, 2.0])]
    suites[1].compare([torch.tensor([1.0, 2.0])], expected)
    with pytest.raises(AssertionError):
        suites[1].compare(wrong, expected)


def test_whole_numbers_are_compared_exactly(suites: tuple[ModuleType, ModuleType]) -> None:
    with pytest.raises(AssertionError):
        suites[1].compare(torch.tensor([100001]), torch.tensor([100000]))


def test_sparse_operators_are_left_out(suites: tuple[ModuleType, ModuleType]) -> None:
    pytest.importorskip("expecttest")
    names = suites[1].operators()
    assert len(names) > 600 and "add" in names
    assert not any("sparse" in name for name in names)


def test_nothing_is_no_success(suites: tuple[ModuleType, ModuleType]) -> None:
    ran = {"name": "add", "outcome": "ran", "samples": 2, "alone": 2, "wrong": [], "fallbacks": {}}
    assert suites[1].report([ran], 0) == 0
    assert suites[1].report([], 0) == 1
    assert suites[1].report([{**ran, "wrong": ["sample 1: no"]}], 0) == 1
    assert suites[1].report([ran, {"name": "mul", "outcome": "failed", "why": "ended"}], 0) == 1
