"""Operators on torch tensors: results, gradients, grad mode, layouts, and mixtures with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import terrazzo as tz

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def floats(*shape: int, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(*shape, generator=generator, **options)


@tz.op
def scaled_gelu(x: Any, scale: Any) -> Any:
    return tz.gelu(x, approximate="tanh") * scale


@tz.op
def stats(x: Any) -> Any:
    """Two floats and an index: not everything can be differentiated."""
    return tz.sum(x * x, axis=1), tz.argmax(x, axis=1), tz.exp(x)


def torch_stats(x: Any) -> Any:
    return (x * x).sum(1), x.argmax(1), x.exp()


# ---------------------------------------------------------------- values
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16", "float16", "int32", "int64",
                                  "uint8", "bool"])
def test_types_come_back(kind: str) -> None:
    x = (floats(3, 5) * 3).abs().to(getattr(torch, kind))
    found = tz.maximum(x, x)
    assert isinstance(found, torch.Tensor) and found.dtype == x.dtype
    assert torch.equal(found, x)


def test_several_results_and_nests() -> None:
    x = floats(4, 6)
    for found, expected in zip(stats(x), torch_stats(x), strict=True):
        torch.testing.assert_close(found, expected)
    tree = tz.jit(lambda t: {"a": [t["x"] + 1.0], "b": (t["x"] * 2.0,)})({"x": x})
    torch.testing.assert_close(tree["a"][0], x + 1)
    torch.testing.assert_close(tree["b"][0], x * 2)


@pytest.mark.parametrize("view", [
    lambda x: x.t(), lambda x: x[:, 2:9], lambda x: x[::2], lambda x: x[0].expand(6, 16),
    lambda x: x[:, :1].expand(12, 16), lambda x: x[:, ::3], lambda x: x.flip(0)])
def test_layouts(view: Any) -> None:
    x = view(floats(12, 16))
    torch.testing.assert_close(tz.softmax(x), torch.softmax(x, -1))
    torch.testing.assert_close(tz.sum(x, axis=0), x.sum(0))


def test_numpy_and_torch_together_give_torch() -> None:
    x, y = floats(3, 4), np.ones((3, 4), np.float32)
    for found in (tz.add(x, y), tz.add(y, x), tz.add(x, 1.0), tz.add(1, x)):
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found, x + 1)
    weight = floats(4).requires_grad_()
    tz.sum(tz.multiply(y, weight)).backward()
    torch.testing.assert_close(weight.grad, torch.full((4,), 3.0))


def test_parameters_and_modules() -> None:
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, x: Any) -> Any:
            return tz.rms_norm(x, self.weight)

    module, x = Norm(), floats(4, 8)
    module(x).sum().backward()
    reference = torch.ones(8, requires_grad=True)
    torch.nn.functional.rms_norm(x, (8,), reference, eps=1e-6).sum().backward()
    torch.testing.assert_close(module.weight.grad, reference.grad, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- gradients
def test_gradient_equals_torchs() -> None:
    x, scale = floats(5, 7).requires_grad_(), floats(7).requires_grad_()
    (scaled_gelu(x, scale) * floats(5, 7)).sum().backward()
    a, b = x.detach().clone().requires_grad_(), scale.detach().clone().requires_grad_()
    (torch.nn.functional.gelu(a, approximate="tanh") * b * floats(5, 7)).sum().backward()
    torch.testing.assert_close(x.grad, a.grad)
    torch.testing.assert_close(scale.grad, b.grad)


def test_only_what_is_wanted_is_computed() -> None:
    x, scale = floats(5, 7).requires_grad_(), floats(7)
    scaled_gelu(x, scale).sum().backward()
    assert x.grad is not None and scale.grad is None


def test_gradient_with_several_results() -> None:
    x = floats(4, 6).requires_grad_()
    total, where, grown = stats(x)
    assert total.requires_grad and grown.requires_grad and not where.requires_grad
    (total.sum() * 2 + (grown * 3).sum()).backward()
    torch.testing.assert_close(x.grad, (4 * x + 3 * x.exp()).detach())
    x.grad = None
    stats(x)[0].sum().backward()  # one result unused
    torch.testing.assert_close(x.grad, (2 * x).detach())


def test_gradcheck_first_and_second_order() -> None:
    x = floats(3, 4, dtype=torch.float64, requires_grad=True)
    y = floats(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(scaled_gelu, (x, y))
    assert torch.autograd.gradgradcheck(scaled_gelu, (x, y))
    assert torch.autograd.gradcheck(lambda x: tz.softmax(x), (x,))
    assert torch.autograd.gradcheck(lambda x, w: tz.layer_norm(x, w), (x, y))
    assert torch.autograd.gradcheck(lambda a: tz.matmul(a, tz.transpose(a)), (x,))


def test_gradient_for_sizes_that_change() -> None:
    for n in (3, 5, 8, 5):
        x = floats(n, 7).requires_grad_()
        tz.softmax(x).square().sum().backward()
        reference = x.detach().clone().requires_grad_()
        torch.softmax(reference, -1).square().sum().backward()
        torch.testing.assert_close(x.grad, reference.grad)


def test_gradients_of_views_and_of_expanded_weights() -> None:
    x = floats(6, 8).requires_grad_()
    y = scaled_gelu(x[:, 1:5], x[0, 4:])
    y.backward(torch.ones(1).expand(6, 4))  # a gradient with strides of zero
    reference = x.detach().clone().requires_grad_()
    (torch.nn.functional.gelu(reference[:, 1:5], approximate="tanh") * reference[0, 4:]
     ).sum().backward()
    torch.testing.assert_close(x.grad, reference.grad)


# ---------------------------------------------------------------- grad mode
def test_grad_mode_is_respected() -> None:
    x = floats(5).requires_grad_()
    assert tz.exp(x).requires_grad
    with torch.no_grad():
        assert not tz.exp(x).requires_grad
    assert tz.exp(x).requires_grad
    with torch.inference_mode():
        assert not tz.exp(x).requires_grad
    assert tz.exp(x).grad_fn is not None
    assert tz.exp(x.detach()).grad_fn is None
    assert tz.exp(floats(5)).grad_fn is None


def test_changing_an_input_before_backward_is_noticed() -> None:
    x = floats(5).requires_grad_()
    y = x * 1.0
    z = tz.exp(y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_training_step() -> None:
    """A small network with our operators learns as one of torch's own does."""
    def train(forward: Any) -> list[float]:
        torch.manual_seed(0)
        w1, w2 = torch.randn(8, 16) * 0.3, torch.randn(16, 1) * 0.3
        w1.requires_grad_(), w2.requires_grad_()
        optimizer = torch.optim.SGD([w1, w2], lr=0.05)
        x = floats(32, 8)
        target = x.sum(1, keepdim=True)
        losses = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = forward(x, w1, w2, target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    @tz.op
    def ours(x: Any, w1: Any, w2: Any, target: Any) -> Any:
        return tz.mse_loss(tz.matmul(tz.tanh(tz.matmul(x, w1)), w2), target)

    def theirs(x: Any, w1: Any, w2: Any, target: Any) -> Any:
        return torch.nn.functional.mse_loss(torch.tanh(x @ w1) @ w2, target)

    found, expected = train(ours), train(theirs)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert found[-1] < found[0] / 2
