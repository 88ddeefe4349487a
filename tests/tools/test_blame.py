"""A mistake in one step of the compiler is blamed on that step by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.base.scalar import loads
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.chips.cpu.llvm import vmath
from terrazzo.errors import VerifyError
from terrazzo.graph import passes
from terrazzo.graph.applying import apply, constant
from terrazzo.graph.fusion import composing, writing
from terrazzo.graph.ir import operator_named
from terrazzo.loop.ir import Store
from terrazzo.loop.ir import rewrite as rewrite_loops
from terrazzo.loop.packing import Packing


def blamed(function: Any, *args: Any, **options: Any) -> VerifyError:
    with pytest.raises(VerifyError) as caught:
        tz.verify(function, *args, **{"dtypes": ["float32"], "kinds": ("random",), **options})
    return caught.value


def arrays_of(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def test_wrong_composing_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = composing.inline

    def unsound(body: Any, producers: Any) -> Any:
        made = sound(body, producers)
        composed = any(load.source in producers for load in loads(body))
        return made * 2.0 if composed and made.dtype.is_float else made

    monkeypatch.setattr(composing, "inline", unsound)
    error = blamed(lambda x: tz.tanh(x) * 3)
    assert error.level == "expr" and (
        "composing of values into their readers" in (error.operator or ""))


def spoil_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of several stages come out wrong: none of them may be merged."""
    sound = writing._rebound

    def unsound(stages: Any, table: Any) -> Any:
        made = sound(stages, table)
        if len(stages) > 1:
            made[-1] = table[stages[-1]] = replace(made[-1], body=made[-1].body * 2.0)
        return made

    monkeypatch.setattr(writing, "_rebound", unsound)


def test_wrong_sharing_of_loops_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_programs(monkeypatch)
    error = blamed(lambda x: tz.exp(x) / tz.sum(tz.exp(x), axis=-1, keepdims=True))
    assert error.level == "expr" and "sharing of loops" in (error.operator or "")


def test_wrong_merging_of_siblings_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_programs(monkeypatch)
    monkeypatch.setattr(Cpu, "fusion_limits", replace(Cpu.fusion_limits, shared=64))
    error = blamed(lambda x: (tz.exp(x), x * 2), *arrays_of((16, 32)), kinds=("given",))
    assert error.level == "expr" and "merging of siblings" in (error.operator or "")


def test_a_wrong_schedule_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Cpu.schedule

    def unsound(self: Cpu, program: Any, revisits: Any = ()) -> Any:
        made, steps = sound(self, program, revisits)
        stages = tuple(replace(s, body=s.body * 2.0) if s.body.dtype.is_float else s
                       for s in made.stages)
        swap = dict(zip(made.stages, stages))
        return replace(made, stages=stages, outputs=tuple(
            swap[t] for t in made.outputs)), steps

    monkeypatch.setattr(Cpu, "schedule", unsound)
    error = blamed(lambda x: tz.tanh(x) * 3)
    assert error.level == "loop" and "the schedule" in (error.operator or "")


def times(x: Any, y: Any) -> Any:
    return tz.matmul(x, y)


def test_a_wrong_template_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Cpu.template

    def unsound(self: Cpu, program: Any, constants: Any) -> Any:
        made = sound(self, program, constants)
        if made is None:
            return None

        def spoil(stmt: Any) -> Any:
            return replace(stmt, value=stmt.value * 2.0) if isinstance(stmt, Store) and (
                stmt.value.dtype.is_float) else None

        return replace(made, body=rewrite_loops(made.body, spoil))

    monkeypatch.setattr(Cpu, "template", unsound)
    error = blamed(times, *arrays_of((8, 16), (16, 32)), kinds=("given",))
    assert error.level == "loop" and "the chip's template" in (error.operator or "")


def test_wrong_packing_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    (weight,) = arrays_of((16, 32))
    weight.flags.writeable = False  # a constant, which may be packed
    sound = Packing.apply

    def unsound(self: Packing, *arrays: np.ndarray) -> np.ndarray:
        made = sound(self, *arrays)
        made.reshape(-1)[:] = made.reshape(-1)[::-1].copy()
        return made

    monkeypatch.setattr(Packing, "apply", unsound)
    error = blamed(lambda x: tz.matmul(x, weight), *arrays_of((8, 16)), kinds=("given",))
    assert error.level == "loop" and "packing of constants" in (error.operator or "")


def test_wrong_vector_maths_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = vmath.FUNCTIONS["exp"]
    monkeypatch.setitem(vmath.FUNCTIONS, "exp", sound._replace(
        single=lambda b, x: b.fmul(sound.single(b, x), 1.01)))
    error = blamed(lambda x: tz.exp(x) + 1, *arrays_of((4, 8)), kinds=("given",))
    assert error.level == "code" and "the function 'exp' of float32" in (error.operator or "")


def test_a_wrong_layout_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = passes.layout

    def unsound(graph: Any, log: Any = None, level: str = "all") -> Any:
        made = sound(graph, log, level)
        return made if made is graph else type(graph)(made.name, made.inputs, tuple(
            apply(operator_named("multiply"), (v, constant(2.0, v.dtype)), {})
            for v in made.outputs))

    monkeypatch.setattr(passes, "layout", unsound)

    def images(x: Any, w: Any) -> Any:
        return tz.conv(tz.relu(tz.conv(x, w, padding=1)), w, padding=1)

    error = blamed(images, *arrays_of((1, 4, 6, 6), (4, 4, 3, 3)), kinds=("given",))
    assert error.level == "graph" and "choice of layouts" in (error.operator or "")
