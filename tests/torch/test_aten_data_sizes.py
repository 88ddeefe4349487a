"""Sizes that vary or that only data tells, as sizes of results and as numbers in arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses import FakeTensorMode  # noqa: E402

from terrazzo.errors import UnsupportedOperator  # noqa: E402
from terrazzo.torch import backend  # noqa: E402
from terrazzo.torch.entry import held  # noqa: E402
from terrazzo.torch.scalars import read_from_rank_0  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def captured() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True,
                                    capture_dynamic_output_shape_ops=True):
        yield


def compiled(function: Any) -> Any:
    return torch.compile(function, backend=backend.terrazzo, fullgraph=True)


def test_what_is_asserted_of_a_size_waits_for_it() -> None:
    def function(x: Any, mask: Any) -> Any:
        chosen = (x * 2).masked_select(mask)
        torch._check(chosen.shape[0] <= 10)
        return chosen.exp() + chosen.shape[0]

    x, mask = torch.randn(10), torch.arange(10) % 3 == 0
    torch.testing.assert_close(compiled(function)(x, mask), function(x, mask))


@pytest.mark.parametrize("end", [5, 8])
def test_a_turned_view_that_ends_where_data_says(end: int) -> None:
    """Whether it has gaps hangs on that."""
    def function(x: Any, end: Any) -> Any:
        return (x + 1).permute(0, 2, 1)[:, :end.item(), :]

    x, given = torch.randn(4, 16, 8), torch.tensor([end])
    found = compiled(function)(x, given)
    assert found.stride() == function(x, given).stride()
    torch.testing.assert_close(found, function(x, given))


def test_a_size_among_several_results() -> None:
    def function(x: Any, index: Any) -> Any:
        values, counts = torch.unique(index, return_counts=True)
        return x.index_select(0, values) * counts

    x, index = torch.randn(8), torch.tensor([1, 5, 1, 7])
    torch.testing.assert_close(compiled(function)(x, index), function(x, index))


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch traces _unique as of one element")
def test_the_gradient_of_what_fills() -> None:
    """It is a sum over the different indices, as many as there are."""
    x, value = torch.randn(6, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    index = torch.tensor([0, 3, 3])

    def function(x: Any, value: Any) -> Any:
        return torch.index_fill(x, 0, index, value)

    weights = torch.arange(1.0, 7.0)
    found = torch.autograd.grad(compiled(function)(x, value), (x, value), weights)
    true = torch.autograd.grad(function(x, value), (x, value), weights)
    for ours, theirs in zip(found, true):
        torch.testing.assert_close(ours, theirs)


def test_means_of_integers_are_refused_as_in_eager_mode() -> None:
    x = torch.ones(1, 2, 4, 4, dtype=torch.int64)
    with pytest.raises(RuntimeError):
        torch.nn.functional.adaptive_avg_pool2d(x, 2)
    with pytest.raises(RuntimeError):
        compiled(lambda x: torch.nn.functional.adaptive_avg_pool2d(x, 2))(x)


def test_a_number_out_of_a_tensor_fills_another() -> None:
    def function(x: Any, number: Any) -> Any:
        return torch.clamp(torch.tanh(x).fill_(number.item()), 0, x.shape[0] - 1)

    given = torch.randn(47), torch.tensor(7)
    found = torch.compile(function, backend=backend.terrazzo, dynamic=True, fullgraph=True)(*given)
    torch.testing.assert_close(found, function(*given))


@pytest.mark.parametrize("function", [
    lambda x: x * x.shape[1] ** -0.5, lambda x: x / x.shape[1], lambda x: x + x.shape[0],
    lambda x: torch.full_like(x, x.shape[1]), lambda x: torch.chunk(x, 2, 1),
    lambda x: [part + 1 for part in torch.chunk(x, 2, 1)]])
def test_sizes_in_arithmetic_and_parts(function: Any) -> None:
    fast = torch.compile(function, backend=backend.terrazzo, dynamic=True)
    for n in (8, 12):
        x = torch.randn(3, n)
        torch.testing.assert_close(list(fast(x)), list(function(x)))


def test_products_of_two_types_are_refused_as_in_eager_mode() -> None:
    x, y = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        torch.mm(x, y)
    with pytest.raises(RuntimeError):
        compiled(torch.mm)(x, y)


def test_views_that_are_negated_or_conjugated_when_read() -> None:
    def function(x: Any) -> Any:
        turned = x.conj()
        return turned.real + turned.imag, turned.imag * 2, turned * 2

    x = torch.randn(4, dtype=torch.complex64)
    for given in (x, x.conj()):
        for ours, theirs in zip(compiled(function)(given), function(given)):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("tangent", [
    lambda w: w, lambda w: w.conj(), lambda w: torch._neg_view(w), lambda w: w.conj().mT.mT])
def test_gradients_that_are_negated_or_conjugated_when_read(tangent: Any) -> None:
    """Whatever they were when torch traced: nobody guards that."""
    w = torch.randn(4, 6, dtype=torch.complex64)
    numbers = torch.randn(4, 6, dtype=torch.complex64), torch.randn(4, 6)
    for function, x in (((lambda x: x * (2 + 1j)), numbers[0]), (torch.fft.ifft, numbers[1]),
                        (torch.fft.ihfft, numbers[1])):
        torch._dynamo.reset()
        fast, given = compiled(function), x.requires_grad_()
        grads = []
        for each in (fast, function):
            y = each(given)
            grads.append(torch.autograd.grad(y, given, tangent(w[:, :y.shape[1]]))[0])
        torch.testing.assert_close(*grads)
    x = numbers[1]
    real = torch._neg_view(torch.ones(4, 6))
    torch.testing.assert_close(torch.autograd.grad(compiled(lambda x: x * 2)(x), x, real)[0],
                               torch.full((4, 6), -2.0))


@pytest.mark.parametrize("function", [
    lambda x, s: x * s.item() + 1, lambda x, s: torch.full((3,), s.item()),
    lambda x, s: x * s.item(), lambda x, s: x.clamp(max=s.item()),
    lambda x, s: (x + (x * 2).sum().item(), s.item())])
def test_a_number_out_of_a_tensor_in_arithmetic(function: Any) -> None:
    """The tensor will do: nothing is left to torch."""
    x, s = torch.randn(5), torch.tensor([[1.3]])
    fast = torch.compile(function, backend=backend.terrazzo, fullgraph=True,
                         options={"fallback": "error"})
    torch.testing.assert_close(fast(x, s), function(x, s))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2, 1)])
def test_numbers_are_read_from_tensors_without_axes(shape: tuple[int, ...]) -> None:
    """Torch up to 2.11 puts the tensor in place of the number, with all its axes."""
    graph = torch.fx.Graph()
    source = graph.placeholder("s")
    source.meta["example_value"] = FakeTensorMode().from_tensor(torch.ones(shape))
    graph.output((graph.call_method("item", (source,)),))
    gm = torch.fx.GraphModule({}, graph)
    read_from_rank_0(gm)
    item = next(n for n in gm.graph.nodes if n.target == "item")
    if shape == (2, 1):  # no number: eager mode says so
        assert item.args == (source,)
        return
    assert item.args[0].meta["example_value"].shape == ()
    assert gm(torch.full(shape, 1.5)) == (1.5,)


def test_indices_that_vary_and_are_negative() -> None:
    def write(n: int, x: Any) -> Any:
        x[n] = -1
        return x

    def read(n: int, x: Any) -> Any:
        return x[n] * 2, x[n:].sum(), torch.select(x, 0, n)

    for function in (write, read):
        torch._dynamo.reset()
        fast = compiled(function)
        for n in (2, 3, 6, -7, -3, -1, 0, 1):
            ours, theirs = torch.arange(7.0), torch.arange(7.0)
            torch.testing.assert_close(fast(n, ours), function(n, theirs))
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("function", [torch.remainder, torch.fmod])
def test_remainders_of_integers_by_zero_are_refused_as_in_eager_mode(function: Any) -> None:
    x = torch.arange(5, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        function(x, 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(lambda x: function(x, 0))(x)


def test_a_result_that_torch_foretold_wrongly_is_an_error() -> None:
    tensor = torch.zeros(3, 2)
    assert held(tensor, (2, 1), (3, 2), "f") is tensor
    with pytest.raises(UnsupportedOperator, match=r"f answered .*\(3, 2\).*\(1, 2\)"):
        held(tensor, (2, 1), (1, 2), "f")


@pytest.mark.parametrize("start", [2, -3])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_part_from_where_data_tells(dim: int, start: int) -> None:
    """It is a view of what was given, and AOTAutograd makes it again from where it lies."""
    def function(x: Any, start: Any) -> Any:
        return torch.narrow(x, dim, start, 2), torch.narrow(x, dim, start, 2) * 2

    x, at = torch.randn(5, 5, 5, requires_grad=True), torch.tensor(start)
    found, true = compiled(function)(x, at), function(x, at)
    for ours, theirs in zip(found, true):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()
    grads = [torch.autograd.grad(pair, x, [torch.ones(r.shape) for r in pair])[0]
             for pair in (found, true)]
    torch.testing.assert_close(*grads)
