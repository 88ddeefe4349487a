"""What AOTAutograd keeps of our programs is found again, and only where it is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from terrazzo.knobs import knobs  # noqa: E402
from terrazzo.torch import backend  # noqa: E402

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


def test_options_settings_and_sizes_are_told_apart() -> None:
    function, x = model(), torch.randn(4, 6)
    assert run(function, x)[1] == MISSED
    assert run(function, x, options={"threads": 1})[1] == MISSED
    with knobs.override(opt_level="none"):
        assert run(function, x)[1] == MISSED
    assert run(function, torch.randn(5, 6))[1][0] == 0
    assert run(function, x)[1] == FOUND


def test_nothing_is_kept_where_the_key_tells_too_little() -> None:
    function, x = model(), torch.randn(4, 6)
    with torch.library._scoped_library("tz_test_kept", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        twice = torch.ops.tz_test_kept.twice
        assert run(lambda x: twice(x) + 1, x)[1] == LEFT_ALONE
    assert run(function, x, grad=True)[1] == LEFT_ALONE  # the backward pass comes later
    assert run(function, x, options={"freeze": True})[1] == LEFT_ALONE
    with knobs.override(cache=False):
        assert run(function, x)[1] == LEFT_ALONE


def test_sizes_that_vary_are_not_kept_and_right() -> None:
    function = model()
    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend.terrazzo, dynamic=True)
        with torch.no_grad():
            for n in (4, 7, 2):
                x = torch.randn(n, 6)
                torch.testing.assert_close(compiled(x), function(x))


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
