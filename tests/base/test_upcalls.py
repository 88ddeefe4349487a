"""What low rooms ask of higher ones is there, and comes when it is asked for."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from terrazzo.base.upcalls import ABOVE, UPCALLS
from terrazzo.graph.derivatives import grad
from terrazzo.graph.ir import Value


@pytest.mark.parametrize("name", ABOVE)
def test_every_name_stands_where_the_table_says(name: str) -> None:
    module, _, function = ABOVE[name].rpartition(".")
    if module.startswith("terrazzo.torch"):
        pytest.importorskip("torch")
    found = UPCALLS[name]
    assert callable(found) and getattr(sys.modules[module], function) is found


def test_a_name_that_nobody_answers_is_an_error() -> None:
    with pytest.raises(KeyError, match="nobody"):
        UPCALLS["nobody"]


def test_arrays_go_through_what_the_table_names(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    jit = UPCALLS["jit"]

    def counting(function):  # type: ignore[no-untyped-def]
        compiled.append(function.__name__)
        return jit(function)

    monkeypatch.setitem(UPCALLS, "jit", counting)

    def cube(x: Value) -> Value:
        return x**3

    derivative = grad(cube)
    np.testing.assert_allclose([derivative(np.float64(x)) for x in (1.0, 2.0)], [3.0, 12.0])
    assert compiled == ["grad_cube"], "compiled once"
