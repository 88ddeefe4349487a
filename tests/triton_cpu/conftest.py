"""Makes the backend known where terrazzo is not installed, and active for these tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from inductor_cases import Launches

# For `inductor_cases`: pytest's importlib mode adds no folder by itself.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def cpu_backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The driver `cpu`, with a cache of its own."""
    pytest.importorskip("triton")
    from triton import knobs
    from triton.runtime import driver

    from terrazzo.triton_cpu.activate import activate

    activate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs.cache, "dir", str(tmp_path_factory.mktemp("triton")))
        yield
    driver.reset_active()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Counts launches, so that a test can tell kernels of ours from torch's own operators."""
    from inductor_cases import Launches

    from terrazzo.triton_cpu.launch.launcher import Launcher

    counted = Launches()
    run = Launcher.__call__

    def counting(self: Launcher, *args: Any) -> None:
        counted.count += 1
        run(self, *args)

    monkeypatch.setattr(Launcher, "__call__", counting)
    return counted
