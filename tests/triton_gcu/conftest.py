"""The backend `gcu`, active for these tests, and memory of its devices without torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# For `device_arrays`: pytest's importlib mode adds no folder by itself.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def gcu_backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The driver `gcu`, with a cache of its own."""
    pytest.importorskip("triton")
    from triton import knobs
    from triton.runtime import driver

    from terrazzo.triton_gcu.activate import activate

    activate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs.cache, "dir", str(tmp_path_factory.mktemp("triton")))
        yield
    driver.reset_active()
