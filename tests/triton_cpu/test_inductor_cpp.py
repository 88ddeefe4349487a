"""torch.compile with `cpu_backend = "triton"` gives what inductor's C++ backend gives.

The same functions, compiled with both. A file of C++ takes seconds to compile, so that one function
stands for all families here, and each family by itself is `slow`, as are steps of training.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from inductor_cases import (  # noqa: E402
    CASES,
    TRAININGS,
    Launches,
    compiled,
    floats,
    inductor,
    integers,
    train,
)
from torch.nn import functional as F  # noqa: E402

pytestmark = [pytest.mark.triton, pytest.mark.torch,
              pytest.mark.filterwarnings("ignore::DeprecationWarning"),
              pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")),
                                 reason="inductor's C++ backend needs a C++ compiler")]


@pytest.fixture(scope="module", autouse=True)
def one_cache() -> Iterator[None]:
    """A cache of this file's own, as the C++ backend compiles its headers once for each."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


def with_both(function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """What a function gives when compiled to C++, and to Triton."""
    results = []
    for backend in ("cpp", "triton"):
        torch.manual_seed(0)
        with inductor(backend):
            results.append(compiled(function, *(a.clone() for a in args))[0])
    return results[0], results[1]


# ---------------------------------------------------------------- operators
def test_families(launches: Launches) -> None:
    """Pointwise, reductions, softmax, norms, scatter, sort and cumsum, each of the one before."""
    def function(x: torch.Tensor, w: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pointwise = F.gelu(x) * w + x.sin() / (1 + x.exp())
        sums = pointwise.sum(0), pointwise.var(-1), pointwise.argmax(-1)
        softmax = pointwise.softmax(-1)
        norm = F.layer_norm(softmax, (33,), w, sums[0])
        scattered = norm.index_put((rows,), pointwise[:5], accumulate=True)
        order = scattered[:, :9].sort(stable=True)
        return pointwise, *sums, softmax, norm, scattered, *order, scattered.cumsum(-1)

    theirs, mine = with_both(function, floats(17, 33), floats(33, seed=1), integers(0, 17, 5))
    assert launches.count > 0
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_operators(name: str, launches: Launches) -> None:
    case = CASES[name]
    theirs, mine = with_both(case.function, *case.args)
    assert launches.count > 0
    torch.testing.assert_close(mine, theirs, rtol=case.tolerance, atol=case.tolerance,
                               equal_nan=True)


# ---------------------------------------------------------------- random numbers
def test_random_numbers_come_from_the_same_words() -> None:
    """Both backends draw the same words of Philox, element for element, if a seed has 32 bits.

    They are not the same numbers, by torch's and Triton's own design: the C++ backend cuts seeds to
    32 bits, where Triton's key has 64; and of a word C++ drops the sign (`word & 0x7fffffff`) where
    `tl.rand` folds it (`-word - 1`), so that half the numbers are mirrored, u against 1 - u.
    """
    draw = torch.ops.prims

    def function(seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shape = [40, 100]
        return (draw.inductor_randint(-5, 2**40, shape, seed),
                draw.inductor_random(shape, seed, "rand"),
                draw.inductor_random(shape, seed, "randn"))

    theirs, mine = with_both(function, torch.tensor(2**32 - 7))
    integers, uniform, normal = zip(theirs, mine, strict=True)
    assert torch.equal(*integers)
    same = uniform[0] == uniform[1]
    assert 0.45 < same.float().mean() < 0.55
    torch.testing.assert_close(uniform[1][~same], 1 - uniform[0][~same], rtol=0, atol=1e-6)
    # Box-Muller of the same words: the angles are the same, as a cosine does not see the mirror;
    # the radius is that of u in Triton, that of 1 - u in C++.
    cosines = [normal / (-2 * u.log()).sqrt() for normal, u in (
        (normal[0].double(), 1 - uniform[0].double()), (normal[1].double(), uniform[1].double()))]
    torch.testing.assert_close(cosines[1], cosines[0], rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- training
@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_training(name: str, launches: Launches) -> None:
    training = TRAININGS[name]
    mine = train(training, "triton")
    assert launches.count > 20
    torch.testing.assert_close(mine, train(training, "cpp"), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine, train(training, None), rtol=1e-4, atol=1e-5)
