"""Errors say what, where and what to do, and are caught as the builtins one would expect."""

from __future__ import annotations

import inspect
import pickle

import pytest

from terrazzo import errors
from terrazzo.errors import TerrazzoError

ERRORS = [
    cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, TerrazzoError)
]


@pytest.mark.parametrize("cls", ERRORS)
def test_renders_message_place_and_advice(cls: type[TerrazzoError]) -> None:
    error = cls("it broke", where="model.py:3", hint="mend it")
    assert str(error) == "it broke\n  where: model.py:3\n  try: mend it"


@pytest.mark.parametrize("cls", ERRORS)
def test_has_a_docstring_that_explains_it(cls: type[TerrazzoError]) -> None:
    assert cls.__doc__ and cls.__doc__.splitlines()[0].endswith(".")


@pytest.mark.parametrize("cls", ERRORS)
def test_survives_pickling(cls: type[TerrazzoError]) -> None:
    error = cls("it broke", where="model.py:3", hint="mend it")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == str(error)


def test_parts_that_are_missing_are_not_rendered() -> None:
    assert str(errors.ShapeError("sizes differ")) == "sizes differ"
    assert str(errors.ShapeError("sizes differ", hint="pad")) == "sizes differ\n  try: pad"


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.ShapeError, ValueError),
        (errors.RankError, errors.ShapeError),
        (errors.BroadcastError, errors.ShapeError),
        (errors.AxisError, IndexError),
        (errors.DTypeError, TypeError),
        (errors.UnsupportedDType, NotImplementedError),
        (errors.ArgumentError, TypeError),
        (errors.UnknownOperator, KeyError),
        (errors.UnsupportedOperator, NotImplementedError),
        (errors.TracedControlFlow, TypeError),
        (errors.ScheduleError, ValueError),
        (errors.OutOfMemory, MemoryError),
        (errors.KnobError, ValueError),
        (errors.VerifyError, AssertionError),
        (errors.IndexOutOfRange, IndexError),
        (errors.MissingDependency, ImportError),
    ],
)
def test_is_caught_as(cls: type[TerrazzoError], builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match="it broke"):
        raise cls("it broke")


def test_traced_control_flow_names_the_users_line_and_the_way_out() -> None:
    def branch_on_a_tensor() -> None:
        raise errors.TracedControlFlow("`if` on a traced value")

    with pytest.raises(errors.TracedControlFlow) as caught:
        branch_on_a_tensor()
    text = str(caught.value)
    assert "test_errors.py:" in text and "in branch_on_a_tensor" in text
    for way_out in ("tz.where", "tz.cond", "tz.while_loop", "tz.scan"):
        assert way_out in text


def test_verify_error_carries_what_differed() -> None:
    error = errors.VerifyError(
        "loop differs from expr", level="loop", operator="tanh", index=(1, 2), expected=0.5, got=0.7
    )
    assert (error.level, error.operator, error.index) == ("loop", "tanh", (1, 2))
    assert (error.expected, error.got) == (0.5, 0.7)


def test_user_location_gives_file_line_and_function() -> None:
    here = errors.user_location()
    assert here is not None
    place, function = here.split(" in ")
    assert place.rpartition(":")[0].endswith("test_errors.py")
    assert int(place.rpartition(":")[2]) > 1
    assert function == "test_user_location_gives_file_line_and_function"


def test_user_location_skips_the_standard_library() -> None:
    import functools

    @functools.singledispatch
    def locate(x: object) -> str | None:
        raise NotImplementedError

    locate.register(int, lambda x: errors.user_location())
    location = locate(1)  # arrives here through functools
    assert location is not None and "test_errors.py" in location


def test_user_location_at_module_level_names_no_function() -> None:
    namespace: dict[str, object] = {"user_location": errors.user_location}
    exec(compile("\nplace = user_location()", "script.py", "exec"), namespace)
    assert namespace["place"] == "script.py:2"
