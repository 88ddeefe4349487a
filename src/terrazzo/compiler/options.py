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
    def now(level: str = "", chip: str = "") -> Options:
        """What is in force in this thread, with a level of rewrites or a chip of one's own."""
        now = knobs.now
        return Options(replace(now, opt_level=level or now.opt_level, chip=chip or now.chip)
                       if level or chip else now)

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
