"""Convolutions that Inductor compiled for the device: templates, forward and backward."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("whole", "fresh")]
F = torch.nn.functional
Sizes = tuple[int, ...]

CONVOLUTIONS: dict[str, tuple[Sizes, Sizes, dict[str, Any]]] = {
    "padded": ((2, 5, 9, 11), (18, 5, 3, 3), {"padding": 1}),
    "plain": ((2, 3, 9, 9), (4, 3, 3, 3), {}),
    "of one element": ((2, 20, 7, 9), (24, 20, 1, 1), {}),
    "dilated": ((2, 8, 13, 12), (16, 8, 3, 3), {"dilation": 2, "padding": 3}),
    "in groups": ((2, 24, 7, 7), (16, 12, 3, 3), {"groups": 2, "padding": 1}),
    "each channel by itself": ((2, 6, 8, 8), (6, 1, 3, 3), {"groups": 6, "padding": 1}),
    "rows unlike columns": ((2, 8, 10, 11), (20, 8, 5, 3), {"padding": (4, 0)}),
    "more padding than window": ((2, 4, 5, 6), (8, 4, 2, 1), {"padding": 2}),
    "signals": ((3, 8, 50), (16, 8, 5), {"padding": 2}),
}
STRIDED = {
    "strides": ((2, 8, 13, 12), (16, 8, 3, 3), {"stride": 2, "padding": 1}),
    "strided signals": ((2, 4, 21), (8, 4, 3), {"stride": 3, "padding": 1}),
}
QUICK = ("padded",)


def ramp(sizes: Sizes, factor: float) -> Any:
    return torch.sin(factor * torch.arange(float(torch.Size(sizes).numel()))).reshape(sizes)


def convolve(x: Any, weight: Any, bias: Any, **options: Any) -> Any:
    """Shifted, so that no result is so near to nothing that rounding decides its gradient."""
    found = (F.conv1d if x.dim() == 3 else F.conv2d)(x, weight, bias, **options)
    return F.relu(found + 40) * 2


def with_gradients(function: Any, args: list[Any], **options: Any) -> list[Any]:
    args = [arg.detach().requires_grad_() for arg in args]
    found = function(*args, **options)
    return [found.detach(), *torch.autograd.grad(found, args, torch.cos(found.detach()))]


def arguments(x: Sizes, weight: Sizes) -> list[Any]:
    return [ramp(x, 0.7), ramp(weight, 0.3), ramp(weight[:1], 0.9)]


def kernels(run: Any) -> list[str]:
    """The names of all that a call launches."""
    from terrazzo import gcu

    with gcu.trace() as trace:
        run()
    assert trace.records
    return [record.name.decode() for record in trace.records]


def cases(table: dict[str, Any]) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
            for name in table]


@pytest.mark.parametrize("name", cases(CONVOLUTIONS | STRIDED))
def test_results_and_gradients(name: str) -> None:
    x, weight, options = (CONVOLUTIONS | STRIDED)[name]
    args = arguments(x, weight)
    on_chip = [arg.to("gcu") for arg in args]
    compiled = torch.compile(convolve, fullgraph=True)
    found = with_gradients(compiled, on_chip, **options)
    exact = with_gradients(convolve, [arg.double() for arg in args], **options)
    torch.testing.assert_close([part.cpu() for part in found], [part.float() for part in exact],
                               rtol=2e-5, atol=2e-4)
    launched = kernels(lambda: with_gradients(compiled, on_chip, **options))
    own = [kernel for kernel in launched if kernel.startswith("k_convolve")]
    assert any(kernel.startswith("triton_tem") for kernel in launched)
    assert bool(own) == (name in STRIDED), own  # gradients of inputs that were strided over


@pytest.mark.slow
@pytest.mark.parametrize("name", ["padded", "in groups"])
def test_channels_last(name: str) -> None:
    x, weight, options = CONVOLUTIONS[name]
    args = [arg.to(memory_format=torch.channels_last) if arg.dim() == 4 else arg
            for arg in arguments(x, weight)]
    found = with_gradients(torch.compile(convolve, fullgraph=True),
                           [arg.to("gcu") for arg in args], **options)
    torch.testing.assert_close([part.cpu() for part in found],
                               with_gradients(convolve, args, **options), rtol=2e-5, atol=2e-4,
                               check_stride=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["padded", "of one element", "signals"])
def test_autocast(name: str) -> None:
    """As near to what is exact as eager mode: results of the matrix unit are rounded once."""
    x, weight, options = CONVOLUTIONS[name]
    args = arguments(x, weight)
    exact = with_gradients(convolve, [arg.bfloat16().double() for arg in args], **options)
    apart = []
    for function in (torch.compile(convolve, fullgraph=True), convolve):
        with torch.autocast("gcu", torch.bfloat16):
            found = with_gradients(function, [arg.to("gcu") for arg in args], **options)
        assert found[0].dtype == torch.bfloat16
        apart.append([float((part.cpu() - other).abs().max() / other.abs().max())
                      for part, other in zip(found, exact)])
    for compiled, eager in zip(*apart):
        assert compiled <= 1.5 * eager + 1e-3, apart


def test_what_follows_is_part_of_the_kernel() -> None:
    args = [arg.to("gcu") for arg in arguments((2, 5, 9, 11), (18, 5, 3, 3))]
    compiled = torch.compile(convolve)
    compiled(*args)
    assert len(kernels(lambda: compiled(*args))) == 1


def test_blocks_lie_in_the_scratchpad() -> None:
    """A template that is not tuned has one block: it must be one that runs."""
    import terrazzo.torch_device.inductor.backend  # noqa: F401  (as Inductor would)
    from terrazzo.torch_device.inductor.convolution_templates import (
        Shape,
        ranked_forward,
        ranked_gradient,
    )
    from terrazzo.triton_gcu.chip import description

    chip = description()
    large = Shape(8, 256, 56, 56, 256, 56, 56, 3, 3, 1, 1, 1, 1, 1, 1, 1)
    for ranked in (ranked_forward(chip, large, 4, 1), ranked_gradient(chip, large, 4, 1)):
        held = [8 * b.rows * b.columns + 8 * b.length * (b.rows + b.columns) for b in ranked]
        assert held and max(held) <= chip.scratchpad_bytes


@pytest.mark.slow
def test_tuning_takes_what_the_model_says() -> None:
    from terrazzo.triton_gcu.driver import modelled_bench

    args = [arg.to("gcu") for arg in arguments((4, 16, 12, 12), (32, 16, 3, 3))]
    taken = []
    for mode in (None, "max-autotune-no-cudagraphs"):
        torch._dynamo.reset()
        compiled = torch.compile(convolve, mode=mode)
        torch.testing.assert_close(compiled(*args, padding=1), convolve(*args, padding=1),
                                   rtol=1e-4, atol=1e-4)
        taken.append(modelled_bench(lambda run=compiled: run(*args, padding=1)))
    assert taken[1] <= taken[0]


@pytest.mark.slow
def test_sizes_that_vary_are_left_to_operators() -> None:
    compiled = torch.compile(convolve, dynamic=True, fullgraph=True)
    for x, weight in (((2, 3, 9, 8), (4, 3, 3, 3)), ((3, 5, 12, 20), (6, 5, 3, 3))):
        args = arguments(x, weight)
        found = compiled(*(arg.to("gcu") for arg in args), padding=1)
        torch.testing.assert_close(found.cpu(), convolve(*args, padding=1), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_compiled_step_of_a_network_of_convolutions_is_three_times_as_fast() -> None:
    """By the model of time: forward, backward and Adam, with the same losses."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import gcu as benchmark

    steps = {way: benchmark.trained("convnet", way, 2) for way in ("eager", "inductor")}
    torch.testing.assert_close(steps["inductor"].losses, steps["eager"].losses, rtol=1e-5,
                               atol=1e-5)
    eager, compiled = (steps[way].microseconds for way in ("eager", "inductor"))
    assert compiled < eager / 3
    assert compiled < 165
