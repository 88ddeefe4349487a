"""torch.profiler with the device, and snapshots of its memory."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("device")]

from torch.autograd import DeviceType  # noqa: E402
from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

BOTH = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]
with_kineto = pytest.mark.skipif(
    not hasattr(torch._C._profiler.ProfilerState, "KINETO_PRIVATEUSE1"),
    reason="kineto of this torch takes no profilers of other devices")


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(),
                               torch.nn.Linear(32, 4)).to("gcu")


def step(model: Any, x: Any) -> None:
    with record_function("whole step"):
        with record_function("forward"):
            loss = model(x).square().mean()
        loss.backward()


def profiled(**options: Any) -> Any:
    """A step that was run before: nothing is compiled."""
    model, x = network(), torch.randn(8, 16).to("gcu")
    step(model, x)
    torch.gcu.synchronize()
    with profile(activities=BOTH, **options) as made:
        step(model, x)
    return made


def on_device(made: Any) -> list[Any]:
    return [event for event in made.events() if event.device_type == DeviceType.PrivateUse1]


@with_kineto
def test_kernels_have_modelled_times() -> None:
    """The same ones in each run, and those that the library traces."""
    from terrazzo import gcu

    def kernels() -> list[tuple[str, float]]:
        return [(event.name, event.time_range.elapsed_us()) for event in on_device(profiled())
                if not event.is_user_annotation]

    found, again = kernels(), kernels()
    assert [name for name, _ in found] == [name for name, _ in again]
    assert [time for _, time in found] == pytest.approx([time for _, time in again], abs=2e-3)
    model, x = network(), torch.randn(8, 16).to("gcu")
    step(model, x)
    torch.gcu.synchronize()
    with gcu.trace() as traced:
        step(model, x)
        torch.gcu.synchronize()
    expected = [(record.name.decode(), traced.microseconds(record.cycles))
                for record in traced.records]
    assert len(expected) > 10
    assert sorted(name for name, _ in found) == sorted(name for name, _ in expected)
    assert sum(time for _, time in found) == pytest.approx(
        sum(time for _, time in expected), rel=1e-3)


@with_kineto
def test_the_table_has_device_times() -> None:
    made = profiled()
    averages = made.key_averages()
    by_name = {row.key: row for row in averages}
    assert by_name["aten::addmm"].self_device_time_total > 0
    kernels = sum(event.time_range.elapsed_us() for event in on_device(made)
                  if not event.is_user_annotation)
    assert sum(row.self_device_time_total for row in averages
               if row.device_type == DeviceType.CPU) == pytest.approx(kernels, rel=1e-3)
    table = averages.table(sort_by="self_device_time_total", row_limit=-1)
    assert "Self GCU" in table and "aten::addmm" in table


@with_kineto
def test_regions_are_around_their_kernels() -> None:
    """On the host by who launched what, on the device in time."""
    made = profiled()
    regions = {event.name: event for event in made.events()
               if event.device_type == DeviceType.CPU and event.is_user_annotation}
    forward, whole = regions["forward"], regions["whole step"]
    assert 0 < forward.device_time_total < whole.device_time_total
    spans = {event.name: event.time_range for event in on_device(made) if event.is_user_annotation}
    assert spans.keys() == {"forward", "whole step"}
    assert spans["whole step"].start <= spans["forward"].start
    assert spans["forward"].end <= spans["whole step"].end
    inside = [event for event in on_device(made) if not event.is_user_annotation
              and spans["forward"].start <= event.time_range.start
              and event.time_range.end <= spans["forward"].end + 1e-3]
    assert sum(event.time_range.elapsed_us() for event in inside) == pytest.approx(
        forward.device_time_total, rel=1e-2)


@with_kineto
def test_profiles_and_traces_inside_each_other() -> None:
    from terrazzo import gcu

    x = torch.ones(10, device="gcu")
    x + 1, x * 2, x - 3
    with gcu.trace() as whole:
        x + 1
        with profile(activities=BOTH) as made:
            x * 2
            with gcu.trace() as part:
                x - 3
        x * 2
    assert [record.name for record in part.records] == [b"k_subtract"]
    assert [record.name for record in whole.records] == [
        b"k_add", b"k_multiply", b"k_subtract", b"k_multiply"]
    assert [event.name for event in on_device(made)] == ["k_multiply", "k_subtract"]


@with_kineto
def test_a_trace_for_viewers(tmp_path: Path) -> None:
    made = profiled()
    made.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert len(kernels) > 5
    assert all(kernel["pid"] == 0 and kernel["args"]["cycles"] > 0 and kernel["dur"] > 0
               for kernel in kernels)
    operators = {event["args"]["External id"]: event["name"] for event in events
                 if event.get("cat") == "cpu_op"}
    launched = {operators[kernel["args"]["External id"]] for kernel in kernels}
    assert "aten::addmm" in launched
    rows = [event["args"]["name"] for event in events
            if event["name"] == "thread_name" and event["pid"] == 0]
    assert any(row.startswith("gcu:0, stream") for row in rows)
    assert {event["name"] for event in events if event.get("cat") == "gpu_user_annotation"} == {
        "forward", "whole step"}


@with_kineto
def test_copies_streams_and_devices() -> None:
    x, other = torch.randn(64), torch.gcu.Stream()
    torch.gcu.synchronize()
    with profile(activities=BOTH) as made:
        here = x.to("gcu")
        with torch.gcu.stream(other):
            here.add(1)
        there = x.to("gcu:1").mul(2)
        there.cpu()
        torch.gcu.synchronize(1)
    found = on_device(made)
    assert {event.device_index for event in found} == {0, 1}
    assert len({event.device_resource_id for event in found if event.device_index == 0}) == 2
    assert len([event for event in found if event.activity_type == "gpu_memcpy"]) == 3


@with_kineto
def test_profiles_follow_each_other() -> None:
    """With a schedule, and with nothing to see; what ran before is no part of one."""
    model, x = network(), torch.randn(8, 16).to("gcu")
    step(model, x)
    with profile(activities=BOTH) as empty:
        pass
    assert on_device(empty) == []
    counts = []
    with profile(activities=BOTH, schedule=torch.profiler.schedule(wait=1, warmup=1, active=2),
                 on_trace_ready=lambda made: counts.append(len(on_device(made)))) as made:
        for _ in range(4):
            step(model, x)
            torch.gcu.synchronize()
            made.step()
    assert len(counts) == 1 and counts[0] > 10


def test_times_by_events_without_kineto() -> None:
    x = torch.randn(32, 32).to("gcu")
    x @ x
    with torch.autograd.profiler.profile(use_device="gcu", use_kineto=False) as made:
        x @ x
    rows = {row.key: row for row in made.key_averages()}
    assert rows["aten::mm"].device_time_total > 0


# ---------------------------------------------------------------- memory
def test_a_snapshot_is_what_the_viewer_reads(device: ModuleType, tmp_path: Path) -> None:
    from torch.cuda import _memory_viz

    memory = torch.gcu.memory
    torch.gcu.synchronize()
    torch.gcu.empty_cache()
    memory._record_memory_history(max_entries=1000)
    try:
        kept = torch.zeros(1 << 18, device="gcu")
        gone = torch.zeros(100, device="gcu")
        del gone
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 40, dtype=torch.uint8, device="gcu")
        memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    finally:
        memory._record_memory_history(None)
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    events = snapshot["device_traces"][kept.device.index]
    actions = [event["action"] for event in events]
    assert {"alloc", "free_requested", "free_completed", "segment_alloc", "oom"} <= set(actions)
    lost = events[actions.index("oom")]
    assert lost["size"] == 1 << 40 and 0 < lost["device_free"] <= torch.gcu.mem_get_info()[1]
    (made,) = [event for event in events
               if event["action"] == "alloc" and event["addr"] == kept.data_ptr()]
    assert made["size"] == 4 << 18 and any(
        frame["filename"] == __file__ for frame in made["frames"])
    (segment,) = [found for found in snapshot["segments"] if found["address"] == kept.data_ptr()]
    assert segment["blocks"][0]["state"] == "active_allocated"
    assert segment["blocks"][0]["frames"] == made["frames"]
    for page in (_memory_viz.trace_plot(snapshot), _memory_viz.segment_plot(snapshot)):
        assert "<html>" in page or "<!DOCTYPE html>" in page
    assert "segments:" in _memory_viz.segsum(snapshot)
    assert "raise OutOfMemoryError" in _memory_viz.trace(snapshot)
    assert "active_allocated" in _memory_viz.memory(snapshot, format_flamegraph=lambda text: text)


def test_only_the_state_is_recorded(device: ModuleType) -> None:
    torch.gcu.memory._record_memory_history("state")
    try:
        kept = torch.zeros(1000, device="gcu")
        snapshot = torch.gcu.memory._snapshot()
    finally:
        torch.gcu.memory._record_memory_history(None)
    assert not any(snapshot["device_traces"])
    (segment,) = [found for found in snapshot["segments"] if found["address"] == kept.data_ptr()]
    assert segment["blocks"][0]["frames"]
    with pytest.raises(ValueError, match="'state', 'all' or None"):
        torch.gcu.memory._record_memory_history("some")
