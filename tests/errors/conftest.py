"""What the tests of messages share."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for messages.py: tests are no packages


@pytest.fixture
def x() -> np.ndarray:
    """A small matrix."""
    return np.ones((3, 4), np.float32)
