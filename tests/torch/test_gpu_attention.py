"""Attention in the forms that torch has for GPUs, compiled here: their graphs need no GPU."""

from __future__ import annotations

from typing import Any

import pytest

import terrazzo as tz
from terrazzo.knobs import knobs

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

aten = torch.ops.aten
plain = torch.nn.functional.scaled_dot_product_attention
FORMS = {
    "flash": lambda q, k, v, _: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0],
    "efficient": lambda q, k, v, bias: aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, bias is None, scale=0.3)[0],
    "cudnn": lambda q, k, v, bias: aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True)[0],
    "one tensor": lambda q, k, v, _: plain(q, q, q),
}


def check(form: str, bias: bool = False) -> None:
    torch._dynamo.reset()
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 2, 40, 16), (2, 2, 50, 16), (2, 2, 50, 16)] + [(2, 1, 40, 50)] * bias
    given = [torch.randn(s, generator=draw).requires_grad_() for s in shapes]
    weights = torch.randn(shapes[0], generator=draw)

    def want(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        if form == "one tensor":
            return plain(q, q, q)
        scale = 0.3 if form == "efficient" else None
        return plain(q * 2, k, v, mask, is_causal=mask is None, scale=scale) * 3

    def mine(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        if form == "one tensor":
            return FORMS[form](q, q, q, None)
        return FORMS[form](q * 2, k, v, mask) * 3

    leaves = given[:1] if form == "one tensor" else given
    y = torch.compile(mine, backend="terrazzo")(*given)
    torch.testing.assert_close(y, want(*given), rtol=1e-4, atol=1e-5)
    for got, true in zip(torch.autograd.grad(y, leaves, weights),
                         torch.autograd.grad(want(*given), leaves, weights), strict=True):
        torch.testing.assert_close(got, true, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form: str) -> None:
    check(form)


def test_the_gradient_of_a_bias() -> None:
    check("efficient", bias=True)


@pytest.mark.triton
@pytest.mark.parametrize("form", ["flash", "efficient", "cudnn"])
def test_kernels_of_the_gpu(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from terrazzo.chips.cuda.simulate import Simulator

    names: list[str] = []
    launch = Simulator.launch

    def noting(self: Any, kernel: int, *args: Any) -> None:
        names.append(self.kernels[kernel]["name"])
        launch(self, kernel, *args)

    monkeypatch.setattr(Simulator, "launch", noting)
    with knobs.override(cuda_simulate=True), tz.chip("cuda"):
        check(form)
    assert [name for name in names if "attention" in name] == [
        "k_attention_with_logsumexp", "k_attention_gradients_q", "k_attention_gradients_kv"]
