"""Descriptions of chips: read, checked, found by name, and the same on both sides of C."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import fields, replace
from pathlib import Path

import pytest

from terrazzo.chips.gcu import description
from terrazzo.chips.gcu.description import BUILT_IN, CDescription, Description
from terrazzo.errors import DeviceError
from terrazzo.knobs import knobs

GCU = description.read(BUILT_IN)
TEXT = BUILT_IN.read_text()
HEADER = Path(description.__file__).with_name("runtime") / "gcu_runtime.h"


def changed(key: str, value: str) -> str:
    """The text of gcu with the first line of a key replaced."""
    text, times = re.subn(rf"(?m)^{key} = [^#\n]*", f"{key} = {value} ", TEXT, count=1)
    assert times == 1
    return text


def test_gcu_is_what_the_issue_says() -> None:
    assert (GCU.name, GCU.units, GCU.warps, GCU.free_grid, GCU.grid_multiple) == (
        "gcu", 48, 1, 48, 48)
    spec = GCU.spec()
    assert spec.kind == "gcu" and spec.cores == 48 and spec.launch.warps == (1,)
    accepted = [n for n in range(1, 300) if spec.launch.accepts_grid(n)]
    assert accepted == [n for n in range(1, 300) if n <= 48 or n % 48 == 0]


def test_the_spec_has_the_chips_rates() -> None:
    spec = GCU.spec()
    assert spec.clock_ghz == pytest.approx(1.4)
    assert spec.memory_gbps == pytest.approx(576 * 1.4)
    assert spec.peak("f32") == pytest.approx(48 * 256 * 2 * 1.4e9)
    assert spec.peak("bf16") == 4 * spec.peak("f32") and spec.peak("i8") == 8 * spec.peak("f32")
    assert spec.lanes(32) == GCU.lanes(32) == 64


@pytest.mark.parametrize("key, value, allowed", [
    ("count", "0", "unit.count cannot be 0"),
    ("count", "4.5", "unit.count cannot be 4.5"),
    ("count", "true", "unit.count cannot be True"),
    ("vector_bits", "100", "multiple of 64"),
    ("free_grid", "50", "launch.free_grid cannot be 50"),
    ("clock_khz", '"fast"', "unit.clock_khz cannot be 'fast'"),
    ("name", '"Gcu 2"', "name cannot be 'Gcu 2'"),
    ("name", '"cuda"', "none of cpu, cuda"),
    ("capability", "[1]", "two whole numbers"),
    ("depth", "{ f3 = 1 }", "the types are f64, f32"),
    ("depth", "{ f32 = 0 }", "matrix.depth.f32 cannot be 0"),
    ("depth", "3", "a table of types"),
    ("transfer_bytes", "1048576", "at most half of the scratchpad"),
])
def test_a_wrong_key_is_named_with_what_is_allowed(key: str, value: str, allowed: str) -> None:
    with pytest.raises(DeviceError, match=re.escape(allowed)):
        description.parse(changed(key, value), "mine.toml")


@pytest.mark.parametrize("key", [f.metadata["key"] for f in fields(Description) if f.metadata])
def test_no_number_may_be_missing(key: str) -> None:
    text = re.sub(rf"(?m)^{key} = .*\n", "", TEXT)
    with pytest.raises(DeviceError, match=rf"mine.toml: (\w+\.)?{key} is missing"):
        description.parse(text, "mine.toml")


def test_a_misspelt_key_is_no_silent_default() -> None:
    with pytest.raises(DeviceError, match=r"there is no key unit\.cuont"):
        description.parse(TEXT.replace("[unit]", "[unit]\ncuont = 3"))
    with pytest.raises(DeviceError, match="there is no key colour"):
        description.parse('colour = "red"\n' + TEXT)
    with pytest.raises(DeviceError, match="is no TOML"):
        description.parse("name = = 3")


def test_other_chips_are_found_by_their_names(tmp_path: Path) -> None:
    mine = tmp_path / "mychip.toml"
    mine.write_text(TEXT.replace('"gcu"', '"mychip"').replace("count = 48", "count = 20"))
    with pytest.raises(DeviceError, match=r"no chip 'mychip' is described.*\n?.*there are gcu"):
        description.find("mychip")
    with knobs.override(chip_files=str(tmp_path)):
        found = description.find("mychip")
        assert found.units == 20 and found.spec().kind == "mychip"
        assert list(description.files()) == ["mychip", "gcu"]
        mine.write_text(mine.read_text().replace("count = 20", "count = 200"))
        assert description.find("mychip").units == 200  # an edited file is read again
    assert description.find(str(mine)).units == 200
    shutil.move(mine, tmp_path / "other.toml")
    with pytest.raises(DeviceError, match="as the file is called"):
        description.find(str(tmp_path / "other.toml"))
    with pytest.raises(DeviceError, match="cannot be read"):
        description.find(str(mine))


def test_the_fingerprint_notices_every_field() -> None:
    assert len(GCU.fingerprint.encode()) == 32
    assert GCU.fingerprint == description.parse(TEXT).fingerprint
    seen = {GCU.fingerprint}
    for f in fields(Description):
        if f.metadata:
            seen.add(replace(GCU, **{f.name: getattr(GCU, f.name) + 1}).fingerprint)
    seen.add(replace(GCU, matrix_depth=()).fingerprint)
    seen.add(replace(GCU, name="other").fingerprint)
    assert len(seen) == len([f for f in fields(Description) if f.metadata]) + 3


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_struct_is_that_of_the_header(tmp_path: Path) -> None:
    names = [row[0] for row in CDescription._fields_]
    lines = "".join(f'printf("%zu ", offsetof(gcuDescription, {n}));' for n in names)
    (tmp_path / "offsets.c").write_text(
        f'#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{ {lines}'
        'printf("%zu", sizeof(gcuDescription)); return 0; }')
    subprocess.run(["cc", "-o", tmp_path / "offsets", tmp_path / "offsets.c"], check=True)
    said = subprocess.run([tmp_path / "offsets"], check=True, capture_output=True, text=True)
    assert [int(n) for n in said.stdout.split()] == [
        *(getattr(CDescription, n).offset for n in names), ctypes.sizeof(CDescription)]
    made = GCU.c_struct()
    assert made.size == ctypes.sizeof(made) and made.name == b"gcu"
    assert list(made.capability) == [1, 0] and made.units == 48
    assert bytes(made.fingerprint).decode() == GCU.fingerprint
    for n in names[4:-1]:
        assert getattr(made, n) == getattr(GCU, n)
