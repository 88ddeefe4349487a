"""Networks learn on the device as on the CPU: their losses differ by no more than rounding does.

What rounding does is measured, not assumed: the same training on the CPU, in float32 or with
autocast, with the samples of each batch in other orders, and all of it held against float64.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]
EXAMPLE = Path(__file__).parents[2] / "examples" / "gcu" / "train.py"
NETWORKS = ("convnet", "transformer")
TIMES = 4.0  # what the CPU's own distance may be exceeded by: three runs are few to know it from


@cache
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gcu_train", EXAMPLE)
    assert spec is not None and spec.loader is not None
    sys.modules["gcu_train"] = made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small networks learn faster so, where the processor is shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(before)


@cache
def on_the_cpu(network: str, autocast: bool, epochs: int) -> tuple[list[float], list[float]]:
    """Losses in float64, and how far from them the CPU's own may be, step by step."""
    train, run = example().train, example().Run(network, "cpu", epochs=epochs)
    exact = train(replace(run, double=True))
    others = [train(replace(run, autocast=autocast, order=order)) for order in (None, 1, 2)]
    apart = [max(abs(losses[step] - exact[step]) for losses in others)
             for step in range(len(exact))]
    # Of bfloat16 a step tells little, as it may round well by chance: the whole run does.
    return exact, [max(apart)] * len(apart) if autocast else list(accumulate(apart, max))


def compare(network: str, compiled: str, autocast: bool, epochs: int) -> None:
    exact, noise = on_the_cpu(network, autocast, epochs)
    assert 0 < noise[-1] < (2e-2 if autocast else 2e-5)  # else it would hide anything
    module: Any = torch.gcu
    module.reset_fallbacks()
    losses = example().train(example().Run(network, "gcu", compiled, autocast, epochs))
    assert len(losses) == len(exact) == 4 * epochs
    far = [f"step {step}: {found} for {wanted}, {abs(found - wanted) / own:.1f} times the CPU's own"
           for step, (found, wanted, own) in enumerate(zip(losses, exact, noise))
           if not abs(found - wanted) <= TIMES * own]
    assert not far, far
    assert losses[-1] < 0.9 * losses[0]
    assert module.fallbacks() == {}


@pytest.mark.parametrize("compiled", ["none", "terrazzo"])
@pytest.mark.parametrize("network", NETWORKS)
def test_two_epochs(device: ModuleType, network: str, compiled: str) -> None:
    compare(network, compiled, autocast=False, epochs=2)


@pytest.mark.parametrize("network", NETWORKS)
def test_two_epochs_with_autocast(device: ModuleType, network: str) -> None:
    compare(network, "none", autocast=True, epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("compiled", ["none", "terrazzo", "inductor"])
@pytest.mark.parametrize("network", NETWORKS)
def test_ten_epochs(device: ModuleType, network: str, compiled: str, autocast: bool) -> None:
    compare(network, compiled, autocast, epochs=10)


def test_a_device_that_computes_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One loss of eight that is off by a millionth of itself is."""
    train = example().train

    def off(run: Any) -> Any:
        losses = train(replace(run, device="cpu"))
        return [loss + 5e-6 * (step == 5) for step, loss in enumerate(losses)]

    on_the_cpu("convnet", False, 2)
    monkeypatch.setattr(example(), "train", off)
    with pytest.raises(AssertionError, match="step 5"):
        compare("convnet", "none", False, 2)
