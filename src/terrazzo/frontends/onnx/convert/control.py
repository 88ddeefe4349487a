"""Control flow: decided while importing where that is possible, else compiled as it stands.

What changes its type from turn to turn, or stacks results of a number of turns that only the data
tells, is put off with the reason, and the host runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from terrazzo.errors import TerrazzoError
from terrazzo.frontends.onnx.importer import literal
from terrazzo.frontends.onnx.reasons import NeedsValue
from terrazzo.frontends.onnx.registry import Call, converts
from terrazzo.graph.ir import Value
from terrazzo.graph.patterns import constant_array
from terrazzo.ops.arrange import flip
from terrazzo.ops.control import cond, scan, while_loop
from terrazzo.ops.elementwise import logical_and
from terrazzo.ops.shape import moveaxis, reshape


@converts("If")
def if_(call: Call) -> Sequence[Value]:
    """The branch that is taken, if that is known; else both, of which one runs."""
    then, orelse = (call.attr(name) for name in ("then_branch", "else_branch"))
    if call.known(0) is not None:
        return call.importer.inline(then if call.number(0) else orelse)
    try:
        result: Sequence[Value] = cond(_scalar(call.value(0)),
                                       lambda: tuple(call.importer.inline(then)),
                                       lambda: tuple(call.importer.inline(orelse)))
        return result
    except (NeedsValue, TerrazzoError) as error:
        raise NeedsValue(call.node.input[0]) from error


def _scalar(value: Value) -> Value:
    return reshape(value, shape=()) if value.shape else value


@converts("Loop")
def loop(call: Call) -> Sequence[Value]:
    """A scan where the number of turns is known beforehand, else a loop with a condition."""
    carried = [call.value(i) for i in range(2, len(call))]
    counted = _counted(call, carried)
    if counted is not None:
        return counted
    if len(call.attr("body").output) > 1 + len(carried):
        call.unsupported("stacks results of a number of turns that is not known beforehand")
    trips = _scalar(call.value(0)) if call.has(0) else None
    start = _scalar(call.value(1)) if call.has(1) else literal(np.array(True))

    def goes_on(state: Any) -> Value:
        number, flag, *_ = state
        return flag if trips is None else logical_and(flag, number < trips)

    def turn(state: Any) -> Any:
        flag, *values = _turn(call, state)
        return (state[0] + 1, _scalar(flag), *values)

    found: Sequence[Value] = while_loop(goes_on, turn, (_zero(), start, *carried))
    return found[2:]


class _Undecided(Exception):
    """A body may stop before its last turn."""


def _counted(call: Call, carried: Sequence[Value]) -> Sequence[Value] | None:
    """A loop that runs for a number of turns that is known beforehand; None for others."""
    going = call.known(1) if call.has(1) else np.array(True)
    if not call.has(0) or call.known(0) is None or going is None or not going.reshape(-1)[0]:
        return None
    (trips,) = call.sizes(0)
    always = literal(np.array(True))

    def turn(state: Any, _: None) -> Any:
        number, *values = state
        flag, *results = _turn(call, [number, always, *values])
        stops = constant_array(flag)
        if stops is None or not stops.reshape(-1)[0]:
            raise _Undecided
        return (number + 1, *results[:len(carried)]), tuple(results[len(carried):])

    try:
        (_, *last), stacked = scan(turn, (_zero(), *carried), None, length=trips)
    except _Undecided:
        return None
    return [*last, *stacked]


def _zero() -> Value:
    return literal(np.array(0, np.int64))


def _turn(call: Call, values: Sequence[Value]) -> list[Value]:
    """One turn of a body."""
    body = call.attr("body")
    return call.importer.inline(body, dict(zip((i.name for i in body.input), values, strict=True)))


@converts("Scan", since=9)
def scan_(call: Call) -> Sequence[Value]:
    """A scan over first axes, in one direction."""
    scanned = call.attr("num_scan_inputs")
    states = len(call) - scanned
    outputs = len(call.attr("body").output) - states

    def listed(name: str, count: int) -> list[int]:
        return list(call.attr(name) or [0] * count)

    rows = [_turned(moveaxis(call.value(states + i), source=axis, destination=0), back)
            for i, (axis, back) in enumerate(zip(listed("scan_input_axes", scanned),
                                                 listed("scan_input_directions", scanned),
                                                 strict=True))]

    def turn(state: Any, row: Any) -> Any:
        results = _turn(call, [*state, *row])
        return tuple(results[:states]), tuple(results[states:])

    last, stacked = scan(turn, tuple(call.value(i) for i in range(states)), tuple(rows))
    return [*last, *(moveaxis(_turned(y, back), source=0, destination=axis)
                     for y, axis, back in zip(stacked, listed("scan_output_axes", outputs),
                                              listed("scan_output_directions", outputs),
                                              strict=True))]


def _turned(value: Value, back: int) -> Value:
    return flip(value, axis=0) if back else value
