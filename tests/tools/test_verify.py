"""`verify` finds a mistake at any level, and names the level it was made at."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import terrazzo as tz
from terrazzo.chips.cpu.chip import Cpu
from terrazzo.chips.cpu.llvm import scalars
from terrazzo.compiler import kernels
from terrazzo.compiler import rewriting as way_down
from terrazzo.dtypes import as_dtype, bfloat16, float16, float32, float64, int32
from terrazzo.errors import ArgumentError, VerifyError
from terrazzo.graph import rewrite as rewriting
from terrazzo.graph.fusion import composing
from terrazzo.graph.ir import TensorType
from terrazzo.graph.passes import recognize
from terrazzo.graph.patterns import P, Wild
from terrazzo.graph.rewrite import rewrite_rule
from terrazzo.graph.trace import trace
from terrazzo.loop.ir import For, Function
from terrazzo.loop.ir import rewrite as rewrite_loops
from terrazzo.tools import samples
from terrazzo.tools.verify import error_bounds, verifier
from terrazzo.tools.verify.bounded import Bounded
from terrazzo.tools.verify.comparison import compare
from terrazzo.tools.verify.report import Row

quantized = importlib.import_module("terrazzo.graph.passes.quantized")
QUICK: dict[str, Any] = {"dtypes": ["float32"], "kinds": ("random", "odd")}


@tz.op(name="test_gelu")
def gelu(x: Any) -> Any:
    return 0.5 * x * (1 + tz.tanh(0.79788456 * (x + 0.044715 * x * x * x)))


@tz.op(name="test_centred")
def centred(x: Any) -> Any:
    return x - tz.mean(x, axis=-1, keepdims=True)


def blamed(function: Any, *args: Any, **options: Any) -> VerifyError:
    with pytest.raises(VerifyError) as caught:
        tz.verify(function, *args, **{**QUICK, **options})
    return caught.value


# ---------------------------------------------------------------- sound operators pass
def test_a_sound_operator_passes_with_everything() -> None:
    report = gelu.verify()
    assert [row.dtype for row in report.rows] == [*verifier.FLOATS, *verifier.OTHERS]
    assert set(report.rows[0].kinds) == set(samples.KINDS)
    assert set(report.rows[1].share) == set(verifier.LEVELS)
    assert all(0 <= share <= 1 for row in report.rows for share in row.share.values())
    text = str(report)
    assert "test_gelu: every level agrees" in text and "bfloat16" in text and "code" in text


@pytest.mark.parametrize("function", [
    tz.softmax, tz.matmul, tz.layer_norm, tz.jit(lambda x, w: x * w), lambda x: tz.sort(x)],
    ids=["rows", "contraction", "several kernels", "jit", "plain function"])
def test_shapes_are_found_and_levels_agree(function: Any) -> None:
    report = tz.verify(function, **QUICK)
    assert report.rows[0].checked > 100


def test_examples_are_tried_as_given() -> None:
    x, indices = np.arange(12, dtype=np.float32).reshape(3, 4), np.array([2, 0])
    report = tz.take.verify(x, indices, axis=0, dtypes=["float32"])
    assert "given" in report.rows[0].kinds
    assert "symbolic" in report.rows[0].kinds


def test_levels_and_types_can_be_chosen() -> None:
    report = gelu.verify(levels=("graph", "expr"), dtypes=["float16"], kinds=("random",))
    (row,) = report.rows
    assert row.dtype == "float16" and set(row.share) == {"graph", "expr"}


def test_what_does_not_apply_is_said() -> None:
    report = tz.bitwise_and.verify()
    assert [row.dtype for row in report.rows] == ["int32"]
    with pytest.raises(ArgumentError, match="no inputs could be found that suit"):
        tz.verify(lambda x: tz.reshape(x, shape=(7, 11)))


# ---------------------------------------------------------------- one mistake at each level
@pytest.fixture
def wrong_rule() -> Iterator[None]:
    before = list(rewriting._user_rules)
    rewrite_rule(P.tanh(Wild("x")), name="tanh is sine")(lambda x: tz.sin(x))
    yield
    rewriting._user_rules[:] = before


@pytest.mark.usefixtures("wrong_rule")
def test_a_wrong_rewrite_is_blamed_on_the_graph() -> None:
    error = blamed(gelu)
    assert error.level == "graph"
    assert error.operator is not None and "'tanh is sine' on tanh" in error.operator
    assert "test_verify.py" in (error.where or "")


def test_a_wrong_reference_is_blamed_on_the_graph() -> None:
    def twice_and_a_bit(x: np.ndarray, *, out: TensorType) -> np.ndarray:
        return (x * 2.001).astype(out.dtype.np)

    double = tz.ops.define.operator(lambda x: x + x, family="user", name="test_double",
                                    reference=twice_and_a_bit)
    error = blamed(double)
    assert error.level == "graph" and "test_double" in (error.operator or "")


def test_wrong_fusion_is_blamed_on_the_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = composing.inline

    def unsound(body: Any, producers: Any) -> Any:
        result = sound(body, producers)
        return result * 1.01 if result.dtype.is_float else result

    monkeypatch.setattr(composing, "inline", unsound)
    error = blamed(gelu)
    assert error.level == "expr" and "k_multiply" in (error.operator or "")
    assert "an operator's own expression" in (error.operator or "")


def test_a_wrong_bound_is_blamed_on_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = kernels.simplify

    def unsound(function: Function) -> Function:
        def shorten(stmt: Any) -> Any:
            return replace(stmt, hi=stmt.hi - 1) if isinstance(stmt, For) and (
                stmt.kind == "vector") else None

        function = sound(function)
        return replace(function, body=rewrite_loops(function.body, shorten))

    monkeypatch.setattr(kernels, "simplify", unsound)
    error = blamed(gelu)
    assert error.level == "loop" and error.index == (7, 15)
    assert "the simplifier of loops" in (error.operator or "")


def test_a_wrong_instruction_is_blamed_on_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scalars._FLOAT, "sub", lambda b, x, y: b.fadd(x, y))
    error = blamed(centred)
    assert error.level == "code" and error.got != error.expected
    assert "the function 'sub' of float32" in (error.operator or "")
    message = str(error)
    assert "test_centred is wrong at level code" in message
    assert "float32, random inputs f32[8, 16]" in message
    assert "reproduce with tz.verify(test_centred" in message


def test_stores_outside_an_output_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = verifier.Subject._invoke

    def overrun(self: Any, i: int, pointers: Any, dims: Any) -> None:
        sound(self, i, [*pointers[:-1], pointers[-1] + 4], dims)

    monkeypatch.setattr(verifier.Subject, "_invoke", overrun)
    assert "writes outside its output" in str(blamed(gelu, levels=("code",)))


def test_a_wrong_gradient_is_found() -> None:
    square = tz.op(lambda x: x * x, name="test_square", grad=lambda node, g: [g * node.inputs[0]])
    error = blamed(square)
    assert error.level == "gradient"
    assert float(error.got) == pytest.approx(float(error.expected) / 2, rel=1e-4)


def test_bits_of_floats_are_not_differentiated() -> None:
    x = np.ones((2,), np.float64)
    report = tz.verify(lambda x: tz.silu(tz.bitcast(x, dtype="int64")), x, kinds=("given",))
    assert str(report)


def test_rounding_of_huge_numbers_has_no_slope() -> None:
    x = np.array([-1e8, 7e9], np.float32)
    assert str(tz.verify(lambda x: tz.trunc(x), x, kinds=("given",)))


def test_a_slope_beyond_saturation_is_left_open() -> None:
    x = np.array([8.25, 0.5], np.float32)
    assert str(tz.verify(lambda x: tz.asin(tz.erf(x)), x, kinds=("given",)))


def test_a_kink_has_no_slope_to_check() -> None:
    """To the right of 1, x ** ceil(x) is x squared, to the left it is x."""
    tz.verify(lambda x: tz.power(x, tz.ceil(x)), np.ones(1, np.float32), kinds=("given",))


def test_noise_of_an_inverse_near_its_end_is_not_a_slope() -> None:
    x = np.array([0.3137553334236145, 4.009322643280029, -4.953551769256592], np.float32)
    tz.verify(lambda x: tz.asin(tz.erf(x)), x, kinds=("given",))


def test_nothing_is_read_for_tensors_without_elements() -> None:
    """A kernel whose result only an empty tensor reads is left out; an empty power is empty."""
    with tz.knobs.override(check=True):
        pooled = tz.jit(lambda x: tz.repeat(tz.global_average_pool(x), repeats=2, axis=None))
        for n in (0, 2, 0, 3):
            assert pooled(np.ones((n, 2, 5), np.float32)).shape == (4 * n,)
        assert tz.jit(lambda x, y: tz.power(y, x))(
            np.array([-7]), np.ones((0, 1), np.int64)).shape == (0, 1)


def test_a_quotient_on_the_fence_may_be_rounded_either_way() -> None:
    """In float64 it is just below 229.5, in float32 it is 229.5."""
    x = np.array([0.703125, 0.6328125], np.float32)
    assert x[1] / (x[0] / np.float32(255)) == 229.5
    tz.verify(lambda x: tz.dynamic_quantize_linear(x)[0], x, kinds=("given",), dtypes=["float32"])


@pytest.mark.parametrize("program, x", [
    (lambda x: tz.atan2(tz.fmod(x, x), tz.fmod(x, x)), [1.0]),
    (lambda x: tz.atan(tz.lgamma(tz.ceil(x))), [0.67, -0.76]),
    (lambda x: tz.nan_to_num(tz.square(x), nan=0.0), [0.2, np.nan]),
])
def test_zero_times_an_undefined_slope_is_left_open(program: Any, x: list[float]) -> None:
    tz.verify(program, np.array(x, np.float32), kinds=("given",))


def test_numpys_habits_are_not_the_yardstick() -> None:
    """A root for the power of a half; half types sorted with nan in the middle; det of inf."""
    tz.verify(lambda x: tz.power(x, 0.5), np.array([88, -0.75, -np.inf], np.float32),
              kinds=("given",), levels=("graph", "expr", "loop", "code"))
    rows = np.array([[1], [np.nan], [-1], [0.5], [np.nan], [0.25]], ml_dtypes.bfloat16)
    tz.verify(lambda x: tz.rank_rows(x)[1], rows, kinds=("given",))
    tz.verify(lambda x: tz.det(x), np.array([[[0, -np.inf], [0, np.inf]], [[1, 2], [3, 4]]],
                                            np.float32),
              kinds=("given",), levels=("graph", "expr", "loop", "code"))


def test_a_determinant_that_cancels_is_held_against_its_matrix() -> None:
    x = np.array([[46.776806528743876, -58.69060225350661],
                  [-22.977173764707594, 28.829333731995867]])
    tz.verify(lambda x: tz.det(x), x, kinds=("given",), dtypes=["float64"])
    graph, _ = trace(lambda x: tz.det(x), [TensorType((2, 2), float64)], name="det")
    (bounded,) = (error_bounds.run(graph, [x])[v] for v in graph.outputs)
    assert 1e-13 < float(bounded.error) < 1e-10


def test_errors_of_the_compiler_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(scalars._FLOAT, "mul")
    error = blamed(gelu)
    assert error.level == "code" and "KeyError: 'mul'" in str(error)


def test_every_compilation_is_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones((4, 6), np.float32)
    with tz.knobs.override(check=True):
        np.testing.assert_array_equal(tz.jit(lambda x: x - 1)(x), 0)
        monkeypatch.setitem(scalars._FLOAT, "sub", lambda b, x, y: b.fadd(x, y))
        with pytest.raises(VerifyError, match=r"level code.* \(a call with f32\[4, 6\]\)"):
            tz.jit(lambda x: x - 2)(x)


# ---------------------------------------------------------------- nothing checked is no success
def test_a_level_at_which_nothing_was_compared_has_failed() -> None:
    error = blamed(lambda x: tz.astype(tz.floor(x / x), dtype="int32"), np.full(3, 7, np.float32),
                   levels=["code"], kinds=("random",))
    assert "could not be checked at level code" in str(error) and error.level == "code"
    with pytest.raises(VerifyError, match="no element was compared"):
        tz.verify(lambda x: x + 1, np.ones((0, 3), np.float32), kinds=("given",),
                  dtypes=["float32"])
    with pytest.raises(VerifyError, match="no element was compared"):
        tz.verify(tz.argmax, np.ones((4, 3), np.float32), levels=["gradient"], **QUICK)


def test_places_of_extrema_are_checked_where_rounding_does_not_matter() -> None:
    x = np.array([[1.0, 3.0, 2.0], [5.0, 5.0, 1.0]], np.float32)
    error = bounds_of(lambda x: tz.argmax(tz.exp(x), axis=-1), x).error
    assert error[0] == 0 and np.isinf(error[1]), "of two equal numbers either may be the larger"
    report = tz.verify(lambda x: tz.argmax(tz.exp(x)), x, levels=["code"], kinds=("random",))
    assert report.elements("code") > 0


def test_what_was_left_out_is_in_the_report() -> None:
    x = np.ones((64, 64), np.float32)
    report = tz.verify(lambda x: tz.argmax(tz.sort(x @ x), axis=-1), x, dtypes=["float32"],
                       kinds=("random",))
    text = str(report)
    assert "left out: level expr of k_sort_pairs: its kernel is made of loops directly" in text
    assert "left out: level loop of k_" in text and "20,000 statements" in text
    assert "left out: level gradient of <lambda>: no result is a float" in text


# ---------------------------------------------------------------- control flow
@tz.op(name="test_steps")
def steps(x: Any) -> Any:
    last, rows = tz.scan(lambda c, row: (tz.tanh(c + row), c * 2.0), x[0] * 0.0, x)
    return last + tz.sum(rows, axis=0)


@tz.op(name="test_halved")
def halved(x: Any) -> Any:
    return tz.while_loop(lambda s: tz.max(tz.absolute(s)) > 1.0, lambda s: s * 0.5, x * 3.0)


@tz.op(name="test_chosen")
def chosen(x: Any) -> Any:
    def inner() -> Any:
        return tz.scan(lambda c, row: (c + row, ()), x[0], x)[0] + tz.exp(x)

    return tz.cond(tz.sum(x) > 0, inner, lambda: x * x)


@pytest.mark.parametrize("function", [steps, halved, chosen], ids=lambda f: f.name)
def test_control_flow_inside_an_operator(function: Any, rng: np.random.Generator) -> None:
    """It is verified down to the code of its parts, lowered part by part, and timed."""
    x = rng.normal(size=(3, 5)).astype(np.float32)
    report = function.verify(x, dtypes=["float32"], kinds=("given", "random", "special"))
    assert all(report.elements(level) for level in ("graph", "expr", "loop", "code"))
    assert report.elements("gradient") or "no gradient" in str(report) or "number is not" in str(
        report)
    for level in Cpu.levels[:-1]:
        assert function.lower(x, level).strip()
    assert f"a part of {function.name}" in function.lower(x, "loop")
    assert function.bench(x, rounds=1, torch=False).lines


def test_a_mistake_inside_control_flow_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scalars._FLOAT, "mul", lambda b, x, y: b.fadd(x, y))
    error = blamed(halved, np.full((3, 5), 2, np.float32), kinds=("given",))
    assert error.level == "code" and "k_multiply" in (error.operator or "")


# ---------------------------------------------------------------- gradients in all directions
def test_one_wrong_element_among_many_is_found() -> None:
    def rule(node: Any, g: Any) -> list[Any]:
        x = node.inputs[0]
        spoilt = np.ones(x.shape)
        spoilt[1, 7] = 1.01
        return [2 * g * x * spoilt]

    square = tz.op(lambda x: x * x, name="test_nearly_square", grad=rule)
    error = blamed(square, np.ones((3, 50), np.float32))
    assert error.level == "gradient" and error.index == (1, 7)


def test_every_element_is_covered_but_those_on_kinks() -> None:
    x = np.linspace(-1, 1, 200, dtype=np.float32)
    x[[3, 50, 51, 199]] = 0
    report = tz.verify(tz.relu, x, dtypes=["float32"], kinds=("given",))
    (row,) = report.rows
    assert row.open["gradient"] == 4 and row.elements["gradient"] == 196


def test_gradients_are_checked_on_every_kind_of_input() -> None:
    kinked = tz.op(lambda x: x * tz.sqrt(tz.absolute(x)), name="test_wrong_at_one",
                   grad=lambda node, g: [g * tz.where(tz.equal(node.inputs[0], 1.0), 0.0, 1.5)
                                         * tz.sqrt(tz.absolute(node.inputs[0]))])
    error = blamed(kinked, np.full((16, 9), 3, np.float32), kinds=("random", "special"))
    assert error.level == "gradient" and "special inputs" in str(error)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp", "sigmoid", "softplus"])
def test_slopes_that_no_difference_can_see_are_no_mistakes(name: str) -> None:
    """At 1e38 any step is over the edge of a softmax, and gradients cancel to their rounding."""
    for seed in range(11):
        report = tz.verify(getattr(tz, name), np.zeros((8, 16), np.float32), seed=seed,
                           kinds=("special", "extreme"), dtypes=["float32"], levels=["gradient"])
        assert report.elements("gradient") > 100


@pytest.mark.parametrize(("name", "body", "rule"), [
    ("linear", lambda x: 3 * x, lambda node, g: [2.99 * g]),
    ("softmax", tz.softmax, lambda node, g: [1.01 * (g - tz.sum(
        g * node.outputs[0], axis=-1, keepdims=True)) * node.outputs[0]]),
    ("log_softmax", tz.log_softmax, lambda node, g: [g - tz.exp(node.outputs[0]) * tz.sum(
        g, axis=-1, keepdims=True) * 0.99]),
    ("steep", lambda x: x * 1e-30, lambda node, g: [g * 2e-30]),
])
def test_wrong_rules_are_found_among_huge_numbers(name: str, body: Any, rule: Any) -> None:
    wrong = tz.op(lambda x: body(x), name=f"test_wrong_{name}", grad=rule)
    x = np.zeros((48, 3), np.float32)  # short rows, of which some have no nan
    for kind in ("special", "random"):
        assert blamed(wrong, x, kinds=(kind,), levels=["gradient"]).level == "gradient"


def test_stopped_gradients_are_respected() -> None:
    x = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
    for function in (
            lambda x: x * tz.stop_gradient(tz.exp(x)),
            lambda x: tz.tanh(x + tz.stop_gradient(tz.round(3 * x) - x)) * tz.sin(x),
            lambda x: tz.sin(tz.stop_gradient(x * x) * tz.stop_gradient(x) + x)):
        report = tz.verify(function, x, **QUICK)
        assert report.elements("gradient") >= 12
    inside = tz.op(lambda x: x * tz.stop_gradient(x), name="test_inside")
    tz.verify(lambda x: tz.exp(inside(x)), x, **QUICK)


def test_straight_through_rules_are_respected_and_what_surrounds_them_is_checked() -> None:
    rounded = tz.op(lambda x: tz.round(x * 8) / 8, name="test_rounded", grad=lambda node, g: [g])
    x = np.linspace(-2, 2, 12, dtype=np.float32)
    report = tz.verify(lambda x: tz.sin(rounded(tz.tanh(x) * x)) + x, x, **QUICK)
    assert report.elements("gradient") >= 12
    wrong = tz.op(tz.tanh.body or (lambda x: tz.tanh(x)), name="test_wrong_tanh",
                  grad=lambda node, g: [g])
    for function in (lambda x: wrong(rounded(x)), lambda x: rounded(wrong(x))):
        assert blamed(function, x).level == "gradient"


# ---------------------------------------------------------------- rewrites are blamed by name
def broken(table: rewriting.RuleTable, name: str) -> rewriting.RuleTable:
    """The table with one rule answering twice what it should."""
    def spoil(rule: rewriting.Rule) -> rewriting.Rule:
        def build(node: Any, **found: Any) -> Any:
            given = {**found, "node": node}
            answer = rule.build(**{k: given[k] for k in rule.wants})
            return None if answer is None else answer * 2

        names = [*(n for n in rule.wants if n != "node"), "node"]
        build.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names])
        return rewriting.Rule(rule.name, rule.pattern, build, rule.level)

    assert any(name in rule.name for rule in table)
    return rewriting.RuleTable(tuple(spoil(r) if name in r.name else r for r in table))


def exact_gelu(x: Any) -> Any:
    return 0.5 * x * (1 + tz.erf(x * 0.7071067811865476))


def normed(x: Any) -> Any:
    centred = x - tz.mean(x, axis=-1, keepdims=True)
    return centred / tz.sqrt(tz.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)


def attended(q: Any, k: Any, v: Any) -> Any:
    return tz.softmax(tz.matmul(q, tz.permute_dims(k, axes=(0, 1, 3, 2))) * 0.25) @ v


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    half = x.shape[-1] // 2
    turned = tz.concat([-x[..., half:], x[..., :half]], axis=-1)
    return x * cos + turned * sin


CASES = {
    "gelu": (exact_gelu, [(4, 8)]),
    "norm": (normed, [(4, 8)]),
    "attention": (attended, [(1, 2, 8, 16)] * 3),
    "rotary": (rotated, [(2, 3, 8, 16), (8, 16), (8, 16)]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_recogniser_is_blamed(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, shapes = CASES[case]
    arrays = [np.ones(s, np.float32) for s in shapes]
    graph, _ = trace(function, [TensorType(s, float32) for s in shapes], name=case)
    applied = {a.rule for step in way_down.rewriting(graph) for a in step.applied
               if step.name == "recognition of patterns"}
    assert len(applied) == 1, applied
    (name,) = applied
    monkeypatch.setattr(recognize, "PATTERNS", broken(recognize.PATTERNS, name))
    for levels in (("graph", "code"), ("code",)):
        error = blamed(function, *arrays, levels=levels, kinds=("random",))
        assert error.level == "graph" and f"rewrite rule {name!r}" in (error.operator or "")


@pytest.mark.parametrize("name", [r.name for r in quantized.REWRITES])
def test_a_wrong_quantised_rewrite_is_blamed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = quantised_layers()
    applied = {a.rule for step in way_down.rewriting(graph) for a in step.applied}
    assert name in applied
    sound = next(r for r in quantized.REWRITES if r.name == name)

    def unsound(node: Any, uses: Any) -> Any:
        answer = sound.build(node, uses)
        if answer is None:
            return None
        return answer * 2.0 if answer.dtype.is_float else tz.minimum(answer, 3)

    monkeypatch.setattr(quantized, "REWRITES", tuple(
        r._replace(build=unsound) if r is sound else r for r in quantized.REWRITES))
    x = np.random.default_rng(0).uniform(-1, 1, graph.inputs[0].shape).astype(np.float32)
    with pytest.raises(verifier.Wrong) as caught:
        verifier.Subject(graph).check([x], ("graph",))
    assert f"rewrite rule {name!r}" in caught.value.what


def quantised_layers() -> Any:
    """A graph that every quantised rewrite applies to."""
    rng = np.random.default_rng(1)
    weights = rng.integers(-9, 9, (6, 6)).astype(np.int8)
    kernels = rng.integers(-9, 9, (6, 6, 1, 1)).astype(np.int8)
    scale, zero = np.float32(0.02), np.uint8(128)

    def again(x: Any, zero: Any = zero) -> Any:
        return tz.dequantize_linear(tz.quantize_linear(x, scale, zero), scale, zero)

    def layers(x: Any) -> Any:
        x = again(x)
        y = again(tz.conv(x, tz.dequantize_linear(kernels, scale)) + 0.1)
        y = tz.max(y, axis=-1)
        z = again(again(y @ tz.dequantize_linear(weights, scale) + np.float32(0.3)
                        + np.float32(0.2)))
        return again(again(tz.concat([z, again(y)], axis=-1)), np.int8(0))

    return trace(layers, [TensorType((2, 6, 6, 5), float32)], name="quantised")[0]


def test_a_rule_among_many_is_found() -> None:
    """Blame is laid on the rewrite at which the value goes wrong, in the order of applying."""
    def chain(x: Any) -> Any:
        for _ in range(20):
            x = tz.negative(tz.negative(x)) * 1.0 + 0.5
        return tz.tanh(x)

    before = list(rewriting._user_rules)
    rewrite_rule(P.tanh(Wild("x")), name="tanh is sine")(lambda x: tz.sin(x))
    try:
        error = blamed(chain, np.ones(4, np.float32), kinds=("random",))
    finally:
        rewriting._user_rules[:] = before
    assert "'tanh is sine' on tanh" in (error.operator or "")


# ---------------------------------------------------------------- bounds
def bounds_of(function: Any, *arrays: np.ndarray) -> Bounded:
    types = [TensorType(a.shape, as_dtype(a.dtype)) for a in arrays]
    graph = verifier.Subject(trace(function, types, name="bounds")[0]).primitive
    return error_bounds.run(graph, arrays)[graph.outputs[0]]


def test_bounds_are_tight_where_nothing_cancels() -> None:
    x = np.linspace(1, 2, 9, dtype=np.float32)
    bounded = bounds_of(lambda x: x * x + x, x)
    assert (bounded.error <= 4 * float32.eps * bounded.value).all()
    assert (bounded.error > 0).all()


def test_bounds_grow_where_terms_cancel() -> None:
    x = np.full(4, 3.0, np.float32)
    bounded = bounds_of(lambda x: (x * 1e8 + 1.0) - x * 1e8, x)
    assert (bounded.error > 1).all()


def test_bounds_of_exact_operators_are_zero() -> None:
    x = np.linspace(-2, 2, 9, dtype=np.float32)
    assert not bounds_of(lambda x: tz.maximum(-tz.absolute(x), x), x).error.any()
    assert not bounds_of(lambda x: tz.sort(x)[::-1], x).error.any()
    assert not bounds_of(lambda n: n * n + 1, np.arange(5, dtype=np.int32)).error.any()


def test_a_decision_on_an_inexact_value_is_left_open() -> None:
    # 0.1 * 10 may be just below 1 or 1, so its floor may be 0 or 1.
    x = np.array([0.1, 0.25], np.float32)
    for decide in (lambda x: tz.floor(x * 10 + 0.0), lambda x: tz.astype(x * 10, dtype="int32"),
                   lambda x: x * 10 >= 1.0):
        error = bounds_of(decide, x).error
        assert error[0] > 0.5 and error[1] == pytest.approx(0, abs=1e-5)


def test_overflow_is_expected_of_results_and_left_open_inside() -> None:
    x = np.array([3e38, 1.0], np.float32)
    product = bounds_of(lambda x: x * 10, x)
    assert compare(np.float32([np.inf, 10]), product, float32).index is None
    assert compare(np.float32([3e38, 10]), product, float32).index == (0,)
    # -inf + 3e39 is nan where the product is rounded, and -inf where it is fused with the sum.
    assert np.isinf(bounds_of(lambda x: x * 10 - np.float32(np.inf), x).error[0])


def test_functions_that_swing_are_left_open_where_their_argument_is_too_inexact() -> None:
    x = np.array([1e9, 1.0], np.float32)
    error = bounds_of(lambda x: tz.sin(x * 1.1), x).error
    assert np.isinf(error[0]) and error[1] < 1e-5


def test_a_pole_that_may_have_been_crossed_is_left_open() -> None:
    x = np.array([np.pi / 2, 1.0], np.float16)
    error = bounds_of(lambda x: tz.tan(x * 1.0001), x).error
    assert np.isinf(error[0]) and error[1] < 0.1
    # -1 - 6e-8 is -1 in float16: a power of a negative number exists for only one of the two.
    tiny = np.array([-6e-8, 0.5], np.float16)
    error = bounds_of(lambda y: tz.power(tz.full((2,), -0.5, "float16"), y - 1), tiny).error
    assert np.isinf(error[0]) and error[1] == pytest.approx(0, abs=1e-5)


def test_infinity_times_what_may_have_vanished_is_left_open() -> None:
    tiny, inf = np.float16([[6e-8, 1.0]]), np.float16([[-np.inf], [1.0]])
    assert np.isinf(bounds_of(lambda x, y: (x * 0.3) @ y, tiny, inf).error[0, 0])
    assert np.isfinite(bounds_of(lambda x, y: (x * 0.3) @ y, tiny, np.ones_like(inf)).error[0, 0])


def test_many_multiples_of_an_inexact_divisor_leave_nothing_known() -> None:
    x, y = np.float32([1e6, 1.0]), np.float32([0.1, 0.3])
    error = bounds_of(lambda x, y: tz.fmod(x, y * 1.1), x, y).error
    assert np.isinf(error[0]) and error[1] < 1e-4


@pytest.mark.parametrize("dtype", [float64, float32, float16, bfloat16])
def test_comparison_knows_the_type(dtype: Any) -> None:
    exact = Bounded(np.array([1.0, np.nan, np.inf]), np.zeros(3))
    good = np.array([1.0, np.nan, np.inf]).astype(dtype.np)
    assert compare(good, exact, dtype).index is None
    for at, wrong in ((0, 1 + 4 * dtype.eps), (1, 0.0), (2, -np.inf)):
        bad = good.copy()
        bad[at] = wrong
        difference = compare(bad, exact, dtype)
        assert difference.index == (at,)
    assert compare(np.array([5]), Bounded(
        np.array([4]), np.zeros(1)), int32).index == (0,)


# ---------------------------------------------------------------- samples
def test_samples_cover_what_they_promise(rng: np.random.Generator) -> None:
    example = [np.ones((8, 16), np.float32), np.arange(3)]
    for kind in samples.KINDS:
        for sample in samples.samples(example, bfloat16, kind, rng):
            floats, integers = sample.arrays
            assert floats.dtype == ml_dtypes.bfloat16 and integers.dtype == np.int64
            assert set(integers.reshape(-1).tolist()) <= {0, 1, 2}
            if kind == "one":
                assert floats.size == 1
            if kind == "empty":
                assert 0 in (floats.size, integers.size)
            if kind == "strided":
                assert not floats.flags.c_contiguous
            if kind == "special":
                assert np.isnan(floats.astype(np.float32)).any()
    shapes = {s.types for s in samples.samples(example, float32, "symbolic", rng)}
    assert len(shapes) == 1, "one compilation for all sizes"


def test_packed_constants_and_shared_kernels_are_checked() -> None:
    """Kernels get constants as they want them at every level, and one kernel serves two layers."""
    weights = np.random.default_rng(0).normal(size=(2, 6, 6)).astype(np.float32)

    def layers(x: Any) -> Any:
        for w in weights:
            x = tz.relu(tz.matmul(x, w))
        return x

    graph, _ = trace(layers, [TensorType((4, 6), float32)], name="layers")
    subject = verifier.Subject(graph)
    first, second = subject.lowering.functions
    assert first is second and list(first.packed) == [1]
    row = Row("float32")
    subject.check([np.ones((4, 6), np.float32)], notes=row)
    assert set(row.elements) == {"graph", "expr", "loop", "code"}


def test_numbers_that_fusion_makes() -> None:
    """A scatter that starts from a number reads it, and no graph holds it."""
    places = np.array([1, 2, 2, 8, 0, 3, 1])
    tz.verify(tz.jit(lambda i: tz.bincount(i, length=9)), places)


# ---------------------------------------------------------------- stairs, types, what has no kernel
@pytest.mark.parametrize("name", ["remainder", "fmod"])
def test_steps_over_many_stairs_of_a_remainder_say_nothing_of_its_slope(name: str) -> None:
    report = tz.verify(getattr(tz, name), dtypes=["float32"], kinds=["odd"])
    assert report.elements("gradient") > 500


def test_a_wrong_slope_of_a_remainder_is_found() -> None:
    def rule(node: Any, g: Any) -> Any:
        x, y = node.inputs
        return [g, g * tz.floor(x / y)]

    @tz.op(name="test_remainder", grad=rule)
    def remainder(x: Any, y: Any) -> Any:
        return tz.remainder(x, y)

    assert blamed(remainder).level == "gradient"


def test_a_conversion_that_only_float32_has_is_verified_but_for_its_slope() -> None:
    report = tz.verify(lambda x: tz.bitcast(x, dtype="int32"), np.ones(7, np.float32),
                       dtypes=["float32"])
    assert report.elements("code") and not report.elements("gradient")
    assert any("level gradient" in line for line in report.skipped)


def test_a_float_that_is_widened_stays_what_it_is() -> None:
    x = np.float32([0.1, 3e38])
    assert bounds_of(lambda x: tz.astype(x, "float64"), x).exact
    assert bounds_of(lambda x: tz.astype(x, "float32"), x).exact
    assert not bounds_of(lambda x: tz.astype(x, "float16"), x).exact


def test_what_needs_no_kernel_says_so() -> None:
    report = tz.verify(lambda x: tz.real(x), np.ones((2, 3), np.float32), dtypes=["float32"],
                       kinds=["random"])
    assert report.elements("code") and not report.elements("expr")
    assert any("memory seen otherwise" in line for line in report.skipped)


def test_what_has_no_inputs_is_compared_at_the_level_of_graphs() -> None:
    assert tz.verify(lambda: tz.arange(start=9), kinds=["random"]).elements("graph") == 9


def test_slopes_of_a_sort_between_equal_elements_blame_nobody() -> None:
    x = np.float32([0.0, -0.0, 1.5, -1.5, 1e-40])
    for seed in range(12):  # the weights of the results decide how much of a bend is seen
        tz.verify(lambda x: tz.sort(x), x, dtypes=["float32"], kinds=["given"], seed=seed)
