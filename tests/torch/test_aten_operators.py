"""PyTorch's own samples of its operators give what eager mode gives, in our code alone.

A sample of each of these; `benchmarks/torch_operators.py` runs all samples of all operators.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")  # which torch.testing imports
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import torch_operators  # noqa: E402

pytestmark = pytest.mark.torch

NAMES = """
abs add addbmm addmm.decomposed addr aminmax angle argsort as_strided as_strided_scatter atan2
baddbmm bucketize cartesian_prod cat cdist clamp copysign cross cummax cumprod
cumsum diag_embed diagonal_scatter diff dist div.floor_rounding einsum expand_as fft.hfft2
fft.irfft fft.rfftn flip fmax frexp gather gradient grid_sampler_2d heaviside histc
hypot index_add index_copy index_put index_reduce.mean index_select isin kron kthvalue
ldexp lerp linalg.cross linalg.vector_norm linspace logaddexp logcumsumexp logit logsumexp
masked.mean masked.softmax masked.var masked_fill masked_scatter matmul median mode msort mul
mvlgamma.mvlgamma_p_3 nan_to_num native_batch_norm native_layer_norm nextafter
nn.functional.adaptive_avg_pool2d nn.functional.adaptive_max_pool2d nn.functional.avg_pool2d
nn.functional.batch_norm nn.functional.bilinear nn.functional.celu nn.functional.conv2d
nn.functional.conv_transpose2d nn.functional.cosine_similarity nn.functional.cross_entropy
nn.functional.embedding nn.functional.gelu nn.functional.glu nn.functional.grid_sample
nn.functional.group_norm nn.functional.huber_loss nn.functional.interpolate.bicubic
nn.functional.interpolate.nearest-exact nn.functional.interpolate.trilinear
nn.functional.kl_div nn.functional.layer_norm nn.functional.linear nn.functional.max_pool1d
nn.functional.max_pool3d nn.functional.max_unpool2d nn.functional.nll_loss
nn.functional.pad.circular nn.functional.pad.reflect nn.functional.pad.replicate
nn.functional.pdist nn.functional.pixel_shuffle nn.functional.prelu
nn.functional.softplus nn.functional.triplet_margin_loss nn.functional.unfold
nn.functional.upsample_bilinear norm.inf outer polygamma.polygamma_n_2 pow prod put
renorm reshape roll rot90 round.decimals_3 scatter_add scatter_reduce.amax
scatter_reduce.mean searchsorted select_scatter slice_scatter sort special.bessel_y0
special.chebyshev_polynomial_u special.erfcx special.i1e special.log_ndtr special.ndtri
special.scaled_modified_bessel_k1 special.zeta std_mean take tensordot topk
trapezoid tril unfold_copy var_mean where xlogy
"""


@pytest.fixture(scope="module")
def known() -> Iterator[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield torch_operators.operators(torch.float32)


@pytest.mark.parametrize("name", NAMES.split())
def test_a_sample(known: dict[str, Any], name: str) -> None:
    middle = len(torch_operators.samples_of(known[name], torch.float32)) // 2
    row = torch_operators.measure(name, known[name], torch.float32, 0, slice(middle, middle + 1))
    assert row["samples"] == 1
    assert not row["wrong"] and not row["torch"] and not row["uncaptured"], row


def test_an_operator_of_torchs_is_told(known: dict[str, Any]) -> None:
    """What the check above takes for granted: calls of torch are seen, and so are wrong results."""
    row = torch_operators.measure("bernoulli", known["bernoulli"], torch.float32, 1)
    assert row["torch"] and torch_operators.status(row) == "in torch"
    eager = [torch.ones(3)]
    assert torch_operators.is_right([torch.ones(3) + 1e-3], eager, lambda: None)
    assert not torch_operators.is_right([torch.ones(3)], eager, lambda: None)
