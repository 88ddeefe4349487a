"""Settings: read from the environment, checked, overridden in a `with`, and listed."""

from __future__ import annotations

import os
import threading
import timeit
from pathlib import Path
from typing import Any

import pytest

from terrazzo.errors import KnobError
from terrazzo.knobs import Knobs, thread_count
from terrazzo.knobs import knobs as settings


def test_defaults_when_the_environment_is_empty() -> None:
    knobs = Knobs({})
    assert (knobs.threads, knobs.vector_bits, knobs.cache, knobs.dump) == (0, 0, True, "")
    assert (knobs.dynamic, knobs.opt_level, knobs.check) == ("auto", "all", False)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("threads", "4", 4),
        ("threads", " 4 ", 4),
        ("threads", "", 0),
        ("vector_bits", "256", 256),
        ("cache", "0", False),
        ("cache", "no", False),
        ("check", "TRUE", True),
        ("cache_dir", "/some/where", "/some/where"),
        ("dump", "loop, asm", "loop,asm"),
        ("dynamic", "never", "never"),
        ("opt_level", "basic", "basic"),
        ("wait_limit", "2.5", 2.5),
        ("wait_limit", "5", 5.0),
    ],
)
def test_reads_the_environment(name: str, text: str, value: Any) -> None:
    read = getattr(Knobs({f"TZ_{name.upper()}": text}), name)
    assert read == value and type(read) is type(value)


def test_every_setting_can_be_read_from_what_it_is() -> None:
    known = Knobs({})
    for row in known.describe():
        value = getattr(known, row.name)
        text = str(int(value)) if isinstance(value, bool) else str(value)
        assert getattr(Knobs({row.variable: text}), row.name) == value
        known_again = Knobs({})
        setattr(known_again, row.name, value)
        assert getattr(known_again, row.name) == value


@pytest.mark.parametrize(
    ("variable", "text", "allowed"),
    [
        ("TZ_THREADS", "many", "at least 0"),
        ("TZ_THREADS", "-1", "at least 0"),
        ("TZ_VECTOR_BITS", "100", "0, 128, 256, 512"),
        ("TZ_CACHE", "maybe", "0 or 1"),
        ("TZ_DUMP", "loop,tokens", "graph, canonical, expr, schedule, loop, llvm, asm"),
        ("TZ_DYNAMIC", "sometimes", "auto, never, always"),
        ("TZ_OPT_LEVEL", "most", "basic, extended, layout, all"),
        ("TZ_WAIT_LIMIT", "long", "a number, at least 0"),
        ("TZ_WAIT_LIMIT", "nan", "a number, at least 0"),
    ],
)
def test_bad_variable_is_named_with_what_is_allowed(variable: str, text: str, allowed: str) -> None:
    with pytest.raises(KnobError) as caught:
        Knobs({variable: text})
    assert variable in str(caught.value)
    assert f"cannot be {text}" in str(caught.value).replace("'", "")
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("threads", "4"), ("threads", True), ("threads", -1), ("cache", 1), ("dynamic", "maybe")],
)
def test_bad_override_is_refused_and_changes_nothing(name: str, value: Any) -> None:
    knobs = Knobs({})
    before = repr(knobs)
    with pytest.raises(KnobError, match=f"TZ_{name.upper()}"), knobs.override(**{name: value}):
        raise AssertionError("the override was accepted")
    with pytest.raises(KnobError):
        setattr(knobs, name, value)
    assert repr(knobs) == before


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    knobs = Knobs({})
    with pytest.raises(KnobError, match=r"thread_count.*\n.*threads"):
        knobs.thread_count = 3  # type: ignore[attr-defined]


def test_override_ends_with_its_block_even_on_an_error() -> None:
    knobs = Knobs({"TZ_THREADS": "3"})
    with pytest.raises(ZeroDivisionError), knobs.override(threads=1, check=True) as inside:
        assert inside is knobs
        assert (knobs.threads, knobs.check) == (1, True)
        with knobs.override(threads=2):
            assert (knobs.threads, knobs.check) == (2, True)
        assert knobs.threads == 1
        raise ZeroDivisionError
    assert (knobs.threads, knobs.check) == (3, False)


def test_overrides_of_two_threads_that_end_out_of_order_leave_nothing_behind() -> None:
    knobs = Knobs({"TZ_THREADS": "7"})
    first_open, second_open, first_ended = (threading.Event() for _ in range(3))
    seen: dict[str, int] = {}

    def first() -> None:
        with knobs.override(threads=1):
            first_open.set()
            second_open.wait(10)
        seen["after first ended"] = knobs.threads
        first_ended.set()

    def second() -> None:
        first_open.wait(10)
        with knobs.override(threads=2):
            second_open.set()
            first_ended.wait(10)

    workers = [threading.Thread(target=work) for work in (first, second)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    assert seen == {"after first ended": 2}
    assert knobs.threads == 7


def test_assignment_settles_and_waits_for_open_overrides() -> None:
    knobs = Knobs({})
    with knobs.override(threads=1):
        knobs.threads = 5
        assert knobs.threads == 1
    assert knobs.threads == 5


def test_code_key_follows_the_settings_that_shape_code_and_no_others() -> None:
    knobs = Knobs({})
    before = knobs.code_key
    with knobs.override(threads=1, dump="asm"):
        assert knobs.code_key == before
    with knobs.override(vector_bits=128):
        assert knobs.code_key != before
    assert knobs.code_key == before


def test_paths_are_accepted_for_folders(tmp_path: Path) -> None:
    with Knobs({}).override(cache_dir=tmp_path) as knobs:
        assert knobs.cache_dir == str(tmp_path)


def test_cache_dir_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert Knobs({}).cache_dir == os.path.join("/xdg", "terrazzo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert Knobs({}).cache_dir == "/home/someone/.cache/terrazzo"


def test_describe_lists_every_setting() -> None:
    knobs = Knobs({"TZ_SPIN": "5"})
    rows = {row.name: row for row in knobs.describe()}
    assert set(rows) == set(Knobs.__dataclass_fields__)
    assert rows["spin"].value == 5 and rows["spin"].default != "5"
    assert all(row.variable == f"TZ_{row.name.upper()}" for row in rows.values())
    assert all(row.meaning and row.allowed for row in rows.values())
    assert os.path.expanduser("~") not in rows["cache_dir"].default


def test_every_default_is_a_value_that_its_setting_allows() -> None:
    knobs = Knobs({})
    for row in knobs.describe():
        with knobs.override(**{row.name: row.value}):
            assert getattr(knobs, row.name) == row.value


def test_thread_count_is_the_setting_or_the_cores_of_the_process() -> None:
    with settings.override(threads=3):
        assert thread_count() == 3
    with settings.override(threads=0):
        assert 1 <= thread_count() <= (os.cpu_count() or 1)


def test_reading_takes_less_than_100_ns() -> None:
    turns = 100_000
    best = min(timeit.repeat("k.threads", globals={"k": Knobs({})}, number=turns, repeat=7))
    assert best / turns < 100e-9


def test_an_unknown_variable_is_warned_of_with_the_nearest_name(
        caplog: pytest.LogCaptureFixture) -> None:
    Knobs({"TZ_THREAD": "3", "TZ_DEBUG": "1", "TZ": "UTC", "OTHER": "x", "TZ_CACHE": "0"})
    assert [r.getMessage() for r in caplog.records] == [
        "there is no setting TZ_THREAD; the nearest is TZ_THREADS (see `tz knobs`)"]


def test_a_thread_compiles_under_its_own_overrides() -> None:
    knobs = Knobs({})
    inside, done = threading.Event(), threading.Event()
    seen: dict[str, Any] = {}

    def other() -> None:
        with knobs.override(opt_level="none", threads=3):
            inside.set()
            done.wait(10)
            seen["other"] = knobs.opt_level, knobs.now.opt_level

    thread = threading.Thread(target=other)
    with knobs.override(opt_level="basic"):
        thread.start()
        assert inside.wait(10)
        assert knobs.opt_level == knobs.now.opt_level == "basic"
        assert knobs.threads == 3, "what steers runs is everybody's"
    assert knobs.opt_level == "none", "a thread without a `with` goes by those of others"
    done.set()
    thread.join(10)
    assert seen == {"other": ("none", "none")}
    assert (knobs.opt_level, knobs.threads) == ("all", 0)


def test_now_is_a_value_that_stays() -> None:
    knobs = Knobs({})
    before = knobs.now
    assert knobs.now is before is knobs.undisturbed
    with knobs.override(opt_level="none"):
        assert knobs.undisturbed is None
        assert knobs.now is knobs.now is not before
        assert (before.opt_level, knobs.now.opt_level) == ("all", "none")
        knobs.renew()
    assert knobs.now == before and knobs.now is not before
    assert knobs.undisturbed is knobs.now
