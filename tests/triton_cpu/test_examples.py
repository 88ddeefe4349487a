"""The programs of examples/triton check themselves, and know nothing of terrazzo."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from terrazzo.errors import KernelFault
from terrazzo.knobs import knobs

pytest.importorskip("torch")

pytestmark = [pytest.mark.triton, pytest.mark.torch]
FOLDER = Path(__file__).parents[2] / "examples" / "triton"
FAULTY = "out_of_bounds"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != FAULTY)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"triton_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_there() -> None:
    assert NAMES == ["dropout", "flash_attention", "gelu", "layer_norm", "matmul", "softmax",
                     "vector_add"]
    assert set(load(FAULTY).VARIANTS) == set(NAMES)


@pytest.mark.parametrize("name", [*NAMES, FAULTY])
def test_nothing_of_terrazzo_is_imported(name: str) -> None:
    assert not re.search(r"^\s*(import|from) terrazzo", (FOLDER / f"{name}.py").read_text(), re.M)


def check(name: str) -> None:
    example = load(name)
    if name == "matmul":  # trying all tiles takes seconds; the largest has ragged ends everywhere
        del example.TILES[:-1]
        assert len(example.matmul_kernel.configs) == 1
    example.check()


@pytest.mark.parametrize("name", NAMES)
def test_example_is_right(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_sanitizer_finds_nothing_in_examples(name: str) -> None:
    with knobs.override(sanitize=True):
        check(name)


@pytest.mark.parametrize("name", NAMES)
def test_sanitizer_finds_what_lacks_a_mask(name: str) -> None:
    faulty = load(FAULTY)
    lines = (FOLDER / f"{FAULTY}.py").read_text().splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith("# no mask")}
    with knobs.override(sanitize=True), pytest.raises(KernelFault) as caught:
        faulty.VARIANTS[name]()
    said = re.fullmatch(
        r"\S*out_of_bounds\.py:(\d+): out-of-bounds (?:load|store) in `(\w+)`, program \(.*\), "
        r"lane .*: (?:reads|writes) `\w+`\[(\d+)\], which has (\d+) elements\. Missing mask\?.*",
        str(caught.value))
    assert said is not None, str(caught.value)
    line, kernel, index, size = said.groups()
    assert int(line) in marked and int(index) >= int(size)
    assert int(line) > getattr(faulty, kernel).fn.__code__.co_firstlineno
