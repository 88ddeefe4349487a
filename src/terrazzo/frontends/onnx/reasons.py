"""Why a node is put off: what an import says of it, and what the placing of nodes goes by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class ContentsUnknown:
    """Its converter has to know what a tensor holds."""

    name: str

    def __str__(self) -> str:
        return f"needs the value of {self.name!r}"


@dataclass(frozen=True)
class InputMissing:
    """A tensor that it reads is not there yet: what makes it was put off."""

    name: str

    def __str__(self) -> str:
        return f"waits for {self.name!r}"


@dataclass(frozen=True)
class NotConverted:
    """There is no code for it, or not for these inputs and attributes."""

    text: str

    def __str__(self) -> str:
        return self.text


Reason: TypeAlias = ContentsUnknown | InputMissing | NotConverted


class NeedsValue(Exception):
    """A converter has to know what a tensor holds, and that is not known before running."""

    def __init__(self, name: str):
        self.reason = ContentsUnknown(name)
        super().__init__(str(self.reason))
