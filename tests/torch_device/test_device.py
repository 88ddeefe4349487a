"""The device itself: numbers and names, streams, events, memory, random numbers, errors."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("device")]

HERE = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
REGISTERED = "import torch; from terrazzo.torch_device import autoload; autoload()\n"


def in_a_process(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", REGISTERED + code], 
                          env={**HERE, "TZ_TORCH_DEVICE": "gcu", **variables},
                          capture_output=True, text=True, timeout=300)


# ---------------------------------------------------------------- devices
def test_what_there_is(device: ModuleType) -> None:
    assert torch.gcu is device and device.is_available() and device.is_initialized()
    assert device.device_count() == torch.accelerator.device_count() >= 1
    assert torch.accelerator.current_accelerator() == torch.device("gcu")
    assert torch.accelerator.is_available()
    found = device.get_device_properties()
    assert found.multi_processor_count == found.description.units
    assert device.get_device_capability("gcu:0") == (found.major, found.minor)
    assert device.get_device_name().startswith("gcu")
    assert device.mem_get_info()[1] == found.total_memory


def test_the_current_device(device: ModuleType) -> None:
    if device.device_count() < 2:
        pytest.skip("one device")
    with device.device(1):
        assert device.current_device() == torch.accelerator.current_device_index() == 1
        assert torch.ones(1, device="gcu").device.index == 1
        assert (torch.ones(1, device="gcu:0") + 1).device.index == 0
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(device.current_device()))
        thread.start()
        thread.join()
        assert seen == [0], "another thread has a current device of its own"
    assert device.current_device() == 0
    with device.device_of(torch.ones(1, device="gcu:1")):
        assert device.current_device() == 1


def test_a_device_that_is_not_there(device: ModuleType) -> None:
    for wrong in (lambda: torch.ones(1, device="gcu:63"), lambda: device.set_device(63)):
        with pytest.raises(RuntimeError, match="63"):
            wrong()
    with pytest.raises(ValueError, match="expected a device of type gcu, got cpu"):
        device.set_device("cpu")
    assert torch.ones(1, device="gcu").item() == 1


def test_visible_devices() -> None:
    ran = in_a_process("print(torch.gcu.device_count(), torch.ones(1, device='gcu').device)",
                       GCU_VISIBLE_DEVICES="0")
    assert ran.stdout.split() == ["1", "gcu:0"], ran.stderr


# ---------------------------------------------------------------- streams and events
def test_streams(device: ModuleType) -> None:
    first = device.current_stream()
    assert first == device.default_stream() and first.query()
    side = device.Stream()
    assert side != first and isinstance(side, torch.Stream)
    x = torch.arange(1000.0, device="gcu")
    side.wait_stream(first)
    with device.stream(side):
        assert device.current_stream() == side
        y = x * 2
        assert y.sum().item() == 999000.0
    assert device.current_stream() == first
    with side:
        assert torch.accelerator.current_stream() == side
    y.record_stream(first)
    del y
    side.synchronize()


def test_events(device: ModuleType) -> None:
    start, end = device.Event(enable_timing=True), device.Event(enable_timing=True)
    assert start.query()
    pinned = torch.empty(1 << 16, pin_memory=True)
    start.record()
    here = pinned.to("gcu", non_blocking=True)
    end.record()
    end.synchronize()
    assert end.query() and start.elapsed_time(end) > 0
    side = device.Stream()
    side.wait_event(end)
    with pytest.raises(ValueError, match="enable_timing"):
        device.Event().elapsed_time(end)
    assert here.device.type == "gcu"


def test_modelled_times_are_the_same_in_every_run(device: ModuleType) -> None:
    host = torch.empty(1 << 16, pin_memory=True)

    def milliseconds() -> float:
        start, end = device.Event(enable_timing=True), device.Event(enable_timing=True)
        start.record()
        host.to("gcu", non_blocking=True)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    assert len({milliseconds() for _ in range(5)}) == 1


# ---------------------------------------------------------------- memory
def test_memory_is_counted_and_kept(device: ModuleType) -> None:
    device.empty_cache()
    device.reset_peak_memory_stats()
    before, reserved = device.memory_allocated(), device.memory_reserved()
    x = torch.empty(1 << 20, dtype=torch.uint8, device="gcu")
    assert device.memory_allocated() - before == 1 << 20
    assert torch.accelerator.memory_allocated() == device.memory_allocated()
    address = x.data_ptr()
    del x
    assert device.memory_allocated() == before
    assert device.max_memory_allocated() >= before + (1 << 20)
    assert device.memory_reserved() >= reserved + (1 << 20), "what was freed is kept"
    assert torch.empty((1 << 20) - 5, dtype=torch.uint8, device="gcu").data_ptr() == address
    device.empty_cache()
    assert device.memory_reserved() == reserved
    assert "allocated" in device.memory_summary()


def test_memory_of_other_streams_is_not_reused_too_early(device: ModuleType) -> None:
    side = device.Stream()
    x = torch.empty(1 << 16, device="gcu")
    address = x.data_ptr()
    with device.stream(side):
        assert torch.empty(1 << 16, device="gcu").data_ptr() != address
    x.record_stream(side)
    del x
    side.synchronize()
    assert torch.empty(1 << 16, device="gcu").data_ptr() == address


def test_more_memory_than_there_is(device: ModuleType) -> None:
    size = device.get_device_properties().total_memory
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate \d+ bytes"):
        torch.empty(size + 1, dtype=torch.uint8, device="gcu")
    assert device.memory_stats()["num_ooms"] >= 1
    assert torch.ones(2, device="gcu").sum().item() == 2


def test_snapshots(device: ModuleType, tmp_path: Path) -> None:
    device._record_memory_history()
    kept = torch.empty(1234, dtype=torch.uint8, device="gcu")
    torch.empty(5, device="gcu")
    device._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    device._record_memory_history(None)
    found = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    block = next(b for s in found["segments"] for b in s["blocks"]
                 if b["address"] == kept.data_ptr())
    assert block["requested_size"] == 1234 and block["state"] == "active_allocated"
    assert any(f["filename"] == __file__ for f in block["frames"])
    actions = [entry["action"] for entry in found["device_traces"][0]]
    assert actions.count("alloc") >= 2 and "free_completed" in actions
    from torch.cuda import _memory_viz

    assert "<html" in _memory_viz.trace_plot(found).lower()


# ---------------------------------------------------------------- random numbers
def test_random_numbers_are_those_of_the_cpu() -> None:
    def drawn(where: str) -> list[torch.Tensor]:
        torch.manual_seed(7)
        x = torch.empty(5, 40, device=where)
        drop = torch.nn.functional.dropout(torch.ones(8, 8, device=where), 0.4)
        return [torch.rand(17, device=where), torch.randn(33, device=where),
                torch.randint(0, 99, (9,), device=where), torch.randperm(11, device=where),
                x.uniform_(-1, 1), x.clone().normal_(2, 3), torch.rand_like(x), drop,
                torch.bernoulli(torch.full((20,), 0.3, device=where)),
                torch.multinomial(torch.ones(6, device=where), 4)]

    for found, expected in zip(drawn("gcu"), drawn("cpu"), strict=True):
        assert torch.equal(found.cpu(), expected)


def test_generators(device: ModuleType) -> None:
    made = torch.Generator("gcu").manual_seed(3)
    assert made.device.type == "gcu" and made.initial_seed() == 3
    found = torch.rand(5, device="gcu", generator=made)
    assert torch.equal(found.cpu(), torch.rand(5, generator=torch.Generator().manual_seed(3)))
    state = made.get_state()
    again = torch.randn(4, device="gcu", generator=made)
    made.set_state(state)
    assert torch.equal(torch.randn(4, device="gcu", generator=made).cpu(), again.cpu())


def test_states(device: ModuleType) -> None:
    host = torch.get_rng_state()
    state, everywhere = device.get_rng_state(), device.get_rng_state_all()
    x = torch.rand(4, device="gcu")
    device.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="gcu").cpu(), x.cpu())
    device.set_rng_state_all(everywhere)
    assert torch.equal(torch.rand(4, device="gcu").cpu(), x.cpu())
    assert torch.equal(torch.get_rng_state(), host), "the CPU's own numbers are left alone"
    with torch.random.fork_rng(devices=[0], device_type="gcu"):
        torch.rand(3, device="gcu")
    device.manual_seed_all(5)
    assert device.initial_seed() == 5


# ---------------------------------------------------------------- loading
def test_a_seed_set_before_the_first_use_counts() -> None:
    ran = in_a_process("torch.manual_seed(11); assert not torch.gcu.is_initialized()\n"
                       "print(torch.equal(torch.rand(4, device='gcu').cpu(), torch.rand(4)))")
    assert ran.stdout.strip() == "True", ran.stderr


@pytest.mark.parametrize("first", [
    "torch.Generator('gcu')", "torch.Stream('gcu').synchronize()", "torch.ones(2).pin_memory()",
    "torch.gcu.memory_summary()", "torch.accelerator.memory_stats()"])
def test_whatever_comes_first(first: str) -> None:
    ran = in_a_process(f"{first}; print(torch.ones(2, device='gcu').sum().item())")
    assert ran.stdout.strip() == "2.0", ran.stderr


GRADIENTS = """
x = torch.ones(3, requires_grad=True); (x * x).sum().backward()
y = torch.ones(3, device="gcu", requires_grad=True); (y * y).sum().backward()
print(y.grad.tolist())"""


def test_gradients_of_the_cpu_before_the_first_use() -> None:
    ran = in_a_process(GRADIENTS)
    assert ran.stdout.strip() == "[2.0, 2.0, 2.0]", ran.stderr


def test_the_same_where_the_native_part_comes_late() -> None:
    """As in the first program after an installation, which builds it when the device is used."""
    late = subprocess.run(
        [sys.executable, "-c", "import torch; from terrazzo.torch_device import autoload, build\n"
         "build.load_if_built = lambda: None; autoload()\n" + GRADIENTS],
        env={**HERE, "TZ_TORCH_DEVICE": "gcu"}, capture_output=True, text=True, timeout=300)
    assert late.stdout.strip() == "[2.0, 2.0, 2.0]", late.stderr


def test_the_same_where_the_device_is_registered_late() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "import torch; from terrazzo.torch_device import register\n"
         + GRADIENTS.replace("y =", "register(); y =")], env=HERE, capture_output=True, text=True,
        timeout=300)
    assert ran.stdout.strip() == "[2.0, 2.0, 2.0]", ran.stderr


def test_a_forked_process_is_told() -> None:
    ran = in_a_process(
        "import os, sys; torch.ones(1, device='gcu'); child = os.fork()\n"
        "if not child:\n"
        "    try: torch.gcu.synchronize()\n"
        "    except Exception as error: print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)")
    assert "forked" in ran.stdout, ran.stdout + ran.stderr


def test_no_compiler(tmp_path: Path) -> None:
    ran = in_a_process("torch.ones(1, device='gcu')", TZ_CACHE_DIR=str(tmp_path),
                       CXX="no-such-compiler")
    assert "MissingDependency" in ran.stderr and "no-such-compiler" in ran.stderr
    assert "set CXX to its command" in ran.stderr


def test_what_a_compiler_built_that_has_gone(device: ModuleType) -> None:
    """As in an image that is run without one: both native parts are found in the cache."""
    ran = in_a_process(
        "print(torch.gcu.is_available(), torch.ones(2, device='gcu').sum().item())",
        CC="no-such-compiler", CXX="no-such-compiler")
    assert ran.stdout.strip() == "True 2.0", ran.stderr


def test_a_forbidden_fallback() -> None:
    ran = in_a_process("torch.linalg.svd(torch.ones(3, 3, device='gcu'))", TZ_GCU_FALLBACK="error")
    assert "NotImplementedError" in ran.stderr and "TZ_GCU_FALLBACK=error" in ran.stderr
    assert "aten::" in ran.stderr


def test_fallbacks_are_counted(device: ModuleType) -> None:
    x = torch.eye(3, device="gcu")
    device.reset_fallbacks()
    (x + 1).sum().item()
    assert device.fallbacks() == {}
    for _ in range(2):
        torch.linalg.svdvals(x)
    torch.linalg.cholesky(x)
    found = device.fallbacks()
    assert found["aten::_linalg_svd.U"] == 2 and found["aten::linalg_cholesky_ex.L"] == 1
    assert list(found.values()) == sorted(found.values(), reverse=True)
    device.reset_fallbacks()
    assert device.fallbacks() == {}


def test_off_leaves_torch_as_it_was() -> None:
    ran = in_a_process(
        "import sys\n"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'\n"
        "assert not hasattr(torch, 'gcu') and not hasattr(torch.Tensor, 'gcu')\n"
        "found = torch.accelerator.current_accelerator()\n"
        "assert found is None or found.type != 'privateuseone'\n"
        "assert 'terrazzo.torch_device.module' not in sys.modules\n"
        "try: torch.ones(2, device='gcu')\n"
        "except RuntimeError as error: print(error)", TZ_TORCH_DEVICE="off")
    assert "device type" in ran.stdout, ran.stdout + ran.stderr


def test_a_torch_that_is_too_old() -> None:
    from terrazzo.errors import MissingDependency
    from terrazzo.torch_device.build import check_version

    check_version(torch.__version__)
    check_version("2.11.0a0+git1")
    with pytest.raises(MissingDependency, match=r"needs torch 2\.11 or newer, not 2\.10\.1"):
        check_version("2.10.1")


def test_compiling_for_the_cpu_is_no_first_use() -> None:
    ran = in_a_process(
        "f = torch.compile(lambda x: x + 1, backend='aot_eager')\n"
        "assert float(f(torch.ones(3)).sum()) == 6 and torch.gcu.is_available()\n"
        "print(torch.gcu.is_initialized())")
    assert ran.stdout.strip() == "False", ran.stderr


def test_training_on_the_cpu_is_no_first_use(tmp_path: Path) -> None:
    """Optimizers ask for the accelerator in each step: nothing is built to answer."""
    ran = in_a_process(
        "layer = torch.nn.Linear(2, 2)\n"
        "opt = torch.optim.Adam(layer.parameters())\n"
        "layer(torch.ones(3, 2)).sum().backward()\n"
        "opt.step()\n"
        "print(torch.accelerator.current_accelerator(check_available=True))",
        TZ_CACHE_DIR=str(tmp_path))
    assert ran.stdout.strip() == "gcu", ran.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_what_there_is_not(tmp_path: Path) -> None:
    for variables in ({"GCU_VISIBLE_DEVICES": "none"}, {"CC": "no-compiler-of-this-name"}):
        (empty := tmp_path / "".join(variables)).mkdir()
        ran = in_a_process("print(torch.gcu.is_available())", TZ_CACHE_DIR=str(empty), **variables)
        assert ran.stdout.strip() == "False", ran.stderr


def test_any_part_of_us_may_come_before_torch(tmp_path: Path) -> None:
    """As installed: torch finds the entry point, and calls us while a part of us imports torch."""
    installed = tmp_path / "device-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: device\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(
        "[torch.backends]\nterrazzo_here = terrazzo.torch_device:autoload\n")
    env = {**HERE, "TZ_TORCH_DEVICE": "gcu", "PYTHONPATH": f"{tmp_path}{os.pathsep}"
           + HERE["PYTHONPATH"]}
    ends = "import torch, sys; assert torch.gcu is sys.modules['terrazzo.torch_device.module']"
    for first in ("build", "module", "start"):  # each imports torch in its first lines
        subprocess.run([sys.executable, "-c", f"import terrazzo.torch_device.{first}; {ends}"],
                       env=env, check=True, timeout=300)


def test_torch_may_load_us_twice() -> None:
    ran = in_a_process("autoload(); print(torch.gcu.device_count() > 0)")
    assert ran.stdout.strip() == "True", ran.stderr
