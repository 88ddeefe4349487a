"""Whether results are those of eager mode, or as near to float64 as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from in_pieces import said


def is_right(found: list[Any], eager: list[Any], exactly: Callable[[], list[Any] | None]) -> str:
    """Why results are wrong; nothing if they are right."""
    import torch

    exact = None

    if len(found) != len(eager):
        return f"{len(found)} tensors where eager has {len(eager)}"
    for i, (ours, theirs) in enumerate(zip(found, eager)):
        try:
            torch.testing.assert_close(ours, theirs, equal_nan=True)
        except AssertionError as error:
            exact = exactly() if exact is None else exact
            if (exact is None or len(exact) != len(found) or ours.shape != theirs.shape
                    or ours.dtype is not theirs.dtype
                    or not (ours.is_floating_point() or ours.is_complex())):
                return said(error)
            true = parts(exact[i]).double()
            if not distance(parts(ours), true) <= 2 * distance(parts(theirs), true) + 1e-12:
                return said(error)
    return ""


def is_close(ours: Any, theirs: Any) -> bool:
    """Whether two tensors agree within torch's own tolerance."""
    import torch

    try:
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    except AssertionError:
        return False
    return True


def parts(x: Any) -> Any:
    """Complex numbers as pairs of real ones."""
    import torch

    return torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x


def distance(found: Any, true: Any) -> float:
    """The largest error where the true result is a number; infinite where nans differ."""
    import torch

    found = found.detach().double()
    whole = torch.isfinite(true)
    if not torch.equal(torch.isnan(found), torch.isnan(true)):
        return float("inf")
    return float((found - true).abs()[whole].max()) if whole.any() else 0.0
