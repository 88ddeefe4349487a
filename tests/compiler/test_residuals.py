"""Training with values that the forward pass keeps: the same gradients as without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import terrazzo as tz

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def layers(x: Any, w: Any, u: Any) -> Any:
    h = tz.tanh(x @ w)
    centred = h - tz.mean(h, axis=-1, keepdims=True)
    return tz.softmax(centred * tz.rsqrt(tz.var(h, axis=-1, keepdims=True) + 1e-5) @ u)


def recurrent(x: Any, w: Any, u: Any) -> Any:
    def step(state: Any, row: Any) -> Any:
        h, c = state
        i, f = tz.split(row + h @ u, indices_or_sections=2, axis=-1)
        c = tz.sigmoid(f) * c + tz.tanh(i)
        return (tz.tanh(c), c), tz.tanh(c)

    zeros = tz.zeros(shape=(x.shape[1], u.shape[0]), dtype=x.dtype)
    (h, _), first = tz.scan(step, (zeros, zeros), x @ w)
    # A second loop over what the first one gave, and one that keeps nothing of its own.
    _, second = tz.scan(step, (h, zeros), first @ w[:u.shape[0]])
    return tz.scan(lambda s, row: (s + row, s), zeros, second, reverse=True)[1] + first


def chosen(x: Any, w: Any, u: Any) -> Any:
    values, places = tz.topk(x @ w, k=3)
    return values @ u[:3], places


CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "layers": (layers, [(128, 256), (256, 256), (256, 64)]),
    "recurrent": (recurrent, [(9, 16, 96), (96, 128), (64, 128)]),
    "chosen": (chosen, [(128, 256), (256, 256), (64, 32)]),
}


def inputs(shapes: list[tuple[int, ...]], dtype: Any = torch.float32) -> list[Any]:
    torch.manual_seed(0)
    return [(torch.randn(s, dtype=torch.float64) * 0.1).to(dtype).requires_grad_() for s in shapes]


def gradients(function: Any, tensors: list[Any], from_inputs: bool) -> list[Any]:
    """A backward pass that may be differentiated in turn starts from the inputs."""
    results = function(*tensors)
    y = results[0] if isinstance(results, tuple) else results
    torch.manual_seed(1)
    weights = torch.randn(y.shape, dtype=torch.float64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, tensors, weights, create_graph=from_inputs)]


def kept_of(function: Any) -> list[Any]:
    families = [f for t in function.tables.values() for f in t.families.values()]
    return [kept for family in families for kept in family.kept.values() if kept is not None]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_same_gradients(name: str, dtype: Any) -> None:
    function, shapes = CASES[name]
    compiled = tz.jit(function)
    tensors = inputs(shapes, dtype)
    with_kept, again = (gradients(compiled, tensors, from_inputs) for from_inputs in (False, True))
    (kept,) = kept_of(compiled)
    assert len(kept.parts.forward.outputs) > kept.parts.results
    assert list(kept.backward_of) == [(0, 1, 2)]
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    for got, want in zip(with_kept, again, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, rtol=tolerance,
                                   atol=tolerance * float(want.detach().abs().max()))


@pytest.mark.parametrize("name", ["layers", "recurrent"])
def test_a_backward_pass_that_is_differentiated_starts_from_the_inputs(name: str) -> None:
    """Gradients of gradients, along a direction, against differences of gradients."""
    function, shapes = CASES[name]
    compiled = tz.jit(function)
    tensors = inputs(shapes, torch.float64)
    torch.manual_seed(2)
    along = [torch.randn_like(t) for t in tensors]

    def first(moved: float) -> Any:
        given = [(t + a * moved).detach().requires_grad_() for t, a in zip(tensors, along)]
        found = torch.autograd.grad(compiled(*given).square().sum(), given, create_graph=True)
        return given, found

    given, found = first(0.0)
    assert kept_of(compiled)
    weights = [torch.randn_like(g) for g in found]
    second = torch.autograd.grad(found, given, weights)
    slope = sum(float((g * a).sum()) for g, a in zip(second, along))
    ahead, behind = (sum(float((g * w).sum()) for g, w in zip(first(s)[1], weights))
                     for s in (1e-5, -1e-5))
    assert slope == pytest.approx((ahead - behind) / 2e-5, rel=1e-5)


def test_some_inputs_some_results_and_results_that_are_written_to() -> None:
    def two(x: Any, w: Any) -> Any:
        h = tz.exp(x @ w)
        return h, tz.square(x @ w), tz.argmax(h, axis=-1)

    compiled = tz.jit(two)
    x, w = inputs([(128, 256), (256, 256)], torch.float64)
    product = (x @ w).detach()
    h, square, place = compiled(x, w)
    h *= 0  # what the backward pass wants is its own
    assert not place.requires_grad
    (got,) = torch.autograd.grad(square.sum(), [x], retain_graph=True)
    torch.testing.assert_close(got, 2 * product @ w.T.detach())
    for _ in range(2):  # twice through the same graph
        got_x, got_w = torch.autograd.grad(square.sum() + h.sum(), [x, w], retain_graph=True)
        torch.testing.assert_close(got_x, 2 * product @ w.T.detach())
        torch.testing.assert_close(got_w, x.T.detach() @ (2 * product))
    assert kept_of(compiled)
    # Only what requires a gradient takes part.
    h, square, _ = compiled(x, w.detach())
    (got,) = torch.autograd.grad(square.sum(), [x])
    torch.testing.assert_close(got, 2 * product @ w.T.detach())


def test_sizes_that_vary_and_values_that_are_mentioned() -> None:
    w = inputs([(256, 256)], torch.float64)[0]
    compiled = tz.jit(lambda x: tz.square(x @ w))
    for rows in (128, 130, 128):
        x = torch.randn(rows, 256, dtype=torch.float64, requires_grad=True)
        w.grad = None
        compiled(x).sum().backward()
        torch.testing.assert_close(w.grad, 2 * x.T.detach() @ (x @ w).detach())
        torch.testing.assert_close(x.grad, 2 * (x @ w).detach() @ w.T.detach())
    assert len(kept_of(compiled)) == 1  # for the first sizes; one symbolic program for the others


def test_a_gradient_that_nobody_asks_for_need_not_exist() -> None:
    def halved(x: Any, w: Any) -> Any:
        return tz.while_loop(lambda s: tz.max(s) > 1.0, lambda s: s * 0.5, x @ w)

    x, w = inputs([(64, 64), (64, 64)])
    assert float(tz.jit(halved)(x, w).detach().max()) <= 1.0


def test_torch_func() -> None:
    x, w = (t.detach() for t in inputs([(128, 256), (256, 256)], torch.float64))
    compiled = tz.jit(lambda x, w: tz.sum(tz.square(x @ w)))
    got = torch.func.grad(lambda x: compiled(x, w))(x)
    torch.testing.assert_close(got, 2 * (x @ w) @ w.T)
    along = torch.randn_like(x)
    _, pushed = torch.func.jvp(lambda x: compiled(x, w), (x,), (along,))
    torch.testing.assert_close(pushed, (got * along).sum())
