"""Makes the backend known where terrazzo is not installed, and active for these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def cpu_backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The driver `cpu`, with a cache of its own."""
    pytest.importorskip("triton")
    from triton import knobs
    from triton.backends import Backend, backends
    from triton.runtime import driver

    from terrazzo.triton_cpu.compiler import CPUBackend
    from terrazzo.triton_cpu.driver import CPUDriver

    backends.setdefault("cpu", Backend(CPUBackend, CPUDriver))
    driver.set_active(CPUDriver())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs.cache, "dir", str(tmp_path_factory.mktemp("triton")))
        yield
    driver.reset_active()
