"""ATen operators in terms of ours: one converter each (`registry.py` says how to add one)."""

from importlib import import_module

from terrazzo.torch.aten.registry import CONVERTERS

_FAMILIES = ("attention", "complexes", "convolutions", "creation", "distances", "histograms",
             "indexing", "norms", "ordering", "pointwise", "pools", "products", "reductions",
             "resizing", "scatters", "segments", "shapes", "special")

for _family in _FAMILIES:
    import_module(f"terrazzo.torch.aten.{_family}")

OURS = frozenset(CONVERTERS)  # those of this package; a user may add others
