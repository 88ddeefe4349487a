from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from runtime_kit import HAS_COMPILER, Kit


@pytest.fixture(scope="session")
def gcu_kit() -> Kit:
    if not HAS_COMPILER:
        pytest.skip("the runtime library is built by a C compiler")
    return Kit()


@pytest.fixture
def kit(gcu_kit: Kit) -> Kit:
    gcu_kit.lib.gcuSetDevice(0)
    return gcu_kit
