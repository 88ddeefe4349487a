"""Programs that wait for others, but not for ever: a limit, and who waits where.

Every turn of a waiting loop looks at the clock. After `knobs.wait_limit` seconds a program
reports its line and gives up, and so do all others that wait: their launch ends with an error
instead of never.
"""

from __future__ import annotations

from terrazzo.base.scalar import Const, Scalar, call
from terrazzo.dtypes import bool_, int64
from terrazzo.loop.ir import Atomic, Buffer, If, Pause, Stmt, Store, block
from terrazzo.triton_cpu.frontend import reports
from terrazzo.triton_cpu.frontend.lower import Lowering
from terrazzo.triton_cpu.frontend.reports import GIVEN_UP, LIMIT, Launch, Record, shorter, word
from terrazzo.triton_cpu.frontend.ttir import Op

WAITED = 0  # the only thing that a waiting loop reports


class Patience:
    """The clock of one waiting loop."""

    def __init__(self, lowering: Lowering, op: Op):
        self.report = reports.of(lowering)
        self.site = self.report.site("wait", lowering.module.where(op))
        self.start, self.now = (lowering.local(name, int64, 1) for name in ("start", "now"))
        self.others = lowering.local("others", int64, 1)
        self.over: Buffer = lowering.local("over", bool_, 1)

    def begin(self) -> Stmt:
        """Before the loop."""
        return block(Pause((self.start, 0)), Store(self.over, 0, Const(bool_, False)))

    def turn(self) -> Stmt:
        """In each turn: others run, and time passes."""
        area = self.report.area
        limit: Scalar = area[LIMIT]
        late = call("and", call("gt", limit, word(0)),
                    call("gt", call("sub", self.now[0], self.start[0]), limit))
        give_up = block(self.report.first(self.site, WAITED, 0, self.now[0]),
                        Store(self.over, 0, Const(bool_, True)),
                        Atomic("exchange", area, GIVEN_UP, word(1)))
        return block(
            Pause((self.now, 0)),
            Atomic("load", area, GIVEN_UP, word(0), None, (self.others, 0)),
            If(call("ne", self.others[0], word(0)), Store(self.over, 0, Const(bool_, True)),
               If(late, give_up)))


def waiting_text(launch: Launch, record: Record) -> str:
    """What is said about a program that waited too long."""
    return (f"{shorter(record.site['where'])}: program {launch.program(record.program)} of "
            f"`{launch.table['kernel']}` has waited here for longer than the limit")
