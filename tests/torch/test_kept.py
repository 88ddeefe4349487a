"""What AOTAutograd keeps of our programs is found again, and only where it is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from terrazzo.errors import IndexFault  # noqa: E402
from terrazzo.graph import rewrite  # noqa: E402
from terrazzo.graph.patterns import P, Wild  # noqa: E402
from terrazzo.knobs import knobs  # noqa: E402
from terrazzo.torch import backend  # noqa: E402
from terrazzo.torch.aten import registry  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def run(model: Any, *given: Any, grad: bool = False, **kwargs: Any) -> tuple[Any, Any]:
    """The result of a model as a new process would compile it, and what the cache did."""
    torch._dynamo.reset()
    counters.clear()
    with torch.set_grad_enabled(grad):
        result = torch.compile(model, backend=backend.terrazzo, **kwargs)(*given)
    seen = counters["aot_autograd"]
    return result, tuple(seen[f"autograd_cache_{name}"] for name in ("hit", "miss", "saved"))


MISSED, FOUND, LEFT_ALONE = (0, 1, 1), (1, 0, 0), (0, 0, 0)


def view_and_torch(x: Any) -> Any:
    """With views, draws of torch's, and several results."""
    y = (x.t() * 2).contiguous()
    return y.view(-1), nn.functional.dropout(x, 0.5, True), x[:2]


def model() -> Any:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


@pytest.mark.parametrize("make", [model, lambda: view_and_torch], ids=["model", "views"])
def test_found_again(make: Callable[[], Any]) -> None:
    function, x = make(), torch.randn(4, 6)
    torch.manual_seed(1)
    first, missed = run(function, x)
    torch.manual_seed(1)
    second, found = run(function, x)
    assert (missed, found) == (MISSED, FOUND)
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    with torch.no_grad():
        torch.manual_seed(1)
        torch.testing.assert_close(second, function(x))
    other = torch.randn(4, 6)  # other parameters and inputs, the same code
    if isinstance(function, nn.Module):
        function = make()
        result, found = run(function, other)
        assert found == FOUND
        torch.testing.assert_close(result, function(other))


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_found_looks_at_indices_as_well(dynamic: bool) -> None:
    table = nn.Embedding(9, 4)
    for hits in (0, 1):
        result, (found, _, _) = run(table, torch.tensor([8, 0, 3]), dynamic=dynamic)
        assert found == hits
        torch.testing.assert_close(result, table.weight[[8, 0, 3]].detach())
        with pytest.raises(IndexFault, match=r"index 9 .* from 0 to 8"), torch.no_grad():
            torch.compile(table, backend=backend.terrazzo, dynamic=dynamic)(
                torch.tensor([8, 9, 3]))


def test_options_settings_and_sizes_are_told_apart() -> None:
    function, x = model(), torch.randn(4, 6)
    assert run(function, x)[1] == MISSED
    assert run(function, x, options={"threads": 1})[1] == MISSED
    with knobs.override(opt_level="none"):
        assert run(function, x)[1] == MISSED
    assert run(function, torch.randn(5, 6))[1][0] == 0
    assert run(function, x)[1] == FOUND


def test_found_whether_or_not_inductor_has_compiled_before(
        monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import codecache

    function, x = model(), torch.randn(4, 6)
    with monkeypatch.context() as patched:  # as Inductor leaves it when it has registered devices
        patched.setitem(codecache.custom_backend_passes, "a device", None)
        patched.setitem(codecache.custom_backend_passes, "another one", None)
        assert run(function, x)[1] == MISSED
    assert run(function, x)[1] == FOUND


def test_nothing_is_kept_where_the_key_tells_too_little() -> None:
    function, x = model(), torch.randn(4, 6)
    with torch.library._scoped_library("tz_test_kept", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        twice = torch.ops.tz_test_kept.twice
        assert run(lambda x: twice(x) + 1, x)[1] == LEFT_ALONE
    assert run(function, x, options={"freeze": True})[1] == LEFT_ALONE
    with knobs.override(cache=False):
        assert run(function, x)[1] == LEFT_ALONE


class Checkpointed(nn.Module):
    """With dropout, whose masks are drawn again for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.LayerNorm(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(checkpoint(self.inner, x, use_reentrant=False))


def convnet() -> Any:
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
                         nn.Flatten(), nn.Linear(64, 3))


def trained(function: Any, x: Any, **kwargs: Any) -> tuple[list[Any], tuple[int, ...]]:
    """Losses, gradients and buffers of two steps as a new process would compile them."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(1)
    compiled = torch.compile(function, backend=backend.terrazzo, **kwargs)
    optimizer = torch.optim.AdamW(function.parameters(), lr=0.1)
    seen: list[Any] = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = compiled(x).square().mean()
        assert not torch._functorch.config.bundled_autograd_cache
        loss.backward()
        assert not torch._functorch.config.bundled_autograd_cache  # for Inductor and others
        optimizer.step()
        seen += [loss.detach(), *(p.grad.clone() for p in function.parameters()),
                 *(b.clone() for b in function.buffers())]
    told = counters["aot_autograd"]
    return seen, tuple(told[f"autograd_cache_{name}"] for name in ("hit", "miss", "saved"))


@pytest.mark.parametrize("make, shape", [
    (model, (4, 6)), (convnet, (2, 3, 6, 6)), (Checkpointed, (4, 6))],
    ids=["mlp", "convnet", "checkpointed"])
def test_training_is_found_again(make: Callable[[], Any], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    torch.manual_seed(5)
    first, missed = trained(make(), x)
    torch.manual_seed(5)
    second, found = trained(make(), x)
    assert (missed, found) == (MISSED, FOUND)
    for a, b in zip(second, first, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert len({float(loss) for loss in (first[0], first[len(first) // 2])}) == 2  # it learned


def test_what_asks_for_gradients_is_told_apart() -> None:
    function, x = model(), torch.randn(4, 6)
    assert run(function, x)[1] == MISSED
    assert trained(function, x)[1] == MISSED
    assert run(function, x)[1] == FOUND
    function.zero_grad()
    for p in function[0].parameters():
        p.requires_grad_(False)
    torch._dynamo.reset()
    counters.clear()
    loss = torch.compile(function, backend=backend.terrazzo)(x).sum()
    loss.backward()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 0
    assert function[0].weight.grad is None
    torch.testing.assert_close(function[2].bias.grad[0], torch.tensor(4.0))


def test_a_graph_found_again_may_be_retained() -> None:
    function, x = model(), torch.randn(4, 6)
    assert trained(function, x)[1] == MISSED
    function.zero_grad()
    torch._dynamo.reset()
    counters.clear()
    loss = torch.compile(function, backend=backend.terrazzo)(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    torch.testing.assert_close(function[2].bias.grad, torch.full((3,), 8.0))


def test_a_forward_pass_alone_is_not_kept() -> None:
    function, x = model(), torch.randn(4, 6)
    assert run(function, x, grad=True)[1] == (0, 1, 0)  # the backward pass comes when asked for
    assert not torch._functorch.config.bundled_autograd_cache


def images() -> Any:
    """Code for these relies on sizes of some pixels at least."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(2))


@pytest.mark.parametrize("make, shapes", [
    (model, [(4, 6), (7, 6), (2, 6)]), (images, [(2, 3, 20, 24), (3, 3, 9, 30), (2, 3, 4, 4)]),
    (lambda: view_and_torch, [(4, 6), (5, 3), (2, 9)])], ids=["model", "images", "views"])
def test_sizes_that_vary_are_found_again(make: Callable[[], Any], shapes: list[Any]) -> None:
    function = make()
    for expected in MISSED, FOUND:
        assert run(function, torch.randn(shapes[0]), dynamic=True)[1] == expected
        compiled = torch.compile(function, backend=backend.terrazzo, dynamic=True)
        for shape in shapes:  # the first is found, and others if they may run the same code
            x = torch.randn(shape)
            with torch.no_grad():
                torch.manual_seed(1)
                ours = compiled(x)
                torch.manual_seed(1)
                torch.testing.assert_close(ours, function(x))


def test_training_with_sizes_that_vary_is_found_again() -> None:
    torch.manual_seed(5)
    first, missed = trained(model(), torch.randn(4, 6), dynamic=True)
    torch.manual_seed(5)
    second, found = trained(model(), torch.randn(4, 6), dynamic=True)
    assert (missed, found) == (MISSED, FOUND)
    for a, b in zip(second, first, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_sizes_that_data_tells_are_not_kept() -> None:
    def chosen(x: Any) -> Any:
        return x.masked_select(x > 0) * 2

    x = torch.randn(4, 6)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for _ in range(2):
            ours, seen = run(chosen, x)
            assert seen[0] == seen[2] == 0
            torch.testing.assert_close(ours, chosen(x))


def test_a_damaged_entry_is_made_again(tmp_path: Any) -> None:
    function, x = model(), torch.randn(4, 6)
    expected, _ = run(function, x)
    files = [f for f in (tmp_path / "aotautograd").rglob("*") if f.is_file()]
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        at = content.find(b"TZX")
        middle = (at if at >= 0 else 0) + 600
        content[middle:middle + 8] = b"\xff" * 8
        file.write_bytes(bytes(content))
    result, seen = run(function, x)
    assert seen[0] == 0
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


SECOND_PROCESS = """
import sys
import torch
from torch._dynamo.utils import counters

model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU())
x = torch.ones(4, 6)
with torch.no_grad():
    found = torch.compile(model, backend="terrazzo")(x)
    torch.testing.assert_close(found, model(x))
print(counters["aot_autograd"]["autograd_cache_hit"], *sys.modules)
"""


def test_a_process_that_finds_its_graphs_loads_nothing_that_makes_code(tmp_path: Any) -> None:
    places = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),
              "TZ_CACHE_DIR": str(tmp_path / "tz")}
    makers = {"terrazzo.ops", "terrazzo.graph.ir", "terrazzo.compiler.lowering",
              "terrazzo.torch.aten", "terrazzo.torch.program"}
    loaded = []
    for _ in range(2):
        made = subprocess.run([sys.executable, "-c", SECOND_PROCESS], capture_output=True,
                              text=True, env={**os.environ, **places}, check=True, timeout=300)
        loaded.append(made.stdout.split())
    assert [words[0] for words in loaded] == ["0", "1"]
    assert makers <= set(loaded[0])
    assert not makers & set(loaded[1])
    if torch.__version__ >= "2.13":  # others may need more of it for their keys
        assert "torch._inductor.scheduler" not in loaded[1]


def test_rules_and_converters_of_the_users_are_noticed() -> None:
    function, x = model(), torch.randn(4, 6)
    assert run(function, x)[1] == MISSED
    rules = list(rewrite._user_rules)
    try:
        rewrite.rewrite_rule(P.exp(P.log(Wild("x"))), name="test_kept")(lambda x: x)
        assert run(function, x)[1] == LEFT_ALONE
    finally:
        rewrite._user_rules[:] = rules
        knobs.renew()
    try:
        registry.aten("frexp.test_kept")(lambda x: x)
        assert run(function, x)[1] == LEFT_ALONE
    finally:
        del registry.CONVERTERS["aten.frexp.test_kept"]
    assert run(function, x)[1] == FOUND
