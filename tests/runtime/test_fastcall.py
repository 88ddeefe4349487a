"""Calls go straight to native code whatever the layout, the sizes and the number of results."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cpu.llvm.program import MOST_ARGUMENTS
from terrazzo.knobs import knobs
from terrazzo.runtime import fastcall
from terrazzo.runtime.executable import Executable


def test_layouts_have_entries_of_their_own(rng: np.random.Generator) -> None:
    double = tz.jit(lambda x: x * 2)
    x = rng.standard_normal((6, 8)).astype(np.float32)
    for view in (x, x.T, x[::2], x[:, ::-1]):
        np.testing.assert_array_equal(double(view), view * 2)
        np.testing.assert_array_equal(double(view), view * 2)
    assert len(double.table.entries) == 4


def test_values_between_kernels_and_several_results(rng: np.random.Generator) -> None:
    both = tz.jit(lambda x: (tz.softmax(x, axis=0), tz.max(x, axis=1)))
    x = rng.standard_normal((40, 30)).astype(np.float32)
    for _ in range(3):
        soft, top = both(x)
        np.testing.assert_allclose(soft.sum(0), 1, rtol=1e-5)
        np.testing.assert_array_equal(top, x.max(1))


def test_sizes_that_vary(rng: np.random.Generator) -> None:
    soft = tz.jit(lambda x: tz.softmax(x, axis=0))
    for n in (3, 7, 7, 20, 3):
        x = rng.standard_normal((n, n + 1)).astype(np.float32)
        np.testing.assert_allclose(soft(x).sum(0), 1, rtol=1e-5)


@pytest.mark.parametrize("count", [12, MOST_ARGUMENTS])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_many_arrays(kind: str, count: int, monkeypatch: pytest.MonkeyPatch,
                     rng: np.random.Generator) -> None:
    """Calls with many arrays go the direct way too, also where sizes vary and layouts differ.

    With the results, the larger number is more than direct entries take.
    """
    convert: Any = np.asarray if kind == "numpy" else pytest.importorskip("torch").from_numpy
    many = tz.jit(lambda *xs: tuple(x * i for i, x in enumerate(xs)) + (sum(xs, 0 * xs[0]),))
    for n in (5, 6, 7):  # from the second on sizes vary
        for turned in (False, True):
            xs = [rng.standard_normal((n, n)).astype(np.float32) for _ in range(count)]
            given = [convert(x.T if turned else x) for x in xs]
            many(*given)
            with monkeypatch.context() as patch:
                patch.setattr(Executable, "run", None)  # the general way
                results = many(*given)
            for i, (x, result) in enumerate(zip(given, results)):
                np.testing.assert_array_equal(np.asarray(result), np.asarray(x) * i)
            total = np.sum([np.asarray(x) for x in given], 0)
            np.testing.assert_allclose(np.asarray(results[-1]), total, rtol=1e-5, atol=1e-5)


def test_scalars_do_not_take_the_place_of_arrays() -> None:
    double = tz.jit(lambda x: x * 2)
    assert double(np.float32(1.5)) == 3
    assert fastcall.key_of((np.float32(1),)) is None and fastcall.key_of(()) is not None


def test_the_number_of_threads_may_change(rng: np.random.Generator) -> None:
    soft = tz.jit(lambda x: tz.softmax(x, axis=0))
    x = rng.standard_normal((300, 300)).astype(np.float32)
    with knobs.override(threads=1):
        one = soft(x)
    with knobs.override(threads=2):
        np.testing.assert_array_equal(soft(x), one)


def test_many_python_threads_share_one_entry(rng: np.random.Generator) -> None:
    soft = tz.jit(lambda x: tz.softmax(x, axis=0))
    xs = [rng.standard_normal((50, 60)).astype(np.float32) for _ in range(4)]
    expected = [soft(x) for x in xs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(50):
            if not np.array_equal(soft(xs[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.torch
def test_torch_tensors(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(rng.standard_normal((40, 30)).astype(np.float32))
    soft, top = tz.jit(lambda x: (tz.softmax(x, axis=0), tz.max(x, axis=1)))(x)
    torch.testing.assert_close(soft, torch.softmax(x, 0))
    torch.testing.assert_close(top, x.amax(1))
    negate = tz.jit(lambda x: -x)
    for view in (x, x.t(), x[::2], x[:, 3:7]):
        result = negate(view)
        assert result.is_contiguous() and torch.equal(result, -view)


@pytest.mark.torch
def test_tensors_unlike_those_of_the_last_calls_are_told_apart() -> None:
    """By layout, type, gradient, and by what torch says of them without its being in memory."""
    torch = pytest.importorskip("torch")
    from torch.autograd import forward_ad

    gelu = tz.jit(lambda x: tz.gelu(x))
    add = tz.jit(lambda x, y: x + y)
    usual = torch.randn(4, 6)
    for _ in range(4):
        gelu(usual)
        add(usual, usual + 1)
    want = torch.nn.functional.gelu
    for x in (usual[:, ::2], torch.randn(6, 4).t(), torch.randn(4, 7), usual.double(), -usual,
              torch._neg_view(usual), usual.new_zeros(0, 6), usual):
        torch.testing.assert_close(gelu(x), want(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(add(usual, usual), usual * 2)
    wanted = usual.clone().requires_grad_()
    assert gelu(wanted).requires_grad and not gelu(usual).requires_grad
    with torch.no_grad():
        assert not gelu(wanted).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(gelu(usual), want(usual), rtol=1e-5, atol=1e-6)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(usual, torch.ones_like(usual))
        assert forward_ad.unpack_dual(gelu(dual)).tangent is not None
    with pytest.raises(tz.errors.TerrazzoError):
        gelu(torch.nested.nested_tensor([usual[0], usual[1]]))
    numbers = np.ones((4, 6), np.float32)
    assert isinstance(gelu(numbers), np.ndarray) and isinstance(gelu(usual), torch.Tensor)
