"""One session called from many threads at once: every answer is bit-equal, and memory stays."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from terrazzo.frontends.onnx.session import Session

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from onnx_models import bert, resnet

pytestmark = pytest.mark.onnx
STATUS = Path("/proc/self/status")
Feeds = dict[str, np.ndarray]


def resident_kib() -> int:
    """What this process has in memory now."""
    line = next(n for n in STATUS.read_text().splitlines() if n.startswith("VmRSS:"))
    return int(line.split()[1])


def tiny_bert() -> Session:
    return Session(bert(layers=2, hidden=64, heads=4, vocabulary=100, positions=64,
                        batch="batch", sequence="sequence"), reference=False)


def questions(count: int) -> list[Feeds]:
    """Inputs of several sizes, so that threads meet each other with different ones."""
    rng = np.random.default_rng(0)
    shapes = [(1, 16), (2, 5), (1, 64), (3, 9)]
    return [{"input_ids": rng.integers(0, 100, shapes[i % 4]),
             "attention_mask": (rng.random(shapes[i % 4]) < 0.9).astype(np.int64)}
            for i in range(count)]


def hammer(session: Session, asked: list[Feeds], threads: int, calls: int) -> int:
    """Calls whose answer differs from the one that a single thread gets, in one bit or more."""
    wanted = [session.run(feeds)[0].tobytes() for feeds in asked]

    def share(thread: int) -> int:
        order = [(thread + i) % len(asked) for i in range(calls // threads)]
        return sum(session.run(asked[i])[0].tobytes() != wanted[i] for i in order)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(share, range(threads)))


def test_answers_are_bit_equal() -> None:
    assert hammer(tiny_bert(), questions(8), threads=16, calls=800) == 0


def test_convolutions_are_bit_equal(rng: np.random.Generator) -> None:
    session = Session(resnet(depths=(1, 1), width=8, image=33, classes=10), reference=False)
    asked = [{"image": rng.standard_normal((1, 3, 33, 33), np.float32)} for _ in range(4)]
    assert hammer(session, asked, threads=8, calls=200) == 0


@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc")
def test_ten_thousand_calls_of_64_threads_leave_memory_as_it_was() -> None:
    session, asked = tiny_bert(), questions(16)
    hammer(session, asked, threads=64, calls=1984)  # by now every thread and size was there
    before = resident_kib()
    assert hammer(session, asked, threads=64, calls=10_048) == 0
    assert resident_kib() - before < 8192
