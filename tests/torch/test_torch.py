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


# ---------------------------------------------------------------- tensors that are not their memory
def unusual() -> dict[str, Any]:
    x = floats(3, 4)
    pairs = torch.complex(x, x + 1)
    return {
        "negated": torch._neg_view(x),
        "imaginary part of a conjugate": pairs.conj().imag,
        "part of a negated view": torch._neg_view(x)[1:, ::2],
        "zero without memory": torch._efficientzerotensor(3, 4),
        "expanded": x[:1].expand(3, 4),
        "parameter": torch.nn.Parameter(x),
    }


@pytest.mark.parametrize("kind", unusual())
def test_views_are_read_as_what_they_mean(kind: str) -> None:
    """Also where an entry for an ordinary tensor of the same layout exists already."""
    x = unusual()[kind]
    same_layout = torch.ones(99).as_strided(x.shape, x.stride())
    ways = {
        "operator": tz.exp,
        "function": tz.jit(lambda x: tz.exp(x)),
        "nested": lambda x: tz.jit(lambda p: tz.exp(p["x"]))({"x": x}),
        "several": lambda x: tz.jit(lambda x: (tz.exp(x), tz.sum(x)))(x)[0],
        "control flow": tz.jit(lambda x: tz.cond(tz.sum(x) > 1e9, lambda: x, lambda: tz.exp(x))),
        "captured": lambda x: tz.jit(lambda y: tz.exp(x) + y * 0)(torch.ones(())),
        "beside numpy": lambda x: tz.jit(lambda x, y: tz.exp(x) * y)(x, np.float32(1)),
        "executable": lambda x: tz.exp.compile(same_layout.contiguous())(x),
    }
    for name, run in ways.items():
        run(same_layout)
        found = run(x)
        np.testing.assert_allclose(torch.as_tensor(found).detach(), x.detach().exp(), rtol=2e-6,
                                   err_msg=f"{kind}, {name}")


def test_gradients_flow_through_negated_views() -> None:
    x = floats(5).requires_grad_()
    tz.exp(torch._neg_view(x)).sum().backward()
    np.testing.assert_allclose(x.grad, -(-x.detach()).exp(), rtol=1e-6)


def refused() -> dict[str, Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = floats(3, 4)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    return {
        "sparse": x.to_sparse(), "rows": x.to_sparse_csr(), "meta": x.to("meta"), "fake": fake,
        "quantised": torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
        "nested": torch.nested.nested_tensor([x, x]),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sparse", "rows", "meta", "fake", "quantised", "nested"])
def test_what_is_more_than_memory_is_refused(kind: str) -> None:
    tz.exp(floats(3, 4))  # there is an entry for an ordinary tensor of this layout
    x = refused()[kind]
    listed, capturing = tz.jit(lambda p: tz.exp(p[0])), tz.jit(lambda y: tz.exp(x) + y)
    for run in (lambda: tz.exp(x), lambda: listed([x]), lambda: capturing(floats(4))):
        with pytest.raises(tz.errors.TerrazzoError) as caught:
            run()
        assert caught.value.hint


def test_a_transform_of_torch_that_batches_is_refused() -> None:
    tz.exp(floats(3))
    with pytest.raises(tz.errors.TerrazzoError, match=r"transform of torch\.func"):
        torch.vmap(tz.exp)(floats(2, 3))


# ---------------------------------------------------------------- forward mode
def test_tangents_are_pushed_forward() -> None:
    from torch.autograd import forward_ad

    x, t = floats(3, 5, dtype=torch.float64), floats(3, 5, dtype=torch.float64) + 1
    stats(x)  # an entry without tangents must not serve those with them
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, t)
        for ours, theirs in zip(stats(dual), torch_stats(dual), strict=True):
            found, wanted = (forward_ad.unpack_dual(y).tangent for y in (ours, theirs))
            if wanted is None:
                assert found is None
            else:
                torch.testing.assert_close(found, wanted)
        other = tz.jit(lambda x, y: x * y)(x, dual)
        torch.testing.assert_close(forward_ad.unpack_dual(other).tangent, x * t)
        assert forward_ad.unpack_dual(tz.exp(x)).tangent is None


def test_transforms_of_torch_func() -> None:
    x, t = floats(3, 5, dtype=torch.float64), floats(3, 5, dtype=torch.float64) + 1
    ours = tz.jit(lambda x: tz.softmax(x) * x)

    def theirs(x: Any) -> Any:
        return torch.softmax(x, -1) * x

    for transform in (lambda f: torch.func.grad(lambda x: f(x).sin().sum())(x),
                      lambda f: torch.func.jvp(f, (x,), (t,))[1],
                      lambda f: torch.func.vjp(f, x)[1](t)[0]):
        torch.testing.assert_close(transform(ours), transform(theirs))


def test_gradients_of_tangents() -> None:
    from torch.autograd import forward_ad

    x, t = floats(5, dtype=torch.float64).requires_grad_(), floats(5, dtype=torch.float64) + 1
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(tz.exp(forward_ad.make_dual(x, t))).tangent
        (found,) = torch.autograd.grad(tangent.sum(), x)
    torch.testing.assert_close(found, x.detach().exp() * t)


# ---------------------------------------------------------------- numbers
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16", "int64"])
def test_numbers_beside_tensors_and_arrays(kind: str) -> None:
    """Every value of a number counts, with one entry for all; so does its type."""
    x = torch.arange(6).reshape(2, 3).to(getattr(torch, kind))

    @tz.op
    def scaled(x: Any, a: Any, b: Any) -> Any:
        return x * a + b

    mixed = tz.jit(lambda x, a, b: x * a + b)
    for function in (scaled, mixed):
        for a, b in ((2.0, 1.0), (3.0, -1.0), (0.0, -0.0), (2.0, 4.0), (float("inf"), 1.0)):
            want = x * a + b
            got = function(x, a, b)
            assert got.dtype == want.dtype or kind == "int64"
            np.testing.assert_allclose(got.double(), want.double())
            if kind == "float64":
                np.testing.assert_allclose(function(x.numpy(), a, b), want)
    np.testing.assert_allclose(scaled(x, 2, 3).double(), (x * 2 + 3).double())
    np.testing.assert_allclose(scaled(x, a=2.0, b=3.0).double(), (x * 2.0 + 3.0).double())


def test_numbers_beside_tensors_that_are_learned() -> None:
    x = floats(3, 4, requires_grad=True)
    function = tz.jit(lambda x, a, b: tz.sum(x * x * a + b))
    for a, b in ((2.0, np.float32(1)), (3.0, np.float32(2)), (0.5, np.asarray(3, np.float32))):
        with torch.no_grad():
            plain = function(x, a, b)
        result = function(x, a, b)
        (gradient,) = torch.autograd.grad(result, [x])
        np.testing.assert_allclose(gradient, 2 * a * x.detach(), rtol=1e-6)
        np.testing.assert_allclose(plain, result.detach())


def test_attributes_that_are_floats_are_a_part_of_the_program() -> None:
    x = floats(3, 4)
    for slope in (0.1, 0.2, 0.1):
        expected = torch.nn.functional.leaky_relu(x, slope)
        np.testing.assert_allclose(tz.leaky_relu(x, slope), expected, rtol=1e-6)
