"""Special functions in float32 beside torch's own in float64, where there are any."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from terrazzo.torch import backend  # noqa: E402

pytestmark = pytest.mark.torch
special = torch.special
EDGES = [0.0, -0.0, 1.0, -1.0, 2.0, 8.0, -8.0, 1e-20, 1e-6, 60.0, float("inf"), float("nan")]

FUNCTIONS = {
    "i0": torch.i0, "i0e": special.i0e, "i1": special.i1, "i1e": special.i1e,
    "j0": special.bessel_j0, "j1": special.bessel_j1, "y0": special.bessel_y0,
    "y1": special.bessel_y1, "k0": special.modified_bessel_k0, "k1": special.modified_bessel_k1,
    "scaled_k0": special.scaled_modified_bessel_k0, "scaled_k1": special.scaled_modified_bessel_k1,
    "spherical_j0": special.spherical_bessel_j0, "erfcx": special.erfcx,
    "log_ndtr": special.log_ndtr, "ndtri": special.ndtri,
    "polygamma": lambda x: torch.polygamma(2, x), "zeta": lambda x: special.zeta(x, 1.5),
    "hurwitz": lambda x: special.zeta(torch.full_like(x, 3.0), x),
}  # fmt: skip


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend.terrazzo, options={"fallback": "error"})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function(name: str) -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.randn(200) * 4, torch.rand(100), torch.rand(100) * 40,
                   torch.tensor(EDGES)])
    if name in ("polygamma", "hurwitz"):
        x = x[x != 0]  # at the pole zeta says inf, and the sign of nothing
    found = compiled(FUNCTIONS[name])(x).double()
    true = FUNCTIONS[name](x.double())
    true = true.where(true.abs() < 3.4e38, true * float("inf"))  # float32 ends there
    torch.testing.assert_close(found, true, rtol=5e-6, atol=5e-7, equal_nan=True)


def test_airy() -> None:
    """Beside mpmath: torch's own is 2e-6 off around -2.1 in float64."""
    mpmath = pytest.importorskip("mpmath")
    x = torch.cat([torch.linspace(-30, 30, 600), torch.tensor([-8.0, 2.0, 0.0, -0.0, 110.0])])
    true = torch.tensor([float(mpmath.airyai(float(v))) for v in x], dtype=torch.float64)
    found = compiled(special.airy_ai)(x).double()
    torch.testing.assert_close(found, true, rtol=5e-6, atol=1e-7)
    edges = torch.tensor([float("inf"), -float("inf"), float("nan")])
    assert bool(compiled(special.airy_ai)(edges).isnan().all())


POLYNOMIALS = [f"{shift}chebyshev_polynomial_{k}" for shift in ("", "shifted_") for k in "tuvw"] + [
    "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l",
    "legendre_polynomial_p"]


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_a_polynomial(name: str) -> None:
    """Degrees are data: each element has its own."""
    torch.manual_seed(0)
    x = torch.cat([torch.rand(60) * 3 - 1.5, torch.tensor([1.0, -1.0, 0.0, 0.5])])
    n = torch.arange(-2, 62).remainder(13).float() - 1
    function = getattr(special, name)
    found = compiled(function)(x, n).double()
    torch.testing.assert_close(found, function(x.double(), n.double()), rtol=5e-6, atol=1e-5)


def test_neighbours() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-45, 3.4028235e38, float("inf"), float("nan"), 2.0])
    y = torch.tensor([1.0, -1.0, 2.0, 0.0, -1.0, float("inf"), 0.0, 1.0, float("nan")])
    torch.testing.assert_close(compiled(torch.nextafter)(x, y), torch.nextafter(x, y), rtol=0,
                               atol=0, equal_nan=True)


def test_mantissa_and_exponent() -> None:
    x = torch.tensor([0.0, 1.0, -3.0, 0.75, 1e-40, -1e-45, 3e38, float("inf"), float("nan")])
    for found, true in zip(compiled(torch.frexp)(x), torch.frexp(x)):
        torch.testing.assert_close(found, true, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("function", [torch.igamma, torch.igammac])
def test_incomplete_gamma(function: Any) -> None:
    torch.manual_seed(0)
    a = torch.cat([torch.rand(200) * 10, torch.rand(50) * 200, torch.rand(9), torch.tensor(EDGES)])
    x = torch.cat([torch.rand(200) * 12, torch.rand(50) * 200, torch.tensor(
        [0.0, float("inf"), float("nan"), -1.0, 1e-6, 1e3, 0.5, 2.0, 9.0]), torch.rand(12) * 3])
    found = compiled(function)(a, x).double()
    torch.testing.assert_close(found, function(a.double(), x.double()), rtol=5e-6, atol=5e-7,
                               equal_nan=True)
