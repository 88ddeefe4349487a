"""The disk cache answers for the program that asks, and for no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
import terrazzo.errors
from terrazzo.compiler.driver import compile_graph
from terrazzo.compiler.keys import graph_key
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.options import Options
from terrazzo.graph.applying import apply
from terrazzo.graph.ir import Graph, TensorType
from terrazzo.graph.patterns import P, Wild
from terrazzo.graph.rewrite import Rule, RuleTable, rewrite_rule
from terrazzo.graph.trace import trace
from terrazzo.index import Var
from terrazzo.knobs import knobs
from terrazzo.ops.define import primitive, same_type
from terrazzo.runtime.content import Unknowable, graph_text, is_ours

X = np.ones(4, np.float32)

PROGRAM = """
import json
import numpy as np
import terrazzo as tz
from onnx import TensorProto, helper
from terrazzo.expr.ir import compute
from terrazzo.frontends.onnx.registry import Converter, _CONVERTERS, converts, converts_each
from terrazzo.graph.patterns import P, Wild
from terrazzo.graph.rewrite import rewrite_rule
from terrazzo.ops.define import primitive, same_type
from terrazzo.session import Session
x = np.ones(4, np.float32)

def model(operator, domain="my.ops"):
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (4,)) for n in "xy"]
    node = helper.make_node(operator, ["x"], ["y"], domain=domain)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my.ops", 1)]
    session = Session(helper.make_model(helper.make_graph([node], "g", ends[:1], ends[1:]),
                                        opset_imports=opsets, ir_version=8))
    assert session.whole is not None
    return session.run({"x": x})[0]

answers = {}
FACTOR = {factor}
"""
USERS = """
def helper_function(x):
    return x * FACTOR

@tz.op(domain="my.ops")
def scaled(x):
    return helper_function(x)

answers["operator"] = scaled(x)
answers["operator in a model"] = model("scaled")

@converts("Odd", domain="my.ops")
def odd(call):
    return call.value(0) * FACTOR

answers["converter"] = model("Odd")
converts_each({"Even": lambda x: x * FACTOR}, "my.ops")
answers["table of converters"] = model("Even")

@primitive(family="elementwise", infer=same_type, reference=lambda x, out: x * FACTOR)
def primitively_scaled(x, *, out):
    return compute(out.shape, lambda *i: x[i] * float(FACTOR))

answers["primitive"] = primitively_scaled(x)
_CONVERTERS["", "Tanh"] = [Converter(lambda call: call.value(0) * FACTOR)]
answers["replaced converter"] = model("Tanh", "")
"""
RULE = """
if FACTOR:
    @rewrite_rule(P.tanh(Wild("x")))
    def wrong(x):
        return x * FACTOR

answers["function"] = tz.jit(lambda x: tz.tanh(x) + 1)(x) - 1
answers["model"] = model("Tanh", "")
"""


def answers_of(program: str, factor: float, folder: Path) -> dict[str, float]:
    """What a process of its own computes."""
    source = str(Path(terrazzo.errors.__file__).parents[1])
    text = PROGRAM.replace("{factor}", str(factor)) + program + (
        "print(json.dumps({k: float(np.asarray(v)[0]) for k, v in answers.items()}))")
    finished = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": source, "TZ_CACHE_DIR": str(folder)})
    assert finished.returncode == 0, finished.stderr
    return dict(json.loads(finished.stdout))


@pytest.mark.onnx
def test_what_users_changed_is_compiled_anew(tmp_path: Path) -> None:
    for factor in (7, 9):
        answers = answers_of(USERS, factor, tmp_path)
        assert len(answers) == 6 and set(answers.values()) == {factor}, answers


@pytest.mark.onnx
def test_rules_of_other_processes_are_none_of_ours(tmp_path: Path) -> None:
    for factor in (7, 9, 0):
        answers = answers_of(RULE, factor, tmp_path)
        expected = factor or np.tanh(1)
        assert len(answers) == 2
        assert all(a == pytest.approx(expected) for a in answers.values()), answers


# ---------------------------------------------------------------- what a key tells apart
def graph_of(function: Callable[..., Any], *types: TensorType) -> Graph:
    return trace(function, types or [TensorType((4,), tz.float32)], name="tested")[0]


def key_of(graph: Graph, options: Options | None = None) -> str:
    options = options or Options.now()
    return graph_key(Lowering(graph, options.chip, options=options))


def rule_times(factor: float) -> RuleTable:
    return RuleTable((Rule("tested", P.tanh(Wild("x")), lambda x: x * factor),))


def test_keys_tell_rules_apart_by_what_they_do() -> None:
    graph, plain = graph_of(lambda x: tz.tanh(x) + 1), Options.now()
    keys = {key_of(graph, Options(plain.settings, rules))
            for rules in (RuleTable(), rule_times(2.0), rule_times(3.0), rule_times(2.0))}
    assert len(keys) == 3


def test_keys_tell_bounds_of_sizes_apart() -> None:
    def key(lo: int) -> str:
        return key_of(graph_of(lambda x: tz.exp(x), TensorType((Var("n", lo),), tz.float32)))

    assert key(0) == key(0) != key(2)


def test_keys_tell_constants_apart() -> None:
    def key(array: np.ndarray) -> str:
        return key_of(graph_of(lambda x: x + array.sum(dtype=array.dtype) + array))

    long = np.zeros(4, np.float32)
    changed = long.copy()
    changed[2] = 1e-30
    assert key(long) == key(long.copy()) != key(changed)


def test_what_cannot_be_told_has_no_key() -> None:
    @primitive(family="user", infer=same_type, reference=lambda x, out, how: x)
    def mystery(x: Any, *, how: Any, out: Any) -> Any:
        return x

    assert not is_ours(mystery)
    graph = graph_of(lambda x: apply(mystery, [x], {"how": 1}))
    assert key_of(graph) == ""
    with pytest.raises(Unknowable, match="mystery"):
        graph_text(graph)


def test_all_our_operators_are_ours() -> None:
    from terrazzo.graph.ir import OPERATORS

    assert [n for n, op in OPERATORS.items() if op.family != "user" and not is_ours(op)] == []


@pytest.mark.onnx
def test_all_our_converters_are_ours() -> None:
    from terrazzo.frontends.onnx import convert, registry

    assert convert
    found = [(d, o) for d, o, f in registry.converters() if not is_ours(f)
             and (f.__module__ or "").startswith("terrazzo") and d in ("", "com.microsoft")]
    assert found == []


# ---------------------------------------------------------------- rules in one process
def test_a_rule_changes_what_was_compiled_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from terrazzo.graph import rewrite

    monkeypatch.setattr(rewrite, "_user_rules", [])
    function = tz.jit(lambda x: tz.tanh(x) + 1)
    before = function(X)

    @rewrite_rule(P.tanh(Wild("x")))
    def wrong(x: Any) -> Any:
        return x * 7

    assert function(X)[0] == 8
    rewrite._user_rules.clear()
    knobs.renew()
    np.testing.assert_array_equal(function(X), before)


# ---------------------------------------------------------------- threads
def test_threads_compile_under_their_own_settings(tmp_path: Path) -> None:
    """Many rounds of two threads, each with its own level, on graphs that both compile."""
    rounds = 6
    meet = threading.Barrier(2, timeout=60)
    wrong: list[str] = []

    def work(level: str) -> None:
        for number in range(rounds):
            graph = graph_of(lambda x, n=number: (x * 1.0 + n) * 1.0 * tz.exp(tz.log(x)))
            meet.wait()
            with knobs.override(opt_level=level, cache_dir=tmp_path):
                meet.wait()
                if knobs.opt_level != level:
                    wrong.append(f"{level} sees {knobs.opt_level}")
                options = Options.now()
                expected = len(Lowering(graph, options.chip, options=options).rewrites)
                executable = compile_graph(graph)
                key = key_of(graph)
                del executable
                if options.level != level or (level == "none") != (expected == 0):
                    wrong.append(f"{level} was rewritten {expected} times as {options.level}")
                if key != graph_key(Lowering(graph, options.chip, options=options)):
                    wrong.append(f"{level} has another key")

    threads = [threading.Thread(target=work, args=(level,)) for level in ("none", "all")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads) and wrong == []


def test_a_call_never_takes_what_another_thread_compiled_under_other_settings() -> None:
    """The level shows in the result: a rule that is wrong on purpose runs at one of them only."""
    from terrazzo.graph import rewrite

    saved = list(rewrite._user_rules)
    stop = threading.Event()
    wrong: list[Any] = []
    try:
        rewrite_rule(P.tanh(Wild("x")), level="all", name="wrong on purpose")(lambda x: x * 7)
        function = tz.jit(lambda x: tz.tanh(x) + 1)

        def work(level: str, expected: float) -> None:
            while not stop.is_set():
                with knobs.override(opt_level=level):
                    for _ in range(20):
                        got = float(function(X)[0])
                        if abs(got - expected) > 1e-3:
                            wrong.append((level, got))
                            stop.set()

        cases = [("all", 8.0), ("basic", 1 + np.tanh(1.0))]
        threads = [threading.Thread(target=work, args=case) for case in cases]
        for thread in threads:
            thread.start()
        stop.wait(1.5)
        stop.set()
        for thread in threads:
            thread.join(60)
    finally:
        rewrite._user_rules[:] = saved
        knobs.renew()
    assert wrong == []


@pytest.mark.onnx
def test_sessions_of_several_levels_side_by_side(tmp_path: Path) -> None:
    from onnx import TensorProto, helper

    from terrazzo.frontends.onnx.session import Session

    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (4,)) for n in "xy"]
    nodes = [helper.make_node("Identity", ["x"], ["h"]), helper.make_node("Neg", ["h"], ["i"]),
             helper.make_node("Neg", ["i"], ["y"])]
    model = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:]),
                              opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    levels = ["none", "basic", "extended", "all"] * 2
    made: dict[int, Session] = {}

    def work(number: int) -> None:
        made[number] = Session(model, level=levels[number])

    with knobs.override(cache_dir=tmp_path):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(len(levels))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert {n: s.options.level for n, s in made.items()} == dict(enumerate(levels))
        # What the cache holds for a level is what that level makes.
        for level in set(levels):
            found = Session(model, level=level).whole
            with knobs.override(cache=False):
                fresh = Session(model, level=level).whole
            assert found is not None and fresh is not None
            assert found.executable.artifact.kernels == fresh.executable.artifact.kernels


def test_a_dump_is_printed_for_what_is_cached(tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    graph = graph_of(lambda x: tz.exp(x) + 3)
    with knobs.override(cache_dir=tmp_path):
        compile_graph(graph)
        assert capsys.readouterr().out == ""
        with knobs.override(dump="graph,loop"):
            compile_graph(graph)
            warm = capsys.readouterr().out
    assert "graph tested" in warm and "exp(" in warm
    with knobs.override(cache=False, dump="graph,loop"):
        compile_graph(graph)
    assert capsys.readouterr().out == warm


@pytest.mark.onnx
def test_a_dump_is_printed_for_a_cached_model(tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    from onnx import TensorProto, helper

    from terrazzo.frontends.onnx.session import Session

    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (4,)) for n in "xy"]
    model = helper.make_model(
        helper.make_graph([helper.make_node("Tanh", ["x"], ["y"])], "dumped", ends[:1], ends[1:]),
        opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with knobs.override(cache_dir=tmp_path):
        Session(model)
        with knobs.override(dump="graph"):
            Session(model)
    assert "graph dumped" in capsys.readouterr().out
