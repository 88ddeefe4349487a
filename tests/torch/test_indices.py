"""Indices that data tells: what eager mode refuses is an error through torch.compile as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

import terrazzo as tz  # noqa: E402
from terrazzo.errors import IndexFault  # noqa: E402
from terrazzo.torch import backend  # noqa: E402

pytestmark = pytest.mark.torch

ONES = torch.ones(3, 4)
# Rows are those of x, 5 x 4; the last index is put outside.
CALLS: dict[str, tuple[Callable[..., Any], list[Any], list[int]]] = {
    "embedding": (lambda x, i: functional.embedding(i, x), [0, 4, 2], [5, -1]),
    "embedding_bag": (lambda x, i: functional.embedding_bag(i[None], x), [0, 4, 2], [5, -1]),
    "index": (lambda x, i: x[i], [0, -5, 4], [5, -6]),
    "index, two axes": (lambda x, i: x[i, 3 - i.abs().clamp(0, 3)], [0, -1, 3], [5, -6]),
    "index_select": (lambda x, i: x.index_select(0, i), [0, 4, 2], [5, -1]),
    "gather": (lambda x, i: x.gather(0, i[:, None]), [0, 4, 2], [5, -1]),
    "take": (lambda x, i: x.take(i), [0, 19, -20], [20, -21]),
    "scatter": (lambda x, i: x.scatter(0, i[:, None], 1.0), [0, 4, 2], [5, -1]),
    "scatter_add": (lambda x, i: x.scatter_add(0, i[:, None], ONES), [0, 4, 2], [5, -1]),
    "scatter_reduce": (lambda x, i: x.scatter_reduce(0, i[:, None], ONES, "amax"), [0, 4, 2], [5]),
    "index_put": (lambda x, i: x.index_put((i,), ONES), [0, 4, -5], [5, -6]),
    "index_add": (lambda x, i: x.index_add(0, i, ONES), [0, 4, 2], [5, -1]),
    "index_copy": (lambda x, i: x.index_copy(0, i, ONES), [0, 4, 2], [5, -6]),
    "index_fill": (lambda x, i: x.index_fill(0, i, 7.0), [0, 4, -5], [5, -6]),
    "put": (lambda x, i: x.put(i, ONES[0, :3]), [0, 19, -20], [20, -21]),
    "nll_loss": (lambda x, i: functional.nll_loss(x[:3], i), [0, 3, -100], [4]),
    "cross_entropy": (lambda x, i: functional.cross_entropy(x[:3], i), [0, 3, -100], [4, -1]),
}


@pytest.mark.parametrize("name", CALLS)
def test_outside(name: str) -> None:
    function, good, bad = CALLS[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend.terrazzo, fullgraph=True)
    x = torch.randn(5, 4)
    for _ in range(2):
        torch.testing.assert_close(compiled(x, torch.tensor(good)), function(x, torch.tensor(good)))
        for index in bad:
            places = torch.tensor([*good[:-1], index])
            with pytest.raises((IndexError, RuntimeError)):
                function(x, places)
            with pytest.raises(IndexFault, match=f"index {index} is out of bounds") as caught:
                compiled(x, places)
            assert "test_indices.py" in str(caught.value.where)


@pytest.mark.parametrize("dynamic", [False, True])
def test_in_training(dynamic: bool) -> None:
    """The forward pass looks; gradients are those of eager mode."""
    torch._dynamo.reset()
    table = torch.nn.Embedding(9, 4)
    compiled = torch.compile(lambda i: table(i).square().sum(), backend=backend.terrazzo,
                             dynamic=dynamic)
    for count in (3, 6):
        places = torch.arange(count) % 9
        compiled(places).backward()
        ours, table.weight.grad = table.weight.grad, None
        table(places).square().sum().backward()
        torch.testing.assert_close(ours, table.weight.grad)
        table.weight.grad = None
        places[1] = 9
        with pytest.raises(IndexFault, match=r"index 9 .* from 0 to 8"):
            compiled(places)


def test_what_torch_calls_unsafe_is_not_looked_at() -> None:
    torch._dynamo.reset()

    def function(x: Any, i: Any) -> Any:
        return torch.ops.aten._unsafe_index(x, [i])

    compiled = torch.compile(function, backend=backend.terrazzo, fullgraph=True)
    assert compiled(torch.randn(5, 4), torch.tensor([0, 9])).shape == (2, 4)


def test_an_exported_model_looks(tmp_path: Path) -> None:
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(9, 4)

        def forward(self, i: Any) -> Any:
            return self.table(i)

    module, file = Table().eval(), tmp_path / "table.tzx"
    tz.torch.export(module, (torch.arange(3),), file,
                    dynamic_shapes={"i": {0: torch.export.Dim("n")}})
    run = tz.load(file)
    for count in (1, 5):
        places = np.arange(count)
        np.testing.assert_array_equal(run(places), module(torch.tensor(places)).detach())
        with pytest.raises(IndexFault, match="index 9 "):
            run(np.full(count, 9))


def test_nothing_is_outside_where_there_is_nothing() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, i: x[i], backend=backend.terrazzo, fullgraph=True)
    assert compiled(torch.zeros(5, 0), torch.tensor([7])).shape == (1, 0)
