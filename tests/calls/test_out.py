"""Results that go into given arrays (`out=`), arguments among them: always the same values."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.chips.cpu.schedule import streaming_sizes
from terrazzo.compiler.driver import compile_graph
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.rewriting import inlined
from terrazzo.errors import ArgumentError, DTypeError, ShapeError, TerrazzoError
from terrazzo.graph.ir import Graph, TensorType, operator_named
from terrazzo.graph.trace import trace
from terrazzo.runtime.artifact import Over

sys.path[:0] = [str(Path(__file__).parents[1])]

from test_every_operator import (  # noqa: E402
    LONG,
    ROWS,
    Case,
    graph_of,
    inputs_of,
    present,
    with_cotangents,
)


@tz.op
def sgd(p: Any, g: Any, m: Any) -> Any:
    m = 0.9 * m + g
    return p - 1e-3 * m, m


@tz.op
def adam(p: Any, g: Any, m: Any, v: Any) -> Any:
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    return p - 1e-3 * (m / 0.5) / (tz.sqrt(v / 0.1) + 1e-8), m, v


@tz.op
def lion(p: Any, g: Any, m: Any) -> Any:
    """Both results read the old m."""
    return p - 1e-4 * tz.sign(0.9 * m + 0.1 * g), 0.99 * m + 0.01 * g


@tz.op
def lion_backwards(p: Any, g: Any, m: Any) -> Any:
    """The same in the other order: m must not be replaced before p is computed."""
    return 0.99 * m + 0.01 * g, p - 1e-4 * tz.sign(0.9 * m + 0.1 * g)


@tz.op
def exchanged(a: Any, b: Any) -> Any:
    return b, a


@tz.op
def reversed_rows(x: Any) -> Any:
    return tz.flip(x, axis=0)


def state(count: int, *shape: int, dtype: Any = np.float32, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.asarray(rng.uniform(0.5, 1.5, shape)).astype(dtype) for _ in range(count)]


def same(found: Any, expected: Any) -> None:
    """Equal bit by bit: the same kernels ran."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.tobytes() == b.tobytes()


# ---------------------------------------------------------------- every operator over its inputs
def over_of(graph: Graph, rng: np.random.Generator) -> Over:
    """For outputs that have the type of an input, such an input, no two the same."""
    taken: list[int] = []
    for output in graph.outputs:
        fit = [i for i, v in enumerate(graph.inputs) if i not in taken
               and v.shape == output.shape and v.dtype is output.dtype]
        taken.append(int(rng.choice(fit)) if fit else -1)
    return tuple(None if i < 0 else i for i in taken)


def check_over(graph: Graph, arrays: Sequence[np.ndarray], over: Over) -> Over:
    """Results over inputs are those in memory of their own; answers what was proven."""
    expected = compile_graph(graph).run(arrays)
    executable = compile_graph(graph, over=over)
    given = [a.copy() for a in arrays]
    targets = [None if i is None else given[i] for i in over]
    found = executable.run(given, into=targets)
    for target, result in zip(targets, found, strict=True):
        assert target is None or result is target
    same(found, expected)
    return getattr(executable, "over", ())


@pytest.mark.parametrize(("name", "row"), [
    pytest.param(name, rows[-1], id=name) for name, rows in LONG.items()])
def test_every_operator_over_its_inputs(name: str, row: Case, rng: np.random.Generator) -> None:
    arrays = present(inputs_of(row, rng, "float32"))
    graph = graph_of(operator_named(name), arrays, row)
    if name in ROWS:
        graph, arrays = with_cotangents(graph, arrays, rng)
    check_over(graph, arrays, over_of(graph, rng))


def random_step(rng: np.random.Generator) -> Callable[..., Any]:
    """A program whose results read its inputs where they are written, elsewhere, and in sums."""
    ways: list[Callable[[Any, Any], Any]] = [
        lambda a, b: a + b, lambda a, b: a * 0.5 - b, lambda a, b: tz.exp(-a) * b,
        lambda a, b: tz.flip(a, axis=0) + b, lambda a, b: tz.roll(a, 3, axis=1) * b,
        lambda a, b: a - tz.mean(b, axis=1, keepdims=True), lambda a, b: tz.where(a > b, a, b),
        lambda a, b: a + tz.sum(b, axis=0, keepdims=True), lambda a, b: a @ b + a]

    def step(*values: Any) -> Any:
        known = list(values)
        for _ in range(int(rng.integers(1, 8))):
            a, b = (known[int(i)] for i in rng.integers(0, len(known), 2))
            known.append(ways[int(rng.choice(len(ways), p=[.2, .2, .2, *[.4 / 6] * 6]))](a, b))
        return tuple(known[-1 - int(i)] for i in rng.permutation(min(3, len(known))))

    return step


def test_random_programs_over_their_inputs() -> None:
    wanted = proven = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        graph = trace(random_step(rng), [TensorType((33, 33), tz.float32)] * 3, "step")[0]
        over = over_of(graph, rng)
        found = check_over(graph, state(3, 33, 33, seed=seed), over)
        wanted += sum(i is not None for i in over)
        proven += sum(i is not None for i in found)
    assert 0 < proven < wanted, "some can be written over, some cannot"


# ---------------------------------------------------------------- optimiser steps
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (600, 513)])
@pytest.mark.parametrize(("step", "count", "over"), [
    (sgd, 3, (0, 2)), (adam, 4, (0, 2, 3)), (lion, 3, (0, 2)),
    (lion_backwards, 3, (2, 0))], ids=["sgd", "adam", "lion", "lion backwards"])
def test_optimisers_are_proven(step: Any, count: int, over: Over, shape: tuple[int, ...],
                               dtype: str) -> None:
    from terrazzo.dtypes import as_dtype

    given = state(count, *shape, dtype=as_dtype(dtype).np)
    expected = step(*given)
    targets = tuple(given[i] for i in over if i is not None)
    assert step.compile(*given, out=targets).over == over
    results = step(*given, out=targets)
    assert all(a is b for a, b in zip(results, targets, strict=True))
    same(results, expected)


def test_what_is_written_over_is_not_stored_past_the_caches() -> None:
    smallest, _ = streaming_sizes(Cpu().spec)
    p, g, m = state(3, smallest // (4 * 1024) + 1, 1024)
    lowered = [sgd.lower(p, g, m, "loop"), sgd.lower(p, g, m, "loop", out=(p, m))]
    assert ["streaming" in text for text in lowered] == [True, False]


def test_sizes_that_vary() -> None:
    step = tz.jit(lambda p, g, m: (p - 0.5 * (0.9 * m + g), 0.9 * m + g))
    for n in (5, 9, 1, 0, 33, 7):
        for dtype in (np.float32, np.float64):
            p, g, m = state(3, n, 4, dtype=dtype)
            expected = [p - dtype(0.5) * (dtype(0.9) * m + g), dtype(0.9) * m + g]
            step(p, g, m, out=(p, m))
            for found, wanted in zip((p, m), expected, strict=True):
                np.testing.assert_allclose(found, wanted, atol=1e-6)  # terms are about 1


def test_kernels_that_read_what_is_overwritten_come_first() -> None:
    @tz.op
    def both(x: Any, y: Any) -> Any:
        new = 0.5 * x + y
        return new, tz.sum(tz.flip(x, axis=0) * y, axis=1)

    x, y = state(2, 40, 50)
    expected = both(x, y)
    assert both.compile(x, y, out=(x, None)).over == (0, None)
    same(both(x, y, out=(x, None)), expected)


# ---------------------------------------------------------------- where a copy has to be made
def test_results_never_depend_on_where_they_go() -> None:
    a, b = state(2, 9, 6)
    a0, b0 = a.copy(), b.copy()
    exchanged(a, b, out=(a, b))
    same((a, b), (b0, a0))
    reversed_rows(a, out=a)
    same([a], [b0[::-1].copy()])
    tz.matmul(state(1, 6, 6)[0], c := state(1, 6, 6, seed=3)[0], out=c)
    same([c], [tz.matmul(*state(1, 6, 6), *state(1, 6, 6, seed=3))])


def test_targets_that_overlap_an_input_in_part() -> None:
    memory = np.arange(24, dtype=np.float32)
    expected = np.exp(-memory[:20] / 24)
    tz.exp(tz.multiply(memory[:20], -1 / 24, out=memory[2:22]), out=memory[4:24])
    np.testing.assert_allclose(memory[4:24], expected, rtol=1e-6)


def test_an_argument_that_is_given_twice() -> None:
    p, m = state(2, 30, 7)
    expected = sgd(p.copy(), p.copy(), m.copy())
    sgd(p, p, m, out=(p, m))
    same((p, m), expected)


@pytest.mark.parametrize("view", [
    lambda room: room[::2, 1:8], lambda room: room[:8, :14].T[:7].T[:, ::1],
    lambda room: room.T[3:10].T[:8], lambda room: room[7::-1, 6::-1]])
def test_targets_of_any_strides(view: Callable[[np.ndarray], np.ndarray]) -> None:
    x = state(1, 8, 7)[0]
    room = np.zeros((16, 14), np.float32)
    target = view(room)
    assert tz.square(x, out=target) is target
    np.testing.assert_array_equal(target, x * x)
    assert np.count_nonzero(room) == x.size
    tz.square(target, out=target)
    np.testing.assert_allclose(target, x**4, rtol=1e-6)


def test_more_results_than_the_direct_way_takes() -> None:
    step = tz.jit(lambda ps, gs: [p - 0.1 * g for p, g in zip(ps, gs, strict=True)])
    ps, gs = state(9, 5, 3), state(9, 5, 3, seed=1)
    expected = [p - np.float32(0.1) * g for p, g in zip(ps, gs, strict=True)]
    results = step(ps, gs, out=ps)
    assert all(a is b for a, b in zip(results, ps, strict=True))
    for found, wanted in zip(ps, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


# ---------------------------------------------------------------- forms of out=
def test_nests_of_results() -> None:
    @tz.jit
    def step(state: Any, *, rate: float = 0.5) -> Any:
        return {"p": state["p"] - rate * state["g"], "norm": [tz.sum(state["g"]), None]}

    p, g = state(2, 5)
    expected = p - 0.5 * g
    found = step({"p": p, "g": g}, rate=0.5, out={"norm": [None, None], "p": p})
    assert found["p"] is p and found["norm"][0].shape == () and found["norm"][1] is None
    np.testing.assert_allclose(p, expected, rtol=1e-6)
    assert step({"p": p, "g": g}, out=None)["p"] is not p


def test_numbers_among_the_arguments() -> None:
    x = state(1, 4)[0]
    for factor in (2.0, 3.0):
        expected = x * np.float32(factor)
        assert tz.multiply(x, factor, out=x) is x
        np.testing.assert_allclose(x, expected, rtol=1e-6)


def test_what_a_function_mentions_may_be_the_target() -> None:
    weight, g = state(2, 6)
    descend = tz.jit(lambda g: weight - 0.1 * g)
    for _ in range(3):
        expected = weight - np.float32(0.1) * g
        assert descend(g, out=weight) is weight
        np.testing.assert_allclose(weight, expected, rtol=1e-6)


def test_an_own_parameter_called_out_stays_one() -> None:
    @tz.op
    def function(x: Any, *, out: int = 2) -> Any:
        return x * out

    np.testing.assert_array_equal(function(np.ones(3, np.float32), out=5), np.full(3, 5.0))


def test_control_flow_and_factorisations() -> None:
    x = state(1, 4, 4)[0] + 4 * np.eye(4, dtype=np.float32)
    for function in (lambda x: tz.fori_loop(0, 3, lambda i, s: s * 0.5 + i, x), tz.inv):
        run = tz.jit(lambda x, function=function: function(x))
        expected = run(x)
        target = x.copy()
        assert run(target, out=target) is target
        np.testing.assert_array_equal(target, expected)


def test_executables_keep_it_when_saved(tmp_path: Path) -> None:
    p, g, m = state(3, 6, 5)
    expected = sgd(p, g, m)
    sgd.compile(p, g, m, out=(p, m)).save(tmp_path / "sgd.tzx")
    loaded = tz.load(tmp_path / "sgd.tzx")
    assert loaded.over == (0, 2)
    same(loaded(p, g, m, out=(p, None)), expected)
    with pytest.raises(ArgumentError, match="2 results, and out= 1"):
        loaded(p, g, m, out=p)


def test_a_pickled_operator_takes_it() -> None:
    p, g, m = state(3, 6, 5)
    expected = sgd(p, g, m)
    same(pickle.loads(pickle.dumps(sgd))(p, g, m, out=(p, m)), expected)


def test_verify_runs_over_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    from terrazzo.compiler import lowering
    from terrazzo.errors import VerifyError

    p, g, m = state(3, 6, 5)
    options = {"dtypes": ["float32"], "kinds": ["random"], "levels": ["code"]}
    assert sgd.verify(p, g, m, out=(p, m), **options).rows
    # A compiler that thinks everything may be written over is found out.
    monkeypatch.setattr(lowering, "may_share", lambda *_: True)
    with pytest.raises(VerifyError, match="run over its inputs"):
        exchanged.verify(p, m, out=(p, m), **options)


def test_bench_takes_it() -> None:
    p, g, m = state(3, 6, 5)
    assert sgd.bench(p, g, m, out=(p, m), rounds=1, torch=False).lines


def test_the_cache_tells_what_is_written_over() -> None:
    from terrazzo.compiler.keys import graph_key
    from terrazzo.compiler.options import Options

    options = Options.now()
    graph = inlined(trace(lambda x: x * 2, [TensorType((4,), tz.float32)], "f")[0])
    keys = {graph_key(Lowering(graph, options.chip, options=options, over=over))
            for over in ((), (0,), (None,))}
    assert len(keys) == 3


# ---------------------------------------------------------------- what is refused
def read_only() -> np.ndarray:
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(("out", "kind", "words"), [
    (np.zeros(4), DTypeError, "float32, and out= has float64"),
    (np.zeros((4, 1), np.float32), ShapeError, r"\(4,\), and out= has \(4, 1\)"),
    (np.zeros(5, np.float32), ShapeError, "shape"),
    (read_only(), ArgumentError, "read only"),
    (np.broadcast_to(np.zeros(1, np.float32), 4), ArgumentError, "share memory"),
    (3.0, ArgumentError, "has a float in it"),
    (np.float32(3), ArgumentError, "has a float32 in it"),
    ([1, 2], ArgumentError, "has a int in it"),
    ((np.zeros(4, np.float32),) * 2, ArgumentError, "are an array, and out= is"),
])
def test_refused_targets(out: Any, kind: type[TerrazzoError], words: str) -> None:
    with pytest.raises(kind, match=words):
        tz.exp(np.ones(4, np.float32), out=out)


def test_targets_must_be_apart() -> None:
    p, g, m = state(3, 8)
    before = p.copy()
    for targets in ((p, p), (p[:], p)):
        with pytest.raises(ArgumentError, match="share memory"):
            sgd(p, g, m, out=targets)
    np.testing.assert_array_equal(p, before)
    room = np.zeros((8, 2), np.float32)
    sgd(p, g, m, out=(room[:, 0], room[:, 1]))  # side by side is apart
    same((room[:, 0].copy(), room[:, 1].copy()), sgd(p, g, m))


def test_traced_values_never_change() -> None:
    @tz.op
    def inner(x: Any) -> Any:
        return tz.exp(x, out=x)

    with pytest.raises(ArgumentError, match="no argument 'out'"):
        inner(np.ones(3, np.float32))
    with pytest.raises(ArgumentError, match="values never change"):
        tz.jit(lambda x: tz.jit(lambda y: y + 1)(x, out=np.zeros(3, np.float32)))(
            np.ones(3, np.float32))


# ---------------------------------------------------------------- torch
@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def test_tensors_are_told(torch: Any) -> None:
    p, g, m = (torch.tensor(a) for a in state(3, 6, 5))
    expected = sgd(p, g, m)
    versions = [t._version for t in (p, g, m)]
    results = sgd(p, g, m, out=(p, m))
    assert results[0] is p and results[1] is m
    assert [t._version for t in (p, g, m)] == [versions[0] + 1, versions[1], versions[2] + 1]
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_a_backward_pass_notices(torch: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    y = torch.full((3,), 2.0)
    product = (x * y).sum()
    tz.exp(y, out=y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_gradients_and_out(torch: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    g, m = torch.ones(3), torch.zeros(3)
    with pytest.raises(ArgumentError, match="requires a gradient"):
        sgd(parameter, g, m, out=(parameter, m))
    assert torch.equal(parameter, torch.ones(3)) and torch.equal(m, torch.zeros(3))
    with torch.no_grad():
        assert sgd(parameter, g, m, out=(parameter, m))[0] is parameter
    assert parameter.requires_grad and torch.allclose(parameter, torch.tensor(0.999))


def test_tensors_of_any_strides(torch: Any) -> None:
    room = torch.zeros(6, 8)
    x = torch.rand(4, 3)
    for target in (room[:4, ::3], room.T[1:5, :3], room.T[::2, 1:4]):
        assert tz.square(x, out=target) is target
        assert torch.equal(target, x * x)
    with pytest.raises(ArgumentError, match="share memory"):
        tz.square(x, out=torch.zeros(1, 1).expand(4, 3))


def test_inference_tensors(torch: Any) -> None:
    with torch.inference_mode():
        x = torch.ones(3)
        tz.multiply(x, 2.0, out=x)
        assert torch.equal(x, torch.full((3,), 2.0))
    with pytest.raises(ArgumentError, match="inference mode"):
        tz.multiply(x, 2.0, out=x)


def test_tensors_beside_arrays(torch: Any) -> None:
    x, y = np.ones(3, np.float32), torch.zeros(3)
    assert tz.exp(x, out=y) is y
    np.testing.assert_array_equal(y.numpy(), tz.exp(x))
    z = np.zeros(3, np.float32)
    assert tz.exp(torch.zeros(3), out=z) is z and (z == 1).all()
