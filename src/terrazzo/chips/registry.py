"""Chips by name: those that come along, those that packages bring, those registered by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module

from terrazzo.chips.chip import Chip
from terrazzo.errors import ArgumentError, DeviceError
from terrazzo.knobs import Settings, knobs

DEFAULT = "cpu"
_GROUP = "terrazzo.chips"  # entry points: a name and "module:class"
_BUILT_IN = {"cpu": "terrazzo.chips.cpu.chip:Cpu", "cuda": "terrazzo.chips.cuda.chip:Cuda",
             "gcu": "terrazzo.chips.gcu.chip:described"}
_DESCRIBED = "terrazzo.chips.gcu.description"  # chips that are files of the user's
_registered: dict[str, Chip] = {}
_loaded: dict[str, Chip] = {}


def register(chip: Chip | type[Chip]) -> Chip:
    """Make a chip known by its name; one that was registered under it before is replaced."""
    made = chip() if isinstance(chip, type) else chip
    if made.name in _BUILT_IN:
        raise ArgumentError(f"the name {made.name!r} is taken", hint="give `spec` another kind")
    _registered[made.name] = made
    knobs.renew()  # what was compiled for another chip of that name
    return made


def _places() -> dict[str, str]:
    from importlib.metadata import entry_points  # 8 ms, and the CPU needs none of it

    found = {point.name: point.value for point in entry_points(group=_GROUP)}
    if knobs.chip_files or knobs.torch_device.endswith(".toml"):
        found |= dict.fromkeys(import_module(_DESCRIBED).files(), _BUILT_IN["gcu"])
    return {**found, **_BUILT_IN}


def chip_named(name: str) -> Chip:
    """The chip of a name."""
    known = _registered.get(name) or _loaded.get(name)
    if known is None:
        place = _BUILT_IN.get(name) or _places().get(name)
        if place is None:
            raise DeviceError(
                f"there is no chip {name!r}", hint=f"there are {', '.join(names())}; others come "
                "with a package that names them, or by terrazzo.chips.register")
        module, _, attribute = place.partition(":")
        made = getattr(import_module(module), attribute)
        known = _loaded[name] = made(name) if place == _BUILT_IN["gcu"] else made()
    return known


def load_default() -> None:
    """Import the default chip: where a program starts, rather than in its first call."""
    chip_named(DEFAULT)


def names() -> list[str]:
    """The names of all chips, the default one first."""
    found = {**_places(), **_registered}
    return sorted(found, key=lambda name: (name != DEFAULT, name))


def chip_for(settings: Settings) -> Chip:
    """The chip that code is compiled for under some settings."""
    return chip_named(settings.chip or DEFAULT).under(settings)


@contextmanager
def chip(name: str) -> Iterator[Chip]:
    """Compile and run on a chip for the length of a `with`, wherever the data is.

    >>> import terrazzo as tz
    >>> with tz.chip("cpu"):
    ...     print(tz.add(1.0, 2.0))
    3.0
    """
    found = chip_named(name)
    found.demand()
    with knobs.override(chip=name):
        yield found


class Chips(Mapping[str, Chip]):
    """The chips that are installed, by name; printed, a line each with what it can do."""

    def __getitem__(self, name: str) -> Chip:
        if name not in names():
            raise KeyError(name)
        return chip_named(name)

    def __iter__(self) -> Iterator[str]:
        return iter(names())

    def __len__(self) -> int:
        return len(names())

    def __repr__(self) -> str:
        return "\n".join(f"{name:8s} {self._line(name)}" for name in self)

    def _line(self, name: str) -> str:
        found = self[name].under(knobs.now)
        can = f"absent: {found.absence}" if found.absence else str(found.spec)
        return f"{can}; levels {', '.join(found.levels)}"
