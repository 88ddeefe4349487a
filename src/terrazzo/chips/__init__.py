"""What a chip is: its description, the protocol that the compiler goes by, and a folder each."""

import sys
from types import ModuleType
from typing import Any

from terrazzo.chips.spec import ChipSpec, LaunchRules

__all__ = ["ChipSpec", "LaunchRules", "register"]


class _Chips(ModuleType):
    """`tz.chips()` lists the chips, and `terrazzo.chips` is this folder: both are one name."""

    def __call__(self) -> Any:
        from terrazzo.chips.registry import Chips

        return Chips()


sys.modules[__name__].__class__ = _Chips


def register(chip: Any) -> Any:
    """Make a chip known by its name."""
    from terrazzo.chips import registry

    return registry.register(chip)
