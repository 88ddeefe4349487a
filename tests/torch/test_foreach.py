"""Operators on lists of tensors, and steps of optimizers that are written with them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from terrazzo.torch import backend  # noqa: E402
from terrazzo.torch.foreach import foreach_rules, names  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def example(argument: Any, number: int) -> Any:
    """Something that an argument of a schema may be."""
    kind = str(argument.type)
    if kind == "List[Tensor]":
        return [torch.rand(4, 4) + 0.5 * number + 0.1, torch.rand(4, 4) + 0.5]
    return {"List[number]": [1.5, 0.5], "number": 2.0, "Tensor": torch.tensor(1.5)}.get(kind)


@pytest.mark.parametrize("op", foreach_rules(True), ids=str)
def test_every_operator_is_that_on_each_tensor(op: Any) -> None:
    arguments = op._schema.arguments
    args = [example(a, i) for i, a in enumerate(arguments) if not a.kwarg_only]
    if str(op).startswith(("aten._foreach_acos", "aten._foreach_asin")):
        args = [[x / 4 for x in args[0]]]
    args = args[:2] if "norm" in str(op) else args
    found, wanted = foreach_rules(True)[op](*args), op(*args)
    assert len(found) == len(wanted) == 2
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_all_of_them_have_a_rule() -> None:
    """But for those that are left out by name; whatever this process has used of them before."""
    told = subprocess.run(
        [sys.executable, "-c", "from terrazzo.torch.foreach import foreach_rules\n"
         "print(*{op._schema.name for op in foreach_rules(True)})"],
        capture_output=True, text=True, check=True, env={**os.environ, "TZ_TORCH_DEVICE": "off"})
    ruled = {n.removeprefix("aten::_foreach_") for n in told.stdout.split()}
    assert ruled == set(names()) - {"copy", "zero", "powsum"} and len(ruled) > 40
    assert ruled == {op._schema.name.removeprefix("aten::_foreach_") for op in foreach_rules(True)}


def test_numbers_of_the_host_stay_lists_where_a_chip_runs_the_rest() -> None:
    rule = foreach_rules(False)[torch.ops.aten._foreach_add.Scalar]
    assert rule([torch.tensor(1.0), torch.tensor(2.0)], 1) is NotImplemented
    assert [x.tolist() for x in rule([torch.ones(2)], 1)] == [[2, 2]]


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.Adam(p, foreach=True), lambda p: torch.optim.AdamW(p, foreach=True),
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True)], ids=["adam", "adamw", "sgd"])
def test_a_step_is_compiled_as_a_whole(make: Any) -> None:
    def steps(compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        given = [torch.randn(n).requires_grad_() for n in (3, 5, 40)]
        optimizer = make(given)
        update = torch.compile(optimizer.step, backend=backend.terrazzo
                               ) if compiled else optimizer.step
        for _ in range(3):
            for p in given:
                p.grad = torch.cos(p.detach())
            update()
        return [p.detach() for p in given]

    programs: list[Any] = []
    backend.WATCHERS.append(programs.append)
    try:
        ours = steps(True)
    finally:
        backend.WATCHERS.pop()
    # What torch would run is named where there is any.
    assert programs and not [r for p in programs if p.calls for r in p.reasons]
    for a, b in zip(ours, steps(False)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
