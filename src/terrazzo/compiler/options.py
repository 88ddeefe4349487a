"""What a compilation goes by beside graph and chip."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from terrazzo.chips.chip import Chip
from terrazzo.chips.registry import chip_for
from terrazzo.graph.passes import Guide
from terrazzo.graph.rewrite import RuleTable, user_rules
from terrazzo.knobs import Settings, knobs


@dataclass(frozen=True, eq=False)
class Options:
    """All that a compilation goes by beside graph and chip, fixed when it begins.

    Settings and users' rules may change at any time, in other threads too; nothing below asks for
    them again.
    """

    settings: Settings
    rules: RuleTable = field(default_factory=user_rules)

    @staticmethod
    def now(level: str = "") -> Options:
        """What is in force in this thread, with a level of rewrites of one's own if given."""
        settings = knobs.now
        return Options(replace(settings, opt_level=level) if level else settings)

    @property
    def level(self) -> str:
        """Which rewrites run."""
        return self.settings.opt_level

    @property
    def guide(self) -> Guide:
        """What rewrites go by."""
        keeps = self.chip.keeps
        return Guide(self.level, self.rules, lambda node: keeps(node.op.name, node.inputs))

    @cached_property
    def chip(self) -> Chip:
        """The chip that code is made for."""
        return chip_for(self.settings)
