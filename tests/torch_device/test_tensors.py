"""Tensors of the device: made, copied, viewed, indexed, stored, kept."""

from __future__ import annotations

import copy
import io
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("device")]

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8,
          torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128]


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in everything but where they are."""
    assert found.device.type == "gcu"
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    assert found.stride() == expected.stride()


# ---------------------------------------------------------------- made
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_there_and_back(dtype: torch.dtype) -> None:
    x = torch.arange(-3, 9).reshape(3, 4).to(dtype)
    same(x.to("gcu"), x)
    assert x.to("gcu").dtype is dtype


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (5, 7), (2, 3, 4, 5)], ids=str)
def test_factories(shape: tuple[int, ...]) -> None:
    for make in (torch.zeros, torch.ones):
        same(make(shape, device="gcu"), make(shape))
    same(torch.full(shape, 2.5, device="gcu"), torch.full(shape, 2.5))
    assert torch.empty(shape, device="gcu").shape == shape
    like = torch.empty(shape, device="gcu")
    same(torch.zeros_like(like), torch.zeros(shape))
    same(like.new_ones((2, 2)), torch.ones(2, 2))


def test_other_factories() -> None:
    same(torch.arange(2, 20, 3, device="gcu"), torch.arange(2, 20, 3))
    same(torch.linspace(0, 1, 7, device="gcu"), torch.linspace(0, 1, 7))
    same(torch.eye(4, 3, device="gcu"), torch.eye(4, 3))
    same(torch.tensor([[1, 2], [3, 4]], device="gcu"), torch.tensor([[1, 2], [3, 4]]))
    same(torch.tril_indices(4, 4, device="gcu"), torch.tril_indices(4, 4))
    with torch.device("gcu"):
        same(torch.ones(3), torch.ones(3, device="cpu"))


def test_channels_last() -> None:
    x = torch.randn(2, 3, 4, 5)
    made = torch.empty(2, 3, 4, 5, device="gcu", memory_format=torch.channels_last)
    assert made.is_contiguous(memory_format=torch.channels_last)
    same(x.to("gcu", memory_format=torch.channels_last), x.to(memory_format=torch.channels_last))


# ---------------------------------------------------------------- copied
@pytest.mark.parametrize("lay", ["plain", "transposed", "strided", "expanded", "offset"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16], ids=str)
def test_copies_between_layouts_and_types(lay: str, dtype: torch.dtype) -> None:
    base = torch.arange(120.0).reshape(10, 12)
    view = {"plain": lambda t: t, "transposed": lambda t: t.t(), "strided": lambda t: t[::2, 1::3],
            "expanded": lambda t: t[:1].expand(4, 12), "offset": lambda t: t[3:, 2:]}[lay]
    host, here = view(base), view(base.to("gcu"))
    torch.testing.assert_close(here.cpu(), host)
    same(here.to(dtype, copy=True), host.to(dtype, copy=True))
    assert torch.equal(here.to("cpu", dtype), host.to(dtype))
    same(host.to("gcu", dtype), host.to(dtype, copy=True))
    for target in (torch.zeros(host.shape, dtype=dtype), torch.zeros(host.shape, dtype=dtype).t()):
        source = host if target.shape == host.shape else host.t()
        on_device = torch.empty_strided(target.shape, target.stride(), dtype=dtype, device="gcu")
        same(on_device.copy_(source.to("gcu")), target.copy_(source))
        same(on_device.zero_().copy_(source), target)


def test_into_a_part() -> None:
    host, here = torch.zeros(6, 8), torch.zeros(6, 8, device="gcu")
    for x in (host, here):
        x[1:4, ::2] = torch.arange(12.0).reshape(3, 4)
        x[5] = 7
        x[:, 7].fill_(-1)
    same(here, host)


def test_conjugates_and_negatives() -> None:
    x = torch.randn(4, 3, dtype=torch.complex64)
    here = x.to("gcu")
    assert here.conj().is_conj()
    same(here.conj().resolve_conj(), x.conj().resolve_conj())
    assert torch.equal(here.conj().cpu().resolve_conj(), x.conj().resolve_conj())
    same(here.conj().imag.resolve_neg(), x.conj().imag.resolve_neg())
    same(torch.view_as_real(here), torch.view_as_real(x))
    same(torch.view_as_complex(torch.view_as_real(here)), x)
    target = torch.zeros_like(here)
    same(target.copy_(here.conj()), x.conj().resolve_conj())


def test_numbers() -> None:
    x = torch.tensor([1.5, -2.0], device="gcu")
    assert x[0].item() == 1.5 and float(x[1]) == -2.0 and x.tolist() == [1.5, -2.0]
    assert bool((x > 0).any()) and int(x.argmin()) == 1
    assert x.numpy(force=True).tolist() == [1.5, -2.0]
    assert repr(x) == "tensor([ 1.5000, -2.0000], device='gcu:0')"


def test_between_devices(device: ModuleType) -> None:
    if device.device_count() < 2:
        pytest.skip("one device")
    x = torch.arange(10.0)
    here = x.to("gcu:1")
    assert here.device.index == 1
    same(here.to("gcu:0"), x)
    same(here[::2].to("gcu:0"), x[::2].contiguous())
    assert device.current_device() == 0


def test_data_of_another_device() -> None:
    x, y = torch.zeros(3), torch.ones(3, device="gcu")
    x.data = y
    assert x.device.type == "gcu" and x.data_ptr() == y.data_ptr()
    y.data = torch.ones(2)
    assert y.device.type == "cpu"


def test_quantised_tensors(counted: ModuleType) -> None:
    x = torch.tensor([[-1.0, 0.26], [0.5, 9.0]])
    host = torch.quantize_per_tensor(x, 0.1, 10, torch.quint8)
    here = torch.quantize_per_tensor(x.to("gcu"), 0.1, 10, torch.quint8)
    assert here.device.type == "gcu" and here.dtype is torch.quint8
    assert (here.q_scale(), here.q_zero_point()) == (0.1, 10)
    same(here.dequantize(), host.dequantize())
    assert counted.fallbacks() == {"aten::quantize_per_tensor": 1, "aten::dequantize.self": 1}


# ---------------------------------------------------------------- views and storage
def test_views_share_memory() -> None:
    x = torch.zeros(4, 6, device="gcu")
    for view in (x.view(24), x.t(), x[1:], x.unfold(1, 2, 2), x.diagonal(), x.reshape(2, 12),
                 x.as_strided((2, 2), (6, 1), 7), x.unsqueeze(0)):
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert view._is_view()
    x.t()[2].fill_(3)
    assert x[:, 2].tolist() == [3.0] * 4


def test_storages() -> None:
    x = torch.arange(5.0, device="gcu")
    storage = x.untyped_storage()
    assert storage.nbytes() == 20 and storage.device.type == "gcu"
    storage.resize_(40)
    assert storage.nbytes() == 40 and x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    x.resize_(10)[5:] = 9
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 9.0, 9.0, 9.0, 9.0, 9.0]
    y = torch.empty(0, device="gcu").set_(storage, 2, (3,), (2,))
    assert y.tolist() == [2.0, 4.0, 9.0] and y.is_set_to(x[2:7:2])
    z = torch.empty(0, device="gcu").set_(x)
    assert z.data_ptr() == x.data_ptr() and z.set_().numel() == 0
    assert torch.UntypedStorage(8, device="gcu").nbytes() == 8


def test_indexing() -> None:
    host = torch.arange(60.0).reshape(3, 4, 5)
    here = host.to("gcu")
    rows, mask = torch.tensor([2, 0]), host > 30
    for index in (1, (slice(None), 2), (..., slice(1, None, 2)), rows, (slice(None), rows), mask,
                  (rows, torch.tensor([1, 3]))):
        on_device = tuple(i.to("gcu") if isinstance(i, torch.Tensor) else i for i in index) if (
            isinstance(index, tuple)) else (
            index.to("gcu") if isinstance(index, torch.Tensor) else index)
        torch.testing.assert_close(here[on_device].cpu(), host[index])
    here[mask.to("gcu")] = -1
    host[mask] = -1
    same(here, host)
    same(here.index_select(0, rows.to("gcu")), host.index_select(0, rows))
    same(here.nonzero(), host.nonzero())


# ---------------------------------------------------------------- kept
def test_saved_and_loaded() -> None:
    model = torch.nn.Linear(3, 2).to("gcu")
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "x": torch.arange(4, device="gcu")}, file)
    for where in (None, "cpu", "gcu:0", torch.device("gcu")):
        file.seek(0)
        found = torch.load(file, map_location=where)
        assert found["x"].device.type == ("cpu" if where == "cpu" else "gcu")
        assert found["x"].tolist() == [0, 1, 2, 3]
        assert torch.equal(found["model"]["weight"].cpu(), model.weight.detach().cpu())


def test_deep_copies() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).to("gcu")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
    assert model[0].weight.abs().sum() > 0 and twin[0].weight.device.type == "gcu"
    assert torch.equal(twin[1].running_var.cpu(), model[1].running_var.cpu())


def test_pinned_memory() -> None:
    x = torch.arange(8.0)
    assert not x.is_pinned()
    pinned = x.pin_memory()
    assert pinned.is_pinned() and torch.equal(pinned, x)
    here = pinned.to("gcu", non_blocking=True)
    back = torch.empty(8, pin_memory=True).copy_(here, non_blocking=True)
    torch.gcu.synchronize()
    assert torch.equal(back, x)


def test_a_loader_pins() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(12.0).reshape(6, 2))
    batches = [x for (x,) in torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True)]
    assert len(batches) == 3 and all(x.is_pinned() for x in batches)
    assert torch.equal(torch.cat([x.to("gcu") for x in batches]).cpu(), data.tensors[0])


def test_names() -> None:
    x = torch.ones(2).gcu()
    assert x.is_gcu and not torch.ones(2).is_gcu
    assert torch.nn.Linear(2, 2).gcu().weight.is_gcu
    assert str(torch.device("gcu", 1)) == "gcu:1"
