"""Terrazzo: write an operator once, run it fast on every chip.

All names but these load when the first of them is asked for (`public.py`). So who needs a part of
the package loads that part alone, as Triton does its backend.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

# `knobs` here, as the module of the same name would take its place.
from terrazzo.knobs import knobs as knobs
from terrazzo.version import __version__ as __version__

if TYPE_CHECKING:
    from terrazzo.public import *  # noqa: F403


_MODULES = ("errors", "gcu", "ort", "te")  # which are there to be used: tz.te, tz.errors.ShapeError


def _load() -> dict[str, Any]:
    """The public names, which are those of this module from now on; none while they load."""
    names: dict[str, Any] = vars(import_module("terrazzo.public")).get("NAMES", {})
    globals().update(names)
    return names


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted({*_load(), "knobs"})
    if not name.startswith("__"):
        if find_spec(f"terrazzo.{name}") is not None:  # no public name is also a module's
            return import_module(f"terrazzo.{name}")
        _load()
        if name in globals():  # also a module, which loading has brought along
            return globals()[name]
    raise AttributeError(f"module 'terrazzo' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names and modules, loaded or not, without what else this file is made of."""
    return sorted({*_load(), *_MODULES, "__doc__", "__version__", "knobs"})
