"""The gradient of attention for GPUs: numbers through our Triton backend, code, and memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import terrazzo as tz
from terrazzo.compiler.lowering import Lowering
from terrazzo.compiler.options import Options
from terrazzo.compiler.residuals import training_parts
from terrazzo.graph.ir import TensorType
from terrazzo.graph.trace import trace
from terrazzo.knobs import knobs

sys.path[:0] = [str(Path(__file__).parent)]

from test_cuda_attention import SLACK, exactly, launched, random  # noqa: E402

pytest.importorskip("triton")
torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.triton, pytest.mark.torch]


kernels = launched  # the simulated chip, and the names of the kernels that it launches


GRADIENT = ["k_attention_gradients_q", "k_attention_gradients_kv"]


def slopes(function: Any, given: list[Any], weights: Any) -> list[Any]:
    """Gradients by the float tensors among those given."""
    leaves = [x.detach().clone().requires_grad_(x.dtype is not torch.bool) for x in given]
    function(*leaves).backward(weights)
    return [x.grad for x in leaves if x.requires_grad]


def check(q: Any, k: Any, v: Any, mask: Any = None, **options: Any) -> None:
    given = [q, k, v] + ([] if mask is None else [mask])
    weights = random(*q.shape[:-1], v.shape[-1], dtype=str(q.dtype)[6:], seed=9)
    got = slopes(tz.jit(lambda *x: tz.scaled_dot_product_attention(*x, **options)), given, weights)
    want = slopes(lambda *x: exactly(*x, **options), [
        x if x.dtype is torch.bool else x.double() for x in given], weights.double())
    slack = 3 * SLACK[str(q.dtype).removeprefix("torch.")]
    for mine, true, x in zip(got, want, given):
        assert mine.shape == x.shape and mine.dtype is x.dtype
        torch.testing.assert_close(mine.double(), true, rtol=slack,
                                   atol=slack * max(1.0, float(true.abs().max())))


def check_kernels(names: list[str]) -> None:
    """One forward pass, which may copy what it keeps of its results, and one backward pass."""
    assert names[-2:] == GRADIENT
    forward = [name for name in names[:-2] if not name.startswith("k_copy")]
    assert 1 <= len(forward) <= 2 and all("attention_with_logsumexp" in n for n in forward)


# q, k, and the size of values: whole tiles, ragged ones, unlike lengths and sizes, shared heads, a
# single head of keys, no heads, few queries (whose forward pass is in parts).
SHAPES = [((1, 2, 256, 32), (1, 2, 256, 32), 32), ((2, 2, 130, 64), (2, 2, 130, 64), 64),
          ((1, 1, 140, 128), (1, 1, 200, 128), 128), ((4, 70, 24), (4, 150, 24), 40),
          ((1, 4, 150, 16), (1, 2, 70, 16), 16), ((2, 3, 40, 16), (2, 1, 70, 16), 16),
          ((90, 16), (70, 16), 16), ((1, 2, 9, 64), (1, 2, 1100, 64), 64),
          ((1, 4, 1, 32), (1, 2, 300, 32), 32)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "size"), SHAPES)
def test_numbers(kernels: list[str], dtype: str, causal: bool, queries: tuple[int, ...],
                 keys: tuple[int, ...], size: int) -> None:
    check(random(*queries, dtype=dtype), random(*keys, dtype=dtype, seed=1),
          random(*keys[:-1], size, dtype=dtype, seed=2), causal=causal)
    if queries[-2] > 1:
        check_kernels(kernels)
    else:  # so little that it is computed again rather than kept
        assert kernels[-2:] == GRADIENT and all("attention" in name for name in kernels)


def test_large_sizes(kernels: list[str]) -> None:
    check(*(random(1, 1, 70, 200, dtype="bfloat16", seed=s) for s in range(3)), causal=True)
    check_kernels(kernels)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("causal", [False, True])
def test_masks(kernels: list[str], dtype: str, causal: bool) -> None:
    q, k, v = (random(2, 4, n, 32, dtype=dtype, seed=n) for n in (130, 140, 140))
    seen = torch.rand(2, 1, 130, 140, generator=torch.Generator().manual_seed(3)) > 0.5
    seen[0, 0, 3:70], seen[1, :, :, 5:] = False, False  # rows that see nothing, keys nobody sees
    check(q, k, v, seen, causal=causal)
    check_kernels(kernels)
    kernels.clear()
    check(q, k[:, :2], v[:, :2], seen[0, 0], causal=causal)
    check_kernels(kernels)


@pytest.mark.parametrize("wanted", [False, True])
def test_masks_that_are_added(kernels: list[str], wanted: bool) -> None:
    q, k, v = (random(2, 2, 70, 32, seed=s) for s in range(3))
    mask = random(2, 1, 70, 70, seed=4)
    mask[0, 0, 3], mask[1, 0, :, 9] = -torch.inf, -torch.inf
    weights = random(2, 2, 70, 32, seed=9)
    function = tz.jit(tz.scaled_dot_product_attention)
    if not wanted:
        got = slopes(lambda *x: function(*x, mask), [q, k, v], weights)
        check_kernels(kernels)
    else:
        got = slopes(function, [q, k, v, mask], weights)
        assert set(GRADIENT) < set(kernels)

    def definition(q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = q @ k.mT / 32 ** 0.5 + mask.masked_fill(mask.isinf(), 0)
        return scores.masked_fill(mask.isinf(), -torch.inf).softmax(-1).nan_to_num(0) @ v

    want = slopes(definition, [x.double() for x in (q, k, v, mask)], weights.double())
    for mine, true in zip(got, want):
        torch.testing.assert_close(mine.double(), true, rtol=3e-5, atol=3e-5)


def test_views_are_read_and_written_where_they_lie(kernels: list[str]) -> None:
    x = random(2, 70, 3, 4, 32, dtype="bfloat16")

    def attend(x: Any, product: Any) -> Any:
        q, k, v = (x[:, :, i].permute(0, 2, 1, 3) for i in range(3))
        return product(q, k, v).permute(0, 2, 1, 3)

    weights = random(2, 70, 4, 32, dtype="bfloat16", seed=9)
    function = tz.jit(lambda x: tz.permute_dims(tz.scaled_dot_product_attention(
        *(tz.permute_dims(x[:, :, i], axes=(0, 2, 1, 3)) for i in range(3)), causal=True),
        axes=(0, 2, 1, 3)))
    (got,) = slopes(function, [x], weights)
    (want,) = slopes(lambda x: attend(x, lambda *y: exactly(*y, causal=True)), [x.double()],
                     weights.double())
    torch.testing.assert_close(got.double(), want, rtol=6e-2, atol=6e-2)
    assert kernels[kernels.index(GRADIENT[0]):] == [*GRADIENT, "k_add"]  # into one tensor


def test_one_tensor_is_queries_keys_and_values(kernels: list[str]) -> None:
    x, weights = random(1, 2, 40, 16), random(1, 2, 40, 16, seed=9)
    (got,) = slopes(tz.jit(lambda x: tz.scaled_dot_product_attention(x, x, x)), [x], weights)
    (want,) = slopes(lambda x: exactly(x, x, x), [x.double()], weights.double())
    torch.testing.assert_close(got.double(), want, rtol=3e-5, atol=3e-5)
    assert set(GRADIENT) < set(kernels)


def test_layers_keep_each_their_own(kernels: list[str]) -> None:
    def layers(q: Any, k: Any, attend: Any) -> Any:
        y = attend(q, k, k)
        return attend(y + q, k * y, y)

    shape = (1, 2, 200, 16)  # long enough that keeping pays
    given, weights = [random(*shape, seed=s) for s in range(2)], random(*shape, seed=9)
    got = slopes(tz.jit(lambda q, k: layers(q, k, tz.scaled_dot_product_attention)), given, weights)
    want = slopes(lambda q, k: layers(q, k, exactly), [x.double() for x in given],
                  weights.double())
    for mine, true in zip(got, want):
        torch.testing.assert_close(mine.double(), true, rtol=1e-4, atol=1e-4)
    names = [name.rstrip("_0123456789") for name in kernels]
    assert names.count(GRADIENT[0]) == names.count(GRADIENT[1]) == 2
    assert names.count("k_attention_with_logsumexp") == 2
    assert "k_scaled_dot_product_attention" not in names


def test_gradients_in_one_graph(kernels: list[str]) -> None:
    """Where value and gradient are one graph, attention is computed once."""
    def loss(q: Any, k: Any, v: Any) -> Any:
        return tz.sum(tz.square(tz.scaled_dot_product_attention(q, k, v, causal=True)))

    given = [random(1, 2, 40, 16, seed=s) for s in range(3)]
    value, got = tz.value_and_grad(loss, argnums=(0, 1, 2))(*given)
    leaves = [x.double().requires_grad_() for x in given]
    true = exactly(*leaves, causal=True).square().sum()
    true.backward()
    assert abs(float(value) - float(true.detach())) < 1e-4 * float(true.detach())
    for mine, x in zip(got, leaves):
        torch.testing.assert_close(mine.double(), x.grad, rtol=1e-4, atol=1e-4)
    assert sum("attention" in name for name in kernels) == 3


def test_gradients_of_gradients(kernels: list[str]) -> None:
    leaves = [random(1, 1, 20, 16, seed=s).requires_grad_() for s in range(3)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    found = []
    for given, attend in ((leaves, tz.scaled_dot_product_attention), (exact, exactly)):
        first = torch.autograd.grad(attend(*given).square().sum(), given, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), given))
    for mine, true in zip(*found):
        torch.testing.assert_close(mine.double(), true, rtol=1e-3, atol=1e-4)
    assert kernels


def test_sizes_that_vary(kernels: list[str]) -> None:
    with knobs.override(dynamic="auto"):
        function = tz.jit(lambda q, k, v: tz.scaled_dot_product_attention(q, k, v, causal=True))
        for n in (5, 70, 130):
            given = [random(1, 2, n, 32, dtype="bfloat16", seed=s) for s in range(3)]
            weights = random(1, 2, n, 32, dtype="bfloat16", seed=9)
            got = slopes(function, given, weights)
            want = slopes(lambda *x: exactly(*x, causal=True), [x.double() for x in given],
                          weights.double())
            for mine, true in zip(got, want):
                torch.testing.assert_close(mine.double(), true, rtol=6e-2, atol=6e-2)
    assert set(GRADIENT) < set(kernels)


def test_what_has_no_kernel_is_products_and_softmax(kernels: list[str]) -> None:
    stretched = random(1, 2, 20, 16), random(3, 2, 20, 16, seed=1), random(3, 2, 20, 16, seed=2)
    large = [random(1, 20, 160, seed=s) for s in range(3)]
    doubles = [random(2, 20, 16, dtype="float64", seed=s) for s in range(3)]
    for q, k, v in (stretched, large, doubles):
        y = exactly(q, k, v)
        weights = random(*y.shape, dtype=str(q.dtype)[6:], seed=9)
        got = slopes(tz.jit(tz.scaled_dot_product_attention), [q, k, v], weights)
        want = slopes(exactly, [x.double() for x in (q, k, v)], weights.double())
        for mine, true in zip(got, want):
            torch.testing.assert_close(mine.double(), true, rtol=1e-4, atol=1e-4)
    assert kernels and not set(GRADIENT) & set(kernels)


@pytest.mark.parametrize("causal", [False, True])
def test_no_scores_are_held(causal: bool) -> None:
    """What a step of training keeps and needs besides is far less than one matrix of scores."""
    length, size = 4096, 64
    x = TensorType((1, 1, length, size), tz.bfloat16)
    graph, _ = trace(lambda q, k, v: tz.scaled_dot_product_attention(q, k, v, causal=causal),
                     [x, x, x], "f")
    with knobs.override(cuda_simulate=True), tz.chip("cuda"):
        options = Options.now()
        parts = training_parts(graph, (0, 1, 2), options)
        assert parts is not None
        kept = parts.forward.outputs[parts.results:]
        assert [v.shape for v in kept] == [(1, 1, length, size), (1, 1, length)]
        for part in (parts.forward, parts.backward):
            plan = Lowering(part, options.chip, options=options).plan
            assert plan.arena <= 4 * length * size


@pytest.mark.parametrize(("dtype", "size", "values", "causal"), [
    ("bfloat16", 128, 128, True), ("float16", 256, 256, True), ("bfloat16", 32, 80, False),
    ("float32", 64, 64, True), ("float32", 128, 128, False)])
def test_code_for_hopper(dtype: str, size: int, values: int, causal: bool) -> None:
    q, y = (random(1, 2, 200, n, dtype=dtype) for n in (size, values))
    sums = random(1, 2, 200)
    with knobs.override(dynamic="never"):
        ptx = tz.attention_gradients.lower(y, q, q, y, y, sums, "ptx", chip="cuda", causal=causal)
    assert ptx.count(".entry") == 2 and ".target sm_90" in ptx
    assert ("wgmma" if dtype != "float32" else "mma") in ptx


@pytest.mark.parametrize(("size", "causal"), [(64, True), (128, False)])
def test_tiles_are_copied_by_descriptors(size: int, causal: bool) -> None:
    from terrazzo.chips.cuda.binaries import compiled
    from terrazzo.chips.cuda.chip import Cuda

    chip = Cuda(simulated=True)
    x = TensorType((1, 2, 256, size), tz.bfloat16)
    graph, _ = trace(lambda *x: tz.attention_gradients(*x, causal=causal),
                     [*[x] * 5, TensorType((1, 2, 256), tz.float32)], "f")
    (group,) = Lowering(graph, chip, options=Options.now(chip="cuda")).fused.groups
    kernels = chip.form(group.program).kernels
    assert len(kernels) == 2
    for kernel in kernels:
        version, types = kernel.versions[0], [t.dtype for t in kernel.tensors]
        made = compiled(version.written, types, version.constants(), version.warps,
                        [True] * len(types), False, chip.spec)
        assert "cp.async.bulk.tensor" in made.ptx and "wgmma" in made.ptx
