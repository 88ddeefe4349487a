"""Convolutions in programs: what moves along which axis, where the padding is, what comes after.

A convolution's stage has the body `epilogue(sum over taps and channels of x * w)`, where x is read
at `position * stride + tap * dilation - before` of every axis in space, and is zero outside. Views
are composed into the loads: which axis is which the operator says (`Contraction`), and how they lie
in memory is found in the indices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from terrazzo.base.scalar import (
    Axis,
    Call,
    Const,
    FromIndex,
    Load,
    Reduce,
    Scalar,
    loads,
    substitute_indices,
    walk,
)
from terrazzo.base.shapes import contiguous_strides
from terrazzo.expr.contraction import ContractionStage, match_contraction
from terrazzo.expr.ir import Program, Tensor
from terrazzo.index import Index, IndexExpr, Var, coefficient, free_vars, substitute


@dataclass(frozen=True, eq=False)
class Space:
    """One axis in space: element `position*stride + tap*dilation - before` is under a tap."""

    position: Axis | None  # None for an axis that is not there
    tap: Axis | None  # None for a window of 1
    extent: Index
    taps: int
    stride: int
    dilation: int
    before: Index
    below: bool  # whether the element's number may be negative
    size: Index | None  # what it may reach or exceed, if it may
    step: Index  # how far neighbours are apart in memory
    w_step: Index  # the same for weights of neighbouring taps

    @property
    def is_plain(self) -> bool:
        """Whether every element is read once, in order."""
        return self.taps == 1 and self.stride == 1 and not self.below and self.size is None


NO_SPACE = Space(None, None, 1, 1, 1, 1, 0, False, None, 0, 0)


@dataclass(frozen=True, eq=False)
class Convolution:
    """`stage[batch, positions, outputs] = body`, where `reduce` in the body sums `x * w`."""

    stage: Tensor
    out_address: Index
    batch: Axis | None
    spaces: tuple[Space, ...]
    outputs: Axis
    channel: Axis | None  # None when a group has one channel
    groups: int
    x: Load
    w: Load
    x_start: Index  # the address of x where all variables are 0
    x_batch: Index
    x_channel: Index
    x_group: Index
    w_start: Index
    w_channel: Index
    w_output: Index
    reduce: Reduce
    body: Scalar

    @property
    def channels(self) -> int:
        """Channels of a group."""
        return 1 if self.channel is None else int(self.channel.extent)  # type: ignore[arg-type]

    @property
    def share(self) -> Index:
        """Outputs of a group."""
        return self.outputs.extent if self.groups == 1 else self.outputs.extent // self.groups

    def merged(self) -> Convolution:
        """Plain neighbouring axes as one, where all that is read lies in one row then."""
        result = self
        for d in range(len(self.spaces) - 2, -1, -1):
            result = result._merge(d) or result
        return result

    def _merge(self, d: int) -> Convolution | None:
        outer, inner = self.spaces[d:d + 2]
        if not (outer.is_plain and inner.is_plain) or outer.position is None or (
                inner.position is None or outer.step != inner.step * inner.extent):
            return None
        extent = outer.extent * inner.extent
        top = max(extent - 1, 0) if isinstance(extent, int) else None
        var = Var(f"{outer.position.var.name}.{inner.position.var.name}", 0, top)
        values = {outer.position.var: var // inner.extent, inner.position.var: var % inner.extent}
        body, address = substitute_indices(self.body, values), substitute(self.out_address, values)
        (total,) = (n for n in walk(body) if isinstance(n, Reduce))
        after = loads_outside(body, total)
        if coefficient(address, var) is None or any(
                isinstance(i, Scalar) for n in after for i in n.indices) or any(
                coefficient(n.source.flat(n.indices), var) is None for n in after):
            return None
        both = replace(inner, position=Axis(var, 0, extent), extent=extent)
        return replace(self, spaces=(*self.spaces[:d], both, *self.spaces[d + 2:]), body=body,
                       reduce=total, out_address=address)


def loads_outside(body: Scalar, total: Reduce) -> list[Load]:
    """The loads of a body that are not part of the sum in it."""
    inside = {id(n) for n in walk(total)}
    return [n for n in loads(body) if id(n) not in inside]


def match_convolution(program: Program) -> Convolution | None:
    """The convolution that a program is, or None."""
    found = match_contraction(program)
    if found is None or not found.positions:
        return None
    x, tests = _guarded(found.x.value)
    w, none = _guarded(found.w.value)
    if x is None or w is None or none != [] or tests is None:
        return None
    return _match(found, x, w, tests)


def _match(found: ContractionStage, x: Load, w: Load, tests: list[Call]) -> Convolution | None:
    (batch,) = found.batch
    stage, reduce, outputs, channel = found.stage, found.reduce, found.outputs, found.channel
    zeros: dict[Var, Index] = {a.var: 0 for a in (*reduce.axes, *stage.axes)}
    used: set[Var] = set()
    along = {a.var: d for axes in (found.positions, found.taps)
             for d, a in enumerate(axes) if a is not None}
    spaces: dict[int, Space] = {}
    batch_step: Index = 0
    channels = _Channels(1, 0, 0)
    strides = x.source.strides or contiguous_strides(x.source.shape)
    for index, step in zip(x.indices, strides, strict=True):
        assert not isinstance(index, Scalar)
        here = free_vars(index) & zeros.keys()
        if used & here:
            return None
        used |= here
        space = {along[v] for v in here if v in along}
        if space:
            d = space.pop()
            made = _space(index, here, found.positions[d], found.taps[d], step, w, tests)
            if made is None:
                return None
            spaces[d] = made
        elif batch.var in here:
            each = coefficient(index, batch.var)
            if here != {batch.var} or each is None:
                return None
            batch_step = each * step
        elif here:
            read = _channels(index, here, found, step)
            if read is None:
                return None
            channels = read
    for d, axis in enumerate(found.positions):
        if d not in spaces and axis.extent == 1:
            spaces[d] = replace(NO_SPACE, position=axis)
    if len(spaces) < len(found.positions) or not {a.var for a in reduce.axes} <= used:
        return None
    if any(not any(_is_about(t, s) for s in spaces.values()) for t in tests):
        return None
    w_address = w.source.flat(w.indices)
    x_address = x.source.flat(x.indices)
    assert not isinstance(w_address, Scalar) and not isinstance(x_address, Scalar)
    w_output = coefficient(w_address, outputs.var)
    w_channel = 0 if channel is None else coefficient(w_address, channel.var)
    if w_output is None or w_channel is None or free_vars(w_address) & {
            a.var for a in found.places}:
        return None
    if channel is not None and not isinstance(channel.extent, int):
        return None
    address = stage.flat([a.var for a in stage.axes])
    assert not isinstance(address, Scalar)
    return Convolution(
        stage, address, batch, tuple(spaces[d] for d in range(len(found.positions))), outputs,
        channel, channels.groups, x, w, substitute(x_address, zeros), batch_step, channels.step,
        channels.group_step, substitute(w_address, zeros), w_channel, w_output, reduce,
        found.body)


def _space(index: Index, here: set[Var], position: Axis, tap: Axis | None, step: Index, w: Load,
           tests: Iterable[Call]) -> Space | None:
    expected = here & {position.var} | (set() if tap is None else {tap.var})
    stride = coefficient(index, position.var) or 1
    dilation = 1 if tap is None else coefficient(index, tap.var)
    taps = 1 if tap is None else tap.extent
    address = w.source.flat(w.indices)
    assert not isinstance(address, Scalar)
    w_step = 0 if tap is None else coefficient(address, tap.var)
    if here != expected or not isinstance(stride, int) or not isinstance(
            dilation, int) or not isinstance(taps, int) or w_step is None or stride < 1:
        return None
    before: Index = 0
    below, size = False, None
    for test in tests:
        tested = _index_of(test)
        if tested is None or not free_vars(tested) & here:
            continue
        if free_vars(tested - index) & here:
            return None
        before = -substitute(tested, dict.fromkeys(here, 0))
        if test.op == "ge":
            below = True
        else:
            limit = test.args[1]
            size = int(limit.value) if isinstance(limit, Const) else (
                limit.index if isinstance(limit, FromIndex) else None)
            if size is None:
                return None
    return Space(position, tap, position.extent, taps, stride, dilation, before, below, size, step,
                 w_step)


@dataclass(frozen=True)
class _Channels:
    """How channels are read: groups of them, and how far apart channels and groups are."""

    groups: int
    step: Index
    group_step: Index


def _channels(index: Index, here: set[Var], found: ContractionStage, step: Index
              ) -> _Channels | None:
    channel, outputs = found.channel, found.outputs
    if here - {outputs.var} - ({channel.var} if channel is not None else set()):
        return None
    along = 0 if channel is None else coefficient(index, channel.var)
    if along is None:
        return None
    if outputs.var not in here:
        return _Channels(1, along * step, 0)  # all groups read the same
    rest = index if channel is None else substitute(index, {channel.var: 0})
    count = outputs.extent
    if not isinstance(count, int) or not _is_shared(rest, outputs.var, found.groups, count):
        return None
    apart = _between_groups(rest, outputs.var, count // found.groups)
    return None if apart is None else _Channels(found.groups, along * step, apart * step)


def _between_groups(rest: Index, output: Var, share: int) -> Index | None:
    group = Var("group", 0)
    return coefficient(substitute(rest, {output: group * share}), group)


def _is_shared(rest: Index, output: Var, groups: int, count: int) -> bool:
    """Whether all outputs of a group read the same channels, and groups follow evenly."""
    share = count // groups
    group, at = Var("group", 0, groups - 1), Var("at", 0, share - 1)
    value = substitute(rest, {output: group * share + (at if share > 1 else 0)})
    return at not in free_vars(value) and coefficient(value, group) is not None


def _guarded(value: Scalar) -> tuple[Load | None, list[Call] | None]:
    """A load without its casts, and the tests that guard it, or None where it is not that."""
    tests: list[Call] | None = []
    while isinstance(value, Call) and value.op in ("cast", "where"):
        if value.op == "cast":
            value = value.args[0]
            continue
        zero = value.args[2]
        while isinstance(zero, Call) and zero.op == "cast":
            zero = zero.args[0]
        if tests or not isinstance(zero, Const) or zero.value != 0:
            return None, None
        tests = _conjuncts(value.args[0])
        value = value.args[1]
    if not isinstance(value, Load) or any(isinstance(i, Scalar) for i in value.indices):
        return None, None
    return value, tests


def _conjuncts(condition: Scalar) -> list[Call] | None:
    if isinstance(condition, Call) and condition.op == "and":
        parts = [_conjuncts(a) for a in condition.args]
        return None if any(p is None for p in parts) else [t for p in parts for t in p or ()]
    if not isinstance(condition, Call) or _index_of(condition) is None:
        return None
    if condition.op == "ge" and not (isinstance(condition.args[1], Const)
                                     and condition.args[1].value == 0):
        return None
    return [condition]


def _is_about(test: Call, space: Space) -> bool:
    index = _index_of(test)
    own = {a.var for a in (space.position, space.tap) if a is not None}
    return index is not None and bool(free_vars(index) & own)


def _index_of(test: Call) -> IndexExpr | None:
    """The index that a test is about."""
    if test.op not in ("ge", "lt") or not isinstance(test.args[0], FromIndex):
        return None
    index = test.args[0].index
    return index if isinstance(index, IndexExpr) else None
