"""What all tests share: repeatable property tests, a private cache, and skips with reasons."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import tempfile

# Before anything imports terrazzo, which reads its settings then. Workers of pytest-xdist inherit
# the variable, so all share one cache, and no test reads or fills the user's own.
if "TZ_CACHE_DIR" not in os.environ:
    os.environ["TZ_CACHE_DIR"] = tempfile.mkdtemp(prefix="terrazzo-tests-")
    atexit.register(shutil.rmtree, os.environ["TZ_CACHE_DIR"], ignore_errors=True)

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# Compiling inside a property takes a varying time, so deadlines would only measure the machine.
settings.register_profile(
    "dev", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

PACKAGE_MARKERS = ("torch", "triton", "onnx")
NVIDIA_DEVICE = "/dev/nvidiactl"


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name in PACKAGE_MARKERS:
        if item.get_closest_marker(name) and importlib.util.find_spec(name) is None:
            pytest.skip(f"needs the package {name}")
    if item.get_closest_marker("gpu") and not os.path.exists(NVIDIA_DEVICE):
        pytest.skip("needs a CUDA device")


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers that are the same in every run."""
    return np.random.default_rng(20240229)
