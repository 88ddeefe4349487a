"""Operators of ours as operators of torch: what its compilers, autograd and exporters make of them.

The first half is about arguments and results of every kind, on a few operators; the second takes
the table of operators with gradients, each wrapped as an operator of its inputs alone.
"""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import terrazzo as tz
from terrazzo.base.nests import leaves
from terrazzo.errors import ArgumentError
from terrazzo.graph.ir import Operator, TensorType, Value, operator_named
from terrazzo.graph.scopes import trace_scope

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from terrazzo.torch.overload import overload_of  # noqa: E402

sys.path[:0] = [str(Path(__file__).parents[1] / "graph")]
from test_operator_gradients import ROWS, Case  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402


def floats(*shape: int, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(*shape, generator=generator, **options)


# ---------------------------------------------------------------- operators of every signature
@tz.op
def squared_relu(x: Any, alpha: Any = 1.0, beta: Any = 0.0) -> Any:
    """A ReLU, squared, with a scale and a shift."""
    positive = tz.maximum(x, 0.0)
    return alpha * positive * positive + beta


def torch_squared_relu(x: Any, alpha: Any = 1.0, beta: Any = 0.0) -> Any:
    return alpha * torch.relu(x) ** 2 + beta


@tz.op
def affine(x: Any, weight: Any = None, bias: Any = None) -> Any:
    scaled = x if weight is None else x * weight
    return scaled if bias is None else scaled + bias


@tz.op
def stats(x: Any, *, axis: int = -1) -> Any:
    """Two floats and an index: not everything can be differentiated."""
    return tz.sum(x * x, axis=axis), tz.argmax(x, axis=axis), tz.exp(x)


@tz.op
def joined(*xs: Any, axis: int = 0) -> Any:
    return tz.concat(xs, axis=axis)


@tz.op
def many(x: Any, *, flag: bool = True, count: int = 3, factor: float = 0.5,
         mode: Literal["sin", "cos"] = "sin", sizes: tuple[int, ...] = (1, 2),
         weights: Sequence[float] = (0.5, 2.0), limit: float | None = None,
         axes: int | Sequence[int] | None = None, dtype: tz.dtypes.DType | None = None) -> Any:
    y = (tz.sin(x) if mode == "sin" else tz.cos(x)) * factor * sum(weights) + sum(sizes) * count
    y = y if flag else -y
    y = y if limit is None else tz.minimum(y, limit)
    y = y if axes is None else tz.sum(y, axis=axes)
    return y if dtype is None else tz.astype(y, dtype)


@tz.op
def rows_kept(x: Any, *, count: int) -> Any:
    return x[:count] * 2.0


@tz.op
def nested(x: Any) -> Any:
    return {"twice": 2.0 * x, "others": [x + 1.0, (x - 1.0,)]}


OPS = {f.name: tz.torch.register(f, f"tztest::{f.name}") for f in (
    squared_relu, affine, stats, joined, many, nested)}
OPS["rows_kept"] = tz.torch.register(rows_kept, "tztest::rows_kept", results=1)
relu = OPS["squared_relu"]

SCHEMAS = {
    "affine": "(Tensor x, Tensor? weight=None, Tensor? bias=None) -> Tensor",
    "stats": "(Tensor x, *, SymInt axis=-1) -> (Tensor, Tensor, Tensor)",
    "joined": "(Tensor[] xs, *, SymInt axis=0) -> Tensor",
    "nested": "(Tensor x) -> (Tensor, Tensor, Tensor)",
    "rows_kept": "(Tensor x, *, SymInt count) -> Tensor",
    "squared_relu": "(Tensor x, Tensor? alpha=None, Tensor? beta=None) -> Tensor",
    "many": '(Tensor x, *, bool flag=True, SymInt count=3, float factor=0.5, str mode="sin", '
            "SymInt[] sizes=[1, 2], float[] weights=[0.5, 2.], float? limit=None, "
            "SymInt[]? axes=None, ScalarType? dtype=None) -> Tensor",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema(name: str) -> None:
    assert str(OPS[name].default._schema) == f"tztest::{name}{SCHEMAS[name]}"


def test_numbers_have_overloads() -> None:
    assert torch.ops.tztest.squared_relu.overloads() == ["default", "alpha", "beta", "alpha_beta"]
    x, a, b = floats(5), torch.tensor(2.0), torch.tensor(0.5)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}), ((a,), {}), ((2.0,), {}), ((a, b), {}), ((2.0, b), {}), ((a, 0.5), {}),
        ((2, 1), {}), ((), {"beta": b}), ((), {"beta": 0.5}), ((None, 0.5), {})]
    for args, kwargs in calls:
        shown = [1.0 if v is None else v for v in args]
        torch.testing.assert_close(torch.ops.tztest.squared_relu(x, *args, **kwargs),
                                   torch_squared_relu(x, *shown, **kwargs))


def test_arguments_arrive() -> None:
    x = floats(3, 4)
    given = {"flag": False, "count": 2, "factor": 2.0, "mode": "cos", "sizes": [4],
             "weights": [1.0], "limit": 1.0, "axes": [0, 1], "dtype": torch.float64}
    found = OPS["many"](x, **given)
    want = torch.minimum(-(torch.cos(x) * 2 + 8), torch.tensor(1.0)).sum().double()
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, want, rtol=1e-6, atol=0)  # a sum of float32
    torch.testing.assert_close(OPS["many"](x), torch.sin(x) * 1.25 + 9)
    torch.testing.assert_close(OPS["joined"]([x, x + 1], axis=1), torch.cat([x, x + 1], 1))
    torch.testing.assert_close(OPS["affine"](x, bias=x), x + x)
    torch.testing.assert_close(OPS["nested"](x), (2 * x, x + 1, x - 1))


CALLS: dict[str, tuple[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "one": ("squared_relu", lambda: ((floats(3, 4),), {})),
    "learned": ("squared_relu", lambda: ((floats(3, 4), floats(4), torch.tensor(0.5)), {})),
    "optional": ("affine", lambda: ((floats(3, 4), None, floats(4)), {})),
    "several": ("stats", lambda: ((floats(3, 4),), {"axis": 0})),
    "list": ("joined", lambda: (([floats(3, 4), floats(2, 4)],), {})),
    "attributes": ("many", lambda: ((floats(3, 4),), {"mode": "cos", "axes": [0], "limit": 1.0})),
    "strided": ("squared_relu", lambda: ((floats(3, 4, 5).transpose(0, 2)[:, ::2],), {})),
    "empty": ("squared_relu", lambda: ((floats(0, 4),), {})),
    "rows": ("rows_kept", lambda: ((floats(3, 4),), {"count": 2})),
}


def wanting(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments, whose tensors require gradients."""
    def one(a: Any) -> Any:
        if isinstance(a, list):
            return [one(x) for x in a]
        return a.detach().requires_grad_() if isinstance(a, torch.Tensor) else a

    return tuple(map(one, args))


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("grad", [False, True], ids=["values", "gradients"])
def test_opcheck(case: str, grad: bool) -> None:
    name, make = CALLS[case]
    args, kwargs = make()
    found = torch.library.opcheck(OPS[name], wanting(args) if grad else args, kwargs)
    assert len(found) == 4 and set(found.values()) == {"SUCCESS"}


def test_opcheck_of_number_overloads() -> None:
    for overload in ("alpha", "alpha_beta"):
        args = (floats(3, requires_grad=True), 2.0)
        found = torch.library.opcheck(getattr(torch.ops.tztest.squared_relu, overload), args)
        assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float64", "int32"])
def test_types(kind: str) -> None:
    x = (floats(3, 5) * 4).to(getattr(torch, kind))
    for args in ((), (2, 1), (2.0,)):
        found, direct = relu(x, *args), squared_relu(x, *args)
        assert torch.equal(found, direct)
        with torch._subclasses.FakeTensorMode() as mode:
            assert relu(mode.from_tensor(x), *args).dtype == direct.dtype
    if x.is_floating_point():
        assert relu(x, 2.0).dtype == x.dtype


# ---------------------------------------------------------------- gradients
def test_gradients_of_every_kind() -> None:
    given = tuple(t.double().requires_grad_() for t in
                  (floats(3, 4), floats(4), torch.tensor(0.5)))
    assert torch.autograd.gradcheck(relu, given, check_forward_ad=True, check_batched_grad=True,
                                    check_batched_forward_grad=True)
    assert torch.autograd.gradgradcheck(relu, given, check_fwd_over_rev=True,
                                        check_batched_grad=True)


def test_third_order() -> None:
    cubed = tz.torch.register(tz.op(lambda x: x * x * x * x, name="fourth"), "tztest::fourth")
    x = floats(3).double().requires_grad_()
    total, expected = cubed(x).sum(), (x ** 4).sum()
    for _ in range(3):
        (found,) = torch.autograd.grad(total, x, create_graph=True)
        (want,) = torch.autograd.grad(expected, x, create_graph=True)
        torch.testing.assert_close(found, want)
        total, expected = found.sum(), want.sum()


def test_gradient_of_some_inputs_and_results() -> None:
    x = floats(3, 4, requires_grad=True)
    total, place, _ = OPS["stats"](x)
    assert not place.requires_grad
    total.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())
    y = floats(2, 4, requires_grad=True)
    OPS["joined"]([x.detach(), y]).sum().backward()
    torch.testing.assert_close(y.grad, torch.ones(2, 4))
    with torch.no_grad():
        assert not relu(x).requires_grad
    with torch.inference_mode():
        assert relu(x).is_inference()


def test_torch_func() -> None:
    x, a = floats(4, 3), torch.tensor(2.0)
    for function in (lambda f: torch.func.grad(lambda x: f(x, a).sum())(x),
                     lambda f: torch.func.jvp(f, (x, a), (torch.ones(4, 3), a))[1],
                     lambda f: torch.func.hessian(lambda x: f(x, a).sum())(x),
                     lambda f: torch.func.jacfwd(torch.func.jacfwd(lambda x: f(x, a)))(x[0]),
                     lambda f: torch.func.jacrev(torch.func.jacrev(lambda x: f(x, a)))(x[0]),
                     lambda f: torch.func.jacrev(torch.func.jacfwd(lambda x: f(x, x)))(x[0]),
                     lambda f: torch.func.grad(
                         lambda x: torch.func.grad(lambda x: f(f(x, a), x).sum())(x).sum())(x),
                     lambda f: torch.func.vmap(f, in_dims=(1, None))(x, a),
                     lambda f: torch.func.vmap(torch.func.vmap(f), in_dims=1, out_dims=1)(x),
                     lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x, a).sum()))(x),
                     lambda f: torch.func.grad(lambda x: torch.vmap(f)(x).sum())(x),
                     lambda f: torch.autograd.functional.jacobian(f, x, vectorize=True)):
        torch.testing.assert_close(function(relu), function(torch_squared_relu))


def test_vmap_of_other_arguments() -> None:
    xs, ys = floats(5, 2, 4), floats(3, 5, 4)
    torch.testing.assert_close(
        torch.vmap(lambda x, y: OPS["joined"]([x, y]), in_dims=(0, 1))(xs, ys),
        torch.cat([xs, ys.transpose(0, 1)], 1))
    torch.testing.assert_close(torch.vmap(lambda x, w: OPS["affine"](x, None, w))(xs, xs), xs + xs)
    for found, want in zip(torch.vmap(OPS["stats"], in_dims=1)(xs),
                           (xs.square().sum(-1).T, xs.argmax(-1).T, xs.exp().transpose(0, 1)),
                           strict=True):
        torch.testing.assert_close(found, want)


def test_captured_tensors_are_constants_or_refused() -> None:
    weight = torch.full((3,), 2.0)
    capturing = tz.op(lambda x: x * weight, name="capturing")
    op = tz.torch.register(capturing, "tztest::capturing")
    torch.testing.assert_close(op(floats(3)), 2 * floats(3))
    for held in (torch.ones(3, requires_grad=True), torch.nn.Linear(3, 3)):
        with pytest.raises(ArgumentError, match="requires a gradient"):
            tz.torch.register(tz.op(_mentioning(held), name="mentions"), "tztest::mentions")


def _mentioning(held: Any) -> Callable[..., Any]:
    return lambda x: x * getattr(held, "weight", held)


# ---------------------------------------------------------------- compilers and exporters
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile(backend: str) -> None:
    if backend == "inductor" and not shutil.which(os.environ.get("CXX", "c++")):
        pytest.skip("Inductor needs a C++ compiler")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    a = torch.tensor(2.0, requires_grad=True)

    def function(f: Any, x: Any) -> Any:
        return (f(x * 2, a) + f(x, 3.0)).sin().sum()

    compiled = torch.compile(lambda x: function(relu, x), backend=counter, fullgraph=True,
                             dynamic=True)
    for n in (3, 5, 8):
        x = floats(n, 4, requires_grad=True)
        found, want = compiled(x), function(torch_squared_relu, x)
        torch.testing.assert_close(found, want)
        torch.testing.assert_close(torch.autograd.grad(found, (x, a)),
                                   torch.autograd.grad(want, (x, a)))
    assert counter.frame_count == 1


def test_sizes_from_attributes_stay_symbolic() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, y: OPS["rows_kept"](x, count=y.shape[0]), backend=counter,
                             fullgraph=True, dynamic=True)
    for n in (3, 4, 6):
        x, y = floats(n + 4, 2), floats(n, 9)
        torch.testing.assert_close(compiled(x, y), x[:n] * 2)
    assert counter.frame_count == 1


def test_sizes_that_depend_on_data() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return relu(x[x > 0], 2.0)

    exported = torch.export.export(Model(), (floats(6),))
    assert torch.ops.tztest.squared_relu.alpha in [n.target for n in exported.graph.nodes]
    for x in (-floats(6), floats(6).abs()):
        torch.testing.assert_close(exported.module()(x), 2 * x[x > 0] ** 2)


class Activation(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = torch.nn.Parameter(torch.tensor(2.0))
        self.beta = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Any) -> Any:
        y = relu(x, self.alpha, self.beta) + relu(x, 3.0, self.beta) + relu(x, beta=0.25)
        total, place, _ = OPS["stats"](y, axis=0)
        other = OPS["many"](x, mode="cos", weights=[2.0], flag=False)
        whole = OPS["many"](x, dtype=torch.int32)
        return OPS["joined"]([y, other]), total, place, whole


def test_torch_export_keeps_sizes_symbolic() -> None:
    model = Activation()
    exported = torch.export.export(model, (floats(4, 5),),
                                   dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    x = floats(7, 5)
    torch.testing.assert_close(exported.module()(x), model(x))


def test_onnx_export(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model = Activation().eval()
    assert callable(tz.torch.onnx_translations) and tz.torch.onnx_translations()
    program = torch.onnx.export(model, (floats(4, 5),), dynamo=True, verbose=False,
                                custom_translation_table=tz.torch.onnx_translations(),
                                dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    file = tmp_path / "model.onnx"
    program.save(str(file))
    session = tz.ort.InferenceSession(str(file))
    x = floats(7, 5)
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    for got, want in zip(found, model(x), strict=True):
        np.testing.assert_allclose(got, want.detach().numpy(), rtol=2e-6, atol=1e-6)


def test_compilers_of_graphs_may_open_it() -> None:
    found = overload_of(torch.ops.tztest.squared_relu.beta)
    assert found is not None and found.schema.overload == "beta"
    value = Value(TensorType((3,), tz.float32))
    with trace_scope():
        (result,) = found.values([value, None, 0.5])
    assert result.type == value.type
    assert overload_of(torch.ops.tztest.squared_relu_vjp.beta) is found.vjp
    assert overload_of(torch.ops.aten.relu.default) is None


# ---------------------------------------------------------------- autocast
def test_autocast() -> None:
    policies: dict[Any, Any] = {None: torch.float32, "lower": torch.bfloat16,
                                "float32": torch.float32, "widest": torch.float32,
                                torch.float16: torch.float16}
    halves: dict[Any, Any] = {None: torch.bfloat16, "float32": torch.float32,
                              "widest": torch.bfloat16}
    for i, (policy, want) in enumerate(policies.items()):
        op = tz.torch.register(squared_relu, f"tztest::cast{i}", autocast=policy)
        x = floats(4, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            found = op(x, torch.tensor(2.0))
            assert found.dtype == want
            if policy in halves:
                half = op(x.detach().bfloat16(), torch.tensor(2.0, dtype=torch.bfloat16))
                assert half.dtype == halves[policy]
        found.float().sum().backward()
        assert x.grad is not None and x.grad.dtype == torch.float32
        assert op(x).dtype == torch.float32


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize("name", ["squared_relu", "a::b::c", "my lib::f", "::f", "a::", 3])
def test_bad_names(name: Any) -> None:
    with pytest.raises(ArgumentError, match="is no name of a torch operator"):
        tz.torch.register(squared_relu, name)


def test_names_that_are_taken() -> None:
    with pytest.raises(ArgumentError, match="registered already"):
        tz.torch.register(stats, "tztest::squared_relu")
    with pytest.raises(ArgumentError, match="torch's own"):
        tz.torch.register(squared_relu, "aten::squared_relu")
    library = torch.library.Library("tztest_other", "FRAGMENT")
    library.define("taken(Tensor x) -> Tensor")
    library.define("half_taken_vjp(Tensor x) -> Tensor")
    for name in ("taken", "half_taken"):
        with pytest.raises(ArgumentError, match="torch has an operator"):
            tz.torch.register(squared_relu, f"tztest_other::{name}")


def test_parameters_that_torch_cannot_have() -> None:
    def refused(function: Callable[..., Any], what: str, **options: Any) -> None:
        with pytest.raises(ArgumentError, match=what):
            tz.torch.register(tz.op(function, name="refused"), "tztest::refused", **options)

    refused(lambda x, *, axis=None: x, "nothing tells torch's type of the parameter 'axis'")
    refused(lambda x, *, axis=(): x, "nothing tells torch's type")
    refused(lambda x, *, mean={}: x, "nothing tells torch's type")
    ones = np.ones(3)
    refused(lambda x, y=ones: x * y, "has a ndarray for its default")
    refused(lambda x, **rest: x, r"\*\*keywords")
    refused(lambda x, *, limit=float("inf"): x, "cannot have inf for a default")
    refused(lambda x: tz.matmul(x, np.ones((5, 7))), "cannot be found by trying")
    refused(lambda x: x, "names 'axis'", types={"axis": "int"})
    refused(lambda x: x, "is no policy", autocast="half")
    with pytest.raises(ArgumentError, match="not a function"):
        tz.torch.register(lambda x: x, "tztest::refused")  # type: ignore[arg-type]
    made = tz.torch.register(tz.op(lambda x, *, axis=None: tz.sum(x, axis=axis), name="refused"),
                             "tztest::refused", types={"axis": "SymInt[]?"})
    torch.testing.assert_close(made(floats(2, 3), axis=[1]), floats(2, 3).sum(1))


def test_rules_come_from_the_operator() -> None:
    for method in (relu.register_fake, relu.register_autograd, relu.register_vmap):
        with pytest.raises(ArgumentError, match="has all its rules"):
            method(lambda *args: None)


def test_importing_terrazzo_does_not_import_torch() -> None:
    code = "import sys, terrazzo.torch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- the table of operators
# These take tables of numbers as inputs, which by contract have no gradient.
WITHOUT = {"fft_columns", "fft_lines"}
WITHOUT_SECOND = {"lgamma"}  # its gradient is digamma, which has none
TABLE = sorted(set(ROWS) - WITHOUT)


def of_inputs(name: str, case: Case) -> tuple[Operator, list[Any]]:
    """An operator of the inputs of a case alone, and tensors for them."""
    rng = np.random.default_rng(3)
    inner = operator_named(name)
    made = [None if make is None else make(rng) for make in case.inputs]

    def body(*values: Any) -> Any:
        left = iter(values)
        given = [None if a is None else next(left) for a in made]
        if case.call is not None:
            return case.call(inner, *given)
        return inner(given, **case.attrs) if inner.variadic else inner(*given, **case.attrs)

    tensors = [torch.from_numpy(np.array(a)) for a in made if a is not None]
    body.__signature__ = inspect.Signature([  # type: ignore[attr-defined]
        inspect.Parameter(f"x{i}", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for i in range(len(tensors))])
    return tz.op(body, name=f"only_{name}"), tensors


def smooth_function(op: Any, tensors: list[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """The float results of an operator by its float inputs, and these."""
    smooth = [i for i, t in enumerate(tensors) if t.is_floating_point()]

    def function(*changed: Any) -> Any:
        given = list(tensors)
        for i, t in zip(smooth, changed, strict=True):
            given[i] = t
        return tuple(r for r in leaves(op(*given)) if r.is_floating_point())

    return function, [tensors[i].requires_grad_() for i in smooth]


@pytest.mark.parametrize("name", [
    *TABLE[::6], *(pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(TABLE)
                   if i % 6)])
def test_operators_of_the_table(name: str) -> None:
    operator, tensors = of_inputs(name, ROWS[name][0])
    count = len(leaves(operator(*tensors)))
    op = tz.torch.register(operator, f"tztable::{name}", results=count)
    found = torch.library.opcheck(op, tuple(tensors))
    assert set(found.values()) == {"SUCCESS"}
    function, wanted = smooth_function(op, tensors)
    if any(r.requires_grad for r in function(*wanted)):
        assert torch.autograd.gradcheck(function, wanted, check_forward_ad=True, fast_mode=True,
                                        check_batched_grad=True)
        if name not in WITHOUT_SECOND:
            assert torch.autograd.gradgradcheck(function, wanted, fast_mode=True)
