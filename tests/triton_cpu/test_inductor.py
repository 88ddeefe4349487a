"""torch.compile with `cpu_backend = "triton"`: inductor's own kernels, run by our backend.

Every test compares with eager torch and asserts two things more: that kernels of ours were
launched, and that nothing was left to torch's own operators but what the test names.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from terrazzo.errors import KernelAssertion

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from inductor_cases import CASES, Launches, compiled, floats, inductor, integers  # noqa: E402
from torch.nn import functional as F  # noqa: E402

pytestmark = [pytest.mark.triton, pytest.mark.torch,
              pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(autouse=True)
def on_triton() -> Iterator[None]:
    from torch._inductor.utils import fresh_cache

    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # with one, inductor leaves less to torch
    with inductor("triton"), fresh_cache():
        yield
    torch.set_num_threads(threads)


# ---------------------------------------------------------------- single operators, by families
@pytest.mark.parametrize("name", CASES)
def test_operators(name: str, launches: Launches) -> None:
    case = CASES[name]
    results, external = compiled(case.function, *(a.clone() for a in case.args))
    assert launches.count > 0
    assert external == case.external
    expected = case.function(*case.args)
    if isinstance(expected, list):
        results, expected = list(results), list(expected)
    torch.testing.assert_close(results, expected, rtol=case.tolerance, atol=case.tolerance,
                               equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_once(dtype: torch.dtype, launches: Launches) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.gelu(x) * y + 1, torch.softmax(x, -1), F.layer_norm(x, (70,)), x.sum(0)

    x, y = floats(33, 70, dtype=dtype), floats(70, dtype=dtype, seed=1)
    results, external = compiled(function, x, y)
    assert launches.count > 0 and not external
    for result, exact in zip(results, function(x.double(), y.double()), strict=True):
        assert result.dtype is dtype
        # Intermediate values are f32: two units in the last place, not one for each operator.
        torch.testing.assert_close(result.double(), exact, rtol=2 * torch.finfo(dtype).eps,
                                   atol=1e-5)


# ---------------------------------------------------------------- random numbers
def test_random_numbers(launches: Launches) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.rand_like(x), torch.randn_like(x), F.dropout(x, 0.3), torch.randint(
            0, 7, x.shape)

    x = torch.ones(400, 100)
    run = torch.compile(function, fullgraph=True)
    streams = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        streams.append(run(x))
    assert launches.count > 0
    for first, same, other in zip(*streams, strict=True):
        assert torch.equal(first, same) and not torch.equal(first, other)
    uniform, normal, dropped, whole = streams[0]
    assert uniform.min() >= 0 and uniform.max() < 1
    # Five standard errors of 40 000 draws.
    assert abs(uniform.mean() - 0.5) < 5 * 0.2887 / 200
    assert abs(normal.mean()) < 5 / 200 and abs(normal.std() - 1) < 5 / 280
    assert abs((dropped > 0).float().mean() - 0.7) < 5 * 0.458 / 200
    torch.testing.assert_close(dropped[dropped > 0].unique(), torch.tensor([1 / 0.7]))
    assert whole.unique().tolist() == list(range(7))
    assert abs(whole.float().mean() - 3) < 5 * 2 / 200


def test_random_numbers_of_torch(launches: Launches) -> None:
    """With `fallback_random` they are eager torch's own."""
    from torch._inductor import config

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.dropout(x * 2, 0.3), torch.randn_like(x) + 1

    x = floats(40, 30)
    torch.manual_seed(0)
    expected = function(x)
    torch.manual_seed(0)
    with config.patch(fallback_random=True):
        torch.testing.assert_close(compiled(function, x)[0], expected)
    assert launches.count > 0


# ---------------------------------------------------------------- sizes, gradients, errors
def test_dynamic_shapes_compile_once(launches: Launches) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1) + x.sum(0) * x.shape[0]

    run = torch.compile(function, fullgraph=True)
    for rows, columns in ((5, 7), (33, 70), (300, 3), (2, 1025)):
        x = floats(rows, columns)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
        with torch.compiler.set_stance("default" if rows == 5 else "fail_on_recompile"):
            result = run(x)
        torch.testing.assert_close(result, function(x), rtol=1e-4, atol=1e-4)
    assert launches.count > 4


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_operators_of_unknown_sizes(name: str, launches: Launches) -> None:
    case = CASES[name]
    run = torch.compile(case.function, fullgraph=True, dynamic=True)
    results = run(*(a.clone() for a in case.args))
    # Inductor's kernels sort rows of known sizes; others it leaves to torch.
    assert launches.count > 0 or name == "sort"
    torch.testing.assert_close(results, case.function(*case.args), rtol=case.tolerance,
                               atol=case.tolerance, equal_nan=True)


def test_gradient_of_embedding(launches: Launches) -> None:
    def loss(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.embedding(rows, weight, padding_idx=3) ** 2, 0.0).sum()

    rows, weight = integers(0, 20, 4, 50), floats(20, 16)
    mine, theirs = (weight.clone().requires_grad_() for _ in range(2))
    torch.compile(loss, fullgraph=True)(mine, rows).backward()
    loss(theirs, rows).backward()
    assert launches.count > 1
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, launches: Launches) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", dtype=dtype):
            hidden = F.linear(x, w)
            return F.layer_norm(hidden, (11,)), hidden.softmax(-1), hidden

    x, w = floats(33, 70), floats(11, 70, seed=1)
    results, external = compiled(function, x, w)
    assert launches.count > 0 and external == {"mm"}
    torch.testing.assert_close(results, function(x, w), rtol=1e-5, atol=1e-5)


def test_matrix_product_templates(launches: Launches) -> None:
    """`max-autotune` tries inductor's own templates of products and convolutions."""
    from torch._inductor import config

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.gelu(x @ w) + 1

    x, w = floats(20, 48), floats(48, 16, seed=1)
    # torch 2.13 cannot benchmark an epilogue on the CPU: `CpuDeviceOpOverrides.
    # import_get_raw_stream_as` gives three lines of code where one is put into an indented text.
    settings = {"benchmark_epilogue_fusion": False, "max_autotune": True,
                "max_autotune_gemm_backends": "TRITON",
                "max_autotune_gemm_search_space": "DEFAULT"}
    with config.patch(settings):
        results, external = compiled(function, x, w)
    assert launches.count > 2 and not external
    torch.testing.assert_close(results, function(x, w), rtol=1e-5, atol=1e-5)


def test_autotuning(launches: Launches) -> None:
    from torch._inductor import config

    x = floats(64, 40)
    with config.patch({"triton.autotune_pointwise": True}):
        results, _ = compiled(lambda x: x.t() * 2 + 1, x)
    assert launches.count > 2  # more than one configuration was tried
    torch.testing.assert_close(results, x.t() * 2 + 1)


@triton.jit
def _twice_and_more(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + at, mask=at < n) * 2 + tl.load(y + at, mask=at < n)
    tl.store(out + at, total, mask=at < n)


def test_kernels_of_the_user_are_part_of_the_graph(launches: Launches) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        _twice_and_more[(triton.cdiv(x.numel(), 64),)](x, y, out, x.numel(), BLOCK=64)
        return out.sin().softmax(-1)

    x, y = floats(33, 7), floats(33, 7, seed=1)
    results, _ = compiled(function, x, y)
    assert launches.count > 1
    torch.testing.assert_close(results, (x * 2 + y).sin().softmax(-1))


def test_index_out_of_bounds_is_an_error() -> None:
    run = torch.compile(lambda x, i: x[i] * 2, fullgraph=True)
    with pytest.raises(KernelAssertion, match="index out of bounds"):
        run(floats(10), torch.tensor([1, 2, 50]))
