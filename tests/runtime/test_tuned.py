"""The file of choices: what it holds, who shares it, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from terrazzo.chips.chip import Assembled, Chip, Code
from terrazzo.chips.spec import ChipSpec
from terrazzo.compiler.keys import chosen_key, kept_key
from terrazzo.knobs import knobs
from terrazzo.runtime.tuned import Database, Measured, choice_text, database, measuring_again

FOUND = Measured({"block": 2048, "persistent": True, "descriptors": False}, 1e-5, 2e-5, "exp")


def test_what_is_kept_is_found(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "choices.json"
    Database(str(path)).keep("a", "p", FOUND)
    other = Database(str(path))
    assert other.find("a", "p") == FOUND
    assert other.find("a", "q") is None and other.find("b", "p") is None
    assert str(FOUND) == "exp: block 2048, persistent, 10.0 us (by rule 20.0)"
    assert choice_text({}) == ""


def test_processes_share_a_file(tmp_path: Path) -> None:
    one, two = (Database(str(tmp_path / "c.json")) for _ in range(2))
    assert one.find("a", "p") is None and two.find("a", "p") is None
    one.keep("a", "p", FOUND)
    two.keep("a", "q", FOUND)
    one.keep("b", "r", FOUND)
    assert two.find("b", "r") == FOUND
    kept = json.loads((tmp_path / "c.json").read_text())
    assert {c: sorted(p) for c, p in kept["chips"].items()} == {"a": ["p", "q"], "b": ["r"]}


@pytest.mark.parametrize("content", [
    "", "{", "[1, 2]", "null", '{"format": "another"}', "\udcff",
    '{"format": "terrazzo choices", "version": 2, "chips": {}}', "[" * 100_000])
def test_other_files_are_left_alone(tmp_path: Path, content: str,
                                    caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "choices.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    known = Database(str(path))
    assert known.find("a", "p") is None and known.find("a", "p") is None
    assert len(caplog.records) == 1 and str(path) in caplog.text
    known.keep("a", "p", FOUND)
    assert known.find("a", "p") == FOUND  # in this process
    assert path.read_bytes() == content.encode(errors="surrogateescape")


@pytest.mark.parametrize("wrong", [
    None, 3, {}, {"choice": []}, {"choice": {"a": "b"}, "seconds": 1, "by_rule": 1},
    {"choice": {"a": 1}, "seconds": "1", "by_rule": 1}, {"choice": {"a": 1}, "seconds": 1},
    {"choice": {"a": 1}, "seconds": float("nan"), "by_rule": 1},
    {"choice": {"a": 1}, "seconds": 1, "by_rule": 1, "text": 5}])
def test_wrong_entries_are_skipped(tmp_path: Path, wrong: Any, caplog: pytest.LogCaptureFixture
                                   ) -> None:
    path = tmp_path / "choices.json"
    good = {"choice": {"a": 1}, "seconds": 1, "by_rule": 2}
    path.write_text(json.dumps({"format": "terrazzo choices", "version": 1, "chips": {
        "a": {"p": wrong, "q": good}, "b": 7}}))
    known = Database(str(path))
    assert known.find("a", "p") is None and "no choices" in caplog.text
    assert known.find("a", "q") == Measured({"a": 1}, 1, 2, "")


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture
                                         ) -> None:
    (tmp_path / "file").write_text("")
    known = Database(str(tmp_path / "file" / "choices.json"))
    known.keep("a", "p", FOUND)
    assert known.find("a", "p") == FOUND and "TZ_TUNE_DB" in caplog.text


def test_where_it_lies(tmp_path: Path) -> None:
    with knobs.override(cache_dir=str(tmp_path), cache=True):
        assert database().path == tmp_path / "choices.json"
        with knobs.override(tune_db=str(tmp_path / "mine.json")):
            assert database().path == tmp_path / "mine.json"
        with knobs.override(cache=False):
            assert database().path is None


class Choosing(Chip):
    """A chip that measures."""

    spec = ChipSpec("test", "choosing", cores=1, vector_bits=64, vector_registers=8)
    tunes = "choosing"

    def assemble(self, recipe: Any) -> Assembled:
        raise NotImplementedError

    def load(self, name: str, made: Assembled, constants: Any) -> Code:
        raise NotImplementedError


def test_the_key_of_code_holds_its_choices(tmp_path: Path) -> None:
    chip, key = Choosing(), "ab" * 32
    with knobs.override(cache_dir=str(tmp_path), cache=True):
        now = knobs.now
        assert chosen_key(key, now, chip) == "", "which programs it has is not known yet"
        assert kept_key(key, now, chip, {"p": None, "q": None}) == key
        assert chosen_key(key, now, chip) == key
        with knobs.override(tune=True):
            assert chosen_key(key, knobs.now, chip) == "", "to be measured"
        database().keep("choosing", "another", FOUND)
        database().keep("of another chip", "p", FOUND)
        assert chosen_key(key, now, chip) == key
        database().keep("choosing", "p", FOUND)
        chosen = chosen_key(key, now, chip)
        assert chosen != key and len(chosen) == len(key)
        assert kept_key(key, now, chip, {"p": dict(FOUND.choice), "q": None}) == chosen
        database().keep("choosing", "p", Measured({"block": 1}, 1, 1, ""))
        assert chosen_key(key, now, chip) not in (key, chosen)
        database().keep("choosing", "q", FOUND)
        with knobs.override(tune=True):
            assert chosen_key(key, knobs.now, chip)
        with measuring_again():
            assert chosen_key(key, now, chip) == ""
        assert chosen_key("", now, chip) == "" == kept_key("", now, chip, {})
