"""Plans of eager calls: what they are made for, how long they are kept, what has none."""

from __future__ import annotations

import gc
import threading
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("device")]


@pytest.fixture
def native() -> ModuleType:
    from terrazzo.torch_device.start import start

    return start()


@pytest.mark.parametrize("dtype, order", [  # a type has plans of its own
    (torch.float32, (4, 2, 0, 3, 0, 7)), (torch.int64, (0, 0, 0, 2)),
    (torch.int32, (1, 2, 3, 0, 4)), (torch.float16, (3, 1, 4))], ids=str)
def test_numbers_that_decide_sizes(
    counted: ModuleType, dtype: torch.dtype, order: tuple[int, ...]
) -> None:
    """From the third number on a plan reads them, but none may that says how much there is."""
    for count in order:
        for ends in ((2, 2 + count), (0.5, 0.5 + count), (count, 0, -1)):
            found = torch.arange(*ends, dtype=dtype, device="gcu").cpu()
            torch.testing.assert_close(found, torch.arange(*ends, dtype=dtype), rtol=0, atol=0)
    assert counted.fallbacks() == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.float64], ids=str)
def test_results_have_the_type_of_where_they_go(counted: ModuleType, dtype: torch.dtype) -> None:
    for call in (lambda **out: torch.arange(7, **out), lambda **out: torch.full((3,), 2, **out),
                 lambda **out: torch.eye(3, **out), lambda **out: torch.linspace(0, 8, 5, **out)):
        out = torch.empty(0, dtype=dtype, device="gcu")
        call(out=out)
        torch.testing.assert_close(out.cpu(), call(out=torch.empty(0, dtype=dtype)))
    assert counted.fallbacks().keys() <= {"aten::linspace.out"}  # of whole numbers


def test_numbers_for_no_elements_are_read(counted: ModuleType, native: ModuleType) -> None:
    x = torch.ones(0, 3, device="gcu")
    x.add_(x, alpha=0.25).mul_(0.25)
    plans = native.plan_count()
    for step in range(100):
        x.add_(x, alpha=step + 0.5).mul_(step + 0.5)
    assert native.plan_count() <= plans + 4 and counted.fallbacks() == {}


def test_the_number_of_plans_is_bounded(native: ModuleType) -> None:
    x = torch.arange(60.0, device="gcu")
    before = native.limit_plans(5)
    try:
        for _ in range(2):  # those of the first round are gone in the second
            for n in range(1, 20):
                torch.testing.assert_close((x[:n] * 3).cpu(), torch.arange(float(n)) * 3)
            assert 0 < native.plan_count() <= 5
        first = native.plan_count()
        for _ in range(10):  # a plan that is used again is not made again
            x[:19] * 3
        assert native.plan_count() == first
    finally:
        native.limit_plans(before)
    gc.collect()
    torch.testing.assert_close((x * 3).cpu(), torch.arange(60.0) * 3)


def test_plans_go_while_others_are_made_in_threads(native: ModuleType) -> None:
    before = native.limit_plans(3)
    wrong: list[object] = []

    def work(step: int) -> None:
        x = torch.ones(64, device="gcu")
        for n in range(step, 40, 3):
            got = (x[:n] + x[:n]).cpu().tolist()
            if got != [2.0] * n:
                wrong.append((n, got))

    try:
        threads = [threading.Thread(target=work, args=(step,)) for step in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        native.limit_plans(before)
    assert not wrong


# ---------------------------------------------------------------- nothing to compute
EMPTY = [
    lambda x: x + 1, lambda x: x * x, lambda x: x.sum(0), lambda x: x.relu_(), lambda x: x > 0,
    lambda x: torch.cat([x, x], 1), lambda x: x.t() @ x[:, :2].t().t(), lambda x: x.softmax(1),
    lambda x: torch.mul(x, 2.0, out=torch.empty(0, 3, device=x.device)),
    lambda x: torch.add(x, x, out=torch.empty(5, 0, device=x.device)), lambda x: x.max(1).values,
]


@pytest.mark.parametrize("call", EMPTY)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_tensors_without_elements(counted: ModuleType, call: Any) -> None:
    host = call(torch.empty(0, 3))
    here = call(torch.empty(0, 3, device="gcu"))
    assert here.device.type == "gcu" and here.dtype is host.dtype
    torch.testing.assert_close(here.cpu(), host, rtol=0, atol=0)
    if not host.numel():
        assert not counted.fallbacks()


# ---------------------------------------------------------------- memory with gaps
PARTS = {
    "every second column": lambda t: t[:, ::2], "a column": lambda t: t[:, 3],
    "a corner": lambda t: t[2:5, 1:4], "every third row": lambda t: t[1::3],
    "of the transpose": lambda t: t.t()[1:, ::3], "the diagonal": lambda t: t.diagonal(),
    "of three dimensions": lambda t: t.view(2, 5, 12)[:, 1::2, 2:11:4],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.bool], ids=str)
@pytest.mark.parametrize("part", PARTS)
def test_what_is_written_into_gaps(counted: ModuleType, part: str, dtype: torch.dtype) -> None:
    view = PARTS[part]
    base = torch.arange(120.0).reshape(10, 12).to(dtype)
    host, here = base.clone(), base.to("gcu")
    source = (torch.arange(float(view(host).numel())).reshape(view(host).shape) - 3).to(dtype)
    view(host).copy_(source)
    view(here).copy_(source.to("gcu"))
    assert torch.equal(here.cpu(), host)
    there = source.double().to("gcu")
    view(host).copy_(source.double())
    view(here).copy_(there)
    assert torch.equal(here.cpu(), host)
    assert not counted.fallbacks()


def test_gaps_are_not_touched(counted: ModuleType) -> None:
    """Two streams write every second element of the same memory at the same time."""
    x = torch.zeros(1 << 18, device="gcu")
    ones, twos = torch.ones(1 << 17, device="gcu"), torch.full((1 << 17,), 2.0, device="gcu")
    counted.synchronize()
    streams = [counted.Stream(), counted.Stream()]
    for _ in range(10):
        for stream, start, source in zip(streams, (0, 1), (ones, twos)):
            with counted.stream(stream):
                x[start::2] = source
    counted.synchronize()
    assert torch.equal(x[::2].cpu(), ones.cpu()) and torch.equal(x[1::2].cpu(), twos.cpu())


def test_a_part_of_itself_written_into_gaps() -> None:
    host, here = torch.arange(40.0), torch.arange(40.0, device="gcu")
    for x in (host, here):
        x[4:36:2] = x[2:18].clone() if x is host else x[2:18]
    assert torch.equal(here.cpu(), host)


def test_copies_that_run_on_the_cpu_are_counted(counted: ModuleType) -> None:
    x = torch.zeros(6, 4, dtype=torch.complex64, device="gcu")
    x[:, ::2] = torch.ones(6, 2, dtype=torch.complex64, device="gcu")
    assert x.cpu().real.sum() == 12
    assert counted.fallbacks().get("aten::copy_") == 1
