"""The device of PyTorch for tests: registered once in a process, its native part built once."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(scope="session", autouse=True)
def device() -> ModuleType:
    """`torch.gcu`."""
    from terrazzo.torch_device import register
    from terrazzo.torch_device.build import OLDEST

    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
        pytest.skip(f"the device needs torch {OLDEST}, and this is {torch.__version__}")
    made = register()
    made.init()
    return made


@pytest.fixture(scope="session")
def whole(device: ModuleType) -> None:
    """For tests of Inductor and of torch.distributed on the device."""
    from terrazzo.torch_device.build import WHOLE, is_whole

    if not is_whole():
        pytest.skip(f"Inductor and torch.distributed know the device from torch {WHOLE} on")


@pytest.fixture
def counted(device: ModuleType) -> Iterator[ModuleType]:
    """The same with calls that ran on the CPU counted from zero, and seeds as ever."""
    device.reset_fallbacks()
    torch.manual_seed(0)
    yield device


@pytest.fixture
def fresh() -> Iterator[None]:
    """Kernels are compiled in this process, and afterwards Triton compiles for what it did before.
    """
    import torch._inductor.config as config
    from triton.runtime import driver

    before = driver.active
    torch._dynamo.reset()
    torch.manual_seed(0)
    with config.patch(compile_threads=1):
        yield
    driver.set_active(before)
