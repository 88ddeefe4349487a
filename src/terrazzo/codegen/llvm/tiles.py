"""Templates for tile intrinsics: hand-shaped code where plain loops would leave speed behind.

A template gets the emitter, the tile and the scope, and answers whether it wrote code; when it
declines, the intrinsic's meaning is written as loops.
"""

from __future__ import annotations

from collections.abc import Callable

TEMPLATES: dict[str, Callable[..., bool]] = {}
