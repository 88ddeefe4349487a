"""What a chip is: a frozen description that every level reads, and one file per kind of chip."""

from terrazzo.chips.spec import ChipSpec, LaunchRules

__all__ = ["ChipSpec", "LaunchRules"]
