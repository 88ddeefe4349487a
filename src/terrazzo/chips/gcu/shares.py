"""Tasks of a kernel in one stretch a unit, so that what they read and write is moved in one.

Our schedules make a task of a row or a few, for a processor that finds rows in its cache. A unit
brings what it needs by transfers, each of which takes its time to begin: rows of neighbours that
are one task are one transfer.
"""

from __future__ import annotations

import math
from dataclasses import replace

from terrazzo.index import Var, minimum
from terrazzo.loop.ir import For, Function, Stmt, rewrite, walk


def shared_out(function: Function, units: int) -> Function:
    """The function with outermost parallel loops of at most one task for each unit."""
    names = {s.var.name for s in walk(function.body) if isinstance(s, For)}
    names |= {d.name for d in function.dims}

    def visit(stmt: Stmt) -> Stmt | None:
        if not isinstance(stmt, For) or stmt.kind != "parallel":
            return None
        count = stmt.hi - stmt.lo
        if not isinstance(count, int) or count <= units:
            return None
        share = math.ceil(count / units)
        tasks = math.ceil(count / share)
        number = 0
        while f"share{number}" in names:
            number += 1
        unit = Var(f"share{number}", 0, tasks - 1)
        names.add(unit.name)
        first = stmt.lo + unit * share
        inner = replace(stmt, lo=first, hi=minimum(stmt.hi, first + share), kind="serial", grain=1)
        return For(unit, 0, tasks, inner, "parallel")

    return replace(function, body=rewrite(function.body, visit))
