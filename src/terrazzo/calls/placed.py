"""A function on a chip that is named, wherever its data is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from terrazzo.chips.registry import chip_named
from terrazzo.knobs import knobs


@dataclass(frozen=True)
class Placed:
    """A function that is compiled for a chip and runs there."""

    function: Any  # an operator, or a compiled function
    chip: str

    def __post_init__(self) -> None:
        chip_named(self.chip).demand()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        with knobs.override(chip=self.chip):
            return self.function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """`verify`, `bench`, `compile` and `lower` of the function, on the chip."""
        found = getattr(self.function, name)

        def there(*args: Any, **kwargs: Any) -> Any:
            with knobs.override(chip=self.chip):
                return found(*args, **kwargs)

        return there if callable(found) else found
