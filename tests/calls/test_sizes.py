"""What a user's code does with sizes, known or symbolic: the same results, the same errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.calls import family
from terrazzo.calls.compiled import Compiled

SIZES = (5, 7, 8, 2, 9, 16, 1, 3, 0, 12, 8)

# A function, and the most symbolic compilations that serve all of SIZES (None: sizes are fixed).
QUESTIONS: dict[str, tuple[Callable[[Any], Any], int | None]] = {
    "equal": (lambda x: x * 2 if x.shape[0] == 8 else x, 1),
    "equal, swapped": (lambda x: x * 2 if 8 == x.shape[0] else x, 1),  # noqa: SIM300
    "not equal": (lambda x: x * 2 if x.shape[0] != 8 else x, 1),
    "in a tuple": (lambda x: x * 2 if x.shape[0] in (8, 7) else x, 1),
    "remainder": (lambda x: x * 2 if x.shape[0] % 2 == 0 else x, 2),
    "key of a dict": (lambda x: x * {8: 3.0, 5: 2.0}.get(x.shape[0], 1.0), None),
    "member of a set": (lambda x: x * 2 if x.shape[0] in {8, 9} else x, None),
    "whole shape": (lambda x: x * 2 if x.shape == (8,) else x, 1),
    "larger": (lambda x: x * 2 if x.shape[0] > 4 else x, 2),
    "larger than a float": (lambda x: x * 2 if x.shape[0] > 4.5 else x, None),
    "truth": (lambda x: x if x.shape[0] else x + 1, 1),
    "type": (lambda x: x if isinstance(x.shape[0], int) else x + 1, 1),
    "min": (lambda x: x * min(x.shape[0], 4), 2),
    "max": (lambda x: x * max(x.shape[0], 4), 2),
    "len": (lambda x: x * len(x), None),
    "iteration": (lambda x: sum(row * 2 for row in x) + 0 * x, None),
    "text": (lambda x: x * len(f"{x.shape[0]}"), None),
    "even Real": (lambda x: x * 2 if x.shape[0] / 2 == 4 else x, None),
}
ARITHMETIC: dict[str, tuple[Callable[[Any], Any], int | None]] = {
    "n ** -0.5": (lambda x: x * x.shape[0] ** -0.5, 1),
    "n ** 0.5": (lambda x: x / x.shape[0] ** 0.5, 1),
    "1 / n": (lambda x: x * (1 / x.shape[0]), 1),
    "1 / n ** 0.5": (lambda x: x * (1 / x.shape[0] ** 0.5), 1),
    "1 / (n - 3)": (lambda x: x * (1.0 / (x.shape[0] - 3)), 1),
    "x / n": (lambda x: x / x.shape[0], 1),
    "x * n": (lambda x: x * x.shape[0], 1),
    "whole x * n": (lambda x: x.astype("int32") * x.shape[0], 1),
    "half x / n": (lambda x: x.astype("float16") / x.shape[0], 1),
    "sums of floats": (lambda x: x - x.shape[0] / 2 + 1e-3 / x.shape[0] - 0.5 * x.shape[0], 1),
    "n ** 2": (lambda x: x * x.shape[0] ** 2, 1),
    "2 ** n": (lambda x: x * 2 ** x.shape[0], None),
    "divmod": (lambda x: x * divmod(x.shape[0], 3)[1] * divmod(x.shape[0], 3)[0], 1),
    "abs": (lambda x: x * abs(3 - x.shape[0]), 2),
    "round": (lambda x: x * round(x.shape[0] * 0.3), None),
    "by a negative": (lambda x: x * (x.shape[0] // -2), None),
    "bits": (lambda x: x * (x.shape[0] & 3), None),
    "bit_length": (lambda x: x * x.shape[0].bit_length(), None),
    "int": (lambda x: x * int(x.shape[0]), None),
    "float": (lambda x: x * float(x.shape[0]), None),
    "range": (lambda x: x * sum(range(x.shape[0])), None),
    "math.sqrt": (lambda x: x / math.sqrt(x.shape[0]), None),
    "math.log2": (lambda x: x * math.log2(x.shape[0]), None),
    "math.prod": (lambda x: x * math.prod(x.shape), 1),
    "np.prod": (lambda x: x * np.prod(x.shape), None),
    "np.sqrt": (lambda x: x * np.sqrt(x.shape[0]), None),
    "np.arange": (lambda x: x + np.arange(x.shape[0], dtype=np.float32), None),
    "np.zeros": (lambda x: x + np.zeros(x.shape, np.float32), None),
    "np.float32 * n": (lambda x: x * (np.float32(2) * x.shape[0]), None),
    "np.int64 * n": (lambda x: x * (np.int64(2) * x.shape[0]), None),
    "an attribute": (lambda x: x + tz.full(x.shape, 1 / x.shape[0]), None),
    "the size itself": (lambda x: x.shape[0], 1),
    "a float itself": (lambda x: x.shape[0] / 2, 1),
}
BOUNDS: dict[str, tuple[Callable[[Any], Any], int | None]] = {
    "x[3]": (lambda x: x[3], 1),
    "x[-3]": (lambda x: x[-3], 1),
    "x[n - 1]": (lambda x: x[x.shape[0] - 1], 1),
    "x[n]": (lambda x: x[x.shape[0]], None),
    "x[n - 9]": (lambda x: x[x.shape[0] - 9], 2),
    "x[3:]": (lambda x: x[3:], 1),
    "x[-4:-1]": (lambda x: x[-4:-1], 1),
    "x[::-2]": (lambda x: x[::-2], 1),
    "x[5 - n:]": (lambda x: x[5 - x.shape[0]:], 2),
    "differences": (lambda x: x[1:] - x[:-1], 1),
    "halves": (lambda x: x[:x.shape[0] // 2] + x[x.shape[0] // 2:], 1),
    "topk": (lambda x: tz.topk(x, k=3)[0], 1),
    "reflect": (lambda x: tz.pad(x, pad_width=3, mode="reflect"), 1),
    "wrap": (lambda x: tz.pad(x, pad_width=(0, 4), mode="wrap"), 1),
    "crop": (lambda x: tz.pad(x, pad_width=-2), 1),
    "reshape": (lambda x: x.reshape((2, -1)), 1),
    "split": (lambda x: tz.split(x, indices_or_sections=2)[1], 1),
    "pool": (lambda x: tz.max_pool(x.reshape((1, 1, -1)), window=4), 1),
    "conv": (lambda x: tz.conv(x.reshape((1, 1, -1)), np.ones((1, 1, 3), np.float32)), 1),
    "windows": (lambda x: tz.sliding_window(x, size=4), 1),
    "known addend": (lambda x: x + np.ones(8, np.float32), None),
    "known factor": (lambda x: x @ np.ones(8, np.float32), None),
    "broadcast": (lambda x: x.reshape((-1, 1)) + x[: max(x.shape[0] - 4, 1)], 2),
}
ALL = {**QUESTIONS, **ARITHMETIC, **BOUNDS}


def outcome(function: Callable[..., Any], *arrays: np.ndarray) -> Any:
    try:
        return function(*arrays)
    except Exception as error:
        return error


def assert_alike(found: Any, wanted: Any) -> None:
    """Equal results, or equal errors."""
    if isinstance(wanted, Exception) or isinstance(found, Exception):
        assert type(found) is type(wanted) and str(found) == str(wanted)
        return
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def executables(compiled: Compiled) -> Iterator[Any]:
    for table in compiled.tables.values():
        for kind in table.families.values():
            for variants in kind.variants.values():
                yield from (found[0] for _, found in variants if found is not None)


@pytest.mark.parametrize("mode", ["auto", "always"])
@pytest.mark.parametrize("name", ALL)
def test_sizes_known_and_symbolic(name: str, mode: str) -> None:
    function, compilations = ALL[name]
    compiled = tz.jit(function)
    with tz.knobs.override(dynamic=mode):
        for n in SIZES:
            x = np.arange(1, n + 1, dtype=np.float32)
            with tz.knobs.override(dynamic="never"):
                wanted = outcome(tz.jit(function), x)
            assert_alike(outcome(compiled, x), wanted)
    made = len(list(executables(compiled)))
    assert 0 < made <= compilations if compilations else made == 0


def test_an_assert_about_sizes_is_made_at_every_call() -> None:
    @tz.jit
    def function(x: Any) -> Any:
        assert x.shape[0] % 4 == 0, f"{x.shape[0]} is odd"
        return x * 2

    for n in (4, 8, 12):
        assert function(np.ones(n, np.float32)).shape == (n,)
    with pytest.raises(AssertionError, match="6 is odd"):
        function(np.ones(6, np.float32))
    assert function(np.ones(16, np.float32)).sum() == 32


def test_two_sizes_that_are_sometimes_equal() -> None:
    @tz.jit
    def function(x: Any, y: Any) -> Any:
        return x + y if x.shape == y.shape else tz.concat(x, y)

    for a, b in ((5, 5), (7, 7), (7, 9), (9, 9), (3, 8), (8, 8), (6, 1), (1, 1)):
        found = function(np.ones(a, np.float32), np.ones(b, np.float32))
        assert found.shape == ((a,) if a == b else (a + b,))


def test_attributes_of_a_users_operator_are_sizes_too() -> None:
    @tz.op
    def halve(x: Any, *, at: int) -> Any:
        return x[:at] if at == 4 else x[at:]

    compiled = tz.jit(lambda x: halve(x, at=x.shape[0] // 2))
    for n in (6, 10, 8, 9, 12):
        assert compiled(np.ones(n, np.float32)).shape == (4 if n in (8, 9) else n - n // 2,)


@pytest.mark.parametrize("name", ["n ** -0.5", "1 / n", "larger", "min", "x[3]", "range", "topk",
                                  "reflect", "differences", "halves", "equal"])
def test_gradients(name: str) -> None:
    function, _ = ALL[name]
    gradient = tz.grad(lambda x: tz.sum(function(x) * x.shape[0]))
    for n in SIZES:
        x = np.arange(1, n + 1, dtype=np.float32)
        with tz.knobs.override(dynamic="never"):
            wanted = outcome(tz.grad(lambda x: tz.sum(function(x) * x.shape[0])), x)
        assert_alike(outcome(gradient, x), wanted)


def test_more_answers_than_variants_are_fixed_sizes() -> None:
    compiled = tz.jit(lambda x: x * sum(range(x.shape[0])))
    for n in range(2, 8 + family.MOST_VARIANTS):
        x = np.ones(n, np.float32)
        np.testing.assert_array_equal(compiled(x), x * sum(range(n)))
    (found,) = compiled.table.families.values()
    (variants,) = found.variants.values()
    assert len(variants) == family.MOST_VARIANTS


def test_an_error_that_only_symbolic_sizes_have_is_nobodys() -> None:
    def function(x: Any) -> Any:
        if type(x.shape[0]) is not int:
            raise RuntimeError("no symbolic sizes here")
        return x + 1

    compiled = tz.jit(function)
    for n in (3, 5, 6):
        assert compiled(np.zeros(n, np.float32)).tolist() == [1.0] * n
