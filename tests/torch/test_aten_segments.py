"""Segments, bags and histograms give what eager mode gives, with gradients, in our code alone."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from terrazzo.torch import backend  # noqa: E402

pytestmark = pytest.mark.torch


def check(function: Any, *given: Any, backward: bool = True, falls_back: bool = False) -> None:
    """Results and gradients beside eager's."""
    torch._dynamo.reset()
    fast = torch.compile(function, backend=backend.terrazzo, fullgraph=True,
                         options={"fallback": "torch" if falls_back else "error"})
    found = []
    for each in (fast, function):
        args = [x.clone().requires_grad_(backward and x.is_floating_point()) for x in given]
        results = each(*args)
        results = results if isinstance(results, tuple) else (results,)
        smooth = [r for r in results if r.requires_grad]
        weights = [torch.linspace(-1, 2, r.numel()).reshape(r.shape).to(r.dtype) for r in smooth]
        slopes = torch.autograd.grad(smooth, [a for a in args if a.requires_grad], weights,
                                     allow_unused=True) if smooth else ()
        found.append([*results, *slopes])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


LENGTHS = {"some empty": [0, 3, 0, 4, 2, 0], "one": [9], "all empty but one": [0, 0, 9]}


@pytest.mark.parametrize("initial", [None, 2.0])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
def test_segments(reduce: str, initial: float | None) -> None:
    torch.manual_seed(0)
    data = torch.randn(9, 3)
    data[4] = data[3]  # equal in one segment, and zeros in a product
    data[0, 1] = data[8, 2] = data[8, 0] = data[7, 0] = 0
    for lengths in LENGTHS.values():
        told = torch.tensor(lengths)
        check(lambda x, n: torch.segment_reduce(x, reduce, lengths=n, initial=initial), data, told)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), told.cumsum(0)])
        check(lambda x, n: torch.segment_reduce(x, reduce, offsets=n, initial=initial), data,
              offsets)


def test_segments_of_an_inner_axis_and_of_nothing() -> None:
    x = torch.randn(2, 5, 3)
    lengths = torch.tensor([[1, 4, 0], [2, 0, 3]])
    check(lambda x, n: torch.segment_reduce(x, "max", lengths=n, axis=1), x, lengths)
    check(lambda x, n: torch.segment_reduce(x, "mean", lengths=n, axis=1), x, lengths)
    check(lambda x, n: torch.segment_reduce(x, "min", lengths=n, axis=1), x.bfloat16(), lengths)
    for reduce in ("sum", "mean", "max"):
        check(lambda x, n, reduce=reduce: torch.segment_reduce(x, reduce, lengths=n),
              torch.zeros(0, 3), torch.tensor([0, 0]), backward=False)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
def test_bags(mode: str, padding: int | None) -> None:
    torch.manual_seed(0)
    table, indices = torch.randn(7, 5), torch.tensor([1, 2, 2, 6, 0, 2, 1, 2])
    for offsets in ([0, 3, 3, 7], [0, 0, 8], [0]):  # bags that are empty, and one of padding alone
        check(lambda w, i, o: torch.nn.functional.embedding_bag(
            i, w, o, mode=mode, padding_idx=padding), table, indices, torch.tensor(offsets))
    check(lambda w, i, o: torch.nn.functional.embedding_bag(
        i, w, o, mode=mode, include_last_offset=True), table, indices.int(),
        torch.tensor([0, 3, 8], dtype=torch.int32))
    check(lambda w, i: torch.nn.functional.embedding_bag(i, w, mode=mode), table,
          indices.reshape(2, 4))


@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_what_bags_tell_beside_their_results(mode: int, padding: int) -> None:
    """Bags of indices, how many count in each, and where the largest are, as eager mode tells."""
    indices, offsets = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 3, 3, 6])
    for operator in (torch.ops.aten._embedding_bag, torch.ops.aten._embedding_bag_forward_only):
        check(lambda w, i, o, operator=operator: operator(
            w, i, o, False, mode, False, None, False, padding), torch.randn(10, 4), indices,
            offsets, backward=False)


def test_weighted_bags_and_gradients_by_frequency() -> None:
    torch.manual_seed(0)
    table, indices = torch.randn(7, 5), torch.tensor([1, 2, 2, 6, 0, 2, 1, 2])
    offsets, weights = torch.tensor([0, 3, 3, 7]), torch.randn(8)
    check(lambda w, i, o, each: torch.nn.functional.embedding_bag(
        i, w, o, mode="sum", per_sample_weights=each, padding_idx=6), table, indices, offsets,
        weights)
    check(lambda w, i, o: torch.nn.functional.embedding_bag(i, w, o, scale_grad_by_freq=True),
          table, indices, offsets, falls_back=True)  # by frequencies that are torch's
    check(lambda w, i, o: torch.nn.functional.embedding_bag(i, w, o), table,
          torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0]), backward=False)


@pytest.mark.parametrize("density", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_histograms(density: bool, weighted: bool) -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.randn(500), torch.tensor([-2.0, 2.0, 0.0, 1.0])])
    weight = torch.rand(x.shape) if weighted else None

    def checked(function: Any, given: Any) -> None:
        check(lambda x: tuple(function(x)), given, backward=False)

    for bins in (1, 7, 64):
        checked(lambda x, n=bins: torch.histogram(x, n, weight=weight, density=density), x)
        checked(lambda x, n=bins: torch.histogram(x, n, range=(-2, 2), weight=weight,
                                                  density=density), x)
    edges = torch.tensor([-2.0, -0.5, 0.0, 0.25, 2.0])
    checked(lambda x: torch.histogram(x, edges, weight=weight, density=density), x)
    rows = x.reshape(-1, 2)
    one = weight[:252] if weight is not None else None
    checked(lambda x: torch._histogramdd_from_bin_tensors(
        x, [edges, edges[:3]], weight=one, density=density)[None], rows)

    def in_two_axes(x: Any) -> Any:
        hist, found = torch.histogramdd(x, [4, 3], weight=one, density=density)
        return hist, *found

    checked(in_two_axes, rows)


def test_histograms_of_equal_elements_and_of_nothing() -> None:
    for x in (torch.full((5,), 3.0), torch.zeros(0)):
        check(lambda x: tuple(torch.histogram(x, 4)), x, backward=False)
        check(lambda x: torch.histc(x, 4), x, backward=False)


def test_a_mask_that_is_wider_than_what_it_is_of() -> None:
    mask = torch.tensor([[True, False, True], [False, True, True]])
    check(lambda x, m, s: torch.masked_scatter(x, m, s), torch.randn(3), mask, torch.randn(6))
