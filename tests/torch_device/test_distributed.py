"""Several devices, each in a process of its own, do together what one does."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("whole"), pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without torch.distributed")]

FILE = Path(__file__).with_name("ranks.py")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ranks", FILE)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


work = _loaded()


def started(count: int, folder: Path, what: str) -> list[dict[str, Any]]:
    """The answers of each rank."""
    env = {**os.environ, "TZ_TORCH_DEVICE": "gcu", "GCU_THREADS": "1", "OMP_NUM_THREADS": "1",
           "GLOO_SOCKET_IFNAME": "lo"}
    processes = [subprocess.Popen(
        [sys.executable, "-W", "ignore", str(FILE), str(rank), str(count),
         str(folder), what], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(count)]
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * count, "\n".join(said)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, device: ModuleType) -> list[dict[str, Any]]:
    """All checks with two ranks."""
    return started(2, tmp_path_factory.mktemp("two"), "all")


def on_one_device(kind: str, ranks: int) -> tuple[list[list[float]], dict[str, Any]]:
    """The same training on one device, batch after batch: losses by rank, and parameters."""
    model = work.network(kind).to("gcu")
    opt, losses = work.optimizer(model.parameters()), []
    for batch in work.batches(kind, ranks):
        parts = [torch.nn.functional.cross_entropy(model(x.to("gcu")), y.to("gcu"))
                 for x, y in batch]
        (sum(parts) / ranks).backward()
        opt.step()
        opt.zero_grad()
        losses.append([loss.item() for loss in parts])
    return [list(of_rank) for of_rank in zip(*losses, strict=True)], {
        name: value.detach().cpu() for name, value in model.named_parameters()}


def check_training(found: list[dict[str, Any]], wrap: str, kind: str, rtol: float,
                   atol: float) -> None:
    losses, parameters = on_one_device(kind, len(found))
    assert parameters
    for rank, answers in enumerate(found):
        of_rank, whole = answers[f"{wrap} {kind}"]
        torch.testing.assert_close(of_rank, losses[rank], rtol=rtol, atol=atol)
        torch.testing.assert_close(whole, parameters, rtol=rtol, atol=atol)


@pytest.mark.parametrize("kind", ["conv", "transformer"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_two_devices_learn_as_one(two: list[dict[str, Any]], wrap: str, kind: str) -> None:
    check_training(two, wrap, kind, 1e-4, 1e-5)


@pytest.mark.parametrize("wrap", ["ddp_with_search", "fsdp_in_bf16"])
def test_what_is_sent_with_half_the_bits(two: list[dict[str, Any]], wrap: str) -> None:
    check_training(two, wrap, "transformer", 3e-2, 3e-2)


@pytest.mark.slow
def test_four_devices_learn_as_one(tmp_path: Path) -> None:
    found = started(4, tmp_path, "training")
    for wrap in ("ddp", "fsdp"):
        for kind in ("conv", "transformer"):
            check_training(found, wrap, kind, 1e-4, 1e-5)


# ---------------------------------------------------------------- collectives
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collectives_are_those_of_gloo(two: list[dict[str, Any]], dtype: Any) -> None:
    for rank, answers in enumerate(two):
        found, expected = answers[f"{dtype} gcu"], answers[f"{dtype} cpu"]
        lists = found.pop("alltoall, lists")
        assert [part.tolist() for part in lists] == [
            work.values(other, dtype)[:rank + 1].tolist() for other in range(2)]
        assert found.keys() == expected.keys() and len(found) > 18
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_means_and_factors(two: list[dict[str, Any]]) -> None:
    assert [answers["means"] for answers in two] == [[1.5, 0.75, 3]] * 2


def test_works_and_futures(two: list[dict[str, Any]]) -> None:
    for answers in two:
        found = answers["futures"]
        assert found["then"] == [6.0] * 4 and found["value"] == [3.0] * 4
        assert found["same"] and found["done"] and found["success"]
        assert found["later"] == [6.0] * 4 and found["pair"] == [2.0, 2.0]
        assert found["objects"] == [{"rank": 0}, {"rank": 1}]
        assert "5 values is not 2 times one of 4" in found["wrong sizes"]


def test_collectives_take_modelled_time(two: list[dict[str, Any]], device: ModuleType) -> None:
    chip = device.get_device_properties().description
    sizes = [4 << 12, 4 << 16]
    # Copies out one after the other, and each comes back when it has gone out.
    copies = [chip.link_latency + -(-size // chip.link_bytes_per_cycle) for size in sizes]
    cycles = sum(copies) + copies[1]
    for answers in two:
        assert answers["modelled"] == pytest.approx([cycles / chip.clock_khz] * 3, rel=1e-6)


def test_the_backend_goes_by_the_name_of_the_device(two: list[dict[str, Any]]) -> None:
    from torch.distributed import Backend

    assert "gcu" in Backend.backend_list
    assert Backend.default_device_backend_map["gcu"] == "gcu_gloo"  # where none is named
    assert [answers["rank"] for answers in two] == [0, 1]
    for answers in two:
        assert "gcu:gcu" in answers["backend"] and "cpu:gloo" in answers["backend"]


def test_a_program_of_the_cpu_alone_that_names_no_backend(two: list[dict[str, Any]]) -> None:
    model = work.network("transformer")
    parts = [torch.nn.functional.cross_entropy(model(x), y)
             for x, y in next(work.batches("transformer", 2))]
    (sum(parts) / 2).backward()
    for answers in two:
        found = answers["cpu alone"]
        assert found["accelerator"] == "gcu" and found["sum"] == [3.0] * 3
        assert found["pair"] == [2.0] * 2
        torch.testing.assert_close(found["gradients"], [p.grad for p in model.parameters()])
