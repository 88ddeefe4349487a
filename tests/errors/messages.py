"""Checks that an error says what happened, where, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from terrazzo.errors import TerrazzoError


def refuses(call: Callable[[], Any], error: type[TerrazzoError], message: str, *,
            hint: str | None = None, where: str | None = None) -> TerrazzoError:
    """The error of exactly this class that a call raises; texts are regular expressions."""
    with pytest.raises(error) as caught:
        call()
    found = caught.value
    assert type(found) is error
    assert re.search(message, found.message), found.message
    if hint is not None:
        assert found.hint is not None and re.search(hint, found.hint), found.hint
    if where is not None:
        assert found.where is not None and re.search(where, found.where), found.where
    return found
