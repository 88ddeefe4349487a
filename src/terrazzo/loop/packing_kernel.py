"""The kernel that packs while code runs: for values that stay the same in all turns of a loop."""

from __future__ import annotations

import math

from terrazzo.base.scalar import Const, as_scalar, call, cast
from terrazzo.dtypes import DType
from terrazzo.index import Index, Var, minimum
from terrazzo.loop.ir import Buffer, For, Function, If, Stmt, Store, block
from terrazzo.loop.packing import Packing, Steps
from terrazzo.loop.pair_tile import pair_panel
from terrazzo.loop.panels import KAxis, Panel


def packing_function(name: str, packing: Packing, dtype: DType, size: int) -> Function:
    """The kernel that packs a flat value of `size` elements: what `Packing.apply` does."""
    source, packed = Buffer("x", dtype, size), Buffer("packed", packing.dtype, packing.size)
    panels = math.ceil(packing.columns[0] / packing.width)
    tasks = math.prod(n for n, _ in packing.batch) * panels
    task = _below("task", tasks)
    start: Index = packing.start
    member: Index = task // panels
    for n, stride in reversed(packing.batch):
        start, member = start + member % n * stride, member // n
    first = task % panels * packing.width
    start = start + first * packing.columns[1]
    room = math.prod(packing.shape[len(packing.batch) + 1:])
    live = minimum(packing.columns[0] - first, packing.width)
    if packing.together == 1:
        used: set[str] = set()
        rooms = [math.prod(packing.shape[len(packing.batch) + 2 + n:])
                 for n in range(len(packing.k))]
        body = Panel(packed, task * room, source, start, packing.width, live, packing.columns[1],
                     lambda name: _unused(name, used)).filled(
            [KAxis(n, step, room) for (n, step), room in zip(packing.k, rooms, strict=True)])
    else:
        body = _pack_panel(packing, source, packed, start, task * room, live, packing.k)
    return Function(name, (source, packed), (), For(task, 0, tasks, body, "parallel"),
                    "packing", bytes=size * dtype.itemsize + packing.size * packing.dtype.itemsize)


def _pack_panel(packing: Packing, source: Buffer, packed: Buffer, start: Index, to: Index,
                live: Index, axes: tuple[Steps, ...]) -> Stmt:
    """One panel of several steps together, or what is left of it for fixed places along k."""
    (count, stride), *inner = axes
    width, together, dtype = packing.width, packing.together, source.dtype
    if inner:
        p = _below(f"p{len(inner)}", count)
        room = math.prod(packing.shape[-len(inner) - 2:])
        return For(p, 0, count, _pack_panel(packing, source, packed, start + p * stride,
                                            to + p * room, live, tuple(inner)))
    if packing.dtype is dtype and dtype.bits == 16 and together == 2 and stride == 1:
        p = _below("p", math.ceil(count / 2))
        return block(pair_panel(packed, to, source, start, count, 2 * width, packing.columns[1],
                                width, live),
                     For(p, 0, math.ceil(count / 2), _zeros(packed, to + p * (2 * width), 1,
                                                            2 * live, 2 * width)))
    p = _below("p", math.ceil(count / together))
    if together == 2 and count % 2 == 0:
        j, at = _below("j", width), to + p * (2 * width)
        pair = [cast(source[start + (p * 2 + i) * stride + j * packing.columns[1]], packing.dtype)
                for i in range(2)]
        return For(p, 0, count // 2, block(
            For(j, 0, live, block(*(Store(packed, at + 2 * j + i, item)
                                    for i, item in enumerate(pair))), "vector"),
            _zeros(packed, at, 1, 2 * live, 2 * width)))
    rows = []
    for i in range(together):
        at = to + p * (width * together) + i
        j = _below("j", width)
        item = source[start + (p * together + i) * stride + j * packing.columns[1]]
        copy = block(
            For(j, 0, live, Store(packed, at + j * together, cast(item, packing.dtype)), "vector"),
            _zeros(packed, at, together, live, width))
        inside = call("lt", as_scalar(p * together + i), count)
        rows.append(copy if count % together == 0 else If(
            inside, copy, _zeros(packed, at, together, 0, width)))
    return For(p, 0, math.ceil(count / together), block(*rows))


def _zeros(packed: Buffer, at: Index, step: int, lo: Index, hi: int) -> Stmt:
    j = _below("j", hi)
    return For(j, lo, hi, Store(packed, at + j * step, Const(packed.dtype, 0)), "vector")


def _unused(name: str, used: set[str]) -> str:
    name = f"{name}{len(used)}"
    used.add(name)
    return name


def _below(name: str, extent: int) -> Var:
    return Var(name, 0, max(extent - 1, 0))
